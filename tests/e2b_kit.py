"""E2B's own clients, as published, and a server for them.

``scripts/test`` puts the clients where ``SLOPLET_TEST_E2B`` says, with the images that E2B's own templates are made of:
``new`` and ``old`` (Python environments), ``js`` and ``js-old`` (node_modules), ``e2b-base.tar`` and ``e2b-code.tar``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server_kit import Served, end_keepers, environment, need_container, start
from sloplet.engines import registry
from sloplet.server.e2b.keys import to_e2b

HERE = Path(__file__).parent / "e2b"
VERSIONS = ("new", "old")
_IMAGES = ("e2b-base", "e2b-code")


def clients() -> Path:
    folder = os.environ.get("SLOPLET_TEST_E2B", "")
    if not folder or not Path(folder, "e2b-code.tar").exists():
        pytest.skip("E2B's clients are not here: scripts/test installs them (SLOPLET_TEST_E2B)")
    return Path(folder)


def has_gvisor() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        if runsc := os.environ.get("SLOPLET_TEST_RUNSC"):
            patch.setenv("SLOPLET_RUNSC", runsc)
        return bool(registry.load("gvisor").probe().available)


@dataclass
class E2BServer:
    """A server with E2B's images, and keys whose sandboxes are of one engine each."""

    served: Served
    keys: dict[str, str]  #: by engine

    def environment(self, mode: str, engine: str) -> dict[str, str]:
        """What a program of E2B's is started with. ``mode``: url (plain HTTP) or domain (TLS)."""
        told = self.served.told["e2b"][mode]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLOPLET_", "E2B_"))}
        live = {"SLOPLET_TEST_LIVE": "1"} if engine == "gvisor" else {}
        return {**kept, **told, **live, "E2B_API_KEY": to_e2b(self.keys[engine]), "NO_PROXY": "*"}

    def run(self, command: Sequence[str | Path], mode: str, engine: str, **variables: str) -> None:
        """Run a program; what it said is shown if it fails."""
        done = subprocess.run(
            [str(word) for word in command], env={**self.environment(mode, engine), **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900, check=False,
        )  # fmt: skip
        said = done.stdout.decode("utf-8", "replace")
        assert done.returncode == 0, f"exit code {done.returncode}:\n{said[-30000:]}"

    @property
    def home(self) -> Path:
        return self.served.home

    def run_python(self, version: str, script: str, mode: str = "url", engine: str = "container", **names: Any) -> Any:
        """What a script of the Python client says last, as JSON. ``names`` are variables of it."""
        head = f"import json\nglobals().update(json.loads({json.dumps(json.dumps(names))}))\n"
        command = [str(clients() / version / "bin" / "python"), "-c", head + script]
        env = self.environment(mode, engine)
        done = subprocess.run(command, env=env, capture_output=True, timeout=300, check=False)
        assert done.returncode == 0, (done.stdout[-3000:] + done.stderr[-6000:]).decode(errors="replace")
        return json.loads(done.stdout.splitlines()[-1])

    def pytest(self, version: str, mode: str, engine: str, *arguments: str) -> None:
        """The programs of tests/e2b/python, by that version of the Python client."""
        python = clients() / version / "bin" / "python"
        folder = HERE / "python"
        files = [str(folder / name) if name.endswith(".py") else name for name in arguments] or [str(folder)]
        self.run([python, "-m", "pytest", "-q", "-c", folder / "pytest.ini", "--rootdir", folder, *files], mode, engine)

    def node(self, version: str, program: Path, mode: str, engine: str) -> None:
        """A program of the JavaScript client."""
        modules = str(clients() / {"new": "js", "old": "js-old"}[version] / "node_modules")
        self.run(["node", "--test", "--test-reporter=spec", program], mode, engine, NODE_PATH=modules)


@contextmanager
def e2b_server(home: Path, arguments: Sequence[str] = ()) -> Iterator[E2BServer]:
    need_container()
    folder = clients()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _IMAGES:
        command = [sys.executable, "-m", "sloplet.cli", "image", "import", "-q", str(folder / f"{name}.tar")]
        subprocess.run([*command, f"sloplet/{name}"], env=environment(home), check=True, capture_output=True)
    served = start(home, ["--e2b", "--e2b-port", "0", *arguments], fake=False)
    try:
        engines = ["container", *(["gvisor"] if has_gvisor() else [])]
        keys = {name: served.new_key(name, "--tenant", "main", "--engines", name) for name in engines}
        yield E2BServer(served, keys)
    finally:
        served.stop()
        if served.process.stdout is not None:
            served.process.stdout.close()
        end_keepers(home)
        shutil.rmtree(home, ignore_errors=True)
