"""What is done to the files of images, as functions of plain values and open descriptors: see ``userns``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..fs import FILE, FOLDER, remove_tree, write_atomic

Job = Callable[[dict[str, Any], Sequence[int], Callable[[int], None]], dict[str, Any]]


def _unpack(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    """``fds``: the blob, the folder that the layer is made in."""
    from .compose import LAYER_FACTS, LAYER_TREE
    from .extract import UnpackLimits
    from .layer import unpack_layer
    from .owners import MOST_INSIDE, Owners

    kept = arguments["owners"] == "kept"
    owners = Owners(kept, MOST_INSIDE, record=not kept)
    os.mkdir(LAYER_TREE, 0o755, dir_fd=fds[1])
    root = os.open(LAYER_TREE, FOLDER, dir_fd=fds[1])
    try:
        os.fchmod(root, 0o755)
        limits = UnpackLimits(**arguments["limits"])
        with os.fdopen(os.dup(fds[0]), "rb", buffering=0) as blob:
            facts = unpack_layer(blob, root, arguments["diff_id"], owners, limits, tell)
    finally:
        os.close(root)
    write_atomic(fds[1], LAYER_FACTS, facts.to_json())
    return {"entries": facts.entries, "bytes": facts.size}


def _relink(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    """``fds``: the folder that the layer is made in, and the one that the other store's layers lie in."""
    from .compose import LAYER_FACTS, LAYER_TREE, relink

    name = arguments["layer"]
    os.mkdir(LAYER_TREE, 0o755, dir_fd=fds[0])
    root = os.open(LAYER_TREE, FOLDER, dir_fd=fds[0])
    try:
        made = relink(root, fds[1], name, keep_owners=arguments["owners"] == "kept")
    finally:
        os.close(root)
    with os.fdopen(os.open(f"{name}/{LAYER_FACTS}", FILE, dir_fd=fds[1]), "rb") as file:
        write_atomic(fds[0], LAYER_FACTS, file.read())
    return made.to_dict()


def _compose(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    """``fds``: the folder that ``rootfs`` is made in, and the one that the layers lie in."""
    from .compose import compose
    from .owners import MODES, RECORDED, write_modes, write_recorded

    os.mkdir("rootfs", 0o755, dir_fd=fds[0])
    root = os.open("rootfs", FOLDER, dir_fd=fds[0])
    try:
        os.fchmod(root, 0o755)
        made = compose(root, fds[1], arguments["layers"], keep_owners=arguments["owners"] == "kept")
    finally:
        os.close(root)
    if made.owners:
        write_atomic(fds[0], RECORDED, write_recorded(made.owners))
    if made.modes:
        write_atomic(fds[0], MODES, write_modes(made.modes))
    return made.to_dict()


def _remove(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    return {"removed": remove_tree(fds[0], arguments["name"])}


def _copy(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    """A volume's files. ``fds``: the folder that they are in, and an empty one."""
    from ..volumes.trees import Copy

    copy = Copy(owners=arguments["owners"] == "kept")
    copy.run(fds[0], fds[1])
    return {"files": copy.files, "bytes": copy.bytes}


def _open(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    from .opening import serve

    return serve(arguments, fds, tell)


def _content(arguments: dict[str, Any], fds: Sequence[int], tell: Callable[[int], None]) -> dict[str, Any]:
    from ..volumes.operations import job

    return job(arguments, fds)


#: Each imports what it needs when it is called: a child does one or two of them.
JOBS: dict[str, Job] = {
    "unpack": _unpack, "relink": _relink, "compose": _compose, "remove": _remove, "open": _open, "copy": _copy,
    "content": _content,
}  # fmt: skip
