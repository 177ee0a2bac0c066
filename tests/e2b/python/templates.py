"""Templates: built step by step, known by names and tags, and what runs in them from the beginning.

Builds take their time: tests/e2e/test_e2b_templates.py runs this file by itself, and not for every client.
"""

from __future__ import annotations

import os
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b.exceptions import BuildException, SandboxException, TemplateException

from conftest import LIVE, until
from e2b import Sandbox, Template

IMAGE = os.environ.get("SLOPLET_TEST_IMAGE", "")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("context")
    (found / "folder" / "sub").mkdir(parents=True)
    (found / "folder" / "test.txt").write_text("hello")
    (found / "folder" / "sub" / "deep.txt").write_text("deep")
    (found / "folder" / "link").symlink_to("test.txt")
    (found / "folder" / "absolute").symlink_to("/etc/hostname")
    (found / "folder" / "dangling").symlink_to("nowhere")
    return found


@pytest.fixture
def name() -> Iterator[str]:
    found = f"e2b-test-{uuid.uuid4().hex[:8]}"
    yield found
    Sandbox.delete_snapshot(found)


def base(context: Path | None = None) -> Any:
    return Template(file_context_path=str(context) if context else None).from_template("base")


def built(template: Any, name: str, **options: Any) -> tuple[Any, list[str]]:
    """What it was, and what its log says."""
    lines: list[str] = []
    info = Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message), **options)
    return info, lines


def failed(template: Any, name: str) -> BuildException:
    with pytest.raises(BuildException) as raised:
        Template.build(template, name)
    return raised.value


def line_of(error: BaseException) -> str:
    """The line of this file that the client blames."""
    return traceback.extract_tb(error.__traceback__)[-1].line or ""


def test_every_kind_of_step(make: Callable[..., Sandbox], name: str, context: Path) -> None:
    template = (
        base(context)
        .copy("folder/*", "copied", force_upload=True)
        .run_cmd('cat copied/test.txt copied/link copied/sub/deep.txt > all; test "$(whoami)" = user; pwd > where')
        .copy("folder/link", "elsewhere/link")
        .copy("folder/test.txt", "/opt/of-root/", user="root", mode=0o640)
        .set_envs({"PLAIN": 'it\'s "quoted" $(id) \\x', "GROWN": "/opt/bin:$PATH:$HOME"})
        .run_cmd('printf "%s\n" "$PLAIN" > plain; printf %s "$GROWN" > grown')
        .run_cmd('test "$(whoami)" = root', user="root")
        .set_workdir("/work/deep")
        .run_cmd("touch here; sudo touch of-root")
        .set_user("alice")
        .run_cmd('test "$(whoami)" = alice; echo $HOME > ~/home')
        .set_user("user")
        .make_symlink("here", "linked")
    )
    built(template, name)
    box = make(name)
    run = box.commands.run
    assert run("cd ~; cat all where").stdout == "hellohellodeep/home/user\n"
    assert run("cd ~; readlink copied/link copied/absolute copied/dangling elsewhere/link").stdout.split() == [
        "test.txt", "/etc/hostname", "nowhere", "test.txt",
    ]  # fmt: skip
    assert run("stat -c '%U %a' /opt/of-root/test.txt ~/copied ~/copied/sub/deep.txt").stdout.split() == [
        "root", "640", "user", "755", "user", "644",
    ]  # fmt: skip
    assert box.files.read("/home/user/plain") == 'it\'s "quoted" $(id) \\x\n'
    grown = box.files.read("/home/user/grown")
    assert grown.startswith("/opt/bin:/")
    assert grown.endswith(":/home/user")
    assert run("pwd; ls; stat -c %U here of-root .").stdout.split() == [
        "/work/deep", "here", "linked", "of-root", "user", "root", "user",
    ]  # fmt: skip
    assert run("cat ~alice/home", user="root").stdout == "/home/alice\n"
    assert run("echo $PLAIN").stdout == 'it\'s "quoted" $(id) \\x\n'


def test_steps_come_out_of_the_cache(name: str) -> None:
    random = uuid.uuid4().hex
    _, first = built(base().run_cmd(f"echo {random} > a").set_envs({"A": "1"}), name)
    _, again = built(base().run_cmd(f"echo {random} > a").set_envs({"A": "1"}), name)
    _, forced = built(base().run_cmd(f"echo {random} > a").skip_cache().run_cmd("echo more >> a"), name)
    _, anew = built(base().run_cmd(f"echo {random} > a"), name, skip_cache=True)
    step = f"RUN echo {random} > a"
    assert f"[builder 1/2] {step}" in first
    assert f"CACHED [builder 1/2] {step}" in again
    assert f"CACHED [builder 1/2] {step}" in forced
    assert "[builder 2/2] RUN echo more >> a" in forced
    assert f"[builder 1/1] {step}" in anew


