"""Tiny random folders of every family, made by transformers, the oracle that wrote the format."""

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

# One thread a process, before torch starts its own: tiny models gain nothing by more, and processes
# that spin at each other's side take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Sums of MKL's kernels for AVX2 depend on where data lies in memory, on processors of Intel's, and
# engines say "up to rounding" there (docs/proof.md, Known exceptions). The tests of equal bits ask
# for sums that depend on values alone.
if (
    os.path.exists("/proc/cpuinfo")
    and "GenuineIntel" in (processor := Path("/proc/cpuinfo").read_text())
    and ("avx512f" not in processor or os.environ.get("MKL_ENABLE_INSTRUCTIONS") == "AVX2")
):
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

import pytest
import reference
import torch
from tqdm import tqdm

import decoding.warmup
from decoding.engine import Engine
from decoding.validation import check_lengths, value_per_row

# a job in the background is started with SIGINT ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
# Test files by a package of requirements-dev.txt that they cannot be imported without. A machine
# with a GPU may have pytest and hypothesis alone.
FILES_BY_PACKAGE = {
    "llguidance": ["test_grammar.py"],
    "lm_eval": ["test_eval_lm.py", "test_hub.py"],
    "openai": [
        "test_attacks.py",
        "test_response_calls.py",
        "test_responses.py",
        "test_serve.py",
        "test_tool_calls.py",
    ],
    "rich": ["test_draft_marks.py"],
}
missing_packages = [name for name in FILES_BY_PACKAGE if importlib.util.find_spec(name) is None]
collect_ignore = [file for name in missing_packages for file in FILES_BY_PACKAGE[name]]


def pytest_report_header() -> str | None:
    """Which files are left out, and why."""
    if not missing_packages:
        return None
    return f"left out without {', '.join(missing_packages)}: {', '.join(collect_ignore)}"


@pytest.hookimpl(tryfirst=True)  # before pytest leaves tests out by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `one_in(n)` leaves out: of a function's cases all but every nth. With
    `one_in(n, m)` only every mth of these is slow, and the others are long."""
    cases = Counter()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None:
            continue
        n, m = (*marker.args, 1)[:2]
        function, _, _ = item.nodeid.partition("[")
        if cases[function] % n:
            item.add_marker("long" if cases[function] % m else "slow")
        cases[function] += 1


def pytest_collection_finish() -> None:
    """The tests run a fifth faster when the collector leaves alone what imports made, hundreds of
    thousands of objects, and looks at new ones less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


STEADY_S = decoding.warmup.STEADY_S


@pytest.fixture(autouse=True)
def short_calibrations(monkeypatch):
    """A calibration times each step once: no test depends on exact costs."""
    monkeypatch.setattr(decoding.warmup, "STEADY_S", 0)


BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def rope(theta: float, kind: str = "default", **others) -> dict:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **others}}


LLAMA3_ROPE = rope(
    500000.0,
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=24,
)

