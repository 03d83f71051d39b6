"""Drafts that read the target's hidden states at some layers: what EAGLE-3, DFlash and MTP heads
share.

A target of L layers has L + 1 states at each position, which are numbered alike everywhere in this
project: state 0 is the embedding, and state i is what leaves the i-th layer and enters the next.

    AuxHiddenStates     one state of the target, by position
    HiddenStateModel    a draft model that reads some of them, and its tensors in a folder
    HiddenStateDraft    makes the target record them
    PairModel           a block that reads pairs of a token and the state before it
    PairDraft           pairs decided tokens with the target's states, drafted ones with the draft's
    HiddenStateSource   a published folder, whose parts published.py reads
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from decoding.errors import UserError
from drafts.base import DraftSource, LoadOptions, ModelDraft
from drafts.published import STATES_KEY, check_target_ids, fill_parts
from drafts.vocabulary import gather_logits
from loading.checkpoint import Checkpoint
from loading.models import allocate, to_dtype
from loading.weight_names import pieces
from model import Caches, Config, Linear, Transformer, row_index
from weights.walker import quantized_copy

TRY_VARIANTS = (
    'python -m scripts.compare --variants --a "FLAGS OF THIS RUN" tries other readings of its files'
)


class AuxHiddenStates(nn.Module):
    """One state of the target at all positions, (B, S, D) at fixed addresses. A pass may leave
    values after the last decided token, as in the target's caches; they are overwritten before a
    draft depends on them."""

    def __init__(self, B: int, S: int, like: Tensor):
        """For B rows of S positions; `like` (D,) has their dtype and device."""
        super().__init__()
        self.register_buffer("x", like.new_zeros(B, S, len(like)), persistent=False)

    def update(self, x: Tensor, pos: Tensor) -> None:
        """Write x (B, T, D) at pos (B, T)."""
        self.x[row_index(pos), pos] = x

    def read(self, pos: Tensor) -> Tensor:
        """(B, T, D) at pos (B, T). A parked row's pos may lie past the end, because the draft's
        cache may be longer; nothing uses what such a row reads."""
        last = self.x.size(1) - 1
        return self.x[row_index(pos), pos.clamp(max=last)]

    def views(
        self,
        rows: int | slice | list[int],
        begin: int,
        end: int,
    ) -> dict[str, Tensor]:
        """Positions [begin, end) of these rows, as in KVCache.views."""
        return {"x": self.x[rows, begin:end]}

    def clear(self, row: int, begin: int, end: int) -> None:
        self.x[row, begin:end] = 0


class HiddenStateModel(Transformer):
    """A draft model that reads some of the target's states. Where its embedding or its head is
    None, `borrow` takes the target's. A subclass sets `state_ids`, and has fuse(*states) -> one
    state (B, T, D).

    `vocab_size`: of the draft's head, which may have only some of the target's tokens. `ids` (V,):
    the draft's id for each id of the target's, -1 for none; None where they are the same.
    """

    state_ids: tuple[int, ...]  # which of the target's states, numbered as above
    # Modules of its own, which folders store under the same names.
    OWN = ("fc", "fc_norm", "hidden_norm", "input_norm", "markov_head")

    def __init__(self, config: Config, vocab_size: int):
        super().__init__(config)
        self.lm_head = Linear(config.dim, vocab_size, bias=False)
        self.register_buffer("ids", None, persistent=False)

    @property
    def advice(self) -> str:
        """What may be wrong if hardly any token is accepted."""
        return (
            f"The draft reads hidden states {list(self.state_ids)} of the target, where 0 is"
            f" the embedding and i the output of the i-th layer; if it was trained on others, name"
            f' them in its config.json as "{STATES_KEY}": [...]. {TRY_VARIANTS}'
        )

    def head(self, h: Tensor) -> Tensor:
        """h (..., D) -> logits (..., V of the target), -inf where the draft has no such token."""
        logits = super().head(h)
        return logits if self.ids is None else gather_logits(logits, self.ids)

    def drop_unstored(self, checkpoint: Checkpoint, V: int) -> None:
        """Leave the embedding and the head to a target of V tokens where the folder stores none, as
        vLLM and SGLang do. UserError where a head of other than V tokens is not stored."""
        if "embed_tokens.weight" not in checkpoint.tensors:
            self.embed = None
        if self.lm_head is None or "lm_head.weight" in checkpoint.tensors:
            return
        n = self.lm_head.out_features
        if n != V:
            raise UserError(
                f"{checkpoint.path}: lm_head.weight is missing, and the target's has {V} tokens,"
                f" not draft_vocab_size = {n}"
            )
        self.lm_head = None

    def borrow(self, target: Transformer) -> None:
        """Use the target's embedding and head, with their scales, where the draft has none. `setup`
        calls it, once packing has replaced the target's modules."""
        if self.embed is None:
            self.embed = target.embed
            self.config = replace(self.config, embed_scale=target.config.embed_scale)
        if self.lm_head is None:
            self.lm_head = target.lm_head
            self.config = replace(self.config, logit_scale=target.config.logit_scale)

    def target_states(self, caches: Caches, pos: Tensor) -> Tensor:
        """The fused state (B, T, D) at each of the target's positions pos (B, T)."""
        states = [caches.aux_hidden_states[i].read(pos) for i in self.state_ids]
        return self.fuse(*states)

    def stored_parts(self) -> Iterator[tuple[str, Tensor]]:
        """(a tensor's name in a folder, the part of a parameter that it fills)."""
        for name, parameter in self.named_parameters():
            if any(module in self.OWN for module in name.split(".")):
                yield name, parameter
                continue
            for source, part in pieces(self.config, name, parameter):
                yield source.removeprefix("model."), part

    def parts_by_name(self, block: str = "layers.0") -> dict[str, Tensor]:
        """`stored_parts` by name, in a layout that calls the first layer `block`."""
        return {name.replace("layers.0", block): part for name, part in self.stored_parts()}

    def fill(self, checkpoint: Checkpoint, target: Config, block: str = "layers.0") -> None:
        """Copy a folder's tensors, for a target of this Config, into the model, and make `ids`.
        `block`: the folder's name of the first layer. UserError names tensors that do not fit."""
        tensors = checkpoint.tensors
        V = target.vocab_size
        maps = {}  # of ids, which fill no parameter: name -> (shape, types) to check
        if self.lm_head is not None:
            n = self.lm_head.out_features
            # d2t[i] is the target's id of the draft's token i, less i. t2d adds nothing to it.
            if "d2t" in tensors or n != V:
                maps["d2t"] = ((n,), ("I64", "I32"))
            if "t2d" in tensors:
                maps["t2d"] = ((self.config.vocab_size,), ("BOOL", "U8"))
        fill_parts(checkpoint.path, tensors, self.parts_by_name(block), maps)
        if "d2t" in maps:
            draft_ids = torch.arange(n)
            target_ids = draft_ids + tensors["d2t"][...]  # (n,); [...] reads the file
            check_target_ids(target_ids, V, checkpoint.path)
            ids = torch.full((V,), -1).scatter(0, target_ids, draft_ids)
            self.register_buffer("ids", ids.to(self.norm.weight.device), persistent=False)


