"""One stage of a build: its base, then its steps one by one, each from the cache or done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import (
    BuildFailed,
    EngineError,
    FileError,
    ImageError,
    NetworkError,
    RecipeInvalid,
    SandboxError,
    SpecError,
    UnsupportedOperation,
    VolumeError,
)
from ..images.config import ImageConfig
from .cache import Hit, key_of
from .commit import Spool
from .context import Folder
from .copying import copy_items, folder_items, select
from .dockerfile import parse_trigger
from .events import BuildEvent
from .ground import Ground
from .instructions import Copy, Instruction, Run
from .layertar import Item, Layer, write_layer
from .plan import Plan, PlannedStage
from .running import network_facts, network_of, run
from .scope import CopyWork, FolderWork, RunWork, Scope, Work
from .threads import in_thread

if TYPE_CHECKING:
    from .executor import Builder


#: Errors that say more with the line of the step they come from.
_WITH_LINE = (ImageError, EngineError, SandboxError, VolumeError, NetworkError, UnsupportedOperation)


@dataclass
class Built:
    """A stage that is done."""

    ground: Ground
    config: ImageConfig
    arguments: Mapping[str, str] = field(default_factory=dict)


class StageBuild:
    """One stage being built."""

    def __init__(
        self, builder: Builder, plan: Plan, planned: PlannedStage, done: Mapping[int, Built],
        defined: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._builder, self._planned, self._done = builder, planned, done
        self._number = 0
        self._history: list[dict[str, Any]] = []
        self._leading = {**defined, **plan.arguments}

    async def build(self) -> Built:
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
        below = None if self._planned.base.stage is None else self._done[self._planned.base.stage]
        self._scope = Scope(
            config, build_args=options.build_args, leading=self._leading, epoch=options.epoch,
            arguments=below.arguments if below else None,
        )  # fmt: skip
        for step in steps:
            await self._step(step, lambda step=step: self._one(step))  # type: ignore[misc]
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(options.epoch))
        config = self._scope.config.changed(history=(*config.history, *self._history), created=created)
        return Built(ground, config, self._scope.arguments)

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
        except FileError as error:  # of the step's sandbox
            raise BuildFailed(f"{step.line.name} line {step.line.number}: {error.message}", hint=error.hint) from error
        except _WITH_LINE as error:
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
        key = self._key({"folder": work.path, "owner": work.owner})
        return await self._cached_or(key, lambda spool: folder_items(work, self._ground))

    async def _run(self, work: RunWork) -> Layer | None:
        builder = self._builder
        self._ground.check_platform()
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

        return await self._cached_or(self._key(facts), make)

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
            quick = self._key({**facts, "origin": (await self._ground_of(work.origin)).chain})
            hit = await self._look_up(quick)
            if hit is not None:
                return self._hit(hit)
        folder = await self._source(work)
        where = "the context" if work.origin is None else work.origin
        selection = await in_thread(select, work, folder, where if work.folder is None else work.folder)
        facts["content"] = selection.digest
        layer = await self._cached_or(self._key(facts), lambda spool: copy_items(work, selection, self._ground, spool))
        if quick is not None:
            await in_thread(self._builder.cache.put, quick, layer)
        return layer

    async def _source(self, work: CopyWork) -> Folder | None:
        if work.folder is not None:
            return await in_thread(self._builder.folder, work.folder)
        return await self._folder_of(work.origin) if work.sources else None

    def _key(self, facts: dict[str, Any]) -> str:
        return key_of(self._ground.chain, {**facts, "epoch": self._builder.options.epoch})

    async def _look_up(self, key: str) -> Hit | None:
        if self._builder.options.no_cache:
            return None
        return await in_thread(self._builder.cache.get, key)

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
                layer = await in_thread(
                    write_layer, items, builder.store.blobs, epoch=builder.options.epoch, check=builder.check
                )
        self._ground.add(layer, [replace(item, data=None) for item in items])
        await in_thread(builder.cache.put, key, layer)
        return layer


def _check_triggers(triggers: Sequence[Instruction], base: Instruction) -> None:
    for trigger in triggers:
        copies = isinstance(trigger, Copy) and trigger.origin is not None
        if copies or (isinstance(trigger, Run) and any(mount.get("from") for mount in trigger.mounts)):
            raise base.line.wrong("the image has an ONBUILD with --from, which is not supported")
