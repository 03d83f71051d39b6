"""The hybrid draft suffix,DIR beside its two drafts, suffix and DIR.

    DraftComparison three engines with one target, which answer every request in turn
    hybrid_rows     the hybrid's figures over those of the better of its two

The engines share a process and the target's weights, because the speeds of two processes differ by
a few percent, which is as much as is measured here. They share calibrated costs too: what they
choose then depends on the drafts alone, and the costs of the steps that they chose compare them
without the clock's noise. Each repetition starts with an empty suffix pool, which would otherwise
know the answers.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.record import ratios, row
from cli.report import speculative
from decoding.costs import Costs
from decoding.engine import Engine
from decoding.sampling import Sampling
from decoding.statistics import Timing
from drafts.registry import load_drafter
from model import Transformer

WARM_UP = 32  # new tokens of an uncounted request, in which the model draft is tried too


class DraftComparison:
    """Engines by the name of their draft: suffix, model and hybrid. `folder` has the draft
    model."""

    def __init__(self, model: Transformer, tokenizer, folder: Path, context: int, compile: bool):
        specs = {"suffix": "suffix", "model": folder, "hybrid": f"suffix,{folder}"}
        self.engines = {}
        for name, spec in specs.items():
            self.engines[name] = Engine(
                model,
                1,
                context,
                drafter=load_drafter(spec, model, tokenizer),
                speculate_k="auto",
                compile=compile,
            )
        self.share_costs()
        for name in self.engines:
            self.answer(name, {"ids": tokenizer.encode("1 2 3 4 5"), "new": WARM_UP})

    def share_costs(self) -> None:
        """Calibrate the hybrid, whose rounds are those of the others too."""
        hybrid = self.engines["hybrid"]
        costs = hybrid.calibrate(Sampling(0))
        for engine in self.engines.values():
            ks = engine.planner.ks
            runs_model = engine.drafter.model is not None
            draft_s = {k: costs.draft_s[k] * runs_model for k in ks}
            shared = Costs(costs.decode_s, draft_s, {k: costs.verify_s[k] for k in ks})
            engine.planner.measured_costs = {1: {0: shared}}
            engine.planner.costs = shared

    def answer(self, name: str, request: dict) -> dict:
        """Tokens/s of this engine's greedy answer, tokens in the time of a plain step by the
        shared costs, tokens a round, and the token ids."""
        engine = self.engines[name]
        timing = Timing()
        pairs = engine.generate(
            [request["ids"]],
            sampling=Sampling(0),
            max_new_tokens=request["new"],
            stop_ids=request.get("stop_ids", ()),
            timing=timing,
        )
        ids = [id for _, id in pairs]
        tokens_per_round = speculative(engine, timing)["tokens_per_round"]
        costs = [record.costs.round(record.k, record.runs_drafter) for record in timing.records]
        num_decoded = len(ids) - 1
        return {
            "ids": ids,
            "tok_s": num_decoded / timing.decode_s if num_decoded else None,
            "tokens_by_costs": num_decoded / sum(costs) if num_decoded else None,
            "tokens_per_round": tokens_per_round or 1.0,  # a single token has no round
        }

    def answers(self, requests: Iterable[dict]) -> dict[str, list[dict]]:
        """Name of an engine -> its answers. ValueError if two engines' texts differ."""
        answers = {name: [] for name in self.engines}
        for request in requests:
            for name in self.engines:
                answers[name].append(self.answer(name, request))
            texts = {name: engine_answers[-1]["ids"] for name, engine_answers in answers.items()}
            if len({tuple(ids) for ids in texts.values()}) > 1:
                raise ValueError(f"greedy texts differ: {texts}")
        return answers


def hybrid_rows(kind: str, answers: dict[str, list[dict]], note: str) -> list[dict]:
    """Rows of one kind of text: each draft's figures, and the hybrid's over the better one's,
    answer by answer. The better one is that with the larger median: to choose it anew for each
    answer would choose noise."""
    ids = {
        "tok_s": "vs_best",
        "tokens_by_costs": "by_costs_vs_best",
        "tokens_per_round": "tokens_vs_best",
    }
    rows = []
    for key, id in ids.items():
        unit = "tok/s" if key == "tok_s" else "tokens"
        figures = {}
        for name, engine_answers in answers.items():
            values = [answer[key] for answer in engine_answers]
            figures[name] = [value for value in values if value is not None]
            rows.append(row(f"smollm2.hybrid.{kind}.{name}.{key}", figures[name], unit, note))
        best = max(("suffix", "model"), key=lambda name: statistics.median(figures[name]))
        ratio = ratios(figures["hybrid"], figures[best])
        ratio_note = f"over {best}, the better of its two; {note}"
        rows.append(row(f"smollm2.hybrid.{kind}.{id}", ratio, "ratio", ratio_note))
    return rows
