"""Placeholders: swapped where they may be, refused where they may not, and values shown nowhere."""

from __future__ import annotations

import base64
import json
import pickle
import traceback
from itertools import pairwise
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inspect_helpers import NAME, PLACE, VALUE, Spec

from sloplet.errors import SpecError
from sloplet.network.channel import Refused
from sloplet.network.http1 import Request, Response
from sloplet.network.needles import Replacer, Scanner, disguises
from sloplet.network.secrets import Here, SecretTable

pytestmark = pytest.mark.anyone

P, V = PLACE.encode(), VALUE.encode()


def here(*where: str, value: str | None = VALUE, host: str = NAME, secure: bool = True, port: int = 443) -> Here:
    table = SecretTable([Spec(where=where or ("headers",))], {"TOKEN": value})
    return table.at(host, port, secure=secure)


def request(*fields: tuple[bytes, bytes], target: bytes = b"/") -> Request:
    return Request(((b"Host", NAME.encode()), *fields), 1, b"GET", target)


def swapped(there: Here, *fields: tuple[bytes, bytes], target: bytes = b"/") -> bytes:
    return there.swap_head(request(*fields, target=target)).encode()


# -- swapping ---------------------------------------------------------------------------


def test_headers() -> None:
    assert b"Authorization: Bearer " + V + b"\r\n" in swapped(here(), (b"Authorization", b"Bearer " + P))
    assert b"Cookie: a=" + V + b"; b=" + V in swapped(here(), (b"Cookie", b"a=" + P + b"; b=" + P))


@pytest.mark.parametrize("user", [b"", b"x", b"me", b"git", b"oauth2"])
def test_basic_authorization(user: bytes) -> None:
    coded = base64.b64encode(user + b":" + P)
    expected = b"Basic " + base64.b64encode(user + b":" + V)
    assert b"Authorization: " + expected in swapped(here(), (b"Authorization", b"Basic " + coded))
    assert expected in swapped(here(), (b"authorization", b"Basic " + coded.rstrip(b"=")))
    first = base64.b64encode(P + b":" + user)
    assert b"Basic " + base64.b64encode(V + b":" + user) in swapped(here(), (b"Authorization", b"Basic " + first))


def test_query() -> None:
    there = here("query")
    assert swapped(there, target=b"/a?key=" + P + b"&b").startswith(
        b"GET /a?key=" + quote(VALUE, safe="").encode() + b"&b "
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (b"application/json", json.dumps('a"b\t')[1:-1]),
        (b"application/vnd.x+json; charset=utf-8", json.dumps('a"b\t')[1:-1]),
        (b"application/x-www-form-urlencoded", quote('a"b\t')), (b"text/plain", 'a"b\t'), (b"", 'a"b\t'),
    ],
)  # fmt: skip
def test_bodies_are_written_as_their_type_wants_it(kind: bytes, expected: str) -> None:
    there = here("body", value='a"b\t')
    swap = there.body_swap(request((b"Content-Type", kind)))
    assert swap is not None
    assert swap.whole(b"<" + P + b">") == b"<" + expected.encode() + b">"


def test_bodies_are_left_alone_where_nobody_asked_or_nobody_can_see() -> None:
    assert here("headers").body_swap(request()) is None
    assert here("body").body_swap(request((b"Content-Encoding", b"gzip"))) is None
    assert here("body", host="other.test").body_swap(request()) is None
    assert here("body", secure=False).body_swap(request()) is None


