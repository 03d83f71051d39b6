"""Tasks of the lm-evaluation-harness on a folder: `python -m scripts.eval_lm --checkpoint DIR --tasks hellaswag,gsm8k`.

    QuickdraftLM    the harness's interface to a model: log-likelihoods, rolling ones, generation, the chat template
    score           rows of tokens -> log-likelihoods of the tokens that follow their last positions
    score_branches  the same for several continuations of a context, which runs once
    sampling_of     a task's generation settings -> Sampling; refuses settings that would change the text
    run, main       the command line: the harness's own table on stdout, all else on stderr

The harness (github.com/EleutherAI/lm-evaluation-harness, lm_eval) makes prompts of tasks and metrics of answers; this
file knows no task and no metric. It treats special tokens in prompts and long prompts as the harness's Hugging Face
model does, so that figures compare; `loglikelihood_rolling` names the exception.
"""

if __name__ == "__main__":  # before torch is imported: --help and wrong flags are answered at once
    from cli.start import answer_flags
    from scripts.flags import eval_lm_args

    answer_flags(eval_lm_args)

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cli.errors import ending_plainly, fail
from cli.load import load, pick_device
from decoding.sampling import Sampling
from generate import Engine
from loading.chat_messages import message_forms, render_complete
from loading.files import write_atomically
from loading.tokenizer import StopStrings, Tokenizer
from model import Caches, Transformer
from scripts.flags import eval_lm_args as parse_args
from tp import ALONE

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    if __name__ != "__main__":
        raise
    fail(f"scripts.eval_lm needs the lm-evaluation-harness: pip install lm_eval ({error})")

HEAD_ROWS = 512  # positions that the head scores at once: 0.26 GB of logits for a vocabulary of 128k
MAX_GEN_TOKS = 256  # the harness's default for tasks without their own
ANSWER_END = "\ufdd2"  # a noncharacter; marks in a rendered template where a task's beginning of an answer ends


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    T = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)  # (B, T)


@torch.inference_mode()
def score(
    model: Transformer, rows: Sequence[Sequence[int]], continuations: Sequence[tuple[int, Sequence[int]]],
    starts: Tensor | None = None, caches: Caches | None = None,
) -> list[tuple[float, bool]]:  # fmt: skip
    """(log-likelihood in nats, is every token the most likely one?) of each continuation. A continuation is (index of a
    row, target tokens): one target follows each of the row's last positions.

    Rows are padded at the end, which no earlier position attends to. Only the positions of continuations go through the
    head, because all logits (B, T, V) would take 2 GB for a row of 4096 tokens and a vocabulary of 128k. `starts` (B,):
    the positions of the rows' first tokens; `caches` have the positions before them.
    """
    device = model.norm.weight.device
    tokens = padded(rows, device)
    pos = torch.arange(tokens.size(1), device=device)  # (T,), or (B, T) with starts
    hidden = model.hidden(tokens, pos if starts is None else starts[:, None] + pos, caches)  # (B, T, D)
    positions = [(row, len(rows[row]) - n) for row, targets in continuations for n in range(len(targets), 0, -1)]
    row, position = torch.tensor(positions, device=device).unbind(1)  # (N,) each
    target = torch.tensor([id for _, targets in continuations for id in targets], device=device)  # (N,)
    log_p, is_top = [], []
    for h, ids in zip(hidden[row, position].split(HEAD_ROWS), target.split(HEAD_ROWS)):
        logits = model.head(h)  # (n, V) float32
        log_p.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].double())
        is_top.append(logits.argmax(-1) == ids)
    lengths = [len(targets) for _, targets in continuations]
    results = zip(torch.cat(log_p).split(lengths), torch.cat(is_top).split(lengths))
    results = [(values.sum().item(), bool(top.all())) for values, top in results]
    if any(math.isnan(total) for total, _ in results):
        raise ValueError("the model's logits are not finite")
    return results


@torch.inference_mode()
def score_branches(
    model: Transformer, prefixes: Sequence[Sequence[int]], branches: Sequence[Sequence[tuple[Sequence[int], list]]]
) -> Iterator[list[tuple[float, bool]]]:
    """Scores of the continuations of each prefix, which runs once. A branch is (tokens behind the prefix, its
    continuations, each of target tokens): every one overwrites the positions of the one before. Yields the scores of
    the first branch of all prefixes, then those of the second."""
    device = model.norm.weight.device
    starts = torch.tensor([len(prefix) for prefix in prefixes], device=device)  # (B,)
    length = max(map(len, prefixes))
    caches = model.make_caches(len(prefixes), length + max(len(branch[0]) for row in branches for branch in row))
    model.hidden(padded(prefixes, device), torch.arange(length, device=device), caches.slice_to(length))
    for number in range(max(map(len, branches))):
        rows = [row[min(number, len(row) - 1)][0] for row in branches]
        continuations = [(i, t) for i, row in enumerate(branches) if number < len(row) for t in row[number][1]]
        yield score(model, rows, continuations, starts, caches)


