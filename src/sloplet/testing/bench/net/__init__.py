"""``sloplet bench --net``: what the way out over the wire costs, beside a bare loopback socket and a bare Python relay.

far (the servers and the bare relay, a process of their own), near (the client, the same program inside and outside),
suites, run; table (for people). The method is in docs/bench.md.
"""
