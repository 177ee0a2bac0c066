"""Servers inside E2B's sandboxes, visited by their public hosts and by headers; and what clients are told of a sandbox
that ends under them. Real clients, by URL and by name over TLS."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from e2b_kit import VERSIONS, E2BServer, clients, e2b_server
from sloplet.server.e2b.keys import to_e2b

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(300)]

INSIDE = (Path(__file__).parent / "inside_server.py").read_text()
MODES = ("url", "domain")
WAIT = 30.0
CLOSED = "The sandbox is running but port is not open"
GONE = "The sandbox was not found"
BROWSER = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0 Safari/537.36"
#: Answers with the headers of the request. Words: the port, the address.
ECHO = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = json.dumps([list(each) for each in self.headers.items()]).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer((sys.argv[2], int(sys.argv[1])), Handler)
"""
SECURE = """
import ssl, subprocess
subprocess.run("openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -days 1 -subj /CN=x", shell=True, check=True)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); context.load_cert_chain("c", "k")
server.socket = context.wrap_socket(server.socket, server_side=True)
"""
#: Counts connections; serves one request and ends.
ONCE = """
import socket
listener = socket.create_server(("0.0.0.0", 8000))
link, _ = listener.accept()
head = b""
while b"\\r\\n\\r\\n" not in head:
    piece = link.recv(65536)
    if not piece:
        raise SystemExit(1)
    head += piece
link.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\nConnection: close\\r\\n\\r\\nonce")
link.close()
"""


@dataclass
class Box:
    """A sandbox made by E2B's API."""

    server: E2BServer
    engine: str
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.told["sandboxID"])

    @property
    def traffic(self) -> str:
        return str(self.told["trafficAccessToken"])

    def host(self, port: int) -> str:
        return f"{port}-{self.id}.{domain(self.server)}"

    def api(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return api(self.server, self.engine, method, path.replace("ID", self.id), body)

    def spawn(self, *command: str) -> None:
        """By Sloplet's own API: the sandbox is the same."""
        with self.server.served.client(self.server.keys[self.engine]) as client:
            answer = client.post(f"/v1/sandboxes/{self.id}/processes", json={"command": list(command)})
            assert answer.status_code == 201, answer.text

    def serve(self, port: int = 8000, address: str = "127.0.0.1", *, secure: bool = False) -> None:
        program = ECHO + (SECURE if secure else "") + "server.serve_forever()\n"
        self.spawn("python3", "-c", program, str(port), address)

    def visit(self, port: int, path: str = "/", method: str = "GET", **options: Any) -> httpx.Response:
        return visit(self.server, self.host(port), path, method, **options)

    def reached(self, port: int, **options: Any) -> httpx.Response:
        """When something listens there."""
        deadline = time.monotonic() + WAIT
        while (answer := self.visit(port, **options)).status_code == 502:
            assert time.monotonic() < deadline, answer.text
        return answer

    def socket(self, port: int, path: str, **options: Any) -> ClientConnection:
        import socket

        told = self.server.served.told["e2b"]["domain"]
        address = ("127.0.0.1", int(told["E2B_DOMAIN"].rpartition(":")[2]))
        context = ssl.create_default_context(cafile=told["NODE_EXTRA_CA_CERTS"])
        sock = socket.create_connection(address, timeout=WAIT)
        return connect(f"wss://{self.host(port)}{path}", sock=sock, ssl=context, proxy=None, **options)


def domain(server: E2BServer) -> str:
    return str(server.served.told["e2b"]["domain"]["E2B_DOMAIN"])


def visit(server: E2BServer, host: str, path: str, method: str, **options: Any) -> httpx.Response:
    """Over TLS, by its name, which this machine may not know."""
    told = server.served.told["e2b"]["domain"]
    context = ssl.create_default_context(cafile=told["NODE_EXTRA_CA_CERTS"])
    headers = {"Host": host, **options.pop("headers", {})}
    port = told["E2B_DOMAIN"].rpartition(":")[2]
    with httpx.Client(verify=context, timeout=WAIT, trust_env=False) as client:
        return client.request(
            method, f"https://127.0.0.1:{port}{path}", headers=headers,
            extensions={"sni_hostname": host.partition(":")[0]}, **options,
        )  # fmt: skip


def api(server: E2BServer, engine: str, method: str, path: str, body: Any = None) -> httpx.Response:
    with server.served.client("") as client:
        return client.request(method, path, json=body, headers={"X-API-Key": server.keys[engine]})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BServer]:
    with e2b_server(Path(tmp_path_factory.mktemp("doors")) / "home") as found:
        yield found


