"""E2B's own clients, unchanged, against a server: old and new, by URL and by name over TLS, on each engine.

What they do is in tests/e2b: programs as E2B's users write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2b_kit import HERE, VERSIONS, E2BServer, e2b_server

pytestmark = pytest.mark.timeout(900)
MODES = ("url", "domain")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BServer]:
    with e2b_server(Path(tmp_path_factory.mktemp("e2b")) / "home") as found:
        yield found


def need(server: E2BServer, engine: str) -> None:
    if engine not in server.keys:
        pytest.skip(f"{engine} cannot run here")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("version", VERSIONS)
def test_python(server: E2BServer, version: str, mode: str) -> None:
    server.pytest(version, mode, "container")


@pytest.mark.parametrize(("version", "mode"), [("new", "domain"), ("old", "url")])
def test_python_on_gvisor(server: E2BServer, version: str, mode: str) -> None:
    need(server, "gvisor")
    server.pytest(version, mode, "gvisor")


@pytest.mark.parametrize(("version", "mode"), [("new", "url"), ("new", "domain"), ("old", "url")])
@pytest.mark.parametrize("program", sorted(path.name for path in (HERE / "js").glob("*.test.cjs")))
def test_javascript(server: E2BServer, program: str, version: str, mode: str) -> None:
    engine = "gvisor" if mode == "domain" and "gvisor" in server.keys else "container"
    server.node(version, HERE / "js" / program, mode, engine)
