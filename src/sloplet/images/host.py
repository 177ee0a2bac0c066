"""What ``image="host"`` is made of: the host's programs and libraries, and nothing that is anybody's.

``look`` reads the machine once; ``layout`` is pure: from what was seen to a list of parts. Everything else
(/home, /root, /var, /run, /opt, /srv, most of /etc) is simply not there.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Folders of programs. Where they are symlinks (merged /usr) they stay symlinks.
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_STORES = ("/nix/store", "/gnu/store")

#: Well-known, public, harmless names below /etc. Never whole families that may hold credentials (ssh, pip.conf,
#: npmrc, gitconfig, apt, environment, profile.d, krb5, docker, ...).
_ETC = (
    "alternatives", "bash.bashrc", "bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies",
    "debian_version", "fonts", "gai.conf", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias",
    "localtime", "lsb-release", "magic", "magic.mime", "mime.types", "os-release", "perl", "pki/ca-trust/extracted",
    "pki/tls/certs", "pki/tls/openssl.cnf", "profile", "protocols", "redhat-release", "rpc", "services", "shells",
    "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "terminfo", "timezone", "vim", "matplotlibrc",
)  # fmt: skip
#: Folders of trusted certificates. One of the sandbox's own is added there where its TLS is opened (network/trust.py).
_TRUST = ("/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted")
_ETC_BEGINNINGS = ("java-", "python3", "ld-musl-")
_SMALL = 8192  # files up to this are copied, and so can be changed inside; larger ones are read-only mounts


@dataclass(frozen=True)
class Overlay:
    """The host's folder, with private changes on top."""

    path: str


@dataclass(frozen=True)
class Bind:
    """The host's file or folder, read-only. ``source`` where it lies on the host."""

    path: str
    source: str
    recursive: bool = False


@dataclass(frozen=True)
class Link:
    path: str
    target: str


@dataclass(frozen=True)
class File:
    path: str
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Folder:
    path: str
    mode: int = 0o755


Part = Overlay | Bind | Link | File | Folder


@dataclass(frozen=True)
class HostView:
    """What was seen of the host. ``entries``: path -> "dir", "file", or "-> text" for a symlink."""

    entries: dict[str, str]
    small: dict[str, bytes] = field(default_factory=dict)
    mount_points: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()  #: of the interpreter: sys.base_prefix, sys.prefix
    private: tuple[str, ...] = ()  #: folders that must never come into view: homes, the sandbox's place


def _kind(path: str) -> str | None:
    try:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            return "-> " + os.readlink(path)
    except OSError:
        return None
    if stat.S_ISDIR(info.st_mode):
        return "dir"
    return "file" if stat.S_ISREG(info.st_mode) else None


def _etc_names() -> list[str]:
    try:
        found = sorted(name for name in os.listdir("/etc") if name.startswith(_ETC_BEGINNINGS))
    except OSError:
        found = []
    return [*_ETC, *found]


def mount_points(mountinfo: str) -> tuple[str, ...]:
    """Mount points out of /proc/self/mountinfo, with its octal escapes undone."""
    points = []
    for line in mountinfo.splitlines():
        words = line.split(" ")
        if len(words) > 4:
            text = words[4]
            for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                text = text.replace(code, plain)
            points.append(text)
    return tuple(points)


def look(private: Iterable[str] = ()) -> HostView:
    """Read what ``layout`` needs. A few dozen lstat calls; callers keep the answer."""
    entries: dict[str, str] = {}
    small: dict[str, bytes] = {}
    for path in ("/usr", *_SYSTEM, *_STORES, "/bin/bash", "/bin/sh", *("/etc/" + name for name in _etc_names())):
        kind = _kind(path)
        if kind is None:
            continue
        entries[path] = kind
        if kind == "file" and path.startswith("/etc/"):
            try:
                with open(path, "rb") as file:
                    content = file.read(_SMALL + 1)
            except OSError:
                del entries[path]  # not readable for us: not public
                continue
            if len(content) <= _SMALL:
                small[path] = content
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            points = mount_points(mounts.read())
    except OSError:
        points = ()
    prefixes = tuple(dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix)))
    homes = [os.path.realpath(os.path.expanduser("~")), "/home", "/root", "/var", "/run", "/etc", "/tmp"]
    return HostView(entries, small, points, prefixes, (*homes, *private))


