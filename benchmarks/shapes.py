"""Shapes that figures are quoted for, and random models of them whose acceptance is set by
construction.

TINYLLAMA, SMALL, MOE   config.json of the 1.1B shape, of its draft's, and of a sparse one
GPU_SHAPES              names on bench_gpu's command line -> files in shapes/
K                       drafted tokens of a verification
scheme_of               a format's name -> `quantize` of load_model; None for bf16
counting_model          a model that predicts i + 1 after token i
"""

import json

import torch

from benchmarks.pipes import ROOT
from loading.config import config_from_hf
from loading.models import random_model
from model import Transformer
from weights.walker import quantize_model

GPU_SHAPES = {
    "8b": "llama-3.1-8b",
    "1b": "llama-3.2-1b",
    "7b": "llama-2-7b",
    "70b": "llama-3.1-70b",
}
K = 5
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def config_json(name: str) -> dict:
    """shapes/NAME.json."""
    return json.loads((ROOT / "benchmarks" / "shapes" / f"{name}.json").read_text())


TINYLLAMA, MOE = config_json("tinyllama-1.1b"), config_json("moe-1b")
SMALL = {
    **TINYLLAMA,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}


def scheme_of(format: str) -> str | None:
    return None if format == "bf16" else format


def counting_model(
    hf: dict,
    error_rate: float,
    period: int | None = None,
    device="cpu",
    quantize: str | None = None,
) -> Transformer:
    """Random weights that predict i + 1 after token i with certainty, but for a fraction
    `error_rate` of all tokens.

    Row j of the head is the embedding of j - 1. The blocks run in full and add a thousandth of a
    random block's output. So a draft of this kind with an error_rate of 1 - alpha is accepted with
    probability alpha, independently for each token. With a `period`, counting starts again after so
    many tokens. `quantize` is the scheme of every matrix, the head's too. The config must not tie
    the head, whose rows are the embedding's in another order.
    """
    model = random_model(config_from_hf(hf), device=device)
    for layer in model.layers:
        layer.attention.out.weight.mul_(1e-3)
        layer.ffn.down.weight.mul_(1e-3)
    V = model.config.vocab_size
    predecessor = torch.arange(V).roll(1)  # of each row of the head
    if period:
        predecessor[0], predecessor[period] = period - 1, V - 1
    model.lm_head.weight.copy_(model.embed.weight[predecessor.to(device)])
    mislead(model, error_rate)
    return quantize_model(model, quantize, quantize) if quantize else model


def mislead(model: Transformer, error_rate: float) -> None:
    """Give a fraction of all tokens the embeddings of others, whose successors the model then
    predicts."""
    weight = model.embed.weight
    # (V,)
    is_misled = torch.rand(len(weight), generator=torch.Generator().manual_seed(1)) < error_rate
    is_misled = is_misled.to(weight.device)
    weight[is_misled] = weight.roll(len(weight) // 2, 0)[is_misled]
