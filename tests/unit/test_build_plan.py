"""Which stages are built, with what values, and what instructions make of a config."""

from __future__ import annotations

import random
import re

import pytest

from sloplet.build.dockerfile import parse
from sloplet.build.plan import Origin, Plan, make_plan, platform_arguments
from sloplet.build.scope import DEFAULT_PATH, CopyWork, FolderWork, RunWork, Scope, Work
from sloplet.errors import RecipeInvalid
from sloplet.images.config import Healthcheck, ImageConfig
from sloplet.images.media import Platform

pytestmark = pytest.mark.anyone

DEFINED = platform_arguments(Platform("linux", "amd64"), Platform("linux", "arm64", "v8"))


def plan(text: str, target: str | None = None, **given: str) -> Plan:
    return make_plan(parse(text), target=target, build_args=given, defined=DEFINED)


def taken(text: str, config: ImageConfig | None = None, **given: str) -> tuple[ImageConfig, list[Work]]:
    scope = Scope(config or ImageConfig(), build_args=given, leading={"TOP": "t"}, epoch=7)
    work = [scope.take(step) for step in parse(f"FROM scratch\n{text}").stages[0].steps]
    return scope.config, [each for each in work if each is not None]


THREE = """
FROM a AS one
RUN x
FROM b AS two
RUN y
FROM scratch
COPY --from=one /x /
"""


def test_only_the_stages_that_are_needed() -> None:
    assert [each.stage.name for each in plan(THREE).stages] == ["one", "2"]
    assert [each.stage.name for each in plan(THREE, "two").stages] == ["two"]
    assert [each.stage.name for each in plan(THREE, "0").stages] == ["one"]


def test_stages_by_name_and_number_and_images() -> None:
    found = plan(
        "FROM a AS base\nFROM Base\nCOPY --from=0 a b\nCOPY --from=debian:12 a b\nRUN --mount=from=base,target=/x y"
    )
    last = found.stages[-1]
    assert last.base == Origin(stage=0)
    assert last.origins == {"0": Origin(stage=0), "debian:12": Origin(image="debian:12"), "base": Origin(stage=0)}
    assert last.needs == {0}


def test_variables_before_the_first_from() -> None:
    text = "ARG V=12\nARG N=debian:$V\nFROM $N\nFROM --platform=$BUILDPLATFORM x:${W:-1}\n"
    assert plan(text, "0").stages[0].base.image == "debian:12"
    assert plan(text, "0", V="13").stages[0].base.image == "debian:13"
    assert (plan(text).stages[0].base.image, plan(text).stages[0].platform) == ("x:1", "linux/arm64/v8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM $NONE", "line 1: .*has no value"),
        ("FROM a\nCOPY --from=0 a b", "line 2: .*only 0 stages"),
        ("FROM a\nCOPY --from=$X a b", "line 2: .*variable"),
        ("FROM a\nCOPY --from=scratch a b", "line 2: .*scratch"),
        ("FROM a\nCOPY --from=late a b\nFROM b AS late", "line 2: .*does not come before"),
        ("FROM ${A", "line 1: .*not closed"),
    ],
)
def test_what_cannot_be_planned(text: str, words: str) -> None:
    with pytest.raises(RecipeInvalid, match=words):
        plan(text)


def test_a_target_that_is_not_there() -> None:
    with pytest.raises(RecipeInvalid, match="no stage 'twoo'") as caught:
        plan(THREE, "twoo")
    assert caught.value.hint == "did you mean two?"


def test_a_build_argument_that_nothing_declares() -> None:
    with pytest.raises(RecipeInvalid, match="declares no build argument VERSIN") as caught:
        plan("FROM a\nARG VERSION", VERSIN="1")
    assert caught.value.hint == "did you mean VERSION?"
    plan("FROM a", HTTP_PROXY="x", TARGETARCH="y")  # these need no declaration


# -- what instructions make of a config -------------------------------------------------


