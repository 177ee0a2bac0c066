"""Builds, really done: every step in a sandbox, its layer looked at, read by other tools, and done again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import SLOPLET, gvisor_environment, sloplet

from image_kit import busybox_image, default_home, needs_busybox
from sloplet import Image, Network, Sandbox
from sloplet.build.dockerfile import parse
from sloplet.build.events import BuildEvent
from sloplet.build.executor import Builder, BuildOptions, parse_tags
from sloplet.build.mounts import cache_name
from sloplet.build.running import RunSettings, engine_of
from sloplet.engines import jail, registry
from sloplet.engines.machine import machine
from sloplet.errors import BuildError, BuildFailed, ImageNotFound, ImagePlatform, RecipeInvalid, SlopletError
from sloplet.images.media import host_platform
from sloplet.images.store import ImageStore, StoredImage
from sloplet.runtime import Runtime
from sloplet.state.home import Home
from sloplet.volumes.store import Volumes

pytestmark = [needs_busybox]

if jail.mode(machine()) == "single":
    pytest.skip("builds need several users inside: there are no subordinate ids here", allow_module_level=True)


@pytest.fixture(scope="session", autouse=True)
def base() -> StoredImage:
    return busybox_image(default_home())


@pytest.fixture
def store() -> Iterator[ImageStore]:
    made = ImageStore(default_home())
    yield made
    made.close()


class Built:
    """What came of a build."""

    def __init__(self, image: StoredImage, events: list[BuildEvent]) -> None:
        self.image = image
        self.events = events

    @property
    def cached(self) -> list[str]:
        """The instructions that were not done again."""
        texts = {event.step: event.text for event in self.events if event.kind == "begin"}
        return [texts[event.step] for event in self.events if event.kind == "end" and event.cached]

    @property
    def log(self) -> list[str]:
        return [event.text for event in self.events if event.kind == "log"]


def build(text: str, context: Path | None = None, *, tag: str = "", **options: Any) -> Built:
    events: list[BuildEvent] = []
    settings = RunSettings(network=options.pop("network", "none"), engine=options.pop("engine", "auto"))

    async def work() -> StoredImage:
        given = BuildOptions(tags=parse_tags([tag] if tag else []), settings=settings, **options)
        return await Builder(
            parse(text), given, home=default_home(), context=context, on_event=events.append,
            dockerfile_path=None if context is None else context / "Dockerfile",
        ).build()  # fmt: skip

    return Built(asyncio.run(work()), events)


def layers(image: StoredImage) -> list[dict[str, tarfile.TarInfo]]:
    store = ImageStore(default_home())
    found = []
    for layer in image.layers:
        with store.blobs.open(layer.digest) as blob, tarfile.open(fileobj=blob, mode="r|gz") as tar:
            found.append({info.name: info for info in tar})
    return found


def output(image: StoredImage, command: str, **options: Any) -> str:
    with Sandbox(image=image.id, **options) as box:
        return box.run(command, check=True).stdout


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "src/deep").mkdir(parents=True)
    (folder / "src/a.txt").write_text("a\n")
    (folder / "src/deep/b.txt").write_text("b\n")
    (folder / "src/ignored.o").write_text("o\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / ".dockerignore").write_text("**/*.o\n")
    return folder


THREE = """
FROM busybox:test AS one
RUN echo one > /one && chown app:staff /one && chmod 600 /one
FROM busybox:test AS two
WORKDIR /work
COPY src ./
RUN cat a.txt deep/b.txt > all
FROM busybox:test
ARG NAME=world
ENV GREETING="hello $NAME"
COPY --from=one /one /result/
COPY --from=two --chown=app /work/all /result/
COPY --chmod=700 run.sh /usr/bin/run
RUN id > /result/id && cat /result/all >> /result/id
USER app
WORKDIR /home/app/w
ENTRYPOINT ["run"]
"""


def test_three_stages_and_again_from_the_cache(context: Path, store: ImageStore) -> None:
    first = build(THREE, context, tag="three:1")
    listing = output(first.image, "ls -lan /result; cat /result/id; echo $GREETING; pwd; id -un", user=None)
    assert " 1000     50 " in next(line for line in listing.splitlines() if line.endswith(" one"))
    assert " 1000     1001 " in next(line for line in listing.splitlines() if line.endswith(" all"))
    assert "uid=0(root)" in listing
    assert "a\nb\n" in listing
    assert listing.endswith("hello world\n/home/app/w\napp\n")
    again = build(THREE, context, tag="three:1")
    assert again.image.id == first.image.id
    made = [text for text in again.cached if text.startswith(("RUN", "COPY", "WORKDIR"))]
    assert len(made) == 9
    assert store.find("three:1").id == first.image.id
    assert first.image.config.entrypoint == ("run",)


def test_a_change_is_built_again_from_there_on(context: Path) -> None:
    build(THREE, context)
    (context / "src/deep/b.txt").write_text("changed\n")
    again = build(THREE, context)
    assert "COPY src ./" not in again.cached
    assert "COPY --from=one /one /result/" in again.cached
    assert "changed" in output(again.image, "cat /result/all", user="root")
    (context / "src/ignored.o").write_text("also changed\n")
    assert build(THREE, context).image.id == again.image.id


def test_without_the_cache_the_same_digests_come_out(context: Path) -> None:
    first = build(THREE, context, no_cache=True)
    second = build(THREE, context, no_cache=True)
    assert not [text for text in second.cached if text.startswith(("RUN", "COPY"))]
    assert second.image.manifest == first.image.manifest


def test_a_layer_that_went_is_built_again(context: Path, store: ImageStore) -> None:
    text = "FROM busybox:test\nRUN echo lost > /lost\n"
    first = build(text)
    store.blobs.remove(first.image.layers[-1].digest)
    again = build(text)
    assert again.cached == []
    assert again.image.id == first.image.id


# -- what is in a layer -----------------------------------------------------------------------


CHANGES = """
FROM busybox:test
RUN mkdir -p /d/old /d/kept && echo 1 > /d/old/f && ln /d/old/f /d/hard && ln -s old /d/soft && chmod 4755 /d/hard \\
 && chown -R app:staff /d/kept && echo caf > "/d/caf\u00e9"
