"""Dockerfiles: what is read, what each instruction becomes, and what is refused with its line."""

from __future__ import annotations

import pytest

from sloplet.build.dockerfile import parse, parse_trigger
from sloplet.build.instructions import Arg, Command, Copy, Env, Health, Label, Names, OnBuild, Run, Text
from sloplet.build.words import Malformed, expand, expand_list, expand_text, split
from sloplet.errors import RecipeInvalid

pytestmark = pytest.mark.anyone


def steps(text: str) -> list[object]:
    return list(parse(f"FROM scratch\n{text}").stages[0].steps)


def one(text: str) -> object:
    (step,) = steps(text)
    return step


# -- words ---------------------------------------------------------------------------

VALUES = {"A": "1", "EMPTY": "", "V": "1.22.3", "P": "/a/b/c"}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("plain", "plain"),
        ("$A", "1"),
        ("${A}x", "1x"),
        ("$NONE", ""),
        ("x$Ay", "x"),
        ("x${A}y", "x1y"),
        ("'$A'", "$A"),
        ('"$A b"', "1 b"),
        (r"\$A", "$A"),
        (r'"\$A"', "$A"),
        (r'"\x"', r"\x"),
        (r"a\ b", "a b"),
        ("${NONE:-d}", "d"),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY-d}", ""),
        ("${A:-d}", "1"),
        ("${A:+y}", "y"),
        ("${EMPTY:+y}", ""),
        ("${EMPTY+y}", "y"),
        ("${NONE:-${A}}", "1"),
        ("${NONE:-'a b'}", "a b"),
        ("${A:?no}", "1"),
        ("${V#*.}", "22.3"),
        ("${V##*.}", "3"),
        ("${V%.*}", "1.22"),
        ("${V%%.*}", "1"),
        ("${P//\\//-}", "-a-b-c"),
        ("${P/\\//}", "a/b/c"),
        ("${P/a/x}", "/x/b/c"),
        ("$", "$"),
        ("a$", "a$"),
        ("$1", "$1"),
    ],
)
def test_expansion(word: str, expected: str) -> None:
    assert expand(word, VALUES.get) == expected


@pytest.mark.parametrize("word", ["'a", '"a', "${A", "${}", "${A:!x}", "${A^^}", "${NONE:?is needed}", "${1}"])
def test_malformed(word: str) -> None:
    with pytest.raises(Malformed):
        expand(word, VALUES.get)


def test_the_message_of_a_needed_variable_is_told() -> None:
    with pytest.raises(Malformed, match="NONE is not set: give me one"):
        expand("${NONE:?give me one}", VALUES.get)


def test_deeply_nested_variables_end() -> None:
    with pytest.raises(Malformed):
        expand("${N:-" * 50 + "x" + "}" * 50, VALUES.get)


def test_split_keeps_quoted_words_together() -> None:
    assert split("a 'b c' \"d e\"f \\ g") == ["a", "'b c'", '"d e"f', "\\ g"]


def test_lists_lose_empty_variables_but_not_empty_quotes() -> None:
    assert expand_list("$A $NONE '' b", VALUES.get) == ["1", "", "b"]


def test_the_text_of_a_heredoc_keeps_its_quotes() -> None:
    assert expand_text("say \"$A\" '${A}' \\$A \\n\n", VALUES.get) == "say \"1\" '1' $A \\n\n"


# -- lines ---------------------------------------------------------------------------


def test_continuations_comments_and_empty_lines() -> None:
    step = one("RUN a && \\\n  # a comment\n\n  b \\\n\n  && c\nENV A=1".replace("ENV A=1", ""))
    assert isinstance(step, Run)
    assert step.text == "a &&   b   && c"
    assert step.line.number == 2


def test_an_escaped_escape_does_not_continue() -> None:
    first, second = steps("RUN echo a\\\\\nRUN b")
    assert isinstance(first, Run)
    assert first.text == "echo a\\\\"
    assert isinstance(second, Run)


def test_another_escape() -> None:
    found = parse("# escape=`\nFROM scratch\nRUN a `\n b\nENV P=C:\\x\n")
    run, env = found.stages[0].steps
    assert isinstance(run, Run)
    assert run.text == "a  b"
    assert isinstance(env, Env)
    assert env.pairs == (("P", "C:\\x"),)


def test_directives_count_at_the_top_only() -> None:
    found = parse("# syntax=docker/dockerfile:1\n# a comment\n# escape=`\nFROM scratch\nRUN a \\\n b\n")
    (run,) = found.stages[0].steps
    assert isinstance(run, Run)
    assert run.text == "a  b"


def test_lines_of_windows_and_a_byte_order_mark() -> None:
    found = parse("\ufeffFROM scratch\r\nRUN a \\\r\n b\r\n")
    assert found.stages[0].steps[0].text == "a  b"  # type: ignore[attr-defined]


