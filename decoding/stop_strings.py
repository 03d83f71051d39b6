"""Stop strings: text in, text out up to the first one."""

import math
import re
from collections.abc import Mapping, Sequence

MARKS = re.compile(r"[\ud800-\udfff]")  # surrogates


class StopStrings:
    """A filter that passes text through up to the first stop string and holds back a possible
    beginning of one. Empty stop strings, which clients send in place of none, are ignored.

    Special tokens have no text unless they are visible. A stop string that contains the name of one
    (`specials`: name -> id) also matches the token itself: in the held-back text each such token is
    represented by a surrogate, a character that decoded text never contains. A special token in the
    middle of another stop string therefore prevents that match.
    """

    def __init__(
        self,
        stops: Sequence[str],
        specials: Mapping[str, int] | None = None,
    ):
        stops = [stop for stop in stops if stop]
        self.stops = {*stops}
        self.mark_by_id = {}
        self.name_by_mark = {}
        self.texts = {}  # mark -> the text of its token
        names = [name for name in specials or {} if any(name in stop for stop in stops)]
        names.sort(key=len, reverse=True)
        for mark, name in enumerate(names, start=0xD800):
            self.mark_by_id[specials[name]] = chr(mark)
            self.name_by_mark[chr(mark)] = name
            stops = [stop.replace(name, chr(mark)) for stop in stops]
        self.stops.update(stops)
        self.pending = ""
        self.stopped = False

    def feed_token(
        self,
        id: int,
        stream,
        is_last: bool,
    ) -> str:
        """`feed` the text that a decoder, `stream`, makes of a token. The `is_last` one, which ends
        the answer, has no text."""
        text = "" if is_last else stream.feed(id)
        mark = self.mark_by_id.get(id)
        if mark is None:
            return self.feed(text)
        before = text.removesuffix(self.name_by_mark[mark])  # of an earlier token's bytes
        self.texts[mark] = text[len(before) :]  # "" unless the token is visible
        return self.feed(before + mark)

    def feed(self, text: str) -> str:
        """The text that is now certain to precede every stop string. Sets `stopped` once the first
        one is complete."""
        if self.stopped:
            return ""
        self.pending += text
        num_held = max(map(self._overlap, self.stops), default=0)
        return self._release(len(self.pending) - num_held)

    def flush(self) -> str:
        """The text held back, at the end of the input. Ends at a stop string in it, which sets
        `stopped`."""
        return self._release(len(self.pending))

    def _release(self, length: int) -> str:
        """The first `length` characters of the text held back, or those before the first stop
        string in it."""
        begins = [self.pending.find(stop) for stop in self.stops if stop in self.pending]
        begin = min(begins, default=math.inf)
        end = min(begin, length)
        text = self.pending[:end]
        self.pending = self.pending[end:]
        if begin <= length:
            self.stopped = True
            self.pending = ""
        return MARKS.sub(lambda mark: self.texts[mark[0]], text)

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the text held back could begin this stop string."""
        longest = min(len(stop) - 1, len(self.pending))
        return next((n for n in range(longest, 0, -1) if self.pending.endswith(stop[:n])), 0)
