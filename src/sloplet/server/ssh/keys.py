"""Public keys of people, each tied to a key of the server (``server_ssh_keys``), and the server's own host key."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SpecError
from ...state.connection import Connected
from ...state.home import Home, unwritable

if TYPE_CHECKING:
    from asyncssh import SSHKey

MOST = 32  #: public keys of one key of the server
MAX_TEXT = 16384  #: characters of a public key
_REFRESH = 1.0  # seconds that a change by another process may take to be seen
_MISSING = 0.02  # the same of one that was added just now
_SMALLEST_RSA = 2048
_SELECT = "SELECT fingerprint, key, name, public, created_at FROM server_ssh_keys "


@dataclass(frozen=True)
class SshKey:
    fingerprint: str  #: "SHA256:...", as `ssh-keygen -l` tells it
    key: str  #: the id of the server's key that it stands for
    name: str
    public: str  #: the line, without its comment
    created_at: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint, "key": self.key, "name": self.name, "public": self.public,
            "created_at": self.created_at,
        }  # fmt: skip


class SshKeys(Connected):
    """Blocking, and quick; what logins need is kept in memory for a second."""

    _known: dict[str, SshKey]
    _read_at = -1e9

    def add(self, key: str, text: str, name: str | None = None) -> SshKey:
        """Tie the public key in ``text`` (a line of a .pub file) to a key of the server. Idempotent. SpecError."""
        public, comment = parse_public(text)
        line = public.export_public_key().decode().strip()
        made = SshKey(
            public.get_fingerprint(), key, _name(name or comment or "key"), " ".join(line.split()[:2]), time.time()
        )
        with self._write(durable=True) as db:
            there = db.execute(
                "SELECT key, (SELECT revoked_at IS NULL AND coalesce(expires_at, 9e99) > ? FROM server_keys"
                " WHERE id = server_ssh_keys.key) FROM server_ssh_keys WHERE fingerprint = ?",
                (time.time(), made.fingerprint),
            ).fetchone()
            if there is not None and there[0] != key and there[1]:
                raise SpecError(
                    f"the public key {made.fingerprint} belongs to another key of this server already",
                    hint="use another pair: `ssh-keygen -t ed25519`",
                )
            count = db.execute("SELECT count(*) FROM server_ssh_keys WHERE key = ?", (key,)).fetchone()[0]
            if there is None and count >= MOST:
                raise SpecError(f"a key can have {MOST} public keys", hint="remove some first")
            db.execute(
                "INSERT OR REPLACE INTO server_ssh_keys VALUES (?, ?, ?, ?, ?)",
                (made.fingerprint, key, made.name, made.public, made.created_at),
            )
        self._read_at = -1e9
        return made

    def list(self, key: str | None = None) -> list[SshKey]:
        """Those of one key of the server, or all; oldest first."""
        where, values = ("", ()) if key is None else ("WHERE key = ? ", (key,))
        return [SshKey(*row) for row in self._read(_SELECT + where + "ORDER BY created_at", values)]

    def remove(self, ref: str, key: str | None = None) -> SshKey:
        """By fingerprint, or by its name if that is the only one of that name. SpecError if there is none."""
        found = [each for each in self.list(key) if each.fingerprint == ref or each.name == ref]
        exact = [each for each in found if each.fingerprint == ref] or found
        if len(exact) != 1:
            why = "there is no" if not exact else f"{len(exact)} keys are called that: there is no single"
            raise SpecError(f"{why} SSH key {ref[:80]!r}", hint="name it by its fingerprint: SHA256:...")
        with self._write(durable=True) as db:
            db.execute(
                "DELETE FROM server_ssh_keys WHERE fingerprint = ? AND key = ?", (exact[0].fingerprint, exact[0].key)
            )
        self._read_at = -1e9
        return exact[0]

    def find(self, fingerprint: str) -> SshKey | None:
        missing = fingerprint not in getattr(self, "_known", {})
        if time.monotonic() - self._read_at > (_MISSING if missing else _REFRESH):
            self._known = {each.fingerprint: each for each in self.list()}
            self._read_at = time.monotonic()
        return self._known.get(fingerprint)


def parse_public(text: str) -> tuple[SSHKey, str]:
    """A public key, and its comment. SpecError, which never repeats what was given: it may be a private one."""
    import asyncssh

    hint = "one line of a .pub file, for example `ssh-ed25519 AAAA... you@there`"
    if "PRIVATE KEY" in text:
        raise SpecError("this is a private key, which nobody but you should have", hint=hint)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if len(text) > MAX_TEXT or len(lines) != 1 or not lines[0].isprintable():
        raise SpecError("this is not one public key of SSH", hint=hint)
    kind = lines[0].split(" ", 1)[0]
    if not kind.startswith(("ssh-", "ecdsa-", "sk-")) or "-cert-" in kind:
        raise SpecError("this is not a public key of SSH, or it has options, which count for nothing here", hint=hint)
    try:
        key = asyncssh.import_public_key(lines[0])
    except (asyncssh.KeyImportError, ValueError):
        raise SpecError("this is not a public key of SSH", hint=hint) from None
    if kind == "ssh-dss" or (kind == "ssh-rsa" and _bits(key) < _SMALLEST_RSA):
        raise SpecError("this key is too weak", hint="make another: `ssh-keygen -t ed25519`")
    return key, " ".join(lines[0].split()[2:])


def _bits(key: SSHKey) -> int:
    return int(getattr(key.pyca_key, "key_size", 0))


def _name(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[:80]


def host_key(home: Home) -> SSHKey:
    """The server's own (ed25519), made once: clients remember it."""
    import asyncssh

    path = Path(home.path, "server", "ssh", "host_ed25519")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
                os.fsync(file.fileno())
            os.rename(fresh, path)
        text = path.read_bytes()
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        return asyncssh.import_private_key(text)
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError, ValueError):
        raise SpecError(
            f"{path} is not a private key", hint="remove it and a new one is made; clients will warn of the change"
        ) from None
