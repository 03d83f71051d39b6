"""A lock that threads get in turn.

FairLock        a threading.RLock that a waiting thread gets before the one that just released it
"""

import threading


class FairLock(type(threading.RLock())):
    """A threading.RLock for `with`, which a thread may take again while it has it. A plain one is
    mostly taken back before a waiting thread has woken up: of two threads that step the same
    engine, one would wait until the other's answer has ended.

    Its steps are RLock's own, in C, so that Ctrl-C comes before or after each of them."""

    def __init__(self):
        self.next = threading.RLock()  # held by the thread that gets this lock next

    @property
    def __enter__(self):
        """RLock's own where this thread has the lock already, otherwise `wait`."""
        return super().__enter__ if self._is_owned() else self.wait

    def wait(self) -> None:
        try:
            with self.next:
                self.acquire()
        except BaseException:  # such as Ctrl-C just after `acquire`
            if self._is_owned():
                self.release()
            raise
