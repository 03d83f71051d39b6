"""A lock that threads get in turn.

FairLock        a re-entrant lock: who waits comes before who has just released it
"""

import threading


class FairLock:
    """A lock for `with`, which a thread may take again while it has it, as threading.RLock. That
    one is mostly taken back before a waiting thread has woken up: of two threads that step the same
    engine, one would wait until the other's answer has ended."""

    def __init__(self):
        self.lock = threading.Lock()
        self.next = threading.Lock()  # held by the thread that gets `lock` next
        self.owner: int | None = None
        self.depth = 0

    def __enter__(self) -> None:
        if self.owner != threading.get_ident():
            with self.next:
                self.lock.acquire()
                self.owner = threading.get_ident()
        self.depth += 1

    def __exit__(self, *error) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.owner = None
            self.lock.release()
