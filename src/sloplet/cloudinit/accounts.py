"""/etc/passwd, /etc/group and /etc/shadow: texts in, texts out. Pure.

Images need hold no useradd for it. Lines that are not understood are kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BuildFailed
from .plan import Group, User
from .users import DEFAULT

_FIRST, _LAST = 1000, 60000
_FIRST_SYSTEM, _LAST_SYSTEM = 101, 999


@dataclass(frozen=True)
class Account:
    """A user as the files have it then."""

    name: str
    uid: int
    gid: int
    home: str
    new: bool

    @property
    def owner(self) -> str:
        return f"{self.uid}:{self.gid}"


class Accounts:
    """The files of an image, being changed."""

    def __init__(self, passwd: str, group: str, shadow: str) -> None:
        self._passwd = _Table(passwd, 7)
        self._group = _Table(group, 4)
        self._shadow = _Table(shadow, 9)

    @property
    def texts(self) -> dict[str, str]:
        """By path, those that have changed."""
        tables = {"/etc/passwd": self._passwd, "/etc/group": self._group, "/etc/shadow": self._shadow}
        return {path: table.text() for path, table in tables.items() if table.changed}

    def find(self, name: str) -> Account | None:
        """By name, or by the number of one that has no name."""
        row = self._passwd.find(name)
        if row is None and name.isdecimal():
            row = next((each for each in self._passwd.rows() if each[2] == name), None)
        if row is None:
            return None
        return Account(row[0], _number(row[2]), _number(row[3]), row[5] or "/", new=False)

    def add_group(self, group: Group) -> None:
        self._group_id(group.name)
        for member in group.members:
            self._join(group.name, member)

    def add_user(self, user: User, default: str, shell: str) -> Account | None:
        """Make it, or bring what is there to what is asked for. ``default`` is who ``default`` stands for; ``shell``
        what one has who asks for none. None for a ``default`` without an account, of whom nothing is asked."""
        found = self.find(default if user.name == DEFAULT else user.name)
        if found is None and user.name == DEFAULT:
            if user == User(user.line, DEFAULT):
                return None
            raise BuildFailed(f"cloud-init, line {user.line}: the image has no user {default!r}")
        found = found or self._make(user, shell)
        name = found.name
        for group in user.groups:
            self._group_id(group)
            self._join(group, name)
        if user.sudo:
            self._group_id("sudo", system=True)  # who is in it may use the sandbox's sudo
            self._join("sudo", name)
        if found.new or user.password is not None:
            self._set_password(name, user)
        return found

    def _make(self, user: User, shell: str) -> Account:
        taken = {_number(row[2]) for row in self._passwd.rows()}
        if user.uid in taken:
            raise BuildFailed(f"cloud-init, line {user.line}: the uid {user.uid} of {user.name!r} is taken")
        uid = user.uid if user.uid is not None else _free(taken, system=user.system)
        gid = self._group_id(user.primary_group or user.name, wanted=uid, system=user.system)
        home = user.home or f"/home/{user.name}"
        self._passwd.add([user.name, "x", str(uid), str(gid), user.gecos, home, user.shell or shell])
        return Account(user.name, uid, gid, home, new=True)

    def _set_password(self, name: str, user: User) -> None:
        password = user.password or "!"
        if user.locked and not password.startswith("!"):
            password = "!" + password
        row = self._shadow.find(name)
        if row is None:
            self._shadow.add([name, password, "", "0", "99999", "7", "", "", ""])
        else:
            self._shadow.set(name, [name, password, *row[2:]])

    def _group_id(self, name: str, *, wanted: int | None = None, system: bool = False) -> int:
        row = self._group.find(name)
        if row is not None:
            return _number(row[2])
        taken = {_number(each[2]) for each in self._group.rows()}
        gid = wanted if wanted is not None and wanted not in taken else _free(taken, system=system)
        self._group.add([name, "x", str(gid), ""])
        return gid

    def _join(self, group: str, member: str) -> None:
        row = self._group.find(group)
        assert row is not None
        members = [each for each in row[3].split(",") if each]
        if member not in members:
            self._group.set(group, [*row[:3], ",".join([*members, member])])


class _Table:
    """Lines of fields with colons between."""

    def __init__(self, text: str, width: int) -> None:
        self._lines = text.removesuffix("\n").split("\n") if text else []  # splitlines cuts within names, too
        self._width = width
        self.changed = False

    def rows(self) -> list[list[str]]:
        return [fields for line in self._lines if len(fields := line.split(":")) == self._width]

    def find(self, name: str) -> list[str] | None:
        return next((row for row in self.rows() if row[0] == name), None)

    def add(self, fields: list[str]) -> None:
        self._lines.append(":".join(fields))
        self.changed = True

    def set(self, name: str, fields: list[str]) -> None:
        for number, line in enumerate(self._lines):
            row = line.split(":")
            if len(row) == self._width and row[0] == name:
                self._lines[number] = ":".join(fields)
                self.changed = True
                return

    def text(self) -> str:
        return "".join(line + "\n" for line in self._lines)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 else -1


def _free(taken: set[int], *, system: bool) -> int:
    first, last = (_FIRST_SYSTEM, _LAST_SYSTEM) if system else (_FIRST, _LAST)
    for number in range(first, last + 1):
        if number not in taken:
            return number
    raise BuildFailed("cloud-init: the image has no free number for another user or group")
