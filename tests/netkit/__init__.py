"""An internet that never leaves this machine: every address and every name is played by one child process.

The child lives in a user and a network namespace of its own, where every IPv4 and IPv6 address is local, so whatever is
dialled is answered (or refused) there, by real servers over real packets, and a packet socket records each of them. The
library under test reaches it through ``Internet.upstream``: names are asked for by UDP in there, connections are made
in there and handed out as descriptors. It works for root and for an ordinary user alike.

``namespace``  the addresses            ``dns``      messages, the server, the resolver
``packets``    the judge                ``web``      HTTP/1.1, WebSocket, static sites
``plain``      echo, mail, silence      ``authority`` the test CA
``world``      the child's main loop    ``internet`` what tests hold
``sites``      what real clients fetch  ``database`` a PostgreSQL
"""

from __future__ import annotations

from .internet import Internet

__all__ = ["Internet"]
