"""GGUF files: written here with the gguf package from tiny folders, and read back. The oracles are
the folders, the package's own dequantization, and the libraries whose vocabularies the files hold.
None of them shares code with loading/, but for the arithmetic of types that it leaves to the
package."""

import dataclasses
import gc
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from conftest import BASE, FAMILIES, ROOT, changed_family, generate, oracle

import loading.checkpoint as checkpoint
import loading.gguf as ours
import loading.gguf_vocabulary as gguf_vocabulary
import loading.models as models
from cli.quantize import main as quantize
from cli.start import main
from decoding.errors import UserError
from decoding.sampling import Sampling
from drafts.ngram import NgramDraft
from generate import LLM
from loading.checkpoint import load_config, load_model
from loading.quantization import choose_schemes
from loading.saving import save_model
from loading.tokenizer import copy_files, load_tokenizer
from loading.tokenizers.base import end_ids
from tp import Ranks
from weights.walker import named_linears, quantized_linears

gguf = pytest.importorskip("gguf")
TYPES = gguf.GGMLQuantizationType
TOKENS = torch.arange(40)[None] % 131, torch.arange(40)
LOOSE = "tensors that are stored quantized load as plain weights"


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of rows, as conversion/llama.py makes it."""
    shape = weight.shape
    return (
        weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


# llama.cpp's architectures of model_types that it calls otherwise
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "gemma3_text": "gemma3",
}
# Converters of LlamaModel, which store RoPE's pairs as neighbours
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")
HUNYUAN_LENGTH = 256 * 1024  # which conversion/hunyuan.py writes, whatever config.json says
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")


def add_config(writer, hf) -> None:
    """Keys of a transformers config, as conversion/base.py and the family's converter write
    them."""
    kind = hf.model_type
    writer.add_block_count(hf.num_hidden_layers)
    is_hunyuan = kind.startswith("hunyuan")
    writer.add_context_length(HUNYUAN_LENGTH if is_hunyuan else hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_vocab_size(hf.vocab_size)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if kind not in ("granite", "granitemoe", "phi3", "olmo2", "olmo3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    nested = hf.rope_parameters
    rope = nested.get("full_attention", nested)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if "sliding_attention" in nested:
        writer.add_rope_freq_base_swa(nested["sliding_attention"]["rope_theta"])
    if "mrope_section" in nested:
        writer.add_rope_dimension_sections([*nested["mrope_section"], 0])
    add_rope(writer, rope, hf, head_dim)
    if kind == "gemma3_text":  # whose pattern llama.cpp fixes
        assert hf._sliding_window_pattern == 6
        writer.add_sliding_window(hf.sliding_window)
    if getattr(hf, "sliding_window", None) and kind in ("mistral", "gpt_oss"):
        writer.add_sliding_window(hf.sliding_window)
    if getattr(hf, "sliding_window", None) and kind in ("exaone4", "olmo3"):
        writer.add_sliding_window(hf.sliding_window)
        writer.add_sliding_window_pattern([x == "sliding_attention" for x in hf.layer_types])
    if kind == "phi3":
        writer.add_sliding_window(hf.sliding_window or 0)
    if kind.startswith("qwen3_vl"):
        writer.add_num_deepstack_layers(1)
    if kind.startswith("granite"):
        writer.add_attention_scale(hf.attention_multiplier)
        writer.add_embedding_scale(hf.embedding_multiplier)
        writer.add_residual_scale(hf.residual_multiplier)
        writer.add_logit_scale(hf.logits_scaling)
    if kind == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    chosen = [getattr(hf, key) for key in CHOSEN if getattr(hf, key, None)]
    if chosen:
        num_chosen = chosen[0][0] if isinstance(chosen[0], list) else chosen[0]
        add_experts(writer, hf, num_chosen)


def add_rope(writer, rope: dict, hf, head_dim: int) -> None:
    kind = rope["rope_type"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if hf.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(hf.original_max_position_embeddings)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in ("attention_factor", "beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                name = key.replace("attention", "attn")
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[key])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    if kind == "longrope":
        original = hf.original_max_position_embeddings
        scale = hf.max_position_embeddings / original
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for part in ("long", "short"):
            factors = numpy.array(rope[f"{part}_factor"], dtype=numpy.float32)
            writer.add_tensor(f"rope_factors_{part}.weight", factors)
    if kind == "dynamic":
        base = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        writer.add_rope_freq_base(base)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(HUNYUAN_LENGTH)


def add_experts(writer, hf, num_chosen: int) -> None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(getattr(hf, key) for key in keys if getattr(hf, key, None)))
    writer.add_expert_used_count(num_chosen)
    if getattr(hf, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(hf.moe_intermediate_size)
    if getattr(hf, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(hf.shared_expert_intermediate_size)
    if hf.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(hf.intermediate_size)
    if hf.model_type == "glm4_moe":
        writer.add_expert_group_count(hf.n_group)
        writer.add_expert_group_used_count(hf.topk_group)
        writer.add_expert_shared_count(hf.n_shared_experts)
        writer.add_leading_dense_block_count(hf.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(hf.routed_scaling_factor)
        writer.add_expert_weights_norm(hf.norm_topk_prob)
    if hf.model_type == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(hf.moe_layer_interval)
        writer.add_leading_dense_block_count(hf.moe_layer_start_index)
        writer.add_expert_shared_count(hf.moe_num_shared_experts)
        size = hf.intermediate_size // hf.num_key_value_heads
        writer.add_expert_shared_feed_forward_length(size)
    if hf.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(hf.intermediate_size)
        writer.add_expert_feed_forward_length(hf.intermediate_size)
        writer.add_expert_shared_count(1)


def llama3_divisors(rope: dict, head_dim: int) -> numpy.ndarray:
    """As conversion/llama.py, generate_extra_tensors."""
    low, high, length = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    found = []
    for frequency in 1.0 / rope["rope_theta"] ** (
        numpy.arange(0, head_dim, 2, dtype=numpy.float32) / head_dim
    ):
        turns = length * frequency / (2 * numpy.pi)
        smooth = min(max((turns - low) / (high - low), 0), 1)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return numpy.array(found, dtype=numpy.float32)


def write(
    file: Path, family: str = "llama-3", types=None, permute=permuted, keys=None, **options
) -> Path:
    """A family's oracle as a GGUF file. types: "Q4_0" for all matrices, or a function of a tensor's
    GGUF name; keys adds keys of its own."""
    model = oracle(family)
    hf = model.config.get_text_config()
    architecture = ARCHITECTURES.get(hf.model_type, hf.model_type)
    writer = gguf.GGUFWriter(file, architecture, **options)
    add_config(writer, hf)
    if keys:
        keys(writer)
    (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, hf.num_hidden_layers)
    for name, tensor in as_converted(model):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            tensor = permute(tensor, getattr(hf, key))
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        named = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        asked = (types(named) if callable(types) else types) if tensor.dim() > 1 else None
        kind = TYPES[asked or "F32"]
        data = numpy.ascontiguousarray(tensor.numpy())
        data = data.astype(numpy.float64) if kind == TYPES.F64 else gguf.quants.quantize(data, kind)
        writer.add_tensor(named, data, raw_dtype=kind)
    return finish(writer, file)


def finish(writer, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def as_converted(model):
    """(name, tensor) of a model; tensors of experts, routers and sinks under llama.cpp's names, in
    its shapes."""
    parts = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
    rest = {
        "gate.weight": "ffn_gate_inp.weight",
        "router.weight": "ffn_gate_inp.weight",
        "router.bias": "ffn_gate_inp.bias",
        "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    }
    for name, tensor in model.state_dict().items():
        if ".visual." in name:
            continue
        name = name.replace("language_model.", "")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("gate.moe_statics", "moe_statics")  # as on disk
        if model.config.model_type == "granitemoe":
            name = name.replace("block_sparse_moe", "mlp")
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn|mlp)\.(.*)", name)
        layer, part = (inner[1], inner[3]) if inner else (None, None)
        expert = re.fullmatch(r"experts\.(gate_up_proj|down_proj)(_bias)?", part or "")
        if expert:
            ours, bias = parts[expert[1]], expert[2] is not None
            if model.config.model_type == "gpt_oss" and not bias:
                tensor = tensor.mT  # (E, rows, in)
            turns = model.config.model_type == "gpt_oss" and len(ours) == 2
            found = (tensor[:, i::2] for i in (0, 1)) if turns else tensor.chunk(len(ours), dim=1)
            for own, each in zip(ours, found):
                yield f"blk.{layer}.{own}.{'bias' if bias else 'weight'}", each
        elif part in rest:
            yield f"blk.{layer}.{rest[part]}", tensor[0] if part.startswith("shared") else tensor
        elif part == "sinks":
            yield f"blk.{layer}.attn_sinks.weight", tensor
        elif model.config.model_type == "gpt_oss" and "post_attention_layernorm" in name:
            yield f"blk.{name.split('.')[2]}.post_attention_norm.weight", tensor
        else:
            yield name, tensor


def weights_of(file: Path, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Every tensor of a file by the gguf package alone, q's and k's rows put back as its
    counterpart did."""
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        n = next((n for part, n in heads.items() if part in tensor.name), 0)
        if n:
            data = data.reshape(n, -1, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
        found[tensor.name] = data
    return found


# what llama.cpp's keys have no words for, or where it fixes another number: every fourth layer
# without RoPE, every sixth without a window, one RoPE base
NOT_SAID = ("qwen2.5-sliding", "qwen3-biased", "qwen3-moe-mixed", "qwen3-vl-moe")
FIXED = {
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "gemma-3": {
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
    },
    "olmo3": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 40,
                "attention_factor": 1.3,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        }
    },
    "qwen3-vl-moe": {"mlp_only_layers": []},
}
LLAMA_HEADS = {"attn_q.": 4, "attn_k.": 2}
STACKED = {
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.out": ("attn_output",),
    "ffn.gate_up": ("ffn_gate", "ffn_up"),
    "ffn.down": ("ffn_down",),
}


