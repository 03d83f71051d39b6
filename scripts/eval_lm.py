"""Tasks of the lm-evaluation-harness on a folder: `python -m scripts.eval_lm --checkpoint DIR
--tasks hellaswag,gsm8k`.

    QuickdraftLM    the harness's interface to a model: log-likelihoods, rolling ones, generation,
                    the chat template
    score           rows of tokens -> log-likelihoods of the tokens that follow their last positions
    score_branches  the same for several continuations of a prefix, which runs once
    sampling_of     a task's generation settings -> Sampling; refuses settings that would change the
                    text
    run, main       the command line: the harness's own table on stdout, all else on stderr

The harness (github.com/EleutherAI/lm-evaluation-harness, lm_eval) turns tasks into prompts and
answers into metrics; this file answers its requests. Special tokens in prompts and long prompts are
treated as the harness's Hugging Face model treats them, so that figures compare;
`loglikelihood_rolling` names the exception.
"""

if __name__ == "__main__":  # before torch is imported
    from cli.process import prepare

    prepare()

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cli.errors import exit_on_error, fail
from cli.flags import FLAGS, Parser, add_model, draft_options, model_options, positive
from cli.options import check_writable
from decoding.answers import Answer
from decoding.engine import Engine
from decoding.errors import UserError
from decoding.sampling import Sampling
from drafts.registry import load_models
from generate import LLM
from loading.chat_messages import first_text, message_forms
from loading.files import write_atomically
from loading.options import DraftOptions, ModelOptions
from loading.target import pick_device
from loading.tokenizer import Tokenizer
from model import Caches, Transformer, takes_long_factors

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    if __name__ != "__main__":
        raise
    fail(f"scripts.eval_lm needs the lm-evaluation-harness: pip install lm_eval ({error})")

# Positions that the head scores at once: 0.26 GB of logits for a vocabulary of 128k.
HEAD_ROWS = 512
MAX_GEN_TOKS = 256  # the harness's default for tasks without their own
# Marks where a task's beginning of an answer ends in a rendered template. Texts do not contain this
# noncharacter.
ANSWER_END = "\ufdd2"

# Flags that are stored with the harness's results.
REPORTED_FLAGS = (
    "checkpoint",
    "dtype",
    "quantize",
    "quantize_head",
    "draft_checkpoint",
    "draft",
    "max_length",
)

InputRow = tuple[int, ...]  # input tokens of one row of a pass
Score = tuple[float, bool]  # (log-likelihood in nats, is every token the most likely one?)


class Continuation(NamedTuple):
    """The tokens that one request asks about; each follows one of its row's last positions."""

    request_number: int
    targets: Sequence[int]


class Branch(NamedTuple):
    """One way in which a shared prefix goes on."""

    tokens: Sequence[int]  # input tokens after the prefix
    continuations: list[Continuation]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    T = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)  # (B, T)


@torch.inference_mode()
def score(
    model: Transformer,
    rows: Sequence[Sequence[int]],
    continuations: Sequence[list[Continuation]],
    starts: Tensor | None = None,
    caches: Caches | None = None,
) -> Iterator[tuple[int, Score]]:
    """Yield (number of the request, its score) for all continuations of each row.

    Rows are padded at the end, which no earlier position attends to. Only the positions of
    continuations go through the head, because all logits (B, T, V) would take 2 GB for a row of
    4096 tokens and a vocabulary of 128k. `starts` (B,) are the positions of the rows' first tokens;
    `caches` have the positions before them.
    """
    device = model.norm.weight.device
    tokens = padded(rows, device)
    pos = torch.arange(tokens.size(1), device=device)  # (T,)
    if starts is not None:
        pos = starts[:, None] + pos  # (B, T)
    hidden = model.hidden(tokens, pos, caches)  # (B, T, D)
    predictions = []
    for row_number, row in enumerate(rows):
        for _, targets in continuations[row_number]:
            first_position = len(row) - len(targets)
            for position, target in enumerate(targets, first_position):
                predictions.append((row_number, position, target))
    row, position, target = torch.tensor(predictions, device=device).unbind(1)  # (N,) each
    log_probs = []
    is_top = []
    for h, ids in zip(hidden[row, position].split(HEAD_ROWS), target.split(HEAD_ROWS)):
        logits = model.head(h)  # (n, V) float32
        log_probs.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].double())
        is_top.append(logits.argmax(-1) == ids)
    flat = [continuation for of_row in continuations for continuation in of_row]
    lengths = [len(continuation.targets) for continuation in flat]
    parts = zip(flat, torch.cat(log_probs).split(lengths), torch.cat(is_top).split(lengths))
    for continuation, log_p, top in parts:
        log_likelihood = log_p.sum().item()
        if math.isnan(log_likelihood):
            raise UserError("the model's logits are not finite")
        yield continuation.request_number, (log_likelihood, bool(top.all()))


