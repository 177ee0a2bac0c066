"""Between sandboxes and a real S3 server: what arrives, what is refused, and which names become which."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sloplet import S3, Sandbox
from sloplet.errors import FileError, FileMissing, SpecError, StorageError
from sloplet.files import AsyncFiles
from sloplet.results import FileInfo
from sloplet.s3 import client
from sloplet.s3 import put as putting
from sloplet.s3.get import plan_folder
from sloplet.s3.put import put
from sloplet.s3.url import S3Url, is_path, is_s3, why_no_key

pytest.importorskip("boto3")
pytest.importorskip("moto")

from s3_kit import CREDENTIALS, Buckets, s3_server

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def server() -> Iterator[Buckets]:
    with s3_server() as url:
        buckets = Buckets(url)
        yield buckets
        buckets.close()


@pytest.fixture
def bucket(server: Buckets, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the test's own, and an environment that leads to its server."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    return server.make(f"b{abs(hash(request.node.name)):x}")


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(engine="fake") as made:
        yield made


# -- names, which are pure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bucket", "key", "folder"),
    [
        ("s3://data", "data", "", True),
        ("s3://data/", "data", "", True),
        ("s3://data/a/b", "data", "a/b", False),
        ("s3://data/a/", "data", "a/", True),
        ("s3://my.data-1/a b?c#d%20", "my.data-1", "a b?c#d%20", False),
        ("s3://data//a", "data", "/a", False),
    ],
)
def test_urls(text: str, bucket: str, key: str, folder: bool) -> None:
    url = S3Url.parse(text)
    assert (url.bucket, url.key, url.is_folder) == (bucket, key, folder)


@pytest.mark.parametrize(
    "text",
    ["s3://", "s3:///x", "s3://a/x", "s3://no such/x", "s3://a..b/x", "s3://data/../other/x", "s3://data/./x",
     "s3://data/x/..", "s3://data/\0", "s3://data/\udcff", "s3://data/" + "k" * 1025, "http://data/x"],
)  # fmt: skip
def test_urls_that_are_none(text: str) -> None:
    with pytest.raises(SpecError):
        S3Url.parse(text)


def test_a_sandbox_may_be_called_s3() -> None:
    assert not is_s3("s3:/x")
    assert is_s3("s3://x")


@pytest.mark.parametrize("name", ["", "/", "/etc/passwd", "..", "../x", "a/../b", "a/./b", "a//b", "a/", "x" * 256])
def test_what_is_no_path(name: str) -> None:
    assert not is_path(name)


def listed(*keys: str, size: int = 1) -> list[dict[str, Any]]:
    return [{"Key": key, "Size": 0 if key.endswith("/") else size, "ETag": '"e"'} for key in keys]


def test_keys_become_paths_below_the_target_or_nothing() -> None:
    plan = plan_folder(
        "x/", listed("x/", "x/a", "x/d/", "x/d/e", "x/../up", "x//etc/passwd", "x/d/../../f", "x/./g", "other")
    )
    assert [item.name for item in plan.files] == ["a", "d/e"]
    assert plan.folders == ["", "d"]
    assert plan.skipped == ["x/../up", "x//etc/passwd", "x/d/../../f", "x/./g", "other"]


def test_a_key_that_is_a_file_and_a_folder() -> None:
    for keys in (["a", "a/b"], ["a/b", "a"], ["a", "a/b/c"], ["a", "a/"]):
        with pytest.raises(StorageError, match="no folder can hold both"):
            plan_folder("", listed(*keys))


def test_very_many_keys_are_no_matter() -> None:
    """Each is looked up once; else this would take hours."""
    plan = plan_folder("", [{"Key": f"{number}/", "Size": 0} for number in range(200_000)])
    assert len(plan.folders) == 200_000


def test_bytes_in_what_stands_for_a_folder() -> None:
    assert plan_folder("", [{"Key": "d/", "Size": 5}]).skipped == ["d/"]


@pytest.mark.parametrize("key", ["a/../b", ".", "\udcff", "k" * 1025, "é" * 513, "nul\0"])
def test_what_is_no_key(key: str) -> None:
    assert why_no_key(key)


# -- there and back ----------------------------------------------------------------------------------------------------


def test_a_folder_there_and_back(server: Buckets, bucket: str, box: Sandbox) -> None:
    box.files.write("out/a.txt", "alpha")
    box.files.write("out/deep/er/b.bin", bytes(range(256)))
    box.files.write("out/run.sh", "#!/bin/sh\n", mode=0o755)
    box.files.write("out/none", b"")
    box.files.mkdir("out/empty/below")
    box.files.symlink("out/link", "/etc/passwd")
    told: list[int] = []
    done = box.download("out", f"s3://{bucket}/x", on_progress=lambda progress: told.append(progress.files))
    assert server.keys(bucket) == ["x/a.txt", "x/deep/er/b.bin", "x/empty/below/", "x/none", "x/run.sh"]
    assert server.read(bucket, "x/deep/er/b.bin") == bytes(range(256))
    assert (done.files, done.bytes, done.skipped) == (4, 271, ("link",))
    assert told[-1] == 4
    back = box.upload(f"s3://{bucket}/x", "in")
    assert (back.files, back.bytes, back.skipped) == (4, 271, ())
    assert box.files.read("in/deep/er/b.bin") == bytes(range(256))
    assert box.files.stat("in/run.sh").mode & 0o777 == 0o755
    assert box.files.stat("in/a.txt").mode & 0o777 == 0o644
    assert box.files.stat("in/empty/below").is_dir
    assert box.files.read("in/none") == b""


def test_a_file_and_where_it_goes(server: Buckets, bucket: str, box: Sandbox) -> None:
    box.files.write("f.json", "{}")
    for target in ("s3://{}/key", "s3://{}/folder/", "s3://{}", "s3://{}/top/"):
        box.download("f.json", target.format(bucket))
    assert server.keys(bucket) == ["f.json", "folder/f.json", "key", "top/f.json"]
    assert server.client.head_object(Bucket=bucket, Key="f.json")["ContentType"] == "application/json"
    box.files.mkdir("there")
    box.upload(f"s3://{bucket}/folder/f.json", "there")
    box.upload(f"s3://{bucket}/folder/f.json", "named")
    assert (box.files.read("there/f.json"), box.files.read("named")) == (b"{}", b"{}")


def test_both_an_object_and_a_folder(server: Buckets, bucket: str, box: Sandbox) -> None:
    server.write(bucket, "x", b"object")
    server.write(bucket, "x/y", b"below")
    box.upload(f"s3://{bucket}/x", "one")
    box.upload(f"s3://{bucket}/x/", "two")
    assert (box.files.read("one"), box.files.read("two/y")) == (b"object", b"below")


def test_an_empty_folder_and_a_whole_bucket(server: Buckets, bucket: str, box: Sandbox) -> None:
    box.files.mkdir("void")
    box.download("void", f"s3://{bucket}/v")
    assert server.keys(bucket) == ["v/"]
    server.write(bucket, "w", b"1")
    box.upload(f"s3://{bucket}", "all")
    assert sorted(info.name for info in box.files.list("all")) == ["v", "w"]


def test_large_files_go_in_parts(server: Buckets, bucket: str, box: Sandbox) -> None:
    data = os.urandom(1024) * (20 * 1024) + b"end"
    box.files.write("big", data)
    box.files.write("exact", data[: 2 * putting.PART])
    box.download("big", f"s3://{bucket}/big")
    box.download("exact", f"s3://{bucket}/exact")
    assert server.read(bucket, "big") == data
    assert server.client.head_object(Bucket=bucket, Key="big")["ETag"].strip('"').endswith("-3")
    assert server.client.head_object(Bucket=bucket, Key="exact")["ETag"].strip('"').endswith("-2")
    box.upload(f"s3://{bucket}/big", "back")
    assert box.files.read("back") == data
    assert server.unfinished(bucket) == []


def test_more_keys_than_one_page(server: Buckets, bucket: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAGE", 3)
    for number in range(10):
        server.write(bucket, f"many/{number}")
    assert box.upload(f"s3://{bucket}/many", "many").files == 10
    assert len(box.files.list("many")) == 10


NAMES = ["esc\x1b]0;x\x07", "a b", "ünïcode", "q?x#y%41", "+", "..x", "A", "a", "-rf", "'\"", "<&>", "\\b"]


def test_names_are_data(server: Buckets, bucket: str, box: Sandbox) -> None:
    for number, name in enumerate(NAMES):
        box.files.write(f"odd/{name}", str(number))
    assert box.download("odd", f"s3://{bucket}/n").files == len(NAMES)
    box.upload(f"s3://{bucket}/n", "again")
    assert {info.name for info in box.files.list("again")} == set(NAMES)
    for number, name in enumerate(NAMES):
        assert box.files.read(f"again/{name}") == str(number).encode()


def test_a_line_break_in_a_name_is_part_of_the_key(misbehaving: Any, box: Sandbox) -> None:
    """Looked at in the request: moto's server has no such keys."""
    server = misbehaving(http("200 OK", ETag=ETAG, Content_Length="0"))
    box.files.write("odd/new\nline\r\nX-Evil: 1", "x")
    box.download("odd", "s3://bucket/n")
    first = server.requests[0].split("\r\n")
    assert first[0] == "PUT /bucket/n/new%0Aline%0D%0AX-Evil%3A%201 HTTP/1.1"
    assert not any(line.startswith("X-Evil") for line in first)


