"""MCP without a transport: what a model is told and may say, bounded and checked; sessions' sandboxes; the SDK's own
client over the fake engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from mcp import Client

import sloplet.mcp
from sloplet.code.results import CodeFailure, CodeResult, RichResult
from sloplet.errors import (
    FileMissing,
    InvalidLimit,
    InvalidName,
    NotAllowed,
    QuotaExceeded,
    RequestInvalid,
    SandboxExists,
    SandboxNotFound,
    SlopletError,
    SpecError,
    StartFailed,
)
from sloplet.mcp import uris
from sloplet.mcp.bounded import Kept, clean, one_line, share, shorten
from sloplet.mcp.boxes import Boxes
from sloplet.mcp.call import failed
from sloplet.mcp.local import LocalGround
from sloplet.mcp.policy import Policy
from sloplet.mcp.progress import nobody, telling
from sloplet.mcp.server import Session, make_server
from sloplet.mcp.stdio import MAX_LINE, Incoming
from sloplet.mcp.tools import toolbox
from sloplet.mcp.tools.files import image_type, is_binary, split_lines
from sloplet.mcp.tools.network import merged, policy_words
from sloplet.mcp.tools.running import MAX_IMAGE, Printed, code_answer
from sloplet.netspec import NetworkSpec
from sloplet.network.log import Decision
from sloplet.server.mcpasked import session_asked

pytestmark = pytest.mark.anyone


# -- text that is bounded ------------------------------------------------------------------------------------------


def test_a_short_text_stays_as_it_is() -> None:
    assert shorten("a\nb\n", 100) == "a\nb\n"


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_of_a_long_text_head_and_tail_stay(pieces: int) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    kept = Kept(1000)
    for start in range(0, len(text), max(1, len(text) // pieces)):
        kept.add(text[start : start + max(1, len(text) // pieces)])
    cut = kept.cut(1000)
    assert cut.startswith("line 0\nline 1\n")
    assert cut.endswith("line 19999\n")
    note = re.search(r"\[\.\.\. ([0-9,]+) characters left out \.\.\.\]", cut)
    assert note is not None
    shown = cut.replace(f"\n{note[0]}\n", "")
    assert int(note[1].replace(",", "")) == len(text) - len(shown)
    assert len(shown) <= 1000
    assert kept.last_line == "line 19999"


def test_an_endless_line_is_cut_too() -> None:
    assert len(shorten("x" * 1_000_000, 1000)) < 1100


def test_memory_is_bounded_whatever_comes() -> None:
    kept = Kept(1000)
    for _ in range(2000):
        kept.add("y" * 997)
    assert len(kept._head) + sum(map(len, kept._tail)) <= 6000
    assert kept.size == 2000 * 997


@pytest.mark.parametrize(
    ("most", "first", "second", "shared"),
    [(100, 10, 20, (10, 90)), (100, 90, 20, (80, 20)), (100, 500, 500, (50, 50)), (100, 0, 900, (0, 100))],
)
def test_two_texts_share_the_room(most: int, first: int, second: int, shared: tuple[int, int]) -> None:
    assert share(most, first, second) == shared


def test_what_cannot_be_encoded_is_replaced() -> None:
    assert clean("a\udcffb") == "a?b"
    json.dumps(clean("\ud800")).encode()
    assert one_line("a\x1b[31mb\nc") == "a [31mb c"
    assert len(one_line("z" * 999)) == 200


# -- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/workspace/a b.txt", "/ü/%41", "/x\udcff", "/a?b#c", "/"])
def test_files_have_addresses_and_back(path: str) -> None:
    uri = uris.file_uri("abc123", path, "/workspace")
    if path == "/":
        assert uris.parse(uri) is None
    else:
        assert uris.parse(uri) == uris.FileAt("abc123", path)


def test_relative_paths_begin_in_the_workspace() -> None:
    assert uris.file_uri("abc", "x/../y", "/workspace") == "sloplet://abc/files/workspace/y"


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc/passwd",
        "sloplet://a/files/",
        "sloplet://a/files/x%00y",
        "sloplet://a b/files/x",
        "sloplet://a/processes/x/output",
        "sloplet://a/processes/1/other",
        "sloplet://" + "a" * 20_000 + "/files/x",
        "",
    ],
)
def test_what_is_no_address_means_nothing(uri: str) -> None:
    assert uris.parse(uri) is None


# -- the tools as they are told ------------------------------------------------------------------------------------

TOOLS = toolbox().tools


def test_the_tools() -> None:
    assert set(TOOLS) == {
        "run", "run_code", "read_file", "write_file", "edit_file", "list_files", "start_process", "process_output",
        "stop_process", "snapshot", "rollback", "fork", "diff", "delete_snapshot", "open_url", "network_log",
        "create_sandbox", "list_sandboxes", "delete_sandbox",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_no_tool_has_an_argument_that_could_widen_anything(name: str) -> None:
    schema = TOOLS[name].listed().input_schema
    assert schema["additionalProperties"] is False
    forbidden = {
        "image", "engine", "at_least", "memory", "cpus", "disk", "pids", "network", "allow", "deny", "secrets",
        "secret", "volumes", "volume", "mount", "user", "sudo", "ttl", "ports", "template", "controller", "server",
    }  # fmt: skip
    assert not forbidden & set(schema["properties"])


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_tools_say_what_they_do(name: str) -> None:
    listed = TOOLS[name].listed()
    assert listed.description
    assert listed.annotations is not None
    hints = listed.annotations
    assert None not in (hints.read_only_hint, hints.destructive_hint, hints.idempotent_hint, hints.open_world_hint)
    assert not (hints.read_only_hint and hints.destructive_hint)


def test_what_every_conversation_pays() -> None:
    words = sum(len(tool.listed().description or "") + len(json.dumps(tool.listed().input_schema)) for tool in
                TOOLS.values())  # fmt: skip
    assert words < 13_000


# -- errors --------------------------------------------------------------------------------------------------------


def text_of(result: Any) -> str:
    return "\n".join(block.text for block in result.content if block.type == "text")


def test_errors_say_what_to_do_and_no_path_of_the_host() -> None:
    import sys

    told = text_of(failed(StartFailed(f"cannot open {sys.prefix}/lib/x", hint=f"see {sys.prefix}/log")))
    assert told == "StartFailed: cannot open <host>\nHint: see <host>"
    inside = text_of(failed(FileMissing("cannot stat /tmp/x: No such file or directory")))
    assert "/tmp/x" in inside  # the model's own path


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sloplet.mcp.require()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SlopletError, match="not installed") as caught:
        sloplet.mcp.require()
    assert caught.value.hint == "pip install 'sloplet[mcp]'"


# -- policy --------------------------------------------------------------------------------------------------------


def test_a_model_may_ask_for_more_time_up_to_a_limit() -> None:
    policy = Policy(timeout=10, max_timeout=60)
    assert policy.seconds(None) == 10
    assert policy.seconds(60) == 60
    with pytest.raises(InvalidLimit):
        policy.seconds(61)


@pytest.mark.parametrize("wrong", [{"max_sandboxes": 0}, {"max_output": 1}, {"max_output": 10**9}])
def test_senseless_policies(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidLimit):
        Policy(**wrong)


def test_settings_of_a_session_by_its_url() -> None:
    asked = session_asked(
        "image=python:3.12&engine=container&memory=1g&cpus=0.5&allow=pypi.org&allow=%40github&env=A=b%3Dc"
        "&volume=cache:/cache:ro&max_sandboxes=2&timeout=30s&idle=1h&keep=true&sandbox=dev&session=w1&label=team=x"
    )
    spec = asked.spec
    assert (spec.image, spec.engine, spec.limits.memory, spec.limits.cpus) == ("python:3.12", "container", 2**30, 0.5)
    assert set(spec.network.allow) == {"pypi.org", "@github"}
    assert spec.env == (("A", "b=c"),)
    assert (spec.volumes[0].source, spec.volumes[0].mode) == ("cache", "ro")
    assert (asked.policy.max_sandboxes, asked.policy.timeout, asked.idle) == (2, 30.0, 3600.0)
    assert (asked.keep, asked.sandbox, asked.session, asked.said) == (True, "dev", "w1", True)
    assert dict(spec.labels) == {"team": "x"}
    assert not session_asked("").said
    assert not session_asked("sandbox=dev").said


@pytest.mark.parametrize(
    "query",
    [
        "imag=x", "image=a&image=b", "cpus=many", "keep=perhaps", "network=all", "network=none&allow=x.org",
        "volume=/etc", "volume=~/x:/y", "env=A", "session=../x", "sandbox=a%2Fb", "max_sandboxes=0", "=", "image",
        "secret=x", "image=" + "a" * 20_000, "engine=Rm%20-rf", "timeout=soon", "cpus=nan", "pids=1e9",
    ],
)  # fmt: skip
def test_what_makes_no_sense_in_a_url_is_refused(query: str) -> None:
    with pytest.raises((RequestInvalid, SpecError)):
        session_asked(query)


def test_the_longest_idle_time_is_a_day() -> None:
    assert session_asked("idle=99d").idle == 86_400


# -- what files are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n...", "image/png"), (b"\xff\xd8\xff\xe0", "image/jpeg"), (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"), (b"RIFF\0\0\0\0WAVE", None), (b"<svg/>", None), (b"", None),
    ],
)  # fmt: skip
def test_images_are_known_by_their_bytes(head: bytes, kind: str | None) -> None:
    assert image_type(head) == kind


@pytest.mark.parametrize(
    ("head", "binary"),
    [
        (b"text\n", False), ("ü".encode() * 100, False), (b"a\0b", True), (b"\xff\xfe", True), (b"", False),
        (b"a" * 8191 + "ü".encode()[:1], False), (b"a" * 100 + "ü".encode()[:1], True),
    ],
)  # fmt: skip
def test_text_is_known_by_its_bytes(head: bytes, binary: bool) -> None:
    assert is_binary(head) is binary


def test_lines_are_split_and_long_ones_cut() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"one\ntw", b"o\n", b"x" * 50, b"y" * 50 + b"\nlast"):
            yield piece

    async def lines() -> list[str]:
        return [line async for line in split_lines(pieces(), 60)]

    assert asyncio.run(lines()) == [
        "one\n", "two\n", "x" * 50 + "y" * 10 + " [... 40 bytes of this line left out ...]\n", "last",
    ]  # fmt: skip


# -- cells ---------------------------------------------------------------------------------------------------------


def cell(*results: RichResult, **more: Any) -> Any:
    return code_answer(CodeResult(results=results, **more), Printed(1000, nobody), 1000)


def test_images_of_a_cell_are_images_and_then_there_is_no_data() -> None:
    answer = cell(RichResult({"image/png": b"\x89PNG", "text/plain": b"<Figure>"}))
    result = answer.result()
    assert [block.type for block in result.content] == ["text", "image"]
    assert result.structured_content is None


def test_tables_and_errors_of_a_cell_are_text_and_data() -> None:
    result = cell(
        RichResult({"text/html": b"<table>", "text/plain": b"a b\n1 2"}, main=True),
        error=CodeFailure("ValueError", "no", "Traceback...\nValueError: no"),
    ).result()
    assert "a b\n1 2" in text_of(result)
    assert "ValueError: no" in text_of(result)
    assert result.structured_content["result"] == "a b\n1 2"
    assert result.structured_content["error"]["name"] == "ValueError"


def test_images_that_no_model_takes_are_left_out_and_told() -> None:
    result = cell(RichResult({"image/png": b"x" * (MAX_IMAGE + 1)})).result()
    assert [block.type for block in result.content] == ["text"]
    assert "1 images were left out" in text_of(result)


# -- the network in words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (NetworkSpec(), "no network"),
        (NetworkSpec("rules", allow=("pypi.org",)), "may reach pypi.org"),
        (NetworkSpec("rules", allow=("a.org",), deny=("b.a.org",)), "but not b.a.org"),
        (NetworkSpec("learn"), "any public host"),
    ],
)
def test_policy_in_words(spec: NetworkSpec, word: str) -> None:
    assert word in policy_words(spec)
    assert "No tool can change this" in policy_words(spec)


def test_the_same_refusal_many_times_is_one_row() -> None:
    rows = [Decision(n, n, 0.0, "x", "a.org", "", 443, "deny", reason="not allowed") for n in range(5)]
    rows.append(Decision(9, 9, 0.0, "x", "b.org", "", 443, "deny", reason="not allowed"))
    assert [(row.target, row.count) for row in merged(rows)] == [("a.org:443", 5), ("b.org:443", 1)]


# -- a session's sandboxes -----------------------------------------------------------------------------------------


class Pretend:
    """A ground whose sandboxes are names."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing: SlopletError | None = None
        self.lending = ""

    def _box(self) -> Any:
        number = len(self.made) + 1

        async def kill() -> None:
            self.ended.append(f"id{number}")

        box = SimpleNamespace(id=f"id{number}", kill=kill)
        self.made.append(box)
        return box

    async def make(self, say: Any, *, main: bool) -> Any:
        await self.gate.wait()
        if self.failing is not None:
            raise self.failing
        return self._box()

    async def fork(self, box: Any, count: int, snapshot: str | None) -> Sequence[Any]:
        return [self._box() for _ in range(count)]

    async def url(self, box: Any, port: int) -> str:
        return ""

    async def end(self, box: Any) -> None:
        await box.kill()

    def lent(self, box: Any) -> bool:
        return bool(box.id == self.lending)


