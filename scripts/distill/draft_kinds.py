"""The kinds of drafts that scripts.distill_draft trains.

    Kind, Pard, Eagle3, MtpHead,    a kind: its config.json, its model, its states over a row, its
    DFlash, DSpark                  loss, its drafter, its folder
    Drafted                         states of a draft, and the positions whose next-token
                                    distributions they learn

A draft learns on the text's tokens instead of its own drafted ones. PARD learns masks after random
positions, about as many masks as tokens (COD, arXiv:2504.18583). EAGLE-3 and an MTP head learn
steps that continue their own states (training-time test, arXiv:2503.01840). DFlash learns blocks at
random positions, and gives their first tokens the largest weight (arXiv:2602.06036). DSpark learns
the same blocks with a head that reads the token before each position, and mainly the probability of
acceptance (arXiv:2607.05147).
"""

import contextlib
import itertools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.errors import UserError
from drafts.base import Drafter, ModelDraft
from drafts.dflash import DFlashDraft, DFlashModel, dflash_of
from drafts.eagle import EagleModel, eagle_of
from drafts.hidden_states import AuxHiddenStates, PairDraft, PairModel
from drafts.mtp import COUNTS, HEAD_MODULES, MtpDraft, MtpModel, head_config, mtp_of, switch_keys
from drafts.pard import PardDraft
from loading.config import Section, config_from_hf
from loading.files import save_tensors, write_atomically
from loading.models import allocate
from loading.saving import save_model
from model import AttentionKernel, AttentionMask, Caches, Config, Transformer, attend
from scripts.distill.draft_start import embedding_of

MAX_MARKOV_RANK = 256  # of DeepSpec's published drafts

Pairs = list[tuple[Tensor, Tensor]]  # (at, states) of Drafted, by position in a draft


class Drafted(NamedTuple):
    """The draft's states for rows (B, T)."""

    states: Tensor  # (B, N, D)
    # Positions (N,) in the row, where each state learns the target's next-token distribution.
    at: Tensor
    position: Tensor  # (N,) positions in the draft, from 0


def training_autocast(model: Transformer) -> contextlib.AbstractContextManager:
    """bfloat16 products for a model in training; any other computes in its own dtype."""
    weight = model.norm.weight
    if not weight.requires_grad:
        return contextlib.nullcontext()
    return torch.autocast(weight.device.type, torch.bfloat16)


