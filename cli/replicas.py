"""Replicas: copies of a model, on different ranks, that share one file of prompts.

A replica with a free slot takes the number of the next row from a counter in torchrun's store. The
store also brings results to rank 0. With one replica nothing is sent.
"""

import json
from collections.abc import Iterator

from torch.distributed.distributed_c10d import _get_default_store

from tp import Ranks

COUNTER = "quickdraft/row"
QUEUE = "quickdraft/results"


class Replicas:
    """The replica of this rank, whose ranks are `ranks`, among `everyone`."""

    def __init__(self, everyone: Ranks, ranks: Ranks):
        self.ranks = ranks
        self.count = everyone.world // ranks.world
        self.is_root = everyone.rank == 0
        self.is_first = everyone.rank < ranks.world  # is it in the replica that shows results?
        self.store = _get_default_store() if self.count > 1 else None

    def numbers(self, num_rows: int) -> Iterator[int]:
        """The numbers of the rows that this replica decodes."""
        if self.count == 1:
            yield from range(num_rows)
            return
        while (number := self.next_number()) < num_rows:
            yield number

    def next_number(self) -> int:
        """The next row's number, the same on all ranks of this replica."""
        number = self.store.add(COUNTER, 1) - 1 if self.ranks.rank == 0 else None
        return self.ranks.broadcast_object(number)

    def send(self, result: tuple) -> None:
        if self.ranks.rank == 0:
            self.store.queue_push(QUEUE, json.dumps(result))

    def received(self) -> Iterator[list]:
        """Results of other replicas, on rank 0."""
        while self.is_root and self.count > 1 and self.store.queue_len(QUEUE):
            yield json.loads(self.store.queue_pop(QUEUE, False))
