"""Tiny random models, and what they decode plainly."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decoding.engine import Engine
from decoding.sampling import Sampling
from generate import decode
from loading.models import random_model
from model import Config, Transformer

TINY = Config(
    dim=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    ffn_dim=24,
    vocab_size=4,
    max_seq_length=32,
    norm_eps=1e-5,
)
V = 61
BASE = {
    "vocab_size": V,
    "dim": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "n_layers": 4,
    "max_seq_length": 96,
}
PROMPTS = [[5, 9, 17, 5, 9], [40, 3, 59, 12, 7, 60, 20, 12, 7], [8], [4, 4, 4, 4]]


def tiny(seed: int, scale: float = 25.0, **changes) -> Transformer:
    """A random model whose next-token distributions differ from uniform and from each other's."""
    model = random_model(dataclasses.replace(TINY, **changes), dtype=torch.float32, seed=seed)
    for layer in model.layers:
        for matrix in (layer.attention.qkv, layer.attention.out, layer.ffn.gate_up, layer.ffn.down):
            matrix.weight.mul_(scale)
    model.embed.weight.mul_(50)
    model.lm_head.weight.mul_(20)
    return model


def pair(windows=(), **changes) -> tuple[Transformer, Transformer]:
    """A target, and a model of one layer that drafts for it."""
    target = tiny(0, 14, **BASE, windows=windows, **changes)
    draft = tiny(0, 14, **{**BASE, "n_layers": 1}, windows=windows[1:2], **changes)
    with torch.no_grad():  # related to the target, so that some of what it drafts is accepted
        draft.embed.weight.copy_(target.embed.weight)
        draft.lm_head.weight.copy_(target.lm_head.weight)
        for mine, other in zip(draft.layers[0].parameters(), target.layers[0].parameters()):
            mine.copy_(other)
    return target, draft


def plain_text(model: Transformer, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What generate.decode gives at temperature 0."""
    return list(decode(model, prompt, sampling=Sampling(0), max_new_tokens=max_new_tokens))


def texts_of(engine: Engine, prompts: Sequence[Sequence[int]], **settings) -> list[list[int]]:
    """What an engine decodes, row by row."""
    texts = [[] for _ in prompts]
    for row, id in engine.generate(prompts, **settings):
        texts[row].append(id)
    return texts


@torch.inference_mode()
def hidden_states(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """The states (L + 1, T, D) of these tokens in one pass without caches, in the model's dtype. As
    in drafts/hidden_states.py state 0 is the embedding, and the last one is not normed."""
    states = []

    def record(module, inputs):
        states.append(inputs[0][0])  # (1, T, D) -> (T, D)

    handles = [part.register_forward_pre_hook(record) for part in (*model.layers, model.norm)]
    model(torch.tensor([tokens]), torch.arange(len(tokens)))
    for handle in handles:
        handle.remove()
    return torch.stack(states)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a tiny model are done sooner than threads have started."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
