"""tests/conformance: the project's own drafters, caches, formats and families do what the kit asks
of a fork's, and deliberate mistakes do not.

The kit's statistical checks refuse a correct drafter with a probability below 1e-6; their seeds are
fixed. Each mistake must be refused by a message that says where it shows.
"""

import math
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import BASE, FAMILIES, config_json
from test_caches import Ring
from test_drafts import any_drafter, tiny_drafter
from test_quantize import FORKED, SCHEMES
from test_speculative import DropsTheUnlikely, Poison

import decoding.sampling as sampling
import speculative
from decoding.errors import UserError
from decoding.kv_8bit import Fp8Cache, Int8Cache
from decoding.rule import Rule
from drafts.base import Draft, Drafter, ModelDraft
from drafts.eagle import EagleModel
from drafts.hidden_states import AuxHiddenStates, PairDraft
from drafts.hybrid import HybridDraft
from drafts.ngram import NgramDraft
from drafts.pard import PardDraft
from drafts.suffix import SuffixDraft
from drafts.target_layers import WindowedTarget, layer_subset
from exact.products import RowSplit
from model import (
    AttentionKernel,
    AttentionMask,
    KVCache,
    Transformer,
    attend,
    attention_mask,
)
from speculative import accept
from tests.conformance import check_cache, check_drafter, check_family, check_format, check_rule
from tests.conformance.drafters import check_caches, check_newest_state
from tests.conformance.formats import check_experts
from tests.conformance.targets import V, hidden_states, pair, tiny
from weights.cpu import PlainWeights
from weights.experts import Stack
from weights.formats import FORMATS, Asymmetric, Format, Symmetric
from weights.linears import KERNELS, QuantizedLinear

# --------------------------------------------------------------------------------------- drafters


def draft_for(target: Transformer) -> Transformer:
    """A model that drafts for the kit's own target of as many tokens."""
    return pair()[1] if target.config.vocab_size == V else tiny(7, n_layers=1)


def from_folder(kind: str):
    def make(target: Transformer):
        if target.config.vocab_size == V:
            return any_drafter(kind, target, draft_for(target))
        return tiny_drafter(kind, target)

    return make


def layers(target: Transformer) -> ModelDraft:
    kept = [*range(target.config.n_layers - 1)]
    return ModelDraft(layer_subset(target, kept), kept)


class Parrot:
    """The example of docs/fork.md."""

    def __init__(self, target):
        self.V = target.config.vocab_size

    def propose(self, batch, plan):
        tokens = batch.tokens.gather(1, batch.pos[:, None]).expand(-1, plan.k)
        return tokens, torch.nn.functional.one_hot(tokens, self.V).float()


DRAFTERS = {
    "model": lambda target: ModelDraft(draft_for(target)),
    "eagle": from_folder("eagle"),
    "ngram": lambda target: NgramDraft(2),
    "layers": layers,
    "suffix": lambda target: SuffixDraft(pool_tokens=0),
    "pard": from_folder("pard"),
    "dflash": from_folder("dflash"),
    "hybrid": lambda target: HybridDraft(SuffixDraft(), ModelDraft(draft_for(target))),
    "custom": Parrot,
    "mtp": from_folder("mtp"),
    "shared": from_folder("shared"),
    "window": lambda target: ModelDraft(
        WindowedTarget(target, 6), on_layers=range(target.config.n_layers)
    ),
    "poison": lambda target: Poison(),
}


@pytest.mark.one_in(len(DRAFTERS), 3)
@pytest.mark.filterwarnings("ignore:check_drafter. without `twin`")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters_conform(kind):
    check_drafter(DRAFTERS[kind])


def model_twin(target: Transformer):
    """q of `model` by its draft in float64, without caches."""
    draft = draft_for(target).double()

    def twin(tokens, drafted, sampling):
        text = torch.tensor([tokens + drafted[:-1]])
        logits = draft(text, torch.arange(text.size(1)))[0, -len(drafted) :]
        return sampling.probs(logits.float()).double()

    return twin


