"""The suffix draft and a model's draft as one drafter: in every round each row takes the draft that
promises more tokens.

ArcticInference (github.com/snowflakedb/ArcticInference, vllm/model_runner.py) takes a suffix draft
whose expected length is at least the number of tokens that the model would draft. Here it has to
promise as many accepted tokens as the model's draft. The choice reads decided tokens and earlier
rounds alone, so it does not change the distribution of the text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decoding.costs import expected_tokens
from decoding.scheduler import Request
from drafts.suffix import END, SuffixDraft
from speculative import DraftLength, ModelDraft


class HybridDraft(SuffixDraft):
    """A suffix draft with the draft of a model next to it. A round in which no row takes the
    model's does not run the model, whose cache then lags until `catch_up` fills it."""

    def __init__(self, draft: ModelDraft, depth: int = 24):
        super().__init__(depth)
        self.draft = draft
        self.model = draft.model
        self.owns_cache = draft.owns_cache
        self.max_draft_tokens = draft.max_draft_tokens
        self.max_positions = draft.max_positions

    def setup(self, *args) -> None:
        super().setup(*args)
        self.draft.setup(*args)
        self.runner = self.draft.runner
        self.num_input_tokens = self.draft.num_input_tokens

    def row_view(self, begin: int, end: int) -> "HybridDraft":
        view = super().row_view(begin, end)
        view.draft = self.draft.row_view(begin, end)
        return view

    def choose_k(
        self,
        requests: Sequence[Request],
        unread: int,
        draft_length: DraftLength,
    ) -> int:
        """A row takes the suffix draft where the model cannot draft, or where at least as many of
        its first K tokens are expected to be accepted as of the model's. With "auto", a round of
        suffix drafts alone, which costs no drafting, also competes with rounds of the model."""
        guesses = self.expect(requests, unread)
        can_run = [row is None for row in self.draft.expect(requests, unread)]
        is_auto = draft_length.fixed is None
        k = 0
        model_tokens = 0.0
        if is_auto:
            gain, k = draft_length.best_of(guesses, runs_model=False)
            if any(can_run) and gain < draft_length.best()[1]:
                k = 0
        has_draft = any(can_run)
        if not is_auto:
            has_draft = has_draft or any(guesses)
        if k == 0 and has_draft:
            k = draft_length.choose()
            model_tokens = expected_tokens(draft_length.alpha, k) - 1
        self.guessed = set()
        for request, guess, can in zip(requests, guesses, can_run):
            if not can or sum(guess[:k]) >= model_tokens:
                self.guessed.add(request)
            else:
                self.draft_rows[request.slot.index, 1].fill_(END)
        self.runs_model = k == 0 or len(self.guessed) < len(requests)
        return k

    def lag_after(self, request: Request, k: int) -> int:
        if not self.runs_model:
            return request.draft_lag + k + 1
        num_lost = k if request in self.guessed else 0  # the model's drafts were of another text
        return max(super().lag_after(request, k), num_lost)

    def propose(self, state: nn.Module) -> tuple[Tensor, Tensor]:
        """A suffix draft that later tokens have refuted leaves its row to the model, if that
        runs."""
        tokens, probs = super().propose(state)  # (B, K), (B, K, V)
        if not self.runs_model:
            return tokens, probs
        model_tokens, model_probs = self.draft.propose(state)
        has_suffix = probs[:, :1].sum(dim=-1) > 0  # (B, 1)
        can_run = self.draft.rows_to_draft(state)[:, None, None]  # (B, 1, 1)
        probs = torch.where(has_suffix[..., None], probs, can_run * model_probs)
        # At the addresses and strides of a compiled verification.
        model_tokens.copy_(torch.where(has_suffix, tokens, model_tokens))
        model_probs.copy_(probs)
        return model_tokens, model_probs

    def rows_to_draft(self, state: nn.Module) -> Tensor:
        return state.may_draft  # a suffix draft may lie beyond the model's context

    def advance(self, n_accepted: Tensor) -> None:
        self.runs_model = True  # until a round without it is planned

    def observe(self, overlap: float) -> None:
        self.draft.observe(overlap)

    def passes(self, k: int) -> int:
        return self.draft.passes(k)

    def catch_up(self, state: nn.Module, lag: int) -> None:
        if self.runs_model:
            self.draft.catch_up(state, lag)
