"""Templates over HTTP: announced, their files sent, built, listed; their tags."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..answers import Answer, refused
from ..api import Asked, Route, optional, text, texts
from ..documents import ENVD, time_of
from ..pages import page_size, read_token, write_token
from .asked import NewBuild, build_asked, new_build
from .logs import PAGE
from .names import DEFAULT_TAG, bare_tags, new_template_id, parse
from .standard import STANDARD
from .steps import HASH_RE
from .store import FAILED, WAITING, Build, Template

if TYPE_CHECKING:
    from .catalog import Templates

_DISK_MB = 10 << 10
_MOST_OFFSET = 10**9
_MOST_TEMPLATES, _MOST_WAITING = 10_000, 100
_OLD = 86400.0  # seconds after which a build that was announced and never begun is forgotten


class TemplateRoutes:
    def __init__(self, templates: Templates) -> None:
        self._templates, self._store = templates, templates.store
        self.routes = (
            Route("POST", "/v3/templates", self.announce),
            Route("POST", "/v2/templates", self.announce_old),
            Route("POST", "/templates", self.announce_oldest),
            Route("GET", "/templates", self.list_all),
            Route("GET", "/v2/templates", self.list),
            Route("GET", "/templates/{template}", self.info),
            Route("PATCH", "/templates/{template}", self.change),
            Route("PATCH", "/v2/templates/{template}", self.change),
            Route("DELETE", "/templates/{template}", self.delete),
            Route("GET", "/templates/{template}/files/{hash}", self.file_link),
            Route("POST", "/v2/templates/{template}/builds/{build}", self.begin),
            Route("GET", "/templates/{template}/builds/{build}/status", self.status),
            Route("GET", "/templates/{template}/builds/{build}/logs", self.build_logs),
            Route("GET", "/templates/aliases/{alias}", self.alias),
            Route("POST", "/templates/tags", self.assign_tags),
            Route("DELETE", "/templates/tags", self.remove_tags),
            Route("GET", "/templates/{template}/tags", self.tags),
        )

    # -- building ----------------------------------------------------------------------

    async def announce(self, asked: Asked) -> Answer:
        template, build = self._announced(asked, new_build(asked.body))
        return Answer(202, {
            "templateID": template.id, "buildID": build.id, "public": template.public, "names": _names(template),
            "tags": build.tags, "aliases": [template.name],
        })  # fmt: skip

    async def announce_old(self, asked: Asked) -> Answer:
        template, build = self._announced(asked, new_build(asked.body, "alias"))
        return Answer(202, self._listed(template, build))

    async def announce_oldest(self, asked: Asked) -> Answer:
        raise refused(400, "templates of a Dockerfile that the client builds are not supported: use a newer client")

    def _announced(self, asked: Asked, new: NewBuild) -> tuple[Template, Build]:
        tenant, name = asked.caller.tenant.name, new.reference.name
        if new.reference.slug not in ("", tenant):
            raise refused(403, f"'{new.reference.slug}' is not your part of names: it is '{tenant}'")
        if name in STANDARD:
            raise refused(403, f"the name '{name}' is taken: it is a standard template's")
        now = time.time()
        template = self._store.find(tenant, name)
        if template is None:
            if len(self._store.of_tenant(tenant)) >= _MOST_TEMPLATES:
                raise refused(400, f"there are {_MOST_TEMPLATES} templates already: delete some")
            template = self._store.put(Template(new_template_id(), tenant, name, now, now))
        waiting = [each for each in self._store.builds(template.id) if each.status == WAITING]
        for number, old in enumerate(waiting):
            if number >= _MOST_WAITING or now - old.created_at > _OLD:
                self._store.drop_build(old)
        return template, self._store.put_build(Build(
            str(uuid.uuid4()), tenant, template.id, WAITING, now, tags=new.tags, cpus=new.cpus, memory=new.memory,
            explicit=new.explicit,
        ))  # fmt: skip

    async def file_link(self, asked: Asked) -> Answer:
        template = self._templates.find(asked.caller, asked.path["template"])
        digest = asked.path["hash"]
        if not HASH_RE.match(digest):
            raise refused(400, "a hash is 64 hexadecimal digits")
        files, home = self._templates.files, asked.caller.tenant.home
        present = await asyncio.to_thread(files.present, home, template.id, digest)
        return Answer(201, {"present": present, "url": files.address(asked, template.id, digest)})

    async def begin(self, asked: Asked) -> Answer:
        build = self._build(asked)
        self._templates.builds.begin(asked.caller, build, build_asked(asked.body))
        return Answer(202)

    def _build(self, asked: Asked) -> Build:
        template = self._templates.find(asked.caller, asked.path["template"])
        build = self._store.build(asked.path["build"])
        if build is None or build.template != template.id:
            raise refused(404, f"build '{asked.path['build'][:80]}' not found")
        return build

    async def status(self, asked: Asked) -> Answer:
        build = self._build(asked)
        entries = await self._entries(asked, build, "logsOffset")
        found: dict[str, Any] = {
            "templateID": build.template, "buildID": build.id, "status": build.status, "logEntries": entries,
            "logs": [each["message"] for each in entries],
        }  # fmt: skip
        if build.status == FAILED:
            found["reason"] = {"message": build.reason, **({"step": build.step} if build.step else {})}
        return Answer(200, found)

    async def _entries(self, asked: Asked, build: Build, name: str) -> list[dict[str, Any]]:
        logs, home = self._templates.logs, asked.caller.tenant.home
        log = await asyncio.to_thread(logs.find, home, build.id)
        level = asked.query.get("level") or "debug"
        return log.page(_number(asked, name, 0, _MOST_OFFSET), _number(asked, "limit", PAGE, PAGE), level)

    async def build_logs(self, asked: Asked) -> Answer:
        return Answer(200, {"logs": await self._entries(asked, self._build(asked), "cursor")})

    # -- finding -----------------------------------------------------------------------

    async def list_all(self, asked: Asked) -> Answer:
        found = self._store.of_tenant(asked.caller.tenant.name)
        return Answer(200, [self._listed(each) for each in found if self._is_template(each)])

    async def list(self, asked: Asked) -> Answer:
        found = [each for each in self._store.of_tenant(asked.caller.tenant.name) if self._is_template(each)]
        limit = page_size(asked.query)
        if token := asked.query.get("nextToken"):
            mark = read_token(token)
            found = [each for each in found if (each.created_at, each.id) < mark]
        page = found[:limit]
        headers = {"x-next-token": write_token(page[-1].created_at, page[-1].id)} if len(found) > limit else {}
        return Answer(200, [self._listed(each) for each in page], headers)

    def _is_template(self, template: Template) -> bool:
        """Not one that is snapshots of sandboxes only: those are listed by themselves."""
        builds = self._store.builds(template.id)
        return not builds or not all(build.sandbox for build in builds)

    def _listed(self, template: Template, build: Build | None = None) -> dict[str, Any]:
        builds = self._store.builds(template.id)
        tag = self._store.tags(template.id).get(DEFAULT_TAG)
        chosen = build or (self._store.build(tag.build) if tag else None) or (builds[0] if builds else None)
        count, last = self._templates.spawned.get(template.id, (0, 0.0))
        return {
            "templateID": template.id, "buildID": chosen.id if chosen else str(uuid.UUID(int=0)),
            "cpuCount": chosen.cpus if chosen else 0, "memoryMB": chosen.memory if chosen else 0,
            "diskSizeMB": _DISK_MB, "public": template.public, "aliases": [template.name] if template.name else [],
            "names": _names(template), "createdAt": time_of(template.created_at),
            "updatedAt": time_of(template.updated_at), "createdBy": None,
            "lastSpawnedAt": time_of(last) if last else None, "spawnCount": count, "buildCount": len(builds),
            "envdVersion": ENVD, "buildStatus": chosen.status if chosen else WAITING,
        }  # fmt: skip

    async def info(self, asked: Asked) -> Answer:
        template = self._templates.find(asked.caller, asked.path["template"])
        listed = self._listed(template)
        kept = ("templateID", "public", "aliases", "names", "createdAt", "updatedAt", "lastSpawnedAt", "spawnCount")
        return Answer(200, {name: listed[name] for name in kept} | {
            "builds": [_build_document(each) for each in self._store.builds(template.id)[:page_size(asked.query)]],
        })  # fmt: skip

    async def alias(self, asked: Asked) -> Answer:
        reference = parse(asked.path["alias"])
        template = self._templates.known(asked.caller, reference)
        if template is not None:
            return Answer(200, {"templateID": template.id, "public": template.public})
        if reference.name in STANDARD and not reference.slug:
            return Answer(200, {"templateID": reference.name, "public": True})
        raise refused(404, f"template alias '{asked.path['alias'][:200]}' not found")

    # -- changing ----------------------------------------------------------------------

    async def change(self, asked: Asked) -> Answer:
        template = self._templates.find(asked.caller, asked.path["template"])
        if optional(asked.body, "public", bool, template.public):
            raise refused(400, "templates of this server are their tenant's own: none is public")
        self._store.put(replace(template, updated_at=time.time()))
        return Answer(200, {"names": _names(template)})

    async def delete(self, asked: Asked) -> Answer:
        """One tag of several goes alone: a snapshot's id has it."""
        reference = parse(asked.path["template"])
        template = self._templates.known(asked.caller, reference)
        tags = {} if template is None else self._store.tags(template.id)
        if template is None or (reference.said and reference.tag not in tags):
            raise refused(404, f"template '{asked.path['template'][:200]}' not found")
        if reference.said and len(tags) > 1:
            self._store.take_off(template.id, [reference.tag])
            await self._templates.retire(asked.caller, template)
        else:
            await self._templates.delete(asked.caller, template)
        return Answer(204)

    # -- tags --------------------------------------------------------------------------

    async def assign_tags(self, asked: Asked) -> Answer:
        target = text(asked.body, "target", most=512)
        tags = bare_tags(texts(asked.body, "tags"))
        if not tags:
            raise refused(400, "tags are missing")
        self._templates.find(asked.caller, target)
        build = self._templates.resolve(asked.caller, target)
        assert isinstance(build, Build)
        self._store.assign(build.template, tags, build.id)
        await self._templates.retire(asked.caller, self._templates.find(asked.caller, build.template))
        return Answer(201, {"tags": tags, "buildID": build.id})

    async def remove_tags(self, asked: Asked) -> Answer:
        template = self._templates.find(asked.caller, text(asked.body, "name", most=512))
        tags = bare_tags(texts(asked.body, "tags"))
        if DEFAULT_TAG in tags:
            raise refused(400, f"the tag '{DEFAULT_TAG}' cannot be removed")
        there = self._store.tags(template.id)
        for tag in tags:
            if tag not in there:
                raise refused(404, f"tag '{tag}' not found")
        self._store.take_off(template.id, tags)
        await self._templates.retire(asked.caller, template)
        return Answer(204)

    async def tags(self, asked: Asked) -> Answer:
        template = self._templates.find(asked.caller, asked.path["template"])
        found = sorted(self._store.tags(template.id).values(), key=lambda tag: (-tag.created_at, tag.name))
        return Answer(200, [
            {"tag": tag.name, "buildID": tag.build, "createdAt": time_of(tag.created_at)} for tag in found
        ])  # fmt: skip


def _names(template: Template) -> list[str]:
    return [f"{template.tenant}/{template.name}"] if template.name else []


def _build_document(build: Build) -> dict[str, Any]:
    found: dict[str, Any] = {
        "buildID": build.id, "status": build.status, "createdAt": time_of(build.created_at),
        "updatedAt": time_of(build.finished_at or build.created_at), "cpuCount": build.cpus, "memoryMB": build.memory,
        "diskSizeMB": _DISK_MB, "envdVersion": ENVD,
    }  # fmt: skip
    if build.finished_at:
        found["finishedAt"] = time_of(build.finished_at)
    return found


def _number(asked: Asked, name: str, default: int, most: int) -> int:
    given = asked.query.get(name, "")
    if not given:
        return default
    if not given.isascii() or not given.isdecimal() or len(given) > 12:
        raise refused(400, f"{name} is no number")
    return min(int(given), most)
