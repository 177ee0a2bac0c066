"""The examples of docs/http.md run, in their order, with the curl and the shell that are here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from server_kit import served
from sloplet.engines import registry

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(120)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http.md"
_BLOCK = re.compile(r"^<!-- run -->\n```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: An alias with a fault that is an error here: any answer but a good one ends the script.
_BEGIN = """
shopt -s expand_aliases
set -eux
alias api='curl -sS --fail-with-body -w "\\n" --noproxy "*" -H "Authorization: Bearer $SLOPLET_KEY"'
"""


def test_examples(tmp_path: Path) -> None:
    blocks = _BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 6
    probe = registry.load("container").probe()
    if not probe.available or not probe.capabilities.egress:
        pytest.skip(f"capability: container: {probe.reason or probe.capabilities.no_egress}")
    script = "".join(re.sub(r"^alias api=.*\n", "", block, flags=re.MULTILINE) for block in blocks)
    with served(tmp_path / "home") as server:
        done = subprocess.run(
            ["bash", "-c", _BEGIN + script],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "SLOPLET_URL": server.url, "SLOPLET_KEY": server.key},
            cwd=tmp_path, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert '"stdout":"hello\\n"' in done.stdout.replace(": ", ":")
        with server.client() as http:
            left = [item["name"] for item in http.get("/v1/sandboxes").json()["items"]]
        assert left == [None], "the one of the Idempotency-Key, once"
