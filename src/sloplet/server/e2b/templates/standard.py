"""The standard templates: images that are built once on this machine, in the operator's home, and linked from there.

Where it can be, code-interpreter-v1 is kept warm: a saved state with a kernel that has imported what everybody does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from .... import recipes
from ....build.events import BuildEvent
from ....errors import ImageNotFound, SlopletError, SnapshotNotFound
from ....images import adopting
from ....images.store import ImageStore, StoredImage
from ...caller import Caller
from ...keys import MAIN
from ...logs import log
from ...served import ACTING
from ..answers import refused
from ..making import Plan, engine_of

if TYPE_CHECKING:
    from ....state.home import Home
    from ...tenants import Tenant
    from ..door import Facade

#: name -> the standard image that it is
STANDARD = {"base": "sloplet/e2b-base", "code-interpreter-v1": "sloplet/e2b-code"}
#: Images of E2B's own that mean the same.
SAME = {"e2bdev/base": "base", "e2bdev/code-interpreter": "code-interpreter-v1"}
_WARM = ("code-interpreter-v1",)
_AGAIN = 3600.0  # seconds until what could not be warmed up is tried again
_PATIENCE = 45.0  # seconds that somebody waits for a build
_CPUS, _MEMORY = 2, "1g"

OnProgress = Callable[[str], None]


class Standard:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._building: dict[str, asyncio.Task[None]] = {}
        self._here: set[tuple[str, str]] = set()  # tenant and image
        self._warming: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._warm: dict[tuple[str, str], str] = {}  # tenant and name -> the saved state
        self._tried: dict[tuple[str, str], float] = {}

    async def plan(self, caller: Caller, name: str, *, fresh: bool = False) -> Plan:
        """refused (503) while it is being built: that takes longer than clients wait for an answer. ``fresh``: not
        from a state that runs already."""
        try:
            image = await asyncio.wait_for(self.image(caller.tenant, name), _PATIENCE)
        except TimeoutError:
            raise refused(503, f"the template '{name}' is being built, which takes minutes, once: try again") from None
        plan = Plan(name, alias=name, image=image, home="/home/user", workdir="/home/user")
        if fresh or name not in _WARM or await engine_of(self._facade, caller) != "gvisor":
            return plan
        warm = await self._warmed(caller, name)
        return plan if not warm else Plan(name, alias=name, snapshot=warm, home="/home/user", workdir="/home/user")

    async def image(self, tenant: Tenant, name: str, on_progress: OnProgress | None = None) -> str:
        """The image of a standard template, in this tenant's store and unpacked: found, linked, or built first. Whoever
        comes while it is built waits for the same build."""
        image = STANDARD[name]
        if (tenant.name, image) in self._here:
            return image
        if not await asyncio.to_thread(_lay_out, tenant.home, image):
            await self._build(image, on_progress)
            if not await asyncio.to_thread(_lay_out, tenant.home, image):
                raise ImageNotFound(f"{image} was built, and is not there", hint="is it being removed?")
        self._here.add((tenant.name, image))
        return image

    async def prepare(self, names: Iterable[str], on_progress: OnProgress | None = None) -> None:
        """Before anybody asks for them."""
        for name in names:
            await self.image(self._facade.server.tenants.get(MAIN), name, on_progress)

    async def aclose(self) -> None:
        tasks = [*self._building.values(), *self._warming.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- building ----------------------------------------------------------------------

    async def _build(self, image: str, on_progress: OnProgress | None) -> None:
        task = self._building.get(image)
        if task is None:
            task = self._building[image] = asyncio.ensure_future(self._built(image, on_progress))
            task.add_done_callback(lambda _: self._building.pop(image, None))
        await asyncio.shield(task)

    async def _built(self, image: str, on_progress: OnProgress | None) -> None:
        """In the operator's home and on his behalf: the recipe is ours, and all tenants have it then."""
        ACTING.set(None)
        main = self._facade.server.tenants.get(MAIN)
        log.info("building %s, which takes minutes, once", image)

        def tell(event: BuildEvent) -> None:
            if event.kind == "begin":
                line = f"{image} [{event.step}/{event.total}] {event.text.splitlines()[0][:200] if event.text else ''}"
                log.info("%s", line)
                if on_progress is not None:
                    on_progress(line)

        await recipes.build(image, on_event=tell, home=main.home, controller=main.embedded)
        log.info("built %s", image)

    # -- warm --------------------------------------------------------------------------

    async def _warmed(self, caller: Caller, name: str) -> str:
        """The saved state, "" while there is none; then one is made meanwhile."""
        at = (caller.tenant.name, name)
        if found := self._warm.get(at):
            try:
                await caller.tenant.controller.find_snapshot(found)
                return found
            except SnapshotNotFound:
                del self._warm[at]
        now = asyncio.get_running_loop().time()
        if at not in self._warming and now - self._tried.get(at, -_AGAIN) >= _AGAIN:
            self._tried[at] = now
            task = self._warming[at] = asyncio.ensure_future(self._make_warm(caller, name))
            task.add_done_callback(lambda _: self._warming.pop(at, None))
        return ""

    async def forget_warm(self, caller: Caller, name: str) -> None:
        """It is of no use: whoever comes next has another made."""
        at = (caller.tenant.name, name)
        found = self._warm.pop(at, None)
        self._tried.pop(at, None)
        if found is not None:
            with suppress(SlopletError):
                await caller.tenant.controller.delete_snapshot(found, force=True)

    async def _make_warm(self, caller: Caller, name: str) -> None:
        image, controller = STANDARD[name], caller.tenant.controller
        try:
            try:
                found = await controller.find_snapshot(recipes.template_name(image))
                here = await asyncio.to_thread(_find, caller.tenant.home, image)
                fits = found.role == "template" and found.spec.image == image and found.kind == "live"
                usable = fits and here is not None and here.created_at <= found.created_at  # else it is of an older one
            except SnapshotNotFound:
                usable = False
            if not usable:
                found = await recipes.warm(image, controller, cpus=_CPUS, memory=_MEMORY, allow_weaker=True)
            self._warm[caller.tenant.name, name] = found.id
        except SlopletError as error:
            log.warning("%s could not be warmed up: %s", image, error)


def _find(home: Home, image: str) -> StoredImage | None:
    store = ImageStore(home.open())
    try:
        return adopting.find(store, image)
    except ImageNotFound:
        return None
    finally:
        store.close()


def _lay_out(home: Home, image: str) -> bool:
    """Whether it is here. Then it is unpacked, too: the first sandbox need not do that, which can take as long as its
    client waits."""
    store = ImageStore(home.open())
    try:
        store.resolve(adopting.find(store, image)).close()
        return True
    except ImageNotFound:
        return False
    finally:
        store.close()
