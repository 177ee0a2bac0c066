"""Volumes in real sandboxes: whose files they are, who may have them, and that they outlive whatever happens."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sloplet import Sandbox, Volume, Volumes
from sloplet.engines import registry
from sloplet.engines.machine import machine
from sloplet.errors import (
    FileDenied,
    SpecError,
    UnsupportedOperation,
    VolumeError,
    VolumeInUse,
    VolumeNotFound,
)

pytestmark = pytest.mark.timeout(120)
SIZES = machine().root and machine().loop and machine().mkfs is not None


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A folder of the caller's own; of somebody else's where the caller is root."""
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one\n")
    (folder / "private").write_text("for its owner\n")
    (folder / "private").chmod(0o600)
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 4321, 4322)
    return folder


@pytest.fixture
def name() -> Iterator[str]:
    """A named volume that is gone afterwards."""
    chosen = f"vol-{os.urandom(4).hex()}"
    yield chosen
    if any(info.name == chosen for info in Volumes().list()):
        Volumes().remove(chosen)


def live(engine: str) -> bool:
    return registry.load(engine).probe().capabilities.live_snapshots


def outside(path: Path) -> tuple[int, int]:
    return os.lstat(path).st_uid, os.lstat(path).st_gid


def test_whose_files_they_are(engine: str, repo: Path, name: str) -> None:
    """The caller's outside, the agent's inside: what was there, and what is made."""
    with Sandbox(engine=engine, volumes={"/src": Volume(repo, mode="rw"), "/data": name}) as box:
        assert box.run("stat -c %U:%G /src /src/a.txt /src/private /data").stdout.split() == ["agent:agent"] * 4
        box.run("cat /src/private && echo two >> /src/a.txt && mkdir /src/new && echo x > /src/new/f", check=True)
        box.run("echo kept > /data/f && ln -s f /data/link && chmod 700 /data/f", check=True)
        box.files.write("/src/by-the-library", "z")
    owner = outside(repo)
    assert {outside(path) for path in repo.rglob("*")} == {owner}
    assert (repo / "a.txt").read_text() == "one\ntwo\n"
    kept = Path(Volumes().inspect(name).path)
    assert outside(kept / "f") == outside(kept) == (os.geteuid(), os.getegid())
    with Sandbox(engine=engine, volumes={"/again": Volume(name, read_only=True)}) as box:
        assert box.run("cat /again/link; stat -c %U /again/f").stdout == "kept\nagent\n"


def test_another_user_of_the_sandbox_has_them_too(engine: str, repo: Path, name: str) -> None:
    if not registry.load(engine).probe().capabilities.users:
        pytest.skip("one user only")
    with Sandbox(engine=engine, user="root", volumes={"/src": Volume(repo, mode="rw"), "/data": name}) as box:
        box.run("echo root > /src/by-root && echo root > /data/by-root && cat /src/private", check=True)
    assert outside(repo / "by-root") == outside(repo)
    with Sandbox(engine=engine, volumes={"/data": name}) as box:
        assert box.run("stat -c %U /data/by-root").stdout == "agent\n"


