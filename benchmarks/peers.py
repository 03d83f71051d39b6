"""Other programs on the same shape, for bench and bench_gpu, or the same file, for real: `python -m benchmarks.peers`.

Each class builds one program with random weights in bfloat16, or quantized, and answers like benchmarks.bench's own
contender: `decode(steps, filled)` and, where compared, `prefill(length)`, in seconds. Everything about a peer is here;
none of its code is. gpt-fast is imported from a checkout given by path. torch is imported by those that need it:
llama.cpp and torch in one process may crash.

    transformers [DEVICE]                   eager with a dynamic cache
    transformers_compiled [DEVICE]          compiled with a static one
    llamacpp [KIND]                         llama-cpp-python on a GGUF with random weights that `gguf` writes
    llamacpp_file                           the same on a file, which is named in place of a shape: `generate`
    gptfast CHECKOUT [FORMAT [DEVICE]]      its decode_one_token, compiled as its own main() does; int4 on CUDA only
"""

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

os.environ.pop("GOMP_SPINCOUNT", None)  # cli/ sets it for this project alone: others wait as they always do


def inference(method: Callable) -> Callable:
    """The method under torch.inference_mode()."""

    @functools.wraps(method)
    def inside(*args, **named):
        import torch

        with torch.inference_mode():
            return method(*args, **named)

    return inside


def median_seconds(step: Callable[[], object], steps: int, device: str = "cpu") -> dict:
    """Of each step; on a GPU they run back to back, with an event between them."""
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
    return {"seconds": statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))}


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
        # to_empty leaves RoPE's frequencies uninitialised; their values do not change what a step costs
        for name, buffer in self.model.named_buffers():
            if "inv_freq" in name:
                buffer.fill_(0.01)

    def cache(self, filled: int):
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model(torch.full((1, filled), 7, device=self.device), past_key_values=cache, logits_to_keep=1)
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
        return median_seconds(lambda: self.model(tokens, use_cache=True, logits_to_keep=1), 1, self.device)


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

        cache, positions = StaticCache(config=self.model.config, max_cache_len=1024), torch.arange(1024).to(self.device)
        token, prompt = (torch.full((1, n), 7, device=self.device) for n in (1, filled - 1))
        pos = filled - 1
        self.model(prompt, past_key_values=cache, cache_position=positions[:pos], logits_to_keep=1)

        def step():
            nonlocal token, pos
            logits = self.forward(token, past_key_values=cache, cache_position=positions[pos : pos + 1]).logits
            token, pos = logits[:, -1].argmax(-1, keepdim=True).clone(), pos + 1

        for _ in range(3 if self.device != "cpu" else 0):  # compile, record, replay
            step()
        return median_seconds(step, steps, self.device)


def load_llama(file: str | Path, repacks: bool | None = None, **options) -> tuple[object, bool]:
    """(llama.cpp on a file, does it repack weights into buffers of its own?). Some builds crash in the AMX code that
    these buffers are for, so unless `repacks` says it, another process tries first."""
    import llama_cpp

    if repacks is None:
        probe = [sys.executable, "-m", "benchmarks.peers", "llamacpp_probe", json.dumps(str(file))]
        found = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True)
        repacks = found.returncode == 0
    usual = llama_cpp.llama_model_default_params

    def chosen():
        params = usual()
        params.use_extra_bufts = repacks
        return params

    for module in (llama_cpp, llama_cpp.llama_cpp):
        module.llama_model_default_params = chosen
    threads = len(os.sched_getaffinity(0))
    options = {"n_batch": 512, "n_threads": threads, "n_threads_batch": threads, "verbose": False} | options
    return llama_cpp.Llama(str(file), **options), repacks


def llama_probe(file: str) -> None:
    """A prompt and a step with repacked weights: ends well, or with the process."""
    llm, _ = load_llama(file, repacks=True, n_ctx=256)
    llm.eval([7] * 64)
    llm.eval([7])
    sys.exit()


class LlamaCppFile:
    """Greedy text of a file's model; with `lookup`, after the binding's own prompt lookup of so many tokens."""

    def __init__(self, file: str, lookup: str = "0", context: str = "1024"):
        draft = None
        if int(lookup):
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=int(lookup))
        self.llm, self.repacks = load_llama(file, n_ctx=int(context), draft_model=draft)

    def generate(self, ids: list[int], new: int, stop_ids: Iterable[int] = ()) -> dict:
        """Tokens a second after the first one, as in generate.py's JSON."""
        self.llm.reset()
        begun, marks, tokens = time.perf_counter(), [], []
        for token in self.llm.generate(ids, temp=0.0):
            marks.append(time.perf_counter())
            tokens.append(int(token))
            if len(tokens) == new or tokens[-1] in stop_ids:
                break
        spent = marks[-1] - marks[0]
        rate = (len(tokens) - 1) / spent if spent else 0.0
        return {"decode_tok_s": rate, "ttft_s": marks[0] - begun, "tokens": tokens, "repacks": self.repacks}


