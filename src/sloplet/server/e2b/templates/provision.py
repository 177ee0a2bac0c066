"""Any image as E2B's programs know a computer: a user ``user`` who may use sudo, bash, and what is asked of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....build.dockerfile import Dockerfile, Stage
from ....build.image import literal
from ....build.instructions import From, Instruction, Run, Text
from ....build.lines import Line

USER, HOME = "user", "/home/user"

#: By the image's own shell, which may be any. What cannot be installed is done without, but for bash.
_PROVISION = r"""set -e
missing=
want() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
want bash bash
want curl curl
want git git
want ss iproute2
want pgrep procps
certificates=
for each in /etc/ssl/certs/ca-certificates.crt /etc/ssl/cert.pem /etc/pki/tls/certs/ca-bundle.crt; do
  [ -e "$each" ] && certificates=1
done
[ -n "$certificates" ] || missing="$missing ca-certificates"
if [ -n "$missing" ]; then
  echo "installing$missing"
  if command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt="apt-get -o APT::Sandbox::User=root -o Acquire::Retries=0 -q"
    { $apt update && $apt install -y --no-install-recommends $missing; } || true
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/log/apt /var/log/dpkg.log
  elif command -v apk >/dev/null 2>&1; then
    apk add --no-cache $missing || true
  elif command -v dnf >/dev/null 2>&1; then
    dnf -y install $(echo "$missing" | sed s/procps/procps-ng/) && dnf clean all || true
  fi
fi
if ! command -v bash >/dev/null 2>&1; then
  echo "the image has no bash, and none could be installed" >&2
  exit 1
fi
[ -e /bin/bash ] || ln -s "$(command -v bash)" /bin/bash
touch /etc/passwd /etc/group
taken() { grep -q "^[^:]*:[^:]*:$1:" /etc/passwd /etc/group; }
if ! grep -q '^user:' /etc/passwd; then
  id=1000
  while taken "$id"; do id=$((id + 1)); done
  echo "user:x:$id:$id::/home/user:/bin/bash" >>/etc/passwd
  grep -q '^user:' /etc/group || echo "user:x:$id:" >>/etc/group
  [ ! -e /etc/shadow ] || echo 'user:!:19000:0:99999:7:::' >>/etc/shadow
  mkdir -p /home/user
  if [ -d /etc/skel ]; then cp -R /etc/skel/. /home/user/; fi
  chown -R "$id:$id" /home/user
fi
if ! grep -q '^sudo:' /etc/group; then
  id=27
  while taken "$id"; do id=$((id + 1)); done
  echo "sudo:x:$id:user" >>/etc/group
elif ! grep -Eq '^sudo:.*[:,]user(,|$)' /etc/group; then
  sed -i -e 's/^\(sudo:.*:\)$/\1user/' -e t -e 's/^\(sudo:.*\)$/\1,user/' /etc/group
fi
mkdir -p /usr/local/bin /code
ln -sfn /run/sloplet/bin/sudo /usr/local/bin/sudo
chmod 777 /code
find /usr/local -type d -exec chmod a+rwx {} + || chmod -R a+rwX /usr/local"""


def recipe(image: str, options: Mapping[str, Any]) -> Dockerfile:
    """``options``: more for what runs something, as of a template's own steps. Pure."""

    def line(number: int, keyword: str, shown: str) -> Line:
        return Line(number, keyword, shown, name="template")

    steps: list[Instruction] = [
        Text(line(1, "USER", "root"), "0"),
        Text(line(1, "WORKDIR", "/"), "/"),
        Run(line(1, "RUN", "provision"), argv=("/bin/sh", "-c", _PROVISION), **options),
        Text(line(1, "USER", USER), USER),
        Text(line(1, "WORKDIR", HOME), HOME),
    ]
    return built_from(image, steps)


def built_from(image: str, steps: list[Instruction]) -> Dockerfile:
    first = From(Line(0, "FROM", image, name="template"), literal(image))
    return Dockerfile([Stage(0, first, steps)], name="template")