def make(server: E2BServer, engine: str = "container", **asked: Any) -> Box:
    if engine not in server.keys:
        pytest.skip(f"{engine} cannot run here")
    answer = api(server, engine, "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 300, **asked})
    assert answer.status_code == 201, answer.text
    return Box(server, engine, answer.json())


@pytest.fixture(scope="module")
def box(server: E2BServer) -> Box:
    """Anybody's to visit: 8000 listens on loopback only, 8001 everywhere, 8002 is tests/e2e/inside_server.py."""
    found = make(server)
    found.serve(8000)
    found.serve(8001, "0.0.0.0")
    found.spawn("python3", "-c", INSIDE, "8002")
    for port in (8000, 8001):
        assert found.reached(port).status_code == 200
    assert found.reached(8002, path="/seen").status_code == 200
    return found


# -- public hosts ---------------------------------------------------------------------


def test_the_domain_is_told(server: E2BServer, box: Box) -> None:
    assert box.told["domain"] == domain(server)
    assert domain(server).startswith("sbx.localhost:")


@pytest.mark.parametrize("port", [8000, 8001])
def test_a_server_inside_is_everybodys(box: Box, port: int) -> None:
    answer = box.visit(port)
    assert answer.status_code == 200
    assert dict(answer.json())["Host"] == box.host(port)
    body = bytes(range(256)) * 4096
    assert box.visit(port, method="POST", content=body).content == body


def test_plain_http_by_name_is_as_good(box: Box) -> None:
    with box.server.served.client("") as client:
        assert client.get("/", headers={"Host": f"8000-{box.id}.sbx.localhost:1"}).status_code == 200
        assert client.get("/", headers={"Host": f"8000-{box.id}.localhost"}).status_code == 200


def test_what_is_none_of_the_sandboxs_business_stays_outside(box: Box) -> None:
    sent = {
        "E2b-Traffic-Access-Token": box.traffic, "E2b-Sandbox-Id": "other", "E2b-Sandbox-Port": "1",
        "X-Access-Token": box.told["envdAccessToken"], "X-API-Key": to_e2b(box.server.keys["container"]),
        "Authorization": f"Bearer {box.server.served.key}", "X-Own": "stays",
    }  # fmt: skip
    seen = {name.lower(): value for name, value in box.visit(8000, headers=sent).json()}
    assert seen["x-own"] == "stays"
    assert not {name.lower() for name in sent} - {"x-own"} & set(seen)
    mine = {name.lower(): value for name, value in box.visit(8000, headers={"X-Access-Token": "mine"}).json()}
    assert mine["x-access-token"] == "mine"


def test_a_port_that_is_closed(box: Box) -> None:
    answer = box.visit(3000)
    assert answer.status_code == 502
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"sandboxId": box.id, "message": CLOSED, "port": 3000, "code": 502}
    opened = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "none", "Accept": "text/html,*/*"}
    for more in ({}, opened, {"Sec-Fetch-Mode": "cors"}):  # the last: Node's fetch, which may call itself a browser
        page = box.visit(3000, headers={"User-Agent": BROWSER, **more})
        assert page.status_code == 502
        assert "<title>Closed Port Error</title>" in page.text
        assert page.headers["content-type"].startswith("text/html")
    for more in (PAGE, {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "same-site"}, {"Accept": "application/json"}):
        script = box.visit(3000, headers={"User-Agent": BROWSER, **more})  # scripts of pages read documents
        assert script.json()["message"] == CLOSED


def test_a_server_that_has_just_been_started_is_waited_for(server: E2BServer) -> None:
    """And it is connected to once: nobody probes."""
    found = make(server)
    found.spawn("sh", "-c", 'sleep 0.3; exec python3 -c "$0"', ONCE)
    answer = found.reached(8000)
    assert answer.text == "once"
    assert found.visit(8000).json()["message"] == CLOSED
    found.api("DELETE", "/sandboxes/ID")


def test_websockets(box: Box) -> None:
    with box.socket(8002, "/ws") as link:
        link.send("hello")
        assert link.recv(WAIT) == "hello"
    with pytest.raises(InvalidStatus) as refused:
        box.socket(3000, "/")
    assert refused.value.response.status_code == 502
    assert json.loads(refused.value.response.body)["message"] == CLOSED


