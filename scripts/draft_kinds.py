"""The kinds of drafts that scripts.distill_draft trains.

    Kind, Pard, Eagle3, DFlash      a kind: its config.json, its model, its states over a row, its drafter, its folder
    Drafted                         states of a draft, and the positions whose next-token distributions they learn

A draft learns on the text's tokens instead of its own drafted ones. PARD learns masks behind random positions, about
as many masks as tokens (COD, arXiv:2504.18583). EAGLE-3 learns steps that continue its own states (training-time test,
arXiv:2503.01840). DFlash learns blocks at random positions, the first tokens of a block most (arXiv:2602.06036).
"""

import contextlib
import itertools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from drafts.dflash import DFlashDraft, DFlashModel, default_layer_ids, dflash_of, tensors_of
from drafts.eagle import EagleDraft, EagleModel, eagle_of
from drafts.eagle import tensors_of as eagle_tensors
from drafts.hidden_states import AuxHiddenStates
from drafts.pard import PardDraft
from loading.checkpoint import allocate, save_model
from loading.config import config_from_hf
from loading.files import save_tensors, write_atomically
from model import AttentionMask, Caches, Config, Transformer, attend
from speculative import Drafter, ModelDraft

Pairs = list[tuple[Tensor, Tensor]]  # (at, states) of Drafted, by position in a draft


class Drafted(NamedTuple):
    """The draft's states for rows (B, T)."""

    states: Tensor  # (B, N, D)
    at: Tensor  # (N,) positions in the row; a state learns the target's next-token distribution there
    position: Tensor  # (N,) positions in the draft, from 0


def training_autocast(model: Transformer) -> contextlib.AbstractContextManager:
    """bfloat16 products for a model in training; any other computes in its own dtype."""
    weight = model.norm.weight
    return torch.autocast(weight.device.type, torch.bfloat16) if weight.requires_grad else contextlib.nullcontext()


