"""Who may import whom (DESIGN, section 8), and what ``import sloplet`` may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sloplet

pytestmark = pytest.mark.anyone

ROOT = Path(sloplet.__file__).parent


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, *, at_start_only: bool = False) -> set[str]:
    """The modules of ours that a file imports; types-only imports are left out."""
    tree = ast.parse(path.read_text())
    package = _module(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    nodes = tree.body if at_start_only else ast.walk(tree)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sloplet"}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                prefix = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            else:
                prefix = node.module or ""
            if prefix.split(".")[0] == "sloplet":
                found |= {prefix} | {f"{prefix}.{alias.name}" for alias in node.names}
    return {name.removeprefix("sloplet.") for name in found if name != "sloplet"}


FILES = {_module(path).removeprefix("sloplet").lstrip("."): path for path in sorted(ROOT.rglob("*.py"))}


def _hits(imported: set[str], forbidden: str) -> set[str]:
    return {name for name in imported if name == forbidden or name.startswith(forbidden + ".")}


RULES = [
    # (who, may not import, why)
    ("errors", ["spec", "engines", "wire", "runtime", "state", "sandbox", "fs", "files"], "errors import nothing"),
    ("spec", ["engines", "wire", "runtime", "state", "sandbox", "fs", "files"], "specs import nothing but errors"),
    *(
        (
            part,
            ["engines", "wire", "runtime", "state", "sandbox", "keeper", "cli", "network.egress"],
            "specs are plain values",
        )
        for part in ("netspec", "secretspec", "volumespec", "quantities")
    ),
    *(
        (
            f"network.{part}",
            ["engines", "wire", "controller", "runtime", "state", "sandbox", "keeper", "cli"],
            "policy is pure",
        )
        for part in (
            "policy",
            "rules",
            "hosts",
            "names",
            "addresses",
            "paths",
            "lookup",
            "reasons",
            "presets",
            "indexes",
        )
    ),
    (
        "network",
        ["engines", "runtime", "holder", "state", "keeper", "sandbox", "cli"],
        "what is judged knows no holder",
    ),
    ("results", ["engines", "wire", "runtime", "state", "sandbox", "files"], "results are plain values"),
    (
        "engines",
        ["runtime", "state", "keeper", "sandbox", "sync", "cli", "files", "process"],
        "engines know no commands",
    ),
    (
        "wire",
        ["runtime", "state", "keeper", "sandbox", "sync", "cli", "files", "process", "images"],
        "the wire is below",
    ),
    (
        "state",
        ["runtime", "engines.registry", "keeper", "sandbox", "sync", "cli", "wire.mux"],
        "state knows no engines",
    ),
    ("sandbox", ["state", "engines.registry", "images", "cli", "sync"], "a sandbox knows its Controller only"),
    ("files", ["runtime", "state", "engines", "cli", "sandbox"], "files are over the wire"),
    ("process", ["runtime", "state", "engines", "cli", "sandbox"], "commands are over the wire"),
    ("transfer", ["runtime", "state", "engines", "cli", "sandbox"], "transfers are over the wire"),
    ("runtime", ["cli", "sync", "sandbox", "keeper", "testing"], "the runtime is a Controller"),
    ("holder", ["cli", "sync", "sandbox", "keeper", "testing"], "and so is what it stands on"),
    ("timeline", ["cli", "sync", "sandbox", "keeper", "testing"], "and its live state"),
    ("pools", ["cli", "sync", "sandbox", "keeper", "testing"], "and its pools"),
    ("volumes", ["runtime", "holder", "cli", "sandbox", "keeper", "engines.registry"], "volumes know no sandboxes"),
    ("images", ["runtime", "engines.registry", "cli", "sandbox", "keeper", "build"], "images know no sandboxes"),
    *(
        (f"build.{part}", ["engines", "wire", "controller", "runtime", "state", "sandbox", "fs"], "recipes are pure")
        for part in ("words", "lines", "instructions", "dockerfile", "plan", "scope", "ignore")
    ),
    ("build", ["cli", "sync", "runtime", "holder", "keeper"], "builds know their Controller only"),
    ("mcp", ["runtime", "holder", "state", "keeper", "remote", "images", "engines"], "sessions know their Ground only"),
    (
        "remote",
        ["runtime", "holder", "engines.registry", "server", "cli", "sandbox", "sync"],
        "a server's client runs nothing",
    ),
    ("", ["testing"], "the suite is for tests only"),
]


@pytest.mark.parametrize(("who", "forbidden", "why"), RULES, ids=[rule[0] or "everything" for rule in RULES])
def test_direction(who: str, forbidden: list[str], why: str) -> None:
    wrong: list[str] = []
    for module, path in FILES.items():
        inside = module == who or module.startswith(who + ".") or not who
        if not inside or module.startswith("testing") or (not who and module.startswith("cli")):
            continue
        for name in forbidden:
            wrong += [f"{module} imports {hit}: {why}" for hit in _hits(_imports(path), name)]
    assert not wrong


def test_the_cli_is_on_top() -> None:
    wrong = [
        m
        for m, path in FILES.items()
        if not m.startswith(("cli", "testing", "__main__")) and _hits(_imports(path), "cli")
    ]
    assert not wrong


def test_the_server_is_on_top() -> None:
    """Nobody needs it to use sandboxes, here or elsewhere; a model's tools show errors as it does."""
    may = ("server", "cli", "testing", "mcp")
    assert not [m for m, path in FILES.items() if not m.startswith(may) and _hits(_imports(path), "server")]
    inside = {hit for m, path in FILES.items() if m.startswith("mcp") for hit in _hits(_imports(path), "server")}
    assert inside <= {"server.problems", "server.problems.without_paths"}


