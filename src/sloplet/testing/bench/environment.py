"""A SLOPLET_HOME for the length of a run, with the runsc of the one that was set before."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...setup import runsc


@contextmanager
def temporary_home() -> Iterator[Path]:
    """In a temporary folder, which is gone afterwards."""
    found = runsc.find()
    folder = Path(tempfile.mkdtemp(prefix="sloplet-bench-home-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(_variable("SLOPLET_HOME", str(folder)))
        if found is not None:
            stack.enter_context(_variable(runsc.VARIABLE, str(found.path)))
        yield folder


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
