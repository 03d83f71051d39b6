"""GGUF files for comparisons with llama.cpp: `write_gguf` of random weights, `write_as` of another
file's weights.

This file imports no torch: llama.cpp and torch in one process may crash.
"""

from pathlib import Path

import gguf
import numpy as np


def write_gguf(hf: dict, file: Path, type_name: str = "BF16") -> None:
    """Random matrices of one type (BF16, Q8_0, Q4_0, Q4_1), float32 norms, and a vocabulary of
    numbered tokens. All matrices of one width repeat the same rows: quantizing billions of numbers
    would take many minutes."""
    D, F, V, L = (
        hf["hidden_size"],
        hf["intermediate_size"],
        hf["vocab_size"],
        hf["num_hidden_layers"],
    )
    H, G = hf["num_attention_heads"], hf["num_key_value_heads"]
    kv = G * D // H
    writer, rng = gguf.GGUFWriter(file, "llama", use_temp_file=True), np.random.default_rng(0)
    quantization = getattr(gguf.GGMLQuantizationType, type_name)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(D)
    writer.add_block_count(L)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_rope_dimension_count(D // H)
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    num_experts = hf.get("num_local_experts", 0)  # llama.cpp calls Mixtral "llama" too
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(hf["num_experts_per_tok"])
    writer.add_vocab_size(V)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>"] + [f"t{i}".encode() for i in range(3, V)])
    writer.add_token_scores([0.0] * V)
    writer.add_token_types([2, 3, 3] + [1] * (V - 3))

    def matrix(name: str, *shape: int) -> None:
        numbers = rng.standard_normal((256, shape[-1]), dtype=np.float32) * np.float32(0.02)
        block = gguf.quants.quantize(numbers, quantization)
        weight = np.resize(block, (*shape[:-1], block.shape[-1]))
        writer.add_tensor(f"{name}.weight", weight, raw_dtype=quantization)

    matrix("token_embd", V, D)
    writer.add_tensor("output_norm.weight", np.ones(D, dtype=np.float32))
    matrix("output", V, D)
    for i in range(L):
        dense = [("ffn_gate", F, D), ("ffn_up", F, D), ("ffn_down", D, F)]
        for name, *shape in (
            ("attn_q", D, D),
            ("attn_k", kv, D),
            ("attn_v", kv, D),
            ("attn_output", D, D),
            *(
                [(f"{name}_exps", num_experts, *shape) for name, *shape in dense]
                if num_experts
                else dense
            ),
        ):
            matrix(f"blk.{i}.{name}", *shape)
        if num_experts:
            router = rng.standard_normal((num_experts, D), dtype=np.float32) * np.float32(0.02)
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(D, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_as(source: str | Path, file: str | Path, type_name: str = "BF16") -> None:
    """A GGUF file with the same keys, and all matrices in one type (BF16, Q8_0)."""
    reader = gguf.GGUFReader(source)
    quantization = gguf.GGMLQuantizationType[type_name]
    file_type = gguf.LlamaFileType[f"MOSTLY_{type_name}"]
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = file_type if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, *field.types[:2])
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if weight.ndim == 1:
            writer.add_tensor(tensor.name, weight)
        else:
            codes = gguf.quants.quantize(weight, quantization)
            writer.add_tensor(tensor.name, codes, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
