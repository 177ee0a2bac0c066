"""The config of an image: what it says of how it wants to be run. Pure; every length is bounded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ImageInvalid

MAX_CONFIG = 8 * 2**20
_MOST_ENTRIES = 4096
_MOST_LAYERS = 1024
_MOST_NUMBER = 2**63 - 1  # what Docker, which counts nanoseconds, can hold


@dataclass(frozen=True)
class Healthcheck:
    """How an image says that it can be asked whether it works. Seconds."""

    test: tuple[str, ...] = ()  #: ("NONE",), ("CMD", ...) or ("CMD-SHELL", text)
    interval: float = 30.0
    timeout: float = 30.0
    start_period: float = 0.0
    retries: int = 3


@dataclass(frozen=True)
class ImageConfig:
    """What matters of an image's config, in OCI's words."""

    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()  #: "80/tcp"
    stop_signal: str = ""
    healthcheck: Healthcheck | None = None
    shell: tuple[str, ...] = ()  #: Docker's: what RUN, and CMD as text, run with
    labels: tuple[tuple[str, str], ...] = ()
    on_build: tuple[str, ...] = ()
    architecture: str = ""
    os: str = "linux"
    variant: str = ""
    created: str = ""
    author: str = ""
    diff_ids: tuple[str, ...] = ()  #: digests of the layers' uncompressed tars, the lowest first
    history: tuple[dict[str, Any], ...] = field(default=(), hash=False)

    def changed(self, **values: Any) -> ImageConfig:
        return replace(self, **values)

    @property
    def command(self) -> tuple[str, ...]:
        """What the image runs by itself; empty if it does not say."""
        return (*self.entrypoint, *self.cmd)

    def to_json(self) -> bytes:
        """An OCI image config; equal configs give equal bytes."""
        config: dict[str, Any] = {}
        for key, value in (
            ("User", self.user), ("ExposedPorts", {port: {} for port in self.ports}),
            ("Env", [f"{name}={text}" for name, text in self.env]), ("Entrypoint", list(self.entrypoint)),
            ("Cmd", list(self.cmd)), ("Volumes", {path: {} for path in self.volumes}), ("WorkingDir", self.workdir),
            ("Labels", dict(self.labels)), ("StopSignal", self.stop_signal), ("Shell", list(self.shell)),
            ("OnBuild", list(self.on_build)),
            ("Healthcheck", None if self.healthcheck is None else _health_json(self.healthcheck)),
        ):  # fmt: skip
            if value:
                config[key] = value
        document: dict[str, Any] = {
            "architecture": self.architecture, "os": self.os, "config": config,
            "rootfs": {"type": "layers", "diff_ids": list(self.diff_ids)}, "history": list(self.history),
        }  # fmt: skip
        for name in ("variant", "created", "author"):
            if text := getattr(self, name):
                document[name] = text
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def load_json(data: bytes) -> Any:
    """As strict as other readers of images: UTF-8, whole characters (a lone surrogate can be written nowhere), finite
    numbers. Raises ValueError, RecursionError."""
    text = data.decode()
    document = json.loads(text, parse_constant=_no_number)
    if "\\ud" in text.lower():
        json.dumps(document, ensure_ascii=False).encode()
    return document


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def parse_config(data: bytes) -> ImageConfig:
    """Raises ImageInvalid, and tells what is wrong."""
    if len(data) > MAX_CONFIG:
        raise ImageInvalid(f"the image's config has {len(data)} bytes; at most {MAX_CONFIG} are allowed")
    try:
        document = load_json(data)
    except (ValueError, RecursionError) as error:
        raise ImageInvalid(f"the image's config is no JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise ImageInvalid("the image's config is no JSON object")
    inner = _mapping(document, "config")
    rootfs = _mapping(document, "rootfs")
    return ImageConfig(
        env=tuple(_pair(text) for text in _texts(inner, "Env")),
        user=_text(inner, "User"),
        workdir=_text(inner, "WorkingDir"),
        entrypoint=_texts(inner, "Entrypoint"),
        cmd=_texts(inner, "Cmd"),
        volumes=tuple(sorted(_keys(inner, "Volumes"))),
        ports=tuple(sorted(_keys(inner, "ExposedPorts"))),
        stop_signal=_text(inner, "StopSignal"),
        healthcheck=_health(inner),
        shell=_texts(inner, "Shell"),
        labels=tuple(sorted((key, str(value)) for key, value in _mapping(inner, "Labels").items())),
        on_build=_texts(inner, "OnBuild"),
        architecture=_text(document, "architecture"),
        os=_text(document, "os") or "linux",
        variant=_text(document, "variant"),
        created=_text(document, "created"),
        author=_text(document, "author"),
        diff_ids=_texts(rootfs, "diff_ids", _MOST_LAYERS),
        history=tuple(item for item in _list(document, "history") if isinstance(item, dict)),
    )


def _mapping(above: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = above.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MOST_ENTRIES:
        raise ImageInvalid(f"{key} in the image's config is no object, or has more than {_MOST_ENTRIES} entries")
    return value


def _list(above: Mapping[str, Any], key: str, most: int = _MOST_ENTRIES) -> list[Any]:
    value = above.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise ImageInvalid(f"{key} in the image's config is no list, or has more than {most} entries")
    return value


def _text(above: Mapping[str, Any], key: str) -> str:
    value = above.get(key)
    return "" if value is None else _checked(key, value)


def _texts(above: Mapping[str, Any], key: str, most: int = _MOST_ENTRIES) -> tuple[str, ...]:
    return tuple(_checked(key, value) for value in _list(above, key, most))


def _keys(above: Mapping[str, Any], key: str) -> list[str]:
    return [_checked(key, name) for name in _mapping(above, key)]


def _checked(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ImageInvalid(f"{key} in the image's config holds {str(value)[:80]!r}, which is no text")
    if "\0" in value:
        raise ImageInvalid(f"{key} in the image's config holds a NUL byte")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name:
        raise ImageInvalid(f"Env in the image's config holds {text[:80]!r}, a variable without a name")
    return name, value


def _health(inner: Mapping[str, Any]) -> Healthcheck | None:
    found = _mapping(inner, "Healthcheck")
    test = _texts(found, "Test")
    if not test:
        return None
    default = Healthcheck()
    seconds = {
        name: min(value, _MOST_NUMBER) / 1e9
        if isinstance(value := found.get(key), (int, float)) and value > 0
        else getattr(default, name)
        for name, key in (("interval", "Interval"), ("timeout", "Timeout"), ("start_period", "StartPeriod"))
    }
    retries = found.get("Retries")
    return Healthcheck(test, **seconds, retries=retries if isinstance(retries, int) and retries > 0 else 3)


def _health_json(check: Healthcheck) -> dict[str, Any]:
    default = Healthcheck()
    found: dict[str, Any] = {"Test": list(check.test)}
    for name, key in (("interval", "Interval"), ("timeout", "Timeout"), ("start_period", "StartPeriod")):
        if getattr(check, name) != getattr(default, name):
            found[key] = int(getattr(check, name) * 1e9)
    if check.retries != default.retries:
        found["Retries"] = check.retries
    return found