class HiddenStateDraft(ModelDraft):
    """The drafter of a HiddenStateModel. Decoding stays lossless even if the draft reads hidden
    states that it was not trained on, so such a mismatch shows only as a low acceptance rate."""

    def setup(
        self,
        batch: nn.Module,
        k_max: int,
        target,
        maybe_compile: Callable,
    ) -> None:
        self.model.borrow(target.model)  # first: a runner reads `norm`, which MTP may borrow
        like = target.model.norm.weight
        S = target.S + target.slack  # as the target's caches
        with torch.inference_mode(False):  # plain tensors, which any later code may write to
            states = {i: AuxHiddenStates(target.B, S, like) for i in self.model.state_ids}
        super().setup(batch, k_max, target, maybe_compile)
        for runner in (target, self.runner):  # the target records them, the draft reads them
            runner.caches = runner.caches._replace(aux_hidden_states=states)

    def causes(self) -> list[str]:
        return [self.model.advice]


class PairModel(HiddenStateModel):
    """One block that reads pairs of a token and the state before it, the target's or the draft's.

    Published code stores a pair at the position of its state; this class stores it at that of its
    token, one later, so that pairs are cached and prefilled like tokens. RoPE scores depend on
    distances and stay the same. Position 0 has no pair and is masked.
    """

    # Is a drafted token paired with the draft's state after its last norm, which the head reads?
    recycles_normed: bool

    def visible_by_window(
        self,
        pos: Tensor,
        caches: Caches,
        dtype: torch.dtype,
    ) -> dict:
        """As in any model, but position 0, which has no pair, is never visible."""
        # A key at 2^30 comes after every query, so that none sees it. Where a window gathers keys,
        # masks are made from `index` and not from key_pos: the loop masks it there.
        key_pos = torch.where(caches.key_pos == 0, 2**30, caches.key_pos)
        visible = super().visible_by_window(pos, caches._replace(key_pos=key_pos), dtype)
        for window, keys in visible.items():
            if keys.index is not None:
                is_first = (keys.index == 0)[:, None, None]  # (B, 1, 1, S)
                mask = keys.mask.masked_fill(is_first, -math.inf)
                visible[window] = keys._replace(mask=mask)
        return visible

    def stream(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches,
        state: Tensor,
    ) -> Tensor:
        """tokens and pos (B, T), the state (B, T, D) before each token -> the block's output (B, T,
        D), not normed."""
        raise NotImplementedError

    def hidden(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches,
    ) -> Tensor:
        """Normed states (B, T, D) of decided tokens."""
        pos = pos.expand(tokens.shape)
        state = self.state_before(pos, caches)
        return self.norm(self.stream(tokens, pos, caches, state))

    def state_before(self, pos: Tensor, caches: Caches) -> Tensor:
        """The target's state (B, T, D) before each token at pos (B, T)."""
        return self.target_states(caches, (pos - 1).clamp(min=0))