def sources(name: str) -> list[str]:
    """Tensors of a file behind one of our matrices."""
    if not name.startswith("layers."):
        return [{"lm_head": "output.weight", "embed": "token_embd.weight"}[name]]
    _, layer, module = name.split(".", 2)
    fused, _, number = module.rpartition(".")
    names = [STACKED[fused][int(number)]] if number.isdigit() else STACKED[module]
    return [f"blk.{layer}.{source}.weight" for source in names]


def same(a, b) -> bool:
    (names, ours), (others, theirs) = (zip(*model.named_parameters()) for model in (a, b))
    return names == others and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(ours, theirs)
    )


def parameters_of(a, b) -> zip:
    return zip(a.parameters(), b.parameters(), strict=True)


# ----------------------------------------------------------------------------- config and tensors


# model_types of files
WRITTEN = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "olmoe",
    "smollm3",
    "granite",
    "granitemoe",
    "phi3",
    "olmo2",
    "ernie4_5",
    "seed_oss",
    "exaone4",
    "glm4",
    *ARCHITECTURES,
)
WRITTEN_FAMILIES = [
    name
    for name, hf in FAMILIES.items()
    if hf.get("model_type", "llama") in WRITTEN and name not in {*NOT_SAID} - {*FIXED}
]


def same_config(got, want) -> bool:
    """Equal but for float32's rounding of numbers, the length that Hunyuan's files have, and a base
    that no layer takes."""
    if want.family.startswith("hunyuan"):
        lengths = {"max_seq_length": want.max_seq_length}
        got = dataclasses.replace(got, rope_local_theta=want.rope_local_theta, **lengths)
    got = dataclasses.replace(got, family=want.family)  # no part of the arithmetic
    pairs = zip(dataclasses.asdict(got).items(), dataclasses.asdict(want).items(), strict=True)
    for (key, value), (_, expected) in pairs:
        is_number = isinstance(expected, float) or key in ("rope_short", "rope_long")
        if value != (pytest.approx(expected, rel=1e-6) if is_number else expected):
            raise AssertionError(f"{key} = {value!r} is not {expected!r}")
    return True


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", WRITTEN_FAMILIES)
def test_every_family_is_its_folder(family, tmp_path):
    """Config and all weights, bit for bit, through names and orders that conversion to GGUF gave
    them; and transformers' logits."""
    with changed_family(family, **FIXED.get(family, {})) as other:
        file, folder = write(tmp_path / "m.gguf", other), tmp_path / "folder"
        oracle(other).save_pretrained(folder)
        assert same_config(load_config(file), load_config(folder))
        got = load_model(file, dtype=torch.float32)
        if family == "gemma-3":  # w + 1 - 1
            want = load_model(folder, dtype=torch.float32)
            assert all(torch.allclose(a, b, atol=1e-7) for a, b in parameters_of(got, want))
        else:
            assert same(got, load_model(folder, dtype=torch.float32))
        with torch.no_grad():
            want = oracle(other)(TOKENS[0]).logits
            assert (got(*TOKENS) - want).abs().max() <= 1e-4


def test_mistral_small_3_is_of_ministrals_architecture(folder_of, tmp_path, monkeypatch):
    """conversion/mistral3.py; earlier files of it have llama's."""
    monkeypatch.setitem(ARCHITECTURES, "mistral", "mistral3")
    file = write(tmp_path / "m.gguf", "mistral-nemo")
    assert gguf.GGUFReader(file).get_field("general.architecture").contents() == "mistral3"
    want = load_model(folder_of("mistral-nemo"), dtype=torch.float32)
    got = load_model(file, dtype=torch.float32)
    assert got.config == want.config and same(got, want)
    assert checkpoint.Checkpoint(file).hf["model_type"] == "mistral"


def test_layers_that_predict_further_ahead_are_left_out(folder_of, tmp_path, capsys):
    """GLM-4.5's file counts them among its layers."""

    def keys(writer):
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_norm", "ffn_gate_exps", "exp_probs_b"):
            shape = (6, 32, 64) if "exps" in name else (64, 128) if "proj" in name else (64,)
            part = "bias" if name == "exp_probs_b" else "weight"
            writer.add_tensor(f"blk.3.{name}.{part}", numpy.ones(shape, dtype=numpy.float32))

    got = load_model(write(tmp_path / "m.gguf", "glm-4.5", keys=keys), dtype=torch.float32)
    # each of the six experts counts
    assert "9 tensors are not the text model's" in capsys.readouterr().err
    want = load_model(folder_of("glm-4.5"), dtype=torch.float32)
    assert got.config == want.config and same(got, want)


@pytest.mark.parametrize("shape", [(1, 6), (6,)])
def test_a_selection_bias_may_be_a_vector(shape, folder_of, tmp_path, monkeypatch):
    """ERNIE's is a matrix of one row, of which programs that write a file anew drop a dimension."""
    convert = as_converted

    def reshaped(model):
        for name, tensor in convert(model):
            yield name, tensor.view(shape) if "moe_statics" in name else tensor

    monkeypatch.setitem(globals(), "as_converted", reshaped)
    file = write(tmp_path / "m.gguf", "ernie-4.5-moe")
    assert ours.parse(file).tensors["blk.1.exp_probs_b.bias"].shape == shape
    want = load_model(folder_of("ernie-4.5-moe"), dtype=torch.float32)
    assert same(load_model(file, dtype=torch.float32), want)


def test_without_the_order_of_rows_it_is_another_model(folder_of, tmp_path):
    """Negative control: the order of q's and k's rows decides the logits."""
    want = load_model(folder_of("llama-3"), dtype=torch.float32)(*TOKENS)
    for permute, equal in ((permuted, True), (lambda weight, heads: weight, False)):
        file = write(tmp_path / f"{equal}.gguf", permute=permute)
        assert torch.equal(load_model(file, dtype=torch.float32)(*TOKENS), want) == equal


def test_a_number_of_heads_for_each_layer_is_one_for_all_or_refused(tmp_path):
    """Files may hold an array for each layer; layers of different shapes are no damage."""
    key = "llama.attention.head_count"

    def by_layer(*heads: int):
        def change(writer: gguf.GGUFWriter) -> None:
            writer.kv_data[0].pop(key)
            writer.add_array(key, list(heads))

        return change

    plain = checkpoint.Checkpoint(write(tmp_path / "plain.gguf")).hf
    assert "architectures" not in plain  # transformers' class would be a guess
    heads = plain["num_attention_heads"]
    equal = write(tmp_path / "a.gguf", keys=by_layer(heads, heads))
    assert checkpoint.Checkpoint(equal).hf == plain
    want = load_model(tmp_path / "plain.gguf", dtype=torch.float32)
    assert same(load_model(equal, dtype=torch.float32), want)
    different = write(tmp_path / "b.gguf", keys=by_layer(heads, heads + 1))
    with pytest.raises(ValueError, match=rf"b.gguf: {key} = .* differs from layer to layer"):
        load_config(different)


def test_scaling_that_is_not_llama_3s_is_refused(tmp_path):
    def keys(writer):
        divisors = numpy.linspace(1, 9, 8)
        writer.add_tensor("rope_freqs.weight", divisors.astype(numpy.float32))

    def keys_of_two_scalings(writer):
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        keys(writer)

    def keys_of_a_huge_base(writer):
        writer.add_float32("llama.rope.freq_base", 1e25)
        divisors = numpy.array([1, 1, 1, 1, 1, 1, 8, 3], dtype=numpy.float32)
        writer.add_tensor("rope_freqs.weight", divisors)

    def keys_of_zeros(writer):
        writer.add_tensor("rope_freqs.weight", numpy.zeros(8, dtype=numpy.float32))

    file = write(tmp_path / "m.gguf", keys=keys)
    with pytest.raises(ValueError, match=r"m.gguf: rope_freqs.weight .*other numbers"):
        load_config(file)
    file = write(tmp_path / "zeros.gguf", keys=keys_of_zeros)
    with pytest.raises(UserError, match=r"zeros.gguf: rope_freqs.weight must hold 8 positive"):
        load_config(file)
    file = write(tmp_path / "huge.gguf", keys=keys_of_a_huge_base)
    with pytest.raises(UserError, match=r"huge.gguf: .*not"):
        load_config(file)
    file = write(tmp_path / "two.gguf", keys=keys_of_two_scalings)
    with pytest.raises(ValueError, match=r"rope.scaling.type = 'yarn' next to rope_freqs.weight"):
        load_config(file)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama-3", "llama-3.2"])
def test_types_keep_their_bits(kind, family, tmp_path, capsys):
    """All weights equal those that the gguf package computes. In 4 and 8 bits they are held so,
    tied ones too."""
    file = write(tmp_path / "m.gguf", family, kind)
    model = load_model(file, dtype=torch.float32, pack=False)
    want, scheme = (
        weights_of(file, LLAMA_HEADS),
        {"Q4_0": "q4_1", "Q4_1": "q4_1", "Q8_0": "q8_0"}.get(kind),
    )
    tied = {"lm_head": "embed"} if family == "llama-3.2" else {}
    for name, linear in named_linears(model):
        assert getattr(linear, "scheme", None) == scheme, name
        got = linear.dequantized(torch.float32) if scheme else linear.weight
        assert torch.equal(
            got, torch.cat([want[source] for source in sources(tied.get(name, name))])
        ), name
    ids = torch.arange(131)
    assert torch.equal(model.embed(ids), want["token_embd.weight"])
    err = capsys.readouterr().err
    if kind == "Q5_1":
        assert f"m.gguf: {LOOSE}" in err and f" in 16 bits: {23 - bool(tied)} in Q5_1" in err
    elif scheme and not tied:
        # an embedding alone is looked up, not multiplied
        assert LOOSE in err and f" in 16 bits: 1 in {kind}" in err
    else:
        assert LOOSE not in err
    assert load_config(file).dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "bfloat16")


