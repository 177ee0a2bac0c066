"""Verbs with verbs of their own: ``sloplet snapshots rm``, ``sloplet template create``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import click
from click.shell_completion import CompletionItem

from .options import Verb


def _near(word: str, verbs: Iterable[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(word, list(verbs), n=1, cutoff=0.5)


class VerbGroup(Verb, click.Group):
    """Without a verb of its own it does what ``default`` does; with ``takes_words`` also for words that are none."""

    def __init__(self, *args: Any, default: str, takes_words: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, no_args_is_help=False, **kwargs)
        self.default, self.takes_words = default, takes_words

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self._means_default(ctx, args):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _means_default(self, ctx: click.Context, args: list[str]) -> bool:
        if not args:
            return not ctx.resilient_parsing  # a shell completes both: our verbs, and the default's words
        if args[0] in self.commands or args[0] in ctx.help_option_names:
            return False
        if args[0].startswith("-"):
            return True
        return self.takes_words and not (self._is_slip(args) and not ctx.resilient_parsing)

    def _is_slip(self, args: list[str]) -> bool:
        """More words than the default takes, the first of them nearly a verb: that is what was meant."""
        most = sum(isinstance(each, click.Argument) for each in self.commands[self.default].params)
        words = list(takewhile(lambda word: not word.startswith("-"), args))  # behind an option may be its value
        return len(words) > most and bool(_near(args[0], self.commands))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            near = _near(args[0], self.commands)
            hint = f"did you mean `{ctx.command_path} {near[0]}`?" if near else f"one of {', '.join(self.commands)}"
            raise click.UsageError(f"there is no verb {args[0][:80]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(ctx, incomplete)
        if self.takes_words:
            command = self.commands[self.default]
            for parameter in command.params:
                if isinstance(parameter, click.Argument):
                    found += parameter.shell_complete(ctx, incomplete)
        return found
