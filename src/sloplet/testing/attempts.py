"""A program for inside a sandbox: makes attempts at the network and tells how each went. Plain Python, nothing else.

    python3 attempts.py '[{"way": "tcp", "to": "example.com", "port": 80, "talk": [["GET / ...", null]]}]'

One JSON object comes out for each attempt: ``error`` (an errno's name, EAI_..., SSL, TIMEOUT, or null), ``data`` (what
was received), ``ms`` (how long it took). Ways and what they take:

    tcp   to port [talk] [tls] [ca]   talk: [send, until]..., until null: to the end. tls: server name, "" sends none
    udp   to port [send]              sends and waits for an answer
    icmp  to                          an echo request, by a datagram socket
    raw   to                          a packet of protocol 253, by a raw socket
    name  to                          getaddrinfo; data: the addresses
    dns   to [type] [server] [port] [tcp]   one question; data: the addresses, code: the answer's
"""

from __future__ import annotations

import errno
import json
import socket
import ssl
import struct
import sys
import time
from typing import Any

PATIENCE = 15.0


def main() -> None:
    for attempt in json.loads(sys.argv[1]):
        began = time.monotonic()
        told: dict[str, Any] = {"error": None, "data": ""}
        try:
            WAYS[attempt["way"]](attempt, told)
        except socket.gaierror as error:
            told["error"] = next((name for name in dir(socket) if name.startswith("EAI_") and _is(name, error)), "EAI")
        except ssl.SSLError as error:
            told["error"] = "SSL " + str(error.reason)
        except socket.timeout:  # noqa: UP041 - sandboxes have older Pythons than 3.10, too
            told["error"] = "TIMEOUT"
        except OSError as error:
            told["error"] = errno.errorcode.get(error.errno or 0, str(error))
        told["ms"] = round((time.monotonic() - began) * 1000)
        print(json.dumps(told), flush=True)


def _is(name: str, error: socket.gaierror) -> bool:
    return bool(getattr(socket, name) == error.errno)


def _socket(attempt: dict[str, Any], kind: int, protocol: int = 0) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in attempt["to"] else socket.AF_INET, kind, protocol)
    made.settimeout(attempt.get("wait", PATIENCE))
    return made


def _tcp(attempt: dict[str, Any], told: dict[str, Any]) -> None:
    line = socket.create_connection((attempt["to"], attempt["port"]), attempt.get("wait", PATIENCE))
    with line:
        if attempt.get("tls") is not None:
            line = _tls(line, attempt)
        for send, until in attempt.get("talk", [["", None]]):
            line.sendall(send.encode("latin-1"))
            seen = ""
            while until is None or until not in seen:
                piece = line.recv(65536).decode("latin-1")
                seen += piece
                told["data"] += piece
                if not piece:
                    break


def _tls(line: socket.socket, attempt: dict[str, Any]) -> socket.socket:
    context = ssl.create_default_context(cafile=attempt.get("ca"))
    context.check_hostname = False
    if not attempt.get("ca"):
        context.verify_mode = ssl.CERT_NONE
    if attempt.get("alpn"):
        context.set_alpn_protocols(attempt["alpn"])
    return context.wrap_socket(line, server_hostname=attempt["tls"] or None)


def _udp(attempt: dict[str, Any], told: dict[str, Any]) -> None:
    with _socket(attempt, socket.SOCK_DGRAM) as line:
        line.connect((attempt["to"], attempt["port"]))
        line.send(attempt.get("send", "x").encode())
        told["data"] = line.recv(65536).decode("latin-1")


def _icmp(attempt: dict[str, Any], told: dict[str, Any]) -> None:
    six = ":" in attempt["to"]
    with _socket(attempt, socket.SOCK_DGRAM, 58 if six else 1) as line:
        line.sendto(struct.pack("!BBHHH", 128 if six else 8, 0, 0, 1, 1) + b"canary", (attempt["to"], 0))
        told["data"] = line.recv(65536).decode("latin-1")


def _raw(attempt: dict[str, Any], told: dict[str, Any]) -> None:
    with _socket(attempt, socket.SOCK_RAW, 253) as line:
        line.sendto(b"canary", (attempt["to"], 0))
        told["data"] = line.recv(65536).decode("latin-1")


def _name(attempt: dict[str, Any], told: dict[str, Any]) -> None:
    found = socket.getaddrinfo(attempt["to"], 80, type=socket.SOCK_STREAM)
    told["data"] = " ".join(sorted({str(each[4][0]) for each in found}))


def _dns(attempt: dict[str, Any], told: dict[str, Any]) -> None:
    labels = [label.encode() for label in attempt["to"].split(".") if label]
    question = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    question += struct.pack("!HH", attempt.get("type", 1), 1)
    message = struct.pack("!HHHHHH", 77, 0x0100, 1, 0, 0, 0) + question
    place = (attempt.get("server", "127.0.0.1"), attempt.get("port", 53))
    where = {**attempt, "to": place[0]}
    if attempt.get("tcp"):
        with _socket(where, socket.SOCK_STREAM) as line:
            line.connect(place)
            line.sendall(struct.pack("!H", len(message)) + message)
            answer = b""
            while len(answer) < 2 or len(answer) < 2 + struct.unpack("!H", answer[:2])[0]:
                piece = line.recv(65536)
                if not piece:
                    raise ConnectionResetError(errno.ECONNRESET, "closed")
                answer += piece
            answer = answer[2:]
    else:
        with _socket(where, socket.SOCK_DGRAM) as line:
            line.connect(place)
            line.send(message)
            answer = line.recv(65536)
    _, flags, _, count = struct.unpack_from("!HHHH", answer)
    told["code"], told["count"] = flags & 15, count
    rest = answer[12 + len(question) :]
    found = []
    for _ in range(count):
        kind, _, ttl, size = struct.unpack_from("!HHIH", rest, 2)  # our names are always one pointer
        data, rest = rest[12 : 12 + size], rest[12 + size :]
        if kind in (1, 28):
            found.append(socket.inet_ntop(socket.AF_INET if kind == 1 else socket.AF_INET6, data))
        told["ttl"] = ttl
    told["data"] = " ".join(found)


WAYS = {"tcp": _tcp, "udp": _udp, "icmp": _icmp, "raw": _raw, "name": _name, "dns": _dns}

if __name__ == "__main__":
    main()
