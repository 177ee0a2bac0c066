"""``sloplet serve``: HTTP, WebSocket, MCP and SSH in front of keepers. See docs/server.md and docs/adr/0070.

The server holds no sandbox. Each tenant has a home of its own below the server's (``tenants/NAME``) with a keeper of
its own, so what a key may see and touch is decided by which keeper its requests go to, and a server that is killed
takes no sandbox with it. ``app`` puts the parts together, ``guard`` decides who comes in, ``routes`` translate HTTP to
calls of ``AsyncSandbox`` and the Controller, ``wire`` is the tunnel that the library's own client uses.
"""
