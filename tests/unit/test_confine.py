"""The process rung's plan: pure."""

from __future__ import annotations

import pytest
from test_jail import ROOT, SINGLE, VIEW, only

from sloplet.engines import confine, jail
from sloplet.engines.base import ResolvedImage
from sloplet.engines.controls import decide
from sloplet.engines.machine import FIRST_RANGE, Machine
from sloplet.engines.plan import AllowFlag, Do, Seccomp, Set, Step
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

WRITE = 1 << 1


def build(machine: Machine, *, owned: bool = False) -> tuple[Step, ...]:
    spec = SandboxSpec.make()
    request = jail.JailRequest("abc", spec, ResolvedImage("host"), "/place", 7, id_range=2)
    decided = decide(spec, machine, "abc", namespaces=False)
    return confine.process_plan(request, machine, VIEW, decided, confine.Folders("/place"), owned_in_view=owned)


@pytest.mark.parametrize(("abi", "rights"), [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (7, 16)])
def test_every_right_the_kernel_knows_is_guarded(abi: int, rights: int) -> None:
    assert confine.filesystem_rights(abi) == (1 << rights) - 1


@pytest.mark.parametrize("machine", [ROOT, SINGLE], ids=["root", "user"])
def test_only_its_own_folders_and_devices_can_be_written(machine: Machine) -> None:
    writable = {str(args[2]) for args in only(build(machine), Do.ALLOW) if int(args[1]) & WRITE}
    own = {f"/place/{name}" for name in confine.FOLDERS}
    assert own <= writable
    assert all(path.startswith("/dev/") for path in writable - own)


def test_commands_see_neither_processes_nor_the_callers_terminals() -> None:
    agent_only = {str(args[2]) for args in only(build(SINGLE), Do.ALLOW) if AllowFlag.AGENT_ONLY in AllowFlag(args[0])}
    assert agent_only == {"/proc", "/dev/ptmx", "/dev/pts"}


def test_root_runs_nothing_as_root() -> None:
    uid = FIRST_RANGE + 2 * 65536 + 1000
    assert only(build(ROOT), Set.DROP_TO) == [(uid, uid)]
    assert not only(build(SINGLE), Set.DROP_TO)


def test_metadata_is_guarded_under_the_callers_uid_only() -> None:
    assert Seccomp.NO_METADATA not in Seccomp(only(build(ROOT), Set.SECCOMP)[0][0])
    assert Seccomp.FENCED not in Seccomp(only(build(SINGLE), Set.SECCOMP)[0][0])
    assert Seccomp.NO_METADATA | Seccomp.FENCED in Seccomp(only(build(SINGLE, owned=True), Set.SECCOMP)[0][0])


def test_old_kernels_do_not_show_files_that_their_owner_could_truncate() -> None:
    old = Machine(uid=1001, landlock_abi=2)
    assert not [args for args in only(build(old), Do.ALLOW) if str(args[2]).startswith("/home")]
    assert [args for args in only(build(SINGLE), Do.ALLOW) if str(args[2]).startswith("/home")]
