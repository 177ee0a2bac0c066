"""E2B's templates, the pure parts: names and tags, steps as instructions, logs by number, what is on record."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sloplet.build.events import BuildEvent
from sloplet.build.instructions import Copy, Env, Run, Text
from sloplet.build.scope import Scope
from sloplet.errors import BuildFailed, RequestInvalid, SandboxError, UserNotFound
from sloplet.images.config import ImageConfig
from sloplet.server.e2b.templates import standard
from sloplet.server.e2b.templates.asked import build_asked, new_build
from sloplet.server.e2b.templates.building import failure
from sloplet.server.e2b.templates.logs import BuildLogs
from sloplet.server.e2b.templates.names import Reference, bare_tags, new_template_id, parse
from sloplet.server.e2b.templates.places import waited
from sloplet.server.e2b.templates.standard import Standard
from sloplet.server.e2b.templates.steps import (
    Piece,
    Placed,
    StepFailed,
    expandable,
    first_forced,
    link_target,
    read_steps,
    source_of,
    translate,
)
from sloplet.server.e2b.templates.store import BUILDING, READY, WAITING, Build, Template, TemplateStore
from sloplet.server.imaging import Places
from sloplet.state.home import Home

HASH = "0" * 64


def status_of(error: pytest.ExceptionInfo[RequestInvalid]) -> int | None:
    return error.value.status


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("base", Reference("base")),
        ("My-Name_1", Reference("my-name_1")),
        ("name:v1.0", Reference("name", "v1.0", said=True)),
        ("team/name:TAG", Reference("name", "tag", "team", said=True)),
        ("team/name", Reference("name", slug="team")),
    ],
)
def test_references(text: str, found: Reference) -> None:
    assert parse(text) == found


@pytest.mark.parametrize(
    "text",
    ["", ":tag", "name:", "a b", "a/b/c", "/name", "name:a:b", "a/../b", "name:../x", "n\nm", "n" * 200,
     "name:123e4567-e89b-12d3-a456-426614174000"],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(RequestInvalid) as error:
        parse(text)
    assert status_of(error) == 400


def test_tags() -> None:
    assert bare_tags(["a", "name:b", "A"]) == ["a", "b"]
    assert bare_tags([]) == []
    with pytest.raises(RequestInvalid):
        bare_tags(["name:"])
    assert new_template_id() != new_template_id()
    assert parse(new_template_id()).tag == "default"


@pytest.mark.parametrize(
    ("body", "tags", "explicit"),
    [
        ({"name": "a"}, ["default"], []),
        ({"name": "a:v1"}, ["v1"], []),
        ({"name": "a:v1", "tags": ["v2", "a:v1"]}, ["v1", "v2"], []),
        ({"name": "a", "cpuCount": 2, "memoryMB": 1024}, ["default"], []),
        ({"name": "a", "cpuCount": 4, "memoryMB": 1024}, ["default"], ["cpus"]),
        ({"name": "a", "memoryMB": 512, "cpuCount": None}, ["default"], ["memory"]),
    ],
)
def test_builds_that_are_announced(body: dict[str, Any], tags: list[str], explicit: list[str]) -> None:
    found = new_build(body)
    assert (found.tags, found.explicit) == (tags, explicit)


@pytest.mark.parametrize("more", [{"cpuCount": 0}, {"memoryMB": 32}, {"memoryMB": 1025}, {"cpuCount": 10**6},
                                  {"memoryMB": 10**9}, {"cpuCount": True}, {"tags": "a"}, {"name": 1}])  # fmt: skip
def test_builds_that_make_no_sense(more: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid) as error:
        new_build({"name": "a", **more})
    assert status_of(error) == 400


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(*given: tuple[str, list[str]], **more: Any) -> list[Any]:
    return read_steps({"steps": [
        {"type": kind, "args": args, **({"filesHash": HASH} if kind == "COPY" else {}), **more} for kind, args in given
    ]})  # fmt: skip


def translated(*given: tuple[str, list[str]], user: str = "user") -> list[Piece]:
    found = steps(*given)
    copies = [each for each in found if each.type == "COPY"]
    placed = {each.number: Placed(f"files/{source_of(each.args[0])}", each.args[1]) for each in copies}
    return translate(found, placed, user)


def test_a_command() -> None:
    (piece,) = translated(("RUN", ["echo $A 'b'"]))
    assert isinstance(piece.instruction, Run)
    assert piece.instruction.argv == ("/bin/bash", "-l", "-c", "echo $A 'b'")


def users(pieces: list[Piece]) -> list[str]:
    """Who each command runs as, by the way down of a build."""
    scope = Scope(ImageConfig(user="user", workdir="/home/user"), build_args={}, leading={}, epoch=0)
    found = []
    for piece in pieces:
        work = scope.take(piece.instruction)
        if isinstance(piece.instruction, Run):
            found.append(work.user)  # type: ignore[union-attr]
    return [*found, scope.config.user]


def test_who_commands_run_as() -> None:
    assert users(translated(("RUN", ["a"]), ("RUN", ["b", "root"]), ("RUN", ["c"]))) == ["user", "root", "user", "user"]
    assert users(translated(("USER", ["root"]), ("RUN", ["a"]), ("RUN", ["a", "user"]))) == ["root", "user", "root"]
    # who is missing is made, by root
    assert users(translated(("USER", ["alice"]), ("RUN", ["a"]))) == ["root", "alice", "alice"]
    assert [piece.main for piece in translated(("USER", ["alice"]))] == [False, False, True]


@pytest.mark.parametrize("given", [("USER", ["; exit 1"]), ("USER", ["-x"]), ("USER", ["1"]),
                                   ("RUN", ["a", "$(id)"]), ("ENV", ["A"]),
                                   ("ENV", ["", "b"]), ("ENV", ["A=", "b"]), ("COPY", ["a", "b", "", "rwx"]),
                                   ("COPY", ["a", "b", "--x", ""])])  # fmt: skip
def test_steps_that_fail_before_they_begin(given: tuple[str, list[str]]) -> None:
    with pytest.raises(StepFailed) as error:
        translated(("RUN", ["true"]), given)
    assert error.value.step == "2"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("plain", "plain"),
        ('it\'s "q" \\n `id` $(id)', 'it\'s "q" \\n `id` $(id)'),
        ("$A:${A}x:$", "1:1x:$"),
        ("$MISSING.", "."),
        ("$HOME/bin:$PATH", "/home/user/bin:/usr/bin"),
        ("${A:-x} $1", "${A:-x} $1"),
    ],
)
def test_values_of_variables(value: str, found: str) -> None:
    scope = Scope(ImageConfig(env=(("A", "1"), ("PATH", "/usr/bin"))), build_args={}, leading={}, epoch=0)
    (piece,) = translated(("ENV", ["B", value]))
    assert isinstance(piece.instruction, Env)
    scope.take(piece.instruction)
    assert dict(scope.config.env)["B"] == found
    assert expandable("$HOME", "/root") == "/root"


@pytest.mark.parametrize(
    ("text", "found"),
    [("folder/*", "folder"), ("*", ""), (".", ""), ("a/b.txt", "a/b.txt"), ("./a/**/x", "a"), ("a[1]/b", ""),
     ("../../etc", "etc"), ("/abs", "abs"), ("a/{b,c}", "a")],
)  # fmt: skip
def test_what_a_copy_takes(text: str, found: str) -> None:
    assert source_of(text) == found


def test_copies() -> None:
    (piece,) = translated(("COPY", ["a", "b/", "", ""]))
    assert isinstance(piece.instruction, Copy)
    assert (piece.instruction.chown, piece.instruction.chmod, piece.instruction.folder) == ("user", None, "1")
    (piece,) = translated(("COPY", ["a", "b", "root:root", "0755"]))
    assert isinstance(piece.instruction, Copy)
    assert (piece.instruction.chown, piece.instruction.chmod) == ("root", "0755")
    (piece,) = translated(("COPY", ["a", "b", "1:2", "644"]))
    assert isinstance(piece.instruction, Copy)
    assert (piece.instruction.chown, piece.instruction.chmod) == ("1:2", "644")


@pytest.mark.parametrize(
    ("target", "found"),
    [("x/link", ("x", "link")), ("x/", ("x/", "l")), (".", (".", "l")), ("name", (".", "name")), ("/n", ("/", "n"))],
)
def test_where_a_link_goes(target: str, found: tuple[str, str]) -> None:
    assert link_target("files/folder/l", target) == found


def test_which_steps_may_be_cached() -> None:
    assert first_forced(steps(("RUN", ["a"]), ("RUN", ["b"]))) == 2
    assert first_forced(steps(("RUN", ["a"]), ("RUN", ["b"]), force=True)) == 0
    assert [type(each.instruction) for each in translated(("WORKDIR", ["/a b"]))] == [Text]


@pytest.mark.parametrize(
    "body",
    [{}, {"fromImage": "a", "fromTemplate": "b"}, {"fromImage": 1}, {"fromImage": "a", "steps": {}},
     {"fromImage": "a", "steps": ["RUN"]}, {"fromImage": "a", "steps": [{"type": "ADD", "args": ["a"]}]},
     {"fromImage": "a", "steps": [{"type": "RUN", "args": []}]},
     {"fromImage": "a", "steps": [{"type": "RUN", "args": [1]}]},
     {"fromImage": "a", "steps": [{"type": "RUN", "args": ["a\0"]}]},
     {"fromImage": "a", "steps": [{"type": "COPY", "args": ["a", "b"], "filesHash": "../../x"}]},
     {"fromImage": "a", "fromImageRegistry": {"type": "other"}}, {"fromImage": "a", "fromImageRegistry": {"type": 1}}],
)  # fmt: skip
def test_builds_that_cannot_begin(body: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid) as error:
        build_asked(body)
    assert status_of(error) == 400


def test_credentials_are_not_shown() -> None:
    asked = build_asked(
        {"fromImage": "a", "fromImageRegistry": {"type": "registry", "username": "u", "password": "p4ss"}}
    )
    assert asked.registry["password"] == "p4ss"
    assert "p4ss" not in repr(asked)


def test_what_is_told_of_a_failure() -> None:
    (run,) = translated(("RUN", ["make", "root"]))[1:2]
    failed = BuildFailed("template line 1: RUN make: exit code 2\nlast lines", hint="a hint")
    failed.exit_code = 2
    told = failure(run, failed)
    assert (told.step, told.message, told.hint) == ("1", "failed to run command 'make': exit status 2", "a hint")
    unknown = BuildFailed("template line 1: there is no user")
    unknown.__cause__ = UserNotFound("there is no user")
    assert "unauthenticated: invalid username: 'root'" in failure(run, unknown).message
    (folder,) = translated(("WORKDIR", ["/etc/passwd"]))
    assert failure(folder, BuildFailed("template line 1: a file")).message == "failed to create workdir: a file"
    assert failure(run, SandboxError("template line 1: gone")).message == "failed to run command 'make': gone"


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_are_read_by_number(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").open()
    logs = BuildLogs()
    log = logs.begin("b")
    for number in range(250):
        log.add(f"line {number}", "debug" if number % 2 else "info", "1")

    def read() -> list[str]:
        found: list[str] = []
        while page := logs.find(home, "b").page(len(found)):
            assert len(page) <= 100
            found += [each["message"] for each in page]
        return found

    whole = [f"line {number}" for number in range(250)]
    assert read() == whole
    logs.finish(home, "b")
    assert read() == whole
    again = BuildLogs()  # after a restart
    assert [each["message"] for each in again.find(home, "b").page(248)] == whole[248:]
    assert len(again.find(home, "b").page(0, 10)) == 10
    assert [each["level"] for each in again.find(home, "b").page(0, 3, "info")] == ["info"] * 3
    again.forget(home, "b")
    assert again.find(home, "b").page(0) == []


def test_a_log_has_an_end(tmp_path: Path) -> None:
    log = BuildLogs().begin("b")
    for _ in range(1000):
        log.add("\U0001f600" * 5000)
    assert log.entries[-1]["level"] == "warn"
    assert sum(len(each["message"]) for each in log.entries) < 1.1 * 2**20
    log.add("why it failed", "error")
    assert log.entries[-1]["message"] == "why it failed"
    many = BuildLogs().begin("c")
    for number in range(20_000):
        many.add(str(number))
    assert (len(many.entries), many.entries[-1]["level"]) == (10_001, "warn")


# -- what is on record -------------------------------------------------------------------------------------------------


def test_what_is_on_record_stays(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    store = TemplateStore(home)
    one = store.put(Template("t1", "main", "name", 1.0, 1.0))
    store.put(Template("t2", "other", "name", 2.0, 2.0))
    store.put(Template("t3", "main", "", 3.0, 3.0))
    first = store.put_build(Build("b1", "main", "t1", WAITING, 1.0, tags=["v1"]))
    second = store.put_build(Build("b2", "main", "t1", READY, 2.0, image="i", explicit=["cpus"], start="x"))
    store.change_build(first, status=BUILDING)
    store.assign("t1", ["v1", "default"], "b2")
    for seen in (store, TemplateStore(home)):
        assert seen.find("main", "name") == seen.find("main", "t1") == one
        assert seen.find("other", "t1") is None
        assert seen.find("other", "name") != one
        assert [each.id for each in seen.of_tenant("main")] == ["t3", "t1"]
        assert [each.id for each in seen.builds("t1")] == ["b2", "b1"]
        assert seen.build("b2") == second
        assert [each.id for each in seen.unfinished()] == ["b1"]
        assert {each.id for each in seen.with_images("main")} == {"b1", "b2"}
        assert {tag.name: tag.build for tag in seen.tags("t1").values()} == {"v1": "b2", "default": "b2"}
    store.take_off("t1", ["v1"])
    store.drop(one)
    for seen in (store, TemplateStore(home)):
        assert seen.find("main", "name") is None
        assert seen.build("b1") is None
        assert seen.tags("t1") == {}
        assert seen.find("other", "name") is not None
        assert seen.change_build(second, status=READY).status == READY  # of one that is gone: nothing is written
        assert seen.build("b2") is None


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


# -- first uses --------------------------------------------------------------------------------------------------------


class _Ground:
    """As much of a server as the standard templates need: tenants, and images that are built once."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built: list[str] = []
        self.go_on = asyncio.Event()
        self.fails = False
        home = Home(tmp_path / "home")
        self.tenants = {name: SimpleNamespace(name=name, home=home, embedded=object()) for name in ("main", "other")}
        server = SimpleNamespace(tenants=SimpleNamespace(get=self.tenants.__getitem__))
        self.standard = Standard(SimpleNamespace(server=server))  # type: ignore[arg-type]
        monkeypatch.setattr(standard, "_lay_out", lambda home, image: image in self.built)
        monkeypatch.setattr(standard.recipes, "build", self._build)

    async def _build(self, image: str, *, home: object, controller: object, on_event: Any) -> None:
        assert controller is self.tenants["main"].embedded  # on the operator's behalf, whoever asks
        on_event(BuildEvent("begin", 1, 2, text="FROM x"))
        await self.go_on.wait()
        if self.fails:
            raise BuildFailed("no network")
        self.built.append(image)

    def image(self, tenant: str, told: list[str] | None = None) -> asyncio.Task[str]:
        tell = None if told is None else told.append
        return asyncio.ensure_future(self.standard.image(self.tenants[tenant], "base", tell))  # type: ignore[arg-type]