def test_a_template_of_a_template(make: Callable[..., Sandbox], name: str) -> None:
    built(base().set_envs({"A": "below"}).set_workdir("/work").run_cmd("echo 1 > file"), name)
    other = f"{name}-above"
    try:
        built(Template().from_template(name).run_cmd("echo $A >> file"), other)
        assert make(other).commands.run("pwd; cat file").stdout == "/work\n1\nbelow\n"
        Sandbox.delete_snapshot(name)  # the other stays whole
        assert make(other).commands.run("cat file").stdout == "1\nbelow\n"
    finally:
        Sandbox.delete_snapshot(other)


def test_a_dockerfile(make: Callable[..., Sandbox], name: str, context: Path) -> None:
    text = "FROM e2bdev/base\nENV A=1\nWORKDIR /app\nCOPY folder /app\nRUN cat test.txt > made\nUSER user\n"
    built(Template(file_context_path=str(context)).from_dockerfile(text), name)
    assert make(name).commands.run("cat /app/made").stdout == "hello"


def test_which_step_failed(name: str, context: Path) -> None:
    error = failed(base().run_cmd("true").run_cmd("exit 3"), name)  # blamed
    assert str(error) == "failed to run command 'exit 3': exit status 3"
    assert "blamed" in line_of(error)
    said = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'nobody123'"
    assert said in str(failed(base().run_cmd("whoami", user="nobody123"), name))
    assert "failed to create workdir: " in str(failed(base().set_workdir("/etc/passwd"), name))
    assert "; exit 1" in str(failed(base().set_user("; exit 1"), name))
    assert "/etc/passwd" in str(failed(base(context).copy("folder/test.txt", "/etc/passwd/x"), name))
    error = failed(Template().from_template("no-such-template").run_cmd("true"), name)  # the base
    assert "no-such-template" in str(error)
    assert "the base" in line_of(error)
    error = failed(Template().from_image("127.0.0.1:1/no/such:image").run_cmd("true"), name)  # the image
    assert "127.0.0.1:1" in str(error)
    assert "the image" in line_of(error)
    error = failed(base().run_cmd("true").set_start_cmd("./no/such/program", "sleep 1"), name)  # the end
    assert str(error) == "start command failed: exit status 127"
    assert "the end" in line_of(error)
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(name)


def test_where_a_failure_is_told(name: str) -> None:
    """By number, as the API has it."""
    info = Template.build_in_background(base().run_cmd("true").run_cmd("false"), name)
    until(lambda: Template.get_build_status(info).status.value not in ("waiting", "building"))
    status = Template.get_build_status(info)
    assert status.status.value == "error"
    assert status.reason is not None
    assert status.reason.step == "2"


def test_in_the_background(name: str) -> None:
    began = time.monotonic()
    info = Template.build_in_background(base().run_cmd(f"sleep 4; : {name}").run_cmd(f"seq 150; : {name}"), name)
    assert time.monotonic() - began < 4
    assert Template.get_build_status(info).status.value == "building"
    until(lambda: Template.get_build_status(info).status.value == "ready", 60)
    seen: list[str] = []
    while page := Template.get_build_status(info, logs_offset=len(seen)).log_entries:
        assert len(page) <= 100
        seen += [entry.message for entry in page]
    assert [line for line in seen if "[stdout]" in line] == [
        f"[builder 2/2] [stdout]: {number}" for number in range(1, 151)
    ]


@pytest.mark.parametrize("ready", ["[ -f /tmp/ready ]", ""])
def test_what_runs_from_the_beginning(make: Callable[..., Sandbox], name: str, ready: str) -> None:
    """Where memory is saved it is the same process in all sandboxes; else it is started in each."""
    command = "echo $A > /tmp/started; sleep 1; touch /tmp/ready; exec sleep 100000"
    if ready:
        built(base().set_envs({"A": "begun"}).set_start_cmd(command, ready), name)
        box = make(name)
        assert box.files.exists("/tmp/ready")
    else:
        built(base().set_envs({"A": "begun"}).set_start_cmd("exec sleep 100000", "true"), name)
        box = make(name)
    assert [each for each in box.commands.list() if "sleep 100000" in " ".join(each.args)]
    assert box.commands.run("pgrep -u user -f '^sleep 100000'").stdout.strip()
    if not ready:
        return
    assert box.files.read("/tmp/started") == "begun\n"
    box.commands.run("rm /tmp/ready")
    box.pause(keep_memory=False)
    box.connect()
    until(lambda: box.files.exists("/tmp/ready"))
    assert box.commands.run("pgrep -u user -f '^sleep 100000'").stdout.strip()