RUN rm -rf /d/old && mkdir /d/old && echo 2 > /d/old/new && rm /etc/group && chmod 700 /var/lib && mkfifo /fifo
RUN touch /tmp/x && rm /tmp/x
"""


#: The same for every user, on every engine, on every day.
DIFF_IDS = (
    "sha256:36eebd4cc8164b6f6956e5735f1ae9bdb0b17b197dd3bd3949a22e3ebd924a97",
    "sha256:6d732189cc34b56b9ec2bfef2ee107c706f7c508218c27c42ec1e85ff9bf1ff2",
)


def check_changes(image: StoredImage) -> None:
    _, first, second = layers(image)
    assert first["d/hard"].isreg()
    assert first["d/hard"].mode == 0o4755
    assert (first["d/old/f"].islnk(), first["d/old/f"].linkname) == (True, "d/hard")
    assert first["d/soft"].linkname == "old"
    assert (first["d/kept"].uid, first["d/kept"].gid) == (1000, 50)
    assert "d/caf\u00e9" in first
    assert set(second) == {"d/old/.wh.f", "d/old/new", "etc/.wh.group", "var/lib"}
    assert second["var/lib"].mode == 0o700
    assert image.config.diff_ids[1:] == DIFF_IDS


def test_what_a_step_changed() -> None:
    check_changes(build(CHANGES).image)


def test_another_engine_makes_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gvisor_environment().items():
        monkeypatch.setenv(name, value)
    probe = registry.load("gvisor").probe()
    if not probe.available:
        pytest.skip(f"gvisor cannot run here: {probe.reason}")
    gvisor = build(CHANGES, no_cache=True, engine="gvisor")
    check_changes(gvisor.image)
    assert gvisor.image.id == build(CHANGES, no_cache=True, engine="container").image.id


def test_nothing_of_the_runtime_is_in_a_layer() -> None:
    built = build(
        "FROM busybox:test\nRUN echo 127.0.0.1 x >> /etc/hosts; echo y > /etc/resolv.conf; hostname; touch /z"
    )
    assert set(layers(built.image)[-1]) == {"z"}


@pytest.mark.parametrize("files", [{}, {"etc/ssl/certs/ca-certificates.crt": "the image's\n"}])
def test_the_certificate_of_a_sandbox_stays_in_it(files: dict[str, str]) -> None:
    busybox_image(default_home(), "busybox:tls", files=files)
    text = "FROM busybox:tls\nRUN grep -c BEGIN $SSL_CERT_FILE; cat $SSL_CERT_FILE > /copied; rm /copied; touch /z\n"
    built = build(text, network=Network(inspect=True))
    assert built.log[-1] == "1"  # it was there
    assert set(layers(built.image)[-1]) == {"z"}


def test_a_step_that_changes_nothing_makes_no_layer() -> None:
    built = build("FROM busybox:test\nRUN true\n")
    assert len(built.image.layers) == 1
    assert built.image.config.history[-1]["empty_layer"] is True


# -- steps -----------------------------------------------------------------------------------


def test_how_commands_are_run() -> None:
    built = build(
        "FROM busybox:test\nARG A=arg\nENV E=env\nRUN echo $A $E $SOURCE_DATE_EPOCH\n"
        'RUN ["echo", "$A"]\nSHELL ["/bin/sh", "-ec"]\nRUN <<EOF\nfalse || echo two\necho lines\nEOF\n'
        "RUN <<EOF\n#!/bin/cat\nitself\nEOF\nRUN cat <<-'X' <<Y\n\tfirst $A\n\tX\nsecond\nY\n"
        "USER app:staff\nWORKDIR /w\nRUN id -un; id -gn; pwd; stat -c %U .\n"
    )
    assert built.log[1:] == [
        "arg env 315532800", "$A", "two", "lines", "#!/bin/cat", "itself", "second", "app", "staff", "/w", "app",
    ]  # fmt: skip
    assert "A" not in dict(built.image.config.env)


def test_a_step_that_fails_tells_everything(store: ImageStore) -> None:
    text = "FROM busybox:test\n\nRUN echo kept\nRUN echo before; echo why >&2; exit 3\n"
    with pytest.raises(BuildFailed) as caught:
        build(text, tag="failed:1")
    assert caught.value.message.startswith("Dockerfile line 4: RUN echo before; echo why >&2; exit 3: ")
    assert "exit code 3" in caught.value.message
    assert caught.value.message.endswith("before\nwhy")
    with pytest.raises(ImageNotFound):
        store.find("failed:1")


def test_programs_that_are_not_there() -> None:
    with pytest.raises(BuildFailed, match="line 2: RUN nothing"):
        build('FROM busybox:test\nRUN ["nothing"]\n')
    with pytest.raises(BuildFailed, match=r"line 2: .*nothing in scratch"):
        build("FROM scratch\nRUN true\n")
    with pytest.raises(BuildFailed, match=r"line 3: .*no user 'nobody'"):
        build("FROM busybox:test\nUSER nobody\nWORKDIR /new\n")


def test_a_folder_that_cannot_be_is_told_with_its_line() -> None:
    text = "FROM busybox:test\nRUN mkdir /a && ln -s /a /way\nWORKDIR /way/w\nRUN rm -r /a\nRUN true\n"
    with pytest.raises(BuildFailed, match="Dockerfile line 5: cannot make folder /way/w"):
        build(text)


def test_there_is_no_network_unless_asked_for() -> None:
    text = "FROM busybox:test\nRUN tail -n +3 /proc/net/dev | sed 's/:.*//'; echo Temporary failure in name resolution"
    assert [line.strip() for line in build(f"{text}\n").log[1:]] == ["lo", "Temporary failure in name resolution"]
    with pytest.raises(BuildFailed) as caught:
        build(f"{text}; exit 1\n")
    assert "--allow HOST" in str(caught.value.hint)


def test_from_scratch(context: Path) -> None:
    built = build("FROM scratch\nCOPY src/a.txt /\nCOPY <<x /etc/\ntext\nx\n", context)
    assert [set(layer) for layer in layers(built.image)] == [{"a.txt"}, {"etc", "etc/x"}]
    with pytest.raises(RecipeInvalid, match="without any file"):
        build("FROM scratch\nENV A=b\n")


def test_what_a_copy_takes_and_where_it_goes(context: Path) -> None:
    (context / "link").symlink_to("/etc/passwd")
    (context / "inner").symlink_to("src/a.txt")
    built = build(
        "FROM busybox:test\nRUN ln -s /usr /way\nCOPY src /app\nCOPY run.sh /way/bin/\nCOPY inner /in\n"
        "COPY --chown=app:staff src/*.txt /owned/\n", context,
    )  # fmt: skip
    _, _, app, way, inner, owned = layers(built.image)
    assert set(app) == {"app", "app/a.txt", "app/deep", "app/deep/b.txt"}
    assert set(way) == {"usr/bin/run.sh"}
    assert inner["in"].isreg()
    assert (owned["owned/a.txt"].uid, owned["owned"].gid) == (1000, 50)
    with pytest.raises(BuildFailed, match="line 2: link is a link to what is not in the context"):
        build("FROM busybox:test\nCOPY link /x\n", context)


def test_bits_that_no_sandbox_heeds_are_copied_all_the_same() -> None:
    """They are taken off when layers are unpacked; what is copied out of a stage is for others, too."""
    built = build(
        "FROM busybox:test AS one\nRUN echo x > /su && chmod 4755 /su && mkdir /sg && chmod 2775 /sg && touch /sg/f\n"
        "RUN touch /su && stat -c %a /su /sg\nRUN echo y > /was && chmod 4755 /was\nRUN rm /was && echo z > /was\n"
        "FROM scratch\nCOPY --from=one / /all/\nCOPY --from=one /su /alone\n"
    )
    assert built.log[-2:] == ["755", "775"]
    everything, alone = layers(built.image)
    modes = [everything[f"all/{name}"].mode for name in ("su", "sg", "sg/f", "was")]
    assert modes == [0o4755, 0o2775, 0o644, 0o644]
    assert alone["alone"].mode == 0o4755


def test_archives_are_unpacked_by_add_only(context: Path) -> None:
    with tarfile.open(context / "t.tgz", "w:gz") as tar:
        info = tar.gettarinfo(context / "run.sh", "bin/added")
        info.uid, info.gid = 5, 6
        with open(context / "run.sh", "rb") as file:
            tar.addfile(info, file)
    built = build("FROM busybox:test\nADD t.tgz /\nCOPY t.tgz /x/\n", context)
    _, added, copied = layers(built.image)
    assert set(added) == {"usr/bin/added"}  # /bin is a link there, and stays one
    assert added["usr/bin/added"].uid == 5
    assert set(copied) == {"x", "x/t.tgz"}


def test_a_stage_has_the_arguments_of_the_one_below() -> None:
    text = "FROM busybox:test AS one\nARG A=1\nARG B\nFROM one AS two\nARG C=3\nFROM two\nRUN echo $A $B $C\n"
    assert build(text, build_args={"B": "2"}).log[-1] == "1 2 3"
    text = "FROM busybox:test AS one\nARG A=1\nFROM busybox:test\nRUN echo none: $A\n"
    assert build(text).log[-1] == "none:"


def test_another_time_is_another_step(context: Path) -> None:
    text = "FROM busybox:test\nCOPY src /src\nWORKDIR /w\n"
    times = {}
    for epoch in (1_000_000_000, 1_000_000_001):
        found = layers(build(text, context, epoch=epoch).image)
        times[epoch] = {info.mtime for layer in found[1:] for info in layer.values()}
    assert times == {1_000_000_000: {1_000_000_000}, 1_000_000_001: {1_000_000_001}}


def test_what_is_as_it_was_is_in_no_layer() -> None:
    text = "FROM busybox:test\nRUN echo a > /a; echo b > /b; ln /b /c\nRUN touch /a; echo b > /b; chown -R 0:0 /a /c\n"
    assert len(build(text).image.layers) == 2


def test_steps_run_in_a_container_unless_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_of(RunSettings()) == "container"
    assert engine_of(RunSettings(engine="gvisor")) == "gvisor"
    assert engine_of(RunSettings(at_least="gvisor")) == "auto"
    with pytest.raises(SlopletError, match="weaker than at_least='microvm'"):
        asyncio.run(Image("busybox:test").run("true").build_async(at_least="microvm", no_cache=True))
    with (
        pytest.raises(SlopletError, match="weaker than at_least='microvm'"),
        Sandbox(image=Image("busybox:test").run("touch /never-built-before"), at_least="microvm"),
    ):
        raise AssertionError("started")


def test_triggers_of_a_base(context: Path) -> None:
    build("FROM busybox:test\nONBUILD COPY src/a.txt /triggered\nONBUILD ENV T=1\n", tag="base:onbuild")
    built = build("FROM base:onbuild\nRUN cat /triggered\n", context)
    assert built.log[-1] == "a"
    assert dict(built.image.config.env)["T"] == "1"
    assert built.image.config.on_build == ()
    for number, trigger in enumerate(("COPY --from=x a b", "RUN --mount=from=x,target=/y z", "FROM x", "NONSENSE", "")):
        busybox_image(default_home(), f"base:{number}", on_build=(trigger,))  # whoever made it may write anything
        with pytest.raises(RecipeInvalid):
            build(f"FROM base:{number}\n")


def test_mounts_are_seen_and_not_kept(context: Path, tmp_path: Path) -> None:
    text = (
        "FROM busybox:test AS other\nRUN echo o > /o && chown app /o && chmod 600 /o\nFROM busybox:test\nWORKDIR /w\n"
        "RUN --mount=type=bind,source=src,target=/ctx --mount=type=bind,from=other,source=/o,target=o "
        "--mount=type=tmpfs,target=/t/u --mount=type=secret,id=key --mount=type=cache,target=/home "
        "cat /ctx/a.txt o /run/secrets/key; stat -c %u o; echo more >> /ctx/a.txt; touch /t/u/x /t/y /home/c\n"
        "RUN --mount=type=cache,target=/home,sharing=locked ls /home; ls /ctx /o /run/secrets\n"
    )
    with pytest.raises(BuildFailed, match="line 6") as caught:
        build(text, context, secrets={"key": b"canary-2f6a\n"})
    assert "No such file" in caught.value.message
    built = build(text.replace("; ls /ctx /o /run/secrets", ""), context, secrets={"key": b"canary-2f6a\n"})
    assert built.log[-1] == "c"
    assert set(layers(built.image)[-1]) == {"t", "t/y"}
    assert (context / "src/a.txt").read_text() == "a\n"
    found = subprocess.run(
        ["grep", "-rlaF", "canary-2f6a", str(default_home().path)], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


def test_a_cache_belongs_to_whom_it_is_given(tmp_path: Path) -> None:
    cache = f"c{tmp_path.name}"
    mount = f"--mount=type=cache,id={cache},target=/home/app/.cache,uid=1000,gid=50,mode=0750"
    text = f"FROM busybox:test\nUSER app\nRUN {mount} stat -c '%u %g %a' ~/.cache && touch ~/.cache/x && ls ~/.cache\n"
    built = build(text)
    Volumes(default_home()).remove(cache_name(cache))
    assert built.log[-2:] == ["1000 50 750", "x"]
    assert len(built.image.layers) == 1


def test_a_bind_over_something_is_refused(context: Path) -> None:
    with pytest.raises(BuildFailed, match="line 2: --mount at /etc: there is something"):
        build("FROM busybox:test\nRUN --mount=type=bind,target=/etc true\n", context)


# -- hostile steps -----------------------------------------------------------------------------


def test_names_that_mean_something_in_a_layer_are_refused() -> None:
    with pytest.raises(BuildFailed, match=r"line 2: /x/\.wh\.y cannot be kept"):
        build("FROM busybox:test\nRUN mkdir /x && touch /x/.wh.y\n")


def test_a_file_of_holes_cannot_make_an_endless_layer() -> None:
    with pytest.raises(
        BuildFailed, match=r"line 2: the layer would be larger than 32 GiB, the limit: /big has 1099511"
    ):
        build("FROM busybox:test\nRUN dd if=/dev/null of=/big bs=1M seek=1M count=0\n")


def test_deep_folders_and_long_names_are_kept() -> None:
    built = build(
        "FROM busybox:test\nRUN d=; for i in $(seq 60); do d=$d/$(printf '%050d' $i); mkdir $d; done; touch $d/end\n"
        "RUN find / -xdev -name end | wc -c\n"
    )
    assert built.log[-1] == str(60 * 51 + len("/end\n"))


def test_links_in_the_image_lead_nowhere_else(context: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    built = build(
        f"FROM busybox:test\nRUN ln -s {outside} /abs && ln -s ../../../../../../..{outside} /rel\n"
        "COPY run.sh /abs/one\nCOPY run.sh /rel/two\n", context,
    )  # fmt: skip
    assert list(outside.iterdir()) == []
    assert str(outside).strip("/") + "/one" in layers(built.image)[-2]
    (outside / "run.sh").write_text("secret")
    with pytest.raises(BuildFailed, match=r"there is no /abs/run\.sh"):
        build(f"FROM busybox:test AS a\nRUN ln -s {outside} /abs\nFROM scratch\nCOPY --from=a /abs/run.sh /\n")


# -- other tools -------------------------------------------------------------------------------


def test_skopeo_and_umoci_read_what_was_built(context: Path, tmp_path: Path) -> None:
    from registry_kit import needs

    needs("skopeo")
    needs("umoci")
    from sloplet.images.export import export_image

    built = build(THREE, context, tag="three:1")
    store = ImageStore(default_home())
    export_image(built.image, store, tmp_path / "layout")
    store.close()
    told = json.loads(
        subprocess.run(
            ["skopeo", "inspect", "--raw", f"oci:{tmp_path / 'layout'}"], capture_output=True, check=True
        ).stdout
    )
    assert told["config"]["digest"] == built.image.id
    copied = tmp_path / "copied"
    subprocess.run(
        ["skopeo", "copy", "-q", f"oci:{tmp_path / 'layout'}", f"oci:{copied}:x"], capture_output=True, check=True
    )
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    subprocess.run(
        ["umoci", "unpack", *rootless, "--image", f"{copied}:x", str(tmp_path / "bundle")],
        capture_output=True, check=True,
    )  # fmt: skip
    root = tmp_path / "bundle/rootfs"
    theirs = sorted(
        f"{path.relative_to(root)} {oct(path.lstat().st_mode)[-4:]}"
        for path in root.rglob("*")
        if not path.is_symlink()
    )
    ours = output(built.image, "cd / && find . -xdev -not -type l -exec stat -c '%n %a' {} +", user="root")
    made = ("dev", "proc", "run", "etc/hosts", "etc/hostname", "etc/resolv.conf", "sys", "workspace")
    seen = [line.removeprefix("./") for line in ours.splitlines() if line != ". 755"]
    kept = [line for line in seen if not line.startswith(made)]
    assert (
        sorted(f"{line.rpartition(' ')[0]} {int(line.rpartition(' ')[2], 8) & 0o7777:04o}" for line in kept) == theirs
    )
    assert (root / "result/all").read_text() == "a\nb\n"


# -- in Python ---------------------------------------------------------------------------------


def test_an_image_in_python(context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(context)
    other = Image("busybox:test").run("echo other > /made")
    image = (
        Image("busybox:test")
        .run("echo 1 > /one")
        .run(["sh", "-c", "echo $0 > /two", "a b"])
        .copy("src", "/app", exclude=["deep"])
        .copy("run.sh", "/bin/go", chmod=0o755)
        .copy("/made", "/from", image=other)
        .env(A="1 $B 'c'")
        .workdir("/app")
        .user("app")
        .cmd("go")
        .label({"x.y": "z"})
        .expose(80)
    )
    assert image.run("x") != image
    with Sandbox(image=image) as box:
        assert box.spec.image == image.build().id
        found = box.run("cat /one /two /from; ls; printf '%s\\n' \"$A\"; id -un; pwd; go", check=True).stdout
    assert found == "1\na b\nother\na.txt\nignored.o\n1 $B 'c'\napp\n/app\nran\n"
    built = image.build("python:1")
    assert (built.config.cmd, built.config.ports, built.config.labels) == (("go",), ("80/tcp",), (("x.y", "z"),))


def test_a_dockerfile_in_python_with_more_steps(context: Path) -> None:
    (context / "Dockerfile").write_text("FROM busybox:test AS a\nCOPY src /src\nFROM busybox:test\nRUN false\n")
    image = Image.dockerfile(context, target="a").run("cat /src/a.txt > /b")
    assert output(image.build(), "cat /b") == "a\n"


@pytest.fixture
def archive(tmp_path: Path) -> str:
    """A line of apt's sources for an archive of one package."""
    from registry_kit import needs

    needs("mmdebstrap")
    needs("dpkg-deb")
    package, place = tmp_path / "package", tmp_path / "archive"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "usr/bin").mkdir(parents=True)
    place.mkdir()
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)  # apt downloads as a user of its own
    control = "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.com>\nDescription: x\n"
    (package / "DEBIAN/control").write_text(control)
    (package / "usr/bin/tiny").write_text("#!/bin/sh\necho tiny\n")
    subprocess.run(["dpkg-deb", "-b", package, place / "tiny.deb"], check=True, capture_output=True)
    data = (place / "tiny.deb").read_bytes()
    facts = f"Filename: ./tiny.deb\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    (place / "Packages").write_text(control + facts)
    return f"deb [trusted=yes] copy://{place} ./"


