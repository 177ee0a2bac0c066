"""The parts of SSH that need no connection: keys, variables, and that no file of this machine is behind SFTP."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path

import asyncssh
import pytest
from asyncssh.sftp import SFTPServerHandler

from sloplet.errors import SpecError
from sloplet.server.keys import Keys
from sloplet.server.ssh import files, session
from sloplet.server.ssh.keys import MOST, SshKeys, host_key, parse_public
from sloplet.server.ssh.service import origin_of
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").open()


def public(comment: str = "me@there", kind: str = "ssh-ed25519") -> str:
    return asyncssh.generate_private_key(kind, comment).export_public_key().decode()


# -- SFTP ------------------------------------------------------------------------------

#: What asyncssh's own server does without touching a file.
PURE = {"channel", "connection", "env", "logger", "convert_attrs", "format_longname", "exit"}


def test_every_method_that_would_touch_this_machine_is_replaced() -> None:
    theirs = {name for name, _ in inspect.getmembers(asyncssh.SFTPServer) if not name.startswith("_")}
    assert theirs - PURE <= set(vars(files.SandboxFiles))
    assert {"open", "stat", "remove", "map_path", "statvfs"} <= theirs - PURE


def test_extensions_that_work_on_open_files_of_this_machine_are_not_there() -> None:
    named = {name for name, _ in files.Handler._extensions}
    assert named == set(files._KNOWN)
    handled = {kind for kind in files.Handler._packet_handlers if isinstance(kind, bytes)}
    assert handled == named
    assert b"copy-data" in SFTPServerHandler._packet_handlers  # there is something to leave out
    assert b"copy-data" not in handled


# -- sessions --------------------------------------------------------------------------


def test_variables_that_pass() -> None:
    kept = session.Environment()
    for name, value in (
        (b"LANG", b"de_DE.UTF-8"), (b"LC_ALL", b"C"), (b"LD_PRELOAD", b"x"), (b"LC_X", b"$(id)"), (b"LANG\n", b"x"),
        (b"LC_TIME", b"x" * 100), (b"PATH", b"/"), (b"\xff", b"\xff"),
    ):  # fmt: skip
        kept[name] = value
    assert kept == {b"LANG": b"de_DE.UTF-8", b"LC_ALL": b"C"}
    for each in range(1000):
        kept[b"LC_" + bytes([65 + each % 26, 65 + each // 26 % 26])] = b"C"
    assert len(kept) <= 20


def test_terminals() -> None:
    assert session.terminal_size(101, 31) == (31, 101)
    assert session.terminal_size(0, 0) == (24, 80)
    assert session.terminal_size(2**32 - 1, 2**32 - 1) == (10000, 10000)
    found = session.wanted_environment({"LC_ALL": "C", "EVIL": "1"}, "xterm", "dev")
    assert (found["TERM"], found["LC_ALL"], found["LANG"]) == ("xterm", "C", "C.UTF-8")
    assert "EVIL" not in found
    assert session.wanted_environment({}, "x\n;rm", "dev")["TERM"] == "dumb"
    assert session.wanted_environment({"LANG": "C"}, None, "dev") == {"LANG": "C"}


# -- keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"])
def test_kinds_of_keys(kind: str) -> None:
    key, comment = parse_public(f"# a comment\n\n{public('me and you', kind)}\n")
    assert (key.get_algorithm(), comment) == (kind, "me and you")


def test_what_is_no_public_key() -> None:
    good = public()
    private = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
    weak = asyncssh.generate_private_key("ssh-rsa", key_size=1024).export_public_key().decode()
    for text in ("", "x", good + good, "ssh-ed25519", "ssh-ed25519 AAAA", "ssh-ed25519 !!!!", private, weak,
                 'command="id" ' + good, "x" * 100_000, good.replace(" ", "\0"), "ssh-dss AAAA",
                 "ssh-ed25519-cert-v01@openssh.com AAAA"):  # fmt: skip
        with pytest.raises(SpecError) as caught:
            parse_public(text)
        assert private.splitlines()[1] not in str(caught.value)


def test_a_public_key_stands_for_one_key_that_is_valid(home: Home) -> None:
    keys, ssh = Keys(home), SshKeys(home)
    ana, _ = keys.create("ana")
    bob, _ = keys.create("bob")
    text = public()
    made = ssh.add(ana.id, text)
    assert ssh.add(ana.id, text, "renamed").fingerprint == made.fingerprint
    assert [each.name for each in ssh.list(ana.id)] == ["renamed"]
    assert ssh.list(bob.id) == []
    found = ssh.find(made.fingerprint)
    assert found is not None
    assert found.key == ana.id
    with pytest.raises(SpecError, match="another key"):
        ssh.add(bob.id, text)
    keys.revoke("ana")
    assert ssh.add(bob.id, text).key == bob.id  # who had it has no use for it any more
    with pytest.raises(SpecError, match="there is no"):
        ssh.remove(made.fingerprint, ana.id)
    assert ssh.remove("me@there").key == bob.id
    assert ssh.find(made.fingerprint) is None
    keys.close()
    ssh.close()


def test_two_of_one_name_are_told_apart_and_there_are_not_too_many(home: Home) -> None:
    keys, ssh = Keys(home), SshKeys(home)
    ana, _ = keys.create("ana")
    for _ in range(MOST):
        ssh.add(ana.id, public("same"))
    with pytest.raises(SpecError, match="fingerprint"):
        ssh.remove("same")
    with pytest.raises(SpecError, match=str(MOST)):
        ssh.add(ana.id, public())
    ssh.remove(ssh.list()[0].fingerprint)
    assert len(ssh.list()) == MOST - 1
    keys.close()
    ssh.close()


def test_the_host_key_is_made_once(home: Home) -> None:
    first = host_key(home)
    assert host_key(home).get_fingerprint() == first.get_fingerprint()
    path = home.path / "server/ssh/host_ed25519"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    told = subprocess.run(["ssh-keygen", "-l", "-f", str(path)], capture_output=True, check=True).stdout.decode()
    assert told.split()[1] == first.get_fingerprint()
    path.write_text("nonsense")
    with pytest.raises(SpecError, match="not a private key"):
        host_key(home)


# -- who is counted as one -------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
    ],
)
def test_where_strangers_come_from(one: str, other: str, same: bool) -> None:
    assert (origin_of(one) == origin_of(other)) is same