def sampling_of(settings: dict) -> Sampling:
    """A task's normalized generation settings, without `until` and `max_gen_toks`, as a Sampling. ValueError for a
    setting that would change the text and is not a field of Sampling."""
    names = [field.name for field in dataclasses.fields(Sampling)]
    for name, value in settings.items():
        is_supported = name in names or name == "do_sample" or (name == "num_beams" and value == 1)
        if not is_supported and value is not None:
            raise ValueError(
                f"generation_kwargs: {name} = {value!r} is not supported; there are until, max_gen_toks, do_sample,"
                f" {', '.join(names)}"
            )
    if not settings.get("do_sample"):
        settings = settings | {"temperature": 0.0}
    return Sampling(**{name: settings[name] for name in names if settings.get(name) is not None})


class QuickdraftLM(TemplateLM):
    """A model and its tokenizer, in the form that lm_eval.simple_evaluate takes.

    `max_length`: input tokens of one pass; default: the model's context. Longer inputs lose their first tokens, and one
    line on stderr counts these requests. `drafter` is used for generation. Request n for text has seed `seed` + n. The
    harness stores requests under `name`.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, *, batch_size: int = 8, max_length: int | None = None,
        drafter=None, seed: int = 0, name: str = "quickdraft",
    ):  # fmt: skip
        super().__init__()
        limit = model.config.max_seq_length
        if max_length is not None and not 1 <= max_length <= limit:
            raise ValueError(f"--max_length {max_length} must lie between 1 and the model's {limit}")
        if tokenizer.bos_id is None and not tokenizer.stop_ids:
            raise ValueError("the tokenizer has neither BOS nor an end token to precede a text's first token")
        self.model, self.tokenizer, self.drafter = model, tokenizer, drafter
        self.batch_size, self.max_length, self.seed, self.name = batch_size, max_length or limit, seed, name
        self._notices: set[str] = set()
        self.engine: Engine | None = None  # of the last generation; serves later ones that fit in it
        self._device = model.norm.weight.device

    @property
    def eot_token_id(self) -> int:
        """The lowest of the ids that end a text or a turn: models number the end of a text first."""
        return min(self.tokenizer.stop_ids, default=self.tokenizer.bos_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text: BOS, or without BOS (Qwen) the end of the text before."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Ids of a text. Names of special tokens in it become those tokens, because a rendered chat template arrives as
        text. BOS leads the ids if the folder adds BOS and the text does not begin with it."""
        ids, bos = self.tokenizer.parse(string), self.tokenizer.bos_id
        needs_bos = ids[:1] != [bos] if add_special_tokens is None else add_special_tokens
        return [bos, *ids] if needs_bos and self.tokenizer.add_bos and bos is not None else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation in the folder's template. Without a generation prompt the last message is the start of an
        answer, and the template's text behind it is removed. A template that refuses system messages, or leaves them
        out, gets the conversation without them."""
        template = self.tokenizer.template
        if template is None:
            raise ValueError("this folder has no chat template: leave --apply_chat_template away")
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            messages[-1]["content"] += f"{ANSWER_END} "

        def render(form: list[dict]) -> str:
            return template.render(form, add_generation_prompt)

        def forms(chat: list[dict]) -> Iterator[list[dict]]:
            return message_forms(chat, template.source in template.part_readers, has_developer=False)

        try:
            text = render_complete(render, forms(messages), template.roles())
        except ValueError as error:
            without_system = [message for message in messages if message["role"] != "system"]
            if len(without_system) == len(messages):
                raise
            text = render_complete(render, forms(without_system), template.roles())
            if str(error) not in self._notices:
                self._notices.add(str(error))
                print(f"without system messages: {error}", file=sys.stderr)
        if add_generation_prompt:
            return text
        text, separator, ending = text.rpartition(ANSWER_END)
        if not separator:
            raise ValueError("the chat template leaves out the last message, which the task continues")
        return text if ending.startswith(" ") else text.rstrip()  # a template that trims messages trims this one too

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """Requests are (strings or None, context ids, continuation ids). The inherited `loglikelihood` has encoded the
        two texts together and moved spaces from the context's end to the continuation. Requests with the same input
        tokens, such as choices of one token each, share a row; rows with the same context run it once."""
        numbers_by_row: dict[tuple[int, ...], list[int]] = {}
        for number, (strings, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens cannot be scored: it must have 1 to"
                    f" {self.max_length}, the positions of the model; the request is {str(strings)[:200]}"
                )
            ids = [*(context or [self.prefix_token_id]), *continuation]
            row = tuple(ids[-self.max_length - 1 : -1])  # the last token is a target and no input
            numbers_by_row.setdefault(row, []).append(number)
        self._report_truncated(sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests), len(requests))
        results: list = [None] * len(requests)
        branches: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # prefix -> rows that continue it, such as choices
        for row, numbers in numbers_by_row.items():
            num_targets = max(len(requests[number][2]) for number in numbers)
            branches.setdefault(row[:-num_targets], []).append(row)
        config, longest = self.model.config, max(len(continuation) for _, _, continuation in requests)
        # Padding must fit in the context. longrope depends on a row's last position, so it shares nothing.
        limit = 0 if config.rope_long else config.max_seq_length - longest
        shared = {prefix: rows for prefix, rows in branches.items() if 0 < len(prefix) <= limit and len(rows) > 1}
        rows = {row for rows in branches.values() for row in rows} - {row for rows in shared.values() for row in rows}
        rows = sorted(rows, key=len, reverse=True)  # if one does not fit in memory, the first one fails
        prefixes = sorted(shared, key=len, reverse=True)
        with tqdm(total=len(requests), desc="score", leave=False, disable=disable_tqdm) as bar:

            def add(numbers: list[int], scores: list[tuple[float, bool]]) -> None:
                for number, result in zip(numbers, scores, strict=True):
                    results[number] = result
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], result)
                bar.update(len(numbers))

            for start in range(0, len(prefixes), self.batch_size):
                batch = prefixes[start : start + self.batch_size]
                targets = {row: [requests[n][2] for n in numbers_by_row[row]] for p in batch for row in shared[p]}
                parts = [[(row[len(prefix) :], targets[row]) for row in shared[prefix]] for prefix in batch]
                for branch, scores in enumerate(score_branches(self.model, batch, parts)):
                    branch_rows = [shared[prefix][branch] for prefix in batch if branch < len(shared[prefix])]
                    add([number for row in branch_rows for number in numbers_by_row[row]], scores)
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                numbers = [(i, number) for i, row in enumerate(batch) for number in numbers_by_row[row]]
                scores = score(self.model, batch, [(i, requests[number][2]) for i, number in numbers])
                add([number for _, number in numbers], scores)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in windows of max_length tokens that score every token once. The text is encoded
        without BOS, and the prefix token leads its first window. The harness's Hugging Face model leaves the
        tokenizer's BOS behind the prefix, and scores it as a token of the text."""
        windows, window_numbers = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                window_numbers.append(number)
        totals = [0.0] * len(requests)
        for number, (log_p, _) in zip(window_numbers, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[number] += log_p
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Text up to a stop string, a stop token or the task's number of tokens. Each text is that of `generate` for
        its prompt alone with its seed, in any batch."""
        options, num_truncated = [self._options(number, *request.args) for number, request in enumerate(requests)], 0
        for kwargs in options:
            prompt, max_length = kwargs["prompt"], self.max_length - kwargs["max_new_tokens"]
            kwargs["prompt"], num_truncated = prompt[-max_length:], num_truncated + (len(prompt) > max_length)
        self._report_truncated(num_truncated, len(requests))
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generate", leave=False, disable=disable_tqdm) as bar:
            for number, text in self._texts(options):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(1)
        return texts

    def _options(self, number: int, context: str, gen_kwargs: dict) -> dict:
        """The keyword arguments of Engine.add_request, and "stops"."""
        settings = dict(normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS))
        max_new_tokens, stops = settings.pop("max_gen_toks"), [stop for stop in settings.pop("until") if stop]
        if not 1 <= max_new_tokens < self.max_length:
            raise ValueError(
                f"max_gen_toks = {max_new_tokens} must lie between 1 and {self.max_length - 1}, to leave room"
                f" for a prompt in {self.max_length} positions: set --gen_kwargs max_gen_toks=N"
            )
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        return {"prompt": prompt, "max_new_tokens": max_new_tokens, "sampling": sampling_of(settings),
                "stop_ids": self.tokenizer.stop_ids, "seed": self.seed + number, "stops": stops}  # fmt: skip

    def _fit_engine(self, options: list[dict]) -> Engine:
        """The last engine, or a larger one where these requests need it."""
        rows = min(self.batch_size, len(options))
        length = max(len(kwargs["prompt"]) + kwargs["max_new_tokens"] for kwargs in options)
        if self.engine is not None:
            rows, length = max(rows, self.engine.batch_size), max(length, self.engine.max_seq_length)
            if (rows, length) == (self.engine.batch_size, self.engine.max_seq_length):
                return self.engine
        self.engine = None  # frees its caches before the next ones take memory
        self.engine = Engine(self.model, rows, length, drafter=self.drafter)
        return self.engine

    def _texts(self, options: list[dict]) -> Iterator[tuple[int, str]]:
        """(index of a request, its text) when it ends. An answer is decoded without its prompt, so it has no leading
        space if the tokenizer puts one before every text (sentencepiece)."""
        if not options:
            return
        engine, running = self._fit_engine(options), {}
        for number, kwargs in enumerate(options):
            stops = StopStrings(kwargs.pop("stops"), self.tokenizer.specials)
            id = engine.add_request(**kwargs)
            running[id] = number, engine.requests[id], self.tokenizer.stream(), stops, []
        while running:
            for id, token in engine.step():
                if id in running:
                    _, request, stream, stops, pieces = running[id]
                    pieces.append(stops.feed_token(token, stream, is_last=token in request.stop_ids))
                    if stops.stopped:
                        engine.abort(id)
            for id, (number, request, stream, stops, pieces) in list(running.items()):
                if request.finish_reason is not None:
                    if request.error is not None:
                        raise ValueError(f"request {number}: {request.error}")
                    del running[id]
                    yield number, "".join(pieces) + stops.feed(stream.flush()) + stops.flush()

    def _report_truncated(self, num_truncated: int, num_requests: int) -> None:
        if num_truncated:
            print(f"{num_truncated} of {num_requests} requests do not fit in {self.max_length} positions: their first"
                  " tokens are left out", file=sys.stderr)  # fmt: skip


def run(args: argparse.Namespace) -> dict:
    """The harness's results. ValueError for an unknown task, before the model is loaded."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if args.output and not os.access(Path(args.output).resolve().parent, os.W_OK):
        raise ValueError(f"--output {args.output}: its folder does not exist or cannot be written to")
    if args.output and Path(args.output).is_dir():
        raise ValueError(f"--output {args.output} is a folder: name a file in it")
    if args.include_path and not Path(args.include_path).is_dir():
        raise ValueError(f"--include_path {args.include_path}: no such folder")
    tasks, manager = [name.strip() for name in args.tasks.split(",")], TaskManager(include_path=args.include_path)
    for name in tasks:
        if name not in manager.all_tasks:
            names = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"nearest: {', '.join(names)}" if names else "--include_path DIR adds a folder of YAML tasks"
            raise ValueError(f"--tasks: the harness has no task {name!r}; {hint}")
    model, tokenizer, drafter = load(args, pick_device(args.device), ALONE)
    lm = QuickdraftLM(
        model, tokenizer, batch_size=args.batch_size, max_length=args.max_length,
        drafter=drafter, name=args.checkpoint,
    )  # fmt: skip
    names = ("checkpoint", "dtype", "quantize", "quantize_head", "draft_checkpoint", "draft", "max_length")
    return simple_evaluate(
        lm, model_args={name: getattr(args, name) for name in names}, tasks=tasks, num_fewshot=args.num_fewshot,
        batch_size=args.batch_size, device=str(lm.device), limit=args.limit, log_samples=False, task_manager=manager,
        apply_chat_template=args.apply_chat_template, system_instruction=args.system, gen_kwargs=args.gen_kwargs,
    )  # fmt: skip


def main() -> None:
    args = parse_args()
    with ending_plainly():
        results = run(args)
        from lm_eval.utils import handle_non_serializable, make_table

        if args.output:
            text = json.dumps(results, indent=2, default=handle_non_serializable) + "\n"
            write_atomically(Path(args.output), lambda partial: partial.write_text(text, encoding="utf-8"))
        kinds = ["results", "groups"] if results.get("groups") else ["results"]
        print(*[make_table(results, kind) for kind in kinds], sep="\n", flush=True)


if __name__ == "__main__":
    main()