@pytest.mark.slow
def test_a_twin_replaces_the_recomputation():
    target, _ = pair()
    check_drafter(DRAFTERS["model"], target, twin=model_twin(target))
    with pytest.raises(AssertionError, match="from q by `twin`"):
        check_drafter(DRAFTERS["layers"], target, twin=model_twin(target))


class Heads(Drafter):
    """As Medusa's, which read the state that leaves the last layer, normed."""

    layer = -1
    num_back = 1  # positions before the last decided token

    def __init__(self, target):
        super().__init__()
        config = target.config
        generator = torch.Generator().manual_seed(0)
        self.heads = torch.randn(3, config.vocab_size, config.dim, generator=generator) / 3
        self.heads = self.heads.to(target.norm.weight.dtype)
        self.ids = range(3)

    def setup(self, state, k_max, target, maybe_compile):
        super().setup(state, k_max, target, maybe_compile)
        self.norm = target.model.norm
        layer = [*range(target.model.config.n_layers + 1)][self.layer]
        states = AuxHiddenStates(target.B, target.S + target.slack, self.norm.weight)
        target.caches = target.caches._replace(aux_hidden_states={layer: states})
        self.register_buffer("states", states.x, persistent=False)  # (B, S, D)

    def propose(self, batch, plan):
        pos = batch.pos[:, None] + torch.arange(1, plan.k + 1)  # (B, K)
        before = (batch.pos - self.num_back).clamp(0, self.states.size(1) - 1)
        h = self.norm(self.states[torch.arange(len(pos)), before])  # (B, D)
        logits = self.logits(h, plan.k)  # (B, K, V)
        q = sampling.distribution(logits, batch.sampling_path, batch.values)
        return Draft(sampling.draw(q, batch.noise(pos, sampling.DRAFT_DRAW)), q)

    def logits(self, h, k):
        return torch.stack([h @ self.heads[i].mT for i in self.ids[:k]], dim=1)


class NoNorm(Heads):
    def setup(self, *args):
        super().setup(*args)
        self.norm = torch.nn.Identity()


class OtherOrder(Heads):
    def __init__(self, target):
        super().__init__(target)
        self.ids = (2, 1, 0)


class OtherLayer(Heads):
    layer = -2


class OneBack(Heads):
    num_back = 2


class NoTemperature(Heads):
    def logits(self, h, k):
        return 3 * super().logits(h, k)


def heads_twin():
    target = pair()[0].double()
    heads = Heads(target)

    def twin(tokens, drafted, sampling):
        h = target.norm(hidden_states(target, tokens[:-1])[-1, -1])  # (D,)
        return sampling.probs((heads.heads[: len(drafted)] @ h).float()).double()

    return twin


@pytest.mark.slow
def test_a_twin_sees_how_hidden_states_are_read():
    check_drafter(Heads, twin=heads_twin())
    for wrong in (NoNorm, OtherOrder, OtherLayer, OneBack, NoTemperature):
        with pytest.raises(
            AssertionError, match=r"from q by `twin`.* norm .* order, .* temperature"
        ):
            check_caches(wrong, pair()[0], 3, heads_twin())


@pytest.mark.slow
def test_without_a_twin_the_newest_state_has_to_be_read():
    with pytest.warns(UserWarning, match="without `twin`"):
        check_newest_state(Heads, pair()[0], 3, None)
    with pytest.raises(AssertionError, match="whatever the newest of them are"):
        check_drafter(OneBack)


class OneAhead(EagleModel):
    """Hidden states one position off: each token is paired with the state that the target has of
    the token itself, which it does not have for the newest."""

    def state_before(self, pos, caches):
        return self.target_states(caches, pos)


def one_ahead(target: Transformer) -> PairDraft:
    drafter = from_folder("eagle")(target)
    drafter.model.__class__ = OneAhead
    return drafter


class Forgets(PardDraft):
    """Reads two tokens a round, so that masks stay in its cache."""

    def setup(self, *args):
        super().setup(*args)
        self.num_first_inputs = 2


def forgets(target: Transformer) -> Forgets:
    right = from_folder("pard")(target)
    return Forgets(right.model, right.mask)


class StopsAtTheUnlikely(ModelDraft):
    """Ends a draft because of the token that it has drawn."""

    def propose(self, batch, plan):
        tokens, q = super().propose(batch, plan)
        is_likely = q.gather(2, tokens[..., None]) >= 0.3
        return Draft(tokens, torch.where(is_likely, q, 0))