def test_float64_is_read_as_what_it_holds(tmp_path, story_tokenizer):
    """Weights of float32 in the wider type are the same model, and a folder made of them is no
    wider than others."""
    with changed_family("llama-3", vocab_size=384) as family:
        wide, narrow = (
            write(
                tmp_path / f"{kind}.gguf",
                family,
                kind,
                keys=lambda writer: from_sentencepiece(writer, story_tokenizer),
            )
            for kind in ("F64", "F32")
        )
    assert same(*(load_model(file, dtype=torch.float32) for file in (wide, narrow)))
    quantize(["--checkpoint", str(wide), "--output", str(tmp_path / "plain")])
    assert (
        load_config(wide).dtype == "float64" and load_config(tmp_path / "plain").dtype == "bfloat16"
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_scales_that_are_no_numbers_do_not_become_numbers(kind, quantize, tmp_path):
    """float16's NaN in the first two bytes of a block, E8M0's in the first one. What is converted
    or quantized again is refused by name; what is held as stored reaches the logits, where decoding
    reports it."""
    file = write(tmp_path / "m.gguf", "mixtral" if kind == "MXFP4" else "llama-3", kind)
    name = "blk.1.ffn_down_exps.weight" if kind == "MXFP4" else "blk.1.ffn_down.weight"
    tensor = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name)
    data = bytearray(file.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\xff\x7f"
    file.write_bytes(data)
    if quantize is None:
        linears = quantized_linears(load_model(file, pack=False))
        weights = [linear.dequantized(torch.float32) for linear in linears]
        assert sum(not weight.isfinite().all() for weight in weights) == 1
        return
    with pytest.raises(ValueError, match=r"m\.gguf: .*(down_proj|w2)\S*: .*NaN or infinity"):
        load_model(file, quantize=quantize)


def mixed(name: str) -> str:
    """As files of llama.cpp's K types: v and down in more bits."""
    if name.startswith("blk.1."):
        return "Q4_1"
    return {"attn_v": "Q8_0", "ffn_down": "Q8_0", "token_embd": "F16", "output": "Q8_0"}.get(
        name.split(".")[-2], "Q4_0"
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_merged_experts_keep_their_bits(kind, family, tmp_path):
    """Each expert's matrix holds what the gguf package reads in the merged tensor."""
    scheme = {"Q4_0": "q4_1", "Q8_0": "q8_0", "MXFP4": "mxfp4"}[kind]
    with changed_family(
        family, hidden_size=64, **{"moe_intermediate_size": 32} if family == "qwen3-moe" else {}
    ) as other:
        file = write(
            tmp_path / "m.gguf", other, lambda name: kind if "_exps.weight" in name else None
        )
    model, want = load_model(file, dtype=torch.float32, pack=False), weights_of(file, {})
    for number, expert in enumerate(model.layers[1].ffn.experts):
        assert expert.gate_up.scheme == expert.down.scheme == scheme
        gate, up, down = (
            want[f"blk.1.ffn_{part}_exps.weight"][number] for part in ("gate", "up", "down")
        )
        assert torch.equal(expert.gate_up.dequantized(torch.float32), torch.cat((gate, up)))
        assert torch.equal(expert.down.dequantized(torch.float32), down)
    assert model.layers[1].ffn.router.weight.dtype == torch.float32


def test_matrices_of_several_types(tmp_path, capsys):
    """Each source of one that is fused of several types has its own scheme; nothing is lost or
    unpacked."""
    file = write(tmp_path / "m.gguf", types=mixed)
    model, want = load_model(file, dtype=torch.float32, pack=False), weights_of(file, LLAMA_HEADS)
    schemes = {name: getattr(linear, "scheme", None) for name, linear in named_linears(model)}
    parts = [schemes[f"layers.0.attention.qkv.{number}"] for number in range(3)]
    assert parts == ["q4_1", "q4_1", "q8_0"] and schemes["layers.1.attention.qkv"] == "q4_1"
    names = ("layers.0.ffn.down", "layers.0.ffn.gate_up", "lm_head")
    assert [schemes[name] for name in names] == ["q8_0", "q4_1", "q8_0"]
    for name, linear in named_linears(model):
        got = linear.dequantized(torch.float32) if schemes[name] else linear.weight
        assert torch.equal(got, torch.cat([want[source] for source in sources(name)])), name
    assert LOOSE not in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no folder holds such a model.*q4_1 and q8_0"):
        save_model(model, tmp_path / "again", {})
    assert not (tmp_path / "again").exists()


def test_packed_products_are_those_of_the_weights(tmp_path):
    """Decoding and a prompt longer than the kernel takes, against the same weights in plain
    matrices."""
    file = write(tmp_path / "m.gguf", "llama-3.2", "Q4_1")
    model, plain = (load_model(file, dtype=torch.float32, pack=pack) for pack in (True, False))
    many = torch.arange(300).view(2, 150) % 131, torch.arange(150)
    for tokens, pos in (TOKENS, (TOKENS[0][:, :1], TOKENS[1][:1]), many):
        assert torch.allclose(model(tokens, pos), plain(tokens, pos), rtol=1e-4, atol=1e-4)


def test_asked_for_it_is_quantized_again(tmp_path):
    """What it holds in that scheme already stays. The gguf package is not needed for
    these types."""
    file = write(
        tmp_path / "m.gguf", types=lambda name: "Q8_0" if name == "output.weight" else "Q4_0"
    )
    model = load_model(file, quantize="int8", pack=False)
    assert [linear.scheme for linear in quantized_linears(model)] == ["int8"] * 12 + ["q8_0"]
    model = load_model(file, quantize="q4_1", head_scheme="int8", pack=False)
    assert [linear.scheme for linear in quantized_linears(model)] == ["q4_1"] * 12 + ["int8"]
    same_as = load_model(file, pack=False)
    assert torch.equal(model.layers[0].ffn.down.codes, same_as.layers[0].ffn.down.codes)


# Bytes of a block of 256 weights, and where it has float16 scales
BLOCKS = {
    "Q3_K": (110, (108,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}
K_TYPES = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "ffn_up": "Q5_K"}


def k_types(file: Path, kinds: dict[str, str] = K_TYPES) -> Path:
    """A file of K types: arbitrary bytes with small scales. kinds: of tensors, Q4_K for others."""
    hf = {
        **BASE,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "model_type": "llama",
    }
    rng, writer = numpy.random.default_rng(0), gguf.GGUFWriter(file, "llama")
    add_config(
        writer,
        type("hf", (), {**hf, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    )
    sizes = {"attn_k": 128, "attn_v": 128, "token_embd": 131, "output": 131}
    for name in [name for names in STACKED.values() for name in names] + ["token_embd", "output"]:
        kind = kinds.get(name, "Q4_K")
        num_bytes, places = BLOCKS[kind]
        data = rng.integers(0, 256, (sizes.get(name, 256), num_bytes), dtype=numpy.uint8)
        for at in places:  # float16 scales of 2^-10 and some other bits
            data[:, at + 1] = 0x14
        prefix = "" if name in ("token_embd", "output") else "blk.0."
        writer.add_tensor(f"{prefix}{name}.weight", data, raw_dtype=TYPES[kind])
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(256, dtype=numpy.float32))
    return finish(writer, file)


def test_k_types_keep_their_bits(tmp_path, capsys, monkeypatch):
    """In 4 to 6 bits, without the gguf package, which says what they are."""
    file = k_types(tmp_path / "k.gguf")
    want = weights_of(file, LLAMA_HEADS)
    ours.block_type.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    model = load_model(file, dtype=torch.float32, pack=False)
    for name, linear in named_linears(model):
        weights = torch.cat([want[source] for source in sources(name)])
        got = linear.dequantized(torch.float32)
        assert torch.equal(got.view(torch.int32), weights.view(torch.int32)), name
    schemes = {name: linear.scheme for name, linear in named_linears(model)}
    assert [*schemes.values()] == ["q4_k", "q4_k", "q6_k", "q4_k", "q4_k", "q5_k", "q6_k", "q6_k"]
    assert torch.equal(model.embed(torch.arange(131)), want["token_embd.weight"])
    assert " in 16 bits: 1 in Q4_K" in capsys.readouterr().err


def test_k_types_of_every_scale(tmp_path):
    """Blocks of any bits, with float16 scales of both signs and all sizes: bit for bit."""
    rng = numpy.random.default_rng(0)
    for kind, (num_bytes, places) in BLOCKS.items():
        data = rng.integers(0, 256, (64, 2 * num_bytes), dtype=numpy.uint8)
        blocks = data.reshape(128, num_bytes)
        for at in places:
            blocks[:, at + 1] &= 0xBF  # no NaN, no infinity
        want = torch.from_numpy(gguf.quants.dequantize(data, TYPES[kind]))
        stored = ours.block_type(TYPES[kind])
        got = ours.Blocks(stored, (64, 512), torch.from_numpy(data))[:]
        assert torch.equal(got.view(torch.int32), want.view(torch.int32)), kind


def test_other_types_are_unpacked(tmp_path, capsys, monkeypatch):
    file = k_types(tmp_path / "k.gguf", dict.fromkeys(K_TYPES, "Q3_K"))
    model, want = load_model(file, dtype=torch.float32, pack=False), weights_of(file, LLAMA_HEADS)
    for name, linear in named_linears(model):
        got = linear.dequantized(torch.float32) if hasattr(linear, "scheme") else linear.weight
        assert torch.equal(got, torch.cat([want[source] for source in sources(name)])), name
    # q and k, out and gate
    assert [linear.scheme for linear in quantized_linears(model)] == ["q4_k"] * 4
    plain = [
        tensor
        for tensor in gguf.GGUFReader(file).tensors
        if re.search("attn_v|ffn_down|ffn_up|token_embd|^output.weight", tensor.name)
    ]
    assert len(plain) == 5
    num_weights = sum(int(tensor.n_elements) for tensor in plain)
    sizes = f"{2 * num_weights / 1e9:.3g} GB in 16 bits"
    assert f"k.gguf: {LOOSE}, {sizes}: 4 in Q3_K, 1 in Q4_K" in capsys.readouterr().err
    requantized = quantized_linears(load_model(file, quantize="int4-g32"))
    assert {linear.scheme for linear in requantized} == {"int4-g32"}
    # The embedding, and without a scheme of its own the head; what is quantized to int4 is not.
    assert " in 16 bits: 1 in Q3_K, 1 in Q4_K\n" in capsys.readouterr().err
    for cache in (ours.block_type, ours.read_header):
        cache.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ValueError, match=r"k.gguf: .*tensor blk.0.attn_v.weight: type 11 .*: pip install gguf"
    ):
        load_config(file)
    ours.block_type.cache_clear()


def mixed_types(name: str) -> str:
    """A type of its own for v, and plain weights for up, as in files of mixed types."""
    return {"attn_v": "Q8_0", "ffn_up": "F16"}.get(name.split(".")[-2], "Q4_1")


@pytest.mark.parametrize("family", ["llama-3", "qwen2.5-yarn"])  # with biases
def test_a_fused_matrix_of_unlike_types_keeps_them(family, tmp_path):
    file = write(tmp_path / "m.gguf", family, mixed_types)
    model = load_model(file, dtype=torch.float32, pack=False)
    heads = {} if family.startswith("qwen") else LLAMA_HEADS
    want = weights_of(file, heads)
    for layer in model.layers:
        qkv = layer.attention.qkv
        gate_up = layer.ffn.gate_up
        assert [linear.scheme for linear in qkv] == ["q4_1", "q4_1", "q8_0"]
        assert [getattr(linear, "scheme", None) for linear in gate_up] == ["q4_1", None]
        assert layer.ffn.down.scheme == "q4_1"
    for name, linear in named_linears(model):
        got = linear.dequantized(torch.float32) if hasattr(linear, "scheme") else linear.weight
        assert torch.equal(got, torch.cat([want[source] for source in sources(name)])), name
    source = checkpoint.Checkpoint(file).source
    plain = models.allocate(models.empty_model(source.config, torch.float32), "cpu")
    models.load_parameters(plain, [name for name, _ in plain.named_parameters()], source.tensors)
    expected = plain(*TOKENS)
    assert torch.allclose(model(*TOKENS), expected, atol=1e-5 * expected.abs().max().item())
    packed = load_model(file, dtype=torch.float32)
    assert torch.allclose(packed(*TOKENS), expected, atol=0.02 * expected.abs().max().item())
    # Another scheme is that of all sources, in one matrix.
    requantized = load_model(file, quantize="int8", pack=False)
    assert requantized.layers[0].attention.qkv.scheme == "int8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_matrix_in_parts_drafts_as_it_decodes(dtype, tmp_path):
    """The same bits for one row and for a round of several, in every part's own kernel."""
    model = load_model(write(tmp_path / "m.gguf", types=mixed_types), dtype=dtype)
    prompts = [[40, 3, 99, 12, 7], [*range(5, 30)]]
    texts = []
    for drafting in ({}, {"drafter": NgramDraft(1), "speculate_k": 3}):
        rows = [[], []]
        options = {"sampling": Sampling(0), "max_new_tokens": 30, **drafting}
        for row, id in generate(model, prompts, **options):
            rows[row].append(id)
        texts.append(rows)
    assert texts[0] == texts[1] and len(texts[0][0]) == 30


def test_a_fused_matrix_in_parts_is_saved_and_loaded(tmp_path):
    """Whose sources are in one scheme of ours, or plain."""

    def types(name: str) -> str:
        return "F32" if "attn_k" in name or "ffn_up" in name else "Q4_1"

    file = write(tmp_path / "m.gguf", types=types)
    model = load_model(file, dtype=torch.float32, pack=False)
    save_model(model, tmp_path / "again", checkpoint.Checkpoint(file).hf)
    again = load_model(tmp_path / "again", dtype=torch.float32, pack=False)
    assert same(model, again)
    schemes = [getattr(linear, "scheme", None) for linear in again.layers[1].attention.qkv]
    assert schemes == ["q4_1", None, "q4_1"]


@pytest.mark.parametrize("types", ["Q4_1", mixed_types])
def test_pieces_of_two_ranks_are_slices(types, tmp_path):
    """Rows of q, k, v, gate and up, columns of o and down, in the quantized form."""
    with changed_family("llama-3", intermediate_size=128, vocab_size=132) as family:
        file = write(tmp_path / "m.gguf", family, types)
    want = weights_of(file, LLAMA_HEADS)
    source = checkpoint.Checkpoint(file).source
    schemes = choose_schemes(source, file)
    for rank in range(2):
        ranks = Ranks(rank, 2)
        model = models.empty_model(source.config, torch.float32, schemes, ranks)
        stored_names = [n for n, _ in model.named_parameters()]
        models.load_parameters(models.allocate(model, "cpu"), stored_names, source.tensors, ranks)
        for name, linear in named_linears(model):
            cut = 1 if name.endswith(("attention.out", "ffn.down")) else 0
            parts = [want[source].chunk(2, cut)[rank] for source in sources(name)]
            got = linear.dequantized(torch.float32) if hasattr(linear, "scheme") else linear.weight
            assert torch.equal(got, torch.cat(parts)), name


def test_a_split_file_is_one(tmp_path, folder_of):
    write(tmp_path / "m.gguf", split_max_tensors=7)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) == 5 and files[0].name == "m-00001-of-00005.gguf"
    assert load_config(files[0]) == load_config(folder_of("llama-3"))
    assert same(
        load_model(files[0], dtype=torch.float32),
        load_model(folder_of("llama-3"), dtype=torch.float32),
    )
    with pytest.raises(ValueError, match=r"give the first, which ends in -00001-of-00005.gguf"):
        load_config(files[2])
    files[3].rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"m-00004-of-00005.gguf: not a readable GGUF file"):
        load_config(files[0])
    with pytest.raises(ValueError, match=r"first.gguf: one of 5 files; give the first"):
        load_config(files[0].rename(tmp_path / "first.gguf"))


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    def split(writer) -> None:
        writer.add_uint16("split.count", 2)

    first = write(tmp_path / "m-00001-of-00002.gguf", keys=split)
    shutil.copy(first, tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(UserError, match=r"m-00002-of-00002.gguf: tensor .* is in another part"):
        load_config(first)


def test_a_file_is_mapped_twice_at_most(tmp_path, monkeypatch):
    """Once for its header and once for its tensors."""
    file = write(tmp_path / "m.gguf", types="Q4_0")
    maps = []
    map_file = ours.map_file

    def counted(path: Path):
        maps.append(path)
        return map_file(path)

    monkeypatch.setattr(ours, "map_file", counted)
    load_model(file)
    assert maps == [file] * 2


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_0"])
def test_an_adapter_is_not_merged_into_quantized_weights(kind, tmp_path):
    file = write(tmp_path / "m.gguf", types=kind)
    with pytest.raises(UserError, match=r"m.gguf is stored quantized; merge into the original"):
        _ = checkpoint.Checkpoint(file, tmp_path).source


# ------------------------------------------------------------------------------------- tokenizers


def add_vocabulary(
    writer, model: str, tokens, types, scores=None, merges=None, pre=None, **ids
) -> None:
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    if pre:
        writer.add_tokenizer_pre(pre)
    for key, id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", id)


def from_sentencepiece(
    writer, file: Path, added: tuple[str, ...] = (), added_type: int = 4, **special
) -> None:
    """As conversion/base.py, _create_vocab_sentencepiece, which calls added tokens user-defined
    (4)."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ids = range(model.get_piece_size())
    kinds = [
        2
        if model.is_unknown(id)
        else 3
        if model.is_control(id)
        else 5
        if model.is_unused(id)
        else 6
        if model.is_byte(id)
        else 1
        for id in ids
    ]
    tokens, scores = [model.id_to_piece(id) for id in ids], [model.get_score(id) for id in ids]
    kinds, scores = kinds + [added_type] * len(added), scores + [0.0] * len(added)
    add_vocabulary(
        writer,
        "llama",
        [*tokens, *added],
        kinds,
        scores,
        **(special or {"bos": 1, "eos": 2, "unknown": 0}),
    )


TEXTS = [
    "",
    "the little cat",
    "  two  spaces and\n\n a newline\t",
    "Don't, it's we'LL 12345 67.8",
    "日本語 é e\u0301 ß 🎉\u200d🦊",
    "<s> </s> <|im_start|>",
    " x",
    "\n\n\n  y\r\nz  ",
    "snake_case(x[3])!=…",
    "ÀÉÎ naïve coöperate ﬁ",
    "a zebra, 12345 67.8",
    "Ἀθῆναι; \u2126\u212b Жук (a|b) ა가나 x。\n ​ y  ",
]


def test_sentencepiece_inside(tmp_path, story_tokenizer, text_folder):
    """The same ids, texts and special tokens as the model file that it was made of."""
    file = write_vocabulary(
        tmp_path / "m.gguf", lambda writer: from_sentencepiece(writer, story_tokenizer)
    )
    got, want = load_tokenizer(file), load_tokenizer(text_folder)
    for text in TEXTS:
        assert got.encode(text) == want.encode(text), text
        assert got.decode(got.encode(text, bos=False)) == want.decode(want.encode(text, bos=False))
    assert (got.bos_id, got.add_bos, got.stop_ids, got.specials) == (
        want.bos_id,
        True,
        want.stop_ids,
        want.specials,
    )
    assert got.pieces() == want.pieces()


@pytest.mark.parametrize("ids", [{"bos": 1, "eos": 2}, {"bos": 1, "eos": 2, "unknown": 0}])
def test_padding_of_the_unknown_type_is_no_second_unknown_token(
    ids, tmp_path, story_tokenizer, text_folder
):
    """A Phi-3 file has 53 of them; sentencepiece refuses a second unknown token."""
    padding = tuple(f"[PAD{number}]" for number in range(5))
    file = write_vocabulary(
        tmp_path / "m.gguf",
        lambda writer: from_sentencepiece(writer, story_tokenizer, padding, added_type=2, **ids),
    )
    got, want = load_tokenizer(file), load_tokenizer(text_folder)
    for text in (*TEXTS, "a [PAD1] b"):
        assert got.encode(text) == want.encode(text), text
    assert got.specials == want.specials and got.vocab_size == want.vocab_size + len(padding)


@pytest.mark.parametrize(
    ("names", "stored", "ends"),
    [
        (["<|end|>", "<|endoftext|>"], 4, [4, 5]),
        (["<|end|>", "<|endoftext|>", "<|call|>", "<|return|>"], 7, [5, 6, 7]),  # gpt-oss
        (["<|end|>", "<|endoftext|>", "<|calls|>", "<|flush|>"], 7, [5, 6, 7]),  # Solar Open
        (["<|end|>"], 2**32 - 1, [4]),  # an id that is not set
    ],
)
def test_what_ends_a_text(names, stored, ends):
    """<|end|> ends a message, and not the text, where others end that."""
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.eos_token_id": stored}
    keys["tokenizer.ggml.tokens"] = ["<unk>", "<s>", "a", "b", *names]
    keys["tokenizer.ggml.token_type"] = [2, 3, 1, 1, *[3] * len(names)]
    assert gguf_vocabulary.Vocabulary(keys).generation_config() == {"eos_token_id": ends}
    ids = {name: 4 + number for number, name in enumerate(names)}
    if len(names) == 4:
        assert end_ids(ids) == {5, 6, 7}


@pytest.mark.parametrize("stored", [2, 2**32 - 1])
def test_an_id_that_is_not_set_does_not_reach_config_json(stored, tmp_path):
    def keys(writer):
        writer.add_eos_token_id(stored)

    hf = checkpoint.Checkpoint(write(tmp_path / "m.gguf", keys=keys)).hf
    assert hf.get("eos_token_id") == (2 if stored == 2 else None)


@pytest.mark.parametrize("name", ["Phi-3 mini", "phi3", "Llama 3"])
def test_phi_3s_special_tokens_take_white_space_after_them(name, tmp_path, story_tokenizer):
    """By the model's name alone, as in llama.cpp; not <s>."""

    def keys(writer):
        from_sentencepiece(writer, story_tokenizer, ("<|user|>", "<|end|>"), 3)
        writer.add_name(name)

    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", keys))
    text = "<s>\n<|user|>\nthe cat<|end|>\n<|user|>\n"
    ids = tokenizer.encode(text, parse_special=True, bos=False)
    stripped = tokenizer.encode(
        "<s>\n<|user|>the cat<|end|><|user|>", parse_special=True, bos=False
    )
    assert (ids == stripped) == name.lower().startswith("phi")
    begins = ("<s>\na", "<s>a")  # <s> keeps it
    encoded = [tokenizer.encode(text, parse_special=True, bos=False) for text in begins]
    assert encoded[0] != encoded[1]


@pytest.mark.parametrize("unknown", [-1, 4, None])
def test_an_id_that_no_token_has_says_that_none_is_unknown(unknown):
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "a", "b"]}
    keys |= {"tokenizer.ggml.token_type": [2, 3, 1, 1], "tokenizer.ggml.unknown_token_id": unknown}
    types = [2, 3, 1, 1] if unknown is None else [5, 3, 1, 1]
    assert gguf_vocabulary.Vocabulary(keys).types == types


