"""Secrets as they are asked for. ``Secret`` is the user's and knows where the value is; ``SecretSpec`` is what is
stored and sent about it, and never holds a value."""

from __future__ import annotations

import os
import re
import secrets as random
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import SecretUnavailable, SpecError
from .secretsource import is_text, printed

#: Where a placeholder may be swapped for the value.
PLACES = ("headers", "query", "body")
MAX_SECRETS = 64
MAX_HOSTS = 64
MAX_VALUE = 16 * 1024  #: bytes
READ_SECONDS = 30.0

_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_PLACEHOLDER_RE = re.compile(r"[A-Za-z0-9_.~-]{12,256}\Z")


class Secret:
    """A value that never enters the sandbox: commands see a placeholder in the variable of the secret's name.

    ``value``, ``env`` (a variable of this process) or ``command`` (what it prints; a string is run by ``/bin/sh -c``,
    a list is the argument vector) says where the value is. ``hosts`` are the names that may be sent it, over TLS;
    ``where`` says in which parts of a request.
    """

    __slots__ = ("_command", "_env", "_value", "hosts", "placeholder", "where")

    def __init__(
        self,
        value: str | None = None,
        *,
        env: str | None = None,
        command: str | Sequence[str] | None = None,
        hosts: Iterable[str],
        where: Iterable[str] = ("headers",),
        placeholder: str | None = None,
    ) -> None:
        if sum(source is not None for source in (value, env, command)) != 1:
            raise SpecError(
                "a secret needs one source", hint="give exactly one of value=, env='VARIABLE' and command=[...]"
            )
        if env is not None and (not isinstance(env, str) or not env or "=" in env or "\0" in env):
            raise SpecError(f"env={str(env)[:80]!r} is not a name of a variable", hint="for example env='GITHUB_TOKEN'")
        self._value, self._env = value, env
        self._command = None if command is None else _argv(command)
        self.hosts = _hosts(hosts)
        self.where = _places(where)
        self.placeholder = None if placeholder is None else _check_placeholder(placeholder)
        if value is not None:
            check_value("the secret", value, self.where)

    def __repr__(self) -> str:
        source = "value=..." if self._value is not None else f"env={self._env!r}" if self._env else "command=..."
        return f"Secret({source}, hosts={list(self.hosts)!r}, where={self.where!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled: its value would be in what is made; make it where it is used")

    def __copy__(self) -> Secret:
        return self  # nothing of it ever changes

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def read(self, stop: threading.Event | None = None) -> str:
        """The value now, as this process sees it. SecretUnavailable, without any part of a value, if there is none.
        ``stop``: nobody waits for it any more."""
        if self._value is not None:
            return self._value
        if self._env is not None:
            found = os.environ.get(self._env)
            if not found:
                raise SecretUnavailable(f"the variable {self._env} is not set here", hint=f"export {self._env}=...")
            return check_value(f"the variable {self._env}", found, self.where, kind=SecretUnavailable)
        assert self._command is not None
        found = printed(self._command, MAX_VALUE, READ_SECONDS, stop)
        return check_value("what the secret's command prints", found, self.where, kind=SecretUnavailable)

    def spec(self, name: str) -> SecretSpec:
        return SecretSpec(name, self.hosts, self.where, self.placeholder or "")


@dataclass(frozen=True)
class SecretSpec:
    """What is known about a secret apart from its value."""

    name: str
    hosts: tuple[str, ...]
    where: tuple[str, ...]
    placeholder: str  #: "": its holder makes one, when the sandbox starts

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "hosts": list(self.hosts), "where": list(self.where), "placeholder": self.placeholder,
        }  # fmt: skip

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SecretSpec:
        if not isinstance(data, Mapping) or set(data) != {"name", "hosts", "where", "placeholder"}:
            raise SpecError("that is not what is stored about a secret")
        return SecretSpec(
            _check_name(data["name"]), _hosts(data["hosts"]), _places(data["where"]),
            "" if data["placeholder"] == "" else _check_placeholder(data["placeholder"]),
        )  # fmt: skip


def new_placeholder(name: str) -> str:
    """One that nobody can know who is not inside: a stranger's text that a program there copies into a request must
    not become the value."""
    return f"sloplet-secret-{name.lower()}-{random.token_hex(8)}"


