"""The tree of a sandbox's snapshots, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .output import age, plain, size
from .saved import called, state_text

if TYPE_CHECKING:
    from ..controller import SandboxInfo, Snapshot


def visible_parent(snapshot_id: str | None, known: dict[str, Snapshot], shown: set[str]) -> str | None:
    """The nearest ancestor that is shown; itself, if it is. A broken or circular record ends the search."""
    seen: set[str] = set()
    while snapshot_id is not None and snapshot_id not in shown:
        if snapshot_id in seen or snapshot_id not in known:
            return None
        seen.add(snapshot_id)
        snapshot_id = known[snapshot_id].parent
    return snapshot_id


def draw(info: SandboxInfo, found: Sequence[Snapshot], shown: Sequence[Snapshot], *, always: bool) -> Any:
    """The sandbox, its snapshots below, each under its nearest shown ancestor; None if there are none, unless
    ``always``."""
    from rich.text import Text
    from rich.tree import Tree

    own = [item for item in shown if item.sandbox == info.id]
    if not own and not always:
        return None
    known, visible = {item.id: item for item in found}, {item.id for item in own}
    here = visible_parent(info.head, known, visible)
    title = Text(plain(info.name or info.id), style="bold")
    title.append(f"  {plain(state_text(info))}", style="not bold")
    root = Tree(title, guide_style="dim")
    nodes: dict[str, Any] = {}
    for item in _parents_first(own, known, visible):
        above = visible_parent(item.parent, known, visible)
        label = _label(item, found=known.get(item.parent or ""), is_root=above is None, here=item.id == here)
        nodes[item.id] = nodes.get(above or "", root).add(label)
    return root


def _parents_first(own: Sequence[Snapshot], known: dict[str, Snapshot], visible: set[str]) -> list[Snapshot]:
    """In the order they were made; a parent before its children even if clocks have jumped."""
    waiting, done = list(own), []
    placed: set[str] = set()
    while waiting:
        ready = [item for item in waiting if visible_parent(item.parent, known, visible) in (None, *placed)]
        for item in ready or waiting:  # what is circular is shown as it comes
            done.append(item)
            placed.add(item.id)
        waiting = [item for item in waiting if item.id not in placed]
    return done


def _label(item: Snapshot, *, found: Snapshot | None, is_root: bool, here: bool) -> Any:
    from rich.text import Text

    label = Text(plain(called(item)), style="cyan")
    facts = [item.id] if item.name else []
    facts += [item.kind if item.kind != "disk" else "disk: files only", size(item.bytes), f"{age(item.created_at)} ago"]
    if item.role != "snapshot":
        facts.insert(0, item.role if not item.note else f"{item.role}: before `{plain(item.note, 60)}`")
    if is_root and found is not None and found.sandbox != item.sandbox:
        facts.append(f"from {called(found)} of {found.sandbox_name or found.sandbox}")
    label.append("  " + "  ".join(plain(fact) for fact in facts), style="default")
    if here:
        label.append("  ← now", style="bold green")
    return label
