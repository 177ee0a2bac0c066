"""users and groups of a cloud-config. Pure."""

from __future__ import annotations

import re
from typing import Any

from .document import Value
from .plan import Group, User

#: Stands for the sandbox's own user, whoever that is.
DEFAULT = "default"
_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?\Z")
_HASH_RE = re.compile(r"[!*]{0,2}|[!]?\$[0-9a-zA-Z]+\$[^:\s]{8,500}\Z")
_SUDO_RE = re.compile(r"ALL\s*=\s*\(\s*ALL\s*(:\s*ALL\s*)?\)\s*NOPASSWD\s*:\s*ALL\Z")
_MOST_UID = 65533
_KNOWN = ("name", "gecos", "groups", "homedir", "lock_passwd", "no_create_home", "no_user_group", "passwd",
          "hashed_passwd", "primary_group", "shell", "ssh_authorized_keys", "sudo", "system", "uid")  # fmt: skip
_SENSELESS = {
    "plain_text_passwd": "a password does not belong into a file: passwd: has its hash (`openssl passwd -6`)",
    "ssh_import_id": "keys are not fetched from elsewhere: write them under ssh_authorized_keys:",
    "ssh_redirect_user": "there is no SSH server in a sandbox",
    "selinux_user": "there is no SELinux in a sandbox",
    "snapuser": "there are no snaps in a sandbox",
    "expiredate": "nobody logs in to a sandbox with a password",
    "inactive": "nobody logs in to a sandbox with a password",
    "no_log_init": "nobody logs in to a sandbox with a password",
    "doas": "write the file under write_files:",
}


def groups_of(value: Value) -> dict[str, Any]:
    found: list[Group] = []
    if value.kind == "str":
        found = [Group(_name(value, part)) for part in value.strings("groups")]
    elif value.kind == "map":
        found = [_group(name, members) for name, members in value.entries("groups")]
    else:
        for item in value.list("groups"):
            if item.kind == "map":
                found += [_group(name, members) for name, members in item.entries("groups")]
            else:
                found += [Group(_name(item, part)) for part in item.strings("groups")]
    return {"groups": tuple(found)}


def _group(name: str, members: Value) -> Group:
    who = () if members.is_null else members.strings(f"the members of {name}")
    return Group(_name(members, name), tuple(_name(members, member) for member in who))


def users_of(value: Value) -> dict[str, Any]:
    if value.kind == "map":  # older files write {name: {...}}
        raise value.wrong("users must be a list", "begin each with '- name: ...'")
    if value.kind == "str":
        return {"users": tuple(User(value.line, _name(value, name)) for name in value.strings("users"))}
    found: list[User] = []
    for item in value.list("users"):
        user = _user(item)
        if any(user.name == other.name for other in found):
            raise item.wrong(f"the user {user.name!r} is there twice")
        found.append(user)
    return {"users": tuple(found)}


def _user(item: Value) -> User:
    if item.kind == "str":
        return User(item.line, _name(item, item.text))
    # cloud-init takes ssh-authorized-keys for ssh_authorized_keys, and so do many files.
    given = dict(item.entries("a user", (*_KNOWN, *_SENSELESS), dashes=True))
    for name, why in _SENSELESS.items():
        if name in given:
            raise given[name].wrong(f"{name} makes no sense in a sandbox", why)
    if "name" not in given:
        raise item.wrong("a user has no name")

    def text(key: str) -> str | None:
        return given[key].string(key) if key in given and not given[key].is_null else None

    def flag(key: str, default: bool = False) -> bool:
        return given[key].boolean(key) if key in given else default

    name = _name(given["name"], given["name"].string("name"))
    system = flag("system")
    home = text("homedir")
    if home is not None and (not home.startswith("/") or ".." in home.split("/") or ":" in home or "\n" in home):
        raise given["homedir"].wrong(f"{home[:80]!r} is not an absolute path")
    shell = text("shell")
    if shell is not None and (not shell.startswith("/") or ":" in shell or "\n" in shell):
        raise given["shell"].wrong(f"{shell[:80]!r} is not the absolute path of a shell")
    gecos = text("gecos") or ""
    if ":" in gecos or "\n" in gecos:
        raise given["gecos"].wrong("gecos may not have ':' or a line break in it")
    primary = text("primary_group")
    if flag("no_user_group") and primary is None:
        primary = "users"
    return User(
        item.line,
        name,
        uid=given["uid"].whole("uid", _MOST_UID) if "uid" in given and not given["uid"].is_null else None,
        gecos=gecos,
        home=home,
        shell=shell,
        primary_group=None if primary is None else _name(given.get("primary_group", item), primary),
        groups=_groups(given.get("groups")),
        system=system,
        create_home=not flag("no_create_home") and not system,
        password=_password(given),
        locked=flag("lock_passwd", True),
        sudo=_sudo(given.get("sudo")),
        keys=keys_of(given.get("ssh_authorized_keys")),
    )


def _groups(value: Value | None) -> tuple[str, ...]:
    if value is None or value.is_null:
        return ()
    return tuple(dict.fromkeys(_name(value, name) for name in value.strings("groups")))


def _password(given: dict[str, Value]) -> str | None:
    for key in ("passwd", "hashed_passwd"):
        if key in given and not given[key].is_null:
            text = given[key].string(key)
            if not _HASH_RE.fullmatch(text):
                raise given[key].wrong(f"{key} is not the hash of a password", "make one with `openssl passwd -6`")
            return text
    return None


def _sudo(value: Value | None) -> tuple[str, ...]:
    """Rules, as sudoers has them. ``false`` and null: none."""
    if value is None or value.is_null or (value.kind == "bool" and not value.boolean("sudo")):
        return ()
    rules = (value.text,) if value.kind in ("str", "bool") else value.strings("sudo")
    for rule in rules:
        if not _SUDO_RE.match(rule.strip()):
            raise value.wrong(
                f"sudo: {rule[:80]!r} cannot be enforced: in a sandbox one may be root, or not",
                "write ALL=(ALL) NOPASSWD:ALL",
            )
    return tuple(rule.strip() for rule in rules)


def keys_of(value: Value | None) -> tuple[str, ...]:
    if value is None or value.is_null:
        return ()
    keys = tuple(item.string("a key") for item in value.list("ssh_authorized_keys"))
    if any("\n" in key.strip() for key in keys):
        raise value.wrong("a key of ssh_authorized_keys is one line")
    return keys


def _name(value: Value, name: str) -> str:
    if not _NAME_RE.match(name):
        raise value.wrong(f"{name[:80]!r} is not a name of a user or a group", "letters, digits, '_', '-', '.'")
    return name
