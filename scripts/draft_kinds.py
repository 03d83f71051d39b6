"""What scripts.distill_draft teaches besides a plain model: PARD and EAGLE-3 drafts, and how their folders are written.

    Model, Pard, Eagle3     a kind: its config.json, its model, what it learns from a row, its drafter, its folder
    Drafted                 states of a draft, and which of the target's distributions each should have

Where a kind learns a later position of a draft, the text's own tokens stand for those drafted before. PARD learns masks
behind positions drawn at random, about as many masks as tokens (COD, arXiv:2504.18583); EAGLE-3 learns steps that
follow its own states (training-time test, arXiv:2503.01840). This file knows no flags' text and no loop.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from drafts.eagle import AuxHiddenStates, EagleDraft, EagleModel, eagle_of, places_of
from drafts.pard import PardDraft
from loading.checkpoint import allocate, empty_model, save_model
from loading.config import config_from_hf
from loading.files import save_tensors, write_atomically
from model import AttentionMask, Config, Transformer, attend
from speculative import Drafter, ModelDraft

Pairs = list[tuple[Tensor, Tensor]]


class Drafted(NamedTuple):
    """What a draft computes for rows (B, T) while it learns."""

    states: Tensor  # (B, N, D)
    at: Tensor  # (N,) of the T states of the target, the one whose next-token distribution each should have
    position: Tensor  # (N,) in a draft, from 0

    @staticmethod
    def of(parts: Sequence[tuple[Tensor, Tensor]]) -> "Drafted":
        """From (at, states) of each position in a draft."""
        position = torch.cat([torch.full_like(at, i) for i, (at, _) in enumerate(parts)])
        return Drafted(torch.cat([x for _, x in parts], dim=1), torch.cat([at for at, _ in parts]), position)


def learning(model: Transformer) -> contextlib.AbstractContextManager:
    """bfloat16 products in a model that learns; one that is deployed computes as it is."""
    weight = model.norm.weight
    return torch.autocast(weight.device.type, torch.bfloat16) if weight.requires_grad else contextlib.nullcontext()


class Model:
    """A plain model, whose distribution after a token is the same at every position of a draft."""

    def __init__(self, hf: dict, target: Config, depth: int):
        self.hf, self.target, self.depth, self.positions = hf, target, depth, 1

    def empty(self, dtype: torch.dtype) -> Transformer:
        return empty_model(config_from_hf(self.hf), dtype)

    def trained(self) -> Transformer:
        """A model in float32 to be learned, its weights not yet drawn."""
        return Transformer(config_from_hf(self.hf))

    def bind(self, draft: Transformer, target: Transformer) -> None:
        """What the draft takes from its target."""

    def drafter(self, model: Transformer) -> Drafter:
        return ModelDraft(model)

    def states(self, draft: Transformer, target: Transformer, rows: Tensor, seed: int | None) -> tuple[Tensor, Drafted]:
        """rows (B, T) -> the target's states (B, T, D), and the draft's. `seed` draws what is learned of the rows, None
        takes what is evaluated."""
        with torch.no_grad():
            h, known = self.of_target(target, rows)
        with learning(draft):
            return h, Drafted.of(self.pairs(draft, rows, known, seed))

    def of_target(self, target: Transformer, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The target's states (B, T, D), and what else of the target the draft sees."""
        return target.hidden(rows, torch.arange(rows.size(1), device=rows.device)), []

    def pairs(self, draft: Transformer, rows: Tensor, known: list[Tensor], seed: int | None) -> Pairs:
        """For each position of a draft, (at, states) of `Drafted`."""
        pos = torch.arange(rows.size(1), device=rows.device)
        return [(pos, draft.hidden(rows, pos))]

    def logits(self, draft: Transformer, states: Tensor) -> Tensor:
        """states (..., D) -> logits (..., n) of the tokens that this kind drafts."""
        with learning(draft):
            return draft.head(states)[..., : self.target.vocab_size]

    def drafts(self, x: Tensor) -> Tensor:
        """x (..., V of the target) -> (..., n), of the tokens that this kind drafts."""
        return x

    def save(self, model: Transformer, folder: Path) -> None:
        save_model(model, folder, self.hf)


