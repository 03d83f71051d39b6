"""Other programs: `python -m benchmarks.peers NAME SHAPE_OR_FILE [OPTION …]`, a worker that answers
lines of JSON.

    transformers [DEVICE]                   eager with a dynamic cache
    transformers_compiled [DEVICE]          compiled with a static one
    llamacpp [KIND [CONTEXT]]               llama.cpp through its binding, on a GGUF file of the
                                            shape, random weights
    llamacpp_file [LOOKUP [CONTEXT]]        llama.cpp on a file: `generate`
    llamacpp_clients [SLOTS [CONTEXT]]      llama.cpp on a file, with several clients: `serve`,
                                            `join`
    gptfast CHECKOUT [FORMAT [DEVICE]]      its decode_one_token, compiled as its own main() does;
                                            int4 on CUDA only

Each name has a class that builds random weights and measures seconds with `decode(steps, filled)`
and
`prefill(length)`; the classes of a file answer the methods named above. torch is imported inside
functions, because llama.cpp and torch in one process may crash.
"""

import dataclasses
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.pipes import answer_lines
from decoding.errors import UserError

os.environ.pop("GOMP_SPINCOUNT", None)  # cli/ sets it for this project alone


def inference(method: Callable) -> Callable:
    """`method` under torch.inference_mode(), without torch at import."""

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        import torch

        with torch.inference_mode():
            return method(*args, **kwargs)

    return wrapped


def median_seconds(step: Callable[[], object], steps: int, device: str = "cpu") -> dict:
    """Median seconds of a step. On a GPU steps run back to back, with an event between them."""
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return {"seconds": statistics.median(b - a for a, b in itertools.pairwise(marks))}
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for event in marks[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return {
        "seconds": statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))
    }


class Transformers:
    def __init__(self, hf: dict, device: str = "cpu"):
        import torch
        import transformers

        self.device = device
        config = transformers.AutoConfig.for_model(**hf)
        with torch.device("meta"):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.to_empty(device=device).eval()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        # to_empty leaves RoPE's frequencies uninitialised. Any values cost the same.
        for name, buffer in self.model.named_buffers():
            if "inv_freq" in name:
                buffer.fill_(0.01)

    def cache(self, filled: int):
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model(
            torch.full((1, filled), 7, device=self.device), past_key_values=cache, logits_to_keep=1
        )
        return cache

    @inference
    def decode(self, steps: int, filled: int) -> dict:
        import torch

        cache, token = self.cache(filled - 1), torch.tensor([[7]], device=self.device)

        def step():
            nonlocal token
            logits = self.model(token, past_key_values=cache).logits
            token = logits[:, -1].argmax(-1, keepdim=True)

        return median_seconds(step, steps, self.device)

    @inference
    def prefill(self, length: int) -> dict:
        import torch

        tokens = torch.full((1, length), 7, device=self.device)
        return median_seconds(
            lambda: self.model(tokens, use_cache=True, logits_to_keep=1), 1, self.device
        )


class TransformersCompiled(Transformers):
    """The static cache and compilation that transformers documents for decoding."""

    def __init__(self, hf: dict, device: str = "cpu"):
        import torch

        super().__init__(hf, device)
        self.forward = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)

    @inference
    def decode(self, steps: int, filled: int) -> dict:
        import torch
        from transformers import StaticCache

        cache, positions = (
            StaticCache(config=self.model.config, max_cache_len=1024),
            torch.arange(1024).to(self.device),
        )
        token, prompt = (torch.full((1, n), 7, device=self.device) for n in (1, filled - 1))
        pos = filled - 1
        self.model(prompt, past_key_values=cache, cache_position=positions[:pos], logits_to_keep=1)

        def step():
            nonlocal token, pos
            logits = self.forward(
                token, past_key_values=cache, cache_position=positions[pos : pos + 1]
            ).logits
            token, pos = logits[:, -1].argmax(-1, keepdim=True).clone(), pos + 1

        for _ in range(3 if self.device != "cpu" else 0):  # compile, record, replay
            step()
        return median_seconds(step, steps, self.device)


