"""schemathesis over the OpenAPI document: whatever is sent, the answer is one that the document tells of.

Every operation, with data that fits its schema and data that does not, with an admin's key and with a tenant's. The
fake engine makes sandboxes cheap. No answer is a bug (5xx, but for what a registry or a full disk are to blame for),
none has a status, a content type or a body that is not declared, and what was asked wrongly is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis")

import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.core.parameters import ParameterLocation

from server_kit import Served, served
from sloplet.server.openapi import document

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(300)]

BOX = "fuzzed"  #: a sandbox that is there
#: What streams for ever: the first bytes are enough.
ENDLESS = ("/v1/events", "/events", "/files/watch", "/network/asks")
#: Ends what the others need, or changes who may ask: done to what is not there.
ENDING = ("DELETE /v1/sandboxes/{box}",)
#: The only ones of the fives: what others are to blame for.
BLAMELESS = {502, 503, 507}

EXCLUDED = [
    schemathesis.checks.not_a_server_error,  # judged below
    schemathesis.checks.ignored_auth,  # tests/hostile/test_g_server.py tries every route without a key
    schemathesis.checks.missing_required_header,  # the key again
    schemathesis.checks.unsupported_method,  # a body that is no JSON is refused (415) before its method is (405)
    schemathesis.checks.positive_data_acceptance,  # a folder that is not there fits the schema, too
]

schemathesis.serializer.alias(["application/x-tar", "application/vnd.sloplet.archive"], "application/octet-stream")


def _schema(examples: int, *, coverage: bool) -> Any:
    """``coverage``: also every boundary of every field, and wrong methods and content types."""
    config = schemathesis.Config(seed=7)
    project = config.projects.default
    project.generation.update(
        modes=list(GenerationMode), max_examples=examples, deterministic=True, no_shrink=True,
        with_security_parameters=False,
    )  # fmt: skip
    project.phases.coverage.enabled = coverage
    return schemathesis.openapi.from_dict(document(), config=config)


def _bounded(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("fuzz") / "home") as made:
        yield made


def _with_box(server: Served, key: str) -> str:
    with server.client(key) as client:
        answer = client.post("/v1/sandboxes", json={"name": BOX, "engine": "fake"})
        assert answer.status_code == 201, answer.text
    return key


@pytest.fixture(scope="module")
def admin(server: Served) -> str:
    return _with_box(server, server.key)


@pytest.fixture(scope="module")
def tenant(server: Served) -> str:
    return _with_box(server, server.new_key("fuzzer"))


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        yield made


def _aim(case: Case) -> None:
    """At what is there, where the path was not meant to be wrong; and at nobody outside."""
    label = case.operation.label
    component = case.meta.components.get(ParameterLocation.PATH) if case.meta is not None else None
    wrong = component is not None and component.mode is GenerationMode.NEGATIVE
    if not wrong and "box" in case.path_parameters and label not in ENDING:
        case.path_parameters["box"] = BOX
    if not isinstance(case.body, dict):
        return
    if label == "POST /v1/sandboxes":  # a real engine would cost seconds, and so would an image of somewhere else
        case.body["engine"] = "fake"
        if isinstance(case.body.get("image"), str):
            case.body["image"] = "host"
    for name in ("reference", "to"):  # no registry of the internet's is asked
        if isinstance(case.body.get(name), str):
            case.body[name] = f"127.0.0.1:9/{case.body[name]}"


def _check(case: Case, server: Served, key: str, session: requests.Session) -> None:
    _aim(case)
    headers = {"Authorization": f"Bearer {key}"}
    if case.operation.path.endswith(ENDLESS):
        asked = case.as_transport_kwargs(base_url=server.url, headers=headers)
        with session.request(**asked, stream=True, timeout=30) as found:
            if found.status_code == 200:
                assert found.headers["content-type"].startswith("text/event-stream")
                return
            found.content  # noqa: B018 (read: it ends)
            answer: Any = found
    else:
        answer = case.call(base_url=server.url, session=session, headers=headers, timeout=30)
    assert answer.status_code < 500 or answer.status_code in BLAMELESS, answer.content[:2000]
    if "octet-stream" not in answer.headers.get("content-type", "") and len(answer.content) < 1 << 20:
        assert b"Traceback" not in answer.content
        assert str(server.home).encode() not in answer.content
    case.validate_response(answer, excluded_checks=EXCLUDED)


@_schema(8, coverage=True).parametrize()
@_bounded(8)
def test_a_tenant_gets_what_the_document_tells_of(
    case: Case, server: Served, tenant: str, session: requests.Session
) -> None:
    _check(case, server, tenant, session)


@_schema(5, coverage=False).parametrize()
@_bounded(5)
def test_an_admin_gets_what_the_document_tells_of(
    case: Case, server: Served, admin: str, session: requests.Session
) -> None:
    _check(case, server, admin, session)


@_schema(8, coverage=True).include(path_regex="^/v1/(keys|tenants|audit|backup|me)").parametrize()
@_bounded(8)
def test_what_only_an_admin_may(case: Case, server: Served, admin: str, session: requests.Session) -> None:
    _check(case, server, admin, session)


def test_what_the_document_does_not_tell_of_is_found(server: Served, tenant: str, session: requests.Session) -> None:
    """Positive control: were 404 not declared, or of another schema, an answer of 404 would be a failure."""
    for spoil in (lambda answers: answers.pop("404"), lambda answers: answers["404"].update(_OTHER)):
        spoilt = copy.deepcopy(document())
        spoil(spoilt["paths"]["/v1/sandboxes/{box}"]["get"]["responses"])
        case = schemathesis.openapi.from_dict(spoilt)["/v1/sandboxes/{box}"]["GET"].Case(path_parameters={"box": "no"})
        answer = case.call(base_url=server.url, session=session, headers={"Authorization": f"Bearer {tenant}"})
        assert answer.status_code == 404
        with pytest.raises(FailureGroup):
            case.validate_response(answer, excluded_checks=EXCLUDED)


_OTHER = {"content": {"application/problem+json": {"schema": {"type": "object", "required": ["no such field"]}}}}
