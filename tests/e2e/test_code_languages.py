"""Cells of R, Java and Deno, where the host has them. ``sloplet/code-all`` does; scripts/standard-images tries it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from server_kit import need_container
from sloplet import Sandbox
from sloplet.errors import KernelError

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    need_container()
    with Sandbox(engine="container", env={"GIVEN": "by the sandbox"}) as made:
        yield made


class TestJava:
    @pytest.fixture(autouse=True)
    def there_is_java(self) -> None:
        if shutil.which("jshell", path="/usr/bin") is None:
            pytest.skip("capability: apt-get install openjdk-17-jdk-headless")

    def test_values_and_names(self, box: Sandbox) -> None:
        assert box.code("int x = 5;\nint square(int n) { return n * n; }", language="java").text is None
        assert box.code("square(x) + 1", language="java").text == "26"
        assert box.code('"a" + x', language="java").text == '"a5"'
        assert box.code("x = 6", language="java").text is None
        assert (
            box.code("List.of(x).stream().map(n -> n + 1).collect(Collectors.toList())", language="java").text == "[7]"
        )
        assert box.code("", language="java").ok
        assert box.code("// nothing", language="java").ok

    def test_output(self, box: Sandbox) -> None:
        result = box.code('System.out.println("Hello"); System.err.print("é")', language="java")
        assert (result.stdout, result.stderr, result.text) == ("Hello\n", "é", None)

    @pytest.mark.parametrize(
        ("cell", "name", "message"),
        [
            ('int y = "no";', "CompilationError", "cannot be converted to int"),
            ("if (true) {", "CompilationError", "ends too early"),
            ('throw new IllegalStateException("bad");', "IllegalStateException", "bad"),
            ("unknown()", "CompilationError", "cannot find symbol"),
        ],
    )
    def test_errors(self, box: Sandbox, cell: str, name: str, message: str) -> None:
        box.code("int kept = 5;", language="java")
        result = box.code(cell, language="java")
        assert result.error is not None
        assert result.error.name == name
        assert message in result.error.message
        assert box.code("kept", language="java").text == "5"

    def test_variables_are_properties(self, box: Sandbox) -> None:
        asked = 'System.getProperty("FOO", "none")'
        assert box.code(asked, language="java", env={"FOO": "x y"}).text == '"x y"'
        assert box.code(asked, language="java").text == '"none"'
        assert box.code(asked + ".length()", language="java", env={"FOO": "x" * 9000}).text == "9000"
        assert box.code('System.getProperty("GIVEN")', language="java").text == '"by the sandbox"'

    def test_it_can_be_interrupted(self, box: Sandbox) -> None:
        box.code("int stays = 5;", language="java")
        for cell in ("while (true) {}", "Thread.sleep(60000);"):
            result = box.code(cell, language="java", timeout=0.5)
            assert (result.timed_out, result.restarted) == (True, False)
        assert box.code("stays", language="java").text == "5"

    def test_exit_ends_it(self, box: Sandbox) -> None:
        box.contexts.create("java", name="ending")
        with pytest.raises(KernelError, match="exit code 3"):
            box.code("System.exit(3)", context="ending")
        assert box.code("1 + 1", context="ending", restart=True).text == "2"


class TestR:
    @pytest.fixture(autouse=True)
    def there_is_r(self) -> None:
        if shutil.which("Rscript", path="/usr/bin") is None:
            pytest.skip("capability: apt-get install r-base-core")

    def test_values_output_and_errors(self, box: Sandbox) -> None:
        assert box.code("x <- 5; x + 1", language="r").text == "[1] 6"
        result = box.code('print("Hello"); message("told"); x; invisible(x)', language="r")
        assert (result.stdout, result.stderr, result.text) == ('[1] "Hello"\n[1] 5\n', "told\n", None)
        result = box.code("f <- function() stop('bad')\nf()", language="r")
        assert result.error is not None
        assert (result.error.name, result.error.message) == ("Error", "bad")
        assert not box.code("1 +* 2", language="r").ok
        assert not box.code("q()", language="r").ok
        assert box.code("", language="r").ok
        assert box.code("system('cat; echo child')", language="r").stdout == "child\n"
        assert box.code("x", language="r").text == "[1] 5"

    def test_plots(self, box: Sandbox) -> None:
        result = box.code("plot(1:3); hist(c(1, 2)); 7", language="r")
        assert result.text == "[1] 7"
        assert [one.png[:4] for one in result.results if one.png is not None] == [b"\x89PNG"] * 2

    def test_variables_for_one_cell(self, box: Sandbox) -> None:
        asked = "Sys.getenv('FOO', unset = 'none')"
        assert box.code(asked, language="r", env={"FOO": "x y", "EMPTY": ""}).text == '[1] "x y"'
        assert box.code(asked, language="r").text == '[1] "none"'
        assert box.code(f"nchar({asked})", language="r", env={"FOO": "x" * 9000}).text == "[1] 9000"

    def test_it_can_be_interrupted(self, box: Sandbox) -> None:
        box.code("kept <- 5", language="r")
        for cell in ("while (TRUE) {}", "Sys.sleep(60)"):
            result = box.code(cell, language="r", timeout=0.5)
            assert (result.timed_out, result.restarted) == (True, False)
        box.contexts.interrupt("r")  # while nothing runs: it is not for the next cell
        assert box.code("kept", language="r").text == "[1] 5"


class TestDeno:
    @pytest.fixture(autouse=True)
    def there_is_deno(self) -> None:
        if shutil.which("deno", path="/usr/local/bin:/usr/bin") is None:
            pytest.skip("capability: pip install deno")

    def test_values_output_and_errors(self, box: Sandbox) -> None:
        assert box.code("const x: number = 5; enum E { A = 1 }; x + E.A", language="deno").text == "6"
        assert box.code("import { join } from 'node:path'; join('a', `${x}`)", language="deno").text == "'a/5'"
        result = box.code("console.log('Hello'); console.error('told'); await Promise.resolve()", language="deno")
        assert (result.stdout, result.stderr, result.text) == ("Hello\n", "told\n", None)
        wrong = {"let y: = 4": "SyntaxError", "missing()": "ReferenceError", "Deno.exit(3)": "SystemExit"}
        for cell, name in wrong.items():
            error = box.code(cell, language="deno").error
            assert error is not None
            assert error.name == name
        assert box.code("x", language="deno").text == "5"

    def test_variables_for_one_cell(self, box: Sandbox) -> None:
        asked = "Deno.env.get('FOO') ?? Deno.env.get('GIVEN')"
        assert box.code(asked, language="deno", env={"FOO": "x y"}).text == "'x y'"
        assert box.code(asked, language="deno").text == "'by the sandbox'"

    def test_it_can_be_interrupted(self, box: Sandbox) -> None:
        box.code("const kept = 5", language="deno")
        result = box.code("await new Promise((done) => setTimeout(done, 60000))", language="deno", timeout=0.5)
        assert (result.timed_out, result.restarted) == (True, False)
        assert box.code("kept", language="deno").text == "5"


def test_a_language_that_is_not_there_is_told(box: Sandbox) -> None:
    box.contexts.create("r" if shutil.which("Rscript") is None else "python", name="none", env={"PATH": "/nowhere"})
    with pytest.raises(KernelError, match="could not be started"):
        box.code("1", context="none")
