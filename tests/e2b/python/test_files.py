"""Files: in every form, big, with metadata, by signed URLs; folders."""

from __future__ import annotations

import hashlib
import io
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from e2b.exceptions import AuthenticationException

from e2b import FileType, InvalidArgumentException, NotFoundException, Sandbox

CONTEXT = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE"))


def test_text_bytes_and_streams(shared: Sandbox) -> None:
    info = shared.files.write("plain.txt", "text with ä")
    assert (info.path, info.name) == ("/home/user/plain.txt", "plain.txt")
    assert shared.files.read("plain.txt") == "text with ä"
    assert bytes(shared.files.read("/home/user/plain.txt", format="bytes")) == "text with ä".encode()
    assert b"".join(shared.files.read("plain.txt", format="stream")) == "text with ä".encode()
    shared.files.write("plain.txt", b"\x00\xff\x00")
    assert bytes(shared.files.read("plain.txt", format="bytes")) == b"\x00\xff\x00"
    shared.files.write("empty", "")
    assert shared.files.read("empty") == ""


def test_whose_they_are(shared: Sandbox) -> None:
    shared.files.write("deep/er/file", "x")
    shared.files.write("/new-at-the-root/file", "x")
    said = shared.commands.run("stat -c '%U:%G %a' deep deep/er deep/er/file /new-at-the-root/file").stdout
    assert said.splitlines() == ["user:user 755", "user:user 755", "user:user 644", "user:user 644"]
    shared.files.write("of-root", "x", user="root")
    assert shared.commands.run("stat -c %U /root/of-root", user="root").stdout == "root\n"
    with pytest.raises(AuthenticationException):
        shared.files.read("of-root", user="nobody-here")


def test_many_at_once(shared: Sandbox) -> None:
    given = [{"path": f"many/{n}/file-{n}.txt", "data": f"content {n}"} for n in range(12)]
    made = shared.files.write_files(given)  # type: ignore[arg-type]
    assert [info.path for info in made] == [f"/home/user/{item['path']}" for item in given]
    assert [shared.files.read(item["path"]) for item in given] == [item["data"] for item in given]


def test_names_of_all_kinds(shared: Sandbox) -> None:
    for name in ("with space", "ünïcode", 'quo"te', "per%cent%22", "a;b&c=d", "new\nline"):
        shared.files.write(f"names/{name}", name)
        assert shared.files.read(f"names/{name}") == name
    assert len(shared.files.list("names")) == 6


def test_compressed(shared: Sandbox) -> None:
    text = "again and " * 20_000
    shared.files.write("packed", text, gzip=True)
    assert shared.commands.run("wc -c < packed").stdout.strip() == str(len(text))
    assert shared.files.read("packed", gzip=True) == text
    assert shared.files.read("packed") == text


def test_a_big_file_both_ways(shared: Sandbox) -> None:
    data = os.urandom(1 << 20) * 64
    shared.files.write("big", io.BytesIO(data))
    assert shared.commands.run("sha256sum big").stdout.split()[0] == hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256()
    for piece in shared.files.read("big", format="stream"):
        digest.update(piece)
    assert digest.hexdigest() == hashlib.sha256(data).hexdigest()
    shared.files.remove("big")


def test_what_is_not_there(shared: Sandbox) -> None:
    with pytest.raises(NotFoundException, match="'/home/user/nothing' does not exist"):
        shared.files.read("nothing")
    with pytest.raises(InvalidArgumentException, match="is a directory"):
        shared.files.read("/home")
    with pytest.raises(InvalidArgumentException):
        shared.files.write("/home", "x")
    with pytest.raises(NotFoundException):
        shared.files.get_info("nothing")
    assert not shared.files.exists("nothing")


def test_files_of_the_kernel(shared: Sandbox) -> None:
    assert len(shared.files.read("/proc/sys/kernel/random/boot_id").strip()) == 36