@torch.inference_mode()
def score_branches(
    model: Transformer, prefixes: Sequence[Sequence[int]], branches: Sequence[list[Branch]]
) -> Iterator[tuple[int, Score]]:
    """Yield what `score` yields, for the branches of each prefix. A prefix runs once; each of its
    branches overwrites the cached positions of the one before."""
    device = model.norm.weight.device
    starts = torch.tensor([len(prefix) for prefix in prefixes], device=device)  # (B,)
    prefix_length = max(map(len, prefixes))
    branch_length = max(len(branch.tokens) for of_prefix in branches for branch in of_prefix)
    caches = model.make_caches(len(prefixes), prefix_length + branch_length)
    prefix_pos = torch.arange(prefix_length, device=device)
    model.hidden(padded(prefixes, device), prefix_pos, caches.slice_to(prefix_length))
    for number in range(max(map(len, branches))):
        rows = []
        continuations = []
        for of_prefix in branches:
            # A prefix with fewer branches runs its last one again, and nothing is scored.
            branch = of_prefix[min(number, len(of_prefix) - 1)]
            rows.append(branch.tokens)
            continuations.append(branch.continuations if number < len(of_prefix) else [])
        yield from score(model, rows, continuations, starts, caches)


def sampling_of(settings: dict) -> Sampling:
    """A task's normalized generation settings, without `until` and `max_gen_toks`, as a Sampling.
    UserError for a setting that would change the text and is not a field of Sampling."""
    names = [field.name for field in dataclasses.fields(Sampling)]
    for name, value in settings.items():
        is_supported = name in names or name == "do_sample" or (name == "num_beams" and value == 1)
        if not is_supported and value is not None:
            raise UserError(
                f"generation_kwargs: {name} = {value!r} is not supported; there are until,"
                f" max_gen_toks, do_sample, {', '.join(names)}"
            )
    if not settings.get("do_sample"):
        settings = settings | {"temperature": 0.0}
    return Sampling(**{name: settings[name] for name in names if settings.get(name) is not None})


