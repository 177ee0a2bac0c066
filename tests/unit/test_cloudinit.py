"""cloud-config files as plans: what is taken, and what is told, in which line, about the rest."""

from __future__ import annotations

import base64
import gzip
import textwrap
from pathlib import Path
from typing import Any

import pytest

from sloplet.cloudinit.accounts import Accounts
from sloplet.cloudinit.asked import asked
from sloplet.cloudinit.config import parse
from sloplet.cloudinit.packages import commands_for
from sloplet.cloudinit.plan import File, Group, Packages, User
from sloplet.cloudinit.senseless import SENSELESS
from sloplet.cloudspec import MAX_TEXT, CloudInitSpec
from sloplet.errors import BuildFailed, RecipeInvalid, SpecError
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone


def plan(text: str) -> Any:
    return parse("#cloud-config\n" + textwrap.dedent(text))


def test_a_whole_file() -> None:
    found = plan(
        """
        hostname: blue
        timezone: Europe/Berlin
        locale: C.UTF-8
        env: {A: "1", DEBUG: yes, PORT: 8080}
        packages: [git, [jq, "1.6-2"], python3=3.11]
        package_update: true
        bootcmd: [echo early]
        runcmd:
          - echo "a b"
          - [ls, -l, "x y", 3]
        final_message: done
        ssh_authorized_keys: ["ssh-ed25519 AAAA, with a comma"]
        """
    )
    assert (found.hostname, found.timezone, found.locale) == ("blue", (4, "Europe/Berlin"), "C.UTF-8")
    assert found.env == {"A": "1", "DEBUG": "yes", "PORT": "8080", "LANG": "C.UTF-8"}
    assert found.packages == Packages(7, ("git", "jq=1.6-2", "python3=3.11"), update=True)
    assert [item.script for item in found.bootcmd] == ["echo early"]
    assert [(item.line, item.script) for item in found.runcmd] == [(11, 'echo "a b"'), (12, "ls -l 'x y' 3")]
    assert found.default_keys == ("ssh-ed25519 AAAA, with a comma",)
    assert found.message == "done"


def test_an_empty_file_asks_for_nothing() -> None:
    assert plan("") == plan("runcmd:\nusers: null\npackage_update: false\n")


def test_files() -> None:
    zipped = base64.b64encode(gzip.compress(b"zipped")).decode()
    found = plan(
        f"""
        write_files:
          - {{path: /a, content: text}}
          - path: /b
            content: aGVs
              bG8=
            encoding: b64
            owner: agent:ops
            permissions: '0750'
            append: true
          - {{path: /c, content: {zipped}, encoding: gz+b64, defer: true}}
          - {{path: /d, permissions: 0600}}
        """
    )
    assert found.files == (
        File(4, "/a", b"text"),
        File(5, "/b", b"hello", 0o750, "agent:ops", append=True),
        File(13, "/d", b"", 0o600),
    )
    assert found.deferred == (File(12, "/c", b"zipped"),)


