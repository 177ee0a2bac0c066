"""Host names as policy sees them: lower case, A-labels, no trailing dot, never something that is an address."""

from __future__ import annotations

import re

from ..errors import SpecError

#: The host's own loopback, if a rule names it with a port.
HOST = "host.sloplet"

_LABEL_RE = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NAME_RE = re.compile(
    r"(?!.{254})(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z"
)
_NUMBER_RE = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_DOTS_RE = re.compile("[.。．｡]")
#: IDNA 2003 and 2008 make different names of these.
_DEVIATIONS = "ßς\u200c\u200d"


class BadName(ValueError):
    """That is no host name."""


def normal(text: str) -> str:
    """The one spelling of a name that came over the wire. BadName if it is none (or is a number: an address)."""
    name = text.lower() if text.isascii() else text
    if name.endswith("."):
        name = name[:-1]
    if not _NAME_RE.match(name):
        raise BadName(f"{shown(text)} is not a host name")
    if is_number(name):
        raise BadName(f"{shown(text)} is a number, not a host name")
    return name


def is_number(name: str) -> bool:
    """Does its last label make it an address (or nothing at all), in any notation that resolvers know?"""
    last = name.rpartition(".")[2]
    return last[:1].isdecimal() and _NUMBER_RE.match(last) is not None


def from_user(text: str) -> str:
    """The one spelling of a name that a person wrote: as ``normal``, and letters beyond ASCII become A-labels."""
    if not text.isascii():
        text = ".".join(_a_label(label, text) for label in _DOTS_RE.split(text))
    return normal(text)


def _a_label(label: str, whole: str) -> str:
    if label.isascii():
        return label
    if any(char in label for char in _DEVIATIONS):
        raise BadName(f"{shown(whole)} has two spellings in DNS: write the one that begins with xn--")
    try:
        return label.encode("idna").decode("ascii")
    except UnicodeError:
        raise BadName(f"{shown(whole)} is not a host name") from None


def is_loopback(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def is_own(name: str) -> bool:
    """Names that no server of the world answers for."""
    return name == "sloplet" or name.endswith(".sloplet")


def shown(text: str) -> str:
    """A name from anywhere, in a form that is safe to print."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def check_link(name: object) -> str:
    """What another sandbox is called inside."""
    hint = "a short host name, for example 'db'"
    try:
        label = from_user(name) if isinstance(name, str) else ""
    except BadName as error:
        raise SpecError(f"the link {shown(str(name))}: {error}", hint=hint) from None
    if not label or is_loopback(label) or label == HOST:
        raise SpecError(f"{shown(str(name))} cannot be the name of a link", hint=hint)
    return label
