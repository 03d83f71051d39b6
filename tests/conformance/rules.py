"""check_rule: does a rule of acceptance keep what it says, and is a lossless one lossless?"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.rule import Rule
from decoding.sampling import INVALID, draw
from tests.conformance.drafters import FALSE_ALARM, check
from tests.joint_laws import martingale, p_value

V = 3
K = 2
N = 200_000  # rounds
NUM_LAWS = 4  # pairs of a target's and a draft's


def check_rule(rule: Rule) -> None:
    """Check a rule like decoding.rule.Rule on random distributions over three tokens.

    - What it decides has the shapes and values of `accept`, and is the same for each row alone.
    - A row whose q is zero has no draft: nothing of it is kept, and its token is the one that plain
      decoding draws with the same number. So it is behind the end of a draft.
    - `expected` is how often a token that was drawn from q is kept.
    - A token whose p is 0 is neither kept nor drawn: at temperature 0 p is 1 for one token, and 0
      for what top_k or a grammar excludes.
    - A target that is not finite gives INVALID.
    - With `is_lossless`, a round of two tokens has the target's law, by chi-square tests of 200,000
      of them, which refuse a correct rule with a probability below 1e-6.
    """
    check(
        isinstance(rule, Rule),
        f"{rule!r} is no instance of decoding.rule.Rule, such as Typical() of a class"
        " Typical(Rule)",
    )
    generator = torch.Generator().manual_seed(0)
    drafted, q, p = random_rounds(generator)
    noise = (torch.rand(N, K, generator=generator), torch.rand(N, K + 1, generator=generator))
    n, token = rule.accept(drafted, q, p, noise)
    check_values(n, token)
    check_rows_alone(rule, drafted, q, p, noise, n, token)
    check_without_draft(rule, drafted, q, p, noise)
    check_impossible(rule, drafted, q, p, noise)
    check_invalid(rule, drafted, q, p, noise)
    check_expected(rule, drafted, q, p, noise)
    for _ in range(NUM_LAWS if rule.is_lossless else 0):
        target = laws(generator)
        drafted, q, p = rounds_of(target, laws(generator), generator)
        n, token = rule.accept(drafted, q, p, noise)
        check_law(target, drafted, n, token, generator)


def random_rounds(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Drafted tokens (N, K), with q (N, K, V) that each was drawn from, and p (N, K + 1, V), which
    differ in every row."""
    logits = 2 * torch.randn(N, 2 * K + 1, V, generator=generator)
    q, p = logits.softmax(-1).split((K, K + 1), dim=1)
    return draw(q, torch.rand(N, K, generator=generator)), q, p


def laws(generator: torch.Generator) -> dict[int, Tensor]:
    """Number of tokens -> the law (V, …, V) float32 of the one after them, by these tokens."""
    found = {}
    for i in range(K + 1):
        logits = torch.randn(*(V,) * (i + 1), generator=generator)
        found[i] = logits.softmax(-1)
    return found


