"""Writing an archive: one pass over the state's files and the image, never more than a few megabytes in memory."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from ..engines.base import ResolvedImage
from ..errors import FileExists, SaveFailed, SnapshotDamaged, SpecError
from ..fs import FILE, NEW_FILE, write_all
from ..images.trees import disk_owners
from ..state.home import Home
from ..state.opened import Opened
from ..volumespec import left_behind
from . import hostprint, layout, rootfs, tarwrite
from .layout import ImageFacts, Manifest, Member
from .work import Work

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PIECE = 1 << 20
_LEVEL = 3
_THREADS = min(4, os.cpu_count() or 1)
_NAME_MAX = 255


class Target:
    """A new file: at the end it is there whole, or not at all. Until then it has a name that begins with a dot and
    ends with ``.partial``, and only its owner can read it: it will hold a sandbox's memory.

    A context manager; constructing it refuses what cannot become a file (SpecError, FileExists, SaveFailed).
    """

    def __init__(self, path: str, home: Home) -> None:
        folder, self._name = os.path.split(path)
        if not os.path.isabs(path) or "\0" in path or self._name in ("", ".", ".."):
            raise SpecError(f"{path[:200]!r} is not a path for an archive", hint="an absolute path to a new file")
        self.path = path
        real = os.path.realpath(folder)
        for kept in (home.sandboxes, home.images, home.cache, home.snapshots, home.run):
            if os.path.commonpath((real, own := os.path.realpath(kept))) == own:
                raise SpecError(f"{path[:200]!r} is inside of SLOPLET_HOME", hint="write the archive somewhere else")
        self._temporary = f".{self._name}"[: _NAME_MAX - 32] + f".{secrets.token_hex(6)}.partial"
        self.fd = self._folder = -1
        try:
            self._folder = os.open(folder, _FOLDER)
            self._refuse_existing()
            self.fd = os.open(self._temporary, NEW_FILE, 0o600, dir_fd=self._folder)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, FileExists):
                raise not_written(path, error) from error
            raise

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self) -> None:
        """From now on it has its name. FileExists if something else got that meanwhile."""
        try:
            os.fsync(self.fd)
            self._refuse_existing()
            try:
                os.link(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except FileExistsError:
                self._refuse_existing()
                raise
            except OSError:  # a filesystem without hard links
                os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            os.fsync(self._folder)
        except FileExists:
            raise
        except OSError as error:
            raise not_written(self.path, error) from error

    def close(self) -> None:
        """Idempotent. What has no name yet goes."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            with suppress(FileNotFoundError, OSError):
                os.unlink(self._temporary, dir_fd=self._folder)
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def _refuse_existing(self) -> None:
        with suppress(FileNotFoundError):
            os.lstat(self._name, dir_fd=self._folder)
            raise FileExists(
                f"there already is {self.path[:300]!r}", hint="name a new file, or remove that one", errno=errno.EEXIST
            )


def not_written(path: str, error: OSError) -> SaveFailed:
    hints = {
        errno.ENOSPC: "the disk is full: free some space, or write it elsewhere",
        errno.EDQUOT: "your disk quota is used up: free some space, or write it elsewhere",
        errno.EFBIG: "it is larger than this process or its filesystem allows (`ulimit -f`)",
        errno.ENOENT: "its folder does not exist",
        errno.EACCES: "write it to a folder of your own",
        errno.EPERM: "write it to a folder of your own",
        errno.EROFS: "write it to a folder of your own",
    }
    hint = hints.get(error.errno or 0)
    return SaveFailed(f"the archive {path[:300]!r} could not be written: {error.strerror or error}", hint=hint)


def write(target: Target, opened: Opened, image: ResolvedImage, home: Home, work: Work, *, include: bool) -> None:
    """The state, and its image if ``include``, into the target, which is then published. Every byte is compared with
    the digest it was saved with. SaveFailed, SnapshotDamaged, ImageError; nothing is left then."""
    facts, size = _image_facts(opened, image, home, include=include)
    manifest = describe(opened, facts, size if include else None)
    work.total = manifest.total
    try:
        sink = _Sink(target.fd)
        text = manifest.to_bytes()
        sink.member(layout.MANIFEST_MEMBER, len(text), [text], manifest.created_at)
        for member in manifest.state:
            with closing(_checked(_pieces(opened, member), member, work)) as pieces:
                sink.member(layout.STATE_PREFIX + member.name, member.bytes, pieces, manifest.created_at)
        if manifest.packed is not None:
            assert image.path is not None
            tar = rootfs.tar(image.path, owners=disk_owners(image) or False)
            with closing(_checked(tar, manifest.packed, work)) as pieces:
                sink.member(manifest.packed.name, manifest.packed.bytes, pieces, manifest.created_at)
        sink.finish()
    except OSError as error:
        raise not_written(target.path, error) from error
    work.check()
    target.publish()


