"""Tokens of answers on a page: --report's file, and the script and style that the server's
page, scripts/serve/serve.html, uses too.

Token           a token of an answer, with its origin and its round's probabilities
token_of        an answer's record of a token -> Token
page            a file of HTML with the style and the scripts that it names put in
write_report    answers -> one file of HTML, which needs no network
"""

import itertools
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from cli.answers import RowAnswer
from cli.options import Options
from cli.report import (
    PLAIN_TOKEN,
    covers,
    greedy_text,
    speculative,
    summary,
    token_origin,
)
from decoding.answers import Answer
from decoding.engine import Engine
from decoding.statistics import StepRecord, Timing
from loading.files import write_atomically

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


class Token(NamedTuple):
    """A token of an answer: the text that it adds, its origin, the number of its round, and that
    round's probabilities p of the target and q of the draft. at: seconds of decoding until it was
    decided. rejected: the texts of the drafted tokens in whose place it stands, of which the first
    has the probabilities rejected_p and rejected_q."""

    id: int
    text: str
    origin: str = PLAIN_TOKEN
    round: int = 0  # from 1 on; 0 of a token of the prompt
    at: float = 0.0
    p: float | None = None
    q: float | None = None
    overlap: float | None = None  # sum of min(p, q) over the vocabulary
    rejected: Sequence[str] = ()
    rejected_p: float | None = None
    rejected_q: float | None = None
    # (id, log-probability), the token's own first; None: not recorded.
    top_logprobs: Sequence[tuple[int, float]] | None = None

    def as_json(self) -> dict:
        """The object that cli/tokens.js draws. A draft's NaN, which JSON lacks, is null."""
        values = self._asdict()
        top_logprobs = values.pop("top_logprobs")
        values["logprob"] = top_logprobs[0][1] if top_logprobs else None
        return {key: None if value != value else value for key, value in values.items()}


def token_of(answer: Answer, number: int, text: str, at: float, num_logprobs: int | None) -> Token:
    """Token `number` of an answer. num_logprobs: of so many more top tokens; None leaves out
    probabilities."""
    request = answer.request
    record = answer.token_record(number)
    rejected = answer.rejected_texts(record)
    round = request.token_steps[number] + 1
    token = Token(request.tokens[number], text, token_origin(record), round, at, rejected=rejected)
    if num_logprobs is None:
        return token
    p, q, rejected_p, rejected_q = request.token_probs[number]
    pairs = request.top_logprobs[number][: 1 + num_logprobs]
    token = token._replace(p=p, top_logprobs=logprob_pairs(pairs))
    if rejected:
        token = token._replace(rejected_p=rejected_p, rejected_q=rejected_q)
    if record is not None and record.index < record.k:
        token = token._replace(q=q, overlap=record.overlap)
    return token


def logprob_pairs(pairs: Sequence) -> list[tuple[int, float]]:
    """A token's pairs (id, log-probability) as JSON can write them."""
    return [(int(id), max(logprob, MIN_LOGPROB)) for id, logprob in pairs]


def page(file: Path) -> str:
    """A file of HTML in which a line such as /* tokens.js */ is replaced by that file, from its own
    folder or from this one."""

    def included(line: re.Match) -> str:
        sibling = file.with_name(line[1])
        part = sibling if sibling.exists() else Path(__file__).with_name(line[1])
        return part.read_text("utf-8")

    return re.sub(r"/\* (\w+\.(?:css|js)) \*/\n", included, file.read_text("utf-8"))


def write_report(options: Options, answers: Collection[RowAnswer], engine: Engine) -> None:
    """Write --report's page of these answers, whose engine has recorded log-probabilities."""
    about = {
        "id": Path(options.model.source).name,
        "draft": options.draft.source and str(options.draft.source),
        "k": engine.planner.speculate_k,
        "greedy_text": greedy_text(engine),
        "plain_tok_s": 1 / engine.planner.costs.decode_s if engine.planner.costs else None,
        "plain_source": "as calibrated before the run",
    }
    data = {"about": about, "answers": [section(answer, engine) for answer in answers]}
    # A text may hold </script>, so the data has no <.
    script = json.dumps(data).replace("<", "\\u003c")
    html = page(Path(__file__).with_name("report.html")).replace("/* data */", script)
    write_atomically(
        Path(options.output.report), lambda partial: partial.write_text(html, encoding="utf-8")
    )


def section(answer: RowAnswer, engine: Engine) -> dict:
    """An answer with its tokens, the (k, accepted) of its rounds, and the costs of its steps."""
    request = answer.request
    row = answer.row
    label = f"seed {row.seed}, sample {row.sample}"
    if row.prompt.location:  # which has the line and the id
        label = f"{row.prompt.location}, {label}"
    last = len(answer.ids) - 1
    # Text that `close` released joins the last token.
    texts = [*answer.pieces[:last], "".join(answer.pieces[last:])]
    seconds = (step.seconds for step in request.steps)
    end_times = list(itertools.accumulate(seconds, initial=request.prefill_s))
    tokens = []
    for i, number in enumerate(request.token_steps):
        token = token_of(answer, i, texts[i], end_times[number], 0)
        tokens.append(token.as_json())
    figures = speculative(engine, Timing([request]))
    return {
        "prompt": row.prompt.text,
        "label": label,
        "finish_reason": answer.finish_reason,
        "error": request.error and str(request.error),
        "tokens": tokens,
        "steps": [(r.k, r.accepted) for r in request.token_records if not (r.index or r.first)],
        "costs": list(map(cost_of, request.steps)),
        "rows": max((len(step.positions) for step in request.steps), default=1),
        "summary": summary(figures) if figures else [],
    }


def cost_of(step: StepRecord) -> dict:
    """What a step took, and the calibrated cost of one with its K in plain steps."""
    is_calibrated = covers(step.costs, [step.k])
    return {
        "k": step.k,
        "seconds": step.seconds,
        "draft_s": step.draft_s,
        "verify_s": step.verify_s,
        "plain_steps": step.costs.round(step.k) if is_calibrated else None,
    }
