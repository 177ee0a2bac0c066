"""The inside of the fake engine: an agent in Python with files, processes and a shell that exist in memory only.

vfs (files), kernel and streams (processes, signals, pipes), jobs (what the wire calls a process: rings, followers,
terminals), syntax, words, shell and builtins (a small sh), programs and tools (its vocabulary), fileops and agent
(the wire's operations).
"""