def session(most: int, work: Callable[[Boxes, Pretend], Awaitable[None]], *, explicit: bool = False) -> Pretend:
    async def run() -> Pretend:
        ground = Pretend()
        boxes = Boxes(ground, most, explicit=explicit)
        try:
            await work(boxes, ground)
        finally:
            await boxes.close()
        assert sorted(ground.ended) == sorted(box.id for box in ground.made)
        return ground

    return asyncio.run(run())


def test_the_own_is_made_once_and_by_first_use() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        assert boxes.all() == []
        ground.gate.clear()
        calls = [asyncio.ensure_future(boxes.get(None)) for _ in range(10)]
        await asyncio.sleep(0)
        ground.gate.set()
        assert {held.id for held in await asyncio.gather(*calls)} == {"id1"}
        assert (await boxes.get("main")).id == (await boxes.get("id1")).id == "id1"

    assert len(session(3, work).made) == 1


def test_a_call_that_is_cancelled_leaves_it_to_the_next() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        ground.gate.clear()
        call = asyncio.ensure_future(boxes.get(None))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        ground.gate.set()
        assert (await boxes.get(None)).id == "id1"

    assert len(session(3, work).made) == 1


def test_one_that_failed_to_start_can_be_tried_again() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        ground.failing = StartFailed("no")
        with pytest.raises(StartFailed):
            await boxes.get(None)
        ground.failing = None
        assert (await boxes.get(None)).id == "id1"

    session(1, work)


