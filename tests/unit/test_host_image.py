"""image="host": what of the host comes into view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sloplet.engines.machine import maps_high_ids, parse_kernel, parse_subids
from sloplet.images import host

pytestmark = pytest.mark.anyone

VIEW = host.HostView(
    entries={"/usr": "dir", "/bin": "-> usr/bin", "/bin/sh": "file", "/etc/profile": "file",
             "/etc/localtime": "-> /usr/share/zoneinfo/UTC", "/etc/ssl/certs": "dir",
             "/etc/os-release": "-> /etc/static/os-release"},
    small={"/etc/profile": b"umask 022\n"},
    prefixes=("/usr", "/opt/py"),
    private=("/home/ann", "/home", "/root"),
)  # fmt: skip


def parts(view: host.HostView) -> dict[str, host.Part]:
    return {part.path: part for part in host.layout(view)}


def test_merged_usr_stays_symlinks() -> None:
    found = parts(VIEW)
    assert found["/usr"] == host.Overlay("/usr")
    assert found["/bin"] == host.Link("/bin", "usr/bin")


def test_a_host_without_merged_usr() -> None:
    found = parts(replace(VIEW, entries={**VIEW.entries, "/bin": "dir", "/lib": "dir"}))
    assert found["/bin"] == host.Overlay("/bin")
    assert found["/lib"] == host.Overlay("/lib")


def test_etc_holds_generated_users_and_public_names_only() -> None:
    etc = {path: part for path, part in parts(VIEW).items() if path.startswith("/etc/")}
    generated = {"/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/mtab"}
    assert set(etc) == generated | {"/etc/profile", "/etc/localtime", "/etc/ssl/certs", "/etc/os-release"}
    assert etc["/etc/localtime"] == host.Link("/etc/localtime", "/usr/share/zoneinfo/UTC")
    assert isinstance(etc["/etc/os-release"], host.Bind)  # its target would not be there
    assert isinstance(etc["/etc/passwd"], host.File)
    assert b"agent:x:1000:1000" in etc["/etc/passwd"].content


def test_names_that_hold_secrets_are_on_no_list() -> None:
    secrets = "shadow gshadow ssh sudoers krb5.keytab pip.conf npmrc gitconfig docker environment apt profile.d"
    assert not set(secrets.split()) & set(host._ETC)


def test_the_interpreter_is_shown_where_it_is_and_its_parents_are_bare() -> None:
    view = replace(VIEW, prefixes=("/root/.pyenv/versions/3.12",))
    found = host.layout(view)
    assert found[-1] == host.Overlay("/root/.pyenv/versions/3.12")
    assert host.Folder("/root/.pyenv", 0o755) in found
    assert host.Folder("/root", 0o700) not in found
    assert host.Folder("/root", 0o755) in found
    assert host.python_path(view) == ["/root/.pyenv/versions/3.12/bin"]


def test_a_prefix_that_is_somebodys_home_is_not_shown() -> None:
    for prefix in ("/home/ann", "/home", "/", "/root"):
        view = replace(VIEW, prefixes=(prefix,))
        assert host.interpreter_parts(view) == []
        assert host.python_path(view) == []


def test_a_virtual_environment_inside_its_base_is_one_part() -> None:
    view = replace(VIEW, prefixes=("/opt/py", "/opt/py/envs/x"))
    assert host.interpreter_parts(view) == [host.Overlay("/opt/py")]
    assert host.python_path(view) == ["/opt/py/envs/x/bin", "/opt/py/bin"]


def test_mount_points_and_escapes() -> None:
    text = "1 2 8:1 / / rw - ext4 /dev/a rw\n3 1 8:2 / /usr/my\\040disk rw - ext4 /dev/b rw\n"
    points = host.mount_points(text)
    assert points == ("/", "/usr/my disk")
    assert host.submounts(replace(VIEW, mount_points=points), "/usr") == ("/usr/my disk",)


def test_facts() -> None:
    assert parse_kernel("6.18.44-fc") == (6, 18)
    assert parse_kernel("odd") == (0, 0)
    table = "bob:1:2\nann:100000:65536\n1001:5:10\nann:x:y\n"
    assert parse_subids(table, "ann", 1001) == (100000, 65536)
    assert parse_subids(table, "eve", 7) is None
    assert maps_high_ids("         0          0 4294967295\n")
    assert not maps_high_ids("0 100000 65536\n")
