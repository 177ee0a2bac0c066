"""What the hostile tests share: engines to attack, weakened ones for positive controls, probes in C, host canaries.

A test gets a ``Target``: one engine as it can run here, in one way of mapping users. It is skipped by capability, never
by the engine's name. ``target.weakened("seccomp")`` is the same engine with single controls switched off: a probe that
finds nothing there either proves nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import sloplet.holder
import sloplet.runtime
from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.engines.base import Capabilities, Engine
from sloplet.engines.machine import Machine, machine
from sloplet.portal import portal
from sloplet.runtime import Runtime, embedded_runtime

PROBES = Path(__file__).parent / "probes"
_SWITCHES = ("seccomp", "masks", "landlock", "caps", "cgroup", "nosuid")


@dataclass(frozen=True)
class Target:
    """One engine to attack. ``facts``: what it believes of the machine; None: the truth."""

    label: str
    name: str
    facts: Machine | None = None
    weaken: tuple[str, ...] = ()

    @property
    def engine(self) -> Engine:
        return _engine(self)

    @property
    def can(self) -> Capabilities:
        return self.engine.probe().capabilities

    def enforces(self, control: str) -> bool:
        return control in self.can.controls

    def weakened(self, *controls: str) -> Target:
        """Without those of the controls that this engine has."""
        return replace(self, weaken=tuple(control for control in controls if control in _switches(self.name)))

    def with_facts(self, **changes: Any) -> Target:
        return replace(self, facts=replace(self.facts or machine(), **changes))

    @contextmanager
    def box(self, **settings: Any) -> Iterator[Sandbox]:
        """A sandbox of this engine."""
        with self.in_use():
            box = Sandbox(engine=self.name, **settings)
            box.start()
        try:
            yield box
        finally:
            box.kill()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Sandboxes made here with ``engine=self.name`` are of this engine."""
        loaded = registry._loaded
        before = loaded.get(self.name)
        loaded[self.name] = self.engine
        try:
            yield
        finally:
            if before is None:
                del loaded[self.name]
            else:
                loaded[self.name] = before

    def some(self, **limits: Any) -> dict[str, Any]:
        """Those of the limits that can be enforced here; to name another is to be refused."""
        return {control: value for control, value in limits.items() if self.enforces(control)}

    def need(self, *capabilities: str) -> None:
        """Skip unless the engine has each of them (fields of ``Capabilities``)."""
        for name in capabilities:
            if not getattr(self.can, name):
                pytest.skip(f"{self.label} has no {name.replace('_', ' ')}")

    def need_controls(self, *controls: str) -> None:
        for control in controls:
            if not self.enforces(control):
                pytest.skip(f"{self.label} cannot enforce {control} here")


_engines: dict[str, Engine] = {}


def _engine(target: Target) -> Engine:
    key = repr((target.name, target.facts, target.weaken))
    if key not in _engines:
        kind: Any = type(registry.load(target.name))
        _engines[key] = kind(weaken=target.weaken, facts=target.facts)
    return _engines[key]


@cache
def _switches(name: str) -> frozenset[str]:
    """The controls that an engine lets tests switch off."""
    kind: Any = type(registry.load(name))
    known = set()
    for control in _SWITCHES:
        try:
            kind(weaken={control})
        except ValueError:
            continue
        known.add(control)
    return frozenset(known)


@cache
def targets() -> tuple[Target, ...]:
    """Every real engine that runs here; for an ordinary user with subordinate ids also as one without."""
    found = []
    for name in registry._AUTO:
        target = Target(name, name)
        if target.engine.probe().available and target.can.shared_kernel:  # others: test_g_gvisor.py
            found.append(target)
            single = replace(target.with_facts(newuidmap=None), label=f"{name}-single")
            if machine().helpers and target.can.users and single.engine.probe().available:
                found.append(single)
    return tuple(found)


# -- probes ------------------------------------------------------------------------------------

