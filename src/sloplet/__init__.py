"""Sloplet: a disposable, stateful computer for code that nobody has read.

    from sloplet import Sandbox

    with Sandbox() as box:
        print(box.run("echo hello from $(id -un)").stdout)

Names are imported when first used, so that ``import sloplet`` costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost ten times all the rest
if TYPE_CHECKING:
    from typing import Any

    from .build.image import Image
    from .code.results import CodeContext, CodeFailure, CodeResult, RichResult
    from .controller import Event, SandboxInfo
    from .engines.base import Guarantee
    from .errors import SlopletError
    from .netspec import Network, Secret
    from .process import AsyncProcess
    from .results import FileChange, FileInfo, Metrics, ProcessInfo, Progress, Result
    from .s3.settings import S3
    from .sandbox import AsyncSandbox
    from .sync import Process, Sandbox
    from .volumes.records import VolumeInfo
    from .volumes.store import Volumes
    from .volumespec import Volume

__version__ = "0.1.0"

_WHERE = {
    "Sandbox": "sync",
    "Process": "sync",
    "AsyncSandbox": "sandbox",
    "AsyncProcess": "process",
    "Result": "results",
    "ProcessInfo": "results",
    "FileInfo": "results",
    "FileChange": "results",
    "Metrics": "results",
    "Progress": "results",
    "CodeResult": "code.results",
    "CodeFailure": "code.results",
    "CodeContext": "code.results",
    "RichResult": "code.results",
    "Image": "build.image",
    "SandboxInfo": "controller",
    "Event": "controller",
    "Network": "netspec",
    "Volume": "volumespec",
    "Volumes": "volumes.store",
    "VolumeInfo": "volumes.records",
    "Secret": "netspec",
    "S3": "s3.settings",
    "Guarantee": "engines.base",
    "SlopletError": "errors",
}

__all__ = [
    "S3", "AsyncProcess", "AsyncSandbox", "CodeContext", "CodeFailure", "CodeResult", "Event", "FileChange", "FileInfo",
    "Guarantee", "Image", "Metrics", "Network", "Process", "ProcessInfo", "Progress", "Result", "RichResult", "Sandbox",
    "SandboxInfo", "Secret", "SlopletError", "Volume", "VolumeInfo", "Volumes", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "errors":
        import importlib

        return importlib.import_module(".errors", __name__)
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module("." + _WHERE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