def describe(opened: Opened, image: ImageFacts, packed: int | None) -> Manifest:
    """The manifest of a saved state. ``packed``: the size of the image's tar, if that is to be a member."""
    from .. import __version__

    snapshot, spec = opened.snapshot, opened.snapshot.spec
    files = opened.manifest["files"]
    return Manifest(
        kind=snapshot.kind,
        engine=snapshot.engine,
        spec=replace(spec, volumes=left_behind(spec.volumes, live=snapshot.kind == "live")),
        format=opened.format,
        image=image,
        state=tuple(Member(name, entry["bytes"], entry["sha256"]) for name, entry in sorted(files.items())),
        packed=None if packed is None else Member(layout.IMAGE_MEMBER, packed, image.content),
        extra=opened.extra,
        created_at=snapshot.created_at,
        sandbox=snapshot.sandbox,
        sloplet=__version__,
    )


def _image_facts(opened: Opened, image: ResolvedImage, home: Home, *, include: bool) -> tuple[ImageFacts, int | None]:
    """What is known of the image, and how long its tar is (None if nobody needs to know)."""
    reference = opened.snapshot.spec.image
    if image.path is None:
        return ImageFacts("host", reference, host=hostprint.fingerprint()), None
    key = ""
    if image.path.name == "rootfs" and image.path.parent.parent == home.images:
        key = image.path.parent.name
    owners = disk_owners(image)
    facts = ImageFacts("rootfs", reference, key=key, owners=owners is not None, config=_config(image))
    if key and not include:
        return facts, None
    size, content = rootfs.measure(image.path, owners=owners or False)
    return replace(facts, content=content), size


def _config(image: ResolvedImage) -> str:
    return "" if image.config is None else image.config.to_json().decode()


def _pieces(opened: Opened, member: Member) -> Generator[bytes, None, None]:
    fd = os.open(member.name, FILE, dir_fd=opened.fd)
    try:
        while piece := os.read(fd, _PIECE):
            yield piece
    finally:
        os.close(fd)


def _checked(pieces: Generator[bytes, None, None], member: Member, work: Work) -> Generator[bytes, None, None]:
    """The same bytes. Never more than were promised; an error if they are others. The file that they come from is
    closed when this ends: what is kept of an error would keep it open, and it is deleted next."""
    hashed, left = hashlib.sha256(), member.bytes
    with closing(pieces):
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                break
            hashed.update(piece)
            work.step(len(piece))
            yield piece
    if left or hashed.hexdigest() != member.sha256:
        if member.name == layout.IMAGE_MEMBER:
            raise rootfs.changed("some file in it")
        raise SnapshotDamaged(f"the saved state is damaged: {member.name} is not what was written")


class _Sink:
    """Packs, hashes and writes what it is given."""

    def __init__(self, fd: int) -> None:
        import zstandard

        self._fd = fd
        self._hash = hashlib.sha256()
        packer = zstandard.ZstdCompressor(level=_LEVEL, threads=_THREADS, write_checksum=True)
        self._packer: Any = packer.compressobj()
        self._put(layout.mark())

    def member(self, name: str, size: int, pieces: Iterable[bytes], created_at: float) -> None:
        self._pack(tarwrite.header(name.encode("ascii"), size=size, mtime_ns=int(created_at) * 10**9))
        for piece in pieces:
            self._pack(piece)
        self._pack(tarwrite.padding(size))

    def finish(self) -> None:
        self._pack(tarwrite.END)
        self._put(self._packer.flush())
        self._put(layout.trailer(self._hash.digest()))

    def _pack(self, data: bytes) -> None:
        self._put(self._packer.compress(data))

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        write_all(self._fd, data)
