"""cloud-init in real sandboxes: what it leaves, that it runs once, and that nothing is left of one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import gvisor_environment, sloplet

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.errors import BuildFailed, RecipeInvalid, SandboxMismatch, UnsupportedOperation
from sloplet.state.home import Home
from sloplet.state.store import Store

FILE = """#cloud-config
env: {GREETING: "hello there"}
hostname: blue
groups: [{ops: [agent]}]
users:
  - default
  - name: worker
    groups: [ops, video]
    sudo: ALL=(ALL) NOPASSWD:ALL
    ssh_authorized_keys: [ssh-ed25519 AAAA me@x]
  - {name: nobody2, system: true}
write_files:
  - {path: /opt/app/early, content: "1"}
  - {path: /opt/app/conf, content: "late", owner: "worker:ops", permissions: '0640', defer: true}
bootcmd:
  - test ! -e /opt/app && mkdir -p /opt/app && touch /opt/app/boot
runcmd:
  - cd /opt/app
  - HERE=yes
  - [touch, "two words"]
  - echo "$GREETING, $HERE, $(id -un)" > said
  - |
    cat <<END >> count
    once
    END
"""


@pytest.fixture(params=["container", "gvisor"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "gvisor":
        for key, value in gvisor_environment().items():
            monkeypatch.setenv(key, value)
    probe = registry.load(name).probe()
    if not probe.available or not probe.capabilities.users:
        pytest.skip(f"{name} cannot have several users here: {probe.reason}")
    return name


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> str:
    probe = registry.load("container").probe()
    if not probe.available or not probe.capabilities.users:
        pytest.skip("no container with several users here")
    return "container"


def test_all_of_it(engine: str) -> None:
    with Sandbox(engine=engine, cloud_init=FILE) as box:

        def out(command: str, user: str | None = None) -> str:
            return box.run(command, user=user, check=True).stdout.strip()

        assert out("cat /opt/app/said") == "hello there, yes, root"
        assert out("echo $GREETING; hostname; id -un") == "hello there\nblue\nagent"
        assert out("cd /opt/app && ls") == "boot\nconf\ncount\nearly\nsaid\ntwo words"
        assert out("stat -c '%U:%G %a' /opt/app/conf") == "worker:ops 640"
        assert "ops" in out("id -nG").split()
        assert set(out("id -nG", "worker").split()) == {"worker", "ops", "video", "sudo"}
        assert out("cd ~ && pwd && stat -c '%U %a' . .ssh .ssh/authorized_keys", "worker") == (
            "/home/worker\nworker 755\nworker 700\nworker 600"
        )
        assert out("sudo id -un", "worker") == "root"
        assert box.run("cat /etc/shadow").exit_code != 0, "its users do not read it"
        assert out("sudo cat /etc/shadow | grep worker").startswith("worker:!")
        assert out("sudo cat /var/lib/cloud/instance/user-data.txt").startswith("#cloud-config")


@pytest.mark.parametrize("user", ["1000:1000", "agent:agent", "1000"])
def test_its_own_user_however_written(container: str, user: str) -> None:
    file = "#cloud-config\nusers: [{name: default, groups: [ops]}]\nssh_authorized_keys: [ssh-rsa AAAA]\n"
    with Sandbox(engine=container, user=user, cloud_init=file) as box:
        assert box.run("cat ~/.ssh/authorized_keys; grep ops /etc/group", check=True).stdout.endswith(":agent\n")


@pytest.mark.parametrize("users", ["[default, {name: worker}]", "[{name: worker}]"])
def test_its_own_user_may_be_made_by_it(container: str, users: str) -> None:
    file = f"#cloud-config\nusers: {users}\n"
    with Sandbox(engine=container, user="worker", cloud_init=file) as box:
        assert box.run("touch x && id -un && pwd", check=True).stdout == "worker\n/workspace\n"


def test_a_default_that_has_no_account(container: str) -> None:
    with Sandbox(engine=container, user="1234", cloud_init="#cloud-config\nusers: [default]\n") as box:
        assert box.run("id -u", check=True).stdout == "1234\n"
    file = "#cloud-config\nusers: [{name: default, groups: [ops]}]\n"
    with pytest.raises(BuildFailed, match="no user '1234'"):
        Sandbox(engine=container, user="1234", cloud_init=file).start()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    assert sloplet("rm", "--all", "--force").returncode == 0


def test_once_in_the_life_of_a_named_one(home: Path, engine: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(FILE)
    made = sloplet("create", "dev", "--engine", engine, "--cloud-init", str(tmp_path / "file"))
    assert made.returncode == 0, made.stderr
    for _ in range(2):
        with Sandbox("dev", engine=engine, cloud_init=tmp_path / "file") as box:
            assert box.run("cat /opt/app/count", check=True).stdout == "once\n"
            assert box.spec.cloud_init is not None
    if engine == "gvisor":
        copies = Sandbox.connect("dev").fork(2)
        for copy in copies:
            assert copy.run("cat /opt/app/count", check=True).stdout == "once\n"
            copy.kill()
    (tmp_path / "file").write_text(FILE + "final_message: other\n")
    with pytest.raises(SandboxMismatch, match="cloud_init"):
        Sandbox("dev", engine=engine, cloud_init=tmp_path / "file").start()
    assert b"once" not in sloplet("info", "dev", "--json").stdout, "its text is not kept"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runcmd:\n  - echo fine\n  - 'echo oh; echo no >&2; exit 3'\n  - touch /never", "runcmd, line 4: echo oh"),
        ("bootcmd:\n  - [cat, /no/such]", "bootcmd, line 3: cat /no/such"),
        ("runcmd: ['if']", "runcmd, line 2"),
        ("write_files:\n  - {path: /proc/version, content: x}", "write_files, line 3: /proc/version"),
        ("write_files:\n  - {path: /x, owner: nobody-here}", "write_files, line 3: /x"),
        ("write_files:\n  - {path: /x, owner: nobody-here}", "need defer: true"),
        ("runcmd: [systemctl enable --now nginx]", "no systemd: start the program itself"),
        ("users:\n  - {name: a, uid: 1000}", "line 3: the uid 1000"),
        ("timezone: Mars/Base", "timezone, line 2"),
        ("packages: [hello]", "packages, line 2"),
    ],
)
def test_what_fails_is_told_and_gone(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))
    from sloplet.runtime import Runtime
    from sloplet.sandbox import AsyncSandbox

    async def main() -> None:
        runtime = Runtime(Home(tmp_path / "home"))
        try:
            box = AsyncSandbox(engine=container, cloud_init="#cloud-config\n" + text, controller=runtime)
            with pytest.raises(BuildFailed) as caught:
                await box.start()
            assert said in str(caught.value)
            if "oh" in text:
                assert "oh\nno" in str(caught.value)
                assert "exit code 3" in str(caught.value)
            assert runtime.held == 0
        finally:
            await runtime.aclose()

    asyncio.run(main())
    store = Store(Home(tmp_path / "home"))
    assert store.list() == []
    store.close()
    assert list((tmp_path / "home" / "sandboxes").iterdir()) == []


def test_a_caller_who_gives_up_leaves_nothing(container: str, tmp_path: Path) -> None:
    from sloplet.runtime import Runtime
    from sloplet.sandbox import AsyncSandbox

    async def main() -> None:
        runtime = Runtime(Home(tmp_path / "home"))
        seen: list[str] = []
        events = runtime.events()
        box = AsyncSandbox(
            engine=container, controller=runtime,
            cloud_init="#cloud-config\nwrite_files: [{path: /x}]\nruncmd: [sleep 1000]\n",
        )  # fmt: skip
        starting = asyncio.ensure_future(box.start())
        async for event in events:
            seen.append(event.data.get("module", event.type))
            if seen[-1] == "runcmd":
                break
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert seen == ["write_files", "runcmd"]
        assert (runtime.held, await runtime.list()) == (0, [])
        await runtime.aclose()

    asyncio.run(main())
    assert list((tmp_path / "home" / "sandboxes").iterdir()) == []


def test_a_named_one_that_fails_leaves_its_name_free(home: Path, container: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("#cloud-config\nruncmd: ['exit 1']\n")
    words = ("create", "dev", "--engine", container, "--cloud-init", str(tmp_path / "file"))
    done = sloplet(*words)
    assert done.returncode == 125
    assert b"cloud-init, runcmd, line 2: exit 1" in done.stderr
    assert sloplet("ls", "-q").stdout == b""
    (tmp_path / "file").write_text("#cloud-config\nruncmd: ['exit 0']\n")
    assert sloplet(*words).returncode == 0


def test_a_bad_file_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("#cloud-config\nruncmd:\n - a\nmounts: [x]\n")
    with pytest.raises(RecipeInvalid, match="line 4"):
        Sandbox(cloud_init=tmp_path / "file")
    done = sloplet("run", "--cloud-init", str(tmp_path / "file"), "true")
    assert (done.returncode, done.stderr.count(b"\n")) == (125, 1)
    assert b"line 4" in done.stderr


def test_engines_without_users_refuse() -> None:
    if not registry.load("process").probe().available:
        pytest.skip("no process engine here")
    with pytest.raises(UnsupportedOperation, match="one user"), Sandbox(engine="process", cloud_init=FILE):
        pass


def test_a_template_may_be_set_up_further(home: Path, container: str) -> None:
    with Sandbox("base", engine=container, cloud_init="#cloud-config\nruncmd: [echo 1 > /opt/one]\n") as box:
        box.template("ready")
    with Sandbox("next", template="ready", cloud_init="#cloud-config\nruncmd: [cat /opt/one > /opt/two]\n") as box:
        assert box.run("cat /opt/two", check=True).stdout == "1\n"
    with Sandbox("plain", template="ready") as box:
        assert box.run("ls /opt", check=True).stdout == "one\n"
