"""The world outside, as the host reaches it: names to addresses, addresses to sockets. Tests put in another."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from .tie import resets

PATIENCE = 10.0  # seconds, for a connection
_RESOLVERS = 64  # at the same time, of all sandboxes; resolving.py says how many of these one may occupy
_HOSTS = "/etc/hosts"
_MOST = 32  # addresses of a name that are looked at


class Upstream(Protocol):
    #: a file with certificates that are trusted besides the machine's own; None: only those
    ca_file: str | None

    async def resolve(self, name: str) -> list[str]:
        """Its addresses as text, those to try first in front; [] or socket.gaierror (EAI_NONAME) if there is no such
        name. OSError if that cannot be found out. It may take long: who asks does not wait for ever."""

    async def connect(self, address: str, port: int) -> socket.socket:
        """A connected socket that does not block, to exactly that address. OSError."""

    def is_own(self, address: str) -> bool:
        """Whether who connects there comes to this machine itself, to whatever listens on all of its addresses.
        OSError if that cannot be found out."""


class System:
    """This machine's resolver and network."""

    def __init__(self, ca_file: str | None = None, *, patience: float = PATIENCE) -> None:
        self.ca_file = ca_file
        self._patience = patience
        self._threads: ThreadPoolExecutor | None = None

    async def resolve(self, name: str) -> list[str]:
        """Names are whole: the resolver's search list would make others of them, which nobody has judged."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="sloplet-names")
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, name)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"no thread can be started: {error}") from error
        return await work

    async def connect(self, address: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            resets(made)
            async with asyncio.timeout(self._patience):
                await asyncio.get_running_loop().sock_connect(made, (address, port))
        except TimeoutError:
            made.close()
            raise OSError(errno.ETIMEDOUT, f"no answer within {self._patience:g} s") from None
        except BaseException:
            made.close()
            raise
        return made

    def is_own(self, address: str) -> bool:
        parsed = ipaddress.ip_address(address)
        family = socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect((address, 9))  # nothing is sent: the kernel says from where it would be
            except OSError:
                return False  # there is no way there at all
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == parsed


def _look_up(name: str) -> list[str]:
    whole = name if _in_hosts(name) else f"{name}."  # with its dot it is not found in that file
    try:
        found = socket.getaddrinfo(whole, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except UnicodeError:
        return []
    addresses = dict.fromkeys(str(item[4][0]).partition("%")[0] for item in found)
    return sorted(addresses, key=lambda address: ":" in address)[:_MOST]


def _in_hosts(name: str) -> bool:
    """Whether the machine's own file has it."""
    try:
        with open(_HOSTS, encoding="utf-8", errors="replace") as file:
            return any(name in line.partition("#")[0].lower().split()[1:] for line in file)
    except OSError:
        return False