def test_heredoc_as_the_whole_command() -> None:
    step = one("RUN <<EOF\nset -e\n# not a comment of ours\necho $HOME\nEOF\n")
    assert isinstance(step, Run)
    assert step.script == "set -e\n# not a comment of ours\necho $HOME\n"


def test_heredocs_of_a_command_are_the_shells() -> None:
    step = one("RUN cat <<'A' <<-B > /x\na\nA\n\tb\n\tB\n")
    assert isinstance(step, Run)
    assert step.text == "cat <<'A' <<-B > /x\na\nA\nb\nB"


def test_files_in_the_dockerfile() -> None:
    step = one('COPY <<a.txt <<"b" /dir/\none $X\na.txt\ntwo $X\nb\n')
    assert isinstance(step, Copy)
    assert [(doc.name, doc.text, doc.expand) for doc in step.heredocs] == [
        ("a.txt", "one $X\n", True),
        ("b", "two $X\n", False),
    ]
    assert (step.sources, step.target) == ((), "/dir/")


def test_names_of_heredocs_are_names_of_files() -> None:
    found = parse("FROM a\nCOPY <<my-app.conf <<etc/x+y /etc/\n1\nmy-app.conf\n2\netc/x+y\nRUN y\n").stages[0]
    assert isinstance(found.steps[0], Copy)
    assert [(doc.name, doc.text) for doc in found.steps[0].heredocs] == [("my-app.conf", "1\n"), ("etc/x+y", "2\n")]
    assert len(found.steps) == 2


def test_what_looks_like_a_heredoc_in_quotes_is_none() -> None:
    step = one("RUN sh -c 'cat <<EOF'\n")
    assert isinstance(step, Run)
    assert step.line.heredocs == ()


def test_instructions_of_any_case() -> None:
    assert isinstance(one("run true"), Run)
    assert parse("from scratch as Name\n").stages[0].base.alias == "name"


# -- instructions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('RUN ["a", "b c"]', {"argv": ("a", "b c"), "text": ""}),
        ("RUN [ -f x ]", {"argv": (), "text": "[ -f x ]"}),
        ("RUN --network=none a", {"network": "none", "text": "a"}),
        ("COPY a b /c/", {"sources": ("a", "b"), "target": "/c/", "unpack": False}),
        ('COPY ["a b", "/c"]', {"sources": ("a b",), "target": "/c"}),
        ("COPY --from=x --chown=1:2 --chmod=755 --link a /b", {"origin": "x", "chown": "1:2", "chmod": "755"}),
        ("COPY --exclude=*.o --exclude=t --parents a /b", {"exclude": ("*.o", "t"), "parents": True}),
        ("ADD a.tar /b", {"unpack": True}),
        ("ENV A=b C='d e'", {"pairs": (("A", "b"), ("C", "'d e'"))}),
        ("ENV A b c", {"pairs": (("A", "b c"),)}),
        ("LABEL a.b=c", {"pairs": (("a.b", "c"),)}),
        ("ARG A B=c", {"pairs": (("A", None), ("B", "c"))}),
        ("WORKDIR /a b", {"value": "/a b"}),
        ("USER app", {"value": "app"}),
        ('SHELL ["/bin/bash", "-c"]', {"argv": ("/bin/bash", "-c")}),
        ("CMD x y", {"text": "x y", "argv": ()}),
        ("CMD []", {"argv": ()}),
        ("EXPOSE 80 $P/udp", {"text": "80 $P/udp"}),
        ('VOLUME ["/a", "/b c"]', {"words": ("/a", "/b c")}),
        ("HEALTHCHECK NONE", {"test": ("NONE",)}),
        ("HEALTHCHECK --interval=5s --retries=2 CMD a b", {"test": ("CMD-SHELL", "a b")}),
        ('HEALTHCHECK CMD ["a"]', {"test": ("CMD", "a")}),
        ("STOPSIGNAL SIGINT", {"value": "SIGINT"}),
        ("MAINTAINER someone", {"value": "someone"}),
        ("ONBUILD COPY . /app", {"text": "COPY . /app"}),
    ],
)
def test_instructions(text: str, expected: dict[str, object]) -> None:
    step = one(text)
    assert {name: getattr(step, name) for name in expected} == expected


def test_kinds() -> None:
    kinds = {type(step) for step in steps("RUN a\nCOPY a b\nENV a=b\nLABEL a=b\nARG a\nUSER a\nCMD a\nEXPOSE 1\n"
                                          "HEALTHCHECK NONE\nONBUILD RUN x\n")}  # fmt: skip
    assert kinds == {Run, Copy, Env, Label, Arg, Text, Command, Names, Health, OnBuild}


