"""What a sandbox's requests and connections are given on their way that it never sees: headers by host, and the
proxy's password. The values are here, in the holder's memory, and nowhere else.

Nothing of a value is in any text, repr or exception made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import SpecError
from ..headerspec import (
    PROXY_KEY,
    HeaderSpec,
    ProxySpec,
    check_credential,
    check_header_value,
    header_key,
    keys_of,
    read_proxy,
)
from ..netspec import NetworkSpec
from .channel import Refused
from .hosts import Host, parse_host

_AGAIN = "give it again (box.network.set(Network(...)), or PUT .../network)"


class Injected:
    """Of one policy. Another policy has another one, which knows the values that are still wanted (``under``)."""

    def __init__(self, spec: NetworkSpec, before: Injected | None = None) -> None:
        self.proxy: ProxySpec | None = read_proxy(spec.proxy) if spec.proxy else None
        self._proxy_text = spec.proxy
        self._headers: HeaderSpec = spec.headers
        self._hosts = _ranked(spec.headers)
        self._wanted = frozenset(keys_of(spec.headers, spec.proxy))
        self._values: dict[str, str] = {}
        if before is not None:
            same = before._proxy_text == spec.proxy  # a password is for that user, of that proxy
            self._values = {
                key: value
                for key, value in before._values.items()
                if key in self._wanted and (key != PROXY_KEY or same)
            }

    def __repr__(self) -> str:
        return f"Injected({', '.join(sorted(self._wanted))})"

    def __reduce__(self) -> str:
        raise TypeError("values do not leave their process")

    def under(self, spec: NetworkSpec) -> Injected:
        return Injected(spec, self)

    def check(self, values: Mapping[str, str | None], placeholders: Iterable[str] = ()) -> None:
        """SpecError: a key that is not known here, or a value that cannot be sent."""
        places = list(placeholders)
        for key, value in values.items():
            if key not in self._wanted:
                what = "its proxy has no password" if key == PROXY_KEY else "this sandbox sets no such header"
                raise SpecError(f"{key[:120]!r}: {what}", hint=", ".join(sorted(self._wanted)) or "there are none")
            if value is None:
                continue
            if key == PROXY_KEY:
                check_credential("password", value)
            else:
                check_header_value(key, value)
            if any(place in value for place in places):
                raise SpecError(f"the value of {key} holds a placeholder", hint="give what the placeholder stands for")

    def set(self, values: Mapping[str, str | None]) -> None:
        """At once, also for open connections; None takes one away. They were checked."""
        for key, value in values.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value

    def clear(self) -> None:
        self._values = {}

    def values(self) -> dict[str, str]:
        return dict(self._values)

    def at(self, name: str, port: int) -> bool:
        """Whether requests to there are given any."""
        return any(host.matches(name, port) for host, _, _ in self._hosts)

    def fields(self, name: str, port: int) -> list[tuple[bytes, bytes]]:
        """What requests to there get now; of two for the same header, that of the host that is named more exactly.
        Refused if a value is missing."""
        found: dict[str, tuple[bytes, bytes]] = {}
        for host, text, names in self._hosts:
            if not host.matches(name, port):
                continue
            for header in names:
                if header.lower() in found:
                    continue
                value = self._values.get(header_key(text, header))
                if value is None:
                    raise Refused(f"the header {header} that requests to {name} get has no value now: {_AGAIN}")
                found[header.lower()] = header.encode(), value.encode()
        return list(found.values())

    def password(self) -> str:
        """The proxy's; "" if it has none. Refused if it is missing."""
        if self.proxy is None or not self.proxy.password:
            return ""
        if PROXY_KEY not in self._values:
            raise Refused(f"the password of the proxy {self.proxy.host} is not known now: {_AGAIN}")
        return self._values[PROXY_KEY]


def _ranked(headers: HeaderSpec) -> list[tuple[Host, str, tuple[str, ...]]]:
    """The more exactly named first: the name itself, then the longer ``*.name``."""
    found = [(parse_host(text), text, names) for text, names in headers]
    return sorted(found, key=lambda item: (item[0].wild, -len(item[0].name), item[0].ports.every, item[1]))