class Masked:
    """A model in training, which attends by `mask` (T, S)."""

    mask: Tensor

    def visible_by_window(self, pos: Tensor, caches, dtype: torch.dtype) -> dict:
        H, G = self.layers[0].attention.heads()
        visible = self.mask.expand(len(pos), 1, -1, -1)  # (B, 1, T, S)
        mask = AttentionMask(visible, None)
        bias = AttentionKernel().prepare(mask, H // G, dtype)  # (B, 1, R*T, S)
        return dict.fromkeys(self.windows, bias)


def positions_to_learn(first: int, last: int, n: int, seed: int | None) -> Tensor:
    """n positions from `first` to `last`, drawn by `seed`; without one evenly spaced."""
    if seed is None:
        return torch.linspace(first, last, n).long()
    generator = torch.Generator().manual_seed(seed)
    return first + torch.randperm(last - first + 1, generator=generator)[:n]


class Kind:
    """A kind of draft; this one is a plain model, whose distribution does not depend on the
    position in a draft."""

    aux_layer_ids: tuple[int, ...] = ()  # the target's layers whose inputs the draft reads
    model_class: type = Transformer  # of a draft that decodes
    trained_class: type = Transformer  # of one in training
    drafter_class: type = ModelDraft

    def __init__(self, hf: dict, target: Config, depth: int):
        self.hf = hf
        self.target = target
        self.depth = depth
        self.num_positions = 1
        self.loss_weights = torch.ones(depth)  # by position in a draft

    def choose_ids(self, tokens: Tensor) -> None:
        """Choose the draft's ids, or its mask, by the text to learn, tokens (n,)."""

    def token_counts(self, tokens: Tensor) -> Tensor:
        """(V,): how often tokens (n,) have each id."""
        return torch.bincount(tokens.long(), minlength=self.target.vocab_size)

    def model_of(self, model_class: type) -> Transformer:
        return model_class(config_from_hf(self.hf))

    def new_model(self) -> Transformer:
        """A model in float32 for training, without initial weights."""
        return self.model_of(self.trained_class)

    def empty_model(self, dtype: torch.dtype, device: torch.device | str) -> Transformer:
        """A model as loading makes it, before its weights are read."""
        with torch.device("meta"):
            model = self.new_model().to(dtype)
        return allocate(model, device)

    def bind(self, draft: Transformer, target: Transformer) -> None:
        """Give the draft the modules of its target that it uses, and the ids that it drafts."""

    def copy_of(self, model: Transformer) -> Transformer:
        """A draft that decodes, with the weights, dtype and device of one in training."""
        draft = self.model_of(self.model_class).to(model.norm.weight)
        draft.load_state_dict(model.state_dict())
        return draft.requires_grad_(False).eval()

    def drafter(self, model: Transformer) -> Drafter:
        return self.drafter_class(self.copy_of(model))

    def states(
        self, draft: Transformer, target: Transformer, rows: Tensor, seed: int | None
    ) -> tuple[Tensor, Drafted]:
        """rows (B, T) -> the target's states (B, T, D), and the draft's. `seed` draws the positions
        to learn; None takes evenly spaced ones, for evaluation."""
        with torch.no_grad():
            h, streams = self.target_states(target, rows)
        with training_autocast(draft):
            pairs = self.pairs(draft, rows, streams, seed)
        all_states = []
        all_at = []
        positions = []
        for position, (at, states) in enumerate(pairs):
            all_states.append(states)
            all_at.append(at)
            positions.append(torch.full_like(at, position))
        return h, Drafted(torch.cat(all_states, dim=1), torch.cat(all_at), torch.cat(positions))

    def target_states(self, target: Transformer, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The target's states (B, T, D), and the inputs (B, T, D) of its layers `aux_layer_ids`."""
        B, T = rows.shape
        streams = {i: AuxHiddenStates(B, T, target.norm.weight) for i in self.aux_layer_ids}
        caches = None
        if streams:
            caches = target.make_caches(B, T)
            caches = caches._replace(aux_hidden_states=streams)
        pos = torch.arange(T, device=rows.device)
        h = target.hidden(rows, pos, caches)  # (B, T, D)
        # A layer may stand twice among the ids of a small target.
        return h, [streams[i].x for i in self.aux_layer_ids]

    def pairs(
        self, draft: Transformer, rows: Tensor, streams: list[Tensor], seed: int | None
    ) -> Pairs:
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

    def losses(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Log-probabilities (B, n, V) of the tokens that this kind drafts, by the target and the
        draft -> KL(target || draft) (B, n)."""
        losses = F.kl_div(log_q, log_p, log_target=True, reduction="none")
        return losses.sum(-1)

    def save(self, model: Transformer, folder: Path) -> None:
        save_model(model, folder, self.hf)


class TrainedPard(Masked, Transformer):
    """A PARD draft in training."""


class Pard(Kind):
    """A model with one more token, the mask."""

    trained_class = TrainedPard

    def __init__(self, hf: dict, target: Config, depth: int):
        self.mask_id = hf["vocab_size"]
        pard_keys = {"vocab_size": self.mask_id + 1, "pard_token": self.mask_id}
        super().__init__(hf | pard_keys, target, depth)
        self.num_positions = depth

    def drafter(self, model: Transformer) -> Drafter:
        return PardDraft(self.copy_of(model), self.mask_id)

    def pairs(
        self, draft: TrainedPard, rows: Tensor, streams: list[Tensor], seed: int | None
    ) -> Pairs:
        """The rows, and chains of K - 1 masks after T / (K - 1) of their positions. A token sees
        the tokens before it. A mask sees the tokens before its chain, and the masks before it."""
        B, T = rows.shape
        K = self.depth
        num_chains = max(1, T // max(1, K - 1))
        at = positions_to_learn(0, T - K, num_chains, seed)  # (n,)
        at = at.to(rows.device)
        text_pos = torch.arange(T, device=rows.device)
        ahead = torch.arange(1, K, device=rows.device)
        chain_pos = at[:, None] + ahead  # (n, K - 1)
        chain_pos = chain_pos.flatten()  # (n * (K - 1),)
        pos = torch.cat((text_pos, chain_pos))  # (N,)
        draft.mask = self.visible_to_chains(pos, at, T)
        masks = rows.new_full((B, len(chain_pos)), self.mask_id)
        tokens = torch.cat((rows, masks), dim=1)  # (B, N)
        states = draft.hidden(tokens, pos)  # (B, N, D)
        text_states = states[:, :T]
        chain_states = states[:, T:].unflatten(1, (len(at), K - 1))  # (B, n, K - 1, D)
        pairs = [(text_pos, text_states)]
        for i, mask_states in enumerate(chain_states.unbind(2), 1):
            pairs.append((at + i, mask_states))
        return pairs

    def visible_to_chains(self, pos: Tensor, at: Tensor, T: int) -> Tensor:
        """(N, N): what a query at pos (N,) may see. The first T are tokens, the others chains of
        masks after the positions at (n,)."""
        num_masks = self.depth - 1  # of a chain
        last_token = at.repeat_interleave(num_masks)
        last_token = torch.cat((pos[:T], last_token))  # (N,)
        is_earlier = pos <= last_token[:, None]  # (N, N)
        is_token = torch.arange(len(pos), device=pos.device) < T
        sees_token = is_token & is_earlier
        chain = torch.arange(len(at), device=pos.device)
        chain = chain.repeat_interleave(num_masks)
        chain = F.pad(chain, (T, 0), value=-1)  # (N,); -1 of a token
        is_same_chain = (chain == chain[:, None]) & ~is_token
        sees_mask = is_same_chain & (pos <= pos[:, None])
        return sees_token | sees_mask


class GrowingCache:
    """Keys and values of a draft's layer. Every call appends to them, and gradients flow through
    them."""

    max_seq_length = 0  # as in model.Caches: texts to train on are short ones for longrope

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None):
        self.layers = (self,)
        self.k = k
        self.v = v

    def update(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        if self.k is not None:
            k = torch.cat((self.k, k), 2)
            v = torch.cat((self.v, v), 2)
        self.k = k
        self.v = v

    def attend(self, q: Tensor, visible: AttentionMask, sinks: Tensor | None = None) -> Tensor:
        dtype = q.dtype
        k = self.k.to(dtype)
        v = self.v.to(dtype)
        mask = visible.mask.to(dtype)
        return attend(q, k, v, mask, sinks)


class Trained(Masked):
    """A draft in training that uses the target's embedding, which is not trained."""

    embeddings: list  # of the target's embedding: modules in a list are not submodules

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embeddings[0](tokens).to(self.norm.weight.dtype)


class Published(Kind):
    """A kind whose folder has the tensors of a published layout."""

    def tensors(self, model: Transformer) -> dict[str, Tensor]:
        return dict(model.stored_parts())

    def save(self, model: Transformer, folder: Path) -> None:
        tensors = self.tensors(model)
        copies = {name: x.detach().contiguous().clone() for name, x in tensors.items()}
        save_tensors(folder / "model.safetensors", copies)
        text = json.dumps(self.hf, indent=2) + "\n"
        write_atomically(folder / "config.json", lambda partial: partial.write_text(text))


class PairKind(Published):
    """A kind whose model reads pairs of a token and the state before it."""

    def __init__(self, hf: dict, target: Config, depth: int):
        super().__init__(hf, target, depth)
        self.num_positions = depth

    def pairs(
        self, draft: PairModel, rows: Tensor, streams: list[Tensor], seed: int | None
    ) -> Pairs:
        """`depth` steps over all positions at once, each from the previous step's states. A state
        is paired with the next token, so in step j the first j + 1 tokens of a row have none."""
        T = rows.size(1)
        dtype = draft.norm.weight.dtype
        pos = torch.arange(T, device=rows.device)
        caches = GrowingCache()
        pairs = []
        inputs = [x.to(dtype) for x in streams]
        state = draft.fuse(*inputs).to(dtype)  # (B, T, D)
        state = state.roll(1, dims=1)
        for step in range(self.depth):
            draft.mask = self.mask_of_step(step, pos)
            x = draft.stream(rows, pos.expand(rows.shape), caches, state)  # (B, T, D)
            h = draft.norm(x)
            pairs.append((pos[step + 1 :], h[:, step + 1 :]))
            output = h if draft.recycles_normed else x
            state = output.to(dtype).roll(1, dims=1)
        return pairs

    def mask_of_step(self, step: int, pos: Tensor) -> Tensor:
        """(T, (step + 1) T): a token sees the target's states up to where its draft begins, and one
        state of each later step."""
        distance = pos[:, None] - pos  # (T, T)
        is_target_state = distance >= step
        masks = [is_target_state & (pos > 0)]
        for later_step in range(1, step + 1):
            is_state = distance == step - later_step
            masks.append(is_state & (pos > later_step))
        masks[step] |= distance == 0  # a row without keys gives NaN
        return torch.cat(masks, dim=1)


class TrainedEagle(Trained, EagleModel):
    """An EAGLE-3 draft in training."""


class Eagle3(PairKind):
    """One layer in SafeAILab's layout, with a head for `vocab` of the target's tokens (default:
    all)."""

    model_class = EagleModel
    trained_class = TrainedEagle

    def __init__(self, hf: dict, target: Config, depth: int, vocab: int | None = None):
        eagle_keys = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": vocab or target.vocab_size,
            "tie_word_embeddings": False,
            "target_hidden_size": target.dim,
        }
        super().__init__(hf | eagle_keys, target, depth)
        self.ids = torch.arange(vocab or target.vocab_size)  # the target's id of each draft id
        self.eagle = eagle_of(dict(self.hf), target)
        self.hf["target_hidden_states"] = list(self.eagle.state_ids)
        self.aux_layer_ids = self.eagle.state_ids

    def model_of(self, model_class: type[EagleModel]) -> EagleModel:
        return model_class(config_from_hf(self.eagle.layer), self.eagle, False)

    def bind(self, draft: TrainedEagle, target: Transformer) -> None:
        draft.embeddings = [target.embed]
        device = target.norm.weight.device
        draft_ids = torch.full((self.target.vocab_size,), -1)  # by the target's id
        draft_ids[self.ids] = torch.arange(len(self.ids))
        draft.register_buffer("ids", draft_ids.to(device), persistent=False)

    def choose_ids(self, tokens: Tensor) -> None:
        """Choose the most frequent of `tokens` (n,), and among equal counts the smaller ids."""
        counts = self.token_counts(tokens)
        by_count = counts.argsort(descending=True, stable=True)
        most_frequent = by_count[: self.eagle.vocab_size]
        self.ids = most_frequent.sort().values

    def drafter(self, model: EagleModel) -> Drafter:
        draft = self.copy_of(model)
        draft.register_buffer("ids", model.ids, persistent=False)
        return PairDraft(draft)

    def logits(self, draft: TrainedEagle, states: Tensor) -> Tensor:
        with training_autocast(draft):
            return Transformer.head(draft, states)

    def select(self, x: Tensor) -> Tensor:
        if len(self.ids) == x.size(-1):
            return x
        return x[..., self.ids.to(x.device)]

    def tensors(self, model: EagleModel) -> dict[str, Tensor]:
        draft_ids = torch.arange(len(self.ids))
        has_draft_id = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        has_draft_id[self.ids] = True
        maps = {"d2t": self.ids - draft_ids, "t2d": has_draft_id}
        return model.parts_by_name("midlayer") | maps


class TargetHead(Published):
    """A kind that uses the target's embedding and head, which are not trained."""

    def bind(self, draft: Trained, target: Transformer) -> None:
        draft.embeddings = [target.embed]
        self.head = head_of(target)  # a packed head has no gradients

    def logits(self, draft: Trained, states: Tensor) -> Tensor:
        with training_autocast(draft):
            states = states.to(draft.norm.weight.dtype)
            return F.linear(states, self.head).float()


class TrainedMtp(Trained, MtpModel):
    """An MTP head in training."""


class MtpHead(PairKind, TargetHead):
    """A layer of the target's own kind, dense and without a window, in the layout of the target's
    family (drafts.mtp). `hf`: the target's config.json."""

    model_class = MtpModel
    trained_class = TrainedMtp
    drafter_class = MtpDraft

    def __init__(self, hf: dict, target: Config, depth: int):
        super().__init__(
            {key: value for key, value in hf.items() if key not in COUNTS}, target, depth
        )
        self.hf |= {
            COUNTS[0]: 1,
            "mtp_layer_types": ["full_attention"],
            "mtp_mlp_layer_types": ["dense"],
        }
        self.mtp = mtp_of(target)
        if len(self.mtp.names) < len(HEAD_MODULES):
            raise UserError(
                f"--kind mtp: a head for {target.family} has no norm of its own after its layer,"
                " and such heads cannot be trained"
            )
        self.hf |= switch_keys(self.mtp)
        self.config = head_config(Section(self.hf), target, self.mtp)
        self.aux_layer_ids = (target.n_layers,)

    def model_of(self, model_class: type[MtpModel]) -> MtpModel:
        return model_class(self.config, self.mtp, self.target.n_layers)

    def target_states(self, target: Transformer, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        h, streams = super().target_states(target, rows)
        return h, [h] if self.mtp.reads_normed else streams


class TrainedDFlash(Trained, DFlashModel):
    """A DFlash draft in training."""


class DFlash(TargetHead):
    """z-lab's layout: a block is a decided token and `depth` masks. The mask's id is the text's
    rarest token."""

    model_class = DFlashModel
    trained_class = TrainedDFlash
    drafter_class = DFlashDraft

    def __init__(self, hf: dict, target: Config, depth: int):
        dflash_keys = {
            "model_type": "qwen3",
            "num_target_layers": target.n_layers,
            "tie_word_embeddings": False,
        }
        super().__init__(hf | dflash_keys, target, depth)
        num_hidden_states = max(3, hf["num_hidden_layers"])
        self.hf |= self.layout_keys(default_layer_ids(target.n_layers, num_hidden_states))
        self.dflash, self.config = dflash_of(self.hf, target)
        self.num_positions = depth
        self.aux_layer_ids = self.dflash.state_ids
        # The paper's weights, with gamma = half a block.
        self.loss_weights = torch.exp(-torch.arange(depth) / ((depth + 1) / 2))

    def layout_keys(self, layer_ids: list[int]) -> dict:
        """The keys of config.json for a draft that reads the outputs of these layers."""
        return {
            "architectures": ["DFlashDraftModel"],
            "block_size": self.depth + 1,
            "dflash_config": {
                "mask_token_id": self.target.vocab_size - 1,
                "target_layer_ids": layer_ids,
            },
        }

    def choose_ids(self, tokens: Tensor) -> None:
        counts = self.token_counts(tokens)
        is_rarest = counts == counts.min()
        mask = int(is_rarest.nonzero().max())  # the last of the rarest
        options = self.hf.get("dflash_config", self.hf)
        options["mask_token_id"] = mask
        self.dflash = self.dflash._replace(mask=mask)

    def model_of(self, model_class: type[DFlashModel]) -> DFlashModel:
        return model_class(self.config, self.dflash)

    def pairs(
        self, draft: TrainedDFlash, rows: Tensor, streams: list[Tensor], seed: int | None
    ) -> Pairs:
        """Blocks of W tokens that begin at T / W positions. A block sees the context before its
        begin, and itself."""
        T = rows.size(1)
        W = self.dflash.block_size
        begin = positions_to_learn(1, T - self.depth, max(1, T // W), seed)  # (n,)
        begin = begin.to(rows.device)
        n = len(begin)
        offsets = torch.arange(W, device=rows.device)
        pos = begin[:, None] + offsets  # (n, W)
        pos = pos.flatten()  # (n*W,)
        tokens = rows[:, begin].repeat_interleave(W, dim=1)  # (B, n*W)
        is_mask = (offsets > 0).repeat(n)  # (n*W,)
        tokens = tokens.masked_fill(is_mask, self.dflash.mask)
        draft.mask = self.visible_to_blocks(begin, T)
        caches = self.cached_context(draft, rows, streams)
        states = draft.block_hidden(tokens, pos, caches)
        states = states.unflatten(1, (n, W))  # (B, n, W, D)
        drawing_states = states.unbind(2)[W - self.depth :]
        return [(begin + i, states) for i, states in enumerate(drawing_states)]

    def visible_to_blocks(self, begin: Tensor, T: int) -> Tensor:
        """(n*W, T + n*W): the context before a block's begin (n,), and the block itself."""
        device = begin.device
        context_pos = torch.arange(T, device=device)
        block = torch.arange(len(begin), device=device)
        block = block.repeat_interleave(self.dflash.block_size)  # (n*W,)
        is_before = context_pos < begin[block, None]  # (n*W, T)
        is_same_block = block == block[:, None]
        return torch.cat((is_before, is_same_block), dim=1)

    def cached_context(self, draft: TrainedDFlash, rows: Tensor, streams: list[Tensor]) -> Caches:
        """The draft's keys and values of the target's states at every position of the rows."""
        dtype = draft.norm.weight.dtype
        inputs = [x.to(dtype) for x in streams]
        context = draft.fuse(*inputs)  # (B, T, D)
        pos = torch.arange(rows.size(1), device=rows.device)
        keys_values = draft.keys_values(context, pos.expand(rows.shape), None)
        layers = tuple(GrowingCache(k, v) for k, v in keys_values)
        return Caches(layers, pos)


def head_of(target: Transformer) -> Tensor:
    """The matrix (V, D) of the target's head, which may be quantized or packed."""
    weight = target.norm.weight
    identity = torch.eye(len(weight)).to(weight)  # (D, D)
    with torch.no_grad():
        columns = target.head(identity)  # (D, V)
    return columns.T.to(weight.dtype)


class TrainedDSpark(Masked, DFlashModel):
    """A DSpark draft in training."""


class DSpark(DFlash):
    """DeepSpec's layout: a block is a decided token and `depth` - 1 masks. The folder has copies of
    the target's embedding and head, which are not trained, and no confidence head, because decoding
    here does not read it."""

    trained_class = TrainedDSpark

    def layout_keys(self, layer_ids: list[int]) -> dict:
        return {
            "architectures": ["Qwen3DSparkModel"],
            "layer_types": ["full_attention"] * self.hf["num_hidden_layers"],
            "block_size": self.depth,
            "mask_token_id": self.target.vocab_size - 1,
            "target_layer_ids": sorted(set(layer_ids)),  # DeepSpec's own model takes no id twice
            "num_anchors": 512,  # read by DeepSpec's own training alone
            "markov_rank": min(MAX_MARKOV_RANK, self.target.dim),
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
        }

    def new_model(self) -> DFlashModel:
        draft = super().new_model()
        draft.embed.requires_grad_(False)
        draft.lm_head.requires_grad_(False)
        return draft

    @torch.no_grad()
    def bind(self, draft: TrainedDSpark, target: Transformer) -> None:
        draft.embed.weight.copy_(embedding_of(target))
        draft.lm_head.weight.copy_(head_of(target))

    def pairs(
        self, draft: TrainedDSpark, rows: Tensor, streams: list[Tensor], seed: int | None
    ) -> Pairs:
        """The states (B, n, D + R) are DFlash's, each with the Markov embedding of the token whose
        successor it draws: the text's, in place of the one drawn before."""
        pairs = []
        for at, h in super().pairs(draft, rows, streams, seed):
            before = draft.markov_head.markov_w1(rows[:, at])  # (B, n, R)
            pairs.append((at, torch.cat((h, before), dim=-1)))
        return pairs

    def logits(self, draft: TrainedDSpark, states: Tensor) -> Tensor:
        h, before = states.split((self.config.dim, self.dflash.markov_rank), dim=-1)
        with training_autocast(draft):
            return draft.head(h) + draft.markov_head.markov_w2(before)

    def losses(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """DeepSpec's weights: 0.9 for the L1 distance of the distributions, which is twice the
        probability of rejection, and 0.1 for cross-entropy. KL(target || draft) stands for the
        latter: over text that the target writes, both have the same mean gradient."""
        distance = (log_p.exp() - log_q.exp()).abs().sum(-1)
        return 0.9 * distance + 0.1 * super().losses(log_p, log_q)


def default_layer_ids(n_target: int, n_draft: int) -> list[int]:
    """The target's middle layer for a draft of one layer, else n_draft layers, evenly from 1 to
    n_target - 3."""
    if n_draft == 1:
        return [n_target // 2]
    return [round(1 + i * (n_target - 4) / (n_draft - 1)) for i in range(n_draft)]


KINDS = {
    "model": Kind,
    "pard": Pard,
    "eagle3": Eagle3,
    "mtp": MtpHead,
    "dflash": DFlash,
    "dspark": DSpark,
}


def tokens_per_round(alphas: Sequence[float], k: int) -> float:
    """Expected tokens of a round with k drafted ones. alphas[i] is the acceptance of the i-th if
    all before it are accepted; positions beyond the list have its last value."""
    num_beyond = k - len(alphas)
    probs = [*alphas[:k]]
    probs += [alphas[-1]] * num_beyond
    return 1 + sum(itertools.accumulate(probs, operator.mul))
