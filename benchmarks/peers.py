"""Other programs on the same shape, for bench and bench_gpu: `python -m benchmarks.peers NAME SHAPE …`.

Each class builds one program with random weights in bfloat16, or quantized, and answers like benchmarks.bench's own
contender: `decode(steps, filled)` and, where compared, `prefill(length)`, in seconds. Everything about a peer is here;
none of its code is. gpt-fast is imported from a checkout given by path.

    transformers [DEVICE]                   eager with a dynamic cache
    transformers_compiled [DEVICE]          compiled with a static one
    llamacpp [KIND]                         llama-cpp-python on a GGUF with random weights that `gguf` writes
    gptfast CHECKOUT [FORMAT [DEVICE]]      its decode_one_token, compiled as its own main() does; int4 on CUDA only
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch


def median_seconds(step: Callable[[], object], steps: int, device: str = "cpu") -> dict:
    """Of each step; on a GPU they run back to back, with an event between them."""
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return {"seconds": statistics.median(b - a for a, b in itertools.pairwise(marks))}
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for event in marks[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return {"seconds": statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))}


class Transformers:
    def __init__(self, hf: dict, device: str = "cpu"):
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
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model(torch.full((1, filled), 7, device=self.device), past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def decode(self, steps: int, filled: int) -> dict:
        cache, token = self.cache(filled - 1), torch.tensor([[7]], device=self.device)

        def step():
            nonlocal token
            logits = self.model(token, past_key_values=cache).logits
            token = logits[:, -1].argmax(-1, keepdim=True)

        return median_seconds(step, steps, self.device)

    @torch.inference_mode()
    def prefill(self, length: int) -> dict:
        tokens = torch.full((1, length), 7, device=self.device)
        return median_seconds(lambda: self.model(tokens, use_cache=True, logits_to_keep=1), 1, self.device)


class TransformersCompiled(Transformers):
    """The static cache and compilation that transformers documents for decoding."""

    def __init__(self, hf: dict, device: str = "cpu"):
        super().__init__(hf, device)
        self.forward = torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def decode(self, steps: int, filled: int) -> dict:
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


class LlamaCpp:
    def __init__(self, hf: dict, kind: str = "BF16"):
        import llama_cpp

        self.folder = tempfile.TemporaryDirectory()  # gone when the worker is
        self.file = Path(self.folder.name) / "model.gguf"
        write_gguf(hf, self.file, kind)
        self.llm = llama_cpp.Llama(
            str(self.file), n_ctx=1024, n_batch=512, n_threads=2, n_threads_batch=2, verbose=False, use_mmap=True,
        )  # fmt: skip

    def decode(self, steps: int, filled: int) -> dict:
        self.llm.reset()
        self.llm.eval([7] * (filled - 1))
        return median_seconds(lambda: self.llm.eval([7]), steps)


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
    writer.add_vocab_size(V)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>"] + [f"t{i}".encode() for i in range(3, V)])
    writer.add_token_scores([0.0] * V)
    writer.add_token_types([2, 3, 3] + [1] * (V - 3))

    def matrix(name: str, rows: int, columns: int) -> None:
        weight = (rng.standard_normal((rows, columns), dtype=np.float32) * 0.02).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, quantization), raw_dtype=quantization)

    matrix("token_embd", V, D)
    writer.add_tensor("output_norm.weight", np.ones(D, dtype=np.float32))
    matrix("output", V, D)
    for i in range(L):
        for name, rows, columns in (
            ("attn_q", D, D), ("attn_k", kv, D), ("attn_v", kv, D), ("attn_output", D, D),
            ("ffn_gate", F, D), ("ffn_up", F, D), ("ffn_down", D, F),
        ):  # fmt: skip
            matrix(f"blk.{i}.{name}", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(D, dtype=np.float32))
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

    @torch.no_grad()
    def decode(self, steps: int, filled: int) -> dict:
        token = torch.tensor([[7]], dtype=torch.int, device=self.device)
        pos = torch.tensor([filled - 1], device=self.device)

        def step():
            nonlocal token
            token = self.step(self.model, token, pos, self.mask, temperature=0.8, top_k=None)[0].clone()
            pos.add_(1)

        for _ in range(3 if self.device != "cpu" else 0):  # compile, record, replay
            step()
        return median_seconds(step, steps, self.device)


NAMES = {
    "transformers": Transformers,
    "transformers_compiled": TransformersCompiled,
    "llamacpp": LlamaCpp,
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
