"""``sloplet bench --images``: unpacking a layer beside ``tar -x``, starting of an image beside the host's own programs,
and what a hundred sandboxes of one image take. plan (what is worked with), suites, run. The method is in docs/bench.md.
"""
