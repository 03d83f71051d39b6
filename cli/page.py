"""Tokens of answers on a page: --report's file, and the script and style that scripts/serve.html uses too.

Token           a token of an answer, with its origin and its round's probabilities
token_of        a request's record of a token -> Token
page            a file of HTML with cli/tokens.css and cli/tokens.js put in
write_report    answers -> one file of HTML, which needs no network
"""

import argparse
import itertools
import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from cli.answers import Answer
from cli.report import PLAIN_TOKEN, greedy_text, origin, speculative, step_numbers, summary
from decoding.scheduler import Request
from decoding.timing import Timing
from generate import Engine
from loading.files import write_atomically

ORIGINS = ("plain", "accepted", "corrected", "bonus")  # in cli/report.py's order
RECENT_S = 300.0
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


class Token(NamedTuple):
    """A token of an answer: the text that it adds, its origin, the number of its round, and that round's probabilities
    p of the target and q of the draft. at: seconds of decoding until it was decided."""

    id: int
    text: str
    origin: int = 0
    round: int = 0  # from 1 on; 0 of a token of the prompt
    at: float = 0.0
    p: float | None = None
    q: float | None = None
    overlap: float | None = None  # sum of min(p, q) over the vocabulary
    top_logprobs: Sequence[tuple[int, float]] | None = None  # (id, log-probability), its own first; None: not recorded

    def as_json(self) -> dict:
        """The object that cli/tokens.js draws. A draft's NaN, which JSON lacks, is null."""
        keys = ("text", "round", "at", "p", "q", "overlap")
        values = {key: None if (value := getattr(self, key)) != value else value for key in keys}
        return {"origin": ORIGINS[self.origin], "logprob": self.top_logprobs and self.top_logprobs[0][1]} | values


def token_of(request: Request, number: int, text: str, round: int, at: float, num_logprobs: int | None) -> Token:
    """Token `number` of a request. num_logprobs: of so many more top tokens; None leaves out probabilities."""
    record = request.token_records[number] if request.token_records else None
    token = Token(request.tokens[number], text, origin(record) if record else PLAIN_TOKEN, round, at)
    if num_logprobs is None:
        return token
    (p, q), pairs = request.token_probs[number], request.top_logprobs[number][: 1 + num_logprobs]
    token = token._replace(p=p, top_logprobs=[(int(id), max(x, MIN_LOGPROB)) for id, x in pairs])
    is_drafted = record is not None and record.index < record.k
    return token._replace(q=q, overlap=record.overlap) if is_drafted else token


def page(file: Path) -> str:
    html = file.read_text("utf-8")
    for name in ("tokens.css", "tokens.js"):
        html = html.replace(f"/* {name} */\n", Path(__file__).with_name(name).read_text("utf-8"))
    return html


def write_report(args: argparse.Namespace, answers: Collection[Answer], engine: Engine) -> None:
    """Write --report's page of these answers, whose engine has recorded log-probabilities."""
    about = {
        "id": Path(args.random_weights or args.checkpoint).name, "draft": args.draft or args.draft_checkpoint,
        "k": engine.speculate_k, "greedy_text": greedy_text(engine),
        "plain_tok_s": plain_rate(answers, engine), "plain_source": "as calibrated before the run",
    }  # fmt: skip
    data = {"about": about, "answers": [section(answer, engine) for answer in answers]}
    # A text may hold </script>, so the data has no <.
    script = json.dumps(data).replace("<", "\\u003c")
    html = page(Path(__file__).with_name("report.html")).replace("/* data */", script)
    write_atomically(Path(args.report), lambda partial: partial.write_text(html, encoding="utf-8"))


def plain_rate(answers: Collection[Answer], engine: Engine) -> float | None:
    """Tokens a second of plain decoding, as calibrated before the first answer. None where that is minutes ago: the
    machine may have had other work then, and the rate compares with nothing."""
    started = [answer.request.started for answer in answers if answer.request is not None and answer.request.started]
    if engine.costs is None or not started or time.perf_counter() - min(started) > RECENT_S:
        return None
    return 1 / engine.costs.decode_s


def section(answer: Answer, engine: Engine) -> dict:
    """An answer with its tokens, the (k, accepted) of its steps, and its costs by K."""
    request, printer, row = answer.request, answer.printer, answer.row
    labels = f"seed {row.seed}, sample {row.sample}"  # the location has the line and the id
    numbers, last = step_numbers(request), len(printer.ids) - 1
    texts = [*printer.pieces[:last], "".join(printer.pieces[last:])]  # text that `close` released joins the last token
    end_times = list(itertools.accumulate((step.seconds for step in request.steps), initial=request.prefill_s))
    tokens = [
        token_of(request, i, text, number + 1, end_times[number], 0)
        for i, (text, number) in enumerate(zip(texts, numbers))
    ]
    return {
        "prompt": row.text, "label": f"{row.location}, {labels}" if row.location else labels,
        "finish_reason": printer.finish_reason(), "error": request.error and str(request.error),
        "tokens": [token.as_json() for token in tokens],
        "steps": [(r.k, r.accepted) for r in request.token_records if not (r.index or r.first)],
        "costs": costs_by_k(request, numbers), "rows": max((len(step.positions) for step in request.steps), default=1),
        "summary": summary(speculative(engine, [Timing([request])], 0)) if engine.drafts else [],
    }  # fmt: skip


def costs_by_k(request: Request, numbers: list[int]) -> list[dict]:
    """For each K: steps, tokens and seconds, and the calibrated cost of a round in units of a plain step."""
    rows = []
    for k in sorted({step.k for step in request.steps}):
        steps = [(i, step) for i, step in enumerate(request.steps, 1) if step.k == k]
        seconds, draft_s, verify_s = (
            sum(getattr(step, name) for _, step in steps) for name in ("seconds", "draft_s", "verify_s")
        )
        costs = [step.costs.round(k) for _, step in steps if step.costs and k in {0, *step.costs.verify_s}]
        num_tokens = sum(numbers.count(i) for i, _ in steps)
        rows.append({"k": k, "steps": len(steps), "tokens": num_tokens, "seconds": seconds, "draft_s": draft_s,
                     "verify_s": verify_s, "plain_steps": sum(costs) / len(costs) if costs else None})  # fmt: skip
    return rows
