"""The same sandboxes on another machine: a Controller over a Sloplet server. See docs/remote.md.

``place`` is where it is and who asks, ``websocket`` and ``tunnel`` carry the wire (commands, files, ports), ``http``
asks the routes for everything else, ``controller`` puts them together, ``link`` is what a program has of each server.
"""
