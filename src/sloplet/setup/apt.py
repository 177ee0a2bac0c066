"""Single packages out of Debian's archive, with apt's own signature check, without touching the system's apt.

All of apt's state (lists, cache, locks) is in a folder of our own that goes afterwards; packages are unpacked,
never installed. The mirror is the one this machine is configured for. Works as any user.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SlopletError

KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
    "/etc/apt/trusted.gpg.d/debian-archive-keyring.gpg",
)
Say = Callable[[str], None]


class AptFailed(SlopletError):
    """apt or dpkg could not do it; the message holds its words."""


def debian_mirrors(sources: str) -> list[str]:
    """The mirrors of Debian's own archive in apt's sources (both formats), without its security one."""
    found = re.findall(r"\b(?:https?|file)://[^\s\]]+", "\n".join(_active_lines(sources)))
    mirrors = [uri.rstrip("/") for uri in found if uri.rstrip("/").endswith("/debian")]
    return list(dict.fromkeys(mirrors))


def _active_lines(sources: str) -> list[str]:
    return [line for line in sources.splitlines() if not line.lstrip().startswith("#")]


def configured_sources() -> str:
    """The text of apt's sources on this machine."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    texts = []
    for file in files:
        try:
            if file.suffix in (".list", ".sources"):
                texts.append(file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)


def keyring() -> str | None:
    """Debian's archive keys, as the distribution installed them."""
    return next((path for path in KEYRINGS if os.access(path, os.R_OK)), None)


def configuration(folder: Path, architecture: str) -> str:
    """The apt.conf that keeps everything in ``folder``. Proxies and the like still come from the system's."""
    return "\n".join(
        [
            f'Dir::Etc::sourcelist "{folder}/sources.list";',
            'Dir::Etc::sourceparts "-";',
            'Dir::Etc::preferences "-";',
            'Dir::Etc::preferencesparts "-";',
            f'Dir::State "{folder}/state";',
            f'Dir::State::status "{folder}/status";',
            f'Dir::Cache "{folder}/cache";',
            f'APT::Architecture "{architecture}";',
            f'APT::Architectures {{ "{architecture}"; }};',
            'APT::Get::AllowUnauthenticated "false";',
            'Acquire::AllowInsecureRepositories "false";',
            'Acquire::Check-Valid-Until "true";',
            'Acquire::Languages "none";',
            # The system's hooks (cleaners, notifiers) are about the system's state, not ours.
            "#clear APT::Update::Pre-Invoke;",
            "#clear APT::Update::Post-Invoke;",
            "#clear APT::Update::Post-Invoke-Success;",
            "#clear DPkg::Pre-Install-Pkgs;",
            "",
        ]
    )


class PrivateApt:
    """apt with a state of its own, for one suite of one mirror."""

    def __init__(self, folder: Path, mirror: str, suite: str, keys: str, architecture: str, say: Say) -> None:
        self.folder = folder
        self._say = say
        for part in ("state/lists/partial", "cache/archives/partial", "packages"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "apt.conf").write_text(configuration(folder, architecture))
        (folder / "sources.list").write_text(f"deb [signed-by={keys} arch={architecture}] {mirror} {suite} main\n")

    def update(self) -> None:
        self._apt("apt-get", "update", "--error-on=any")

    def depends(self, package: str) -> list[str]:
        """The packages that one depends on directly."""
        text = self._apt("apt-cache", "depends", package)
        return re.findall(r"^\s*\|?Depends: (\S+)$", text, re.MULTILINE)

    def unpack(self, package: str) -> Path:
        """Download a package (verified against the signed index) and unpack it; the folder of its files."""
        self._apt("apt-get", "download", package, cwd=self.folder / "packages")
        archives = list((self.folder / "packages").glob(f"{package}_*.deb"))
        if not archives:
            raise AptFailed(f"apt downloaded no {package}")
        target = self.folder / "unpacked" / package
        target.mkdir(parents=True)
        _checked(["dpkg-deb", "--extract", str(archives[0]), str(target)], None)
        self._say(f"unpacked {archives[0].name}")
        return target

    def _apt(self, program: str, *words: str, cwd: Path | None = None) -> str:
        self._say(f"{program} {' '.join(words)} (in a private folder)")
        return _checked([program, "-c", str(self.folder / "apt.conf"), "-q", *words], cwd)


def _checked(command: list[str], cwd: Path | None) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=900,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise AptFailed(f"cannot run {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise AptFailed(f"{command[0]} took longer than 15 minutes") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line[:2] in ("E:", "W:")]
        words = " ".join(lines[:4]) or done.stderr.strip()[-400:] or f"exit code {done.returncode}"
        raise AptFailed(f"{command[0]} failed: {words}")
    return done.stdout


@contextmanager
def private_apt(suite: str, architecture: str, say: Say) -> Iterator[PrivateApt]:
    """A PrivateApt for a Debian suite from the first of this machine's mirrors that has it. AptFailed if none does."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise AptFailed("this system has no apt")
    keys = keyring()
    if keys is None:
        raise AptFailed("Debian's archive keys are not installed", hint="install debian-archive-keyring")
    mirrors = debian_mirrors(configured_sources())
    if not mirrors:
        raise AptFailed("apt on this machine knows no mirror of Debian")
    # Not in SLOPLET_HOME: apt downloads as a user of its own (_apt), who has to get in.
    with tempfile.TemporaryDirectory(prefix="sloplet-apt-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # noqa: S103
        failure: AptFailed | None = None
        for number, mirror in enumerate(mirrors):
            apt = PrivateApt(Path(folder, str(number)), mirror, suite, keys, architecture, say)
            try:
                apt.update()
            except AptFailed as error:
                failure = error
                continue
            yield apt
            return
        assert failure is not None
        raise failure