# of names that end a generation in llama.cpp
ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|fim_pad|>")


@pytest.mark.parametrize("added_type", [1, 4])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_names_that_end_a_turn_are_control_tokens_whatever_their_type(
    model, added_type, tmp_path, story_tokenizer
):
    """As in llama.cpp (llama-vocab.cpp, load): a user's text that spells them stays text, and they
    end a generation. In Qwen's vocabulary </s> is an ordinary word; where <|call|> ends a message,
    <|end|> does not."""
    names = (*ENDS, "<|fim_middle|>", "<|return|>", "<|call|>", "<|end|>")

    def keys(writer):
        if model == "llama":
            from_sentencepiece(writer, story_tokenizer, names, added_type)
        else:
            tokens = [*"abcdefghijklmnopqrstuvwxyz<>/|_", "</", "s>", "</s>", *names]
            types = [1] * (len(tokens) - len(names)) + [added_type] * len(names)
            add_vocabulary(writer, "gpt2", tokens, types, None, ["< /", "s >", "</ s>"], "gpt-2")

    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", keys))
    assert {name for name in names if tokenizer.specials[name] in tokenizer.stop_ids} == {
        *ENDS,
        "<|return|>",
        "<|call|>",
    }
    for name in names:
        id = tokenizer.specials[name]
        assert id not in tokenizer.encode(f"a{name}b", bos=False) and id in tokenizer.parse(
            f"a{name}b"
        )
        assert tokenizer.decode([id]) == ""
    if model == "gpt2":
        assert tokenizer.decode(tokenizer.encode("a</s>", bos=False)) == "a</s>"
        assert "</s>" not in tokenizer.specials


