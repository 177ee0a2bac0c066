"""Templates, their builds and tags: tables of the server's ``state.db``, all of it in memory too.

The server is the only one who writes them.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ....state.connection import Connected

WAITING, BUILDING, READY, FAILED = "waiting", "building", "ready", "error"


@dataclass(frozen=True)
class Template:
    id: str
    tenant: str
    name: str  #: "": it has none (of a snapshot that nobody named)
    created_at: float
    updated_at: float
    public: bool = False


@dataclass(frozen=True)
class Build:
    """One state of a template: an image, a saved state, or both (then the state is of a sandbox of the image)."""

    id: str  #: a UUID
    tenant: str
    template: str
    status: str
    created_at: float
    finished_at: float = 0.0
    reason: str = ""
    step: str = ""  #: that failed: base, 1, 2, ..., finalize
    tags: list[str] = field(default_factory=list)  #: that it gets when it is ready
    cpus: int = 2
    memory: int = 1024  #: MB
    explicit: list[str] = field(default_factory=list)  #: which of these were asked for
    image: str = ""  #: its id in the tenant's store
    snapshot: str = ""  #: the id of the saved state
    live: bool = False  #: which has its processes, too
    sandbox: str = ""  #: of which it is a snapshot that somebody asked for
    engine: str = ""  #: of the saved state
    user: str = "user"
    workdir: str = "/home/user"
    start: str = ""
    ready: str = ""


@dataclass(frozen=True)
class Tag:
    name: str
    build: str
    created_at: float


class TemplateStore(Connected):
    """Blocking, and quick."""

    _loaded = False

    def _load(self) -> None:
        if self._loaded:
            return
        self._templates: dict[str, Template] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._builds: dict[str, Build] = {}
        self._of_template: dict[str, dict[str, Build]] = {}
        self._tags: dict[str, dict[str, Tag]] = {}
        for row in self._read("SELECT id, tenant, name, created_at, updated_at, public FROM e2b_templates", ()):
            self._know(Template(row[0], row[1], row[2] or "", row[3], row[4], bool(row[5])))
        for row in self._read("SELECT id, tenant, template, status, created_at, document FROM e2b_builds", ()):
            self._know_build(Build(*row[:5], **json.loads(row[5])))
        for row in self._read("SELECT template, tag, build, created_at FROM e2b_tags", ()):
            self._tags.setdefault(row[0], {})[row[1]] = Tag(*row[1:])
        self._loaded = True

    def _know(self, template: Template) -> None:
        self._templates[template.id] = template
        if template.name:
            self._names[template.tenant, template.name] = template.id

    def _know_build(self, build: Build) -> None:
        self._builds[build.id] = build
        self._of_template.setdefault(build.template, {})[build.id] = build

    # -- templates ---------------------------------------------------------------------

    def find(self, tenant: str, name: str) -> Template | None:
        """By id or name, of one tenant."""
        self._load()
        found = self._templates.get(self._names.get((tenant, name), name))
        return found if found is not None and found.tenant == tenant else None

    def of_tenant(self, tenant: str) -> list[Template]:
        """The newest first."""
        self._load()
        found = [each for each in self._templates.values() if each.tenant == tenant]
        return sorted(found, key=lambda each: (each.created_at, each.id), reverse=True)

    def put(self, template: Template) -> Template:
        self._load()
        values = (
            template.id, template.tenant, template.name or None, template.created_at, template.updated_at,
            int(template.public),
        )  # fmt: skip
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO e2b_templates VALUES (?, ?, ?, ?, ?, ?)", values)
        self._know(template)
        return template

    def drop(self, template: Template) -> None:
        """With its builds and tags."""
        self._load()
        with self._write() as db:
            db.execute("DELETE FROM e2b_tags WHERE template = ?", (template.id,))
            db.execute("DELETE FROM e2b_builds WHERE template = ?", (template.id,))
            db.execute("DELETE FROM e2b_templates WHERE id = ?", (template.id,))
        self._tags.pop(template.id, None)
        for build in self._of_template.pop(template.id, {}):
            self._builds.pop(build, None)
        self._templates.pop(template.id, None)
        self._names.pop((template.tenant, template.name), None)

    # -- builds ------------------------------------------------------------------------

    def build(self, build_id: str) -> Build | None:
        self._load()
        return self._builds.get(build_id)

    def builds(self, template: str) -> list[Build]:
        """The newest first."""
        self._load()
        return sorted(
            self._of_template.get(template, {}).values(), key=lambda each: (each.created_at, each.id), reverse=True
        )

    def unfinished(self) -> list[Build]:
        self._load()
        return [each for each in self._builds.values() if each.status in (WAITING, BUILDING)]

    def with_images(self, tenant: str) -> list[Build]:
        """Those that have one, or are getting it just now."""
        self._load()
        found = [each for each in self._builds.values() if each.tenant == tenant]
        return [each for each in found if each.image or each.status == BUILDING]

    def put_build(self, build: Build) -> Build:
        self._load()
        document = asdict(build)
        columns = [document.pop(name) for name in ("id", "tenant", "template", "status", "created_at")]
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO e2b_builds VALUES (?, ?, ?, ?, ?, ?)", (*columns, json.dumps(document)))
        self._know_build(build)
        return build

    def change_build(self, build: Build, **values: Any) -> Build:
        """Of the build as it is by now; one that is gone stays so."""
        current = self.build(build.id)
        changed = replace(current or build, **values)
        return changed if current is None else self.put_build(changed)

    def drop_build(self, build: Build) -> None:
        self._load()
        with self._write() as db:
            db.execute("DELETE FROM e2b_builds WHERE id = ?", (build.id,))
        self._builds.pop(build.id, None)
        self._of_template.get(build.template, {}).pop(build.id, None)

    # -- tags --------------------------------------------------------------------------

    def tags(self, template: str) -> dict[str, Tag]:
        self._load()
        return dict(self._tags.get(template, {}))

    def assign(self, template: str, names: list[str], build: str) -> None:
        self._load()
        now = time.time()
        with self._write() as db:
            db.executemany(
                "INSERT OR REPLACE INTO e2b_tags VALUES (?, ?, ?, ?)", [(template, name, build, now) for name in names]
            )
        self._tags.setdefault(template, {}).update((name, Tag(name, build, now)) for name in names)

    def take_off(self, template: str, names: list[str]) -> None:
        self._load()
        with self._write() as db:
            db.executemany("DELETE FROM e2b_tags WHERE template = ? AND tag = ?", [(template, name) for name in names])
        for name in names:
            self._tags.get(template, {}).pop(name, None)
