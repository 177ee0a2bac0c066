"""Connections through a SOCKS5 proxy (RFC 1928, and 1929 for users). Nothing of a password is in any error."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from .addresses import parse, special
from .channel import Refused
from .policy import Policy
from .tie import close_socket

if TYPE_CHECKING:
    from .egress import Egress

_TRIES = 4  # of the proxy's addresses
_REPLIES = {
    1: (errno.EIO, "it failed"),
    2: (errno.EACCES, "its rules do not allow it"),
    3: (errno.ENETUNREACH, "it cannot reach that network"),
    4: (errno.EHOSTUNREACH, "it cannot reach that host"),
    5: (errno.ECONNREFUSED, "the connection was refused"),
    6: (errno.ETIMEDOUT, "it took too long"),
    7: (errno.EOPNOTSUPP, "it does not make connections"),
    8: (errno.EAFNOSUPPORT, "it does not know that kind of address"),
}


async def dial(egress: Egress, policy: Policy, host: str, port: int) -> socket.socket:
    """A socket to there, through the egress's proxy. ``host``: an address, or a name that the proxy is to resolve.
    OSError; Refused: the proxy itself must not be dialled, or its password is missing."""
    injected = egress.injected
    proxy = injected.proxy
    assert proxy is not None
    password = injected.password()
    literal = parse(proxy.host) is not None
    found = [proxy.host] if literal else await egress.resolver.resolve(proxy.host)
    if not found:
        raise OSError(errno.EHOSTUNREACH, f"the proxy: there is no name {proxy.host}")
    failure: OSError | Refused | None = None
    for address in found[:_TRIES]:
        try:
            _check(egress, policy, address, proxy.port)
            sock = await egress.upstream.connect(address, proxy.port)
        except (OSError, Refused) as error:
            failure = failure or error
            continue
        try:
            await connect(sock, host, port, proxy.user, password)
        except BaseException:
            close_socket(sock, reset=True)
            raise
        return sock
    if isinstance(failure, OSError):
        raise OSError(failure.errno or errno.EIO, f"the proxy {proxy.host}: {failure.strerror}") from failure
    assert failure is not None
    raise failure


def _check(egress: Egress, policy: Policy, address: str, port: int) -> None:
    """Refused if it is private, or this machine's own, and no rule by address opens that."""
    parsed = parse(address)
    found = None if parsed is None else special(parsed)
    if parsed is None or (found is not None and policy.judge_address(address, port).allow is not True):
        raise Refused(f"the proxy is at {address}, which is {found.what if found else 'no address'}; no rule opens it")
    if egress.upstream.is_own(address) and (refusal := policy.check_own("", address, port)) is not None:
        raise Refused(f"the proxy: {refusal.reason}")


async def connect(sock: socket.socket, host: str, port: int, user: str, password: str) -> None:
    """Make the proxy at the other end connect to there. Not a byte is read that comes after its answer."""
    await _send(sock, b"\x05\x02\x00\x02" if user else b"\x05\x01\x00")
    version, method = await _read(sock, 2)
    if version != 5 or method not in (0, 2) or (method == 2 and not user):
        what = "wants a user" if (version, method) == (5, 0xFF) and not user else "does not speak SOCKS5 as we do"
        raise OSError(errno.EPROTO if version != 5 else errno.EACCES, f"the proxy {what}")
    if method == 2:
        name, word = user.encode(), password.encode()
        await _send(sock, b"\x01" + bytes([len(name)]) + name + bytes([len(word)]) + word)
        if (await _read(sock, 2))[1] != 0:
            raise OSError(errno.EACCES, "the proxy does not take its user and password")
    await _send(sock, b"\x05\x01\x00" + _place(host) + port.to_bytes(2, "big"))
    version, code, _, kind = await _read(sock, 4)
    if version != 5:
        raise OSError(errno.EPROTO, "the proxy does not speak SOCKS5")
    if code:
        number, words = _REPLIES.get(code, (errno.EIO, f"answer {code}"))
        raise OSError(number, f"the proxy: {words}")
    size = {1: 4, 4: 16}.get(kind)
    if size is None:
        if kind != 3:
            raise OSError(errno.EPROTO, "the proxy does not speak SOCKS5")
        size = (await _read(sock, 1))[0]
    await _read(sock, size + 2)


def _place(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("ascii")
        return b"\x03" + bytes([len(name)]) + name
    return (b"\x01" if address.version == 4 else b"\x04") + address.packed


async def _send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not piece:
            raise OSError(errno.ECONNRESET, f"the proxy: {os.strerror(errno.ECONNRESET)}")
        data += piece
    return data
