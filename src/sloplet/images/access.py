"""On whose behalf registries are asked: which credentials are shown, and which addresses may be reached.

Whoever owns this SLOPLET_HOME uses his own logins and reaches what his machine reaches. A tenant of a server does
neither, unless the operator said so: what ``sloplet serve`` was told lies in ``server/registries.json`` of the main
home, because tenants' keepers pull, too. Without that file nothing is allowed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SpecError
from ..fs import FOLDER, write_atomic
from ..state.home import Home, unwritable
from . import credentials as own
from .credentials import ANONYMOUS, Credentials
from .reach import Reach
from .reference import Reference, is_host
from .registries import Endpoint

_FILE = "registries.json"


@dataclass(frozen=True)
class Access:
    """How one pull or push asks."""

    given: Credentials = field(default=ANONYMOUS, repr=False)  #: for the registry that is named, and for no mirror
    logins: frozenset[str] | None = None  #: registries that this machine's own logins are used for; None: all
    reach: Reach | None = None  #: None: everywhere

    def credentials(self, endpoint: Endpoint, reference: Reference) -> Credentials:
        """Blocking: helpers may be asked. RegistryDenied."""
        if self.given and endpoint.host == reference.registry and not endpoint.mirror:
            return self.given
        if self.logins is not None and endpoint.host not in self.logins:
            return ANONYMOUS
        return own.find(endpoint.host, endpoint.repository)

    def reach_of(self, endpoint: Endpoint) -> Reach | None:
        """A mirror is what the operator wrote down: it may be anywhere."""
        if self.reach is None or not endpoint.mirror:
            return self.reach
        return self.reach.plus(endpoint.host)

    def with_login(self, username: str, password: str) -> Access:
        """The same with credentials for the registry that is asked for."""
        return replace(self, given=Credentials(username, password, source="this request"))


def access_of(home: Home, *, tenant: bool | None = None) -> Access:
    """What holds for who uses this home. ``tenant``: it is to be as for a tenant, wherever it is. Blocking."""
    main = home.main
    if tenant is False or (main is None and not tenant):
        return Access()
    told = _told(main or home)
    return Access(logins=frozenset(told.get("logins", ())), reach=Reach(told.get("allow", ())))


def parse_registry(text: str) -> str:
    """``HOST`` or ``HOST:PORT``, of the operator's. SpecError."""
    if not is_host(text):
        raise SpecError(f"{text[:80]!r} is not a registry", hint="HOST or HOST:PORT, for example registry.lan:5000")
    return text


def publish(main: Home, allow: Iterable[str], logins: Iterable[str]) -> None:
    """Write down what the operator allows his tenants. StateUnwritable."""
    data = json.dumps({"allow": sorted(allow), "logins": sorted(logins)}, indent=1).encode()
    folder = main.path / "server"
    try:
        fd = os.open(folder, FOLDER)
        try:
            write_atomic(fd, _FILE, data)
        finally:
            os.close(fd)
    except OSError as error:
        raise unwritable(folder / _FILE, error) from error


def _told(main: Home) -> dict[str, list[str]]:
    try:
        found: Any = json.loads((main.path / "server" / _FILE).read_bytes())
        return {key: [str(each) for each in found[key]] for key in ("allow", "logins")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
