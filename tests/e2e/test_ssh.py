"""SSH into sandboxes of a real server, with OpenSSH's own ssh, sftp and scp, and with asyncssh for what they cannot
send."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from server_kit import Served, environment, served
from sloplet.engines import registry

pytestmark = pytest.mark.anyone

WAIT = 30.0


@dataclass
class Door:
    """The server's SSH, and a key that opens it."""

    server: Served
    port: int
    folder: Path
    identity: str

    def options(self, *, port: str = "-p") -> list[str]:
        return [
            "-F", "/dev/null", "-i", self.identity, port, str(self.port), "-o", "IdentitiesOnly=yes", "-o",
            "IdentityAgent=none", "-o", "StrictHostKeyChecking=yes", "-o", f"UserKnownHostsFile={self.folder}/known",
            "-o", "BatchMode=yes", "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=20",
        ]  # fmt: skip

    def command(self, *words: str, name: str = "dev", flags: tuple[str, ...] = ()) -> list[str]:
        return ["ssh", *self.options(), *flags, f"{name}@127.0.0.1", *words]

    def ssh(
        self, *words: str, name: str = "dev", flags: tuple[str, ...] = (), stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        command = self.command(*words, name=name, flags=flags)
        return subprocess.run(command, input=stdin, capture_output=True, timeout=60)

    def sftp(self, *lines: str, name: str = "dev") -> subprocess.CompletedProcess[bytes]:
        command = ["sftp", *self.options(port="-P"), "-b", "-", f"{name}@127.0.0.1"]
        return subprocess.run(command, input="\n".join(lines).encode() + b"\n", capture_output=True, timeout=60)

    def scp(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["scp", *self.options(port="-P"), *words], capture_output=True, timeout=60)

    def connect(self, name: str = "dev") -> Any:
        return asyncssh.connect(
            "127.0.0.1", self.port, username=name, client_keys=[self.identity], known_hosts=f"{self.folder}/known",
            agent_path=None, config=None,
        )  # fmt: skip


def cli(server: Served, *words: str) -> str:
    command = [sys.executable, "-m", "sloplet.cli", *words]
    done = subprocess.run(command, env=environment(server.home), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def new_identity(folder: Path, name: str, *kind: str) -> str:
    path = str(folder / name)
    subprocess.run(["ssh-keygen", "-q", *(kind or ("-t", "ed25519")), "-N", "", "-C", name, "-f", path], check=True)
    return path


def until(what: str, check: Any) -> Any:
    """Its first answer that counts."""
    deadline = time.monotonic() + WAIT
    while not (found := check()):
        assert time.monotonic() < deadline, what
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not registry.load("container").probe().available:
        pytest.skip("capability: container")
    with served(tmp_path_factory.mktemp("ssh") / "home", "--ssh-port", "0") as running:
        yield running


@pytest.fixture(scope="module")
def door(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Door:
    """With a sandbox `dev` behind it."""
    folder = tmp_path_factory.mktemp("keys")
    port = server.told["ssh"]["port"]
    host = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(server.home / "server/ssh/host_ed25519")], capture_output=True, check=True
    ).stdout.decode()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host}")
    door = Door(server, port, folder, new_identity(folder, "me"))
    key = server.new_key("mine")
    assert re.match(r"SHA256:\S+ me\n", cli(server, "key", "ssh-add", "mine", f"{door.identity}.pub"))
    with server.client(key) as client:
        made = client.post("/v1/sandboxes", json={"name": "dev", "engine": "container", "pids": 128})
        assert made.status_code == 201, made.text
    return door


@pytest.fixture(scope="module")
def api(server: Served, door: Door) -> str:
    """A key of the same tenant, for HTTP."""
    return server.new_key("mine-2", "--tenant", "mine")


def inside(door: Door, api: str, command: str) -> str:
    with door.server.client(api) as client:
        return str(client.post("/v1/sandboxes/dev/exec", json={"command": command}).json()["stdout"])


# -- commands --------------------------------------------------------------------------


