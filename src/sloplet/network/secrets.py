"""Placeholders and what stands for them: swapped for bound hosts inside TLS, refused everywhere else.

Nothing of a value is in any text, repr or exception made here.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol
from urllib.parse import quote, unquote_to_bytes

from ..errors import SpecError
from ..secretspec import check_value
from .channel import Refused
from .hosts import parse_host
from .http1 import MAX_HEAD, Head, Request, Response, with_field
from .needles import Growth, Replacer, Scanner, Value, disguises, echoes

_SHORTEST_PLACEHOLDER = 8
_SHORTEST_SCRUBBED = 8  # a shorter value would be found in what has nothing to do with it
_MAX_HELD = 16 * 1024 * 1024
_HEAD_GROWTH = MAX_HEAD  # by what is put in place of placeholders, in all of a request's head
_BODY_GROWTH = 256 * 1024  # and in all of its body
_MAX_CREDENTIALS = 64  # different ones of Basic, on one connection
_CREDENTIALS_LENGTH = 32 * 1024  # of all of these: a program chooses what they are, and answers are searched for them
_MAX_FORMS = 256  # of values that are not the ones of now any more
_AGAIN = "give it again (`sloplet secret set`, or box.network.set_secret)"
#: Headers of a response that say where it ends.
_FRAMING = frozenset(b"content-length transfer-encoding connection upgrade".split())
#: Headers that say how a message is to be read: never changed.
_FIXED = frozenset(
    b"host content-length transfer-encoding connection upgrade te trailer expect content-type content-encoding".split()
)


class Spec(Protocol):
    """``netspec.SecretSpec``."""

    @property
    def name(self) -> str: ...

    @property
    def hosts(self) -> Sequence[str]: ...

    @property
    def where(self) -> Sequence[str]: ...

    @property
    def placeholder(self) -> str: ...


class SecretTable:
    """The secrets of one sandbox, with their values."""

    def __init__(
        self,
        specs: Iterable[Spec],
        values: Mapping[str, str | None] | None = None,
        *,
        before: SecretTable | None = None,
    ) -> None:
        """``before``: whose values it begins with, those of earlier included."""
        self._specs = {spec.name: spec for spec in specs}
        self._hosts = {spec.name: [parse_host(item) for item in spec.hosts] for spec in self._specs.values()}
        self._values: dict[str, str] = {}
        self._forms: dict[bytes, str] = {}  # of the values of now -> whose
        self._past: dict[bytes, str] = {}  # the same of those of before, oldest first
        self._held = 0  # bytes of bodies that are held back, on all connections
        for spec in self._specs.values():
            if len(spec.placeholder) < _SHORTEST_PLACEHOLDER or not spec.placeholder.isascii():
                raise SpecError(
                    f"the placeholder of the secret {spec.name} cannot be told from other text",
                    hint=f"{_SHORTEST_PLACEHOLDER} or more ASCII characters",
                )
        if before is not None:
            self._past = {form: name for form, name in before._past.items() if name in self._specs}
            self.set({name: value for name, value in before._values.items() if name in self._specs})
        if values:
            self.set(values)

    def __repr__(self) -> str:
        return f"SecretTable({', '.join(self._specs)})"

    def __reduce__(self) -> str:
        raise TypeError("secrets do not leave their process")

    def set(self, values: Mapping[str, str | None]) -> None:
        """New values, at once, also for open connections; None takes one away. SpecError: an unknown name, or a value
        that cannot be put where it is asked for; then nothing has changed."""
        for name, value in values.items():
            if name not in self._specs:
                raise SpecError(
                    f"this sandbox has no secret {name[:80]!r}", hint=", ".join(self._specs) or "it has none"
                )
            if value is not None:
                places = self.placeholders.values()
                check_value(f"the value of the secret {name}", value, self._specs[name].where, places)
        before = self._forms
        for name, value in values.items():
            if value is None:
                self._values.pop(name, None)
            else:
                self._values[name] = value
        self._forms = {
            form: name
            for name, value in self._values.items()
            if len(value) >= _SHORTEST_SCRUBBED
            for form in echoes(value.encode())
        }
        for form, name in before.items():
            if form not in self._forms:
                self._past.pop(form, None)  # it is the newest again
                self._past[form] = name
        for form in list(self._past)[:-_MAX_FORMS]:
            del self._past[form]

    def clear(self) -> None:
        """No values any more, and none of before either: nothing is sent, and nothing comes back."""
        self._values, self._forms, self._past = {}, {}, {}

    @property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(self._specs.values())

    @property
    def placeholders(self) -> dict[str, str]:
        """By name: what the sandbox's environment holds."""
        return {spec.name: spec.placeholder for spec in self._specs.values()}

    def values(self) -> dict[str, str]:
        """Those that are known now."""
        return dict(self._values)

    def copy(self) -> SecretTable:
        """As it is now: for a fork in the same holder."""
        return SecretTable(self.specs, before=self)

    def at(self, host: str, port: int, *, secure: bool) -> Here:
        """For one HTTP connection; ``secure``: inside TLS that we opened and whose server was verified."""
        bound = [
            spec for spec in self._specs.values() if any(item.matches(host, port) for item in self._hosts[spec.name])
        ]
        return Here(self, host, bound if secure else [], secure)

    def scan(self, where: str = "on a connection that is not HTTP over TLS") -> Scanner:
        """For the program's side of one opaque connection (and of HTTP judged by address)."""
        return Scanner(
            {
                needle: f"the placeholder of the secret {spec.name} was sent {where}; it is only for "
                f"{', '.join(spec.hosts)}, over TLS"
                for spec in self._specs.values()
                for needle in disguises(spec.placeholder.encode())
            }
        )

    @contextmanager
    def holding(self, size: int) -> Iterator[bool]:
        """Whether so much of a body may be held back now, beside what other connections of the sandbox hold."""
        if self._held + size > _MAX_HELD:
            yield False
            return
        self._held += size
        try:
            yield True
        finally:
            self._held -= size

    def value(self, spec: Spec) -> bytes:
        """Refused if it has none now."""
        if spec.name not in self._values:
            raise Refused(f"the secret {spec.name} has no value now: {_AGAIN}")
        return self._values[spec.name].encode()

    def known(self, spec: Spec) -> bool:
        return spec.name in self._values

    def shown(self, bound: Sequence[Spec]) -> dict[bytes, bytes]:
        """What a server may send back of the values that these have and have had -> what is shown instead."""
        places = {spec.name: spec.placeholder.encode() for spec in bound}
        return {form: places[name] for form, name in {**self._past, **self._forms}.items() if name in places}

    def others(self, bound: Sequence[Spec]) -> list[Spec]:
        return [spec for spec in self._specs.values() if spec not in bound]


