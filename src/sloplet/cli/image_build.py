"""``sloplet image build``: an image from a Dockerfile."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .buildlog import BuildLog
from .image_standard import build_standard, is_standard
from .netoptions import policy, rule_options
from .options import Verb, json_option, limit_options, whole_number
from .output import EXIT_INTERRUPTED, note, print_json, size
from .stores import place

if TYPE_CHECKING:
    from ..build.dockerfile import Dockerfile
    from ..build.executor import BuildOptions
    from ..images.store import StoredImage
    from ..remote.place import Place

_LIMITS = ("cpus", "memory", "disk", "pids", "open_files")


@click.command(
    "build",
    cls=Verb,
    examples="""
    sloplet image build -t app .
    sloplet image build -t app:dev --target dev --build-arg VERSION=3 --allow @package-indexes .
    sloplet image build -f docker/Dockerfile --memory 4g --disk 20g --network policy.toml .
    sloplet image build sloplet/code
    sloplet image build --secret id=token,env=TOKEN -t app --output app.tar .
    """,
)
@click.argument("path", metavar="[PATH]", default=".", type=click.Path())
@click.option("-f", "--file", "file", metavar="FILE", help="The Dockerfile, - for stdin. [default: PATH/Dockerfile]")
@click.option("-t", "--tag", "tags", multiple=True, metavar="NAME", help="What the image is called; may be repeated.")
@click.option("--build-arg", "build_args", multiple=True, metavar="K=V", help="Value of an ARG; K alone takes yours.")
@click.option("--target", metavar="STAGE", help="Build this stage, and what it needs. [default: the last]")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label of the image.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="id=ID,src=FILE",
    help="For RUN --mount=type=secret; or id=ID,env=NAME.",
)
@click.option(
    "--network", metavar="POLICY", help="What steps may reach: none, learn, or a policy's FILE. [default: none]"
)
@rule_options
@limit_options
@click.option("--engine", default="auto", metavar="NAME", help="What steps run on. [default: container, if it can]")
@click.option("--at-least", metavar="RUNG", help="Refuse anything weaker for steps: container, gvisor, ...")
@click.option("--no-cache", is_flag=True, help="Do every step, whatever was built before.")
@click.option("--pull", is_flag=True, help="Ask registries for newer images of the same name.")
@click.option("--platform", metavar="OS/ARCH", help="For another kind of machine, where no step runs anything.")
@click.option("--output", metavar="PATH", help="Also write it as an OCI layout; an archive if it ends with .tar.")
@click.option("-q", "--quiet", is_flag=True, help="No log; print the id alone.")
@click.option("--plain", "plain_log", is_flag=True, help="The log as plain lines, on a terminal too.")
@json_option
def command(path: str, **options: Any) -> None:
    """Build an image from a Dockerfile. PATH is the folder that COPY takes files from; or sloplet/base or sloplet/code,
    recipes that came with sloplet.

    Every step runs in a sandbox of its own, without a network unless --allow or --network gives it one, and is not done
    again as long as nothing has changed that it depends on.
    """
    began = time.monotonic()
    log = BuildLog(quiet=options["quiet"] or options["as_json"], live=False if options["plain_log"] else None)
    try:
        if is_standard(path) and place() is not None:
            raise SpecError(
                f"{path} is built on the server's own machine, by its operator", hint="then every key can use it"
            )
        if is_standard(path):
            rung = {"at_least": options["at_least"]} if options["at_least"] else {}
            image = asyncio.run(build_standard(path, options, {**_limits(options), **rung}, log))
            options["tags"] = (path, *options["tags"])
        else:
            image = asyncio.run(_build(Path(path), options, log))
    except KeyboardInterrupt:
        note("interrupted. Steps that were done are kept: the same command goes on from there")
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    seconds = time.monotonic() - began
    if options["as_json"]:
        print_json({**image.to_dict(), "steps": log.events, "seconds": round(seconds, 3)})
    elif options["quiet"]:
        click.echo(image.id)
    else:
        names = ", ".join(options["tags"]) or "without a name"
        click.echo(f"{image.short} ({names}): {len(image.layers)} layers, {size(image.size)}, in {seconds:.1f} s")


async def _build(folder: Path, options: dict[str, Any], log: BuildLog) -> StoredImage:
    from ..build.dockerfile import parse
    from ..build.executor import Builder, BuildOptions, parse_tags
    from ..build.image import read_recipe, source_date_epoch
    from ..build.running import RunSettings
    from ..state.home import Home

    if not folder.is_dir():
        raise SpecError(
            f"{folder} is not a folder", hint="PATH is the folder that COPY takes files from; -f names a file"
        )
    piped = options["file"] == "-"
    file = Path(options["file"]) if options["file"] and not piped else folder / "Dockerfile"
    given = BuildOptions(
        tags=parse_tags(options["tags"]), build_args=_pairs("--build-arg", options["build_args"], ours=True),
        target=options["target"], settings=RunSettings(
            _network(options), _limits(options), options["engine"], options["allow_weaker"], options["at_least"]
        ),
        labels=_pairs("--label", options["labels"]), secrets=dict(map(_secret, options["secrets"])),
        no_cache=options["no_cache"], pull=options["pull"], platform=options["platform"], epoch=source_date_epoch(),
    )  # fmt: skip
    recipe = parse(read_recipe(Path("/dev/stdin") if piped else file), file.name)
    if (there := place()) is not None:
        return await _build_there(there, recipe, given, folder, file, options["output"], log)
    builder = Builder(recipe, given, home=Home(), context=folder, dockerfile_path=file, on_event=log)
    with log:
        image = await builder.build()
    if options["output"]:
        from ..images.export import export_image

        reference = given.tags[0] if given.tags else None
        await asyncio.to_thread(export_image, image, builder.store, options["output"], reference=reference)
        builder.store.close()
    return image


async def _build_there(
    there: Place, recipe: Dockerfile, given: BuildOptions, folder: Path, file: Path, output: str | None, log: BuildLog
) -> StoredImage:
    from ..remote.building import build
    from ..remote.images import RemoteImages

    remote = RemoteImages(there)
    with log:
        image = await build(remote, recipe, given, log, context=folder, dockerfile_path=file)
    if output:
        await remote.export(str(given.tags[0]) if given.tags else image.id, output)
    return image


def _network(options: dict[str, Any]) -> Any:
    given = bool(options["allow"] or options["deny"])
    if options["network"] == "none" and given:
        raise SpecError("--network none and --allow", hint="leave one of them")
    if options["network"] in (None, "none") and not given:
        return "none"
    return policy({"network": options["network"], "allow": options["allow"], "deny": options["deny"]})


def _limits(options: dict[str, Any]) -> dict[str, Any]:
    found = {name: options[name] for name in _LIMITS if options[name] is not None}
    for name in ("pids", "open_files"):
        if name in found:
            found[name] = whole_number(name.replace("_", "-"), found[name])
    return found


def _pairs(flag: str, texts: tuple[str, ...], *, ours: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or (not separator and not ours):
            raise SpecError(f"{flag} {text[:80]!r} is no pair", hint=f"write {flag} NAME=VALUE")
        if separator:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
        else:
            raise SpecError(f"{flag} {name[:80]}: there is no such variable here", hint=f"write {flag} NAME=VALUE")
    return found


def _secret(text: str) -> tuple[str, bytes]:
    """What is wrong is not repeated: it may be a value."""
    options = dict(part.partition("=")[::2] for part in text.split(","))
    name = options.get("id", "")
    if not name or set(options) - {"id", "src", "source", "env", "type"}:
        raise SpecError("--secret says not what it is", hint="write id=ID,src=FILE or id=ID,env=NAME")
    if "env" in options:
        if options["env"] not in os.environ:
            raise SpecError(f"--secret {name}: there is no variable of that name here")
        return name, os.environ[options["env"]].encode("utf-8", "surrogateescape")
    try:
        return name, Path(options.get("src") or options.get("source") or name).read_bytes()
    except OSError as error:
        raise SpecError(f"--secret {name} cannot be read: {error.strerror}") from None
