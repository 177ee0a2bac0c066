"""References to images: ``python:3.12-slim``, ``registry.example:5000/team/app@sha256:...``. Pure.

As Docker reads them: without a registry it is Docker Hub's, without a tag ``latest``, one word is ``library/WORD``.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from ..errors import SpecError

HUB = "docker.io"
#: Of sha256 and sha512; nothing else is accepted as the name of content.
DIGEST_RE = re.compile(r"sha256:[0-9a-f]{64}\Z|sha512:[0-9a-f]{128}\Z")
_TAG_RE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_PART_RE = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*\Z")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_RE = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[([0-9A-Fa-f:.]{{2,45}})\])(?::([0-9]{{1,5}}))?\Z")
_FORM = "for example python:3.12-slim, ghcr.io/owner/app:1.2, localhost:5000/app@sha256:..."


@dataclass(frozen=True)
class Reference:
    """Where an image is said to be. ``str`` gives it in full: registry, repository, tag, digest."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.registry}/{self.repository}{tag}{'@' + self.digest if self.digest else ''}"

    @property
    def familiar(self) -> str:
        """As people write it: without what goes without saying."""
        text = str(self)
        if self.registry == HUB:
            text = text.removeprefix(f"{HUB}/").removeprefix("library/")
        return text

    @property
    def asked(self) -> str:
        """What to ask the registry for: the digest, or the tag."""
        return self.digest or self.tag or "latest"

    def with_digest(self, digest: str) -> Reference:
        return replace(self, digest=digest)


def parse(text: str) -> Reference:
    """Raises SpecError."""
    rest, at, digest = text.partition("@")
    if at and not DIGEST_RE.match(digest):
        raise _wrong(text, f"{digest[:80]!r} is no digest (sha256: and 64 hexadecimal digits)")
    rest, tag = _split_tag(rest)
    if tag is not None and not _TAG_RE.match(tag):
        raise _wrong(text, f"{tag[:80]!r} is no tag")
    first, slash, path = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        registry = HUB if first in ("index.docker.io", "registry-1.docker.io") else first
    else:
        registry, path = HUB, rest
    if not is_host(registry):
        raise _wrong(text, f"{registry[:80]!r} is no host")
    if registry == HUB and "/" not in path:
        path = f"library/{path}"
    if len(path) > 255 or not all(map(_PART_RE.match, path.split("/"))):
        why = "names are lower case" if path != path.lower() else f"{path[:80]!r} is no repository"
        raise _wrong(text, why)
    return Reference(registry, path, tag or (None if digest else "latest"), digest or None)


def is_host(text: str) -> bool:
    """Whether it is a name or an address, IPv6 in brackets, with or without a port."""
    match = _HOST_RE.match(text)
    if match is None or int(match[2] or 0) > 65535:
        return False
    try:
        return match[1] is None or bool(ipaddress.IPv6Address(match[1]))
    except ValueError:
        return False


def _split_tag(text: str) -> tuple[str, str | None]:
    before, colon, tag = text.rpartition(":")
    if not colon or "/" in tag or (text.startswith("[") and "/" not in text):
        return text, None
    return before, tag


def _wrong(text: str, why: str) -> SpecError:
    return SpecError(f"{text[:200]!r} is not a reference to an image: {why}", hint=_FORM)