def visible_by_mask(model: Transformer, pos: Tensor, dtype: torch.dtype) -> dict:
    """Transformer.visible_by_window for queries that attend by `model.mask` (T, S)."""
    H, G = model.layers[0].attention.heads()
    mask = AttentionMask(model.mask.expand(pos.size(0), 1, -1, -1), None).as_bias(H // G, 1, dtype)  # (B, 1, R*T, S)
    return dict.fromkeys(set(model.windows), mask)


class Kind:
    """A kind of draft; this one is a plain model, whose distribution does not depend on the position in a draft."""

    aux_layer_ids: tuple[int, ...] = ()  # the target's layers whose inputs the draft reads

    def __init__(self, hf: dict, target: Config, depth: int):
        self.hf, self.target, self.depth, self.num_positions = hf, target, depth, 1
        self.loss_weights = torch.ones(depth)  # by position in a draft

    def choose_ids(self, tokens: Tensor) -> None:
        """Choose the draft's ids, or its mask, by the text to learn, tokens (n,)."""

    def new_model(self) -> Transformer:
        """A model in float32 for training, without initial weights."""
        return Transformer(config_from_hf(self.hf))

    def empty_model(self, dtype: torch.dtype, device: torch.device | str) -> Transformer:
        """A model as loading makes it, before its weights are read."""
        with torch.device("meta"):
            model = self.new_model().to(dtype)
        return allocate(model, device)

    def bind(self, draft: Transformer, target: Transformer) -> None:
        """Give the draft the modules of its target that it uses, and the ids that it drafts."""

    def drafter(self, model: Transformer) -> Drafter:
        return ModelDraft(model)

    def states(self, draft: Transformer, target: Transformer, rows: Tensor, seed: int | None) -> tuple[Tensor, Drafted]:
        """rows (B, T) -> the target's states (B, T, D), and the draft's. `seed` draws the positions to learn; None
        takes evenly spaced ones, for evaluation."""
        with torch.no_grad():
            h, streams = self.target_states(target, rows)
        with training_autocast(draft):
            pairs = self.pairs(draft, rows, streams, seed)
            position = torch.cat([torch.full_like(at, i) for i, (at, _) in enumerate(pairs)])
            return h, Drafted(torch.cat([x for _, x in pairs], dim=1), torch.cat([at for at, _ in pairs]), position)

    def target_states(self, target: Transformer, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The target's states (B, T, D), and the inputs (B, T, D) of its layers `aux_layer_ids`."""
        (B, T), D, like = rows.shape, target.config.dim, target.norm.weight
        streams = {i: AuxHiddenStates(B, T, D, like.dtype, like.device) for i in self.aux_layer_ids}
        caches = target.make_caches(B, T)._replace(aux_hidden_states=streams) if streams else None
        h = target.hidden(rows, torch.arange(T, device=rows.device), caches)  # (B, T, D)
        return h, [streams[i].x for i in self.aux_layer_ids]  # a small target may name a layer twice

    def pairs(self, draft: Transformer, rows: Tensor, streams: list[Tensor], seed: int | None) -> Pairs:
        """For each position in a draft, `at` and `states` of Drafted."""
        pos = torch.arange(rows.size(1), device=rows.device)
        return [(pos, draft.hidden(rows, pos))]

    def logits(self, draft: Transformer, states: Tensor) -> Tensor:
        """states (..., D) -> logits (..., n) of the n tokens that this kind drafts."""
        with training_autocast(draft):
            return draft.head(states)[..., : self.target.vocab_size]

    def select(self, x: Tensor) -> Tensor:
        """x (..., V of the target) -> (..., n), the columns of the tokens that this kind drafts."""
        return x

    def save(self, model: Transformer, folder: Path) -> None:
        save_model(model, folder, self.hf)


class Masked(Transformer):
    """A model that attends by `mask` (N, N) in calls without caches."""

    mask: Tensor

    def visible_by_window(self, pos: Tensor, caches, dtype: torch.dtype) -> dict:
        return visible_by_mask(self, pos, dtype) if caches is None else super().visible_by_window(pos, caches, dtype)


class Pard(Kind):
    """A model with one more token, the mask."""

    def __init__(self, hf: dict, target: Config, depth: int):
        self.mask_id = hf["vocab_size"]
        super().__init__(hf | {"vocab_size": self.mask_id + 1, "pard_token": self.mask_id}, target, depth)
        self.num_positions = depth

    def new_model(self) -> Transformer:
        return Masked(config_from_hf(self.hf))

    def drafter(self, model: Transformer) -> Drafter:
        return PardDraft(model, self.mask_id)

    def pairs(self, draft: Masked, rows: Tensor, streams: list[Tensor], seed: int | None) -> Pairs:
        """The rows, and chains of K - 1 masks behind T / (K - 1) of their positions. A token sees the tokens before it.
        A mask sees the tokens before its chain, and the masks before it."""
        (B, T), device, K = rows.shape, rows.device, self.depth
        n = max(1, T // max(1, K - 1))
        generator = torch.Generator().manual_seed(seed or 0)
        at = torch.linspace(0, T - K, n).long() if seed is None else torch.randperm(T - K + 1, generator=generator)[:n]
        at, ahead = at.to(device), torch.arange(1, K, device=device)
        pos = torch.cat((torch.arange(T, device=device), (at[:, None] + ahead).flatten()))  # (N,)
        last_token = torch.cat((pos[:T], at.repeat_interleave(K - 1)))  # (N,) that a query may see
        index = torch.arange(len(pos), device=device)
        is_token, chain = index < T, (index - T).div(max(1, K - 1), rounding_mode="floor")
        same_chain = (chain[:, None] == chain) & ~is_token & ~is_token[:, None] & (pos[:, None] >= pos)
        draft.mask = (is_token & (pos <= last_token[:, None])) | same_chain  # (N, N)
        tokens = torch.cat((rows, rows.new_full((B, len(pos) - T), self.mask_id)), dim=1)  # (B, N)
        states = draft.hidden(tokens, pos)  # (B, N, D)
        masked = states[:, T:].unflatten(1, (len(at), K - 1))  # (B, n, K - 1, D)
        return [(pos[:T], states[:, :T])] + [(at + i, masked[:, :, i - 1]) for i in range(1, K)]


class GrowingCache:
    """Keys and values of a draft's layer. Every call appends to them, and gradients flow through them."""

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None):
        self.layers, self.k, self.v = (self,), k, v

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        self.k, self.v = (k, v) if self.k is None else (torch.cat((self.k, k), 2), torch.cat((self.v, v), 2))

    def attend(self, q: Tensor, visible: AttentionMask, sinks: Tensor | None = None) -> Tensor:
        return attend(q, self.k.to(q.dtype), self.v.to(q.dtype), visible.mask.to(q.dtype), sinks)


class TrainedEagle(EagleModel):
    """An EAGLE-3 draft that attends by `mask` (T, S). It uses the target's embedding, which is not trained."""

    mask: Tensor
    embeddings: list  # of the target's embedding: modules in a list are not submodules
    embed = property(lambda self: lambda tokens: self.embeddings[0](tokens).to(self.norm.weight.dtype))

    visible_by_window = lambda self, pos, caches, dtype: visible_by_mask(self, pos, dtype)  # noqa: E731


class Eagle3(Kind):
    """One layer in SafeAILab's layout, with a head for `vocab` of the target's tokens (default: all)."""

    def __init__(self, hf: dict, target: Config, depth: int, vocab: int | None = None):
        eagle_keys = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "draft_vocab_size": vocab or target.vocab_size, "tie_word_embeddings": False,
            "target_hidden_size": target.dim,
        }  # fmt: skip
        super().__init__(hf | eagle_keys, target, depth)
        self.num_positions = depth
        self.ids = torch.arange(vocab or target.vocab_size)  # the target's ids of the head's rows
        self.eagle = eagle_of(dict(self.hf), target)
        self.hf["target_hidden_states"] = list(self.eagle.aux_layer_ids)
        self.aux_layer_ids = self.eagle.aux_layer_ids

    def new_model(self) -> EagleModel:
        return TrainedEagle(config_from_hf(self.eagle.layer), self.eagle, False)

    def bind(self, draft: TrainedEagle, target: Transformer) -> None:
        draft.embeddings = [target.embed]
        draft_ids = torch.full((self.target.vocab_size,), -1)  # by the target's id
        draft_ids[self.ids] = torch.arange(len(self.ids))
        draft.register_buffer("ids", draft_ids.to(target.norm.weight.device), persistent=False)

    def choose_ids(self, tokens: Tensor) -> None:
        """Choose the most frequent of `tokens` (n,), and among equal counts the smaller ids."""
        counts = torch.bincount(tokens.long(), minlength=self.target.vocab_size)
        self.ids = counts.sort(descending=True, stable=True).indices[: self.eagle.vocab_size].sort().values

    def drafter(self, model: EagleModel) -> Drafter:
        draft = EagleModel(config_from_hf(self.eagle.layer), self.eagle, False).to(model.norm.weight)
        draft.load_state_dict(model.state_dict())
        draft.register_buffer("ids", model.ids, persistent=False)
        return EagleDraft(draft.requires_grad_(False).eval())

    def logits(self, draft: TrainedEagle, states: Tensor) -> Tensor:
        with training_autocast(draft):
            return Transformer.head(draft, states)

    def select(self, x: Tensor) -> Tensor:
        return x if len(self.ids) == x.size(-1) else x[..., self.ids.to(x.device)]

    def pairs(self, draft: TrainedEagle, rows: Tensor, streams: list[Tensor], seed: int | None) -> Pairs:
        """`depth` steps over all positions at once, each from the previous step's states. A state is paired with the
        next token, so in step j the first j + 1 tokens of a row have none."""
        (_, T), device, dtype = rows.shape, rows.device, draft.norm.weight.dtype
        pos, caches, pairs = torch.arange(T, device=device), GrowingCache(), []
        state = draft.fuse(*(x.to(dtype) for x in streams)).to(dtype).roll(1, dims=1)  # (B, T, D)
        distance = pos[:, None] - pos  # (T, T)
        for step in range(self.depth):
            # A token of step j sees the target's states up to its draft's begin, and one state of each later step.
            masks = [(distance >= step) & (pos > 0)]
            masks += [(distance == step - i) & (pos > i) for i in range(1, step + 1)]
            draft.mask = torch.cat(masks, dim=1)  # (T, (step + 1) T)
            draft.mask[:, step * T :] |= torch.eye(T, dtype=torch.bool, device=device)  # a row without keys gives NaN
            x = draft.stream(rows, pos.expand(rows.shape), caches, state)
            pairs.append((pos[step + 1 :], draft.norm(x)[:, step + 1 :]))
            state = x.roll(1, dims=1)
        return pairs

    def save(self, model: EagleModel, folder: Path) -> None:
        tensors = {name: part.detach().contiguous().clone() for name, part in eagle_tensors(model, "midlayer")}
        has_id = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        has_id[self.ids] = True
        maps = {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": has_id}
        write_folder(folder, self.hf, tensors | maps)


def write_folder(folder: Path, hf: dict, tensors: dict[str, Tensor]) -> None:
    save_tensors(folder / "model.safetensors", tensors)
    text = json.dumps(hf, indent=2) + "\n"
    write_atomically(folder / "config.json", lambda partial: partial.write_text(text))


class TrainedDFlash(DFlashModel):
    """A DFlash draft that attends by `mask` (N, S). It uses the target's embedding, which is not trained."""

    mask: Tensor
    embeddings: list
    embed = TrainedEagle.embed
    visible_by_window = TrainedEagle.visible_by_window


class DFlash(Kind):
    """z-lab's layout: a block is a decided token and `depth` masks. The mask's id is the text's rarest token."""

    def __init__(self, hf: dict, target: Config, depth: int):
        num_layers = hf["num_hidden_layers"]
        dflash_config = {
            "mask_token_id": target.vocab_size - 1,
            "target_layer_ids": default_layer_ids(target.n_layers, max(3, num_layers)),
        }
        dflash_keys = {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": target.n_layers,
            "block_size": depth + 1, "dflash_config": dflash_config, "tie_word_embeddings": False,
        }  # fmt: skip
        super().__init__(hf | dflash_keys, target, depth)
        self.dflash, self.config = dflash_of(self.hf, target)
        self.num_positions, self.aux_layer_ids = depth, tuple(i + 1 for i in self.dflash.target_layer_ids)
        self.loss_weights = torch.exp(-torch.arange(depth) / ((depth + 1) / 2))  # gamma: half a block

    def choose_ids(self, tokens: Tensor) -> None:
        counts = torch.bincount(tokens.long(), minlength=self.target.vocab_size)
        mask = int((counts == counts.min()).nonzero().max())  # the last of the rarest
        self.hf["dflash_config"]["mask_token_id"], self.dflash = mask, self.dflash._replace(mask=mask)

    def new_model(self) -> DFlashModel:
        return TrainedDFlash(self.config, self.dflash)

    def bind(self, draft: TrainedDFlash, target: Transformer) -> None:
        like = target.norm.weight
        draft.embeddings = [target.embed]
        with torch.no_grad():  # a packed head has no gradients: recover its matrix
            self.head = target.head(torch.eye(target.config.dim, dtype=like.dtype, device=like.device)).T.to(like.dtype)

    def drafter(self, model: DFlashModel) -> Drafter:
        draft = DFlashModel(self.config, self.dflash).to(model.norm.weight)
        draft.load_state_dict(model.state_dict())
        return DFlashDraft(draft.requires_grad_(False).eval())

    def logits(self, draft: TrainedDFlash, states: Tensor) -> Tensor:
        with training_autocast(draft):
            return torch.nn.functional.linear(states.to(draft.norm.weight.dtype), self.head).float()

    def pairs(self, draft: TrainedDFlash, rows: Tensor, streams: list[Tensor], seed: int | None) -> Pairs:
        """Blocks that begin at T / (depth + 1) positions. A block sees the context before its begin, and itself."""
        (B, T), device, W = rows.shape, rows.device, self.depth + 1
        n, last = max(1, T // W), T - self.depth
        generator = torch.Generator().manual_seed(seed or 0)
        begin = torch.linspace(1, last, n).long() if seed is None else 1 + torch.randperm(last, generator=generator)[:n]
        begin = begin.to(device)  # (n,)
        tokens = rows.new_full((B, n, W), self.dflash.mask)
        tokens[:, :, 0] = rows[:, begin]
        pos = (begin[:, None] + torch.arange(W, device=device)).flatten()  # (n*W,)
        context_pos, block = torch.arange(T, device=device), torch.arange(n * W, device=device) // W
        draft.mask = torch.cat((context_pos < begin.repeat_interleave(W)[:, None], block[:, None] == block), dim=1)
        context = draft.fuse(*(x.to(draft.norm.weight.dtype) for x in streams))  # (B, T, D)
        parts = draft.keys_values(context, context_pos.expand(rows.shape), None)
        caches = Caches(tuple(GrowingCache(k, v) for k, v in parts), context_pos)
        states = draft.block_hidden(tokens.flatten(1), pos, caches).unflatten(1, (n, W))  # (B, n, W, D)
        return [(begin + i - 1, states[:, :, i]) for i in range(1, W)]

    def save(self, model: DFlashModel, folder: Path) -> None:
        write_folder(folder, self.hf, {name: x.detach().contiguous().clone() for name, x in tensors_of(model)})


KINDS = {"model": Kind, "pard": Pard, "eagle3": Eagle3, "dflash": DFlash}


def tokens_per_round(alphas: Sequence[float], k: int) -> float:
    """Expected tokens of a round with k drafted ones. alphas[i] is the acceptance of the i-th if all before it are
    accepted; positions beyond the list have its last value."""
    probs = [*alphas[:k], *[alphas[-1]] * (k - len(alphas))]
    return 1 + sum(itertools.accumulate(probs, operator.mul))