# What distinguishes each family, at a size that shows it: contexts before stretching and windows
# are short enough for the tests' 40 to 80 tokens to leave them.
FAMILIES = {
    "llama-2": {"model_type": "llama", "num_key_value_heads": 4, **rope(10000.0)},
    "llama-3": {"model_type": "llama", **rope(500000.0)},
    "llama-3.1": {"model_type": "llama", **LLAMA3_ROPE},
    "llama-3.2": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 8, **LLAMA3_ROPE},
    "codellama": {"model_type": "llama", "num_key_value_heads": 4, **rope(1000000.0)},
    "tinyllama": {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        **rope(10000.0),
    },
    "yi": {"model_type": "llama", **rope(5000000.0)},
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        **rope(100000.0),
    },
    "llama-linear": {"model_type": "llama", **rope(10000.0, "linear", factor=4.0)},
    "llama-biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        **rope(10000.0),
    },
    "mistral-v0.1": {"model_type": "mistral", "sliding_window": 9, **rope(10000.0)},
    "mistral-v0.2": {"model_type": "mistral", "sliding_window": None, **rope(1000000.0)},
    "mistral-nemo": {
        "model_type": "mistral",
        "sliding_window": None,
        "head_dim": 32,
        **rope(1000000.0),
    },
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "sliding_window": 9,
        **rope(1000000.0),
    },
    "qwen2.5-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        **rope(1000000.0),
    },
    "qwen2.5-yarn": {
        "model_type": "qwen2",
        **rope(1000000.0, "yarn", factor=4.0, original_max_position_embeddings=40),
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6, **rope(1000000.0)},
    "qwen3-biased": {
        "model_type": "qwen3",
        "head_dim": 32,
        "attention_bias": True,
        **rope(1000000.0),
    },
    "r1-distill-llama": {"model_type": "llama", "num_attention_heads": 8, **LLAMA3_ROPE},
    "r1-distill-qwen": {"model_type": "qwen2", **rope(10000.0)},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        **rope(1000000.0),
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        **rope(1000000.0),
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        **rope(1000000.0),
    },
    "qwen3-moe-mixed": {  # a dense layer among sparse ones, and weights that do not sum to 1
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        **rope(10000.0),
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
        **rope(2e6),
    },
    "phi-4": {"model_type": "phi3", "pad_token_id": 0, **rope(250000.0)},
    "phi-3": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "sliding_window": 9,
        "num_key_value_heads": 4,
        **rope(10000.0),
    },
    "phi-4-mini": {  # texts here are longer than the original context
        "model_type": "phi3",
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "original_max_position_embeddings": 40,
        "partial_rotary_factor": 0.75,
        **rope(
            10000.0,
            "longrope",
            short_factor=[1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
            long_factor=[1.0, 1.5, 3.0, 7.0, 12.0, 30.0],
            original_max_position_embeddings=40,
            partial_rotary_factor=0.75,
        ),
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
        "attention_multiplier": 0.1,
        **rope(10000.0),
    },
    "olmo2": {"model_type": "olmo2", **rope(500000.0)},
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": 9,
        "num_hidden_layers": 5,
        "rope_parameters": {
            "full_attention": rope(
                500000.0, "yarn", factor=4.0, original_max_position_embeddings=40
            )["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "seed-oss": {"model_type": "seed_oss", "head_dim": 32, **rope(1e7)},
    "ernie-4.5": {
        "model_type": "ernie4_5",
        "head_dim": 32,
        "use_bias": True,
        "tie_word_embeddings": False,
        **rope(5e5),
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 32,
        **rope(10000.0, "dynamic", alpha=50.0, factor=1.0),
    },
    "exaone-4": {
        "model_type": "exaone4",
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "sliding_window_pattern": 4,
        **LLAMA3_ROPE,
    },
    "exaone-4-small": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        **LLAMA3_ROPE,
    },
    "ministral-3": {
        "model_type": "ministral3",
        "head_dim": 32,
        **rope(
            1e6,
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            max_position_embeddings=160,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "intermediate_size": 64,
        **rope(
            150000.0,
            "yarn",
            factor=4.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=40,
        ),
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        **rope(10000.0),
    },
    "granite-moe": {
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
        "attention_multiplier": 0.1,
        **rope(10000.0),
    },
    "granite-swa": {  # the full layer does not rotate
        "model_type": "granite_swa",
        "sliding_window": 9,
        "layer_rope_theta": [0, 10000.0, 10000.0],
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
        "attention_multiplier": 0.1,
        "tie_word_embeddings": False,
        **rope(10000.0),
    },
    "granite-moe-swa": {
        "model_type": "granitemoe_swa",
        "sliding_window": 9,
        "layer_rope_theta": [0, 10000.0, 10000.0],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
        "attention_multiplier": 0.1,
        **rope(10000.0),
    },
    "mellum-2": {
        "model_type": "mellum",
        "head_dim": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": rope(
                500000.0, "yarn", factor=4.0, original_max_position_embeddings=40
            )["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "cwm": {
        "model_type": "cwm",
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "head_dim": 16,
        **LLAMA3_ROPE,
    },
    "ministral-8b": {
        "model_type": "ministral",
        "head_dim": 32,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        **rope(1e6),
    },
    "iquest-coder": {"model_type": "iquestcoder", "head_dim": 32, **rope(500000.0)},
    "glm-4.5": {
        "model_type": "glm4_moe",
        "head_dim": 32,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.5,
        **rope(1e6, partial_rotary_factor=0.5),
    },
    "glm-4.5-air": {  # no norms of queries and keys, and weights that do not sum to 1
        "model_type": "glm4_moe",
        "head_dim": 32,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        **rope(1e6, partial_rotary_factor=0.5),
    },
    "glm-4": {
        "model_type": "glm",
        "head_dim": 32,
        "pad_token_id": 0,
        **rope(10000.0, partial_rotary_factor=0.5),
    },
    "glm-4-0414": {
        "model_type": "glm4",
        "head_dim": 32,
        "pad_token_id": 0,
        **rope(10000.0, partial_rotary_factor=0.5),
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        **rope(5e6, partial_rotary_factor=0.5),
    },
    "solar-open": {
        "model_type": "solar_open",
        "head_dim": 32,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=40),
    },
    "k-exaone": {
        "model_type": "exaone_moe",
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
        **rope(1e6),
    },
    "dots.llm1": {
        "model_type": "dots1",
        "head_dim": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 9,
        "max_window_layers": 2,
        **rope(1e7),
    },
    "hy3": {
        "model_type": "hy_v3",
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **rope(1e7),
    },
    "ernie-4.5-moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
        **rope(5e5),
    },
    "hunyuan-a13b": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 32,
        "num_experts": 6,
        "moe_topk": [2, 2, 2],
        **rope(10000.0, "dynamic", alpha=50.0, factor=1.0),
    },
    "gemma-3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 50,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": rope(1e6, "linear", factor=4.0)["rope_parameters"],
            "sliding_attention": rope(10000.0)["rope_parameters"],
        },
    },
    "qwen2.5-vl": {
        "model_type": "qwen2_5_vl_text",
        "tie_word_embeddings": True,
        **rope(1e6, mrope_section=[2, 3, 3]),
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl_text",
        "head_dim": 32,
        **rope(5e6, mrope_section=[6, 5, 5], mrope_interleaved=True),
    },
    "exaone-4.5": {
        "model_type": "exaone4",
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "sliding_window_pattern": 4,
        **LLAMA3_ROPE,
    },
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe_text",
        "head_dim": 32,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
        **rope(5e6, mrope_section=[6, 5, 5], mrope_interleaved=True),
    },
}
# Families whose folders hold more than their text model: the rest of such a config.json.
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
WRAPPERS = {
    "qwen2.5-vl": {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": True,
        "vision_config": {**VISION, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "vision_config": {**VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
    "exaone-4.5": {
        "model_type": "exaone4_5",
        "tie_word_embeddings": False,
        "vision_config": {
            **VISION,
            "out_hidden_size": 64,
            "num_key_value_heads": 1,
            "fullatt_block_indexes": [0],
        },
    },
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe",
        "vision_config": {**VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
}


class Twin:
    """The naive twin of a family that transformers does not have, for tests that ask transformers'
    model: its logits, greedy text, and folder."""

    def __init__(self, hf: dict):
        from loading.config import config_from_hf
        from loading.models import random_model
        from tests.conformance.families import filled, saved_tensors

        model = random_model(config_from_hf(hf), dtype=torch.float32, pack=False)
        self.model = filled(model)
        self.hf = hf
        self.tensors = saved_tensors(self.model, hf)

    def __call__(self, input_ids: torch.Tensor) -> SimpleNamespace:
        rows = [reference.logits(self.hf, self.tensors, row.tolist()) for row in input_ids]
        return SimpleNamespace(logits=torch.stack(rows).float())

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **greedy) -> torch.Tensor:
        for _ in range(max_new_tokens):
            token = self(input_ids).logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, token), dim=1)
        return input_ids

    def save_pretrained(self, folder: Path) -> None:
        from loading.saving import save_model

        save_model(self.model, Path(folder), self.hf)


@functools.cache
def oracle(family: str):
    """transformers' model of a family with every parameter random: its own init leaves biases 0 and
    norms 1. The naive twin where transformers has no such family."""
    transformers = pytest.importorskip("transformers")
    hf = {**BASE, **FAMILIES[family]}
    if hf["model_type"] not in transformers.CONFIG_MAPPING:
        return Twin(hf)
    auto_model = transformers.AutoModelForCausalLM
    if family in WRAPPERS:
        hf = {**WRAPPERS[family], "text_config": hf}
        auto_model = transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model(**hf)
    config._attn_implementation = "eager"
    model = auto_model.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Gemma's norms multiply by 1 more than their weights.
            center = 1 if "norm" in name and not family.startswith("gemma") else 0
            parameter.copy_(center + (0.2 if "norm" in name else 0.15) * noise)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.15 * torch.randn(buffer.shape, generator=generator))
    return model