class Masked(Transformer):
    """A model whose next call without caches attends by `mask` (N, N), which positions alone do not say."""

    mask: Tensor

    def visible_by_window(self, pos: Tensor, caches, dtype: torch.dtype) -> dict:
        if caches is not None:
            return super().visible_by_window(pos, caches, dtype)
        H, G = self.layers[0].attention.heads()
        mask = self.mask.expand(pos.size(0), 1, -1, -1)  # (B, 1, N, N)
        return dict.fromkeys(set(self.windows), AttentionMask(mask, None).as_bias(H // G, 1, dtype))


class Pard(Model):
    """A model with one token more, the mask."""

    def __init__(self, hf: dict, target: Config, depth: int):
        mask = hf["vocab_size"]
        super().__init__(hf | {"vocab_size": mask + 1, "pard_token": mask}, target, depth)
        self.mask, self.positions = mask, depth

    def empty(self, dtype: torch.dtype) -> Transformer:
        with torch.device("meta"):
            return Masked(config_from_hf(self.hf)).to(dtype)

    def trained(self) -> Transformer:
        return Masked(config_from_hf(self.hf))

    def drafter(self, model: Transformer) -> Drafter:
        return PardDraft(model, self.mask)

    def pairs(self, draft: Masked, rows: Tensor, known: list[Tensor], seed: int | None) -> Pairs:
        """Chains of masks stand behind T / (depth - 1) positions, drawn by the seed, or evenly apart without one."""
        (B, T), device, K = rows.shape, rows.device, self.depth
        n = max(1, T // max(1, K - 1))
        generator = torch.Generator().manual_seed(seed or 0)
        at = torch.linspace(0, T - K, n).long() if seed is None else torch.randperm(T - K + 1, generator=generator)[:n]
        at, ahead = at.to(device), torch.arange(1, K, device=device)
        anchor = torch.cat((torch.full((T,), -1, device=device), at.repeat_interleave(K - 1)))  # (N,) -1: a token
        pos = torch.cat((torch.arange(T, device=device), (at[:, None] + ahead).flatten()))  # (N,)
        real, chain = anchor < 0, torch.arange(len(pos), device=device).sub(T).div(max(1, K - 1), rounding_mode="floor")
        reach = torch.where(real, pos, anchor)  # the last token that each may see
        same = (chain[:, None] == chain) & ~real & ~real[:, None] & (pos[:, None] >= pos)
        draft.mask = (real & (pos <= reach[:, None])) | same  # (N, N)
        tokens = torch.cat((rows, rows.new_full((B, len(pos) - T), self.mask)), dim=1)  # (B, N)
        out = draft.hidden(tokens, pos)  # (B, N, D)
        later = out[:, T:].unflatten(1, (len(at), K - 1))  # (B, n, K - 1, D)
        return [(pos[:T], out[:, :T])] + [(at + i, later[:, :, i - 1]) for i in range(1, K)]


class Grown:
    """Keys and values of one layer that every call adds to, with their gradients."""

    def __init__(self):
        self.k = self.v = None

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        old = self.k is not None
        self.k, self.v = (torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)) if old else (k, v)

    def attend(self, q: Tensor, visible: AttentionMask, sinks: Tensor | None = None) -> Tensor:
        return attend(q, self.k.to(q.dtype), self.v.to(q.dtype), visible.mask.to(q.dtype), sinks)


class Steps:
    """What `stream` takes for caches while steps are learned."""

    def __init__(self):
        self.layers = (Grown(),)


class LearnedEagle(EagleModel):
    """An EAGLE-3 draft that attends by `mask` (T, S), and whose embedding is the target's and no parameter."""

    mask: Tensor
    table: list
    embed = property(lambda self: lambda tokens: self.table[0](tokens).to(self.norm.weight.dtype))

    def visible_by_window(self, pos: Tensor, caches, dtype: torch.dtype) -> dict:
        H, G = self.layers[0].attention.heads()
        mask = self.mask.expand(pos.size(0), 1, -1, -1)
        return {None: AttentionMask(mask, None).as_bias(H // G, 1, dtype)}


class Eagle3(Model):
    """One layer in SafeAILab's layout, and a head for some of the target's tokens, which is most of its cost."""

    def __init__(self, hf: dict, target: Config, depth: int, vocab: int | None = None):
        changed = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "draft_vocab_size": vocab or target.vocab_size, "tie_word_embeddings": False,
            "target_hidden_size": target.dim,
        }  # fmt: skip
        super().__init__(hf | changed, target, depth)
        self.positions, self.ids = depth, torch.arange(vocab or target.vocab_size)  # the target's, of what it drafts
        self.eagle = eagle_of(dict(self.hf), target.n_layers, target.dim)
        self.aux_layer_ids = list(self.eagle.aux_layer_ids)

    def trained(self) -> EagleModel:
        return LearnedEagle(config_from_hf(self.eagle.layer), self.eagle, False)

    def empty(self, dtype: torch.dtype) -> EagleModel:
        with torch.device("meta"):
            return self.trained().to(dtype)

    def bind(self, draft: LearnedEagle, target: Transformer) -> None:
        draft.table = [target.embed]
        own = torch.full((self.target.vocab_size,), -1)  # the draft's id of each of the target's
        own[self.ids] = torch.arange(len(self.ids))
        draft.register_buffer("ids", own.to(target.norm.weight.device), persistent=False)

    def choose(self, tokens: Tensor) -> None:
        """Draft the tokens that stand most often in `tokens` (n,); of those as rare as each other, the first ids."""
        V = self.target.vocab_size
        often = torch.bincount(tokens.long(), minlength=V).sort(descending=True, stable=True).indices
        self.ids = often[: self.eagle.vocab_size].sort().values

    def drafter(self, model: EagleModel) -> Drafter:
        other = EagleModel(config_from_hf(self.eagle.layer), self.eagle, False).to(model.norm.weight.dtype)
        other.load_state_dict(model.state_dict())
        other.register_buffer("ids", model.ids, persistent=False)
        return EagleDraft(other.requires_grad_(False).eval())

    def of_target(self, target: Transformer, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The target's states (B, T, D), and what enters its tapped layers."""
        (B, T), like = rows.shape, target.norm.weight
        streams = {i: AuxHiddenStates(B, T, target.config.dim, like.dtype, like.device) for i in self.aux_layer_ids}
        caches = target.make_caches(B, T)._replace(aux_hidden_states=streams)
        return target.hidden(rows, torch.arange(T, device=rows.device), caches), [
            streams[i].x for i in self.aux_layer_ids
        ]

    def logits(self, draft: LearnedEagle, states: Tensor) -> Tensor:
        with learning(draft):
            return Transformer.head(draft, states)

    def drafts(self, x: Tensor) -> Tensor:
        return x if len(self.ids) == x.size(-1) else x[..., self.ids.to(x.device)]

    def pairs(self, draft: LearnedEagle, rows: Tensor, known: list[Tensor], seed: int | None) -> Pairs:
        """`depth` steps over all positions at once, each after the last one's states. The first token of a row has no
        state before it, and in step j the first j + 1 have not."""
        (_, T), device = rows.shape, rows.device
        pos, caches, found = torch.arange(T, device=device), Steps(), []
        dtype = draft.norm.weight.dtype
        fused = draft.fuse(*(x.to(dtype) for x in known)).to(dtype)  # (B, T, D)
        state, ago = fused.roll(1, dims=1), pos[:, None] - pos
        for step in range(self.depth):
            # A row of step j sees the target's states up to its round's beginning, then one of each later step.
            masks = [(ago >= step) & (pos > 0), *((ago == step - i) & (pos > i) for i in range(1, step + 1))]
            draft.mask = torch.cat(masks, dim=1)  # (T, (step + 1) T)
            draft.mask[:, step * T :] |= torch.eye(T, dtype=torch.bool, device=device)  # no row sees nothing
            x = draft.stream(rows, pos.expand(rows.shape), caches, state)
            found.append((pos[step + 1 :], draft.norm(x)[:, step + 1 :]))
            state = x.roll(1, dims=1)
        return found

    def save(self, model: EagleModel, folder: Path) -> None:
        tensors = {name: part.detach().contiguous().clone() for name, part in places_of(model, "midlayer")}
        known = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        known[self.ids] = True
        maps = {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": known}
        save_tensors(folder / "model.safetensors", tensors | maps)
        text = json.dumps(self.hf, indent=2) + "\n"
        write_atomically(folder / "config.json", lambda partial: partial.write_text(text))


KINDS = {"model": Model, "pard": Pard, "eagle3": Eagle3}


def deployed(kind: Model, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """The kind's model as it will be loaded."""
    return allocate(kind.empty(dtype), device)


def by_position(alphas: Sequence[float], k: int) -> float:
    """Tokens that a round of k drafted ones yields where the i-th is accepted with probability alphas[i] if all before
    it are; the last number stands for all further ones."""
    reached = total = 1.0
    for i in range(k):
        reached *= alphas[min(i, len(alphas) - 1)]
        total += reached
    return total