@pytest.mark.parametrize("port", [49983, 49999])
def test_nothing_inside_is_reached_on_the_ports_of_e2bs_own_services(server: E2BServer, port: int) -> None:
    found = make(server)
    found.serve(port, "0.0.0.0")
    found.serve(8000)
    assert found.reached(8000).status_code == 200
    answer = found.visit(port, "/files?path=/etc/passwd")
    assert answer.status_code in (401, 404)
    assert set(answer.json()) == {"code", "message"}
    with pytest.raises(InvalidStatus) as refused:
        found.socket(port, "/")
    assert refused.value.response.status_code == 404
    found.api("DELETE", "/sandboxes/ID")


def test_headers_name_a_port_where_the_host_does_not(box: Box) -> None:
    with box.server.served.client("") as client:
        at = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
        seen = {name.lower() for name, _ in client.get("/v2/sandboxes", headers=at).json()}
        assert "user-agent" in seen
        assert not {"e2b-sandbox-id", "e2b-sandbox-port"} & seen
        closed = client.get("/", headers={**at, "E2b-Sandbox-Port": "3000"})
        assert closed.json() == {"sandboxId": box.id, "message": CLOSED, "port": 3000, "code": 502}
        for port in ("0", "65536", "-1", "x", "", "8000, 8001", "\u0663".encode()):
            answer = client.get("/", headers={**at, "E2b-Sandbox-Port": port})  # type: ignore[dict-item]
            assert answer.status_code == 400, (port, answer.text)
        gone = client.get("/", headers={**at, "E2b-Sandbox-Id": "zzzzzzzzzzzz"})
        assert gone.json() == {"sandboxId": "zzzzzzzzzzzz", "message": GONE, "code": 502}


def test_headers_do_not_name_what_is_not_e2bs(server: E2BServer) -> None:
    """A port that Sloplet's own API has published has its own host, and its own token."""
    with server.served.client(server.keys["container"]) as client:
        made = client.post("/v1/sandboxes", json={"engine": "container"}).json()["id"]
        told = client.put(f"/v1/sandboxes/{made}/ports/8000", json={"public": True}).json()
        assert client.get("/", headers={"Host": told["url"].partition("//")[2]}).status_code == 502  # nobody listens
        at = {"E2b-Sandbox-Id": made, "E2b-Sandbox-Port": "8000"}
        assert client.get("/", headers=at).json()["message"] == GONE
        client.delete(f"/v1/sandboxes/{made}")


def test_one_that_is_not_public(server: E2BServer) -> None:
    found = make(server, network={"allowPublicTraffic": False})
    assert found.visit(8000).status_code == 403  # before it is told whether anything listens
    found.serve(8000)
    right = {"E2B-Traffic-Access-Token": found.traffic}
    seen = {name.lower() for name, _ in found.reached(8000, headers=right).json()}
    assert "e2b-traffic-access-token" not in seen
    for wrong in ({}, {"e2b-traffic-access-token": ""}, {"e2b-traffic-access-token": found.traffic[:-1] + "x"}):
        answer = found.visit(8000, headers=wrong)
        assert answer.status_code == 403
        assert answer.json()["code"] == 403
    with pytest.raises(InvalidStatus) as refused:
        found.socket(8000, "/")
    assert refused.value.response.status_code == 403
    found.api("DELETE", "/sandboxes/ID")


def test_the_host_that_servers_inside_see(server: E2BServer) -> None:
    found = make(server, network={"maskRequestHost": "custom.example.com:${PORT}"})
    found.serve(8000)
    seen = {name.lower(): value for name, value in found.reached(8000).json()}
    assert seen["host"] == "custom.example.com:8000"
    assert seen["x-forwarded-host"] == found.host(8000)
    found.api("DELETE", "/sandboxes/ID")


def test_servers_inside_that_speak_tls(server: E2BServer) -> None:
    found = make(server, network={"httpsPorts": [8443, 8444]})
    found.serve(8443, secure=True)
    found.serve(8444)  # it does not, whatever was said
    deadline = time.monotonic() + WAIT
    while (answer := found.visit(8443)).status_code == 502:
        assert time.monotonic() < deadline, answer.text
    assert dict(answer.json())["Host"] == found.host(8443)
    body = bytes(range(256)) * 8192
    for _ in range(3):
        assert found.visit(8443, method="POST", content=body).content == body
    answer = found.visit(8444)
    assert answer.status_code == 502
    assert "TLS" in answer.json()["message"]
    found.api("DELETE", "/sandboxes/ID")