def test_a_remote_client_is_light() -> None:
    """What a program with SLOPLET_URL loads before its first sandbox: no web framework, and httpx only for streams."""
    script = "import sys, sloplet.remote.controller; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "websockets" in loaded
    assert not loaded & {"fastapi", "starlette", "uvicorn", "pydantic", "httpx", "mcp", "asyncssh", "sqlite3"}


def test_the_rules_see_something() -> None:
    assert "wire.mux" in _imports(FILES["holder"])
    assert "engines.base" in _imports(FILES["runtime"])
    assert "wire.mux.AgentMux" in _imports(FILES["engines.fakeagent.agent"])
    assert _hits({"state.home.Home"}, "state")


def _loaded(statement: str) -> set[str]:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); before = set(sys.modules); {statement}; "
        "print('\\n'.join(set(sys.modules) - before))"
    )
    command = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    loaded = _loaded("import sloplet")
    heavy = {
        "asyncio",
        "sqlite3",
        "ctypes",
        "subprocess",
        "socket",
        "ssl",
        "json",
        "dataclasses",
        "inspect",
        "click",
        "rich",
    }
    assert not loaded & heavy
    assert {name for name in loaded if name.startswith("sloplet")} == {"sloplet"}


def test_the_embedded_path_needs_the_standard_library_only() -> None:
    loaded = _loaded("from sloplet import Sandbox; Sandbox(engine='fake')")
    foreign = {name.split(".")[0] for name in loaded} - {"sloplet"} - set(sys.stdlib_module_names)
    assert not {name for name in foreign if not name.startswith("_")}
    assert "pytest" not in loaded


def test_every_public_name_is_there() -> None:
    for name in sloplet.__all__:
        assert getattr(sloplet, name) is not None
    assert set(sloplet.__all__) == set(dir(sloplet))
    with pytest.raises(AttributeError):
        _ = sloplet.nothing


@pytest.mark.parametrize("module", sorted(FILES))
def test_files_say_what_they_are_for(module: str) -> None:
    path = FILES[module]
    text = path.read_text()
    if not text.strip():
        return
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path.name} does not say its purpose"
