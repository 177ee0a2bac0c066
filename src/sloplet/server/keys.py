"""Keys: who may ask, for which tenant, how much. Stored as digests, shown once.

A key is ``slp_ID_SECRET``: the id finds the record, the secret (256 random bits) is compared in constant time. A digest
of so much randomness needs no salt and no slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..engines.registry import all_names
from ..errors import InvalidLimit, InvalidName, KeyRefused, SpecError
from ..quantities import parse_duration, parse_size
from ..spec import RUNGS
from ..state.connection import Connected
from ..state.home import TENANT_RE, new_id

if TYPE_CHECKING:
    import sqlite3

#: The tenant whose home is the server's own: what `sloplet ls` on the server's machine shows.
MAIN = "main"
_KEY_RE = re.compile(r"slp_([a-z0-9]{12})_([A-Za-z0-9_-]{43})\Z")
_NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_REFRESH = 1.0  # seconds that a change by another process may take to be seen
_MISSING = 0.02  # the same of a key that was made just now; who guesses ids makes us read this often at most
_SELECT = "SELECT id, name, tenant, digest, admin, limits, created_at, expires_at, revoked_at FROM server_keys "


@dataclass(frozen=True)
class KeyLimits:
    """What a key's holder may have at a time, counted over all of its tenant; None: as the machine allows."""

    max_sandboxes: int | None = None  #: that run or are being made
    max_memory: int | None = None  #: bytes: the sum of the memory limits of those
    max_cpus: float | None = None
    max_disk: int | None = None
    engines: tuple[str, ...] = ()  #: (): any
    at_least: str | None = None
    rate: float | None = None  #: requests a second
    concurrency: int | None = None  #: requests at a time
    max_ttl: float | None = None  #: seconds; a sandbox that asks for more, or for none, gets this

    @staticmethod
    def make(
        *,
        max_sandboxes: object = None,
        max_memory: object = None,
        max_cpus: object = None,
        max_disk: object = None,
        engines: Iterable[str] = (),
        at_least: str | None = None,
        rate: object = None,
        concurrency: object = None,
        max_ttl: object = None,
    ) -> KeyLimits:
        """As people write them: "8g", "1d". SpecError for what makes no sense: a limit is never silently none."""
        named = tuple(dict.fromkeys(engines))
        for each in named:
            if each not in all_names():
                raise SpecError(f"there is no engine {each[:40]!r}", hint=f"one of {', '.join(all_names())}")
        if at_least is not None and at_least not in RUNGS:
            raise SpecError(f"at_least={at_least[:40]!r} is not a rung", hint=f"one of {', '.join(RUNGS)}")
        return KeyLimits(
            max_sandboxes=_whole("max_sandboxes", max_sandboxes, least=0),
            max_memory=None if max_memory is None else parse_size(max_memory, "max_memory"),
            max_cpus=_number("max_cpus", max_cpus),
            max_disk=None if max_disk is None else parse_size(max_disk, "max_disk"),
            engines=named,
            at_least=at_least,
            rate=_number("rate", rate),
            concurrency=_whole("concurrency", concurrency, least=1),
            max_ttl=None if max_ttl is None else parse_duration(max_ttl, "max_ttl"),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "engines": list(self.engines)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> KeyLimits:
        return KeyLimits(**{**data, "engines": tuple(data.get("engines", ()))})


@dataclass(frozen=True)
class Key:
    """A key without its secret."""

    id: str
    name: str
    tenant: str
    admin: bool
    limits: KeyLimits
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    digest: bytes = field(default=b"", repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "name": self.name, "tenant": self.tenant, "admin": self.admin,
            "limits": self.limits.to_dict(), "created_at": self.created_at, "expires_at": self.expires_at,
            "revoked_at": self.revoked_at,
        }  # fmt: skip


class Keys(Connected):
    """The keys of the server of this home. Blocking; what is read often is kept in memory for a second."""

    _known: dict[str, Key]
    _read_at = -1e9

    def create(
        self,
        name: str,
        *,
        tenant: str | None = None,
        admin: bool = False,
        limits: KeyLimits | None = None,
        expires: float | None = None,
    ) -> tuple[Key, str]:
        """A new key, and the text that is shown once. SpecError if the name is taken. ``expires``: seconds from now."""
        if not _NAME_RE.match(name):
            raise InvalidName(f"{name[:80]!r} is not a name for a key", hint="letters, digits, '_', '.' and '-'")
        owner = tenant if tenant is not None else MAIN if admin else _tenant_of(name)
        if not TENANT_RE.match(owner):
            raise InvalidName(
                f"{owner[:80]!r} is not a name for a tenant", hint="1 to 39 small letters, digits and '-': see --tenant"
            )
        limits = limits or KeyLimits()
        now = time.time()
        secret = secrets.token_urlsafe(32)
        key = Key(new_id(), name, owner, admin, limits, now, None if expires is None else now + expires, None)
        with self._write(durable=True) as db:
            if db.execute(
                "SELECT 1 FROM server_keys WHERE name = ? COLLATE NOCASE AND revoked_at IS NULL", (name,)
            ).fetchone():
                raise SpecError(f"there is a key {name!r} already", hint=f"`sloplet key rm {name}` revokes it")
            if tenant is None and not admin:
                _check_own(db, name, owner)
            db.execute(
                "INSERT INTO server_keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                (
                    key.id, name, owner, _digest(secret), int(admin), json.dumps(limits.to_dict()), now, key.expires_at,
                ),
            )  # fmt: skip
        self._read_at = -1e9
        return key, f"slp_{key.id}_{secret}"

    def list(self) -> list[Key]:
        """All, also revoked and expired ones, oldest first."""
        return [_key(row) for row in self._read(_SELECT + "ORDER BY created_at", ())]

    def revoke(self, ref: str) -> Key:
        """By name or id. LookupError as KeyRefused if there is none that is valid."""
        with self._write(durable=True) as db:
            row = db.execute(
                _SELECT + "WHERE (id = ? OR name = ? COLLATE NOCASE) AND revoked_at IS NULL", (ref, ref)
            ).fetchone()
            if row is None:
                raise SpecError(f"there is no key {ref[:80]!r}", hint="see `sloplet key ls`")
            now = time.time()
            db.execute("UPDATE server_keys SET revoked_at = ? WHERE id = ?", (now, row[0]))
        self._read_at = -1e9
        return replace(_key(row), revoked_at=now)

    def verify(self, text: str) -> Key:
        """The key that this text is. KeyRefused, which never tells whether the id or the secret was wrong."""
        match = _KEY_RE.match(text)
        key = self._all(match[1]).get(match[1]) if match else None
        expected = key.digest if key is not None else bytes(32)
        right = hmac.compare_digest(_digest(match[2] if match else ""), expected)
        if key is None or not right:
            raise KeyRefused("this key is not known here", hint="see `sloplet key ls` on the server's machine")
        self.check_valid(key)
        return key

    @staticmethod
    def check_valid(key: Key) -> None:
        """KeyRefused unless it is valid now."""
        if key.revoked_at is not None:
            raise KeyRefused("this key was revoked", hint="ask the server's operator for another one")
        if key.expires_at is not None and key.expires_at <= time.time():
            raise KeyRefused("this key has expired", hint="ask the server's operator for another one")

    def of_tenant(self, tenant: str) -> Iterator[Key]:
        """Those that are valid now."""
        for key in self._all().values():
            if key.tenant == tenant and self.current(key.id) is not None:
                yield key

    def _all(self, wanted: str | None = None) -> dict[str, Key]:
        """By id; not older than a second, and hardly older at all for a key that is not among them: it may be new."""
        missing = wanted is not None and wanted not in getattr(self, "_known", {})
        if time.monotonic() - self._read_at > (_MISSING if missing else _REFRESH):
            self._known = {key.id: key for key in self.list()}
            self._read_at = time.monotonic()
        return self._known

    def current(self, key_id: str) -> Key | None:
        """What the key of this id is now, for what runs long: a session, a stream. None: revoked, expired or gone."""
        key = self._all(key_id).get(key_id)
        try:
            if key is not None:
                self.check_valid(key)
        except KeyRefused:
            return None
        return key


