"""stub"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def chain_id(diff_ids: Sequence[str]) -> str:
    """OCI's name of a row of layers applied one after the other: 64 hexadecimal digits."""
    chain = ""
    for diff in diff_ids:
        chain = diff if not chain else "sha256:" + hashlib.sha256(f"{chain} {diff}".encode("ascii")).hexdigest()
    return chain.removeprefix("sha256:")
