"""What the sandboxes of an MCP session are like, as whoever configures the client says in the URL:
``/mcp?image=python:3.12-slim&allow=pypi.org``. The model never sees it. The tenant's controller checks it as it does
every other request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from pydantic import ValidationError

from ..errors import RequestInvalid, SpecError
from ..mcp.policy import DEFAULT_MAX_OUTPUT, DEFAULT_MAX_SANDBOXES, DEFAULT_MAX_TIMEOUT, DEFAULT_TIMEOUT, Policy
from ..quantities import parse_duration
from ..spec import SandboxSpec, check_name
from .asked import SandboxCreate

DEFAULT_IDLE = 1800.0  #: seconds without a request after which a session ends
MAX_IDLE = 86_400.0
MAX_QUERY = 16_384
_TEXTS = ("image", "engine", "at_least", "memory", "disk", "ttl", "workdir", "user", "template")
_NUMBERS = {"cpus": float, "pids": int, "open_files": int}
_LISTS = ("allow", "deny", "passthrough")
_OWN = ("network", "sudo", "env", "volume", "sandbox", "keep", "session", "idle", "max_sandboxes", "max_output",
        "timeout", "max_timeout", "label")  # fmt: skip
KNOWN = frozenset((*_TEXTS, *_NUMBERS, *_LISTS, *_OWN))
_MANY = frozenset((*_LISTS, "env", "volume", "label"))
_YES, _NO = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True)
class SessionAsked:
    """``spec`` is without a name. ``said``: whether the URL says anything of what the sandbox is."""

    spec: SandboxSpec
    policy: Policy
    sandbox: str | None = None  #: the session's own is this named one
    keep: bool = False
    session: str | None = None  #: which session, for a protocol that has none
    idle: float = DEFAULT_IDLE
    said: bool = False


def session_asked(query: str) -> SessionAsked:
    """RequestInvalid and SpecError for what makes no sense; what is not known is refused, not ignored."""
    if len(query) > MAX_QUERY:
        raise RequestInvalid(f"the query is longer than {MAX_QUERY} characters")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=200)
    except ValueError:
        raise RequestInvalid("the query cannot be read", hint="for example /mcp?image=debian:12&memory=1g") from None
    given = _grouped(pairs)
    one = {name: values[0] for name, values in given.items() if name not in _MANY}
    asked = _create(given, one)
    return SessionAsked(
        spec=asked.spec(),
        policy=Policy(
            max_sandboxes=_number("max_sandboxes", one.get("max_sandboxes"), DEFAULT_MAX_SANDBOXES),
            max_output=_number("max_output", one.get("max_output"), DEFAULT_MAX_OUTPUT),
            timeout=_seconds("timeout", one.get("timeout"), DEFAULT_TIMEOUT),
            max_timeout=_seconds("max_timeout", one.get("max_timeout"), DEFAULT_MAX_TIMEOUT),
        ),
        sandbox=None if "sandbox" not in one else check_name(one["sandbox"]),
        keep=_flag("keep", one.get("keep")) or False,
        session=None if "session" not in one else check_name(one["session"]),
        idle=min(MAX_IDLE, _seconds("idle", one.get("idle"), DEFAULT_IDLE)),
        said=any(name not in ("session", "sandbox", "keep", "idle", "max_sandboxes", "max_output", "timeout",
                              "max_timeout") for name in given),
    )  # fmt: skip


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        if name not in KNOWN:
            raise RequestInvalid(f"/mcp has no setting {name[:40]!r}", hint=f"it has {', '.join(sorted(KNOWN))}")
        found.setdefault(name, []).append(value)
    for name, values in found.items():
        if name not in _MANY and len(values) > 1:
            raise RequestInvalid(f"{name} is there {len(values)} times", hint="leave all but one")
    return found


def _create(given: dict[str, list[str]], one: dict[str, str]) -> SandboxCreate:
    values: dict[str, Any] = {name: one[name] for name in _TEXTS if name in one}
    for name, kind in _NUMBERS.items():
        if name in one:
            values[name] = _parsed(name, one[name], kind)
    if "sudo" in one:
        values["sudo"] = _flag("sudo", one["sudo"])
    values["env"] = dict(_pair("env", text) for text in given.get("env", ()))
    values["volumes"] = dict(_volume(text) for text in given.get("volume", ()))
    if "label" in given:
        values["labels"] = dict(_pair("label", text) for text in given["label"])
    network = _network(given, one)
    if network is not None:
        values["network"] = network
    try:
        return SandboxCreate.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        raise RequestInvalid(f"{where}: {first['msg']}"[:300], hint="see docs/mcp.md") from None


def _network(given: dict[str, list[str]], one: dict[str, str]) -> Any:
    rules = {name: given[name] for name in _LISTS if name in given}
    named = one.get("network")
    if named not in (None, "none", "learn"):
        raise RequestInvalid(f"network={named[:40]!r} is not one", hint="none or learn; allow=HOST names hosts")
    if named == "none" and rules:
        raise RequestInvalid(f"network=none and {min(rules)} contradict each other", hint="leave one of them")
    if named == "none" or (named is None and not rules):
        return named
    return {**rules, "learn": named == "learn"}


def _pair(what: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise RequestInvalid(f"{what}={text[:40]!r} is not NAME=VALUE")
    return name, value


def _volume(text: str) -> tuple[str, dict[str, Any]]:
    """``SRC:DST[:HOW]``, as the CLI has it."""
    source, _, rest = text.partition(":")
    path, _, how = rest.partition(":")
    if not source or not path or how not in ("", "ro", "rw", "copy", "shared"):
        raise RequestInvalid(f"volume={text[:80]!r} is not a volume", hint="SRC:DST, or SRC:DST:ro (rw, copy, shared)")
    mode = how if how in ("ro", "rw", "copy") else None
    return path, {"source": source, "mode": mode, "shared": how == "shared"}


def _flag(what: str, text: str | None) -> bool | None:
    if text is None:
        return None
    if text.casefold() not in (*_YES, *_NO):
        raise RequestInvalid(f"{what}={text[:40]!r} is neither true nor false")
    return text.casefold() in _YES


def _number(what: str, text: str | None, default: int) -> int:
    return default if text is None else int(_parsed(what, text, int))


def _seconds(what: str, text: str | None, default: float) -> float:
    return default if text is None else parse_duration(text, what)


def _parsed(what: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except (ValueError, OverflowError):
        raise SpecError(f"{what}={text[:40]!r} is not a number") from None
