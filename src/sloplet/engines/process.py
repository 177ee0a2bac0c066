"""The process rung: what is left where user namespaces are not to be had. Weaker, quick, and honest about it."""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from dataclasses import replace
from functools import cached_property, partial
from pathlib import PurePath

from ..errors import StartFailed, UnsupportedOperation
from ..fs import remove_tree
from ..images import host
from ..spec import SandboxSpec
from . import cgroups, confine
from .base import FILES, Capabilities, Guarantee, Instance, Probe, ResolvedImage, StartRequest, StateFormat
from .controls import Controls, decide, enforceable
from .jail import JailRequest
from .launcher import launch, try_plan
from .machine import Machine
from .plan import encode_steps, frame
from .rung import Rung

_DEFAULT_WORKDIR = "/workspace"


class ProcessEngine(Rung):
    name = "process"
    rung = "process"
    weakenable = frozenset({"seccomp", "landlock", "cgroup"})

    @cached_property
    def _view(self) -> host.HostView:
        view = host.look()
        if self.machine.drops:
            return view
        # Who owns a file and may open it may set its times, which nothing here can refuse without breaking touch(1):
        # an interpreter that is the caller's own stays out of view.
        return replace(view, prefixes=tuple(prefix for prefix in view.prefixes if not _own(prefix, self.machine.uid)))

    @cached_property
    def _probe(self) -> Probe:
        facts = self.machine
        decided = decide(SandboxSpec(), facts, "probe", namespaces=False)
        controls = enforceable((*decided.guarantees, *self._fixed(facts)), facts)
        capabilities = Capabilities(
            images=frozenset({"host"}), controls=controls, disk_snapshots=True, no_egress="it can make no sockets"
        )
        reason, fix = self._trouble(facts, decided)
        more = "" if facts.landlock_abi >= 6 else " (6 guards signals too)"
        details = (f"Landlock ABI {facts.landlock_abi}{more}",)
        return Probe(self.name, self.rung, not reason, reason, fix, details, capabilities)

    def probe(self) -> Probe:
        return self._probe

    def _trouble(self, facts: Machine, decided: Controls) -> tuple[str, str]:
        if facts.landlock_abi < 1:
            return "this kernel has no Landlock, or it is off", "boot Linux 5.13 or newer with `lsm=landlock,...`"
        if facts.arch not in ("x86_64", "aarch64"):
            return f"the system call filter does not know {facts.arch}", ""
        if not facts.seccomp:
            return "this kernel has no seccomp filters", ""
        if not facts.drops and not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            return "this kernel does not list children (CONFIG_PROC_CHILDREN), so no tree could be ended", ""
        folders = confine.Folders("/usr", nested=False)  # nothing runs, so nothing is made that a crash could leave
        request = JailRequest("probe", SandboxSpec(), ResolvedImage("host"), "/", os.getpid(), probe=True)
        plan = confine.process_plan(request, facts, self._view, decided, folders, owned_in_view=True)
        return try_plan(frame(encode_steps(plan))), ""

    def _fixed(self, facts: Machine) -> tuple[Guarantee, ...]:
        scoped = facts.landlock_abi >= 6 or facts.drops
        own = "a uid of its own" if facts.drops else "the caller's uid"
        files = "Landlock: programs and libraries read-only, writes only into its own folders"
        if not facts.drops:
            files += "; no change of modes and owners by name"
        signals = "Landlock scope" if facts.landlock_abi >= 6 else own
        how = f"no signals outside ({signals}), no tracing"
        if not scoped:
            how = "no tracing, but signals to the caller's other processes: Landlock ABI 6 (Linux 6.12) is needed"
        landlock, seccomp = "landlock" not in self._weaken, "seccomp" not in self._weaken
        return (
            Guarantee("filesystem", landlock, files + "; names and sizes of the host's files can be seen"),
            Guarantee("processes", scoped and landlock, how),
            Guarantee("network", seccomp, "seccomp: no sockets at all", "none"),
            Guarantee("ipc", seccomp, "seccomp: no System V or POSIX queues, no Unix sockets"),
            Guarantee("syscalls", seccomp, "seccomp allowlist on every ABI of the kernel"),
            Guarantee("privileges", True, f"no_new_privs, no capabilities, {own}"),
            Guarantee("users", facts.drops, own),
        )

    def _decide(self, request: StartRequest) -> Controls:
        self._require(request)
        spec = request.spec
        if spec.run_user not in ("agent", "1000", "1000:1000"):
            raise UnsupportedOperation(
                f"engine 'process' has one user only, not {spec.user!r}", hint="engine='container' can"
            )
        if spec.sudo:
            raise UnsupportedOperation(
                "engine 'process' has no root, so sudo cannot work", hint="engine='container' can"
            )
        if spec.run_workdir != _DEFAULT_WORKDIR:
            raise UnsupportedOperation(
                f"engine 'process' has no filesystem of its own, so workdir={spec.workdir!r} cannot be made",
                hint="leave workdir out, or use engine='container'",
            )
        return decide(spec, self.machine, request.id, namespaces=False)

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        return (*self._decide(request).guarantees, *self._fixed(self.machine))

    async def start(self, request: StartRequest) -> Instance:
        facts, decided = self.machine, self._decide(request)
        if not facts.drops and not facts.cgroup.enforces("pids"):
            # Counted together with all the caller's other processes: no control of the sandbox, but it stops a bomb.
            most = _tasks_of(facts.uid) + decided.limits.pids
            decided = replace(decided, rlimits=(*decided.rlimits, (resource.RLIMIT_NPROC, most)))
        top = _outside(request.id) if facts.drops else str(request.place)
        group = cgroups.plan(facts.cgroup, request.id, decided.limits)
        number = self._ranges.take(request.id)
        jailed = JailRequest(
            request.id, request.spec, request.image, top, os.getpid(), group=group, id_range=number, weaken=self._weaken
        )
        try:
            folders = _make_folders(top, confine.own_uid(facts, number))
            owned = self._owned_in_view()
            plan = confine.process_plan(jailed, facts, self._view, decided, folders, owned_in_view=owned)
            guarantees = (*decided.guarantees, *self._fixed(facts))
            programs = [path for path in host.python_path(self._view) if self._reachable(path)]
            hello = replace(confine.hello(jailed, folders, programs), memory=decided.watched)
        except BaseException:
            self._ranges.give_back(number)
            _remove_outside(request.id)
            raise
        return await launch(
            frame(encode_steps(plan)),
            hello,
            guarantees,
            facts.cgroup,
            group,
            released=partial(self._ranges.give_back, number),
            cleaned=lambda: _remove_outside(request.id),
        )

    def _owned_in_view(self) -> bool:
        if host.interpreter_parts(self._view):
            return True
        shown = ("/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/local/lib")
        return any(os.path.exists(path) and os.stat(path).st_uid == self.machine.uid for path in shown)

    def _reachable(self, path: str) -> bool:
        """Whether the sandbox's uid gets there: root's own interpreter may lie in a folder closed to others."""
        if not self.machine.drops:
            return True
        parents = (path, *(str(parent) for parent in PurePath(path).parents))
        return all(os.path.isdir(parent) and os.stat(parent).st_mode & stat.S_IXOTH for parent in parents)

    def state_format(self) -> StateFormat:
        return StateFormat(self.name, FILES)

    def reap(self, sandbox_id: str) -> None:
        super().reap(sandbox_id)
        _remove_outside(sandbox_id)


def _own(path: str, uid: int) -> bool:
    try:
        return os.stat(path).st_uid == uid
    except OSError:
        return True


def _outside(sandbox_id: str) -> str:
    """As root a sandbox runs under an id of its own, to which SLOPLET_HOME is closed: its folders lie elsewhere."""
    return f"{tempfile.gettempdir()}/sloplet-{sandbox_id}"


def _remove_outside(sandbox_id: str) -> None:
    path = _outside(sandbox_id)
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
        above = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(above, os.path.basename(path))
        finally:
            os.close(above)


def _make_folders(top: str, uid: int | None) -> confine.Folders:
    folders = confine.Folders(os.path.realpath(top))
    try:
        os.makedirs(folders.top, exist_ok=True)
        if uid is not None:
            os.chmod(folders.top, 0o711)  # noqa: S103 - passable, not readable
        for name in confine.FOLDERS:
            os.mkdir(folders.path(name), 0o700)
            if uid is not None:
                os.chown(folders.path(name), uid, uid)
    except OSError as error:
        raise StartFailed(f"the sandbox's folders cannot be made: {error}") from error
    return folders


def _tasks_of(uid: int) -> int:
    """How many threads this user runs now."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count