class QuickdraftLM(TemplateLM):
    """A model and its tokenizer, in the form that lm_eval.simple_evaluate takes.

    `max_length`: input tokens of one pass; default: the model's context. Longer inputs lose their
    first tokens, and one line on stderr counts these requests. `drafter` is used for generation.
    Request n for text has seed `seed` + n. The harness stores requests under `name`.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        drafter=None,
        seed: int = 0,
        name: str = "quickdraft",
    ):
        super().__init__()
        limit = model.config.max_seq_length
        if max_length is not None and not 1 <= max_length <= limit:
            raise UserError(f"--max_length {max_length} must lie between 1 and the model's {limit}")
        if tokenizer.bos_id is None and not tokenizer.stop_ids:
            raise UserError(
                "the tokenizer has neither BOS nor an end token to precede a text's first token"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.batch_size = batch_size
        self.max_length = max_length or limit
        self.seed = seed
        self.name = name
        self._notices: set[str] = set()  # those that have been printed
        self._device = model.norm.weight.device

    @property
    def eot_token_id(self) -> int:
        """The lowest of the ids that end a text or a turn: models number the end of a text
        first."""
        return min(self.tokenizer.stop_ids, default=self.tokenizer.bos_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text: BOS, or without BOS (Qwen) the end of the text
        before."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        """Ids of a text. Names of special tokens in it become those tokens, because a rendered chat
        template arrives as text. BOS leads the ids if the folder adds BOS and the text does not
        begin with it."""
        ids = self.tokenizer.parse(string)
        bos = self.tokenizer.bos_id
        if bos is None or not self.tokenizer.add_bos:
            return ids
        needs_bos = ids[:1] != [bos] if add_special_tokens is None else add_special_tokens
        return [bos, *ids] if needs_bos else ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation in the folder's template. Without a generation prompt the last message
        is the start of an answer, and the template's text after it is removed. A template that
        refuses system messages, or leaves them out, gets the conversation without them."""
        if self.tokenizer.template is None:
            raise UserError("this folder has no chat template: leave --apply_chat_template away")
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            messages[-1]["content"] += f"{ANSWER_END} "
        try:
            text = self._render(messages, add_generation_prompt)
        except UserError as error:
            without_system = [message for message in messages if message["role"] != "system"]
            if len(without_system) == len(messages):
                raise
            text = self._render(without_system, add_generation_prompt)
            if str(error) not in self._notices:
                self._notices.add(str(error))
                print(f"without system messages: {error}", file=sys.stderr)
        if add_generation_prompt:
            return text
        text, separator, ending = text.rpartition(ANSWER_END)
        if not separator:
            raise UserError(
                "the chat template leaves out the last message, which the task continues"
            )
        # A template that trims messages would trim this one too.
        return text if ending.startswith(" ") else text.rstrip()

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        template = self.tokenizer.template
        forms = message_forms(messages, template.developer, template.content_form)
        return first_text(lambda form: template.render(form, add_generation_prompt), forms)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        """Requests are (strings or None, context ids, continuation ids). The inherited
        `loglikelihood` has encoded the two texts together and moved spaces from the context's end
        to the continuation. Requests with the same input tokens, such as choices of one token each,
        share a row; rows with the same context run it once."""
        scores = self._scores(self._input_rows(requests))
        results: list = [None] * len(requests)
        for number, result in tqdm(
            scores, total=len(requests), desc="score", leave=False, disable=disable_tqdm
        ):
            results[number] = result
            strings = requests[number][0]
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, result)
        return results

    def _input_rows(self, requests) -> dict[InputRow, list[Continuation]]:
        """The different rows of input tokens, and the continuations that each one is to score. A
        row keeps the last `max_length` tokens of a request."""
        continuations_by_row: dict[InputRow, list[Continuation]] = {}
        num_truncated = 0
        for number, (strings, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens cannot be scored: it must have"
                    f" 1 to {self.max_length}, the positions of the model; the request is"
                    f" {str(strings)[:200]}"
                )
            num_truncated += len(context) + len(continuation) > self.max_length + 1
            ids = [*(context or [self.prefix_token_id]), *continuation]
            row = tuple(ids[-self.max_length - 1 : -1])  # the last token is a target and no input
            continuations = continuations_by_row.setdefault(row, [])
            continuations.append(Continuation(number, continuation))
        self._report_truncated(num_truncated, len(requests))
        return continuations_by_row

    def _shared_prefixes(
        self, continuations_by_row: dict[InputRow, list[Continuation]]
    ) -> dict[InputRow, list[InputRow]]:
        """The prefixes with which several rows begin, such as a question and its choices, and these
        rows. longrope depends on a row's last position, so there rows share nothing."""
        if self.model.config.rope_long:
            return {}
        rows_by_prefix: dict[InputRow, list[InputRow]] = {}
        max_targets = 0
        for row, continuations in continuations_by_row.items():
            num_targets = max(len(continuation.targets) for continuation in continuations)
            max_targets = max(max_targets, num_targets)
            rows_by_prefix.setdefault(row[:-num_targets], []).append(row)
        limit = self.model.config.max_seq_length - max_targets  # padding must fit in the context
        return {
            prefix: rows
            for prefix, rows in rows_by_prefix.items()
            if 0 < len(prefix) <= limit and len(rows) > 1
        }

    def _scores(
        self, continuations_by_row: dict[InputRow, list[Continuation]]
    ) -> Iterator[tuple[int, Score]]:
        """What `score` yields for all rows: first for those that share a prefix."""
        lone_rows = dict(continuations_by_row)
        branches_by_prefix: dict[InputRow, list[Branch]] = {}
        for prefix, rows in self._shared_prefixes(continuations_by_row).items():
            n = len(prefix)
            branches_by_prefix[prefix] = [Branch(row[n:], lone_rows.pop(row)) for row in rows]
        for prefixes in self._batches(branches_by_prefix):
            branches = [branches_by_prefix[prefix] for prefix in prefixes]
            yield from score_branches(self.model, prefixes, branches)
        for batch in self._batches(lone_rows):
            yield from score(self.model, batch, [lone_rows[row] for row in batch])

    def _batches(self, rows: Iterable[InputRow]) -> Iterator[list[InputRow]]:
        """Rows of similar length. The longest come first: if any does not fit in memory, they fail
        at once. Rows with longrope's long factors stand apart from others."""
        ordered = sorted(rows, key=len, reverse=True)
        for _, alike in itertools.groupby(ordered, self._is_long):
            alike = list(alike)
            for start in range(0, len(alike), self.batch_size):
                yield alike[start : start + self.batch_size]

    def _is_long(self, row: InputRow) -> bool:
        return takes_long_factors(self.model.config, len(row))

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in windows of max_length tokens that score every token once.
        The text is encoded without BOS, and the prefix token leads its first window. The harness's
        Hugging Face model leaves the tokenizer's BOS after the prefix, and scores it as a token of
        the text."""
        windows = []
        request_numbers = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            ):
                context, targets = make_disjoint_window(pair)
                windows.append((None, context, targets))
                request_numbers.append(number)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        totals = [0.0] * len(requests)
        for number, (log_p, _) in zip(request_numbers, scores):
            totals[number] += log_p
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Text up to a stop string, a stop token or the task's number of tokens. Each text is that
        of `generate` for its prompt alone with its seed, in any batch."""
        if not requests:
            return []
        answers = []
        num_truncated = 0
        for number, request in enumerate(requests):
            context, gen_kwargs = request.args
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            answer = self._answer(number, prompt, gen_kwargs)
            num_truncated += len(answer.prompt) < len(prompt)
            answers.append(answer)
        self._report_truncated(num_truncated, len(requests))
        numbers = {answer: number for number, answer in enumerate(answers)}
        batch_size = min(self.batch_size, len(answers))
        length = max(
            len(answer.prompt) + answer.request_args["max_new_tokens"] for answer in answers
        )
        engine = Engine(self.model, batch_size, length, drafter=self.drafter)
        llm = LLM.from_engine(engine, self.tokenizer)
        finished = tqdm(
            llm.run(answers),
            total=len(requests),
            desc="generate",
            leave=False,
            disable=disable_tqdm,
        )
        for answer in finished:
            number = numbers[answer]
            if isinstance(answer.request.error, UserError):
                raise UserError(f"request {number}: {answer.request.error}")
            answer.check()
            self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)
        return [answer.text for answer in answers]

    def _answer(self, number: int, prompt: list[int], gen_kwargs: dict) -> Answer:
        """The answer that a request asks for. A prompt that leaves too little room loses its first
        tokens."""
        try:
            settings = dict(normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS))
        except ValueError as error:
            raise UserError(f"generation_kwargs: {error}; set --gen_kwargs KEY=NUMBER") from None
        max_new_tokens = settings.pop("max_gen_toks")
        stops = [stop for stop in settings.pop("until") if stop]
        if not 1 <= max_new_tokens < self.max_length:
            raise UserError(
                f"max_gen_toks = {max_new_tokens} must lie between 1 and {self.max_length - 1}, to"
                f" leave room for a prompt in {self.max_length} positions: set --gen_kwargs"
                " max_gen_toks=N"
            )
        room = self.max_length - max_new_tokens
        answer = Answer(
            self.tokenizer,
            prompt[-room:],
            stops,
            max_new_tokens=max_new_tokens,
            sampling=sampling_of(settings),
            stop_ids=self.tokenizer.stop_ids,
            seed=self.seed + number,
        )
        # The text is decoded without its prompt, so it has no leading space if the tokenizer puts
        # one before every text (sentencepiece).
        answer.stream = self.tokenizer.stream()
        return answer

    def _report_truncated(self, num_truncated: int, num_requests: int) -> None:
        if num_truncated:
            print(
                f"{num_truncated} of {num_requests} requests do not fit in {self.max_length}"
                " positions: their first tokens are left out",
                file=sys.stderr,
            )


