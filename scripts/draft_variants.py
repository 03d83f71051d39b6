"""`python -m scripts.compare --variants`: with which of the settings that the files of a draft
leave open were its weights trained?

    check           a draft and a K that can be judged
    result_of       how one variant of a draft did
    judged          all of them as one JSON object, the best first;  print_table  the same as text

The score is the mean number of drafted tokens that a round accepts. The first token's acceptance
alone cannot tell how a draft's own states are fed, because the first token does not depend on
them.
"""

import math
import statistics
from collections.abc import Sequence

from decoding.errors import UserError
from decoding.statistics import Timing

MIN_ERRORS = 3  # standard errors by which the best variant must lead another to rule it out

ROW = (
    "{first_acceptance:11.3f}  {tokens_per_round:7.2f} ± {standard_error:.2f}  {rounds:6}"
    "  {settings}"
)
VERDICT = (
    "as read: {as_read}\n"
    "trained with: {trained_with}; the first has {ratio:.2f} times the tokens of the second"
)
UNCERTAIN = "the first {possible} may be equally good: take more prompts, or a larger --speculate_k"


def check(variants: Sequence, k: int | str) -> None:
    """UserError for a draft without variants, and for a K that follows from its acceptance."""
    if len(variants) < 2:
        raise UserError(
            "--variants: --a needs an EAGLE-3 or DFlash folder as --draft_checkpoint, or --draft"
            " mtp[:DIR]; the files of other drafts leave nothing open"
        )
    if k == "auto":
        raise UserError("--variants: --speculate_k auto drafts less where less is accepted; name K")


def result_of(settings: str, timing: Timing) -> dict:
    """The figures of a variant with these settings of config.json."""
    records = [record for request in timing.requests for record in request.token_records]
    rounds = [record for record in records if record.k and record.index == 0 and not record.first]
    if len(rounds) < 2:
        raise UserError("--variants: these prompts give no rounds; take more or longer answers")
    accepted = [record.accepted for record in rounds]
    return {
        "settings": settings,
        "rounds": len(rounds),
        "first_acceptance": statistics.fmean(record.overlap for record in rounds),
        "tokens_per_round": 1 + statistics.fmean(accepted),
        "standard_error": statistics.stdev(accepted) / math.sqrt(len(rounds)),
    }


def judged(results: Sequence[dict]) -> dict:
    """The variants, the best first. `possible`: how many of them may be as good as the first one;
    `trained_with`: the settings of the first, None if others are possible too; `ratio`: of its
    tokens a round over the second's."""
    ranked = sorted(results, key=lambda result: -result["tokens_per_round"])
    first, second = ranked[:2]
    possible = sum(not is_worse(result, first) for result in ranked)
    return {
        "as_read": results[0]["settings"],
        "trained_with": first["settings"] if possible == 1 else None,
        "possible": possible,
        "ratio": first["tokens_per_round"] / second["tokens_per_round"],
        "variants": ranked,
    }


def is_worse(result: dict, best: dict) -> bool:
    """Is it behind the best by more than chance explains?"""
    lead = best["tokens_per_round"] - result["tokens_per_round"]
    return lead > MIN_ERRORS * math.hypot(best["standard_error"], result["standard_error"])


def print_table(result: dict) -> None:
    print("first token  tokens a round  rounds  settings in config.json")
    for row in result["variants"]:
        print(ROW.format(**row))
    print(VERDICT.format(**result))
    if result["trained_with"] is None:
        print(UNCERTAIN.format(**result))