# -- refusing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"target": b"/" + P}, {"target": b"/?a=" + P}, {"target": b"/?a=" + b"".join(b"%%%02x" % c for c in P)},
        {"fields": (b"Authorization", b"Bearer " + P)}, {"fields": (b"Authorization",
        b"Basic " + base64.b64encode(b"me:" + P))},
        {"fields": (b"X",
        base64.urlsafe_b64encode(b"12" + P + b"3"))}, {"fields": (P, b"x")}, {"fields": (b"X", quote(P).encode())},
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [{"host": "other.test"}, {"secure": False}])
def test_elsewhere_it_is_refused(fields: dict[str, object], place: dict[str, object]) -> None:
    there = here("headers", "query", "body", **place)  # type: ignore[arg-type]
    target = fields.get("target", b"/")
    assert isinstance(target, bytes)
    given_fields = [fields["fields"]] if "fields" in fields else []
    with pytest.raises(Refused, match="the secret TOKEN"):
        swapped(there, *given_fields, target=target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "field", "target"),
    [
        ("headers", None, b"/" + P), ("headers", None, b"/?a=" + P), ("query", (b"Authorization", P), b"/"),
        ("query", None, b"/" + P),
        ("headers", (b"X", base64.b64encode(b"a" + P)), b"/"), ("headers", (b"Expect", P), b"/"), ("headers",
        (P, b"x"), b"/"),
        ("headers", (b"Content-Type", P), b"/"), ("query", None, b"/?" + b"".join(b"%%%02x" % c for c in P)),
    ],
)  # fmt: skip
def test_in_a_place_that_was_not_asked_for_it_is_refused(
    where: str, field: tuple[bytes, bytes] | None, target: bytes
) -> None:
    with pytest.raises(Refused, match="TOKEN"):
        swapped(here(where), *([field] if field else []), target=target)


def test_without_a_value_it_is_refused() -> None:
    table = SecretTable([Spec(where=("headers", "query", "body"))])
    there = table.at(NAME, 443, secure=True)
    swapped(there, (b"X", b"y"))
    for kind in ({"field": (b"X", P)}, {"target": b"/?" + P}):
        with pytest.raises(Refused, match="give it again"):
            swapped(there, *([kind["field"]] if "field" in kind else []), target=kind.get("target", b"/"))  # type: ignore[arg-type, list-item]
    with pytest.raises(Refused, match="give it again"):
        there.body_scan().feed(P)


def test_values_change_on_open_connections() -> None:
    table = SecretTable([Spec()], {"TOKEN": VALUE})
    there = table.at(NAME, 443, secure=True)
    assert V in swapped(there, (b"X", P))
    table.set({"TOKEN": "another value"})
    assert b"another value" in swapped(there, (b"X", P))
    echoed = there.scrub_head(Response(((b"A", V), (b"B", b"another value")), 1, 200, b"OK"))
    assert echoed.fields == ((b"A", P), (b"B", P))
    table.set({"TOKEN": None})
    with pytest.raises(Refused):
        swapped(there, (b"X", P))
    assert table.values() == {}


@pytest.mark.parametrize(
    ("pattern", "host", "port", "bound"),
    [
        (NAME, NAME, 443, True), (NAME, "x." + NAME, 443, False), (NAME.upper(), NAME, 1, True),
        ("*.example.test", NAME, 443, True),
        ("*.example.test", "a.b.example.test", 443, True), ("*.example.test", "example.test", 443, False),
        ("*.example.test", "evilexample.test", 443, False), (NAME + ":8443", NAME, 8443, True),
        (NAME + ":8443", NAME, 443, False),
        (NAME + ":443,8443", NAME, 8443, True), (NAME + ":443,8443", NAME, 444, False),
        (NAME + ":8000-8100", NAME, 8050, True), (NAME + ":8000-8100", NAME, 8101, False),
        (NAME + ":*", NAME, 9999, True), ("*.example.test:*", NAME, 9999, True),
    ],
)  # fmt: skip
def test_what_a_secret_is_bound_to(pattern: str, host: str, port: int, bound: bool) -> None:
    table = SecretTable([Spec(hosts=(pattern,))], {"TOKEN": VALUE})
    there = table.at(host, port, secure=True)
    if bound:
        assert V in swapped(there, (b"X", P))
    else:
        with pytest.raises(Refused):
            swapped(there, (b"X", P))


