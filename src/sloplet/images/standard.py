"""The names of the standard images. They are built here (``recipes/``), not pulled: no registry is asked for them."""

from __future__ import annotations

from ..errors import ImageNotFound
from .reference import HUB, Reference

#: name -> module of ``recipes``
STANDARD = {
    "sloplet/base": "base",
    "sloplet/code": "code",
    "sloplet/code-all": "code_all",
    "sloplet/e2b-base": "e2b_base",
    "sloplet/e2b-code": "e2b_code",
}


def refuse_standard(reference: Reference, why: str = "is not built yet") -> None:
    """Before something is pulled, because a name means nothing here or by its name: whoever has our names in a registry
    would have our users' sandboxes. ImageNotFound, with how to build it."""
    if (name := standard_name(reference)) is not None:
        raise ImageNotFound(
            f"the standard image {name} {why}", hint=f"`sloplet image build {name}` builds it here, once"
        )


def standard_name(reference: Reference) -> str | None:
    """The standard image that a reference means, if it means one."""
    if reference.registry != HUB or reference.digest or reference.tag not in (None, "latest"):
        return None
    return reference.repository if reference.repository in STANDARD else None
