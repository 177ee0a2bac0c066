"""Volumes in a launcher plan: who outside is who inside, and where they are put. Pure.

One rule on every rung: what belongs to a volume's owner outside is the sandbox user's inside, and the other way round.
As root the mount maps owners. Otherwise the sandbox's whole user namespace does: the caller is mapped to the sandbox's
user, and root inside to the subordinate id that would have been the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedOperation
from .base import Guarantee, Mount
from .machine import FIRST_RANGE, RANGE_SIZE, RANGES, Machine
from .plan import MAX_SLOTS, Attr, Do, PlanFlag, Set, Step, VolumeFlag, step

if TYPE_CHECKING:
    from .jail import JailRequest

#: Slots that no image takes, nor the shell.
_FIRST_SLOT = MAX_SLOTS - 32
#: Where ids lie that own files in a folder of the host and are nobody: a range that no sandbox gets.
_STRANGERS = FIRST_RANGE + RANGES * RANGE_SIZE
#: In the shell of a gVisor sandbox.
_SHELL_FOLDER = "volumes"


def given(request: JailRequest) -> tuple[int, ...]:
    """The descriptors that the launcher gets, in the order that steps number them."""
    return (*(volume.fd for volume in request.volumes), *request.held)


def reaches_out(volumes: Sequence[Mount]) -> bool:
    """Whether what is written inside lands where other users of the host may get at it."""
    return any(not volume.private and not volume.read_only for volume in volumes)


def flags(volumes: Sequence[Mount]) -> PlanFlag:
    """What commands are kept from by them."""
    found = PlanFlag.NO_SETID if reaches_out(volumes) else PlanFlag(0)
    return found | PlanFlag.NO_LEASES if any(not volume.private for volume in volumes) else found


def guest_words(volumes: Sequence[Mount]) -> list[str]:
    """What the agent in a gVisor sandbox is told of them."""
    words = ["nosetid"] if reaches_out(volumes) else []
    return [*words, "tmp"] if any(volume.path == "/tmp" for volume in volumes) else words


def settings(request: JailRequest) -> list[Step]:
    count = len(given(request))
    return [step(Set.GIVEN, count)] if count else []


def tree_steps(request: JailRequest, machine: Machine) -> list[Step]:
    """Each volume as a mount that is nowhere yet."""
    return [
        step(
            Do.VOLUME,
            _FIRST_SLOT + number,
            VolumeFlag.WHOLE if volume.whole else VolumeFlag(0),
            Attr.NOSUID | Attr.NODEV | (Attr.RDONLY if volume.read_only else Attr(0)),
            number,
            volume.label,
            *_maps(volume, request, machine),
        )
        for number, volume in enumerate(request.volumes)
    ]


def place_steps(volumes: Sequence[Mount]) -> list[Step]:
    """Below the sandbox's root, outer ones first."""
    return [step(Do.PLACE, _FIRST_SLOT + number, volume.path.lstrip("/")) for number, volume in enumerate(volumes)]


def point_steps(volumes: Sequence[Mount]) -> list[Step]:
    """Folders in a gVisor sandbox's image for runsc to mount them on: the image is read-only for it. What goes into
    another volume has its folder there."""
    paths = [volume.path for volume in volumes]
    outer = [path for path in paths if not any(path.startswith(other + "/") for other in paths)]
    return [step(Do.MKDIR, 0o755, path.lstrip("/")) for path in outer]


def shell_steps(volumes: Sequence[Mount]) -> list[Step]:
    """Beside the image in a gVisor sandbox's shell, whence runsc takes them."""
    return [step(Do.MOUNT, _FIRST_SLOT + number, f"{_SHELL_FOLDER}/{number}") for number in range(len(volumes))]


def oci_mounts(volumes: Sequence[Mount]) -> list[dict[str, Any]]:
    return [
        {
            "destination": volume.path,
            "type": "bind",
            "source": f"/{_SHELL_FOLDER}/{number}",
            "options": ["bind", "ro" if volume.read_only else "rw", "nosuid", "nodev"],
        }
        for number, volume in enumerate(volumes)
    ]


def guarantees(volumes: Sequence[Mount], *, shared_kernel: bool) -> tuple[Guarantee, ...]:
    """``shared_kernel``: a Unix socket in a folder leads to who listens there, on a read-only mount too, and no filter
    of system calls sees which one is meant."""
    return tuple(
        Guarantee(
            "volume",
            True,
            f"{volume.label}: {'read-only' if volume.read_only else 'read-write'}, nosuid, nodev; "
            "the sandbox's user inside is its owner outside"
            + ("; commands cannot set setuid or setgid" if reaches_out([volume]) else "")
            + ("; sockets and pipes in it can be reached" if shared_kernel and not volume.private else ""),
            volume.path,
        )
        for volume in volumes
    )


def _maps(volume: Mount, request: JailRequest, machine: Machine) -> tuple[str, str]:
    if not machine.root:
        return "", ""
    first = FIRST_RANGE + request.id_range * RANGE_SIZE
    uid, gid = (
        mount_map(owner, user, first, private=volume.private)
        for owner, user in zip(volume.owner, request.user, strict=True)
    )
    return uid, gid


def mount_map(owner: int, user: int, first: int, *, private: bool) -> str:
    """The id map of a mount: ``on the disk, on this machine, count``. ``first``: this machine's id of root inside.

    ``private``: ids on the disk are those inside, with the owner and the user exchanged. Else only the owner is
    anybody: what others inside write belongs to ids that are nobody's, so that nothing there can become root's."""
    if user >= RANGE_SIZE:
        raise UnsupportedOperation(f"the user {user} inside is too high for volumes", hint="use one below 65536")
    begin = 0 if private else _STRANGERS
    if owner == begin + user:
        lines = [(begin, 0, RANGE_SIZE)]
    elif not begin <= owner < begin + RANGE_SIZE:
        lines = [(owner, user, 1), (begin, 0, user), (begin + user + 1, user + 1, RANGE_SIZE - user - 1)]
    else:  # a folder that another than the user made inside, earlier, is of those
        low, high = sorted((owner - begin, user))
        between = (begin + low + 1, low + 1, high - low - 1)
        rest = (begin + high + 1, high + 1, RANGE_SIZE - high - 1)
        lines = [(begin, 0, low), (begin + low, high, 1), between, (begin + high, low, 1), rest]
    return "".join(f"{disk} {first + inside} {count}\n" for disk, inside, count in lines if count)


def callers_map(caller: int, first: int, count: int, user: int) -> str:
    """The id map of a whole sandbox: ``inside, on this machine, count``. The caller is ``user`` inside; root has the id
    that would have been that user's."""
    if user == 0:
        return f"0 {caller} 1\n1 {first} {count}\n"
    if user > count:
        raise UnsupportedOperation(
            f"the user {user} inside cannot be the calling user: there are {count} subordinate ids",
            hint="use another user=, or give this one more ids",
        )
    lines = [
        (0, first + user - 1, 1), (1, first, user - 1), (user, caller, 1), (user + 1, first + user, count - user),
    ]  # fmt: skip
    return "".join(f"{inside} {outside} {length}\n" for inside, outside, length in lines if length)
