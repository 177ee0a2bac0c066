"""Builds of templates: each goes on by itself while its client asks how far it is, and ends with the server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ....errors import SlopletError
from ...building import LONGEST
from ...caller import Caller
from ...logs import log as server_log
from ..answers import refused, text_of
from .asked import BuildAsked
from .building import Building
from .logs import BuildLog
from .places import waited
from .steps import StepFailed
from .store import BUILDING, FAILED, WAITING, Build

if TYPE_CHECKING:
    from .catalog import Templates

_QUEUED = 20  # builds of one tenant that wait for a place or are under way
_WAITS = "Waiting for other builds to end"


class Builds:
    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._facade, self._store = templates.facade, templates.store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tenants: dict[str, str] = {}  # of what is under way

    def begin(self, caller: Caller, build: Build, asked: BuildAsked) -> None:
        """From here on it is under way. refused (400, 429)."""
        if build.status != WAITING:
            raise refused(400, "build is not in waiting state")
        if sum(each == caller.tenant.name for each in self._tenants.values()) >= _QUEUED:
            raise refused(429, f"{_QUEUED} builds of yours are under way already")
        log = self._templates.logs.begin(build.id)
        build = self._store.change_build(build, status=BUILDING)
        self._tenants[build.id] = caller.tenant.name
        task = self._tasks[build.id] = asyncio.ensure_future(self._run(caller, build, asked, log))
        task.add_done_callback(lambda _: self._over(build.id))

    def _over(self, build: str) -> None:
        self._tasks.pop(build, None)
        self._tenants.pop(build, None)

    async def stop(self, build: str) -> None:
        """It ends, whatever it is doing."""
        if (task := self._tasks.get(build)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def aclose(self) -> None:
        for build in list(self._tasks):
            await self.stop(build)

    async def _run(self, caller: Caller, build: Build, asked: BuildAsked, log: BuildLog) -> None:
        reason, step, hint = "the build was stopped", "", None
        made: Build | None = None
        places = self._facade.server.images.builds
        try:
            building = Building(self._templates, caller, build, asked, log)
            async with asyncio.timeout(LONGEST):
                async with waited(places, caller.tenant.name, lambda: log.add(_WAITS)):
                    stepped = await building.build()
                made = await building.finalize(stepped)  # a sandbox like any other: others need not wait for it
        except StepFailed as error:
            reason, step, hint = error.message, error.step, error.hint
        except TimeoutError:
            reason = f"the build took longer than {LONGEST / 3600:g} hours, the limit"
        except SlopletError as error:
            reason = text_of(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            server_log.error("a build of a template failed", exc_info=error)
            reason = "the server failed"
        finally:
            if made is None:
                if hint:
                    log.add(hint, "warn", step)
                log.add(f"Build failed: {reason}", "error", step)
            await asyncio.shield(asyncio.to_thread(self._templates.logs.finish, caller.tenant.home, build.id))
            now = time.time()
            if made is None:
                self._store.change_build(build, status=FAILED, reason=reason, step=step, finished_at=now)
        if made is None:
            await self._templates.sweep(caller.tenant)
        else:
            await self._templates.completed(caller, replace(made, finished_at=now))
