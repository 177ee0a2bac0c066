"""Public names: ``https://{port}-{id}.DOMAIN`` is a server inside a sandbox. See docs/http.md, "Public names".

``app`` is the ASGI application that the guard hands such requests to; ``parts`` decides what of a request goes in and
what of an answer comes out (pure); ``published`` is the table of ports that have a name; ``wires`` reaches into
sandboxes; ``http`` and ``websocket`` carry one request each.
"""

from __future__ import annotations

from .app import PublicNames

__all__ = ["PublicNames"]
