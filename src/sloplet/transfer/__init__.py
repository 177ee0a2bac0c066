"""Files and whole directories into a sandbox and out of it, streamed, several at a time.

The host's side works by directory descriptors only (``fs.open_in``): no link is followed below what the caller named.
Permission bits are kept, setuid, setgid and sticky never are. Symbolic links go along as links if they are relative and
stay inside the tree; on the way in another link is an error (nothing is copied then), on the way out it is left out.
Special files (devices, sockets, pipes) are left out. What was left out is named in ``Progress.skipped``.

A download trusts nothing that the sandbox says: names cannot leave the target, nothing that exists is replaced by
something of another kind, two names that the host takes for one are an error, and the amount is bounded. A file
appears under its name when it is complete.
"""

from __future__ import annotations

from .common import OnProgress
from .download import MAX_DOWNLOAD, download
from .upload import upload

__all__ = ["MAX_DOWNLOAD", "OnProgress", "download", "upload"]