def test_users_and_groups() -> None:
    found = plan(
        """
        groups: [plain, {ops: [agent, root]}, "x, y"]
        users:
          - default
          - name: worker
            gecos: The Worker
            groups: [ops, video]
            sudo: ["ALL=(ALL) NOPASSWD:ALL"]
            uid: 1234
            homedir: /srv/worker
            shell: /bin/sh
            passwd: $6$saltsalt$abcdefghijklmnop
            lock_passwd: false
          - {name: daemon2, system: true, no_user_group: true}
        """
    )
    assert found.groups == (Group("plain"), Group("ops", ("agent", "root")), Group("x"), Group("y"))
    default, worker, daemon = found.users
    assert default == User(5, "default")
    assert worker == User(
        6, "worker", 1234, "The Worker", "/srv/worker", "/bin/sh", groups=("ops", "video"),
        password="$6$saltsalt$abcdefghijklmnop", locked=False, sudo=("ALL=(ALL) NOPASSWD:ALL",),
    )  # fmt: skip
    assert (daemon.primary_group, daemon.system, daemon.create_home) == ("users", True, False)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("runcmdd: [x]", 2, "did you mean runcmd?"),
        ("write-files: []", 2, "did you mean write_files?"),
        ("colour: red", 2, "there is no key 'colour'"),
        ("\n\ndisk_setup: {}", 4, "makes no sense in a sandbox"),
        ("power_state: {mode: reboot}", 2, "does not boot"),
        ("runcmd: echo", 2, "must be a list"),
        ("runcmd:\n - echo: x", 3, "quotes"),
        ("runcmd: ['']", 2, "is empty"),
        ("runcmd: [[]]", 2, "no words"),
        ("runcmd: [true]", 2, "must be a text"),
        ("runcmd: [a]\nruncmd: [b]", 3, "twice: also in line 2"),
        ("users: {a: b}", 2, "must be a list"),
        ("users: [{nam: x}]", 2, "did you mean name?"),
        ("users: [{gecos: x}]", 2, "has no name"),
        ("users: [{name: 'a b'}]", 2, "not a name"),
        ("users: [{name: 'a:0:0'}]", 2, "not a name"),
        ("users: [{name: a}, {name: a}]", 2, "twice"),
        ("users:\n - {name: a, uid: -1}", 3, "whole number"),
        ("users:\n - {name: a, uid: 70000}", 3, "at most"),
        ("users: [{name: a, homedir: x}]", 2, "absolute"),
        ("users: [{name: a, homedir: '/x:y'}]", 2, "absolute"),
        ("users: [{name: a, shell: sh}]", 2, "absolute"),
        ("users: [{name: a, gecos: 'x:y'}]", 2, "gecos"),
        ("users: [{name: a, passwd: secret}]", 2, "not the hash"),
        ("users: [{name: a, plain_text_passwd: secret}]", 2, "makes no sense"),
        ("users: [{name: a, sudo: 'ALL=(root) /bin/ls'}]", 2, "cannot be enforced"),
        ("users: [{name: a, sudo: true}]", 2, "cannot be enforced"),
        ("users: [{name: a, ssh_authorized_keys: [\"x\\ny\"]}]", 2, "one line"),
        ("groups: ['a b']", 2, "not a name"),
        ("write_files: [{content: x}]", 2, "no path"),
        ("write_files: [{path: a}]", 2, "absolute"),
        ("write_files: [{path: /a/../b}]", 2, "absolute"),
        ("write_files: [{path: /a/}]", 2, "absolute"),
        ("write_files: [{path: /a, permissions: 644}]", 2, "write '0644'"),
        ("write_files: [{path: /a, permissions: '0999'}]", 2, "no permissions"),
        ("write_files: [{path: /a, permissions: rw}]", 2, "no permissions"),
        ("write_files: [{path: /a, owner: 'a b'}]", 2, "not an owner"),
        ("write_files: [{path: /a, encoding: rot13}]", 2, "no encoding"),
        ("write_files: [{path: /a, content: '%', encoding: b64}]", 2, "not base64"),
        ("write_files: [{path: /a, content: aGVsbG8=, encoding: gz+b64}]", 2, "not gzip"),
        ("write_files: [{path: /a, append: maybe}]", 2, "true or false"),
        ("write_files: [{path: /a, source: {uri: http://x}}]", 2, "makes no sense"),
        ("packages: ['-o']", 2, "not the name"),
        ("packages: ['a b']", 2, "not the name"),
        ("packages: [[a, b, c]]", 2, "[name, version]"),
        ("packages: [{snap: [x]}]", 2, "one manager alone"),
        ("env: [A]", 2, "must be a mapping"),
        ("env: {'a b': x}", 2, "not the name of a variable"),
        ("env: {A: \"x\\ny\"}", 2, "line break"),
        ("hostname: a_b", 2, "not a host name"),
        ("timezone: ../../etc/passwd", 2, "not a time zone"),
        ("locale: 'a b'", 2, "not a locale"),
        ("a: [", 3, "not YAML"),
        ("runcmd: [\tx: y: z]", 2, "not YAML"),
        ("a: !!python/object/apply:os.system [id]", 2, "the tag"),
        ("base: &x {a: 1}\nc:\n  <<: *x", 4, "merge keys"),
        ("- a list", 2, "must be a mapping"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(RecipeInvalid) as caught:
        parse("#cloud-config\n" + text)
    assert said in str(caught.value)
    assert f"line {line}:" in str(caught.value)


@pytest.mark.parametrize("key", sorted(SENSELESS))
def test_keys_that_make_no_sense_say_why(key: str) -> None:
    with pytest.raises(RecipeInvalid, match="makes no sense") as caught:
        plan(f"{key}: x")
    assert caught.value.hint == SENSELESS[key]


@pytest.mark.parametrize(
    "text", ["", "runcmd: []", "#!/bin/sh\nid", "## template: jinja\n#cloud-config\n", "#include\nhttp"]
)
def test_what_is_no_cloud_config(text: str) -> None:
    with pytest.raises(RecipeInvalid, match="does not begin with #cloud-config"):
        parse(text)


def test_a_few_lines_that_stand_for_millions() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    for text in ("\n".join(lines), "a: &a [*a]", "[" * 250_000, "{a: " * 200 + "}" * 200):
        with pytest.raises(RecipeInvalid):
            parse("#cloud-config\n" + text)


def test_an_alias_is_what_it_stands_for() -> None:
    found = plan("runcmd: [&x echo, *x]")
    assert [item.script for item in found.runcmd] == ["echo", "echo"]


def test_gzip_that_never_ends() -> None:
    bomb = base64.b64encode(gzip.compress(bytes(40 * 2**20))).decode()
    with pytest.raises(RecipeInvalid, match="longer than"):
        plan(f"write_files: [{{path: /a, encoding: gz+b64, content: {bomb}}}]")


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_a_file_or_its_text(tmp_path: Any) -> None:
    text = "#cloud-config\nenv: {A: b}\nhostname: blue\n"
    (tmp_path / "file").write_text(text)
    found = asked(tmp_path / "file")
    assert found == asked(str(tmp_path / "file")) == asked(text)
    assert (found.env, found.hostname) == ({"A": "b"}, "blue")
    assert found.spec.recorded() == found.spec
    assert found.spec.recorded().text == ""


@pytest.mark.parametrize("source", ["", "/no/such/file", "/", "a\0b", 7, b"x"])
def test_no_file(source: Any) -> None:
    with pytest.raises(SpecError):
        asked(source)


def test_bad_files(tmp_path: Any) -> None:
    (tmp_path / "long").write_text("#cloud-config\n" + "#" * MAX_TEXT)
    (tmp_path / "binary").write_bytes(b"#cloud-config\n\xff")
    for name, said in (("long", "longer than"), ("binary", "UTF-8")):
        with pytest.raises(SpecError, match=said):
            asked(tmp_path / name)


def test_the_spec_keeps_the_digest() -> None:
    one, other = CloudInitSpec.of("#cloud-config\n"), CloudInitSpec.of("#cloud-config\nenv: {}\n")
    spec = SandboxSpec.make("x", cloud_init=one)
    assert spec.sudo is True
    assert SandboxSpec.from_dict(spec.to_dict()).cloud_init.text == one.text  # type: ignore[union-attr]
    assert "text" not in spec.recorded().to_dict()["cloud_init"]
    assert SandboxSpec.from_dict(spec.recorded().to_dict()) == spec
    assert SandboxSpec.make("x", cloud_init=other) != spec
    with pytest.raises(SpecError, match="powers"):
        SandboxSpec.make(cloud_init=one, sudo=False)
    with pytest.raises(SpecError, match="pool"):
        SandboxSpec.make(cloud_init=one, pool=1)


# -- accounts ----------------------------------------------------------------------------------------------------------

PASSWD = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\nodd line\n"
GROUP = "root:x:0:\nagent:x:1000:\nvideo:x:44:root\n"


def test_accounts() -> None:
    accounts = Accounts(PASSWD, GROUP, "root:*:1::::::\n")
    accounts.add_group(Group("ops", ("agent",)))
    made = accounts.add_user(User(1, "new", groups=("video", "fresh"), sudo=("x",)), "agent", "/bin/bash")
    assert (made.uid, made.home, made.new) == (1001, "/home/new", True)
    again = accounts.add_user(User(2, "default", groups=("video",)), "agent", "/bin/bash")
    assert (again.name, again.uid, again.new) == ("agent", 1000, False)
    texts = accounts.texts
    assert texts["/etc/passwd"] == PASSWD + f"new:x:1001:{made.gid}::/home/new:/bin/bash\n"
    groups = dict(line.split(":", 1) for line in texts["/etc/group"].splitlines())
    assert groups["video"] == "x:44:root,new,agent"
    assert groups["ops"].endswith(":agent")
    assert groups["sudo"].endswith(":new")
    assert "fresh" in groups
    assert texts["/etc/shadow"] == "root:*:1::::::\nnew:!::0:99999:7:::\n"


def test_accounts_that_are_there_already_are_let_be() -> None:
    accounts = Accounts(PASSWD, GROUP, "")
    accounts.add_user(User(1, "agent", uid=7, home="/x"), "agent", "/bin/sh")
    assert accounts.texts == {}


@pytest.mark.parametrize(
    ("user", "field"),
    [
        (User(1, "a", password="$6$x$yyyyyyyy", locked=False), "$6$x$yyyyyyyy"),
        (User(1, "a", password="$6$x$yyyyyyyy"), "!$6$x$yyyyyyyy"),
        (User(1, "a"), "!"),
        (User(1, "root", password="$6$x$yyyyyyyy", locked=False), "$6$x$yyyyyyyy"),
    ],
)
def test_passwords(user: User, field: str) -> None:
    accounts = Accounts(PASSWD, GROUP, "root:*:1::::::\n")
    accounts.add_user(user, "agent", "/bin/sh")
    rows = [line.split(":") for line in accounts.texts["/etc/shadow"].splitlines()]
    assert next(row[1] for row in rows if row[0] == user.name) == field


def test_a_uid_that_is_taken() -> None:
    with pytest.raises(BuildFailed, match="line 9: the uid 1000"):
        Accounts(PASSWD, GROUP, "").add_user(User(9, "a", uid=1000), "agent", "/bin/sh")


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "commands"),
    [
        (["apt-get", "dpkg"], ["update", "dist-upgrade", "install git jq=1.6"]),
        (["apk"], ["apk update", "apk upgrade", "apk add git jq=1.6"]),
        (["dnf"], ["dnf -y makecache", "dnf -y upgrade", "dnf -y install git jq-1.6"]),
        (["microdnf"], ["microdnf -y upgrade", "microdnf -y install git jq-1.6"]),
    ],
)
def test_package_managers(found: list[str], commands: list[str]) -> None:
    made = [" ".join(argv) for argv in commands_for(Packages(1, ("git", "jq=1.6"), upgrade=True), found)]
    assert [line.endswith(end) for line, end in zip(made, commands, strict=True)] == [True] * len(commands)


