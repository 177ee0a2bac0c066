"""sloplet/e2b-base: sloplet/base as E2B's programs know a computer: the user is ``user``, at home in /home/user."""

from __future__ import annotations

from ..build.image import Image

NEEDS = "sloplet/base"

#: The same uid 1000 by another name: who may use sudo stays who may.
USER = """set -e
usermod --login user --home /home/user --move-home agent
groupmod --new-name user agent
rmdir /workspace
ln -sf python3 /usr/bin/python
mkdir -p /code
chown user:user /code
chmod 777 /code
find /usr/local -type d -exec chmod a+rwx {} +
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid-"""


def image(below: str = NEEDS, title: str = "sloplet/e2b-base") -> Image:
    return (
        Image(below)
        .user("root")
        .workdir("/")
        .run(USER)
        .label({"org.opencontainers.image.title": title})
        .user("user")
        .workdir("/home/user")
    )