def test_bootstrap_of_packages(archive: str) -> None:
    image = Image.bootstrap("debian:bookworm", packages=["tiny"], variant="extract", mirror=archive)
    events: list[BuildEvent] = []
    first = image.build("bootstrapped:1", on_event=events.append)
    (layer,) = layers(first)
    assert layer["usr/bin/tiny"].mode == 0o644
    assert not [name for name in layer if name.startswith("dev")]
    assert any("extracting archives" in event.text for event in events)
    again = image.build(on_event=(events := []).append)
    assert again.id == first.id
    assert next(event.cached for event in events if event.kind == "end")
    assert image.build(no_cache=True).manifest == first.manifest


def test_bootstrap_of_what_is_not_there(archive: str) -> None:
    image = Image.bootstrap("debian:bookworm", packages=["tinny"], variant="extract", mirror=archive)
    with pytest.raises(BuildFailed, match="Unable to locate package tinny"):
        image.build()


def test_bootstrap_without_mmdebstrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    image = Image.bootstrap("debian:bookworm", packages=["hello"], mirror="http://127.0.0.1:9/debian")
    with pytest.raises(BuildError, match="mmdebstrap is not installed") as caught:
        image.build()
    assert caught.value.hint == "sudo apt-get install mmdebstrap"


# -- the CLI -----------------------------------------------------------------------------------


