"""Secrets as they are asked for: every slip is an error, and no value is ever shown or stored."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from sloplet import Network, Secret
from sloplet.errors import SecretUnavailable, SpecError
from sloplet.network_api import read_secret, read_secrets
from sloplet.secretsource import read_file
from sloplet.secretspec import SecretSpec, new_placeholder
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

CANARY = "canary-7f3a91c2"


@pytest.mark.parametrize(
    "options",
    [
        {}, {"value": "a",
        "env": "B"}, {"env": ""}, {"env": "A=B"}, {"command": ""}, {"command": []}, {"command": [""]}, {"command": 5},
        {"value": ""}, {"value": 5}, {"value": "a\nb"}, {"value": "a\r"}, {"value": "a\0"}, {"value": "x" * 16385},
        {"value": " a"}, {"value": "a\tb"}, {"value": "a\x7f"}, {"value": "a\udc80"},
        {"value": "a", "hosts": []}, {"value": "a", "hosts": "x.org"}, {"value": "a", "hosts": None}, {"value": "a",
        "hosts": ["*"]},
        {"value": "a", "hosts": ["10.0.0.1"]}, {"value": "a", "hosts": ["https://x.org"]}, {"value": "a",
        "where": []},
        {"value": "a", "where": ["cookies"]}, {"value": "a", "where": "all"}, {"value": "a", "placeholder": "short"},
        {"value": "a", "placeholder": "has a space in it"}, {"value": "a", "placeholder": "quo\"te-quo\"te"},
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_no_secrets(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        Secret(**{"hosts": ["x.org"], **options})
    assert "xxxx" not in str(caught.value)


@pytest.mark.parametrize(
    "secrets",
    ["TOKEN", ["TOKEN"], {"TOKEN": CANARY}, {"TOKEN": None}, {"": Secret("a", hosts=["x.org"])},
     {"A-B": Secret("a", hosts=["x.org"])},
     {"1A": Secret("a", hosts=["x.org"])}, {5: Secret("a", hosts=["x.org"])},
     {f"A{i}": Secret("a", hosts=["x.org"]) for i in range(65)},
     {name: Secret("a", hosts=["x.org"], placeholder="the-same-placeholder") for name in "AB"},
     {"A": Secret("a", hosts=["x.org"], placeholder="abcdefghijklmnop"),
     "B": Secret("a", hosts=["x.org"], placeholder="defghijklmnop")}],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_no_mapping_of_secrets(secrets: Any) -> None:
    with pytest.raises(SpecError) as caught:
        SandboxSpec.make(network=Network(), secrets=secrets)
    assert CANARY not in str(caught.value)


def test_secrets_and_links_need_a_network() -> None:
    for options in ({"secrets": {"A": Secret("a", hosts=["x.org"])}}, {"links": {"db": "pg"}}):
        with pytest.raises(SpecError, match="need a network"):
            SandboxSpec.make(**options)  # type: ignore[arg-type]
        SandboxSpec.make(**options, network=Network())  # type: ignore[arg-type]
        SandboxSpec.make(**options, template="t")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="both a secret and a variable"):
        SandboxSpec.make(network=Network(), secrets={"A": Secret("a", hosts=["x.org"])}, env={"A": "b"})


def test_a_value_is_nowhere() -> None:
    secret = Secret(CANARY, hosts=["x.org"])
    spec = SandboxSpec.make(network=Network(), secrets={"TOKEN": secret})
    shown = [
        repr(secret),
        str(secret),
        repr({"a": secret}),
        repr(secret.spec("TOKEN")),
        repr(spec),
        json.dumps(spec.to_dict()),
    ]
    assert not [text for text in shown if CANARY in text]
    assert secret.read() == CANARY, "the control"
    assert "_value" not in dir(secret.spec("TOKEN"))
    assert CANARY.encode() not in pickle.dumps(spec)
    with pytest.raises(TypeError):
        vars(secret)
    assert copy.copy(secret).read() == copy.deepcopy({"a": secret})["a"].read() == CANARY
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(secret, protocol)


def test_what_no_header_could_hold_may_be_for_a_body() -> None:
    for value in (" padded ", "a\tb", "x" * 16384):
        assert Secret(value, hosts=["x.org"], where="body").read() == value


def test_a_placeholder_cannot_be_known_from_outside() -> None:
    one = Secret("a", hosts=["x.org"]).spec("GITHUB_TOKEN")
    assert one == Secret(env="OTHER", hosts=("X.org.",)).spec("GITHUB_TOKEN"), "where the value is does not matter"
    assert one.placeholder == "", "whoever holds the sandbox makes one, for it alone"
    assert SecretSpec.from_dict(one.to_dict()) == one
    made = [new_placeholder("GITHUB_TOKEN") for _ in range(2)]
    assert made[0] != made[1]
    assert made[0].startswith("sloplet-secret-github_token-")
    assert SecretSpec.from_dict({**one.to_dict(), "placeholder": made[0]}).placeholder == made[0]
    for nonsense in (None, 0, [], False, "short"):
        with pytest.raises(SpecError, match="not a placeholder"):
            SecretSpec.from_dict({**one.to_dict(), "placeholder": nonsense})
    assert Secret("a", hosts=["x.org"], placeholder="ghp_000000000000").spec("T").placeholder == "ghp_000000000000"


def test_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", CANARY)
    assert Secret(env="SECRET_OF_TEST", hosts=["x.org"]).read() == CANARY
    assert Secret(command=[sys.executable, "-c", f"print('{CANARY}')"], hosts=["x.org"]).read() == CANARY
    assert Secret(command=f"echo {CANARY}", hosts=["x.org"]).read() == CANARY
    monkeypatch.delenv("SECRET_OF_TEST")
    with pytest.raises(SecretUnavailable, match="SECRET_OF_TEST is not set"):
        Secret(env="SECRET_OF_TEST", hosts=["x.org"]).read()


@pytest.mark.parametrize(
    "command",
    [f"echo {CANARY}; echo {CANARY} >&2; exit 3", f"echo {CANARY}; echo {CANARY}", "true", "/nonexistent/program",
     f"printf '{CANARY}\\0x'", f"printf ' {CANARY}'", f"yes {CANARY} | head -c 20000", f"yes {CANARY}",
     f"printf '{CANARY}\\377'", ["/nonexistent/program", CANARY]],
)  # fmt: skip
def test_what_cannot_be_read_is_not_shown(command: str | list[str]) -> None:
    secret = Secret(command=command, hosts=["x.org"])
    with pytest.raises(SecretUnavailable) as caught:
        secret.read()
    assert CANARY not in "".join(traceback.format_exception_only(caught.value))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "it would hold what was printed, shown or not"
    assert CANARY not in repr(secret)


def test_a_command_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It and what it has started are ended: the pipe's last writer is gone."""
    monkeypatch.setattr("sloplet.secretspec.READ_SECONDS", 0.5)
    pipe, hangs = _hanging(tmp_path)
    with pytest.raises(SecretUnavailable, match="too long") as caught:
        Secret(command=f"echo {CANARY}; {hangs}", hosts=["x.org"]).read()
    assert CANARY not in "".join(traceback.format_exception(caught.value, chain=True)).rpartition("raise ")[2]
    assert caught.value.__context__ is None, "it would show the command, and what it had printed"
    with pipe:
        assert pipe.read() == b"", "which waits for that"


