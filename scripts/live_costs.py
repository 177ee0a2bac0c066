#!/usr/bin/env python3
"""Write the numbers of a live run into the docs: tables into docs/live-costs.md, the curves into docs/live-costs.svg.

sloplet bench --live --json > numbers.json && python scripts/live_costs.py numbers.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from sloplet.testing.bench.state.page import rewrite  # noqa: E402
from sloplet.testing.bench.state.plot import draw  # noqa: E402


def main(numbers: str, docs: Path = ROOT / "docs") -> None:
    data = json.loads(Path(numbers).read_text("utf-8"))
    if data.get("kind") != "live":
        sys.exit(f"{numbers} is not a report of `sloplet bench --live --json`")
    page = docs / "live-costs.md"
    page.write_text(rewrite(page.read_text("utf-8"), data), "utf-8")
    (docs / "live-costs.svg").write_text(draw(data), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
