"""A kernel's state is part of its sandbox: pause, snapshots, forks, templates, undo. Where only files are kept, it is
told as lost."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import gvisor_environment

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.errors import KernelError, SandboxPaused


def must_run(engine: str) -> None:
    probe = registry.load(engine).probe()
    if not probe.available:
        pytest.skip(f"capability: {engine} cannot run here: {probe.reason}")


@pytest.fixture(scope="module")
def gvisor() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gvisor_environment().items():
            patch.setenv(name, value)
        must_run("gvisor")
        yield "gvisor"


@contextlib.contextmanager
def sandbox(engine: str, **settings: object) -> Iterator[Sandbox]:
    box = Sandbox(engine=engine, **settings)  # type: ignore[arg-type]
    try:
        yield box
    finally:
        box.kill()


def draw(box: Sandbox) -> tuple[str | None, str | None]:
    return box.code("random.random()").text, box.code("import os; os.urandom(8).hex()").text


def test_variables_survive_pause_forks_diverge_and_rollback_brings_them_back(gvisor: str) -> None:
    with sandbox(gvisor) as box:
        box.code("import random\nrandom.seed(7)\nx = [1]\nhandle = open('/tmp/log', 'w')")
        box.code("y=2; f() { echo f$y; }", language="shell")
        pid = box.contexts.list()[0].pid
        box.pause()
        assert box.code("x").text == "[1]"  # using it wakes it
        assert box.code("f", language="shell").stdout == "f2\n"
        assert box.contexts.list()[0].pid == pid
        snapshot = box.snapshot("before")
        kids = box.fork(2)
        try:
            for number, kid in enumerate(kids):
                kid.code(f"x.append({number}); handle.write('{number}'); handle.flush()")
            assert [kid.code("x").text for kid in kids] == ["[1, 0]", "[1, 1]"]
            assert [kid.files.read_text("/tmp/log") for kid in kids] == ["0", "1"]
            assert kids[0].code("f", language="shell").stdout == "f2\n"
            first, second = draw(kids[0]), draw(kids[1])
            assert first[0] != second[0]
            assert first[1] != second[1]
        finally:
            for kid in kids:
                kid.kill()
        assert box.code("x").text == "[1]"
        box.code("x = 'changed'")
        box.rollback(snapshot)
        assert box.code("x").text == "[1]"


@pytest.mark.parametrize("length", [10, 10_000])
def test_a_pause_in_the_middle_of_a_cell(gvisor: str, length: int) -> None:
    with sandbox(gvisor) as box:
        box.code("n = 0")
        begun = threading.Event()
        told: list[BaseException] = []

        def run() -> None:
            cell = "#" * length + "\nimport time\nfor _ in range(20):\n    n += 1; print(n); time.sleep(0.1)"
            try:
                box.code(cell, on_stdout=lambda _: begun.set())
            except SandboxPaused as error:
                told.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        box.pause()
        thread.join()
        assert len(told) == 1
        assert box.info().state == "paused"  # what the cell leaves behind does not wake it
        assert box.code("n").text == "20"  # it went on, and was waited for
        assert [info.name for info in box.files.list("/tmp/.sloplet-code")] == ["python.json"]


def test_a_template_has_its_kernel_running(gvisor: str) -> None:
    name = f"warm-{secrets.token_hex(4)}"
    with sandbox(gvisor) as box:
        box.code("import json\nready = 'yes'")
        template = box.template(name)
        try:
            with sandbox(gvisor, template=name) as warm:
                assert [(one.name, one.running) for one in warm.contexts.list()] == [("python", True)]
                result = warm.code("ready")
                assert (result.text, result.execution_count) == ("'yes'", 2)
        finally:
            box.delete_snapshot(template)


def test_undo_goes_back_to_before_a_cell(gvisor: str) -> None:
    with sandbox(gvisor, undo=2) as box:
        box.code("x = 1")
        box.code("x = 2")
        box.code("x = 3")
        assert box.undo().note == "x = 3"
        assert box.code("x").text == "2"


@pytest.mark.parametrize("engine", ["container", "process"])
def test_where_only_files_are_kept_it_is_told(engine: str) -> None:
    must_run(engine)
    with sandbox(engine) as box:
        box.contexts.create(name="mine", env={"WHO": "me"})
        box.code("x = 1")
        box.code("x = 1", context="mine")
        snapshot = box.snapshot()
        assert box.code("x").text == "1"
        box.rollback(snapshot)
        with pytest.raises(KernelError, match="only the files of its sandbox were kept"):
            box.code("x")
        assert {one.name: one.state for one in box.contexts.list()} == {"mine": "lost", "python": "lost"}
        assert box.code("'anew'", restart=True).text == "'anew'"
        box.contexts.restart("mine")
        assert box.code("import os; os.environ['WHO']", context="mine").text == "'me'"


def test_a_named_sandbox_in_the_keeper_and_another_connection(
    gvisor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path))  # a keeper of its own: one that runs may not know of runsc
    name = f"code-{secrets.token_hex(4)}"
    with sandbox(gvisor, name=name) as box:
        with box:
            box.code("x = 41")
        with Sandbox.connect(name) as again:  # it was paused when the block was left
            assert again.code("x + 1").text == "42"