USER_DEFINED = ("<|im_start|>", "call  tool")
PARSED = (
    *TEXTS,
    "<s>the cat</s>the dog",
    "<s> the</s>  x</s>\nthe<s>",
    "</s></s>the",
    "<|im_start|>user<|im_start|> x",
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
)


def with_user_defined(writer, file: Path, add_space_prefix: bool | None) -> None:
    from_sentencepiece(writer, file, USER_DEFINED)
    writer.add_chat_template(TURNS)
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)


@pytest.mark.parametrize("add_space_prefix", [None, True, False])
def test_a_space_behind_special_tokens_as_in_llama_cpp(add_space_prefix, tmp_path, story_tokenizer):
    """One before every text behind a token that the text was split at, even before a space; none
    where a name is parted that a message spells."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(story_tokenizer))
    file = write_vocabulary(
        tmp_path / "m.gguf", lambda w: with_user_defined(w, story_tokenizer, add_space_prefix)
    )
    tokenizer, start = load_tokenizer(file), model.get_piece_size()
    names = {"<s>": 1, "</s>": 2, **{name: start + i for i, name in enumerate(USER_DEFINED)}}

    def split(text: str) -> list[int]:
        parts = [part for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if part]
        return [id for part in parts for id in ([names[part]] if part in names else encode(part))]

    def encode(text: str) -> list[int]:
        return model.encode(text) if add_space_prefix is not False else model.encode("<" + text)[2:]

    assert len(model.encode("<")) == 2  # a space and a byte
    for text in PARSED:
        assert tokenizer.parse(text) == split(text), text
    plain, evil = ([{"role": "user", "content": f"the cat{name} the"}] for name in ("", "</s>"))
    assert tokenizer.chat(plain) == split("<s><|im_start|>the cat the</s>")
    parted = split("<s><|im_start|>the cat")
    assert tokenizer.chat(evil)[: len(parted)] == parted and tokenizer.chat(evil).count(2) == 1
    assert tokenizer.decode(tokenizer.chat(evil)).count(" ") == 2 + (add_space_prefix is not False)


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_sentencepiece_ids_are_llama_cpps(add_space_prefix, tmp_path, story_tokenizer):
    llama_cpp = pytest.importorskip("llama_cpp")
    file = write_vocabulary(
        tmp_path / "m.gguf", lambda w: with_user_defined(w, story_tokenizer, add_space_prefix)
    )
    tokenizer, other = (
        load_tokenizer(file),
        llama_cpp.Llama(str(file), vocab_only=True, verbose=False),
    )
    for text in PARSED:
        assert tokenizer.parse(text) == other.tokenize(
            text.encode(), add_bos=False, special=True
        ), text
        assert tokenizer.encode(text) == other.tokenize(
            text.encode(), add_bos=True, special=False
        ), text
    other.close()


def test_a_vocabulary_without_a_leading_space(tmp_path, story_tokenizer):
    """add_space_prefix false: nothing is put before a text, and nothing taken from a decoded
    one."""

    def keys(writer):
        from_sentencepiece(writer, story_tokenizer)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)

    got = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", keys))
    with_space = load_tokenizer(
        write_vocabulary(tmp_path / "n.gguf", lambda w: from_sentencepiece(w, story_tokenizer))
    )
    assert (
        got.encode(" the cat") == with_space.encode("the cat", bos=False) != got.encode("the cat")
    )
    for text in TEXTS:
        assert got.decode(got.encode(text)) == text


def write_vocabulary(file: Path, keys) -> Path:
    """A file of keys and one tensor."""
    writer = gguf.GGUFWriter(file, "llama")
    keys(writer)
    writer.add_tensor("token_embd.weight", numpy.zeros((400, 64), dtype=numpy.float32))
    return finish(writer, file)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# DeepSeek V3's.
KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tiktoken's o200k_base, as published with gpt-oss.
O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def splitter(pre: str):
    """The pre-tokenizer that the published tokenizer.json of such a model has."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2")
    )
    if pre == "gpt-2":
        return byte_level
    first = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "llama-bpe": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        "falcon3": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        "qwen2": pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
        "gpt-4o": pre_tokenizers.Split(Regex(O200K), "isolated"),
        "glm4": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        "seed-coder": pre_tokenizers.Split(Regex(SEED), "isolated"),
    }[pre]
    return pre_tokenizers.Sequence([first, byte_level])


