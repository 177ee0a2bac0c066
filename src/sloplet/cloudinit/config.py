"""``#cloud-config`` text to a ``Plan``. Pure. What is not known is an error that says where, and what is near."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

from ..errors import RecipeInvalid
from .document import Value, near, read
from .files import files_of
from .plan import Command, Packages, Plan
from .senseless import SENSELESS
from .users import groups_of, keys_of, users_of

_HEADER = "#cloud-config"
_PACKAGES = ("packages", "package_update", "package_upgrade")
_OLD_NAMES = {"apt_update": "package_update", "apt_upgrade": "package_upgrade"}
_HOSTNAME_RE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?\Z")
_ENV_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ZONE_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+_-]*(/[A-Za-z0-9][A-Za-z0-9+_-]*){0,3}\Z")
_LOCALE_RE = re.compile(r"[A-Za-z0-9_.@-]{1,64}\Z")
_PACKAGE_RE = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@.+:~/_^-]*\Z")
_VERSION_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+:~_-]*\Z")


def parse(text: str) -> Plan:
    """RecipeInvalid, with the line, for everything that would not be applied as it is written."""
    first = text.lstrip("\ufeff \t\r\n").split("\n", 1)[0].strip()
    if first != _HEADER:
        raise RecipeInvalid(
            f"cloud-init, line 1: the file does not begin with {_HEADER}",
            hint="scripts, archives and templates (## template: jinja) are not taken: put commands under runcmd:",
        )
    root = read(text.lstrip("\ufeff"))
    found: dict[str, Any] = {}
    packages: dict[str, Any] = {}
    for name, value in root.entries("the file"):
        key = _known(root, name)
        if value.is_null:
            continue
        if key in _PACKAGES:
            if key in packages:
                raise value.wrong(f"{key} is there twice: apt_ is an old name for it")
            packages[key] = value
        else:
            found.update(_KEYS[key](value))
    if packages and (asked := _packages(packages)) is not None:
        found["packages"] = asked
    fqdn = found.pop("fqdn", None)
    found.setdefault("hostname", fqdn)  # as in cloud-init, wherever they stand
    plan = Plan(**found)
    if plan.locale is not None:
        plan.env.setdefault("LANG", plan.locale)
    return plan


def _known(root: Value, name: str) -> str:
    name = _OLD_NAMES.get(name, name)
    if name in _KEYS or name in _PACKAGES:
        return name
    here = next(key for key, _ in root.pairs if key.text == name)
    if name in SENSELESS:
        raise here.wrong(f"{name} makes no sense in a sandbox", SENSELESS[name])
    raise here.wrong(f"there is no key {name[:80]!r}", near(name, [*_KEYS, *_PACKAGES]))


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands(what: str) -> Callable[[Value], dict[str, Any]]:
    def read_them(value: Value) -> dict[str, Any]:
        return {what: tuple(_command(what, item) for item in value.list(what) if not item.is_null)}

    return read_them


def _command(what: str, item: Value) -> Command:
    if item.kind == "list":
        words = [word.string(f"a word of {what}") for word in item.items if not word.is_null]
        if not words:
            raise item.wrong(f"a command of {what} has no words")
        return Command(item.line, shlex.join(words))
    if item.kind == "map":
        raise item.wrong(f"a command of {what} is a mapping", "put quotes around a command with ': ' in it")
    text = item.string(f"a command of {what}")
    if not text.strip():
        raise item.wrong(f"a command of {what} is empty")
    return Command(item.line, text)


# -- packages ----------------------------------------------------------------------------------------------------------


def _packages(found: dict[str, Value]) -> Packages | None:
    line = min(value.line for value in found.values())
    names: list[str] = []
    if "packages" in found:
        value = found["packages"]
        for item in value.list("packages") if value.kind == "list" else (value,):
            names.append(_package(item))
    update = "package_update" in found and found["package_update"].boolean("package_update")
    upgrade = "package_upgrade" in found and found["package_upgrade"].boolean("package_upgrade")
    if not (names or update or upgrade):
        return None
    return Packages(line, tuple(names), update, upgrade)


def _package(item: Value) -> str:
    if item.kind == "list":
        words = [word.string("a package") for word in item.items]
        if len(words) == 2 and _PACKAGE_RE.match(words[0]) and _VERSION_RE.match(words[1]):
            return f"{words[0]}={words[1]}"
        raise item.wrong("a package in brackets is [name, version]")
    if item.kind == "map":
        raise item.wrong("packages of one manager alone are not taken", "name them as items of the list")
    name, equals, version = item.string("a package").partition("=")
    if not _PACKAGE_RE.match(name) or (equals and not _VERSION_RE.match(version)):
        raise item.wrong(f"{item.text[:80]!r} is not the name of a package", "for example git, or [git, '1:2.39']")
    return item.text


# -- small ones --------------------------------------------------------------------------------------------------------


def _env(value: Value) -> dict[str, Any]:
    found = {}
    for name, item in value.entries("env"):
        if not _ENV_RE.match(name):
            raise item.wrong(f"{name[:80]!r} is not the name of a variable", "letters, digits and _")
        text = item.text if item.kind == "bool" else item.string(f"the value of {name}")
        if "\n" in text:
            raise item.wrong(f"the value of {name} has a line break in it", "write it to a file")
        found[name] = text
    return {"env": found}


def _hostname(key: str) -> Callable[[Value], dict[str, Any]]:
    def read_it(value: Value) -> dict[str, Any]:
        text = value.string(key)
        if not _HOSTNAME_RE.match(text):
            raise value.wrong(f"{text[:80]!r} is not a host name", "letters, digits and '-'")
        return {key: text}

    return read_it


def _timezone(value: Value) -> dict[str, Any]:
    text = value.string("timezone")
    if not _ZONE_RE.match(text):
        raise value.wrong(f"{text[:80]!r} is not a time zone", "for example Europe/Berlin")
    return {"timezone": (value.line, text)}


def _locale(value: Value) -> dict[str, Any]:
    if value.kind == "bool":
        if value.boolean("locale"):
            raise value.wrong("locale must be the name of one", "for example C.UTF-8")
        return {}
    text = value.string("locale")
    if not _LOCALE_RE.match(text):
        raise value.wrong(f"{text[:80]!r} is not a locale", "for example C.UTF-8")
    return {"locale": text}


_KEYS: dict[str, Callable[[Value], dict[str, Any]]] = {
    "bootcmd": _commands("bootcmd"),
    "runcmd": _commands("runcmd"),
    "write_files": files_of,
    "groups": groups_of,
    "users": users_of,
    "ssh_authorized_keys": lambda value: {"default_keys": keys_of(value)},
    "env": _env,
    "hostname": _hostname("hostname"),
    "fqdn": _hostname("fqdn"),
    "timezone": _timezone,
    "locale": _locale,
    "final_message": lambda value: {"message": value.string("final_message")},
}