@pytest.mark.parametrize("pattern", ["10.0.0.1", "[fd00::1]:443", "*", ""])
def test_it_is_bound_to_names_only(pattern: str) -> None:
    with pytest.raises(SpecError):
        SecretTable([Spec(hosts=(pattern,))])


# -- what it may cost -------------------------------------------------------------------


def test_a_head_grows_only_so_far() -> None:
    """A few kilobytes of placeholders would be megabytes of values."""
    there = here("headers", "query", value="v" * 16000)
    assert len(swapped(there, (b"X", P * 3), target=b"/?" + P)) > 4 * 16000
    for field, target in (((b"X", P * 5), b"/"), ((b"X", P * 3), b"/?" + P * 2), ((b"X", b"y"), b"/?" + P * 5)):
        with pytest.raises(Refused, match="grow"):
            swapped(there, field, target=target)
    with pytest.raises(Refused, match="grow"):
        swapped(there, (b"Authorization", b"Basic " + base64.b64encode(b"me:" + P * 5)))


@pytest.mark.parametrize("step", [len(P), 7, 100_000])
def test_a_body_grows_only_so_far(step: int) -> None:
    """All of it together, however it comes."""
    there = here("body", value="v" * 16000)
    few, many = P * 16, P * 17
    swap = there.body_swap(request())
    assert swap is not None
    out = b"".join(swap.feed(few[at : at + step]) for at in range(0, len(few), step)) + swap.finish()
    assert out == b"v" * 16000 * 16
    swap = there.body_swap(request())
    assert swap is not None
    with pytest.raises(Refused, match="grow"):
        b"".join(swap.feed(many[at : at + step]) for at in range(0, len(many), step))
    swap = there.body_swap(request())
    assert swap is not None
    with pytest.raises(Refused, match="grow"):
        swap.whole(many)


def test_what_is_put_into_a_body_is_the_value_of_that_moment() -> None:
    """A program may hold a body back for as long as it likes."""
    table = SecretTable([Spec(where=("headers", "body"))], {"TOKEN": VALUE})
    swap = table.at(NAME, 443, secure=True).body_swap(request())
    assert swap is not None
    assert swap.feed(P) == V
    table.set({"TOKEN": "another value"})
    assert swap.feed(P) == b"another value"
    assert swap.feed(P[:-1]) == b""
    table.set({"TOKEN": None})
    with pytest.raises(Refused, match="give it again"):
        swap.feed(P[-1:])
    with pytest.raises(Refused, match=r"sloplet secret set.*box\.network\.set_secret"):
        swap.whole(P)


# -- streams ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [P, base64.b64encode(P), base64.b64encode(b"a" + P), base64.b64encode(b"ab" + P + b"cd"), quote(P).encode()]
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_stream_is_stopped_before_the_placeholder_is_whole(text: bytes, step: int) -> None:
    scan = SecretTable([Spec()]).scan()
    data = b"before " * 9 + text + b" after"
    out: list[bytes] = []
    with pytest.raises(Refused, match="TOKEN"):
        out.extend(scan.feed(data[at : at + step]) for at in range(0, len(data), step))
    assert text not in b"".join(out)
    assert data.startswith(b"".join(out))


def test_a_stream_without_it_is_never_held() -> None:
    scan = SecretTable([Spec()]).scan()
    for piece in (b"s", P[:-1], b"", b"x" * 1000, P[:5]):
        assert scan.feed(piece) == piece
    assert scan.finish() == b""


def test_bodies_may_tell_of_a_secret_of_this_host_but_of_no_other() -> None:
    other = Spec("OTHER", ("other.test",), placeholder="sloplet-secret-other-0123456789abcdef")
    there = SecretTable([Spec(), other], {"TOKEN": VALUE, "OTHER": "x"}).at(NAME, 443, secure=True)
    assert there.body_scan().feed(P) == P
    with pytest.raises(Refused, match="OTHER"):
        there.body_scan().feed(other.placeholder.encode())


