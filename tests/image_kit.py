"""Small images for tests, made here: no registry is asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from sloplet.build.ground import record
from sloplet.build.layertar import Item, text_data, write_layer
from sloplet.images.config import ImageConfig
from sloplet.images.media import host_platform
from sloplet.images.reference import parse
from sloplet.images.store import ImageStore, StoredImage
from sloplet.state.home import Home

BUSYBOX = shutil.which("busybox")
_APPLETS = (
    "sh", "cat", "echo", "ls", "id", "true", "false", "mkdir", "rm", "rmdir", "mv", "cp", "ln", "touch", "chmod",
    "chown", "stat", "test", "[", "env", "pwd", "sleep", "tar", "gzip", "wc", "sort", "find", "grep", "sed", "head",
    "tail", "dd",
    "readlink", "date", "sync", "whoami", "printf", "seq", "wget", "nslookup", "mkfifo", "md5sum", "sha256sum",
)  # fmt: skip
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001:app:/home/app:/bin/sh\n",
    "etc/group": "root:x:0:\napp:x:1001:\nstaff:x:50:app\n",
}

needs_busybox = pytest.mark.skipif(BUSYBOX is None, reason="busybox-static is not installed")


def busybox_items(files: Mapping[str, str] | None = None) -> list[Item]:
    """A root filesystem that has a shell: /bin is a link, as distributions have it."""
    assert BUSYBOX is not None
    program = Path(BUSYBOX).read_bytes()
    items = [Item(path, "folder", 0o755) for path in ("usr", "usr/bin", "etc", "root", "home", "var", "var/lib")]
    items += [Item("tmp", "folder", 0o1777), Item("bin", "symlink", link="usr/bin")]
    items += [Item("home/app", "folder", 0o750, 1000, 1001)]
    items.append(Item("usr/bin/busybox", "file", 0o755, size=len(program), data=text_data(program)))
    items += [Item(f"usr/bin/{name}", "symlink", link="busybox") for name in _APPLETS]
    for path, text in {**_FILES, **(files or {})}.items():
        parts = path.split("/")[:-1]
        items += [Item("/".join(parts[:count]), "folder", 0o755) for count in range(1, len(parts) + 1)]
        items.append(Item(path, "file", 0o644, size=len(text.encode()), data=text_data(text.encode())))
    return items


def busybox_image(
    home: Home, name: str | None = "busybox:test", *, files: Mapping[str, str] | None = None, **config: object
) -> StoredImage:
    """An image of one layer in the store of ``home``."""
    store = ImageStore(home)
    try:
        platform = host_platform()
        with store.adding():
            layer = write_layer(busybox_items(files), store.blobs)
            whole = ImageConfig(
                architecture=platform.architecture, variant=platform.variant, env=(("PATH", "/usr/bin"),), cmd=("sh",),
            )  # fmt: skip
            return record(store, whole.changed(**config), [layer], None if name is None else parse(name))
    finally:
        store.close()


def default_home() -> Home:
    """That of SLOPLET_HOME, as the library finds it."""
    return Home(os.environ["SLOPLET_HOME"])
