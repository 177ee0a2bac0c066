"""What whoever starts a session has decided, apart from what its sandboxes are. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidLimit

DEFAULT_MAX_SANDBOXES = 5
DEFAULT_MAX_OUTPUT = 30_000
DEFAULT_TIMEOUT = 120.0
DEFAULT_MAX_TIMEOUT = 3600.0
MAX_SNAPSHOTS = 32  #: of one sandbox: they cost disk of the host's


@dataclass(frozen=True)
class Policy:
    max_sandboxes: int = DEFAULT_MAX_SANDBOXES  #: at a time, with the session's own
    max_output: int = DEFAULT_MAX_OUTPUT  #: characters of one answer that come from a sandbox
    timeout: float = DEFAULT_TIMEOUT  #: seconds that a command or cell may take if the model does not say
    max_timeout: float = DEFAULT_MAX_TIMEOUT  #: and the most that it may ask for

    def __post_init__(self) -> None:
        if not 1 <= self.max_sandboxes <= 1000:
            raise InvalidLimit(f"{self.max_sandboxes} sandboxes are out of range", hint="from 1 to 1000")
        if not 1000 <= self.max_output <= 10_000_000:
            raise InvalidLimit(f"{self.max_output} characters of output are out of range", hint="from 1000 to 10000000")

    def seconds(self, asked: float | None) -> float:
        """The time limit of a command."""
        if asked is None:
            return min(self.timeout, self.max_timeout)
        if asked > self.max_timeout:
            raise InvalidLimit(
                f"timeout={asked:g} is more than is allowed here",
                hint=f"at most {self.max_timeout:g} s; start_process has no time limit",
            )
        return asked
