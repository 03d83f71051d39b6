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
from decoding.draft_length import DECAY, MIN_GAIN, DraftLength
from decoding.memory import DraftPlan
from decoding.scheduler import Request
from drafts.base import Draft, ModelDraft
from drafts.suffix import END, Acceptance, SuffixDraft

# The model's acceptance is only observed in rounds that run the model. When it is compared with a
# suffix draft, this many accepted tokens are added, so that a model with a poor start runs again.
OPTIMISM = 4.0


class HybridFigures(Acceptance):
    """Also running sums of decided tokens, and of the plain steps that they would have cost with
    the suffix draft alone. They start with a few plain steps."""

    def __init__(self):
        super().__init__()
        self.decided_tokens = 8.0
        self.suffix_cost = 8.0


class HybridDraft(SuffixDraft):
    """A suffix draft next to a ModelDraft. A round in which no row takes the model's draft does not
    run the model, whose cache then lacks what the round decided."""

    figures_type = HybridFigures

    def __init__(self, model_draft: ModelDraft, depth: int = 24):
        super().__init__(depth)
        self.model_draft = model_draft
        self.model = model_draft.model
        self.owns_cache = model_draft.owns_cache
        self.max_draft_tokens = model_draft.max_draft_tokens
        self.max_positions = model_draft.max_positions

    def setup(self, *args) -> None:
        super().setup(*args)
        self.model_draft.setup(*args)
        self.runner = self.model_draft.runner
        self.num_input_tokens = self.model_draft.num_input_tokens
        # (B,) whether the plan of a row runs the model; the same on the host
        model_rows = torch.ones_like(self.draft_rows[:, 0], dtype=torch.bool)
        self.register_buffer("model_rows", model_rows, persistent=False)
        self.register_buffer("host_model_rows", model_rows.cpu().clone(), persistent=False)

    def row_view(self, begin: int, end: int) -> "HybridDraft":
        view = super().row_view(begin, end)
        view.model_draft = self.model_draft.row_view(begin, end)
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
        expected = self.expect(requests, unread)
        can_run = [row is None for row in self.model_draft.expect(requests, unread)]
        figures = requests[0].memory.figures
        k, model_tokens = self.choose_round(expected, any(can_run), draft_length, figures)
        self.suffix_requests = set()
        for request, row, can in zip(requests, expected, can_run):
            if not can or sum(row[:k]) >= model_tokens:
                self.suffix_requests.add(request)
            else:
                self.host_rows[request.slot.index, 1] = END
        self.runs_model = k == 0 or len(self.suffix_requests) < len(requests)
        for request in requests:
            self.host_model_rows[request.slot.index] = self.runs_model
        return k

    def choose_round(
        self,
        expected: Sequence[list[float]],
        can_run: bool,
        draft_length: DraftLength,
        figures: HybridFigures,
    ) -> tuple[int, float]:
        """K, and how many of the model's K tokens are expected to be accepted; 0 if the model does
        not run. `expected`: as `expect` has it, for the suffix drafts.

        With "auto" the model has to be faster than the latest steps without it were on average.
        Otherwise it would delay copies, which are noticed once they have begun, and its cache would
        have to catch up after each."""
        if draft_length.fixed is None:
            k, gain = draft_length.best_for(expected, runs_model=False)
            model_gain = draft_length.best(OPTIMISM)[1] / MIN_GAIN
            gain = max(gain, figures.decided_tokens / figures.suffix_cost)
            # Instead of plain steps `choose` also tries a model that does not pay.
            is_probe = k == 0 and model_gain < 1
            can_run = can_run and (gain < model_gain or is_probe)
        else:
            k = draft_length.fixed if any(expected) else 0
        # 0: the model does not pay yet, and runs again later.
        model_k = draft_length.choose() if can_run else 0
        if model_k == 0:
            return k, 0.0
        return model_k, expected_tokens(draft_length.alpha, model_k) - 1

    def propose(self, batch: nn.Module, plan) -> Draft:
        """A suffix draft that later tokens have refuted leaves its row to the model, if that
        runs."""
        tokens, probs = super().propose(batch, plan)  # (B, K), (B, K, V)
        if not plan.runs_model:
            return Draft(tokens, probs)
        model_tokens, model_probs = self.model_draft.propose(batch, plan)
        has_suffix = probs[:, :1].sum(dim=-1) > 0  # (B, 1)
        self.model_rows.copy_(self.host_model_rows)
        may_draft = self.model_draft.rows_to_draft(batch, plan.k)  # (B, K)
        can_run = may_draft & self.model_rows[:, None]
        probs = torch.where(has_suffix[..., None], probs, can_run[..., None] * model_probs)
        # At the addresses and strides of a compiled verification.
        model_tokens.copy_(torch.where(has_suffix, tokens, model_tokens))
        model_probs.copy_(probs)
        return Draft(model_tokens, model_probs)

    def rows_to_draft(self, batch: nn.Module, k: int) -> Tensor:
        return batch.positions_to_draft(k)  # a suffix draft may lie beyond the model's context

    def observe(self, overlap: float) -> None:
        self.model_draft.observe(overlap)

    def observe_step(self, plan: DraftPlan, num_tokens: float) -> None:
        """Tokens of the model's rounds count as plain steps: that is what the suffix draft had
        instead."""
        if plan.costs is None:
            return
        cost = num_tokens if plan.runs_model else plan.costs.round(plan.k, runs_model=False)
        decay = DECAY**num_tokens
        figures = plan.memory.figures
        figures.decided_tokens = figures.decided_tokens * decay + num_tokens
        figures.suffix_cost = figures.suffix_cost * decay + cost

    def passes(self, k: int) -> int:
        return self.model_draft.passes(k)
