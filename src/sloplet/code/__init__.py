"""The code interpreter: cells of code that run in a process of the sandbox, which keeps their variables.

    results     plain values: what a cell gave
    frames      pure: a kernel's bytes -> output and frames
    languages   pure: which program runs a language, and what a cell looks like to it
    cell        one cell over one stream: output, results, time limit, interruption
    contexts    which kernels there are: in the sandbox itself, by the tags of their processes
    api         ``box.code`` and ``box.contexts``

What runs inside is in ``sloplet/kernels``. All that comes from there is hostile: see docs/code.md.
"""
