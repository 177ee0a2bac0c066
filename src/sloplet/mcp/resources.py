"""Resources: the files of a session's sandboxes, and what its processes printed. Looking never makes a sandbox."""

from __future__ import annotations

import base64

import mcp_types as types

from ..errors import FileError, FileIsDirectory, SandboxNotFound, SlopletError, SpecError
from . import uris
from .bounded import clean, one_line
from .boxes import Boxes, Held
from .output import printed
from .tools.files import image_type, is_binary

MAX_READ = 8 * 2**20
_MAX_FILES = 100  # of each sandbox, in a list
_MAX_PROCESSES = 50
_LOOK = 8192

TEMPLATES = [
    types.ResourceTemplate(
        name="file",
        title="A file of a sandbox",
        uri_template=uris.FILES,
        description="SANDBOX is a name or id of list_sandboxes (main: the session's own), PATH begins at its root.",
    ),
    types.ResourceTemplate(
        name="output",
        title="What a process printed",
        uri_template=uris.OUTPUT,
        description="The last that is kept of its stdout and stderr; PID is that of start_process.",
        mime_type="text/plain",
    ),
]


async def listed(boxes: Boxes) -> list[types.Resource]:
    """Files in the working directories, and processes' output. A sandbox that cannot be asked has none."""
    found: list[types.Resource] = []
    for held in boxes.all():
        try:
            found += [*await _files(held), *await _outputs(held)]
        except SlopletError:
            continue
    return found


async def _files(held: Held) -> list[types.Resource]:
    files = [info for info in await held.box.files.list(held.box.workdir) if info.is_file]
    return [
        types.Resource(
            uri=uris.file_uri(held.id, info.name, held.box.workdir),
            name=clean(info.name),
            description=f"in {held.name}",
            size=info.size,
        )
        for info in files[:_MAX_FILES]
    ]


async def _outputs(held: Held) -> list[types.Resource]:
    return [
        types.Resource(
            uri=uris.output_uri(held.id, info.pid),
            name=f"output of process {info.pid}",
            description=one_line(f"in {held.name}: {' '.join(info.command)}"),
            mime_type="text/plain",
        )
        for info in (await held.box.processes())[-_MAX_PROCESSES:]
    ]


async def read(boxes: Boxes, uri: str) -> types.TextResourceContents | types.BlobResourceContents:
    """What is at an address. SpecError for one that means nothing, SandboxNotFound, FileError, ProcessNotFound."""
    place = uris.parse(uri)
    if place is None:
        raise SpecError(f"{uri[:200]!r} is not an address here", hint=f"{uris.FILES} or {uris.OUTPUT}")
    held = boxes.find(place.sandbox)
    if held is None:
        raise SandboxNotFound(f"this session has no sandbox {place.sandbox!r}")
    if isinstance(place, uris.OutputOf):
        found = await printed(held.box, place.pid)
        text = found.stdout + (f"\n[stderr]\n{found.stderr}" if found.stderr else "")
        return types.TextResourceContents(uri=uri, mime_type="text/plain", text=clean(text))
    return await _file(held, place.path, uri)


async def _file(held: Held, path: str, uri: str) -> types.TextResourceContents | types.BlobResourceContents:
    info = await held.box.files.stat(path)
    if info.is_dir:
        raise FileIsDirectory(f"{path} is a folder")
    if not info.is_file:
        raise FileError(f"{path} is no ordinary file")
    raw = await held.box.files.read(path, length=MAX_READ + 1, max_bytes=MAX_READ + 1)
    if len(raw) > MAX_READ:
        raise FileError(f"{path} is larger than {MAX_READ:,} bytes", hint="read_file reads parts of it")
    kind = image_type(raw[:_LOOK])
    if kind is None and not is_binary(raw[:_LOOK]):
        try:
            return types.TextResourceContents(uri=uri, mime_type="text/plain", text=raw.decode())
        except UnicodeDecodeError:
            pass
    return types.BlobResourceContents(
        uri=uri, mime_type=kind or "application/octet-stream", blob=base64.b64encode(raw).decode()
    )