class PairDraft(HiddenStateDraft):
    """The drafter of a PairModel. Its first pass takes as many decided tokens as a round can
    decide, paired with the target's states. A later pass takes one drafted token, paired with the
    draft's state from the pass before."""

    num_extra_inputs = 0

    def setup(self, *args) -> None:
        super().setup(*args)
        weight = self.model.norm.weight  # (D,)
        # (B, 1, D) the draft's state at the token that ran last, which the next one is paired with.
        last_state = weight.new_zeros(len(self.tokens), 1, len(weight))
        self.register_buffer("last_state", last_state, persistent=False)

    def hidden_up_to(
        self,
        caches: Caches,
        batch: nn.Module,
        last: Tensor,
        T: int,
    ) -> Tensor:
        """Normed states (B, T, D) at the T positions up to `last` (B,). T = 1 is a drafted token: a
        first pass has more."""
        model = self.model
        tokens, pos = self.inputs_up_to(batch, last, T)
        before = self.last_state if T == 1 else model.state_before(pos, caches)
        x = model.stream(tokens, pos, caches, before)
        h = model.norm(x)
        output = h if model.recycles_normed else x
        self.last_state.copy_(output[:, -1:])
        return h


class HiddenStateSource(DraftSource):
    """A published folder of such a draft. In a subclass, `check` reads config.json, `new_model`
    makes the model that `load` fills, and `choices` gives, for each key of config.json that may be
    wrong or missing, the values to try, beginning with the one in use."""

    draft_class: type[HiddenStateDraft]

    def __init__(self, origin, config: Config, options: LoadOptions):
        if options.sharded:
            raise UserError(
                f"--draft_tp sharded: {origin.path} reads the target's hidden states, and every"
                f" rank holds such a draft in full"
            )
        super().__init__(origin, config, options)

    def variants(self) -> list[tuple[str, DraftSource]]:
        choices = self.choices()
        variants = []
        for values in itertools.product(*choices.values()):
            keys = dict(zip(choices, values))
            source = type(self)(self.origin.with_keys(keys), self.target_config, self.options)
            variants.append((json.dumps(keys)[1:-1], source))  # without the braces
        return variants

    def load(self, target: Transformer, tokenizer) -> HiddenStateDraft:
        """The drafter, in the target's dtype."""
        like = target.norm.weight
        with torch.device("meta"):  # no memory for what drop_unstored removes
            model = to_dtype(self.new_model(), like.dtype)
        model.drop_unstored(self.origin, target.config.vocab_size)
        allocate(model, like.device)
        model.fill(self.origin, target.config)
        if self.options.quantize:
            model = quantized_copy(model, self.options.quantize)
        return self.draft_class(model)
