"""Which commands install packages, by what an image has. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import BuildFailed
from .plan import Packages

#: Prints what ``commands_for`` needs to know.
LOOK = """
for p in apt-get apk dnf microdnf yum; do command -v $p >/dev/null 2>&1 && echo $p; done
test -e /var/lib/dpkg/status && echo dpkg
"""
_APT = ["apt-get", "--option=Dpkg::Options::=--force-confold", "--option=Dpkg::options::=--force-unsafe-io",
        "--assume-yes", "--quiet"]  # fmt: skip
_STRICT = "--option=APT::Update::Error-Mode=any"  # else a list that could not be fetched is a warning


def commands_for(wanted: Packages, found: Collection[str]) -> list[list[str]]:
    """``found``: the package managers that are there, and ``dpkg`` if there is its database."""
    if "apt-get" in found and "dpkg" in found:
        return _steps(wanted, [*_APT, _STRICT, "update"], [*_APT, "dist-upgrade"], [*_APT, "install"], "=")
    if "apk" in found:
        return _steps(wanted, ["apk", "update"], ["apk", "upgrade"], ["apk", "add"], "=")
    for name in ("dnf", "microdnf", "yum"):
        if name in found:
            refresh = [] if name == "microdnf" else [name, "-y", "makecache"]
            return _steps(wanted, refresh, [name, "-y", "upgrade"], [name, "-y", "install"], "-")
    why = "there is apt-get, but no database of packages: is it the host's?" if "apt-get" in found else "there is none"
    raise BuildFailed(
        f"cloud-init, packages, line {wanted.line}: the image has no package manager that can be used: {why}",
        hint="give an image with one: image='debian:12', or Image.bootstrap('debian:bookworm')",
    )


def _steps(
    wanted: Packages, update: list[str], upgrade: list[str], install: list[str], separator: str
) -> list[list[str]]:
    """Lists are always fetched before something is installed, as cloud-init does."""
    steps = [update] if update else []
    if wanted.upgrade:
        steps.append(upgrade)
    if wanted.names:
        steps.append([*install, *(name.replace("=", separator, 1) for name in wanted.names)])
    return steps
