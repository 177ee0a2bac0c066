"""Out of a sandbox, which is hostile, onto the host."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .. import fs
from ..errors import FileError, FileExists, FileIsDirectory, FileMissing, FileNotDirectory
from ..files import AsyncFiles
from ..results import FileInfo, Progress
from .common import DIR, Meter, OnProgress, host_errors, host_path, in_parallel, opened, stays_inside

if TYPE_CHECKING:
    from ..s3.settings import S3

MAX_DOWNLOAD = 64 * 2**30


async def download(
    files: AsyncFiles,
    source: str,
    target: str | os.PathLike[str],
    on_progress: OnProgress | None = None,
    *,
    max_bytes: int = MAX_DOWNLOAD,
    s3: S3 | None = None,
) -> Progress:
    """Copy a sandbox's file or directory out, also to an ``s3://`` URL. A file goes to ``target``, or into it if it is
    a directory; of a directory the content goes into ``target``, which is made if missing. More than ``max_bytes`` is
    an error."""
    if isinstance(target, str) and target.startswith("s3://"):
        from ..s3.put import put

        return await put(files, source, target, s3, on_progress, max_bytes=max_bytes)
    path = host_path(target, s3)
    info = await files.stat(source)
    if info.is_dir:
        found = await files.list(source, recursive=True)
        with host_errors(path):
            os.makedirs(path, exist_ok=True)
            with opened(path, DIR) as root:
                return await _Download(files, source, root, found, on_progress, max_bytes).run()
    if not info.is_file:
        raise FileError(f"{source} is neither a file nor a directory", errno=errno.EINVAL)
    with host_errors(path):
        if os.path.isdir(path):
            folder, name = path, source.rstrip("/").rpartition("/")[2]
        else:
            folder, name = os.path.dirname(path) or ".", os.path.basename(path)
            if not name:
                raise FileMissing(f"on this machine: there is no directory {path}", errno=errno.ENOENT)
        single = FileInfo(name, "file", info.size, info.mode, info.uid, info.gid, info.modified)
        with opened(folder, DIR) as root:
            job = _Download(files, source, root, [single], on_progress, max_bytes, whole=source)
            return await job.run()


class _Download:
    """One download of a tree (or of one file: then ``whole`` is its path in the sandbox)."""

    def __init__(
        self,
        files: AsyncFiles,
        source: str,
        root: int,
        found: list[FileInfo],
        on_progress: OnProgress | None,
        max_bytes: int,
        whole: str | None = None,
    ) -> None:
        self.files = files
        self.source = source.rstrip("/") or "/"
        self.root = root
        self.whole = whole
        self.left = max_bytes
        self.max_bytes = max_bytes
        self.found = found
        self.made: set[tuple[int, int]] = set()  # what this download has put there: device and inode
        regular = [item for item in found if item.is_file]
        self.meter = Meter(on_progress, len(regular), sum(max(0, item.size) for item in regular))

    async def run(self) -> Progress:
        for item in self.found:
            _check_name(item.name)
        folders = sorted(item.name for item in self.found if item.is_dir)
        for name in folders:
            self.make_folder(name)
        await in_parallel([item for item in self.found if item.is_file], self.one)
        for item in self.found:
            if item.type == "symlink":
                self.link(item)
            elif item.type not in ("file", "dir"):
                self.meter.skip(item.name)
        modes = {item.name: item.mode for item in self.found if item.is_dir}
        for name in reversed(folders):
            with suppress(FileNotFoundError), self.folder(name) as fd:
                os.fchmod(fd, modes[name] & 0o777 | 0o700)
        return self.meter.done(self.source, last=True, count=False)

    @contextmanager
    def folder(self, name: str) -> Iterator[int]:
        """A directory of the target, never through a link."""
        try:
            fd = fs.open_in(self.root, name or ".", DIR | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise FileNotDirectory(
                    f"{name!r} is a directory in the sandbox, and there is a file or a link of that name here",
                    hint="download into an empty directory", errno=errno.ENOTDIR,
                ) from None  # fmt: skip
            raise
        try:
            yield fd
        finally:
            os.close(fd)

    def make_folder(self, name: str) -> None:
        above, _, last = name.rpartition("/")
        with self.folder(above) as fd:
            with suppress(FileExistsError):
                os.mkdir(last, 0o700, dir_fd=fd)
                self.note(fd, last)
                return
            self.refuse_twin(fd, last, name)
        with self.folder(name):
            pass

    def note(self, fd: int, name: str) -> None:
        info = os.lstat(name, dir_fd=fd)
        self.made.add((info.st_dev, info.st_ino))

    def refuse_twin(self, fd: int, last: str, name: str) -> os.stat_result | None:
        """What is there now; FileExists if this very download has put it there under another spelling."""
        try:
            info = os.lstat(last, dir_fd=fd)
        except FileNotFoundError:
            return None
        if (info.st_dev, info.st_ino) in self.made:
            raise FileExists(
                f"{name!r} and another name of the sandbox are the same on this machine (upper and lower case?)",
                hint="rename one of them in the sandbox", errno=errno.EEXIST,
            )  # fmt: skip
        return info

    async def one(self, item: FileInfo) -> None:
        above, _, last = item.name.rpartition("/")
        with self.folder(above) as fd:
            old = self.refuse_twin(fd, last, item.name)
            if old is not None and stat.S_ISDIR(old.st_mode):
                raise FileIsDirectory(
                    f"{item.name!r} is a file in the sandbox and a directory here", hint="remove it here first",
                    errno=errno.EISDIR,
                )  # fmt: skip
            temporary = f".sloplet-{os.urandom(8).hex()}.part"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            out = os.open(temporary, flags, 0o600, dir_fd=fd)
            try:
                try:
                    await self.copy(item, out)
                    os.fchmod(out, item.mode & 0o777)
                finally:
                    os.close(out)
                self.refuse_twin(fd, last, item.name)
                os.rename(temporary, last, src_dir_fd=fd, dst_dir_fd=fd)
                self.note(fd, last)
            except BaseException as error:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=fd)
                if isinstance(error, (FileMissing, FileIsDirectory, FileNotDirectory)) and self.whole is None:
                    self.meter.skip(item.name)  # the tree changed since it was listed
                    return
                raise
        self.meter.done(item.name)

    async def copy(self, item: FileInfo, out: int) -> None:
        path = self.whole if self.whole is not None else f"{self.source}/{item.name}"
        async for piece in self.files.stream(path):
            self.left -= len(piece)
            if self.left < 0:
                raise FileError(
                    f"the download is larger than {self.max_bytes} bytes; it stopped in {item.name!r}",
                    hint="download less at once", errno=errno.EFBIG,
                )  # fmt: skip
            fs.write_all(out, piece)
            self.meter.moved(item.name, len(piece))

    def link(self, item: FileInfo) -> None:
        text = item.target or ""
        if not stays_inside(item.name, text):
            self.meter.skip(item.name)
            return
        above, _, last = item.name.rpartition("/")
        with self.folder(above) as fd:
            old = self.refuse_twin(fd, last, item.name)
            if old is not None and not stat.S_ISLNK(old.st_mode):
                raise FileExists(
                    f"{item.name!r} is a link in the sandbox and something else here", hint="remove it here first",
                    errno=errno.EEXIST,
                )  # fmt: skip
            temporary = f".sloplet-{os.urandom(8).hex()}.part"
            os.symlink(text, temporary, dir_fd=fd)
            os.rename(temporary, last, src_dir_fd=fd, dst_dir_fd=fd)
            self.note(fd, last)


def _check_name(name: str) -> None:
    """A listed name is a relative path below what was listed, or the sandbox lies."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 for part in parts):
        raise FileError(f"the sandbox names a file {name[:200]!r}, which is not a name", errno=errno.EINVAL)
