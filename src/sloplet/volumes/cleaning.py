"""What a crash left in volumes/: half made and half removed ones, copies that nothing speaks of, locks of nobody."""

from __future__ import annotations

from ..errors import SlopletError
from ..state.home import ID_RE, Home
from ..state.locks import FileLock
from ..state.store import Store
from . import copies
from .store import remove_staged, staging_lock

_PREFIX = ".tmp-"


def sweep(home: Home, store: Store, names: list[str], locks: list[str], errors: list[str]) -> int:
    """How many went. ``names``, ``locks``: what lies in volumes/ and in run/."""
    gone = 0
    staged = {name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)}
    for name in locks:
        if name.startswith("volume-name-"):
            gone += _let_go(FileLock.take(home.run / name))
        elif name.startswith("volume-"):
            staged.add(name.removeprefix("volume-").removesuffix(".lock"))
    for each in filter(ID_RE.match, staged):
        lock = FileLock.take(staging_lock(home, each))
        if lock is None:
            continue  # somebody is at it
        try:
            remove_staged(home, each)
            gone += 1
        except SlopletError as error:
            errors.append(str(error))
        finally:
            lock.release()
    if copies.FOLDER_NAME in names:
        for base in store.unspoken(copies.all_kept(home)):
            try:
                copies.forget(home, base)
                gone += 1
            except SlopletError as error:
                errors.append(str(error))
    return gone


def _let_go(lock: FileLock | None) -> int:
    if lock is None:
        return 0
    lock.release()
    return 1