@settings(deadline=None)
@given(st.binary(min_size=5, max_size=20), st.binary(max_size=30), st.binary(max_size=30))
def test_base64_is_seen_wherever_it_stands(text: bytes, before: bytes, after: bytes) -> None:
    coded = base64.b64encode(before + text + after)
    assert any(form in coded for form in disguises(text))
    coded = base64.urlsafe_b64encode(before + text + after)
    assert any(form in coded for form in disguises(text))


_NEEDLES = st.dictionaries(
    st.text("ab", min_size=1, max_size=4).map(str.encode), st.binary(max_size=3), min_size=1, max_size=3
)


@example({b"a": b"", b"bb": b"", b"baa": b""}, b"bba", [], False)
@settings(deadline=None)
@given(_NEEDLES, st.text("abc", max_size=30).map(str.encode), st.lists(st.integers(0, 30), max_size=5), st.booleans())
def test_replacing_is_the_same_for_any_split(
    pairs: dict[bytes, bytes], data: bytes, cuts: list[int], same: bool
) -> None:
    replacer = Replacer(pairs, same_length=same)
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    out = b"".join(replacer.feed(data[a:b]) for a, b in pairwise(marks)) + replacer.finish()
    assert out == Replacer(pairs, same_length=same).whole(data)
    if same:
        assert len(out) == len(data)


@settings(deadline=None)
@given(_NEEDLES, st.text("abc", max_size=30).map(str.encode), st.lists(st.integers(0, 30), max_size=5))
def test_scanning_is_the_same_for_any_split(pairs: dict[bytes, bytes], data: bytes, cuts: list[int]) -> None:
    scanner = Scanner(dict.fromkeys(pairs, "found"))
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found = False
    try:
        for a, b in pairwise(marks):
            scanner.feed(data[a:b])
    except Refused:
        found = True
    assert found == any(needle in data for needle in pairs)


# -- what comes back --------------------------------------------------------------------


def test_what_a_server_sends_back_is_hidden() -> None:
    there = here("headers", "query")
    coded = base64.b64encode(b"me:" + P)
    swapped(there, (b"Authorization", b"Basic " + coded))
    sent = base64.b64encode(b"me:" + V)
    response = Response(((b"X", V), (b"Y", b"Basic " + sent), (b"Z", quote(V, safe="").encode())), 1, 200, b"OK " + V)
    shown = there.scrub_head(response)
    assert [value for _, value in shown.fields] == [P, b"Basic " + coded, P]
    assert shown.reason == b"OK " + P
    scrub = there.scrub_body(response, same_length=False)
    assert scrub is not None
    body = b'{"token": "' + V + b'", "header": "' + sent + b'"}'
    out = b"".join(scrub.feed(body[at : at + 3]) for at in range(0, len(body), 3)) + scrub.finish()
    assert out == body.replace(V, P).replace(sent, coded)
    assert there.scrub_body(Response(((b"Content-Encoding", b"gzip"),), 1, 200, b""), same_length=False) is None


def test_no_number_of_credentials_makes_a_value_forgotten() -> None:
    """Each of them is remembered, too: they must not take the place of the value itself."""
    there = here()
    many = [(b"X-%d" % number, b"Basic " + base64.b64encode(b"%d:" % number + P)) for number in range(64)]
    swapped(there, *many, (b"Authorization", P))
    response = Response(((b"X", V),), 1, 200, b"")
    assert there.scrub_head(response).fields == ((b"X", P),)
    scrub = there.scrub_body(response, same_length=False)
    assert scrub is not None
    assert scrub.whole(V) == P
    with pytest.raises(Refused, match="64 different"):
        swapped(there, (b"Authorization", b"Basic " + base64.b64encode(b"64:" + P)))


