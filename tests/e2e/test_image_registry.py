"""Round trips with real registries (Debian's docker-registry) and real tools: skopeo, umoci, buildah, mmdebstrap."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Terminal

from registry_kit import PASSWORD, USER, RealRegistry, busybox_root, layout_of, needs, real_registry, run
from rude_registry import Reply, RudeRegistry, layer_tar, make_image
from sloplet.errors import ImageNotFound, ImagePlatform, RegistryDenied, RegistryUnavailable
from sloplet.images import registries
from sloplet.images.export import export_image
from sloplet.images.layout import import_image
from sloplet.images.media import OCI_INDEX, OCI_LAYER, OCI_MANIFEST, host_platform
from sloplet.images.pull import pull
from sloplet.images.push import push
from sloplet.images.reference import parse
from sloplet.images.store import ImageStore, StoredImage
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """On loopback, without TLS, for everybody."""
    with real_registry(tmp_path_factory.mktemp("plain")) as registry:
        yield registry


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """With TLS, of an authority of its own, and a password."""
    with real_registry(tmp_path_factory.mktemp("private"), tls=True, private=True) as registry:
        yield registry


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busybox_root(tmp_path_factory.mktemp("busybox"))


@pytest.fixture(scope="module")
def made(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OCI layout of umoci's, ``:v1``, of two layers."""
    needs("skopeo", "umoci")
    return layout_of(root, tmp_path_factory.mktemp("layout") / "oci", second={"note.txt": "second\n"})


class Here:
    """A state directory and credentials of one test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.store = ImageStore(Home(folder / "home"))
        self.auth = folder / "auth.json"
        self._settings: list[str] = []
        monkeypatch.setenv("SLOPLET_HOME", str(folder / "home"))
        monkeypatch.setenv("SLOPLET_REGISTRIES", str(folder / "registries.toml"))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(self.auth))
        self.auth.write_text("{}")  # buildah wants it to be there
        self.knows()

    def knows(self, *settings: RealRegistry | str) -> None:
        self._settings += [text if isinstance(text, str) else text.settings for text in settings]
        (self.folder / "registries.toml").write_text("\n".join(self._settings))

    def login(self, registry: RealRegistry) -> None:
        packed = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        self.auth.write_text(json.dumps({"auths": {registry.host: {"auth": packed}}}))

    def pull(self, text: str, **options: Any) -> StoredImage:
        return asyncio.run(pull(parse(text), self.store, registries=registries.load(self.store.home), **options))

    def push(self, image: StoredImage, text: str) -> str:
        return asyncio.run(push(image, parse(text), self.store, registries=registries.load(self.store.home)))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    made = Here(tmp_path, monkeypatch)
    yield made
    made.store.close()


def raw(registry: RealRegistry, name: str) -> bytes:
    return registry.skopeo("inspect", "--raw", f"docker://{registry.host}/{name}").stdout.encode()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def tree(folder: Path) -> dict[str, tuple[str, str]]:
    """What is in a root filesystem: kinds and modes, contents and targets."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        if path.is_symlink():
            found[str(path.relative_to(folder))] = ("link", os.readlink(path))
        elif path.is_dir():
            found[str(path.relative_to(folder))] = (f"folder {info.st_mode:o}", "")
        elif not path.is_file():
            found[str(path.relative_to(folder))] = (f"other {info.st_mode:o}", "")  # a device: never opened
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = (f"file {info.st_mode:o} {info.st_nlink}", content)
    return found


def unpacked(registry: RealRegistry, name: str, folder: Path) -> dict[str, tuple[str, str]]:
    """What umoci makes of an image in the registry."""
    registry.skopeo("copy", f"docker://{registry.host}/{name}", f"oci:{folder / 'read'}:v1")
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    run("umoci", "unpack", *rootless, "--image", f"{folder / 'read'}:v1", str(folder / "bundle"))
    return tree(folder / "bundle" / "rootfs")


def with_zstd(layout: Path, target: Path) -> Path:
    """The same image with its layers packed by zstd (skopeo would take what it knows to be there in gzip)."""
    needs("zstd")
    run("cp", "-r", str(layout), str(target))
    blobs = target / "blobs" / "sha256"
    index = json.loads((target / "index.json").read_bytes())
    (entry,) = index["manifests"]
    manifest = json.loads((blobs / entry["digest"][7:]).read_bytes())
    for layer in manifest["layers"]:
        path = blobs / layer["digest"][7:]
        packed = subprocess.run(f"gzip -dc {path} | zstd -c", shell=True, capture_output=True, check=True).stdout
        layer.update(mediaType=f"{OCI_LAYER}+zstd", digest=digest(packed), size=len(packed))
        (blobs / digest(packed)[7:]).write_bytes(packed)
        path.unlink()
    data = json.dumps(manifest).encode()
    (blobs / digest(data)[7:]).write_bytes(data)
    entry.update(digest=digest(data), size=len(data))
    (target / "index.json").write_text(json.dumps(index))
    return target


