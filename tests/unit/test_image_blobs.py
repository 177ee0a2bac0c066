"""Blobs: whole or not there, written by one at a time, gone on with after a break."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_helpers import finish, start

from layer_kit import digest
from sloplet.errors import ImageInvalid, ImageNotFound, StateBusy, StateUnwritable
from sloplet.images.blobs import BlobStore
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

DATA = bytes(range(256)) * 40
NAME = digest(DATA)


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[BlobStore]:
    before = len(os.listdir("/proc/self/fd"))
    yield BlobStore(Home(tmp_path / "home"))
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"


def partials(blobs: BlobStore) -> list[str]:
    return os.listdir(blobs.partial)


def test_what_goes_in_comes_out(blobs: BlobStore) -> None:
    assert not blobs.has(NAME)
    assert not blobs.path.exists(), "a look makes nothing"
    assert blobs.add_bytes(DATA) == NAME
    assert blobs.add_bytes(DATA) == NAME
    assert blobs.has(NAME)
    assert blobs.size(NAME) == len(DATA)
    assert blobs.read(NAME, len(DATA)) == DATA
    with blobs.open(NAME) as file:
        assert file.read() == DATA
    assert os.stat(blobs.path_of(NAME)).st_mode & 0o777 == 0o600
    assert blobs.digests() == [NAME]
    assert partials(blobs) == []
    with pytest.raises(ImageInvalid, match="at most 100"):
        blobs.read(NAME, 100)
    assert blobs.remove(NAME) == len(DATA)
    assert blobs.remove(NAME) == 0
    for ask in (blobs.size, blobs.open, lambda name: blobs.read(name, 10)):
        with pytest.raises(ImageNotFound):
            ask(NAME)


@pytest.mark.parametrize(
    "name", ["", "sha256:", "sha256:" + "0" * 63, "sha256:../../x", "md5:" + "0" * 32, "sha256:" + "A" * 64]
)
def test_what_is_no_digest(blobs: BlobStore, name: str) -> None:
    for ask in (blobs.has, blobs.size, blobs.open, blobs.writer, blobs.remove):
        with pytest.raises(ImageInvalid):
            ask(name)


def test_a_blob_that_was_changed_on_disk(blobs: BlobStore) -> None:
    blobs.add_bytes(DATA)
    with open(blobs.path_of(NAME), "r+b") as file:
        file.write(b"X")
    with pytest.raises(ImageInvalid, match="damaged on this disk"):
        blobs.read(NAME, 1 << 20)


@pytest.mark.parametrize("before", [0, 100])
def test_a_disk_that_was_full_for_a_moment(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """A part of a piece was written. Whoever goes on, or begins again, makes the blob and nothing else of its name."""

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for again in (False, True):
        with blobs.writer(NAME, len(DATA)) as writer:
            writer.write(DATA[:before])
            with monkeypatch.context() as patched:
                patched.setattr("sloplet.images.blobs.write_all", full)
                with pytest.raises(StateUnwritable):
                    writer.write(DATA[before:])
            if again:
                writer.restart()
            writer.write(DATA[writer.offset :])
            assert writer.commit() == NAME
        assert blobs.read(NAME, 1 << 20) == DATA
        blobs.remove(NAME)


def test_going_on_after_a_break(blobs: BlobStore) -> None:
    with blobs.writer(NAME, len(DATA)) as first:
        first.write(DATA[:1000])
    assert not blobs.has(NAME)
    with blobs.writer(NAME, len(DATA)) as second:
        assert second.offset == 1000
        second.write(DATA[1000:])
        assert second.commit() == NAME
    assert blobs.read(NAME, 1 << 20) == DATA
    with blobs.writer(NAME, len(DATA)) as third:
        assert third.done
        assert third.offset == len(DATA)
        third.write(b"not needed")
        assert third.commit() == NAME
    assert partials(blobs) == []


def test_a_server_that_begins_again(blobs: BlobStore) -> None:
    with blobs.writer(NAME) as first:
        first.write(b"something else")
    with blobs.writer(NAME, len(DATA)) as second:
        assert second.offset
        second.restart()
        assert second.offset == 0
        second.write(DATA)
        second.commit()
    assert blobs.read(NAME, 1 << 20) == DATA


@pytest.mark.parametrize("data", [DATA + b"x", DATA[:-1], b"y" + DATA[1:], b""], ids=["long", "short", "other", "none"])
def test_another_blob_than_was_told(blobs: BlobStore, data: bytes) -> None:
    def write() -> None:
        with blobs.writer(NAME, len(DATA)) as writer:
            for at in range(0, len(data), 4000):
                writer.write(data[at : at + 4000])
            writer.commit()

    with pytest.raises(ImageInvalid, match=NAME):
        write()
    assert not blobs.has(NAME)
    assert partials(blobs) == [], "nothing to be led astray by"
    blobs.add_bytes(DATA)


def test_of_unknown_digest(blobs: BlobStore) -> None:
    with blobs.writer() as given_up:
        given_up.write(b"never mind")
    assert partials(blobs) == []
    with blobs.writer() as writer:
        writer.write(DATA)
        assert writer.commit() == NAME
    assert blobs.digests() == [NAME]


def test_two_writers_of_one_blob(blobs: BlobStore) -> None:
    """The second waits, and has nothing to do then."""
    found = []
    with blobs.writer(NAME, len(DATA)) as first:
        with pytest.raises(StateBusy):
            blobs.writer(NAME, len(DATA), wait=False)

        def wait() -> None:
            with blobs.writer(NAME, len(DATA)) as second:
                found.append((second.done, second.commit()))

        thread = threading.Thread(target=wait)
        thread.start()
        first.write(DATA)
        first.commit()
    thread.join()
    assert found == [(True, NAME)]
    assert partials(blobs) == []


def test_a_writer_that_is_killed(blobs: BlobStore) -> None:
    def write() -> None:
        writer = BlobStore(Home(blobs.path.parent.parent)).writer(NAME, len(DATA))
        writer.write(DATA[:5000])
        os.kill(os.getpid(), signal.SIGKILL)

    pid, read = start(write)
    with pytest.raises(AssertionError, match="said nothing"):
        finish(pid, read)
    with blobs.writer(NAME, len(DATA)) as writer:
        assert writer.offset == 5000
        writer.write(DATA[5000:])
        writer.commit()
    assert blobs.read(NAME, 1 << 20) == DATA


def test_many_processes_write_one_blob(blobs: BlobStore) -> None:
    def write() -> str:
        with BlobStore(Home(blobs.path.parent.parent)).writer(NAME, len(DATA)) as writer:
            writer.write(DATA[writer.offset :])
            time.sleep(0.001)
            return writer.commit()

    assert {finish(*child) for child in [start(write) for _ in range(6)]} == {NAME}
    assert blobs.read(NAME, 1 << 20) == DATA
    assert partials(blobs) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk(blobs: BlobStore) -> None:
    with blobs.writer(NAME, len(DATA)) as writer:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, writer._fd)
        os.close(full)
        with pytest.raises(StateUnwritable, match="No space"):
            writer.write(DATA)
    assert not blobs.has(NAME)
