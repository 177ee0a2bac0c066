"""Which ids the sandbox's user has inside, known before it starts: by the image's own /etc/passwd, as agent/users.c
reads it. The files are the image's, and hostile: bounded, regular, and a line that makes no sense is skipped."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ..fs import FILE, open_in
from ..images import host
from ..spec import DEFAULT_USER
from .base import ResolvedImage

_SMALL = 1 << 20
_FIRST_UID = 1000


def ids_of(user: str, image: ResolvedImage) -> tuple[int, int]:
    """uid and gid of a user as ``SandboxSpec.user`` writes it. One that is not known is the agent's affair, which
    refuses it."""
    return find(user, _file(image, "etc/passwd"), _file(image, "etc/group"))


def find(user: str, passwd: bytes, group: bytes) -> tuple[int, int]:
    """Pure."""
    name, _, its_group = user.partition(":")
    users = {line[0]: (line[2], line[3]) for line in reversed(list(_lines(passwd, 7, (2, 3))))}
    groups = {line[0]: line[2] for line in reversed(list(_lines(group, 3, (2,))))}
    by_uid = {uid: ids for ids in reversed(users.values()) for uid in ids[:1]}
    if name in users:
        uid, gid = users[name]
    elif name == DEFAULT_USER:  # the agent adds it
        uid = _FIRST_UID
        while uid in by_uid:
            uid += 1
        gid = groups.get(name, uid)
    elif name.isascii() and name.isdigit():
        uid, gid = by_uid.get(int(name), (int(name), 0))
    else:
        uid, gid = 0, 0
    if its_group.isascii() and its_group.isdigit():
        gid = int(its_group)
    elif its_group:
        gid = groups.get(its_group, gid)
    return uid, gid


def _lines(text: bytes, fields: int, numbers: tuple[int, ...]) -> Iterator[tuple[str, str, int, int]]:
    for line in text.split(b"\n"):
        parts = line.decode("utf-8", "surrogateescape").split(":")
        if len(parts) < fields:
            continue
        found = [parts[at] for at in numbers]
        if all(part.isascii() and part.isdigit() and len(part) <= 10 and int(part) < 2**32 - 1 for part in found):
            yield parts[0], parts[1], int(found[0]), int(found[-1])


def _file(image: ResolvedImage, name: str) -> bytes:
    if image.path is None:
        made = (part for part in host.identity_files("/bin/sh") if isinstance(part, host.File))
        return next((part.content for part in made if part.path == "/" + name), b"")
    try:
        root = os.open(image.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        fd = open_in(root, name, FILE & ~os.O_NOFOLLOW, follow=True)
    except OSError:
        return b""
    finally:
        os.close(root)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _SMALL:
            return b""
        return os.read(fd, _SMALL)
    except OSError:
        return b""
    finally:
        os.close(fd)
