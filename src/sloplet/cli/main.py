"""``sloplet``: the entry point. Verbs are imported when they are used, errors end here as one line.

Each verb is a small file beside this one, a thin client of the library: whatever it can do, Python code can do too.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import Any, NoReturn

gc.set_threshold(50_000)  # importing makes many objects and no garbage: collecting meanwhile costs a tenth of `run`

import click  # noqa: E402

from .. import __version__  # noqa: E402
from ..errors import CommandNotFound, SandboxPaused, SlopletError  # noqa: E402
from .output import EXIT_INTERRUPTED, EXIT_OURS, EXIT_PIPE, complain, exit_code_of, report_error  # noqa: E402

#: verb -> (module, what `sloplet --help` says), in the order of the help.
VERBS = {
    "run": ("run", "Run a command in a fresh sandbox that is gone afterwards."),
    "shell": ("shell", "A terminal in a sandbox: a named one, or a fresh one."),
    "create": ("create", "Make a named sandbox that stays."),
    "exec": ("exec", "Run a command in a named sandbox."),
    "code": ("code", "Run code where its variables stay: Python, Node, shell."),
    "ls": ("ls", "List sandboxes."),
    "rm": ("rm", "End sandboxes and remove all they had."),
    "pause": ("pausing", "Write sandboxes to disk and free all they use."),
    "resume": ("pausing", "Let paused sandboxes go on where they were."),
    "ttl": ("ttl", "How long a sandbox has to live from now on."),
    "snapshot": ("snapshot", "Save the state of a sandbox, which runs on."),
    "snapshots": ("snapshots", "The tree of snapshots; inspect and delete them."),
    "fork": ("fork", "Running copies of a sandbox."),
    "rollback": ("back", "Take a sandbox back to a snapshot."),
    "undo": ("back", "Take a sandbox back to before its last command."),
    "diff": ("diff", "What a sandbox has made of its files."),
    "apply": ("apply", "Bring chosen changes of a sandbox to this machine."),
    "template": ("template", "States that new sandboxes start from, warm."),
    "export": ("archive", "Write a sandbox to one file."),
    "import": ("archive", "Start a sandbox from such a file."),
    "image": ("image", "Images: pull, build, list, push and remove them."),
    "volume": ("volume", "Data that outlives sandboxes."),
    "net": ("net", "What sandboxes may reach, and what they have reached."),
    "secret": ("secret", "Values that a sandbox uses and never sees."),
    "url": ("url", "The URL of a server inside."),
    "forward": ("forward", "Ports of a sandbox at this machine, until Ctrl-C."),
    "ps": ("ps", "List the commands of a sandbox."),
    "logs": ("logs", "What a command of a sandbox printed."),
    "attach": ("attach", "Join a running command of a sandbox."),
    "cp": ("cp", "Copy files into or out of a sandbox."),
    "info": ("info", "Everything known about a sandbox."),
    "guarantees": ("guarantees", "What is enforced, and how."),
    "top": ("top", "Live use of CPU, memory, processes and disk."),
    "serve": ("serve", "This machine as a sandbox server: HTTP, WebSocket, MCP."),
    "audit": ("audit", "Who asked the server for what, and what came of it."),
    "backup": ("backup", "Copy a server's records while it runs."),
    "key": ("key", "Keys of the server: who may use it, and how much."),
    "mcp": ("mcp", "A sandbox for a model, over stdin and stdout."),
    "gc": ("gc", "Clean up after programs that died."),
    "doctor": ("doctor", "What this machine can do, what is missing, and the fix."),
    "setup": ("setup", "Install what stronger isolation needs."),
    "bench": ("bench", "Measure sandboxes on this machine."),
    "completion": ("completion", "Shell completion for bash, zsh and fish."),
    "version": ("version", "The version of Sloplet."),
}
ALIASES = {"inspect": "info", "list": "ls", "kill": "rm"}


class LazyGroup(click.Group):
    """A group that knows its verbs by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in VERBS:
            return None
        import importlib

        command: click.Command = getattr(importlib.import_module(f".{VERBS[name][0]}", __package__), _attribute(name))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None:
            import difflib

            near = difflib.get_close_matches(name, [*VERBS, *ALIASES], n=1, cutoff=0.5)
            hint = f"did you mean `sloplet {near[0]}`?" if near else "`sloplet --help` lists them"
            raise click.UsageError(f"there is no verb {name[:80]!r}: {hint}", ctx)
        return ALIASES.get(name, name), command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in ("sloplet run -- python3 -c 'print(6*7)'", "sloplet shell", "sloplet create dev --memory 1g",
                         "sloplet exec dev -- make test", "sloplet snapshot dev base", "sloplet fork dev 10",
                         "sloplet doctor"):  # fmt: skip
                formatter.write(f"  {line}\n")


