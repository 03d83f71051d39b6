"""What an Engine is made with, besides its model and its sizes. This file needs no torch, so that a
program can check its flags before torch is imported."""

from collections.abc import Callable
from dataclasses import dataclass

from decoding.errors import UserError
from decoding.settings import DEFAULT_K
from decoding.validation import check_count

CACHE_NAMES = ("model", "int8", "fp8")  # decoding/kv_8bit.py has the latter two
VERIFICATIONS = ("block", "token")  # what speculative.accept knows; another rule has no name


@dataclass(frozen=True)
class EngineOptions:
    """How an Engine runs its steps. UserError for values that no model could serve.

    compile             compile the steps; None: on a GPU, where launching kernels costs more than
                        running them
    compile_prompts     compile the pass over prompts too; None: if the steps are compiled
    speculate_k         tokens that a drafter proposes in a round, or "auto", which needs
                        `calibrate`
    verification        how drafted tokens are accepted where they are sampled: "block", all K at
                        once, or "token", one by one; the texts have the same distribution. Or a
                        decoding.rule.Rule of one's own
    fixed_width_steps   run every step over K + 1 positions, drafted or not
    logits_processor    changes logits before sampling: see decoding/batch.py
    logprobs            record the log-probabilities of each token and of the N most likely
                        ones; None: of none
    cache_type          one of CACHE_NAMES, or a class like model.KVCache
    draft_cache_type    the same for a draft's own caches; None: cache_type if that is a name, and
                        "model" next to a class, which may fit its model alone
    """

    compile: bool | None = False
    compile_prompts: bool | None = None
    speculate_k: int | str = DEFAULT_K
    verification: str | object = "block"
    fixed_width_steps: bool = False
    logits_processor: Callable | None = None
    logprobs: int | None = None
    cache_type: str | type = "model"
    draft_cache_type: str | type | None = None

    def __post_init__(self):
        k = self.speculate_k
        if k == "auto" and self.fixed_width_steps:
            raise UserError("fixed_width_steps needs a speculate_k that is a number, not 'auto'")
        if k != "auto" and not (isinstance(k, int) and k >= 0):
            raise UserError(f"speculate_k = {k!r} must be a number of tokens from 0 on, or 'auto'")
        rule = self.verification
        is_rule = hasattr(rule, "accept") and not isinstance(rule, type)
        if not is_rule and rule not in VERIFICATIONS:
            names = ", ".join(VERIFICATIONS)
            raise UserError(
                f"verification = {rule!r} must be {names}, or an instance of a decoding.rule.Rule"
            )
        if self.logprobs is not None:
            check_count("logprobs", self.logprobs, 0)
        for name in ("cache_type", "draft_cache_type"):
            value = getattr(self, name)
            if not isinstance(value, type | None) and value not in CACHE_NAMES:
                raise UserError(
                    f"{name} = {value!r} must be one of {', '.join(CACHE_NAMES)}, or a class"
                )

    def cache_type_for_drafts(self) -> str | type:
        if self.draft_cache_type is not None:
            return self.draft_cache_type
        return self.cache_type if isinstance(self.cache_type, str) else "model"
