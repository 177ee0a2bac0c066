"""The package indexes of this machine as variables for a step that installs something. No user name, no token.

A machine behind a proxy that opens TLS, or with a mirror of its own, trusts authorities that no image knows. Steps that
install something see this machine's list of them, as a file that is no part of their layer.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ..network import configured
from ..network.configured import Machine
from ..network.names import HOST, is_loopback

#: The id of the secret that the list of authorities is, and where a step sees it.
TRUST = "sloplet-trust"
TRUST_PATH = f"/run/secrets/{TRUST}"
_TRUST_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_MAX_BUNDLE = 8 * 2**20


def trusted() -> bytes | None:
    """The authorities that this machine trusts; None where they are not found."""
    given = [os.environ[name] for name in _TRUST_VARIABLES if os.environ.get(name)]
    for path in (*given, ssl.get_default_verify_paths().cafile or "", *_BUNDLES):
        try:
            if path and Path(path).is_file():
                with open(path, "rb") as file:
                    found = file.read(_MAX_BUNDLE)
                if b"-----BEGIN CERTIFICATE-----" in found:
                    return found
        except OSError:
            continue
    return None


def trust_environment() -> dict[str, str]:
    """For a step that sees the list."""
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
    return {**dict.fromkeys(names, TRUST_PATH), "npm_config_cafile": TRUST_PATH}


def pip_environment(machine: Machine | None = None) -> dict[str, str]:
    """How pip inside finds what pip here does."""
    found = {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore",
             "PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_NO_INPUT": "1"}  # fmt: skip
    urls, default = configured.pip(machine or Machine())
    public = [url for url in map(_public, urls) if url]
    if public and not default:
        found["PIP_INDEX_URL"], *extra = public
        if extra:
            found["PIP_EXTRA_INDEX_URL"] = " ".join(extra)
    elif public:
        found["PIP_EXTRA_INDEX_URL"] = " ".join(public)
    plain = sorted({urlsplit(url).netloc for url in public if url.startswith("http:")})
    if plain:
        found["PIP_TRUSTED_HOST"] = " ".join(plain)
    return found


def npm_environment(machine: Machine | None = None) -> dict[str, str]:
    """How npm inside finds what npm here does."""
    urls, default = configured.npm(machine or Machine())
    public = [url for url in map(_public, urls) if url]
    found = {"npm_config_cache": "/tmp/.npm", "npm_config_update_notifier": "false"}
    if public and not default:
        found["npm_config_registry"] = public[0]
    return found


def _public(url: str) -> str:
    """An address for the inside: this machine's loopback has another name there. "" for what cannot be given away."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.password or parts.query:
        return ""
    if is_loopback(host) or host in ("127.0.0.1", "::1"):
        netloc = f"{HOST}:{port}" if port else HOST
        return urlunsplit((parts.scheme, netloc, parts.path, "", ""))
    return url