class SaysAnother(ModelDraft):
    """Reports a distribution that is hotter than the one that it draws from."""

    def propose(self, batch, plan):
        tokens, q = super().propose(batch, plan)
        q = q.sqrt()
        return Draft(tokens, q / q.sum(-1, keepdim=True))


class Unnormalized(ModelDraft):
    def propose(self, batch, plan):
        tokens, q = super().propose(batch, plan)
        return Draft(tokens, 2 * q)


class OneNumber(ModelDraft):
    """Draws all tokens of a row with one number."""

    def draw(self, state, *args):
        with mock.patch.object(state, "noise", self.noise_of(state)):
            super().draw(state, *args)

    def noise_of(self, state):
        noise = type(state).noise
        first = state.pos[:, None] + 1
        return lambda pos, purpose: noise(state, first.expand_as(pos), purpose)


class NumberOfTheLast(OneNumber):
    """Draws with the number of the last decided token."""

    def noise_of(self, state):
        noise = type(state).noise
        return lambda pos, purpose: noise(state, pos - 1)


class NumberOfTheTarget(OneNumber):
    """Draws with the number that draws the target's token in its place."""

    def noise_of(self, state):
        noise = state.noise
        return lambda pos, purpose: noise(pos)


class WritesText(Parrot):
    """Into the last decided token."""

    def propose(self, batch, plan):
        proposal = super().propose(batch, plan)
        batch.tokens.scatter_(1, batch.pos[:, None], 1)
        return proposal


class SharesARow(Parrot):
    """Every row repeats the last token of row 0, and says that it may be any token."""

    def propose(self, batch, plan):
        tokens, _ = super().propose(batch, plan)
        tokens = tokens[:1].expand(len(tokens), -1)
        q = torch.nn.functional.one_hot(tokens, self.V).float()
        return tokens, q


def of_model(drafter_class):
    return lambda target: drafter_class(draft_for(target))


MISTAKES = {
    "states one position off": (one_ahead, "a hidden state or a key one position off"),
    "stops at the unlikely": (of_model(StopsAtTheUnlikely), "drawn and then replaced or dropped"),
    "writes text": (WritesText, "differs from plain decoding at its token"),
    "drops the unlikely": (
        of_model(DropsTheUnlikely),
        "drawn and then replaced or dropped|so it was not drawn",
    ),
    "says another": (of_model(SaysAnother), "drawn and then replaced or dropped"),
    "one number": (of_model(OneNumber), "drafted token 1 where drafted token 0 is .* used twice"),
    "number of the last": (of_model(NumberOfTheLast), "where the last decided token is"),
    "number of the target": (of_model(NumberOfTheTarget), "numbers that draw the target's tokens"),
    "not normalized": (of_model(Unnormalized), "q sums to 2"),
    "forgets": (forgets, "since their tokens were rejected"),
    "shares a row": (SharesARow, "its draft depends on other rows"),
}


