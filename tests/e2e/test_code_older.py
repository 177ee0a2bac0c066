"""Kernels of an older version, as a saved state may hold them: they get what they understand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.errors import KernelError

KEY = "0123456789abcdef"
#: As they were: a file is source, and words that they do not know are not looked at. Prints those it was sent.
OLD = """
import json, os, sys
def say(text):
    for fd in (1, 2):
        os.write(fd, b"\\x1e0123456789abcdef %s %s\\n" % (cell, text))
for line in sys.stdin:
    asked = json.loads(line)
    cell = asked["id"].encode()
    source = open(asked["file"]).read() if "file" in asked else asked["code"]
    say(b"begin 1")
    os.write(1, ("%s\\n" % sorted(asked)).encode())
    exec(source)
    sys.stdout.flush()
    say(b"end 0")
"""


@pytest.fixture
def box() -> Iterator[Sandbox]:
    if not registry.load("container").probe().available:
        pytest.skip("capability: containers do not run here")
    with Sandbox(engine="container", env={"GIVEN": "by the sandbox"}) as made:
        yield made


def test_they_get_plain_code(box: Sandbox) -> None:
    tag = f"sloplet-code/1/python/python/{KEY}"
    box.spawn(["python3", "-c", OLD], stdin=True, detached=True, tag=tag).detach()
    assert box.code("print('ran')").stdout == "['code', 'id', 'key']\nran\n"
    long = "#" * 5000 + "\nprint('ran')"
    assert box.code(long).stdout == "['file', 'id', 'key']\nran\n"
    with pytest.raises(KernelError, match="older version") as refused:
        box.code("print('ran')", env={"A": "b"})
    assert "contexts.restart('python')" in str(refused.value.hint)
    assert box.code("print('ran')").ok, "what was refused has cost it nothing"
    box.contexts.restart("python")
    assert box.code("import os; os.environ['A'] + os.environ['GIVEN']", env={"A": "b"}).text == "'bby the sandbox'"
    tags = [info.tag for info in box.processes() if info.tag.startswith("sloplet-code/")]
    assert [tag.split("/")[1] for tag in tags] == ["2"]
