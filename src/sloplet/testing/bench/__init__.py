"""``sloplet bench``: Sloplet and its rivals, measured side by side in one run. The method is in docs/bench.md.

stats (pure: percentiles, series), bars (pure: what we promise, and whether it held), rivals (the other tools),
measures (Sloplet itself), run (the interleaving), show (the table).
"""
