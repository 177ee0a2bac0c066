"""Options that several verbs share, and how they become arguments of the library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from ..errors import SpecError

F = TypeVar("F", bound=Callable[..., Any])

#: Options end at the first word of the command, so `sloplet run ls -la` needs no `--`.
COMMAND_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


class Verb(click.Command):
    """A click command whose help ends with examples, printed as they are written."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(f"  {line.strip()}\n" if line.strip() else "\n")


class CountVerb(Verb):
    """A verb with a number among its words: ``-1`` is a wrong number, not an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        numbers = [word for word in args if word[:1] == "-" and word[1:].isdecimal()]
        if numbers and "--" not in args:
            args = [*(word for word in args if word not in numbers), "--", *numbers]
        return super().parse_args(ctx, args)


class NamedCommandVerb(Verb):
    """``NAME [OPTIONS] [--] COMMAND...``: options may stand on both sides of NAME, and end where the command begins."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, words = self._split(ctx, args)
        if words and "--" not in before:
            after, command = self._split(ctx, words[1:])
            options = after[:-1] if after[-1:] == ["--"] else after
            args = [*before, *options, "--", words[0], *command]
        return super().parse_args(ctx, args)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """The options in front (with the ``--`` that ends them, if any), and the words from the first that is none."""
        found, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        name, command = found.get("name"), found.get("command")
        rest = command if isinstance(command, (tuple, list)) else ()  # click has a mark of its own for "not given"
        words = [name, *rest] if isinstance(name, str) else []
        return args[: len(args) - len(words)], words


def stacked(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several option decorators as one, in help order."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

env_options = stacked(
    click.option("-e", "--env", "env", multiple=True, metavar="K=V", help="Set a variable; K alone takes yours."),
    click.option("--env-file", "env_files", multiple=True, metavar="FILE", help="Lines of K=V; # begins a comment."),
)

limit_options = stacked(
    click.option("--cpus", metavar="N", help="CPU time per wall time, for example 0.5 or 2. [default: 1]"),
    click.option("--memory", metavar="SIZE", help="Memory, for example 256m or 2g. [default: 512m]"),
    click.option("--disk", metavar="SIZE", help="What it may write. [default: 1g]"),
    click.option("--pids", metavar="N", help="Processes and threads. [default: 512]"),
    click.option("--open-files", "open_files", metavar="N", help="Open files per process. [default: 1024]"),
    click.option("--allow-weaker", is_flag=True, help="Start even if a limit named here cannot be enforced."),
)

spec_options = stacked(
    click.option(
        "--image",
        default="host",
        show_default=True,
        metavar="IMAGE",
        shell_complete=lambda *args: image_names(*args),
        help="host, a reference (python:3.12-slim), a rootfs folder or a tar.",
    ),
    click.option("--engine", default="auto", show_default=True, metavar="NAME", help="See `sloplet doctor`."),
    click.option(
        "--at-least", "at_least", metavar="RUNG", help="Refuse anything weaker: process, container, gvisor, ..."
    ),
    limit_options,
    env_options,
    click.option("-w", "--workdir", metavar="PATH", help="Where commands begin. [default: the image's, or /workspace]"),
    click.option("-u", "--user", metavar="USER", help="A name or uid[:gid]. [default: the image's, or agent]"),
    click.option("--sudo/--no-sudo", "sudo", default=None, help="Whether root has powers, and sudo works, inside."),
    click.option(
        "--cloud-init", "cloud_init", metavar="FILE", help="Set it up by this #cloud-config before it is used."
    ),
)

volume_option = click.option(
    "-v",
    "--volume",
    "volumes",
    multiple=True,
    metavar="SRC:DST[:HOW]",
    help="A named volume or a folder (with a / or .) at DST; HOW: ro, rw, copy, shared. See `sloplet volume`.",
)

label_option = click.option(
    "--label", "labels", multiple=True, metavar="K=V", help="A label to find it by (`sloplet ls --label`); repeatable."
)

template_option = click.option(
    "--template",
    metavar="TEMPLATE",
    shell_complete=lambda *args: template_names(*args),
    help="Start from this saved state; see `sloplet template`.",
)

disk_option = click.option("--disk", "files_only", is_flag=True, help="Only the files; what runs in it is not saved.")

#: Of sandboxes that the keeper holds.
life_options = stacked(
    click.option("--ttl", metavar="TIME", help="End it after that long, for example 90s, 5m or 8h."),
    click.option("--on-ttl", "on_ttl", metavar="HOW",
                 help="Then: end (the default), pause it, or pause-disk (its files only)."),
    click.option("--idle", metavar="TIME", help="Pause it when it has done nothing for that long; use wakes it."),
    click.option("--undo", metavar="N", help="Keep a checkpoint from before each of the last N commands."),
    click.option("--checkpoint-every", "checkpoint_every", metavar="TIME",
                 help="Save it that often, to go on from if it dies."),
    click.option("--pool", metavar="N", help="Keep N more ready, so that the next one starts at once."),
)  # fmt: skip

SPEC_KEYS = ("image", "engine", "at_least", "cpus", "memory", "disk", "pids", "open_files", "workdir", "user", "sudo",
             "cloud_init", "allow_weaker", "template", "pool", "ttl", "on_ttl", "idle", "undo",
             "checkpoint_every")  # fmt: skip
_WHOLE = ("pids", "open_files", "pool", "undo")


def sandbox_arguments(options: dict[str, Any], ask: Any = True) -> dict[str, Any]:
    """The keyword arguments of ``AsyncSandbox`` from parsed options of these; they are validated there. ``ask``: whom
    to ask about connections (True: nobody yet)."""
    arguments = {key: options[key] for key in SPEC_KEYS if options.get(key) is not None}
    for key in _WHOLE:
        if key in arguments:
            arguments[key] = whole_number(key.replace("_", "-"), arguments[key])
    arguments["env"] = environment(options.get("env", ()), options.get("env_files", ()))
    if options.get("labels"):
        from ..labels import parse_labels

        arguments["labels"] = parse_labels(options["labels"])
    if options.get("volumes"):
        arguments["volumes"] = volumes(options["volumes"])
    if "allow" in options:
        from .netoptions import network_arguments

        arguments.update(network_arguments(options, ask))
    return arguments


def volumes(texts: Iterable[str]) -> dict[str, Any]:
    """``-v`` given any number of times."""
    from ..volumespec import parse_volume

    found: dict[str, Any] = {}
    for text in texts:
        path, wanted = parse_volume(text)
        if path in found:
            raise SpecError(f"-v {text[:80]}: there is a volume at {path} already", hint="give each a path of its own")
        found[path] = wanted
    return found


def whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"--{name} {text[:80]!r} is not a whole number", hint="for example 256") from None


