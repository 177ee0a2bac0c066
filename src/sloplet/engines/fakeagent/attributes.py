"""What the wire tells of a file beyond its stat fields, and extended attributes, on the fake's files."""

from __future__ import annotations

import errno
import os

from ...wire.fields import Fields
from ...wire.schema import FileType, SetxattrsFlag, StatFlag, Tag, WatchMask
from .kernel import Kernel
from .vfs import READ, WRITE, Cred, Node, Vfs, fail

_BESIDE = 16384


def prefix_of(request: Fields) -> bytes:
    prefix = request.raw(Tag.PREFIX, b"user.")
    if not prefix.startswith(b"user.") or len(prefix) > 255:
        raise fail(errno.EINVAL, "PREFIX")
    return prefix


def read_attributes(vfs: Vfs, path: str, workdir: str, cred: Cred, prefix: bytes) -> list[bytes]:
    node = vfs.find(path, workdir, cred)
    if not node.allows(cred, READ):
        raise fail(errno.EACCES, path)
    return [name + b"\0" + value for name, value in node.attributes.items() if name.startswith(prefix)]


def set_attributes(vfs: Vfs, path: str, workdir: str, cred: Cred, request: Fields) -> int:
    prefix = prefix_of(request)
    given = [raw.partition(b"\0") for raw in request.all(Tag.ATTRIBUTE)]
    if any(not name.startswith(prefix) or not 5 < len(name) <= 255 for name, _, _ in given):
        raise fail(errno.EINVAL, "ATTRIBUTE")
    folder, last, node = vfs.locate(path, workdir, cred, follow=True)
    if node is None:
        raise fail(errno.ENOENT, path)
    if node.device or not node.allows(cred, WRITE):
        raise fail(errno.EPERM if node.device else errno.EACCES, path)
    gone = [name for name, nul, _ in given if not nul]
    if request.integer(Tag.FLAGS, 0) & SetxattrsFlag.REPLACE:
        kept = {name for name, _, _ in given}
        gone += [name for name in node.attributes if name.startswith(prefix) and name not in kept]
    changes: list[bytes] = [name for name in gone if node.attributes.pop(name, None) is not None]
    for name, nul, value in given:
        if nul:
            node.attributes[name] = value
            changes.append(name)
    for _ in changes:
        vfs.emit(WatchMask.ATTRIBUTES, folder, last)
    return len(changes)


class Extras:
    """What a STAT or LIST asks for beside stat fields; its flags for that are the same numbers."""

    def __init__(self, kernel: Kernel, request: Fields, cred: Cred) -> None:
        flags = request.integer(Tag.FLAGS, 0)
        self._kernel, self._cred = kernel, cred
        self._names, self._target = bool(flags & StatFlag.NAMES), bool(flags & StatFlag.TARGET)
        self._prefix = prefix_of(request) if Tag.PREFIX in request else None

    def add(self, fields: Fields, node: Node, path: str) -> Fields:
        if self._names:
            fields.add(Tag.OWNER, self._name(node.uid, group=False)).add(Tag.GROUP, self._name(node.gid, group=True))
        if self._target and node.type is FileType.SYMLINK:
            self._leads_to(fields, path)
        if self._prefix is not None and node.allows(self._cred, READ):
            used = 0
            for name, value in node.attributes.items():
                size = len(name) + 1 + len(value)
                if name.startswith(self._prefix) and used + size <= _BESIDE:
                    fields.add(Tag.ATTRIBUTE, name + b"\0" + value)
                    used += size
        return fields

    def _name(self, number: int, *, group: bool) -> str:
        users = self._kernel.users.values()
        return next((cred.name for cred in users if number == (cred.gid if group else cred.uid)), str(number))

    def _leads_to(self, fields: Fields, path: str) -> None:
        try:
            folder, name, node = self._kernel.vfs.locate(path, "/", self._cred, follow=True)
        except OSError:
            return
        if node is None:
            return
        kind = FileType.OTHER if node.device else node.type
        fields.add(Tag.TARGET_TYPE, int(kind)).add(Tag.TARGET_SIZE, node.size).add(Tag.TARGET_MODE, node.mode)
        fields.add(Tag.TARGET, node.path() if node.is_dir else os.path.join(folder.path(), name))
