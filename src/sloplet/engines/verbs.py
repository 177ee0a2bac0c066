"""How runsc is called in a sandbox's jail. Pure."""

from __future__ import annotations

PLATFORM = "systrap"
#: Inside the jail: runsc itself, the image, what is written, runsc's own state. agent/launch.h has the last two.
PROGRAM, IMAGE, BUNDLE, FILESTORE, STATE, LOG, PID = (
    "/runsc", "/image", "/bundle", "/filestore", "/run/runsc", "/run/log", "/run/pid",
)  # fmt: skip
#: Where our agent lies in the sandbox's own root.
AGENT = "/.sloplet/agent"
CONTAINER = "sandbox"
_FIRST_FD = 10


def _common(egress: bool) -> list[str]:
    """``egress``: gVisor's `lo` has the addresses of the jail's, and the agent may bring what leaves to itself, which
    takes a raw socket. All verbs of a sandbox get the same."""
    network = ["--network=sandbox", "--net-raw"] if egress else ["--network=none"]
    return [
        PROGRAM, f"--root={STATE}", f"--log={LOG}", "--log-format=text", *network, "--ignore-cgroups",
        f"--platform={PLATFORM}", f"--overlay2=root:dir={FILESTORE}",
    ]  # fmt: skip


def _environment() -> list[str]:
    return ["PATH=/", "TMPDIR=/tmp"]


def run_words(*, egress: bool = False) -> list[str]:
    return [*_environment(), *_common(egress), "run", "--detach", f"--pid-file={PID}", f"--bundle={BUNDLE}", CONTAINER]


def restore_words(*, egress: bool = False) -> list[str]:
    """The saved folder is the first descriptor of the message."""
    return [
        *_environment(), *_common(egress), "restore", "--detach", f"--pid-file={PID}", f"--bundle={BUNDLE}",
        f"--image-path=/proc/self/fd/{_FIRST_FD}", CONTAINER,
    ]  # fmt: skip


def checkpoint_words(*, egress: bool = False) -> list[str]:
    """The folder to save to is the first descriptor of the message. Whoever is to end with it is ended afterwards:
    runsc would end it where saving fails, too."""
    return [
        *_environment(), *_common(egress), "checkpoint", "--compression=none", "--leave-running",
        f"--image-path=/proc/self/fd/{_FIRST_FD}", CONTAINER,
    ]  # fmt: skip
