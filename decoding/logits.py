"""What may happen to logits before decoding/sampling.py takes them, and what is told of them as the model gave them.

    RepetitionPenalty   a processor: any function of logits, tokens and positions, position by position
    log_likeliest       log-probabilities of drawn tokens, and of the likeliest

A processor gives the same for a position whether one is asked for or K + 1 are, so drafting stays lossless with it.
This file knows no model, no distribution and no text.
"""

import math

import torch
from torch import Tensor


class RepetitionPenalty:
    """Logits of tokens that stand in prompt or output already, divided by the penalty where positive and multiplied
    where negative (Keskar et al., arXiv:1909.05858, section 4.1, with the sign that transformers gives it). As any
    processor of logits it is called with logits (B, T, V) for the tokens behind positions pos (B, T) of tokens (B, S),
    of which those up to each position are decided or drafted: so every position of a drafted round has its own."""

    def __init__(self, penalty: float):
        if not 0 < penalty < math.inf:
            raise ValueError(f"repetition_penalty = {penalty} must be a positive number; 1 for none")
        self.penalty = penalty

    def __call__(self, logits: Tensor, tokens: Tensor, pos: Tensor) -> Tensor:
        B, S = tokens.shape
        index = torch.arange(S, device=tokens.device).expand(B, S)
        first = torch.full((B, logits.size(-1)), S, device=tokens.device)  # (B, V) where each id stands first
        first = first.scatter_reduce(1, tokens, index, "amin")
        stands = first[:, None] <= pos[..., None]  # (B, T, V)
        return torch.where(stands, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


def log_likeliest(logits: Tensor, tokens: Tensor, n: int) -> Tensor:
    """logits (B, T, V) before any filter, the drawn tokens (B, T) -> (B, T, 1 + n, 2) float32: id and log-probability
    of the drawn token and of the n likeliest. Ids below 2^24 are exact."""
    log_p = logits.float().log_softmax(dim=-1)
    top = log_p.topk(n, dim=-1)
    ids = torch.cat((tokens[..., None], top.indices), dim=-1)  # (B, T, 1 + n)
    values = torch.cat((log_p.gather(2, tokens[..., None].clamp(min=0)), top.values), dim=-1)
    return torch.stack((ids.float(), values), dim=-1)