_built: dict[str, Path] = {}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Made when a probe is: programs that import this and are killed leave none behind."""
    folder = tempfile.TemporaryDirectory(prefix="sloplet-probes-")
    os.chmod(folder.name, 0o755)  # other users run them too
    return folder


def probe(name: str) -> Path:
    """A static program out of probes/NAME.c, compiled once."""
    if name not in _built:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler for the probes")
        program = Path(_folder().name, name)
        source = PROBES / f"{name}.c"
        flags = ["-static", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
        command = [compiler, *flags, "-o", str(program), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        _built[name] = program
    return _built[name]


def install(box: Sandbox, name: str) -> str:
    """Put a probe into a sandbox; its path there."""
    path = f"{box.workdir}/{name}"
    box.files.write(path, probe(name).read_bytes(), mode=0o755)
    return path


@dataclass
class Said:
    """A probe's lines ``KEY VALUE``; the last of a key counts."""

    lines: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> str:
        return self.lines[key]

    def number(self, key: str) -> int:
        return int(self.lines[key])


def parse(text: str) -> Said:
    said = Said()
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        said.lines[key] = value
    return said


def ask(box: Sandbox, name: str, *arguments: str, **options: Any) -> Said:
    """Run a probe inside; what it said. The sandbox must live on."""
    result = box.run([install(box, name), *arguments], **options)
    assert result.exit_code == 0, f"{name}: {result.describe()}\n{result.stdout}{result.stderr}"
    assert box.run("echo alive").stdout == "alive\n"
    return parse(result.stdout)


def ask_host(name: str, *arguments: str, **options: Any) -> Said:
    """Run a probe on the bare host."""
    done = subprocess.run([probe(name), *arguments], capture_output=True, text=True, timeout=30, check=True, **options)
    return parse(done.stdout)


# -- looking from outside ------------------------------------------------------------------------


def runtime() -> Runtime:
    return portal().call(embedded_runtime())


def host_pids(box: Sandbox) -> tuple[int, ...]:
    """The host's pids of all processes of a sandbox; the supervisor is first."""
    return runtime().pids(box.id)


def status_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def rss() -> int:
    """Bytes of memory this process has resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def eventually(check: Callable[[], object], seconds: float = 5.0, what: str = "") -> None:
    """Poll until it is true."""
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, what or f"not within {seconds} s"
        time.sleep(0.01)


def fingerprint(*folders: str | Path) -> str:
    """Names, kinds, modes, owners, sizes and change times of all below some folders (contents change ctime)."""
    digest = hashlib.sha256()
    for folder in folders:
        for path, names, files in os.walk(folder):
            names.sort()
            for name in (".", *sorted(files)):
                try:
                    info = os.lstat(os.path.join(path, name))
                except OSError:
                    continue
                facts = (info.st_mode, info.st_uid, info.st_gid, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
                digest.update(os.fsencode(os.path.join(path, name)) + repr(facts).encode())
    return digest.hexdigest()


_APPLETS = ("sh", "ls", "cat", "rm", "mv", "cp", "echo", "chmod", "touch", "true", "false", "sleep", "id", "ln", "wc")


def make_rootfs(folder: Path, busybox: Path) -> None:
    """A root file system: busybox under its names, users, a canary. Readable by whoever the sandbox maps to."""
    for name in ("bin", "etc", "lib", "tmp"):
        (folder / name).mkdir()
    shutil.copy(busybox, folder / "bin/busybox")
    (folder / "bin/busybox").chmod(0o755)
    for name in _APPLETS:
        (folder / "bin" / name).symlink_to("busybox")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    (folder / "canary").write_text("the image's own\n")
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    for parent in list(folder.parents)[:2]:
        if parent != Path(tempfile.gettempdir()) and parent.stat().st_uid == os.geteuid():
            parent.chmod(0o755)


class Waiting:
    """A blocking call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(call,), daemon=True)
        self._thread.start()

    def _work(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome = call()
        except BaseException as error:
            self._error = error

    def _join(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the call did not return within {seconds} s"

    def result(self, seconds: float) -> Any:
        self._join(seconds)
        assert self._error is None, self._error
        return self._outcome

    def error(self, seconds: float) -> BaseException | None:
        self._join(seconds)
        return self._error


def patience(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """How long the holder waits for an agent before it does something about it."""
    names = {
        "start": "_START_TIMEOUT",
        "overdue": "_OVERDUE",
        "pulse": "_PULSE",
        "quiet": "_QUIET",
        "last": "_PATIENCE",
    }
    wanted = {names[key]: value for key, value in seconds.items()}
    for name, value in wanted.items():
        monkeypatch.setattr(sloplet.runtime if name == "_OVERDUE" else sloplet.holder, name, value)
