"""Secrets of tenants, kept: the table ``e2b_secrets``. Values are encrypted with a key that lies in a file of its own,
beside the database: who has a copy of one of the two has nothing.

A value is bound to its secret and its version: a row with another's value in it does not open.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ...errors import StateCorrupt
from ...state.connection import Connected
from ...state.home import Home, new_id

_NONCE = 12
_FACTS = "SELECT id, tenant, name, version, metadata, created_at, updated_at FROM e2b_secrets"


@dataclass(frozen=True)
class Secret:
    """All but its value."""

    id: str
    tenant: str
    name: str
    version: int
    metadata: dict[str, str]
    created_at: float
    updated_at: float


class SecretStore(Connected):
    """Blocking, and quick."""

    def __init__(self, home: Home, key: bytes) -> None:
        super().__init__(home)
        self._cipher = ChaCha20Poly1305(key)

    def all(self, tenant: str) -> list[Secret]:
        """Newest first."""
        rows = self._read(f"{_FACTS} WHERE tenant = ? ORDER BY created_at DESC, id DESC", (tenant,))
        return [_secret(row) for row in rows]

    def find(self, tenant: str, ref: str) -> Secret | None:
        """By id or name."""
        rows = self._read(f"{_FACTS} WHERE tenant = ? AND (id = ? OR name = ?)", (tenant, ref, ref.lower()))
        return _secret(rows[0]) if rows else None

    def add(self, tenant: str, name: str, value: str, metadata: dict[str, str], most: int) -> Secret | None:
        """None if there is one of that name. OverflowError if there are ``most`` already."""
        now = time.time()
        made = Secret("sec_" + new_id() + new_id(), tenant, name, 1, metadata, now, now)
        with self._write(durable=True) as db:
            if db.execute("SELECT 1 FROM e2b_secrets WHERE tenant = ? AND name = ?", (tenant, name)).fetchone():
                return None
            if db.execute("SELECT count(*) FROM e2b_secrets WHERE tenant = ?", (tenant,)).fetchone()[0] >= most:
                raise OverflowError
            db.execute(
                "INSERT INTO e2b_secrets VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (made.id, tenant, name, 1, json.dumps(metadata), self._seal(made.id, 1, value), now, now),
            )
        return made

    def change(self, secret: Secret, value: str, metadata: dict[str, str] | None) -> Secret | None:
        """A new version; ``metadata`` None: as it was. None if it is gone."""
        with self._write(durable=True) as db:
            db.execute("PRAGMA secure_delete=ON")
            row = db.execute(f"{_FACTS} WHERE id = ?", (secret.id,)).fetchone()
            if row is None:
                return None
            before = _secret(row)
            version, kept = before.version + 1, before.metadata if metadata is None else metadata
            now = max(time.time(), before.updated_at)
            db.execute(
                "UPDATE e2b_secrets SET version = ?, metadata = ?, sealed = ?, updated_at = ? WHERE id = ?",
                (version, json.dumps(kept), self._seal(secret.id, version, value), now, secret.id),
            )
        return Secret(before.id, before.tenant, before.name, version, kept, before.created_at, now)

    def remove(self, secret: Secret) -> bool:
        """What it was is overwritten on the disk."""
        with self._write(durable=True) as db:
            db.execute("PRAGMA secure_delete=ON")
            return db.execute("DELETE FROM e2b_secrets WHERE id = ?", (secret.id,)).rowcount > 0

    def value(self, tenant: str, name: str) -> str | None:
        """None if there is none of that name. StateCorrupt if it cannot be opened."""
        rows = self._read("SELECT id, version, sealed FROM e2b_secrets WHERE tenant = ? AND name = ?", (tenant, name))
        if not rows:
            return None
        secret, version, sealed = rows[0]
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], _bound(secret, version)).decode()
        except (InvalidTag, ValueError):
            raise StateCorrupt(
                f"the value of the secret {name!r} cannot be opened: server/e2b.key is not what it was",
                hint="set it anew, or put that file back from a backup",
            ) from None

    def _seal(self, secret: str, version: int, value: str) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value.encode(), _bound(secret, version))


def _bound(secret: str, version: int) -> bytes:
    return f"{secret} {version}".encode()


def _secret(row: tuple[object, ...]) -> Secret:
    secret, tenant, name, version, metadata, created, updated = row
    return Secret(
        str(secret), str(tenant), str(name), int(str(version)), json.loads(str(metadata)), float(str(created)),
        float(str(updated)),
    )  # fmt: skip
