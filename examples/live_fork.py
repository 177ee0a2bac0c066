"""Explore in parallel: five copies of one running computer, each tries another fix, the one that works is kept.

Needs the gvisor engine: `sloplet setup gvisor`. Run it in a scratch folder; the fix comes out as ./fixed/mean.py.
"""

from sloplet import Sandbox

BROKEN = "def mean(values):\n    return sum(values) / len(values)\n"
TEST = "from mean import mean\nassert mean([1, 2, 6]) == 3\nassert mean([]) == 0\nprint('passed')\n"
FIXES = ["len(values) + 1", "(len(values) or 1)", "max(len(values), 0)", "len(values or [])", "abs(len(values))"]

with Sandbox(engine="gvisor") as box:
    box.files.write("mean.py", BROKEN)
    box.files.write("test.py", TEST)
    trials = []
    for fix, child in zip(FIXES, box.fork(len(FIXES)), strict=True):
        child.files.write("mean.py", BROKEN.replace("len(values)", fix))
        trials.append((fix, child, child.spawn(["python3", "test.py"])))  # all are at work now
    for fix, child, trial in trials:
        result = trial.wait()
        print(f"{fix:20} {result.stdout.strip() or result.stderr.strip().splitlines()[-1]}")
        if result.exit_code == 0:
            print("kept:", *child.apply("/workspace/mean.py", to="fixed").written)
        child.close()