def load_llama(
    file: str | Path, repacks: bool | None = None, context: dict | None = None, **options
) -> tuple:
    """(llama_cpp.Llama of a file, `repacks`). repacks: copy weights into extra buffers for AMX.
    Some builds crash in that code, so None tries it in another process first. context: fields of
    llama.cpp's context without an argument in the binding."""
    import llama_cpp

    if repacks is None:
        probe = [sys.executable, "-m", "benchmarks.peers", "llamacpp_probe", json.dumps(str(file))]
        repacks = (
            subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
        )
    fields = {"model": {"use_extra_bufts": repacks}, "context": context or {}}
    for kind, values in fields.items():
        name = f"llama_{kind}_default_params"
        params_with_fields = functools.partial(
            changed_params, getattr(llama_cpp, name, None), values
        )
        for module in (llama_cpp, llama_cpp.llama_cpp) if values else ():
            setattr(module, name, params_with_fields)
    threads = len(os.sched_getaffinity(0))
    options = {
        "n_batch": 512,
        "n_threads": threads,
        "n_threads_batch": threads,
        "verbose": False,
    } | options
    return llama_cpp.Llama(str(file), **options), repacks


def load_fastest(file: str | Path, **options) -> tuple:
    """(llama_cpp.Llama of a file with flash attention off or on, whichever decodes faster after 100
    tokens; its build and settings in words)."""
    import llama_cpp

    seconds, repacks = {}, None
    for flash in (False, True):
        llm, repacks = load_llama(file, repacks, flash_attn=flash, **options)
        llm.eval([7] * 100)
        seconds[flash] = median_seconds(functools.partial(llm.eval, [7]), 24)["seconds"]
        llm.close()  # a large model does not fit twice
    flash = seconds[True] < seconds[False]
    llm, _ = load_llama(file, repacks, flash_attn=flash, **options)
    buffers = f"{'with' if repacks else 'without'} its extra buffers"
    features = llama_features(llama_cpp)
    return (
        llm,
        f"llama.cpp {buffers}, flash attention {'on' if flash else 'off'}, the faster one;"
        f" {features}",
    )


def llama_features(api) -> str:
    """Its version, and the instructions that its build uses here."""
    features = api.llama_print_system_info().decode().split("|")
    names = [
        feature.split("=")[0].strip() for feature in features if feature.strip().endswith("= 1")
    ]
    return f"llama-cpp-python {api.__version__}: {' '.join(names).removeprefix('CPU : ')}"


def changed_params(default_params: Callable, values: dict):
    params = default_params()
    for name, value in values.items():
        setattr(params, name, value)
    return params


def llama_probe(file: str) -> None:
    """Run a prompt and a step with repacked weights. A crash shows in the exit status."""
    llm, _ = load_llama(file, repacks=True, n_ctx=256)
    llm.eval([7] * 64)
    llm.eval([7])
    sys.exit()


class LlamaCppFile:
    """Greedy text of a file's model, with the binding's own prompt lookup of `lookup` tokens if
    that is not 0."""

    def __init__(self, file: str, lookup: str = "0", context: str = "1024"):
        draft = None
        if int(lookup):
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=int(lookup))
        self.llm, self.settings = load_fastest(file, n_ctx=int(context), draft_model=draft)

    def generate(self, ids: list[int], new: int, stop_ids: Iterable[int] = ()) -> dict:
        """Tokens a second after the first one, as in generate.py's JSON."""
        self.llm.reset()
        start, marks, tokens = time.perf_counter(), [], []
        for token in self.llm.generate(ids, temp=0.0):
            marks.append(time.perf_counter())
            tokens.append(int(token))
            if len(tokens) == new or tokens[-1] in stop_ids:
                break
        seconds = marks[-1] - marks[0]
        rate = (len(tokens) - 1) / seconds if seconds else 0.0
        return {
            "decode_tok_s": rate,
            "ttft_s": marks[0] - start,
            "tokens": tokens,
            "settings": self.settings,
        }


