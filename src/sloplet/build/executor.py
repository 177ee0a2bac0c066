"""Builds a Dockerfile: stages as their needs allow, step by step, from the cache where that has been done before."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..controller import Controller
from ..errors import BuildFailed, ImageNotFound, ImagePlatform, RecipeInvalid, RegistryError, SpecError
from ..finding import local_controller
from ..images import adopting
from ..images.config import ImageConfig
from ..images.media import Platform, check_platform, host_platform, parse_platform
from ..images.progress import ImageProgress
from ..images.reference import Reference
from ..images.reference import parse as parse_reference
from ..images.standard import refuse_standard, standard_name
from ..images.store import ImageStore, StoredImage
from ..state.home import Home
from .cache import BuildCache
from .context import Folder, read_ignore
from .dockerfile import Dockerfile
from .events import BuildEvent, OnBuildEvent, silent
from .ground import Ground, record
from .layertar import DEFAULT_EPOCH, Layer
from .mounts import Mounts
from .plan import Plan, PlannedStage, make_plan, platform_arguments
from .running import RunSettings
from .stage import Built, StageBuild
from .threads import in_thread, made_in_thread

if TYPE_CHECKING:
    from ..images.access import Access

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
    access: Access | None = None  #: how registries are asked; None: as the home's owner does


class Builder:
    """One build. ``context``: the folder that COPY takes files from, by its path, or opened (and closed by the build);
    None: there is none. ``folders``: others, by the names that steps have for them; without it these are paths."""

    def __init__(
        self, dockerfile: Dockerfile, options: BuildOptions, *, home: Home | None = None,
        context: Path | Folder | None = None, dockerfile_path: Path | None = None, on_event: OnBuildEvent = silent,
        controller: Controller | None = None, folders: Mapping[str, Folder] | None = None,
    ) -> None:  # fmt: skip
        self._dockerfile = dockerfile
        self._options = options
        self._home = home or Home()
        self._context_path = context if isinstance(context, Path) else None
        self._dockerfile_path = dockerfile_path or Path("Dockerfile")
        self._on_event = on_event
        self._controller = controller
        self.store = ImageStore(self._home)
        self._cache = BuildCache(self._home, self.store.blobs)
        self._mounts = Mounts(self._home, options.secrets)
        self._host = host_platform()
        self._platform = parse_platform(options.platform) if options.platform else self._host
        self._stop = threading.Event()
        self._context = context if isinstance(context, Folder) else None
        self._images: dict[tuple[str, str | None], StoredImage] = {}
        self._image_grounds: dict[str, Ground] = {}
        self._pulling = asyncio.Lock()
        self._grounds: list[Ground] = []
        self._folders: dict[str, Folder] = dict(folders or {})
        self._only_those = folders is not None
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
            adding = await made_in_thread(self._begin, ExitStack.close)
            stack.enter_context(adding)
            stack.callback(self._close)
            stack.callback(self._stop.set)
            built = await self._all(plan, defined)
            image = await in_thread(self._finish, built)
            await in_thread(self._cache.tidy)
        self._on_event(BuildEvent("done", self._total, self._total, text=image.id, seconds=time.monotonic() - began))
        return image

    def _begin(self) -> ExitStack:
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

    def _finish(self, built: Built) -> StoredImage:
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

    async def _all(self, plan: Plan, defined: Mapping[str, str]) -> Built:
        """Each stage as soon as those are done that it needs; two at a time."""
        places = asyncio.Semaphore(_PARALLEL)
        tasks: dict[int, asyncio.Task[Built]] = {}

        async def one(planned: PlannedStage) -> Built:
            done = {index: await asyncio.shield(tasks[index]) for index in sorted(planned.needs)}
            async with places:
                return await StageBuild(self, plan, planned, done, defined).build()

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
            self._controller = await local_controller(named=False)
        return self._controller

    async def image(self, name: str, platform: str | None, tell: Callable[[str], None]) -> StoredImage:
        """The image of a FROM or --from: here, or pulled."""
        wanted = platform or self._options.platform
        async with self._pulling:
            if (name, wanted) not in self._images:
                self._images[name, wanted] = await self._find(name, wanted, tell)
            return self._images[name, wanted]

    async def _find(self, name: str, wanted: str | None, tell: Callable[[str], None]) -> StoredImage:
        unfit: ImagePlatform | None = None
        if not self._options.pull or name.startswith("sha256:") or standard_name(parse_reference(name)):
            try:
                found = await in_thread(adopting.find, self.store, name)
                if wanted is not None:
                    config = found.config
                    made_for = Platform(config.os, config.architecture, config.variant)
                    check_platform(made_for, parse_platform(wanted))
                return found
            except ImagePlatform as error:
                unfit = error
            except ImageNotFound:
                if name.startswith("sha256:"):
                    raise
        if unfit is not None and name.startswith("sha256:"):
            raise unfit
        from ..images.pull import pull

        loop = asyncio.get_running_loop()

        def progress(part: ImageProgress) -> None:
            if part.stage == "download" and part.total is not None and part.done >= part.total:
                loop.call_soon_threadsafe(tell, f"got {part.key[:19]}, {part.total} bytes")
            elif part.stage == "resolve" and part.text:
                loop.call_soon_threadsafe(tell, part.text)

        reference = parse_reference(name)
        refuse_standard(reference)
        try:
            return await pull(reference, self.store, platform=wanted, progress=progress, access=self._options.access)
        except (RegistryError, ImageNotFound) as error:
            if unfit is None:
                raise
            message = f"{unfit.message}, and another {name} could not be brought: {error.message}"
            raise ImagePlatform(message, hint=error.hint) from error

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
            if self._only_those:
                raise BuildFailed(f"the folder {path[:80]} did not come with the recipe")
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


def parse_tags(texts: Sequence[str]) -> tuple[Reference, ...]:
    """SpecError."""
    found = []
    for text in texts:
        reference = parse_reference(text)
        if reference.digest is not None:
            raise SpecError(f"{text!r} names content: an image cannot be called so", hint="use a tag")
        found.append(reference)
    return tuple(found)
