"""The standard images: recipes that are built on the user's own machine, from Debian packages, PyPI and npm.

``sloplet image build sloplet/base`` builds one. Each module here is one recipe, short enough to be copied and changed:
``image()`` is what is built, ``NEEDS`` the recipe below it, ``WARM`` what its kernel runs before a template is saved.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ImageNotFound, KernelError, SnapshotExists, SnapshotNotFound, SpecError
from ..images.standard import STANDARD

if TYPE_CHECKING:
    from ..build.events import OnBuildEvent
    from ..controller import Controller, Snapshot
    from ..images.store import StoredImage
    from ..state.home import Home


def recipe(name: str) -> ModuleType:
    if name not in STANDARD:
        raise ImageNotFound(f"there is no standard image {name[:80]!r}", hint=f"there are {', '.join(STANDARD)}")
    return importlib.import_module(f".{STANDARD[name]}", __name__)


async def build(
    name: str,
    tags: Sequence[str] = (),
    *,
    no_cache: bool = False,
    on_event: OnBuildEvent | None = None,
    engine: str = "auto",
    home: Home | None = None,
    controller: Controller | None = None,
    **limits: Any,
) -> StoredImage:
    """Build a standard image and those below it, or find them built. It is called ``name``, and ``tags``. ``home``,
    ``controller``: where, and by whose sandboxes, if not this user's own."""
    found = recipe(name)
    options: dict[str, Any] = {
        "no_cache": no_cache, "on_event": on_event, "engine": engine, "home": home, "controller": controller, **limits,
    }  # fmt: skip
    if needs := getattr(found, "NEEDS", None):
        await build(needs, **options)
    image: StoredImage = await found.image().build_async([name, *tags], server="", **options)
    return image


def template_name(name: str) -> str:
    """What the warm template of an image is called."""
    return name.replace("/", "-")


async def warm(name: str, controller: Controller, *, template: str | None = None, **limits: Any) -> Snapshot:
    """A live template of a standard image: started, with a Python kernel that has imported what everybody imports. One
    of that name is replaced if it is of that image, else SnapshotExists. ImageNotFound where the image is not built."""
    from ..code.cell import Wishes
    from ..netspec import Network
    from ..sandbox import AsyncSandbox

    code = getattr(recipe(name), "WARM", None)
    if code is None:
        raise SpecError(f"{name} has nothing to warm up", hint="`sloplet image warm sloplet/code`")
    called = template or template_name(name)
    old = await _template(controller, called)
    if old is not None and (old.role != "template" or old.spec.image != name):
        raise SnapshotExists(f"there is another {called!r}, which is not of {name}", hint="--template names another")
    # With a network that reaches nothing: who starts from the template may then ask for one that does.
    box = AsyncSandbox(image=name, engine="gvisor", network=Network(), controller=controller, **limits)
    async with box:
        kernel = await box._kernels.kernel("python", None)
        result = await box._cell(kernel, code, Wishes(300, silent=True))  # the first cell of who starts from it is his
        if result.error is not None:
            raise KernelError(f"{name} could not be warmed up: {result.error.name}: {result.error.message}")
        if old is not None:
            await controller.delete_snapshot(old.id, force=True)
        return await box.template(called)


async def _template(controller: Controller, name: str) -> Snapshot | None:
    try:
        return await controller.find_snapshot(name)
    except SnapshotNotFound:
        return None
