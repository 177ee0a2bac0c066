"""The far side, a process of its own: ``python -m sloplet.testing.bench.net.far``. It prints the ports of its servers
as JSON and ends when its stdin does. Everything is on 127.0.0.1.

flood: one line, a number of bytes, then that many bytes. Closes.
greet: one byte at once. Closes when the client has.
echo:  every byte back.
relay: a bare Python relay to flood, as plain as can be: what a proxy in Python costs before it does anything.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable

_PIECE = bytes(1 << 20)
_BUFFER = 65536


def _flood(client: socket.socket) -> None:
    line = b""
    while not line.endswith(b"\n"):
        got = client.recv(64)
        if not got:
            return
        line += got
    left = int(line)
    while left:
        count = min(left, len(_PIECE))
        client.sendall(_PIECE[:count] if count < len(_PIECE) else _PIECE)
        left -= count


def _greet(client: socket.socket) -> None:
    client.sendall(b"!")
    client.recv(1)


def _echo(client: socket.socket) -> None:
    while data := client.recv(_BUFFER):
        client.sendall(data)


def _relay_to(port: int) -> Callable[[socket.socket], None]:
    def relay(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=_copy, args=(client, server), daemon=True)
            back.start()
            _copy(server, client)
            back.join()

    return relay


def _copy(source: socket.socket, target: socket.socket) -> None:
    buffer = bytearray(_BUFFER)
    view = memoryview(buffer)
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(view[:count])
        target.shutdown(socket.SHUT_WR)


def _serve(job: Callable[[socket.socket], None]) -> int:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)

    def one(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            job(client)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=one, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def main() -> None:
    threading.stack_size(256 * 1024)
    if sys.argv[1:2] == ["relay"]:  # a process of its own, as a proxy is
        ports = {"relay": _serve(_relay_to(int(sys.argv[2])))}
    else:
        ports = {"flood": _serve(_flood), "greet": _serve(_greet), "echo": _serve(_echo)}
    print(json.dumps(ports), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