def test_a_command_ends_with_whoever_waits_for_it(tmp_path: Path) -> None:
    pipe, hangs = _hanging(tmp_path)

    async def main() -> None:
        secret = Secret(command=hangs, hosts=["x.org"])
        task = asyncio.create_task(read_secret(secret))
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begun = time.monotonic()
    asyncio.run(main())
    with pipe:
        assert pipe.read() == b""
    assert time.monotonic() - begun < 25, "not because its time was over"


def _hanging(folder: Path) -> tuple[BinaryIO, str]:
    """Of a shell: what hangs, and has a child that hangs; and a pipe whose end is read when both are gone."""
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    return os.fdopen(pipe, "rb"), f"exec 9>{folder}/pipe; echo > {folder}/began; sleep 60 & wait"


def test_a_command_that_prints_without_end_is_not_read_to_the_end() -> None:
    begun = time.monotonic()
    with pytest.raises(SecretUnavailable, match="more than 16384 bytes"):
        Secret(command=f"yes {CANARY}", hosts=["x.org"]).read()
    assert time.monotonic() - begun < 25, "not because its time was over"


def test_line_ends_are_no_part_of_a_value() -> None:
    assert Secret(command="printf '%016384d\r\n\n' 7", hosts=["x.org"]).read() == f"{7:016384d}"


@pytest.mark.parametrize("content", [b"caf\xe9-" + CANARY.encode(), CANARY.encode() * 2000, None])
def test_what_a_file_cannot_give_is_not_shown(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "value"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SecretUnavailable, match=r"not UTF-8|longer than|cannot be read") as caught:
        read_file(str(file), 16384)
    assert caught.value.__context__ is None, "it would hold the file's bytes"
    assert CANARY not in str(caught.value)
    file.write_text(f"{CANARY}\n")
    assert read_file(str(file), 16384) == CANARY, "the control"


def test_values_are_checked_before_anything_is_made() -> None:
    """All that the holder would refuse: what it has taken when it does would stay behind."""
    place = "placeholder-of-other"
    other = Secret(CANARY, hosts=["x.org"], placeholder=place)
    secrets = {"TOKEN": Secret(f"a{place}", hosts=["x.org"]), "OTHER": other}
    with pytest.raises(SpecError, match="TOKEN holds a placeholder") as caught:
        asyncio.run(read_secrets(secrets))
    assert place not in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "network", "links"),
    [
        (["api.x.org"], {"passthrough": ["api.x.org"]}, {}), (["api.x.org"], {"passthrough": ["*.x.org"]}, {}),
        (["*.x.org"], {"passthrough": ["*.x.org"]}, {}), (["*.a.x.org"], {"passthrough": ["*.x.org"]}, {}),
        (["y.org", "api.x.org:443"], {"passthrough": ["api.x.org"]}, {}),
        (["api.x.org:443,8005"], {"passthrough": ["api.x.org:443,8000-8010"]}, {}),
        (["db"], {}, {"db": "pg"}), (["db:5432"], {}, {"db": "pg:5432"}),
    ],
)  # fmt: skip
def test_a_secret_for_what_is_never_opened(hosts: list[str], network: dict[str, Any], links: dict[str, str]) -> None:
    secrets = {"TOKEN": Secret("a", hosts=hosts)}
    with pytest.raises(SpecError, match=r"TOKEN is for .* (passthrough|link)"):
        SandboxSpec.make(network=Network(**network), secrets=secrets, links=links)


@pytest.mark.parametrize(
    ("host", "passthrough"),
    [("*.x.org", "api.x.org"), ("api.x.org", "api.x.org:8443"), ("api.x.org:443-500", "api.x.org:443-450"),
     ("x.org", "*.x.org"), ("evilx.org", "*.x.org"), ("*.x.org", "*.a.x.org")],
)  # fmt: skip
def test_a_secret_for_what_is_opened_in_part(host: str, passthrough: str) -> None:
    SandboxSpec.make(
        network=Network(passthrough=[passthrough]),
        secrets={"TOKEN": Secret("a", hosts=[host])},
        links={"db": "pg", "x": "pg"},
    )
