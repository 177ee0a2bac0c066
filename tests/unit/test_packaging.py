"""The wheel carries the agent, static, executable and tagged for its architecture; the sdist can be built from."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).resolve().parents[2]
AGENT = "sloplet/bin/sloplet-agent"


@pytest.fixture(scope="module")
def compiler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_agent", ROOT / "scripts" / "compile_agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not module.candidates():
        pytest.skip("no C compiler here")
    return module


@pytest.fixture(scope="module")
def built(compiler: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_wheel_carries_the_agent(wheel: Path, compiler: ModuleType, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(AGENT)
        archive.extract(info, tmp_path)
        names = archive.namelist()
    assert (info.external_attr >> 16) & 0o777 == 0o755
    assert compiler.is_static(tmp_path / AGENT)
    assert {"sloplet/py.typed", "sloplet/network/presets.toml"} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".o", ".pyc")) or name.startswith(("tests/", "agent/"))]


def test_wheel_is_tagged_for_its_architecture_and_every_libc(wheel: Path, compiler: ModuleType) -> None:
    arch = compiler.machine()
    platforms = f"manylinux2014_{arch}.manylinux_2_17_{arch}.musllinux_1_1_{arch}"
    assert wheel.name.endswith(f"-py3-none-{platforms}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        said = archive.read(name).decode()
    assert "Root-Is-Purelib: false" in said


def test_sdist_holds_what_the_build_needs_and_nothing_built(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"agent/Makefile", "agent/main.c", "scripts/hatch_build.py", "scripts/compile_agent.py"} <= names
    assert not [name for name in names if name.startswith(("agent/build/", "src/sloplet/bin/"))]


def test_installed_without_a_compiler_it_runs(wheel: Path, tmp_path: Path) -> None:
    """A clean environment, nothing of the source tree, and no compiler on PATH."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / AGENT).chmod(0o755)  # as every installer does from the archive's attributes
    code = (
        "from sloplet import Sandbox\n"
        "from sloplet.errors import EngineUnavailable\n"
        "try:\n"
        "    with Sandbox() as box: print(box.run('echo $((6 * 7))').stdout.strip())\n"
        "except EngineUnavailable as error: print('unavailable:', error)\n"
    )
    done = subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={"PATH": "/nowhere", "HOME": str(tmp_path), "SLOPLET_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "42\n" or done.stdout.startswith("unavailable:")


def test_a_compiler_that_fails_is_named_with_its_words(compiler: ModuleType, tmp_path: Path) -> None:
    bad = tmp_path / "badcc"
    bad.write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 1\n")
    bad.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compile_agent.py"), str(tmp_path / "out")],
        capture_output=True, text=True, env={"CC": str(bad), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode != 0
    for words in ("badcc", "no such luck", "musl-tools", "ziglang"):
        assert words in done.stderr
    assert list(tmp_path.iterdir()) == [bad]


def test_cc_is_the_only_candidate_when_given(compiler: ModuleType) -> None:
    assert compiler.candidates({"CC": "my cc --flag"}) == [["my", "cc", "--flag"]]
    assert [] not in compiler.candidates({})
