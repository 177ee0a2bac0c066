"""cloud-init as a runtime uses it: whether an engine can, and applying it to a sandbox that nobody has yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cloudspec import CloudInitSpec
from ..engines.base import Engine
from ..errors import BuildFailed, SpecError, UnsupportedOperation

if TYPE_CHECKING:
    from ..controller import Stream
    from ..events import EventBus
    from ..live import Live
    from ..wire.fields import Fields
    from .plan import Plan


def check(cloud_init: CloudInitSpec | None, engine: Engine) -> None:
    """Setting up a computer takes root, and users to be told apart. UnsupportedOperation."""
    if cloud_init is not None and not engine.probe().capabilities.users:
        raise UnsupportedOperation(
            f"cloud_init needs root inside, and other users; with {engine.name!r} there is one user here",
            hint="engine='container' and 'gvisor' have them, for root or with subordinate ids: `sloplet doctor`",
        )


async def set_up(live: Live, cloud_init: CloudInitSpec, bus: EventBus) -> None:
    """Apply it, with an event as each of its parts begins."""
    from .apply import apply
    from .config import parse

    if not cloud_init.text:
        raise SpecError("the text of the cloud-init file is not kept", hint="give the file again")

    async def ask(fields: Fields) -> Stream:
        return live.mux.open(fields)

    def tell(module: str) -> None:
        bus.emit(live.info.id, "cloud_init", module=module)

    plan = parse(cloud_init.text)
    try:
        await apply(plan, cloud_init.text, ask, user=live.spec.run_user, tell=tell)
    except BuildFailed as error:
        raise BuildFailed(error.message, hint=error.hint or _refused(live, plan)) from error


def _refused(live: Live, plan: Plan) -> str | None:
    """What the network had to do with it, if it may have."""
    if live.egress is not None:
        denied = live.egress.log.denied_since(0)
        return f"its network's policy refused: {denied[0]}" if denied else None
    return "it has no network: allow=['@package-indexes'] gives it one" if plan.packages is not None else None