def test_root_inside_is_nobody_in_a_folder_of_the_host(engine: str, repo: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("for root")
    repo.chmod(0o777)
    with Sandbox(engine=engine, volumes={"/src": Volume(repo, mode="rw")}) as box:
        assert box.run("touch /src/by-root", user="root").exit_code == 0
        assert box.run("cat /src/private", user="root").exit_code != 0
    assert outside(repo / "by-root")[0] > 2**30, "neither root nor anybody else"


def test_read_only_is_the_mounts(engine: str, repo: Path, name: str) -> None:
    Volumes().create(name)
    with Sandbox(engine=engine, volumes={"/src": repo, "/data": Volume(name, read_only=True)}) as box:
        for path in ("/src/x", "/data/x"):
            done = box.run(f"echo > {path}")
            assert done.exit_code != 0
            assert "Read-only" in done.stderr
            with pytest.raises(FileDenied):
                box.files.write(path, "x")
        assert box.run("rm /src/a.txt; chmod 777 /src/a.txt; touch /src/a.txt").exit_code != 0
        assert box.run("cat /src/a.txt").stdout == "one\n"
        (repo / "later").write_text("seen")
        assert box.run("cat /src/later").stdout == "seen"
    assert (repo / "a.txt").read_text() == "one\n"


def test_nested_and_shadowed(engine: str, repo: Path, name: str) -> None:
    volumes = {"/workspace/sub": name, "/workspace": Volume(repo, mode="rw"), "/srv/deep/er": Volume(repo)}
    with Sandbox(engine=engine, volumes=volumes) as box:
        box.run("pwd; echo in > sub/f; echo out > f; cat /srv/deep/er/a.txt", check=True)
        box.upload(repo / "a.txt", "/workspace/sub/up.txt")  # what is shadowed is not written, the volume is
        assert "/workspace" not in [change.path for change in box.diff(text=False).changes]
    assert (repo / "f").read_text() == "out\n"
    assert os.listdir(repo / "sub") == []
    kept = Path(Volumes().inspect(name).path)
    assert (kept / "f").read_text() == "in\n"
    assert (kept / "up.txt").read_text() == "one\n"


def test_one_writes_or_many_who_asked_for_it(engine: str, name: str) -> None:
    with Sandbox(engine=engine, volumes={"/data": name}) as first:
        first.start()
        for wanted in (name, Volume(name, read_only=True), Volume(name, shared=True)):
            with pytest.raises(VolumeInUse, match=first.id), Sandbox(engine=engine, volumes={"/data": wanted}):
                pass
        with pytest.raises(VolumeInUse, match=first.id):
            Volumes().remove(name)
        assert [use.sandbox for use in Volumes().inspect(name).users] == [first.id]
    shared = Volume(name, shared=True)
    with (
        Sandbox(engine=engine, volumes={"/data": shared}) as one,
        Sandbox(engine=engine, volumes={"/d": shared}) as two,
    ):
        one.run("echo 1 > /data/one", check=True)
        two.run("cat /d/one && echo 2 > /d/two", check=True)
        assert one.run("cat /data/two").stdout == "2\n"
    assert Volumes().inspect(name).users == ()


def test_what_is_refused(engine: str, repo: Path, tmp_path: Path, name: str) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"/data": Volume(name, read_only=True)}, VolumeNotFound),
        ({"/x": tmp_path / "missing"}, VolumeNotFound),
        ({"/x": repo / "a.txt"}, VolumeError),
        ({"/x": os.environ["SLOPLET_HOME"]}, VolumeError),
        ({"/x": "/"}, VolumeError),
        ({"/proc": repo}, SpecError),
    ]
    for volumes, error in wrong:
        with pytest.raises(error), Sandbox(engine=engine, volumes=volumes):
            pass
    with pytest.raises(UnsupportedOperation, match="volumes"), Sandbox(engine="process", volumes={"/x": repo}):
        pass
    assert not any(info.name == name for info in Volumes().list())


def test_what_is_saved_leaves_them_out(engine: str, repo: Path, name: str) -> None:
    with Sandbox(engine=engine, volumes={"/data": name, "/src": Volume(repo, mode="rw")}) as box:
        box.run("echo own > /home/agent/own; echo 1 > /data/n; echo 1 > /src/n", check=True)
        box.snapshot("one")
        box.run("echo 2 > /data/n; echo 2 > /src/n; echo 2 > /home/agent/own; echo new > /data/new", check=True)
        box.rollback("one")
        assert box.run("cat /home/agent/own /data/n /src/n /data/new").stdout == "own\n2\n2\nnew\n"
        assert [change.path for change in box.diff(text=False).changes] == ["/home/agent/own"]
        assert box.diff("one", text=False).changes == ()
        box.run("echo 3 > /data/n", check=True)
        if live(engine):
            with pytest.raises(VolumeInUse, match="cannot be forked"):
                box.fork(1)
    assert (Path(Volumes().inspect(name).path) / "n").read_text() == "3\n"


def test_asleep_it_has_nothing_and_awake_the_same_again(engine: str, name: str) -> None:
    if not live(engine):
        pytest.skip("cannot be paused")
    with Sandbox(engine=engine, volumes={"/data": name}) as box:
        box.spawn("exec 3>>/data/log; while :; do echo tick >&3; sleep 0.05; done", detached=True)
        box.run("until [ -s /data/log ]; do sleep 0.05; done", check=True, timeout=20)
        box.pause()
        assert Volumes().inspect(name).users == ()
        log = Path(Volumes().inspect(name).path) / "log"
        size = log.stat().st_size
        with Sandbox(engine=engine, volumes={"/d": name}) as other:
            other.run("echo other >> /d/log", check=True)
            with pytest.raises(VolumeInUse):
                box.resume()
        box.resume()
        box.run(f"until [ $(stat -c %s /data/log) -gt {size + 20} ]; do sleep 0.05; done", check=True, timeout=20)
        assert "other" in box.run("cat /data/log").stdout
        shared = box.info().spec.volumes
        assert [volume.source for volume in shared] == [name]


