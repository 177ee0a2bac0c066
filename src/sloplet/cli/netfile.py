"""Network policies as files: TOML or JSON with the arguments of ``Network``, strictly."""

from __future__ import annotations

import json
import os
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
    if not isinstance(found, dict):
        raise SpecError(f"the policy {path[:200]!r} is not a table of settings", hint=_HINT)
    return found


def _parse(text: str, path: str) -> Any:
    if path.lower().endswith(".json"):
        return json.loads(text)
    if not path.lower().endswith(".toml"):
        raise ValueError("its name ends neither in .toml nor in .json")
    import tomllib

    return tomllib.loads(text)


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
        else:
            lines.append(f"{key} = {json.dumps(value)}")  # JSON's texts, numbers and true are TOML's
    return "\n".join(lines) + "\n"


def write_policy(path: str, settings: dict[str, Any]) -> None:
    """By the file's name as TOML or JSON; whole or not at all."""
    if not path.lower().endswith((".toml", ".json")):
        raise SpecError(f"the policy {path[:200]!r} has no name that says what it is", hint="end it in .toml or .json")
    text = json.dumps(settings, indent=2) + "\n" if path.lower().endswith(".json") else to_toml(settings)
    passing = f"{path}.{os.getpid()}.part"
    try:
        with open(passing, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(passing, path)
    except OSError as error:
        raise SpecError(f"the policy {path[:200]!r} cannot be written: {error.strerror}") from None
