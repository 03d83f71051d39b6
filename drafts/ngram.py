"""Prompt lookup: a draft without a model, from the text of the request itself."""

from decoding.scheduler import Request
from drafts.base import Drafter
from drafts.suffix import DraftToken, IndexedText, SuffixDraft, SuffixSource


class NgramDraft(SuffixDraft):
    """Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): propose the
    continuation of the most recent earlier occurrence of the last `n` tokens. A continuation that
    reaches the text's end repeats."""

    auto_k = Drafter.auto_k

    def __init__(self, n: int = 3):
        super().__init__(pool_tokens=0)  # it reads no earlier answers
        self.n = n
        self.grams = (n,)

    def best_continuation(self, text: IndexedText, request: Request) -> list[DraftToken]:
        ends = text.ends.get(tuple(text.ids[-self.n :]), [])
        if len(ends) < 2:  # the last of them is the end of the text itself
            return []
        begin = ends[-2] + 1
        period = len(text.ids) - begin
        ids = [text.ids[begin + i % period] for i in range(self.max_length)]
        return [DraftToken(id, 1.0, self.n) for id in ids]


class NgramSource(SuffixSource):
    """`--draft ngram[:N]`: matches have N tokens."""

    draft_class = NgramDraft
