"""What was asked for of cloud-init: the text of a file, and the digest that it is known by once it has been applied."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import SpecError

MAX_TEXT = 256 * 1024


def too_long() -> SpecError:
    return SpecError(
        f"the cloud-init file is longer than {MAX_TEXT} bytes", hint="put large files into an image or a volume"
    )


@dataclass(frozen=True)
class CloudInitSpec:
    """A cloud-config. It is applied once, when the sandbox is made; then only the digest is kept, to tell whoever
    opens the sandbox by its name with another file."""

    digest: str  #: sha256:HEX of the text
    text: str = field(default="", compare=False, repr=False)

    @staticmethod
    def of(text: str) -> CloudInitSpec:
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > MAX_TEXT:
            raise too_long()
        return CloudInitSpec("sha256:" + hashlib.sha256(data).hexdigest(), text)

    def recorded(self) -> CloudInitSpec:
        return replace(self, text="")

    def to_dict(self) -> dict[str, Any]:
        return {"digest": self.digest, "text": self.text} if self.text else {"digest": self.digest}


def cloud_init_from(data: Any) -> CloudInitSpec | None:
    return None if data is None else CloudInitSpec(str(data["digest"]), str(data.get("text", "")))
