"""E2B's code interpreter in a real sandbox: the lines of its answers, its contexts, and what interrupts it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from server_kit import need_container
from sloplet import AsyncSandbox
from sloplet.code.results import CodeFailure
from sloplet.server.e2b import interpreter

pytestmark = pytest.mark.timeout(120)

Lines = list[dict[str, Any]]


def inside(story: Callable[[AsyncSandbox], Awaitable[None]]) -> None:
    need_container()

    async def run() -> None:
        async with AsyncSandbox(engine="container", workdir="/workspace") as box:
            await story(box)

    asyncio.run(run())


async def cell(box: AsyncSandbox, code: str, **more: Any) -> Lines:
    """Without what every answer has: its end."""
    lines = [line async for line in await interpreter.execute(box, {"code": code, **more})]
    assert lines[-1] == {"type": "end_of_execution"}
    return lines[:-1]


def only(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["type"] == kind]


async def text(box: AsyncSandbox, code: str, **more: Any) -> Any:
    return next(
        (line["text"] for line in only(await cell(box, code, **more), "result") if line["is_main_result"]), None
    )


def test_what_cells_answer() -> None:
    async def story(box: AsyncSandbox) -> None:
        lines = await cell(box, "x =1; x", context_id=None, language=None, env_vars=None)
        assert only(lines, "result") == [{"type": "result", "is_main_result": True, "text": "1", "extra": {}}]
        assert only(lines, "number_of_executions") == [{"type": "number_of_executions", "execution_count": 1}]
        assert await text(box, "'a text'") == "a text"
        assert only(await cell(box, "{'a': [1]}"), "result")[0]["json"] == {"a": [1]}
        (printed,) = only(await cell(box, "import sys\nprint('a', end='', flush=True); print('b')"), "stdout")
        assert printed["text"] == "ab\n"
        assert printed["timestamp"].endswith("Z")
        (printed,) = only(await cell(box, "print(1, file=sys.stderr)"), "stderr")
        assert printed["text"] == "1\n"
        shown = only(await cell(box, "display({'text/latex': '$x$'}, raw=True)\n5"), "result")
        assert shown[0] == {"type": "result", "is_main_result": False, "latex": "$x$", "extra": {}}
        assert shown[1]["text"] == "5"
        assert only(await cell(box, "display({'image/png': b'PNG', 'text/x': 'y'}, raw=True)"), "result")[0] == {
            "type": "result", "is_main_result": False, "png": "UE5H", "extra": {"text/x": "y"},
        }  # fmt: skip

    inside(story)


def test_errors() -> None:
    async def story(box: AsyncSandbox) -> None:
        (error,) = only(await cell(box, "def f():\n    xyz\nf()"), "error")
        assert (error["name"], error["value"]) == ("NameError", "name 'xyz' is not defined")
        lines = error["traceback"].split("\n")
        assert lines[0] == "-" * 75
        assert lines[1].split(maxsplit=1) == ["NameError", "Traceback (most recent call last)"]
        assert lines[2] == "Cell In[1], line 3"
        assert "Cell In[1], line 2, in f" in lines
        assert lines[-1] == "NameError: name 'xyz' is not defined"
        (error,) = only(await cell(box, "false", language="bash"), "error")
        assert (error["name"], error["value"]) == ("ExitStatus", "1")
        (error,) = only(await cell(box, "import os; os._exit(3)"), "error")
        assert error["name"] == "ContextRestarting"
        assert await text(box, "1 + 1") == "2"
        for body, status, told in (
            ({"code": "1", "context_id": "nope"}, 404, "Context nope not found"),
            ({"code": "1", "context_id": "../x"}, 404, "not found"),
            ({"code": "1", "context_id": "python", "language": "js"}, 400, "Only one of context_id or language"),
            ({"code": "1", "language": "cobol"}, 500, "no kernel 'cobol'"),
            ({"code": None}, 400, "code is a text"),
            ({"code": "1", "env_vars": {"A": 1}}, 400, "env_vars"),
        ):
            with pytest.raises(interpreter.InterpreterError, match=told) as raised:
                await interpreter.execute(box, body)
            assert raised.value.status == status

    inside(story)


def test_languages_and_variables() -> None:
    async def story(box: AsyncSandbox) -> None:
        assert only(await cell(box, "console.log('Hello')", language="js"), "stdout")[0]["text"] == "Hello\n"
        assert await text(box, "process.env.FOO", language="javascript", env_vars={"FOO": "bar"}) == "bar"
        assert await text(box, "process.env.FOO || 'default'", language="js") == "default"
        assert await text(box, "import os; os.getenv('FOO')", env_vars={"FOO": "bar"}) == "bar"
        assert await text(box, "os.getenv('FOO', 'default')") == "default"
        assert only(await cell(box, "echo $FOO", language="bash", env_vars={"FOO": "b"}), "stdout")[0]["text"] == "b\n"

    inside(story)


def test_contexts() -> None:
    async def story(box: AsyncSandbox) -> None:
        assert [each["language"] for each in await interpreter.list_contexts(box)] == ["python", "javascript"]
        await interpreter.restart_context(box, "python")
        one = await interpreter.create_context(box, {})
        assert (one["language"], one["cwd"]) == ("python", "/workspace")
        other = await interpreter.create_context(box, {"language": "js", "cwd": "/nowhere/at/all"})
        assert (await interpreter.list_contexts(box))[-2:] == [one, other]
        await cell(box, "x = 1")
        await cell(box, "y = 1", context_id=one["id"])
        assert only(await cell(box, "x", context_id=one["id"]), "error")[0]["value"] == "name 'x' is not defined"
        await interpreter.restart_context(box, one["id"])
        assert only(await cell(box, "y", context_id=one["id"]), "error")[0]["name"] == "NameError"
        assert await text(box, "process.cwd()", context_id=other["id"]) == "/workspace"
        await interpreter.remove_context(box, one["id"])
        assert one["id"] not in [each["id"] for each in await interpreter.list_contexts(box)]
        for gone in (interpreter.remove_context, interpreter.restart_context):
            with pytest.raises(interpreter.NoContext):
                await gone(box, one["id"])
        there = await interpreter.create_context(box, {"cwd": "/tmp"})
        assert await text(box, "import os; os.getcwd()", context_id=there["id"]) == "/tmp"

    inside(story)


def test_who_stops_reading_interrupts_it() -> None:
    async def story(box: AsyncSandbox) -> None:
        lines = await interpreter.execute(box, {"code": "kept = 5\nprint('begun')\nimport time; time.sleep(60)"})
        assert (await anext(lines))["text"] == "begun\n"
        await lines.aclose()
        async with asyncio.timeout(20):
            assert await text(box, "kept") == "5"

    inside(story)


def test_a_quiet_cell_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_QUIET", 0.05)

    async def story(box: AsyncSandbox) -> None:
        assert only(await cell(box, "import time; time.sleep(0.5)"), "keepalive")

    inside(story)


def test_a_traceback_of_other_languages_stays() -> None:
    assert interpreter.traceback_of(CodeFailure("E", "m", "E: m\n    at x"), "node") == "E: m\n    at x"
    assert interpreter.traceback_of(CodeFailure("E", "m"), "node") == "E: m"