class EvaluationOptions(NamedTuple):
    """`flags`: all flags by name; the lm-evaluation-harness reads most of them."""

    model: ModelOptions
    draft: DraftOptions
    flags: dict


def parse_args() -> EvaluationOptions:
    parser = Parser(description="Run tasks of the lm-evaluation-harness on a model.")
    add = parser.add_argument
    add_model(parser)
    add(
        "--tasks",
        required=True,
        metavar="NAME,NAME",
        help="tasks of the harness, or of --include_path",
    )
    add("--include_path", metavar="DIR", help="a folder of your own YAML tasks")
    add("--limit", type=positive, metavar="N", help="only the first N documents of each task")
    add(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="examples before each question; default: the task's",
    )
    add(
        "--batch_size",
        type=positive,
        default=8,
        help="requests that run together; default: %(default)s",
    )
    add(
        "--max_length",
        type=positive,
        metavar="N",
        help="input tokens of one pass; default: the model's context",
    )
    add(
        "--apply_chat_template",
        action="store_true",
        help="write prompts in the folder's chat template",
    )
    add("--system", metavar="TEXT", help="system message, or text before every prompt")
    add(
        "--gen_kwargs",
        metavar="KEY=VALUE,…",
        help="replace a task's settings, such as max_gen_toks or temperature",
    )
    add("--output", metavar="FILE", help="write the harness's results as JSON")
    draft = parser.add_mutually_exclusive_group()
    FLAGS["draft_checkpoint"].add_to(draft)
    FLAGS["draft"].add_to(draft)
    args = parser.parse_args()
    return EvaluationOptions(model_options(args), draft_options(args), vars(args))


