"""``sloplet version``."""

from __future__ import annotations

import click

from .. import __version__
from .options import Verb, json_option
from .output import print_json


@click.command("version", cls=Verb, examples="sloplet version\nsloplet version --json")
@json_option
def version(as_json: bool) -> None:
    """The version of Sloplet, of Python and of the kernel."""
    import os
    import platform

    facts = {"sloplet": __version__, "python": platform.python_version(), "kernel": os.uname().release}
    if as_json:
        print_json(facts)
    else:
        click.echo(f"sloplet {__version__} (Python {facts['python']}, Linux {facts['kernel']})")