@pytest.mark.parametrize(("found", "said"), [([], "there is none"), (["apt-get"], "is it the host's")])
def test_no_package_manager(found: list[str], said: str) -> None:
    with pytest.raises(BuildFailed, match=said):
        commands_for(Packages(1, ("git",)), found)


def test_what_older_files_write() -> None:
    """As in tutorials, and as cloud-init itself takes it."""
    found = plan(
        """
        apt_update: true
        apt_upgrade: true
        users:
          - {name: demo, ssh-authorized-keys: [ssh-rsa AAAA], lock-passwd: false, primary-group: ops}
        """
    )
    assert found.packages == Packages(3, (), update=True, upgrade=True)
    assert found.users == (User(6, "demo", primary_group="ops", locked=False, keys=("ssh-rsa AAAA",)),)
    with pytest.raises(RecipeInvalid, match="line 3: package_update is there twice"):
        plan("package_update: true\napt_update: true")
    with pytest.raises(RecipeInvalid, match="line 2: 'lock_passwd' is there twice"):
        plan("users: [{name: a, lock_passwd: true, lock-passwd: true}]")


def test_binary_content() -> None:
    zipped = base64.b64encode(gzip.compress(b"zipped")).decode()
    found = plan(
        f"""
        write_files:
          - {{path: /a, content: !!binary f0VM}}
          - {{path: /b, content: !!binary {zipped}, encoding: gzip}}
        """
    )
    assert [file.content for file in found.files] == [b"\x7fEL", b"zipped"]
    for text, said in [
        ("write_files: [{path: /a, content: !!binary '='}]", "not base64"),
        ("write_files: [{path: /a, content: text, encoding: gzip}]", "not gzip"),
        ("runcmd: [!!binary aGk=]", "must be a text"),
        ("!!binary aGk=: x", "must be a text"),
    ]:
        with pytest.raises(RecipeInvalid, match=said):
            plan(text)


