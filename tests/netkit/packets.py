"""The judge: every packet that was sent in this namespace, and what can be found in them.

A packet socket gets each packet while it is sent, so whoever asks after an exchange finds all of it. What overflowed is
counted: a judge that lost packets says so rather than that it saw nothing.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_SO_RCVBUFFORCE = 33
_MOST = 64 * 2**20

_TCP, _UDP = 6, 17


@dataclass(frozen=True)
class Packet:
    protocol: int
    source: str
    target: str
    source_port: int
    port: int
    payload: bytes
    opens: bool = False  #: a connection of TCP

    @property
    def flow(self) -> tuple[str, int, str, int, int]:
        return (self.source, self.source_port, self.target, self.port, self.protocol)

    def to_dict(self) -> dict[str, Any]:
        return {
            "protocol": {1: "icmp", _TCP: "tcp", _UDP: "udp", 58: "icmp6"}.get(self.protocol, str(self.protocol)),
            "source": self.source,
            "address": self.target,
            "source_port": self.source_port,
            "port": self.port,
            "size": len(self.payload),
        }


class Sink:
    """All packets since it was made or last cleared. Without those that only end a connection from before that, or
    acknowledge what it has sent: they come when they come."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 2**20)
        self._packets: list[Packet] = []
        self._before: set[tuple[str, int, str, int, int]] = set()  # flows of TCP, both directions
        self._held = 0
        self._lost = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def drain(self) -> None:
        while True:
            try:
                data, origin = self._socket.recvfrom(2**17)
            except BlockingIOError:
                break
            if origin[2] != socket.PACKET_OUTGOING:
                continue  # on loopback each comes twice
            if self._held + len(data) > _MOST:
                self._lost += 1
                continue
            packet = _parse(data)
            if packet is not None and not self._is_afterwards(packet):
                self._packets.append(packet)
                self._held += len(data)
        statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self._lost += struct.unpack("II", statistics)[1]

    def _is_afterwards(self, packet: Packet) -> bool:
        if packet.opens:
            self._before.discard(packet.flow)
        return packet.flow in self._before and not packet.payload

    def clear(self) -> None:
        self.drain()
        for packet in self._packets:
            if packet.protocol == _TCP:
                source, source_port, target, port, _ = packet.flow
                self._before |= {packet.flow, (target, port, source, source_port, _TCP)}
        self._packets.clear()
        self._held = self._lost = 0

    @property
    def lost(self) -> int:
        return self._lost

    def all(self) -> list[Packet]:
        self.drain()
        return list(self._packets)

    def with_text(self, canary: bytes) -> list[Packet]:
        """The packets, or one of the flow, in which a text was sent, whatever its case, also cut in two."""
        wanted = canary.lower()
        found = [packet for packet in self.all() if wanted in packet.payload.lower()]
        flows: dict[tuple[str, int, str, int, int], list[Packet]] = {}
        for packet in self._packets:
            flows.setdefault(packet.flow, []).append(packet)
        for flow in flows.values():
            if wanted in b"".join(packet.payload for packet in flow).lower() and not set(flow) & set(found):
                found.append(flow[0])
        return found


def _parse(data: bytes) -> Packet | None:
    version = data[0] >> 4 if data else 0
    if version == 4 and len(data) >= 20:
        start = (data[0] & 15) * 4
        protocol = data[9]
        source, target = (socket.inet_ntop(socket.AF_INET, data[at : at + 4]) for at in (12, 16))
    elif version == 6 and len(data) >= 40:
        start, protocol = 40, data[6]
        source, target = (socket.inet_ntop(socket.AF_INET6, data[at : at + 16]) for at in (8, 24))
    else:
        return None
    ports, payload, opens = (0, 0), data[start:], False
    if protocol in (_TCP, _UDP) and len(payload) >= 8:
        ports = struct.unpack_from("!HH", payload)
        opens = protocol == _TCP and bool(payload[13] & 2)
        payload = payload[8:] if protocol == _UDP else payload[(payload[12] >> 4) * 4 :]
    return Packet(protocol, source, target, ports[0], ports[1], payload, opens)
