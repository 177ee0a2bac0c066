"""What cells tell to programs: charts, tables and plain values as JSON; variables for one cell; TypeScript."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_kit import need_container
from sloplet import Sandbox
from sloplet.code.results import RichResult

SYSTEM_PYTHON = "/usr/bin/python3"
#: In place of the compiler: types of this form are all that the cells here have.
STRIPPER = r"""
exports.version = '5.0.0';
exports.ScriptTarget = { ES2022: 9 }; exports.ModuleKind = { ESNext: 99 }; exports.DiagnosticCategory = { Error: 1 };
exports.flattenDiagnosticMessageText = (text) => text;
exports.transpileModule = (source) => {
  const at = source.indexOf(': =');
  const file = { getLineAndCharacterOfPosition: (start) => ({ line: 0, character: start }) };
  const diagnostics = at < 0 ? [] : [{ category: 1, file, start: at, messageText: 'Type expected.' }];
  return { outputText: source.replace(/: (number|string)\b/g, ''), diagnostics };
};
"""


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    need_container()
    with Sandbox(engine="container") as made:
        yield made


@pytest.fixture(scope="module")
def data(box: Sandbox) -> Sandbox:
    for package in ("matplotlib", "pandas", "PIL"):
        if not Path(f"/usr/lib/python3/dist-packages/{package}").exists():
            pytest.skip(f"capability: apt-get install python3-{package}")
    box.contexts.create(name="data", python=SYSTEM_PYTHON)
    box.code("import matplotlib.pyplot as plt, numpy as np, pandas as pd, datetime", context="data")
    return box


def shown(box: Sandbox, cell: str, **more: Any) -> list[RichResult]:
    result = box.code(cell, context="data", **more)
    assert result.error is None
    return list(result.results)


def chart(box: Sandbox, cell: str) -> dict[str, Any]:
    (found,) = shown(box, cell + ";plt.show()")
    assert found.png is not None
    made: dict[str, Any] = found.chart
    return made


class TestCharts:
    def test_a_line(self, data: Sandbox) -> None:
        found = chart(
            data,
            "plt.plot([0, 1, 2], [3, float('nan'), 5], label='up'); plt.plot([0, 1, 2], [1, 1, 1]); plt.grid(True)\n"
            "plt.xlabel('Time (s)'); plt.ylabel('Rate [Hz]'); plt.title('T')",
        )
        assert (found["type"], found["title"]) == ("line", "T")
        assert [found[key] for key in ("x_label", "x_unit", "y_label", "y_unit")] == [
            "Time (s)",
            "s",
            "Rate [Hz]",
            "Hz",
        ]
        assert (found["x_scale"], found["y_scale"]) == ("linear", "linear")
        assert all(isinstance(tick, float) for tick in found["x_ticks"] + found["y_ticks"])
        assert len(found["x_ticks"]) == len(found["x_tick_labels"])
        assert found["elements"] == [
            {"label": "up", "points": [[0.0, 3.0], [1.0, None], [2.0, 5.0]]},
            {"label": "Line 1", "points": [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]},
        ]

    @pytest.mark.parametrize(
        ("cell", "scales"),
        [
            ("plt.plot([datetime.date(2023, 9, day) for day in (1, 2)], [1, 2])", ("datetime", "linear")),
            ("plt.plot([1, 2, 3], ['A', 'B', 'C'])", ("linear", "categorical")),
            ("plt.plot([1, 10, 100], [1, 2, 3]); plt.xscale('log')", ("log", "linear")),
        ],
    )
    def test_scales(self, data: Sandbox, cell: str, scales: tuple[str, str]) -> None:
        found = chart(data, cell)
        assert (found["x_scale"], found["y_scale"]) == scales
        if scales[0] == "datetime":
            assert found["elements"][0]["points"] == [["2023-09-01", 1.0], ["2023-09-02", 2.0]]
            assert all(tick.startswith("2023-09-0") for tick in found["x_ticks"])

    def test_a_scatter(self, data: Sandbox) -> None:
        found = chart(data, "plt.scatter([1, 2], [3, 4], label='D'); plt.axhline(2)")
        assert found["type"] == "scatter"
        assert found["elements"] == [{"label": "D", "points": [[1.0, 3.0], [2.0, 4.0]]}]

    @pytest.mark.parametrize(
        ("cell", "labels", "elements"),
        [
            ("plt.bar(['a', 'b'], [5, 5]); plt.xlabel('n'); plt.ylabel('v')", ("n", "v"),
             [("a", "Group 0", 5.0), ("b", "Group 0", 5.0)]),
            ("plt.barh(['a', 'b'], [5, 7]); plt.xlabel('v'); plt.ylabel('n')", ("n", "v"),
             [("a", "Group 0", 5.0), ("b", "Group 0", 7.0)]),
            ("plt.bar([0.8, 1.8], [1, 2], .4, label='m'); plt.bar([1.2, 2.2], [3, 4], .4, label='w')\n"
             "plt.xticks([1, 2], ['G1', 'G2'])", (None, None),
             [("G1", "m", 1.0), ("G2", "m", 2.0), ("G1", "w", 3.0), ("G2", "w", 4.0)]),
        ],
    )  # fmt: skip
    def test_bars(self, data: Sandbox, cell: str, labels: Any, elements: Any) -> None:
        found = chart(data, cell)
        assert (found["type"], found["x_label"], found["y_label"]) == ("bar", *labels)
        assert [(one["label"], one["group"], one["value"]) for one in found["elements"]] == elements

    def test_a_pie(self, data: Sandbox) -> None:
        found = chart(data, "plt.pie([90, 10], labels=['No', 'Yes'], autopct='%1.1f%%', startangle=90)")
        assert found["type"] == "pie"
        assert found["elements"] == [
            {"label": "No", "angle": 324.0, "radius": 1.0},
            {"label": "Yes", "angle": 36.0, "radius": 1.0},
        ]

    @pytest.mark.parametrize("upright", [True, False])
    def test_boxes(self, data: Sandbox, upright: bool) -> None:
        found = chart(
            data,
            "plt.boxplot([[85, 90, 78, 92, 88], [95, 89, 76, 91, 84, 87]], labels=['A', 'B'], patch_artist=True,"
            f" vert={upright})",
        )
        assert found["type"] == "box_and_whisker"
        keys = ("label", "min", "first_quartile", "median", "third_quartile", "max", "outliers")
        assert [[one[key] for key in keys] for one in found["elements"]] == [
            ["A", 78.0, 85.0, 88.0, 90.0, 92.0, []],
            ["B", 84.0, 84.75, 88.0, 90.5, 95.0, [76.0]],
        ]

    def test_several_unknown_and_none(self, data: Sandbox) -> None:
        found = chart(data, "f, (a, b) = plt.subplots(1, 2); f.suptitle('S'); a.plot([1, 2]); b.imshow(np.eye(2))")
        assert (found["type"], found["title"]) == ("superchart", "S")
        assert [one["type"] for one in found["elements"]] == ["line", "unknown"]
        assert found["elements"][1]["elements"] == []
        assert shown(data, "plt.subplots(); plt.show()")[0].chart is None

    def test_too_much_of_it_is_left_out(self, data: Sandbox) -> None:
        (found,) = shown(data, "plt.plot(np.zeros(300_000)); plt.show()")
        assert found.png is not None
        assert found.chart is None

    def test_what_fails_is_left_out(self, data: Sandbox) -> None:
        cell = "f, a = plt.subplots(); a.plot([1, 2]); a.get_title = None; plt.show()"
        assert [(one.png is not None, one.chart) for one in shown(data, cell)] == [(True, None)]


class TestValues:
    def test_tables(self, data: Sandbox) -> None:
        times = "pd.to_datetime(['2020-01-01', None])"
        cell = f"pd.DataFrame({{'a': [1, 2], 't': {times}, 'o': [{{1}}, float('nan')], 5: [1.5, 2]}})"
        (found,) = shown(data, cell)
        assert found.columns == {"a": [1, 2], "t": ["2020-01-01T00:00:00", None], "o": ["{1}", None], "5": [1.5, 2.0]}
        assert "<table" in (found.html or "")
        assert shown(data, "pd.DataFrame({'a': range(300_000)})")[0].columns is None

    def test_lists_and_dicts(self, data: Sandbox) -> None:
        assert shown(data, "{'a': [1, (2, np.float64(3)), float('inf')], 3: np.arange(2)}")[0].json == {
            "a": [1, [2, 3.0], None], "3": [0, 1],
        }  # fmt: skip
        assert shown(data, "[object]")[0].json is None
        assert shown(data, "deep = []\nfor _ in range(500): deep = [deep]\ndeep")[0].json is None
        assert json.dumps(shown(data, "[1]")[0].to_dict()["data"]["application/json"]) == '"[1]"'

    def test_pictures_that_are_shown_or_saved(self, data: Sandbox) -> None:
        cell = "from PIL import Image\npicture = Image.new('RGB', (2, 2)); picture.show(); picture.save('/tmp/p.png')"
        assert [one.png is not None for one in shown(data, cell)] == [True]
        again = shown(data, cell, env={"SLOPLET_SHOW_SAVED": "1"})
        assert [one.png is not None for one in again] == [True, True]


@pytest.mark.parametrize(
    ("language", "said", "keep"),
    [
        ("python", "import os; print(os.environ.get('FOO', 'none'), len(os.environ.get('LONG', '')))",
         "os.environ['FOO'] = 'kept'"),
        ("node", "console.log(process.env.FOO || 'none', (process.env.LONG || '').length)", "process.env.FOO = 'kept'"),
        ("shell", "echo ${FOO-none} ${#LONG}", "FOO=kept"),
    ],
)  # fmt: skip
def test_variables_for_one_cell(box: Sandbox, language: str, said: str, keep: str) -> None:
    def told(**env: str) -> str:
        return box.code(said, language=language, env=env).stdout

    assert told(FOO="b'a\"$r") == "b'a\"$r 0\n"
    assert told() == "none 0\n"
    assert told(FOO="x", LONG="y" * 9000) == "x 9000\n"
    assert told() == "none 0\n"
    box.code(keep, language=language)
    assert told(FOO="other") == "other 0\n"
    assert told() == "kept 0\n"


@pytest.mark.parametrize(
    ("language", "cell"), [("python", "1 / 0"), ("node", "throw 1"), ("shell", "exit 3"), ("shell", "set -e; false")]
)
def test_they_are_given_back_by_a_cell_that_fails(box: Sandbox, language: str, cell: str) -> None:
    assert not box.code(cell, language=language, env={"LENT": "x"}).ok
    assert box.code("echo ${LENT-none}", language="shell").stdout == "none\n"
    assert box.code("import os; os.environ.get('LENT')").text is None
    assert box.code("process.env.LENT", language="node").text is None


class TestTypeScript:
    def test_without_a_compiler_it_says_so(self, box: Sandbox) -> None:
        box.contexts.create("typescript", name="bare", cwd="/")
        result = box.code("1", context="bare")
        if result.ok:
            pytest.skip("capability: there is a compiler")
        assert result.error is not None
        assert result.error.name == "TypeScriptError"
        assert "npm install" in result.error.message

    def test_types_are_stripped(self, box: Sandbox) -> None:
        box.files.write("node_modules/typescript/index.js", STRIPPER, parents=True)
        assert box.code("const add = (x: number, y: number): number => x + y; add(1, 2)", language="ts").text == "3"
        assert box.code("const n: number = add(3, 4)", language="typescript").ok
        assert box.code("await Promise.resolve(n)", language="ts").text == "7"
        failed = box.code("const x: = 5", language="ts")
        assert failed.error is not None
        assert (failed.error.name, failed.error.message) == ("SyntaxError", "line 1, column 8: Type expected.")
        assert [context.name for context in box.contexts.list() if context.language == "typescript"]


def test_an_object_is_no_block(box: Sandbox) -> None:
    assert box.code("{a: 1, b: [2]}", language="node").text == "{ a: 1, b: [ 2 ] }"
    assert box.code("{ let x = 1; x + 1 }", language="node").text == "2"