@pytest.mark.one_in(12, 3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_drafters_are_refused(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=message):
        check_drafter(make)


def accepts_all(p, q):
    """min(1, p / q), 1 where q is 0."""
    return (p / q).nan_to_num(1).clamp(max=1)


def test_rows_without_a_draft_must_not_be_accepted(monkeypatch):
    monkeypatch.setattr(speculative, "acceptance", accepts_all)
    with pytest.raises(AssertionError, match=r"look for what .* speculative.accept"):
        check_drafter(DRAFTERS["ngram"])


# ------------------------------------------------------------------------------------------ rules


class Typical(Rule):
    """The example of docs/fork.md."""

    def is_typical(self, p):
        entropy = -(p * p.clamp(min=1e-9).log()).sum(dim=-1, keepdim=True)
        return p > (0.3 * torch.exp(-entropy)).clamp(max=0.09)

    def keep(self, draft_tokens, q, p, u):
        return self.is_typical(p).gather(2, draft_tokens[..., None])[..., 0]

    def expected(self, p, q):
        return (q * self.is_typical(p)).sum(dim=-1)


class TokenByToken(Rule):
    """Algorithm 1, by the methods that a rule of one's own overrides."""

    is_lossless = True

    def keep(self, draft_tokens, q, p, u):
        drafted = draft_tokens[..., None]
        ratio = p.gather(2, drafted) / q.gather(2, drafted)
        return u < ratio[..., 0]

    def next_law(self, p, q):
        return speculative.residual(p, q)

    def expected(self, p, q):
        return torch.minimum(p, q).sum(dim=-1)


class Accept(Rule):
    """speculative.accept."""

    is_lossless = True

    def __init__(self, block):
        self.block = block

    def accept(self, draft_tokens, q, p, noise):
        return accept(draft_tokens, q, p, noise=noise, block=self.block)

    def expected(self, p, q):
        return torch.minimum(p, q).sum(dim=-1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "rule",
    [Accept(True), Accept(False), Typical(), TokenByToken()],
    ids=lambda rule: type(rule).__name__,
)
def test_rules_conform(rule):
    check_rule(rule)


class SaysLossless(Typical):
    is_lossless = True


class DrawsFromTheTarget(TokenByToken):
    """After a rejection too."""

    def next_law(self, p, q):
        return p


class Hopes(Typical):
    """Expects all that is likely in the draft."""

    def expected(self, p, q):
        return q.amax(dim=-1)


class KeepsWhatIsNoDraft(TokenByToken):
    def accept(self, draft_tokens, q, p, noise):
        q = torch.where(q.amax(dim=-1, keepdim=True) == 0, 1 / q.size(-1), q)
        return super().accept(draft_tokens, q, p, noise)


class OfTheBatch(Typical):
    """Its threshold is the batch's."""

    def is_typical(self, p):
        return p > p.mean(dim=0).amax(-1, keepdim=True)


class KeepsAll(Rule):
    """A draft in place of the target."""

    def keep(self, draft_tokens, q, p, u):
        return torch.ones_like(u, dtype=torch.bool)

    def expected(self, p, q):
        return torch.ones(q.shape[:2])


class ComparesWithItself(KeepsAll):
    """With a share of p, which is 0 where p is."""

    def keep(self, draft_tokens, q, p, u):
        p = p.gather(2, draft_tokens[..., None])[..., 0]
        return p >= p / 2


class DrawsFromTheDraft(Typical):
    def next_law(self, p, q):
        has_draft = q.amax(dim=-1, keepdim=True) > 0
        return torch.where(has_draft, q, p)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "rule, message",
    [
        (SaysLossless(), "rounds of 2 tokens do not have the target's law"),
        (DrawsFromTheTarget(), "at `next_law`, whose token replaces a rejected one"),
        (Hopes(), "`auto` and reports would go by a wrong number"),
        (KeepsWhatIsNoDraft(), "of a draft of 1 tokens, behind which q is 0, up to 2 are kept"),
        (OfTheBatch(), "what it keeps depends on other rows"),
        (KeepsAll(), "at temperature 0, of the draft .* p of decided token 0 is 0"),
        (ComparesWithItself(), "p of decided token 0 is 0"),
        (DrawsFromTheDraft(), "greedy text would change"),
        (Typical, "is no instance of decoding.rule.Rule"),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, Rule) else "",
)
def test_wrong_rules_are_refused(rule, message):
    with pytest.raises(AssertionError, match=message):
        check_rule(rule)


# ----------------------------------------------------------------------------------------- caches


class LastPlaces(Ring):
    """As few places as a window and the longest pass need."""

    LENGTH = Ring.WINDOW - 1 + 16


class ShortRing(Ring):
    LENGTH = LastPlaces.LENGTH - 1


class Unparked(Ring):
    """Rows without a text write into the ring."""

    def update(self, k, v, pos):
        place = pos % self.LENGTH
        self.write(place, k=k, v=v)
        self.key_pos.scatter_(1, place, pos)
        self.pos = pos


class Lends(Ring):
    keeps_prefixes = True


class LongRing(Ring):
    LENGTH = 64


