"""In a fresh network namespace: loopback up, and every address of IPv4 and IPv6 a local one (what ip(8) calls
``ip route add local default dev lo``), by netlink, so that no tool need be installed."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_RTM_NEWROUTE = 24
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_CREATE = 0x1, 0x4, 0x400
_RTA_OIF = 4
_RT_TABLE_LOCAL, _RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL = 255, 3, 254, 2


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def everything_is_local() -> None:
    _local_default(socket.AF_INET)
    if has_ipv6():
        _local_default(socket.AF_INET6)


def has_ipv6() -> bool:
    return os.path.exists("/proc/sys/net/ipv6")


def _local_default(family: int) -> None:
    interface = struct.pack("=HHI", 8, _RTA_OIF, socket.if_nametoindex("lo"))
    route = struct.pack("=BBBBBBBBI", family, 0, 0, 0, _RT_TABLE_LOCAL, _RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL, 0)
    size = 16 + len(route) + len(interface)
    flags = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_CREATE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("=IHHII", size, _RTM_NEWROUTE, flags, 1, 0) + route + interface)
        code: int = struct.unpack_from("=i", netlink.recv(4096), 16)[0]
    if code:
        raise OSError(-code, f"route for family {family}: {os.strerror(-code)}")
