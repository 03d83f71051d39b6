"""Decode text with a Llama-architecture model: `python generate.py --checkpoint DIR --prompt "Once
upon a time"`.

    decode                  the whole idea: prefill, then one token a step, for one prompt
    LLM                     a folder's model and tokenizer: text, chats and batches, with stop
                            strings and drafts

Read `decode` first. `LLM` gives the same tokens by way of an engine (decoding/engine.py), faster:
many prompts at a time, drafted or compiled, without waiting for each token.
model.py has the arithmetic, decoding/sampling.py the choice of a token, loading/ reads weights and
tokenizers, speculative.py drafts. Run as a program, this file hands over to cli/.
"""

if __name__ == "__main__":
    # This runs before torch is imported: cli/ handles Ctrl-C and flags from the first moment on.
    from cli.process import prepare

    prepare()
    from cli.start import main

    raise SystemExit(main())

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from numbers import Integral

import torch

import decoding.validation as validation
from decoding.answers import Answer, Completion
from decoding.errors import UserError
from decoding.logits import penalize_text, process
from decoding.sampling import INVALID, Sampling, uniform
from decoding.settings import (
    DEFAULT_LENGTH,
    DEFAULT_TEMPERATURE,
    default_sampling,
    new_tokens,
)
from model import KVCache, Transformer


@torch.inference_mode()
def decode(
    model: Transformer,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    seed: int = 0,
    cache_type: type[KVCache] = KVCache,
    logits_processor: Callable | None = None,
) -> Iterator[int]:
    """Prefill the prompt, then decode one token a step: yields new ids up to a stop id, which comes
    last, or up to max_new_tokens. logits_processor(logits (1, 1, V), tokens (1, S), pos (1, 1))
    returns the logits that the token after `pos` is drawn from. UserError, on the first `next`, for
    what validation.check_request refuses, and later for logits that are not finite."""
    from decoding.runner import ModelRunner  # here, so that `import generate` stays quick

    prompt = list(prompt)
    stop_ids = validation.check_request(model, prompt, max_new_tokens, sampling, seed, stop_ids)
    prompt = [int(id) for id in prompt]  # 5.0 passes the check, but is no index
    device = model.norm.weight.device
    max_length = len(prompt) + int(max_new_tokens)
    # The caches, and the shapes of passes that round as the engine's do.
    runner = ModelRunner(model, 1, max_length, cache_type=cache_type)
    seeds = torch.tensor([int(seed)], device=device)  # (1,)
    tokens = torch.tensor([prompt], device=device)  # (1, S) all so far
    h = runner.prefill(tokens, 0, len(prompt))  # (1, T, D)
    for length in range(len(prompt), max_length):
        # The newest token is at length - 1; the next one will be at `length`.
        pos = torch.tensor([length - 1], device=device)  # (1,) of the newest token
        logits = model.head(h[:, -1])  # (1, V)
        logits = penalize_text(logits, tokens, len(prompt), sampling)  # (1, V)
        if logits_processor is not None:  # it takes logits (B, T, V): here B = T = 1
            logits = process(logits_processor, logits[:, None], tokens, pos[None])[:, 0]  # (1, V)
        # The random number is a hash of the seed and the token's position, without a generator.
        token = sampling.sample(logits, uniform(seeds, pos + 1))  # (1,)
        id = token.item()
        if id == INVALID:
            raise UserError(f"position {length}: the model's logits are not finite")
        yield id
        if id in stop_ids or length + 1 == max_length:
            return
        tokens = torch.cat((tokens, token[:, None]), dim=1)  # (1, S + 1)
        h = model.hidden(token[:, None], pos + 1, runner.slice_to(length + 1))  # (1, 1, D)


# ------------------------------------------------------------------------------ text in, text out


def calibrate_auto(engine) -> None:
    """Measure what steps and rounds cost, which an engine with speculate_k = "auto" chooses by."""
    if engine.planner.speculate_k == "auto":
        engine.calibrate(Sampling(DEFAULT_TEMPERATURE))


