"""clients/js: its types are those of the server, its errors those of errors.py, and Node drives a server with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_kit import Served, need_container, served
from sloplet import errors

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "clients" / "js"


def _run(*command: str, env: dict[str, str] | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    quiet = {"npm_config_update_notifier": "false", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=PACKAGE, env={**os.environ, **quiet, **(env or {})}, timeout=timeout, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def package() -> Path:
    """The package with what its tests need. Skips where Node is missing, or npm can install nothing."""
    for name in ("node", "npm"):
        if shutil.which(name) is None:
            pytest.skip(f"no {name} here (apt-get install nodejs npm)")
    version = _run("node", "--version").stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < 20:
        pytest.skip(f"Node {version} is too old: 20 or newer is needed")
    wanted, installed = PACKAGE / "package-lock.json", PACKAGE / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
        done = _run("npm", "ci", "--prefer-offline", "--no-audit", "--no-fund")
        if done.returncode:
            pytest.skip(f"npm can install nothing here: {done.stdout[-500:]}")
        os.utime(installed)
    return PACKAGE


@pytest.fixture(scope="module")
def compiled(package: Path) -> Path:
    shutil.rmtree(package / "build", ignore_errors=True)
    done = _run("node_modules/.bin/tsc", "-p", "tsconfig.json")
    assert done.returncode == 0, done.stdout
    return package / "build"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_container()
    with served(tmp_path_factory.mktemp("js") / "home") as made:
        yield made


def test_the_lock_file_names_no_registry() -> None:
    """Whoever installs decides where packages come from."""
    assert '"resolved"' not in (PACKAGE / "package-lock.json").read_text()


def test_errors_are_the_same_tree() -> None:
    text = (PACKAGE / "src" / "errors.ts").read_text()
    theirs = dict(re.findall(r"^export class (\w+) extends (\w+)", text, re.M))
    assert theirs.pop("SlopletError") == "Error"
    ours: dict[str, str] = {}

    def walk(cls: type[errors.SlopletError]) -> None:
        for each in cls.__subclasses__():
            if each.__module__ == errors.__name__:
                ours[each.__name__] = cls.__name__
                walk(each)

    walk(errors.SlopletError)
    assert theirs == ours
    listed = re.search(r"const TREE.*?= \{(.*?)\};", text, re.S)
    assert listed is not None
    assert set(re.findall(r"\w+", listed[1])) == {"SlopletError", *ours}


def test_the_types_are_those_of_the_document(package: Path, tmp_path: Path) -> None:
    """docs/openapi.json is the server's own: tests/unit/test_openapi.py. This is made of it."""
    made = tmp_path / "schema.ts"
    tool, document = "node_modules/.bin/openapi-typescript", str(ROOT / "docs" / "openapi.json")
    done = _run(tool, document, "--output", str(made), "--alphabetize", "--default-non-nullable", "false")
    assert done.returncode == 0, done.stdout
    assert made.read_text() == (package / "src" / "schema.ts").read_text(), "stale: run scripts/openapi"


def test_it_is_a_package(package: Path, compiled: Path, tmp_path: Path) -> None:
    """What is published: built, imported by its name, and nothing else in it."""
    done = _run("node_modules/.bin/tsc", "-p", "tsconfig.build.json")
    assert done.returncode == 0, done.stdout
    script = (
        "import('sloplet').then(m => { if (!m.Sandbox.create || !new m.FileMissing('x').message) process.exit(1) })"
    )
    done = _run("node", "-e", script)
    assert done.returncode == 0, done.stdout
    packed = _run("npm", "pack", "--dry-run", "--ignore-scripts", "--json")
    assert "dist/index.js" in packed.stdout
    assert "dist/index.d.ts" in packed.stdout
    assert "test" not in re.findall(r'"path": "([^"/]+)', packed.stdout)


