"""Real registries on loopback (Debian's docker-registry) and real tools (skopeo, umoci) for tests of images."""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from netkit.authority import Authority

USER, PASSWORD = "tester", "pass:word with spaces"
_TAIL = re.compile(r"listening on 127\.0\.0\.1:(\d+)")


def needs(*programs: str) -> None:
    """Skip where one of the tools is not installed, naming it."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@dataclass(frozen=True)
class RealRegistry:
    """A docker-registry that runs. ``host`` is as in references."""

    host: str
    folder: Path
    ca: Path | None = None  #: it speaks TLS with a certificate of this authority
    private: bool = False  #: it wants USER and PASSWORD

    @property
    def settings(self) -> str:
        """For registries.toml."""
        table = f'[registry."{self.host}"]\n'
        return table + (f'ca = "{self.ca}"\n' if self.ca else "insecure = true\n")

    @property
    def blobs(self) -> Path:
        return self.folder / "docker" / "registry" / "v2" / "blobs" / "sha256"

    def skopeo(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``copy``, ``inspect`` or another verb; the options that this registry needs are added."""
        verb, *rest = words
        sides = ("src-", "dest-") if verb == "copy" else ("",)
        options = []
        for side in sides:
            if self.ca:
                options.append(f"--{side}cert-dir={self.ca.parent}")
            else:
                options.append(f"--{side}tls-verify=false")
        if self.private:
            options += [f"--{side}creds={USER}:{PASSWORD}" for side in sides if f"{side}" != "src-" or _remote(rest, 0)]
        return run("skopeo", "--insecure-policy", verb, *options, *rest, check=check)


def _remote(words: list[str], number: int) -> bool:
    plain = [word for word in words if not word.startswith("-")]
    return len(plain) > number and plain[number].startswith("docker://")


def run(*command: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)  # type: ignore[call-overload]
    if check and done.returncode:
        raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done  # type: ignore[no-any-return]


@contextmanager
def real_registry(folder: Path, *, tls: bool = False, private: bool = False) -> Iterator[RealRegistry]:
    """Start one; it is gone at the end, its files are in ``folder``."""
    needs("docker-registry")
    data = folder / "data"
    data.mkdir(parents=True)
    lines = [
        "version: 0.1", "log: {level: info, accesslog: {disabled: true}}",
        f"storage: {{filesystem: {{rootdirectory: {data}}}, delete: {{enabled: true}}}}",
        "http:", "  addr: 127.0.0.1:0", "  secret: nothing",
    ]  # fmt: skip
    ca = None
    if tls:
        certificates = folder / "certs"
        certificates.mkdir()
        authority = Authority(certificates)
        leaf = authority.leaf("127.0.0.1")
        (folder / "ca").mkdir()
        ca = folder / "ca" / "ca.crt"  # as skopeo wants it: a folder with nothing but *.crt
        ca.write_bytes(authority.file.read_bytes())
        lines += [f"  tls: {{certificate: {leaf}, key: {leaf}}}"]
    if private:
        needs("htpasswd")
        made = run("htpasswd", "-Bbn", USER, PASSWORD).stdout
        (folder / "htpasswd").write_text(made.strip() + "\n")
        lines += [f"auth: {{htpasswd: {{realm: tests, path: {folder / 'htpasswd'}}}}}"]
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(
        ["docker-registry", "serve", str(folder / "config.yml")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "OTEL_TRACES_EXPORTER": "none"},
    )  # fmt: skip
    assert process.stdout is not None
    log = b""
    drain = threading.Thread()
    try:
        for line in process.stdout:
            log += line
            if found := _TAIL.search(line.decode()):
                break
        else:
            raise AssertionError(f"docker-registry did not start: {log[-2000:]!r}")
        drain = threading.Thread(target=lambda: collections.deque(process.stdout or (), maxlen=0), daemon=True)
        drain.start()  # it logs on, and would wait for a reader
        yield RealRegistry(f"127.0.0.1:{found[1]}", data, ca, private)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if drain.ident:
            drain.join()
        process.stdout.close()


def busybox_root(folder: Path) -> Path:
    """A small root filesystem: busybox, links, modes, an odd name; the same every time."""
    needs("busybox")
    program = shutil.which("busybox")
    assert program
    for name in ("bin", "etc", "tmp", "usr/share"):
        (folder / name).mkdir(parents=True)
    shutil.copy(program, folder / "bin" / "busybox")
    (folder / "bin" / "busybox").chmod(0o755)
    for name in ("sh", "ls", "cat", "echo", "id", "sleep", "true"):
        (folder / "bin" / name).symlink_to("busybox")
    (folder / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
    (folder / "etc" / "group").write_text("root:x:0:\n")
    (folder / "usr" / "share" / "größe.txt").write_text("in Bytes\n")
    os.link(folder / "etc" / "passwd", folder / "etc" / "passwd-")
    (folder / "tmp").chmod(0o1777)
    return folder


def layout_of(root: Path, layout: Path, *, second: dict[str, str] | None = None) -> Path:
    """An OCI layout ``layout:v1`` made by umoci, of one or two layers, with a config."""
    needs("umoci")
    owner = [] if os.geteuid() == 0 else ["--rootless"]
    run("umoci", "init", "--layout", str(layout))
    run("umoci", "new", "--image", f"{layout}:v1")
    run("umoci", "insert", *owner, "--image", f"{layout}:v1", str(root), "/")
    if second:
        extra = layout.with_name(layout.name + "-second")
        extra.mkdir()
        for name, text in second.items():
            (extra / name).write_text(text)
        run("umoci", "insert", *owner, "--image", f"{layout}:v1", str(extra), "/srv")
    run("umoci", "config", "--image", f"{layout}:v1", "--config.env", "GREETING=hello", "--config.cmd", "/bin/sh",
        "--config.workingdir", "/srv", "--config.user", "nobody")  # fmt: skip
    run("umoci", "gc", "--layout", str(layout))
    return layout