def test_tags(make: Callable[..., Sandbox], name: str) -> None:
    info, _ = built(base().run_cmd("echo 1 > version"), f"{name}:v1", tags=["old"])
    assert set(info.tags) == {"v1", "old"}
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(name)  # nothing has the default tag
    assigned = Template.assign_tags(f"{name}:v1", ["production", f"{name}:latest"])
    assert assigned.tags == ["production", "latest"]
    assert assigned.build_id == info.build_id
    second, _ = built(base().run_cmd("echo 2 > version"), f"{name}:v2", tags=["production"])
    assert second.template_id == info.template_id
    tags = {each.tag: each.build_id for each in Template.get_tags(name)}
    assert tags == dict.fromkeys(["v1", "old", "latest"], info.build_id) | dict.fromkeys(
        ["v2", "production"], second.build_id
    )
    for reference, version in ((f"{name}:v1", "1"), (f"{name}:production", "2"), (f"{info.template_id}:v2", "2")):
        box = make(reference)
        assert box.files.read("version").strip() == version
        assert box.get_info().template_id == info.template_id
        assert box.get_info().name == name
    Template.remove_tags(name, ["v1", "old"])
    for bad in (lambda: Template.remove_tags(name, "nothing"), lambda: Template.remove_tags(name, "default"),
                lambda: Template.assign_tags(":bad", "tag"), lambda: Template.assign_tags(f"{name}:", "tag"),
                lambda: Template.assign_tags(f"{name}:v1", "again")):  # fmt: skip
        with pytest.raises(TemplateException):
            bad()
    assert make(f"{name}:latest").files.read("version").strip() == "1"


def test_names(name: str) -> None:
    assert Template.exists("base")
    assert not Template.exists(name)
    built(base(), name.upper())
    assert Template.exists(name)
    assert Sandbox.delete_snapshot(name) is True
    assert Sandbox.delete_snapshot(name) is False
    assert not Template.exists(name)
    for bad, why in (("base", "403"), ("Not A Name", "400"), ("a:b:c", "400")):
        with pytest.raises(BuildException, match=why):
            Template.build(base(), bad)
    for bad, why in ((f"{name}:", "400"), (name, "404"), (f"other/{name}", "404")):
        with pytest.raises(SandboxException, match=why):
            Sandbox.create(bad)


def test_cpus_and_memory(make: Callable[..., Sandbox], name: str) -> None:
    built(base(), name, cpu_count=1, memory_mb=512)
    try:
        info = make(name).get_info()
    except SandboxException as error:
        if "cannot be enforced here" not in str(error):
            raise
        pytest.skip(f"capability: {str(error)[:80]}")
    assert (info.cpu_count, info.memory_mb) == (1, 512)
    for options in ({"cpu_count": 0}, {"memory_mb": 32}, {"memory_mb": 1025}, {"cpu_count": 1000000}):
        with pytest.raises(BuildException, match="400"):
            Template.build(base(), name, **options)


@pytest.mark.skipif(not IMAGE, reason="no image of another kind is here")
def test_any_image(make: Callable[..., Sandbox], name: str) -> None:
    """It gets the user, his sudo, and bash."""
    built(Template().from_image(IMAGE).run_cmd("id -un > who; pwd >> who; echo $FROM_IMAGE >> who"), name)
    box = make(name)
    assert box.files.read("who") == "user\n/home/user\nyes\n"
    assert box.commands.run("sudo id -u").stdout == "0\n"
    box.commands.run("touch /usr/local/bin/mine /usr/local/mine /code/mine")  # as E2B has it: npm install -g
    assert box.commands.run("id -u app; id -u").stdout.split()[0] != box.commands.run("id -u").stdout.strip()


def test_snapshots_of_a_template(make: Callable[..., Sandbox], name: str) -> None:
    """What a sandbox has become is a template, too: with its processes where memory is saved."""
    built(base().set_workdir("/work").set_start_cmd("exec sleep 100000", "true"), name)
    box = make(name)
    box.files.write("/work/kept", "1")
    snapshot = box.create_snapshot(name=f"{name}-saved")
    try:
        assert any(f"{name}-saved" in each for each in snapshot.names)
        box.files.write("/work/kept", "2")
        again = box.create_snapshot(name=f"{name}-saved")
        assert again.snapshot_id == snapshot.snapshot_id
        copy = make(snapshot.snapshot_id)
        assert copy.commands.run("pwd; cat kept").stdout == "/work\n2"
        assert copy.commands.run("pgrep -u user -f '^sleep 100000'").stdout.strip()
        assert copy.get_info().template_id != box.get_info().template_id
        listed = Sandbox.list_snapshots(name=f"{name}-saved").next_items()
        assert [each.snapshot_id for each in listed] == [snapshot.snapshot_id]
        files = box.create_snapshot(name=f"{name}-saved:files", **({"keep_memory": False} if LIVE and _can() else {}))
        assert files.snapshot_id.endswith(":files")
        assert make(files.snapshot_id).files.read("/work/kept") == "2"
        assert Sandbox.delete_snapshot(files.snapshot_id) is True
        assert make(snapshot.snapshot_id).is_running()
    finally:
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False


def _can() -> bool:
    """Whether this client can leave the memory out of a snapshot."""
    import inspect

    return "keep_memory" in inspect.signature(Sandbox.create_snapshot).parameters
