"""The near side: the client, run by ``python3 -c`` with this file's text, inside a sandbox and outside alike. Standard
library only. Prints one JSON object.

    download HOST PORT BYTES     seconds from the request to the last byte
    connect HOST PORT TIMES      seconds from connect() to the first byte, each; the name is looked up before
    resolve HOST PORT TIMES      the same with the name looked up each time
    together HOST PORT COUNT     that many connections, all open before a byte is sent; how many echoes are right
    dawdle HOST PORT COUNT SECONDS     that many connections with a flood each, of which little is read
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable

Answer = dict[str, object]
Address = tuple[str, int]


def look_up(host: str, port: int) -> Address:
    found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    return str(found[0]), int(found[1])


def download(host: str, port: int, count: int) -> Answer:
    buffer = bytearray(1 << 18)
    with socket.create_connection(look_up(host, port)) as server:
        began = time.perf_counter()
        server.sendall(b"%d\n" % count)
        seen = 0
        while got := server.recv_into(buffer):
            seen += got
        return {"seconds": time.perf_counter() - began, "bytes": seen}


def first_byte(address: Address) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.connect(address)
        if server.recv(1) != b"!":
            raise SystemExit("no greeting")


def connect(host: str, port: int, times: int, *, anew: bool = False) -> Answer:
    address = look_up(host, port)
    samples = []
    for _ in range(times):
        began = time.perf_counter()
        first_byte(look_up(host, port) if anew else address)
        samples.append(time.perf_counter() - began)
    return {"samples": samples}


def together(host: str, port: int, count: int) -> Answer:
    address = look_up(host, port)
    began = time.perf_counter()
    servers: list[tuple[int, socket.socket]] = []
    errors: list[str] = []
    for number in range(count):
        try:
            servers.append((number, socket.create_connection(address, timeout=30)))
        except OSError as error:
            errors.append(str(error))
    for number, server in servers:
        server.sendall(b"%08d" % number)
    good = 0
    for number, server in servers:
        try:
            got = b""
            while len(got) < 8 and (piece := server.recv(8 - len(got))):
                got += piece
            good += got == b"%08d" % number
        except OSError as error:
            errors.append(str(error))
        server.close()
    return {"good": good, "seconds": time.perf_counter() - began, "errors": sorted(set(errors))[:3]}


def dawdle(host: str, port: int, count: int, seconds: int) -> Answer:
    address = look_up(host, port)
    servers = [socket.create_connection(address) for _ in range(count)]
    for server in servers:
        server.sendall(b"%d\n" % (1 << 34))
    until, seen = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for server in servers:
            seen += len(server.recv(1024))
        time.sleep(0.05)
    return {"bytes": seen}


def main() -> None:
    what, host, port, *numbers = sys.argv[1:]
    jobs: dict[str, Callable[..., Answer]] = {
        "download": download,
        "connect": connect,
        "resolve": lambda *given: connect(*given, anew=True),
        "together": together,
        "dawdle": dawdle,
    }
    print(json.dumps(jobs[what](host, int(port), *map(int, numbers))))


main()
