"""``sloplet key ssh-add``, ``ssh-ls``, ``ssh-rm``: whose SSH keys stand for a key of the server."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ..errors import EngineUnavailable, SpecError
from .keyring import key_names, open_keys, tell
from .options import Verb, json_option
from .output import age, print_json, print_table

if TYPE_CHECKING:
    from ..server.keys import Key
    from ..server.ssh.keys import SshKeys

_MAX_FILE = 65536


def _open() -> SshKeys:
    from ..server.ssh.keys import SshKeys
    from ..state.home import Home

    return SshKeys(Home().open())


def _valid(name: str) -> Key:
    """A key that is valid now, by its name or id. SpecError."""
    keys = open_keys()
    try:
        for key in keys.list():
            if name.casefold() in (key.name.casefold(), key.id) and keys.current(key.id) is not None:
                return key
    finally:
        keys.close()
    raise SpecError(f"there is no key {name[:80]!r} that is valid", hint="see `sloplet key ls`")


@click.command(
    "ssh-add",
    cls=Verb,
    examples="""
    sloplet key ssh-add ci ~/.ssh/id_ed25519.pub
    ssh-add -L | head -1 | sloplet key ssh-add ci -
    """,
)
@click.argument("key", metavar="KEY", shell_complete=key_names)
@click.argument("file", metavar="FILE", type=click.Path(allow_dash=True, dir_okay=False))
@click.option("--name", help="What to call it. [default: the comment in the file]")
@json_option
def ssh_add(key: str, file: str, name: str | None, as_json: bool) -> None:
    """Let the holder of an SSH key in, as the key KEY of the server. FILE is the public half (`-`: stdin)."""
    owner = _valid(key)
    try:
        if file == "-":
            text = sys.stdin.read(_MAX_FILE)
        else:
            with open(os.path.expanduser(file), encoding="utf-8", errors="replace") as opened:
                text = opened.read(_MAX_FILE)
    except OSError as error:
        raise SpecError(f"{file} cannot be read: {error.strerror}") from error
    keys = _open()
    try:
        made = keys.add(owner.id, text, name)
    except ImportError as error:
        raise EngineUnavailable(
            f"SSH needs a package that is not here: {error.name}", hint="pip install 'sloplet[server]'"
        ) from None
    finally:
        keys.close()
    tell("ssh_keys.add", owner)
    if as_json:
        print_json({**made.to_dict(), "key_name": owner.name})
    else:
        click.echo(f"{made.fingerprint} {made.name}")


@click.command("ssh-ls", cls=Verb, examples="sloplet key ssh-ls\nsloplet key ssh-ls ci --json")
@click.argument("key", metavar="[KEY]", required=False, shell_complete=key_names)
@json_option
def ssh_ls(key: str | None, as_json: bool) -> None:
    """List SSH keys, of one key of the server or of all."""
    id = None if key is None else _valid(key).id
    server_keys = open_keys()
    names = {each.id: each.name for each in server_keys.list()}
    server_keys.close()
    keys = _open()
    found = keys.list(id)
    keys.close()
    if as_json:
        print_json([{**each.to_dict(), "key_name": names.get(each.key, "")} for each in found])
    elif found:
        rows = [(names.get(each.key, each.key), each.name, each.fingerprint, age(each.created_at)) for each in found]
        print_table(("KEY", "NAME", "FINGERPRINT", "AGE"), rows)
    else:
        click.echo("no SSH keys (`sloplet key ssh-add KEY FILE.pub` adds one)", err=True)


@click.command("ssh-rm", cls=Verb, examples="sloplet key ssh-rm SHA256:...\nsloplet key ssh-rm you@laptop")
@click.argument("keys", metavar="FINGERPRINT...", nargs=-1, required=True)
@json_option
def ssh_rm(keys: tuple[str, ...], as_json: bool) -> None:
    """Let holders of SSH keys in no more, by fingerprint or name. Their connections end within seconds."""
    there = _open()
    try:
        gone = [there.remove(each) for each in keys]
    finally:
        there.close()
    if as_json:
        print_json({"removed": [each.fingerprint for each in gone]})
        return
    for each in gone:
        click.echo(each.fingerprint)
