"""Crash points: an operation is cut off at its N-th system call, `sloplet gc` runs once, and everything is as before.

A *nursery* is a Python process with all of Sloplet imported, from which programs under test are forked: a point costs
a few hundredths of a second, and the calls that are counted are the operation's own. It adopts whatever a dying
program leaves (so it sees it), and gives its programs a SLOPLET_HOME and a TMPDIR of their own.

    with Nursery(warm=True) as nursery:
        point = nursery.point("create", at=117)
        assert point["broken"] == []
"""

from __future__ import annotations

import atexit
import errno
import importlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from crash_trace import CALLS, Plan, Told, Tracer, wait_until

from sloplet.errors import SlopletError

ALL = os.environ.get("SLOPLET_CRASH_POINTS", "") == "all"
#: With SLOPLET_CRASH_POINTS=all every operation gets at least that many (rounds over all N; threads meet differently).
AT_LEAST = int(os.environ.get("SLOPLET_CRASH_LEAST", "1000"))
#: "1/2": the first of two runs that share a sample, as root's and the ordinary user's half of scripts/test do.
SHARE, SHARERS = map(int, os.environ.get("SLOPLET_CRASH_SHARE", "1/1").split("/"))
NAME = "dev"
TYPED = 71  #: a library program ended by an error of Sloplet's own
_SETTLE = 10.0
_MARK = "zz"
_KEPT = {
    ".", "state.db", "state.db-wal", "state.db-shm", "sandboxes", "snapshots", "network", "images", "cache", "volumes",
    "run", "run/owners", "run/keeper.sock", "run/keeper.log", "run/keeper.lock", "run/keeper.start",
}  # fmt: skip


