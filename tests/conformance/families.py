"""check_family: are a config's logits those of a naive twin, in every shape of pass?"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from decoding.engine import Engine
from drafts.base import ModelDraft
from drafts.ngram import NgramDraft
from drafts.target_layers import layer_subset
from loading.config import config_from_hf
from loading.models import random_model
from loading.saving import save_model
from model import RMSNorm, Transformer
from tests.conformance.drafters import check, compare
from tests.conformance.targets import one_thread, plain_text
from tests.reference import logits as reference_logits

LIMIT = 1e-4  # of a logit in float32, as a share of the largest
NUM_TOKENS = 40  # more than a tiny config's windows and its context before it was stretched


def check_family(
    config: Mapping,
    *,
    twin: Callable[[dict, dict[str, Tensor], list[int]], Tensor] = reference_logits,
) -> None:
    """Check a family on a CPU by a tiny config: the keys of its config.json, with at most a few
    hundred dimensions and layers of each kind. Every weight is random, norms and biases too.

    - twin(config, tensors, tokens) -> (n, V) are the logits of one text in float64, by the keys of
      the config and the names of its tensors in a folder; tests/reference.py has those of this
      project's families.
    - Logits are the twin's in one pass without caches, in chunks, token by token, and in a batch
      whose rows stand elsewhere.
    - Greedy text is the same drafted: by prompt lookup, and by the model's own first layers.
    """
    hf = dict(config)
    model = filled(random_model(config_from_hf(hf), dtype=torch.float32, pack=False))
    tensors = saved_tensors(model, hf)
    V = model.config.vocab_size
    tokens = torch.randint(V, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    want = torch.stack([twin(hf, tensors, row.tolist()) for row in tokens])
    with one_thread():
        with torch.inference_mode():
            check_passes(model, tokens, want)
            check_rows(model, tokens, want)
        check_drafts(model, tokens[:, :7].tolist())


@torch.no_grad()
def filled(model: Transformer) -> Transformer:
    """The model with random parameters of a size that shows a mistake; norms are near 1."""
    generator = torch.Generator().manual_seed(0)
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = id(parameter) in norms
        center = 1 - model.config.norm_offset if is_norm else 0
        parameter.copy_(center + (0.2 if is_norm else 0.15) * noise)
    return model


def saved_tensors(model: Transformer, hf: dict) -> dict[str, Tensor]:
    """The model's tensors by the family's own names."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder), hf)
        return load_file(Path(folder) / "model.safetensors")


def check_logits(case: str, got: Tensor, want: Tensor) -> None:
    """got and want (B, T, V)."""
    error = (got.double() - want).abs() / want.abs().max()
    worst = torch.unravel_index(error.argmax(), error.shape)
    row, position, id = (index.item() for index in worst)
    is_equal = error.amax(dim=(0, 2)) <= LIMIT  # (T,), False for NaN
    differing = (~is_equal).nonzero()[:, 0]
    first = differing[0].item() if len(differing) else None
    places = "embeddings, norms, heads, feed-forwards"
    if first:
        places = "rotation, windows and caches, or what is wrong by little, such as a norm's eps"
    check(
        first is None,
        f"{case}: the logit of id {id} at position {position} of row {row} is"
        f" {got[worst].item():.5g}, and the twin's {want[worst].item():.5g}."
        f" The first position that differs is {first} of these: look at {places}",
    )


def check_passes(model: Transformer, tokens: Tensor, want: Tensor) -> None:
    """Without caches, in chunks, and token by token."""
    T = tokens.size(1)
    pos = torch.arange(T)
    check_logits("one pass without caches", model(tokens, pos), want)
    for cuts in ([7, 1, 20, 2, T - 30], [1] * T):
        caches = model.make_caches(2, T)
        begin = 0
        for n in cuts:
            part = slice(begin, begin + n)
            got = model(tokens[:, part], pos[part], caches)
            case = f"positions {begin} to {begin + n - 1} on caches of those before"
            check_logits(case, got, want[:, part])
            begin += n


def check_rows(model: Transformer, tokens: Tensor, want: Tensor) -> None:
    """Two rows that stand elsewhere take three tokens in one pass."""
    T = tokens.size(1)
    caches = model.make_caches(2, T)
    # The second row wrote ahead: what it sees must stop at its own position.
    model(tokens[:, : T - 3], torch.arange(T - 3), caches)
    starts = torch.tensor([T - 3, T // 2])
    pos = starts[:, None] + torch.arange(3)
    got = model(tokens.gather(1, pos), pos, caches)
    rows = torch.arange(2)[:, None]
    check_logits(f"a pass of rows at positions {starts.tolist()}", got, want[rows, pos])


def check_drafts(model: Transformer, prompts: list[list[int]]) -> None:
    S = max(map(len, prompts)) + 16
    plain = [plain_text(model, prompt, S - len(prompt)) for prompt in prompts]
    half = [*range((model.config.n_layers + 1) // 2)]
    drafters = {
        "prompt lookup": NgramDraft(1),
        f"layers {half}": ModelDraft(layer_subset(model, half), half),
    }
    for name, drafter in drafters.items():
        engine = Engine(model, len(prompts), S, drafter=drafter, speculate_k=3)
        compare(f"drafts by {name}", engine, prompts, plain)
