"""A first sandbox at work: what is enforced, what it survives, how fast it is. ``scripts/try`` runs this.

Everything here goes through the public API; read it as an example.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sloplet import Result, Sandbox, SlopletError
from sloplet.errors import ControlUnavailable
from sloplet.testing.leaks import settled, snapshot

console = Console(highlight=False)

RM = "echo precious > thesis.txt; rm -rf --no-preserve-root / 2>&1 | tail -n 1; cat thesis.txt 2>&1"
FORK_BOMB = "bomb() { bomb | bomb & }; bomb; sleep 1"
MEMORY_BOMB = ["python3", "-c", "x = []\nwhile True: x.append(bytearray(10_000_000))"]
DISK_BOMB = "cat /dev/zero > filler; ls -l filler | awk '{print $5 / 1048576 \" MiB written, then: no more\"}'"


def main() -> int:
    """Run the show. Exit code 1 if the host did not come out as it went in."""
    with tempfile.TemporaryDirectory(prefix="sloplet-try-") as folder:
        witness = Path(folder, "precious.txt")
        witness.write_text("the host's own file\n")
        try:
            with Sandbox() as box:
                hello(box)
                guarantees(box)
            survived = disasters(witness)
        except SlopletError as error:
            console.print(f"[red]{error}[/red]\nWhat this machine lacks: [bold]sloplet doctor[/bold]")
            return 1
        timings()
    return 0 if survived else 1


def title(text: str) -> None:
    console.print()
    console.rule(f"[bold cyan]{text}", align="left", style="cyan")


def hello(box: Sandbox) -> None:
    title("A computer of its own")
    for command in (
        "id -un; hostname; pwd",
        "ls /home /root 2>&1 | head -3",
        "tail -n +3 /proc/net/dev | cut -d: -f1   # its network devices",
    ):
        result = box.run(command)
        console.print(f"[dim]$[/dim] [bold]{command}[/bold]")
        console.print(result.stdout.rstrip() or "[dim](nothing)[/dim]", style="green")


def guarantees(box: Sandbox) -> None:
    title(f"What is enforced here (engine: {box.engine})")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for one in box.guarantees():
        mark = "[green]yes[/green]" if one.enforced else "[yellow]no[/yellow]"
        table.add_row(mark, one.control, one.value, f"[dim]{one.how}[/dim]")
    console.print(table)


def disasters(witness: Path) -> bool:
    """Each in a sandbox of its own; the neighbour next door and the host must not notice."""
    title("What nobody should run")
    outside, before = host_state(witness), snapshot()
    with Sandbox() as neighbour:
        attempt("rm -rf --no-preserve-root /", lambda box: box.run(RM, timeout=15))
        attempt("a fork bomb", lambda box: box.run(FORK_BOMB, timeout=10), pids=64)
        attempt("a memory bomb", lambda box: box.run(MEMORY_BOMB, timeout=60), memory="128m")
        attempt("cat /dev/zero to stdout, 2 GiB", lambda box: box.run("head -c 2G /dev/zero", timeout=60))
        attempt("cat /dev/zero to the disk", lambda box: box.run(DISK_BOMB, timeout=60), disk="64m")
        alive = neighbour.run("echo still here").stdout.strip() == "still here"
    checks = {
        "the sandbox next door still answered": alive,
        "the host's files are as they were": host_state(witness) == outside,
        "no process, mount, cgroup, namespace or open file is left": settled(before) == [],
    }
    console.print()
    for text, good in checks.items():
        console.print(verdict(good, text))
    return all(checks.values())


def attempt(name: str, act: Callable[[Sandbox], Result], **limits: Any) -> None:
    """A limit that this machine cannot enforce is refused; then, for the show, taken as far as it goes."""
    asked = ", ".join(f"{key}={value}" for key, value in limits.items())
    console.print(f"[bold red]{name}[/bold red] [dim]{asked}[/dim]")
    began = time.perf_counter()
    try:
        try:
            box = Sandbox(**limits)
            box.start()
        except ControlUnavailable as error:
            console.print(
                f"   [yellow]refused:[/yellow] [dim]{error.message.split(': ')[0]}; so, with allow_weaker:[/dim]"
            )
            box = Sandbox(**limits, allow_weaker=True)
        with box:
            console.print(f"   {told(act(box))} [dim]({time.perf_counter() - began:.1f} s)[/dim]")
    except SlopletError as error:
        console.print(f"   {error}")


def told(result: Result) -> str:
    text = f"{result.describe()}"
    if result.truncated:
        text += (
            f"; {result.stdout_size / 2**20:.0f} MiB of output, of which {len(result.stdout_raw) / 2**20:.0f} were kept"
        )
    elif said := (result.stdout + result.stderr).strip():
        text += f": [italic]{said.splitlines()[-1][:100]}[/italic]"
    return text


def host_state(witness: Path) -> tuple[object, ...]:
    """What a sandbox could have damaged, as far as one can tell in a moment."""
    places = ("/", "/etc", "/usr/bin", os.path.expanduser("~"))
    return (witness.read_text(), *(tuple(sorted(os.listdir(place))) for place in places))


def verdict(good: bool, text: str) -> str:
    return f"[bold green]✓[/bold green] {text}" if good else f"[bold red]✗ not true: {text}[/bold red]"


def timings() -> None:
    title("How fast")

    def create() -> None:
        with Sandbox() as box:
            box.run(["true"])

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("create, run a command, destroy", milliseconds(create, 20))
    with Sandbox() as box:
        table.add_row("run a command in a sandbox that is there", milliseconds(lambda: box.run(["true"]), 100))
    console.print(table)
    console.print("[dim]side by side with bwrap, docker and runsc: [/dim][bold]sloplet bench[/bold]")


def milliseconds(act: Callable[[], object], times: int) -> str:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return f"[bold]{statistics.median(taken) * 1000:.1f} ms[/bold] [dim](median of {times})[/dim]"


if __name__ == "__main__":
    sys.exit(main())
