"""Network policies as files: TOML or JSON with the arguments of ``Network``, strictly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import SpecError

if TYPE_CHECKING:
    from ..netspec import NetworkSpec

_MOST = 2**20
_HINT = 'a TOML or JSON file with the keys of Network(), for example allow = ["pypi.org"]'


def read_policy(path: str) -> dict[str, Any]:
    """What the file says; its keys and values are judged by ``Network``."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST + 1)
    except OSError as error:
        raise SpecError(f"the policy {path[:200]!r} cannot be read: {error.strerror}", hint=_HINT) from None
    if len(raw) > _MOST:
        raise SpecError(f"the policy {path[:200]!r} is longer than 1 MiB", hint=_HINT)
    try:
        found = _parse(raw.decode(), path)
    except ValueError as error:
        raise SpecError(f"the policy {path[:200]!r} is not understood: {error}", hint=_HINT) from None
    except RecursionError:
        raise SpecError(f"the policy {path[:200]!r} is not understood: it is nested too deep", hint=_HINT) from None
    if not isinstance(found, dict):
        raise SpecError(f"the policy {path[:200]!r} is not a table of settings", hint=_HINT)
    if not isinstance(found.get("ask", False), bool):  # whom to ask cannot stand in a file, only whether
        raise SpecError(f"the policy {path[:200]!r}: ask={str(found['ask'])[:80]!r} is neither true nor false")
    return found


def _parse(text: str, path: str) -> Any:
    if path.lower().endswith(".json"):
        return json.loads(text, object_pairs_hook=_once)
    if not path.lower().endswith(".toml"):
        raise ValueError("its name ends neither in .toml nor in .json")
    import tomllib

    return tomllib.loads(text)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """As TOML has it: a key that comes twice is a slip, and which of the two is meant nobody knows."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:80]!r} is there twice")
        found[key] = value
    return found


def policy_settings(spec: NetworkSpec) -> dict[str, Any]:
    """The arguments of ``Network`` that make this spec, without those that are as they would be anyway."""
    from ..netspec import NetworkSpec

    default = NetworkSpec(mode="rules").to_dict()
    found: dict[str, Any] = {"allow": list(spec.allow)}  # also if it is empty: nothing is allowed
    for key, value in spec.to_dict().items():
        if key not in ("mode", "asks", "allow") and value != default[key]:
            found[key] = value
    if spec.asks:
        found["ask"] = True
    if spec.mode == "learn":
        found["learn"] = True
    return found


def to_toml(settings: dict[str, Any]) -> str:
    """Settings as ``read_policy`` takes them, a rule a line."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, list):
            lines.append(
                f"{key} = [" + "".join(f"\n    {json.dumps(item)}," for item in value) + ("\n]" if value else "]")
            )
        elif isinstance(value, dict):
            inner = ", ".join(f"{json.dumps(name)} = {json.dumps(item)}" for name, item in value.items())
            lines.append(f"{key} = {{ {inner} }}")
        else:
            lines.append(f"{key} = {json.dumps(value)}")  # JSON's texts, numbers and true are TOML's
    return "\n".join(lines) + "\n"


def check_target(path: str) -> None:
    """SpecError if a policy cannot be written there: to be known before there is one to lose."""
    _check_name(path)
    _write(path, "", os.unlink)


def _check_name(path: str) -> None:
    if not path.lower().endswith((".toml", ".json")):
        raise SpecError(f"the policy {path[:200]!r} has no name that says what it is", hint="end it in .toml or .json")
    if os.path.isdir(path):
        raise SpecError(f"the policy {path[:200]!r} cannot be written: it is a folder")


def write_policy(path: str, settings: dict[str, Any]) -> None:
    """By the file's name as TOML or JSON; whole or not at all."""
    _check_name(path)
    text = json.dumps(settings, indent=2) + "\n" if path.lower().endswith(".json") else to_toml(settings)
    _write(path, text, lambda passing: os.replace(passing, path))


def _write(path: str, text: str, publish: Callable[[str], None]) -> None:
    """``publish`` gets a file with the text, in the folder of ``path``; nothing else stays of it."""
    passing = f"{path}.{os.getpid()}.part"
    try:
        with open(passing, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
                publish(passing)
            except BaseException:
                with suppress(OSError):
                    os.unlink(passing)
                raise
    except OSError as error:
        raise SpecError(f"the policy {path[:200]!r} cannot be written: {error.strerror}") from None