@pytest.mark.parametrize("kind", ["plain", "private"])
@pytest.mark.parametrize(
    "form", [("oci", "gzip"), ("oci", "zstd"), ("v2s2", "gzip")], ids=["oci-gzip", "oci-zstd", "docker"]
)
def test_round_trip(
    kind: str, form: tuple[str, str], made: Path, here: Here, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    registry: RealRegistry = request.getfixturevalue(kind)
    here.knows(registry)
    if registry.private:
        here.login(registry)
    name = f"team/{'-'.join(form)}"
    source = with_zstd(made, tmp_path / "zstd") if form[1] == "zstd" else made
    registry.skopeo("copy", f"--format={form[0]}", f"oci:{source}:v1", f"docker://{registry.host}/{name}:v1")
    document = raw(registry, f"{name}:v1")

    image = here.pull(f"{registry.host}/{name}:v1")
    assert image.manifest == digest(document)
    assert [layer.packing for layer in image.layers] == [form[1]] * 2
    assert (image.config.user, image.config.workdir, image.config.cmd) == ("nobody", "/srv", ("/bin/sh",))
    assert dict(image.config.env)["GREETING"] == "hello"

    assert here.push(image, f"{registry.host}/other/{name}:v2") == image.manifest
    assert raw(registry, f"other/{name}:v2") == document
    assert here.pull(f"{registry.host}/other/{name}@{image.manifest}").id == image.id
    if form[1] != "zstd":  # which Debian's umoci does not know
        assert unpacked(registry, f"other/{name}:v2", tmp_path) == unpacked_layout(made, tmp_path)


def unpacked_layout(layout: Path, folder: Path) -> dict[str, tuple[str, str]]:
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    run("umoci", "unpack", *rootless, "--image", f"{layout}:v1", str(folder / "original"))
    return tree(folder / "original" / "rootfs")


def test_an_image_for_several_machines(plain: RealRegistry, made: Path, here: Here, tmp_path: Path) -> None:
    """An index, copied by skopeo with all that is in it."""
    here.knows(plain)
    index = json.loads((made / "index.json").read_bytes())
    (mine,) = [item for item in index["manifests"] if item["annotations"]["org.opencontainers.image.ref.name"] == "v1"]
    platform = host_platform()
    layout = tmp_path / "multi"
    run("cp", "-r", str(made), str(layout))
    blobs = layout / "blobs" / "sha256"

    def add(data: bytes) -> dict[str, Any]:
        (blobs / digest(data)[7:]).write_bytes(data)
        return {"digest": digest(data), "size": len(data)}

    manifest = json.loads((blobs / mine["digest"][7:]).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_bytes())
    manifest["config"].update(add(json.dumps({**config, "architecture": "s390x"}).encode()))
    other = {"mediaType": OCI_MANIFEST, **add(json.dumps(manifest).encode())}
    own = {"os": "linux", "architecture": platform.architecture}
    listed = [
        {**other, "platform": {"os": "linux", "architecture": "s390x"}},
        {**{key: mine[key] for key in ("mediaType", "digest", "size")}, "platform": own},
    ]
    whole = add(json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}).encode())
    named = {"mediaType": OCI_INDEX, **whole, "annotations": {"org.opencontainers.image.ref.name": "multi"}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    plain.skopeo("copy", "--all", f"oci:{layout}:multi", f"docker://{plain.host}/team/multi:v1")

    assert here.pull(f"{plain.host}/team/multi:v1").manifest == mine["digest"]
    assert here.pull(f"{plain.host}/team/multi@{whole['digest']}").manifest == mine["digest"]
    foreign = here.pull(f"{plain.host}/team/multi:v1", platform="linux/s390x")
    assert (foreign.manifest, foreign.platform) == (other["digest"], "linux/s390x")
    with pytest.raises(ImagePlatform, match=f"linux/{platform.architecture}, linux/s390x"):
        here.pull(f"{plain.host}/team/multi:v1", platform="linux/mips64le")
    assert import_image(layout, here.store).manifest == mine["digest"]


def test_who_may_read(private: RealRegistry, made: Path, here: Here, tmp_path: Path) -> None:
    """Nobody, the wrong password, a file that skopeo login wrote, a credential helper."""
    here.knows(private)
    name = f"{private.host}/team/secret:v1"
    private.skopeo("copy", f"oci:{made}:v1", f"docker://{name}")
    with pytest.raises(RegistryDenied, match="wants credentials"):
        here.pull(name)
    here.auth.write_text(json.dumps({"auths": {private.host: {"username": USER, "password": "wrong"}}}))
    with pytest.raises(RegistryDenied, match="does not accept"):
        here.pull(name)
    here.auth.unlink()

    login = ["skopeo", "login", f"--authfile={here.auth}", f"--cert-dir={private.ca and private.ca.parent}"]
    run(*login, "-u", USER, "--password-stdin", private.host, input=PASSWORD)
    image = here.pull(name)

    program = tmp_path / "docker-credential-tests"
    answer = json.dumps({"ServerURL": private.host, "Username": USER, "Secret": PASSWORD})
    program.write_text(f"#!/bin/sh\nread server; [ \"$server\" = {private.host} ] && cat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    here.auth.write_text(json.dumps({"credHelpers": {private.host: "tests"}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert here.push(image, f"{private.host}/team/again:v1") == image.manifest


def test_whom_to_trust(private: RealRegistry, plain: RealRegistry, here: Here) -> None:
    with pytest.raises(RegistryUnavailable, match="cannot show who it is") as caught:
        here.pull(f"{private.host}/team/app")
    assert "ca = FILE" in str(caught.value)
    with pytest.raises(RegistryUnavailable, match="does not speak TLS") as caught:
        here.pull(f"{plain.host}/team/app")
    assert "--insecure" in str(caught.value)
    here.knows(plain)
    with pytest.raises(ImageNotFound, match="has no team/nothing v9"):
        here.pull(f"{plain.host}/team/nothing:v9")
    with pytest.raises(RegistryUnavailable, match="cannot be reached: Connection refused"):
        here.pull("127.0.0.1:1/x")


def test_a_mirror_of_docker_hub(plain: RealRegistry, made: Path, here: Here) -> None:
    here.knows(plain, f'[registry."docker.io"]\nmirrors = ["127.0.0.1:1", "{plain.host}/hub"]')
    plain.skopeo("copy", f"oci:{made}:v1", f"docker://{plain.host}/hub/library/busy:v1")
    image = here.pull("busy:v1")
    assert image.references == ("docker.io/library/busy:v1",)
    assert here.store.find("busy:v1").id == image.id


def test_what_we_write_they_read_and_the_other_way_round(
    plain: RealRegistry, made: Path, here: Here, tmp_path: Path
) -> None:
    image = import_image(made, here.store, parse("app:v1"))
    export_image(image, here.store, tmp_path / "out", reference=parse("app:v1"))
    export_image(image, here.store, tmp_path / "out.tar", reference=parse("app:v1"))
    copy = ["skopeo", "--insecure-policy", "copy"]
    for number, source in enumerate((f"oci:{tmp_path / 'out'}:v1", f"oci-archive:{tmp_path / 'out.tar'}:v1")):
        run(*copy, source, f"dir:{tmp_path / f'read{number}'}")
        assert digest((tmp_path / f"read{number}" / "manifest.json").read_bytes()) == image.manifest
    run(*copy, f"docker-archive:{tmp_path / 'out.tar'}:app:v1", f"oci:{tmp_path / 'docker'}:v1")
    shown = json.loads(run("skopeo", "inspect", "--config", f"oci:{tmp_path / 'docker'}:v1").stdout)
    assert shown["rootfs"]["diff_ids"] == list(image.config.diff_ids)
    assert run("umoci", "ls", "--layout", str(tmp_path / "out")).stdout.split() == ["v1"]

    run(*copy, f"oci:{made}:v1", f"docker-archive:{tmp_path / 'saved.tar'}:saved:v1")
    run(*copy, f"oci:{made}:v1", f"oci-archive:{tmp_path / 'oci.tar'}:v1")
    saved = import_image(tmp_path / "saved.tar", here.store)
    assert "docker.io/library/saved:v1" in saved.references
    assert saved.config.diff_ids == image.config.diff_ids
    assert import_image(tmp_path / "oci.tar", here.store).manifest == image.manifest


def test_what_buildah_builds(plain: RealRegistry, root: Path, here: Here, tmp_path: Path) -> None:
    needs("buildah", "skopeo", "umoci")
    here.knows(plain)
    where = ["--root", str(tmp_path / "b"), "--runroot", str(tmp_path / "r"), "--storage-driver", "vfs"]
    begun = run("buildah", *where, "from", "scratch", check=False)
    if begun.returncode:
        pytest.skip(f"buildah cannot work here (it needs root or subordinate ids): {begun.stderr.strip()[-200:]}")
    container = begun.stdout.strip()
    run("buildah", *where, "add", container, str(root), "/")
    run("buildah", *where, "config", "--cmd", "/bin/sh", "--port", "80/tcp", "--label", "a=b", container)
    target = f"docker://{plain.host}/team/buildah:v1"
    run("buildah", *where, "commit", "--tls-verify=false", "--rm", container, target)

    image = here.pull(f"{plain.host}/team/buildah:v1")
    assert (image.config.ports, dict(image.config.labels)["a"]) == (("80/tcp",), "b")
    here.push(image, f"{plain.host}/team/buildah:v2")
    assert raw(plain, "team/buildah:v2") == raw(plain, "team/buildah:v1")
    found = unpacked(plain, "team/buildah:v2", tmp_path)
    assert {name: found[name] for name in tree(root)} == tree(root)


def test_what_mmdebstrap_makes(plain: RealRegistry, here: Here, tmp_path: Path) -> None:
    needs("mmdebstrap", "skopeo", "umoci")
    here.knows(plain)
    archive = tmp_path / "debian.tar"
    command = ["mmdebstrap", "--quiet", "--variant=extract", "--include=busybox-static", "bookworm", str(archive)]
    done = run(*command, check=False)
    if done.returncode:
        pytest.skip(f"mmdebstrap cannot work here (a mirror, or subordinate ids): {done.stderr.strip()[-200:]}")
    image = import_image(archive, here.store, parse(f"{plain.host}/team/debian:v1"))
    assert here.push(image, f"{plain.host}/team/debian:v1") == image.manifest
    found = unpacked(plain, "team/debian:v1", tmp_path)
    assert found["bin/busybox"][0].startswith("file 100755")
    listed = {name.strip("./") for name in run("tar", "-tf", str(archive)).stdout.split("\n")} - {""}
    assert {name for name in listed if not name.startswith("dev/")} <= set(found)


# The command line


def sloplet(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "sloplet.cli", "image", *words, check=check)


def test_the_verbs(plain: RealRegistry, made: Path, here: Here, tmp_path: Path) -> None:
    plain.skopeo("copy", f"oci:{made}:v1", f"docker://{plain.host}/cli/app:v1")
    name = f"{plain.host}/cli/app:v1"
    done = sloplet("pull", name, "--insecure")
    assert done.stdout.startswith(f"{name}: ")
    assert "2 layers" in done.stdout
    assert done.stderr.count("sloplet: got ") == 3  # the config and two layers, a line each: this is no terminal

    assert sloplet("pull", name, "--insecure").stderr.count("sloplet: here already ") == 3

    facts = json.loads(sloplet("pull", name, "--insecure", "--json").stdout)
    assert facts["reference"] == name
    assert facts["manifest"] == digest(raw(plain, "cli/app:v1"))
    quiet = sloplet("pull", name, "--insecure", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (facts["id"] + "\n", "")

    pushed = json.loads(sloplet("push", name, f"{plain.host}/cli/app:v2", "--insecure", "--json").stdout)
    assert pushed["digest"] == facts["manifest"] == digest(raw(plain, "cli/app:v2"))
    exported = json.loads(sloplet("export", name, str(tmp_path / "out.tar"), "--json").stdout)
    assert exported["manifest"] == facts["manifest"]
    assert sloplet("export", name, str(tmp_path / "out"), "--quiet").stdout == ""
    again = json.loads(sloplet("import", str(tmp_path / "out.tar"), "again:1", "--json").stdout)
    assert again["id"] == facts["id"]
    assert "docker.io/library/again:1" in again["references"]
    assert sloplet("import", str(tmp_path / "out"), "--quiet").stdout == facts["id"] + "\n"
    unnamed = sloplet("push", facts["id"][7:19], "--insecure", "--json", check=False)
    assert "say what to push it as" in json.loads(unnamed.stderr)["message"]
    piped = subprocess.run([sys.executable, "-m", "sloplet.cli", "image", "export", name, "-"], capture_output=True)
    assert piped.stdout == (tmp_path / "out.tar").read_bytes()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("pull", "{host}/no/such:v1", "--insecure"), "ImageNotFound"),
        (("pull", "{host}/no/such:v1"), "RegistryUnavailable"),
        (("pull", "UPPER CASE"), "SpecError"),
        (("pull", "registry.test/x", "--insecure"), "SpecError"),
        (("pull", "x", "--platform", "a/b/c/d"), "SpecError"),
        (("push", "no/such:v1"), "ImageNotFound"),
        (("import", "/no/such/file"), "FileMissing"),
        (("import", "/dev/null"), "ImageInvalid"),
        (("export", "no/such:v1", "/tmp/never.tar"), "ImageNotFound"),
    ],
)
def test_errors_of_the_verbs(words: tuple[str, ...], error: str, plain: RealRegistry, here: Here) -> None:
    done = sloplet(*(word.format(host=plain.host) for word in words), "--json", check=False)
    assert done.returncode == 125
    assert done.stdout == ""
    assert json.loads(done.stderr)["error"] == error