# -- asleep, and gone -----------------------------------------------------------------


def test_a_visitor_wakes_one_that_wakes_for_visitors(server: E2BServer) -> None:
    found = make(server, "gvisor", autoPause=True, autoResume={"enabled": True})
    found.serve(8000)
    assert found.reached(8000).status_code == 200
    assert found.api("POST", "/sandboxes/ID/pause", {}).status_code == 204
    assert found.visit(49983, "/health").status_code == 502  # who asks whether it runs does not wake it
    assert found.visit(49999, "/health").status_code == 502
    assert found.api("GET", "/sandboxes/ID").json()["state"] == "paused"
    began = time.monotonic()
    assert found.visit(8000).status_code == 200
    assert time.monotonic() - began < 15
    told = found.api("GET", "/sandboxes/ID").json()
    assert told["state"] == "running"
    from datetime import datetime

    assert datetime.fromisoformat(told["endAt"]).timestamp() > time.time() + 200
    found.api("DELETE", "/sandboxes/ID")


def test_one_that_does_not_sleeps_on(server: E2BServer) -> None:
    found = make(server, "gvisor")
    found.serve(8000)
    assert found.reached(8000).status_code == 200
    assert found.api("POST", "/sandboxes/ID/pause", {}).status_code == 204
    for port, path in ((8000, "/"), (49983, "/health")):
        answer = found.visit(port, path)
        assert answer.status_code == 502
        assert answer.json() == {"sandboxId": found.id, "message": GONE, "code": 502}
    assert found.api("GET", "/sandboxes/ID").json()["state"] == "paused"
    found.api("DELETE", "/sandboxes/ID")


def test_one_that_is_gone(server: E2BServer) -> None:
    found = make(server)
    assert found.visit(3000).json()["message"] == CLOSED
    assert found.api("DELETE", "/sandboxes/ID").status_code == 204
    for port, path in ((3000, "/"), (49983, "/health"), (49999, "/health")):
        answer = found.visit(port, path)
        assert answer.status_code == 502
        assert answer.json() == {"sandboxId": found.id, "message": GONE, "code": 502}
    other = make(server)  # the same, when it was ended by another door
    with server.served.client(server.keys["container"]) as client:
        client.delete(f"/v1/sandboxes/{other.id}")
    assert other.visit(3000).json()["message"] == GONE
    assert other.visit(3000).json()["message"] == GONE
    never = visit(server, f"49983-zzzzzzzzzzzz.{domain(server)}", "/health", "GET")
    assert never.json()["message"] == GONE


# -- web pages ------------------------------------------------------------------------

PAGE = {"Origin": "https://page.example.org"}
ASKS = {**PAGE, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-api-key, lang"}


def is_open(answer: httpx.Response, status: int) -> bool:
    """Whether a page may read that answer; never with cookies."""
    said = answer.headers
    return (
        answer.status_code == status
        and said.get("access-control-allow-origin") == "*"
        and "access-control-allow-credentials" not in said
    )


def test_pages_of_any_origin_call_with_a_key_or_a_token(server: E2BServer) -> None:
    found = make(server)
    key = {"X-API-Key": to_e2b(server.keys["container"])}
    token = {"X-Access-Token": found.told["envdAccessToken"]}
    by_header = {**ASKS, "Access-Control-Request-Headers": "e2b-sandbox-id,x-access-token"}
    named = {**token, "E2b-Sandbox-Id": found.id}
    with httpx.Client(base_url=server.served.url, headers=PAGE, timeout=60, trust_env=False) as page:
        asked = page.options("/v2/sandboxes", headers=ASKS)
        assert is_open(asked, 204)
        assert asked.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]
        listed = page.get("/v2/sandboxes", headers=key)
        assert is_open(listed, 200)
        assert "x-next-token" in listed.headers["access-control-expose-headers"]
        assert is_open(page.get("/v2/sandboxes"), 401)
        assert is_open(page.options("/files?path=/etc/hostname", headers=by_header), 204)
        assert is_open(page.get("/files?path=/etc/hostname", headers=named), 200)
        assert is_open(page.get("/files?path=/etc/hostname", headers={"E2b-Sandbox-Id": found.id}), 401)
        for headers in (ASKS, key):  # and nothing else of this server
            assert page.request("OPTIONS" if headers is ASKS else "GET", "/v1/me", headers=headers).status_code == 403
        assert page.get("/v1/me", headers={**key, **named}).status_code == 404
    assert is_open(found.visit(49983, "/health", "OPTIONS", headers=ASKS), 204)
    assert is_open(found.visit(49983, "/health", headers=PAGE), 204)
    found.api("DELETE", "/sandboxes/ID")
    assert is_open(found.visit(49983, "/health", "OPTIONS", headers=ASKS), 204)
    assert is_open(found.visit(49983, "/health", headers=PAGE), 502)


