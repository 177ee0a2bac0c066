"""Writes the classes of clients/js/src/errors.ts anew, of the tree in sloplet.errors. Run by scripts/openapi."""

from __future__ import annotations

import textwrap
from pathlib import Path

from sloplet import errors

PATH = Path(__file__).parents[1] / "clients" / "js" / "src" / "errors.ts"
BEGIN, END = "// -- made by scripts/openapi: begin\n", "// -- made by scripts/openapi: end\n"
FAILED = """/** `check` and the command did not end with 0. `result` holds what it printed. */
export class CommandFailed extends CommandError {
  result: Result | undefined;
}"""


def tree(cls: type[errors.SlopletError]) -> list[tuple[str, str]]:
    """All below a class, with what each extends, each after that."""
    below = [each for each in cls.__subclasses__() if each.__module__ == errors.__name__]
    return [pair for each in below for pair in ((each.__name__, cls.__name__), *tree(each))]


def made() -> str:
    found = tree(errors.SlopletError)
    classes = [FAILED if name == "CommandFailed" else f"export class {name} extends {of} {{}}" for name, of in found]
    listed = ", ".join(["SlopletError", *(name for name, _ in found)]) + ","
    names = textwrap.fill(listed, 118, initial_indent="  ", subsequent_indent="  ")
    about = "/** The classes by name: errors come from this tree only. */"
    table = "const TREE: Readonly<Record<string, new (message: string, options?: ErrorOptions) => SlopletError>> = {"
    return "\n".join([*classes, "", about, table, names, "};\n"])


if __name__ == "__main__":
    head, _, rest = PATH.read_text().partition(BEGIN)
    PATH.write_text(head + BEGIN + made() + END + rest.partition(END)[2])
