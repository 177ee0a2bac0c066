"""``sloplet cp``: files and folders between this machine and a sandbox."""

from __future__ import annotations

import asyncio

import click

from ..errors import SpecError
from ..s3.settings import S3
from ..s3.url import is_s3
from ..spec import NAME_RE
from .options import Verb, sandbox_names


@click.command(
    "cp",
    cls=Verb,
    examples="""
    sloplet cp app.py dev:
    sloplet cp ./project dev:/workspace/
    sloplet cp dev:/workspace/result.json .
    sloplet cp dev:build/. ./out
    echo hello | sloplet cp - dev:greeting.txt
    sloplet cp dev:greeting.txt - | wc -c
    sloplet cp dev:/workspace/out s3://bucket/results
    sloplet cp --endpoint-url http://127.0.0.1:9000 s3://bucket/data/ dev:/workspace/
    """,
)
@click.argument("source", metavar="SRC", shell_complete=sandbox_names)
@click.argument("target", metavar="DST", shell_complete=sandbox_names)
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@click.option("--endpoint-url", metavar="URL", help="The S3 server, where it is not Amazon's (or AWS_ENDPOINT_URL).")
@click.option("--profile", metavar="NAME", help="The profile of ~/.aws to use for S3 (or AWS_PROFILE).")
@click.option("--no-sign-request", is_flag=True, help="Use S3 without credentials: for public buckets.")
def cp(
    source: str, target: str, quiet: bool, endpoint_url: str | None, profile: str | None, no_sign_request: bool
) -> int:
    """Copy files or folders into or out of a sandbox. One side is NAME:PATH, the other a path here, - for stdin or
    stdout, or s3://BUCKET/KEY.

    As with `cp -r`: into a folder that exists (or ends with /) under its own name, else it becomes DST. FOLDER/. means
    its content. Relative paths in the sandbox begin at its working directory. In S3 only what ends with / is a folder,
    and a bucket is one. Its credentials are those of this machine; they never enter the sandbox.
    """
    from_box, to_box = in_sandbox(source), in_sandbox(target)
    if (from_box is None) == (to_box is None):
        raise SpecError(
            "one of SRC and DST must be in a sandbox, the other on this machine or in S3",
            hint="write NAME:PATH for the sandbox; ./a:b for a file here with a colon",
        )
    asked = endpoint_url is not None or profile is not None or no_sign_request
    if asked and not is_s3(source) and not is_s3(target):
        raise SpecError("--endpoint-url, --profile and --no-sign-request are for S3", hint="write s3://BUCKET/KEY")
    s3 = S3(endpoint_url=endpoint_url, profile=profile, anonymous=no_sign_request)
    return asyncio.run(_copy(source, target, quiet, s3))


def in_sandbox(text: str) -> tuple[str, str] | None:
    """(name, path) of NAME:PATH; None for a path of this machine."""
    name, colon, path = text.partition(":")
    if is_s3(text):
        return None
    return (name, path or "./") if colon and NAME_RE.match(name) else None


async def _copy(source: str, target: str, quiet: bool, s3: S3) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_connected(source, target, quiet, s3), signals)


async def _connected(source: str, target: str, quiet: bool, s3: S3) -> int:
    from .copying import Bar, into, out_of
    from .opening import open_box

    bar = None if quiet else Bar()
    try:
        if (there := in_sandbox(target)) is not None:
            await into(await open_box(there[0]), source, there[1], bar, s3 if is_s3(source) else None)
        elif (there := in_sandbox(source)) is not None:
            await out_of(await open_box(there[0]), there[1], target, bar, s3 if is_s3(target) else None)
    finally:
        if bar is not None:
            bar.finish()
    return 0