def test_credentials_are_only_so_long() -> None:
    """The search for one whose beginning is the same again and again takes time with the square of its length."""
    there = here(value="v" * 16000)
    swapped(there, (b"Authorization", b"Basic " + base64.b64encode(b"me:" + P)))
    with pytest.raises(Refused, match="32768 bytes"):
        swapped(there, (b"Authorization", b"Basic " + base64.b64encode(b"a" * 10_000 + P)))
    with pytest.raises(Refused, match="32768 bytes"):
        swapped(here(), (b"Authorization", b"Basic " + base64.b64encode(b"a" * 30_000 + P)))


def test_values_of_before_many_rotations_do_not_hide_the_one_of_now() -> None:
    table = SecretTable([Spec()], {"TOKEN": VALUE})
    there = table.at(NAME, 443, secure=True)
    for number in range(300):
        table.set({"TOKEN": f"rotated-value-{number}"})
        swapped(there, (b"X", P))
    shown = there.scrub_head(Response(((b"X", b"rotated-value-299"), (b"Y", b"rotated-value-200")), 1, 200, b""))
    assert [value for _, value in shown.fields] == [P, P]


def test_values_of_before_are_hidden_on_later_connections_too() -> None:
    table = SecretTable([Spec()], {"TOKEN": "the first value"})
    table.set({"TOKEN": "the second value"})
    page = Response(((b"X", b"the first value"), (b"Y", b"the second value")), 1, 200, b"")
    for value in ("the second value", "the third value", None):
        table.set({"TOKEN": value})
        there = table.at(NAME, 443, secure=True)
        assert b"Accept-Encoding: identity" in swapped(there, (b"Accept-Encoding", b"gzip"))
        assert [shown for _, shown in there.scrub_head(page).fields] == [P, P]
        scrub = there.scrub_body(page, same_length=False)
        assert scrub is not None
        assert scrub.whole(b"the first value") == P
    elsewhere = table.at("other.test", 443, secure=True)
    assert elsewhere.scrub_head(page) == page, "what the server is not bound to is not known to it"
    table.clear()
    assert table.at(NAME, 443, secure=True).scrub_head(page) == page


def test_a_fork_has_the_values_and_hides_those_of_before() -> None:
    other = Spec("OTHER", placeholder="sloplet-secret-other-0123456789abcdef")
    parent = SecretTable([Spec(), other], {"TOKEN": "the first value", "OTHER": "another one"})
    parent.set({"TOKEN": "the second value"})
    kept = parent.copy()
    parent.set({"TOKEN": None})
    fork = SecretTable([Spec()], before=kept)
    assert fork.values() == {"TOKEN": "the second value"}
    page = Response(((b"X", b"the first value"), (b"Y", b"the second value"), (b"Z", b"another one")), 1, 200, b"")
    shown = fork.at(NAME, 443, secure=True).scrub_head(page)
    assert [value for _, value in shown.fields] == [P, P, b"another one"]


@pytest.mark.parametrize(
    "form",
    [
        "aB/cD+eF==gH/12 4é(", "aB/cD%2BeF%3D%3DgH/12%204%C3%A9%28", "aB%2FcD%2BeF%3D%3DgH%2F12%204%C3%A9%28",
        "aB%2fcD%2beF%3d%3dgH%2f12%204%c3%a9%28", "aB%2FcD%2BeF%3D%3DgH%2F12%204%C3%A9(",
        "aB%2FcD%2BeF%3D%3DgH%2F12+4%C3%A9%28", "aB\\/cD+eF==gH\\/12 4é(", "aB\\/cD+eF==gH\\/12 4\\u00e9(",
        "aB/cD+eF==gH/12 4\\u00e9(",
    ],
)  # fmt: skip
def test_the_usual_ways_to_write_a_value_are_hidden(form: str) -> None:
    there = here(value="aB/cD+eF==gH/12 4é(")
    scrub = there.scrub_body(Response((), 1, 200, b""), same_length=False)
    assert scrub is not None
    text = f"<{form}>".encode()
    assert b"".join(scrub.feed(text[at : at + 5]) for at in range(0, len(text), 5)) + scrub.finish() == b"<" + P + b">"


