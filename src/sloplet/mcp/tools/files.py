"""read_file, write_file, edit_file, list_files. Moving and removing are `run`'s."""

from __future__ import annotations

import base64
import binascii
import difflib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Literal

import mcp_types as types
from pydantic import BaseModel, Field

from ...errors import FileError, FileIsDirectory, SpecError
from ...results import FileInfo
from ..bounded import clean, shorten
from ..boxes import Held
from ..call import Answer, BoxArguments, Call, Path, Toolbox
from ..uris import file_uri
from .running import MAX_IMAGE

MAX_WRITE = 8 * 2**20
MAX_EDIT = 4 * 2**20
MAX_BLOB = 2**20
MAX_ENTRIES = 500
_WHOLE = 8 * 2**20  # bytes of a file that is read as a whole, so that its lines can be counted
_LOOK = 8192  # bytes that tell what a file is
_DIFF_LINES = 60

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


class ReadArguments(BoxArguments):
    path: Path
    offset: Annotated[int, Field(ge=1, description="The first line to read, counted from 1.")] = 1
    lines: Annotated[int, Field(ge=1, le=100_000, description="How many lines at most.")] = 2000
    blob: Annotated[bool, Field(description="Of a binary file: its bytes, not only what it is. At most 1 MiB.")] = False


async def read_file(call: Call, arguments: ReadArguments) -> Answer:
    """Read a file of the sandbox: text by lines, images (PNG, JPEG, GIF, WebP) as images."""
    held = await call.box(arguments.sandbox)
    files, path = held.box.files, arguments.path
    info = await files.stat(path)
    if info.is_dir:
        raise FileIsDirectory(f"{path} is a folder", hint="list_files tells what is in it")
    if not info.is_file:
        raise FileError(f"{path} is no ordinary file", hint="read it with run, if it can be read at all")
    head = await files.read(path, length=_LOOK, max_bytes=_LOOK)
    kind = image_type(head)
    if kind is not None:
        return await _image(held, path, kind, info)
    if is_binary(head):
        return await _binary(held, arguments, info)
    return Answer(await _lines(held, arguments, info, call.policy.max_output))