def environment(pairs: Iterable[str], files: Iterable[str]) -> dict[str, str]:
    """Files first, then options: the last word counts. A bare name takes this process's value, if it has one."""
    found: dict[str, str] = {}
    for path in files:
        for line in _lines(path):
            _put(found, line, path)
    for pair in pairs:
        _put(found, pair, "--env")
    return found


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except UnicodeDecodeError:
        raise SpecError(f"--env-file {path} is not UTF-8 text") from None
    except OSError as error:
        raise SpecError(f"--env-file {path}: {error.strerror}", hint="name a file that can be read") from None
    return [line for line in lines if line and not line.startswith("#")]


def _put(found: dict[str, str], pair: str, source: str) -> None:
    name, separator, value = pair.partition("=")
    if not name or name != name.strip():
        raise SpecError(f"{source}: {pair[:80]!r} is not a variable", hint="write NAME=VALUE, or NAME to pass yours on")
    if separator:
        found[name] = value
    elif name in os.environ:
        found[name] = os.environ[name]


def command_line(words: tuple[str, ...], shell_text: str | None) -> list[str]:
    """The argument vector. ``-c TEXT`` is /bin/sh's, with further words as $0, $1, ... as sh has it."""
    if shell_text is not None:
        return ["/bin/sh", "-c", shell_text, *words]
    if not words:
        raise SpecError("there is no command", hint="for example: sloplet run -- python3 -V")
    return list(words)


def split_pair(text: str) -> tuple[str, str]:
    """``SRC[:DST]``; SRC may be ``s3://BUCKET/KEY``, whose first colon splits nothing."""
    scheme = "s3://" if text.startswith("s3://") else ""
    source, _, target = text.removeprefix(scheme).partition(":")
    source = scheme + source if source else ""
    if not source:
        raise SpecError(f"{text[:80]!r} names no source", hint="write SRC or SRC:DST")
    return source, target


def sandbox_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion: a look into the records, never a keeper."""
    from .completing import sandboxes

    return sandboxes(incomplete)


def snapshot_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Those of the sandbox that was named before."""
    from .completing import snapshots

    named = ctx.params.get("name") or next(iter(ctx.args), None)  # click leaves it there behind an option's name
    return snapshots(named, incomplete)


def template_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from .completing import templates

    return templates(incomplete)


def image_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from .completing import images

    return images(incomplete)


def name_argument(required: bool = True, multiple: bool = False) -> Callable[[F], F]:
    return click.argument(
        "names" if multiple else "name",
        metavar="NAME..." if multiple else ("NAME" if required else "[NAME]"),
        required=required,
        nargs=-1 if multiple else 1,
        shell_complete=sandbox_names,
    )
