"""The docs are true: their Python runs, and nothing that users meet is missing from them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from sloplet import errors
from sloplet.cli.main import VERBS, cli

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NOT_RUN = "<!-- not run"  # on the line before a block that cannot run by itself; says why


def snippets() -> list[object]:
    """Every Python block that imports something: those are programs; the others are signatures."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for number, match in enumerate(_BLOCK.finditer(text), 1):
            before = text[: match.start()].rstrip().rpartition("\n")[2]
            if re.search(r"^\s*(from|import) ", match[1], re.MULTILINE) and not before.startswith(_NOT_RUN):
                found.append(pytest.param(match[1], id=f"{page.name}-{number}"))
    return found


@pytest.mark.timeout(90)
@pytest.mark.parametrize("code", snippets())
def test_snippet_runs(code: str, tmp_path: Path) -> None:
    package = str(Path(errors.__file__).parents[1])
    environment = {**os.environ, "SLOPLET_HOME": str(tmp_path / "home"), "PYTHONPATH": package}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment,
        timeout=80,
    )  # fmt: skip
    if "EngineUnavailable" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", list(VERBS))
def test_verb_and_its_flags_are_documented(verb: str) -> None:
    assert re.search(rf"\bsloplet {verb}\b", TEXT), f"`sloplet {verb}` is in no page"
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    missing = []
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            flag = max(parameter.opts, key=len)
            if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", TEXT):
                missing.append(flag)
    assert missing == [], f"flags of `sloplet {verb}` that no page mentions"


@pytest.mark.parametrize("verb", list(VERBS))
def test_verb_has_help(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    assert command.help
    assert [p.name for p in command.params if isinstance(p, click.Option) and not p.help and not p.hidden] == []


def error_classes() -> list[str]:
    return [
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.SlopletError) and kind.__module__ == errors.__name__
    ]


@pytest.mark.parametrize("name", error_classes())
def test_error_is_documented(name: str) -> None:
    assert re.search(rf"\b{name}\b", TEXT)


def settings() -> list[str]:
    names: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        names |= set(re.findall(r"\bSLOPLET_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
    return sorted(names)


@pytest.mark.parametrize("name", settings())
def test_setting_is_documented(name: str) -> None:
    assert name in TEXT


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