def test_config() -> None:
    config, work = taken(
        "ENV A=1 B=$TOP\nARG TOP\nENV C=${A}$TOP D='$A'\nLABEL x=\"$A\"\nUSER app:$A\nEXPOSE 80 53/udp 9000-9001\n"
        'VOLUME /data $A\nSTOPSIGNAL SIGINT\nMAINTAINER me\nENTRYPOINT ["a"]\nCMD b $A\nSHELL ["/bin/bash", "-c"]\n'
        "HEALTHCHECK --interval=1m30s --timeout=500ms --retries=5 CMD true\nONBUILD RUN x\n"
    )
    assert work == []
    assert dict(config.env) == {"A": "1", "B": "", "C": "1t", "D": "$A"}
    assert config.labels == (("x", "1"),)
    assert config.user == "app:1"
    assert config.ports == ("53/udp", "80/tcp", "9000/tcp", "9001/tcp")
    assert config.volumes == ("/1", "/data")
    assert (config.stop_signal, config.author) == ("SIGINT", "me")
    assert (config.entrypoint, config.cmd, config.shell) == (("a",), ("/bin/sh", "-c", "b $A"), ("/bin/bash", "-c"))
    assert config.healthcheck == Healthcheck(("CMD-SHELL", "true"), interval=90.0, timeout=0.5, retries=5)
    assert config.on_build == ("RUN x",)


def test_an_entrypoint_takes_the_command_of_the_base_away_but_not_ours() -> None:
    base = ImageConfig(cmd=("old",))
    assert taken('ENTRYPOINT ["a"]', base)[0].cmd == ()
    assert taken('CMD ["b"]\nENTRYPOINT ["a"]', base)[0].cmd == ("b",)


def test_working_folders_add_up() -> None:
    config, work = taken("WORKDIR /a\nWORKDIR b/../c\nUSER app\nWORKDIR d\n")
    assert config.workdir == "/a/c/d"
    assert [(each.path, each.owner) for each in work if isinstance(each, FolderWork)] == [
        ("/a", "0"), ("/a/c", "0"), ("/a/c/d", "app"),
    ]  # fmt: skip


def test_the_environment_of_a_command() -> None:
    _, (first, second) = taken("ARG A=1\nARG B\nENV B=env\nRUN x\nENV SOURCE_DATE_EPOCH=9\nRUN y", B="given")
    assert isinstance(first, RunWork)
    env = dict(first.env)
    assert (env["A"], env["B"], env["SOURCE_DATE_EPOCH"]) == ("1", "env", "7")
    assert env["PATH"].startswith("/usr/local/sbin:")
    assert isinstance(second, RunWork)
    assert dict(second.env)["SOURCE_DATE_EPOCH"] == "9"


def test_commands() -> None:
    _, work = taken(
        'RUN a $B\nRUN ["c"]\nSHELL ["s", "-x"]\nRUN <<E\nd\nE\nRUN <<E\n#!/bin/x\nE\n'
        "USER u\nWORKDIR /w\nRUN --network=none e"
    )
    runs = [each for each in work if isinstance(each, RunWork)]
    assert [run.argv for run in runs[:3]] == [("/bin/sh", "-c", "a $B"), ("c",), ("s", "-x", "d\n")]
    assert runs[3].script == "#!/bin/x\n"
    assert (runs[4].user, runs[4].workdir, runs[4].network) == ("u", "/w", "none")
    assert (runs[0].user, runs[0].workdir, runs[0].network) == ("0", "/", None)


