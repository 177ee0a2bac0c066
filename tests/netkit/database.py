"""A real PostgreSQL in the fake internet."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from .internet import Internet


@contextmanager
def postgres(net: Internet, name: str, folder: Path) -> Iterator[None]:
    """A server on port 5432 of every address in there; it has TLS, as ``name``."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("capability: no PostgreSQL server on this machine (apt-get install postgresql)")
    where = str(programs[-1])
    data = folder / "data"
    key = folder / "server.pem"
    key.write_bytes(net.leaf(name).read_bytes())
    key.chmod(0o600)
    made = ["-D", str(data), "-U", "someone", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
    subprocess.run(net.command(f"{where}/initdb", *made), check=True, capture_output=True)
    (data / "pg_hba.conf").write_text("hostssl all all 0.0.0.0/0 trust\nhostnossl all all 0.0.0.0/0 trust\n")
    settings = {
        "listen_addresses": "*", "port": "5432", "unix_socket_directories": "", "fsync": "off", "ssl": "on",
        "ssl_cert_file": str(key), "ssl_key_file": str(key), "shared_buffers": "1MB",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    with (folder / "log").open("wb") as log, ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(net.command(f"{where}/postgres", "-D", str(data), *words), stdout=log, stderr=log)
        )
        stack.callback(server.terminate)
        until = time.monotonic() + 30
        while True:
            with suppress(OSError):
                net.connect("5.5.5.5", 5432).close()
                break
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.05)
        yield