def test_pages_learn_why_nobody_answers(server: E2BServer) -> None:
    """Servers inside say themselves which pages may call them."""
    found = make(server, network={"allowPublicTraffic": False})
    found.serve(8000)
    token = {"e2b-traffic-access-token": found.traffic}
    assert found.reached(8000, headers=token).status_code == 200
    assert is_open(found.visit(8000, headers=PAGE), 403)
    assert is_open(found.visit(8000, method="OPTIONS", headers=ASKS), 204)  # it cannot show the token
    assert "access-control-allow-origin" not in found.visit(8000, headers={**PAGE, **token}).headers
    assert is_open(found.visit(3000, headers={**PAGE, **token}), 502)
    found.api("DELETE", "/sandboxes/ID")
    assert is_open(found.visit(8000, headers=PAGE), 502)


# -- ended in the middle --------------------------------------------------------------

ENDED = {
    "kill": ("box.kill()", "await box.kill()"),
    "pause": ("box.pause()", "await box.pause()"),
    "timeout": ("box.set_timeout(0)", "await box.setTimeout(0)"),
}
PYTHON = """
import json, threading
from e2b import Sandbox
box = Sandbox.create(timeout=120)
assert box.commands.run("echo hello").stdout == "hello\\n"
handle = box.commands.run("echo begun; sleep 60", background=True)
print(box.get_host(8000))
def end():
    ENDING
began = []
def told(text):
    if not began:
        began.append(text)
        threading.Thread(target=end).start()
try:
    handle.wait(on_stdout=told)
    said = "nothing"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
running = box.is_running()
box.kill()
print(json.dumps([said, running]))
"""
NODE = """
const { Sandbox } = require("e2b");
async function main() {
  const box = await Sandbox.create({ timeoutMs: 120000 });
  if ((await box.commands.run("echo hello")).stdout !== "hello\\n") throw new Error("no hello");
  let begun;
  const first = new Promise((resolve) => { begun = resolve; });
  const handle = await box.commands.run("echo begun; sleep 60", { background: true, onStdout: () => begun() });
  const ended = handle.wait().then(() => "nothing", (error) => `${error.name}: ${error.message}`);
  await first;
  ENDING;
  const said = await ended;
  const running = await box.isRunning();
  await box.kill();
  console.log(JSON.stringify([said, running]));
}
main().then(() => process.exit(0), (error) => { console.error(error); process.exit(1); });
"""
_LIVE = (("new", "domain"), ("old", "url"), ("js", "url"), ("js-old", "domain"))
CUT = [
    *((client, mode, "kill", "container") for client in (*VERSIONS, "js", "js-old") for mode in MODES),
    *((client, mode, how, "gvisor") for client, mode in _LIVE for how in ("kill", "pause", "timeout")),
]


@pytest.mark.parametrize(("client", "mode", "how", "engine"), CUT)
def test_a_sandbox_that_ends_in_the_middle_of_a_command(
    server: E2BServer, client: str, mode: str, how: str, engine: str
) -> None:
    if engine not in server.keys:
        pytest.skip(f"{engine} cannot run here")
    python, node = ENDED[how]
    if client.startswith("js"):
        command = ["node", "-e", NODE.replace("ENDING", node)]
        more = {"NODE_PATH": str(clients() / client / "node_modules")}
    else:
        command = [str(clients() / client / "bin" / "python"), "-c", PYTHON.replace("ENDING", python)]
        more = {}
    done = subprocess.run(
        command, env={**server.environment(mode, engine), **more}, capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    said, running = json.loads(done.stdout.splitlines()[-1])
    assert "sandbox was killed or reached its end of life" in said
    assert running is False
