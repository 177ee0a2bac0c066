"""Version control for a running computer: snapshot, fork, rollback, sleep and wake. ``scripts/try`` runs this.

Needs the gvisor engine: `sloplet setup gvisor`. docs/live.md has the same step by step, for the command line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from sloplet import Sandbox, SlopletError

T = TypeVar("T")
console = Console(highlight=False)

#: A program with a state that is nowhere but in its memory; it says it when it is asked.
COUNTER = "n=0; while read -r word <&3; do n=$((n + 1)); echo $n >/tmp/answer; done 3<>/tmp/ask"
ASK = "rm -f /tmp/answer; echo next >/tmp/ask; while [ ! -s /tmp/answer ]; do sleep 0.01; done; cat /tmp/answer"


def main() -> int:
    """Exit code 1 if anything came out differently than it says."""
    console.print()
    console.rule("[bold cyan]Live state: a computer that can be saved while it runs", align="left", style="cyan")
    try:
        with Sandbox(engine="gvisor") as box:
            return show(box)
    except SlopletError as error:
        console.print(f"[red]{error}[/red]")
        return 1


def show(box: Sandbox) -> int:
    box.run("mkfifo /tmp/ask; echo precious > work.txt", check=True)
    box.spawn(COUNTER, detached=True)
    good = step("a program counts, in its memory alone", lambda: [count(box) for _ in range(3)], [1, 2, 3])
    saved = timed("snapshot", box.snapshot)
    box.run("rm work.txt; pkill -f 'read -r word'")
    good &= step("somebody kills it and deletes its work; what is left?", lambda: left(box), [])
    timed("rollback", lambda: box.rollback(saved))
    good &= step("everything is back", lambda: left(box), ["program", "work.txt"])
    good &= step("and the program counts on", lambda: count(box), 4)
    copies = timed("fork(5)", lambda: box.fork(5))
    good &= step("five copies, each for itself", lambda: [count(copy) for copy in copies], [5] * 5)
    drawn = {copy.run("head -c 16 /dev/urandom | od -An -tx1").stdout for copy in copies}
    good &= step("and no two draw the same random numbers", lambda: len(drawn), 5)
    for copy in copies:
        copy.close()
    timed("pause", box.pause)
    timed("resume", box.resume)
    good &= step("the first one slept, and knows where it was", lambda: count(box), 5)
    return 0 if good else 1


def left(box: Sandbox) -> list[str]:
    programs = ["program"] if box.run("pgrep -f 'read -r [w]ord'").ok else []
    return programs + [entry.name for entry in box.files.list(".")]


def count(box: Sandbox) -> int:
    return int(box.run(ASK, check=True, timeout=30).stdout)


def step(what: str, act: Callable[[], T], wanted: T) -> bool:
    got = act()
    mark = "[bold green]✓[/bold green]" if got == wanted else f"[bold red]✗ (not {wanted})[/bold red]"
    console.print(f"{mark} {what}: [bold]{got}[/bold]")
    return got == wanted


def timed(what: str, act: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = act()
    console.print(f"  {what} [dim]({(time.perf_counter() - began) * 1000:.0f} ms)[/dim]")
    return result


if __name__ == "__main__":
    sys.exit(main())