def test_bars_on_a_terminal(plain: RealRegistry, made: Path, here: Here) -> None:
    plain.skopeo("copy", f"oci:{made}:v1", f"docker://{plain.host}/cli/bars:v1")
    with Terminal("image", "pull", f"{plain.host}/cli/bars:v1", "--insecure") as terminal:
        assert terminal.wait() == 0
        assert b"download" in terminal.seen
        assert b"2 layers" in terminal.seen
        assert terminal.modes_restored()


def test_an_interrupted_pull_says_what_is_there(here: Here) -> None:
    async def work() -> None:
        async with RudeRegistry() as registry:
            made = registry.add(make_image(layer_tar({"bin/sh": os.urandom(3 << 20)})), "v1")
            data = made.blobs[made.layers[0]]
            registry.will(made.layers[0], Reply(200, data[: 2 << 20], length=len(data), stall=True))
            partial = here.store.blobs.partial / made.layers[0].replace(":", "-")
            with Terminal("image", "pull", f"{registry.host}/app:v1", "--insecure") as terminal:
                while not (partial.exists() and partial.stat().st_size):
                    await asyncio.sleep(0.01)
                os.write(terminal.fd, b"\x03")
                assert await asyncio.to_thread(terminal.wait) == 130
                assert b"What has come is kept" in terminal.seen
            assert partial.read_bytes() == data[: partial.stat().st_size]

    asyncio.run(work())