# -- what is done ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """An operation. ``target``: whose calls are counted. A library operation is ``setup`` and then, traced, ``act``;
    a CLI one is its words; for the keeper, ``before`` runs first and ``words`` is what a client then asks."""

    target: str  # library, cli, keeper
    setup: Callable[[], Any] = lambda: None
    act: Callable[[Any], Any] = lambda state: None
    words: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    keeper: bool = False  # a keeper runs already
    fresh: bool = False  # in a SLOPLET_HOME that is not there yet


def _box(**settings: Any) -> Any:
    from sloplet import Sandbox

    return Sandbox(**{"engine": "container", **settings})


def _started(**settings: Any) -> Any:
    box = _box(**settings)
    box.start()
    return box


def _busy(**settings: Any) -> Any:
    box = _started(**settings)
    box.spawn(["sh", "-c", "sleep 1000 & sleep 1000"], detached=True)
    return box


def _use(box: Any) -> None:
    assert box.run("echo $((6 * 7))", check=True).stdout == "42\n"
    box.files.write("note", "x" * 1000)
    assert box.files.read_text("note") == "x" * 1000


def _finish(box: Any) -> None:
    box.close()
    atexit._run_exitfuncs()


def _whole(settings: dict[str, Any]) -> None:
    box = _box(**settings)
    with box:
        _use(box)
    atexit._run_exitfuncs()


def _add_image() -> Any:
    """An image of two layers into the store, in pieces, as downloads come."""
    import image_crash

    return image_crash.add()


def _unpacked_image() -> Any:
    import image_crash

    image = image_crash.resolve(image_crash.add())
    image_crash.settle()
    return image


def _image_base() -> None:
    import image_crash

    image_crash.base()


OPS = {
    "image-add": Op("library", act=lambda _: _add_image()),
    "image-unpack": Op("library", _add_image, lambda image: sys.modules["image_crash"].resolve(image)),
    "image-rm": Op("library", _unpacked_image, lambda image: sys.modules["image_crash"].remove(image)),
    "image-prune": Op("library", _unpacked_image, lambda _: sys.modules["image_crash"].prune()),
    "image-build": Op("library", lambda: _image_base(), lambda _: sys.modules["image_crash"].build()),
    "first": Op("library", act=lambda _: _whole({}), fresh=True),
    "first-process-rung": Op("library", act=lambda _: _whole({"engine": "process"}), fresh=True),
    "create": Op("library", act=lambda _: _started()),
    "exec": Op("library", _started, _use),
    "spawn": Op("library", _started, lambda box: box.spawn(["sleep", "1000"], detached=True)),
    "close": Op("library", _busy, _finish),
    "unpack": Op("library", act=lambda _: _started(image=os.environ["CRASH_IMAGE"])),
    "process-rung": Op("library", act=lambda _: _whole({"engine": "process"})),
    "whole": Op("library", act=lambda _: _whole({})),
    "cli-run": Op("cli", words=("run", "--", "true")),
    "cli-create": Op("cli", words=("create", NAME)),
    "cli-create-kept": Op("cli", words=("create", NAME), keeper=True),
    "cli-rm": Op("cli", words=("rm", NAME), before=("create", NAME), keeper=True),
    "keeper-create": Op("keeper", words=("create", NAME)),
    "keeper-exec": Op("keeper", before=("create", NAME), words=("exec", NAME, "--", "echo", "hello")),
    "keeper-rm": Op("keeper", before=("create", NAME), words=("rm", NAME)),
}


# -- forked programs -------------------------------------------------------------------------------


def _fork(job: Callable[[], Any], output: int | None = None) -> int:
    """A child that runs ``job`` as a program would, stdin empty, its output in one place."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing if output is None else output, 1)
        os.dup2(nothing if output is None else output, 2)
        job()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except SlopletError as error:
        code = TYPED
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answer(job: Callable[[], Any]) -> Any:
    """What ``job`` returns, done in a forked child. RuntimeError with its traceback if it fails."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result: tuple[bool, Any] = (True, job())
        except BaseException:
            result = (False, traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        try:
            good, value = pickle.load(pipe)  # not to the end: a keeper that it started has the pipe open
        except EOFError:
            good, value = False, "it ended without a word"
    os.waitpid(pid, 0)
    if not good:
        raise RuntimeError(value)
    return value


def _cli(*words: str) -> tuple[int, str]:
    """A sloplet command, forked: (exit code, all it printed)."""
    with tempfile.TemporaryFile() as output:
        pid = _fork(lambda: _main(words), output.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")


def _main(words: tuple[str, ...]) -> None:
    from sloplet.cli.main import main

    main(list(words))


def _keeper() -> None:
    from sloplet.keeper.__main__ import main

    sys.exit(main([]))


def _socket() -> Path:
    from sloplet.state.home import Home

    return Home().open().socket_path()


def _listens() -> bool:
    from sloplet.keeper.launch import listens

    return listens(_socket())


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


# -- one point: runs in a child of the nursery, the monitor, which is the tracer ---------------------


def _monitor(op: Op, plan: Plan) -> dict[str, Any]:
    output = os.open(os.environ["CRASH_OUTPUT"], os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    if op.keeper:
        _fork(_keeper)
        assert wait_until(_listens, 10)
    if op.before and op.target != "keeper":
        code, said = _cli(*op.before)
        assert code == 0, said
    told, client = (_trace_keeper if op.target == "keeper" else _trace_program)(op, plan, output)
    os.lseek(output, 0, os.SEEK_SET)
    return {
        "count": told.count, "hit": told.hit, "hang": told.hang, "client": client,
        "exit": os.waitstatus_to_exitcode(told.status) if told.status is not None else None,
        "said": os.read(output, 20000).decode("utf-8", "replace"),
    }  # fmt: skip


def _trace_program(op: Op, plan: Plan, output: int) -> tuple[Told, int | None]:
    ready, tell_ready = os.pipe()
    go, tell_go = os.pipe()

    def program() -> None:
        os.close(ready)
        os.close(tell_go)
        state = op.setup()
        os.write(tell_ready, b"r")
        os.close(tell_ready)
        with suppress(OSError):  # it is a call like any other, and may be the one that fails
            os.read(go, 1)
        if op.target == "cli":
            _main(op.words)
        op.act(state)

    pid = _fork(program, output)
    os.close(tell_ready)
    assert os.read(ready, 1) == b"r", "the program did not come to where it is traced"
    tracer = Tracer(pid, plan)
    tracer.seize()
    os.write(tell_go, b"g")
    return tracer.run(), None


def _trace_keeper(op: Op, plan: Plan, output: int) -> tuple[Told, int | None]:
    go, tell_go = os.pipe()

    def keeper() -> None:
        os.close(tell_go)
        os.read(go, 1)
        _keeper()

    pid = _fork(keeper)
    tracer = Tracer(pid, plan)
    if op.before:
        os.write(tell_go, b"g")
        assert wait_until(_listens, 10)
        code, said = _cli(*op.before)
        assert code == 0, said

    def client() -> None:
        wait_until(lambda: _ended(pid) or _listens(), 10)
        _main(op.words)

    tracer.seize()
    helper = _fork(client, output)
    if not op.before:
        os.write(tell_go, b"g")

    def kill() -> None:
        os.kill(pid, 9)

    told = tracer.run(helper, kill)
    return told, os.waitstatus_to_exitcode(told.others[helper]) if helper in told.others else None


# -- what must hold afterwards -----------------------------------------------------------------------


@dataclass
class Machine:
    """What was there before."""

    mounts: Counter[str]
    cgroups: Counter[str]
    processes: set[int]

    @staticmethod
    def look() -> Machine:
        from sloplet.testing import leaks

        leaks.bury_orphans()
        family = leaks.descendants()
        return Machine(leaks._mounts(), leaks._cgroups(family), family)


def _mark_ids(mark: str) -> None:
    """Sandboxes of this nursery have ids of their own kind: their cgroups lie among those of others."""
    from sloplet import runtime
    from sloplet.state import home

    runtime.new_id = lambda: mark + home.new_id()[len(mark) :]
    os.environ["CRASH_MARK"] = mark


def _ours(group: str, op: Op | None) -> bool:
    """A keeper that the CLI starts is a program of its own, and makes ids as everybody does."""
    mark, found = os.environ.get("CRASH_MARK", ""), os.path.basename(group).removeprefix("sloplet-")
    return found.startswith(mark) or (op is not None and "create" in op.words and not found.startswith(_MARK))


def left_over(before: Machine, home: Path, op: Op | None = None) -> list[str]:
    """What of ours is there and should not be, after the kernel had its moment: processes, mounts, cgroups, loop
    devices, files."""
    from sloplet.testing import leaks

    until = time.monotonic() + _SETTLE
    groups: set[str] | None = None
    while True:
        now = Machine.look()
        # Other programs' groups come and go; one that stays empty is a leak.
        seen = {group for group in now.cgroups - before.cgroups if _ours(group, op)}
        groups = seen if groups is None else groups & seen
        found = [f"process {pid}: {leaks._command(pid)}" for pid in now.processes - before.processes]
        found += [f"mount {name}" for name in now.mounts - before.mounts]
        found += [f"cgroup {name}" for name in groups]
        found += [f"loop device on {name}" for name in leaks._loop_devices(home)]
        found += [f"file {name}" for name in files_of(home) if not _expected(name)]
        found += [f"temporary file {name}" for name in os.listdir(tempfile.gettempdir())]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.005)


def files_of(home: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(home):
        for name in (*folders, *names):
            yield os.path.relpath(os.path.join(folder, name), home)


def _expected(name: str) -> bool:
    if name in _KEPT or (name.startswith("cache/") and "/." not in name):
        return True
    parts = name.split("/")  # a published image, blobs and layers: see image_crash
    return parts[0] == "images" and len(parts) > 1 and (len(parts[1]) == 64 or parts[1] in ("blobs", "layers"))


def _records() -> tuple[list[tuple[str, str | None, str]], list[str]]:
    from sloplet.state.home import Home
    from sloplet.state.store import Store

    store = Store(Home())
    return [(info.id, info.name, info.state) for info in store.list()], store.check()


def _image_broken(home: Path) -> list[str]:
    """A published image is whole."""
    wanted = int(os.environ["CRASH_IMAGE_FILES"])
    found = []
    for folder in (home / "images").iterdir():
        count = sum(len(names) + len(folders) for _, folders, names in os.walk(folder / "rootfs"))
        if count != wanted or not (folder / "image.json").exists():
            found.append(f"image {folder.name[:12]} has {count} of {wanted} files")
    return found


def _judge(name: str, op: Op, report: dict[str, Any]) -> list[str]:
    """The invariants that need sloplet commands; the first is `sloplet gc`."""
    code, said = _cli("gc", "--json")
    if code != 0:
        return [f"gc ended with {code}: {said}"]
    records, damage = _answer(_records)
    broken = [f"state.db: {line}" for line in damage]
    if op.target == "library" or not (op.before or op.words[0] == "create"):
        return broken + [f"record left: {record}" for record in records]
    return broken + _judge_named(op, report)


def _judge_named(op: Op, report: dict[str, Any]) -> list[str]:
    """A named sandbox that was acknowledged runs or is reported dead; one whose end was acknowledged is gone."""
    state: str | None = "starting"
    until = time.monotonic() + 5
    while state == "starting" and time.monotonic() < until:  # the keeper goes on with what a dead caller asked for
        code, said = _cli("ls", "--json")
        if code != 0:
            return [f"ls ended with {code}: {said}"]
        state = {info["name"]: info["state"] for info in json.loads(said)}.get(NAME)
    acknowledged = (report["client"] if op.target == "keeper" else report["exit"]) == 0
    broken = []
    created = op.words[0] == "create"
    if ((acknowledged and created) or op.words[0] == "exec") and state not in ("running", "dead"):
        broken.append(f"acknowledged, but now it is {state}")
    if acknowledged and op.words[0] == "rm" and state is not None:
        broken.append(f"removed, but now it is {state}")
    if state == "starting":
        broken.append("it stays in the state 'starting'")
    if state == "running":
        code, said = _cli("exec", NAME, "--", "echo", "hello")
        going = op.words[0] == "rm" and ("there is no" in said or "is dead" in said or "being closed" in said)
        if (code, said) != (0, "hello\n") and not going:  # a keeper goes on with the rm of a dead caller
            broken.append(f"it is said to run, but: {said}")
    if state == "dead":
        for words, expected in ((("exec", NAME, "--", "true"), "is dead"), (("create", NAME), "there already is")):
            code, said = _cli(*words)
            if code != 125 or expected not in said:
                broken.append(f"dead, but {words[0]} gave {code}: {said}")
    code, said = _cli("rm", "--force", NAME)
    if code != 0:
        broken.append(f"rm ended with {code}: {said}")
    return broken


def _point(name: str, request: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    op = OPS[name]
    home = folder / (f"fresh{number}" if op.fresh else "home")
    os.environ["SLOPLET_HOME"] = str(home)
    if not op.fresh and not home.exists():
        assert _cli("run", "--", "true")[0] == 0, "a first sandbox, so that what is made once is there"
        wait_until(lambda: not left_over(Machine.look(), home), 5)
    before = Machine.look()
    calls = frozenset(CALLS[call] for call in request.get("calls", ()))
    plan = Plan(request["at"], request.get("errno", 0), calls, request.get("children", False))
    report = _answer(lambda: _monitor(op, plan))
    broken = ["it hung"] if report["hang"] else []
    said = report["said"].partition("Exception ignored in: <function BaseEventLoop.__del__")[0]  # Python's own
    if "Traceback" in said:
        broken.append(f"no typed error: {report['said']}")
    broken += _judge(name, op, report)
    broken += left_over(before, home, op)
    if name.startswith("image-"):
        judge = "built" if name == "image-build" else "broken"
        broken += _answer(lambda: getattr(sys.modules["image_crash"], judge)())
    if name == "unpack":
        broken += _image_broken(home)
        for path in [*(home / "images").iterdir(), *(home / "cache").glob("tar-*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if op.fresh or broken:
        shutil.rmtree(home, ignore_errors=True)
    return {**report, "broken": broken}


# -- the nursery -------------------------------------------------------------------------------------


def _warm_up() -> None:
    """Once per process in life, once for all here: imports (learnt from a child that does the whole thing) and, for
    programs that have run for a while, what the engines found out about the machine."""

    def modules() -> list[str]:
        _whole({})
        _main_modules()
        return [name for name in sys.modules if not name.startswith("__")]

    for name in _answer(modules):
        with suppress(Exception):
            importlib.import_module(name)


def _main_modules() -> None:
    import image_crash  # noqa: F401

    from sloplet.cli import main

    for module, _ in main.VERBS.values():
        importlib.import_module(f"sloplet.cli.{module}")
    for module in ("keeper.client", "keeper.server", "keeper.__main__", "keeper.launch", "state.reaper"):
        importlib.import_module(f"sloplet.{module}")
    for module in ("engines.process", "engines.container", "engines.fake", "images.resolve", "cli.session"):
        importlib.import_module(f"sloplet.{module}")


def _make_image(folder: Path) -> None:
    """A root filesystem of some thirty files."""
    path = folder / "image.tar"
    source = folder / "rootfs"
    for name in ("bin", "etc", "lib/deep/deeper", "tmp"):
        (source / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox:
        shutil.copy(busybox, source / "bin/busybox")
    (source / "bin/sh").symlink_to("busybox")
    for number in range(25):
        (source / "lib/deep" / f"file{number}").write_text("x" * (number * 100))
    with tarfile.open(path, "w") as tar:
        tar.add(source, ".")
    os.environ["CRASH_IMAGE"] = str(path)
    os.environ["CRASH_IMAGE_FILES"] = str(sum(len(f) + len(n) for _, f, n in os.walk(source)))


def _serve(folder: Path, warm: bool) -> None:
    from sloplet.engines import registry
    from sloplet.testing.leaks import adopted_orphans

    with adopted_orphans():
        os.environ["SLOPLET_HOME"] = str(folder / "home")
        os.environ["SLOPLET_KEEPER_IDLE"] = "0"
        os.environ["CRASH_OUTPUT"] = str(folder / "output")
        _mark_ids(_MARK + random.choice("abcdefgh") + random.choice("abcdefgh") + random.choice("abcdefgh"))
        _make_image(folder)
        try:
            _warm_up()
            if warm:
                for name in registry._AUTO:
                    registry.load(name).probe()
            engines = _answer(lambda: [n for n in registry._AUTO if registry.load(n).probe().available])
            print(json.dumps({"engines": engines}))
        except Exception:
            print(json.dumps({"failed": traceback.format_exc()}))
            return
        sys.stdout.flush()
        for number, line in enumerate(sys.stdin):
            request = json.loads(line)
            try:
                answer = _point(request["op"], request, folder, number)
            except Exception:
                answer = {"count": 0, "hit": "", "exit": None, "said": "", "broken": [traceback.format_exc()]}
            print(json.dumps(answer), flush=True)


class Nursery:
    """The process, from outside."""

    def __init__(self, *, warm: bool) -> None:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="sloplet-crash-", dir=base))
        (self.folder / "tmp").mkdir()
        for path in (self.folder, self.folder / "tmp"):
            path.chmod(0o711)  # as /tmp is: the process rung runs under another user id
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLOPLET_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), "warm" if warm else "cold"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "TMPDIR": str(self.folder / "tmp")},
            text=True,
        )
        self.hello = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the nursery ended: {self._process.wait()}"
        return dict(json.loads(line))

    def point(self, op: str, at: int = 0, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, "at": at, **more}) + "\n")
        self._process.stdin.flush()
        return {"op": op, "at": at, **more, **self._read()}

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Pool:
    """Two nurseries at work at once."""

    def __init__(self, *, warm: bool) -> None:
        self._threads = ThreadPoolExecutor(2)
        self._idle = list(self._threads.map(lambda _: Nursery(warm=warm), range(2)))
        self._all = list(self._idle)
        self.hello = self._all[0].hello

    def point(self, op: str, at: int = 0, **more: Any) -> dict[str, Any]:
        nursery = self._idle.pop()
        try:
            return nursery.point(op, at, **more)
        finally:
            self._idle.append(nursery)

    def whole(self, op: str, **more: Any) -> dict[str, Any]:
        """Not cut off. Threads meet differently each time, and one run makes up to twice as many calls as another: of
        three the shortest, so that a sample is of calls that are made, or the longest if all N are taken."""
        runs = list(self._threads.map(lambda _: self.point(op, **more), range(3)))
        broken = [line for run in runs for line in run["broken"]]
        return {**sorted(runs, key=lambda run: run["count"])[-1 if ALL else 0], "broken": broken}

    def points(self, op: str, numbers: list[int], **more: Any) -> Iterator[dict[str, Any]]:
        return self._threads.map(lambda at: self.point(op, at, **more), numbers)

    def close(self) -> None:
        self._threads.shutdown()
        for nursery in self._all:
            nursery.close()


@contextmanager
def pool(*, warm: bool) -> Iterator[Pool]:
    made = Pool(warm=warm)
    try:
        yield made
    finally:
        made.close()


def choose(op: str, total: int, wanted: int, salt: str = "") -> list[int]:
    """Which N: all of them, in rounds, or a sample that is the same in every run (one out of each equal part), or our
    share of it."""
    if ALL:
        return list(range(1, total + 1)) * max(1, -(-AT_LEAST // max(1, total)))
    picked = random.Random(op + salt)
    edges = [1 + total * part // wanted for part in range(wanted + 1)]
    sample = sorted({picked.randrange(low, max(low + 1, high)) for low, high in pairwise(edges)})
    return sample[SHARE - 1 :: SHARERS]


ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "ENOMEM", "EMFILE", "EINTR")}


if __name__ == "__main__":
    try:
        _serve(Path(sys.argv[1]), sys.argv[2] == "warm")
    finally:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
