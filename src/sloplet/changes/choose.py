"""Which changes ``apply`` brings, and where to: pure, and decided before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..controller import Change
from ..errors import SpecError
from ..images.host import below


@dataclass(frozen=True)
class Chosen:
    """A change and its place: a path relative to the target folder; "" is that folder itself."""

    change: Change
    place: str


def choose(changes: Sequence[Change], paths: Iterable[str]) -> tuple[list[Chosen], list[str]]:
    """What lies at or below the paths, by place; and the paths at which nothing has changed.

    Of a folder, the content goes into the target folder; anything else goes there under its own name. SpecError for
    paths that are not absolute, and where two changes would go to one place.
    """
    wanted = list(dict.fromkeys(_checked(path) for path in paths))
    if not wanted:
        raise SpecError("nothing was chosen to apply", hint="give paths as diff() lists them, or '/' for everything")
    places: dict[str, Chosen] = {}
    idle = []
    for path in wanted:
        here = [change for change in changes if below(change.path, path)]
        if not here:
            idle.append(path)
        for change in here:
            _add(places, Chosen(change, _place(change, path)))
    chosen = [places[place] for place in sorted(places)]
    for one in chosen:
        _refuse_file_above(places, one)
    return chosen, idle


def _add(places: dict[str, Chosen], one: Chosen) -> None:
    if one.place:
        check_place(one.place)
    other = places.setdefault(one.place, one)
    both_folders = other.change.type == one.change.type == "dir" and "removed" not in (
        other.change.kind,
        one.change.kind,
    )
    if other.change.path != one.change.path and not both_folders:
        raise _conflict(other, one)


def _refuse_file_above(places: dict[str, Chosen], one: Chosen) -> None:
    """A place below another one's: fine if that is a folder, or what was there is gone."""
    above = one.place.rpartition("/")[0]
    while above:
        other = places.get(above)
        if other is not None and other.change.type != "dir" and one.change.kind != "removed":
            raise _conflict(other, one)
        above = above.rpartition("/")[0]


def _conflict(one: Chosen, other: Chosen) -> SpecError:
    return SpecError(
        f"{one.change.path!r} and {other.change.path!r} would both go to {one.place!r}",
        hint="apply them one after the other, to different folders",
    )


def _place(change: Change, path: str) -> str:
    if change.path != path:
        return change.path[len(path.rstrip("/")) + 1 :]
    return "" if change.type == "dir" else path.rpartition("/")[2]


def _checked(path: object) -> str:
    hint = "absolute, inside the sandbox, as diff() lists it: '/workspace', '/workspace/a.py', '/'"
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise SpecError(f"{str(path)[:80]!r} is not a path that can be applied", hint=hint)
    parts = [part for part in path.split("/") if part]
    if "." in parts or ".." in parts:
        raise SpecError(f"{path[:80]!r} has '.' or '..' in it", hint=hint)
    return "/" + "/".join(parts)


def check_place(place: str) -> None:
    """A ``Change`` may come from elsewhere (the keeper, a file): its path is looked at again."""
    parts = place.split("/")
    if "\0" in place or any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 for part in parts):
        raise SpecError(f"the diff names a file {place[:200]!r}, which is not a name", hint="make a new diff()")
