"""``sloplet image build sloplet/base``: a recipe that came with sloplet, in place of a folder with a Dockerfile."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..images.standard import STANDARD

if TYPE_CHECKING:
    from ..images.store import StoredImage
    from .buildlog import BuildLog

#: What says how a Dockerfile is built; a recipe of ours says that itself.
_NOT_TAKEN = ("file", "target", "build_args", "labels", "secrets", "network", "allow", "deny", "platform", "pull")


def is_standard(path: str) -> bool:
    """A folder of that name is meant, if there is one."""
    return path in STANDARD and not os.path.isdir(path)


async def build_standard(name: str, options: dict[str, Any], limits: dict[str, Any], log: BuildLog) -> StoredImage:
    from ..build.executor import parse_tags
    from ..recipes import build

    for option in _NOT_TAKEN:
        if options.get(option):
            flag = {"build_args": "build-arg", "labels": "label", "secrets": "secret"}.get(option, option)
            raise SpecError(
                f"--{flag} is for Dockerfiles: {name} is built by its own recipe", hint=f"build your own FROM {name}"
            )
    parse_tags(options["tags"])
    with log:
        return await build(
            name, options["tags"], no_cache=options["no_cache"], on_event=log, engine=options["engine"], **limits
        )
