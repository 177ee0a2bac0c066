"""A certificate authority per sandbox: its key is derived, never stored, so no snapshot can hold it.

The one thing on disk is ``SLOPLET_HOME/ca/master.key``; a sandbox's id of its CA is no secret.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import ssl
import stat
import time
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import StateCorrupt, StateUnwritable

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_KEY_BYTES = 32
_CACHED = 256
_LEAF_DAYS, _RENEW_SECONDS = 90, 30 * 86400
#: Fixed, so that the certificate is the same whenever it is made again; a sandbox's clock may be off by years.
_SINCE, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2049, 12, 31, tzinfo=UTC)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256


def new_id() -> str:
    """An id for a new sandbox's CA."""
    return secrets.token_hex(16)


def master_key(home: Path) -> bytes:
    """The 32 bytes of ``home/ca/master.key``; made if there are none, by one of those who try at once."""
    folder = home / "ca"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            try:
                return _read_key(folder_fd, folder)
            except FileNotFoundError:
                _make_key(folder_fd)
            return _read_key(folder_fd, folder)
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise StateUnwritable(
            f"the key of the sandboxes' certificates cannot be read or made in {folder}: {error.strerror}",
            hint="it is needed to open TLS, for secrets and for rules about paths",
        ) from error


def _read_key(folder_fd: int, folder: Path) -> bytes:
    fd = os.open("master.key", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        found = os.fstat(fd)
        key = os.read(fd, _KEY_BYTES + 1)
    finally:
        os.close(fd)
    private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not private or len(key) != _KEY_BYTES:
        raise StateCorrupt(
            f"{folder / 'master.key'} is not a private file of {_KEY_BYTES} bytes that belongs to you",
            hint="remove it if nobody else may have read it; sandboxes that trust it must be started anew",
        )
    return key


def _make_key(folder_fd: int) -> None:
    """Written under a name of its own and linked: whoever comes second finds the first one's, whole."""
    name = f".{secrets.token_hex(8)}"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(fd)
        try:
            os.link(name, "master.key", src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except FileExistsError:
            pass
        os.fsync(folder_fd)
    finally:
        os.unlink(name, dir_fd=folder_fd)


class Authority:
    """The CA of one sandbox. The same master key and id give the same key and certificate, on every day."""

    def __init__(self, master: bytes, ca_id: str) -> None:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        def derive(purpose: bytes) -> ec.EllipticCurvePrivateKey:
            kdf = HKDF(hashes.SHA256(), 48, salt=ca_id.encode(), info=b"sloplet " + purpose)
            number = int.from_bytes(kdf.derive(master), "big") % (_ORDER - 1) + 1
            return ec.derive_private_key(number, ec.SECP256R1())

        self._key = derive(b"ca key 1")
        self._leaf_key = derive(b"leaf key 1")
        self._name = f"Sloplet sandbox {hashlib.sha256(ca_id.encode()).hexdigest()[:12]}"
        self._certificate = self._make_ca()
        self._ca_pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        self._leaves: OrderedDict[str, tuple[float, ssl.SSLContext]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Authority({self._name!r})"

    @property
    def ca_pem(self) -> bytes:
        """The certificate to trust."""
        return self._ca_pem

    def leaf(self, name: str) -> ssl.SSLContext:
        """A server's context with a certificate for that name or address; kept for the next time."""
        kept = self._leaves.get(name)
        if kept is not None and abs(time.time() - kept[0]) < _RENEW_SECONDS:
            self._leaves.move_to_end(name)
            return kept[1]
        context = self._context(self._make_leaf(name))
        self._leaves[name] = (time.time(), context)
        self._leaves.move_to_end(name)
        while len(self._leaves) > _CACHED:
            self._leaves.popitem(last=False)
        return context

    def _make_ca(self) -> x509.Certificate:
        from cryptography import x509

        usage = _key_usage(key_cert_sign=True, crl_sign=True)
        serial = int.from_bytes(hashlib.sha256(self._name.encode()).digest()[:16], "big") >> 1
        builder = self._builder(self._name, self._key.public_key(), serial, _SINCE, _UNTIL)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return self._signed(builder.add_extension(usage, critical=True))

    def _make_leaf(self, name: str) -> x509.Certificate:
        from cryptography import x509

        now = datetime.now(UTC)
        since, until = now - timedelta(days=7), now + timedelta(days=_LEAF_DAYS)
        # A name of 64 characters or more does not fit into a subject; the alternative name is what counts.
        builder = self._builder(name[:63], self._leaf_key.public_key(), x509.random_serial_number(), since, until)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return self._signed(
            builder.add_extension(x509.SubjectAlternativeName([_alternative(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(authority, critical=False)
        )

    def _builder(
        self, name: str, key: ec.EllipticCurvePublicKey, serial: int, since: datetime, until: datetime
    ) -> x509.CertificateBuilder:
        from cryptography import x509

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

        builder = x509.CertificateBuilder(named(self._name), named(name), key, serial, since, until)
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)

    def _signed(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes

        try:
            return builder.sign(self._key, hashes.SHA256(), ecdsa_deterministic=True)
        except (TypeError, UnsupportedAlgorithm):  # an old OpenSSL: another signature each time, which does no harm
            return builder.sign(self._key, hashes.SHA256())

    def _context(self, certificate: x509.Certificate) -> ssl.SSLContext:
        from cryptography.hazmat.primitives import serialization

        encoding = serialization.Encoding.PEM
        key = self._leaf_key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # The ssl module reads files only; this one has no name and is in memory.
        fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            os.write(fd, certificate.public_bytes(encoding) + key)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def _alternative(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(**true: bool) -> x509.KeyUsage:
    from cryptography import x509

    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: true.get(name, False) for name in names})