class LlamaCpp:
    def __init__(self, hf: dict, kind: str = "BF16", context: str = "1024"):
        self.folder = tempfile.TemporaryDirectory()  # gone when the worker is
        self.file = Path(self.folder.name) / "model.gguf"
        write_gguf(hf, self.file, kind)
        self.llm, _ = load_llama(self.file, n_ctx=int(context))

    def decode(self, steps: int, filled: int) -> dict:
        self.llm.reset()
        self.llm.eval([7] * (filled - 1))
        return median_seconds(lambda: self.llm.eval([7]), steps)

    def prefill(self, length: int) -> dict:
        def run() -> None:
            self.llm.reset()
            self.llm.eval([7] * length)

        return median_seconds(run, 1)


def write_gguf(hf: dict, file: Path, kind: str = "BF16") -> None:
    """Random matrices of one kind (BF16, Q8_0, Q4_0), float32 norms, and a vocabulary of numbered tokens."""
    import gguf
    import numpy as np

    D, F, V, L = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"], hf["num_hidden_layers"]
    H, G = hf["num_attention_heads"], hf["num_key_value_heads"]
    kv = G * D // H
    writer, rng = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
    quantization = getattr(gguf.GGMLQuantizationType, kind)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(D)
    writer.add_block_count(L)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_rope_dimension_count(D // H)
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    E = hf.get("num_local_experts", 0)  # Mixtral is an architecture of this name too
    if E:
        writer.add_expert_count(E)
        writer.add_expert_used_count(hf["num_experts_per_tok"])
    writer.add_vocab_size(V)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>"] + [f"t{i}".encode() for i in range(3, V)])
    writer.add_token_scores([0.0] * V)
    writer.add_token_types([2, 3, 3] + [1] * (V - 3))

    def matrix(name: str, *shape: int) -> None:
        weight = (rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, quantization), raw_dtype=quantization)

    matrix("token_embd", V, D)
    writer.add_tensor("output_norm.weight", np.ones(D, dtype=np.float32))
    matrix("output", V, D)
    for i in range(L):
        dense = [("ffn_gate", F, D), ("ffn_up", F, D), ("ffn_down", D, F)]
        for name, *shape in (
            ("attn_q", D, D), ("attn_k", kv, D), ("attn_v", kv, D), ("attn_output", D, D),
            *([(f"{name}_exps", E, *shape) for name, *shape in dense] if E else dense),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}", *shape)
        if E:
            router = rng.standard_normal((E, D), dtype=np.float32) * np.float32(0.02)
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(D, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bf16(source: str | Path, file: str | Path) -> None:
    """A GGUF file with the same keys and all matrices in bfloat16."""
    import gguf
    import numpy as np

    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType.BF16
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = gguf.LlamaFileType.MOSTLY_BF16 if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, *field.types[:2])
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if weight.ndim == 1:
            writer.add_tensor(tensor.name, weight)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
            block_size=hf["max_position_embeddings"], vocab_size=hf["vocab_size"], n_layer=hf["num_hidden_layers"],
            n_head=hf["num_attention_heads"], n_local_heads=hf["num_key_value_heads"], dim=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
        )  # fmt: skip
        with torch.device("meta"):
            model = Transformer(args)
            model = model.to(torch.bfloat16)
            if format == "int8":
                from quantize import WeightOnlyInt8QuantHandler

                WeightOnlyInt8QuantHandler(model).convert_for_runtime()
            elif format.startswith("int4-g"):
                from quantize import WeightOnlyInt4QuantHandler

                WeightOnlyInt4QuantHandler(model, int(format.removeprefix("int4-g"))).convert_for_runtime()
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
            token = self.step(self.model, token, pos, self.mask, temperature=0.8, top_k=None)[0].clone()
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
    "llamacpp_probe": llama_probe,
    "gptfast": GptFast,
}


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python -m benchmarks.peers {'|'.join(NAMES)} SHAPE_JSON [OPTIONS]")
    peer = NAMES[sys.argv[1]](json.loads(sys.argv[2]), *sys.argv[3:])
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("what")
        print(json.dumps(getattr(peer, what)(**request)), flush=True)


if __name__ == "__main__":
    main()
