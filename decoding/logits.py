"""Changes of logits before sampling, and log-probabilities of the unmodified logits.

    penalize        logit_bias and the penalties of every row, position by position
    penalize_text   the same for one text and its Sampling
    apply_masks     minus infinity for the tokens that a row's grammar forbids
    process         what a logits_processor makes of logits, checked
    top_logprobs    log-probabilities of drawn tokens, and of the most likely ones

Any function of logits, tokens and positions may process logits too (Engine's `logits_processor`).
Its result for a position must not depend on how many positions a pass computes; drafting then stays
lossless.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.sampling import PENALIZED, PENALTIES, SETTINGS, Sampling, split_by_name


def penalize(
    logits: Tensor,
    tokens: Tensor,
    pos: Tensor,
    prompt_length: Tensor,
    values: Tensor,
    biases: Tensor,
) -> Tensor:
    """logits (B, T, V) for the tokens after pos (B, T) -> penalized logits. tokens (B, S) are
    decided or drafted up to pos; prompt_length (B,); values (B, n) and biases (B, 2, N) of the
    rows' Samplings. Neutral rows keep their bits."""
    V = logits.size(-1)
    index = torch.arange(tokens.size(1), device=tokens.device)  # (S,)
    is_prompt = index < prompt_length[:, None, None]  # (B, 1, S)
    is_decided = index <= pos[..., None]  # (B, T, S)
    is_output = is_decided & ~is_prompt
    prompt_counts = counts_by_id(tokens, is_prompt, V)  # (B, 1, V)
    output_counts = counts_by_id(tokens, is_output, V)  # (B, T, V)
    ids, bias = biases[:, None].unbind(2)  # (B, 1, N)
    penalized = logits + sums_by_id(ids.long(), bias, V)
    is_penalized = (bias != 0).any(dim=-1, keepdim=True)  # (B, 1, 1)
    value_by_name = split_by_name(values, dims=3)
    for name, penalty in PENALTIES.items():
        value = value_by_name[name]
        penalized = penalty(penalized, value, prompt_counts, output_counts)
        is_penalized = is_penalized | (value != SETTINGS[name].neutral)
    return torch.where(is_penalized, penalized, logits)


def penalize_text(
    logits: Tensor,
    text: Tensor,
    prompt_length: int,
    sampling: Sampling,
) -> Tensor:
    """logits (1, V) for the token after `text` (1, S), whose first tokens are the prompt ->
    penalized logits (1, V)."""
    if sampling.path != PENALIZED:
        return logits
    device = text.device
    end = text.size(1) - 1
    last = torch.tensor([[end]], device=device)  # (1, 1)
    lengths = torch.tensor([prompt_length], device=device)  # (1,)
    values = sampling.values[None].to(device)  # (1, n)
    biases = sampling.biases[None].to(device)  # (1, 2, N)
    penalized = penalize(logits[:, None], text, last, lengths, values, biases)  # (1, 1, V)
    return penalized[:, 0]


def process(
    logits_processor: Callable,
    logits: Tensor,
    tokens: Tensor,
    pos: Tensor,
) -> Tensor:
    """The processor's logits (B, T, V). It gets a copy, which it may write to: log-probabilities
    are those of the unmodified logits. UserError for a result of another shape, which would draw
    ids that there are not."""
    processed = logits_processor(logits.clone(), tokens, pos)
    shape = getattr(processed, "shape", None)
    if shape != logits.shape:
        raise UserError(
            f"logits_processor returned {type(processed).__name__} of shape {shape} for logits of"
            f" shape {tuple(logits.shape)}"
        )
    return processed


def apply_masks(logits: Tensor, masks: Tensor) -> Tensor:
    """logits (B, T, V), bits masks (B, T, W) int32 with 32 W >= V -> logits with minus infinity
    where a bit is 0."""
    shift = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = masks[..., None] >> shift & 1  # (B, T, W, 32)
    bits = bits.flatten(-2)  # (B, T, W * 32)
    V = logits.size(-1)
    is_forbidden = bits[..., :V] == 0
    return logits.masked_fill(is_forbidden, -math.inf)


def counts_by_id(
    tokens: Tensor,
    mask: Tensor,
    V: int,
) -> Tensor:
    """tokens (B, S), mask (B, T, S) -> how often each id is among the marked ones (B, T, V)."""
    ids = tokens[:, None].expand(mask.shape)
    return sums_by_id(ids, mask.float(), V)


def sums_by_id(
    ids: Tensor,
    weights: Tensor,
    V: int,
) -> Tensor:
    """ids (B, T, N), weights (B, T, N) -> sums (B, T, V). Ids from V on, outside a draft's
    vocabulary, are ignored."""
    B, T, _ = ids.shape
    sums = weights.new_zeros(B, T, V + 1)
    sums = sums.scatter_add(-1, ids.clamp(max=V), weights)
    return sums[..., :V]


def top_logprobs(
    logits: Tensor,
    tokens: Tensor,
    n: int,
) -> Tensor:
    """logits (B, T, V) before penalties and filters, the drawn tokens (B, T) -> (B, T, 1 + n, 2)
    float32: id and log-probability of the drawn token and of the n most likely. Ids below 2^24 are
    exact."""
    log_p = logits.float().log_softmax(dim=-1)
    top = log_p.topk(n, dim=-1)
    drawn = tokens[..., None]  # (B, T, 1)
    drawn_log_p = log_p.gather(-1, drawn.clamp(min=0))
    ids = torch.cat((drawn, top.indices), dim=-1)  # (B, T, 1 + n)
    values = torch.cat((drawn_log_p, top.values), dim=-1)
    return torch.stack((ids.float(), values), dim=-1)
