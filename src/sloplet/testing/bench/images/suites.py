"""The suites of ``sloplet bench --images``."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ....fs import FOLDER, sync_filesystem
from ....images import userns
from ....images.extract import UnpackLimits
from ....sync import Sandbox
from ..clock import interleave
from ..measures import must
from ..memory import MIB, _field
from ..run import Say
from .plan import Bench, add_image, layer_of_host, packed, small_root

OURS, TAR, HOST, IMAGE = "sloplet", "tar", "host", "image"


def unpack(bench: Bench, say: Say) -> None:
    """The same layer by ``tar -x`` and by the store's extractor, plain and packed, in turns."""
    plan = bench.plan
    data = Path(plan.layer).read_bytes() if plan.layer else layer_of_host(plan.files, plan.bytes)
    diff = "sha256:" + hashlib.sha256(data).hexdigest()
    for form, content in (("plain", data), ("gzip", packed(data))):
        source = bench.place / f"layer.{form}"
        source.write_bytes(content)
        mib = len(data) / MIB

        def ours(source: Path = source, mib: float = mib) -> float:
            with tempfile.TemporaryDirectory(dir=bench.place) as made, open(source, "rb") as blob:
                target = os.open(made, FOLDER)
                try:
                    arguments = {"diff_id": diff, "limits": asdict(UnpackLimits())}
                    began = time.perf_counter()
                    userns.run("unpack", arguments, [blob.fileno(), target])
                    took = time.perf_counter() - began
                    userns.remove_in(target, "tree")
                finally:
                    os.close(target)
            return mib / took

        def theirs(source: Path = source, mib: float = mib) -> float:
            with tempfile.TemporaryDirectory(dir=bench.place) as made:
                began = time.perf_counter()
                # an ordinary user's tar complains of devices, and goes on
                done = subprocess.run(["tar", "-xf", str(source), "-C", made], capture_output=True, check=False)
                took = time.perf_counter() - began
                must(bool(os.listdir(made)), f"tar unpacked nothing: {done.stderr.decode()[:200]}")
                subprocess.run(["chmod", "-R", "u+rwX", made], check=True)
            return mib / took

        metric = f"unpack.{form}"
        jobs = {OURS: ours, TAR: theirs}
        interleave(jobs, dict.fromkeys(jobs, plan.rounds), 1, _adder(bench, metric))
        source.unlink()


def tree(bench: Bench, say: Say) -> None:
    """A layer that is there made into an image's tree, and a tree that is there found again."""
    plan = bench.plan
    image = add_image(bench.store, layer_of_host(plan.files, plan.bytes), "bench:tree")
    began = time.perf_counter()
    bench.store.resolve(image).close()
    bench.report.add("tree.first", OURS, time.perf_counter() - began)
    for _ in range(plan.starts):
        began = time.perf_counter()
        bench.store.resolve(bench.store.find("bench:tree")).close()
        bench.report.add("tree.again", OURS, time.perf_counter() - began)
    bench.store.remove("bench:tree")


def start(bench: Bench, say: Say) -> None:
    """``Sandbox(image=ID)`` to its first result, of an image that is here, beside ``image="host"``."""
    with tempfile.TemporaryDirectory(dir=bench.place) as made:
        image = add_image(bench.store, small_root(Path(made), 0), "bench:start")

    def job(name: str) -> Callable[[], float]:
        def once() -> float:
            began = time.perf_counter()
            box = Sandbox(image=name, engine="container")
            try:
                result = box.run(["true"])
                took = time.perf_counter() - began
            finally:
                box.close()
            must(result.exit_code == 0, result.describe())
            return took

        return once

    jobs = {IMAGE: job(image.id), HOST: job("host")}
    interleave(jobs, dict.fromkeys(jobs, bench.plan.starts), 3, _adder(bench, "start.image"))
    ours, host = (bench.report.get("start.image", name) for name in (IMAGE, HOST))
    if ours is not None and host is not None:
        bench.report.add("start.overhead", IMAGE, ours.p50 - host.p50)
    bench.store.remove(image.id)


def share(bench: Bench, say: Say) -> None:
    """Many sandboxes of one image, each of which reads one large file of it."""
    plan = bench.plan
    with tempfile.TemporaryDirectory(dir=bench.place) as made:
        image = add_image(bench.store, small_root(Path(made), plan.shared), "bench:share")
    found = bench.store.resolve(image)
    assert found.path is not None
    large = found.path / "large"
    _out_of_memory(large)
    _out_of_memory(bench.store.blobs.path_of(image.layers[0].digest))
    disk, cached = _disk(bench.store.home.path), _cached()
    with ExitStack() as stack:
        seen = set()
        for _ in range(plan.together):
            box = stack.enter_context(Sandbox(image=image.id, engine="container"))
            result = box.run("/bin/busybox cat /large | /bin/busybox wc -c; /bin/busybox stat -c %i /large")
            must(result.stdout.split()[:1] == [str(plan.shared)], result.describe())
            seen.add(result.stdout.split()[1])
        grown = max(_resident(large), _cached() - cached)  # others may have given back more than this took
        bench.report.add("share.cache", OURS, grown / plan.shared, note=f"{plan.together} sandboxes read it")
        bench.report.add("share.disk", OURS, max(0, _disk(bench.store.home.path) - disk) / MIB / plan.together)
        bench.report.add("share.inodes", OURS, len(seen | {str(large.stat().st_ino)}))
    found.close()
    bench.store.remove(image.id)


def _out_of_memory(path: Path) -> None:
    """Have the kernel forget what it keeps of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_filesystem(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _resident(path: Path) -> int:
    """Bytes of a file that the kernel keeps in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, rights) as area:
        pages = -(-len(area) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))
        must(libc.mincore(start, ctypes.c_size_t(len(area)), found) == 0, "mincore failed")
        count = sum(byte & 1 for byte in found)
        del start
        gc.collect()
        return count * mmap.PAGESIZE


def _cached() -> int:
    """Of files on disks: without what lies in memory only (tmpfs)."""
    return (_field("/proc/meminfo", "Cached:") - _field("/proc/meminfo", "Shmem:")) * 1024


def _disk(folder: Path) -> int:
    """Bytes that a folder takes on disk, each inode once."""
    seen, total = set(), 0
    for base, folders, names in os.walk(folder):
        for name in folders + names:
            try:
                info = os.lstat(os.path.join(base, name))
            except OSError:
                continue
            if info.st_ino not in seen:
                seen.add(info.st_ino)
                total += info.st_blocks * 512
    return total


def _adder(bench: Bench, metric: str) -> Callable[[str, float], None]:
    return lambda name, value: bench.report.add(metric, name, value)


SUITES: dict[str, Callable[[Bench, Say], None]] = {"unpack": unpack, "tree": tree, "start": start, "share": share}
