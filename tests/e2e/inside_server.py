"""A server that tests run inside a sandbox (``python3 -c`` of this text): good pages, WebSocket, and lies.

Everything by hand on raw sockets, so that it can also do what no HTTP library would.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
import sys
from collections.abc import Awaitable, Callable

GO = asyncio.Event()
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter

#: What it answers to GET /lie/NAME, byte for byte; then it closes.
LIES: dict[str, bytes] = {
    "garbage": bytes(range(256)) * 8,
    "nothing": b"",
    "no-status": b"HELLO\r\n\r\n",
    "half": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
    "half-chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "both-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "bad-length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "huge-length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "bad-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "gzip-chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "control": b"HTTP/1.1 200 OK\r\nX-Bad: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "nul": b"HTTP/1.1 200 OK\r\nX-Bad: a\0b\r\nContent-Length: 0\r\n\r\n",
    "cr": b"HTTP/1.1 200 OK\r\nX-Bad: a\rInjected: 1\r\nContent-Length: 0\r\n\r\n",
    "spaced-name": b"HTTP/1.1 200 OK\r\nX-Bad : a\r\nContent-Length: 0\r\n\r\n",
    "status-999": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    "status-099": b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nsecret tunnel",
    "endless-1xx": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000,
    "many-headers": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 5000 + b"Content-Length: 0\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "ftp": b"220 ready\r\n",
}


async def serve(reader: Reader, writer: Writer) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            method, target, _ = first.split(" ")
            headers = [(line.split(":", 1)[0].lower(), line.split(":", 1)[1].strip()) for line in lines]
            if not await answer(method, target, headers, reader, writer):
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def body_of(headers: list[tuple[str, str]], reader: Reader) -> bytes:
    known = dict(headers)
    if known.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return b"".join(parts)
    return await reader.readexactly(int(known.get("content-length", 0)))


def reply(writer: Writer, body: bytes, *more: str, status: str = "200 OK") -> None:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more, "", ""]
    writer.write("\r\n".join(lines).encode("latin-1") + body)


REPORT: list[str] = []
SEEN = {"connections": 0, "early": 0, "cut": 0}


async def answer(method: str, target: str, headers: list[tuple[str, str]], reader: Reader, writer: Writer) -> bool:
    path = target.split("?")[0]
    if path.startswith("/lie/"):
        writer.write(LIES[path[5:]])
        await writer.drain()
        return False
    if path == "/endless":
        writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
    if path == "/ws" or path.startswith("/wslie"):
        await websocket(path, headers, reader, writer)
        return False
    if path == "/early":  # an answer before the body
        reply(writer, b"no", status="413 Too Large")
        await writer.drain()
        SEEN["early"] = len(await reader.read(65536))
        return False
    if dict(headers).get("expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await body_of(headers, reader)
    if path == "/echo":
        told = {"method": method, "target": target, "headers": headers, "length": len(body)}
        reply(writer, json.dumps({**told, "sha256": hashlib.sha256(body).hexdigest()}).encode())
    elif path == "/report":
        REPORT.extend([body.decode()] if method == "POST" else [])
        reply(writer, json.dumps(REPORT).encode())
    elif path == "/seen":
        reply(writer, json.dumps(SEEN).encode())
    elif path == "/page":
        reply(writer, PAGE, "Content-Type: text/html")
    elif path == "/cookies":
        reply(writer, b"", "Set-Cookie: app=1; Domain=localhost; Path=/", "Set-Cookie: sloplet-token=stolen",
              "Alt-Svc: h3=\":1\"", "Strict-Transport-Security: max-age=99", "Sloplet-Request-Id: fake",
              "Trailer: x")  # fmt: skip
    elif path == "/big":
        size = int(target.split("?")[1])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        block = bytes(range(256)) * 256
        for at in range(0, size, len(block)):
            writer.write(block[: size - at])
            await writer.drain()
    elif path == "/chunked":
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b"one", b"two", b"three"):
            writer.write(b"%x;ext=1\r\n%s\r\n" % (len(part), part))
        writer.write(b"0\r\nX-Trailer: 1\r\n\r\n")
    elif path == "/until-close":
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")
        return False
    elif path == "/events":
        GO.clear()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: first\n\n")
        await writer.drain()
        await GO.wait()
        writer.write(b"data: second\n\n")
        return False
    elif path == "/go":
        GO.set()
        reply(writer, b"")
    elif path == "/hang":
        try:
            await reader.read(1)
        finally:
            SEEN["cut"] += 1
        return False
    elif path == "/204":
        writer.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 7\r\n\r\n")
    elif path == "/304":
        writer.write(b'HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\nETag: "x"\r\n\r\n')
    else:
        reply(writer, b"not here", status="404 Not Found")
    await writer.drain()
    return True


PAGE = b"""<!doctype html><title>inside</title><script>
const told = [];
function done() { fetch("/report", {method: "POST", body: told.join(" ")}); }
(async () => {
  told.push("query=" + (location.search || "none"), "cookie=" + (document.cookie || "none"));
  const echo = await (await fetch("/echo", {method: "POST", body: "abc"})).json();
  told.push("fetch=" + echo.length);
  const socket = new WebSocket("ws://" + location.host + "/ws", ["chat"]);
  socket.onmessage = event => { told.push("ws=" + event.data + "/" + socket.protocol); socket.close(4000); };
  socket.onclose = event => { told.push("closed=" + event.code); done(); };
  socket.onopen = () => socket.send("hello");
})();
</script>"""


# -- WebSocket -------------------------------------------------------------------------


def frame(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    first = (0x80 if fin else 0) | opcode
    if len(data) < 126:
        return bytes([first, len(data)]) + data
    if len(data) < 65536:
        return bytes([first, 126]) + struct.pack(">H", len(data)) + data
    return bytes([first, 127]) + struct.pack(">Q", len(data)) + data


async def read_frame(reader: Reader) -> tuple[int, bytes]:
    first, second = await reader.readexactly(2)
    assert second & 0x80, "a client masks"
    size = second & 0x7F
    if size == 126:
        (size,) = struct.unpack(">H", await reader.readexactly(2))
    elif size == 127:
        (size,) = struct.unpack(">Q", await reader.readexactly(8))
    mask = await reader.readexactly(4)
    data = bytearray(await reader.readexactly(size))
    for each in range(4):
        data[each::4] = bytes(byte ^ mask[each] for byte in data[each::4])
    return first & 15, bytes(data)


async def storm(writer: Writer) -> None:
    """Pings, for as long as somebody is there."""
    while not writer.is_closing():
        writer.write(frame(9, b"ping" * 20))
        await writer.drain()
        await asyncio.sleep(0)


async def websocket(path: str, headers: list[tuple[str, str]], reader: Reader, writer: Writer) -> None:
    known = dict(headers)
    if path == "/wslie-login":
        reply(writer, b"log in first", "X-Why: login", status="401 Unauthorized")
        return
    accept = base64.b64encode(
        hashlib.sha1(known["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    ).decode()
    if path == "/wslie-accept":
        accept = "nonsense"
    lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Accept: {accept}", "Set-Cookie: ws=1; Domain=localhost"]
    if path == "/wslie-extension":
        lines.append("Sec-WebSocket-Extensions: permessage-deflate")
    if path == "/wslie-protocol":
        lines.append("Sec-WebSocket-Protocol: never-offered")
    elif "sec-websocket-protocol" in known:
        lines.append("Sec-WebSocket-Protocol: " + known["sec-websocket-protocol"].split(",")[0].strip())
    writer.write("\r\n".join([*lines, "", ""]).encode())
    if path == "/wslie-masked":
        writer.write(b"\x81\x85\0\0\0\0hello")
    elif path == "/wslie-utf8":
        writer.write(frame(1, b"\xff\xfe"))
    elif path == "/wslie-huge":
        writer.write(b"\x82\x7f" + struct.pack(">Q", 1 << 40))
    elif path == "/wslie-empty-parts":
        writer.write(frame(1, b"", fin=False) + frame(0, b"", fin=False) * 100_000 + frame(0, b"end"))
    elif path == "/wslie-gone":
        writer.write(frame(1, b"bye"))
        writer.transport.abort()
        return
    storming: list[asyncio.Task[None]] = []
    while True:
        opcode, data = await read_frame(reader)
        if opcode == 8:
            SEEN["closed"] = int.from_bytes(data[:2], "big")
            writer.write(frame(8, data))
            return
        if data == b"close 4001":
            writer.write(frame(8, struct.pack(">H", 4001) + b"as asked"))
        elif data == b"close":
            writer.write(frame(8, b""))
        elif data == b"storm":
            storming.append(asyncio.ensure_future(storm(writer)))
        elif data == b"headers":
            writer.write(frame(1, json.dumps(headers).encode()))
        elif data == b"parts":
            writer.write(frame(9, b"ping") + frame(1, b"a", fin=False) + frame(0, b"b", fin=False) + frame(0, b"c"))
        elif opcode in (1, 2):
            writer.write(frame(opcode, data))
        await writer.drain()


async def main() -> None:
    Handler = Callable[[Reader, Writer], Awaitable[None]]

    async def counted(reader: Reader, writer: Writer) -> None:
        SEEN["connections"] += 1
        await serve(reader, writer)

    handler: Handler = counted
    server = await asyncio.start_server(handler, "127.0.0.1", int(sys.argv[1]), limit=1 << 20)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
