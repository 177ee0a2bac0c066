"""One run of ``sloplet bench --images``. Fills a Report."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from ....errors import SlopletError
from ....images.store import ImageStore
from ....state.home import Home
from ..environment import temporary_home
from ..machine import describe
from ..run import Say
from ..stats import Report
from .plan import Bench, ImagesPlan
from .suites import SUITES

_MEMORY = Path("/dev/shm")


def run_images(plan: ImagesPlan, say: Say = lambda text: None) -> Report:
    """Measure. State goes to a SLOPLET_HOME of its own that is gone afterwards."""
    report = Report("images")
    report.options = asdict(plan)
    report.machine = describe()
    with temporary_home() as folder, tempfile.TemporaryDirectory(prefix="sloplet-bench-", dir=_roomy(plan)) as place:
        store = ImageStore(Home(folder))
        try:
            for name, suite in SUITES.items():
                if plan.only and name not in plan.only:
                    report.skipped[name] = "not asked for"
                    continue
                say(name)
                try:
                    suite(Bench(plan, report, store, Path(place)), say)
                except SlopletError as error:
                    report.skipped[name] = str(error)
                    say(f"{name}: {error}")
        finally:
            store.prune(everything=True)
            store.close()
    report.machine["load_after"] = list(os.getloadavg())
    return report


def _roomy(plan: ImagesPlan) -> Path | None:
    """In memory, if there is room for all of it: a disk would be what is measured. None: the temporary folder."""
    try:
        room = os.statvfs(_MEMORY)
        return _MEMORY if room.f_bavail * room.f_frsize > 8 * plan.bytes + 2**29 else None
    except OSError:
        return None