@pytest.mark.parametrize(
    "pre",
    ["smollm", "gpt-2", "llama-bpe", "qwen2", "falcon3", "gpt-4o", "glm4", "seed-coder"],
)
def test_byte_level_vocabularies(pre, tmp_path):
    """Ids of texts equal those of the tokenizer that the file was made of; so does which names are
    special. Its merges go across what its pattern splits, and one of its words is of no merges."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    want = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "falcon3", "glm4")))
    want.pre_tokenizer, want.decoder = splitter("gpt-2"), decoders.ByteLevel()
    if pre == "qwen2":
        want.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    lines = [*TEXTS, *(ROOT / "checkpoints" / "stories.txt").read_text().splitlines()[:300]]
    want.train_from_iterator([*lines * 2, "12345 67.8 " * 200], trainer)
    stored = json.loads(want.to_str())
    stored["model"]["vocab"]["Ġzebra"] = len(stored["model"]["vocab"])
    want = Tokenizer.from_str(json.dumps(stored))
    want.pre_tokenizer = splitter(pre)
    want.add_tokens([AddedToken("<tool>", normalized=False)])
    stored = json.loads(want.to_str())
    vocab = want.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    kinds = [3 if token in special else 4 if token == "<tool>" else 1 for token in tokens] + [5]

    def keys(writer):
        merges = [" ".join(pair) for pair in stored["model"]["merges"]]
        add_vocabulary(
            writer, "gpt2", [*tokens, "[PAD9]"], kinds, None, merges, pre, bos=1, eos=2, eot=0
        )

    got = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", keys))
    assert (
        got.add_bos == (pre in ("llama-bpe", "falcon3"))
        and got.stop_ids == {0, 2}
        and got.bos_id == 1
    )
    assert (
        got.vocab_size == len(tokens)
        and got.specials.keys() == {*special}
        and got.runtime.literals.keys() == {"<tool>"}
    )
    for text in [*TEXTS, *lines[-20:]]:
        assert got.parse(text) == want.encode(text, add_special_tokens=False).ids, text
        plain = text.replace("<|", "<")
        ids = got.encode(plain, bos=False)
        assert ids == want.encode(plain, add_special_tokens=False).ids
        assert got.decode(ids) == (
            plain if pre != "qwen2" else want.normalizer.normalize_str(plain)
        )
    assert got.encode("a <tool> b", bos=False).count(vocab["<tool>"]) == 1
    assert got.encode("<|im_end|>", bos=False) != [2] and got.parse("<|im_end|>") == [2]


LLAMA3_BOS = "falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral"
# llama.cpp's table in 0.3.36: the names of every split that is here, by the patterns that it
# quotes from the published tokenizer.json, with whether they put BOS first and leave words that are
# tokens unmerged.
TABLE = [
    (LLAMA3_BOS, [LLAMA3], True, True),
    ("glm4 glm5", [LLAMA3], False, True),
    ("chatglm-bpe dbrx smaug-bpe", [LLAMA3], False, False),
    ("minicpm5", [r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")], False, True),
    (
        "deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo megrez qwen2 solar-open stablelm2",
        [LLAMA3.replace("{1,3}", "")],
        False,
        False,
    ),
    ("gpt-4o kanana2 llama4 minimax-m2 talkie", [O200K], False, False),
    ("seed-coder", [SEED], False, False),
    (
        "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v1-en"
        " jina-v2-code jina-v2-de jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe"
        " trillion",
        [GPT2],
        False,
        False,
    ),
    (
        "codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder",
        [r"\p{N}", GPT2],
        False,
        False,
    ),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", [r"\p{N}{1,3}", KANA, DEEPSEEK3], False, False),
]


@pytest.mark.parametrize(("names", "patterns", "adds_bos", "ignores_merges"), TABLE)
def test_every_name_of_a_split_that_is_here(names, patterns, adds_bos, ignores_merges):
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = pre_tokenizers.Sequence([*splits, byte_level])
    for name in names.split():
        vocabulary = gguf_vocabulary.Vocabulary(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": name,
                "tokenizer.ggml.tokens": ["a", "b", "<s>"],
                "tokenizer.ggml.token_type": [1, 1, 3],
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.bos_token_id": 2,
            }
        )
        tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json().decode())
        for text in TEXTS:
            words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
            assert words == expected.pre_tokenize_str(text), name
        assert tokenizer.encode("a").ids == ([2, 0] if adds_bos else [0]), name
        assert tokenizer.model.ignore_merges == ignores_merges, name


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
)


def test_templates_and_stops(tmp_path, story_tokenizer):
    """The file's template with the file's names; generation ends at its ends of text, turn and
    message."""

    def keys(writer):
        from_sentencepiece(writer, story_tokenizer)
        writer.add_chat_template(TEMPLATE)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 9)

    file = write_vocabulary(tmp_path / "m.gguf", keys)
    tokenizer = load_tokenizer(file)
    assert tokenizer.stop_ids == {2, 7, 9}
    ids = tokenizer.chat([{"role": "user", "content": "the cat </s>"}])
    assert ids[0] == 1 and ids[-1] == 2 and ids.count(2) == 1  # the one in the message stays text
    assert tokenizer.decode(ids) == "[user]the cat </s>"


NAMED_TEMPLATES = {
    "default": "{{ messages[0].content }}",
    "rag": "{{ documents }}",
    "tool_use": "{{ tools[0].name }} {{ messages[0].content }}",
}


@pytest.mark.parametrize("names", [["default", "rag", "tool_use"], ["tool_use"], ["default"]])
def test_a_template_for_tools(names, tmp_path, story_tokenizer):
    """With tools the file's template of that name, as in a folder with the same templates; without
    tools the default one, or the only one, as in llama.cpp. quantize.py's folder keeps them."""
    templates = [{"name": name, "template": NAMED_TEMPLATES[name]} for name in names]

    def keys(writer):
        from_sentencepiece(writer, story_tokenizer)
        writer.add_chat_template(templates)

    file = write_vocabulary(tmp_path / "m.gguf", keys)
    copy_files(file, tmp_path)
    for tokenizer in (load_tokenizer(file), load_tokenizer(tmp_path)):
        messages = [{"role": "user", "content": "the cat"}]
        if "default" in names:
            assert tokenizer.decode(tokenizer.chat(messages)) == "the cat"
        if "tool_use" in names:
            ids = tokenizer.chat(messages, tools=[{"name": "clock"}])
            assert tokenizer.decode(ids) == "clock the cat"
        else:
            with pytest.raises(ValueError, match="does not mention tools"):
                tokenizer.chat(messages, tools=[{"name": "clock"}])
        expected = NAMED_TEMPLATES["default" if "default" in names else "tool_use"]
        assert tokenizer.template.source == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (lambda w: None, "tokenizer.ggml.model = None is not supported; supported: gpt2, llama"),
        (lambda w: w.add_tokenizer_model("bert"), "tokenizer.ggml.model = 'bert' is not supported"),
        (lambda w: w.add_tokenizer_model("llama"), "tokenizer.ggml.tokens"),
        (
            lambda w: add_vocabulary(w, "gpt2", ["a"], [1], pre="falcon", merges=["a b"]),
            "pre = 'falcon' is not",
        ),
        (
            lambda w: add_vocabulary(w, "gpt2", ["a"], [1], pre="smollm"),
            "tokenizer.ggml.merges",
        ),
        (
            lambda w: add_vocabulary(w, "gpt2", ["a"], [1], pre="smollm", merges=["ab"]),
            "not a tokenizer of",
        ),
        (
            lambda w: add_vocabulary(w, "llama", ["a", "b"], [1]),
            "tokenizer.ggml.token_type must be 2 numbers, one a token",
        ),
        (lambda w: add_vocabulary(w, "llama", ["a", "b"], [1, 1]), "not a sentencepiece model"),
    ],
)
def test_vocabularies_that_cannot_be_read(keys, message, tmp_path):
    file = write_vocabulary(tmp_path / "m.gguf", keys)
    with pytest.raises(ValueError, match=r"m.gguf") as error:
        load_tokenizer(file)
    assert (
        message in str(error.value)
        and "\n" not in str(error.value)
        and "/tmp/tmp" not in str(error.value)
    )


# ---------------------------------------------------------------------------------- what is wrong


def flip(at: int, form: str, value) -> object:
    def change(data: bytearray) -> None:
        struct.pack_into(f"<{form}", data, at, value)

    return change


def after(name: bytes, offset: int, form: str, value) -> object:
    """Change what stands behind a name in the header."""

    def change(data: bytearray) -> None:
        struct.pack_into(f"<{form}", data, data.index(name) + len(name) + offset, value)

    return change


def rename(old: bytes, new: bytes) -> object:
    def change(data: bytearray) -> None:
        assert len(old) == len(new) and old in data
        data[:] = data.replace(old, new, 1)

    return change


def cut(size: int) -> object:
    def change(data: bytearray) -> None:
        del data[size:]

    return change


