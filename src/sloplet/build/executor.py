"""Builds a Dockerfile: stages as their needs allow, step by step, from the cache where that has been done before."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..controller import Controller
from ..errors import BuildFailed, ImageError, ImageNotFound, RecipeInvalid, SpecError
from ..finding import default_controller
from ..images.config import ImageConfig
from ..images.media import host_platform, parse_platform
from ..images.progress import ImageProgress
from ..images.reference import Reference
from ..images.reference import parse as parse_reference
from ..images.standard import refuse_standard
from ..images.store import ImageStore, StoredImage
from ..state.home import Home
from .cache import BuildCache, Hit, key_of
from .commit import Spool
from .context import Folder, read_ignore
from .copying import copy_items, folder_items, select
from .dockerfile import Dockerfile, parse_trigger
from .events import BuildEvent, OnBuildEvent, silent
from .ground import Ground, record
from .instructions import Copy, Instruction
from .layertar import DEFAULT_EPOCH, Item, Layer, write_layer
from .mounts import Mounts
from .plan import Plan, PlannedStage, make_plan, platform_arguments
from .running import RunSettings, network_facts, network_of, run
from .scope import CopyWork, FolderWork, RunWork, Scope, Work

T = TypeVar("T")
_PARALLEL = 2


@dataclass(frozen=True)
class BuildOptions:
    """How a build is done."""

    tags: tuple[Reference, ...] = ()
    build_args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    settings: RunSettings = field(default_factory=RunSettings)
    labels: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, bytes] = field(default_factory=dict)
    no_cache: bool = False
    pull: bool = False
    platform: str | None = None
    epoch: int = DEFAULT_EPOCH


@dataclass
class _Built:
    """A stage that is done."""

    ground: Ground
    config: ImageConfig


class Builder:
    """One build. ``context``: the folder that COPY takes files from; None: there is none."""

    def __init__(
        self, dockerfile: Dockerfile, options: BuildOptions, *, home: Home | None = None, context: Path | None = None,
        dockerfile_path: Path | None = None, on_event: OnBuildEvent = silent, controller: Controller | None = None,
    ) -> None:  # fmt: skip
        self._dockerfile = dockerfile
        self._options = options
        self._home = home or Home()
        self._context_path = context
        self._dockerfile_path = dockerfile_path or Path("Dockerfile")
        self._on_event = on_event
        self._controller = controller
        self.store = ImageStore(self._home)
        self._cache = BuildCache(self._home, self.store.blobs)
        self._mounts = Mounts(self._home, options.secrets)
        self._host = host_platform()
        self._platform = parse_platform(options.platform) if options.platform else self._host
        self._stop = threading.Event()
        self._context: Folder | None = None
        self._images: dict[str, StoredImage] = {}
        self._image_grounds: dict[str, Ground] = {}
        self._pulling = asyncio.Lock()
        self._grounds: list[Ground] = []
        self._folders: dict[str, Folder] = {}
        self._begun = self._total = 0

    async def build(self) -> StoredImage:
        """Raises RecipeInvalid, BuildFailed, and the errors of images, sandboxes and state."""
        began = time.monotonic()
        defined = platform_arguments(self._platform, self._host)
        plan = make_plan(
            self._dockerfile, target=self._options.target, build_args=self._options.build_args, defined=defined
        )
        self._total = sum(1 + len(planned.stage.steps) for planned in plan.stages)
        with ExitStack() as stack:
            stack.callback(self.store.close)
            adding = await asyncio.to_thread(self._begin)
            stack.enter_context(adding)
            stack.callback(self._close)
            stack.callback(self._stop.set)
            built = await self._all(plan, defined)
            image = await asyncio.to_thread(self._finish, built)
        self._on_event(BuildEvent("done", self._total, self._total, text=image.id, seconds=time.monotonic() - began))
        return image

    def _begin(self) -> Any:
        if self._context_path is not None:
            ignore = read_ignore(self._context_path, self._dockerfile_path)
            self._context = Folder(self._context_path, ignore=ignore)
        stack = ExitStack()
        stack.enter_context(self.store.adding())
        return stack

    def _close(self) -> None:
        for ground in self._grounds:
            ground.close()
        for folder in (*self._folders.values(), *([self._context] if self._context else [])):
            folder.close()

    def _finish(self, built: _Built) -> StoredImage:
        if not built.ground.layers:
            raise RecipeInvalid(
                f"{self._dockerfile.name} makes an image without any file", hint="COPY something into it"
            )
        labels = {**dict(built.config.labels), **self._options.labels}
        config = built.config.changed(labels=tuple(sorted(labels.items())))
        first, *others = self._options.tags or (None,)
        image = record(self.store, config, built.ground.layers, first)
        for reference in others:
            if reference is not None:
                self.store.tag(image, reference)
        return self.store.find(image.id)

    # -- stages ------------------------------------------------------------------

    async def _all(self, plan: Plan, defined: Mapping[str, str]) -> _Built:
        """Each stage as soon as those are done that it needs; two at a time."""
        places = asyncio.Semaphore(_PARALLEL)
        tasks: dict[int, asyncio.Task[_Built]] = {}

        async def one(planned: PlannedStage) -> _Built:
            done = {index: await asyncio.shield(tasks[index]) for index in sorted(planned.needs)}
            async with places:
                return await _Stage(self, plan, planned, done, defined).build()

        for planned in plan.stages:
            tasks[planned.stage.index] = asyncio.ensure_future(one(planned))
        try:
            waiting = set(tasks.values())
            while waiting:
                finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
                failed = [task for task in finished if not task.cancelled() and task.exception() is not None]
                if failed:
                    await failed[0]
            return tasks[plan.target].result()
        finally:
            self._stop.set()
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            self._stop.clear()

    # -- for its stages ------------------------------------------------------------

    def count(self, more: int = 0) -> int:
        """The number of the step that begins now; ``more`` have turned up."""
        self._total += more
        self._begun += 0 if more else 1
        return self._begun

    def tell(self, event: BuildEvent) -> None:
        self._on_event(replace(event, total=self._total))

    def check(self) -> None:
        """Called from threads, now and then."""
        if self._stop.is_set():
            raise BuildFailed("the build was stopped")

    async def controller(self) -> Controller:
        if self._controller is None:
            self._controller = await default_controller(named=False)
        return self._controller

    async def image(self, name: str, platform: str | None, tell: Callable[[str], None]) -> StoredImage:
        """The image of a FROM or --from: here, or pulled."""
        async with self._pulling:
            if name not in self._images:
                self._images[name] = await self._find(name, platform, tell)
            return self._images[name]

    async def _find(self, name: str, platform: str | None, tell: Callable[[str], None]) -> StoredImage:
        if not self._options.pull or name.startswith("sha256:"):
            try:
                return await asyncio.to_thread(self.store.find, name)
            except ImageNotFound:
                if name.startswith("sha256:"):
                    raise
        from ..images.pull import pull

        loop = asyncio.get_running_loop()

        def progress(part: ImageProgress) -> None:
            if part.stage in ("resolve", "done") and part.text:
                loop.call_soon_threadsafe(tell, part.text)

        wanted = platform or self._options.platform
        reference = parse_reference(name)
        refuse_standard(reference)
        return await pull(reference, self.store, platform=wanted, progress=progress)

    async def image_ground(self, image: StoredImage) -> Ground:
        """The files of an image that is copied from."""
        if image.id not in self._image_grounds:
            self._image_grounds[image.id] = self.ground(image)
        return self._image_grounds[image.id]

    def ground(self, image: StoredImage | None) -> Ground:
        config = image.config if image else ImageConfig(
            architecture=self._platform.architecture, os=self._platform.os, variant=self._platform.variant
        )  # fmt: skip
        layers = [] if image is None else [
            Layer(layer, diff) for layer, diff in zip(image.layers, image.config.diff_ids, strict=True)
        ]  # fmt: skip
        return self.kept(Ground(self.store, config, layers, [None] * len(layers)))

    def kept(self, ground: Ground) -> Ground:
        self._grounds.append(ground)
        return ground

    def folder(self, path: str) -> Folder:
        """A folder of this machine other than the context."""
        if path not in self._folders:
            self._folders[path] = Folder(path, ignore=read_ignore(Path(path), Path(path, "Dockerfile")))
        return self._folders[path]

    @property
    def options(self) -> BuildOptions:
        return self._options

    @property
    def home(self) -> Home:
        return self._home

    @property
    def cache(self) -> BuildCache:
        return self._cache

    @property
    def mounts(self) -> Mounts:
        return self._mounts

    @property
    def context(self) -> Folder | None:
        return self._context


class _Stage:
    """One stage being built."""

    def __init__(
        self, builder: Builder, plan: Plan, planned: PlannedStage, done: Mapping[int, _Built],
        defined: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._builder, self._planned, self._done = builder, planned, done
        self._number = 0
        self._history: list[dict[str, Any]] = []
        self._leading = {**defined, **plan.arguments}

    async def build(self) -> _Built:
        base = self._planned.stage.base
        ground, config = await self._step(base, self._base)
        self._ground = ground
        steps = list(self._planned.stage.steps)
        if config.on_build:
            triggers = [parse_trigger(text, base.image) for text in config.on_build]
            _check_triggers(triggers, base)
            steps = [*triggers, *steps]
            self._builder.count(len(triggers))
            config = config.changed(on_build=())
        options = self._builder.options
        self._scope = Scope(config, build_args=options.build_args, leading=self._leading, epoch=options.epoch)
        for step in steps:
            await self._step(step, lambda step=step: self._one(step))  # type: ignore[misc]
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(options.epoch))
        config = self._scope.config.changed(history=(*config.history, *self._history), created=created)
        return _Built(ground, config)

    async def _step(self, step: Instruction, do: Callable[[], Any]) -> Any:
        """Do it, and tell of it."""
        self._number = self._builder.count()
        self._cached = False
        began = time.monotonic()
        name = self._planned.stage.name
        self._builder.tell(BuildEvent("begin", self._number, stage=name, text=step.line.text))
        try:
            result = await do()
        except RecipeInvalid:
            raise
        except BuildFailed as error:
            where = f"{step.line.name} line {step.line.number}: "
            if error.message.startswith(f"{step.line.name} line "):
                raise
            raise BuildFailed(where + error.message, hint=error.hint) from error
        except SpecError as error:
            raise step.line.wrong(error.message, error.hint) from error
        except ImageError as error:
            where = f"{step.line.name} line {step.line.number}: "
            raise type(error)(where + error.message, hint=error.hint) from error
        seconds = time.monotonic() - began
        self._builder.tell(BuildEvent("end", self._number, stage=name, cached=self._cached, seconds=seconds))
        return result

    def _log(self, line: str) -> None:
        self._builder.tell(BuildEvent("log", self._number, stage=self._planned.stage.name, text=line))

    async def _base(self) -> tuple[Ground, ImageConfig]:
        planned = self._planned
        if planned.base.stage is not None:
            below = self._done[planned.base.stage]
            self._cached = True
            return self._builder.kept(below.ground.copy()), below.config
        if planned.base.image is None:
            ground = self._builder.ground(None)
            return ground, ground.platform.changed(diff_ids=(), history=())
        image = await self._builder.image(planned.base.image, planned.platform, self._log)
        self._log(f"{planned.base.image} is {image.id}")
        return self._builder.ground(image), image.config

    async def _one(self, step: Instruction) -> None:
        work = self._scope.take(step)
        layer = None if work is None else await self._work(work)
        options = self._builder.options
        entry: dict[str, Any] = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(options.epoch)),
            "created_by": (step.line.text if work is None else work.shown)[:4096],
            "comment": "sloplet",
        }
        if layer is None:
            entry["empty_layer"] = True
        self._history.append(entry)

    # -- steps that make layers ----------------------------------------------------

    async def _work(self, work: Work) -> Layer | None:
        if isinstance(work, RunWork):
            return await self._run(work)
        if isinstance(work, CopyWork):
            return await self._copy(work)
        assert isinstance(work, FolderWork)
        key = key_of(self._ground.chain, {"folder": work.path, "owner": work.owner})
        return await self._cached_or(key, lambda spool: folder_items(work, self._ground))

    async def _run(self, work: RunWork) -> Layer | None:
        builder = self._builder
        settings = builder.options.settings
        network = network_of(work, settings)
        mounted = await builder.mounts.prepare(work, self._folder_of)
        facts = {
            "run": work.argv, "script": work.script, "env": work.env, "user": work.user, "workdir": work.workdir,
            "network": network_facts(network), "mounts": mounted.facts,
        }  # fmt: skip

        async def make(spool: Spool) -> list[Item]:
            tree = await self._ground.tree()
            controller = await builder.controller()
            return await run(work, tree, settings, controller, builder.home, spool, mounted, self._log)

        return await self._cached_or(key_of(self._ground.chain, facts), make)

    async def _folder_of(self, name: str | None) -> Folder:
        """Where COPY --from and mounts take files from."""
        if name is None:
            if self._builder.context is None:
                raise BuildFailed("this build has no context to copy from", hint="give it a folder")
            return self._builder.context
        return (await (await self._ground_of(name)).tree()).folder

    async def _ground_of(self, name: str) -> Ground:
        origin = self._planned.origins[name]
        if origin.stage is not None:
            return self._done[origin.stage].ground
        assert origin.image is not None
        image = await self._builder.image(origin.image, None, self._log)
        return await self._builder.image_ground(image)

    async def _copy(self, work: CopyWork) -> Layer | None:
        facts: dict[str, Any] = {
            "copy": work.sources, "target": work.target, "chown": work.chown, "chmod": work.chmod,
            "unpack": work.unpack, "parents": work.parents, "exclude": work.exclude, "files": work.files,
        }  # fmt: skip
        quick = None
        if work.origin is not None:  # the origin's layers tell what is in it: no need to read its files
            quick = key_of(self._ground.chain, {**facts, "origin": (await self._ground_of(work.origin)).chain})
            hit = await self._look_up(quick)
            if hit is not None:
                return self._hit(hit)
        folder = await self._source(work)
        where = "the context" if work.origin is None else work.origin
        selection = await asyncio.to_thread(select, work, folder, where if work.folder is None else work.folder)
        facts["content"] = selection.digest
        layer = await self._cached_or(
            key_of(self._ground.chain, facts), lambda spool: copy_items(work, selection, self._ground, spool)
        )
        if quick is not None:
            await asyncio.to_thread(self._builder.cache.put, quick, layer)
        return layer

    async def _source(self, work: CopyWork) -> Folder | None:
        if work.folder is not None:
            return await asyncio.to_thread(self._builder.folder, work.folder)
        return await self._folder_of(work.origin) if work.sources else None

    async def _look_up(self, key: str) -> Hit | None:
        if self._builder.options.no_cache:
            return None
        return await asyncio.to_thread(self._builder.cache.get, key)

    def _hit(self, hit: Hit) -> Layer | None:
        self._cached = True
        self._ground.add(hit.layer, None)
        return hit.layer

    async def _cached_or(self, key: str, make: Callable[[Spool], Any]) -> Layer | None:
        hit = await self._look_up(key)
        if hit is not None:
            return self._hit(hit)
        builder = self._builder
        with Spool(builder.home) as spool:
            items: list[Item] = await make(spool)
            layer = None
            if items:
                layer = await asyncio.to_thread(
                    write_layer, items, builder.store.blobs, epoch=builder.options.epoch, check=builder.check
                )
        self._ground.add(layer, [replace(item, data=None) for item in items])
        await asyncio.to_thread(builder.cache.put, key, layer)
        return layer


def _check_triggers(triggers: Sequence[Instruction], base: Instruction) -> None:
    for trigger in triggers:
        if isinstance(trigger, Copy) and trigger.origin is not None:
            raise base.line.wrong("the image has an ONBUILD with --from, which is not supported")


def parse_tags(texts: Sequence[str]) -> tuple[Reference, ...]:
    """SpecError."""
    found = []
    for text in texts:
        reference = parse_reference(text)
        if reference.digest is not None:
            raise SpecError(f"{text!r} names content: an image cannot be called so", hint="use a tag")
        found.append(reference)
    return tuple(found)
