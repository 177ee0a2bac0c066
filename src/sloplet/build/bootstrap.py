"""A root filesystem out of a distribution's packages, by mmdebstrap, as an image of one layer.

apt and dpkg of this machine do it, with its own sources and keys: as root, as an ordinary user with subordinate ids in
a user namespace, else with fakechroot. What comes out is a tar on a pipe, which is read by our own reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from ..engines.machine import machine
from ..errors import BuildError, BuildFailed, ImageInvalid, SpecError
from ..images.config import ImageConfig
from ..images.media import host_platform
from ..images.store import ImageStore, StoredImage
from ..setup.apt import Say, configured_sources
from ..state.home import Home
from .cache import BuildCache, key_of
from .commit import Spool
from .events import BuildEvent, OnBuildEvent, silent
from .fromtar import image_items, read_tar
from .ground import record
from .layertar import Item, Layer, write_layer
from .scope import DEFAULT_PATH

_DISTRIBUTIONS = ("debian", "ubuntu")
_SUITE_RE = re.compile(r"[a-z][a-z0-9-]{1,40}\Z")
_PACKAGE_RE = re.compile(r"[a-z0-9][a-z0-9+.-]*\Z")
_VARIANTS = ("extract", "custom", "essential", "apt", "required", "minbase", "buildd", "important", "debootstrap",
             "standard")  # fmt: skip
_MIRROR_RE = re.compile(r"(?:(?:https?|file|copy)://\S+|deb (?:\[[^\]\n]*\] )?\S+(?: [^\s\[\]]+)+)\Z")
_LISTS = Path("/var/lib/apt/lists")
_GRACE = 10.0


@dataclass(frozen=True)
class Bootstrap:
    """What is wanted."""

    distribution: str
    suite: str
    packages: tuple[str, ...] = ()
    variant: str = "minbase"
    mirror: str | None = None

    @staticmethod
    def make(
        distribution: str, packages: Sequence[str] = (), *, variant: str = "minbase", mirror: str | None = None
    ) -> Bootstrap:
        """SpecError."""
        name, colon, suite = distribution.partition(":")
        if name not in _DISTRIBUTIONS or not colon or not _SUITE_RE.match(suite):
            raise SpecError(f"{distribution[:80]!r} is no distribution", hint="for example debian:bookworm")
        for package in packages:
            if not isinstance(package, str) or not _PACKAGE_RE.match(package):
                raise SpecError(f"{str(package)[:80]!r} is no package", hint="for example python3")
        if variant not in _VARIANTS:
            raise SpecError(f"variant={variant[:80]!r} is not known", hint=f"one of {', '.join(_VARIANTS)}")
        if mirror is not None and not _MIRROR_RE.match(mirror):
            raise SpecError(
                f"mirror={mirror[:80]!r} is neither an address nor a line of apt's sources",
                hint="for example http://deb.debian.org/debian",
            )
        return Bootstrap(name, suite, tuple(sorted(set(packages))), variant, mirror)

    @property
    def shown(self) -> str:
        more = f" with {', '.join(self.packages)}" if self.packages else ""
        return f"{self.distribution}:{self.suite} ({self.variant}){more}"


async def make(
    wanted: Bootstrap, *, no_cache: bool = False, on_event: OnBuildEvent | None = None, epoch: int,
    home: Home | None = None,
) -> StoredImage:  # fmt: skip
    """The image, made if it is not here. BuildError: mmdebstrap is missing; BuildFailed: it failed."""
    home = home or Home()
    store = ImageStore(home)
    tell = on_event or silent
    stop = threading.Event()
    loop = asyncio.get_running_loop()

    def log(line: str) -> None:
        loop.call_soon_threadsafe(tell, BuildEvent("log", 1, 1, "bootstrap", line))

    began = time.monotonic()
    tell(BuildEvent("begin", 1, 1, "bootstrap", f"bootstrap {wanted.shown}"))
    work = asyncio.ensure_future(asyncio.to_thread(_make, wanted, store, home, no_cache, epoch, log, stop))
    try:
        image, cached = await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)
        raise
    finally:
        store.close()
    tell(BuildEvent("end", 1, 1, "bootstrap", cached=cached, seconds=time.monotonic() - began))
    return image


def _make(
    wanted: Bootstrap, store: ImageStore, home: Home, no_cache: bool, epoch: int, log: Say, stop: threading.Event
) -> tuple[StoredImage, bool]:
    sources = wanted.mirror or sources_for(wanted, configured_sources())
    key = key_of("", {
        "bootstrap": (wanted.distribution, wanted.suite, wanted.packages, wanted.variant), "sources": sources,
        "lists": _lists_stamp(wanted.suite), "architecture": host_platform().architecture, "epoch": epoch,
    })  # fmt: skip
    cache = BuildCache(home, store.blobs)
    with store.adding():
        hit = None if no_cache else cache.get(key)
        if hit is not None and hit.layer is not None:
            return _record(wanted, store, hit.layer, epoch), True
        with Spool(home) as spool:
            items = _run(wanted, sources, spool, epoch, log, stop)
            layer = write_layer(items, store.blobs, epoch=epoch, check=lambda: _stopped(stop))
        image = _record(wanted, store, layer, epoch)
        cache.put(key, layer)
        return image, False


def _record(wanted: Bootstrap, store: ImageStore, layer: Layer, epoch: int) -> StoredImage:
    platform = host_platform()
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    config = ImageConfig(
        architecture=platform.architecture, os=platform.os, variant=platform.variant, created=created,
        env=(("PATH", DEFAULT_PATH),), cmd=("/bin/bash",),
        history=({"created": created, "created_by": f"mmdebstrap {wanted.shown}", "comment": "sloplet"},),
    )  # fmt: skip
    return record(store, config, [layer])


def sources_for(wanted: Bootstrap, configured: str) -> str:
    """This machine's sources of that distribution, for that suite, in apt's one-line form. BuildError."""
    found = []
    for uris, suites, components, options in _entries(configured):
        for uri in uris:
            if uri.rstrip("/").rpartition("/")[2] not in (wanted.distribution, f"{wanted.distribution}-security"):
                continue
            for suite in suites:
                code, _, pocket = suite.partition("-")
                if pocket.startswith("backports") or "/" in suite:
                    continue
                named = f"{wanted.suite}-{pocket}" if pocket else wanted.suite
                if code == wanted.suite or not pocket:
                    found.append(f"deb {options}{uri} {named} {' '.join(components)}")
    if not found:
        raise BuildError(
            f"apt on this machine has no source of {wanted.distribution}",
            hint="give one: Image.bootstrap(..., mirror='http://deb.debian.org/debian')",
        )
    return "\n".join(dict.fromkeys(found)) + "\n"


def _entries(text: str) -> list[tuple[list[str], list[str], list[str], str]]:
    """Addresses, suites, components and options of apt's sources, both formats."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(\[[^\]]*\]\s+)?(\S+)\s+(\S+)((?:\s+[^\s#]+)+)", line)
        if match:
            found.append(([match[2]], [match[3]], match[4].split(), match[1] or ""))
    for paragraph in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        for line in paragraph.splitlines():
            key, colon, value = line.partition(":")
            if colon and not line.startswith(("#", " ", "\t")):
                fields[key.strip().lower()] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() != "no":
            signed = fields.get("signed-by", "")
            options = f"[signed-by={signed}] " if signed.startswith("/") else ""
            found.append((
                fields.get("uris", "").split(), fields.get("suites", "").split(), fields.get("components", "").split(),
                options,
            ))  # fmt: skip
    return found


