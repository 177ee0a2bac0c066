"""From what a user wrote as ``image=`` to the folder a sandbox's root is made of.

``host``; an image of the store by reference or id, which is pulled if it is not here; a root filesystem in a folder
(``dir:PATH``, or a path); a tar of one, which is unpacked once into ``images/SHA256/rootfs`` and used again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..engines.base import ResolvedImage
from ..errors import ImageError, ImageInvalid, ImageNotFound, SpecError
from ..fs import FOLDER, write_all, write_atomic
from ..state.home import Home, unwritable
from ..state.locks import FileLock, image_lock_path
from . import adopting, lease
from .progress import OnImageProgress, silent
from .reference import parse
from .staging import Staging
from .standard import refuse_standard
from .store import ImageStore, StoredImage
from .threads import Patient
from .trees import leased
from .unpack import Unpack, UnpackLimits, unpack

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tar.zst", ".tzst")
_FORMS = (
    "use 'host', an image ('debian:12', 'registry.example/team/app@sha256:...'), a folder that holds a root filesystem "
    "('dir:/path', './path'), or a tar of one ('./image.tar.gz')"
)
_ID_RE = re.compile(r"sha256:[0-9a-f]*\Z")


def resolve(
    image: str,
    home: Home,
    *,
    limits: UnpackLimits | None = None,
    store: ImageStore | None = None,
    progress: OnImageProgress = silent,
    patient: Patient | None = None,
    pull: bool = True,
) -> ResolvedImage:
    """The image's root, which the caller closes. Quick for what was seen before; else it may take minutes: call it in a
    thread that runs no event loop. ``patient`` puts an end to a pull (Abandoned); without ``pull`` no registry is asked
    (ImageNotFound).

    Raises ImageNotFound, ImageInvalid, ImagePlatform, RegistryError, StateError.
    """
    if image == "host":
        return ResolvedImage("host")
    if image.startswith("dir:") and image != "dir:":
        return _folder(Path(image.removeprefix("dir:")).expanduser(), image, home)
    if image.startswith(("/", "./", "../", "~/")) or image in (".", "..", "~"):
        path = Path(image).expanduser()
    elif is_tar(image):
        path = Path(image)
    else:
        return _of_store(
            image, ImageStore(home) if store is None else store, progress, (patient or Patient()) if pull else None
        )
    try:
        if path.is_dir():
            return _folder(path, image, home)
        return _tar(path, image, home, limits)
    except (ValueError, OSError) as error:
        raise _no_access(image, error) from error


def is_tar(image: str) -> bool:
    """Whether a word names a tar rather than an image of a registry."""
    return image.lower().endswith(_TAR_SUFFIXES)


def _of_store(image: str, store: ImageStore, progress: OnImageProgress, patient: Patient | None) -> ResolvedImage:
    for _ in range(3):
        found = find_or_pull(image, store, progress, patient)
        try:
            return store.resolve(found, progress)
        except ImageNotFound:
            continue  # somebody removed it meanwhile
    return store.resolve(find_or_pull(image, store, progress, patient), progress)


def find_or_pull(image: str, store: ImageStore, progress: OnImageProgress, patient: Patient | None) -> StoredImage:
    """What a reference or an id means here, or to the operator of whose server this is a tenant; a reference that
    means nothing is pulled, if somebody is patient."""
    if _ID_RE.match(image):
        return adopting.find(store, image)
    try:
        reference = parse(image)
    except SpecError as error:
        raise ImageNotFound(f"the image {image[:200]!r} does not exist: {error.message}", hint=_FORMS) from error
    try:
        return adopting.find(store, image)
    except ImageNotFound:
        if patient is None:
            raise
    refuse_standard(reference)
    from .pull import pull

    return patient.run(pull(reference, store, progress=progress))


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
    """The image that lies in ``images/DIGEST``, which the caller closes. ImageInvalid if there is none, or no whole
    one."""
    try:
        found = leased(home, digest)
    except FileNotFoundError as error:
        found, why = None, f" ({error.strerror})"
    else:
        why = ""
    if found is None:
        raise ImageInvalid(
            f"the unpacked image {digest[:12]} is not there, or damaged{why}",
            hint=f"remove {home.images / digest} and try again",
        )
    return found


def _publish(
    source: BinaryIO, key: str, image: str, home: Home, limits: UnpackLimits | None, before: os.stat_result
) -> str:
    """Unpack a tar (the lock of ``key`` is held), and remember where its content is."""
    with Staging(home, key) as staging:
        result = unpack_staged(staging, source, limits)
        after = os.fstat(source.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ImageInvalid("it changed while it was being unpacked", hint="try again")
        publish_staged(staging, result.digest, {**result.to_dict(), "source": image})
        try:
            _remember(staging, key, result.digest)
        except OSError as error:
            raise unwritable(home.images, error) from error
    return result.digest


def unpack_staged(staging: Staging, source: BinaryIO, limits: UnpackLimits | None) -> Unpack:
    """ImageInvalid, StateUnwritable, and whatever ``source`` raises (an OSError of its own counts as the disk's)."""
    try:
        os.mkdir("rootfs", 0o755, dir_fd=staging.fd)
        root = os.open("rootfs", FOLDER, dir_fd=staging.fd)
        try:
            return unpack(source, root, limits)
        finally:
            os.close(root)
    except OSError as error:
        raise unwritable(staging.home.images, error) from error


def publish_staged(staging: Staging, digest: str, facts: dict[str, Any]) -> None:
    """Make it durable and give it its name; no error if the same content came in by another path."""
    try:
        data = json.dumps({**facts, "unpacked_at": time.time()}, indent=1).encode()
        write_atomic(staging.fd, lease.FACTS, data)
    except OSError as error:
        raise unwritable(staging.home.images, error) from error
    staging.publish(digest)


def _remember(staging: Staging, key: str, digest: str) -> None:
    """Written under the name that the folder had (free now): what a crash leaves of it the reaper removes."""
    home, images, name = staging.home, staging.images, staging.name
    home.cache.mkdir(mode=0o700, exist_ok=True)
    staging.clear()  # still there if the same content had come in by another path
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=images)
    try:
        write_all(fd, digest.encode("ascii"))
    finally:
        os.close(fd)
    os.rename(name, home.cache / f"tar-{key}", src_dir_fd=images)