class SinksAndRing(Ring):
    """The first positions of a text stay, and the last ones go round behind them."""

    FIRST = 4
    LENGTH = FIRST + Ring.WINDOW - 1 + 16
    cleared_to: ClassVar = {"key_pos": -1}
    by_position = ("k", "v", "key_pos")

    def __init__(self, B, G, S, E, dtype, device):
        KVCache.__init__(self, B, G, self.LENGTH + 1, E, dtype, device)
        self.register_buffer("key_pos", torch.full((B, 1, self.LENGTH + 1), -1), persistent=False)

    def update(self, k, v, pos):
        in_ring = self.FIRST + (pos - self.FIRST) % (self.LENGTH - self.FIRST)
        place = torch.where(pos < self.FIRST, pos, in_ring)
        is_parked = pos >= self.parked_pos
        place = torch.where(is_parked, self.LENGTH, place)
        key_pos = torch.where(is_parked, -1, pos)
        self.write(place, k=k, v=v, key_pos=key_pos[:, None])
        self.pos = pos

    def attend(self, q, visible, sinks=None):
        B, H = q.shape[:2]
        key_pos = self.key_pos[:B, 0]
        mask = attention_mask(self.pos, key_pos, self.WINDOW)  # (B, 1, T, LENGTH + 1)
        is_first = (key_pos < self.FIRST)[:, None, None]
        mask = mask | attention_mask(self.pos, key_pos, None) & is_first
        mask = mask & (key_pos >= 0)[:, None, None]
        keys = AttentionKernel().prepare(AttentionMask(mask, None), H // self.k.size(1), q.dtype)
        return attend(q, self.k[:B], self.v[:B], keys.mask, sinks)

    def clear(self, row, begin, end):
        KVCache.clear(self, row, 0, self.LENGTH + 1)


class NoSinks(SinksAndRing):
    """All positions go round."""

    FIRST = 0


class OneShort(SinksAndRing):
    LENGTH = SinksAndRing.LENGTH - 1


class ClearedToZero(SinksAndRing):
    """An empty place holds position 0."""

    cleared_to: ClassVar = {}


class Remembers(SinksAndRing):
    """A sink too many."""

    def attend(self, q, visible, sinks=None):
        with mock.patch.object(self, "FIRST", self.FIRST + 1):
            return super().attend(q, visible, sinks)


class SharedScale(KVCache):
    """Keys as 8-bit codes with a scale that all positions of a row share."""

    def read(self, B, visible):
        keys, values = super().read(B, visible)
        scale = keys.abs().amax(dim=(2, 3), keepdim=True) / 127
        return [(keys / scale).round() * scale, values]


class WrongRow(KVCache):
    """Reads the first rows, whatever rows run."""

    def read(self, B, visible):
        keys, values = super().read(B, visible)
        return [keys, values[:1].expand(B, -1, -1, -1)]


RING = {"windows": [Ring.WINDOW]}


def sees(query, key):
    return key < SinksAndRing.FIRST or query - key < Ring.WINDOW


SINKS = {"windows": [None], "sees": sees}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "cache, options",
    [
        (KVCache, {}),
        (Int8Cache, {"tolerance": 0.03}),
        (Fp8Cache, {"tolerance": 0.1}),
        (Ring, RING),
        (LastPlaces, RING),
        (SinksAndRing, SINKS),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_caches_conform(cache, options):
    check_cache(cache, **options)


@pytest.mark.parametrize(
    "cache, options, message",
    [
        (ShortRing, RING, "as in a ring that is too short"),
        (LongRing, RING, "Give the kit a subclass with a shorter ring"),
        (NoSinks, SINKS, r"sees 0 to \d.* without position 0:"),
        (OneShort, SINKS, "as in a ring that is too short"),
        (ClearedToZero, SINKS, "cleared for another text.* more keys and values of 0"),
        (Remembers, SINKS, "with position 4, which it must not see"),
        (Lends, RING, "A beginning that was copied from another slot"),
        (Unparked, RING, "Rows without a text, which write from parked_pos on, beside others"),
        (WrongRow, {}, r"row 1 at position \d+.* what `attend` reads for each row"),
        (Int8Cache, {"tolerance": 1e-5}, "attention is off by 0.00"),
        (SharedScale, {"tolerance": 0.1}, "Drafts that were rejected changed what it reads"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_wrong_caches_are_refused(cache, options, message):
    with pytest.raises(AssertionError, match=message):
        check_cache(cache, **options)


# ---------------------------------------------------------------------------------------- formats


@pytest.mark.one_in(4, 2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_formats_conform(scheme):
    check_format(FORMATS[scheme])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FORKED)
def test_formats_of_ones_own_conform(name):
    check_format(FORKED[name])
    assert not any(name.startswith("checked") for name in FORMATS)


class OfTheMatrix(Symmetric):
    """Takes the largest weight of the matrix into each row's scale, and states rows."""

    scope = "rows"

    def quantize(self, w, row_max=None):
        return super().quantize(w, w.abs().amax(1) + w.abs().max() / 1e4)


class Misnamed(Symmetric):
    scope = "rows"

    def quantize(self, w, row_max=None):
        return {**super().quantize(w), "offset": torch.zeros(len(w))}


class Inverse(Symmetric):
    """Divides by the scale where it should multiply."""

    def dequantize(self, parts):
        return parts["codes"].float() / parts["scale"].float()[:, None]


class ByColumn(Symmetric):
    """A scale of each column, which a cut by rows halves too."""

    scope = "matrix"

    def shapes(self, rows, columns):
        return {"codes": ((rows, columns), torch.int8), "scale": ((columns,), torch.float32)}

    def quantize(self, w, row_max=None):
        scale = w.abs().amax(0) / 127 + 1e-12
        return {"codes": (w / scale).round().to(torch.int8), "scale": scale}

    def dequantize(self, parts):
        return parts["codes"].float() * parts["scale"]


class Rolled(Symmetric):
    """Stores the codes of the last input first, so that a cut by columns holds others."""

    scope = "rows"

    def quantize(self, w, row_max=None):
        parts = super().quantize(w)
        return parts | {"codes": parts["codes"].roll(1, 1)}

    def dequantize(self, parts):
        return super().dequantize(parts | {"codes": parts["codes"].roll(-1, 1)})


class Blocks(Format):
    """Blocks of 64 inputs with a scale each, of which `group` says nothing."""

    def shapes(self, rows, columns):
        num_blocks = math.ceil(columns / 64)
        return {
            "codes": ((rows, columns), torch.int8),
            "scale": ((rows, num_blocks), torch.float32),
        }

    def quantize(self, w):
        blocks = F.pad(w, (0, -w.size(1) % 64)).unflatten(1, (-1, 64))
        scale = blocks.abs().amax(-1) / 127 + 1e-12
        codes = (blocks / scale[..., None]).round().to(torch.int8)
        return {"codes": codes.flatten(1)[:, : w.size(1)], "scale": scale}

    def dequantize(self, parts):
        codes = parts["codes"].float()
        scale = parts["scale"].repeat_interleave(64, 1)
        return codes * scale[:, : codes.size(1)]


class Refuses(Blocks):
    """Says itself which sizes it takes."""

    def shapes(self, rows, columns):
        if columns % 64:
            raise UserError(f"{columns} inputs are no multiple of 64")
        return super().shapes(rows, columns)


@pytest.mark.parametrize(
    "format_class, message",
    [
        (OfTheMatrix, "scope = 'rows' says that half of the rows"),
        (Misnamed, r"returns the parts \['codes', 'offset', 'scale'\]"),
        (Inverse, "dequantize does not invert quantize"),
        (Rolled, "by columns dequantizes to other weights"),
        (ByColumn, "the first dimension is that of the 48 rows"),
        (Blocks, r"over 2 ranks, \d+ each, with group = 0: .* `group` says how many"),
    ],
)
def test_wrong_formats_are_refused(format_class, message):
    with pytest.raises(AssertionError, match=message):
        check_format(format_class(8))


def test_blocks_of_ones_own_are_refused_or_stated():
    check_format(Refuses(8))
    check_format(Blocks(8, 64))


class OwnKernel(QuantizedLinear):
    """Keeps the codes, and decodes them for every product. docs/fork.md points here."""

    reads_codes_on_cpu = True

    def prepack(self):
        if self.codes.device.type != "cpu":
            return super().prepack()
        like = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        self.use_kernel(PlainWeights.find_row_split(like), self.out_features)

    def product(self, x):
        if not self.is_packed or x.device.type != "cpu":
            return super().product(x)
        if not torch.compiler.is_compiling():
            return self.run_kernel(x)
        # Inductor may sum in another order than the one that was probed.
        return torch.ops.quickdraft.packed_product(x, self.handle, self.kernel_outputs, x.dtype)

    def kernel(self, x):
        return F.linear(x, self.dequantized(x.dtype))


class Claims(OwnKernel):
    """That a row has the same bits in up to 256, and sums otherwise from 2 rows on."""

    def prepack(self):
        self.use_kernel(RowSplit((1,), 256), self.out_features)

    def product(self, x):
        y = super().product(x)
        if not self.is_packed or len(x) == 1:
            return y
        halves = zip(x.chunk(2, 1), self.dequantized(x.dtype).chunk(2, 1), strict=True)
        return sum(F.linear(*half) for half in halves)


def with_own_kernel(monkeypatch, linear_class) -> Format:
    monkeypatch.setitem(KERNELS, "own", linear_class)
    return Asymmetric(4, 32, kernel="own")


def test_a_kernel_of_ones_own_conforms_in_experts_too(monkeypatch):
    check_format(with_own_kernel(monkeypatch, OwnKernel))


@pytest.mark.slow
def test_a_kernel_of_ones_own_rounds_alike_compiled(monkeypatch):
    monkeypatch.setitem(FORMATS, "own", with_own_kernel(monkeypatch, OwnKernel))
    linear = torch.nn.Linear(256, 64, bias=False).requires_grad_(False)
    quantized = QuantizedLinear.from_float(linear, "own")
    quantized.pack()
    assert quantized.held_bytes("cpu") == quantized.stored_bytes < linear.weight.nbytes / 4
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.compile(quantized)(x), quantized(x))


def test_a_false_claim_of_equal_rows_is_refused(monkeypatch):
    with pytest.raises(AssertionError, match="has other bits than alone, and batch_invariant"):
        check_format(with_own_kernel(monkeypatch, Claims))


def test_a_kernel_that_nobody_has_is_refused():
    with pytest.raises(AssertionError, match="'nope' is not in weights"):
        check_format(Asymmetric(4, 32, kernel="nope"))


def test_experts_of_wrong_codes_are_refused(monkeypatch):
    """Those of the expert before."""
    monkeypatch.setattr(
        Stack,
        "chosen",
        lambda self, expert: {name: getattr(self, name)[expert - 1] for name in self.part_names},
    )
    with pytest.raises(AssertionError, match=r"rows: output .* times what rounding may do"):
        check_experts(FORMATS["int4-g32"], "int4-g32")


def test_a_wrong_kernel_is_refused(monkeypatch):
    """One that leaves out the last input."""
    product = QuantizedLinear.product

    def without_last(self, x):
        return product(self, torch.cat((x[:, :-1], torch.zeros_like(x[:, :1])), dim=1))

    monkeypatch.setattr(QuantizedLinear, "product", without_last)
    with pytest.raises(AssertionError, match=r"1 rows: output .* times what rounding may do"):
        check_format(FORMATS["mxfp8"])


# --------------------------------------------------------------------------------------- families


@pytest.mark.one_in(20, 4)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_conform(family, folder_of):
    check_family(config_json(folder_of(family)))


def test_a_last_norm_that_was_left_out_is_refused(monkeypatch):
    hidden = Transformer.hidden

    def without_norm(self, *args):
        with mock.patch.dict(self._modules, norm=torch.nn.Identity()):
            return hidden(self, *args)

    monkeypatch.setattr(Transformer, "hidden", without_norm)
    with pytest.raises(AssertionError, match="one pass without caches: the logit of id"):
        check_family(BASE | FAMILIES["llama-3"])


def test_caches_that_are_one_position_late_are_refused(monkeypatch):
    """Tokens see themselves only in a pass without caches."""
    update = KVCache.update
    monkeypatch.setattr(KVCache, "update", lambda self, k, v, pos: update(self, k, v, pos + 1))
    with pytest.raises(AssertionError, match="on caches of those before"):
        check_family(BASE | FAMILIES["llama-3"])