class Clients:
    """Several clients of one program. A subclass has `add(prompt, new) -> id` for a request of
    `new` greedy tokens, and
    `step() -> [(id, token), …]`. All slots are free before and after `serve` and `join`."""

    def serve(self, prompts: list[list[list[int]]], new: int) -> dict:
        """Seconds until all clients have their answers. Each client sends its next prompt as soon
        as its last answer is complete."""
        queues, client_by_id, num_remaining = [iter(client) for client in prompts], {}, {}

        def send(client: int) -> None:
            if (prompt := next(queues[client], None)) is not None:
                id = self.add(prompt, new)
                client_by_id[id], num_remaining[id] = client, new

        self.clear()
        start = time.perf_counter()
        for client in range(len(prompts)):
            send(client)
        while num_remaining:
            for id, _ in self.step():
                num_remaining[id] -= 1
                if not num_remaining[id]:
                    del num_remaining[id]
                    send(client_by_id[id])
        return {
            "seconds": time.perf_counter() - start,
            "tokens": new * sum(map(len, prompts)),
            **self.settings(),
        }

    def clear(self) -> None:
        """Forget earlier prompts, whose beginnings might be reused."""

    def settings(self) -> dict:
        """Facts for the note of a result."""
        return {}

    def join(self, prompts: list[list[int]], newcomer: list[int], new: int) -> dict:
        """Seconds from the request of a newcomer to its first token, while answers to `prompts` are
        decoded."""
        self.clear()
        num_remaining = {self.add(prompt, new): new for prompt in prompts}
        while max(num_remaining.values()) > new - 8:
            for id, _ in self.step():
                num_remaining[id] -= 1
        start, newcomer_id = time.perf_counter(), self.add(newcomer, 1)
        num_remaining[newcomer_id], ttft_s = 1, 0.0
        while any(num_remaining.values()):
            for id, _ in self.step():
                num_remaining[id] -= 1
                ttft_s = time.perf_counter() - start if id == newcomer_id else ttft_s
        return {"ttft_s": ttft_s}


@dataclasses.dataclass
class LlamaSequence:
    """A request in llama.cpp's batches."""

    slot: int
    tokens: list[int]  # not yet read by a pass
    num_new: int  # tokens to decode
    position: int = 0  # of the next token that a pass reads


class LlamaCppClients(Clients):
    """Batched decoding as llama.cpp's server does it: a pass takes one token of each decoding
    sequence, and as many tokens of prompts as fit. Flash attention and one cache for all sequences
    were the fastest settings."""

    def __init__(self, file: str, slots: str = "8", context: str = "512"):
        fields = {"n_seq_max": int(slots), "kv_unified": True}
        self.llm, self.repacks = load_llama(
            file, context=fields, n_ctx=int(slots) * int(context), flash_attn=True
        )
        import llama_cpp
        import llama_cpp.llama_cpp as api

        self.features = llama_features(llama_cpp)
        self.api, self.limit = api, 512  # tokens of a pass
        self.batch = api.llama_batch_init(self.limit, 0, 1)
        self.free_slots, self.ids = list(range(int(slots))), itertools.count()
        self.sequences: dict[int, LlamaSequence] = {}

    def add(self, prompt: list[int], new: int) -> int:
        id = next(self.ids)
        self.sequences[id] = LlamaSequence(self.free_slots.pop(0), list(prompt), new)
        return id

    def step(self) -> list[tuple[int, int]]:
        import numpy as np

        # outputs: id -> row of the batch that decides its next token
        batch, n, outputs = (self.batch, 0, {})
        for id, sequence in sorted(self.sequences.items(), key=lambda item: len(item[1].tokens)):
            num_tokens = min(len(sequence.tokens), self.limit - n)
            for token in sequence.tokens[:num_tokens]:
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, sequence.position, 1
                batch.seq_id[n][0], batch.logits[n] = sequence.slot, False
                sequence.position, n = sequence.position + 1, n + 1
            del sequence.tokens[:num_tokens]
            if num_tokens and not sequence.tokens:
                batch.logits[n - 1], outputs[id] = True, n - 1
        batch.n_tokens = n
        if self.api.llama_decode(self.llm.ctx, batch):
            raise UserError(f"llama.cpp could not decode a batch of {n} tokens")
        events = []
        for id, row in outputs.items():
            logits = np.ctypeslib.as_array(
                self.api.llama_get_logits_ith(self.llm.ctx, row), (self.llm.n_vocab(),)
            )
            token, sequence = int(logits.argmax()), self.sequences[id]
            sequence.tokens, sequence.num_new = [token], sequence.num_new - 1
            events.append((id, token))
            if not sequence.num_new:
                self.api.llama_memory_seq_rm(
                    self.api.llama_get_memory(self.llm.ctx), sequence.slot, -1, -1
                )
                self.free_slots.append(self.sequences.pop(id).slot)
        return events

    def settings(self) -> dict:
        return {"repacks": self.repacks, "system": self.features}


