"""``sloplet bench --live``: what it costs to save and restore running sandboxes, beside runsc used by hand.

guests (the programs inside), raw (runsc by hand), ours (Sloplet), jobs (single samples), suites, run; table (for
people), page (for docs/live-costs.md) and plot (its picture). The method is in docs/bench.md.
"""
