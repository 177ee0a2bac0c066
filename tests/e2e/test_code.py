"""Cells of code in real sandboxes: what they give, what they print, how they fail, how they are stopped."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import gvisor_environment

from sloplet import AsyncSandbox, CodeResult, RichResult, Sandbox
from sloplet.engines import registry
from sloplet.errors import KernelError, SpecError

ENGINES = ("process", "container", "gvisor")
SYSTEM_PYTHON = "/usr/bin/python3"
#: A line that does not end, and no signal that would end it.
STUBBORN = "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass"


@pytest.fixture(scope="module", params=ENGINES)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gvisor":
            for name, value in gvisor_environment().items():
                patch.setenv(name, value)
        probe = registry.load(request.param).probe()
        if not probe.available:
            pytest.skip(f"capability: {request.param} cannot run here: {probe.reason}")
        with Sandbox(engine=request.param) as made:
            yield made


def failed(result: CodeResult) -> tuple[str, str]:
    assert result.error is not None
    assert not result.ok
    return result.error.name, result.error.message


class TestPython:
    def test_variables_stay(self, box: Sandbox) -> None:
        assert box.code("x = 1").text is None
        result = box.code("x + 1")
        assert (result.text, result.ok, result.stdout, result.error) == ("2", True, "", None)
        assert (result.context, result.language) == ("python", "python")
        assert result.execution_count == box.code("1").execution_count - 1

    @pytest.mark.parametrize(
        ("cell", "text"),
        [
            ("6 * 7", "42"), ("'a;'", "'a;'"), ("5 # ; a comment", "5"), ("1\n2", "2"), ("y = 1", None), ("y;", None),
            ("(y\n) ;  # no", None), ("None", None), ("", None), ("# nothing", None), ("if True:\n    5", None),
            ("\n    y = 2\n    if y:\n        y = 3\n    y\n    ", "3"), ("\ufeffy = 4\ny\r\n", "4"),
            ("    !true\n    %cd .\n    5", "5"), ("  1\n 2", "SyntaxError"), ("1\n  2", "SyntaxError"),
            ("await __import__('asyncio').sleep(0, 'waited')", "'waited'"), ("__name__", "'__main__'"),
        ],
    )  # fmt: skip
    def test_the_last_expression_is_the_result(self, box: Sandbox, cell: str, text: str | None) -> None:
        box.code("y = 0")
        result = box.code(cell)
        if text == "SyntaxError":
            assert failed(result)[0] == "IndentationError"
            return
        assert result.error is None
        assert result.text == text

    def test_output_of_threads_children_and_descriptors(self, box: Sandbox) -> None:
        result = box.code(
            "import os, subprocess, sys, threading\n"
            "print('out'); print('err', file=sys.stderr)\n"
            "thread = threading.Thread(target=lambda: print('thread')); thread.start(); thread.join()\n"
            "os.system('echo child'); subprocess.run(['sh', '-c', 'echo its stderr >&2'])\n"
            "os.write(1, b'raw\\xff\\n')"
        )
        assert result.stdout == "out\nthread\nchild\nraw\ufffd\n"
        assert result.stderr == "err\nits stderr\n"

    def test_what_comes_late_is_the_next_cells(self, box: Sandbox) -> None:
        box.code("import threading\ntimer = threading.Timer(0.05, lambda: print('late')); timer.start()")
        box.run("sleep 0.3")
        assert box.code("1").stdout == "late\n"

    def test_an_error_has_its_traceback(self, box: Sandbox) -> None:
        result = box.code("def broken(n):\n    return n / 0\nbroken(5)")
        assert failed(result) == ("ZeroDivisionError", "division by zero")
        assert result.error is not None
        lines = result.error.traceback.splitlines()
        assert "line 3, in <module>" in lines[1]
        assert lines[2].strip() == "broken(5)"
        assert "sloplet" not in result.error.traceback
        assert result.exit_code == 1

    @pytest.mark.parametrize(
        ("cell", "name", "message"),
        [
            ("def f(:", "SyntaxError", "invalid syntax"),
            ("x = '\0'", "ValueError|SyntaxError", "null bytes"),
            ("import sys; sys.exit(3)", "SystemExit", "3"),
            ("input('name? ')", "RuntimeError", "input() has nobody to ask"),
            ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
            ("raise ValueError('\x1b[31mred\x1b[0m')", "ValueError", "red"),
            ("class R:\n    def __repr__(self): raise ValueError('no repr')\nR()", "ValueError", "no repr"),
            ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E", "could not be made"),
        ],
    )
    def test_what_fails_leaves_the_variables(self, box: Sandbox, cell: str, name: str, message: str) -> None:
        box.code("kept = 5")
        result = box.code(cell)
        assert failed(result)[0] in name.split("|")
        assert message in failed(result)[1]
        assert "\x1b" not in (result.error.traceback if result.error else "")
        assert box.code("kept").text == "5"

    def test_a_fork_does_not_speak_for_the_kernel(self, box: Sandbox) -> None:
        result = box.code(
            "import os\npid = os.fork()\nif pid:\n    status = os.waitpid(pid, 0)[1]\nelse:\n    print('child')\n"
            "'parent' if pid else 'child'"
        )
        assert (result.text, result.stdout) == ("'parent'", "child\n")
        assert box.code("os.waitstatus_to_exitcode(status)").text == "0"
        assert box.code("1").text == "1"

    def test_asyncio_tasks_live_on(self, box: Sandbox) -> None:
        box.code(
            "import asyncio\nasync def later():\n    await asyncio.sleep(0.05)\n    return 'done'\n"
            "task = asyncio.ensure_future(later()); await asyncio.sleep(0)"
        )
        box.run("sleep 0.3")
        assert box.code("task.result()").text == "'done'"
        assert box.code("asyncio.run(asyncio.sleep(0, 'by run'))").text == "'by run'"

    def test_asyncio_is_a_notebooks(self, box: Sandbox) -> None:
        box.contexts.create(name="tasks")
        made = "import asyncio, sys\nasync def f(n):\n    await asyncio.sleep(0.01)\n    return n\n"
        assert box.code(made + "task = asyncio.create_task(f(5))", context="tasks").error is None
        assert box.code("await task", context="tasks").text == "5"
        assert box.code("task = asyncio.create_task(f(6))\nawait task", context="tasks").text == "6"
        assert box.code("asyncio.run(f(7))", context="tasks").text == "7"
        assert box.code("task = asyncio.ensure_future(f(8))", context="tasks").error is None
        assert box.code("await task", context="tasks").text == "8"
        box.contexts.remove("tasks")

    @pytest.mark.parametrize("what", ["sys.exit(3)", "asyncio.get_running_loop().stop(); await asyncio.sleep(0)"])
    def test_a_task_that_goes_wrong_later_is_told_and_survived(self, box: Sandbox, what: str) -> None:
        box.code("kept = 5")
        box.code(
            "import asyncio, sys\nasync def wrong():\n    await asyncio.sleep(0.02)\n    "
            f"{what}\ntask = asyncio.create_task(wrong())\nawait asyncio.sleep(0)"
        )
        box.run("sleep 0.2")
        result = box.code("kept")
        assert result.text == "5"
        assert "SystemExit" in result.stderr or "stopped" in result.stderr

    def test_words_of_ipython(self, box: Sandbox) -> None:
        result = box.code("!echo from the shell\n%matplotlib inline\n%cd /\nimport os; os.getcwd()")
        assert (result.stdout, result.text) == ("from the shell\n", "'/'")
        assert box.code("%%bash\necho $((6 * 7))").stdout == "42\n"
        assert box.code("%%bash\n[[ a == a ]] && echo bash").stdout == "bash\n"
        name, message = failed(box.code("print('not run')\n%nonsense"))
        assert name == "SyntaxError"
        assert "%nonsense is none of the magics that cells know" in message
        assert "%%time" in failed(box.code("%%nonsense\n1"))[1]

    @pytest.mark.parametrize(
        ("cell", "text", "stdout"),
        [
            ("found = !echo a; echo b\nfound", "['a', 'b']", ""),
            ("n = 'it'\n!echo {n} $n ${HOME:+set} | awk '{print}'", None, "it it set\n"),
            ("!echo a \\\n    b", None, "a b\n"),
            ("!echo \"it's\"\n!echo ')'", None, "it's\n)\n"),
            ('text = """\n!important\n%x\n"""\n!true\ntext', r"'\n!important\n%x\n'", ""),
            ("def f(x):\n    y = !echo {x}\n    return y\nf(5)", "['5']", ""),
            ("%config InlineBackend.figure_format = 'retina'\n%load_ext autoreload\n%autoreload 2\n5", "5", ""),
            ("%env SLOPLET_WORD=x\n!echo $SLOPLET_WORD", None, "env: SLOPLET_WORD=x\nx\n"),
            ("%%capture said\nprint(5)\n", None, ""),
            ("pip list --help | head -n 0", None, ""),
            ("get_ipython().run_line_magic('matplotlib', 'inline')", None, ""),
            ("7 % 4", "3", ""),
        ],
    )
    def test_more_words_of_ipython(self, box: Sandbox, cell: str, text: str | None, stdout: str) -> None:
        result = box.code(cell)
        assert (result.error, result.text, result.stdout) == (None, text, stdout)

    def test_times(self, box: Sandbox) -> None:
        result = box.code("%%time\nx = 6\nx * 7")
        assert result.text == "42"
        assert "Wall time" in result.stdout
        assert "Wall time" in box.code("x = %time 5").stdout
        assert "per loop" in box.code("%timeit -n 10 -r 1 1 + 1").stdout
        failure = box.code("%%time\n\n1 / 0").error
        assert failure is not None
        assert "line 3, in <module>\n    1 / 0" in failure.traceback

    def test_ipython_display_without_ipython(self, box: Sandbox) -> None:
        result = box.code(
            "from IPython.display import display, HTML, Image, Markdown, clear_output\nclear_output(wait=True)\n"
            "display(HTML('<b>x</b>'), Markdown('# x'))\nhandle = display(1, display_id=True); handle.update(2)\n"
            "Image(data=b'\\x89PNG')"
        )
        assert result.error is None
        shown = [one.html or one.markdown or one.png or one.text for one in result.results]
        assert shown == ["<b>x</b>", "# x", "1", "2", b"\x89PNG"]

    @pytest.mark.parametrize("how", ["!{0}\n", "import os; os.system({0!r})"])
    def test_what_a_user_installs_first_is_found(self, box: Sandbox, how: str) -> None:
        """The folder of his packages is not there when Python starts."""
        where = box.code("import site; site.getusersitepackages()", context="data").text if self.data(box) else None
        if where is None:
            pytest.skip("capability: a Python that is no venv's")
        module = f"installed_{'shell' if how[0] == '!' else 'system'}"
        made = f"mkdir -p {where} && echo value = 5 > {where.strip(chr(39))}/{module}.py"
        box.code(f"import shutil; shutil.rmtree({where}, ignore_errors=True)", context="data")
        box.contexts.restart("data")
        assert box.code(how.format(made) + ("" if how[0] != "!" else f"import {module}"), context="data").error is None
        assert box.code(f"import {module}; {module}.value", context="data").text == "5"

    def data(self, box: Sandbox) -> bool:
        if not os.path.exists(SYSTEM_PYTHON):
            return False
        if "data" not in {context.name for context in box.contexts.list()}:
            box.contexts.create(name="data", python=SYSTEM_PYTHON)
        return box.code("import site; site.ENABLE_USER_SITE", context="data").text == "True"

    def test_much_output_is_cut(self, box: Sandbox) -> None:
        result = box.code("print('x' * 20_000_000)", max_output="1m")
        assert (len(result.stdout), result.truncated) == (2**20, True)
        assert not box.code("print('x')").truncated

    def test_much_code(self, box: Sandbox) -> None:
        assert box.code(f"text = '{'é' * 5_000_000}'\nlen(text)").text == "5000000"
        for size in (3900, 4000, 4050, 4096, 5000, 70_000):
            assert box.code(f"text = '{'x' * size}'\nlen(text)").text == str(size)
        folder = "/tmp" if box.engine != "process" else os.path.dirname(box.workdir) + "/tmp"
        assert [info.name for info in box.files.list(f"{folder}/.sloplet-code") if "-" in info.name] == []

    def test_pickle_and_multiprocessing_know_what_cells_define(self, box: Sandbox) -> None:
        if box.engine == "process":
            pytest.skip("capability: the process rung has no semaphores that processes could share")
        cell = (
            "from multiprocessing import Pool\ndef square(n): return n * n\n"
            "with Pool(2) as pool:\n    found = pool.map(square, [1, 2, 3])\nfound"
        )
        assert box.code(cell).text == "[1, 4, 9]"


class TestRich:
    def test_representations(self, box: Sandbox) -> None:
        result = box.code(
            "class Rich:\n"
            "    def _repr_html_(self): return '<b>x</b>'\n"
            "    def _repr_markdown_(self): return '**x**'\n"
            "    def _repr_latex_(self): return '$x$'\n"
            "    def _repr_svg_(self): return '<svg/>'\n"
            "    def _repr_png_(self): return b'\\x89PNG'\n"
            "    def _repr_jpeg_(self): return 'aGk='\n"
            "    def _repr_json_(self): return {'a': [1]}\n"
            "    def _repr_javascript_(self): raise ValueError\n"
            "    def __repr__(self): return 'plain'\n"
            "display(Rich(), 5)\n"
            "display({'text/html': '<i>raw</i>'}, raw=True)\n"
            "Rich()"
        )
        assert result.error is None
        assert [one.main for one in result.results] == [False, False, False, True]
        rich = result.results[3]
        assert (rich.text, rich.html, rich.markdown, rich.latex) == ("plain", "<b>x</b>", "**x**", "$x$")
        assert (rich.svg, rich.png, rich.jpeg, rich.json) == ("<svg/>", b"\x89PNG", b"hi", {"a": [1]})
        assert rich.javascript is None
        assert (result.results[1].text, result.results[2].html, result.text) == ("5", "<i>raw</i>", "plain")

    def test_a_bundle_of_its_own(self, box: Sandbox) -> None:
        result = box.code(
            "class Bundle:\n    def _repr_mimebundle_(self, include=None, exclude=None):\n"
            "        return {'text/plain': 'mine', 'application/json': [1, 2]}, {}\nBundle()"
        )
        assert (result.text, result.results[0].json) == ("mine", [1, 2])

    def test_odd_values(self, box: Sandbox) -> None:
        cell = "class Dots(dict):\n    __getattr__ = dict.__getitem__\nDots(a=1)"  # KeyError, where it has no such name
        assert box.code(cell).text == "{'a': 1}"
        assert box.code("class Silent:\n    def __repr__(self): return ''\nSilent()").text == ""

    def test_odd_types(self, box: Sandbox) -> None:
        result = box.code(
            "class Bundle:\n    def _repr_mimebundle_(self, **_):\n        return {'text/' + 'x' * 400: 'x', "
            "'a/b c': 'x', 'application/vnd.bokehjs_load.v0+json': {}, 'e2b/chart': [1], 'image/gif': 'R0lG'}\n"
            "display({'text/x\\ny': '', 'text/' + 'x' * 5000: 'x', 'text/html': '<b>'}, raw=True)\nBundle()"
        )
        assert (result.stdout, result.error) == ("", None)
        assert dict(result.results[0].data) == {"text/html": b"<b>"}
        given = dict(result.results[1].data)
        assert b"Bundle" in given.pop("text/plain")
        assert given == {"application/vnd.bokehjs_load.v0+json": b"{}", "e2b/chart": b"[1]", "image/gif": b"GIF"}

    def test_much_of_it_is_cut(self, box: Sandbox) -> None:
        result = box.code("'x' * 5_000_000")
        assert result.truncated
        assert result.text is not None
        assert len(result.text) == 2**20
        result = box.code("for n in range(1200): display(n)")
        assert (len(result.results), result.truncated) == (1000, True)
        cell = "class Large:\n    def _repr_png_(self): return bytes(15_000_000)\ndisplay(Large(), Large(), Large())"
        result = box.code(cell)
        assert [one.png is not None for one in result.results] == [True, True, False]
        assert result.truncated

    def test_half_a_result_is_none(self, box: Sandbox) -> None:
        result = box.code(
            "import signal\nclass Large:\n    def __init__(self, data): self.data = data\n"
            "    def _repr_png_(self): return self.data\n    def __repr__(self): return 'x'\n"
            "def stop(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, stop)\nlarge = Large(b'a' * 15_000_000)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.02)\n"
            "try:\n    while True: display(large)\nexcept TimeoutError: pass\n"
            "Large(b'whole')"
        )
        assert result.error is None
        assert {len(one.png or b"") for one in result.results} <= {15_000_000, 0, 5}
        assert result.results[-1].png == b"whole"

    @pytest.fixture
    def data_box(self, box: Sandbox) -> Sandbox:
        for package in ("matplotlib", "pandas"):
            if not Path(f"/usr/lib/python3/dist-packages/{package}").exists():
                pytest.skip(f"capability: apt-get install python3-{package}")
        if "data" not in {context.name for context in box.contexts.list()}:
            box.contexts.create(name="data", python=SYSTEM_PYTHON)
        return box

    def test_figures(self, data_box: Sandbox) -> None:
        assert data_box.code("import sys; 'matplotlib' in sys.modules", context="data").text == "False"
        result = data_box.code(
            "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\nplt.plot([2, 1])\n"
            "plt.figure(); plt.bar([1], [2]);",
            context="data",
        )
        assert result.error is None
        assert "Warning" not in result.stderr  # (fontconfig may miss a cache)
        pictures = [one.png for one in result.results]
        assert len(pictures) == 3
        assert len(set(pictures)) == 3
        assert all(png is not None and png.startswith(b"\x89PNG\r\n") and len(png) > 2000 for png in pictures)
        result = data_box.code("figure, axes = plt.subplots(); axes.plot([1, 2]); figure", context="data")
        assert [(one.main, one.png is not None) for one in result.results] == [(True, True)]
        assert data_box.code("plt.get_fignums()", context="data").text == "[]"
        result = data_box.code("plt.plot([1, 2])\n1 / 0", context="data")
        assert [one.png is not None for one in result.results] == [True]
        assert data_box.code("plt.get_fignums()", context="data").text == "[]"  # the next cell begins another one

    def test_tables(self, data_box: Sandbox) -> None:
        result = data_box.code("import pandas\npandas.DataFrame({'a': [1, 2]})", context="data")
        assert "<table" in (result.results[0].html or "")
        assert result.text is not None
        assert result.text.split() == ["a", "0", "1", "1", "2"]


class TestStopping:
    def test_a_time_limit_interrupts_and_keeps_the_variables(self, box: Sandbox) -> None:
        box.code("kept = 5")
        for cell in ("while True: pass", "import time; time.sleep(60)", "import asyncio; await asyncio.sleep(60)"):
            result = box.code("print('before')\n" + cell, timeout=0.3)
            assert failed(result)[0] == "Timeout"
            assert (result.timed_out, result.restarted, result.exit_code) == (True, False, 124)
            assert result.stdout == "before\n"
        assert box.code("kept").text == "5"

    def test_what_cannot_be_interrupted_is_started_anew_and_that_is_told(
        self, box: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sloplet.code.cell.PATIENCE", (0.1, 0.2, 0.5))
        box.contexts.create(name="stubborn", env={"KEPT": "yes"})
        box.code("lost = 5", context="stubborn")
        result = box.code(STUBBORN, context="stubborn", timeout=0.2)
        assert (result.timed_out, result.restarted) == (True, True)
        assert "without its variables" in failed(result)[1]
        assert failed(box.code("lost", context="stubborn"))[0] == "NameError"
        assert box.code("import os; os.environ['KEPT']", context="stubborn").text == "'yes'"
        box.contexts.remove("stubborn")

    def test_interrupt_from_elsewhere(self, box: Sandbox) -> None:
        def begun(text: str) -> None:
            threading.Timer(0.05, box.contexts.interrupt, ["python"]).start()

        result = box.code("print('begun')\nwhile True: pass", on_stdout=begun)
        assert failed(result)[0] == "KeyboardInterrupt"
        assert not result.timed_out

    def test_a_caller_that_gives_up_interrupts_it(self, box: Sandbox) -> None:
        async def give_up() -> None:
            begun = asyncio.Event()
            work = asyncio.ensure_future(
                box._inner.code("kept = 6\nprint('begun')\nwhile True: pass", on_stdout=lambda _: begun.set())
            )
            await begun.wait()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work

        from sloplet.portal import portal

        portal().call(give_up())
        assert box.code("kept", timeout=20).text == "6"

    @pytest.mark.parametrize(
        ("cell", "why"),
        [
            ("import os; os._exit(3)", "exit code 3"),
            ("import ctypes; ctypes.string_at(0)", "signal 11"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ],
    )
    def test_a_dead_kernel_is_told_until_it_is_started_anew(self, box: Sandbox, cell: str, why: str) -> None:
        box.code("lost = 5")
        with pytest.raises(KernelError, match=why):
            box.code(cell)
        with pytest.raises(KernelError, match="gone, with its variables"):
            box.code("lost")
        assert {context.name: context.state for context in box.contexts.list()}["python"] == "dead"
        assert failed(box.code("lost", restart=True))[0] == "NameError"
        assert box.code("1").text == "1"

    def test_one_that_ended_between_cells_is_started_anew_for_the_next(self, box: Sandbox) -> None:
        for _ in range(2):  # while it is still taken to be there
            box.run(f"kill -9 {box.code('import os; os.getpid()').text}")
            assert failed(box.code("os", restart=True))[0] == "NameError"
        box.run(f"kill -9 {box.code('import os; os.getpid()').text}")
        with pytest.raises(KernelError, match="signal 9"):
            box.code("os")
        assert box.code("1", restart=True).text == "1"

    def test_what_is_no_interpreter_is_told(self, box: Sandbox) -> None:
        box.contexts.create(name="broken", python="/bin/ls")
        with pytest.raises(KernelError, match=r"(?s)could not be started.*exit code 2.*python=") as told:
            box.code("1", context="broken")
        assert "variables" not in str(told.value)
        assert "broken" not in {context.name for context in box.contexts.list()}

    def test_a_first_cell_that_ends_its_kernel_is_told_too(self, box: Sandbox) -> None:
        box.contexts.create(name="first", env={"WHO": "me"})
        with pytest.raises(KernelError, match="exit code 3"):
            box.code("import os; os._exit(3)", context="first")
        with pytest.raises(KernelError, match="gone, with its variables"):
            box.code("1", context="first")
        assert box.code("import os; os.environ['WHO']", context="first", restart=True).text == "'me'"
        box.contexts.remove("first")

    def test_a_time_limit_behind_a_first_cell_does_not_end_it(
        self, box: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sloplet.code.cell._STARTING", 0.1)
        monkeypatch.setattr("sloplet.code.cell.PATIENCE", (0.1, 0.2, 0.3))
        box.contexts.create(name="busy")

        async def together() -> tuple[CodeResult, BaseException]:
            begun = asyncio.Event()
            cell = "import time\nprint('begun')\nfor _ in range(20): time.sleep(0.1)\n'done'"
            first = asyncio.ensure_future(box._inner.code(cell, context="busy", on_stdout=lambda _: begun.set()))
            await begun.wait()
            second = await asyncio.gather(box._inner.code("1", context="busy", timeout=0.1), return_exceptions=True)
            return await first, second[0]  # type: ignore[return-value]

        from sloplet.portal import portal

        done, refused = portal().call(together())
        assert (done.text, done.error) == ("'done'", None)
        assert isinstance(refused, KernelError)
        assert "another one runs in it" in str(refused)
        box.contexts.remove("busy")

    def test_one_at_a_time_and_each_its_own_output(self, box: Sandbox) -> None:
        async def together() -> list[CodeResult]:
            cells = [box._inner.code(f"import time; print({n}); time.sleep(0.01); {n}") for n in range(8)]
            return await asyncio.gather(*cells)

        from sloplet.portal import portal

        results = portal().call(together())
        assert [(one.stdout, one.text) for one in results] == [(f"{n}\n", f"{n}") for n in range(8)]

    def test_a_busy_context(self, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sloplet.code.cell.PATIENCE", (0.1, 0.2, 0.3))

        async def busy() -> None:
            begun = asyncio.Event()
            first = asyncio.ensure_future(
                box._inner.code("import time; ran = 0; print(); time.sleep(2)", on_stdout=lambda _: begun.set())
            )
            await begun.wait()
            with pytest.raises(KernelError, match="another one runs in it"):
                await box._inner.code("ran = 1", timeout=0.2)
            assert (await first).ok

        from sloplet.portal import portal

        portal().call(busy())
        assert box.code("ran").text == "0"

    def test_the_start_of_a_kernel_is_not_the_cells_time(self, box: Sandbox) -> None:
        script = f"{box.workdir}/slow-python"
        box.files.write(script, '#!/bin/sh\nsleep 1.5\nexec python3 "$@"\n', mode=0o755)
        box.contexts.create(name="slow", python=script)
        assert box.code("5", context="slow", timeout=1).text == "5"
        box.contexts.remove("slow")

    def test_a_queued_cell_is_taken_back(self, box: Sandbox) -> None:
        async def queued() -> None:
            begun = asyncio.Event()
            first = asyncio.ensure_future(
                box._inner.code("import time; ran = 0; print(); time.sleep(1)", on_stdout=lambda _: begun.set())
            )
            await begun.wait()
            second = asyncio.ensure_future(box._inner.code("ran = 1"))
            await asyncio.sleep(0.2)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            await first

        from sloplet.portal import portal

        portal().call(queued())
        assert box.code("ran").text == "0"


class TestStreams:
    def test_output_and_results_as_they_come(self, box: Sandbox) -> None:
        seen: list[object] = []
        result = box.code(
            "import sys, time\nprint('one')\ntime.sleep(0.05)\ndisplay(1)\nprint('two', file=sys.stderr)\n2",
            on_stdout=lambda text: seen.append(("out", text)),
            on_stderr=lambda text: seen.append(("err", text)),
            on_result=lambda one: seen.append((one.main, one.text)),
        )
        assert [item for item in seen if item != ("err", "two\n")] == [("out", "one\n"), (False, "1"), (True, "2")]
        assert ("err", "two\n") in seen
        assert (result.stdout, result.stderr, result.text) == ("one\n", "two\n", "2")

    def test_a_callback_that_fails_is_the_callers(self, box: Sandbox) -> None:
        def refuse(one: RichResult) -> None:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            box.code("5", on_result=refuse)
        assert box.code("6").text == "6"


class TestContexts:
    def test_each_has_its_own_variables_and_settings(self, box: Sandbox) -> None:
        context = box.contexts.create(cwd="/", env={"WHO": "me"})
        assert (context.language, context.running) == ("python", True)
        assert box.code("import os; own = 1; os.getcwd(), os.environ['WHO']", context=context).text == "('/', 'me')"
        assert failed(box.code("own"))[0] == "NameError"
        again = box.contexts.restart(context)
        assert again.pid != context.pid
        assert box.code("import os; os.getcwd(), os.environ['WHO']", context=context.name).text == "('/', 'me')"
        box.contexts.remove(context)
        box.contexts.remove(context)
        with pytest.raises(KernelError, match="no context"):
            box.code("1", context=context)
        assert context.name not in {one.name for one in box.contexts.list()}

    def test_what_makes_no_sense_is_refused(self, box: Sandbox) -> None:
        with pytest.raises(SpecError, match="language"):
            box.code("1", language="cobol")
        with pytest.raises(SpecError, match="name for a context"):
            box.code("1", context="a/b")
        with pytest.raises(SpecError, match="speaks python"):
            box.code("1", language="shell", context="python")
        with pytest.raises(SpecError, match="timeout"):
            box.code("1", timeout=-1)
        with pytest.raises(SpecError, match="text"):
            box.code(b"1")  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="surrogate"):
            box.code("'\ud800'")
        with pytest.raises(KernelError, match="already"):
            box.contexts.create(name="python")

    def test_an_interpreter_that_is_not_there(self, box: Sandbox) -> None:
        with pytest.raises(KernelError, match="no python in this sandbox"):
            box.contexts.create(name="none", python="/no/such/python")
        assert "none" not in {one.name for one in box.contexts.list()}

    def test_one_that_never_ran_leaves_nothing(self, box: Sandbox) -> None:
        box.contexts.create(name="wrong", python="/bin/false")
        with pytest.raises(KernelError, match="exit code 1"):
            box.code("1", context="wrong")
        assert "wrong" not in {one.name for one in box.contexts.list()}

    def test_another_client_finds_them(self, box: Sandbox) -> None:
        box.code("shared = 5")

        async def other() -> list[str | None]:
            found = AsyncSandbox._adopt(box._inner._controller, await box._inner.info())  # type: ignore[arg-type]
            return [(await found.code("shared")).text, (await found.code("shared += 1; shared")).text]

        from sloplet.portal import portal

        assert portal().call(other()) == ["5", "6"]
        assert box.code("shared").text == "6"

    def test_clients_that_come_together_start_one_kernel(self, box: Sandbox) -> None:
        box.contexts.remove("python")

        async def together() -> list[str | None]:
            info = await box._inner.info()
            clients = [AsyncSandbox._adopt(box._inner._controller, info) for _ in range(4)]  # type: ignore[arg-type]
            cell = "count = globals().get('count', 0) + 1; count"
            return [one.text for one in await asyncio.gather(*(client.code(cell) for client in clients))]

        from sloplet.portal import portal

        assert sorted(map(str, portal().call(together()))) == ["1", "2", "3", "4"]


class TestShell:
    def run(self, box: Sandbox, cell: str, **more: object) -> CodeResult:
        return box.code(cell, language="bash", **more)  # type: ignore[arg-type]

    def test_variables_functions_and_folder_stay(self, box: Sandbox) -> None:
        assert self.run(box, "x=5; greet() { echo \"hi $1\"; }; cd /; text='it'\\''s'").ok
        assert self.run(box, 'echo $x; greet you; pwd; echo "$text"').stdout == "5\nhi you\n/\nit's\n"
        assert self.run(box, "cat; read nothing; echo end").stdout == "end\n"

    def test_exit_codes_and_errors(self, box: Sandbox) -> None:
        result = self.run(box, "echo out; echo err >&2; (exit 7)")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
        assert failed(result)[0] == "ExitStatus"
        assert "syntax error" in self.run(box, "if then").stderr.lower()
        assert self.run(box, "true").ok

    @pytest.mark.skipif(not shutil.which("bash"), reason="capability: bash")
    def test_exit_ends_the_cell_alone(self, box: Sandbox) -> None:
        self.run(box, "kept='a b'; declare -A map=([k]='v w'); greet() { echo hi; }; cd /")
        assert self.run(box, "echo before; exit 3; echo after").stdout == "before\n"
        assert self.run(box, "set -euo pipefail; false; echo after").exit_code == 1
        result = self.run(box, 'echo "$kept ${map[k]}"; greet; pwd; false; echo on')
        assert result.stdout == "a b v w\nhi\n/\non\n"

    def test_a_time_limit(self, box: Sandbox) -> None:
        self.run(box, "kept=5")
        for cell in ("while :; do :; done", "sleep 60", "sleep 60 | cat"):
            result = self.run(box, cell, timeout=0.3)
            assert (result.timed_out, result.restarted) == (True, False)
        assert self.run(box, "echo $kept").stdout == "5\n"

    @pytest.mark.parametrize("program", ["/bin/dash", "/bin/busybox"])
    def test_other_shells(self, box: Sandbox, program: str) -> None:
        """Where there is no bash: what the sandbox's PATH has as sh."""
        if not os.path.exists(program):
            pytest.skip(f"capability: {program}")
        place = f"{box.workdir}/{os.path.basename(program)}"
        box.run(f"mkdir -p {place} && ln -sf {program} {place}/sh && ln -sf {program} {place}/ash", check=True)
        for tool in ("sleep", "cat", "ls"):
            box.run(f"ln -sf $(command -v {tool}) {place}/{tool}", check=True)
        name = os.path.basename(program)
        box.contexts.create("shell", name=name, env={"PATH": place})

        def run(cell: str, **more: object) -> CodeResult:
            return box.code(cell, context=name, **more)  # type: ignore[arg-type]

        assert run("x=5; greet() { echo hi $1; }; cd /").ok
        assert run("echo $x; greet you; pwd").stdout == "5\nhi you\n/\n"
        result = run("ls /nowhere; if then")
        assert "syntax error" in result.stderr.lower()
        assert not result.ok
        assert run("set -o nonsense; echo on").stderr != ""
        # (busybox's ash misses one interrupt in a hundred while it computes, and all later ones: then it is restarted)
        for cell in ("sleep 60", *(["while :; do :; done"] if name == "dash" else [])):
            result = run(cell, timeout=0.3)
            assert (result.timed_out, result.restarted) == (True, False)
        assert run("echo $x").stdout == "5\n"
        assert run(f"text='{'x' * 10_000}'; echo ${{#text}}").stdout == "10000\n"
        with pytest.raises(KernelError, match="exit code 3"):
            run("exit 3")
        box.contexts.remove(name)

    @pytest.mark.parametrize(
        ("cell", "stdout", "status"),
        [
            ("set -euo pipefail; trap 'echo cleaned' EXIT; false; echo no", "cleaned\n", 1),
            ("trap 'echo was $?' 0; exit 3", "was 3\n", 3),
            ("trap -- 'code=$?; echo $code; exit 7' INT EXIT; exit 2", "2\n", 7),
            ("trap 'echo no' EXIT; trap - EXIT; (trap 'echo sub' EXIT; true); exit 0", "sub\n", 0),
        ],
    )
    def test_exit_traps_of_cells(self, box: Sandbox, cell: str, stdout: str, status: int) -> None:
        self.run(box, "kept=5")
        result = self.run(box, cell)
        assert (result.stdout, result.exit_code) == (stdout, status)
        assert self.run(box, "echo $kept; trap 'echo usr' USR1; kill -USR1 $$").stdout == "5\nusr\n"
        assert self.run(box, "exit 4").stdout == ""  # it has run

    def test_much_code_and_strange_code(self, box: Sandbox) -> None:
        assert self.run(box, f"text='{'x' * 100_000}'; echo ${{#text}}").stdout == "100000\n"
        assert self.run(box, "cat <<'END'\nit's `$x` \\n\nEND\n").stdout == "it's `$x` \\n\n"
        with pytest.raises(SpecError, match="NUL"):
            self.run(box, "echo \0")


