"""``sloplet image``: the group; each of its verbs is a file beside this one (``image_VERB.py``), imported to be run."""

from __future__ import annotations

import importlib

import click

from .options import Verb

#: verb -> (module, what the help says)
IMAGE_VERBS = {
    "pull": ("image_pull", "Bring an image here from a registry."),
    "ls": ("image_ls", "List the images that are here."),
    "inspect": ("image_inspect", "Everything known about an image."),
    "build": ("image_build", "Build one from a Dockerfile, or a standard one."),
    "warm": ("image_warm", "A live template of a standard image."),
    "tag": ("image_tag", "Give an image another name."),
    "push": ("image_push", "Send an image to a registry."),
    "import": ("image_import", "Take in an OCI layout, a docker save tar, or a root filesystem."),
    "export": ("image_export", "Write an image as an OCI layout or archive."),
    "rm": ("image_rm", "Remove images."),
    "prune": ("image_prune", "Remove what nothing needs, by age or size."),
}


class _Verbs(Verb, click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(IMAGE_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = {"list": "ls", "remove": "rm"}.get(cmd_name, cmd_name)
        if name not in IMAGE_VERBS:
            return None
        module = importlib.import_module(f".{IMAGE_VERBS[name][0]}", __package__)
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            import difflib

            near = difflib.get_close_matches(args[0], list(IMAGE_VERBS), n=1, cutoff=0.5)
            hint = f"did you mean `sloplet image {near[0]}`?" if near else f"one of {', '.join(IMAGE_VERBS)}"
            raise click.UsageError(f"there is no verb {args[0][:80]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in IMAGE_VERBS.items()])


@click.group(
    "image",
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples="""
    sloplet image pull python:3.12-slim
    sloplet image build -t app .
    sloplet image ls
    sloplet image prune --older-than 7d
    sloplet run --image app
    """,
)
def image() -> None:
    """Images: what sandboxes are made of."""