def below(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def interpreter_parts(view: HostView) -> list[Part]:
    """The prefixes of the Python that runs us, where they are not in /usr. One that holds a private folder as a
    whole (a virtual environment made right in a home folder) stays out of view."""
    chosen: list[str] = []
    for prefix in sorted(view.prefixes, key=len):
        exposed = prefix in ("/", "") or any(below(private, prefix) for private in view.private)
        if exposed or below(prefix, "/usr") or any(below(prefix, other) for other in chosen):
            continue
        chosen.append(prefix)
    return [Overlay(path) for path in chosen]


def python_path(view: HostView) -> list[str]:
    """bin folders of the interpreter that are in view, the virtual environment's first."""
    shown = [part.path for part in interpreter_parts(view) if isinstance(part, Overlay)]
    wanted = [prefix for prefix in reversed(view.prefixes) if any(below(prefix, path) for path in shown)]
    return [prefix + "/bin" for prefix in wanted]


def _system_parts(view: HostView) -> list[Part]:
    parts: list[Part] = []
    for path in ("/usr", *_SYSTEM):
        kind = view.entries.get(path, "")
        if kind == "dir":
            parts.append(Overlay(path))
        elif kind.startswith("-> "):
            parts.append(Link(path, kind[3:]))
    parts.extend(Bind(path, path) for path in _STORES if view.entries.get(path) == "dir")
    return parts


def _etc_parts(view: HostView) -> list[Part]:
    parts: list[Part] = []
    for path, kind in view.entries.items():
        if not path.startswith("/etc/"):
            continue
        if kind.startswith("-> "):
            target = os.path.normpath(os.path.join(os.path.dirname(path), kind[3:]))
            parts.append(Link(path, kind[3:]) if below(target, "/usr") else Bind(path, path))
        elif path in view.small:
            parts.append(File(path, view.small[path]))
        elif kind == "dir" and path in _TRUST:
            parts.append(Overlay(path))
        else:
            parts.append(Bind(path, path))
    return parts


def identity_files(shell: str) -> list[Part]:
    """The generated part of /etc that is the same for all: users, how names are looked up, no resolver."""
    passwd = (
        f"root:x:0:0:root:/root:{shell}\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        f"agent:x:1000:1000:agent:/home/agent:{shell}\n"
    )
    group = "root:x:0:\ntty:x:5:\nnogroup:x:65534:\nagent:x:1000:\n"
    nsswitch = "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"
    texts = {"passwd": passwd, "group": group, "nsswitch.conf": nsswitch}
    files: list[Part] = [File("/etc/" + name, text.encode()) for name, text in texts.items()]
    return [*files, Link("/etc/mtab", "/proc/self/mounts")]


def naming_files(hostname: str) -> list[File]:
    """Those that every sandbox gets whatever its image holds: its own name, and no resolver."""
    hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{hostname}\n"
    return [
        File("/etc/hosts", hosts.encode()),
        File("/etc/hostname", hostname.encode() + b"\n"),
        File("/etc/resolv.conf", b""),
    ]


def layout(view: HostView) -> list[Part]:
    """The root of a sandbox with ``image="host"``, without /dev and /proc. Folders before what lies in them."""
    shell = "/bin/bash" if "/bin/bash" in view.entries else "/bin/sh"
    folders: list[Part] = [
        Folder("/" + name) for name in ("dev", "etc", "home", "mnt", "opt", "proc", "run", "srv", "var")
    ]
    folders += [Folder("/var/" + name) for name in ("cache", "lib", "log")]
    folders += [Folder("/var/tmp", 0o1777), Folder("/tmp", 0o1777), Folder("/root", 0o700), Link("/var/run", "/run")]
    parts = [*folders, *_system_parts(view), *identity_files(shell), *_etc_parts(view)]
    for part in interpreter_parts(view):
        if isinstance(part, Overlay):
            # its parents must be passable for everybody inside, and hold nothing else
            parents = part.path.split("/")[1:-1]
            parts = [p for p in parts if not (isinstance(p, Folder) and p.mode == 0o700 and below(part.path, p.path))]
            parts += [Folder("/" + "/".join(parents[: i + 1])) for i in range(len(parents))]
        parts.append(part)
    return parts


def submounts(view: HostView, path: str) -> tuple[str, ...]:
    """Other filesystems mounted below ``path`` on the host."""
    return tuple(point for point in view.mount_points if point != path and below(point, path))
