"""What is in a volume is hostile, inside and outside, and a volume gives a sandbox nothing but what is in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hostile_kit import Target, make_rootfs

from sloplet import Sandbox, Volume, Volumes
from sloplet.errors import SlopletError, StartFailed, VolumeError
from sloplet.state.home import Home
from sloplet.state.reaper import reap
from sloplet.state.store import Store
from sloplet.volumes import opening

HOST = os.geteuid() == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"hostile-{os.urandom(4).hex()}"
    yield chosen
    if any(info.name == chosen for info in Volumes().list()):
        Volumes().remove(chosen)


@pytest.fixture(autouse=True)
def _able(request: pytest.FixtureRequest) -> None:
    if "target" in request.fixturenames:
        request.getfixturevalue("target").need("volumes")


def test_devices_open_nothing(target: Target, folder: Path, name: str) -> None:
    if not HOST:
        pytest.skip("only root makes devices")
    Volumes().create(name)
    kept = Path(Volumes().inspect(name).path)
    for place in (folder, kept):
        os.mknod(place / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.chmod(place / "zero", 0o666)
    with target.box(volumes={"/f": Volume(folder, mode="rw"), "/d": name}) as box:
        for path in ("/f/zero", "/d/zero"):
            assert box.run(f"head -c 1 {path} | wc -c").stdout.strip() == "0"
        if target.can.users:
            assert box.run("mknod /d/mine c 1 5 || mknod /f/mine c 1 5", user="root").exit_code != 0


def test_setuid_programs_are_programs(target: Target, folder: Path, name: str) -> None:
    Volumes().create(name)
    for place in (folder, Path(Volumes().inspect(name).path)):
        shutil.copy("/usr/bin/id", place / "id")
        (place / "id").chmod(0o6755)
    with target.box(volumes={"/f": folder, "/d": name}) as box:
        for path in ("/f/id", "/d/id"):
            assert box.run(f"{path} -u; {path} -ru").stdout == "1000\n1000\n"


def test_nothing_becomes_setuid_outside(target: Target, folder: Path) -> None:
    attempts = (
        "cp /bin/sh s && chmod 4755 s", "cp /bin/sh t && chmod u+s,g+s t", "install -m 6755 /bin/sh u",
        "python3 -c 'import os; os.open(\"v\", os.O_CREAT | os.O_WRONLY, 0o4777)'",
        "python3 -c 'import os; os.mknod(\"w\", 0o104777)'",
        "umask 0; tar -C /bin -cf - --mode=6755 sh | tar -xpf -",
    )  # fmt: skip
    users = ["agent", "root"] if target.can.users else ["agent"]
    folder.chmod(0o777)
    with target.box(volumes={"/f": Volume(folder, mode="rw")}) as box:
        for user in users:
            for attempt in attempts:
                box.run(attempt, cwd="/f", user=user)
        box.run("chmod 755 /f/s; touch /f/alive", cwd="/f", check=True)
    assert {path.name for path in folder.iterdir()} >= {"s", "alive"}
    assert [path for path in folder.rglob("*") if os.lstat(path).st_mode & 0o6000] == []


def test_nobody_outside_is_held_up(target: Target, folder: Path) -> None:
    (folder / "f").write_text("x")
    os.chmod(folder / "f", 0o666)
    script = (
        "import fcntl, os; fd = os.open('/f/f', os.O_RDONLY); print(fcntl.fcntl(fd, fcntl.F_GETLEASE), flush=True);"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)"
    )
    with target.box(volumes={"/f": folder}) as box:
        done = box.run(["python3", "-c", script])
    assert done.stdout == f"{fcntl.F_UNLCK}\n"
    assert "PermissionError" in done.stderr


def test_links_lead_nowhere_but_inside(target: Target, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("canary")
    (folder / "up").symlink_to("../secret")
    (folder / "absolute").symlink_to(tmp_path / "secret")
    (folder / "root").symlink_to("/proc/1/root")
    (folder / "passwd").symlink_to("/etc/passwd")
    with target.box(volumes={"/a/f": folder}) as box:
        said = box.run("cat /a/f/up /a/f/absolute /a/f/../secret /a/f/root/proc/1/environ; ls /a; cat /a/f/passwd")
        assert "canary" not in said.stdout
        assert "agent" in said.stdout, "the sandbox's own"


def test_a_mount_is_not_undone_inside(target: Target, folder: Path) -> None:
    (folder / "f").write_text("x")
    users = ["agent", "root"] if target.can.users else ["agent"]
    with target.box(volumes={"/workspace": folder}) as box:
        for user in users:
            for attempt in ("mount -o remount,rw /workspace", "umount /workspace", "mount --bind /workspace /mnt"):
                assert box.run(attempt, cwd="/", user=user).exit_code != 0
            assert box.run("echo y > /workspace/f", user=user).exit_code != 0
    assert (folder / "f").read_text() == "x"


def test_what_was_opened_is_what_is_mounted(
    target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody exchanges the folder for a link to another between our look at it and the mount."""
    (folder / "f").write_text("right")
    other = tmp_path / "other"
    other.mkdir()
    (other / "f").write_text("wrong")
    true_open = opening.open_folder

    def exchanged(path: str, home: Home) -> int:
        fd = true_open(path, home)
        folder.rename(tmp_path / "moved")
        folder.symlink_to(other)
        return fd

    monkeypatch.setattr(opening, "open_folder", exchanged)
    try:
        with target.box(volumes={"/f": folder}) as box:
            assert box.run("cat /f/f").stdout == "right"
    except StartFailed as error:
        assert "moved" in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("link", ["/proc", "../../..", "/run/sloplet", "etc"])
