"""What templates are called: ``[slug/]name[:tag]``, where an id may stand for the name. Pure."""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass

from ..answers import refused

DEFAULT_TAG = "default"
_NAME_RE = re.compile(r"[a-z0-9_-]{1,128}\Z")
_TAG_RE = re.compile(r"[a-z0-9_.-]{1,128}\Z")
_UUID_RE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_LETTERS = string.ascii_lowercase + string.digits
_MOST_TAGS = 100


@dataclass(frozen=True)
class Reference:
    """``slug`` is "" where none was said; ``tag`` is the default one then, and ``said`` False."""

    name: str
    tag: str = DEFAULT_TAG
    slug: str = ""
    said: bool = False


def new_template_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(20))


def parse(text: str) -> Reference:
    """refused (400)."""
    rest, colon, tag = text.strip().lower().partition(":")
    slug, slash, name = rest.rpartition("/")
    if not _NAME_RE.match(name) or (slash and not _NAME_RE.match(slug)):
        raise refused(400, f"Invalid template reference: {text[:200]}")
    if not colon:
        return Reference(name, slug=slug)
    return Reference(name, check_tag(tag, text), slug, True)


def check_tag(tag: str, shown: str = "") -> str:
    """refused (400). A tag that is a UUID would be taken for a build."""
    small = tag.strip().lower()
    if not _TAG_RE.match(small) or _UUID_RE.match(small):
        raise refused(400, f"Invalid template reference: {(shown or tag)[:200]}: '{tag[:80]}' is no tag")
    return small


def bare_tags(tags: list[str]) -> list[str]:
    """Tags as they are listed; ``name:tag`` is as good as ``tag``. Each once. refused (400)."""
    if len(tags) > _MOST_TAGS:
        raise refused(400, f"these are more than {_MOST_TAGS} tags")
    return list(dict.fromkeys(_bare(tag) for tag in tags))


def _bare(tag: str) -> str:
    name, colon, bare = tag.rpartition(":")
    if colon:
        parse(name)
    return check_tag(bare, tag)
