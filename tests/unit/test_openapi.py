"""The OpenAPI document: docs/openapi.json is what the server answers, and it says all that clients need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from sloplet.server.openapi import document

pytestmark = pytest.mark.anyone
COPY = Path(__file__).parents[2] / "docs" / "openapi.json"
METHODS = {"get", "put", "post", "delete", "patch", "head", "options", "trace"}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return json.loads(json.dumps(document()))  # type: ignore[no-any-return]


def operations(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in spec["paths"].items():
        for method, operation in item.items():
            if method in METHODS:
                yield f"{method.upper()} {path}", operation


def _outline(spec: dict[str, Any]) -> dict[str, Any]:
    """What clients depend on. Wording and how a version of FastAPI writes things down is left out."""
    found: dict[str, Any] = {}
    for name, operation in operations(spec):
        body = operation.get("requestBody", {})
        found[name] = {
            "parameters": sorted(
                (each["in"], each["name"], each.get("required", False)) for each in operation.get("parameters", ())
            ),
            "body": {kind: _ref(one) for kind, one in body.get("content", {}).items()},
            "answers": {
                status: {kind: _ref(one) for kind, one in answer.get("content", {}).items()}
                for status, answer in operation["responses"].items()
            },
        }
    for name, schema in spec["components"]["schemas"].items():
        found[name] = (sorted(schema.get("properties", ())), sorted(schema.get("required", ())))
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def _ref(content: dict[str, Any]) -> str:
    return str(content.get("schema", {}).get("$ref", ""))


def test_the_copy_in_docs_is_what_the_server_answers(made: dict[str, Any]) -> None:
    ours, theirs = _outline(made), _outline(json.loads(COPY.read_text()))
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert not changed, "docs/openapi.json is stale: run scripts/openapi"


def test_every_operation_has_an_id_of_its_own_and_says_what_it_does(made: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, operation in operations(made)]
    assert len(ids) == len(set(ids))
    silent = [name for name, each in operations(made) if not (each.get("summary") or each.get("description"))]
    assert not silent


def test_every_problem_is_a_problem_document(made: dict[str, Any]) -> None:
    wrong = []
    for name, operation in operations(made):
        for status, answer in operation["responses"].items():
            problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
            if status[0] in "45" and answer.get("content", {}).get("application/problem+json") != problem:
                wrong.append(f"{name} {status}")
    assert not wrong


def test_what_needs_a_key_says_so(made: dict[str, Any]) -> None:
    """401 is declared wherever a key is needed: everywhere but where the server tells that it is up."""
    open_to_all = {name for name, operation in operations(made) if "401" not in operation["responses"]}
    assert open_to_all <= {"GET /healthz", "GET /readyz"}, open_to_all
    schemes = made["components"].get("securitySchemes", {})
    assert any(each.get("scheme") == "bearer" for each in schemes.values())