@contextlib.contextmanager
def errors_of_prompt(number: int) -> Iterator[None]:
    """Put the number of a prompt in front of a UserError that it causes."""
    try:
        yield
    except UserError as error:
        raise UserError(f"prompt {number}: {validation.reason_of(error)}") from None


class LLM:
    """A model with its tokenizer: text in, text out.

        llm = LLM("checkpoints/demo", draft="checkpoints/demo-draft", speculate_k=3)
        for text in llm.stream("Once upon a time", max_new_tokens=60, stop=["The End"]):
            print(text, end="")

    A prompt is text, a list of token ids, or a list of messages ({"role", "content"}) for the
    model's chat template. Settings of a call: max_new_tokens (by default up to 200, as many as
    fit), the fields of Sampling (by default those of the folder's generation_config.json, else
    temperature 0.8), seed, stop (strings), schema (a JSON schema that the answer obeys),
    logits_processor, parse_special, and for messages tools, prefill and chat_template_kwargs.

    Computed positions stay cached between conversations: a prompt that begins like an earlier
    one runs only its rest. `start`, `step` and `abort` serve programs whose prompts come
    and go; `run` answers any number of them. Several threads may call all of these: their answers
    are decoded together, by whichever thread steps.
    """

    def __init__(
        self,
        checkpoint,
        *,
        draft=None,
        batch_size: int = 1,
        max_seq_length: int | None = None,
        **options,
    ):
        """Load a folder, a GGUF file or a model of the hub. `draft`: one of these, a spec such as
        "ngram", or a drafter of your own (drafts.base.Drafter); batch_size: answers at a time.
        `options` are fields of ModelOptions (quantize, dtype, device, …) and of EngineOptions
        (speculate_k, compile, cache_type, …). TypeError for a name that is neither, UserError for
        a value that cannot be used."""
        from decoding.engine import Engine
        from decoding.options import EngineOptions
        from drafts.registry import find_draft, load_models
        from loading.hub import checkpoint_path
        from loading.options import ModelOptions, folder_sampling
        from loading.target import pick_device

        engine_names = {field.name for field in fields(EngineOptions)}
        engine_options = {"compile": None}
        model_options = {}
        for name, value in options.items():
            chosen = engine_options if name in engine_names else model_options
            chosen[name] = value
        engine_options = EngineOptions(**engine_options)  # UserError before weights are read
        model_options = ModelOptions(checkpoint_path(os.fspath(checkpoint)), **model_options)
        device = pick_device(model_options.device)
        model, tokenizer, drafter = load_models(model_options, find_draft(draft), device)
        context = model.config.max_seq_length
        length = min(context, DEFAULT_LENGTH) if max_seq_length is None else max_seq_length
        validation.check_count("max_seq_length", length, 1)
        if not 2 <= length <= context:
            raise UserError(
                f"max_seq_length = {length} must lie between 2 and the model's {context}"
            )
        engine = Engine(model, batch_size, length, engine_options, drafter)
        calibrate_auto(engine)
        self._set(engine, tokenizer)
        if not model_options.random_weights:
            self.sampling |= folder_sampling(model_options, default_sampling)

    @classmethod
    def from_engine(cls, engine, tokenizer, stop_ids: Collection[int] | None = None) -> "LLM":
        """An LLM on an engine that exists. `stop_ids`: by default the tokenizer's."""
        self = cls.__new__(cls)
        self._set(engine, tokenizer, stop_ids)
        return self

    def _set(self, engine, tokenizer, stop_ids: Collection[int] | None = None) -> None:
        from decoding.fair_lock import FairLock

        self.engine = engine
        self.lock = FairLock()  # of the engine and of `running`
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(tokenizer.stop_ids if stop_ids is None else stop_ids)
        self.sampling = {"temperature": DEFAULT_TEMPERATURE}  # of calls that bring none
        self.running: dict[int, Answer] = {}  # by the id of their request
        self.logits_processor = engine.options.logits_processor  # of calls that bring none
        self.grammars = None  # made when a schema first comes
        self.grammar_lock = threading.Lock()

    # ------------------------------------------------------------------------------- for programs

    def stream(self, prompt, **settings) -> Iterator[str]:
        """The answer to one prompt, in pieces of complete characters. Closing the iterator ends the
        answer."""
        answer = self.answer(prompt, **settings)
        num_shown = 0
        try:
            self.start(answer)
            while not answer.is_finished or num_shown < len(answer.pieces):
                if num_shown == len(answer.pieces):
                    self.step()
                    continue
                num_shown += 1  # before the yield: until the next piece another stream may step
                yield answer.pieces[num_shown - 1]
            answer.check()
        finally:
            self.abort(answer)

    def generate(self, prompts: Sequence, **settings) -> list[Completion]:
        """The answers to prompts, in their order, decoded as many at a time as the engine has
        slots. Answer i has the seed `seed` + i, and is the one that its prompt alone would get.
        UserError names a prompt that fails."""
        if isinstance(prompts, str):
            raise UserError("prompts is one text: give a list of them")
        seed = settings.pop("seed", 0)
        validation.check_seed(seed)
        answers = []
        for number, prompt in enumerate(prompts):
            with errors_of_prompt(number):
                answers.append(self.answer(prompt, seed=seed + number, **settings))
        for _ in self.run(answers):
            pass
        completions = []
        for number, answer in enumerate(answers):
            with errors_of_prompt(number):
                completions.append(answer.completion())
        return completions

    def chat(self, messages: Sequence[dict], **settings) -> Completion:
        """The answer to a conversation. Its earlier turns are not computed again."""
        validation.check_messages(messages)
        return self.generate([list(messages)], **settings)[0]

    def answer(
        self, prompt, *, max_new_tokens=None, seed: int = 0, stop=(), schema=None, **settings
    ) -> Answer:
        """An Answer to a prompt, for `start` or `run`. UserError for a prompt or a setting that
        cannot be used, TypeError for a name that is no setting. Another `logits_processor` than the
        last answer's, or none after one, makes a new engine, which has cached and compiled nothing:
        keep one function for many answers."""
        stop = validation.stop_strings(stop)
        if "logit_bias" in settings:
            settings["logit_bias"] = validation.bias_pairs(settings["logit_bias"])
        sampling_names = {field.name for field in fields(Sampling)}
        sampling_settings = {name: settings.pop(name) for name in sampling_names & {*settings}}
        engine = self._use_processor(settings.pop("logits_processor", self.logits_processor))
        ids = self.encode(prompt, **settings)
        limit = engine.max_seq_length
        max_new_tokens = new_tokens(max_new_tokens, ids, limit)
        sampling = Sampling(**self.sampling | sampling_settings)
        validation.check_lengths(engine.model, [ids], [max_new_tokens], limit)
        validation.check_settings(engine.model, sampling, seed, self.stop_ids)
        answer = Answer(
            self.tokenizer,
            ids,
            stop,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop_ids=self.stop_ids,
            seed=seed,
            grammar=None if schema is None else self.grammar(schema),
        )
        answer.engine = engine
        return answer

    def encode(self, prompt, *, parse_special: bool = False, **template) -> list[int]:
        """The ids of a prompt: text, ids, or messages, for which `template` has tools, prefill and
        chat_template_kwargs. UserError for a setting that this kind of prompt does not have."""
        is_text = isinstance(prompt, str)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise UserError(
                "a prompt is text, a list of token ids, or a list of messages, not"
                f" {type(prompt).__name__}"
            )
        is_conversation = not is_text and bool(prompt) and isinstance(prompt[0], dict)
        template = validation.check_template(is_conversation, **template)
        if parse_special and not is_text:
            raise UserError("parse_special: only a text can name special tokens")
        if is_text:
            return self.tokenizer.encode(prompt, parse_special=parse_special)
        if is_conversation:
            from loading.tokenizer import conversation_ids

            return conversation_ids(self.tokenizer, prompt, **template)
        for id in prompt:
            if not isinstance(id, Integral):
                raise UserError(f"{id!r:.99} in a list of token ids is no integer")
        return list(prompt)

    def grammar(self, schema: dict):
        """The grammar that makes an answer obey a JSON schema."""
        from decoding.grammar import JsonGrammars

        validation.check_schema(schema)
        with self.grammar_lock:
            if self.grammars is None:
                self.grammars = JsonGrammars(self.tokenizer, self.stop_ids)
            return self.grammars.compile(schema)

    def _use_processor(self, logits_processor: Callable | None):
        """The engine of this processor, which is part of an engine's compiled steps: another one
        means a new engine."""
        with self.lock:
            old = self.engine
            # A dead owner: Ctrl-C came while another engine was made, and the drafter has that
            # one's tensors.
            is_lost = old.drafter is not None and old.drafter.owner() is None
            if logits_processor is old.options.logits_processor and not is_lost:
                return old
            if self.running:
                raise UserError(
                    "another logits_processor cannot start while answers are running: wait for"
                    " them, or abort them"
                )
            from decoding.engine import Engine

            options = replace(old.options, logits_processor=logits_processor)
            try:
                engine = Engine(old.model, old.batch_size, old.max_seq_length, options, old.drafter)
                calibrate_auto(engine)
            except BaseException:  # such as Ctrl-C, before the engine is ready
                if old.drafter is not None:
                    old.drafter.owner = lambda: None  # set up anew for the next answer
                raise
            self.engine = engine
            return engine

    def __reduce__(self):
        raise TypeError(
            "an LLM cannot be pickled or copied: make one in each process; the threads of a"
            " process can share one"
        )

    # ------------------------------------------------------------------------------- the text loop

    def start(self, answer: Answer) -> None:
        """Add an answer's request to the engine, where it waits for a free slot."""
        with self.lock:
            if answer.request is not None or answer.engine not in (None, self.engine):
                raise UserError(
                    "an answer runs once, and before another logits_processor is asked for: make"
                    " the answer again"
                )
            id = self.engine.add_request(answer.prompt, **answer.request_args)
            answer.request = self.engine.requests[id]
            self.running[id] = answer

    def step(self) -> list[Answer]:
        """Decode one step for all running answers; returns those that have ended, in text or by an
        error. An answer may also end in the step of another thread, or of `generate` or a stream:
        its `is_finished` tells."""
        with self.lock:
            self.engine.step()
            return self.feed()

    def feed(self) -> list[Answer]:
        """Give the tokens of the last step to their answers; returns those that have ended. The
        caller holds `lock`."""
        finished = [answer for answer in self.running.values() if answer.feed()]
        for answer in finished:
            self.abort(answer)
        return finished

    def abort(self, answer: Answer) -> None:
        """End an answer as it stands, and free its slot. One that has ended does not change."""
        with self.lock:
            if answer.request is None or self.running.pop(answer.request.id, None) is None:
                return
            # At a stop string the engine's request still runs.
            self.engine.abort(answer.request.id)
            answer.close()

    def run(
        self,
        answers: Iterable[Answer],
        interrupts: Collection = (),
    ) -> Iterator[Answer]:
        """Decode answers, as many at a time as the engine has slots, and yield each as it ends; if
        one fails, its request has an `error`. As soon as `interrupts` is not empty, all of these
        answers that run end. Other streams go on beside them, and outlive an error here, unless it
        is a step's."""
        answers = iter(answers)
        started = []
        try:
            while not interrupts:
                num_free = self.engine.batch_size - len(self.engine.requests)
                if not started:
                    num_free = max(num_free, 1)  # one may wait for others' slots, or none is left
                for answer in itertools.islice(answers, max(0, num_free)):
                    started.append(answer)
                    self.start(answer)
                if not started:
                    return
                with self.lock:
                    if self.engine.has_unfinished():
                        self.engine.step()
                    self.feed()  # in any case: another thread's error may have ended these
                finished = [answer for answer in started if answer.is_finished]
                started = [answer for answer in started if not answer.is_finished]
                yield from finished
        finally:
            for answer in started:
                self.abort(answer)