def test_a_command_its_streams_and_its_code(door: Door) -> None:
    done = door.ssh("echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    assert door.ssh("true").returncode == 0
    assert door.ssh("nosuchprogram").returncode == 127
    done = door.ssh("id -un; pwd; echo $TERM-$SHLVL")
    assert done.stdout.splitlines()[:2] == [b"agent", b"/workspace"]
    assert door.ssh("kill -KILL $$").returncode == 255  # as OpenSSH tells a signal


def test_stdin_byte_for_byte_and_its_end(door: Door) -> None:
    data = os.urandom(4 << 20)
    done = door.ssh("cat", stdin=data)
    assert done.returncode == 0
    assert done.stdout == data
    assert door.ssh("sha256sum", stdin=data).stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_a_script_on_stdin_without_a_terminal(door: Door) -> None:
    done = door.ssh(stdin=b"echo from the script\nexit 4\n")
    assert (done.returncode, done.stdout) == (4, b"from the script\n")


def test_only_harmless_variables_pass(door: Door) -> None:
    flags = ("-o", "SetEnv=LC_TIME=de_DE.UTF-8 LD_PRELOAD=/tmp/x.so PATH=/evil SECRET=1 LC_ALL=$(id)")
    told = door.ssh("env", flags=flags).stdout.decode()
    assert "LC_TIME=de_DE.UTF-8\n" in told
    assert not re.search("LD_PRELOAD|/evil|SECRET|LC_ALL", told)


def test_by_id_and_by_a_name_that_is_none(door: Door, api: str) -> None:
    with door.server.client(api) as client:
        box = client.get("/v1/sandboxes/dev").json()["id"]
    assert door.ssh("hostname", name=box).stdout == b"dev\n"
    for name in ("nothere", "../dev", "x" * 200):
        done = door.ssh("true", name=name)
        assert done.returncode == 255
        assert done.stderr.startswith(b"sloplet: ")
        assert b"Traceback" not in done.stderr


def test_signals_of_clients_and_exit_by_signal(door: Door) -> None:
    async def main() -> None:
        async with door.connect() as conn:
            process = await conn.create_process(
                "trap 'echo got it; exit 7' USR1; echo ready; while :; do sleep 0.05; done"
            )
            assert await process.stdout.readline() == "ready\n"
            process.send_signal("USR1")
            assert await process.stdout.readline() == "got it\n"
            assert (await process.wait()).exit_status == 7
            killed = await conn.run("kill -TERM $$")
            assert killed.exit_signal is not None
            assert killed.exit_signal[0] == "TERM"

    asyncio.run(bounded(main()))


async def bounded(work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(60):
        await work


# -- terminals -------------------------------------------------------------------------


class Terminal:
    """A terminal here with ssh in it, as a person has."""

    def __init__(self, command: list[str], rows: int, cols: int) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(rows, cols)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), env={**os.environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def expect(self, pattern: bytes) -> re.Match[bytes]:
        deadline = time.monotonic() + WAIT
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, (pattern, self.seen)
            self.seen += os.read(self.ours, 65536)
        self.seen = self.seen[found.end() :]
        return found

    def close(self) -> int:
        os.close(self.ours)
        return self.process.wait(WAIT)


def test_a_signal_without_a_name(door: Door) -> None:
    assert door.ssh("kill -40 $$").returncode == 168
    assert "Traceback" not in (door.server.log or Path("/dev/null")).read_text()


def test_a_shell_in_a_terminal_that_is_resized(door: Door) -> None:
    terminal = Terminal(door.command(), 31, 101)
    try:
        terminal.expect(rb"agent@dev")
        terminal.type("stty size; echo $TERM\n")
        terminal.expect(rb"31 101\r\nxterm-256color")
        terminal.type("trap 'echo size: $(stty size)' WINCH; echo armed\n")
        terminal.expect(rb"\rarmed")
        terminal.resize(50, 120)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.type("\n")
        terminal.expect(rb"size: 50 120")
        terminal.type("sleep 1000\n")
        terminal.expect(rb"sleep 1000\r\n")
        terminal.type("\x03")  # Ctrl-C ends the sleep, not the shell
        terminal.expect(rb"agent@dev")
        terminal.type("exit 9\n")
        assert terminal.process.wait(WAIT) == 9
    finally:
        terminal.process.kill()
        terminal.close()


def test_who_hangs_up_ends_what_runs_but_for_nohup(door: Door, api: str) -> None:
    mark = "sleep 98765"
    stays = "sleep 98764"
    script = f"nohup {stays} >/dev/null 2>&1 & {mark}"
    terminal = Terminal(door.command(), 24, 80)
    command = subprocess.Popen(
        door.command(mark), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        terminal.expect(rb"agent@dev")
        terminal.type(script + "\n")
        until("both run", lambda: inside(door, api, f"pgrep -fc '^{mark}'").strip() == "2")
        until("it runs", lambda: inside(door, api, f"pgrep -fc '^{stays}'").strip() == "1")
        terminal.process.kill()  # no goodbye
        command.kill()
        until("both have ended", lambda: inside(door, api, f"pgrep -fc '^{mark}'").strip() == "0")
        assert inside(door, api, f"pgrep -fc '^{stays}'").strip() == "1"
        assert inside(door, api, "pgrep -xc bash").strip() == "0"
    finally:
        inside(door, api, f"pkill -f '^{stays}'")
        terminal.close()
        command.communicate()


# -- files -----------------------------------------------------------------------------


def test_sftp_does_what_sftp_does(door: Door, api: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello\n")
    os.chmod(tmp_path / "a", 0o640)
    os.utime(tmp_path / "a", (1_500_000_000, 1_500_000_000))
    done = door.sftp(
        "pwd", "mkdir folder", "cd folder", f"put -p {tmp_path}/a one", "rename one two", "symlink two link",
        "chmod 600 two", "ls -ln", f"get link {tmp_path}/b", "df", "rm link", "mkdir empty", "rmdir empty",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"Remote working directory: /workspace" in done.stdout
    assert re.search(rb"-rw-------\s+\S+\s+1000\s+1000\s+6 Jul 14\s+2017 two", done.stdout), done.stdout
    assert re.search(rb"lrwxrwxrwx.* link", done.stdout)
    assert (tmp_path / "b").read_bytes() == b"hello\n"
    assert inside(door, api, "cd folder; ls; stat -c '%a %Y' two") == "two\n600 1500000000\n"
    for wrong, why in (
        ("get nothere", b"not found"), ("put /nothere", b""), ("rmdir folder", b"ailure"), ("rm folder", b""),
        ("mkdir folder", b""), (f"put {tmp_path}/a /usr/x", b"ermission denied"), ("rename folder/two /nodir/x", b""),
        ("ln folder/two folder/hard", b""), ("cd nothere", b""), ("ls /root/x", b""),
    ):  # fmt: skip
        done = door.sftp(wrong)
        assert done.returncode == 1, wrong
        assert why in done.stderr, (wrong, done.stderr)


def test_fifty_megabytes_both_ways_by_scp(door: Door, api: str, tmp_path: Path) -> None:
    data = os.urandom((50 << 20) + 3)
    (tmp_path / "there").write_bytes(data)
    done = door.scp(str(tmp_path / "there"), "dev@127.0.0.1:big")
    assert done.returncode == 0, done.stderr
    assert inside(door, api, "sha256sum < big").split()[0] == hashlib.sha256(data).hexdigest()
    assert door.scp("dev@127.0.0.1:/workspace/big", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_bytes() == data
    inside(door, api, "rm big")
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/x y").write_bytes(b"1")
    (tmp_path / "tree/ünï").write_bytes(b"2")
    assert door.scp("-r", str(tmp_path / "tree"), "dev@127.0.0.1:").returncode == 0
    assert inside(door, api, "cd tree; find . -type f | LC_ALL=C sort") == "./sub/x y\n./ünï\n"
    assert door.scp("-r", "dev@127.0.0.1:tree", str(tmp_path / "copy")).returncode == 0
    assert (tmp_path / "copy/sub/x y").read_bytes() == b"1"


def test_an_upload_that_breaks_off_leaves_the_old_file(door: Door, api: str) -> None:
    async def main() -> None:
        conn = await door.connect()
        sftp = await conn.start_sftp_client()
        async with sftp.open("precious", "wb") as file:
            await file.write(b"old and whole")
        file = await sftp.open("precious", "wb")
        await file.write(b"x" * 1_000_000)
        assert await sftp.getsize("precious") == len(b"old and whole")
        conn.abort()
        await conn.wait_closed()

    asyncio.run(bounded(main()))
    until("it is whole", lambda: inside(door, api, "cat precious") == "old and whole")
    assert "precious" in inside(door, api, "ls -A")
    until("nothing is left beside it", lambda: not re.search(r"^\.", inside(door, api, "ls -A"), re.MULTILINE))


def test_writing_anywhere_in_a_file(door: Door) -> None:
    async def main() -> None:
        async with door.connect() as conn, conn.start_sftp_client() as sftp:
            expected = bytearray(os.urandom(300_000))
            async with sftp.open("patched", "wb") as file:
                await file.write(bytes(expected))
            async with sftp.open("patched", "r+b") as file:
                for at, data in ((10, b"A" * 5), (200_000, b"B" * 1000), (100, b"C" * 70_000), (299_999, b"DE")):
                    await file.write(data, at)
                    expected[at : at + len(data)] = data
                assert await file.read(5, 10) == b"A" * 5
                await file.write(b"end", 400_000)
            expected += bytes(400_000 - len(expected)) + b"end"
            async with sftp.open("patched", "rb") as file:
                assert await file.read() == bytes(expected)
                assert await file.read(7, 100_000) == bytes(expected[100_000:100_007])
                assert await file.read(7, 50) == bytes(expected[50:57])
                assert await file.read(7, 10_000_000) == b""
            async with sftp.open("patched", "ab") as file:
                await file.write(b"mo")
                await file.write(b"re")
                assert (await file.stat()).size == len(expected) + 4
            expected += b"more"
            assert await (await sftp.open("patched", "rb")).read() == bytes(expected)
            await sftp.truncate("patched", 1000)
            assert await (await sftp.open("patched", "rb")).read() == bytes(expected[:1000])
            await sftp.truncate("patched", 2000)
            assert await sftp.getsize("patched") == 2000
            with pytest.raises(asyncssh.SFTPError):
                await sftp.open("patched", "xb")
            with pytest.raises(asyncssh.SFTPError):
                await (await sftp.open("patched", "r+b")).write(b"x", 1 << 45)
            async with sftp.open("fresh", "xb") as file:
                pass
            assert await sftp.getsize("fresh") == 0
            assert await sftp.realpath("a/../b") == "/workspace/b"
            await sftp.symlink("fresh", "to-fresh")
            assert await sftp.readlink("to-fresh") == "fresh"
            async with sftp.open(b"\xff\xfe name", "wb") as file:
                await file.write(b"bytes")
            assert b"\xff\xfe name" in await sftp.listdir(b".")
            with pytest.raises(asyncssh.SFTPOpUnsupported):
                await sftp.link("fresh", "hard")

    asyncio.run(bounded(main()))


def test_a_client_that_does_not_read_costs_little(door: Door, api: str) -> None:
    inside(door, api, "head -c 100M /dev/zero > zeros")

    async def main() -> None:
        async with door.connect() as conn:
            process = await conn.create_process("cat /dev/zero", encoding=None)
            await process.stdout.read(1)
            sftp = await conn.start_sftp_client()
            file = await sftp.open("zeros", "rb", block_size=-1)
            reads = [asyncio.ensure_future(file.read(1 << 20, at << 20)) for at in range(100)]
            conn._transport.pause_reading()
            before = _rss(door.server.pid)
            assert door.ssh("echo hi").stdout == b"hi\n"
            assert _rss(door.server.pid) - before < 32 << 20
            for each in reads:
                each.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            conn.abort()

    asyncio.run(bounded(main()))
    inside(door, api, "rm zeros")


def test_many_open_files_and_folders_cost_little(door: Door, api: str) -> None:
    """Each would be read ahead, and a folder might be long: that is bounded for all of a key's connections together."""
    inside(door, api, "head -c 250000 /dev/zero > ahead; mkdir many; cd many; seq 1 20000 | xargs touch")

    async def main() -> None:
        async with door.connect() as conn, conn.start_sftp_client() as sftp:
            handler = sftp._handler
            assert len(await sftp.listdir("many")) == 20002
            before = _rss(door.server.pid)
            files = [await sftp.open("ahead", "rb", block_size=-1) for _ in range(150)]
            for file in files:
                assert await file.read(1, 7) == b"\0"
            for file in files:  # also where what was read ahead was given up
                assert await file.read(10, 8) == bytes(10)
            assert _rss(door.server.pid) - before < 40 << 20
            folders = [await handler.opendir(b"many") for _ in range(80)]
            for folder in folders[:64]:
                await handler.readdir(folder)
            with pytest.raises(asyncssh.SFTPError):
                await handler.readdir(folders[64])
            assert _rss(door.server.pid) - before < 120 << 20
            await handler.close(folders[0])
            assert len((await handler.readdir(folders[65]))[0]) > 2
        async with door.connect() as conn, conn.start_sftp_client() as sftp:  # nothing is left of it
            assert len(await sftp.listdir("many")) == 20002

    asyncio.run(bounded(main()))
    inside(door, api, "rm -r ahead many")


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- ports -----------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_port_inside_at_this_machine(door: Door, api: str) -> None:
    with door.server.client(api) as client:
        command = "mkdir -p www; cd www; echo from inside > page; exec python3 -m http.server --bind 127.0.0.1 8123"
        assert client.post("/v1/sandboxes/dev/processes", json={"command": command}).status_code == 201
    port = free_port()
    forward = subprocess.Popen(
        door.command(flags=("-N", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:localhost:8123")),
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}/page"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def fetched() -> bytes:
            try:
                return bytes(opener.open(url, timeout=WAIT).read())
            except OSError:
                return b""

        assert until("it answers", fetched) == b"from inside\n"
        for _ in range(20):
            assert fetched() == b"from inside\n"
    finally:
        forward.kill()
        forward.communicate()


def test_many_ports_at_once_are_not_too_many(door: Door, api: str) -> None:
    """Asked for all together: each is counted when it is asked for, not when it is there."""
    port = 8123
    listen = f"import socket, time; s = socket.create_server(('127.0.0.1', {port}), backlog=500); time.sleep(60)"
    with door.server.client(api) as client:
        made = client.post("/v1/sandboxes/dev/processes", json={"command": ["python3", "-c", listen]})
        assert made.status_code == 201, made.text
    until("it listens", lambda: f"{port:04X}" in inside(door, api, "cat /proc/net/tcp"))

    async def main() -> None:
        async with door.connect() as conn:
            asked = [conn.open_connection("localhost", port) for _ in range(150)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(not isinstance(each, BaseException) for each in found) == 64
            assert {each.code for each in found if isinstance(each, asyncssh.ChannelOpenError)} == {
                asyncssh.OPEN_RESOURCE_SHORTAGE
            }

    asyncio.run(bounded(main()))
    inside(door, api, f"kill {made.json()['pid']}")


def test_nothing_but_the_sandbox_can_be_reached(door: Door) -> None:
    outside = int(door.server.url.rsplit(":", 1)[1])

    async def main() -> None:
        async with door.connect() as conn:
            for host, port in (
                ("localhost", outside), ("127.0.0.1", door.port), ("::1", outside), ("127.0.0.2", 8123),
                ("0.0.0.0", 8123), ("example.com", 80), ("169.254.169.254", 80), ("10.0.0.1", 22), ("", 8123),
                ("dev", 8123), ("localhost", 1),
            ):  # fmt: skip
                with pytest.raises(asyncssh.ChannelOpenError):
                    await conn.open_connection(host, port)
            with pytest.raises(asyncssh.ChannelOpenError):
                await conn.open_unix_connection("/var/run/docker.sock")
            with pytest.raises(asyncssh.ChannelListenError):
                await conn.forward_remote_port("127.0.0.1", 0, "127.0.0.1", outside)
            with pytest.raises(asyncssh.ChannelListenError):
                await conn.forward_remote_path("/tmp/sloplet-test.sock", "/tmp/x")
            with pytest.raises(asyncssh.ChannelOpenError):
                await conn.create_process(subsystem="netconf")
            assert (await conn.run("echo still here")).stdout == "still here\n"

    asyncio.run(bounded(main()))
    done = door.ssh("env; ls /tmp", flags=("-A", "-X"))
    assert b"SSH_AUTH_SOCK" not in done.stdout
    assert b"DISPLAY" not in done.stdout


def test_many_sessions_of_one_connection(door: Door) -> None:
    async def main() -> None:
        async with door.connect() as conn:
            processes = [await conn.create_process("cat") for _ in range(10)]
            with pytest.raises(asyncssh.ChannelOpenError):
                await conn.create_process("cat")
            for each in processes:
                each.stdin.write("x")
                each.stdin.write_eof()
            assert [(await each.wait()).stdout for each in processes] == ["x"] * 10
            assert (await conn.run("echo again")).stdout == "again\n"

    asyncio.run(bounded(main()))


# -- who comes in ----------------------------------------------------------------------


def refused(done: subprocess.CompletedProcess[bytes]) -> bool:
    return done.returncode == 255 and b"Permission denied (publickey)" in done.stderr


def test_other_keys_other_tenants_and_no_passwords(door: Door, server: Served) -> None:
    stranger = Door(server, door.port, door.folder, new_identity(door.folder, "stranger"))
    assert refused(stranger.ssh("true"))
    server.new_key("other")
    cli(server, "key", "ssh-add", "other", f"{stranger.identity}.pub", "--name", "theirs")
    done = stranger.ssh("true")
    assert done.returncode == 255
    assert b"no sandbox" in done.stderr
    assert b"dev" in done.stderr
    command = [*door.command("true"), "-v"]
    command[command.index("BatchMode=yes")] = "PreferredAuthentications=password,keyboard-interactive,none"
    assert refused(subprocess.run(command, input=b"", capture_output=True, timeout=60))
    # One public key stands for one key.
    again = subprocess.run(
        [sys.executable, "-m", "sloplet.cli", "key", "ssh-add", "other", f"{door.identity}.pub"],
        env=environment(server.home), capture_output=True,
    )  # fmt: skip
    assert again.returncode == 125
    assert b"belongs to another key" in again.stderr
    listed = json.loads(cli(server, "key", "ssh-ls", "--json"))
    assert {(each["key_name"], each["name"]) for each in listed} == {("mine", "me"), ("other", "theirs")}
    assert "theirs" in cli(server, "key", "ssh-ls", "other")


def test_ones_own_keys_over_http(door: Door, server: Served, api: str) -> None:
    identity = new_identity(door.folder, "mine-too")
    public = Path(f"{identity}.pub").read_text()
    mine = Door(server, door.port, door.folder, identity)
    other = server.new_key("bystander")
    with server.client(api) as client, server.client(other) as bystander:
        made = client.post("/v1/me/ssh-keys", json={"public": public})
        assert made.status_code == 201, made.text
        assert made.json()["name"] == "mine-too"
        print_ = made.json()["fingerprint"]
        assert [each["fingerprint"] for each in client.get("/v1/me/ssh-keys").json()["items"]] == [print_]
        assert mine.ssh("echo hi").stdout == b"hi\n"
        assert bystander.get("/v1/me/ssh-keys").json()["items"] == []
        assert bystander.post("/v1/me/ssh-keys", json={"public": public}).status_code == 422
        assert bystander.delete(f"/v1/me/ssh-keys/{print_}").status_code == 204
        assert mine.ssh("echo hi").stdout == b"hi\n"
        assert client.delete(f"/v1/me/ssh-keys/{print_}").status_code == 204
        assert client.delete(f"/v1/me/ssh-keys/{print_}").status_code == 204
        assert refused(mine.ssh("true"))
        for wrong in ("", "x", "ssh-ed25519 AAAA", public * 2, 'command="id" ' + public, Path(identity).read_text()):
            answer = client.post("/v1/me/ssh-keys", json={"public": wrong})
            assert answer.status_code == 422, wrong
            assert "b3BlbnNzaC1rZXk" not in answer.text
        weak = new_identity(door.folder, "weak", "-t", "rsa", "-b", "1024")
        answer = client.post("/v1/me/ssh-keys", json={"public": Path(f"{weak}.pub").read_text()})
        assert (answer.status_code, "weak" in answer.json()["detail"]) == (422, True)


def test_a_revoked_key_ends_its_sessions(door: Door, server: Served) -> None:
    identity = new_identity(door.folder, "leaver")
    leaver = Door(server, door.port, door.folder, identity)
    server.new_key("leaver", "--tenant", "mine")
    cli(server, "key", "ssh-add", "leaver", f"{identity}.pub")
    session = subprocess.Popen(
        leaver.command("echo in; cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert session.stdout is not None
        assert session.stdout.readline() == b"in\n"
        cli(server, "key", "rm", "leaver")
        began = time.monotonic()
        assert session.wait(WAIT) == 255
        assert time.monotonic() - began < 10
        assert refused(leaver.ssh("true"))
    finally:
        session.kill()
        session.communicate()
    assert door.ssh("true").returncode == 0


def test_the_host_key_stays_and_is_private(door: Door, server: Served) -> None:
    path = server.home / "server/ssh/host_ed25519"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    told = subprocess.run(["ssh-keygen", "-l", "-f", str(path)], capture_output=True, check=True).stdout.decode()
    assert server.told["ssh"]["fingerprint"] == told.split()[1]


def test_the_audit_log_tells(door: Door, server: Served) -> None:
    door.ssh("echo secret-word")
    lines = [json.loads(line) for line in (server.home / "server/audit.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["action"] == "ssh.exec"][-1]
    assert (last["name"], last["tenant"], last["address"], last["detail"]) == ("mine", "mine", "127.0.0.1", "echo")
    assert {"ssh.login", "ssh.sftp", "ssh.shell", "ssh.forward"} <= {line["action"] for line in lines}
    assert "secret-word" not in (server.home / "server/audit.jsonl").read_text()


def test_garbage_and_strangers_that_say_nothing(door: Door) -> None:
    for sent in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"SSH-2.0-x\r\n" + os.urandom(4096), b""):
        with socket.create_connection(("127.0.0.1", door.port), timeout=WAIT) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    crowd = [socket.create_connection(("127.0.0.1", door.port), timeout=WAIT) for _ in range(80)]
    try:
        assert door.ssh("echo hi", flags=("-b", "127.0.0.2")).stdout == b"hi\n"  # they keep nobody else out
        turned_away = 0
        for each in crowd[70:]:
            each.settimeout(WAIT)
            turned_away += not each.recv(1)
        assert turned_away == 10
    finally:
        for each in crowd:
            each.close()
    until("it serves again", lambda: door.ssh("echo hi").stdout == b"hi\n")
    assert "Traceback" not in (door.server.log or Path("/dev/null")).read_text()


@pytest.mark.parametrize("kind", ["rsa2048-sha256", "diffie-hellman-group18-sha512", "diffie-hellman-group14-sha256"])
def test_strangers_have_nothing_costly_reckoned(door: Door, kind: str) -> None:
    async def main() -> None:
        with pytest.raises(asyncssh.KeyExchangeFailed):
            await asyncssh.connect("127.0.0.1", door.port, known_hosts=None, config=None, kex_algs=[kind])

    asyncio.run(bounded(main()))


# -- sleepers, and the server's end ----------------------------------------------------


def test_a_login_wakes_who_sleeps(door: Door, api: str) -> None:
    if not os.environ.get("SLOPLET_TEST_RUNSC"):
        pytest.skip("capability: gvisor needs runsc")
    with door.server.client(api) as client:
        made = client.post("/v1/sandboxes", json={"engine": "gvisor", "name": "sleeper"})
        assert made.status_code == 201, made.text
        assert door.ssh("echo kept > /workspace/f", name="sleeper").returncode == 0
        assert client.post("/v1/sandboxes/sleeper/pause").json()["state"] == "paused"
        assert door.ssh("cat f", name="sleeper").stdout == b"kept\n"
        assert client.post("/v1/sandboxes/sleeper/pause").json()["state"] == "paused"
        assert door.sftp("ls", name="sleeper").returncode == 0
        assert client.delete("/v1/sandboxes/sleeper").status_code == 204


def test_a_server_that_ends_hangs_up(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with served(home, "--ssh-port", "0") as server:
        identity = new_identity(tmp_path, "id")
        cli(server, "key", "ssh-add", "admin", f"{identity}.pub")
        door = Door(server, server.told["ssh"]["port"], tmp_path, identity)
        (tmp_path / "known").write_text("")
        with server.client() as client:
            assert client.post("/v1/sandboxes", json={"name": "dev", "engine": "container"}).status_code == 201
        command = door.command("echo in; sleep 91919")
        command[command.index("StrictHostKeyChecking=yes")] = "StrictHostKeyChecking=no"
        session = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert session.stdout is not None
        assert session.stdout.readline() == b"in\n"
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 10
        assert session.wait(WAIT) == 255
        session.communicate()
        gone = subprocess.run(
            [sys.executable, "-m", "sloplet.cli", "exec", "dev", "-c", "pgrep -fc '^sleep 91919'"],
            env=environment(home), capture_output=True,
        )  # fmt: skip
        assert gone.stdout.strip() == b"0"
