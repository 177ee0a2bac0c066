"""S-04: nothing that is saved of a sandbox holds a secret's value, nor a key with which its TLS is opened."""

from __future__ import annotations

import os
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hostile_kit import runtime
from live_kit import folder_of_its_own
from net_kit import GOOD, Rung, files_with

from netkit import Internet
from sloplet import Network, Sandbox, Secret

EACH_MAPPING = True
VALUE = "-".join(("value", "canary", f"{os.getpid():x}", "40ab12"))
NAME = "API_KEY"
SEND = f'curl -fsS -m 15 -H "Authorization: Bearer ${NAME}" https://{GOOD}/used'


def private_keys(box: Sandbox) -> list[bytes]:
    """The keys with which TLS is opened for this sandbox, as they would lie in memory or in a file."""
    authority: Any = runtime().networks.find(box.id).inspection.authority
    numbers = [key.private_numbers().private_value for key in (authority._key, authority._leaf_key)]
    return [number.to_bytes(32, "big") for number in numbers]


def test_s04_nothing_that_is_saved_holds_it(rung: Rung, net: Internet) -> None:
    """Snapshots of disk and memory, templates and exports: neither the value nor a private key is in them."""
    with rung.box(network=Network(allow=[GOOD]), secrets={NAME: Secret(VALUE, hosts=[GOOD])}) as box:
        if not (rung.can.live_snapshots or rung.can.disk_snapshots):
            pytest.skip(f"capability: {rung.label} saves nothing")
        marker = f"marker-{box.id}-in-the-clear"
        assert box.run(f"echo {marker} > marker; {SEND} -o answer").ok
        assert net.heard(VALUE), "it was sent"
        live = box.spawn(["python3", "-c", f"import time; x = '{marker}' * 9; print(1, flush=True); time.sleep(1000)"])
        next(iter(live))
        forbidden = [VALUE.encode(), *private_keys(box)]
        snapshot, template = box.snapshot("s04"), box.template(f"t-{box.id}")
        places = [runtime().home.snapshots / each.id for each in (snapshot, template)]
        try:
            with folder_of_its_own() as folder:
                box.export(folder / "box.sloplet")
                assert not any(files_with(folder, *forbidden))
                assert not any(unpacked(folder / "box.sloplet", *forbidden))
                assert all(unpacked(folder / "box.sloplet", marker.encode())), "the positive control"
            assert not any(files_with(runtime().home.path, *forbidden))
            for place in places:
                assert files_with(place, marker.encode())[0], "the positive control"
                assert only_for_its_owner(place)
        finally:
            box.delete_snapshot(template, force=True)


def only_for_its_owner(place: Path) -> bool:
    """It, or a folder above it, lets nobody else in."""
    return any(stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0 for folder in (place, *place.parents))


def unpacked(archive: Path, *wanted: bytes) -> list[bool]:
    """Whether an export has each of some texts: as it is, or in what it is when unpacked."""
    data = archive.read_bytes()
    listing = subprocess.run(["tar", "-xOf", str(archive)], capture_output=True, check=False).stdout or data
    whole = [data, listing]
    at = 0
    while (at := listing.find(b"\x28\xb5\x2f\xfd", at)) >= 0:
        with suppress(zstandard.ZstdError):
            whole.append(zstandard.ZstdDecompressor().decompressobj().decompress(listing[at:]))
        at += 4
    return [any(text in each for each in whole) for text in wanted]