def test_keys_that_climb_stay_out(server: Buckets, bucket: str, box: Sandbox) -> None:
    """Positive control: the bucket does hold such keys."""
    for key in ("k/../../up", "k//etc/passwd", "k/fine"):
        _write_raw(server, bucket, key)
    assert "k//etc/passwd" in server.keys(bucket)
    done = box.upload(f"s3://{bucket}/k", "safe/in")
    assert [info.name for info in box.files.list("safe", recursive=True)] == ["in", "in/fine"]
    assert "k//etc/passwd" in done.skipped


def _write_raw(server: Buckets, bucket: str, key: str) -> None:
    """A key as it is: HTTP clients take '..' out of paths, so this speaks for itself."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as peer:
        head = f"PUT /{bucket}/{key} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"
        peer.sendall(head.encode())
        assert b" 200 " in peer.recv(4096)


# -- a sandbox that lies -----------------------------------------------------------------------------------------------


def entry(name: str, type: str = "file", *, size: int = 1, mode: int = 0o644) -> FileInfo:
    return FileInfo(name, type, size, mode, 0, 0, 0.0, "x" if type == "symlink" else None)


class Liar(AsyncFiles):
    """Answers what it likes."""

    def __init__(self, entries: list[FileInfo], content: bytes = b"x", *, endless: bool = False) -> None:
        self.entries = entries
        self.content = content
        self.endless = endless
        self.missing: set[str] = set()

    async def stat(self, path: str, **_: Any) -> FileInfo:
        return entry(path, "dir")

    async def list(self, path: str = ".", **_: Any) -> list[FileInfo]:
        return self.entries

    async def stream(self, path: str, **_: Any) -> AsyncIterator[bytes]:
        if path in self.missing:
            raise FileMissing(f"{path}: gone")
        yield self.content
        while self.endless:
            yield self.content


@pytest.mark.parametrize(
    "name", ["..", "../other/x", "/etc/passwd", "a/../../x", "./a", "a//b", "nul\0", "\udcff", "k" * 255 + "/a" * 400]
)
def test_listed_names_that_are_none(server: Buckets, bucket: str, name: str) -> None:
    with pytest.raises((FileError, StorageError)):
        asyncio.run(put(Liar([entry("fine"), entry(name)]), "/tree", f"s3://{bucket}/x"))
    assert server.keys(bucket) == [], "all names are looked at before anything is sent"


def test_one_name_twice(server: Buckets, bucket: str) -> None:
    with pytest.raises(FileError, match="twice"):
        asyncio.run(put(Liar([entry("a"), entry("a")]), "/tree", f"s3://{bucket}/x"))


def test_a_name_like_a_url_says_no_type(server: Buckets, bucket: str) -> None:
    asyncio.run(put(Liar([entry("data:text/evil,x"), entry("data:text/x.html")]), "/tree", f"s3://{bucket}"))
    types = [server.client.head_object(Bucket=bucket, Key=key)["ContentType"] for key in server.keys(bucket)]
    assert types == ["application/octet-stream", "text/html"]


@pytest.mark.parametrize("bound", [1_000_000, 2 * putting.PART])
def test_endless_files(server: Buckets, bucket: str, bound: int) -> None:
    liar = Liar([entry("small")], bytes(65536), endless=True)
    with pytest.raises(FileError, match=f"larger than {bound}"):
        asyncio.run(put(liar, "/tree", f"s3://{bucket}/x", max_bytes=bound))
    assert (server.keys(bucket), server.unfinished(bucket)) == ([], [])


def test_sizes_are_hints_and_what_vanishes_is_told(server: Buckets, bucket: str) -> None:
    liar = Liar([entry("a", size=2**62), entry("b", size=-1), entry("gone"), entry("dev", "other")], b"12345")
    liar.missing = {"/tree/gone"}
    done = asyncio.run(put(liar, "/tree", f"s3://{bucket}/x"))
    assert (done.files, done.bytes, sorted(done.skipped)) == (2, 10, ["dev", "gone"])
    assert server.keys(bucket) == ["x/a", "x/b"]


def test_what_is_in_memory_is_bounded(server: Buckets, bucket: str) -> None:
    """Whatever the sizes: some parts, not all of them."""
    total = 24 * putting.PART

    class Large(Liar):
        async def stream(self, path: str, **_: Any) -> AsyncIterator[bytes]:
            for _ in range(total // 4 // 65536):
                yield bytes(65536)

    tracemalloc.start()
    try:
        liar = Large([entry(str(number), size=total // 4) for number in range(4)])
        done = asyncio.run(put(liar, "/tree", f"s3://{bucket}/x"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.bytes == total
    assert peak < 12 * putting.PART


def test_a_cancelled_copy_leaves_no_parts(server: Buckets, bucket: str) -> None:
    liar = Liar([entry("endless")], bytes(65536), endless=True)

    async def main() -> None:
        begun = asyncio.Event()

        def tell(progress: Any) -> None:
            if progress.bytes > 3 * putting.PART:
                begun.set()

        task = asyncio.ensure_future(put(liar, "/tree", f"s3://{bucket}/x", on_progress=tell))
        await begun.wait()
        assert server.unfinished(bucket), "it is under way"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (server.keys(bucket), server.unfinished(bucket)) == ([], [])


def test_a_copy_that_is_cancelled_as_it_begins_leaves_no_parts(
    server: Buckets, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has begun an upload whose id nobody has heard yet."""
    liar = Liar([entry("endless")], bytes(65536), endless=True)
    real = client.in_thread

    async def main() -> None:
        begun = asyncio.Event()
        heard = asyncio.Event()

        async def in_thread(work: Any) -> Any:
            answer = await real(work)
            if isinstance(answer, dict) and "UploadId" in answer and not begun.is_set():
                begun.set()
                await heard.wait()
            return answer

        monkeypatch.setattr(client, "in_thread", in_thread)
        task = asyncio.ensure_future(put(liar, "/tree", f"s3://{bucket}/x"))
        await begun.wait()
        assert server.unfinished(bucket)
        task.cancel()
        asyncio.get_running_loop().call_soon(heard.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (server.keys(bucket), server.unfinished(bucket)) == ([], [])


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_no_such_bucket_or_key(server: Buckets, bucket: str, box: Sandbox) -> None:
    box.files.write("f", "x")
    for work in (
        lambda: box.download("f", "s3://no-such-bucket/x"),
        lambda: box.upload("s3://no-such-bucket/x", "g"),
        lambda: box.upload("s3://no-such-bucket", "g"),
    ):
        with pytest.raises(StorageError, match="no such bucket"):
            work()
    with pytest.raises(StorageError, match="there is nothing at"):
        box.upload(f"s3://{bucket}/nothing", "g")
    with pytest.raises(FileMissing):
        box.download("nothing", f"s3://{bucket}/x")
    assert not box.files.exists("g")


def test_no_credentials(bucket: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    box.files.write("f", "x")
    with pytest.raises(StorageError, match="no credentials") as caught:
        box.download("f", f"s3://{bucket}/x")
    assert "AWS_PROFILE" in str(caught.value)
    box.download("f", f"s3://{bucket}/x", s3=S3(anonymous=True))


def test_profiles(server: Buckets, bucket: str, box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\naws_access_key_id=k\naws_secret_access_key=s\nendpoint_url={server.url}\nregion=eu-west-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    box.files.write("f", "x")
    box.download("f", f"s3://{bucket}/x", s3=S3(profile="lab"))
    assert server.keys(bucket) == ["x"]
    with pytest.raises(StorageError, match="no such profile"):
        box.download("f", f"s3://{bucket}/x", s3=S3(profile="other"))


def test_an_endpoint_that_is_not_there(bucket: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    box.files.write("f", "x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        box.download("f", f"s3://{bucket}/x", s3=S3(endpoint_url=f"http://127.0.0.1:{free}"))
    assert "--endpoint-url" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "options",
    [{"endpoint_url": "nowhere"}, {"endpoint_url": "http://me:hunter2@x"}, {"profile": ""}, {"region": "a\nb"}],
)
def test_settings_that_are_none(options: dict[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        S3(**options)
    assert "hunter2" not in str(caught.value)


def test_a_password_in_an_endpoint_is_not_told(bucket: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@no host:99999")
    box.files.write("f", b"x")
    with pytest.raises(StorageError, match="Invalid endpoint") as caught:
        box.download("f", f"s3://{bucket}/x")
    assert "hunter2" not in str(caught.value)


class Misbehaving:
    """A server that gives every request one answer, over and over."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[str] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                peer, _ = self.listening.accept()
            except OSError:
                return
            peer.settimeout(5)
            with peer:
                head = b""
                while b"\r\n\r\n" not in head and (piece := peer.recv(65536)):
                    head += piece
                self.requests.append(head.decode("latin-1"))
                answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                peer.sendall(answer)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass

    def close(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.thread.join()


@pytest.fixture
def misbehaving(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    made: list[Misbehaving] = []

    def start(*answers: bytes) -> Misbehaving:
        made.append(Misbehaving(*answers))
        monkeypatch.setenv("AWS_ENDPOINT_URL", made[-1].url)
        return made[-1]

    yield start
    for one in made:
        one.close()


def http(status: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error_body(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>as said</Message></Error>".encode()


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("AccessDenied", "403 Forbidden", "access is denied"),
        ("InvalidAccessKeyId", "403 Forbidden", "access key is not known"),
        ("SignatureDoesNotMatch", "403 Forbidden", "secret key is wrong"),
        ("ExpiredToken", "400 Bad Request", "expired"),
        ("BadDigest", "400 Bad Request", "damaged"),
        ("SlowDown", "503 Slow Down", "overloaded"),
        ("Unheard", "418 Teapot", "Unheard"),
    ],
)
def test_what_s3_says_is_told(misbehaving: Any, box: Sandbox, code: str, status: str, said: str) -> None:
    body = error_body(code)
    misbehaving(http(status, body, Content_Length=str(len(body))))
    box.files.write("f", "x")
    with pytest.raises(StorageError, match=said) as caught:
        box.download("f", "s3://bucket/x")
    assert "test-secret-key" not in str(caught.value)


def test_a_put_whose_etag_is_another(misbehaving: Any, box: Sandbox) -> None:
    misbehaving(http("200 OK", ETag=f'"{"0" * 32}"', Content_Length="0"))
    box.files.write("f", "x")
    with pytest.raises(StorageError, match="not what was sent"):
        box.download("f", "s3://bucket/x")


ETAG = '"9dd4e461268c8034f5c8564e155c67a6"'  # of one x


def test_a_get_that_is_cut_goes_on_where_it_was(misbehaving: Any, box: Sandbox) -> None:
    etag = '"8287458823facb8ff918dbfabcd22ccb"'  # of parts
    head = http("200 OK", Content_Length="6", ETag=etag)
    cut = http("200 OK", b"par", Content_Length="6", ETag=etag)
    rest = http("206 Partial Content", b"tsx", Content_Length="3", ETag=etag, Content_Range="bytes 3-5/6")
    server = misbehaving(head, cut, rest)
    with pytest.raises(StorageError, match="damaged on its way"):
        box.upload("s3://bucket/x", "f")
    assert "range: bytes=3-" in server.requests[-1].lower()
    assert not box.files.exists("f"), "what is not right gets no name"
    whole = f'"{hashlib.md5(b"partsx").hexdigest()}"'
    misbehaving(*(answer.replace(etag.encode(), whole.encode()) for answer in (head, cut, rest)))
    box.upload("s3://bucket/x", "f")
    assert box.files.read("f") == b"partsx"


def test_a_get_that_never_comes_whole(misbehaving: Any, box: Sandbox) -> None:
    head = http("200 OK", Content_Length="6", ETag=ETAG)
    misbehaving(head, http("200 OK", b"par", Content_Length="6", ETag=ETAG), http("200 OK", Content_Length="6"))
    with pytest.raises(StorageError):
        box.upload("s3://bucket/x", "f")
    assert not box.files.exists("f")


def test_an_object_that_is_replaced_meanwhile(misbehaving: Any, box: Sandbox) -> None:
    misbehaving(http("200 OK", Content_Length="6", ETag=ETAG), http("200 OK", b"other", Content_Length="5", ETag=ETAG))
    with pytest.raises(StorageError, match="replaced"):
        box.upload("s3://bucket/x", "f")


def test_s3_settings_for_what_is_not_s3(box: Sandbox, tmp_path: Path) -> None:
    for path in (str(tmp_path), tmp_path, "s3:/x"):
        with pytest.raises(SpecError, match="path of this machine"):
            box.upload(path, "x", s3=S3())
        with pytest.raises(SpecError, match="path of this machine"):
            box.download("x", path, s3=S3())


def test_boto3_is_asked_for(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "botocore.session", None)
    box.files.write("f", "x")
    with pytest.raises(StorageError, match="needs boto3") as caught:
        box.download("f", "s3://bucket/x")
    assert caught.value.hint == "pip install 'sloplet[s3]'"
