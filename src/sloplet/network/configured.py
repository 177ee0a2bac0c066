"""The addresses that this machine's own pip, npm and apt are configured to fetch from: files and variables -> URLs.

Nothing is run: the files are read where those programs look for them, in their order of precedence.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

MAX_FILE = 2**20
MAX_FILES = 200


@dataclass(frozen=True)
class Machine:
    """Where configuration is looked for. ``root`` is "/" but in tests."""

    root: Path = Path("/")
    home: Path = field(default_factory=lambda: Path(os.path.expanduser("~")))
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    prefixes: tuple[Path, ...] = field(default_factory=lambda: (Path(sys.prefix),))  #: Python's own
    node: str | None = field(default_factory=lambda: shutil.which("node") or shutil.which("npm"))

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: Path) -> str:
        """A configuration file; "" if it is not there or not for us to read."""
        try:
            if not path.is_file():  # a pipe would be waited for
                return ""
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(MAX_FILE)
        except OSError:
            return ""

    def files(self, folder: str, *suffixes: str) -> list[Path]:
        try:
            found = sorted(path for path in self.at(folder).iterdir() if path.suffix in suffixes)
        except OSError:
            return []
        return found[:MAX_FILES]


_URLS = ("PIP_INDEX_URL", "PIP_PYPI_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "NPM_CONFIG_REGISTRY")
_PLAIN = ("PIP_CONFIG_FILE", "PIP_NO_INDEX", "NPM_CONFIG_USERCONFIG", "NPM_CONFIG_GLOBALCONFIG", "NPM_CONFIG_PREFIX",
          "VIRTUAL_ENV")  # fmt: skip
_NOWHERE = "file:///"  # stands for an address that is none of a network: without it the default would be used


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those of an environment that say what packages come from, for a process that is to know it without the rest. Of
    addresses only scheme, host and port are left: what else is in them may be secret. One that names no host is still
    one that was set: it takes the place of the default."""
    found = {}
    for name, value in env.items():
        if name.upper() in _PLAIN:
            found[name] = value
        elif name.upper() in _URLS and (urls := value.split()):
            found[name] = " ".join(dict.fromkeys(_bare(url) for url in urls))
    return found