def test_no_more_than_are_allowed_whoever_asks_at_once() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        main = await boxes.get(None)
        outcomes = await asyncio.gather(*(boxes.create(None) for _ in range(10)), return_exceptions=True)
        assert sum(isinstance(each, QuotaExceeded) for each in outcomes) == 8
        with pytest.raises(QuotaExceeded):
            await boxes.fork(main, 1, None)
        await boxes.delete("box-1")
        assert [held.name for held in await boxes.fork(main, 1, None)] == ["fork-1"]

    assert len(session(3, work).made) == 4


def test_names_are_the_sessions_own() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        await boxes.create("second")
        for wrong in ("Second", "-x", "a b", "../x", "x" * 40, ""):
            with pytest.raises(InvalidName):
                await boxes.create(wrong)
        for taken in ("second", "main"):
            with pytest.raises(SandboxExists):
                await boxes.create(taken)
        with pytest.raises(SandboxNotFound):
            await boxes.get("third")
        with pytest.raises(SandboxNotFound):
            await boxes.delete("third")

    session(5, work)


def test_the_own_that_was_deleted_is_made_anew() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        await boxes.get(None)
        await boxes.delete("main")
        assert (await boxes.get(None)).id == "id2"

    session(1, work)


def test_what_is_only_lent_is_not_thrown_away() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        ground.lending = "id1"
        await boxes.get(None)
        with pytest.raises(NotAllowed):
            await boxes.delete("main")
        assert ground.ended == []

    session(1, work)