def check_tasks(names: Sequence[str], manager) -> None:
    """UserError for a task that the harness's TaskManager does not have."""
    for name in names:
        if name in manager.all_tasks:
            continue
        similar_names = get_close_matches(name, manager.all_tasks, n=3)
        hint = "--include_path DIR adds a folder of YAML tasks"
        if similar_names:
            hint = f"nearest: {', '.join(similar_names)}"
        raise UserError(f"--tasks: the harness has no task {name!r}; {hint}")


def run(options: EvaluationOptions) -> dict:
    """The harness's results. UserError for an unknown task, before the model is loaded."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    flags = options.flags
    check_writable("output", flags["output"])
    folder = flags["include_path"]
    if folder and not Path(folder).is_dir():
        raise UserError(f"--include_path {folder}: no such folder")
    tasks = [name.strip() for name in flags["tasks"].split(",")]
    manager = TaskManager(include_path=folder)
    check_tasks(tasks, manager)
    device = pick_device(options.model.device)
    model, tokenizer, drafter = load_models(options.model, options.draft, device, progress=True)
    lm = QuickdraftLM(
        model,
        tokenizer,
        batch_size=flags["batch_size"],
        max_length=flags["max_length"],
        drafter=drafter,
        name=options.model.checkpoint,
    )
    return simple_evaluate(
        lm,
        model_args={name: flags[name] for name in REPORTED_FLAGS},
        tasks=tasks,
        num_fewshot=flags["num_fewshot"],
        batch_size=flags["batch_size"],
        device=str(lm.device),
        limit=flags["limit"],
        log_samples=False,
        task_manager=manager,
        apply_chat_template=flags["apply_chat_template"],
        system_instruction=flags["system"],
        gen_kwargs=flags["gen_kwargs"],
    )


def main() -> None:
    with exit_on_error():
        options = parse_args()
        results = run(options)
        from lm_eval.utils import handle_non_serializable, make_table

        if file := options.flags["output"]:
            text = json.dumps(results, indent=2, default=handle_non_serializable) + "\n"
            write_atomically(Path(file), lambda partial: partial.write_text(text, encoding="utf-8"))
        print(make_table(results, "results"), flush=True)
        if results.get("groups"):
            print(make_table(results, "groups"), flush=True)


if __name__ == "__main__":
    main()
