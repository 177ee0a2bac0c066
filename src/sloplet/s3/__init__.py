"""Files and folders between a sandbox and S3 or what speaks like it. The bytes pass through this process, streamed.

Keys are the host's: boto3 finds them here (environment, ~/.aws, a role), nothing of them enters the sandbox, and the
sandbox needs no network for it. What a sandbox names is data: a name becomes the end of a key below the one that was
asked for, or is refused. What a bucket names is data, too: a key becomes a path below the target, or is left out.

An object has no permissions, no owner and no links. Permission bits go along in its metadata (``sloplet-mode``), an
empty folder as an empty object whose key ends with a slash, as S3's own console does; links and special files are left
out and named in ``Progress.skipped``. boto3 is imported on first use.
"""

from __future__ import annotations
