"""``s3://BUCKET/KEY``, and which texts can be keys and paths. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import SpecError

MAX_KEY = 1024
_SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}\Z")


def is_s3(text: object) -> bool:
    """Whether this names something in S3. ``s3:x`` does not: that is a path in a sandbox called s3."""
    return isinstance(text, str) and text.startswith(_SCHEME)


@dataclass(frozen=True)
class S3Url:
    """A bucket, and a key or the beginning of keys in it (empty: all of the bucket)."""

    bucket: str
    key: str

    @staticmethod
    def parse(text: str) -> S3Url:
        bucket, _, key = text[len(_SCHEME) :].partition("/")
        if not is_s3(text) or not _BUCKET.match(bucket) or ".." in bucket:
            raise SpecError(f"{text[:200]!r} does not name a bucket", hint="write s3://BUCKET/KEY")
        why = why_no_key(key)
        if why:
            raise SpecError(f"{text[:200]!r} {why}", hint="write s3://BUCKET/KEY")
        return S3Url(bucket, key)

    @property
    def is_folder(self) -> bool:
        """Whether it is written as one: the bucket itself, or with a slash at its end."""
        return not self.key or self.key.endswith("/")

    @property
    def prefix(self) -> str:
        """What the keys of all that is in this folder begin with."""
        return self.key if self.is_folder else self.key + "/"

    def below(self, name: str) -> S3Url:
        return S3Url(self.bucket, self.prefix + name)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.key}"


def why_no_key(key: str) -> str | None:
    """Why a text cannot be a key, or the beginning of one; None if it can. HTTP clients take ``.`` and ``..`` out of a
    path, and so would write another key, or into another bucket."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "is not text in UTF-8, as keys in S3 are"
    if size > MAX_KEY:
        return f"is longer than {MAX_KEY} bytes, the most a key in S3 can have"
    if "\0" in key:
        return "has a NUL in it"
    if any(part in (".", "..") for part in key.split("/")):
        return "has a part '.' or '..', which keys cannot have"
    return None


def is_path(name: str) -> bool:
    """Whether the rest of a key is a path below a folder, and can be a file's in Linux."""
    if not name or "\0" in name or len(name.encode("utf-8", "surrogatepass")) > 4000:
        return False
    return all(
        part not in ("", ".", "..") and len(part.encode("utf-8", "surrogatepass")) <= 255 for part in name.split("/")
    )
