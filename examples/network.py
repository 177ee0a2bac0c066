"""A way out, decided by name: one allowed server, everything else refused in words, a port brought out, a policy that
changes while it runs. ``scripts/try`` runs this. Nothing leaves this machine: the server is its own.

docs/network.md has the whole of it.
"""

from __future__ import annotations

import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rich.console import Console

from sloplet import Network, Sandbox, SlopletError
from sloplet.errors import EngineUnavailable, UnsupportedOperation

console = Console(highlight=False)
FETCH = "python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())' {url}"
SERVE = "mkdir -p www && echo 'hello from inside' > www/index.html && cd www && exec python3 -m http.server 8000"


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"hello from outside"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


def main() -> int:
    """Exit code 1 if anything came out differently than it says, 2 where no rung here has a way out."""
    console.print()
    console.rule("[bold cyan]No network device: what leaves is asked for, by name", align="left", style="cyan")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        rule = f"host.sloplet:{server.server_address[1]}"
        with Sandbox(at_least="container", network=Network(allow=[rule])) as box:
            return show(box, rule)
    except (EngineUnavailable, UnsupportedOperation) as error:
        console.print(f"[yellow]left out: {error}[/yellow]")
        return 2
    except SlopletError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    finally:
        server.shutdown()


def show(box: Sandbox, rule: str) -> int:
    url = f"http://{rule}/"
    good = step(f"allow=['{rule}']: an ordinary program gets there", fetch(box, url) == "hello from outside")
    refused = box.run(FETCH.format(url="http://example.com/"))
    good &= step("anything else is a reset, at once", not refused.ok and bool(refused.denied))
    for reason in refused.denied:
        console.print(f"  [dim]result.denied:[/dim] {reason}")
    address = box.run(FETCH.format(url="http://169.254.169.254/latest/meta-data/"))
    good &= step("so is the cloud's metadata address", not address.ok and bool(address.denied))
    box.network.set(Network())
    good &= step("a policy changes while it runs: nothing is allowed now", not box.run(FETCH.format(url=url)).ok)
    box.spawn(SERVE, detached=True)
    box.run("until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))'; do :; done 2>/dev/null")
    with urllib.request.urlopen(box.url(8000), timeout=10) as answer:  # noqa: S310
        good &= step(f"its own server, brought out to {box.url(8000)}", answer.read() == b"hello from inside\n")
    console.print("  box.network.log():")
    for line in box.network.log():
        where = f"{line.name or line.address}:{line.port}"
        console.print(f"    [dim]{line.verdict:5} {where:28} {line.rule}[/dim]")
    return 0 if good else 1


def fetch(box: Sandbox, url: str) -> str:
    return box.run(FETCH.format(url=url), check=True).stdout.strip()


def step(what: str, good: bool) -> bool:
    console.print(f"{'[bold green]✓[/bold green]' if good else '[bold red]✗[/bold red]'} {what}")
    return good


if __name__ == "__main__":
    sys.exit(main())
