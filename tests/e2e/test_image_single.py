"""Images for a user without subordinate ids: owners are recorded, and given inside where the sandbox has users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from image_kit import needs_busybox
from sloplet.engines.machine import machine

pytestmark = [
    needs_busybox,
    pytest.mark.skipif(machine().root, reason="root has every id: there is nobody without"),
]

#: Facts of a machine where this user has one id: said before anything has looked.
_SCRIPT = """
import json, sys
from dataclasses import replace
import sloplet.engines.machine as known
facts = replace(known.machine(), subuid=None, subgid=None, newuidmap=None, newgidmap=None)
known.machine = lambda: facts
from image_kit import busybox_image, default_home
from sloplet import Sandbox
from sloplet.errors import UnsupportedOperation
from sloplet.images.owners import recorded
from sloplet.images.store import ImageStore

busybox_image(default_home(), "single:test")
store = ImageStore(default_home())
image = store.resolve(store.find("single:test"))
said = {"recorded": recorded(image.path), "kept": image.owners_kept}
with Sandbox(image="single:test", engine=sys.argv[1]) as box:
    said["id"] = box.run("id -u").stdout.strip()
    said["stat"] = box.run("stat -c '%u:%g %a' /home/app").stdout.strip()
    said["etc"] = box.run("stat -c '%u:%g' /etc/passwd").stdout.strip()
    if sys.argv[1] == "gvisor":
        said["wrote"] = box.run("echo hi > ~/mine && cat ~/mine && ! touch /etc/passwd 2>/dev/null", user="app").stdout
        child = box.fork(1)[0]
        said["fork"] = child.run("cat ~/mine", user="app").stdout
        child.kill()
    else:
        try:
            box.run("true", user="app").exit_code
        except Exception as error:
            said["refused"] = str(error)
print(json.dumps(said))
"""


def _say(engine: str, home: Path) -> dict[str, object]:
    here = Path(__file__).parent.parent
    env = {**os.environ, "SLOPLET_HOME": str(home), "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    if named := os.environ.get("SLOPLET_TEST_RUNSC"):
        env["SLOPLET_RUNSC"] = named
    done = subprocess.run([sys.executable, "-c", _SCRIPT, engine], capture_output=True, text=True, env=env, timeout=100)
    if "EngineUnavailable" in done.stderr:
        pytest.skip(f"{engine}: {done.stderr.splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_gvisor_gives_the_files_to_whom_they_belong(tmp_path: Path) -> None:
    said = _say("gvisor", tmp_path)
    assert said["kept"] is False
    assert said["recorded"] == {"home/app": [1000, 1001]}
    assert (said["id"], said["stat"], said["etc"]) == ("0", "1000:1001 750", "0:0")
    assert said["wrote"] == "hi\n"
    assert said["fork"] == "hi\n"


def test_the_container_has_one_user_and_all_is_his(tmp_path: Path) -> None:
    said = _say("container", tmp_path)
    assert said["recorded"] == {"home/app": [1000, 1001]}
    assert said["id"] == "1000"
    assert str(said["stat"]).startswith("1000:")
    assert str(said["etc"]).startswith("1000:")