# of one dimension: behind its name a count, a size, a type, an offset
TENSOR = b"blk.0.attn_norm.weight"
DAMAGED = "m.gguf: not a readable GGUF file, damaged or not completely fetched"
BROKEN = {
    "magic": (flip(0, "4s", b"GGML"), "neither a folder nor a GGUF file"),
    "version 1": (flip(4, "I", 1), "version 1 is not supported"),
    "big-endian": (
        flip(4, "I", 3 << 24),
        "a big-endian file; gguf-convert-endian FILE little makes it readable",
    ),
    "big-endian 2": (flip(4, "I", 2 << 24), "a big-endian file"),
    "version 9": (flip(4, "I", 9), "version 9 is not supported; supported: 2 and 3"),
    "tensors": (flip(8, "Q", 2**60), "m.gguf: "),
    "keys": (flip(16, "Q", 2**40), DAMAGED),
    "more keys": (flip(16, "Q", 4000), DAMAGED),
    "key's length": (flip(24, "Q", 2**63), DAMAGED),
    "header cut": (cut(300), DAMAGED),
    "almost nothing": (cut(9), DAMAGED),
    "data cut": (
        lambda data: cut(len(data) - 1000)(data),
        "the file ends inside tensor output.weight: fetch it again",
    ),
    "value's type": (after(b"general.architecture", 0, "I", 77), DAMAGED),
    "value's length": (after(b"general.architecture", 4, "Q", 2**62), DAMAGED),
    "architecture": (
        rename(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"),
        "general.architecture = 'mamba'",
    ),
    "dimensions": (after(TENSOR, 0, "I", 9), f"tensor {TENSOR.decode()}: "),
    "size": (after(TENSOR, 4, "Q", 2**60), f"the file ends inside tensor {TENSOR.decode()}"),
    "large size": (after(TENSOR, 4, "Q", 2**31), f"the file ends inside tensor {TENSOR.decode()}"),
    "no size": (after(TENSOR, 4, "Q", 0), DAMAGED),
    "type": (after(TENSOR, 12, "I", 4711), "4711 is not a valid GGMLQuantizationType"),
    "whole numbers": (after(TENSOR, 12, "I", 24), "Dequantization for I8 is not yet implemented"),
    "odd offset": (after(TENSOR, 16, "Q", 7), f"tensor {TENSOR.decode()} has the offset 7"),
    "far offset": (after(TENSOR, 16, "Q", 2**62), f"tensor {TENSOR.decode()} has the offset 461"),
    "overlap": (after(TENSOR, 16, "Q", 0), f"tensor {TENSOR.decode()} has the offset 0 instead of"),
    "misshapen": (
        lambda data: after(TENSOR, 4, "Q", 60)(data),
        "misshapen: model.layers.0.input_layernorm.weight is [60] instead",
    ),
    "missing": (
        rename(TENSOR, b"blk.0.attn_sorm.weight"),
        "missing: model.layers.0.input_layernorm.weight; unex",
    ),
    "twice": (
        rename(TENSOR, b"blk.1.attn_norm.weight"),
        "tensor blk.1.attn_norm.weight occurs twice",
    ),
    "key twice": (
        rename(b"llama.rope.freq_base", b"llama.context_length"),
        "key llama.context_length occurs twice",
    ),
    "ragged rows": (
        after(b"blk.0.attn_q.weight", 4, "Q", 48),
        "tensor blk.0.attn_q.weight has rows of 48 weights, which are no blocks of 32",
    ),
    "no layers": (
        rename(b"llama.block_count", b"llama.block_count"[::-1]),
        "the file has no key llama.block_count",
    ),
    "no context": (
        rename(b"llama.context_length", b"llama.context_lengXX"),
        "llama.context_lengXX = ",
    ),
    "no embedding": (
        rename(b"token_embd.weight", b"token_embX.weight"),
        "the file has no tensor token_embd.weight",
    ),
    "no output": (
        rename(b"blk.0.attn_output.weight", b"blk.0.attn_outpuX.weight"),
        "the file has no tensor blk.0.attn_output.weight",
    ),
    "heads": (after(b"llama.attention.head_count", 4, "I", 3), "m.gguf"),
    "no heads": (
        after(b"llama.attention.head_count", 4, "I", 0),
        "key llama.attention.head_count = 0 must be a positive number",
    ),
    "head's size": (
        after(b"llama.attention.key_length", 4, "I", 17),
        "partial_rotary_factor = 0.9411764705882353 is not supported; supported: 1",
    ),
    "layers": (after(b"llama.block_count", 4, "I", 2**31), "num_hidden_layers = 2147483648"),
    "epsilon": (
        after(b"layer_norm_rms_epsilon", 4, "f", float("nan")),
        "key llama.attention.layer_norm_rms_epsilon = nan must be a positive number",
    ),
    "base": (after(b"rope.freq_base", 4, "f", -1.0), "rope.freq_base = -1.0 must be a positive"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("good") / "m.gguf", types="Q4_0").read_bytes()


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_one_line(what, good, tmp_path):
    """The file, and what of it: from the header alone, before a weight is read."""
    change, message = BROKEN[what]
    data = bytearray(good)
    change(data)
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"m.gguf") as error:
        load_model(file)
    assert message in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_an_empty_architecture_is_not_supported(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "")
    writer.add_key_value("general.architecture", "", gguf.GGUFValueType.STRING)
    writer.add_tensor("token_embd.weight", numpy.zeros((4, 64), dtype=numpy.float32))
    with pytest.raises(ValueError, match=r"m.gguf: general.architecture = '' is not supported"):
        load_model(finish(writer, tmp_path / "m.gguf"))


def test_braces_in_the_name_of_a_tensor_are_no_format(tmp_path):
    def add(writer):
        writer.add_tensor("a{}{x}.weight", numpy.zeros((2, 4, 64), dtype=numpy.float32))

    with pytest.raises(ValueError, match=r"m.gguf: .*unexpected: a0\{x\}"):
        load_model(write(tmp_path / "m.gguf", keys=add))


@pytest.mark.parametrize("file_type", ["adapter", "mmproj", "imatrix"])
def test_other_files_of_llama_cpp_are_named(file_type, tmp_path):
    """As convert_lora_to_gguf.py and llama.cpp's other programs write them."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_type(file_type)
    writer.add_string("adapter.type", "lora")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", numpy.zeros((4, 64), dtype=numpy.float32))
    with pytest.raises(ValueError, match=r"m.gguf: general.type = ") as error:
        load_model(finish(writer, tmp_path / "m.gguf"))
    assert f"'{file_type}' is not supported; supported: model" in str(error.value)


def test_a_vocabulary_alone_is_a_tokenizer_and_no_model(tmp_path, story_tokenizer):
    """As convert_hf_to_gguf.py --vocab-only writes it."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    from_sentencepiece(writer, story_tokenizer)
    writer.add_block_count(1)
    file = finish(writer, tmp_path / "m.gguf")
    assert load_tokenizer(file).decode(load_tokenizer(file).encode("the cat")) == "the cat"
    with pytest.raises(ValueError, match=r"m.gguf: the file has a vocabulary and no tensors"):
        load_model(file)


def test_a_key_of_the_vocabulary_that_is_missing_is_named(tmp_path):
    file = write_vocabulary(tmp_path / "m.gguf", lambda w: w.add_tokenizer_model("llama"))
    with pytest.raises(ValueError, match=r"m.gguf: the file has no key tokenizer.ggml.tokens"):
        load_tokenizer(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qwen2.expert_count", 8, "qwen2.expert_count = 8 is not supported"),
        (
            "llama.expert_gating_func",
            2,
            "llama.expert_gating_func = 2 is not supported; supported: 1",
        ),
        (
            "llama.expert_weights_norm",
            0,
            "llama.expert_weights_norm = 0 is not supported; supported: True",
        ),
        ("llama.attn_logit_softcapping", 30, "attn_logit_softcapping = 30"),
        ("llama.rope.scaling.type", "longrope", "m.gguf"),
        ("llama.rope.scale_linear", 4, "llama.rope.scale_linear = 4 is not supported"),
        ("llama.rope.freq_base_swa", 9, "llama.rope.freq_base_swa = 9 is not supported"),
        (
            "llama.attention.temperature_scale",
            1,
            "attention.temperature_scale = 1 is not supported; supported: only files without it",
        ),
        ("llama.a_key_of_next_year", 0, "llama.a_key_of_next_year = 0 is not supported"),
        ("llama.a_key\nin_lines", 0, "llama.a_key in_lines = 0 is not supported"),
        ("phi3.rope.scaling.attn_factor", 2, "phi3.rope.scaling.attn_factor = 2"),
        ("granite.rope.scaling.finetuned", 0, "granite.rope.scaling.finetuned = 0"),
        ("granite.deepstack_mapping", 0, "granite.deepstack_mapping = 0"),
        ("glm4.rope.dimension_sections", 8, "glm4.rope.dimension_sections = 8"),
        ("glm4moe.expert_gating_func", 1, "glm4moe.expert_gating_func = 1"),
        ("glm4moe.expert_group_count", 4, "glm4moe.expert_group_count = 4"),
        ("gemma3.final_logit_softcapping", 30, "gemma3.final_logit_softcapping = 30"),
        ("general.alignment", 7, "general.alignment = 7 must be a multiple of 8"),
        ("general.alignment", 0, "general.alignment = 0 must be a multiple of 8"),
        ("split.count", 3, "one of 3 files"),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused(key, value, message, tmp_path):
    def keys(writer):
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)

    file = tmp_path / "m.gguf"
    if key == "general.alignment":
        data = write(file, keys=lambda w: w.add_uint32("general.alignmen_", value)).read_bytes()
        file.write_bytes(data.replace(b"general.alignmen_", b"general.alignment"))
    else:
        architecture = key.split(".")[0]
        family = "mixtral" if "expert_" in key else "llama-3"
        with changed_family("gemma-3", **FIXED["gemma-3"]) as gemma:
            families = {
                "qwen2": "qwen2",
                "phi3": "phi-4",
                "granite": "granite",
                "glm4": "glm-4-0414",
                "glm4moe": "glm-4.5",
                "gemma3": gemma,
            }
            write(file, families.get(architecture, family), keys=keys)
    with pytest.raises(ValueError, match=r"m.gguf") as error:
        load_config(file)
    assert message in str(error.value)


def test_tensors_may_be_aligned_to_any_multiple_of_8(tmp_path, folder_of):
    want = load_model(folder_of("llama-3"), dtype=torch.float32)
    for alignment in (8, 2**17):
        file = write(
            tmp_path / f"{alignment}.gguf", keys=lambda w, n=alignment: w.add_custom_alignment(n)
        )
        assert same(load_model(file, dtype=torch.float32), want)


@pytest.mark.parametrize(
    "kind, rope_type", [(None, "linear"), ("linear", "linear"), ("none", "default")]
)
def test_a_factor_without_a_type_is_linear(kind, rope_type, tmp_path):
    """As in llama.cpp (src/llama-model.cpp), whose default of rope.scaling.type is linear."""

    def keys(writer):
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        if kind is not None:
            writer.add_string("llama.rope.scaling.type", kind)

    config = load_config(write(tmp_path / "m.gguf", "llama-2", keys=keys))
    factor = 4.0 if rope_type == "linear" else 1.0
    assert (config.rope_type, config.rope_factor) == (rope_type, factor)
    plain = write(
        tmp_path / "plain.gguf",
        "llama-2",
        keys=lambda w: w.add_string("llama.rope.scaling.type", "linear"),
    )
    assert load_config(plain).rope_type == "default"


def test_what_is_no_gguf_file(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 14500438\n"
    )
    with pytest.raises(ValueError, match=r"m.gguf: a Git LFS pointer"):
        load_model(file)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: no such folder"):
        load_model(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"config.json: no such file; pass the path of m.gguf"):
        load_model(tmp_path)


# -------------------------------------------------------------------------------- llama.cpp itself

# In a process of its own, and token by token, as in test_gguf_real.py.
LLAMA_CPP = """
import sys
import llama_cpp, numpy
options = {"n_ctx": 64, "n_batch": 1, "n_threads": 1, "logits_all": True, "verbose": False}
llama = llama_cpp.Llama(sys.argv[1], **options, type_k=0, type_v=0, flash_attn=False)
llama.eval([int(id) for id in sys.argv[3:]])
numpy.save(sys.argv[2], llama.scores[: len(sys.argv) - 3])
"""
# Where llama.cpp computes something else than transformers: it has no windows of Mistral 0.1 and
# Phi-3, and those of EXAONE 4 in models of 64 layers alone.
NOT_LLAMA_CPPS = ("mistral-v0.1", "phi-3", "exaone-4")
# Its table of GELU holds 16 bits, and of qwen2vl it does not read the norms' epsilon.
LESS_EXACT = ("gemma-3", "qwen2.5-vl")
COMPARABLE = {
    "olmoe": {"num_key_value_heads": 4},  # norms of keys are as long as those of queries
    # no biases of the last matrices, and a shared expert of this size
    "ernie-4.5": {"use_bias": False},
    "ernie-4.5-moe": {"intermediate_size": 128},
    # the factor that follows from YaRN's
    "olmo3": {
        "rope_parameters": {
            kind: {key: value for key, value in rope.items() if key != "attention_factor"}
            for kind, rope in FIXED["olmo3"]["rope_parameters"].items()
        }
    },
}


@pytest.mark.attack
@pytest.mark.parametrize(
    "family", [family for family in WRITTEN_FAMILIES if family not in NOT_LLAMA_CPPS]
)
def test_logits_are_llama_cpps(family, tmp_path, story_tokenizer):
    """Of 60 tokens, in float32."""
    import sentencepiece

    pytest.importorskip("llama_cpp")
    vocab_size = sentencepiece.SentencePieceProcessor(model_file=str(story_tokenizer)).vocab_size()
    changes = {**FIXED.get(family, {}), **COMPARABLE.get(family, {}), "vocab_size": vocab_size}
    with changed_family(family, **changes) as other:
        file = write(
            tmp_path / "m.gguf",
            other,
            keys=lambda writer: from_sentencepiece(writer, story_tokenizer),
        )
    tokens = torch.arange(3, 63)
    command = [sys.executable, "-c", LLAMA_CPP, file, tmp_path / "logits.npy", *tokens.tolist()]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    want = torch.from_numpy(numpy.load(tmp_path / "logits.npy"))
    model = load_model(file, dtype=torch.float32)
    if family == "gpt-oss":  # llama.cpp rounds YaRN's bounds, which gpt-oss does not
        model.rope.config = dataclasses.replace(model.config, rope_truncate=True)
        model.rope.make_table("cpu")
    got = model(tokens[None], torch.arange(60))[0]
    assert want.abs().max() > 1
    limit = 5e-3 if family in LESS_EXACT else 1e-4
    assert (got - want).abs().max() <= limit * want.abs().max()


# --------------------------------------------------------------------------------------- programs


@pytest.fixture
def model_file(tmp_path, story_tokenizer) -> Path:
    """A whole model with its vocabulary."""
    with changed_family("llama-3", vocab_size=384) as family:
        return write(
            tmp_path / "m.gguf",
            family,
            "Q4_0",
            keys=lambda writer: from_sentencepiece(writer, story_tokenizer),
        )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_deleted_model_unmaps_its_file(model_file):
    """At once; a file that stays open is cached no less."""

    def is_mapped() -> bool:
        return str(model_file) in Path("/proc/self/maps").read_text()

    gc.collect()
    gc.disable()
    try:
        stored = checkpoint.Checkpoint(model_file)
        llm = LLM(model_file, device="cpu")
        assert llm.generate(["the cat"], max_new_tokens=3)[0].tokens
        assert "model.norm.weight" in stored.tensors and is_mapped()
        del llm, stored
        assert not is_mapped()
    finally:
        gc.enable()


def test_generate_takes_a_file(model_file, capsys):
    arguments = [
        "--checkpoint",
        str(model_file),
        "--temperature",
        "0",
        "--max_new_tokens",
        "5",
        "--device",
        "cpu",
    ]
    main([*arguments, "--json", "--prompt", "the cat"])
    got = json.loads(capsys.readouterr().out)
    assert (
        got["prompt_tokens"] == load_tokenizer(model_file).encode("the cat")
        and len(got["tokens"]) == 5
    )
    main([*arguments, "--json", "--prompt", "the cat", "--draft_checkpoint", str(model_file)])
    assert json.loads(capsys.readouterr().out)["tokens"] == got["tokens"]
    model_file.write_bytes(model_file.read_bytes()[:5000])
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and err.count("error: ") == 1 and "m.gguf" in err


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "gpt-oss",
        *(
            pytest.param(family, marks=pytest.mark.attack)
            for family in (
                "olmoe",
                "granite-moe",
                "glm-4.5",
                "ernie-4.5-moe",
                "hunyuan-a13b",
                "gemma-3",
                "ministral-3",
                "exaone-4",
                "seed-oss",
            )
        ),
    ],
)
def test_transformers_reads_a_folder_made_of_a_file_with_experts(family, tmp_path, story_tokenizer):
    """Each config of transformers reads its own key of the number of experts."""
    import transformers

    with changed_family(family, vocab_size=384, **FIXED.get(family, {})) as other:
        file = write(
            tmp_path / "m.gguf",
            other,
            keys=lambda writer: from_sentencepiece(writer, story_tokenizer),
        )
        quantize(
            ["--checkpoint", str(file), "--dtype", "float32", "--output", str(tmp_path / "plain")]
        )
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", dtype=torch.float32
        )
        with torch.no_grad():
            want = oracle(other)(TOKENS[0]).logits
            assert torch.allclose(theirs(TOKENS[0]).logits, want, rtol=1e-4, atol=1e-4)