@contextlib.contextmanager
def changed_family(family: str, **changes):
    """A family of other sizes, by a name of its own."""
    name = f"{family} {changes}"
    FAMILIES[name] = {**FAMILIES[family], **changes}
    if family in WRAPPERS:
        WRAPPERS[name] = WRAPPERS[family]
    try:
        yield name
    finally:
        del FAMILIES[name]
        WRAPPERS.pop(name, None)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """family -> a folder that transformers saved."""

    @functools.cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        oracle(family).save_pretrained(folder)
        return folder

    return make


def in_context(model, length: int):
    """The same model, of a context of so many positions."""
    model.config = dataclasses.replace(model.config, max_seq_length=length)
    return model


def generate(model, prompts, *, engine: Engine | None = None, timing=None, **settings):
    """Engine.generate's (row, token id), without an engine in a new one that just holds the rows.
    `settings`: of the rows, and of a new engine."""
    names = ("sampling", "max_new_tokens", "stop_ids", "seed")
    rows = {name: settings.pop(name) for name in names if name in settings}
    if engine is None:
        budgets = value_per_row("max_new_tokens", rows["max_new_tokens"], len(prompts))
        check_lengths(model, prompts, budgets, model.config.max_seq_length)
        length = max(len(prompt) + int(budget) for prompt, budget in zip(prompts, budgets))
        engine = Engine(model, len(prompts), length, **settings)
    return engine.generate(prompts, timing=timing, **rows)