def _lists_stamp(suite: str) -> str:
    """What this machine knows of the packages of a suite: its signed lists, or today's date where it has none."""
    seen = hashlib.sha256()
    known = False
    try:
        for path in sorted(_LISTS.glob(f"*_dists_{suite}*Release")):
            seen.update(path.read_bytes())
            known = True
    except OSError:
        known = False
    return seen.hexdigest() if known else time.strftime("%Y-%m-%d", time.gmtime())


def mode() -> str:
    """How mmdebstrap may work here, as whom we are."""
    here = machine()
    if here.root:
        return "root"
    if here.helpers:
        return "unshare"
    return "fakechroot" if shutil.which("fakechroot") and shutil.which("fakeroot") else "chrootless"


def command(wanted: Bootstrap, how: str) -> list[str]:
    argv = [
        "mmdebstrap", f"--mode={how}", f"--variant={wanted.variant}", "--format=tar", "--skip=output/dev",
        '--aptopt=Acquire::Languages "none"',
    ]  # fmt: skip
    if wanted.packages:
        argv.append(f"--include={','.join(wanted.packages)}")
    return [*argv, wanted.suite, "-", wanted.mirror or "-"]


def _run(wanted: Bootstrap, sources: str, spool: Spool, epoch: int, log: Say, stop: threading.Event) -> list[Item]:
    if shutil.which("mmdebstrap") is None:
        raise BuildError("mmdebstrap is not installed", hint="sudo apt-get install mmdebstrap")
    environment = {
        **{key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR", "http_proxy", "https_proxy", "no_proxy")
           if key in os.environ},
        "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": str(epoch), "DEBIAN_FRONTEND": "noninteractive",
    }  # fmt: skip
    environment["PATH"] = f"{environment.get('PATH', '')}:/usr/sbin:/sbin"
    child = subprocess.Popen(
        command(wanted, mode()), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, cwd="/", start_new_session=True,
    )  # fmt: skip
    last: deque[str] = deque(maxlen=30)
    reader = threading.Thread(target=_relay, args=(child.stderr, log, last), daemon=True)
    watcher = threading.Thread(target=_watch, args=(child, stop), daemon=True)
    reader.start()
    watcher.start()
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):
            if wanted.mirror is None:
                child.stdin.write(sources.encode())
            child.stdin.close()
        problem: ImageInvalid | None = None
        try:
            items = image_items(read_tar(cast(BinaryIO, child.stdout), spool))
        except ImageInvalid as error:
            problem, items = error, []
        status = child.wait()
        _stopped(stop)
        reader.join(2)
        if status or problem is not None:
            text = "\n".join(last)
            why = f"mmdebstrap ended with exit code {status}" if status else f"its tar is not one: {problem}"
            raise BuildFailed(f"bootstrap {wanted.shown} failed: {why}\n{text}".rstrip())
        return items
    finally:
        _end(child)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _relay(pipe: BinaryIO, log: Say, last: deque[str]) -> None:
    with suppress(ValueError, OSError):  # closed when it is over
        for raw in pipe:
            line = raw.decode("utf-8", "replace").rstrip().rpartition("\r")[2]
            if line and not re.match(r"(done|\s*\d+%?)\Z", line):
                last.append(line)
                log(line)


def _watch(child: subprocess.Popen[bytes], stop: threading.Event) -> None:
    while child.poll() is None:
        if stop.wait(0.2):
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask it to clean up behind itself; then end it."""
    if child.poll() is not None:
        return
    for number, patience in ((signal.SIGINT, _GRACE), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            return


def _stopped(stop: threading.Event) -> None:
    if stop.is_set():
        raise BuildFailed("the build was stopped")
