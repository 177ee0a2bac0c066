"""From what a caller gives as ``cloud_init`` to what the spec has of it. Everything wrong in the file is told here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..cloudspec import MAX_TEXT, CloudInitSpec, too_long
from ..errors import SpecError
from .config import parse


@dataclass(frozen=True)
class Asked:
    spec: CloudInitSpec
    env: dict[str, str]
    hostname: str | None


def asked(source: str | os.PathLike[str]) -> Asked:
    """A file's path, or its text itself (which begins with ``#cloud-config``). RecipeInvalid, SpecError."""
    given = isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("#cloud-config")
    text = str(source) if given else _read(source)
    spec = CloudInitSpec.of(text)
    plan = parse(text)
    return Asked(spec, plan.env, plan.hostname)


def _read(source: object) -> str:
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source) or "\0" in str(source):
        raise SpecError(f"cloud_init={str(source)[:80]!r} is not a file", hint="the path of a #cloud-config file")
    path = os.fspath(source)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise SpecError(
            f"cloud_init: {path}: {error.strerror}", hint="name a #cloud-config file that can be read"
        ) from None
    if len(data) > MAX_TEXT:
        raise too_long()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError(f"cloud_init: {path} is not text in UTF-8") from None
