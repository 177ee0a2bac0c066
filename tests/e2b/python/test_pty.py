"""Terminals."""

from __future__ import annotations

import pytest

from conftest import until
from e2b import CommandExitException, PtySize, Sandbox


def test_a_shell_in_a_terminal(shared: Sandbox) -> None:
    said: list[bytes] = []
    terminal = shared.pty.create(PtySize(rows=24, cols=80), envs={"ABC": "123"}, cwd="/")
    shared.pty.send_stdin(terminal.pid, b"echo $ABC in $PWD; tput cols; exit\n")
    result = terminal.wait(on_pty=said.append)
    text = b"".join(said).decode()
    assert result.exit_code == 0
    assert "123 in /" in text
    assert "80\r\n" in text


def test_its_size_can_be_changed(shared: Sandbox) -> None:
    said: list[bytes] = []
    terminal = shared.pty.create(PtySize(rows=24, cols=80))
    shared.pty.resize(terminal.pid, PtySize(rows=30, cols=117))
    shared.pty.send_stdin(terminal.pid, b"tput cols; exit 3\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=said.append)
    assert ended.value.exit_code == 3
    assert "\r117\r" in b"".join(said).decode()


def test_found_again(shared: Sandbox) -> None:
    terminal = shared.pty.create(PtySize(rows=24, cols=80), envs={"FOO": "bar"})
    terminal.disconnect()
    again = shared.pty.connect(terminal.pid)
    assert again.pid == terminal.pid
    said: list[bytes] = []
    shared.pty.send_stdin(again.pid, b"echo $FOO; exit\n")
    assert again.wait(on_pty=said.append).exit_code == 0
    assert "bar" in b"".join(said).decode()


def test_ended(shared: Sandbox) -> None:
    terminal = shared.pty.create(PtySize(rows=24, cols=80))
    assert shared.pty.kill(terminal.pid) is True
    until(lambda: terminal.pid not in [each.pid for each in shared.commands.list()])
    assert shared.pty.kill(999_999) is False