def test_the_verb(context: Path, store: ImageStore) -> None:
    (context / "Dockerfile").write_text("FROM busybox:test\nARG V\nRUN echo v=$V\nCOPY run.sh /x\n")
    done = sloplet("image", "build", "-t", "cli:1", "-t", "cli:2", "--build-arg", "V=7", "--label", "a=b", str(context))
    assert done.returncode == 0, done.stderr
    log = done.stderr.decode().splitlines()
    assert "[3/4 0] | v=7" in log
    assert store.find("cli:1").id == store.find("cli:2").id
    assert store.find("cli:1").config.labels == (("a", "b"),)
    again = sloplet("image", "build", "--json", "--build-arg", "V=7", "--label", "a=b", str(context))
    told = json.loads(again.stdout)
    assert told["id"] == store.find("cli:1").id
    assert [step["cached"] for step in told["steps"]] == [False, False, True, True]
    quiet = sloplet("image", "build", "-q", "--build-arg", "V=7", "--label", "a=b", str(context))
    assert (quiet.stdout.decode().strip(), quiet.stderr) == (told["id"], b"")
    recipe = (context / "Dockerfile").read_bytes()
    piped = sloplet("image", "build", "-qf", "-", "--build-arg", "V=7", "--label", "a=b", str(context), input=recipe)
    assert piped.stdout == quiet.stdout


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("FROM busybox:test\nRUNN x\n", (), "Dockerfile line 2: unknown instruction RUNN (did you mean RUN?)"),
        ("FROM busybox:test\nRUN exit 4\n", (), "Dockerfile line 2: RUN exit 4: it ended with exit code 4"),
        ("FROM busybox:test\n", ("--target", "x"), "has no stage 'x'"),
        ("FROM busybox:test\n", ("--build-arg", "X=1"), "declares no build argument X"),
        ("FROM busybox:test\n", ("--network", "none", "--allow", "a.example"), "leave one of them"),
        ("FROM busybox:test\n", ("-f", "missing"), "there is no missing"),
        ("FROM busybox:test\n", ("-t", "Not/Ok"), "not a reference"),
        ("FROM busybox:test\n", ("--secret", "value"), "says not what it is"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(context: Path, text: str, words: tuple[str, ...], said: str) -> None:
    (context / "Dockerfile").write_text(text)
    done = sloplet("image", "build", *words, str(context))
    assert done.returncode == 125
    assert said in done.stderr.decode().splitlines()[-1]
    assert b"Traceback" not in done.stderr


def test_an_interrupted_build_leaves_nothing_running(context: Path, tmp_path: Path) -> None:
    (context / "Dockerfile").write_text("FROM busybox:test\nRUN echo began; sleep 600\n")
    home = tmp_path / "home"
    busybox_image(Home(home))
    child = subprocess.Popen(
        [*SLOPLET, "image", "build", str(context)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        env={**os.environ, "SLOPLET_HOME": str(home)},
    )  # fmt: skip
    assert child.stderr is not None
    with child.stderr as log:
        for line in log:
            if line.endswith(b"| began\n"):
                break
        child.send_signal(signal.SIGINT)
        rest = log.read()
    assert child.wait(30) == 130, rest
    assert b"interrupted" in rest
    assert b"Traceback" not in rest
    assert list((home / "sandboxes").glob("*/*")) == []


def test_two_builds_at_once_make_one_image(context: Path) -> None:
    (context / "Dockerfile").write_text("FROM busybox:test\nRUN echo both > /b; sleep 0.2\nCOPY src /s\n")
    command = [sys.executable, "-m", "sloplet.cli", "image", "build", "-q", str(context)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    said = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1


def test_a_killed_build_is_gone_on_with(context: Path, tmp_path: Path) -> None:
    (context / "Dockerfile").write_text(
        "FROM busybox:test\nRUN echo first > /f\nRUN echo began; sleep 2\nCOPY src /s\n"
    )
    home = tmp_path / "home"
    busybox_image(Home(home))
    env = {"SLOPLET_HOME": str(home)}
    child = subprocess.Popen(
        [*SLOPLET, "image", "build", str(context)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        env={**os.environ, **env},
    )  # fmt: skip
    assert child.stderr is not None
    with child.stderr as log:
        for line in log:
            if line.endswith(b"| began\n"):
                break
        child.kill()
        child.wait()
    assert sloplet("gc", env=env).returncode == 0
    (context / "Dockerfile").write_text("FROM busybox:test\nRUN echo first > /f\nRUN echo began\nCOPY src /s\n")
    began = time.monotonic()
    done = sloplet("image", "build", str(context), env=env)
    assert done.returncode == 0, done.stderr
    assert b"[2/4 0] CACHED" in done.stderr
    assert time.monotonic() - began < 60


def test_an_image_for_another_machine_is_copied_from_but_not_run(context: Path) -> None:
    other = "arm64" if host_platform().architecture != "arm64" else "amd64"
    busybox_image(default_home(), "busybox:other", architecture=other, variant="")
    built = build("FROM busybox:other\nCOPY src/a.txt /bin/\nENV A=b\n", context, platform=f"linux/{other}")
    assert built.image.platform == f"linux/{other}"
    assert set(layers(built.image)[-1]) == {"usr/bin/a.txt"}
    with pytest.raises(ImagePlatform, match=f"Dockerfile line 2: the image is made for linux/{other}"):
        build("FROM busybox:other\nRUN true\n", platform=f"linux/{other}")


def test_an_image_of_this_machine_is_not_taken_for_another(context: Path, base: StoredImage) -> None:
    """127.0.0.1:9: nobody is there to bring the right one."""
    other = "arm64" if host_platform().architecture != "arm64" else "amd64"
    name = "127.0.0.1:9/busybox:test"
    store = ImageStore(default_home())
    store.tag(base, parse_tags([name])[0])
    store.close()
    said = f"Dockerfile line 1: the image is made for {base.platform}, not for linux/{other}, and another"
    with pytest.raises(ImagePlatform, match=said):
        build(f"FROM --platform=linux/{other} {name}\nCOPY src /src\n", context)
    with pytest.raises(ImagePlatform, match=said):
        build(f"FROM {name}\nCOPY src /src\n", context, platform=f"linux/{other}")
    assert build(f"FROM --platform={base.platform} {name}\nCOPY src /src\n", context).image.platform == base.platform


def test_a_build_that_is_cancelled_lets_go_of_everything(context: Path) -> None:
    async def work(after: float) -> None:
        (context / "src/a.txt").write_text(f"{after}")
        runtime = Runtime(default_home())
        options = BuildOptions(no_cache=True)
        builder = Builder(parse(THREE), options, home=default_home(), context=context, controller=runtime)
        task = asyncio.ensure_future(builder.build())
        await asyncio.wait({task}, timeout=after)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await runtime.list() == []
        await runtime.aclose()

    counts = []
    for after in (5.0, 0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        asyncio.run(work(after))
        store = ImageStore(default_home())
        store.prune()  # nobody holds the store, or a tree of it
        store.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[0] + 2  # a thread that syncs may be at it; what leaks does so every time