def test_folders(shared: Sandbox) -> None:
    assert shared.files.make_dir("tree/a/b") is True
    assert shared.files.make_dir("tree/a/b") is False
    for path in ("tree/file", "tree/a/one", "tree/a/b/two"):
        shared.files.write(path, "x")
    names = [[entry.name for entry in shared.files.list("tree", depth=depth)] for depth in (1, 2, 3)]
    assert names == [["a", "file"], ["a", "b", "one", "file"], ["a", "b", "two", "one", "file"]]
    kinds = {entry.path: entry.type for entry in shared.files.list("tree")}
    assert kinds == {"/home/user/tree/a": FileType.DIR, "/home/user/tree/file": FileType.FILE}
    shared.files.remove("tree")
    shared.files.remove("tree")
    assert not shared.files.exists("tree")
    with pytest.raises(NotFoundException):
        shared.files.list("tree")


def test_an_entry(shared: Sandbox) -> None:
    shared.files.write("entry", "four")
    shared.commands.run("ln -sf entry entry-link")
    info = shared.files.get_info("entry")
    assert (info.name, info.path, info.type, info.size) == ("entry", "/home/user/entry", FileType.FILE, 4)
    assert (info.mode, info.permissions, info.owner, info.group) == (0o644, "-rw-r--r--", "user", "user")
    assert info.symlink_target is None
    assert info.modified_time is not None
    link = shared.files.get_info("entry-link")
    assert (link.type, link.symlink_target) == (FileType.FILE, "/home/user/entry")
    folder = shared.files.get_info("/home/user")
    assert (folder.type, folder.permissions[0]) == (FileType.DIR, "d")
    assert folder.size > 0


def test_renamed(shared: Sandbox) -> None:
    shared.files.write("before", "kept")
    info = shared.files.rename("before", "into/after")
    assert info.path == "/home/user/into/after"
    assert not shared.files.exists("before")
    assert shared.files.read("into/after") == "kept"
    with pytest.raises(NotFoundException):
        shared.files.rename("before", "elsewhere")


def test_metadata(shared: Sandbox) -> None:
    given = {"author": "mish", "purpose": "a test"}
    assert shared.files.write("tagged", "x", metadata=given).metadata == given
    assert shared.files.get_info("tagged").metadata == given
    assert shared.files.write("tagged-2", io.BytesIO(b"x"), metadata=given).metadata == given
    assert shared.files.rename("tagged", "renamed").metadata == given
    assert shared.files.write("renamed", "y").metadata is None
    assert shared.files.get_info("renamed").metadata is None
    shared.commands.run("python3 -c \"import os; os.setxattr('renamed', 'user.e2b.by', b'hand')\"")
    assert shared.files.get_info("renamed").metadata == {"by": "hand"}


def fetch(url: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data, headers or {})
    try:
        with urllib.request.urlopen(request, context=CONTEXT if url.startswith("https") else None) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_signed_urls(make: Callable[..., Sandbox], resolves: None) -> None:
    box = make()
    box.files.write("signed", "content")
    assert fetch(box.download_url("signed", user="user")) == (200, b"content")
    assert fetch(box.download_url("signed")) == (200, b"content")
    assert fetch(box.download_url("signed", user="user", use_signature_expiration=100)) == (200, b"content")
    status, said = fetch(box.download_url("signed", user="user", use_signature_expiration=-100))
    assert (status, json.loads(said)) == (401, {"code": 401, "message": "signature is already expired"})
    status, said = fetch(box.download_url("signed").replace("signature=v1_", "signature=v1_x"))
    assert (status, json.loads(said)["message"]) == (401, "invalid signature")
    body = b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nsent\r\n--B--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=B"}
    status, said = fetch(box.upload_url("sent"), body, kind)
    assert (status, json.loads(said)) == (200, [{"path": "/home/user/sent", "name": "sent", "type": "file"}])
    assert box.files.read("sent") == "sent"
    status, said = fetch(box.download_url("signed").replace("read", "write"), body, kind)
    assert status == 401


def test_a_disk_that_is_full(make: Callable[..., Sandbox]) -> None:
    box = make()
    from e2b import NotEnoughSpaceException

    with pytest.raises(NotEnoughSpaceException):
        box.files.write("/dev/full", "x")
