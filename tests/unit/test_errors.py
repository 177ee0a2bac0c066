"""The error tree: as drawn in its docstring, complete, and the same on both sides of a process border."""

from __future__ import annotations

import errno
import json
import pickle
import re

import pytest

from sloplet import errors
from sloplet.errors import FileError, SlopletError, file_error, from_dict
from sloplet.wire.failures import close_error
from sloplet.wire.fields import Fields
from sloplet.wire.mux import request
from sloplet.wire.schema import Op, Tag

pytestmark = pytest.mark.anyone


def _drawn() -> dict[str, tuple[str, str]]:
    """Name -> (parent, builtin base) as the docstring draws it."""
    found: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?: \((\w+)\))?", line)
        if not match:
            continue
        depth = len(match[1]) // 4
        path = [*path[:depth], match[2]]
        found[match[2]] = (path[depth - 1] if depth else "", match[3] or "")
    return found


def _classes() -> dict[str, type[SlopletError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, SlopletError) and value.__module__ == errors.__name__
    }


def test_the_drawing_is_the_tree() -> None:
    drawn, classes = _drawn(), _classes()
    assert set(drawn) == set(classes)
    for name, (parent, builtin) in drawn.items():
        cls = classes[name]
        if parent:
            assert issubclass(cls, classes[parent]), f"{name} is not a {parent}"
        builtins = {
            base.__name__ for base in cls.__mro__ if base.__module__ == "builtins" and base not in SlopletError.__mro__
        }
        if builtin:
            assert builtin in builtins, f"{name} is drawn as a {builtin}"


@pytest.mark.parametrize("name", sorted(_classes()))
def test_across_a_border(name: str) -> None:
    cls = _classes()[name]
    original = cls("what happened", hint="do this")
    if isinstance(original, FileError):
        original.errno = 28
    rebuilt = from_dict(json.loads(json.dumps(original.to_dict())))
    assert type(rebuilt) is cls
    assert str(rebuilt) == str(original) == "what happened (do this)"
    assert rebuilt.to_dict() == original.to_dict()
    copied = pickle.loads(pickle.dumps(original))
    assert type(copied) is cls
    assert str(copied) == str(original)
    assert getattr(copied, "errno", None) == getattr(original, "errno", None)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"error": "SystemExit"},
        {"error": "os.system"},
        {"error": 7},
        {"error": None, "message": None},
        {"error": "KeyError"},
    ],
)
def test_nothing_but_the_tree_is_made(data: dict[str, object]) -> None:
    assert type(from_dict(data)) is SlopletError


@pytest.mark.parametrize(
    ("number", "builtin"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EEXIST, FileExistsError),
        (errno.ENOTEMPTY, FileExistsError),
        (errno.EACCES, PermissionError),
        (errno.EPERM, PermissionError),
        (errno.EROFS, PermissionError),
        (errno.EISDIR, IsADirectoryError),
        (errno.ENOTDIR, NotADirectoryError),
        (errno.ENOSPC, errors.DiskFull),
        (errno.EDQUOT, errors.DiskFull),
        (errno.EIO, OSError),
        (0, OSError),
        (-5, OSError),
        (10**9, OSError),
    ],
)
def test_file_errors(number: int, builtin: type[Exception]) -> None:
    error = file_error(number, "text")
    assert isinstance(error, builtin)
    assert isinstance(error, FileError)
    assert error.errno == number


@pytest.mark.parametrize(
    ("op", "number", "what", "kind"),
    [
        (Op.EXEC, errno.ENOENT, "command", errors.CommandNotFound),
        (Op.EXEC, errno.ENOTDIR, "command", errors.CommandNotFound),
        (Op.EXEC, errno.EACCES, "command", errors.CommandNotExecutable),
        (Op.EXEC, errno.ENOEXEC, "command", errors.CommandNotExecutable),
        (Op.EXEC, errno.ELOOP, "cwd", errors.WorkdirInvalid),
        (Op.EXEC, errno.ESRCH, "user", errors.UserNotFound),
        (Op.READ, errno.ESRCH, "user", errors.UserNotFound),
        (Op.EXEC, errno.EAGAIN, "", errors.ProcessLimit),
        (Op.EXEC, errno.E2BIG, "", errors.CommandError),
        (Op.ATTACH, errno.ESRCH, "", errors.ProcessNotFound),
        (Op.SIGNAL, errno.ESRCH, "", errors.ProcessNotFound),
        (Op.READ, errno.ENOENT, "path", FileNotFoundError),
        (Op.WATCH, errno.EMFILE, "", FileError),
        (Op.METRICS, errno.EIO, "", errors.SandboxError),
        (Op.EXEC, -(2**63), "nonsense", errors.CommandError),
        (Op.STAT, 2**63 - 1, "", FileError),
    ],
)
def test_from_the_agent(op: Op, number: int, what: str, kind: type[Exception]) -> None:
    close = Fields((Tag.ERRNO, number), (Tag.MESSAGE, b"bad \xff\x1b[31m"), (Tag.WHAT, what))
    error = close_error(request(op), close)
    assert isinstance(error, kind)
    assert str(error).isprintable()