def forked(run: Callable[[], object], stderr: Path | int) -> int:
    """The exit status, negative for a signal, of a copy of this process that runs this alone, its
    stderr in a file or a pipe: what signals and rights do to a program, without the seconds that a
    new process takes to import torch."""
    return status_of(started(run, stderr))


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def started(run: Callable[[], object], stderr: Path | int) -> int:
    """The copy's process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            file = (
                stderr
                if isinstance(stderr, int)
                else os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            )
            os.dup2(file, 2)
            sys.stdout = sys.__stdout__ = open(os.devnull, "w")  # noqa: SIM115
            sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)  # a pool's threads are not copied
            # its own is one with this process's, and may be held by a child that died
            tqdm.set_lock(threading.RLock())
            run()
            status = 0
        except SystemExit as exit:
            status = exit.code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def config_json(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="session")
def story_tokenizer(tmp_path_factory) -> Path:
    """A sentencepiece model like Llama-2's (BPE, byte fallback), trained on a page of text in a
    moment."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("tokenizer")
    words = [
        "the",
        "little",
        "cat",
        "and",
        "a",
        "big",
        "dog",
        "went",
        "to",
        "play",
        "in",
        "the",
        "park",
        "with",
        "their",
        "red",
        "ball;",
        "it",
        "was",
        "fun.",
    ]
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 12)) for i in range(1, 80)]
    (folder / "text.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory, story_tokenizer) -> Path:
    """A tiny random Llama with that tokenizer: everything the command line needs."""
    import shutil

    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("text")
    hf = {**BASE, "vocab_size": 384, "model_type": "llama", **rope(10000.0)}
    config = transformers.AutoConfig.for_model(**hf)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    shutil.copy(story_tokenizer, folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": True, "eos_token": "</s>"})
    )
    return folder


@pytest.fixture(scope="module")
def sp_folder(story_tokenizer, tmp_path_factory) -> Path:
    """A folder with that tokenizer alone."""
    import shutil

    folder = tmp_path_factory.mktemp("sp")
    shutil.copy(story_tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def json_folder(tmp_path_factory):
    """A byte-level BPE as Llama 3 and Qwen have it: NFC, specials, a post-processor that puts BOS
    in front."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("json")
    model = tokenizers.Tokenizer(models.BPE())
    model.normalizer = normalizers.NFC()
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end_of_text|>", "<|eot_id|>"],
    )
    model.train_from_iterator(["the little cat and the big dog went to the park"] * 9, trainer)
    model.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    model.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|begin|>",
        "eos_token": "<|end_of_text|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return folder


@pytest.fixture(scope="module")
def tiktoken_folder(tmp_path_factory):
    """Llama 3's file format: 256 bytes, some merges, ranks in order."""
    import base64

    folder = tmp_path_factory.mktemp("tiktoken")
    merges = (b"th", b"the", b" t", b" th", b" the", b"ca", b"cat", b" cat", b"12", b"  ")
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    return folder, tokens