def _check_own(db: sqlite3.Connection, name: str, owner: str) -> None:
    """A tenant that was not named must be nobody else's: ``a.b`` and ``a-b`` would share one without a word."""
    others = "SELECT 1 FROM server_keys WHERE tenant = ? AND name != ? COLLATE NOCASE"
    if owner == MAIN or db.execute(others, (owner, name)).fetchone():
        raise SpecError(
            f"a key {name!r} would be of the tenant {owner!r}, which is there already",
            hint=f"--tenant {owner} if that is meant, or another tenant",
        )


def _whole(what: str, value: object, *, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1_000_000:
        raise InvalidLimit(f"{what}={str(value)[:40]!r} is out of range", hint=f"a whole number from {least} on")
    return value


def _number(what: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1_000_000:
        raise InvalidLimit(f"{what}={str(value)[:40]!r} is out of range", hint="a number above 0")
    return float(value)


def _tenant_of(name: str) -> str:
    return re.sub(r"[^a-z0-9-]", "-", name.casefold())[:39].strip("-") or "x"


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _key(row: tuple[Any, ...]) -> Key:
    id, name, tenant, digest, admin, limits, created, expires, revoked = row
    return Key(
        str(id), str(name), str(tenant), bool(admin), KeyLimits.from_dict(json.loads(limits)), created, expires,
        revoked, bytes(digest),
    )  # fmt: skip
