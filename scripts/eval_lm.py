"""Tasks of the lm-evaluation-harness on a folder: `python -m scripts.eval_lm --checkpoint DIR --tasks hellaswag,gsm8k`.

    QuickdraftLM    the harness's interface to a model: log-likelihoods, rolling ones, generation, the chat template
    score           rows of tokens through the model -> log-likelihoods of their last tokens
    sampling_of     a task's generation settings -> Sampling; refuses what would change the text and is not computed
    run, main       the command line: the harness's own table on stdout, everything else on stderr

The harness (github.com/EleutherAI/lm-evaluation-harness, lm_eval) makes prompts of tasks and metrics of what comes
back; this file knows no task and no metric. Special tokens in prompts and the cutting of long ones are treated as the
harness's own Hugging Face model treats them, so that figures compare; `loglikelihood_rolling` says where they differ.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from cli.errors import ending_plainly, fail
from cli.flags import DTYPES, Parser, positive
from cli.load import load, pick_device
from decoding.sampling import Sampling
from generate import Engine
from loading.files import write_atomically
from loading.tokenizer import StopStrings, Tokenizer
from model import Transformer
from quantize import SCHEMES
from tp import ALONE

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    if __name__ != "__main__":
        raise
    fail(f"scripts.eval_lm needs the lm-evaluation-harness: pip install -r requirements-dev.txt ({error})")

HEAD_ROWS = 512  # positions that the head scores at once: 0.26 GB of logits for a vocabulary of 128k
MAX_GEN_TOKS = 256  # new tokens where a task does not say: the harness's own number
ANSWER = "\ufdd2"  # a noncharacter that marks where an answer begun by a task ends in the rendered template

# --------------------------------------------------------------------------------------- log-likelihoods


@torch.inference_mode()
def score(
    model: Transformer, fed: Sequence[Sequence[int]], wanted: Sequence[tuple[int, Sequence[int]]]
) -> list[tuple[float, bool]]:
    """(log-likelihood in nats, is every token the likeliest) of each pair in `wanted`: a row of `fed`, and the tokens
    that follow its last positions, one each.

    Rows are padded behind their end, where none of their own positions looks. Only the positions wanted go through the
    head: logits of all, (B, T, V), would be 2 GB a row of 4096 tokens with a vocabulary of 128k.
    """
    device, T = model.norm.weight.device, max(map(len, fed))
    tokens = torch.tensor([[*row, *[0] * (T - len(row))] for row in fed], device=device)  # (B, T)
    hidden = model.hidden(tokens, torch.arange(T, device=device))  # (B, T, D)
    places = [(row, len(fed[row]) - n) for row, targets in wanted for n in range(len(targets), 0, -1)]
    row, position = torch.tensor(places, device=device).unbind(1)  # (N,) each
    target = torch.tensor([id for _, targets in wanted for id in targets], device=device)  # (N,)
    log_p, likeliest = [], []
    for h, ids in zip(hidden[row, position].split(HEAD_ROWS), target.split(HEAD_ROWS)):
        logits = model.head(h)  # (n, V) float32
        log_p.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].double())
        likeliest.append(logits.argmax(-1) == ids)
    if any(part.isnan().any() for part in log_p):
        raise ValueError("the model's logits are not finite")
    lengths = [len(targets) for _, targets in wanted]
    sums = (part.sum().item() for part in torch.cat(log_p).split(lengths))
    return list(zip(sums, (bool(part.all()) for part in torch.cat(likeliest).split(lengths))))


# -------------------------------------------------------------------------------------------- generation


class Ask(NamedTuple):
    """One request for text."""

    prompt: list[int]
    new: int  # tokens at most
    stops: list[str]
    sampling: Sampling
    stop_ids: frozenset[int]
    seed: int


def sampling_of(settings: dict) -> Sampling:
    """The harness's normalized generation settings, without `until` and `max_gen_toks`. ValueError for one that would
    change the text and is not computed here."""
    values = {name: settings.get(name) for name in ("top_k", "top_p", "min_p")}
    for name, value in settings.items():
        known = name in values or name in ("do_sample", "temperature") or (name == "num_beams" and value == 1)
        if not known and value is not None:
            raise ValueError(
                f"generation_kwargs: {name} = {value!r} is not supported; there are until, max_gen_toks, do_sample,"
                " temperature, top_k, top_p and min_p"
            )
    if not settings.get("do_sample"):
        return Sampling(0.0)
    return Sampling(settings.get("temperature", 1.0), **values)


class QuickdraftLM(TemplateLM):
    """A model and its tokenizer as lm_eval.simple_evaluate takes them.

    `max_length`: tokens that are fed at once; default: the model's context. Longer inputs lose their first tokens, and
    one line on stderr counts them. A `drafter` of speculative.py serves generation. `seed` is that of the first request
    for text, the next one's is one higher. `name` tells tokenizers apart where the harness stores requests.
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
            raise ValueError(
                "the tokenizer has neither BOS nor an end token: nothing could precede a text's first token"
            )
        self.model, self.tokenizer, self.drafter = model, tokenizer, drafter
        self.batch_size, self.max_length, self.seed, self.name = batch_size, max_length or limit, seed, name
        self._said: set[str] = set()
        self.engine: Engine | None = None  # of the last generation, for as long as requests fit in it
        self._device = model.norm.weight.device

    # ------------------------------------------------------------------------------------ text and tokens

    @property
    def eot_token_id(self) -> int:
        """The lowest of the ids that end a text or a turn: models number the end of a text first."""
        return min(self.tokenizer.stop_ids, default=self.tokenizer.bos_id)

    @property
    def prefix_token_id(self) -> int:
        """What precedes the first token of a text: BOS, or the end of the text before where there is no BOS (Qwen)."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Ids of a text, in which the names of special tokens are those tokens: a rendered chat template is a text like
        any other here. BOS leads them if the folder's policy says so and the text does not begin with it itself."""
        ids, bos = self.tokenizer.parse(string), self.tokenizer.bos_id
        wanted = ids[:1] != [bos] if add_special_tokens is None else add_special_tokens
        return [bos, *ids] if wanted and self.tokenizer.add_bos and bos is not None else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the folder's template writes it. Without a generation prompt the last message is an
        answer begun by the task: what the template puts behind it is cut off. A template that refuses system messages
        gets the conversation without."""
        template = self.tokenizer.template
        if template is None:
            raise ValueError("this folder has no chat template: leave --apply_chat_template away")
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            messages[-1]["content"] += f"{ANSWER} "
        try:
            text = template.render(messages, add_generation_prompt)
        except ValueError as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            text = template.render(others, add_generation_prompt)
            self._say_once(f"without system messages: {error}")
        if add_generation_prompt:
            return text
        text, found, rest = text.rpartition(ANSWER)
        if not found:
            raise ValueError("the chat template leaves out the last message, which the task wants continued")
        return text if rest.startswith(" ") else text.rstrip()  # a template that trims messages would trim this one

    # ---------------------------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """Requests are (strings or None, context ids, continuation ids); the inherited `loglikelihood` encodes the two
        together and moves the context's trailing spaces. Requests that feed the same tokens, such as choices of one
        token each, are one row."""
        rows: dict[tuple[int, ...], list[int]] = {}  # what is fed -> numbers of the requests
        for number, (strings, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens cannot be scored: it must have 1 to"
                    f" {self.max_length}, the positions of the model; the request is {str(strings)[:200]}"
                )
            ids = [*(context or [self.prefix_token_id]), *continuation]
            rows.setdefault(tuple(ids[-self.max_length - 1 : -1]), []).append(number)  # nothing follows the last token
        self._say_cut(sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests), len(requests))
        found: list = [None] * len(requests)
        order = sorted(rows, key=len, reverse=True)  # what does not fit in memory fails at once
        with tqdm(total=len(requests), desc="score", leave=False, disable=disable_tqdm) as bar:
            for begin in range(0, len(order), self.batch_size):
                fed = order[begin : begin + self.batch_size]
                numbers = [(row, number) for row, ids in enumerate(fed) for number in rows[ids]]
                results = score(self.model, fed, [(row, requests[number][2]) for row, number in numbers])
                for (_, number), result in zip(numbers, results):
                    found[number] = result
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], result)
                bar.update(len(numbers))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Each text whole, in windows of max_length tokens that score every token once. The text is encoded without BOS
        and the first window is led by the prefix token: a BOS of the tokenizer's own behind it, which the harness's
        Hugging Face model leaves there, would be scored as a token of the text."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[number] += log_p
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --------------------------------------------------------------------------------------- generation

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Text up to a stop string, a stop token or the number of tokens that the task allows. Row by row it is what
        `generate` gives for that prompt alone with that seed, whatever the batch."""
        asks = [self._ask(number, *request.args) for number, request in enumerate(requests)]
        rooms = [self._limit - ask.new for ask in asks]
        self._say_cut(sum(len(ask.prompt) > room for ask, room in zip(asks, rooms)), len(asks))
        asks = [ask._replace(prompt=ask.prompt[-room:]) for ask, room in zip(asks, rooms)]
        if asks:
            self._fit_engine(asks)
        texts = [""] * len(asks)
        with tqdm(total=len(asks), desc="generate", leave=False, disable=disable_tqdm) as bar:
            for number, text in self._texts(asks):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(1)
        return texts

    @property
    def _limit(self) -> int:
        """Positions for a prompt and its new tokens."""
        draft = self.drafter.model.config.max_seq_length if getattr(self.drafter, "owns_cache", False) else None
        return min(self.max_length, draft or self.max_length)

    def _ask(self, number: int, context: str, gen_kwargs: dict) -> Ask:
        settings = dict(normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS))
        new, stops = settings.pop("max_gen_toks"), [stop for stop in settings.pop("until") if stop]
        if not 1 <= new < self._limit:
            raise ValueError(
                f"max_gen_toks = {new} must be at least 1 and leave room for a prompt in {self._limit} positions:"
                " set another with --gen_kwargs max_gen_toks=N"
            )
        # A special token is invisible in decoded text, so one that a task names as a stop must be met as an id.
        named = {id for name, id in self.tokenizer.specials.items() if name in stops}
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        return Ask(prompt, new, stops, sampling_of(settings), self.tokenizer.stop_ids | named, self.seed + number)

    def _fit_engine(self, asks: list[Ask]) -> None:
        """The engine that there is, or a larger one where these requests need it."""
        rows, length = min(self.batch_size, len(asks)), max(len(ask.prompt) + ask.new for ask in asks)
        if self.engine is not None:
            rows, length = max(rows, len(self.engine.state.pos)), max(length, self.engine.max_seq_length)
            if (rows, length) == (len(self.engine.state.pos), self.engine.max_seq_length):
                return
        self.engine = None  # its caches, before the next ones take memory
        self.engine = Engine(self.model, rows, length, drafter=self.drafter)

    def _texts(self, asks: list[Ask]) -> Iterator[tuple[int, str]]:
        """(number of the request, its text) as they end. An answer is decoded as a text of its own: it has no leading
        space where the tokenizer puts one before every text (sentencepiece)."""
        engine, running = self.engine, {}
        for number, ask in enumerate(asks):
            id = engine.add_request(
                ask.prompt, sampling=ask.sampling, max_new_tokens=ask.new, stop_ids=ask.stop_ids, seed=ask.seed
            )
            running[id] = number, engine.requests[id], self.tokenizer.stream(), StopStrings(ask.stops), []
        while running:
            for id, token in engine.step():
                if id in running:
                    _, request, stream, stops, pieces = running[id]
                    if token not in request.stop_ids:
                        pieces.append(stops.feed(stream.feed(token)))
                    if stops.stopped:
                        engine.abort(id)
            for id, (number, request, stream, stops, pieces) in list(running.items()):
                if request.finish_reason is not None:
                    if request.error is not None:
                        raise ValueError(f"request {number}: {request.error}")
                    del running[id]
                    yield number, "".join(pieces) + stops.feed(stream.flush()) + stops.flush()

    # ------------------------------------------------------------------------------------------ notices

    def _say_cut(self, cut: int, of: int) -> None:
        if cut:
            print(f"{cut} of {of} requests do not fit in {self.max_length} positions: their first tokens are left out",
                  file=sys.stderr)  # fmt: skip

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            print(message, file=sys.stderr)


