"""sloplet/base: Debian with what an agent expects of a computer, and a user ``agent`` who may use sudo."""

from __future__ import annotations

from ..build.image import Image

PACKAGES = (
    "python3", "python3-venv", "python3-pip", "nodejs", "npm",
    "git", "openssh-client", "ripgrep", "jq", "curl", "wget", "ca-certificates",
    "build-essential", "pkg-config",
    "bash", "less", "procps", "iproute2", "attr", "openssl", "file", "tree", "unzip", "zip", "xz-utils", "tzdata",
)  # fmt: skip

#: uid 1000, in the group that the sandbox's sudo lets be root. Login shells have another PATH, without that sudo.
AGENT = """set -e
useradd --create-home --uid 1000 --user-group --groups sudo --shell /bin/bash agent
mkdir /workspace
chown agent:agent /workspace
ln -s /run/sloplet/bin/sudo /usr/local/bin/sudo
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid-"""


def image() -> Image:
    return (
        Image.bootstrap("debian:bookworm", packages=PACKAGES)
        .run(AGENT)
        .env(LANG="C.UTF-8", PIP_BREAK_SYSTEM_PACKAGES="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        .label({"org.opencontainers.image.title": "sloplet/base"})
        .user("agent")
        .workdir("/workspace")
        .cmd("/bin/bash")
    )
