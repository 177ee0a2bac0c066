"""What a sandbox with a network needs at its start: variables, an agent that serves it, and trust in its authority."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .errors import SlopletError, StartFailed
from .wire.fields import Fields
from .wire.schema import Feature, Tag

if TYPE_CHECKING:
    from .controller import Stream
    from .live import Live
    from .network.egress import Egress


def environment(egress: Egress | None, *, single_user: bool) -> dict[str, str]:
    """Variables that a sandbox has besides its own: placeholders, and where the certificates are."""
    if egress is None:
        return {}
    found: dict[str, str] = {}
    if egress.inspection is not None:
        from .network.trust import env

        found.update(env(single_user=single_user))
    if egress.secrets is not None:
        found.update(egress.secrets.placeholders)
    return found


def check_served(egress: Egress | None, answer: Fields) -> None:
    """A sandbox that was to have a network has one, or does not start."""
    if egress is not None and not answer.integer(Tag.FEATURES, 0) & Feature.EGRESS:
        raise StartFailed(
            "the sandbox's network could not be set up: its agent serves no connections",
            hint="network='none' needs none; `sloplet doctor` tells which engines can",
        )


async def furnish(live: Live, timeout: float, *, again: bool) -> None:
    """Before the sandbox is handed out: its programs trust what opens their TLS. StartFailed.

    ``again``: that was done before its state was saved. What is in the way of it now was put there inside: it must not
    keep a sandbox from waking, which is as safe as before and trusted less. ``live.distrust`` tells.
    """
    egress = live.egress
    if egress is None or egress.inspection is None:
        return
    from .network.trust import install

    async def ask(fields: Fields) -> Stream:
        return live.mux.open(fields)

    try:
        async with asyncio.timeout(timeout):
            await install(ask, egress.inspection.authority.ca_pem, single_user=live.instance.hello.no_users)
        return
    except TimeoutError:
        failed = StartFailed(
            f"the sandbox's CA could not be installed within {timeout:g} s: its agent does not answer",
            hint="is the machine overloaded?",
        )
    except StartFailed as error:
        failed = error
    if not again or not await _answers(live, timeout):
        raise failed
    live.distrust = failed.message


async def _answers(live: Live, timeout: float) -> bool:
    """Whether it is only its files that are in the way: one that is gone, or stuck, has not woken."""
    try:
        async with asyncio.timeout(timeout):
            await live.mux.answers()
    except (TimeoutError, SlopletError):
        return False
    return True