@pytest.mark.skipif(not shutil.which("node"), reason="capability: apt-get install nodejs")
class TestNode:
    def run(self, box: Sandbox, cell: str, **more: object) -> CodeResult:
        return box.code(cell, language="javascript", **more)  # type: ignore[arg-type]

    def test_variables_stay_and_may_be_declared_again(self, box: Sandbox) -> None:
        assert self.run(box, "const x = 1; let y = 2").text is None
        assert self.run(box, "const x = 20; x + y").text == "22"
        assert self.run(box, "const z = await new Promise(r => setTimeout(() => r(5), 5)); z").text == "5"
        assert self.run(box, "({z, deep: {list: [1, 2]}})").text == "{ z: 5, deep: { list: [ 1, 2 ] } }"
        assert self.run(box, "undefined").text is None

    def test_output_and_modules(self, box: Sandbox) -> None:
        child = "require('child_process').execSync('echo child', {stdio: 'inherit'})"
        result = self.run(box, f"console.log('out'); console.error('err'); {child}; 1")
        assert (result.stdout, result.stderr, result.text) == ("out\nchild\n", "err\n", "1")
        imports = "import {join as j} from 'path'\nimport * as os from 'os'\n"
        assert self.run(box, imports + "[j('a', 'b'), typeof os.cpus]").text == "[ 'a/b', 'function' ]"
        assert self.run(box, "(await import('path')).join('import(x)', 'y')").text == "'import(x)/y'"
        assert self.run(box, "`import('a') ${1 + 1}`").text == "\"import('a') 2\""

    def test_errors(self, box: Sandbox) -> None:
        result = self.run(box, "function f() {\n  throw new TypeError('bad')\n}\nf()")
        assert failed(result) == ("TypeError", "bad")
        assert result.error is not None
        assert result.error.traceback.splitlines()[1].strip().startswith("at f (cell-")
        assert "sloplet" not in result.error.traceback
        assert failed(self.run(box, "let let = 1"))[0] == "SyntaxError"
        assert failed(self.run(box, "await Promise.reject(new Error('later'))")) == ("Error", "later")
        assert failed(self.run(box, "process.exit(3)"))[0] == "SystemExit"
        assert failed(self.run(box, "throw 5")) == ("Thrown", "5")

    def test_rich_results(self, box: Sandbox) -> None:
        result = self.run(
            box, "display({_repr_html_() { return '<b>x</b>' }, _repr_png_() { return Buffer.from('hi') }}); 10n"
        )
        assert (result.results[0].html, result.results[0].png, result.text) == ("<b>x</b>", b"hi", "10n")

    def test_a_time_limit(self, box: Sandbox) -> None:
        self.run(box, "kept = 5")
        for cell in ("while (true) {}", "await new Promise(() => {})"):
            result = self.run(box, cell, timeout=0.5)
            assert (result.timed_out, result.restarted) == (True, False)
        assert self.run(box, "kept").text == "5"

    def test_what_is_thrown_later_is_told_and_survived(self, box: Sandbox) -> None:
        self.run(box, "setTimeout(() => { throw new Error('later') }, 1)")
        box.run("sleep 0.2")
        assert "Uncaught Error: later" in self.run(box, "1").stderr

    def test_much_code(self, box: Sandbox) -> None:
        assert self.run(box, f"const long = '{'é' * 100_000}'; long.length").text == "100000"

    def test_a_dead_kernel(self, box: Sandbox) -> None:
        with pytest.raises(KernelError, match="signal 9"):
            self.run(box, "process.kill(process.pid, 'SIGKILL')")
        assert self.run(box, "typeof kept", restart=True).text == "'undefined'"
