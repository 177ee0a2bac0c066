"""E2B's secrets at rest: values are on no disk, and open only as what they were kept for."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sloplet.errors import RequestInvalid, StateCorrupt
from sloplet.server.e2b.secrets import Secrets
from sloplet.server.e2b.secretstore import SecretStore
from sloplet.server.e2b.tokens import Tokens
from sloplet.state.home import Home

VALUE = "a-value-that-nobody-sees"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home").open()
    (home.path / "server").mkdir(mode=0o700)
    return home


@pytest.fixture
def store(home: Home) -> SecretStore:
    return SecretStore(home, Tokens(home).key("secrets"))


def bytes_of(home: Home) -> bytes:
    return b"".join(path.read_bytes() for path in home.path.rglob("*") if path.is_file())


def test_a_secret_and_its_versions(store: SecretStore) -> None:
    made = store.add("acme", "key", VALUE, {"a": "b"}, 10)
    assert made is not None
    assert store.add("acme", "key", "x", {}, 10) is None
    assert (made.version, made.metadata, store.value("acme", "key")) == (1, {"a": "b"}, VALUE)
    assert store.find("acme", made.id) == store.find("acme", "KEY") == made
    assert store.find("other", made.id) is store.find("other", "key") is store.value("other", "key") is None
    changed = store.change(made, "second", None)
    assert changed is not None
    assert (changed.version, changed.metadata, store.value("acme", "key")) == (2, {"a": "b"}, "second")
    again = store.change(made, "third", {})
    assert again is not None
    assert (again.version, again.metadata) == (3, {})
    assert store.remove(made)
    assert not store.remove(made)
    assert store.change(made, "x", None) is None
    assert store.value("acme", "key") is None


def test_there_is_an_end_to_them(store: SecretStore) -> None:
    for number in range(3):
        assert store.add("acme", f"k{number}", "v", {}, 3)
    with pytest.raises(OverflowError):
        store.add("acme", "one-more", "v", {}, 3)
    assert store.add("other", "one-more", "v", {}, 3)  # each tenant has its own


def test_values_are_on_no_disk(home: Home, store: SecretStore) -> None:
    made = store.add("acme", "the-name-of-it", VALUE, {}, 10)
    assert made is not None
    store.change(made, VALUE + "2", None)
    found = bytes_of(home)
    assert b"the-name-of-it" in found  # it is there that one would look
    assert VALUE.encode() not in found


def test_only_with_the_key_and_only_as_what_it_was(home: Home, store: SecretStore) -> None:
    one, two = store.add("acme", "one", VALUE, {}, 10), store.add("other", "two", "hers", {}, 10)
    assert one is not None
    assert two is not None
    with pytest.raises(StateCorrupt):
        SecretStore(home, bytes(32)).value("acme", "one")
    store.close()
    with sqlite3.connect(home.database) as db:  # somebody who can write the file, but has no key
        db.execute("UPDATE e2b_secrets SET sealed = (SELECT sealed FROM e2b_secrets WHERE id = ?) WHERE id = ?",
                   (one.id, two.id))  # fmt: skip
        db.commit()
    assert store.value("acme", "one") == VALUE
    with pytest.raises(StateCorrupt):
        store.value("other", "two")


def test_what_headers_get(home: Home) -> None:
    facade: Any = SimpleNamespace(server=SimpleNamespace(home=home), tokens=Tokens(home))
    secrets = Secrets(facade)
    secrets._store.add("acme", "key", VALUE, {}, 10)
    secrets._store.add("acme", "lines", "one\r\nHost: evil", {}, 10)
    assert secrets.fill("acme", "Bearer ${e2b.secrets.KEY}, ${e2b.secrets.key}!") == f"Bearer {VALUE}, {VALUE}!"
    assert secrets.fill("acme", "$x ${e2b.identity.tokens.a} plain") == "$x ${e2b.identity.tokens.a} plain"
    assert secrets.names("a ${e2b.secrets.Key} ${e2b.secrets.other}") == {"key", "other"}
    for tenant, text, why in (
        ("other", "${e2b.secrets.key}", "not found"),
        ("acme", "${e2b.secrets.none}", "not found"),
        ("acme", "${e2b.secrets.lines}", "header"),
    ):
        with pytest.raises(RequestInvalid, match=why) as caught:
            secrets.fill(tenant, text)
        assert VALUE not in str(caught.value)
    secrets.close()