def test_quantize_makes_a_folder(model_file, tmp_path, capsys):
    """In a scheme of ours: that of the exact weights. Plain: what transformers reads, with the
    tokenizer beside it."""
    import transformers

    quantize(["--checkpoint", str(model_file), "--scheme", "int8", "--output", str(tmp_path / "q")])
    assert "other types are rounded to bfloat16; --dtype float32 keeps" in capsys.readouterr().err
    got = load_model(tmp_path / "q", dtype=torch.float32, pack=False)
    want = load_model(model_file, dtype=torch.float32, quantize="int8", pack=False)
    assert torch.equal(got.layers[1].ffn.gate_up.codes, want.layers[1].ffn.gate_up.codes)
    quantize(
        ["--checkpoint", str(model_file), "--dtype", "float32", "--output", str(tmp_path / "plain")]
    )
    err, sizes = capsys.readouterr().err, [model_file.stat().st_size]
    sizes.append(sum(file.stat().st_size for file in (tmp_path / "plain").glob("*.safetensors")))
    assert (
        f"{sizes[1] / 1e6:.1f} MB of {sizes[0] / 1e6:.1f} MB" in err
        and "rounded" not in err
        and "refuse" not in err
    )
    exact = load_model(model_file, dtype=torch.float32)
    plain = load_model(tmp_path / "plain", dtype=torch.float32)
    assert torch.allclose(plain(*TOKENS), exact(*TOKENS), rtol=1e-4, atol=1e-4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32
    )
    with torch.no_grad():
        assert torch.allclose(theirs(TOKENS[0]).logits, plain(*TOKENS), rtol=1e-4, atol=1e-4)
    for text in TEXTS:
        assert load_tokenizer(tmp_path / "plain").encode(text) == load_tokenizer(model_file).encode(
            text
        )
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["dtype"] == "float32" and "quantization" not in config
    for arguments, message in (([], "exists already"), (["--head", "int8"], "--scheme is missing")):
        with pytest.raises(SystemExit):
            quantize(["--checkpoint", str(model_file), "--output", str(tmp_path / "q"), *arguments])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        quantize(["--checkpoint", str(tmp_path / "plain"), "--output", str(tmp_path / "r")])
    assert "--scheme is missing" in capsys.readouterr().err


def test_saved_as_a_folder_it_is_the_same_model(model_file, tmp_path):
    """One scheme for all blocks, and the head's: config.json says it, and the bits stay."""
    model = load_model(model_file, pack=False)
    save_model(model, tmp_path / "again", checkpoint.Checkpoint(model_file).hf)
    assert same(load_model(tmp_path / "again", pack=False), model)
    assert checkpoint.Checkpoint(tmp_path / "again").stored_scheme == "q4_1"


@pytest.mark.attack
def test_other_programs_take_a_file(model_file, tmp_path):
    """Without the gguf package, whose types this file does not use."""
    (tmp_path / "text").write_text("the little cat and a big dog went to play in the park. " * 20)
    (tmp_path / "gguf.py").write_text("raise ImportError")
    for program in (
        [
            "scripts.perplexity",
            "--checkpoint",
            model_file,
            "--text",
            tmp_path / "text",
            "--context",
            "32",
            "--json",
        ],
        ["scripts.tp_plan", model_file, "--ranks", "1", "--json"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *map(str, program)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
    num_bytes = sum(
        parameter.nbytes for parameter in load_model(model_file, pack=False).parameters()
    )
    assert result["weights"] == num_bytes


def test_a_user_defined_piece_with_spaces_is_found(tmp_path):
    """The file has them as spaces; sentencepiece would look for U+2581."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "▁",
        "a",
        "b",
        "call  tool",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    kinds = [2, 3, 3, 1, 1, 1, 4, *[6] * 256]

    def keys(writer):
        add_vocabulary(
            writer, "llama", tokens, kinds, [0.0] * len(tokens), None, None, bos=1, eos=2
        )

    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", keys))
    # llama.cpp puts a space behind it
    assert tokenizer.encode("acall  toolb", bos=False) == [3, 4, 6, 3, 5]
    assert tokenizer.decode([3, 4, 6, 5]) == "acall  toolb"