class Here:
    """The secrets as they are on one connection."""

    def __init__(self, table: SecretTable, host: str, bound: list[Spec], secure: bool) -> None:
        self._table = table
        self._host = host
        self._bound = bound
        self._credentials: dict[bytes, bytes] = {}  # of Basic: what may come back -> what is shown instead
        over = "" if secure else " without TLS"
        self._foreign = Scanner(
            {
                needle: f"the placeholder of the secret {spec.name} was sent to {host}{over}; it is only for "
                f"{', '.join(spec.hosts)}, over TLS"
                for spec in table.others(bound)
                for needle in disguises(spec.placeholder.encode())
            }
        )

    # -- requests ----------------------------------------------------------------------

    def swap_head(self, request: Request) -> Request:
        """With values in place of placeholders; Refused if one is where it must not be, or has no value."""
        growth = Growth(_HEAD_GROWTH)
        for spec in self._bound:
            if "query" in spec.where:
                request = self._swap_query(request, spec, growth)
        pairs = {spec.placeholder.encode(): self._value(spec) for spec in self._bound if "headers" in spec.where}
        swap = Replacer(pairs, growth=growth)
        request = replace(request, fields=tuple(self._swap_field(field, swap) for field in request.fields))
        self._check_rest(request)
        if self._scrubbed():
            request = replace(request, fields=with_field(request.fields, b"Accept-Encoding", b"identity"))
        return request

    def _swap_query(self, request: Request, spec: Spec, growth: Growth) -> Request:
        path, mark, query = request.target.partition(b"?")
        place = spec.placeholder.encode()
        value = self._value(spec, b"application/x-www-form-urlencoded")
        swap = Replacer({place: value, quote(place, safe="").encode(): value}, growth=growth)
        return replace(request, target=path + mark + swap.whole(query))

    def _swap_field(self, field: tuple[bytes, bytes], swap: Replacer) -> tuple[bytes, bytes]:
        name, value = field
        if name.lower() in _FIXED:
            return field
        scheme, _, coded = value.partition(b" ")
        if scheme.lower() == b"basic" and (plain := _decoded(coded.strip())):
            swapped = swap.whole(plain)
            if swapped == plain:
                return field
            made = b64encode(swapped)
            self._credentials[made] = coded.strip()
            if len(self._credentials) > _MAX_CREDENTIALS:
                raise Refused(f"more than {_MAX_CREDENTIALS} different Basic credentials on one connection")
            if sum(map(len, self._credentials)) > _CREDENTIALS_LENGTH:
                raise Refused(f"Basic credentials of more than {_CREDENTIALS_LENGTH} bytes on one connection")
            return name, scheme + b" " + made
        return name, swap.whole(value)

    def _value(self, spec: Spec, kind: bytes = b"") -> Value:
        """The one of the moment at which its placeholder is met, as it is written in a body of that type."""
        return lambda: _escaped(self._table.value(spec), kind)

    def _check_rest(self, request: Request) -> None:
        """No placeholder is left in the head."""
        text = b"\n".join((request.encode(), unquote_to_bytes(request.target)))
        self._foreign.check(text)
        for spec in self._bound:
            for needle in disguises(spec.placeholder.encode()):
                if needle in text:
                    place = "target" if needle in unquote_to_bytes(request.target) else "headers"
                    raise Refused(
                        f"the placeholder of the secret {spec.name} is in the {place} of a request to {self._host} "
                        f"in a way that is not swapped; it is for {', '.join(spec.where)} (where=)"
                    )

    def body_scan(self) -> Scanner:
        """For a request's body: placeholders of secrets that are not for this host. Those that are, but not for
        bodies, may pass as the mere text they are: transcripts are full of them."""
        reasons = dict(self._foreign.reasons)
        for spec in self._bound:
            if "body" in spec.where and not self._table.known(spec):
                reasons[spec.placeholder.encode()] = f"the secret {spec.name} has no value now: {_AGAIN}"
        return Scanner(reasons)

    def body_swap(self, request: Request) -> Replacer | None:
        """For a request's body; None if nothing is to be swapped in it. Compressed bodies are not looked into."""
        if any(coding != b"identity" for coding in request.tokens(b"content-encoding")):
            return None
        kind = b"".join(request.values(b"content-type")).partition(b";")[0].strip().lower()
        pairs: dict[bytes, Value] = {}
        for spec in self._bound:
            if "body" in spec.where and self._table.known(spec):
                place = spec.placeholder.encode()
                pairs[place] = self._value(spec, kind)
                if kind == b"application/x-www-form-urlencoded":
                    pairs[quote(place, safe="").encode()] = pairs[place]
        return Replacer(pairs, growth=Growth(_BODY_GROWTH)) if pairs else None

    # -- responses ---------------------------------------------------------------------

    def _scrubbed(self) -> dict[bytes, bytes]:
        return {**self._table.shown(self._bound), **self._credentials} if self._bound else {}

    def scrub_head(self, response: Response) -> Response:
        """With placeholders in place of values that the server sends back."""
        if not (found := self._scrubbed()):
            return response
        scrub = Replacer(found)
        fields = tuple(
            (name, value) if name.lower() in _FRAMING else (scrub.whole(name), scrub.whole(value))
            for name, value in response.fields
        )
        return replace(response, fields=fields, reason=scrub.whole(response.reason))

    def scrub_body(self, response: Head, *, same_length: bool) -> Replacer | None:
        """For a response's body; None if there is nothing to do."""
        found = self._scrubbed()
        if not found or any(coding != b"identity" for coding in response.tokens(b"content-encoding")):
            return None
        return Replacer(found, same_length=same_length)


def _decoded(coded: bytes) -> bytes:
    try:
        return b64decode(coded + b"=" * (-len(coded) % 4), validate=True)
    except ValueError:
        return b""


def _escaped(value: bytes, kind: bytes) -> bytes:
    """As it is written in a body of that type."""
    if kind == b"application/x-www-form-urlencoded":
        return quote(value, safe="").encode()
    if kind == b"application/json" or kind.endswith(b"+json"):
        return json.dumps(value.decode())[1:-1].encode()
    return value