def test_what_a_program_can_make_a_server_say_of_its_answer_is_hidden_too() -> None:
    """A store answers with the Content-Type that a query asks for; a debugger with headers of any name."""
    there = here("headers", "query")
    swapped(there, target=b"/o?response-content-type=" + P)
    length = (b"Content-Length", b"%d" % len(V))
    response = Response(((b"Content-Type", V), (b"X-" + V, b"1"), (b"Trailer", V), length), 1, 200, b"")
    assert there.scrub_head(response).fields == ((b"Content-Type", P), (b"X-" + P, b"1"), (b"Trailer", P), length)


def test_two_secrets_in_one_credential_are_both_hidden() -> None:
    other = Spec("OTHER", placeholder="sloplet-secret-other-0123456789abcdef")
    there = SecretTable([Spec(), other], {"TOKEN": VALUE, "OTHER": "the-other-value"}).at(NAME, 443, secure=True)
    coded = base64.b64encode(P + b":" + other.placeholder.encode())
    sent = base64.b64encode(V + b":the-other-value")
    assert b"Basic " + sent in swapped(there, (b"Authorization", b"Basic " + coded))
    assert there.scrub_head(Response(((b"X", sent),), 1, 200, b"")).fields == ((b"X", coded),)


def test_a_value_in_an_odd_place_of_a_response_is_hidden_too() -> None:
    there = here(value="value-as-a-token")
    swapped(there, (b"Accept", b"text/" + P))
    fields = ((b"Content-Type", b"text/value-as-a-token"), (b"X-value-as-a-token", b"y"), (b"Content-Length", b"5"))
    shown = there.scrub_head(Response(fields, 1, 200, b"OK"))
    assert shown.fields == ((b"Content-Type", b"text/" + P), (b"X-" + P, b"y"), (b"Content-Length", b"5"))


def test_servers_are_asked_for_what_can_be_searched() -> None:
    assert b"Accept-Encoding: identity\r\n" in swapped(here(), (b"Accept-Encoding", b"gzip, br"))
    assert b"Accept-Encoding: gzip\r\n" in swapped(here(host="other.test"), (b"Accept-Encoding", b"gzip"))


# -- values are not shown ---------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["", "qq\nqq", " qqq", "qq\0", "qq\tq", "qq\udc80q", "x" * 20000, "é" * 9000, "a" + PLACE]
)
def test_a_value_that_cannot_be_used_is_refused_without_showing_it(value: str) -> None:
    table = SecretTable([Spec()], {"TOKEN": VALUE})
    with pytest.raises(SpecError) as caught:
        table.set({"TOKEN": value})
    assert not value or value not in "".join(traceback.format_exception(caught.value))
    assert table.values() == {"TOKEN": VALUE}
    with pytest.raises(SpecError, match="NOBODY"):
        table.set({"TOKEN": "fine", "NOBODY": "x"})
    assert table.values() == {"TOKEN": VALUE}


def test_a_placeholder_must_be_told_from_other_text() -> None:
    with pytest.raises(SpecError):
        SecretTable([Spec(placeholder="short")])


def test_nothing_shows_a_value() -> None:
    table = SecretTable([Spec()], {"TOKEN": VALUE})
    there = table.at(NAME, 443, secure=True)
    swapped(there, (b"X", P))
    assert VALUE not in repr(table) + repr(there) + str(table)
    with pytest.raises(Refused) as caught:
        swapped(there, (b"X", P), (b"Y", base64.b64encode(P)))
    assert VALUE not in str(caught.value)
    with pytest.raises(TypeError):
        pickle.dumps(table)
