"""The user's own credentials for registries, from where Docker and Podman keep them. Nothing is ever written.

Read in this order, and the first file that knows the registry counts: ``REGISTRY_AUTH_FILE`` (alone, if set), Podman's
``$XDG_RUNTIME_DIR/containers/auth.json`` and ``~/.config/containers/auth.json``, Docker's ``config.json`` (below
``DOCKER_CONFIG``, or ``~/.docker``). Programs named there (``credHelpers``, ``credsStore``) are asked without a shell,
over stdin, for a bounded time. What is found stays out of messages, of ``repr``, and of command lines.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RegistryDenied
from .reference import HUB

#: What Docker calls Docker Hub in its files, and asks its helpers for.
HUB_KEY = "https://index.docker.io/v1/"
_HUB_HOSTS = (HUB, "index.docker.io", "registry-1.docker.io")
_MAX_FILE = 2**20
_MAX_ANSWER = 64 * 1024
_HELPER_SECONDS = 30.0
_HELPER_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
#: What helpers print, with exit code 1, when they know of nothing.
_NOT_THERE = ("credentials not found", "no credentials", "no username", "no server url")


@dataclass(frozen=True)
class Credentials:
    """A name and a password, or a token that others are had for; nothing at all: anonymous."""

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    source: str = ""  #: where they came from, for messages

    def __bool__(self) -> bool:
        return bool(self.username or self.identity_token)

    @property
    def basic(self) -> str:
        """The value of an ``Authorization`` header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


ANONYMOUS = Credentials()


def find(registry: str, repository: str = "", environ: Mapping[str, str] | None = None) -> Credentials:
    """What the user has for this registry (a host, as in references), ANONYMOUS if nothing. Runs programs: call it in
    a thread. Raises RegistryDenied for a file or a helper that cannot be used."""
    environ = os.environ if environ is None else environ
    for path in files(environ):
        document = _read(path)
        if document is not None and (found := _of(document, registry, repository, path, environ)):
            return found
    return ANONYMOUS


def files(environ: Mapping[str, str]) -> list[Path]:
    """Where to look, in order. Pure."""
    if named := environ.get("REGISTRY_AUTH_FILE"):
        return [Path(named)]
    home = environ.get("HOME", "")
    found = []
    if os.path.isabs(runtime := environ.get("XDG_RUNTIME_DIR", "")):
        found.append(Path(runtime, "containers", "auth.json"))
    if os.path.isabs(settings := environ.get("XDG_CONFIG_HOME", "")):
        found.append(Path(settings, "containers", "auth.json"))
    elif home:
        found.append(Path(home, ".config", "containers", "auth.json"))
    if docker := environ.get("DOCKER_CONFIG"):
        found.append(Path(docker, "config.json"))
    elif home:
        found.append(Path(home, ".docker", "config.json"))
    return found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _unusable(path, "it is no file")
            data = file.read(_MAX_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    if len(data) > _MAX_FILE:
        raise _unusable(path, f"it has more than {_MAX_FILE} bytes")
    try:
        document = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise _unusable(path, "it is no JSON") from None  # the error would show what stands there
    if not isinstance(document, dict):
        raise _unusable(path, "it is no JSON object")
    return document


def _of(
    document: Mapping[str, Any], registry: str, repository: str, path: Path, environ: Mapping[str, str]
) -> Credentials:
    """What one file knows: the helper for this registry, an entry for it, the helper for all."""
    wanted = list(keys(registry, repository))
    helpers = _table(document, "credHelpers", path)
    for key, helper in helpers.items():
        if normal(key) in wanted and isinstance(helper, str) and helper:
            return _ask(helper, registry, path, environ)
    entries = {normal(key): entry for key, entry in _table(document, "auths", path).items()}
    for key in wanted:
        if isinstance(entry := entries.get(key), dict) and (found := _entry(entry, path)):
            return found
    store = document.get("credsStore")
    return _ask(store, registry, path, environ) if isinstance(store, str) and store else ANONYMOUS


def keys(registry: str, repository: str = "") -> Iterator[str]:
    """What an entry may be called, the nearest first: ``host/team/app``, ``host/team``, ``host``. Pure."""
    hosts = _HUB_HOSTS if registry in _HUB_HOSTS else (registry,)
    parts = repository.split("/") if repository else []
    for count in range(len(parts), -1, -1):
        for host in hosts:
            yield "/".join((host, *parts[:count]))


def normal(key: str) -> str:
    """An entry's name without the scheme and Docker's ``/v1/``, which older versions wrote."""
    bare = re.sub(r"\Ahttps?://", "", key).rstrip("/")
    return re.sub(r"/v[12]\Z", "", bare)


def _table(document: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = document.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _unusable(path, f"its {key} is no object")
    return found


def _entry(entry: Mapping[str, Any], path: Path) -> Credentials:
    token = entry.get("identitytoken")
    username, password = entry.get("username"), entry.get("password")
    packed = entry.get("auth")
    if isinstance(packed, str) and packed:
        try:
            username, colon, password = base64.b64decode(packed, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            raise _unusable(path, "an entry's auth is not base64 of NAME:PASSWORD") from None
        if not colon:
            raise _unusable(path, "an entry's auth is not base64 of NAME:PASSWORD")
        password = password.rstrip("\0")  # as Docker does
    if isinstance(token, str) and token:
        return Credentials(username if isinstance(username, str) else "", "", token, str(path))
    if isinstance(username, str) and username and isinstance(password, str):
        return Credentials(username, password, "", str(path))
    return ANONYMOUS


def _ask(helper: str, registry: str, path: Path, environ: Mapping[str, str]) -> Credentials:
    """``docker-credential-NAME get``, which reads the registry's name from stdin and prints JSON."""
    name = f"docker-credential-{helper}"
    if not _HELPER_RE.match(helper):
        raise _unusable(path, f"{helper[:80]!r} is not the name of a credential helper")
    program = shutil.which(name, path=environ.get("PATH"))
    if program is None:
        raise _unusable(path, f"it names the helper {name}, which is not installed")
    server = HUB_KEY if registry in _HUB_HOSTS else registry
    try:
        done = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=_HELPER_SECONDS, env=dict(environ)
        )
    except subprocess.TimeoutExpired:
        raise _unusable(path, f"{name} did not answer within {_HELPER_SECONDS:.0f} s") from None
    except OSError as error:
        raise _unusable(path, f"{name} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stdout[:_MAX_ANSWER] + done.stderr[:_MAX_ANSWER]).decode("utf-8", "replace").strip()
        if any(text in said.lower() for text in _NOT_THERE):
            return ANONYMOUS
        shown = "" if "secret" in said.lower() else f": {said[:200]!r}"
        raise _unusable(path, f"{name} failed with exit code {done.returncode}{shown}")
    return _answer(done.stdout, name, path)


def _answer(data: bytes, name: str, path: Path) -> Credentials:
    try:
        if len(data) > _MAX_ANSWER:
            raise ValueError
        document = json.loads(data)
        username, secret = document["Username"], document["Secret"]
        if not isinstance(username, str) or not isinstance(secret, str):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _unusable(path, f"{name} did not answer with a Username and a Secret") from None
    if username == "<token>":
        return Credentials("", "", secret, name)
    return Credentials(username, secret, "", name)


def _unusable(path: Path, why: str) -> RegistryDenied:
    return RegistryDenied(
        f"the credentials in {str(path)!r} cannot be used: {why}",
        hint="correct it, log in again (docker login, podman login), or name another file in REGISTRY_AUTH_FILE",
    )
