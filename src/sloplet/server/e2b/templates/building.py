"""One build of one template: its base, its steps by the core's builder, and what runs in it from the beginning."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....build.context import Folder
from ....build.dockerfile import Dockerfile
from ....build.events import BuildEvent
from ....build.executor import Builder, BuildOptions, parse_tags
from ....build.image import for_index, with_trust
from ....build.running import RunSettings
from ....errors import BuildFailed, SlopletError, UserNotFound
from ....fs import FILE, FOLDER
from ....images.access import Access
from ....images.store import StoredImage
from ....images.threads import kept, whole
from ....images.unpack import unpack
from ....netspec import Network
from ...bodies import check_room
from ...building import settings_for
from ...caller import Caller
from ...contexts import LIMITS, private_folder
from ...imaging import access_for
from ..answers import text_of
from ..making import Plan, engine_of, spec_of
from . import provision
from .asked import BuildAsked
from .logs import BuildLog
from .standard import SAME
from .starting import Start, StartFailed, begin
from .steps import Piece, Placed, Step, StepFailed, first_forced, link_target, source_of, translate, unknown_user
from .store import READY, Build

if TYPE_CHECKING:
    from .catalog import Templates

IMAGES = "e2b/"  #: what the names of templates' images begin with
_SETTLE = 0.5  # seconds that a start command has to fail in after its template is said to be ready
_TTL = 3600.0  # seconds for what a template starts with to be ready


@dataclass(frozen=True)
class _Base:
    """What a template begins with."""

    image: str
    user: str = provision.USER
    start: str = ""
    ready: str = ""


class Building:
    """One build of one template."""

    def __init__(self, templates: Templates, caller: Caller, build: Build, asked: BuildAsked, log: BuildLog) -> None:
        self._templates, self._caller, self._asked, self._log = templates, caller, asked, log
        self._facade = templates.facade
        self._of = build
        self._home = caller.tenant.home
        self._now = "base"  # the step at hand

    async def build(self) -> Build:
        """What its steps make: heavy work, for which there are places. StepFailed; what else ends it is an error of
        ours."""
        asked = self._asked
        with self._failing():
            self._options = await asyncio.to_thread(run_options)
            self._settings = settings_for(
                RunSettings(network=Network(allow=["*", "@package-indexes"])), self._caller.key.limits
            )
            base = await self._base()
            image = await self._steps(base)
            user, workdir = image.config.user or "root", image.config.workdir or "/"
            start, ready = asked.start or base.start, asked.ready or base.ready
            return replace(self._of, status=READY, image=image.id, user=user, workdir=workdir, start=start, ready=ready)

    async def finalize(self, made: Build) -> Build:
        """What runs in it from the beginning is tried, and mostly waited for. StepFailed."""
        self._now = "finalize"
        self._log.add("[finalize] Finalizing template build", step="finalize")
        with self._failing():
            return await self._finalized(made)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except SlopletError as error:
            raise StepFailed(self._now, text_of(error).removeprefix("template line 0: ")) from error

    # -- the base ------------------------------------------------------------------------

    async def _base(self) -> _Base:
        asked = self._asked
        if asked.from_template:
            self._log.add(f"[base] FROM TEMPLATE {asked.from_template}", step="base")
            return await self._template_base(asked.from_template)
        name = asked.from_image.removesuffix(":latest")
        if name in SAME:
            self._log.add(f"[base] FROM {asked.from_image}", step="base")
            return await self._standard_base(SAME[name])
        access = await self._access()
        recipe = provision.recipe(asked.from_image, self._options)
        options = BuildOptions(settings=self._settings, no_cache=asked.force, access=access)
        try:
            image = await self._builder(recipe, options, on_event=self._tell_base).build()
        except BuildFailed as error:
            said = error.message.rpartition("\n")[2] if error.exit_code is not None else error.message
            raise StepFailed(
                "base", f"failed to provision the image '{asked.from_image}': {said}", error.hint
            ) from error
        return _Base(image.id)

    async def _template_base(self, text: str) -> _Base:
        try:
            found = self._templates.resolve(self._caller, text)
        except SlopletError as error:
            raise StepFailed("base", f"base template '{text[:200]}' not found: {error.message}") from None
        if isinstance(found, str):
            return await self._standard_base(found)
        if not found.image:
            raise StepFailed("base", f"'{text[:200]}' is a snapshot of a sandbox: nothing can be built on it")
        return _Base(found.image, found.user, found.start, found.ready)

    async def _standard_base(self, name: str) -> _Base:
        image = await self._templates.standard.image(
            self._caller.tenant, name, lambda line: self._log.add(line, "debug")
        )
        return _Base(image)

    async def _access(self) -> Access:
        registry = self._asked.registry
        if registry.get("type") == "aws":
            raise StepFailed(
                "base", "credentials of AWS are not supported: log in to the registry by name and password"
            )
        if registry.get("type") == "gcp":
            return await access_for(self._caller, "_json_key", registry.get("serviceAccountJson", ""))
        return await access_for(self._caller, registry.get("username"), registry.get("password"))

    def _tell_base(self, event: BuildEvent) -> None:
        if event.kind == "begin" and event.step == 1:
            self._log.add(f"[base] {event.text}", step="base")
        elif event.kind == "log":
            self._log.add(f"[base] {event.text}", "debug", "base")

    # -- steps ---------------------------------------------------------------------------

    async def _steps(self, base: _Base) -> StoredImage:
        """The image of all steps, which has a name from then on."""
        steps, cached = self._asked.steps, 0 if self._asked.force else first_forced(self._asked.steps)
        async with self._unpacked(steps) as (folder, placed):
            pieces = translate(steps, placed, base.user, self._options)
            self._now = "base"
            first = [piece for piece in pieces if piece.step.number <= cached]
            rest = [piece for piece in pieces if piece.step.number > cached]
            image = base.image
            if rest and first:
                image = (await self._part(image, first, folder, BuildOptions(settings=self._settings))).id
            options = BuildOptions(
                settings=self._settings, tags=parse_tags([image_name(self._of)]), no_cache=bool(rest)
            )
            return await self._part(image, rest or first, folder, options)

    async def _part(self, image: str, pieces: list[Piece], folder: Path, options: BuildOptions) -> StoredImage:
        folders = {
            str(piece.step.number): Folder(folder / piece.step.files) for piece in pieces
            if piece.step.type == "COPY"
        }  # fmt: skip
        recipe = provision.built_from(image, [piece.instruction for piece in pieces])
        told = _Told(self._log, pieces, len(self._asked.steps), self._began)
        options = replace(options, secrets=with_trust({}, recipe.stages[0].steps))
        try:
            return await self._builder(recipe, options, folders=folders, on_event=told).build()
        except SlopletError as error:
            piece = told.at
            if piece is None:
                raise
            raise failure(piece, error) from error

    def _began(self, step: str) -> None:
        self._now = step

    def _builder(
        self, recipe: Dockerfile, options: BuildOptions, *, folders: Mapping[str, Folder] | None = None,
        on_event: Callable[[BuildEvent], None],
    ) -> Builder:  # fmt: skip
        options = replace(options, secrets=with_trust(options.secrets, recipe.stages[0].steps))
        return Builder(
            recipe, options, home=self._home, folders=folders or {}, on_event=on_event,
            controller=self._caller.tenant.embedded,
        )  # fmt: skip

    @asynccontextmanager
    async def _unpacked(self, steps: Sequence[Step]) -> AsyncIterator[tuple[Path, dict[int, Placed]]]:
        """What came for COPY, unpacked: a folder for each archive, by its digest."""
        copies = [step for step in steps if step.type == "COPY"]
        opening = private_folder(self._home)
        folder = await kept(lambda _: opening.__exit__(None, None, None), opening.__enter__)
        try:
            placed = {}
            for step in copies:
                path = self._templates.files.path(self._home, self._of.template, step.files)
                await asyncio.to_thread(check_room, self._home)
                placed[step.number] = await whole(unpack_step, path, folder / step.files, step)
            yield folder, placed
        finally:
            await asyncio.shield(asyncio.to_thread(opening.__exit__, None, None, None))

    # -- the end -------------------------------------------------------------------------

    async def _finalized(self, made: Build) -> Build:
        """What runs in it from the beginning is tried; where memory can be saved, it is saved running."""
        if not made.start and not made.ready:
            return made
        facade, caller = self._facade, self._caller
        engine = await engine_of(facade, caller)
        plan = Plan(
            made.template, image=made.image, user=made.user, workdir=made.workdir, engine=engine,
            **plan_limits(made),
        )  # fmt: skip
        wanted = await spec_of(facade, caller, plan, {}, _TTL)
        controller = caller.tenant.controller
        info = await controller.create(replace(wanted.spec, pool=0))
        try:
            box = await caller.tenant.box(info.id)
            env = {"E2B_SANDBOX": "true", "E2B_TEMPLATE_ID": made.template}
            await begin(
                box, Start(made.start, made.ready, made.user, made.workdir, env), settle=_SETTLE,
                tell=lambda line: self._log.add(f"[finalize] [stdout]: {line}", step="finalize"),
            )  # fmt: skip
            if not made.start or info.engine != "gvisor":
                return made
            self._log.add("[finalize] Saving the running state", "debug", "finalize")
            saved = await controller.snapshot(info.id, snapshot_name(made.id), role="template")
            return replace(made, snapshot=saved.id, live=saved.kind == "live", engine=saved.engine)
        except StartFailed as error:
            raise StepFailed("finalize", error.message) from None
        finally:
            await asyncio.shield(controller.kill(info.id))


class _Told:
    """A build's events as lines of a template's log, and which step is at hand."""

    def __init__(self, log: BuildLog, pieces: Sequence[Piece], total: int, began: Callable[[str], None]) -> None:
        self._log, self._pieces, self._total, self._began = log, pieces, total, began
        self._announced = False
        self.at: Piece | None = None

    def __call__(self, event: BuildEvent) -> None:
        index = event.step - 2  # the first is FROM
        if event.kind == "done" or not 0 <= index < len(self._pieces):
            return
        piece = self._pieces[index]
        step = str(piece.step.number)
        prefix = f"[builder {step}/{self._total}]"
        if event.kind == "begin":
            self.at, self._announced = piece, not piece.main
            self._began(step)
            return
        if not self._announced:
            self._announced = True
            self._log.add(f"{'CACHED ' if event.cached else ''}{prefix} {piece.step.shown}", step=step)
        if event.kind == "log" and piece.main:
            self._log.add(f"{prefix} [stdout]: {event.text}", step=step)


def failure(piece: Piece, error: SlopletError) -> StepFailed:
    """What is told of a step that failed, in E2B's words."""
    step = piece.step
    where = f"template line {step.number}: "
    said = error.message.removeprefix(where)
    if step.type == "RUN":
        if isinstance(error.__cause__, UserNotFound):
            return step.wrong(unknown_user(step.args[0], step.arg(1)))
        if isinstance(error, BuildFailed) and error.exit_code is not None:
            message = f"failed to run command '{step.args[0]}': exit status {error.exit_code}"
            return StepFailed(str(step.number), message, error.hint)
        return StepFailed(str(step.number), f"failed to run command '{step.args[0]}': {said}", error.hint)
    if step.type == "WORKDIR":
        return StepFailed(str(step.number), f"failed to create workdir: {said}", error.hint)
    if step.type == "USER":
        return StepFailed(str(step.number), f"failed to create user '{step.args[0]}': {said}", error.hint)
    return StepFailed(str(step.number), f"failed to {step.type.lower()}: {said}", error.hint)


