"""The exact law of short texts, and tests that samples of them follow it."""

import itertools
import math

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


def martingale(f: Tensor, mean: Tensor, variance: Tensor) -> tuple[float, float]:
    """(z, p-value) of sum f - mean for f in [0, 1], by the bound that tests/attacks/law.py
    derives: a correct program has a p-value of at most a with a probability of at most a, however
    few numbers there are. z is only for people."""
    total, V = (f - mean).sum(), variance.sum()
    rates = 2.0 ** -torch.arange(14).double()
    rates = torch.cat((rates, -rates))
    # differences are at most 1 to either side
    grown = rates * total - (rates.abs().exp() - 1 - rates.abs()) * V
    evidence = grown.logsumexp(0) - math.log(len(rates))
    return (total / V.clamp(min=1e-300).sqrt()).item(), min(
        1.0, math.exp(min(0.0, -evidence.item()))
    )
