"""Snapshots: a sandbox as it is now, as a template. Named ones are templates by that name; others have an id alone."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from ....errors import SandboxDead, SandboxNotFound
from ..answers import Answer, refused
from ..api import Asked, Route, optional
from ..pages import page_size, read_token, write_token
from .building import snapshot_name
from .names import DEFAULT_TAG, Reference, new_template_id, parse
from .standard import STANDARD
from .store import READY, Build, Tag, Template

if TYPE_CHECKING:
    from .catalog import Templates


class Snapshots:
    def __init__(self, templates: Templates) -> None:
        self._templates, self._store = templates, templates.store
        self.routes = (
            Route("POST", "/sandboxes/{sandbox}/snapshots", self.create),
            Route("GET", "/snapshots", self.list),
        )

    async def create(self, asked: Asked) -> Answer:
        facade, caller = self._templates.facade, asked.caller
        given = optional(asked.body, "name", str, "")
        reference = parse(given) if given else None
        if reference is not None and reference.slug not in ("", caller.tenant.name):
            raise refused(400, f"Invalid snapshot name: {given[:200]}: the part before / is '{caller.tenant.name}'")
        if reference is not None and reference.name in STANDARD:
            raise refused(400, f"Invalid snapshot name: {given[:200]}: this is a standard template's")
        info, record = await facade.sandboxes.find(asked)
        if info.state == "paused":
            raise refused(409, f"Sandbox '{info.id}' is paused")
        build_id = str(uuid.uuid4())
        saving: dict[str, Any] = {} if optional(asked.body, "memory", bool, True) else {"memory": False}
        controller = caller.tenant.controller
        try:
            saved = await controller.snapshot(info.id, snapshot_name(build_id), role="template", **saving)
        except (SandboxNotFound, SandboxDead):
            raise refused(404, f"Sandbox '{info.id}' not found") from None
        limits = info.spec.limits
        origin = self._store.build(record.build)
        template = self._template(caller.tenant.name, reference)
        tag = DEFAULT_TAG if reference is None else reference.tag
        build = Build(
            build_id, caller.tenant.name, template.id, READY, saved.created_at, finished_at=time.time(), tags=[tag],
            cpus=max(1, round(limits.cpus)), memory=limits.memory >> 20, snapshot=saved.id, live=saved.kind == "live",
            sandbox=info.id, engine=saved.engine, user=record.user, workdir=record.workdir,
            start=origin.start if origin else "", ready=origin.ready if origin else "",
        )  # fmt: skip
        self._store.put_build(build)
        self._store.assign(template.id, [tag], build.id)
        await self._templates.retire(caller, template)
        return Answer(201, document(template, tag))

    def _template(self, tenant: str, reference: Reference | None) -> Template:
        """The one of that name, or a new one."""
        found = None if reference is None else self._store.find(tenant, reference.name)
        if found is not None:
            return found
        now = time.time()
        return self._store.put(Template(new_template_id(), tenant, reference.name if reference else "", now, now))

    async def list(self, asked: Asked) -> Answer:
        query, tenant = asked.query, asked.caller.tenant.name
        sandbox, name = query.get("sandboxID"), query.get("name")
        wanted = parse(name) if name else None
        found = []
        for template in self._store.of_tenant(tenant):
            if wanted is not None and not (wanted.name in (template.name, template.id) and wanted.slug in ("", tenant)):
                continue
            for tag in self._store.tags(template.id).values():
                build = self._store.build(tag.build)
                if build is None or not build.sandbox or (sandbox and build.sandbox != sandbox):
                    continue
                if wanted is None or not wanted.said or wanted.tag == tag.name:
                    found.append((build.created_at, f"{template.id}:{tag.name}", template, tag))
        found.sort(key=lambda each: each[:2], reverse=True)
        return _page(query, found)


def _page(query: dict[str, str], found: list[tuple[float, str, Template, Tag]]) -> Answer:
    limit = page_size(query)
    if token := query.get("nextToken"):
        mark = read_token(token)
        found = [each for each in found if each[:2] < mark]
    page = found[:limit]
    headers = {"x-next-token": write_token(*page[-1][:2])} if len(found) > limit else {}
    return Answer(200, [document(template, tag.name) for _, _, template, tag in page], headers)


def document(template: Template, tag: str) -> dict[str, Any]:
    """``snapshotID`` is what sandboxes are made of it by."""
    if not template.name:
        return {"snapshotID": f"{template.id}:{tag}", "names": []}
    name = f"{template.tenant}/{template.name}:{tag}"
    return {"snapshotID": name, "names": [name]}
