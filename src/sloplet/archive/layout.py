"""What an archive is made of: a mark, one zstd frame around a tar, a digest of all before it. Pure.

The mark and the digest are skippable frames of zstd's own format, so ``zstd -d`` and ``tar`` read an archive too. The
tar's first member is the manifest, which names every other with its size and digest, in the order they come in.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..engines.base import StateFormat
from ..errors import SlopletError, SnapshotDamaged, SnapshotIncompatible
from ..images.config import MAX_CONFIG, parse_config
from ..spec import NAME_RE as SANDBOX_RE
from ..spec import Limits, SandboxSpec
from ..state.layout import MANIFEST, NAME_RE, OBJECT_RE
from ..state.layout import VERSION as STATE_VERSION
from ..volumespec import check_volumes, left_behind

VERSION = 1
_SKIPPABLE = struct.Struct("<II")  # zstd: magic 0x184D2A50 to 5F, length of what follows
_MAGIC = 0x184D2A5A
_MARK_RE = re.compile(rb"sloplet archive (\d{1,9})\n\Z")
MARK_BYTES = _SKIPPABLE.size + len(b"sloplet archive 1\n")
TRAILER_BYTES = _SKIPPABLE.size + 32
MANIFEST_MEMBER = "manifest.json"
IMAGE_MEMBER = "image.tar"
STATE_PREFIX = "state/"
MOST_MANIFEST = 64 << 20
_DIGEST_RE = re.compile(r"[0-9a-f]{64}\Z")
_AUTHORITY_RE = re.compile(r"[0-9a-z]{0,64}\Z")
_MOST = 2**60
DAMAGED_HINT = "export the sandbox again, or copy the file again"


def mark(version: int = VERSION) -> bytes:
    """How every archive begins."""
    text = b"sloplet archive %d\n" % version
    return _SKIPPABLE.pack(_MAGIC, len(text)) + text


def trailer(digest: bytes) -> bytes:
    """How every archive ends: the sha256 of all before it."""
    return _SKIPPABLE.pack(_MAGIC, len(digest)) + digest


def check_mark(data: bytes, shown: str) -> None:
    """SnapshotDamaged if that is not how an archive begins, SnapshotIncompatible if it is one of another version."""
    if len(data) == MARK_BYTES and _SKIPPABLE.unpack_from(data)[0] == _MAGIC:
        found = _MARK_RE.match(data[_SKIPPABLE.size :])
        if found and int(found[1]) == VERSION and data == mark():
            return
        if data[_SKIPPABLE.size :].startswith(b"sloplet archive "):
            version = data[_SKIPPABLE.size + 16 :].split(b"\n")[0][:20].decode("ascii", "replace")
            raise SnapshotIncompatible(
                f"{shown} is an archive of version {version!r}; this sloplet knows {VERSION}",
                hint="use the version of sloplet that wrote it, or a newer one",
            )
    raise SnapshotDamaged(f"{shown} is not an archive of a sandbox", hint="name a file that `sloplet export` wrote")


@dataclass(frozen=True)
class Member:
    """A file in the archive, its manifest not among them."""

    name: str
    bytes: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class ImageFacts:
    """What the sandbox's root is made of. ``key``: the folder it has in images/, where it came from a tar;
    ``content``: the digest of the tar that ``rootfs`` makes of it, which is a member if the image is included."""

    kind: str  #: host, rootfs
    reference: str  #: what the user wrote
    host: str = ""  #: fingerprint of the machine's own programs (kind host)
    key: str = ""
    content: str = ""
    owners: bool = False
    config: str = ""  #: what the image says of how it wants to be run, as OCI has it

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "reference": self.reference, "host": self.host, "key": self.key,
            "content": self.content, "owners": self.owners, "config": self.config,
        }  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The first member: enough to refuse an archive before the rest of it is read."""

    kind: str  #: live, disk
    engine: str
    spec: SandboxSpec
    format: StateFormat
    image: ImageFacts
    state: tuple[Member, ...]
    packed: Member | None  #: the image, if it is included
    extra: dict[str, Any]
    created_at: float
    sandbox: str  #: the id that it had
    sloplet: str

    @property
    def members(self) -> tuple[Member, ...]:
        """All but the manifest, in the order they come in."""
        state = tuple(replace(member, name=STATE_PREFIX + member.name) for member in self.state)
        return state if self.packed is None else (*state, self.packed)

    @property
    def total(self) -> int:
        return sum(member.bytes for member in self.members)

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "version": VERSION, "state_version": STATE_VERSION, "sloplet": self.sloplet, "kind": self.kind,
                "engine": self.engine, "sandbox": self.sandbox, "created_at": self.created_at,
                "spec": self.spec.to_dict(), "format": self.format.to_dict(), "image": self.image.to_dict(),
                "state": [member.to_dict() for member in self.state],
                "packed": None if self.packed is None else self.packed.to_dict(), "extra": self.extra,
            },
            indent=1,
        ).encode("ascii")  # fmt: skip


