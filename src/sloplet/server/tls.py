"""The server's own certificates: ``sloplet serve --tls`` makes an authority of its own and a certificate by it.

In ``SLOPLET_HOME/server/tls``: ``ca.pem`` (to trust: ``SLOPLET_CA``), ``ca.key``, and ``server.pem``, which is made
anew before it ends and when the server's names change. Certificates of the operator's own are read again when their
files change. The context stays the same, so new connections get the new one without a restart.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import ServerError, SpecError, StateCorrupt
from ..state.home import Home, unwritable
from .e2b.settings import domain_of
from .settings import ServeSettings

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA_DAYS, DAYS, RENEW_DAYS = 3650, 90, 30
_CHECK = 60.0  # seconds between looks at the files
_HOST_RE = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?)*\Z")


def folder_of(home: Home) -> Path:
    return home.path / "server" / "tls"


def check_host_name(text: str) -> str:
    """A host's name or address as a Host header has it, in small letters. SpecError."""
    name = text.strip().rstrip(".").casefold()
    with suppress(ValueError):
        return str(ipaddress.ip_address(name.strip("[]")))
    if not _HOST_RE.match(name):
        raise SpecError(f"{text[:80]!r} is not a host's name", hint="for example sandbox.example.org, or an address")
    return name


def names_of(settings: ServeSettings) -> list[str]:
    """Names and addresses that a certificate of ours is for."""
    names = ["localhost", "127.0.0.1", "::1", settings.domain, f"*.{settings.domain}", *settings.names]
    if settings.e2b is not None:
        names += [domain_of(settings.domain), f"*.{domain_of(settings.domain)}"]
    if not settings.loopback:
        names += own_addresses() if settings.wildcard else [settings.host]
        names.append(own_name())
    return sorted({name for name in names if name and _valid(name)})


def _valid(name: str) -> bool:
    try:
        check_host_name(name.removeprefix("*."))
    except SpecError:
        return False
    return True


def own_name() -> str:
    return socket.gethostname().casefold()


def own_addresses() -> list[str]:
    """Addresses of this machine's interfaces, without those that need one named beside them."""
    found: set[str] = set()
    with suppress(OSError):
        before = ""
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            if "/32 host LOCAL" in line:
                found.add(before)
            before = line.rpartition("-- ")[2].strip()
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found.add(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    return sorted(text for text in found if text and not ipaddress.ip_address(text).is_link_local)


def make_own(home: Home, names: Sequence[str], *, days: int = DAYS) -> tuple[Path, Path]:
    """The paths of the authority's certificate and of the server's (with its key), made as needed."""
    folder = folder_of(home)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # ``mode`` is of the last one only
        folder.mkdir(mode=0o700, exist_ok=True)
        key, authority = _authority(folder)
        path = folder / "server.pem"
        if not _still_good(path, authority, names):
            _write(path, _leaf(key, authority, names, days))
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder / "ca.pem", path


def make_bundle(home: Home) -> Path:
    """The path of a file with our authority and all that this system trusts: for programs whose setting for one's own
    authority (``SSL_CERT_FILE``) takes the place of the system's."""
    own = (folder_of(home) / "ca.pem").read_bytes()
    path = folder_of(home) / "bundle.pem"
    try:
        _write(path, _system_authorities() + own, mode=0o644)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    return path


def _system_authorities() -> bytes:
    found = ssl.get_default_verify_paths()  # not what the environment says: that may be this very file
    for name in (found.openssl_cafile, "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"):
        with suppress(OSError):
            data = Path(name).read_bytes()
            return data if data.endswith(b"\n") else data + b"\n"
    with suppress(ImportError, OSError):
        import certifi

        return Path(certifi.where()).read_bytes()
    return b""


def make_context(certificate: str, private_key: str | None) -> ssl.SSLContext:
    """ServerError if the files are no certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, private_key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "strerror", None) or str(error)
        raise ServerError(
            f"the certificate {certificate} cannot be used: {reason}",
            hint="--tls-cert is a PEM file with the whole chain, --tls-key its key without a password",
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("its key needs a password")


async def keep_fresh(
    context: ssl.SSLContext, settings: ServeSettings, renew: Callable[[], object], log: Callable[[str], None]
) -> None:
    """For ever: make an own certificate anew in time, and take up files that changed."""
    loop = asyncio.get_running_loop()
    assert settings.certificate is not None
    known = _stamps(settings)
    while True:
        await asyncio.sleep(_CHECK)
        try:
            await loop.run_in_executor(None, renew)
            if (now := _stamps(settings)) != known:
                make_context(settings.certificate, settings.private_key)  # both files are there and fit, or it waits
                context.load_cert_chain(settings.certificate, settings.private_key, password=_no_password)
                known = now
                log("the certificate was read again")
        except (ServerError, OSError, StateCorrupt) as error:
            log(f"the certificate was not renewed: {error}")


def _stamps(settings: ServeSettings) -> tuple[object, ...]:
    found = []
    for path in (settings.certificate, settings.private_key):
        with suppress(OSError):
            if path is not None:
                info = os.stat(path)
                found.append((path, info.st_mtime_ns, info.st_ino, info.st_size))
    return tuple(found)


# -- making them ----------------------------------------------------------------------


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path = folder / "ca.key"
    if not (path.exists() and (folder / "ca.pem").exists()):
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"Sloplet server {socket.gethostname()}"[:63]
        usage = _usage(key_cert_sign=True, crl_sign=True)
        builder = _builder(name, name, key.public_key(), key.public_key(), CA_DAYS, usage)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        _write(path, _pem_key(key))
        _write(folder / "ca.pem", _signed(builder, key).public_bytes(serialization.Encoding.PEM), mode=0o644)
    try:
        found = serialization.load_pem_private_key(path.read_bytes(), None)
        return cast("ec.EllipticCurvePrivateKey", found), x509.load_pem_x509_certificate(
            (folder / "ca.pem").read_bytes()
        )
    except (ValueError, TypeError) as error:
        raise StateCorrupt(
            f"the server's certificate authority in {folder} is damaged: {error}",
            hint="remove that folder: a new one is made, which clients must be given (SLOPLET_CA)",
        ) from None


def _still_good(path: Path, authority: x509.Certificate, names: Sequence[str]) -> bool:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        found.verify_directly_issued_by(authority)
        there = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    left = found.not_valid_after_utc - datetime.now(UTC)
    return left > timedelta(days=RENEW_DAYS) and {str(each.value) for each in there} == set(names)


def _leaf(key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, names: Sequence[str], days: int) -> bytes:
    """The certificate, the authority's, and the key: one file, so that they always fit."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = ec.generate_private_key(ec.SECP256R1())
    issuer = str(authority.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)[0].value)
    builder = _builder(names[0][:63], issuer, own.public_key(), key.public_key(), days, _usage(digital_signature=True))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    encoding = serialization.Encoding.PEM
    return _signed(builder, key).public_bytes(encoding) + authority.public_bytes(encoding) + _pem_key(own)


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePublicKey, days: int,
    usage: x509.KeyUsage,
) -> x509.CertificateBuilder:  # fmt: skip
    from cryptography import x509

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    since, until = now - timedelta(days=1), now + timedelta(days=days)
    builder = x509.CertificateBuilder(named(issuer), named(name), key, x509.random_serial_number(), since, until)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    return builder.add_extension(usage, critical=True)


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _usage(**given: bool) -> x509.KeyUsage:
    from cryptography import x509

    kinds = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{kind: given.get(kind, False) for kind in kinds})


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _write(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Whole, or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    os.replace(new, path)
