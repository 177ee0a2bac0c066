"""SLOPLET_HOME: where it is, who may own it, and the folders in it.

::

    state.db            the store (store.py)
    sandboxes/OWNER/ID  the place of a sandbox, below the token of the process that holds it
    images/             unpacked images (images/resolve.py)
    snapshots/ID        saved states (snapshots.py)
    network/ID.jsonl    what was decided about a named sandbox's connections (network/log.py)
    ca/master.key       what the certificate authorities of sandboxes are derived from (network/authority.py)
    volumes/NAME        named volumes (volumes/records.py)
    cache/              what may be deleted at any time
    run/                locks and sockets of running processes
    server/             keys and records of `sloplet serve` (server/)
    tenants/NAME        the homes of a server's tenants: each like this one, with a keeper of its own

Nothing is touched before ``open``. A home that someone else owns or may write is refused: whoever
writes there chooses what our sandboxes run on.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from ..errors import StateUnwritable
from ..fs import remove_tree

#: Ids are made by ``new_id``; everything that becomes part of a path is checked against this.
ID_RE = re.compile(r"[a-z0-9][a-z0-9-]{3,39}\Z")
#: The name of a tenant: also a part of a path.
TENANT_RE = re.compile(r"[a-z0-9][a-z0-9-]{0,38}\Z")
_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 of them
_FOLDERS = ("sandboxes", "images", "cache", "run", "run/owners", "snapshots", "network", "volumes")
_SUN_PATH_MAX = 107  # sockaddr_un.sun_path is 108 bytes with its NUL


def new_id() -> str:
    """A new sandbox id: 12 letters and digits, 60 bits, never used again."""
    return "".join(_ID_LETTERS[byte & 31] for byte in os.urandom(12))


def check_id(value: str) -> str:
    """Guard for everything that becomes a path component."""
    if not ID_RE.match(value):
        raise ValueError(f"{value!r} is not an id")
    return value


def default_path() -> Path:
    """SLOPLET_HOME, else $XDG_DATA_HOME/sloplet, else ~/.local/share/sloplet."""
    if named := os.environ.get("SLOPLET_HOME"):
        return Path(named)
    shared = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(shared):  # the XDG specification: a relative one is to be ignored
        return Path(shared, "sloplet")
    try:
        return Path.home() / ".local" / "share" / "sloplet"
    except RuntimeError:
        raise StateUnwritable(
            "there is no place for Sloplet's state: this user has no home directory", hint="set SLOPLET_HOME"
        ) from None


class Home:
    """A state directory. Constructing does no I/O; ``open`` makes and checks it, once per process."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        chosen = os.fspath(default_path() if path is None else path)
        if "\0" in chosen or not chosen:
            raise StateUnwritable(f"{chosen!r} cannot be a state directory", hint="set SLOPLET_HOME to a folder")
        self.path = Path(os.path.abspath(os.path.expanduser(chosen)))
        self.database = self.path / "state.db"
        self.sandboxes = self.path / "sandboxes"
        self.images = self.path / "images"
        self.cache = self.path / "cache"
        self.snapshots = self.path / "snapshots"
        self.network = self.path / "network"
        self.volumes = self.path / "volumes"
        self.run = self.path / "run"
        self.owners = self.run / "owners"
        self._opened = False

    def __repr__(self) -> str:
        return f"Home({str(self.path)!r})"

    @property
    def main(self) -> Home | None:
        """Of a tenant's home: the server's own, whose programs and images it may use. None: it is nobody's tenant."""
        above = self.path.parent
        return Home(above.parent) if above.name == "tenants" and (above.parent / "server").is_dir() else None

    def tenant(self, name: str) -> Home:
        """The home of a tenant of a server that serves this one."""
        if not TENANT_RE.match(name):
            raise ValueError(f"{name!r} is not a tenant's name")
        return Home(self.path / "tenants" / name)

    def open(self) -> Home:
        """Make what is missing (mode 0700), refuse what is unsafe. Raises StateUnwritable; nothing is lost then."""
        if self._opened:
            return self
        try:
            try:
                check_folder(self.path)  # before anything is put into it
            except FileNotFoundError:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.mkdir(0o700, exist_ok=True)
                check_folder(self.path)
            needed = (self.network, self.snapshots, self.volumes)  # missing in a home of an older version
            if not all(folder.is_dir() for folder in needed):
                for name in _FOLDERS:
                    (self.path / name).mkdir(0o700, exist_ok=True)
            for folder in (self.snapshots, self.volumes):
                if folder.stat().st_mode & 0o077:  # a home that was copied: what sandboxes have kept lies there
                    folder.chmod(0o700)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._opened = True
        return self

    def place(self, owner: str, sandbox_id: str) -> Path:
        """Where the sandbox lives on disk. Below its owner's token, so that what a dead owner left needs no record."""
        return self.sandboxes / check_id(owner) / check_id(sandbox_id)

    def make_place(self, owner: str, sandbox_id: str) -> Path:
        """Make the sandbox's place, empty. ``Store.reserve`` comes first: intent before action."""
        place = self.place(owner, sandbox_id)
        try:
            try:
                os.mkdir(place, 0o700)
            except FileNotFoundError:
                os.makedirs(place.parent, 0o700, exist_ok=True)
                os.mkdir(place, 0o700)
        except OSError as error:
            raise unwritable(place, error) from error
        return place

    def remove_place(self, owner: str, sandbox_id: str) -> None:
        """Remove the place and all in it; no error if it is gone. ``Store.remove`` comes after it."""
        place = self.place(owner, sandbox_id)
        try:
            os.rmdir(place)  # empty, as a rule
        except FileNotFoundError:
            pass
        except OSError:
            remove_below(place.parent, place.name)

    def socket_path(self, name: str = "keeper.sock") -> Path:
        """A path for a Unix socket that fits into 107 bytes: in run/, or else in a short private folder."""
        path = self.run / name
        if len(os.fsencode(path)) <= _SUN_PATH_MAX:
            return path
        import hashlib

        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        bases = [Path(runtime, "sloplet")] if os.path.isabs(runtime) else []
        failure: Exception | None = None
        for base in [*bases, Path(f"/tmp/sloplet-{os.geteuid()}")]:
            short = base / digest / name
            if len(os.fsencode(short)) > _SUN_PATH_MAX:
                continue
            try:
                for folder in (base, base / digest):
                    try:
                        os.mkdir(folder, 0o700)
                    except FileExistsError:
                        pass
                    check_folder(folder, links=False)
            except (OSError, StateUnwritable) as error:
                failure = error
                continue
            return short
        raise StateUnwritable(
            f"{path} is too long for a Unix socket, and no short folder could be made instead ({failure})",
            hint="set SLOPLET_HOME to a shorter path",
        )