def parse(data: bytes) -> Manifest:
    """What an archive says of itself, every field checked: it may come from anybody. SnapshotDamaged,
    SnapshotIncompatible."""
    try:
        raw = json.loads(data)
        if raw["version"] != VERSION or raw["state_version"] != STATE_VERSION:
            raise SnapshotIncompatible(
                f"the archive has layout {str(raw['version'])[:20]}, {str(raw['state_version'])[:20]}; "
                f"this sloplet knows {VERSION}, {STATE_VERSION}",
                hint=f"it was written by sloplet {str(raw['sloplet'])[:40]}: use that version",
            )
        return _manifest(raw)
    except (SnapshotIncompatible, SnapshotDamaged):
        raise
    except (ValueError, TypeError, KeyError, AttributeError, LookupError, RecursionError, SlopletError) as error:
        text = error.message if isinstance(error, SlopletError) else f"{type(error).__name__}: {error}"
        raise damaged(f"its manifest makes no sense ({text[:200]})") from error


def damaged(what: str) -> SnapshotDamaged:
    return SnapshotDamaged(f"the archive is damaged: {what}", hint=DAMAGED_HINT)


def _manifest(raw: Mapping[str, Any]) -> Manifest:
    if raw["kind"] not in ("live", "disk"):
        raise ValueError(f"kind {raw['kind']!r}")
    state = tuple(_member(item) for item in _list(raw["state"]))
    names = [member.name for member in state]
    if len(set(names)) != len(names):
        raise damaged("its manifest names a file twice")
    for member in state:
        if not NAME_RE.match(member.name) or member.name == MANIFEST:
            raise damaged(f"a state cannot hold a file named {member.name[:80]!r}")
        if (named := OBJECT_RE.match(member.name)) and named[1] != member.sha256:
            raise damaged(f"{member.name} is not named by its content")
    packed = None if raw["packed"] is None else _member(raw["packed"])
    image = _image(raw["image"])
    if packed is not None and (packed.name != IMAGE_MEMBER or image.kind != "rootfs" or packed.sha256 != image.content):
        raise damaged("its image is not the one that its manifest speaks of")
    extra = raw["extra"]
    if not isinstance(extra, dict):
        raise TypeError("extra is no object")
    return Manifest(
        kind=raw["kind"],
        engine=_text(raw["engine"], 64),
        spec=checked_spec(raw["spec"]),
        format=_format(raw["format"]),
        image=image,
        state=state,
        packed=packed,
        extra=extra,
        created_at=float(raw["created_at"]),
        sandbox=_text(raw["sandbox"], 64),
        sloplet=_text(raw["sloplet"], 64),
    )


def _member(raw: Mapping[str, Any]) -> Member:
    size = raw["bytes"]
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _MOST:
        raise ValueError(f"a size of {str(size)[:40]}")
    return Member(_text(raw["name"], 256), size, _digest(raw["sha256"]))


def _image(raw: Mapping[str, Any]) -> ImageFacts:
    if raw["kind"] not in ("host", "rootfs"):
        raise ValueError(f"an image of kind {str(raw['kind'])[:40]!r}")
    digests = {name: _digest(raw[name]) if raw[name] else "" for name in ("host", "key", "content")}
    if raw["kind"] == "rootfs" and not (digests["key"] or digests["content"]):
        raise ValueError("an image without a digest")
    config = _text(raw["config"], MAX_CONFIG) if raw.get("config") else ""  # before there were such images
    if config:
        parse_config(config.encode())
    return ImageFacts(raw["kind"], _text(raw["reference"], 4096), **digests, owners=bool(raw["owners"]), config=config)


def _format(raw: Mapping[str, Any]) -> StateFormat:
    values = {name: str(raw[name]) for name in ("engine", "version", "platform", "arch")}
    return StateFormat(**values, cpu=tuple(str(flag) for flag in _list(raw["cpu"])))


def checked_spec(raw: Mapping[str, Any]) -> SandboxSpec:
    """A spec from elsewhere, through the same checks as a user's own settings. What it came from is not known here:
    its ``template`` is dropped. SpecError, ValueError and their like."""
    asked = SandboxSpec.from_dict(raw)
    limits = asked.limits
    values = {name: getattr(limits, name) for name in ("cpus", "memory", "disk", "pids", "open_files")}
    if not limits.explicit <= set(values):
        raise ValueError("an unknown limit")
    if asked.hostname is not None and not SANDBOX_RE.match(asked.hostname):
        raise ValueError("an impossible host name")
    if not _AUTHORITY_RE.match(asked.authority):
        raise ValueError("an impossible authority")
    made = SandboxSpec.make(
        asked.name, image=asked.image, engine=asked.engine, at_least=asked.at_least, **values, ttl=asked.ttl,
        on_ttl=asked.on_ttl,
        network=asked.network, env=dict(asked.env), workdir=asked.workdir, user=asked.user, sudo=asked.sudo,
        allow_weaker=asked.allow_weaker, idle=asked.idle, undo=asked.undo, checkpoint_every=asked.checkpoint_every,
        pool=asked.pool, secrets=asked.secrets, ports=asked.ports, links=asked.links,
        labels=dict(asked.labels),
    )  # fmt: skip
    exact = Limits(**{name: getattr(made.limits, name) for name in values}, explicit=limits.explicit)
    volumes = check_volumes(left_behind(asked.volumes, live=True))  # which folders it may see is not for it to say
    return replace(made, limits=exact, hostname=asked.hostname, authority=asked.authority, volumes=volumes)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _text(value: object, most: int) -> str:
    if not isinstance(value, str) or not value or len(value) > most or not value.isprintable():
        raise ValueError(f"{str(value)[:40]!r} is no text for that")
    return value


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _DIGEST_RE.match(value):
        raise ValueError(f"{str(value)[:80]!r} is no digest")
    return value
