"""Cells of code over HTTP, on a real server."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from http_kit import Box, made
from server_kit import Served, need_container, served

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(60)]

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SHOWN = f"""
class Picture:
    def _repr_png_(self):
        return {PNG!r}
    def __repr__(self):
        return "a picture"
display(Picture())
Picture()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_container()
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def box(server: Served) -> Iterator[Box]:
    with made(server, "dev") as found:
        yield found


def cell(box: Box, code: str, **more: Any) -> dict[str, Any]:
    answer = box.post("/code", {"code": code, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class TestCells:
    @pytest.mark.parametrize(
        ("language", "first", "second", "text"),
        [("python", "x = 41", "x + 1", "42"), ("shell", "x=41", "echo $((x + 1))", None), (None, "y = 1", "y", "1")],
    )
    def test_variables_stay(self, box: Box, language: str | None, first: str, second: str, text: str | None) -> None:
        assert cell(box, first, language=language)["ok"]
        result = cell(box, second, language=language)
        assert (result["text"], result["error"], result["exit_code"]) == (text, None, 0)
        assert result["stdout"] == ("42\n" if language == "shell" else "")
        assert result["language"] == result["context"] == (language or "python")

    def test_what_is_shown_and_printed(self, box: Box) -> None:
        result = cell(box, SHOWN + "\nimport sys; print('out'); print('err', file=sys.stderr)\nPicture()")
        assert (result["stdout"], result["stderr"], result["text"]) == ("out\n", "err\n", "a picture")
        assert [each["main"] for each in result["results"]] == [False, True]
        for each in result["results"]:
            assert base64.b64decode(each["data"]["image/png"]) == PNG
            assert each["data"]["text/plain"] == "a picture"

    def test_code_that_raises_is_a_result(self, box: Box) -> None:
        result = cell(box, "1 / 0")
        assert (result["ok"], result["error"]["name"], result["exit_code"]) == (False, "ZeroDivisionError", 1)
        assert "Traceback" in result["error"]["traceback"]

    def test_a_time_limit(self, box: Box) -> None:
        cell(box, "kept = 1")
        result = cell(box, "import time; time.sleep(60)", timeout=0.3)
        assert (result["timed_out"], result["restarted"]) == (True, False)
        assert cell(box, "kept")["text"] == "1"

    def test_a_limit_of_output(self, box: Box) -> None:
        result = cell(box, "print('x' * 100000)", max_output=10)
        assert (result["stdout"], result["truncated"]) == ("x" * 10, True)

    @pytest.mark.parametrize(
        ("asked", "status", "error"),
        [
            ({"code": "1", "language": "cobol"}, 422, "SpecError"), ({}, 422, "RequestInvalid"),
            ({"code": "1", "context": "no-such"}, 404, "ContextNotFound"),
            ({"code": "1", "context": "../x"}, 422, "RequestInvalid"),
            ({"code": "a\0b", "language": "shell"}, 422, "SpecError"), ({"code": 1}, 422, "RequestInvalid"),
            ({"code": "1", "max_output": 0}, 422, "RequestInvalid"), ({"code": "1", "x": 1}, 422, "RequestInvalid"),
            ({"code": "1", "timeout": "soon"}, 422, "InvalidLimit"),
        ],
    )  # fmt: skip
    def test_what_cannot_be(self, box: Box, asked: dict[str, Any], status: int, error: str) -> None:
        for rest in ("/code", "/code/stream"):
            answer = box.post(rest, asked)
            assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text

    def test_a_client_that_goes_away_interrupts_its_cell(self, box: Box) -> None:
        code = "open('/tmp/begun', 'w').close()\nwhile True: pass"
        body = json.dumps({"code": code, "context": "python"}).encode()
        cell(box, "still = 'here'")
        with box.events("/files/watch?path=/tmp", method="GET") as changes, box.raw() as connection:
            next(changes)
            head = box.head("POST", "/code", "Content-Type: application/json", f"Content-Length: {len(body)}")
            connection.sendall(head + body)
            assert any(data["name"] == "begun" for _, data in changes)
        assert cell(box, "still", timeout=20)["text"] == "'here'"

    def test_cells_of_a_shell_wait_for_their_turn(self, box: Box) -> None:
        """Each is a request of its own, and they still do not mix."""
        results: dict[int, str] = {}

        def run(number: int) -> None:
            with box.server.client() as http:
                asked = {"code": f"v={number}; sleep 0.05; echo $v", "language": "shell"}
                results[number] = http.post(f"{box.path}/code", json=asked).json()["stdout"]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == {number: f"{number}\n" for number in range(6)}


class TestEvents:
    def test_as_they_come(self, box: Box) -> None:
        """The first line is seen while the cell waits for something that is done after it."""
        code = "import os, time, sys\nprint('one', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.02)\n"
        with box.events("/code/stream", {"code": code + SHOWN}) as told:
            assert next(told) == ("stdout", {"data": "one\n"})
            assert box.put("/tmp/go", b"").status_code == 201
            found = list(told)
        assert [name for name, _ in found] == ["result", "result", "done"]
        assert base64.b64decode(found[0][1]["data"]["image/png"]) == PNG
        done = found[-1][1]
        assert (done["ok"], done["stdout"], done["text"], len(done["results"])) == (True, "one\n", "a picture", 2)

    def test_a_quiet_one_begins_all_the_same(self, box: Box) -> None:
        with box.events("/code/stream", {"code": "import time; time.sleep(1.3); 5"}) as told:
            assert [name for name, _ in told] == ["result", "done"]

    def test_an_end_of_the_kernel_is_an_event(self, box: Box) -> None:
        box.post("/contexts", {"name": "doomed"})
        with box.events(
            "/code/stream", {"code": "print(1, flush=True); import os; os._exit(3)", "context": "doomed"}
        ) as told:
            found = list(told)
        assert found[0] == ("stdout", {"data": "1\n"})
        assert (found[-1][0], found[-1][1]["error"], found[-1][1]["status"]) == ("error", "KernelError", 409)
        assert box.post("/code", {"code": "1", "context": "doomed"}).json()["error"] == "KernelError"
        assert cell(box, "1", context="doomed", restart=True)["text"] == "1"


class TestContexts:
    def test_a_life(self, box: Box) -> None:
        answer = box.post("/contexts", {"language": "python", "name": "mine", "cwd": "/tmp", "env": {"A": "secret"}})
        assert answer.status_code == 201, answer.text
        assert (answer.json()["name"], answer.json()["state"], answer.json()["cwd"]) == ("mine", "running", "/tmp")
        assert "secret" not in answer.text
        assert cell(box, "x = 5; import os; os.getcwd() + os.environ['A']", context="mine")["text"] == "'/tmpsecret'"
        assert box.post("/contexts", {"name": "mine"}).json()["error"] == "KernelError"
        listed = {each["name"]: each for each in box.get("/contexts").json()["items"]}
        assert listed["mine"]["language"] == "python"
        assert box.post("/contexts/mine/restart").json()["state"] == "running"
        assert cell(box, "x", context="mine")["error"]["name"] == "NameError"
        assert cell(box, "os.environ['A']", context="mine")["error"]["name"] == "NameError"
        assert box.http.delete(f"{box.path}/contexts/mine").status_code == 204
        assert box.http.delete(f"{box.path}/contexts/mine").status_code == 204
        assert "mine" not in [each["name"] for each in box.get("/contexts").json()["items"]]

    def test_interrupting(self, box: Box) -> None:
        with box.events("/code/stream", {"code": "print('go', flush=True)\nwhile True: pass"}) as told:
            assert next(told)[0] == "stdout"
            assert box.post("/contexts/python/interrupt").status_code == 204
            name, done = list(told)[-1]
        assert (name, done["error"]["name"]) == ("done", "KeyboardInterrupt")

    def test_no_such_context(self, box: Box) -> None:
        assert box.post("/contexts/nobody/interrupt").json()["error"] == "ContextNotFound"
        assert box.post("/contexts/nobody/restart").status_code == 404
        assert box.post("/contexts/..%2f/restart").status_code in (404, 422)
        assert box.post("/contexts", {"language": "cobol"}).status_code == 422