class LlamaCpp:
    def __init__(self, hf: dict, kind: str = "BF16", context: str = "1024"):
        from benchmarks.gguf_files import write_gguf

        self.folder = tempfile.TemporaryDirectory()  # removed with the worker
        self.file = Path(self.folder.name) / "model.gguf"
        write_gguf(hf, self.file, kind)
        self.llm, self.settings = load_fastest(self.file, n_ctx=int(context))

    def decode(self, steps: int, filled: int) -> dict:
        self.llm.reset()
        self.llm.eval([7] * (filled - 1))
        return median_seconds(lambda: self.llm.eval([7]), steps) | {"settings": self.settings}

    def prefill(self, length: int) -> dict:
        self.llm.reset()
        return median_seconds(lambda: self.llm.eval([7] * length), 1) | {"settings": self.settings}


class GptFast:
    def __init__(self, hf: dict, checkout: str, format: str = "bf16", device: str = "cpu"):
        sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path.cwd()]
        for name in ("generate", "model", "quantize", "tokenizer"):
            sys.modules.pop(name, None)
        sys.path.insert(0, checkout)
        import torch

        import generate as program
        from model import ModelArgs, Transformer

        args = ModelArgs(
            block_size=hf["max_position_embeddings"],
            vocab_size=hf["vocab_size"],
            n_layer=hf["num_hidden_layers"],
            n_head=hf["num_attention_heads"],
            n_local_heads=hf["num_key_value_heads"],
            dim=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
        )
        with torch.device("meta"):
            model = Transformer(args)
            model = model.to(torch.bfloat16)
            if format == "int8":
                from quantize import WeightOnlyInt8QuantHandler

                WeightOnlyInt8QuantHandler(model).convert_for_runtime()
            elif format.startswith("int4-g"):
                from quantize import WeightOnlyInt4QuantHandler

                WeightOnlyInt4QuantHandler(
                    model, int(format.removeprefix("int4-g"))
                ).convert_for_runtime()
        self.model, self.device = model.to_empty(device=device).eval(), device
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        for name, buffer in self.model.named_buffers():
            buffer.random_(-127, 128) if name.endswith("weight") else buffer.fill_(0.001)
        with torch.device(device):
            self.model.setup_caches(1, 1024)
        self.program = program
        self.step = torch.compile(program.decode_one_token, mode="reduce-overhead", fullgraph=True)
        self.mask = program.create_block_mask(program.causal_mask, 1, 1, 1024, 1024, device=device)

    def decode(self, steps: int, filled: int) -> dict:
        import torch

        token = torch.tensor([[7]], dtype=torch.int, device=self.device)
        pos = torch.tensor([filled - 1], device=self.device)

        def step():
            nonlocal token
            token = self.step(self.model, token, pos, self.mask, temperature=0.8, top_k=None)[
                0
            ].clone()
            pos.add_(1)

        with torch.no_grad():
            for _ in range(3 if self.device != "cpu" else 0):  # compile, record, replay
                step()
            return median_seconds(step, steps, self.device)


NAMES = {
    "transformers": Transformers,
    "transformers_compiled": TransformersCompiled,
    "llamacpp": LlamaCpp,
    "llamacpp_file": LlamaCppFile,
    "llamacpp_clients": LlamaCppClients,
    "llamacpp_probe": llama_probe,
    "gptfast": GptFast,
}


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python -m benchmarks.peers {'|'.join(NAMES)} SHAPE_OR_FILE [OPTION …]")
    answer_lines(NAMES[sys.argv[1]](json.loads(sys.argv[2]), *sys.argv[3:]))


if __name__ == "__main__":
    main()
