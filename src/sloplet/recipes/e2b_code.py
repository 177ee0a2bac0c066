"""sloplet/e2b-code: sloplet/code-all as E2B's code interpreter knows it, which speaks R, Java and Deno, too."""

from __future__ import annotations

from ..build.image import Image
from . import e2b_base
from .code import WARM as WARM

NEEDS = "sloplet/code-all"


def image() -> Image:
    return e2b_base.image(NEEDS, "sloplet/e2b-code")