def test_without_a_session_each_call_names_its_sandbox() -> None:
    async def work(boxes: Boxes, ground: Pretend) -> None:
        for ref in (None, "main"):
            with pytest.raises(SandboxNotFound):
                await boxes.get(ref)
        held = await boxes.create(None)
        assert (await boxes.get(held.id)) is held
        await boxes.expire(3600)
        assert boxes.all() == [held]
        await boxes.expire(-1)
        assert boxes.all() == []
        assert ground.ended == ["id1"]

    session(2, work, explicit=True)


def test_what_is_being_made_when_the_session_ends_is_given_up() -> None:
    async def run() -> None:
        ground = Pretend()
        ground.gate.clear()
        boxes = Boxes(ground, 2)
        call = asyncio.ensure_future(boxes.get(None))
        await asyncio.sleep(0)
        await boxes.close()
        with pytest.raises(SandboxNotFound):
            await call
        with pytest.raises(SandboxNotFound):
            await boxes.get(None)
        assert ground.made == []

    asyncio.run(run())


# -- progress, and lines -------------------------------------------------------------------------------------------


def test_progress_tells_the_newest_word_and_grows() -> None:
    async def run() -> list[tuple[float, str | None]]:
        told: list[tuple[float, str | None]] = []
        enough = asyncio.Event()

        async def report(progress: float, total: float | None, message: str | None) -> None:
            told.append((progress, message))
            if len(told) == 2:
                enough.set()

        async with telling(report, "begins") as say:
            say("one\x07")
            while not told:
                await asyncio.sleep(0.01)
            say("two")
            say("three")
            await asyncio.wait_for(enough.wait(), 10)
        return told

    told = asyncio.run(run())
    assert [message for _, message in told] == ["one", "three"]
    assert told[0][0] < told[1][0]