def _attribute(name: str) -> str:
    return {"exec": "exec_", "setup": "setup_", "import": "import_"}.get(name, name)


#: About this machine, whatever server is meant otherwise.
LOCAL = frozenset({
    "serve", "key", "audit", "backup", "gc", "doctor", "setup", "bench", "completion", "version",
})  # fmt: skip


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--server", metavar="URL", help="Sandboxes of this server instead of this machine's. [env: SLOPLET_URL]")
@click.option("--key", metavar="KEY", help="The key to it; better in the environment. [env: SLOPLET_KEY]")
@click.option("--ca", metavar="FILE", help="The certificate authority to trust for it. [env: SLOPLET_CA]")
@click.version_option(__version__, "-V", "--version", message="sloplet %(version)s")
@click.pass_context
def cli(ctx: click.Context, server: str | None, key: str | None, ca: str | None) -> None:
    """Disposable computers for code that nobody has read.

    Everything but a command's own output goes to stderr. Exit codes: the command's (128+n if signal n ended it);
    124 timed out; 125 Sloplet itself failed; 126 not executable; 127 not found.
    """
    _choose_server(ctx.invoked_subcommand, server, key, ca)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _choose_server(verb: str | None, server: str | None, key: str | None, ca: str | None) -> None:
    """By the environment: so all that a verb does is done there, as by any program that has these variables."""
    if verb in LOCAL:
        if server:
            from ..errors import SpecError

            raise SpecError(f"`sloplet {verb}` is about the machine it runs on", hint="run it there, without --server")
        url = os.environ.pop("SLOPLET_URL", "")
        # Whoever runs a server here has its URL in the environment, too: its keys, audit log and backup are meant.
        if url and (verb in ("gc", "doctor", "setup") or (verb in ("key", "audit", "backup") and not _loopback(url))):
            complain(f"sloplet: `{verb}` is about this machine, not about the server in SLOPLET_URL\n")
        return
    for name, value in (("SLOPLET_URL", server), ("SLOPLET_KEY", key), ("SLOPLET_CA", ca)):
        if value is not None:
            os.environ[name] = value


def _loopback(url: str) -> bool:
    host = url.partition("://")[2].rsplit("@", 1)[-1]
    return host.startswith(("127.", "localhost", "[::1]"))


def main(argv: list[str] | None = None) -> NoReturn:
    """What the ``sloplet`` command runs. Always exits."""
    _ensure_standard_fds()
    code = invoke(sys.argv[1:] if argv is None else argv)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or EXIT_PIPE
    # All that must happen at exit has happened; freeing every object one by one would take another 20 ms.
    os._exit(code)


def invoke(words: list[str]) -> int:
    """Run a verb; the exit code. Every error becomes one line here (SLOPLET_DEBUG=1: its traceback too)."""
    as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    try:
        outcome: Any = cli.main(words, prog_name="sloplet", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        _debug()
        report_error(_usage_error(error), as_json)
        return EXIT_OURS
    except SlopletError as error:
        _debug()
        if isinstance(error, CommandNotFound):
            error.hint = "is it installed in the image? Shell text goes behind -c"
        elif isinstance(error, SandboxPaused):
            error.hint = "`sloplet ps` lists what is in it, `sloplet attach` wakes it and follows a command again"
        report_error(error, as_json)
        return exit_code_of(error)
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_PIPE
    except OSError as error:
        _debug()
        what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        report_error(SlopletError(f"the system refused something: {what}"), as_json)
        return EXIT_OURS
    except Exception as error:
        _debug()
        what = f"unexpected {type(error).__name__}: {error}"
        hint = "this is a bug, or the machine is in trouble; SLOPLET_DEBUG=1 shows where"
        report_error(SlopletError(what, hint=hint), as_json)
        return EXIT_OURS


def _usage_error(error: click.ClickException) -> SlopletError:
    from ..errors import SpecError

    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "sloplet"
    text = error.format_message().rstrip(".")
    return SpecError(text[:1].lower() + text[1:], hint=f"see `{path} --help`")


def _debug() -> None:
    if os.environ.get("SLOPLET_DEBUG", "0") not in ("", "0"):
        import traceback

        complain(traceback.format_exc())


def _ensure_standard_fds() -> None:
    """Started with fd 0, 1 or 2 closed? Fill it with /dev/null, or the next file we open would become our stdout."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:  # pragma: no cover - the lowest free number is fd, by POSIX
                os.dup2(opened, fd)
                os.close(opened)
    # Python has no object for an fd that was closed when it started.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