def test_forks_share_what_is_shared(engine: str, name: str) -> None:
    if not live(engine):
        pytest.skip("cannot be forked")
    with Sandbox(engine=engine, volumes={"/data": Volume(name, shared=True)}) as box:
        box.start()
        children = box.fork(2)
        for number, child in enumerate(children):
            child.run(f"echo {number} > /data/{number}", check=True)
        assert box.run("cat /data/0 /data/1").stdout == "0\n1\n"
        for child in children:
            child.close()


@pytest.fixture(scope="module")
def app_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with a user of its own, who has a home and files in it."""
    found = shutil.which("busybox")
    if found is None or b"ld-linux" in Path(found).read_bytes()[:4096]:
        pytest.skip("no static busybox here (apt-get install busybox-static)")
    tar = tmp_path_factory.mktemp("image") / "app.tar"
    with tarfile.open(tar, "w") as archive:

        def add(
            name: str, owner: int, mode: int, data: bytes = b"", kind: bytes = tarfile.REGTYPE, to: str = ""
        ) -> None:
            entry = tarfile.TarInfo(name)
            entry.uid = entry.gid = owner
            entry.mode, entry.size, entry.type, entry.linkname = mode, len(data), kind, to
            archive.addfile(entry, io.BytesIO(data))

        for folder, owner in (("bin", 0), ("etc", 0), ("home", 0), ("home/app", 1000), ("srv", 0), ("srv/app", 1000)):
            add(folder, owner, 0o700 if folder == "home/app" else 0o755, kind=tarfile.DIRTYPE)
        add("bin/busybox", 0, 0o755, Path(found).read_bytes())
        for link in ("sh", "stat", "cat", "touch", "echo"):
            add(f"bin/{link}", 0, 0o777, kind=tarfile.SYMTYPE, to="busybox")
        add("etc/passwd", 0, 0o644, b"root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n")
        add("etc/group", 0, 0o644, b"root:x:0:\napp:x:1000:\n")
        add("home/app/mine", 1000, 0o600, b"mine\n")
    name = f"local/volumes-{os.urandom(4).hex()}:1"
    command = [sys.executable, "-m", "sloplet.cli", "image"]
    done = subprocess.run([*command, "import", str(tar), name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield name
    subprocess.run([*command, "rm", name], capture_output=True, check=True)


def test_an_images_user_keeps_what_is_his(engine: str, app_image: str, repo: Path, name: str) -> None:
    """Also where the volumes' owner takes root's place for it."""
    volumes = {"/src": Volume(repo, mode="rw"), "/data": name}
    with Sandbox(engine=engine, image=app_image, user="app", volumes=volumes) as box:
        said = box.run(
            "stat -c %U /home/app /home/app/mine /srv/app /src /data; cat /home/app/mine; touch /srv/app/x /src/x"
        )
        assert (said.stdout, said.stderr) == ("app\n" * 5 + "mine\n", "")
        assert [change.path for change in box.diff(text=False).changes] == ["/srv/app/x"]
    assert outside(repo / "x") == outside(repo)


def test_templates_have_them_or_others(engine: str, repo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("other\n")
    word = f"warm-{os.urandom(4).hex()}"
    with Sandbox(engine=engine, volumes={"/src": repo}) as box:
        box.run("echo warm > /home/agent/warm", check=True)
        template = box.template(word)
        try:
            for volumes, said in ((None, "one"), ({"/src": other}, "other")):
                with Sandbox(template=word, volumes=volumes) as child:
                    assert child.run("cat /src/a.txt /home/agent/warm").stdout == f"{said}\nwarm\n"
            with pytest.raises(SpecError, match="pool"), Sandbox(template=word, pool=1):
                pass
            if live(engine):
                with pytest.raises(SpecError, match="saved running"), Sandbox(template=word, volumes={"/x": other}):
                    pass
        finally:
            box.delete_snapshot(template, force=True)


def test_what_is_unpacked_does_not_land_in_them(engine: str, repo: Path) -> None:
    """Files of a saved disk that lie where a volume is now."""
    if live(engine):
        pytest.skip("saves memory, with its mounts")
    word = f"plain-{os.urandom(4).hex()}"
    with Sandbox(engine=engine) as box:
        box.run(
            "mkdir sub; echo saved > a.txt; echo saved > sub/f; chmod 700 .; echo mine > /home/agent/mine", check=True
        )
        template = box.template(word)
        try:
            before = repo.stat()
            with Sandbox(template=word, volumes={"/workspace": Volume(repo, mode="rw")}) as child:
                assert child.run("cat a.txt /home/agent/mine; ls sub").stdout == "one\nmine\n"
            assert (repo.stat().st_mode, outside(repo)) == (before.st_mode, (before.st_uid, before.st_gid))
        finally:
            box.delete_snapshot(template, force=True)


def test_nothing_of_them_is_in_an_archive(engine: str, repo: Path, name: str, tmp_path: Path) -> None:
    file = tmp_path / "box.sloplet"
    with Sandbox(engine=engine, volumes={"/src": Volume(repo, mode="rw"), "/data": name}) as box:
        box.run("echo canary-in-a-volume > /data/f; echo own > /home/agent/own", check=True)
        box.export(file)
    assert str(repo).encode() not in file.read_bytes()
    with Sandbox.load(file) as loaded:
        assert loaded.run("cat /home/agent/own; cat /data/f /src/a.txt 2>/dev/null").stdout == "own\n"
        if live(engine):
            assert loaded.run("echo x > /src/x").exit_code != 0
    assert not (repo / "x").exists()


HOLDER = """
import os, sys
from sloplet import Sandbox
box = Sandbox(engine=sys.argv[1], volumes={"/data": sys.argv[2]})
box.start()
box.run("echo before > /data/f; sync", check=True)
box.spawn("while :; do echo x >> /data/busy; done", detached=True)
print(box.id, flush=True)
sys.stdin.read()
"""


def test_it_survives_a_killed_holder(engine: str, name: str) -> None:
    command = [sys.executable, "-c", HOLDER, engine, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with Sandbox(engine=engine, volumes={"/data": name}) as box:  # at once: what is left of it is waited for
            assert box.run("cat /data/f").stdout == "before\n"
            before = box.run("stat -c %s /data/busy").stdout
            assert box.run("sleep 0.2; stat -c %s /data/busy").stdout == before, "nobody else writes it any more"


def test_guarantees_tell_of_them(engine: str, repo: Path, name: str) -> None:
    with Sandbox(engine=engine, volumes={"/data": name, "/src": repo}) as box:
        told = {item.value: item.how for item in box.guarantees() if item.control == "volume"}
    assert told.keys() == {"/data", "/src"}
    assert f"the volume {name}: read-write" in told["/data"]
    assert f"{repo}: read-only" in told["/src"]


@pytest.mark.skipif(not SIZES, reason="needs root, loop devices and mkfs.ext4")
def test_a_limited_one_is_full_at_its_limit(engine: str, name: str) -> None:
    Volumes().create(name, size="32m")
    shared = Volume(name, shared=True)
    with (
        Sandbox(engine=engine, volumes={"/data": shared}) as box,
        Sandbox(engine=engine, volumes={"/d": shared}) as two,
    ):
        done = box.run("head -c 64M /dev/zero > /data/zeros")
        assert "No space left" in done.stderr
        assert 16 * 2**20 < int(two.run("stat -c %s /d/zeros").stdout) < 32 * 2**20
        two.run("rm /d/zeros && echo room > /d/room", check=True)
        assert box.run("cat /data/room; stat -c %U /data/room").stdout == "room\nagent\n"
    Volumes().snapshot(name, "s")
    assert Volumes().inspect(name).snapshots[0].name == "s"


# -- copies ----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "gone-folder" / "deep").mkdir(parents=True)
    for file in ("keep", "edit", "gone", "both", "gone-folder/x", "gone-folder/deep/y"):
        (folder / file).write_text(f"{file}\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("/usr/bin/env")
    return folder


def test_a_copy_is_compared_with_the_folder_as_it_was(engine: str, project: Path) -> None:
    with Sandbox(engine=engine, volumes={"/workspace": Volume(project, mode="copy")}) as box:
        assert box.run("./run.sh; readlink link; stat -c %U edit").stdout == "ran\n/usr/bin/env\nagent\n"
        assert box.diff().changes == ()
        (project / "edit").write_text("changed outside\n")
        box.run("echo more >> edit; rm -r gone gone-folder; mkdir made; echo m > made/m; echo in > both", check=True)
        found = {change.path: change for change in box.diff().changes}
        assert {path: change.kind for path, change in found.items()} == {
            "/workspace/both": "changed", "/workspace/edit": "changed", "/workspace/gone": "removed",
            "/workspace/gone-folder": "removed", "/workspace/made": "added", "/workspace/made/m": "added",
        }  # fmt: skip
        assert str(found["/workspace/edit"].text).endswith("@@ -1 +1,2 @@\n edit\n+more\n")


def test_changes_of_a_copy_go_back(engine: str, project: Path) -> None:
    with Sandbox(engine=engine, volumes={"/workspace": Volume(project, mode="copy")}) as box:
        box.run("echo in > edit; rm -r gone gone-folder; mkdir made; echo m > made/m; echo in > both", check=True)
        (project / "both").write_text("changed outside\n")
        (project / "gone-folder" / "x").write_text("changed outside\n")
        (project / "made").mkdir()
        (project / "made" / "m").write_text("made outside\n")
        done = box.apply(delete=True)
        assert set(done.written) == {"edit"}
        assert set(done.removed) == {"gone"}
        assert dict(done.skipped).keys() == {"both", "gone-folder", "made/m"}
        assert (project / "edit").read_text() == "in\n"
        assert (project / "both").read_text() == "changed outside\n"
        assert (project / "made" / "m").read_text() == "made outside\n"
        assert sorted(path.name for path in (project / "gone-folder").rglob("*")) == ["x"]
        assert outside(project / "edit") == (os.geteuid(), os.getegid())
        for number in range(2):  # what was brought back is known again
            box.run(f"echo {number} > edit; echo {number} > gone", check=True)
            assert set(box.apply(["/workspace/edit", "/workspace/gone"]).written) == {"edit", "gone"}
        (project / "edit").write_text("mine\n")
        box.run("echo again > edit", check=True)
        assert box.apply("/workspace/edit").skipped == (("edit", "it has changed here since it was copied"),)
        with pytest.raises(SpecError, match="in no folder that was copied in"):
            box.apply("/etc")
        elsewhere = project.parent / "elsewhere"
        assert "edit" in box.apply("/workspace", to=elsewhere).written
    copies = Path(os.environ["SLOPLET_HOME"]) / "volumes" / ".copies"
    assert os.listdir(copies) == [], "a copy goes with its sandbox"


def test_a_copy_of_a_folder_that_is_gone(engine: str, project: Path) -> None:
    with Sandbox(engine=engine, volumes={"/workspace": Volume(project, mode="copy")}) as box:
        box.run("echo in > edit; echo new > new", check=True)
        moved = project.rename(project.parent / "moved")
        with pytest.raises(FileNotFoundError):
            box.apply()
        assert not project.exists(), "half of it would be worse than nothing"
        project.write_text("a file")
        with pytest.raises(NotADirectoryError):
            box.apply("/workspace/new")
        project.unlink()
        moved.rename(project)
        assert set(box.apply().written) == {"edit", "new"}


def test_a_copy_lasts_through_time(engine: str, project: Path) -> None:
    with Sandbox(engine=engine, volumes={"/workspace": Volume(project, mode="copy")}) as box:
        box.run("echo 1 > edit", check=True)
        box.snapshot("one")
        box.run("echo 2 > edit; rm keep", check=True)
        assert [change.path for change in box.diff("one").changes] == ["/workspace/edit", "/workspace/keep"]
        box.rollback("one")
        assert [change.path for change in box.diff().changes] == ["/workspace/edit"]
        if live(engine):
            (child,) = box.fork(1)
            child.run("echo child > edit", check=True)
            assert "+child" in str(child.diff().changes[0].text)
            child.close()
            box.pause()
            assert [change.path for change in box.diff().changes] == ["/workspace/edit"]


def test_nothing_to_bring_back(engine: str, repo: Path) -> None:
    with Sandbox(engine=engine, volumes={"/src": repo}) as box:
        with pytest.raises(SpecError, match="nothing was copied"):
            box.apply()
        with pytest.raises(SpecError, match="needs paths"):
            box.apply(to=repo)