def test_lines_of_a_client_are_bounded() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"a":1}\n\n  \n{"b"'
        yield b":2}\n"
        for _ in range(MAX_LINE // 2**20 + 2):
            yield b"x" * 2**20
        yield b'\n{"c":3}\nrest that never ends'

    async def lines() -> list[str]:
        return [line async for line in Incoming(chunks())]

    assert asyncio.run(lines()) == ['{"a":1}', '{"b":2}', "a message that is too long", '{"c":3}']


# -- the SDK's client over the fake engine -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_a_session_of_the_official_client(mode: str) -> None:
    async def run() -> None:
        boxes = Boxes(LocalGround({"engine": "fake"}), 2)
        server = make_server(lambda _: Session(boxes, Policy(max_output=1000)))
        try:
            async with Client(server, mode=mode) as client:
                await _use(client)
                assert len(boxes.all()) == 1
        finally:
            await boxes.close()

    asyncio.run(run())


async def _use(client: Client) -> None:
    assert "sandbox" in (client.instructions or "")
    assert len((await client.list_tools()).tools) == len(TOOLS)
    assert (await client.list_resources()).resources == []  # and no sandbox was made for the look
    wrote = await client.call_tool("write_file", {"path": "a.txt", "content": "one\ntwo\n"})
    assert wrote.structured_content == {"path": "a.txt", "bytes": 8, "created": True}
    ran = await client.call_tool("run", {"command": "cat a.txt; cat nothing", "timeout": "5"})
    assert ran.structured_content["stdout"] == "one\ntwo\n"
    assert ran.structured_content["exit_code"] == 1
    assert not ran.is_error
    long = await client.call_tool("run", {"command": "seq 1 2000"})
    assert long.structured_content["truncated"]
    assert len(text_of(long)) < 1200
    assert "characters left out" in text_of(long)
    files = (await client.list_resources()).resources
    uri = next(each.uri for each in files if each.name == "a.txt")
    read = await client.read_resource(uri)
    assert read.contents[0].text == "one\ntwo\n"  # type: ignore[union-attr]
    unknown = await client.call_tool("read_file", {"path": "b", "user": "root"})
    assert unknown.is_error
    assert "has no argument 'user'" in text_of(unknown)
