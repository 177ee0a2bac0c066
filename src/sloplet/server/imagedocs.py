"""Images, builds and volumes as the HTTP API has them: what is asked for, and what is answered."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..images.store import StoredImage
from ..volumes.records import VolumeInfo
from .asked import Duration, Size
from .documents import Document, Request

Reference = Annotated[str, Field(min_length=1, max_length=1000, examples=["debian:12", "ghcr.io/owner/app:1.2"])]
PlatformName = Annotated[str, Field(min_length=1, max_length=80, examples=["linux/arm64"])]
VolumeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


# -- images --------------------------------------------------------------------------------------------------------


class LayerDocument(Document):
    mediaType: str
    digest: str
    size: int
    diff_id: str = Field(description="The digest of what is in it, unpacked")


class ConfigDocument(Document):
    """What an image says of how it wants to be run."""

    env: dict[str, str]
    user: str
    workdir: str
    entrypoint: list[str]
    cmd: list[str]
    volumes: list[str]
    ports: list[str]
    stop_signal: str
    labels: dict[str, str]
    created: str
    author: str


class DiskDocument(Document):
    blobs: int = Field(description="Bytes, packed")
    unpacked: int


class ImageDocument(Document):
    """An image that is here."""

    id: str = Field(examples=["sha256:..."])
    manifest: str
    references: list[str] = Field(description="Its names, in full")
    size: int
    created_at: float
    used_at: float
    platform: str
    layers: list[LayerDocument]
    config: ConfigDocument

    @classmethod
    def of(cls, image: StoredImage) -> ImageDocument:
        return cls.model_validate(image.to_dict())


class ImageDetails(ImageDocument):
    disk: DiskDocument


class RegistryAsked(Request):
    """With a name and a password for the registry: they count for this request alone, and are kept nowhere."""

    username: str | None = Field(default=None, min_length=1, max_length=1000)
    password: str | None = Field(default=None, max_length=65536, repr=False)
    insecure: bool = Field(default=False, description="Plain HTTP, to a registry on the server's own machine")


class PullAsked(RegistryAsked):
    reference: Reference
    platform: PlatformName | None = None
    if_missing: bool = Field(default=False, description="Ask no registry if it is here, or the operator has it")


class PushAsked(RegistryAsked):
    image: Reference
    reference: Reference | None = Field(default=None, description="What to push it as; by default its own name")


class TagAsked(Request):
    image: Reference
    reference: Reference


class TagDocument(Document):
    id: str
    reference: str


class PruneAsked(Request):
    older_than: Duration | None = Field(default=None, description="Those not used for that long")
    keep: Size | None = Field(default=None, description="The least recently used, until the rest takes that much")
    all: bool = Field(default=False, description="All that nobody uses just now")


class RemovedDocument(Document):
    references: list[str] = Field(description="Names that mean nothing any more")
    image: str | None = Field(description="The id of the image that went; null: it is still here")
    bytes: int
    later: bool


class PrunedDocument(Document):
    images: list[str]
    used: list[str]
    bytes: int
    blobs: int
    layers: int
    trees: int
    later: bool


# -- volumes -------------------------------------------------------------------------------------------------------


class VolumeCreate(Request):
    name: VolumeName
    size: Size | None = Field(default=None, description="The most that it holds; needs a server that runs as root")


class SnapshotAsked(Request):
    name: VolumeName


class CloneAsked(Request):
    name: VolumeName = Field(description="Of the new volume")
    snapshot: VolumeName | None = None


class UseDocument(Document):
    """Who has a volume."""

    sandbox: str
    name: str | None
    mode: str
    shared: bool
    since: float


class VolumeSnapshot(Document):
    name: str
    created_at: float
    size: int | None
    source: str
    used: int | None


class VolumeDocument(Document):
    name: str
    created_at: float
    size: int | None = Field(description="The most that it holds; null: as much as the disk")
    source: str = Field(description="What it is a copy of")
    used: int | None = Field(description="Bytes on the disk; null: not looked at")
    users: list[UseDocument]
    snapshots: list[VolumeSnapshot]

    @classmethod
    def of(cls, info: VolumeInfo) -> VolumeDocument:
        return cls.model_validate(info.to_dict())
