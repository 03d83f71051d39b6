"""The exact law of short texts, and the test that samples of them follow it."""

import itertools

import torch
from torch import Tensor

from decoding.sampling import PENALIZED, Sampling
from model import Transformer
from tests.reference import naive_penalties


def joint_law(model: Transformer, prompt: list[int], n: int, sampling: Sampling) -> Tensor:
    """Exact probabilities of all V^n continuations, in float64 products of the model's own
    distributions."""
    V = model.config.vocab_size
    tails = torch.tensor(list(itertools.product(range(V), repeat=n)))  # (V^n, n)
    tokens = torch.cat((torch.tensor(prompt).expand(len(tails), -1), tails), dim=1)
    with torch.inference_mode():
        logits = model(tokens, torch.arange(tokens.size(1)))[:, len(prompt) - 1 : -1]  # (V^n, n, V)
    logits = logits.clone()
    if sampling.path == PENALIZED:
        # V^(n - i) rows in a row share their first i tokens, and with them the next one's law
        for i in range(n):
            for rows in torch.arange(len(tails)).split(V ** (n - i)):
                text = tokens[rows[0], : len(prompt) + i].tolist()
                logits[rows, i] = naive_penalties(logits[rows[0], i], text, len(prompt), sampling)
    return sampling.probs(logits).double().gather(2, tails[..., None])[..., 0].prod(1)


def p_value(counts: Tensor, law: Tensor) -> float:
    """Of a chi-square test; outcomes expected fewer than five times are one bin, impossible ones
    must not happen."""
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law / law.sum() * counts.sum()
    rare = expected < 5
    observed = torch.cat((counts[~rare].double(), counts[rare].sum()[None].double()))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    keep = expected > 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return torch.special.gammaincc((keep.sum() - 1) / 2, statistic / 2).item()
