"""What each route of the server could name of another tenant's: the table of test_http_tenants.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from layer_kit import member, tar

Refs = dict[str, str]
ARCHIVE = {"Content-Type": "application/x-tar"}
INIT = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip
MCP = {"Accept": "application/json, text/event-stream"}


@dataclass(frozen=True)
class Row:
    """One request. ``{words}`` in it are filled in: with what is A's, or with what never was."""

    query: dict[str, str] = field(default_factory=dict)
    json: Any = None
    content: bytes | Callable[[Refs], bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    undo: tuple[str, ...] = ()  #: what takes back what B may well do
    listed: str = ""  #: nothing is named: of this, A's is in A's answer, and nothing of A's in B's
    said: bool = False  #: B's own words are in it, which name what is A's
    plain: bool = False  #: nothing of anybody's is told or named: the same answer for all
    control: bool = True  #: whether A's answer can be told from the one about what never was
    last: bool = False  #: ends something: the control comes after all others


def _context(base: str) -> bytes:
    return tar(member("Dockerfile", f"FROM {base}\nENV A=b\n".encode()))


ONE = (Row(),)
#: What a route is about, by its label. By default the path's words are all that is named.
TABLE: dict[str, tuple[Row, ...]] = {
    "GET /healthz": (Row(plain=True),),
    "GET /readyz": (Row(plain=True),),
    "GET /openapi.json": (Row(plain=True),),
    "GET /metrics": (Row(listed="tenant"),),
    "GET /v1/me": (Row(listed="tenant"),),
    # -- sandboxes
    "GET /v1/sandboxes": (
        Row(listed="box"), Row(query={"name": "{name}"}, listed="box"),
        Row(query={"label": "of={label}"}, listed="box"),
        Row(query={"tenant": "{tenant}"}, control=False), Row(query={"tenant": "*"}, control=False),
    ),
    "POST /v1/sandboxes": (
        Row(json={"engine": "fake", "name": "{name}"}, undo=("DELETE /v1/sandboxes/{name}",)),
        Row(json={"template": "{template}"}),
        Row(json={"engine": "container", "template": "{snapshot}"}),
        Row(json={"engine": "container", "image": "{image}"}),
        Row(  # one of that name is made if there is none
            json={"engine": "container", "volumes": {"/data": "{volume}"}, "name": "{name}"}, control=False,
            undo=("DELETE /v1/sandboxes/{name}", "DELETE /v1/volumes/{volume}"),
        ),
        Row(json={"engine": "container", "network": {"allow": ["x.test"]}, "links": {"db": "{box}:80"}}, control=False),
        Row(json={"engine": "container", "name": "{name}", "reuse": True}, undo=("DELETE /v1/sandboxes/{name}",)),
    ),
    "POST /v1/sandboxes/import": (
        Row(content=b"no archive", headers={"Content-Type": "application/vnd.sloplet.archive"}, plain=True),
    ),
    "GET /v1/sandboxes/{box}": ONE,
    "DELETE /v1/sandboxes/{box}": (Row(control=False, last=True),),  # 204 always; that A's is still there is looked at
    "POST /v1/sandboxes/{box}/pause": ONE,
    "PUT /v1/sandboxes/{box}/ttl": (Row(json={"ttl": 3600}),),
    "POST /v1/sandboxes/{box}/resume": ONE,
    "POST /v1/sandboxes/{box}/release": ONE,
    "POST /v1/sandboxes/{box}/rollback": (
        Row(json={"snapshot": "{snapshot}"}), Row(json={"snapshot": "{snapshot_name}"}),
    ),
    "POST /v1/sandboxes/{box}/undo": (Row(json={"steps": 1}),),
    "POST /v1/sandboxes/{box}/fork": (Row(json={"count": 1}), Row(json={"count": 1, "snapshot": "{snapshot}"})),
    "GET /v1/sandboxes/{box}/diff": (Row(), Row(query={"against": "{snapshot}"})),
    "POST /v1/sandboxes/{box}/applied": (Row(json={"marks": {"/workspace/kept": "x"}}),),
    "GET /v1/sandboxes/{box}/guarantees": ONE,
    "GET /v1/sandboxes/{box}/metrics": ONE,
    "GET /v1/sandboxes/{box}/stats": ONE,
    "GET /v1/sandboxes/{box}/image-config": ONE,
    "GET /v1/sandboxes/{box}/health": ONE,
    "GET /v1/sandboxes/{box}/export": (Row(query={"image": "false"}),),
    "GET /v1/sandboxes/{box}/snapshots": ONE,
    "POST /v1/sandboxes/{box}/snapshots": (Row(json={}),),
    "GET /v1/snapshots": (Row(listed="snapshot"),),
    "GET /v1/snapshots/{ref}": (Row(), Row(query={"sandbox": "{box}"})),
    "DELETE /v1/snapshots/{ref}": (Row(last=True), Row(query={"sandbox": "{box}", "force": "true"}, last=True)),
    "GET /v1/templates": (Row(listed="template"),),
    "POST /v1/templates": (
        Row(json={"sandbox": "{box}", "name": "taken"}),
        Row(
            json={"sandbox": "{own}", "name": "{template}"}, undo=("DELETE /v1/templates/{template}",), control=False
        ),
    ),
    "GET /v1/templates/{name}": ONE,
    "DELETE /v1/templates/{name}": (Row(last=True),),
    # -- events
    "GET /v1/events": (Row(plain=True),),  # test_events_are_ones_own
    "WS /v1/events": (Row(plain=True),),
    "GET /v1/sandboxes/{box}/events": ONE,
    "WS /v1/sandboxes/{box}/events": ONE,
    # -- commands and code
    "POST /v1/sandboxes/{box}/exec": (Row(json={"command": "echo > kept"}),),
    "POST /v1/sandboxes/{box}/exec/stream": (Row(json={"command": "true"}),),
    "WS /v1/sandboxes/{box}/exec/ws": (Row(json={"command": "true"}), Row(json={"command": "sh", "pty": True})),
    "GET /v1/sandboxes/{box}/processes": ONE,
    "POST /v1/sandboxes/{box}/processes": (Row(json={"command": "true"}),),
    "GET /v1/sandboxes/{box}/processes/{pid}": ONE,
    "GET /v1/sandboxes/{box}/processes/{pid}/output": (Row(query={"follow": "false"}),),
    "POST /v1/sandboxes/{box}/processes/{pid}/signal": (Row(json={"signal": "CONT"}),),
    "WS /v1/sandboxes/{box}/processes/{pid}/attach": ONE,
    "POST /v1/sandboxes/{box}/code": (Row(json={"code": "true", "language": "shell"}),),
    "POST /v1/sandboxes/{box}/code/stream": (Row(json={"code": "true", "language": "shell"}),),
    "GET /v1/sandboxes/{box}/contexts": ONE,
    "POST /v1/sandboxes/{box}/contexts": (Row(json={"language": "shell"}),),
    "DELETE /v1/sandboxes/{box}/contexts/{name}": (Row(last=True),),
    "POST /v1/sandboxes/{box}/contexts/{name}/restart": ONE,
    "POST /v1/sandboxes/{box}/contexts/{name}/interrupt": ONE,
    # -- files
    "GET /v1/sandboxes/{box}/files": (Row(query={"path": "kept"}),),
    "HEAD /v1/sandboxes/{box}/files": (Row(query={"path": "kept"}),),
    "PUT /v1/sandboxes/{box}/files": (Row(query={"path": "kept"}, content=b"overwritten"),),
    "DELETE /v1/sandboxes/{box}/files": (Row(query={"path": "kept"}, last=True),),
    "GET /v1/sandboxes/{box}/files/stat": (Row(query={"path": "kept"}),),
    "GET /v1/sandboxes/{box}/files/list": ONE,
    "GET /v1/sandboxes/{box}/files/attributes": (Row(query={"path": "kept"}),),
    "PUT /v1/sandboxes/{box}/files/attributes": (Row(json={"path": "kept", "attributes": {"user.a": "eA=="}}),),
    "GET /v1/sandboxes/{box}/files/archive": (Row(query={"path": "."}),),
    "PUT /v1/sandboxes/{box}/files/archive": (
        Row(query={"path": "."}, content=tar(member("kept", b"x")), headers=ARCHIVE),
    ),
    "GET /v1/sandboxes/{box}/files/watch": ONE,
    "WS /v1/sandboxes/{box}/files/watch": ONE,
    "POST /v1/sandboxes/{box}/files/chmod": (Row(json={"path": ".", "mode": "0755"}),),
    "POST /v1/sandboxes/{box}/files/chown": (Row(json={"path": ".", "owner": "agent"}),),
    "POST /v1/sandboxes/{box}/files/mkdir": (Row(json={"path": "made"}),),
    "POST /v1/sandboxes/{box}/files/move": (Row(json={"path": "kept", "target": "moved"}, last=True),),
    "POST /v1/sandboxes/{box}/files/symlink": (Row(json={"path": "link", "target": "kept"}),),
    # -- network, secrets, ports
    "GET /v1/sandboxes/{box}/network": ONE,
    "PUT /v1/sandboxes/{box}/network": (Row(json={"allow": ["evil.test"]}),),
    "PATCH /v1/sandboxes/{box}/network": (Row(json={"allow": ["evil.test"]}),),
    "GET /v1/sandboxes/{box}/network/log": ONE,
    "GET /v1/sandboxes/{box}/network/learned": ONE,
    "GET /v1/sandboxes/{box}/network/asks": ONE,
    "WS /v1/sandboxes/{box}/network/asks": ONE,
    "POST /v1/sandboxes/{box}/network/asks/{ask}": (Row(json={"verdict": "once"}),),
    "GET /v1/sandboxes/{box}/secrets": ONE,
    "PUT /v1/sandboxes/{box}/secrets": (Row(json={"values": {"{secret}": "stolen"}}),),
    "DELETE /v1/sandboxes/{box}/secrets/{name}": (Row(last=True),),
    "GET /v1/sandboxes/{box}/ports": ONE,
    "PUT /v1/sandboxes/{box}/ports/{port}": (Row(json={"public": True}),),
    "DELETE /v1/sandboxes/{box}/ports/{port}": (Row(last=True),),
    # -- images, volumes, pools
    "GET /v1/images": (Row(listed="image_digest"), Row(query={"all": "true"}, listed="image_digest")),
    "GET /v1/images/item": (Row(query={"ref": "{image}"}), Row(query={"ref": "{image_digest}"})),
    "DELETE /v1/images/item": (Row(query={"ref": "{image}"}, last=True),),
    "GET /v1/images/export": (Row(query={"ref": "{image}"}), Row(query={"ref": "{image_digest}"})),
    "POST /v1/images/tag": (Row(json={"image": "{image}", "reference": "other.test/x:1"}),),
    "POST /v1/images/push": (Row(json={"image": "{image}", "reference": "127.0.0.1:9/x"}),),
    "POST /v1/images/pull": (Row(json={"reference": "{image}", "if_missing": True}),),
    "POST /v1/images/import": (Row(content=b"no image", headers=ARCHIVE, plain=True),),
    "POST /v1/images/build": (
        Row(content=lambda refs: _context(refs["image"]), query={"engine": "container"}, headers=ARCHIVE),
    ),
    "POST /v1/images/prune": (Row(json={}, plain=True, last=True),),  # that A's image is still there is looked at
    "GET /v1/volumes": (Row(listed="volume"),),
    "POST /v1/volumes": (Row(json={"name": "{volume}"}, undo=("DELETE /v1/volumes/{volume}",)),),
    "GET /v1/volumes/{name}": ONE,
    "DELETE /v1/volumes/{name}": (Row(last=True),),
    "GET /v1/volumes/{name}/snapshots": ONE,
    "POST /v1/volumes/{name}/snapshots": (Row(json={"name": "another"}),),
    "DELETE /v1/volumes/{name}/snapshots/{snapshot}": (Row(last=True),),
    "POST /v1/volumes/{name}/clone": (Row(json={"name": "cloned"}),),
    "GET /v1/pools": (Row(listed="pool"),),
    # -- keys and what operators do
    "GET /v1/keys": (Row(control=False),),
    "POST /v1/keys": (Row(json={"name": "sneaky", "tenant": "{tenant}"}, control=False),),
    "DELETE /v1/keys/{ref}": (Row(control=False),),
    "GET /v1/tenants": (Row(control=False),),
    "POST /v1/backup": (Row(control=False),),
    "GET /v1/audit": (
        Row(listed="key", said=True), Row(query={"tenant": "{tenant}"}, control=False),
        Row(query={"key": "{key}"}, listed="key", said=True), Row(query={"sandbox": "{box}"}, listed="key", said=True),
    ),
    "GET /v1/me/ssh-keys": (Row(listed="fingerprint"),),
    "POST /v1/me/ssh-keys": (Row(json={"public": "nonsense"}, plain=True),),
    "DELETE /v1/me/ssh-keys/{fingerprint}": (Row(control=False, last=True),),
    # -- protocols of their own
    "POST /mcp": (
        Row(json={"jsonrpc": "2.0", "id": 2, "method": "tools/list"}, headers={**MCP, "Mcp-Session-Id": "{mcp}"}),
    ),
    "GET /mcp": (Row(headers={**MCP, "Mcp-Session-Id": "{mcp}"}),),
    "DELETE /mcp": (Row(headers={**MCP, "Mcp-Session-Id": "{mcp}"}, last=True),),
    "WS /v1/wire": (Row(query={"session": "{wire}", "attempt": "1"}, control=False),),  # test_a_tunnel_is_its_keys_own
}  # fmt: skip