def rounds_of(
    target: dict[int, Tensor], draft: dict[int, Tensor], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """As `random_rounds`, by laws of each path."""
    drafted = torch.zeros(N, 0, dtype=torch.int64)
    q = []
    for i in range(K):
        law = draft[i][tuple(drafted.T)].expand(N, V)
        q.append(law)
        token = draw(law, torch.rand(N, generator=generator))
        drafted = torch.cat((drafted, token[:, None]), dim=1)
    p = [target[i][tuple(drafted[:, :i].T)].expand(N, V) for i in range(K + 1)]
    return drafted, torch.stack(q, dim=1), torch.stack(p, dim=1)


def check_values(n: Tensor, token: Tensor) -> None:
    for name, x, largest in (("n_accepted", n, K), ("next_token", token, V - 1)):
        check(
            x.shape == (N,) and x.dtype == torch.int64,
            f"{name} is {x.dtype} {tuple(x.shape)}, and not int64 ({N},)",
        )
        check(
            bool((x >= 0).all() and (x <= largest).all()),
            f"{name} lies between {x.min()} and {x.max()}, and must between 0 and {largest}",
        )


def check_rows_alone(rule, drafted, q, p, noise, n, token) -> None:
    for row in range(8):
        part = slice(row, row + 1)
        own = rule.accept(drafted[part], q[part], p[part], tuple(u[part] for u in noise))
        check(
            [x.item() for x in own] == [n[row].item(), token[row].item()],
            f"row {row} alone gets {[x.item() for x in own]}, and among others"
            f" {[n[row].item(), token[row].item()]}: what it keeps depends on other rows",
        )


def check_without_draft(rule, drafted, q, p, noise) -> None:
    for num_drafted in reversed(range(K)):  # 0 last
        q = q.clone()
        q[:, num_drafted:] = 0
        n, token = rule.accept(drafted, q, p, noise)
        check(
            bool((n <= num_drafted).all()),
            f"of a draft of {num_drafted} tokens, behind which q is 0, up to {n.max()} are kept",
        )
    plain = draw(p[:, 0], noise[1][:, 0])
    check(
        torch.equal(token, plain),
        "in rows without a draft, whose q is 0, the token is not the one that plain decoding draws:"
        " `next_law` must be p there",
    )


def check_impossible(rule, drafted, q, p, noise) -> None:
    excluded = p.clone()
    excluded[:, :K].scatter_(2, drafted[..., None], 0)
    targets = {
        "at temperature 0": F.one_hot(p.argmax(-1), V).float(),
        "where the target excludes each drafted token": excluded / excluded.sum(-1, keepdim=True),
    }
    for case, p in targets.items():
        n, token = rule.accept(drafted, q, p, noise)
        text = torch.cat((drafted, token[:, None]), dim=1)  # (N, K + 1)
        text.scatter_(1, n[:, None], token[:, None])
        is_decided = torch.arange(K + 1) <= n[:, None]
        is_impossible = p.gather(2, text[..., None])[..., 0] == 0  # (N, K + 1)
        row, i = divmod((is_decided & is_impossible).long().argmax().item(), K + 1)
        check(
            not bool((is_decided & is_impossible).any()),
            f"{case}, of the draft {drafted[row].tolist()} {n[row]} tokens are kept and"
            f" {token[row]} is drawn, and p of decided token {i} is 0. Neither `keep` nor"
            f" `next_law` may let it pass: greedy text would change, and what a grammar forbids be"
            f" written",
        )


def check_invalid(rule, drafted, q, p, noise) -> None:
    few = slice(0, 8)
    bad = torch.full_like(p[few], torch.nan)
    _, token = rule.accept(drafted[few], q[few], bad, tuple(u[few] for u in noise))
    check(
        bool((token == INVALID).all()),
        f"where p is NaN the token is {token.tolist()}, and must be INVALID = {INVALID}",
    )


def check_expected(rule, drafted, q, p, noise) -> None:
    """With one drafted token, which is kept or not."""
    to_accept, to_draw = noise
    drafted, q, p = drafted[:, :1], q[:, :1], p[:, :2]
    n, _ = rule.accept(drafted, q, p, (to_accept[:, :1], to_draw[:, :2]))
    expected = rule.expected(p[:, :1], q)[:, 0].double()
    check(
        expected.shape == (N,) and bool((expected >= -1e-6).all() and (expected <= 1 + 1e-6).all()),
        f"`expected` is no probability for each drafted token: {tuple(expected.shape)}, up to"
        f" {expected.max():.3g}",
    )
    expected = expected.clamp(0, 1)
    z, value = martingale(n.double(), expected, expected * (1 - expected))
    check(
        value > FALSE_ALARM,
        f"a first token is kept {n.double().mean():.4f} of the time, and `expected` says"
        f" {expected.mean():.4f} ({z:+.1f} standard deviations): `auto` and reports would go by a"
        f" wrong number",
    )


def check_law(target: dict[int, Tensor], drafted, n, token, generator) -> None:
    """Of a round's tokens, with plain draws behind them up to K + 1."""
    text = torch.cat((drafted, drafted[:, :1]), dim=1)  # (N, K + 1)
    text.scatter_(1, n[:, None], token[:, None])
    for i in range(1, K + 1):
        law = target[i][tuple(text[:, :i].T)]
        plain = draw(law, torch.rand(N, generator=generator))
        text[:, i] = torch.where(n < i, plain, text[:, i])
    weights = V ** torch.arange(K, -1, -1)
    counts = (text @ weights).bincount(minlength=V ** (K + 1))
    tails = itertools.product(range(V), repeat=K + 1)
    want = [[target[i][tail[: i + 1]].item() for i in range(K + 1)] for tail in tails]
    value = p_value(counts, torch.tensor(want, dtype=torch.float64).prod(1))
    check(
        value > FALSE_ALARM,
        f"`is_lossless` is true, and {N} rounds of {K} tokens do not have the target's law (p-value"
        f" {value:.1g}). Look at `keep`, and at `next_law`, whose token replaces a rejected one",
    )
