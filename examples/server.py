"""A sandbox server of one's own: started, used from afar, killed, and nothing is lost. ``scripts/try`` runs this.

Everything is on this machine, over loopback. docs/server.md is for whoever runs one, docs/remote.md for its users.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from sloplet import Sandbox, SlopletError
from sloplet.errors import KeyRefused, QuotaExceeded, SandboxNotFound

console = Console(highlight=False)
_WEB = "python3 -m http.server 8000 --bind 127.0.0.1"


def main() -> int:
    """Exit code 1 if anything came out differently than it says."""
    console.print()
    console.rule("[bold cyan]A server: the same object, from afar", align="left", style="cyan")
    with tempfile.TemporaryDirectory(prefix="sloplet-try-") as folder:
        os.environ["SLOPLET_HOME"] = folder
        try:
            return show(Path(folder))
        except SlopletError as error:
            console.print(f"[red]{error}[/red]")
            end = [sys.executable, "-m", "sloplet.cli", "rm", "dev"]  # the server is gone, its sandboxes are not
            subprocess.run(end, env={**os.environ, "SLOPLET_HOME": f"{folder}/tenants/team"}, check=False)
            return 1


def show(home: Path) -> int:
    good = True
    with served() as told:
        url, here = told["url"], {"server": told["url"], "key": told["key"]}
        mine = {"server": url, "key": new_key("team", "--max-sandboxes", "1")}
        console.print(f"  sloplet serve: {url}; a key for a team, with a quota")
        box = Sandbox("dev", **mine)
        good &= step("a command, by HTTP and WebSocket", box.run("echo hello from $(hostname)").stdout, "hello from")
        box.files.write("site/index.html", "<h1>served from inside</h1>")
        good &= step("what another key sees of it", refused(lambda: Sandbox.connect("dev", **here)), "SandboxNotFound")
        good &= step("one more than the quota", refused(lambda: Sandbox(**mine).start()), "QuotaExceeded")
        wrong = mine["key"][:-8] + "AAAAAAAA"
        good &= step("a wrong key", refused(lambda: Sandbox(server=url, key=wrong).start()), "KeyRefused")
        box.spawn(f"cd site && exec {_WEB}", detached=True)
        good &= step("a server inside, by a name of its own", page(box.public_url(8000, public=True)), "from inside")
        counter = box.spawn("n=0; while sleep 0.1; do n=$((n + 1)); echo $n > count; done", detached=True)
        os.kill(told["pid"], signal.SIGKILL)
    with served(url):
        began = time.perf_counter()
        running = [each.pid for each in box.processes() if each.running]
        good &= step("the server is killed and started anew; what ran, runs", counter.pid in running, True)
        console.print(f"  first answer after {1000 * (time.perf_counter() - began):.0f} ms")
        box.kill()
    return 0 if good else 1


@contextmanager
def served(url: str = "") -> Iterator[dict[str, Any]]:
    """``sloplet serve`` on a free port, or on that of one that was here before."""
    port = url.rpartition(":")[2] or "0"
    command = [sys.executable, "-m", "sloplet.cli", "serve", "--port", port, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    text = b""
    while (line := process.stdout.readline()) and line.rstrip() != b"}":
        text += line
    try:
        yield {**json.loads(text + line), "pid": process.pid}
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def new_key(name: str, *options: str) -> str:
    command = [sys.executable, "-m", "sloplet.cli", "key", "create", "--name", name, "--json", *options]
    return str(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["key"])


def refused(job: Any) -> str:
    try:
        return f"nothing was refused: {job()}"
    except (KeyRefused, QuotaExceeded, SandboxNotFound) as error:
        return type(error).__name__


def page(address: str) -> str:
    """Names below .localhost are this machine's, but not every resolver knows that: it goes into the Host alone."""
    host = address.removeprefix("http://").rstrip("/")
    for _ in range(100):  # until the server inside listens
        port = host.rpartition(":")[2]
        answer = httpx.get(f"http://127.0.0.1:{port}/", headers={"Host": host}, timeout=10, trust_env=False)
        if answer.status_code != 502:
            break
        time.sleep(0.05)
    return answer.text


def step(what: str, came: object, wanted: object) -> bool:
    good = wanted in came if isinstance(wanted, str) and isinstance(came, str) else came == wanted
    mark = "[green]✓[/green]" if good else f"[red]✗ {came!r}, not {wanted!r}[/red]"
    console.print(f"  {what}: [bold]{str(came).strip() if good else wanted}[/bold] {mark}")
    return bool(good)


if __name__ == "__main__":
    sys.exit(main())