@pytest.mark.parametrize("text", ["hostname: blue\nfqdn: blue.test", "fqdn: blue.test\nhostname: blue"])
def test_a_host_name_comes_before_a_full_one(text: str) -> None:
    assert plan(text).hostname == "blue"
    assert plan("fqdn: blue.test").hostname == "blue.test"


def test_a_text_may_begin_with_an_empty_line() -> None:
    """As in a Python text in three quotes; lines are counted from its beginning."""
    assert asked("\n  \n#cloud-config\nhostname: blue\n").hostname == "blue"
    with pytest.raises(RecipeInvalid, match="line 3"):
        asked("\n#cloud-config\ncolour: red\n")


def test_a_file_that_is_cut_within_a_character_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "user-data"
    path.write_text("#cloud-config\n#" + "\u00e9" * MAX_TEXT)
    with pytest.raises(SpecError, match="longer than"):
        asked(path)


def test_lines_of_accounts_end_with_line_breaks_only() -> None:
    passwd = "root:x:0:0::/root:/bin/sh\nada:x:7:7:A\u2028B\x85C\x0cD:/:/bin/sh\n"
    accounts = Accounts(passwd, "", "")
    accounts.add_user(User(1, "bob"), "root", "/bin/sh")
    assert accounts.texts["/etc/passwd"] == passwd + "bob:x:1000:1000::/home/bob:/bin/sh\n"


def test_numbers_are_read_whole() -> None:
    assert plan(f"users: [{{name: a, uid: '{'0' * 25}5'}}]").users[0].uid == 5
