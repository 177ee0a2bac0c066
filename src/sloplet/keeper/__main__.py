"""``python -m sloplet.keeper``: the keeper of this SLOPLET_HOME, in the foreground.

Programs start it with ``--detach FD`` when they first need it (launch.py): it then forks into the background and
tells on FD when it listens, or why it cannot. SIGTERM ends it and its sandboxes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sloplet.state.home import Home
    from sloplet.state.locks import FileLock

_LOCK_WAIT = 20.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sloplet.keeper", description="Holds the sandboxes of this SLOPLET_HOME.")
    parser.add_argument("--detach", type=int, metavar="FD", help="go into the background and tell on FD when ready")
    options = parser.parse_args(argv)
    fd: int | None = options.detach
    if fd is not None and os.fork():
        os._exit(0)
    if fd is not None:
        os.set_inheritable(fd, False)
    if not __package__:  # run by path: the package must be importable, without shadowing anything
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from sloplet.errors import SlopletError
    from sloplet.state.home import Home

    try:
        home = Home().open()
        lock = _take_lock(home)
        if lock is None:
            _tell(fd, {"busy": True})
            return 0
        try:
            _serve(home, fd)
        finally:
            lock.release()
    except SlopletError as error:
        _tell(fd, {"error": error.to_dict()})
        print(f"sloplet.keeper: {error}", file=sys.stderr)
        return 1
    return 0


def _take_lock(home: Home) -> FileLock | None:
    """Be the one keeper. None if there is another that serves; one that is leaving is waited for."""
    import time

    from sloplet.errors import KeeperError
    from sloplet.keeper import keeper_lock
    from sloplet.keeper.launch import listens
    from sloplet.state.locks import FileLock

    deadline = time.monotonic() + _LOCK_WAIT
    while (lock := FileLock.take(keeper_lock(home))) is None:
        if listens(home.socket_path()):
            return None
        if time.monotonic() > deadline:
            raise KeeperError(
                "another keeper holds this SLOPLET_HOME, but does not listen", hint="end it: see `ps -C sloplet-keeper`"
            )
        time.sleep(0.02)
    return lock


def _serve(home: Home, fd: int | None) -> None:
    import asyncio
    import signal

    from sloplet.keeper.process import Log, settings, settle
    from sloplet.keeper.server import Server
    from sloplet.runtime import Runtime

    settle()
    idle = settings()
    log = Log(home, own_file=fd is not None)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log.exception)
        server = Server(home, Runtime(home, holder="keeper"), idle=idle, log=log)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop, f"its keeper was ended ({signal.Signals(number).name})")
        await server.run(lambda: _tell(fd, {"ready": os.getpid()}))

    from sloplet import __version__

    log(f"keeper of {home.path}, sloplet {__version__}")
    asyncio.run(serve())
    log("gone")


def _tell(fd: int | None, what: dict[str, Any]) -> None:
    """One line to whoever started us; they may have died meanwhile."""
    if fd is not None:
        try:
            os.write(fd, json.dumps(what).encode() + b"\n")
            os.close(fd)
        except OSError:
            pass


if __name__ == "__main__":
    sys.exit(main())