def test_the_snippets_of_its_readme_compile(package: Path, compiled: Path) -> None:
    snippets = re.findall(r"```ts\n(.*?)```", (package / "README.md").read_text(), re.S)
    assert len(snippets) >= 2
    done = _run("node_modules/.bin/tsc", "-p", "tsconfig.build.json")  # what `import "sloplet"` finds
    assert done.returncode == 0, done.stdout
    folder = package / "build" / "readme"
    folder.mkdir(exist_ok=True)
    for number, snippet in enumerate(snippets):
        known = "" if "import { Sandbox" in snippet else 'import { Client } from "sloplet";\n'
        (folder / f"{number}.ts").write_text(f"declare const code: string;\n{known}{snippet}\nexport {{}};\n")
    options = {"noEmit": True, "noUnusedLocals": False, "rootDir": "../..", "outDir": "../out"}
    settings = {"extends": "../../tsconfig.json", "compilerOptions": options, "include": ["*.ts"], "exclude": []}
    (folder / "tsconfig.json").write_text(json.dumps(settings))
    done = _run("node_modules/.bin/tsc", "-p", str(folder))
    assert done.returncode == 0, done.stdout


def _tests(*arguments: str, env: dict[str, str]) -> dict[str, int]:
    done = _run("node", "--test", "--test-reporter=tap", *arguments, env=env)
    assert done.returncode == 0, done.stdout[-20000:]
    return {
        what: int(count) for what, count in re.findall(r"^# (pass|fail|skipped|cancelled) (\d+)", done.stdout, re.M)
    }


def test_node_drives_a_real_server(compiled: Path, server: Served) -> None:
    """What clients/js/test asserts, with a tenant's key."""
    env = {"SLOPLET_URL": server.url, "SLOPLET_KEY": server.new_key("node"), "SLOPLET_TEST_ENGINE": "container"}
    if os.environ.get("SLOPLET_TEST_RUNSC"):
        env["SLOPLET_TEST_LIVE_ENGINE"] = "gvisor"
    counts = _tests("build/test/", env=env)
    assert counts["pass"] >= 45, counts
    assert counts["skipped"] <= (0 if "SLOPLET_TEST_LIVE_ENGINE" in env else 1), counts


def test_nodes_own_websocket_does_as_well(compiled: Path, server: Served) -> None:
    """Without the package `ws`: what needs a WebSocket, with the one that Node brings."""
    flags = ["--experimental-websocket"] if _run("node", "-p", "typeof WebSocket").stdout.strip() != "function" else []
    if _run("node", *flags, "-p", "typeof WebSocket").stdout.strip() != "function":
        pytest.skip("this Node has no WebSocket of its own")
    env = {"SLOPLET_URL": server.url, "SLOPLET_KEY": server.new_key("own"), "SLOPLET_TEST_ENGINE": "container"}
    env |= {"SLOPLET_TEST_WEBSOCKET": "global", "NODE_OPTIONS": " ".join(flags)}
    counts = _tests("--test-name-pattern=stdin|terminal|detached|wrong key", "build/test/live.test.js", env=env)
    assert counts["pass"] >= 5, counts


TLS = """
import { Client } from "./build/src/index.js";
import WebSocket from "ws";
const client = new Client({ WebSocket, retries: 0 });
try {
  const box = await client.create({ engine: "fake" });
  const process = await box.spawn(["cat"], { stdin: true });
  await process.send("by socket");
  await process.closeStdin();
  console.log((await process.wait()).stdout);
  await box.close();
} catch (error) {
  console.log(error.name);
}
"""


def test_tls_by_an_authority_of_the_servers_own(compiled: Path, tmp_path: Path) -> None:
    """Trusted when it is named, and only then; for fetch and for WebSockets."""
    with served(tmp_path / "home", "--tls") as secure:
        assert secure.url.startswith("https://")
        env = {"SLOPLET_URL": secure.url, "SLOPLET_KEY": secure.key}
        script = ("node", "--input-type=module", "-e", TLS)
        assert _run(*script, env=env).stdout.strip().endswith("ServerUnreachable")
        trusted = {**env, "NODE_EXTRA_CA_CERTS": str(tmp_path / "home" / "server" / "tls" / "ca.pem")}
        assert _run(*script, env=trusted).stdout.strip() == "by socket"
