"""E2B's API, for E2B's own clients: a facade over the same controllers as ``/v1`` (docs/e2b.md, ADR 0077).

Two planes. The control plane (``api.py``) has E2B's keys, paths and documents; the data plane (``envd.py``) is what E2B
runs inside each sandbox, served from out here: commands, files, the code interpreter.
"""
