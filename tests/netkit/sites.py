"""Static sites for real clients: a Python package index, an npm registry, git repositories; each a folder of files."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path


def package_index(folder: Path, host: str) -> Path:
    """A simple index of one small wheel (PEP 503)."""
    pages = folder / "simple" / "tiny-wheel"
    pages.mkdir(parents=True)
    files = {
        "tiny_wheel.py": "ANSWER = 42\n",
        "tiny_wheel-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n",
        "tiny_wheel-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_urlsafe(text)},{len(text)}\n" for name, text in files.items())
    name = "tiny_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr("tiny_wheel-1.0.dist-info/RECORD", record + "tiny_wheel-1.0.dist-info/RECORD,,\n")
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    link = f'<a href="https://{host}/{name}#sha256={digest}">{name}</a>'
    (pages / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    return folder


def _urlsafe(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def npm_registry(folder: Path, host: str) -> Path:
    """One package: its document (name, dist-tags, versions with dist.tarball and dist.integrity) and its tarball."""
    (folder / "tiny-package" / "-").mkdir(parents=True)
    manifest = {"name": "tiny-package", "version": "1.0.0", "main": "index.js"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (("package.json", json.dumps(manifest)), ("index.js", "module.exports = 42\n")):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    data = packed.getvalue()
    tarball = "tiny-package/-/tiny-package-1.0.0.tgz"
    (folder / tarball).write_bytes(data)
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    dist = {"tarball": f"https://{host}/{tarball}", "integrity": integrity, "shasum": hashlib.sha1(data).hexdigest()}
    document = {
        "name": "tiny-package", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {**manifest, "dist": dist}},
    }  # fmt: skip
    (folder / "tiny-package" / "index.json").write_text(json.dumps(document))
    return folder


def repositories(folder: Path) -> Path:
    """One repository with two commits and a file of some size."""
    work = folder / "work"
    work.mkdir(parents=True)
    identity = {
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@t",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@t",
    }
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=work, env=environment, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (work / "README").write_text("first\n")
    git("add", ".")
    git("commit", "-qm", "one")
    (work / "data").write_bytes(os.urandom(1_000_000))
    git("add", ".")
    git("commit", "-qm", "two")
    git("clone", "-q", "--bare", ".", str(folder / "repo.git"))
    return folder
