"""What was asked for of volumes: frozen, validated values that go to JSON and back without loss.

A word is a named volume (``sloplet volume``), something with a ``/`` or a ``.`` is a folder of this machine. A folder's
path is made absolute here, where the caller's working directory is known; it is opened once, when the sandbox starts.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidName, SpecError

MODES = ("ro", "rw", "copy")
MOST = 16  #: volumes of one sandbox
NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
_NAME_HINT = "use 1 to 63 letters, digits, '_' or '-', beginning with a letter or digit"
_FORMS = "write {'/data': 'cache'} for a named volume, {'/src': './repo'} for a folder of this machine"
#: What the sandbox's own life depends on: these paths as they are, and those with all that is below them.
_EXACTLY = frozenset({"/", "/etc", "/run"})
_TREES = ("/proc", "/sys", "/dev", "/run/sloplet", "/.sloplet")


@dataclass(frozen=True)
class VolumeSpec:
    """One volume of a sandbox."""

    path: str  #: inside: absolute, normal
    source: str  #: a volume's name, or the absolute path of a folder of this machine
    mode: str = "rw"  #: ro, rw; copy: the folder's content is brought in at the start, the folder is not touched
    shared: bool = False  #: a named one that several sandboxes may write at a time
    base: str = ""  #: of a copy: where the folder is kept as it was; the runtime's, not to be asked for
    #: of a folder: no link in its path is followed, since whoever asked for it may not be who made the links; a
    #: server's, not to be asked for
    nofollow: bool = False

    @property
    def named(self) -> bool:
        return bool(self.source) and not self.source.startswith("/")

    @property
    def absent(self) -> bool:
        """It was left behind when the sandbox was brought here: an empty folder stands for it."""
        return not self.source

    @property
    def mounted(self) -> bool:
        return self.mode != "copy"

    @property
    def exclusive(self) -> bool:
        """Whether nobody else may have it meanwhile."""
        return self.named and self.mode == "rw" and not self.shared

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path, "source": self.source, "mode": self.mode, "shared": self.shared, "base": self.base,
            "nofollow": self.nofollow,
        }  # fmt: skip


class Volume:
    """A volume with more to say than where it is: ``volumes={"/src": Volume("./repo", mode="rw")}``.

    ``mode``: ``"ro"`` (what folders of this machine are by default), ``"rw"`` (what named volumes are), or ``"copy"``:
    a folder's content is copied in, and ``apply`` brings changes back. ``read_only=True`` is ``mode="ro"``.
    ``shared``: a named volume that other sandboxes may write at the same time.
    """

    __slots__ = ("mode", "shared", "source")

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        mode: str | None = None,
        read_only: bool | None = None,
        shared: bool = False,
    ) -> None:
        if mode is not None and mode not in MODES:
            raise SpecError(f"mode={str(mode)[:40]!r} is not one of a volume", hint=f"one of {', '.join(MODES)}")
        if read_only is not None:
            said = "ro" if read_only else "rw"
            if mode not in (None, said):
                raise SpecError(f"read_only={bool(read_only)} and mode={mode!r} contradict each other")
            mode = said
        self.source, folder = _source(source)
        if mode == "copy" and not folder:
            raise SpecError(
                f"the named volume {self.source!r} cannot be mode='copy'",
                hint=f"a folder is './{self.source}'; `sloplet volume clone` copies a volume",
            )
        if shared and folder:
            raise SpecError(
                f"shared=True is for named volumes, and {self.source!r} is a folder of this machine",
                hint="leave it out: folders are never held by one sandbox",
            )
        self.mode = mode or ("ro" if folder else "rw")
        self.shared = bool(shared)

    def at(self, path: str) -> VolumeSpec:
        return VolumeSpec(path, self.source, self.mode, self.shared)

    def __repr__(self) -> str:
        shared = ", shared=True" if self.shared else ""
        return f"Volume({self.source!r}, mode={self.mode!r}{shared})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Volume) and self.at("/") == other.at("/")

    def __hash__(self) -> int:
        return hash(self.at("/"))


def check_volume_name(name: object) -> str:
    """The name of a volume, or of one of its snapshots."""
    if not isinstance(name, str) or not NAME_RE.match(name):
        raise InvalidName(f"{str(name)[:80]!r} is not a name for a volume", hint=_NAME_HINT)
    return name


def check_volumes(volumes: object) -> tuple[VolumeSpec, ...]:
    """From ``{path inside: source}``; in the order in which they are mounted, outer ones first."""
    if isinstance(volumes, (list, tuple)) and all(isinstance(one, VolumeSpec) for one in volumes):
        volumes = {one.path: one for one in volumes}
    if not isinstance(volumes, Mapping):
        raise SpecError(f"volumes={str(volumes)[:80]!r} is not a mapping", hint=_FORMS)
    if len(volumes) > MOST:
        raise SpecError(f"{len(volumes)} volumes are too many for one sandbox", hint=f"at most {MOST}")
    found: dict[str, VolumeSpec] = {}
    for path, wanted in volumes.items():
        inside = check_path(path)
        if inside in found:
            raise SpecError(f"two volumes would be at {inside}", hint="give each a path of its own")
        if isinstance(wanted, VolumeSpec):
            found[inside] = wanted
        else:
            found[inside] = (wanted if isinstance(wanted, Volume) else Volume(wanted)).at(inside)
    ordered = tuple(found[path] for path in sorted(found, key=lambda path: path.split("/")))
    _refuse_clashes(ordered)
    return ordered


def check_path(path: object) -> str:
    """Where in the sandbox a volume may be."""
    hint = "an absolute path inside the sandbox, for example /data or /workspace"
    if not isinstance(path, str) or not path.startswith("/") or len(path) > 4000:
        raise SpecError(f"{str(path)[:80]!r} is not a path for a volume", hint=hint)
    if ".." in path.split("/") or any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise SpecError(f"{path[:80]!r} is not a path for a volume", hint=hint)
    normal = "/" + posixpath.normpath(path).lstrip("/")
    if normal in _EXACTLY or any(_at_or_below(normal, tree) for tree in _TREES):
        raise SpecError(f"no volume can be at {normal}: the sandbox itself needs it", hint=hint)
    return normal


def parse_volume(text: str) -> tuple[str, Volume]:
    """``SRC:DST[:ro|rw|copy|shared]``, of the CLI; several words with commas between."""
    source, separator, rest = text.partition(":")
    while not rest.startswith("/") and ":/" in rest:  # a folder with a colon in its name
        more, _, rest = rest.partition(":")
        source += ":" + more
    path, _, words = rest.partition(":")
    if not source or not separator or not path:
        raise SpecError(
            f"{text[:80]!r} is not a volume", hint="write SRC:DST[:ro|rw|copy|shared], for example ./repo:/src:rw"
        )
    mode: str | None = None
    shared = False
    for word in filter(None, words.split(",")):
        if word == "shared":
            shared = True
        elif word in MODES and mode in (None, word):
            mode = word
        else:
            raise SpecError(f"{text[:80]!r}: {word[:40]!r} makes no sense here", hint="one of ro, rw, copy; and shared")
    return path, Volume(source, mode=mode, shared=shared)


def volumes_from(data: Iterable[Mapping[str, Any]]) -> tuple[VolumeSpec, ...]:
    """What ``to_dict`` made."""
    return tuple(VolumeSpec(**dict(one)) for one in data)


def left_behind(volumes: Iterable[VolumeSpec], *, live: bool) -> tuple[VolumeSpec, ...]:
    """What a sandbox that goes to another machine has of its volumes: nothing. What was saved running finds an empty
    folder where each was mounted; copies are files of its own by now."""
    return tuple(VolumeSpec(volume.path, "", "ro") for volume in volumes if volume.mounted) if live else ()


def _source(source: object) -> tuple[str, bool]:
    """A name or an absolute path, and whether it is the latter."""
    path = isinstance(source, os.PathLike)
    text = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(text, str) or not text or "\0" in text or len(text) > 4000:
        raise SpecError(f"{str(source)[:80]!r} is not what a volume can be of", hint=_FORMS)
    if not path and NAME_RE.match(text):
        return text, False
    if path or "/" in text or "." in text or text == "~":
        return os.path.abspath(os.path.expanduser(text)), True
    raise InvalidName(f"{text[:80]!r} is not a name for a volume", hint=f"{_NAME_HINT}; a folder has a '/' in it")


def _refuse_clashes(volumes: tuple[VolumeSpec, ...]) -> None:
    """A copy is files of the sandbox's own: nothing else can be in it or around it. And a named volume is held once."""
    for one in volumes:
        for other in volumes:
            if one is other:
                continue
            if one.mode == "copy" and (_at_or_below(one.path, other.path) or _at_or_below(other.path, one.path)):
                raise SpecError(
                    f"the copy at {one.path} and the volume at {other.path} lie in one another",
                    hint="give them paths side by side",
                )
            if one.named and one.source == other.source and one.exclusive:
                raise SpecError(
                    f"the volume {one.source!r} is asked for twice, at {one.path} and {other.path}",
                    hint="once is enough, or use Volume(..., shared=True) for both",
                )


def _at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