def check_secrets(secrets: object) -> tuple[SecretSpec, ...]:
    """From ``{"NAME": Secret(...)}``, or specs that were made before."""
    found: list[SecretSpec] = []
    if isinstance(secrets, Mapping):
        for name, secret in secrets.items():
            if not isinstance(secret, Secret):
                raise SpecError(
                    f"the secret {str(name)[:80]!r} is not a Secret",
                    hint="write {'NAME': Secret(env='NAME', hosts=['api.example.com'])}",
                )
            found.append(secret.spec(_check_name(name)))
    elif isinstance(secrets, (tuple, list)) and all(isinstance(item, SecretSpec) for item in secrets):
        found = [SecretSpec.from_dict(item.to_dict()) for item in secrets]
    else:
        raise SpecError(
            f"secrets of type {type(secrets).__name__} are not a mapping",
            hint="write {'NAME': Secret(env='NAME', hosts=['api.example.com'])}",
        )
    if len(found) > MAX_SECRETS:
        raise SpecError(f"{len(found)} secrets are too many", hint=f"at most {MAX_SECRETS}")
    _check_distinct(found)
    return tuple(sorted(found, key=lambda item: item.name))


def _check_distinct(secrets: Sequence[SecretSpec]) -> None:
    for index, one in enumerate(secrets):
        for other in secrets[index + 1 :]:
            if one.name == other.name:
                raise SpecError(f"there are two secrets named {one.name}")
            if not (one.placeholder and other.placeholder):
                continue
            if one.placeholder in other.placeholder or other.placeholder in one.placeholder:
                raise SpecError(
                    f"the placeholders of {one.name} and {other.name} cannot be told apart",
                    hint="neither may be part of the other",
                )


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME_RE.match(name):
        raise SpecError(
            f"{str(name)[:80]!r} is not a name for a secret",
            hint="it is the variable that holds the placeholder: letters, digits and '_', for example GITHUB_TOKEN",
        )
    return name


def _check_placeholder(text: object) -> str:
    if not isinstance(text, str) or not _PLACEHOLDER_RE.match(text):
        raise SpecError(
            "that is not a placeholder for a secret",
            hint="12 to 256 letters, digits, '_', '.', '~' or '-', that occur nowhere else",
        )
    return text


def check_value(
    what: str,
    value: object,
    where: Sequence[str],
    placeholders: Iterable[str] = (),
    *,
    kind: type[SpecError | SecretUnavailable] = SpecError,
) -> str:
    """The value, if it can be put into those parts of a request; else an error that shows nothing of it. The one check
    there is: made before anything is started, and by the holder again."""
    hint = "a secret is one line of text"
    if not isinstance(value, str) or not value or len(value.encode("utf-8", "replace")) > MAX_VALUE:
        raise kind(f"{what} is empty, not text, or longer than {MAX_VALUE} bytes")
    if any(char in value for char in "\r\n\0") or not is_text(value):
        raise kind(f"{what} holds a line break, a NUL or a byte that is no text", hint=hint)
    if "headers" in where and (value != value.strip() or any(ord(char) < 32 or ord(char) == 127 for char in value)):
        raise kind(f"{what} has control characters, or spaces around it, which no header can hold", hint=hint)
    if any(placeholder in value for placeholder in placeholders):
        raise kind(f"{what} holds a placeholder", hint="give what the placeholder stands for")
    return value


def _argv(command: object) -> tuple[str, ...]:
    if isinstance(command, str) and command.strip():
        return ("/bin/sh", "-c", command)
    if isinstance(command, (list, tuple)) and command and all(isinstance(word, str) and word for word in command):
        return tuple(command)
    raise SpecError("the secret's command makes no sense", hint="for example command=['pass', 'show', 'github']")


def _hosts(hosts: object) -> tuple[str, ...]:
    from .network.hosts import parse_host

    if isinstance(hosts, (str, bytes)) or not isinstance(hosts, Iterable):
        raise SpecError(f"hosts={str(hosts)[:80]!r} is not a list", hint="write hosts=['api.github.com']")
    found = sorted({parse_host(host).text for host in hosts})
    if not 1 <= len(found) <= MAX_HOSTS:
        raise SpecError(f"a secret for {len(found)} hosts", hint=f"name the 1 to {MAX_HOSTS} hosts that may be sent it")
    return tuple(found)


def _places(where: object) -> tuple[str, ...]:
    places = {where} if isinstance(where, str) else set(where) if isinstance(where, (list, tuple, set)) else set()
    if not places or not places <= set(PLACES):
        raise SpecError(f"where={str(where)[:80]!r} is not valid", hint=f"one or more of {', '.join(PLACES)}")
    return tuple(place for place in PLACES if place in places)
