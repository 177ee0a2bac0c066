"""What runs inside, the same on both sides: a process that holds memory, and on runsc's side one that answers. Pure."""

from __future__ import annotations

#: Holds random bytes, all of them written, says "ready" and their checksum, and computes that anew for each that asks.
HOLDER = """
import hashlib, mmap, os, sys
memory = mmap.mmap(-1, int(sys.argv[1]) << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), 1 << 20):
    memory[at : at + (1 << 20)] = os.urandom(1 << 20)
for name in ("ask", "answer"):
    os.mkfifo("/dev/shm/" + name)
print("ready", hashlib.sha256(memory).hexdigest(), flush=True)
while True:
    with open("/dev/shm/ask") as ask:
        ask.read()
    with open("/dev/shm/answer", "w") as answer:
        answer.write(hashlib.sha256(memory).hexdigest())
"""

#: Asks the holder for its checksum: a command inside.
ASK = "echo > /dev/shm/ask; cat /dev/shm/answer"

#: Answers every line; to "run" after it has run a command. What our agent does, as little as can be.
_ANSWERER = 'while read word; do if [ "$word" = run ]; then /bin/true; fi; echo ok; done'


def holder(python: str, mebibytes: int) -> list[str]:
    return [python, "-c", HOLDER, str(mebibytes)]


def answerer(python: str | None = None, mebibytes: int = 0) -> list[str]:
    """The first process of a sandbox made by hand; with ``mebibytes`` it has a holder beside it."""
    if python is None or not mebibytes:
        return ["/bin/sh", "-c", _ANSWERER]
    return ["/bin/sh", "-c", f'"$0" "$@" & {_ANSWERER}', *holder(python, mebibytes)]