def check_folder(path: Path, *, links: bool = True) -> None:
    """Raise StateUnwritable unless ``path`` is a folder of ours that nobody else may write."""
    info = os.stat(path) if links else os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise StateUnwritable(f"{path} is not a folder", hint="move it away, or set SLOPLET_HOME to a folder")
    if info.st_uid != os.geteuid():
        raise StateUnwritable(
            f"{path} belongs to user {info.st_uid}, and this is user {os.geteuid()}",
            hint="set SLOPLET_HOME to a folder of your own",
        )
    if info.st_mode & 0o022:
        raise StateUnwritable(f"{path} may be written by other users", hint=f"run: chmod go-w '{path}'")


def remove_below(parent: Path, name: str) -> int:
    """``fs.remove_tree`` of ``parent/name``; a missing parent is nothing to do."""
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unwritable(parent, error) from error
    try:
        return remove_tree(fd, name)
    finally:
        os.close(fd)


def remove_log(home: Home, sandbox_id: str) -> None:
    """What was written of a sandbox's connections. Idempotent; what resists is the reaper's."""
    for name in (f"{check_id(sandbox_id)}.jsonl", f"{sandbox_id}.jsonl.1"):
        try:
            os.unlink(home.network / name)
        except OSError:
            pass


_ADVICE = {
    errno.EROFS: "its filesystem is read-only: set SLOPLET_HOME to a folder on a writable one",
    errno.ENOSPC: "the disk is full: free some space or set SLOPLET_HOME to another disk; nothing was lost",
    errno.EDQUOT: "your disk quota is used up: free some space or set SLOPLET_HOME elsewhere; nothing was lost",
    errno.EACCES: "it is not writable for this user: set SLOPLET_HOME to a folder of your own",
    errno.EPERM: "it is not writable for this user: set SLOPLET_HOME to a folder of your own",
    errno.ENOTDIR: "a part of that path is a file: move it away or set SLOPLET_HOME to a folder",
    errno.EMFILE: "this process has too many open files: raise the limit (`ulimit -n`)",
    errno.ENFILE: "the machine has too many open files",
}


def unwritable(path: str | os.PathLike[str], error: OSError) -> StateUnwritable:
    """The typed form of an OSError about our own files."""
    text = error.strerror or str(error)
    return StateUnwritable(f"cannot write {os.fspath(path)}: {text}", hint=_ADVICE.get(error.errno or 0))


def names_in(folder: Path) -> list[str]:
    """What lies in a folder of ours; nothing where there is none. Raises StateUnwritable."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unwritable(folder, error) from error
