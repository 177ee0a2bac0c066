"""Sleeping, waking and waiting, over a controller of records; and what a shell completes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from cli_controller import Records, Said, info

from sloplet.cli.main import cli
from sloplet.cli.opening import open_box
from sloplet.cli.saved import state_text
from sloplet.cli.working import progress_line
from sloplet.controller import Event
from sloplet.errors import SandboxPaused
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone


def test_pause_and_resume(records: Records, said: Said) -> None:
    code, out, err = said("pause", "dev")
    assert (code, err) == (0, "")
    assert out.startswith("dev: paused, 1M saved in ")
    assert said("pause", "dev")[1] == "dev: paused already\n"
    assert said("resume", "dev")[1].startswith("dev: running, woken in ")
    assert said("resume", "dev")[1] == "dev: running already\n"


def test_pause_of_several_goes_on_after_a_refusal(records: Records, said: Said) -> None:
    code, out, err = said("pause", "box", "nobody", "dev")
    assert code == 125
    assert out.startswith("dev: paused")
    assert "the container engine cannot save processes (create it with --engine gvisor)" in err
    assert "there is no sandbox 'nobody' (see `sloplet ls`)" in err
    document = json.loads(said("pause", "box", "dev", "--json")[1])
    assert [item["name"] for item in document["sandboxes"]] == ["dev"]
    assert [item["error"] for item in document["failed"]] == ["UnsupportedOperation"]


def test_resume_tells_of_a_recovery(records: Records, said: Said) -> None:
    records.put(records.boxes["id-dev"], state="dead", reason="killed", saved="x", saved_at=time.time() - 200)
    assert "recovered in " in (out := said("resume", "dev")[1])
    assert "from its checkpoint of 3m20s ago" in out


def test_states_in_words() -> None:
    now = time.time()
    assert state_text(info("dev", state="paused", saved="x", saved_at=now - 7200)) == "paused for 2h"
    dead = info("dev", state="dead", reason="out of memory", saved="x", saved_at=now - 180)
    assert state_text(dead) == "dead, checkpoint of 3m ago: `sloplet resume dev` (it died: out of memory)"
    assert state_text(info("dev", state="dead", reason="killed")) == "dead: killed"
    assert state_text(info("dev", recovered_from=now - 65)) == "running, recovered from its checkpoint of 1m5s ago"


def test_progress_lines() -> None:
    assert progress_line("saving dev", 1, 2.34, None) == "/ saving dev 2.3 s"
    assert progress_line("writing f", 0, 1, (2048, None)) == "| writing f 1.0 s, 2K"
    assert progress_line("reading f", 0, 1, (50, 100)).endswith(" 50% [##########----------] 50 of 100")
    narrow = progress_line("x" * 100, 0, 1, (50, 100), 60)
    assert narrow.startswith("| xxxx")
    assert narrow.endswith("xx… 1.0 s  50% [##########----------] 50 of 100")
    assert len(narrow) == 60


def subcommands() -> list[Any]:
    context = click.Context(cli)
    return [
        pytest.param(sub, id=f"{verb} {name}")
        for verb in ("snapshots", "template")
        for name, sub in getattr(cli.get_command(context, verb), "commands", {}).items()
    ]


@pytest.mark.parametrize("command", subcommands())
def test_verbs_of_verbs_have_help_examples_json_and_docs(command: click.Command) -> None:
    text = command.get_help(click.Context(command))
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert "Examples:" in text
    assert "--json" in text
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help
            assert max(option.opts, key=len) in page


def test_completion_offers_verbs_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.shell_completion import ShellComplete

    monkeypatch.setattr("sloplet.cli.completing.sandboxes", lambda incomplete: ["rmbox"])
    monkeypatch.setattr("sloplet.cli.completing.snapshots", lambda name, incomplete: [f"{name}-base"])
    monkeypatch.setattr("sloplet.cli.completing.templates", lambda incomplete: ["warm"])
    complete = ShellComplete(cli, {}, "sloplet", "_SLOPLET_COMPLETE")

    def values(*words: str, incomplete: str = "") -> list[str]:
        return [item.value for item in complete.get_completions([*words], incomplete)]

    assert {"rm", "rmbox"} <= set(values("snapshots"))
    assert values("rollback", "dev") == ["dev-base"]
    assert values("snapshots", "rm", "dev") == ["dev-base"]
    assert values("fork", "dev", "--snapshot") == ["dev-base"]
    assert values("template", "rm") == ["warm"]
    assert values("create", "x", "--template") == ["warm"]
    assert values("template", "create", "t") == ["rmbox"]


def test_ctrl_c_says_what_is_there(records: Records, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(sandbox_id: str, **_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr(records, "pause", never)
    code, out, err = said("pause", "dev")
    assert (code, out) == (130, "")
    assert err == (
        "sloplet: interrupted. dev is running; what was begun is finished or undone as a whole (`sloplet ls`)\n"
    )


def test_what_takes_long_says_so_at_a_terminal(
    records: Records, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sloplet.cli.working._PATIENCE", 0.0)
    monkeypatch.setattr("sloplet.cli.working._INTERVAL", 0.001)
    monkeypatch.setattr("sloplet.cli.working.os.get_terminal_size", lambda fd: os.terminal_size((80, 24)))
    told = asyncio.Event()

    async def events(sandbox_id: str | None = None) -> AsyncIterator[Event]:
        yield Event(0.0, "id-other", "export.progress", {"bytes": 9, "total": 10})
        yield Event(0.0, "id-dev", "export.progress", {"bytes": 512, "total": 1024})
        told.set()
        await asyncio.Event().wait()

    quick = records.export

    async def slow(sandbox_id: str, path: str, *, image: bool = True) -> Any:
        await told.wait()
        while " 50% [##########----------] 512 of 1K" not in "".join(printed):
            await asyncio.sleep(0.001)
        return await quick(sandbox_id, path, image=image)

    printed: list[str] = []
    monkeypatch.setattr(records, "events", events, raising=False)
    monkeypatch.setattr(records, "export", slow)
    monkeypatch.setattr("sloplet.cli.working.complain", printed.append)
    monkeypatch.setattr("sloplet.cli.working.sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    assert said("export", "dev", str(tmp_path / "file"))[0] == 0
    assert "writing" in printed[0]
    assert printed[-1] == "\r\x1b[K", "the line is gone afterwards"
    assert not any("90%" in line for line in printed), "another sandbox's"


def test_use_wakes_and_recovers(records: Records, capsys: pytest.CaptureFixture[str]) -> None:
    dev = records.boxes["id-dev"]
    records.put(dev, state="paused", saved="x", saved_at=time.time())
    asyncio.run(open_box("dev"))
    assert records.boxes["id-dev"].state == "running"
    assert capsys.readouterr() == ("", "")
    records.put(dev, state="dead", reason="killed\x1b", saved="x", saved_at=time.time() - 65)
    asyncio.run(open_box("dev"))
    assert capsys.readouterr().err == ("sloplet: dev had died (killed?); it goes on from its checkpoint of 1m5s ago\n")
    records.put(dev, state="dead", reason="killed")
    asyncio.run(open_box("dev"))
    assert records.boxes["id-dev"].state == "dead", "nothing to go on from"


def test_a_command_that_a_pause_cut_off(records: Records, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut_off(sandbox_id: str, request: Any) -> None:
        raise SandboxPaused("the sandbox dev was paused", hint="resume() it")

    monkeypatch.setattr(records, "open", cut_off, raising=False)
    code, _, err = said("exec", "dev", "true")
    assert code == 125
    assert "`sloplet attach`" in err


def test_ls_tells_of_sleepers_and_of_the_dead(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    found = [
        info("asleep", state="paused", saved="s1", saved_at=now - 7200),
        info("lost", state="dead", reason="the machine restarted", saved="s2", saved_at=now - 180),
        info("gone", state="dead", reason="out of memory"),
        info("back", recovered_from=now - 60),
    ]
    monkeypatch.setattr("sloplet.cli.local.known_sandboxes", lambda: found)
    monkeypatch.setattr("sloplet.cli.local.saved_sizes", lambda infos: {"id-asleep": 3 * 2**20, "id-lost": 2**20})
    rows = said("ls")[1].splitlines()[1:]
    assert rows[0].endswith("for 2h, 3M")
    assert rows[1].endswith("checkpoint of 3m ago: `sloplet resume lost`")
    assert rows[2].endswith("out of memory")
    assert rows[3].endswith("recovered from its checkpoint of 1m ago")


def test_top_does_not_wake(records: Records, said: Said) -> None:
    records.boxes = {"id-dev": info("dev", state="paused", saved="x", saved_at=time.time() - 5)}
    code, out, _ = said("top", "--once")
    assert code == 0
    assert "paused for 5s" in out
    assert records.boxes["id-dev"].state == "paused"


def test_info_of_a_sleeper(records: Records, said: Said) -> None:
    head = records.add("dev", "base")
    state = records.add("dev", None, role="pause")
    records.put(records.boxes["id-dev"], state="paused", saved=state.id, saved_at=time.time() - 5, head=head.id)
    out = said("info", "dev")[1]
    assert "state:       paused for 5s\n" in out
    assert "saved:       5s ago, 2M\n" in out
    assert "snapshot:    base\n" in out
    assert "the keeper (pid 7)" in out
    document = json.loads(said("info", "dev", "--json")[1])
    assert (document["saved_bytes"], document["head_name"], document["keeper_pid"]) == (2 * 2**20, "base", 7)


def test_create_takes_the_settings_of_a_life(records: Records, said: Said) -> None:
    words = ("--template", "warm", "--idle", "5m", "--undo", "3", "--checkpoint-every", "60s", "--pool", "2")
    assert said("create", "new", *words)[:2] == (0, "new\n")
    spec = records.boxes["id-new"].spec
    assert (spec.template, spec.idle, spec.undo, spec.checkpoint_every, spec.pool) == ("warm", 300, 3, 60, 2)
    for bad in (
        ("--undo", "x"),
        ("--undo", "101"),
        ("--pool", "-2"),
        ("--idle", "soon"),
        ("--checkpoint-every", "0.1"),
    ):
        code, out, err = said("create", "other", *bad)
        assert (code, out) == (125, "")
        assert err.endswith(")\n"), "an error has a hint"
    assert "id-other" not in records.boxes


def test_ttl(records: Records, said: Said) -> None:
    assert said("ttl", "dev", "10m") == (0, "dev: running, ends in 9m59s\n", "")
    assert records.asked[-1] == ("set_ttl", "id-dev", 600.0)
    records.put(records.boxes["id-dev"], spec=SandboxSpec.make("dev", on_ttl="pause"))
    assert said("ttl", "dev", "2h")[1] == "dev: running, sleeps in 1h59m\n"
    assert said("ttl", "dev", "never")[1] == "dev: running, without end\n"
    assert records.asked[-1] == ("set_ttl", "id-dev", None)
    code, out, err = said("ttl", "dev", "soon")
    assert (code, out) == (125, "")
    assert "ttl='soon' is not a duration" in err
    assert json.loads(said("ttl", "dev", "5m", "--json")[1])["name"] == "dev"
    assert said("ttl", "dev", "0")[1] == "dev: ended\n"
    assert said("ttl", "dev", "5m")[0] == 125


def test_files_only(records: Records, said: Said) -> None:
    assert said("pause", "box", "--disk")[1].startswith("box: paused, ")
    assert [each.kind for each in records.saved] == ["disk"]
    assert ": disk" in said("snapshot", "dev", "files", "--disk")[1]
    assert ": disk" in said("template", "create", "warm", "dev", "--disk")[1]
    assert ": live" in said("snapshot", "dev", "all")[1]  # the control


def test_copies_with_a_time_of_their_own(records: Records, said: Said) -> None:
    assert said("fork", "dev", "--ttl", "5m")[0] == 0
    assert records.asked[-1] == ("fork", "id-dev", 1, ["dev-1"], None, 300.0)
    assert said("fork", "dev", "--ttl", "x")[0] == 125
