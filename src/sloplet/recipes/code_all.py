"""sloplet/code-all: sloplet/code with the languages that are large: R, Java and Deno."""

from __future__ import annotations

from ..build.image import Image

NEEDS = "sloplet/code"


def image() -> Image:
    return (
        Image("sloplet/code")
        .user("root")
        .apt("r-base-core", "openjdk-17-jdk-headless")
        .pip("deno")
        .label({"org.opencontainers.image.title": "sloplet/code-all"})
        .user("agent")
    )