# ------------------------------------------------------------------------------------------ command line


def run(args: argparse.Namespace) -> dict:
    """The harness's results. ValueError for a task that it does not know, before the model is loaded."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if args.output and not os.access(Path(args.output).resolve().parent, os.W_OK):
        raise ValueError(f"--output {args.output}: its folder does not exist or cannot be written to")
    if args.include_path and not Path(args.include_path).is_dir():
        raise ValueError(f"--include_path {args.include_path}: no such folder")
    tasks, manager = [name.strip() for name in args.tasks.split(",")], TaskManager(include_path=args.include_path)
    check_tasks(tasks, manager.all_tasks)
    model, tokenizer, drafter = load(args, pick_device(args.device), ALONE)
    lm = QuickdraftLM(
        model, tokenizer, batch_size=args.batch_size, max_length=args.max_length,
        drafter=drafter, name=args.checkpoint,
    )  # fmt: skip
    about = ("checkpoint", "dtype", "quantize", "quantize_head", "draft_checkpoint", "draft", "max_length")
    return simple_evaluate(
        lm, model_args={name: getattr(args, name) for name in about}, tasks=tasks, num_fewshot=args.num_fewshot,
        batch_size=args.batch_size, device=str(lm.device), limit=args.limit, log_samples=False, task_manager=manager,
        apply_chat_template=args.apply_chat_template, system_instruction=args.system, gen_kwargs=args.gen_kwargs,
    )  # fmt: skip


def check_tasks(tasks: list[str], known: list[str]) -> None:
    """ValueError for a name that the harness has not, with the nearest ones that it has."""
    for name in tasks:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f"nearest: {', '.join(near)}" if near else "--include_path DIR adds a folder of YAML tasks"
            raise ValueError(f"--tasks: the harness has no task {name!r}; {hint}")


def write(results: dict, file: Path) -> None:
    """JSON, under another name until it is whole."""
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(results, indent=2, default=handle_non_serializable) + "\n"
    write_atomically(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def parse_args() -> argparse.Namespace:
    parser = Parser(description="Tasks of the lm-evaluation-harness.")
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="PATH", help="a Hugging Face folder or a .gguf file")
    add("--tasks", required=True, metavar="NAME,NAME", help="of the harness, or of --include_path")
    add("--include_path", metavar="DIR", help="a folder of your own YAML tasks")
    add("--limit", type=positive, metavar="N", help="only the first N documents of each task")
    add("--num_fewshot", type=int, metavar="N", help="examples before each question; default: the task's")
    add("--batch_size", type=positive, default=8)
    add("--max_length", type=positive, metavar="N", help="tokens fed at once; default: the model's context")
    add("--apply_chat_template", action="store_true", help="prompts in the folder's chat format")
    add("--system", metavar="TEXT", help="system message, or text before every prompt")
    add("--gen_kwargs", metavar="KEY=VALUE,…", help="in place of the tasks' own: max_gen_toks, temperature, …")
    add("--output", metavar="FILE", help="write the harness's results as JSON")
    add("--quantize", metavar="SCHEME", help=", ".join(SCHEMES))
    add("--quantize_head", metavar="SCHEME", help="of the head, and of an embedding tied to it; default: as stored")
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument("--draft_checkpoint", metavar="PATH", help="a smaller model drafts what tasks have generated")
    draft.add_argument("--draft", metavar="SPEC", help="ngram[:N], layers:0-7,24-31 or quantized:SCHEME")
    add("--dtype", choices=DTYPES)
    add("--device")
    # Flags of generate.py that loading asks for.
    parser.set_defaults(random_weights=None, draft_quantize=None, draft_tp="replicated")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with ending_plainly():
        results = run(args)
        if args.output:
            write(results, Path(args.output))
        from lm_eval.utils import make_table

        kinds = ["results", "groups"] if results.get("groups") else ["results"]
        print(*[make_table(results, kind) for kind in kinds], sep="\n", flush=True)


if __name__ == "__main__":
    main()