def test_a_pull_that_is_killed_goes_on(here: Here) -> None:
    async def work() -> None:
        async with RudeRegistry() as registry:
            made = registry.add(make_image(layer_tar({"bin/sh": os.urandom(3 << 20)})), "v1")
            data = made.blobs[made.layers[0]]
            registry.will(made.layers[0], Reply(200, data[: 2 << 20], length=len(data), stall=True))
            command = [
                sys.executable,
                "-m",
                "sloplet.cli",
                "image",
                "pull",
                f"{registry.host}/app:v1",
                "--insecure",
                "-q",
            ]
            first = await asyncio.create_subprocess_exec(*command)
            partial = here.store.blobs.partial / made.layers[0].replace(":", "-")
            while not (partial.exists() and partial.stat().st_size):
                await asyncio.sleep(0.01)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            have = partial.stat().st_size
            second = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            output, _ = await second.communicate()
            assert output.decode() == made.config + "\n"
            assert registry.asked(made.layers[0])[-1].headers["range"] == f"bytes={have}-"

    asyncio.run(work())


def test_two_pulls_and_one_is_killed(here: Here) -> None:
    """F-08: the other one takes over what the killed one had, and there is one whole image."""

    async def work() -> None:
        async with RudeRegistry() as registry:
            made = registry.add(make_image(layer_tar({"bin/sh": os.urandom(3 << 20)})), "v1")
            data = made.blobs[made.layers[0]]
            registry.will(made.layers[0], Reply(200, data[: 2 << 20], length=len(data), stall=True))
            command = [sys.executable, "-m", "sloplet.cli", "image", "pull", f"{registry.host}/app:v1"]
            command += ["--insecure", "--quiet"]
            first = await asyncio.create_subprocess_exec(*command)
            partial = here.store.blobs.partial / made.layers[0].replace(":", "-")
            while not (partial.exists() and partial.stat().st_size):
                await asyncio.sleep(0.01)
            second = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            while len(registry.asked("/v1")) < 2:
                await asyncio.sleep(0.01)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            output, _ = await second.communicate()
            assert output.decode() == made.config + "\n"
            assert len(registry.asked(made.layers[0])) == 2
            resumed = int(registry.asked(made.layers[0])[1].headers["range"][6:-1])
            assert 0 < resumed <= 2 << 20
            assert os.listdir(here.store.blobs.partial) == []
            assert here.store.find(f"{registry.host}/app:v1").id == made.config

    asyncio.run(work())