def test_mounts_of_a_run() -> None:
    step = one("RUN --mount=type=cache,target=/c,id=x --mount=type=secret,id=s a")
    assert isinstance(step, Run)
    assert [(mount.type, mount.get("id")) for mount in step.mounts] == [("cache", "x"), ("secret", "s")]


def test_a_trigger_with_a_heredoc_comes_back() -> None:
    step = one("ONBUILD RUN <<EOF\na\nEOF\n")
    assert isinstance(step, OnBuild)
    again = parse_trigger(step.text, "base")
    assert isinstance(again, Run)
    assert again.script == "a\n"


# -- what is wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 0, "has no FROM"),
        ("# only a comment\n", 0, "has no FROM"),
        ("RUN a", 1, "before the first FROM"),
        ("FROM a\n\nRUNN b", 3, "unknown instruction RUNN"),
        ("FROM a\nRUN", 2, "RUN needs an argument"),
        ("FROM", 1, "FROM needs an argument"),
        ("FROM a b", 1, "FROM takes one image"),
        ("FROM a AS 1x", 1, "no name for a stage"),
        ("FROM a AS x\nFROM b AS X", 2, "two stages named x"),
        ("FROM --platfrom=x a", 1, "no flag --platfrom"),
        ("FROM a\nCOPY a", 2, "needs at least a source and a target"),
        ("FROM a\nCOPY --frm=x a b", 2, "no flag --frm"),
        ("FROM a\nCOPY --from a b", 2, "--from needs a value"),
        ("FROM a\nCOPY --chmod=1 --chmod=2 a b", 2, "there twice"),
        ("FROM a\nCOPY --link=maybe a b", 2, "neither true nor false"),
        ("FROM a\nUSER --x a", 2, "takes no flags"),
        ("FROM a\nADD https://x.example/f /f", 2, "ADD of a URL"),
        ("FROM a\nENV A", 2, "has no value"),
        ("FROM a\nENV A=b c", 2, "has no ="),
        ("FROM a\nENV =b", 2, "has no name"),
        ("FROM a\nARG 1x=y", 2, "no name of a variable"),
        ("FROM a\nUSER a b", 2, "takes one argument"),
        ("FROM a\nSHELL bash", 2, "SHELL takes a list"),
        ("FROM a\nRUN []", 2, "runs nothing"),
        ("FROM a\nRUN [1]", 2, "texts only"),
        ("FROM a\nRUN --network=host x", 2, "not possible in a sandbox"),
        ("FROM a\nRUN --security=insecure x", 2, "--security=insecure"),
        ("FROM a\nRUN --mount=type=ssh x", 2, "type=ssh"),
        ("FROM a\nRUN --mount=type=cach,target=/x x", 2, "type=cach"),
        ("FROM a\nRUN --mount=type=cache x", 2, "needs a target"),
        ("FROM a\nRUN --mount=type=tmpfs,target=/x,idd=1 x", 2, "no option idd"),
        ("FROM a\nRUN <<EOF\nx\n", 2, "does not end"),
        ("FROM a\nCOPY --from=x <<E /y\nE", 2, "do not go together"),
        ("FROM a\nHEALTHCHECK curl x", 2, "takes CMD"),
        ("FROM a\nHEALTHCHECK NONE x", 2, "takes nothing else"),
        ("FROM a\nONBUILD FROM x", 2, "ONBUILD FROM"),
        ("FROM a\nONBUILD RNU x", 2, "unknown instruction RNU"),
        ("# escape=x\nFROM a", 1, "escape=x"),
        ("# escape=`\n# escape=`\nFROM a", 2, "there twice"),
        ("FROM a\nRUN \0", 2, "NUL"),
    ],
)
def test_refused_with_the_line(text: str, line: int, words: str) -> None:
    with pytest.raises(RecipeInvalid) as caught:
        parse(text, "Recipe")
    assert words in caught.value.message
    if line:
        assert caught.value.message.startswith(f"Recipe line {line}: ")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("FROM a\nRUNN b", "did you mean RUN?"),
        ("FROM a\nENTRYPIONT b", "did you mean ENTRYPOINT?"),
        ("FROM a\nCOPY --chwon=1 a b", "did you mean --chown?"),
        ("FROM a\nRUN --mount=type=tmpf,target=/x b", "did you mean tmpfs?"),
    ],
)
def test_near_misses(text: str, hint: str) -> None:
    with pytest.raises(RecipeInvalid) as caught:
        parse(text)
    assert caught.value.hint == hint


def test_a_dockerfile_may_not_be_endless() -> None:
    with pytest.raises(RecipeInvalid, match="at most"):
        parse("FROM a\n" + "#" * (4 * 2**20))
