"""From what a user wrote as ``image=`` to the folder a sandbox's root is made of.

``host``; a root filesystem in a folder (``dir:PATH``, or a path); a tar of one, which is unpacked once
into ``images/SHA256/rootfs`` and used again. Published by rename: an image is there whole or not at
all, however many processes unpack it and whichever of them is killed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..engines.base import ResolvedImage
from ..errors import ImageError, ImageInvalid, ImageNotFound
from ..fs import remove_tree, sync_filesystem, write_all, write_atomic
from ..state.home import Home, unwritable
from ..state.locks import FileLock, image_lock_path
from .unpack import Unpack, UnpackLimits, unpack

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tar.zst", ".tzst")
_FORMS = "use 'host', a folder that holds a root filesystem ('dir:/path', './path'), or a tar of one ('./image.tar.gz')"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def resolve(image: str, home: Home, *, limits: UnpackLimits | None = None) -> ResolvedImage:
    """The image's root. Quick for what was seen before; unpacking a tar takes seconds: call it in a thread.

    Raises ImageNotFound, ImageInvalid, StateUnwritable.
    """
    if image == "host":
        return ResolvedImage("host")
    if image.startswith("dir:") and image != "dir:":
        return _folder(Path(image.removeprefix("dir:")).expanduser(), image, home)
    if image.startswith(("/", "./", "../", "~/")) or image in (".", "..", "~"):
        path = Path(image).expanduser()
    elif image.lower().endswith(_TAR_SUFFIXES):
        path = Path(image)
    else:
        raise ImageNotFound(
            f"{image!r} is not an image that can be used yet: registries and OCI images come in a later version",
            hint=_FORMS,
        )
    try:
        if path.is_dir():
            return _folder(path, image, home)
        return _tar(path, image, home, limits)
    except (ValueError, OSError) as error:
        raise _no_access(image, error) from error


def _no_access(image: str, error: Exception) -> ImageError:
    number = getattr(error, "errno", None)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return ImageNotFound(f"the image {image!r} does not exist", hint=_FORMS)
    text = getattr(error, "strerror", None) or str(error)
    return ImageInvalid(f"the image {image!r} cannot be read: {text}")


def _folder(path: Path, image: str, home: Home) -> ResolvedImage:
    try:
        root = path.resolve(strict=True)
        info = root.stat()
        if not stat.S_ISDIR(info.st_mode):
            raise ImageInvalid(f"the image {image!r} is not a folder")
        state = home.path.resolve()
        if root == Path("/"):
            raise ImageInvalid("the host's own root cannot be an image", hint="image='host' gives the host's programs")
        if (
            root == state
            or root in state.parents
            or (state in root.parents and home.images.resolve() not in root.parents)
        ):
            raise ImageInvalid(
                f"the image {image!r} and Sloplet's state directory lie inside of each other",
                hint="a sandbox must not see SLOPLET_HOME: put the image elsewhere",
            )
        with os.scandir(root) as entries:
            usable = any(_runnable(entry) for entry in entries)
        if not usable:
            raise ImageInvalid(
                f"the image {image!r} holds no root filesystem: no bin, sbin or usr, and no program",
                hint="point at the folder that has them directly below it",
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise _no_access(image, error) from error
    return ResolvedImage("rootfs", root, owners_kept=os.geteuid() == 0 and info.st_uid == 0)


def _runnable(entry: os.DirEntry[str]) -> bool:
    if entry.name in ("bin", "sbin", "usr"):
        return True
    return entry.is_file(follow_symlinks=False) and bool(entry.stat(follow_symlinks=False).st_mode & 0o111)


def _tar(path: Path, image: str, home: Home, limits: UnpackLimits | None) -> ResolvedImage:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # non-blocking: it may be a fifo
    with os.fdopen(fd, "rb", buffering=0) as file:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise ImageInvalid(f"the image {image!r} is neither a folder nor a file")
        key = _key(path, before)
        home.open()
        if found := _seen(home, key):
            return found
        lock = FileLock.take(image_lock_path(home, key), wait=True)
        assert lock is not None
        try:
            if found := _seen(home, key):
                return found
            try:
                digest = _publish(cast(BinaryIO, file), key, image, home, limits, before)
            except ImageInvalid as error:
                raise ImageInvalid(f"the image {image!r} cannot be used: {error.message}", hint=error.hint) from error
        finally:
            lock.release()
    return unpacked(home, digest)


def _key(path: Path, info: os.stat_result) -> str:
    """What tells this tar from another, and from itself after a change, without reading it."""
    import hashlib

    facts = (os.path.realpath(path), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _seen(home: Home, key: str) -> ResolvedImage | None:
    try:
        digest = (home.cache / f"tar-{key}").read_text("ascii")
        if len(digest) != 64 or digest.strip("0123456789abcdef"):
            return None
        return unpacked(home, digest)
    except (OSError, ValueError, ImageInvalid):
        return None


def unpacked(home: Home, digest: str) -> ResolvedImage:
    """The image that lies in ``images/DIGEST``. ImageInvalid if there is none, or no whole one."""
    try:
        facts = json.loads((home.images / digest / "image.json").read_bytes())
        return ResolvedImage("rootfs", home.images / digest / "rootfs", owners_kept=bool(facts["owners_kept"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageInvalid(
            f"the unpacked image {digest[:12]} is damaged ({error})",
            hint=f"remove {home.images / digest} and try again",
        ) from error


def _publish(
    source: BinaryIO, key: str, image: str, home: Home, limits: UnpackLimits | None, before: os.stat_result
) -> str:
    """Unpack a tar (the lock of ``key`` is held), and remember where its content is."""
    with Staging(home, key) as staging:
        result = staging.unpack(source, limits)
        after = os.fstat(source.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ImageInvalid("it changed while it was being unpacked", hint="try again")
        staging.publish(result.digest, {**result.to_dict(), "source": image})
        try:
            _remember(staging.images, staging.name, home, key, result.digest)
        except OSError as error:
            raise unwritable(home.images, error) from error
    return result.digest


class Staging:
    """``images/.tmp-KEY``, where an image is unpacked before it has its name. The caller holds the lock of ``key``
    (``image_lock_path``). A context manager: what was not published is removed at its end. Raises StateUnwritable."""

    def __init__(self, home: Home, key: str) -> None:
        self.name = f".tmp-{key}"
        self._home = home
        self._folder = -1
        try:
            home.images.mkdir(mode=0o700, exist_ok=True)
            self.images = os.open(home.images, _FOLDER)
        except OSError as error:
            raise unwritable(home.images, error) from error
        try:
            remove_tree(self.images, self.name)  # of a writer that was killed
            os.mkdir(self.name, 0o700, dir_fd=self.images)
            self._folder = os.open(self.name, _FOLDER, dir_fd=self.images)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise unwritable(home.images, error) from error
            raise

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def unpack(self, source: BinaryIO, limits: UnpackLimits | None) -> Unpack:
        """ImageInvalid, and whatever ``source`` raises (an OSError of its own counts as the disk's)."""
        try:
            os.mkdir("rootfs", 0o755, dir_fd=self._folder)
            root = os.open("rootfs", _FOLDER, dir_fd=self._folder)
            try:
                return unpack(source, root, limits)
            finally:
                os.close(root)
        except OSError as error:
            raise unwritable(self._home.images, error) from error

    def publish(self, digest: str, facts: dict[str, Any]) -> None:
        """Make it durable and give it its name; no error if the same content came in by another path."""
        try:
            write_atomic(
                self._folder, "image.json", json.dumps({**facts, "unpacked_at": time.time()}, indent=1).encode()
            )
            sync_filesystem(self._folder)
            _rename_new(self.images, self.name, digest)
        except OSError as error:
            raise unwritable(self._home.images, error) from error

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        with suppress(Exception):
            remove_tree(self.images, self.name)
        os.close(self.images)


def _rename_new(images: int, name: str, digest: str) -> None:
    try:
        os.rename(name, digest, src_dir_fd=images, dst_dir_fd=images)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return  # the same content came in by another path
    os.fsync(images)


def _remember(images: int, name: str, home: Home, key: str, digest: str) -> None:
    """Written under the name that the folder had (free now): what a crash leaves of it the reaper removes."""
    home.cache.mkdir(mode=0o700, exist_ok=True)
    remove_tree(images, name)  # still there if the same content had come in by another path
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=images)
    try:
        write_all(fd, digest.encode("ascii"))
    finally:
        os.close(fd)
    os.rename(name, home.cache / f"tar-{key}", src_dir_fd=images)
