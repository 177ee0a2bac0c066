"""The code interpreter's own client."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b_code_interpreter.charts import BarChart, ChartType, LineChart

from conftest import needs_live
from e2b import NotFoundException, TimeoutException


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=600, envs={"OF": "sandbox"})
    yield made
    made.kill()


def test_cells_keep_their_variables(box: Sandbox) -> None:
    first = box.run_code("x = 1; x")
    second = box.run_code("    x += 1\n    x")
    assert (first.text, second.text) == ("1", "2")
    assert second.execution_count == (first.execution_count or 0) + 1


def test_output_comes_as_it_is_printed(box: Sandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    done = box.run_code(
        "import sys, os; print(1); print('err', file=sys.stderr); print(os.getcwd())",
        on_stdout=lambda message: out.append(message.line),
        on_stderr=lambda message: err.append(message.line),
    )
    assert "".join(out) == "".join(done.logs.stdout) == "1\n/home/user\n"
    assert "".join(err) == "".join(done.logs.stderr) == "err\n"


def test_errors_are_results(box: Sandbox) -> None:
    failed = box.run_code("def f():\n    return missing\nf()").error
    assert failed is not None
    assert (failed.name, failed.value) == ("NameError", "name 'missing' is not defined")
    assert "NameError" in failed.traceback
    assert "line 2" in failed.traceback


def test_charts(box: Sandbox) -> None:
    done = box.run_code(
        "import matplotlib.pyplot as plt\n"
        "plt.bar(['Author A', 'Author B'], [100, 200])\nplt.xlabel('Authors')\nplt.ylabel('Books (n)')\n"
        "plt.title('Sold')\nplt.show()\n"
        "plt.plot([1, 2, 3], [1, 4, 9], label='squares')\nplt.yscale('log')\nplt.show()"
    )
    assert done.error is None
    assert len(done.results) == 2
    assert all(base64.b64decode(result.png or "")[:4] == b"\x89PNG" for result in done.results)
    bar, line = (result.chart for result in done.results)
    assert isinstance(bar, BarChart)
    assert isinstance(line, LineChart)
    assert (bar.type, bar.title, bar.x_label, bar.y_unit) == (ChartType.BAR, "Sold", "Authors", "n")
    assert [(each.label, each.value) for each in bar.elements] == [("Author A", 100), ("Author B", 200)]
    assert line.y_scale == "log"
    assert line.elements[0].label == "squares"
    assert [tuple(point) for point in line.elements[0].points] == [(1, 1), (2, 4), (3, 9)]


def test_tables_and_rich_results(box: Sandbox) -> None:
    table = box.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2, 3]})").results[0]
    assert table.data == {"a": [1, 2, 3]}
    assert "<table" in (table.html or "")
    done = box.run_code("from IPython.display import display, HTML\ndisplay(HTML('<b>x</b>'))\n'last'")
    assert (done.results[0].html, done.results[0].is_main_result) == ("<b>x</b>", False)
    assert done.text == "last"


def test_variables_of_the_environment(box: Sandbox) -> None:
    code = "import os; (os.environ.get('OF'), os.environ.get('CELL'))"
    assert box.run_code(code, envs={"CELL": "1"}).text == "('sandbox', '1')"
    assert box.run_code(code).text == "('sandbox', None)"
    assert box.run_code("echo $OF", language="bash").logs.stdout == ["sandbox\n"]
    assert box.run_code("process.env.OF", language="js").text == "sandbox"


def test_languages(box: Sandbox) -> None:
    assert box.run_code("console.log('Hello'); const kept = 3", language="javascript").logs.stdout == ["Hello\n"]
    assert box.run_code("kept", language="js").text == "3"
    assert box.run_code("const m: string = 'typed'; console.log(m)", language="ts").logs.stdout == ["typed\n"]
    assert box.run_code("cd /; pwd", language="bash").logs.stdout == ["/\n"]
    typed = box.run_code("enum E { A = 5 }; const n: number = E.A; `${Deno.env.get('OF')} ${n}`", language="deno")
    assert typed.text == "sandbox 5"
    assert box.run_code("Deno.env.get('CELL') ?? Deno.cwd()", language="deno").text == "/home/user"
    assert box.run_code("Deno.env.get('CELL')", language="deno", envs={"CELL": "1"}).text == "1"


def test_contexts(box: Sandbox) -> None:
    assert {"python", "javascript"} <= {each.language for each in box.list_code_contexts()}
    context = box.create_code_context(language="python", cwd="/tmp")
    assert box.list_code_contexts()[-1].id == context.id
    assert box.run_code("import os; own = 1; os.getcwd()", context=context).text == "/tmp"
    assert (box.run_code("own").error or Exception()).value == "name 'own' is not defined"  # type: ignore[union-attr]
    box.restart_code_context(context)
    assert (box.run_code("own", context=context).error or Exception()).name == "NameError"  # type: ignore[union-attr]
    box.remove_code_context(context)
    assert context.id not in [each.id for each in box.list_code_contexts()]
    with pytest.raises(NotFoundException):
        box.run_code("1", context=context)


def test_a_cell_that_takes_too_long_is_interrupted(box: Sandbox) -> None:
    box.run_code("kept = 'yes'")
    with pytest.raises(TimeoutException):
        box.run_code("import time; time.sleep(1000)", timeout=1)
    assert box.run_code("kept", timeout=20).text == "yes"


def test_the_start_command_of_e2bs_own_template(box: Sandbox) -> None:
    box.commands.run("sudo /root/.jupyter/start-up.sh", background=True)
    asked = "curl -s --retry 20 --retry-connrefused --retry-delay 1 http://localhost:49999/health"
    assert box.commands.run(asked).stdout == '"OK"'


@pytest.mark.asyncio
async def test_without_blocking() -> None:
    box = await AsyncSandbox.create(timeout=120)
    try:
        assert (await box.run_code("1 + 1")).text == "2"
    finally:
        await box.kill()


def test_the_sandbox_ends_meanwhile() -> None:
    import threading

    box = Sandbox.create(timeout=120)
    box.run_code("1")
    threading.Timer(1.0, box.kill).start()
    with pytest.raises(TimeoutException, match="killed"):
        box.run_code("import time; time.sleep(1000)")


@needs_live
def test_contexts_come_and_go_between_sleeps() -> None:
    box = Sandbox.create(timeout=120)
    try:
        box.run_code("1")
        box.pause()
        box.connect()
        assert box.run_code("1").text == "1"
        box.remove_code_context("python")
        for _ in range(2):
            box.pause()
            box.connect()
            assert box.commands.run("echo alive").stdout == "alive\n"
        assert box.run_code("1 + 1").text == "2"
    finally:
        box.kill()
