"""``sloplet completion``: the script that teaches a shell our verbs, options and sandbox names."""

from __future__ import annotations

import click

from .options import Verb

_HOW = {
    "bash": 'eval "$(sloplet completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(sloplet completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "sloplet completion fish > ~/.config/fish/completions/sloplet.fish",
}


@click.command("completion", cls=Verb, examples="\n".join(_HOW.values()))
@click.argument("shell", type=click.Choice(sorted(_HOW)))
def completion(shell: str) -> None:
    """Print the completion script for a shell."""
    from click.shell_completion import get_completion_class

    from .main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "sloplet", "_SLOPLET_COMPLETE")
    # Not source(): it starts bash to look at its version, which may not even be installed here.
    click.echo(script.source_template % script.source_vars())