@asynchronous
async def test_a_standard_image_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ground, told = _Ground(tmp_path, monkeypatch), list[str]()
    asking = [ground.image("main", told), ground.image("other"), ground.image("other")]
    while not told:
        await asyncio.sleep(0)
    asking[1].cancel()  # who goes away does not end it for the others
    ground.go_on.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert found[0] == found[2] == "sloplet/e2b-base"
    assert isinstance(found[1], asyncio.CancelledError)
    assert ground.built == ["sloplet/e2b-base"]
    assert told == ["sloplet/e2b-base [1/2] FROM x"]
    assert await ground.image("other") == "sloplet/e2b-base"
    assert ground.built == ["sloplet/e2b-base"]


@asynchronous
async def test_a_standard_image_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = _Ground(tmp_path, monkeypatch)
    ground.fails = True
    ground.go_on.set()
    found = await asyncio.gather(ground.image("main"), ground.image("other"), return_exceptions=True)
    assert [type(each) for each in found] == [BuildFailed, BuildFailed]
    ground.fails = False
    assert await ground.image("main") == "sloplet/e2b-base"


@asynchronous
async def test_who_cannot_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = _Ground(tmp_path, monkeypatch)
    monkeypatch.setattr(standard, "_PATIENCE", 0.01)
    with pytest.raises(RequestInvalid) as error:
        await ground.standard.plan(SimpleNamespace(tenant=ground.tenants["main"]), "base")  # type: ignore[arg-type]
    assert status_of(error) == 503
    ground.go_on.set()
    assert await ground.image("main") == "sloplet/e2b-base"  # the same build went on
    assert ground.built == ["sloplet/e2b-base"]


@asynchronous
async def test_who_comes_late_waits_for_a_place() -> None:
    places, told = Places(2, "build"), list[str]()
    async with waited(places, "a", lambda: told.append("a")):

        async def second() -> None:
            async with waited(places, "a", lambda: told.append("b")):
                told.append("in")

        task = asyncio.ensure_future(second())
        while not told:
            await asyncio.sleep(0)
        assert told == ["b"]
    await task
    assert told == ["b", "in"]