def _bare(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return _NOWHERE
    where = f"[{host}]" if host and ":" in host else host
    return f"{parts.scheme}://{where}{f':{port}' if port else ''}" if parts.scheme and host else _NOWHERE


# -- pip -----------------------------------------------------------------------------------------------


def pip(machine: Machine) -> tuple[list[str], bool]:
    """(what pip fetches from, does it also use its default index). As ``pip install`` sees it."""
    settings = _pip_settings(machine)
    if settings.get("no-index", "").strip().lower() in ("1", "true", "yes", "on", "y", "t"):
        return settings.get("find-links", "").split(), False
    index = (settings.get("index-url") or settings.get("pypi-url", "")).split()
    return [*index, *settings.get("extra-index-url", "").split(), *settings.get("find-links", "").split()], not index


def _pip_settings(machine: Machine) -> dict[str, str]:
    """The [global] section of all files in their order, then [install] of all files, then the environment."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in _pip_files(machine):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(machine.text(path))
        except configparser.Error:  # pip refuses to work with such a file
            continue
        for section, found in sections.items():
            if parser.has_section(section):
                found.update((_pip_key(key), value or "") for key, value in parser.items(section))
    merged = {**sections["global"], **sections["install"]}
    for name, value in machine.env.items():
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE" and value:
            merged[_pip_key(name[4:])] = value
    return merged


def _pip_key(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("--")


def _pip_files(machine: Machine) -> Iterator[Path]:
    """Lowest precedence first: machine-wide, the user's, the Python installation's, the named one."""
    named = machine.env.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for folder in reversed((machine.env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")):
        yield machine.at(f"{folder}/pip/pip.conf")
    yield machine.at("/etc/pip.conf")
    if not (named and machine.at(named).exists()):
        yield machine.home / ".pip" / "pip.conf"
        configs = machine.env.get("XDG_CONFIG_HOME")
        yield (machine.at(configs) if configs else machine.home / ".config") / "pip" / "pip.conf"
    environment = machine.env.get("VIRTUAL_ENV")
    for prefix in (machine.at(environment),) if environment else machine.prefixes:
        yield prefix / "pip.conf"
    if named:
        yield machine.at(named)


# -- npm -----------------------------------------------------------------------------------------------


def npm(machine: Machine) -> tuple[list[str], bool]:
    """(the registries of npm, scoped ones too; does it also use its default one)."""
    settings: dict[str, str] = {}
    for path in _npm_files(machine):
        settings.update(_npmrc(machine.text(path), machine.env))
    for name, value in machine.env.items():
        if name.lower().startswith("npm_config_") and value:
            settings[name[11:] if "@" in name else name[11:].lower().replace("_", "-")] = value
    urls = [value for key, value in settings.items() if key == "registry" or re.match(r"@[^:]+:registry\Z", key)]
    return urls, not settings.get("registry")


def _npm_files(machine: Machine) -> Iterator[Path]:
    """Lowest precedence first: machine-wide, the user's."""
    env = {name.lower(): value for name, value in machine.env.items() if name.lower().startswith("npm_config_")}
    prefix = env.get("npm_config_prefix")
    own = Path(machine.node).resolve().parent.parent if machine.node else None
    if named := env.get("npm_config_globalconfig"):
        yield machine.at(named)
    else:
        for folder in ("/etc", "/usr/etc", "/usr/local/etc"):
            yield machine.at(f"{folder}/npmrc")
        if prefix or own:
            yield machine.at(f"{prefix or own}/etc/npmrc")
    named = env.get("npm_config_userconfig")
    yield machine.at(named) if named else machine.home / ".npmrc"


def _npmrc(text: str, env: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for raw in text.splitlines():
        line = raw.strip()
        key, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            value = re.sub(r"\$\{([^}\s]+)\}", lambda match: env.get(match[1].rstrip("?"), ""), value.strip())
            found[key.strip()] = value.strip("\"'")
    return found


# -- apt -----------------------------------------------------------------------------------------------

_ONE_LINE_RE = re.compile(r"deb(?:-src)?\s+(?:\[[^\]]*\]\s*)?(\S+)")


def apt(machine: Machine) -> list[str]:
    """The addresses of apt's sources; lists of mirrors that are files are opened."""
    found: list[str] = []
    for path in (machine.at("/etc/apt/sources.list"), *machine.files("/etc/apt/sources.list.d", ".list")):
        for raw in machine.text(path).splitlines():
            if match := _ONE_LINE_RE.match(raw.strip()):
                found.append(match[1])
    for path in machine.files("/etc/apt/sources.list.d", ".sources"):
        for stanza in _stanzas(machine.text(path)):
            if stanza.get("enabled", "yes").lower() not in ("no", "false", "0", "off", "without", "disable"):
                found += stanza.get("uris", "").split()
    return [url for source in found for url in _mirrors(machine, source)]


def _stanzas(text: str) -> Iterator[dict[str, str]]:
    """deb822: fields in paragraphs, continued by lines that begin with a blank."""
    stanza: dict[str, str] = {}
    key = ""
    for line in (*text.splitlines(), ""):
        if line.startswith("#"):
            continue
        if not line.strip():
            if stanza:
                yield stanza
            stanza, key = {}, ""
        elif line[0].isspace():
            if key:
                stanza[key] += "\n" + line.strip()
        else:
            name, _, value = line.partition(":")
            key = name.strip().lower()
            stanza[key] = value.strip()


def _mirrors(machine: Machine, url: str) -> list[str]:
    if not url.startswith("mirror+file:"):
        return [url]
    lines = machine.text(machine.at(re.sub(r"\A/+", "/", url.removeprefix("mirror+file:")))).splitlines()
    return [words[0] for line in lines if (words := line.split()) and not words[0].startswith("#")]


def proxies(machine: Machine) -> list[str]:
    """Which of the three are told to go through a proxy: sandboxes do not."""
    told = []
    if _pip_settings(machine).get("proxy"):
        told.append("pip")
    settings: dict[str, str] = {}
    for path in _npm_files(machine):
        settings.update(_npmrc(machine.text(path), machine.env))
    if settings.get("proxy") or settings.get("https-proxy"):
        told.append("npm")
    confs = [machine.at("/etc/apt/apt.conf"), *machine.files("/etc/apt/apt.conf.d", ".conf", "")]
    if any(re.search(r"^\s*Acquire::https?::Proxy\s", machine.text(path), re.M | re.I) for path in confs):
        told.append("apt")
    return told