def image_type(head: bytes) -> str | None:
    """By its first bytes: a name can say anything."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for magic, mime in _MAGIC if head.startswith(magic)), None)


def is_binary(head: bytes) -> bool:
    """Whether these first bytes are no UTF-8 text. The last character may be cut."""
    if b"\0" in head:
        return True
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return not (len(head) == _LOOK and error.start > len(head) - 4 and "unexpected end" in error.reason)
    return False


async def _image(held: Held, path: str, kind: str, info: FileInfo) -> Answer:
    if info.size > MAX_IMAGE:
        raise FileError(
            f"{path} is an image of {info.size:,} bytes, too large to be shown", hint="make a smaller copy of it first"
        )
    data = base64.b64encode(await held.box.files.read(path, max_bytes=MAX_IMAGE)).decode()
    return Answer(f"[{path}: {kind}, {info.size:,} bytes]", blocks=[types.ImageContent(data=data, mime_type=kind)])


async def _binary(held: Held, arguments: ReadArguments, info: FileInfo) -> Answer:
    uri, text = file_uri(held.id, arguments.path, held.box.workdir), f"[{arguments.path}: {info.size:,} bytes, no text]"
    if not arguments.blob:
        link = types.ResourceLink(uri=uri, name=clean(info.name), size=info.size, mime_type="application/octet-stream")
        return Answer(f"{text}\nHint: look at it with run (file, xxd, strings), or ask for blob=true.", blocks=[link])
    if info.size > MAX_BLOB:
        raise FileError(f"{arguments.path} has {info.size:,} bytes", hint=f"at most {MAX_BLOB:,} come as a blob")
    raw = await held.box.files.read(arguments.path, max_bytes=MAX_BLOB)
    contents = types.BlobResourceContents(
        uri=uri, mime_type="application/octet-stream", blob=base64.b64encode(raw).decode()
    )
    return Answer(text, blocks=[types.EmbeddedResource(resource=contents)])


async def _lines(held: Held, arguments: ReadArguments, info: FileInfo, most: int) -> str:
    """The lines that were asked for, as far as they fit; a note says where to go on."""
    first, last = arguments.offset, arguments.offset + arguments.lines - 1
    kept: list[str] = []
    number, size, full = 0, 0, False
    counted = info.size <= _WHOLE  # all of it is read, so that the note can tell how many lines there are
    lines = split_lines(held.box.files.stream(arguments.path), most)
    try:
        async for line in lines:
            number += 1
            if first <= number <= last and not full:
                full = bool(kept) and size + len(line) > most
                if not full:
                    kept.append(line)
                    size += len(line)
            if not counted and (full or number > last):
                break
        else:
            counted = True
    finally:
        await lines.aclose()
    if not kept:
        return f"[{arguments.path} has {number} lines: none from {first} on]" if number else "[the file is empty]"
    shown = first + len(kept) - 1
    if shown < number or not counted:
        total = str(number) if counted else f"more ({info.size:,} bytes in all)"
        newline = "" if kept[-1].endswith("\n") else "\n"
        kept.append(f"{newline}[lines {first} to {shown} of {total}; go on with offset={shown + 1}]")
    return "".join(kept)


async def split_lines(pieces: AsyncIterator[bytes], most: int) -> AsyncGenerator[str, None]:
    """Lines with their ends, each of at most ``most`` bytes: of a longer one the rest is counted, and told."""
    line, dropped = b"", 0

    def text(end: str) -> str:
        note = f" [... {dropped:,} bytes of this line left out ...]" if dropped else ""
        return line.decode("utf-8", "replace") + note + end

    async for piece in pieces:
        parts = piece.split(b"\n")
        for index, part in enumerate(parts):
            room = most - len(line)
            line += part[:room]
            dropped += max(0, len(part) - room)
            if index < len(parts) - 1:
                yield text("\n")
                line, dropped = b"", 0
    if line:
        yield text("")


class WriteArguments(BoxArguments):
    path: Path
    content: Annotated[str, Field(max_length=MAX_WRITE * 2)]
    encoding: Annotated[Literal["utf-8", "base64"], Field(description="base64: content is bytes, so encoded.")] = (
        "utf-8"
    )
    append: Annotated[bool, Field(description="Add to its end, do not replace it.")] = False
    executable: bool = False


class WriteOutput(BaseModel):
    path: str
    bytes: int
    created: bool


async def write_file(call: Call, arguments: WriteArguments) -> Answer:
    """Write a file of the sandbox, with the folders above it; an existing one is replaced as a whole. To change a part
    of a file, edit_file is better."""
    raw = _content(arguments)
    held = await call.box(arguments.sandbox)
    async with held.editing:
        there = await held.box.files.exists(arguments.path)
        mode = None
        if arguments.executable:
            mode = ((await held.box.files.stat(arguments.path)).mode | 0o111) & 0o7777 if there else 0o755
        await held.box.files.write(arguments.path, raw, append=arguments.append, mode=mode)
        if mode is not None and there:
            await held.box.files.chmod(arguments.path, mode)
    data = WriteOutput(path=arguments.path, bytes=len(raw), created=not there)
    did = "appended to" if arguments.append and there else "replaced" if there else "created"
    return Answer(f"{did} {arguments.path} ({len(raw):,} bytes)", data)


def _content(arguments: WriteArguments) -> bytes:
    if arguments.encoding == "utf-8":
        raw = clean(arguments.content).encode()
    else:
        try:
            raw = base64.b64decode(arguments.content, validate=True)
        except (binascii.Error, ValueError):
            raise SpecError("write_file: content is not base64") from None
    if len(raw) > MAX_WRITE:
        raise SpecError(f"write_file takes at most {MAX_WRITE:,} bytes", hint="write it in parts with append=true")
    return raw


class EditArguments(BoxArguments):
    path: Path
    old: Annotated[
        str, Field(min_length=1, max_length=MAX_EDIT, description="The exact text to replace, with its white space.")
    ]
    new: Annotated[str, Field(max_length=MAX_EDIT, description="What stands there afterwards.")]
    all: Annotated[bool, Field(description="Replace every occurrence; else there must be exactly one.")] = False


class EditOutput(BaseModel):
    path: str
    replaced: int
    diff: str


async def edit_file(call: Call, arguments: EditArguments) -> Answer:
    """Replace an exact piece of text in a file of the sandbox. It must be there exactly once, unless all=true."""
    held = await call.box(arguments.sandbox)
    files, path = held.box.files, arguments.path
    async with held.editing:
        info = await files.stat(path)
        if info.is_dir:
            raise FileIsDirectory(f"{path} is a folder")
        if info.size > MAX_EDIT:
            raise FileError(
                f"{path} has {info.size:,} bytes, too many to be edited like this", hint="use run, with sed"
            )
        try:
            before = (await files.read(path, max_bytes=MAX_EDIT)).decode()
        except UnicodeDecodeError:
            raise FileError(f"{path} is not UTF-8 text", hint="use run_code to change its bytes") from None
        count = _count(before, arguments)
        after = before.replace(arguments.old, clean(arguments.new))
        if len(after) > 4 * MAX_EDIT:
            raise FileError(f"{path} would become larger than can be edited like this")
        await files.write(path, after, mode=info.mode & 0o7777)
    shown = _diff(path, before, after)
    data = EditOutput(path=path, replaced=count, diff=shown)
    return Answer(f"replaced {count} in {path}\n{shown}", data)


def _count(text: str, arguments: EditArguments) -> int:
    count = text.count(arguments.old)
    if count == 0:
        near = _nearest(text, arguments.old)
        raise FileError(
            f"the text is not in {arguments.path}",
            hint="it must be the same to the last space; read the file again" + (f". Similar: {near}" if near else ""),
        )
    if count > 1 and not arguments.all:
        where, lines = -1, []
        for _ in range(min(count, 5)):
            where = text.find(arguments.old, where + 1)
            lines.append(str(text.count("\n", 0, where) + 1))
        raise FileError(
            f"the text is {count} times in {arguments.path} (lines {', '.join(lines)}{', ...' if count > 5 else ''})",
            hint="give more of what is around it, or all=true",
        )
    return count


def _nearest(text: str, old: str) -> str:
    """The line that looks most like the first of what was to be replaced, with its number."""
    first = next((line for line in old.splitlines() if line.strip()), "")[:200]
    lines = text.splitlines()[:5000]
    found = difflib.get_close_matches(first, [line[:200] for line in lines], n=1, cutoff=0.8)
    if not found:
        return ""
    number = next(index for index, line in enumerate(lines, 1) if line[:200] == found[0])
    return f"line {number} is {found[0]!r}"


def _diff(path: str, before: str, after: str) -> str:
    if len(before) > 500_000 or len(after) > 500_000:
        return ""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, lineterm="", n=2))
    more = [f"[... {len(lines) - _DIFF_LINES} more lines of the diff ...]"] if len(lines) > _DIFF_LINES else []
    return shorten("\n".join([*lines[:_DIFF_LINES], *more]), 6000)


class ListArguments(BoxArguments):
    path: Path = "."
    depth: Annotated[int, Field(ge=1, le=20, description="How many levels of folders.")] = 1


class Entry(BaseModel):
    name: str = Field(description="Relative to the path that was listed")
    type: str
    size: int
    target: str | None = None


class ListOutput(BaseModel):
    path: str
    entries: list[Entry]
    left_out: int = 0


async def list_files(call: Call, arguments: ListArguments) -> Answer:
    """What a folder of the sandbox holds, with sizes; depth= for folders in it, too."""
    held = await call.box(arguments.sandbox)
    found = await held.box.files.list(arguments.path, recursive=arguments.depth > 1, depth=_depth(arguments.depth))
    entries, size = [], 0
    for info in found[:MAX_ENTRIES]:
        size += len(info.name) + 20
        if size > call.policy.max_output:
            break
        entries.append(Entry(name=clean(info.name), type=info.type, size=info.size, target=_clean(info.target)))
    missing = len(found) - len(entries)
    data = ListOutput(path=arguments.path, entries=entries, left_out=missing)
    lines = [_entry(entry) for entry in entries] or [f"[{arguments.path} is empty]"]
    if missing:
        lines.append(f"[... {missing:,} more; list the folders one by one ...]")
    return Answer("\n".join(lines), data)


def _depth(depth: int) -> int | None:
    return depth if depth > 1 else None


def _clean(text: str | None) -> str | None:
    return None if text is None else clean(text)


def _entry(entry: Entry) -> str:
    if entry.type == "dir":
        return f"{entry.name}/"
    if entry.type == "symlink":
        return f"{entry.name} -> {entry.target}"
    return f"{entry.name} ({entry.size:,})" if entry.type == "file" else f"{entry.name} [{entry.type}]"


def add_to(tools: Toolbox) -> None:
    tools.add("read_file", "Read a file", ReadArguments, reads=True)(read_file)
    tools.add("write_file", "Write a file", WriteArguments, WriteOutput, destroys=True)(write_file)
    tools.add("edit_file", "Edit a file", EditArguments, EditOutput, destroys=True)(edit_file)
    tools.add("list_files", "List files", ListArguments, ListOutput, reads=True)(list_files)
