"""Where registries are, and how to talk to them: ``registries.toml`` in SLOPLET_HOME (or ``SLOPLET_REGISTRIES``).

::

    [registry."docker.io"]
    mirrors = ["mirror.example", "cache.example:5000/hub"]   # tried in turn before it, for pulls

    [registry."registry.lan:5000"]
    insecure = true               # plain HTTP, without credentials
    ca = "/etc/ssl/lan.pem"       # vouches for it, beside the system's

A reference becomes a list of ``Endpoint``: pure, once the file is read.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..state.home import Home
from .reference import HUB, Reference, is_host

_HUB_HOST = "registry-1.docker.io"
_MAX_FILE = 2**20
_KEYS = {"mirrors", "insecure", "ca"}
_FORM = "see docs/images.md, section 'Registries'"


@dataclass(frozen=True)
class Endpoint:
    """One server that may have an image."""

    host: str  #: with its port, as people write it; credentials are looked up by it
    repository: str
    url: str  #: https://host/v2/repository
    plain: bool = False  #: without TLS
    loopback: bool = False
    ca: tuple[str, ...] = ()  #: files
    mirror: bool = False

    @property
    def base(self) -> str:
        """The address up to ``/v2/``."""
        return self.url.removesuffix(self.repository)

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}"


@dataclass(frozen=True)
class Registry:
    """What is written about one of them."""

    mirrors: tuple[str, ...] = ()
    insecure: bool = False
    ca: str | None = None


class Registries:
    """All that is written about registries."""

    def __init__(self, entries: Mapping[str, Registry] | None = None, certificates: tuple[Path, ...] = ()) -> None:
        self._entries = dict(entries or {})
        self._certificates = certificates

    def pull(self, reference: Reference, *, insecure: bool = False) -> list[Endpoint]:
        """Where to look for an image: the mirrors of its registry, and then itself."""
        entry = self._entries.get(reference.registry, Registry())
        mirrors = [self._mirror(text, reference) for text in entry.mirrors]
        return [*mirrors, self.push(reference, insecure=insecure)]

    def push(self, reference: Reference, *, insecure: bool = False) -> Endpoint:
        """The registry itself. ``insecure``: without TLS, which is for this machine's own only. Raises SpecError."""
        if insecure and not is_loopback(reference.registry):
            raise SpecError(
                f"without TLS anybody on the way to {reference.registry} could change the image",
                hint=f'if that is meant, write into registries.toml: [registry."{reference.registry}"] insecure = true',
            )
        return self._endpoint(reference.registry, reference.repository, insecure=insecure)

    def _mirror(self, text: str, reference: Reference) -> Endpoint:
        host, _, prefix = text.partition("/")
        repository = f"{prefix}/{reference.repository}" if prefix else reference.repository
        return self._endpoint(host, repository, mirror=True)

    def _endpoint(self, host: str, repository: str, *, insecure: bool = False, mirror: bool = False) -> Endpoint:
        entry = self._entries.get(host, Registry())
        plain = insecure or entry.insecure
        server = _HUB_HOST if host == HUB else host
        scheme = "http" if plain else "https"
        ca = [entry.ca] if entry.ca else []
        if not plain:
            ca += _certificates(self._certificates, host)
        return Endpoint(
            host, repository, f"{scheme}://{server}/v2/{repository}", plain, is_loopback(host), tuple(ca), mirror
        )


def load(home: Home, environ: Mapping[str, str] | None = None) -> Registries:
    """Read the file, if there is one; for a tenant of a server its operator's. Raises SpecError, which tells what is
    wrong in it."""
    environ = os.environ if environ is None else environ
    named = environ.get("SLOPLET_REGISTRIES")
    path = Path(named).expanduser() if named else (home.main or home).path / "registries.toml"
    return Registries(_read(path, required=bool(named)), _certificate_folders(environ))


def _read(path: Path, *, required: bool) -> dict[str, Registry]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _wrong(path, "it is no file")
            data = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        if required:
            raise _wrong(path, "SLOPLET_REGISTRIES names it, and it does not exist") from None
        return {}
    except OSError as error:
        raise _wrong(path, error.strerror or str(error)) from error
    if len(data) > _MAX_FILE:
        raise _wrong(path, f"it has more than {_MAX_FILE} bytes")
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"it is no TOML: {error}") from error
    try:
        return parse(document, path.parent)
    except SpecError as error:
        raise _wrong(path, error.message) from error


def parse(document: Mapping[str, Any], folder: Path) -> dict[str, Registry]:
    """The tables of the file; ``ca`` is relative to its folder. Pure. Raises SpecError."""
    if unknown := sorted(set(document) - {"registry"}):
        raise SpecError(f'{unknown[0]!r} is not known there; tables are called [registry."HOST"]')
    tables = document.get("registry", {})
    if not isinstance(tables, dict):
        raise SpecError("'registry' is no table")
    found = {}
    for host, table in tables.items():
        if not is_host(host):
            raise SpecError(f"{host[:80]!r} is no host")
        if not isinstance(table, dict):
            raise SpecError(f"what stands for {host!r} is no table")
        if unknown := sorted(set(table) - _KEYS):
            raise SpecError(f"{unknown[0]!r} of {host!r} is not known; known are {', '.join(sorted(_KEYS))}")
        found[host] = _registry(host, table, folder)
    return found


def _registry(host: str, table: Mapping[str, Any], folder: Path) -> Registry:
    mirrors, insecure, ca = table.get("mirrors", []), table.get("insecure", False), table.get("ca")
    if not isinstance(mirrors, list) or not all(isinstance(text, str) for text in mirrors):
        raise SpecError(f"mirrors of {host!r} is no list of text")
    for text in mirrors:
        name, _, prefix = text.partition("/")
        if not is_host(name) or (prefix and not prefix.strip("/")) or "//" in text or text.endswith("/"):
            raise SpecError(f"the mirror {text[:80]!r} of {host!r} is not HOST or HOST/PREFIX")
    if not isinstance(insecure, bool):
        raise SpecError(f"insecure of {host!r} is neither true nor false")
    if ca is not None and not (isinstance(ca, str) and ca):
        raise SpecError(f"ca of {host!r} is not the path of a file")
    return Registry(tuple(mirrors), insecure, None if ca is None else str(folder / Path(ca).expanduser()))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its very name: with a port, without, or an address without its brackets.
    Pure: no name is resolved. Names below ``localhost`` are not: many resolvers ask the network for those."""
    if host.startswith("["):
        bare = host.rpartition("]")[0].lstrip("[")
    else:
        bare = host if host.count(":") > 1 else host.partition(":")[0]
    if bare.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def _certificate_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where Podman and Docker look for authorities, by host."""
    home = environ.get("HOME", "")
    own = [Path(home, ".config", "containers", "certs.d")] if os.path.isabs(home) else []
    return (*own, Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d"))


def _certificates(folders: tuple[Path, ...], host: str) -> list[str]:
    """``HOST/*.crt`` of the first folder that has one for this host."""
    for folder in folders:
        try:
            found = sorted(str(path) for path in (folder / host).iterdir() if path.suffix == ".crt")
        except OSError:
            continue
        if found:
            return found
    return []


def _wrong(path: Path, why: str) -> SpecError:
    return SpecError(f"{str(path)!r} cannot be used: {why}", hint=_FORM)
