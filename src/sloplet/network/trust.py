"""Makes programs inside trust the sandbox's CA: the usual bundles, and the usual variables.

Everything is done inside, by the agent. Where nobody inside is root (single-uid mode) the system's own files may be out
of reach: then a bundle in the user's home counts, and the variables name that.
"""

from __future__ import annotations

import hashlib

from ..errors import FileDenied, FileError, SlopletError, StartFailed
from ..files import AsyncFiles, Opener

#: Where the systems of this world keep all certificates in one file. The first is made if it is missing.
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
HASHED = "/etc/ssl/certs"  # OpenSSL's folder: one file per certificate, found by its name's hash
ALONE = "/etc/ssl/certs/sloplet.pem"  # for programs that want what they add to their own in a file by itself
OWN = "/usr/local/share/ca-certificates/sloplet.crt"  # update-ca-certificates makes a new bundle with it
_HOME = "/home/agent/.sloplet"
_MAX_BUNDLE = 16 * 2**20
_BEGIN, _END = b"# -- the CA of this sandbox (sloplet) --\n", b"# -- end of sloplet's --\n"

_ALL = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE",
        "CARGO_HTTP_CAINFO", "HTTPLIB2_CA_CERTS")  # fmt: skip
_EXTRA = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")  # these add to what the program brings itself


def env(*, single_user: bool) -> dict[str, str]:
    """Variables for HELLO; their paths exist once ``install`` is through. The sandbox's own settings win."""
    bundle, own = (f"{_HOME}/ca-bundle.crt", f"{_HOME}/ca.crt") if single_user else (BUNDLES[0], ALONE)
    return {**dict.fromkeys(_ALL, bundle), **dict.fromkeys(_EXTRA, own)}


async def install(open_stream: Opener, ca_pem: bytes, *, single_user: bool) -> None:
    """Put the CA into every usual place that exists. Idempotent: also after a restore or a rollback.
    StartFailed, naming the file, if that cannot be done. ``single_user``: nobody inside is root."""
    files = _Files(open_stream, None if single_user else "0:0")
    known, whole = b"", False
    for path in BUNDLES:
        old = await files.read(path, must=path == BUNDLES[0])
        if old is not None:
            known, whole = known or old, whole or path == BUNDLES[0]
            await files.write(path, old, with_ca(old, ca_pem), must=not single_user)
    if single_user:
        await files.write(f"{_HOME}/ca-bundle.crt", None, with_ca(known, ca_pem))
        await files.write(f"{_HOME}/ca.crt", None, ca_pem)
        return
    if not whole:
        await files.write(BUNDLES[0], None, with_ca(known, ca_pem))
    for path in (ALONE, f"{HASHED}/{name_hash(ca_pem)}.0"):
        await files.write(path, await files.read(path), ca_pem)
    # Of use to update-ca-certificates only; an ordinary user's sandboxes cannot write to their view of the host's /usr.
    await files.write(OWN, await files.read(OWN), ca_pem, must=False)


def with_ca(bundle: bytes, ca_pem: bytes) -> bytes:
    """The bundle with this CA at its end, and no other of ours."""
    rest = without_ours(bundle)
    if rest and not rest.endswith(b"\n"):
        rest += b"\n"
    return rest + _BEGIN + ca_pem.strip() + b"\n" + _END


def without_ours(bundle: bytes) -> bytes:
    """All but our blocks, each with the line break before it. The bundle comes from inside: whatever is in it, each
    byte is looked at a few times only."""
    kept, at = [], 0
    while (begin := bundle.find(_BEGIN, at)) >= 0 and (end := bundle.find(_END, begin + len(_BEGIN))) >= 0:
        kept.append(bundle[at:begin].removesuffix(b"\n"))
        at = end + len(_END)
    return b"".join((*kept, bundle[at:]))


def name_hash(ca_pem: bytes) -> str:
    """OpenSSL's hash of the subject, which has a common name only: sha1 of its canonical form."""
    from cryptography import x509

    subject = x509.load_pem_x509_certificate(ca_pem).subject
    (name,) = [attribute.value for attribute in subject]
    text = (name if isinstance(name, str) else name.decode()).lower().encode()
    value = b"\x06\x03\x55\x04\x03\x0c" + bytes([len(text)]) + text
    pair = b"\x30" + bytes([len(value)]) + value
    digest = hashlib.sha1(b"\x31" + bytes([len(pair)]) + pair, usedforsecurity=False).digest()
    return f"{int.from_bytes(digest[:4], 'little'):08x}"


class _Files:
    """The sandbox's files; failures say what they mean here."""

    def __init__(self, open_stream: Opener, user: str | None) -> None:
        self._files = AsyncFiles(open_stream)
        self._user = user

    async def read(self, path: str, *, must: bool = True) -> bytes | None:
        """None if there is none. Not ``must``: nor if it is no file (a folder, a device), which no program reads
        certificates from."""
        try:
            return await self._files.read(path, max_bytes=_MAX_BUNDLE, user=self._user)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except SlopletError as error:
            if not must and await self._is_no_file(path):
                return None
            raise _failed(path, error) from error

    async def _is_no_file(self, path: str) -> bool:
        try:
            return not (await self._files.stat(path, user=self._user)).is_file
        except SlopletError:
            return False

    async def write(self, path: str, old: bytes | None, new: bytes, *, must: bool = True) -> None:
        try:
            await self._replace(path, old, new)
        except FileError as error:
            if must:
                raise _failed(path, error) from error
        except SlopletError as error:
            raise _failed(path, error) from error

    async def _replace(self, path: str, old: bytes | None, new: bytes) -> None:
        """One that is the host's, whose root is nobody inside, can only be taken away."""
        if new == old:
            return
        try:
            await self._files.write(path, new, mode=None if old is not None else 0o644, user=self._user)
        except FileDenied:
            if old is None:
                raise
            await self._files.remove(path, user=self._user)
            await self._files.write(path, new, mode=0o644, user=self._user)


def _failed(path: str, error: SlopletError) -> StartFailed:
    return StartFailed(
        f"the sandbox's CA could not be installed into {path}: {error.message}",
        hint="programs inside would not trust the TLS that is opened for secrets and for rules about paths; "
        "use an image whose trust store can be written, or neither of those",
    )
