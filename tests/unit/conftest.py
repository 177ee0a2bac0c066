"""Fixtures that several files here share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_controller import Records, Said, install, speaker
from snapshot_helpers import World
from state_helpers import memory_folder


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A home with saved states."""
    made = World(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """What the CLI finds behind it."""
    return install(monkeypatch)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs the CLI: what it answered."""
    return speaker(capsys)