def run_options() -> dict[str, Any]:
    """What every RUN has besides: the package indexes of this machine, and whom it trusts. Blocking."""
    pip, npm = for_index("pip"), for_index("npm")
    env = {**dict(npm["env"]), **dict(pip["env"])}
    env.pop("npm_config_cache", None)  # would be left in the image
    return {"env": tuple(sorted(env.items())), "mounts": pip["mounts"], "index": "pip"}


def unpack_step(archive: Path, folder: Path, step: Step) -> Placed:
    """Unpack what was sent for a COPY into a folder, unless another step has done so. StepFailed. Blocking."""
    if not folder.exists():
        _unpack(archive, folder, step)
    source, target = f"files/{source_of(step.args[0])}".rstrip("/"), step.args[1] or "."
    with Folder(folder) as looking:
        found = looking.lstat(source)
    if found is None:
        raise step.wrong(f"failed to copy: there is no '{step.args[0]}' in what was uploaded")
    if found.kind != "symlink":
        return Placed(source, target)
    target, name = link_target(source, target)
    own = f"link-{step.number}"
    (folder / own).mkdir(0o700)
    os.symlink(found.link, folder / own / name)
    return Placed(own, target)


def _unpack(archive: Path, folder: Path, step: Step) -> None:
    try:
        fd = os.open(archive, FILE)
    except OSError:
        raise step.wrong(f"failed to copy: the files of '{step.args[0]}' were not uploaded") from None
    with os.fdopen(fd, "rb") as file:
        (folder / "files").mkdir(0o700, parents=True)
        root = os.open(folder / "files", FOLDER)
        try:
            os.utime(file.fileno())
            disk = os.statvfs(folder)
            unpack(file, root, replace(LIMITS, bytes=min(LIMITS.bytes, disk.f_bavail * disk.f_frsize // 2)))
        except SlopletError as error:
            raise step.wrong(f"failed to copy: {error.message}") from None
        finally:
            os.close(root)


def snapshot_name(build: str) -> str:
    """What the core calls the saved state of a build."""
    return f"e2b-{build}"


def plan_limits(build: Build) -> dict[str, Any]:
    return {"cpus": float(build.cpus), "memory": build.memory << 20, "explicit": frozenset(build.explicit)}


def image_name(build: Build) -> str:
    """What its image is called, so that it is kept. It is used by its id: no registry is ever asked for that."""
    return f"{IMAGES}{build.template}:{build.id}"
