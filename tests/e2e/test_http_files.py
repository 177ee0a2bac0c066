"""Files over HTTP, on a real server with real clients: ranges, uploads that break off, tars, watching."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_kit import Box, made, peak_memory
from layer_kit import Member, folder, hardlink, member, symlink, tar
from server_kit import Served, need_container, served

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(60)]

BLOCK = 1 << 20
BIG = 128  # blocks
ODD = b"/workspace/odd-\xff\xfe"
ODD_QUERY = "/files{}?path=/workspace/odd-%FF%FE"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_container()
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def box(server: Served) -> Iterator[Box]:
    with made(server, "dev", disk="1g") as found:
        yield found


@pytest.fixture
def place(box: Box, request: pytest.FixtureRequest) -> str:
    """A folder of the test's own."""
    path = f"/workspace/{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"
    assert box.post("/files/mkdir", {"path": path}).status_code == 204
    return path


def _next(changes: Iterator[tuple[str, Any]], kind: str) -> str:
    """What the next change of that kind is about."""
    return str(next(data["name"] for _, data in changes if data["kind"] == kind))


def text(box: Box, path: str) -> str:
    answer = box.read(path)
    assert answer.status_code == 200, answer.text
    return answer.content.decode()


class TestBytes:
    def test_there_and_back(self, box: Box, place: str) -> None:
        data = os.urandom(3_000_000)
        path = f"{place}/below/a"
        first = box.put(path, data, mode="0640")
        assert first.status_code == 201, first.text
        info = first.json()
        assert (info["name"], info["type"], info["size"], info["mode"]) == ("a", "file", len(data), 0o640)
        assert box.read(path).content == data
        again = box.put(path, b"short")
        assert (again.status_code, again.json()["mode"]) == (200, 0o640)
        assert text(box, path) == "short"
        assert box.put(path, b"er", append="true").status_code == 200
        assert text(box, path) == "shorter"
        assert box.put(path, b"x", exclusive="true").json()["error"] == "FileExists"
        assert text(box, path) == "shorter"

    def test_relative_paths_are_below_the_working_directory(self, box: Box) -> None:
        assert box.put("here", b"1").status_code == 201
        assert box.run("cat /workspace/here")["stdout"] == "1"

    def test_nothing(self, box: Box, place: str) -> None:
        assert box.put(f"{place}/empty", b"").json()["size"] == 0
        answer = box.read(f"{place}/empty")
        assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "0")

    def test_files_of_the_kernel_are_of_another_size_than_they_say(self, box: Box) -> None:
        assert box.read("/proc/self/status").text.startswith("Name:")
        assert box.get("/files/stat?path=/proc/self/status").json()["size"] == 0

    @pytest.mark.parametrize(
        ("path", "query", "status", "error"),
        [
            ("/no/such", {}, 404, "FileMissing"), ("/etc", {}, 422, "FileIsDirectory"),
            ("/dev/null", {}, 422, "FileError"), ("/etc/passwd/x", {}, 422, "FileNotDirectory"),
            ("/x\0y", {}, 422, "FileError"), ("x" * 4096, {}, 422, "RequestInvalid"),
            ("ä" * 4000, {}, 422, "FileError"), ("", {}, 422, "RequestInvalid"),
            ("/proc/1/root/etc/passwd", {}, None, "FileDenied"),
            ("/etc/passwd", {"user": "nobody-here"}, 422, "UserNotFound"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_read(self, box: Box, path: str, query: Any, status: int | None, error: str) -> None:
        answer = box.http.get(f"{box.path}/files", params={"path": path, **query})
        if status is not None:
            assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text
        assert answer.status_code != 200
        assert answer.headers["content-type"] == "application/problem+json"

    @pytest.mark.parametrize(
        ("path", "query", "status", "error"),
        [
            ("/etc/passwd", {}, 403, "FileDenied"), ("/workspace", {}, 422, "FileIsDirectory"),
            ("/workspace/no/such", {"parents": "false"}, 404, "FileMissing"),
            ("/workspace/x", {"mode": "rw"}, 422, "RequestInvalid"),
            ("/workspace/x", {"mode": "77777"}, 422, "RequestInvalid"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_written(self, box: Box, path: str, query: Any, status: int, error: str) -> None:
        for size in (0, 1000, 3_000_000):
            answer = box.put(path, bytes(size), **query)
            assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text
        assert box.run("true")["exit_code"] == 0  # the connection serves on

    def test_a_full_disk(self, server: Served) -> None:
        with made(server, "small", disk="16m") as small:
            assert small.put("/workspace/old", b"old").status_code == 201
            answer = small.put("/workspace/old", (bytes(BLOCK) for _ in range(40)))
            assert (answer.status_code, answer.json()["error"]) == (507, "DiskFull"), answer.text
            assert text(small, "/workspace/old") == "old"
            assert small.put("/workspace/fits", bytes(BLOCK)).status_code == 201  # the half of it is gone

    @pytest.mark.parametrize("how", ["length", "chunked", "damaged"])
    def test_a_body_that_breaks_off_leaves_the_old_file(self, box: Box, place: str, how: str) -> None:
        assert box.put(f"{place}/file", b"old").status_code == 201
        more = "Content-Length: 1000000" if how == "length" else "Transfer-Encoding: chunked"
        body = bytes(500_000) if how == "length" else b"7a120\r\n" + bytes(500_000) + b"\r\n"
        with box.events(f"/files/watch?path={place}", method="GET") as changes:
            next(changes)
            with box.raw() as connection:
                connection.sendall(box.head("PUT", f"/files?path={place}/file", more) + body)
                part = _next(changes, "created")  # what it is written to until it is whole
                if how == "damaged":
                    connection.sendall(b"no length\r\n")
            assert _next(changes, "removed") == part
        assert text(box, f"{place}/file") == "old"
        assert [each["name"] for each in box.get(f"/files/list?path={place}").json()["items"]] == ["file"]

    def test_curl_and_much(self, box: Box, tmp_path: Path) -> None:
        """More both ways than the server may grow by."""
        block = os.urandom(BLOCK)
        digest = hashlib.sha256()
        with open(tmp_path / "big", "wb") as big:
            for _ in range(BIG):
                big.write(block)
                digest.update(block)
        before = peak_memory(box.server.pid)
        url = box.url("/files?path=/workspace/big")
        done = subprocess.run([*box.curl, "-T", tmp_path / "big", url], capture_output=True, check=True)
        assert json.loads(done.stdout)["size"] == BIG * BLOCK
        assert box.run("sha256sum < /workspace/big")["stdout"].split()[0] == digest.hexdigest()
        subprocess.run([*box.curl, "-o", tmp_path / "back", url], check=True)
        with open(tmp_path / "back", "rb") as back:
            assert hashlib.file_digest(back, "sha256").hexdigest() == digest.hexdigest()
        assert peak_memory(box.server.pid) - before < 32 << 20
        box.http.delete(f"{box.path}/files?path=/workspace/big")

    def test_a_reader_that_does_not_read_costs_little(self, box: Box) -> None:
        box.run(f"head -c {200 * BLOCK} /dev/zero > /workspace/zeros")
        before = peak_memory(box.server.pid)
        with box.raw() as connection:
            connection.sendall(box.head("GET", "/files?path=/workspace/zeros"))
            assert connection.recv(12) == b"HTTP/1.1 200"
            for _ in range(20):
                box.run("true")
            assert peak_memory(box.server.pid) - before < 16 << 20
        box.run("rm /workspace/zeros")


@pytest.fixture(scope="module")
def path(box: Box) -> str:
    box.put("/workspace/ranges", bytes(range(256)) * 1000)
    return "/workspace/ranges"


class TestRanges:
    @pytest.mark.parametrize(
        ("asked", "part"),
        [
            ("bytes=0-0", (0, 1)), ("bytes=100-199", (100, 200)), ("bytes=255999-", (255_999, 256_000)),
            ("bytes=-1000", (255_000, 256_000)), ("bytes=-999999", (0, 256_000)),
            ("bytes=1000-9999999", (1000, 256_000)), ("bytes=0-", (0, 256_000)),
            ("bytes=200000-255000", (200_000, 255_001)),
        ],
    )  # fmt: skip
    def test_a_part(self, box: Box, path: str, asked: str, part: tuple[int, int]) -> None:
        answer = box.read(path, headers={"Range": asked})
        assert answer.status_code == 206
        assert answer.content == (bytes(range(256)) * 1000)[slice(*part)]
        assert answer.headers["content-range"] == f"bytes {part[0]}-{part[1] - 1}/256000"
        assert answer.headers["content-length"] == str(part[1] - part[0])

    @pytest.mark.parametrize("asked", ["bytes=256000-", "bytes=256000-256001", "bytes=-0", "bytes=999999999999999-"])
    def test_a_part_that_it_does_not_have(self, box: Box, path: str, asked: str) -> None:
        answer = box.read(path, headers={"Range": asked})
        assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */256000")

    @pytest.mark.parametrize(
        "asked", ["bytes=a-b", "lines=1-2", "bytes=5-1", "bytes=0-1,5-6", "bytes=-", "", "bytes=--1"]
    )
    def test_no_range_is_the_whole(self, box: Box, path: str, asked: str) -> None:
        answer = box.read(path, headers={"Range": asked})
        assert (answer.status_code, len(answer.content)) == (200, 256_000)

    def test_validators(self, box: Box, path: str) -> None:
        head = box.http.head(f"{box.path}/files", params={"path": path})
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "256000")
        tag, date = head.headers["etag"], head.headers["last-modified"]
        assert head.headers["accept-ranges"] == "bytes"

        def status(**headers: str) -> int:
            return box.read(path, headers={key.replace("_", "-"): value for key, value in headers.items()}).status_code

        assert status(If_None_Match=tag) == status(If_None_Match=f'"x", W/{tag}') == status(If_None_Match="*") == 304
        assert status(If_None_Match='"x"') == 200
        assert status(If_Modified_Since=date) == 304
        assert status(If_Modified_Since="Thu, 01 Jan 1970 00:00:00 GMT") == status(If_Modified_Since="soon") == 200
        assert status(Range="bytes=0-1", If_Range=tag) == status(Range="bytes=0-1", If_Range=date) == 206
        assert status(Range="bytes=0-1", If_Range='"x"') == 200
        box.put("/workspace/ranges", bytes(range(256)) * 1000)
        assert status(If_None_Match=tag) == 200
        assert status(Range="bytes=0-1", If_Range=tag) == 200

    def test_curl_goes_on_where_it_was(self, box: Box, path: str, tmp_path: Path) -> None:
        (tmp_path / "part").write_bytes((bytes(range(256)) * 1000)[:1234])
        subprocess.run([*box.curl, "-C", "-", "-o", tmp_path / "part", box.url(f"/files?path={path}")], check=True)
        assert (tmp_path / "part").read_bytes() == bytes(range(256)) * 1000

    def test_head_has_the_same_errors(self, box: Box) -> None:
        assert box.http.head(f"{box.path}/files?path=/no").status_code == 404
        assert box.http.head(f"{box.path}/files?path=/etc").status_code == 422


class TestOperations:
    def test_a_life(self, box: Box, place: str) -> None:
        def done(verb: str, **body: Any) -> None:
            answer = box.post(f"/files/{verb}", body)
            assert answer.status_code == 204, answer.text

        done("mkdir", path=f"{place}/a/b", mode="0750")
        done("mkdir", path=f"{place}/a/b")
        box.put(f"{place}/a/file", b"x")
        done("symlink", path=f"{place}/a/link", target="file")
        done("chmod", path=f"{place}/a/file", mode=0o600)
        done("move", path=f"{place}/a/file", target=f"{place}/moved")
        done("chown", path=f"{place}/moved", owner="12:34", user="root")
        listed = box.get(f"/files/list?path={place}&recursive=true").json()
        found = {each["name"]: (each["type"], each["mode"], each["uid"], each["target"]) for each in listed["items"]}
        me = found["a"][2]
        assert found == {
            "a": ("dir", 0o755, me, None), "a/b": ("dir", 0o750, me, None), "a/link": ("symlink", 0o777, me, "file"),
            "moved": ("file", 0o600, 12, None),
        }  # fmt: skip
        assert listed["truncated"] is False
        assert len(box.get(f"/files/list?path={place}").json()["items"]) == 2
        assert len(box.get(f"/files/list?path={place}&recursive=true&depth=1").json()["items"]) == 2
        some = box.get(f"/files/list?path={place}&recursive=true&limit=2").json()
        assert (len(some["items"]), some["truncated"]) == (2, True)
        assert box.get(f"/files/stat?path={place}/a/link&follow=false").json()["target"] == "file"
        assert box.get(f"/files/stat?path={place}/a/link").status_code == 404
        remove = f"{box.path}/files?path={place}"
        assert box.http.delete(remove).json()["error"] == "FileExists"
        assert box.http.delete(f"{remove}&recursive=true").status_code == 204
        assert box.http.delete(f"{remove}&missing_ok=true").status_code == 204
        assert box.http.delete(remove).status_code == 404

    def test_what_is_told_if_asked_for(self, box: Box, place: str) -> None:
        box.put(f"{place}/d/file", b"12345", mode="0640")
        assert box.post("/files/symlink", {"path": f"{place}/link", "target": "d/file"}).status_code == 204
        put = {"path": f"{place}/d/file", "attributes": {"user.app.a": "AP8=", "user.other": "eA=="}}
        assert box.http.put(f"{box.path}/files/attributes", json=put).status_code == 204
        told = [{"name": "user.app.a", "value_base64": "AP8="}]
        assert box.get(f"/files/attributes?path={place}/d/file&prefix=user.app.").json() == {"items": told}
        more = "owners=true&targets=true&attributes=user.app."
        link = box.get(f"/files/stat?path={place}/link&follow=false&{more}").json()
        assert (link["owner"], link["group"]) == ("agent", "agent")
        assert link["leads_to"] == {"type": "file", "size": 5, "mode": 0o640, "path": f"{place}/d/file"}
        items = box.get(f"/files/list?path={place}&recursive=true&{more}").json()["items"]
        assert [(each["name"], each.get("attributes")) for each in items] == [
            ("d", None), ("d/file", told), ("link", None),
        ]  # fmt: skip
        assert items[2]["leads_to"] == link["leads_to"]
        assert "owner" not in box.get(f"/files/stat?path={place}/link").json()
        assert box.put(f"{place}/d/file", b"new", in_place="true").status_code == 200
        put = {"path": f"{place}/d/file", "attributes": {"user.other": None}, "prefix": "user.", "replace": True}
        assert len(box.get(f"/files/attributes?path={place}/d/file").json()["items"]) == 2, "it is the same file"
        assert box.http.put(f"{box.path}/files/attributes", json=put).status_code == 204
        assert box.get(f"/files/attributes?path={place}/d/file").json() == {"items": []}
        for bad in ({"security.a": "eA=="}, {"user.a": "?"}, {"user.a": 1}, {"user.\ud800": "eA=="}):
            put = {"path": f"{place}/d/file", "attributes": bad}
            sent = {"content": json.dumps(put), "headers": {"content-type": "application/json"}}  # with lone surrogates
            assert box.http.put(f"{box.path}/files/attributes", **sent).status_code == 422
        assert box.get(f"/files/attributes?path={place}/d/file&prefix=security.").status_code == 422
        assert box.get(f"/files/attributes?path={place}/none").status_code == 404

    @pytest.mark.parametrize(
        ("verb", "body", "status"),
        [
            ("mkdir", {"path": "/etc/x"}, 403), ("mkdir", {"path": "/workspace", "parents": False}, 409),
            ("mkdir", {}, 422), ("mkdir", {"path": "x", "mode": 99999}, 422),
            ("mkdir", {"path": "x", "mode": "9"}, 422),
            ("mkdir", {"path": {"base64": "?"}}, 422), ("mkdir", {"path": {"base64": "AA=="}}, 422),
            ("mkdir", {"path": "a\0b"}, 422), ("mkdir", {"path": "x", "dance": 1}, 422), ("move", {"path": "x"}, 422),
            ("move", {"path": "/no", "target": "/workspace/x"}, 404), ("chmod", {"path": "/no", "mode": 1}, 404),
            ("chmod", {"path": "/workspace", "mode": True}, 422),
            ("chown", {"path": "/workspace", "owner": "root"}, 403),
            ("symlink", {"path": "/workspace", "target": "x"}, 409),
            ("symlink", {"path": "/workspace/l", "target": ""}, 422),
        ],
    )  # fmt: skip
    def test_what_cannot_be(self, box: Box, verb: str, body: dict[str, Any], status: int) -> None:
        answer = box.post(f"/files/{verb}", body)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"

    def test_names_that_are_no_text(self, box: Box) -> None:
        raw = base64.b64encode(ODD).decode()
        shown = box.http.put(box.path + ODD_QUERY.format(""), content=b"odd")
        assert shown.status_code == 201, shown.text
        assert (shown.json()["name"], shown.json()["name_base64"]) == ("odd-\ufffd\ufffd", "b2RkLf/+")
        assert box.run("od -An -tx1 /workspace/odd-*; ls -b /workspace | grep odd")["stdout"].split() == [
            "6f", "64", "64", "odd-\\377\\376",
        ]  # fmt: skip
        assert box.get(ODD_QUERY.format("")).content == b"odd"
        assert box.get(ODD_QUERY.format("/stat")).json()["name_base64"] == "b2RkLf/+"
        listed = box.get("/files/list?path=/workspace").json()["items"]
        assert [each["name_base64"] for each in listed if each["name"].startswith("odd")] == ["b2RkLf/+"]
        assert all("name_base64" not in each for each in listed if not each["name"].startswith("odd"))
        with tarfile.open(fileobj=io.BytesIO(box.get("/files/archive?path=/workspace").content)) as found:
            assert "odd-\udcff\udcfe" in found.getnames()
        answer = box.post("/files/move", {"path": {"base64": raw}, "target": "/workspace/plain"})
        assert answer.status_code == 204, answer.text
        assert text(box, "/workspace/plain") == "odd"
        assert box.get(ODD_QUERY.format("/stat")).status_code == 404


def unpacked(box: Box, place: str, data: Any) -> Any:
    return box.http.put(f"{box.path}/files/archive", params={"path": place}, content=data)


class TestTars:
    def test_there_and_back_with_tar(self, box: Box, place: str, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "deep" / "er").mkdir(parents=True)
        (source / "deep" / "er" / "big").write_bytes(os.urandom(2_000_000))
        (source / "run.sh").write_text("#!/bin/sh\n")
        (source / "run.sh").chmod(0o755)
        (source / ("long" * 40)).write_text("long")
        (source / "link").symlink_to("deep/er")
        os.link(source / "run.sh", source / "twin")
        os.symlink("loop", source / "loop")
        os.mkfifo(source / "pipe")
        (source / "shut").mkdir()
        (source / "shut" / "in").write_text("in")
        (source / "shut").chmod(0o500)
        for number in range(300):
            (source / "deep" / str(number)).write_text(str(number))
        with subprocess.Popen(["tar", "-C", source, "-c", "."], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            pipe = process.stdout
            answer = unpacked(box, place, iter(lambda: pipe.read(65536), b""))
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (told["files"], told["folders"], told["links"], told["skipped"]) == (305, 3, 2, ["pipe"])
        back = tmp_path / "back"
        back.mkdir()
        command = [*box.curl, box.url(f"/files/archive?path={place}")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
            subprocess.run(["tar", "-C", back, "-xp"], stdin=curl.stdout, check=True)
        (source / "pipe").unlink()
        assert _facts(back) == _facts(source)

    def test_what_tar_makes_of_it(self, box: Box, place: str) -> None:
        box.run(f"cd {place}; echo x > f; chmod 6755 f; mkfifo p; ln -s /etc/passwd out; mkdir d; chmod 1777 d")
        answer = box.get(f"/files/archive?path={place}")
        assert answer.headers["content-type"] == "application/x-tar"
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as found:
            assert {each.name: (each.mode, each.linkname) for each in found} == {
                "f": (0o755, ""), "out": (0o777, "/etc/passwd"), "d": (0o777, ""),
            }  # fmt: skip

    @pytest.mark.parametrize(("path", "status"), [("/no/such", 404), ("/etc/passwd", 422), ("/tmp/shut", 403)])
    def test_no_folder(self, box: Box, path: str, status: int) -> None:
        box.run("mkdir -p -m 000 /tmp/shut", user="root")
        answer = box.get(f"/files/archive?path={path}")
        assert answer.status_code == status, answer.text

    def test_an_empty_folder(self, box: Box, place: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(box.get(f"/files/archive?path={place}").content)) as found:
            assert found.getnames() == []

    def test_a_file_that_cannot_be_read_breaks_it_off(self, box: Box, place: str) -> None:
        box.run(f"cd {place}; head -c 300000 /dev/zero > mine; echo y > shut; chmod 000 shut")
        done = subprocess.run([*box.curl, "--fail", box.url(f"/files/archive?path={place}")], capture_output=True)
        assert done.returncode in (18, 22)  # the transfer was cut short, or never began
        box.run(f"chmod 400 {place}/shut")
        assert box.get(f"/files/archive?path={place}").status_code == 200

    @pytest.mark.parametrize(
        "members",
        [
            [member("../out", b"x")], [member("/tmp/out", b"x")], [member("a/../../out", b"x")], [folder("../out")],
            [symlink("../out", "x")], [hardlink("a", "../../etc/passwd")], [hardlink("a", "/etc/passwd")],
            [symlink("a", "/tmp"), member("a/out", b"x")], [symlink("a", "")], [member("x" * 300, b"x")],
            [member("a", b"x"), folder("a")], [folder("a"), member("a", b"x")], [hardlink("a", "no-such")],
        ],
    )  # fmt: skip
    def test_hostile_ones(self, box: Box, place: str, members: list[Member]) -> None:
        answer = unpacked(box, f"{place}/in", tar(*members))
        assert 400 <= answer.status_code < 500, answer.text
        assert box.run(f"ls {place}/out /workspace/out /tmp/out")["stdout"] == ""

    @pytest.mark.parametrize(
        "data",
        [
            b"", b"\x1f\x8b" + bytes(600), b"no tar" * 200, bytes(512), tar(member("a", bytes(5000)))[:3000],
            tar(member("a", b"x"))[:1024], tar(member("a", b"x", pax_headers={"comment": "x" * 500_000})),
        ],
    )  # fmt: skip
    def test_no_tar(self, box: Box, place: str, data: bytes) -> None:
        answer = unpacked(box, place, data)
        if data == bytes(512):  # an end without its second half
            assert answer.status_code == 200
        else:
            assert (answer.status_code, answer.json()["error"]) == (400, "RequestInvalid"), answer.text

    def test_the_last_of_a_name_counts(self, box: Box, place: str) -> None:
        members = [member("a", str(number).encode()) for number in range(20)]
        assert unpacked(box, place, tar(*members, symlink("l", "x"), member("l", b"file"))).status_code == 200
        assert (text(box, f"{place}/a"), text(box, f"{place}/l")) == ("19", "file")

    def test_links_replace_links(self, box: Box, place: str) -> None:
        for target in ("one", "two"):
            assert unpacked(box, place, tar(symlink("l", target), hardlink("m", "l"))).status_code == 200
        assert box.run(f"readlink {place}/l {place}/m")["stdout"] == "two\ntwo\n"

    def test_holes(self, box: Box, place: str, tmp_path: Path) -> None:
        with open(tmp_path / "sparse", "wb") as sparse:
            sparse.write(b"begin")
            sparse.seek(3_000_000)
            sparse.write(b"end")
            sparse.truncate(3_500_000)
        for form in ("gnu", "posix"):
            command = ["tar", "-C", str(tmp_path), f"--format={form}", "-S", "-c", "sparse"]
            data = subprocess.run(command, capture_output=True, check=True).stdout
            assert len(data) < 1_000_000
            assert unpacked(box, place, data).status_code == 200
            assert box.read(f"{place}/sparse").content == (tmp_path / "sparse").read_bytes()

    def test_one_that_breaks_off(self, box: Box, place: str) -> None:
        data = tar(member("small", b"whole"), member("big", os.urandom(3_000_000)))
        with box.raw() as connection:
            head = box.head("PUT", f"/files/archive?path={place}", f"Content-Length: {len(data)}")
            with box.events(f"/files/watch?path={place}", method="GET") as changes:
                next(changes)
                connection.sendall(head + data[:1_000_000])
                while {each["name"] for each in box.get(f"/files/list?path={place}").json()["items"]} <= {"small"}:
                    next(changes)
                connection.close()
                while len(box.get(f"/files/list?path={place}").json()["items"]) != 1:
                    next(changes)
        assert text(box, f"{place}/small") == "whole"


def _facts(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = path.stat().st_mode & 0o777
        else:
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
    return found


class TestWatching:
    def test_events(self, box: Box, place: str) -> None:
        with box.events(f"/files/watch?path={place}&recursive=true", method="GET") as changes:
            assert next(changes) == ("ready", {"kind": "ready", "name": "", "new_name": None})
            box.run(f"mkdir {place}/d")
            assert next(changes) == ("change", {"kind": "created", "name": "d", "new_name": None})
            box.run(f"echo x > {place}/d/f; mv {place}/d/f {place}/d/g")
            seen: list[dict[str, Any]] = []
            while not seen or seen[-1]["kind"] != "renamed":
                seen.append(next(changes)[1])
            assert (seen[-1]["name"], seen[-1]["new_name"]) == ("d/f", "d/g")

    def test_messages(self, box: Box, place: str) -> None:
        with box.websocket(f"/files/watch?path={place}") as socket:
            assert json.loads(socket.recv(30))["type"] == "ready"
            box.put(f"{place}/f", b"")
            told = json.loads(socket.recv(30))
            assert (told["type"], told["kind"]) == ("change", "created")

    def test_no_such_folder(self, box: Box) -> None:
        assert box.get("/files/watch?path=/no/such").json()["error"] == "FileMissing"
        with box.websocket("/files/watch?path=/no/such") as socket:
            assert json.loads(socket.recv(30))["error"] == "FileMissing"
