"""A drafted run in a notebook: five files copied, and a drafter of one's own.

    model.py speculative.py decoding/sampling.py decoding/settings.py decoding/errors.py

Copy these next to this file, with the last three in a folder decoding/, and run it; in a checkout,
`python -m examples.notebook` does. The model is a tiny one with random weights, and `Lookup` is the
drafter to change. What it prints at the end must hold for every drafter: greedy text is that of
plain decoding, however little the drafts are worth.
"""

import torch
import torch.nn.functional as F

from decoding.sampling import Sampling
from model import Config, Transformer
from speculative import speculate

CONFIG = Config(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=96,
    vocab_size=32,
    max_seq_length=128,
    norm_eps=1e-5,
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
GREEDY = Sampling(temperature=0)


class Runner:
    """A model with caches for one text of up to `length` tokens."""

    def __init__(self, model: Transformer, length: int):
        self.model = model
        self.caches = model.make_caches(1, length)

    def prefill(self, tokens: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Run positions [begin, end) of tokens (1, S); their hidden states (1, T, D)."""
        pos = torch.arange(begin, end)  # (T,)
        return self.model.hidden(tokens[:, begin:end], pos, self.slice_to(end))

    def slice_to(self, length: int):
        """The caches for a pass after which `length` positions are filled."""
        return self.caches.slice_to(length)


class Lookup:
    """Drafts what followed the last earlier occurrence of the newest token."""

    def __init__(self):
        self.num_drafted = 0

    def propose(self, text, plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (1, K) for the positions after text.pos, and the distributions (1, K, V) that they
        were drawn from: zeros say that there is no draft."""
        ids = text.tokens[0, : plan.length].tolist()
        newest = ids[-1]
        places = [i for i, id in enumerate(ids[:-1]) if id == newest]
        if not places:
            return torch.full((1, plan.k), newest), torch.zeros(1, plan.k, CONFIG.vocab_size)
        self.num_drafted += plan.k
        copied = ids[places[-1] + 1 :]  # up to the end of the text, where it repeats
        drafted = [copied[i % len(copied)] for i in range(plan.k)]
        tokens = torch.tensor([drafted])
        return tokens, F.one_hot(tokens, CONFIG.vocab_size).float()


def plain(model: Transformer, num_tokens: int) -> list[int]:
    """Greedy text, without caches: the whole text runs for every token."""
    ids = list(PROMPT)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), torch.arange(len(ids)))  # (1, S, V)
        ids.append(logits[0, -1].argmax().item())
    return ids[len(PROMPT) :]


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG).eval()
    num_tokens, k = 60, 3
    length = len(PROMPT) + num_tokens
    drafter = Lookup()
    num_passes = 0

    def count(*_) -> None:
        nonlocal num_passes
        num_passes += 1

    model.norm.register_forward_hook(count)
    drafted = list(
        speculate(
            Runner(model, length + k + 1),
            drafter,
            PROMPT,
            k=k,
            sampling=GREEDY,
            max_new_tokens=num_tokens,
        )
    )
    print(f"{len(drafted)} tokens in {num_passes} passes, {drafter.num_drafted} of them drafted")
    assert drafted == plain(model, num_tokens), "the drafted text is not the plain one"
    print("the drafted text is the plain one")


if __name__ == "__main__":
    main()