def test_copies() -> None:
    _, work = taken("ARG V=1\nWORKDIR /w\nCOPY a$V b/\nCOPY a .\nCOPY --chown=$V a /x/y\nCOPY <<E /z\n$V\nE\n")
    copies = [each for each in work if isinstance(each, CopyWork)]
    assert [(each.sources, each.target) for each in copies] == [
        (("a1",), "/w/b/"), (("a",), "/w/"), (("a",), "/x/y"), ((), "/z"),
    ]  # fmt: skip
    assert copies[2].chown == "1"
    assert copies[3].files == (("E", "1\n"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("EXPOSE 70000", "no port"),
        ("EXPOSE x", "no port"),
        ("STOPSIGNAL SIGX", "no signal"),
        ("HEALTHCHECK --interval=soon CMD x", "no time"),
        ("HEALTHCHECK --retries=x CMD x", "no number"),
        ("COPY a b /c", "several files"),
        ("COPY --chmod=rwx a /c", "no mode"),
        ("COPY $NONE /c", "is empty"),
        ("WORKDIR $NONE", "is empty"),
        ("USER $NONE", "is empty"),
        ("ENV A=${B", "not closed"),
    ],
)
def test_what_makes_no_sense(text: str, words: str) -> None:
    with pytest.raises(RecipeInvalid, match=f"line 2: .*{words}"):
        taken(text)


# -- whatever is written ------------------------------------------------------------------

_WHOLE = """# syntax=docker/dockerfile:1
# escape=\\
ARG V=1 N=${V:-2}
FROM debian:${V} AS one
RUN --mount=type=cache,target=/c,id=x --network=none echo "a b" $V \\
  # comment

  && echo 'c'
RUN <<EOF
set -e
EOF
COPY --from=one --chown=a:b --chmod=755 ["a b", "/c/"]
COPY <<-"E" <<F /d/
\tx ${V#*.} ${N%%x} ${P/a/b}
\tE
$V
F
ENV A=b C="d e" F='g'
ENV old value
LABEL a.b="c"
WORKDIR ${A:+x}/y
USER a:b
EXPOSE 80 90-92/udp
VOLUME ["/x", "/y"]
HEALTHCHECK --interval=1m --retries=2 CMD ["a"]
STOPSIGNAL SIGTERM
SHELL ["/bin/sh", "-c"]
ENTRYPOINT ["a"]
CMD a b
ONBUILD RUN <<X
x
X
FROM scratch
ADD --exclude=*.o a* /
"""


def test_nothing_that_is_written_is_more_than_an_error_with_its_line() -> None:
    chance = random.Random(5)
    pieces = ["\\", "\n", "$", "${", "}", "'", '"', "<<", "<<E", "[", "]", "--", "=", ",", " ", "\t", "#", "FROM ",
              "\x7f", "é", "RUN", "${A:?x}", "--mount=", "\ud800", "\r\n", "/", "*", "AS", "0", "E\n"]  # fmt: skip
    refused = []
    for _ in range(3000):
        text = _WHOLE
        for _ in range(chance.randint(1, 6)):
            start = chance.randrange(len(text))
            end = start + chance.choice((0, 0, 1, 3, 20))
            text = text[:start] + chance.choice(pieces) * chance.randint(0, 2) + text[end:]
        try:
            recipe = parse(text)
            planned = make_plan(recipe, build_args={}, defined=DEFINED)
            for each in planned.stages:
                scope = Scope(ImageConfig(), build_args={}, leading=planned.arguments, epoch=0)
                for step in each.stage.steps:
                    scope.take(step)
        except RecipeInvalid as error:
            refused.append(error.message)
    assert [text for text in refused if not re.match(r"Dockerfile (line \d+: |has no FROM)", text)] == []
    assert 500 < len(refused) < 3000


def test_the_path_is_there_where_the_image_names_none() -> None:
    config, _ = taken("ENV PATH=/opt/bin:$PATH")
    assert config.env == (("PATH", f"/opt/bin:{DEFAULT_PATH}"),)
    config, _ = taken("ENV PATH=/opt/bin:$PATH", ImageConfig(env=(("PATH", "/theirs"),)))
    assert config.env == (("PATH", "/opt/bin:/theirs"),)


def test_variables_in_lists_of_volumes() -> None:
    config, _ = taken('ENV D=/data\nVOLUME ["$D", "${D}2"]\nEXPOSE 80')
    assert config.volumes == ("/data", "/data2")
