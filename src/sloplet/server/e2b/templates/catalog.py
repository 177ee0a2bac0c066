"""The templates of one server: what a name means to whom, and what sandboxes of it are made of."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....controller import SandboxInfo
from ....errors import ImageError, SlopletError
from ....images.reference import parse as parse_reference
from ....images.store import ImageStore
from ....state.home import Home
from ...caller import Caller
from ...logs import log
from ..answers import Refused, refused
from ..making import Plan, engine_of
from ..records import Record
from .building import IMAGES, image_name, plan_limits
from .builds import Builds
from .files import Files
from .logs import BuildLogs
from .names import Reference, parse
from .routes import TemplateRoutes
from .snapshots import Snapshots
from .standard import STANDARD, OnProgress, Standard
from .starting import Start, StartFailed, begin
from .store import BUILDING, FAILED, READY, Build, Template, TemplateStore

if TYPE_CHECKING:
    from ...tenants import Tenant
    from ..door import Facade

_REMEMBERED = 50  # builds of a template without a tag
_READY = 45.0  # seconds that a create waits for what its template starts with: clients wait a minute for the answer


class Templates:
    def __init__(self, facade: Facade) -> None:
        self.facade = facade
        self.store = TemplateStore(facade.server.home)
        self.files = Files(facade)
        self.logs = BuildLogs()
        self.standard = Standard(facade)
        self.builds = Builds(self)
        self.spawned: dict[str, tuple[int, float]] = {}  #: by template: how often since the server began, and when
        self.routes = (*TemplateRoutes(self).routes, *Snapshots(self).routes, *self.files.routes)

    def start(self) -> None:
        """Before the first request: what a server that died was building has failed."""
        for build in self.store.unfinished():
            if build.status == BUILDING:
                now = time.time()
                self.store.change_build(build, status=FAILED, reason="the server was restarted", finished_at=now)

    async def prepare(self, names: Iterable[str], on_progress: OnProgress | None = None) -> None:
        """Build the standard templates of these names, where they are not built."""
        await self.standard.prepare(names, on_progress)

    async def aclose(self) -> None:
        await self.builds.aclose()
        await self.standard.aclose()
        self.store.close()

    # -- finding -----------------------------------------------------------------------

    def known(self, caller: Caller, reference: Reference) -> Template | None:
        """A template of the caller's."""
        if reference.slug not in ("", caller.tenant.name):
            return None
        return self.store.find(caller.tenant.name, reference.name)

    def find(self, caller: Caller, text: str) -> Template:
        """refused (404)."""
        found = self.known(caller, parse(text))
        if found is None:
            raise missing(text)
        return found

    def resolve(self, caller: Caller, text: str) -> Build | str:
        """A build that is ready, or the name of a standard template. refused (400, 404)."""
        reference = parse(text)
        template = self.known(caller, reference)
        if template is None:
            if reference.name in STANDARD and not reference.slug and reference.tag == "default":
                return reference.name
            raise missing(text)
        tag = self.store.tags(template.id).get(reference.tag)
        build = None if tag is None else self.store.build(tag.build)
        if build is None or build.status != READY:
            raise refused(404, f"template '{text[:200]}' not found: it has no build with the tag '{reference.tag}'")
        return build

    async def plan(self, caller: Caller, reference: str, body: Mapping[str, Any]) -> Plan:
        """What a sandbox of that template is made of, for the ``body`` of a create; refused (404) where there is none.

        What runs already can be given no volume.
        """
        found = self.resolve(caller, reference)
        if isinstance(found, str):
            return await self.standard.plan(caller, found, fresh=bool(body.get("volumeMounts")))
        template = self.store.find(caller.tenant.name, found.template)
        plan = Plan(
            found.template, alias=template.name if template else "", build=found.id, user=found.user,
            workdir=found.workdir, start=found.start, ready=found.ready, **plan_limits(found),
        )  # fmt: skip
        if found.snapshot and (not found.image or (
            found.engine == await engine_of(self.facade, caller) and not body.get("volumeMounts")
        )):  # fmt: skip
            return replace(plan, snapshot=found.snapshot, start="" if found.live else found.start)
        return replace(plan, image=found.image)

    async def instead(self, caller: Caller, plan: Plan) -> Plan | None:
        """For a saved state that this version of the software, or this machine, cannot use any more: the image that it
        was made of, in which what runs from the beginning is started. None: there is none."""
        if plan.template in STANDARD and not plan.build:
            await self.standard.forget_warm(caller, plan.template)
            return await self.standard.plan(caller, plan.template, fresh=True)
        build = self.store.build(plan.build)
        if build is None or not build.image or build.snapshot != plan.snapshot:
            return None
        self.store.change_build(build, snapshot="")
        await self._discard(caller, build)
        return replace(plan, snapshot="", image=build.image, start=build.start)

    # -- sandboxes of them ---------------------------------------------------------------

    async def begun(self, caller: Caller, plan: Plan, info: SandboxInfo, record: Record) -> None:
        """A sandbox of it has just started: what runs in it from the beginning is started, too."""
        count, _ = self.spawned.get(plan.template, (0, 0.0))
        self.spawned[plan.template] = (count + 1, time.time())
        if plan.start:
            await self._start(caller, record, plan.start, plan.ready)

    async def restarted(self, caller: Caller, record: Record) -> None:
        """The same of one that was started anew with its files."""
        build = self.store.build(record.build)
        if build is not None and build.start:
            await self._start(caller, record, build.start, build.ready)

    async def _start(self, caller: Caller, record: Record, start: str, ready: str) -> None:
        """It is waited for, but not for ever; a sandbox in which it fails is one all the same."""
        box = await caller.tenant.box(record.sandbox)
        asked = Start(start, ready, record.user, record.workdir or None, self.facade.environment(record))
        try:
            await begin(box, asked, longest=_READY, unsaid=0.0)
        except StartFailed as error:
            log.warning("sandbox %s of the template %s: %s", record.sandbox, record.template, error.message)

    # -- builds, when they are over ------------------------------------------------------

    async def completed(self, caller: Caller, build: Build) -> None:
        """It is ready: its tags are its own, and what nothing means any more goes."""
        template = self.store.find(build.tenant, build.template)
        if template is None or self.store.build(build.id) is None:  # deleted meanwhile
            await self._discard(caller, build)
            await self.sweep(caller.tenant)
            return
        self.store.put_build(build)
        self.store.assign(template.id, build.tags, build.id)
        self.store.put(replace(template, updated_at=time.time()))
        await self.retire(caller, template)

    async def retire(self, caller: Caller, template: Template) -> None:
        """Builds without a tag keep their place in the list for a while, and nothing on the disk."""
        tagged = {tag.build for tag in self.store.tags(template.id).values()}
        untagged = [build for build in self.store.builds(template.id) if build.id not in tagged and build.finished_at]
        for build in untagged:
            if build.image or build.snapshot:
                self.store.change_build(build, image="", snapshot="")
                await self._discard(caller, build)
        for build in untagged[_REMEMBERED:]:
            self.store.drop_build(build)
            await asyncio.to_thread(self.logs.forget, caller.tenant.home, build.id)
        await self.sweep(caller.tenant)

    async def _discard(self, caller: Caller, build: Build) -> None:
        """Its saved state goes; sandboxes that began with it go on."""
        if build.snapshot:
            with suppress(SlopletError):
                await caller.tenant.controller.delete_snapshot(build.snapshot, force=True)

    async def sweep(self, tenant: Tenant) -> None:
        """Images of builds that have none any more go, but for those that sandboxes still need: another time."""
        kept = {image_name(build) for build in self.store.with_images(tenant.name)}
        await asyncio.to_thread(_remove_images, tenant.home, kept)

    async def delete(self, caller: Caller, template: Template) -> None:
        for build in self.store.builds(template.id):
            await self.builds.stop(build.id)
        builds = self.store.builds(template.id)
        self.store.drop(template)
        for build in builds:
            await self._discard(caller, build)
            await asyncio.to_thread(self.logs.forget, caller.tenant.home, build.id)
        await asyncio.to_thread(self.files.forget, caller.tenant.home, template.id)
        await self.sweep(caller.tenant)


def missing(text: str) -> Refused:
    return refused(404, f"template '{text[:200]}' not found")


#: What images of builds are called, and nobody else's: an id of a template, and one of a build.
_OURS = re.compile(re.escape(IMAGES) + r"[a-z0-9]{20}:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


def _remove_images(home: Home, kept: set[str]) -> None:
    """Those of templates that are not among ``kept``. Blocking."""
    store = ImageStore(home)
    try:
        for image in store.list():
            for name in (parse_reference(each).familiar for each in image.references):
                if _OURS.match(name) and name not in kept:
                    with suppress(ImageError):  # in use, or gone already
                        store.remove(name)
    finally:
        store.close()
