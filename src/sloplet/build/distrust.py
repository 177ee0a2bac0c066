"""The certificate authority of a step's sandbox is no part of the image: it is taken out again before anything is kept.

Where the network opens TLS, ``network/trust.py`` has put it into the usual bundles; a step that ran
``update-ca-certificates`` may have carried it on. Everything here is done inside, by the agent.
"""

from __future__ import annotations

from ..errors import FileError
from ..files import AsyncFiles
from ..network import trust
from .context import Folder
from .layertar import Item
from .threads import in_thread

_MAX_BUNDLE = 16 * 2**20
_ROOT = "0:0"
#: Folders that are made for it where an image has no certificates at all.
_FOLDERS = ("etc/ssl/certs", "etc/ssl", "usr/local/share/ca-certificates", "usr/local/share", "usr/local")


async def authority(files: AsyncFiles) -> bytes | None:
    """The certificate that was put into a fresh sandbox; None if none was."""
    return await _read(files, trust.ALONE)


async def take_out(files: AsyncFiles, certificate: bytes, tree: Folder) -> None:
    """Leave the trust store as it would be without it. ``tree``: the image's. FileError."""
    for path in trust.BUNDLES:
        old = await _read(files, path)
        if old is None:
            continue
        new = trust.without_ours(old).replace(certificate.strip() + b"\n", b"")
        before = await in_thread(tree.read, path, _MAX_BUNDLE)
        if before is not None and before.rstrip(b"\n") == new.rstrip(b"\n"):
            new = before
        if new != old:
            if new:
                await files.write(path, new, user=_ROOT)
            else:
                await files.remove(path, user=_ROOT)
    names = [f"{trust.HASHED}/{trust.name_hash(certificate)}.{number}" for number in range(4)]
    for path in (trust.ALONE, trust.OWN, *names):
        await files.remove(path, missing_ok=True, user=_ROOT)


async def _read(files: AsyncFiles, path: str) -> bytes | None:
    try:
        return await files.read(path, max_bytes=_MAX_BUNDLE, user=_ROOT)
    except FileError:
        return None


def without_traces(items: list[Item], tree: Folder) -> list[Item]:
    """Folders that were made for it alone are no changes. Blocking."""
    kept = {item.path: item for item in items}
    for path in _FOLDERS:
        empty = not any(other.startswith(f"{path}/") for other in kept)
        if path in kept and empty and kept[path].kind == "folder" and tree.lstat(path) is None:
            del kept[path]
    return list(kept.values())
