"""`sloplet cp` between a real sandbox and a real S3 server, each command a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cli_helpers import sloplet

pytest.importorskip("boto3")
pytest.importorskip("moto")

from s3_kit import CREDENTIALS, Buckets, s3_server

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buckets]:
    """The server, and a sandbox named dev in a home of its own."""
    from sloplet.engines import registry

    if not registry.load("container").probe().available:
        pytest.skip("no container engine here")
    before = {name: os.environ.get(name) for name in ("SLOPLET_HOME", *CREDENTIALS)}
    os.environ["SLOPLET_HOME"] = str(tmp_path_factory.mktemp("s3") / "home")
    os.environ.update(CREDENTIALS)
    try:
        with s3_server() as url:
            assert sloplet("create", "dev", "--engine", "container").returncode == 0
            buckets = Buckets(url)
            yield buckets
            buckets.close()
            assert sloplet("rm", "--all", "--force").returncode == 0
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def cp(s3: Buckets, source: str, target: str, *words: str) -> tuple[int, str]:
    done = sloplet("cp", "--endpoint-url", s3.url, *words, source, target)
    assert done.stdout == b""
    return done.returncode, done.stderr.decode()


def inside(script: str) -> str:
    done = sloplet("exec", "dev", "-c", script)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_a_folder_out_and_in(s3: Buckets) -> None:
    s3.make("folders")
    inside(
        "mkdir -p /workspace/out/deep && cd /workspace/out && echo 1 > a && seq 100000 > deep/b && ln -s /etc/passwd l"
    )
    code, said = cp(s3, "dev:/workspace/out", "s3://folders/x")
    assert (code, said) == (0, "sloplet: left out (links, special files, names that cannot be kept): l\n")
    assert s3.keys("folders") == ["x/a", "x/deep/b"]
    assert cp(s3, "dev:out", "s3://folders/y/")[0] == 0
    assert cp(s3, "dev:out/.", "s3://folders/z/")[0] == 0
    assert s3.keys("folders")[2:] == ["y/out/a", "y/out/deep/b", "z/a", "z/deep/b"]
    assert cp(s3, "s3://folders/x", "dev:/workspace/new") == (0, "")
    assert cp(s3, "s3://folders/x", "dev:/workspace/new") == (0, "")  # it is a folder now: into it
    assert cp(s3, "s3://folders/x/.", "dev:/workspace/content/") == (0, "")
    assert inside("cd /workspace && find new content -type f | sort").split() == [
        "content/a", "content/deep/b", "new/a", "new/deep/b", "new/x/a", "new/x/deep/b",
    ]  # fmt: skip
    assert inside("cmp out/deep/b new/deep/b; cd new/deep && stat -c %U b") == "agent\n"


def test_a_file_out_and_in(s3: Buckets) -> None:
    s3.make("files")
    inside("head -c 20000000 /dev/urandom > big && chmod 755 big")
    assert cp(s3, "dev:big", "s3://files") == (0, "")
    assert cp(s3, "dev:big", "s3://files/named") == (0, "")
    assert s3.keys("files") == ["big", "named"]
    assert cp(s3, "s3://files/named", "dev:") == (0, "")
    assert inside("cmp big named && stat -c %a named") == "755\n"


def test_around_a_command(s3: Buckets) -> None:
    s3.make("around")
    s3.write("around", "in/text", b"one two three")
    done = sloplet(
        "run", "--engine", "container", "--copy", "s3://around/in:data", "--out", "out:s3://around/results/",
        "-c", "mkdir out && wc -w < data/text > out/count", env={"AWS_ENDPOINT_URL": s3.url},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert s3.read("around", "results/out/count") == b"3\n"


@pytest.mark.parametrize(
    ("out", "said"), [("out:s3://no-such-bucket/x", b"no such bucket"), ("s3://around/x", b"is in the sandbox")]
)
def test_where_it_cannot_go_is_told_before_the_command(s3: Buckets, out: str, said: bytes) -> None:
    done = sloplet("run", "--out", out, "-c", "echo hours of work", env={"AWS_ENDPOINT_URL": s3.url})
    assert (done.returncode, done.stdout) == (125, b"")
    assert said in done.stderr


def test_keys_stay_outside(s3: Buckets) -> None:
    s3.make("keys")
    assert cp(s3, "dev:/etc/hostname", "s3://keys/x")[0] == 0
    seen = inside("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; cat /proc/*/cmdline 2>/dev/null")
    assert "HOME=" in seen, "it is readable"
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in seen
    assert "AWS_" not in seen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("s3://no-such-bucket/x", "dev:"), "no such bucket"),
        (("dev:/etc/hostname", "s3://no-such-bucket/x"), "no such bucket"),
        (("s3://a/../b", "dev:"), "does not name a bucket"),
        (("s3://bucket/../other", "dev:"), "'..'"),
        (("dev:/nothing", "s3://bucket/x"), "/nothing"),
        (("s3://bucket/x", "."), "must be in a sandbox"),
        (("s3://bucket/x", "s3://bucket/y"), "must be in a sandbox"),
    ],
)
def test_what_is_refused(s3: Buckets, words: tuple[str, str], said: str) -> None:
    code, error = cp(s3, *words)
    assert code == 125
    assert said in error
    assert error.count("\n") == 1, "one line, no traceback"


def test_options_for_s3_only(s3: Buckets) -> None:
    done = sloplet("cp", "--endpoint-url", s3.url, "/etc/hostname", "dev:")
    assert (done.returncode, b"are for S3" in done.stderr) == (125, True)


def test_without_credentials(s3: Buckets) -> None:
    s3.make("public")
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    words = ("cp", "--endpoint-url", s3.url, "dev:/etc/hostname", "s3://public/x")
    done = sloplet(*words, env=nobody)
    assert (done.returncode, b"no credentials" in done.stderr) == (125, True)
    assert sloplet("cp", "--no-sign-request", *words[1:], env=nobody).returncode == 0
    assert s3.keys("public") == ["x"]
