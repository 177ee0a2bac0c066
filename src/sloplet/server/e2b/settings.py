"""How the facade is run."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 7668


@dataclass(frozen=True)
class E2BSettings:
    engine: str = ""  #: "": gvisor where it is, else container
    pool: int = 0  #: sandboxes of each template that are kept ready
    prepare: bool = False  #: the images of E2B's own templates are made when the server starts
    port: int | None = None  #: TLS on this port besides, for clients that know a domain only; 0: any that is free
    certificate: str = ""  #: for that one: PEM, with its key
    authority: str = ""  #: whose certificate that, or the server's own, is
    bundle: str = ""  #: this authority and the system's, in one file
    pages: bool = False  #: web pages of any origin may call, as they may call E2B's own servers


def domain_of(domain: str) -> str:
    """What names that E2B's clients make end in. No client takes a certificate for ``*.localhost``: below a single word
    there is one word more."""
    return domain if "." in domain else f"sbx.{domain}"
