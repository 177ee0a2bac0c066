"""Conformance: commands with a terminal."""

from __future__ import annotations

from ...engines.base import Capabilities
from ...process import AsyncProcess
from ...sync import Sandbox
from .support import needs_command, read_until, run_async


class TestTerminal:
    def test_is_one(self, box: Sandbox) -> None:
        script = "for fd in 0 1 2; do if [ -t $fd ]; then echo yes; else echo no; fi; done"
        assert box.run(script, pty=True).stdout.split() == ["yes"] * 3
        assert box.run(script).stdout.split() == ["no"] * 3
        assert box.run(script, input="").stdout.split() == ["no"] * 3

    def test_all_output_is_one_channel(self, box: Sandbox) -> None:
        result = box.run("echo out; echo err >&2", pty=True)
        assert result.stdout == "out\r\nerr\r\n"
        assert result.stderr_raw == b""

    def test_size_and_resize(self, box: Sandbox) -> None:
        needs_command(box, "stty")
        process = box.spawn("stty size; read x; stty size", pty=(33, 123))
        assert "33 123" in read_until(process, "\n")
        process.resize(50, 200)
        process.send("\n")
        assert "50 200" in process.wait().stdout
        assert "24 80" in box.run("stty size", pty=True).stdout

    def test_echo_and_lines(self, box: Sandbox) -> None:
        process = box.spawn('read x; echo "[$x]"', pty=True)
        process.send("typed\r")
        result = process.wait()
        assert result.stdout == "typed\r\n[typed]\r\n"

    def test_interrupt(self, box: Sandbox, capabilities: Capabilities) -> None:
        process = box.spawn(["cat"], pty=True)  # not a shell: dash itself may lose an interrupt while it forks
        process.send("ready\n")
        read_until(process, "ready\r\nready\r\n")
        process.send(b"\x03")
        result = process.wait()
        assert (result.exit_code, result.signal) == (130, 2)
        assert ("^C" if capabilities.echoes_controls else "\x03") in result.stdout

    def test_end_of_file(self, box: Sandbox) -> None:
        process = box.spawn("cat; echo over", pty=True)
        process.send("a\n")
        read_until(process, "a\r\na\r\n")
        process.send(b"\x04")
        assert process.wait().stdout.endswith("over\r\n")

    def test_close_stdin_is_end_of_file(self, box: Sandbox) -> None:
        process = box.spawn("cat; echo over", pty=True)
        process.send("a\n")
        process.close_stdin()
        assert process.wait().stdout.endswith("over\r\n")

    def test_interactive_shell(self, box: Sandbox) -> None:
        process = box.spawn(["/bin/sh"], pty=True)
        process.send("echo $((40+2))\n")
        read_until(process, "42\r\n")
        process.send("exit 5\n")
        assert process.wait().exit_code == 5

    def test_many_resizes_at_once(self, box: Sandbox) -> None:
        needs_command(box, "stty")

        async def burst(process: AsyncProcess) -> None:
            for rows in range(1, 1001):
                await process.resize(rows, 7)

        process = box.spawn("read x; stty size", pty=True)
        run_async(burst(process._inner))
        process.send("\n")
        assert "1000 7" in process.wait().stdout

    def test_is_listed_as_terminal(self, box: Sandbox) -> None:
        process = box.spawn("read x", pty=True)
        assert next(info for info in box.processes() if info.pid == process.pid).tty
        process.kill()
        process.wait()
