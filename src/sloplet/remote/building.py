"""Building on a server: the recipe and the files that it needs go there, its log comes back as it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..build.context import Folder, read_ignore
from ..build.contexttar import ContextTar
from ..build.dockerfile import Dockerfile
from ..build.events import BuildEvent, OnBuildEvent
from ..build.instructions import Copy
from ..build.recipefile import to_document
from ..build.threads import in_thread
from ..errors import SpecError
from ..images.store import ImageStore, StoredImage
from ..netspec import Network, NetworkSpec, check_network
from .images import RemoteImages, result_of, sent
from .told import lines_of, server_sent

if TYPE_CHECKING:
    from ..build.executor import BuildOptions


async def build(
    images: RemoteImages, recipe: Dockerfile, options: BuildOptions, on_event: OnBuildEvent, *,
    context: Path | None = None, dockerfile_path: Path | None = None,
) -> StoredImage:  # fmt: skip
    """As ``Builder.build`` does it here. RecipeInvalid, BuildFailed; what images, sandboxes and servers raise."""
    paths: list[str] = []
    document = to_document(recipe, paths)
    request = {
        "recipe": document, "build_args": dict(options.build_args), "labels": dict(options.labels),
        "network": _network(options.settings.network),
    }  # fmt: skip
    with ExitStack() as stack:

        def opened(path: Path, dockerfile: Path) -> Folder:
            return stack.enter_context(Folder(path, ignore=read_ignore(path, dockerfile)))

        def open_all() -> ContextTar:
            root = None if context is None else opened(context, dockerfile_path or context / "Dockerfile")
            others = [(opened(Path(each), Path(each, "Dockerfile")), _wanted(recipe, each)) for each in paths]
            return ContextTar(request, root, others, options.secrets)

        tar = await in_thread(open_all)
        async with images._http.stream(
            "POST", "/v1/images/build", params=_query(options), headers={"Content-Type": "application/x-tar"},
            content=sent(tar.pieces()),
        ) as answer:  # fmt: skip
            found = await result_of(server_sent(lines_of(answer)), lambda name, data: on_event(BuildEvent(**data)))
    image = StoredImage.from_dict(found)
    on_event(BuildEvent("done", text=image.id))
    return image


async def bring(images: RemoteImages, image: StoredImage, store: ImageStore) -> str:
    """Have an image of this machine on the server, too; its id."""
    if not await images.has(image.id):
        from ..images.export import archive_pieces

        await images.import_file(archive_pieces(image, store), platform=image.platform)
    await asyncio.to_thread(store.close)
    return image.id


def _wanted(recipe: Dockerfile, folder: str) -> tuple[str, ...]:
    """The names in a folder that steps copy; () for all of it."""
    names: dict[str, None] = {}
    for source in _sources(recipe, folder):
        name = _plain(source)
        if name in ("", "."):
            return ()
        names[name] = None
    return tuple(names)


def _sources(recipe: Dockerfile, folder: str) -> Iterable[str]:
    for stage in recipe.stages:
        for step in stage.steps:
            if isinstance(step, Copy) and step.folder == folder:
                yield from step.sources


def _plain(source: str) -> str:
    """Without the escapes that ``Image.copy`` puts in front of what a Dockerfile would expand."""
    found, letters = "", iter(source)
    for letter in letters:
        found += next(letters, "") if letter == "\\" else letter
    return found


def _network(network: Any) -> Any:
    if isinstance(network, Network) and network.ask is not None:
        raise SpecError("a build whose network asks cannot be done on a server", hint="write rules instead")
    spec: NetworkSpec = check_network(network)
    return None if spec.mode == "none" else spec.to_dict()


def _query(options: BuildOptions) -> dict[str, Any]:
    settings = options.settings
    found: dict[str, Any] = {
        "tag": [str(tag) for tag in options.tags], "epoch": options.epoch, "engine": settings.engine,
        "target": options.target, "platform": options.platform, "at_least": settings.at_least,
        "no_cache": "true" if options.no_cache else None, "pull": "true" if options.pull else None,
        "allow_weaker": "true" if settings.allow_weaker else None, **settings.limits,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}