def test_an_image_does_not_choose_where_it_goes(
    target: Target, folder: Path, tmp_path: Path, busybox: Path, link: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    make_rootfs(root, busybox)
    (root / "data").symlink_to(link)
    (folder / "f").write_text("x")
    tmp_path.chmod(0o755)
    try:
        with target.box(image=f"dir:{root}", volumes={"/data": Volume(folder, mode="rw")}) as box:
            assert box.run("cat /data/f").stdout == "x"
            assert box.run("ls /proc/self/status").exit_code == 0
    except StartFailed as error:
        assert "symlink" in str(error) or "mount" in str(error)  # noqa: PT017 - refused is right, too
    assert os.listdir(folder) == ["f"], "nothing of the sandbox's own was written there"
    assert not os.path.lexists(root.parent / "data")


def test_the_host_follows_nothing_of_it(target: Target, name: str, tmp_path: Path) -> None:
    """Copied and removed by the host, which must not be led out of it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("canary")
    with target.box(volumes={"/d": name}) as box:
        box.run(
            f"ln -s {outside} /d/folder; ln -s {outside}/canary /d/file; mkdir -p /d/a/b/c; mkfifo /d/fifo;"
            "mkdir /d/closed; touch /d/closed/f; chmod 000 /d/closed; touch '/d/new\nline'; ln /d/a/b/../../fifo /d/l;"
            "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/d/socket\")'",
        )
    with suppress(SlopletError):  # an ordinary user may not read what is closed, nor must he
        Volumes().snapshot(name, "s")
    for copy in Path(Volumes().inspect(name).path).parent.rglob("canary"):
        pytest.fail(f"the host followed a link: {copy}")
    Volumes().remove(name)
    assert (outside / "canary").read_text() == "canary"


def test_what_goes_back_follows_no_link_of_the_folder(target: Target, folder: Path, tmp_path: Path) -> None:
    """The folder has a link that leads out of it; the copy a folder in its place. However little of it is asked for."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("canary")
    (folder / "sub").symlink_to(outside)
    (folder / "real").mkdir()
    with target.box(volumes={"/d": Volume(folder, mode="copy")}) as box:
        box.run("rm /d/sub && mkdir -p /d/sub/deep && echo in | tee /d/sub/new /d/sub/deep/new /d/real/new", check=True)
        for paths in ("/d/sub", "/d/sub/new", "/d/sub/deep", "/d/sub/deep/new", None):
            done = box.apply(paths, delete=True)
            assert not any(path.startswith("sub") for path in done.written + done.removed)
            assert any("link here" in why for _, why in done.skipped), paths
        assert os.listdir(outside) == ["canary"]
        assert (folder / "real" / "new").read_text() == "in\n"
        box.run("echo again > /d/real/new", check=True)
        assert box.apply("/d/real/new").written == ("real/new",), "a folder is gone into"


WORK = """
import os, sys
from sloplet import Volumes
volumes = Volumes(sys.argv[1])
os.path.exists("/begin-here")
getattr(volumes, sys.argv[2])(*sys.argv[3:])
"""
_CALLS = "mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,fsync,syncfs,openat2,flock,fchmod,fchown"


@pytest.mark.parametrize(
    "words",
    [("create", "new"), ("snapshot", "data", "s"), ("clone", "data", "new"), ("remove", "data")],
    ids=lambda w: w[0],
)
def test_killed_anywhere_it_is_whole_or_not_there(words: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not here")
    command = [sys.executable, "-c", WORK, str(tmp_path / "counted"), *words]
    before, killed = _begin(command), 0
    for point in (*range(1, 11), *range(11, 200, 4)):
        home = Home(tmp_path / f"{point}").open()
        volumes = Volumes(home)
        volumes.create("data")
        files = {f"f{number}": os.urandom(100) for number in range(4)}
        for file, content in files.items():
            (home.volumes / "data" / "data" / file).write_bytes(content)
        inject = f"inject={_CALLS}:signal=KILL:when={point + before}"
        command[3] = str(home.path)
        done = subprocess.run(["strace", "-qq", "-o", "/dev/null", "-e", inject, *command], capture_output=True)
        ended = done.returncode != -signal.SIGKILL
        killed += not ended
        report = reap(home, Store(home), lambda *_: None)
        assert report.errors == []
        known = {info.name for info in volumes.list()}
        assert known <= {"data", "new"}
        assert set(os.listdir(home.volumes)) - known == set(), "nothing half there"
        assert [each for each in os.listdir(home.run) if each.startswith("volume-")] == []
        for each in known:
            found = {path.name for path in (home.volumes / each / "data").iterdir()}
            assert found == (set() if words[0] == "create" and each == "new" else set(files))
            volumes.remove(each)
        if ended:
            break  # it has no more calls than that
    assert killed >= 3


def _begin(command: list[str]) -> int:
    """How many of those calls an interpreter makes before it begins: they vary a little, which is welcome."""
    trace = ["strace", "-qq", "-e", f"trace={_CALLS},stat,newfstatat", "-o", "/dev/stdout"]
    log = subprocess.run([*trace, *command], capture_output=True, text=True).stdout
    before = log.partition("/begin-here")[0]
    return sum(1 for line in before.splitlines() if line.partition("(")[0] in _CALLS.split(","))


def test_with_a_kernel_of_its_own_neither(gvisor: None, folder: Path, name: str) -> None:
    shutil.copy("/usr/bin/id", folder / "id")
    (folder / "id").chmod(0o6755)
    if HOST:
        os.mknod(folder / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.chmod(folder / "zero", 0o666)
    (folder / "secret").write_text("canary")
    (folder / "shown").mkdir()
    (folder / "shown" / "up").symlink_to("../secret")
    with Sandbox(engine="gvisor", volumes={"/f": Volume(folder, mode="rw"), "/a/shown": folder / "shown"}) as box:
        assert box.run("/f/id -u").stdout == "1000\n"
        assert box.run("head -c 1 /f/zero | wc -c").stdout.strip() == "0"
        assert "canary" not in box.run("cat /a/shown/up /a/shown/../secret").stdout
        for user in ("agent", "root"):
            box.run("cp /bin/sh s; chmod 4755 s; install -m 6755 /bin/sh t", cwd="/f", user=user)
            for attempt in ("mount -o remount,rw /a/shown", "umount /a/shown", "echo x > /a/shown/x"):
                assert box.run(attempt, user=user).exit_code != 0
        box.run("touch /f/alive", check=True)
    assert [path.name for path in folder.rglob("*") if os.lstat(path).st_mode & 0o6000] == ["id"]
    assert os.listdir(folder / "shown") == ["up"]


CONNECT = "import socket; socket.socket(socket.AF_UNIX).connect('/f/socket')"


def _reaches_a_socket(box: Sandbox) -> bool:
    return box.run(["python3", "-c", CONNECT], timeout=20).ok


def _says_so(box: Sandbox) -> bool:
    return any("sockets" in item.how for item in box.guarantees() if item.control == "volume")


def test_what_is_told_of_sockets_is_so(target: Target, folder: Path) -> None:
    """Read-only is about files. Where a socket of the host's can be reached nevertheless, it is not kept secret."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(8)
        with target.box(volumes={"/f": str(folder)}) as box:
            assert _reaches_a_socket(box) == _says_so(box)


def test_gvisor_leads_to_no_socket(gvisor: object, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(8)
        for mode in ("ro", "rw"):
            with Sandbox(engine="gvisor", user="root", volumes={"/f": Volume(folder, mode=mode)}) as box:
                assert box.run("test -d /f").ok
                assert not _reaches_a_socket(box)
                assert not _says_so(box)


@pytest.mark.parametrize("path", ["/run", "/var/run", "/run/lock"])
def test_where_services_listen_is_no_volume(path: str) -> None:
    if not Path(path).is_dir():
        pytest.skip(f"there is no {path}")
    with pytest.raises(VolumeError, match="sockets"), Sandbox(volumes={"/f": path}):
        pass
