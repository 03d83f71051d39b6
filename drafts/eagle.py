"""EAGLE-3 (arXiv:2503.01840): one layer drafts from the target's hidden states before each token.

    EagleModel      pairs (token, state before it) -> logits at the target's ids
    EagleDraft      pairs decided tokens with the target's states, drafted ones with the draft's
    eagle_of        reads the config.json of two published layouts: SafeAILab's (github.com/SafeAILab/EAGLE, tensors
                    `midlayer.*`), and speculators' (github.com/vllm-project/speculators, `layers.0.*`)
    check, load     read a folder of either layout

Published code puts a pair at the position of its state, this file at that of its token, one later. RoPE gives the same
scores, and the pair is cached and prefilled like a token. Position 0 has no pair and is never attended to. This file
does not know sampling or training.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafts.hidden_states import AcceptanceWatch, record_hidden_states
from drafts.vocabulary import spread
from loading.checkpoint import DTYPES, allocate, pieces
from loading.config import Section, config_from_hf
from loading.files import check_headers, open_shards, read_json, shards, tensor_reader
from loading.plain_files import error_prefix
from model import Caches, Config, Linear, RMSNorm, Transformer
from speculative import ModelDraft
from weights.walker import quantized_copy

# A key of our own, because those of others count inputs in one file and outputs in the next.
STATES_KEY = "target_hidden_states"
OTHER_STATES = f'if it was trained on others, name them in its config.json as "{STATES_KEY}": [...], where 0 is the'
OTHER_STATES += " embedding and i the output of the i-th layer"


class Eagle(NamedTuple):
    layer: dict  # config.json of a Llama with one layer
    vocab_size: int  # of the draft's head
    aux_layer_ids: tuple[int, ...]  # the target's layers whose inputs go into `fc`; their number is the last output
    target_dim: int
    norm_before_residual: bool  # the residual stream begins with the normed state
    norm_before_fc: bool  # one norm over all inputs of `fc`
    fc_norm: bool  # a norm for every layer's input of `fc`
    norm_output: bool  # a drafted token's state is normed, as the head's input is
    assumption: str = ""  # how config.json was read where it leaves `aux_layer_ids` open


SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class EagleModel(Transformer):
    """One block whose attention reads a token's embedding and a state (B, T, D), the target's or the draft's."""

    def __init__(self, config: Config, eagle: Eagle, has_embed: bool):
        super().__init__(config)
        D, eps, n = config.dim, config.norm_eps, len(eagle.aux_layer_ids)
        self.eagle, attention = eagle, self.layers[0].attention
        attention.qkv = Linear(2 * D, attention.qkv.out_features, bias=config.qkv_bias)
        self.lm_head = Linear(D, eagle.vocab_size, bias=False)
        self.embed = self.embed if has_embed else None  # EagleDraft.setup sets the target's
        self.hidden_norm, self.fc = RMSNorm(D, eps), Linear(n * eagle.target_dim, D, bias=False)
        self.input_norm = RMSNorm(n * eagle.target_dim, eps) if eagle.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(eagle.target_dim, eps) for _ in eagle.aux_layer_ids if eagle.fc_norm)

    def fuse(self, *aux_states: Tensor) -> Tensor:
        """The residual streams (B, T, D of the target) that entered the auxiliary layers -> a state (B, T, D)."""
        aux_states = [norm(x) for norm, x in zip(self.fc_norm, aux_states)] if self.eagle.fc_norm else aux_states
        x = torch.cat(aux_states, dim=-1)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def visible_by_window(self, pos: Tensor, caches: Caches | None, dtype: torch.dtype) -> dict:
        """As in any model, but position 0, which has no pair, is never visible."""
        if caches is not None:
            caches = caches._replace(key_pos=torch.where(caches.key_pos == 0, 2**30, caches.key_pos))
        return super().visible_by_window(pos, caches, dtype)

    def stream(self, tokens: Tensor, pos: Tensor, caches: Caches | None, state: Tensor) -> Tensor:
        """tokens and pos (B, T), the state (B, T, D) before each token -> the block's output (B, T, D), not normed."""
        (layer,), embedded, normed = self.layers, self.embed(tokens), self.hidden_norm(state)
        inputs = torch.cat((layer.attention_norm(embedded), normed), dim=-1)  # (B, T, 2D)
        visible = self.visible_by_window(pos, caches, inputs.dtype)[self.windows[0]]
        cache = None if caches is None else caches.layers[0]
        x = normed if self.eagle.norm_before_residual else state
        x = x + layer.attention(inputs, pos, self.rope(pos), visible, cache)
        return x + layer.ffn(layer.ffn_norm(x))

    def hidden(self, tokens: Tensor, pos: Tensor, caches: Caches) -> Tensor:
        """Normed states (B, T, D) of decided tokens. `caches.aux_hidden_states` has the target's streams."""
        pos = pos.expand(tokens.shape)
        return self.norm(self.stream(tokens, pos, caches, self.target_states(caches, pos)))

    def target_states(self, caches: Caches, pos: Tensor) -> Tensor:
        """The state (B, T, D) before each token at pos (B, T)."""
        return self.fuse(*(caches.aux_hidden_states[i].read((pos - 1).clamp(min=0)) for i in self.eagle.aux_layer_ids))

    def head(self, h: Tensor) -> Tensor:
        """h (..., D) -> logits (..., V of the target), -inf where the draft has no such token."""
        return spread(super().head(h), self.ids)


class EagleDraft(ModelDraft):
    """A ModelDraft whose first pass takes as many decided tokens as a round can decide, paired with the target's
    states. A later pass takes one drafted token, paired with the draft's state from the pass before."""

    def setup(self, state: nn.Module, k_max: int, target, maybe_compile: Callable) -> None:
        like = target.model.norm.weight
        states = f"The draft reads hidden states {list(self.model.eagle.aux_layer_ids)} of the target; {OTHER_STATES}"
        self.acceptance_watch = AcceptanceWatch(states)
        streams = record_hidden_states(self.model.eagle.aux_layer_ids, state, target)
        self.model.embed = self.model.embed or target.model.embed
        super().setup(state, k_max, target, maybe_compile)
        self.runner.caches, self.num_input_tokens = self.runner.caches._replace(aux_hidden_states=streams), k_max + 1
        last_state = torch.zeros(state.pos.size(0), 1, self.model.config.dim, dtype=like.dtype, device=like.device)
        self.register_buffer("last_state", last_state, persistent=False)  # (B, 1, D) of the last input token

    def observe(self, overlap: float) -> None:
        self.acceptance_watch.observe(overlap)

    def hidden(self, caches: Caches, state: nn.Module, last: Tensor, T: int) -> Tensor:
        """Normed states (B, T, D) at the T positions up to `last` (B,). T = 1 is a drafted token."""
        model, (tokens, pos) = self.model, self.inputs(state, last, T)
        x = model.stream(tokens, pos, caches, self.last_state if T == 1 else model.target_states(caches, pos))
        h = model.norm(x)
        self.last_state.copy_((h if model.eagle.norm_output else x)[:, -1:])
        return h


@torch.no_grad()
def load_eagle(folder: Path, target: Transformer) -> EagleModel:
    """An EAGLE-3 folder for this target, on its device, in its dtype, not packed. ValueError names file and key, or the
    tensor, that does not fit."""
    config, like = target.config, target.norm.weight
    eagle, layer = read_eagle(folder, read_json(folder / "config.json"), config)
    readers = open_shards(shards(folder))
    has_embed, num_ids, V = "embed_tokens.weight" in readers, eagle.vocab_size, config.vocab_size
    if not has_embed and layer.dim != config.dim:
        raise ValueError(f"{folder}: no embed_tokens.weight, and hidden_size = {layer.dim} is not the target's")
    with torch.device("meta"):
        model = EagleModel(layer, eagle, has_embed).to(like.dtype)
    allocate(model, like.device)
    parts = dict(tensors_of(model, "midlayer" if any(name.startswith("midlayer.") for name in readers) else "layers.0"))
    expected = {name: (tuple(part.shape), DTYPES) for name, part in parts.items()}
    maps = {"d2t": ((num_ids,), ("I64", "I32")), "t2d": ((layer.vocab_size,), ("BOOL", "U8"))}
    maps = {name: form for name, form in maps.items() if name in readers or (name == "d2t" and num_ids != V)}
    check_headers(folder, expected | maps, readers, False)
    read = tensor_reader(readers)
    for name, part in parts.items():
        part.copy_(read(name))
    target_ids = torch.arange(num_ids) + (read("d2t").long() if "d2t" in maps else 0)
    if target_ids.min() < 0 or target_ids.max() >= V or len(target_ids.unique()) < num_ids:
        reached = f"{len(target_ids.unique())} ids from {target_ids.min()} to {target_ids.max()}"
        raise ValueError(f"{folder}: d2t leads {num_ids} tokens to {reached}; it needs {num_ids} from 0 to {V - 1}")
    ids = torch.full((V,), -1).scatter(0, target_ids, torch.arange(num_ids))
    model.register_buffer("ids", ids.to(like.device), persistent=False)
    return model


def tensors_of(model: EagleModel, layer: str) -> Iterator[tuple[str, Tensor]]:
    """(a tensor's name in a layout whose block is called `layer`, the part of a parameter that it fills)."""
    for name, parameter in model.named_parameters():
        if name.startswith(("fc", "hidden_norm", "input_norm")):
            yield name.replace("hidden_norm", f"{layer}.hidden_norm"), parameter
            continue
        for source, part in pieces(model.config, name, parameter):
            yield source.removeprefix("model.").replace("layers.0", layer), part


def check(folder: Path, hf: dict, config: Config) -> Callable[..., EagleDraft]:
    """Check an EAGLE-3 folder and return its loader (drafts.registry.FOLDERS). ValueError for a wrong config.json."""
    read_eagle(folder, hf, config)
    return functools.partial(load, folder)


def load(folder: Path, target: Transformer, tokenizer, *, quantize: str | None, sharded: bool, **options) -> EagleDraft:
    """An EAGLE-3 folder for this target, not packed, in the target's dtype."""
    if sharded:
        raise ValueError(f"--draft_tp sharded: {folder} is an EAGLE-3 draft, which every rank holds in full")
    draft = load_eagle(folder, target)
    if draft.eagle.assumption:
        print(f"{folder}: {draft.eagle.assumption}; {OTHER_STATES}", file=sys.stderr)
    return EagleDraft(quantized_copy(draft, quantize) if quantize else draft)


def read_eagle(folder: Path, hf: dict, config: Config) -> tuple[Eagle, Config]:
    """The draft's settings and Config, for a target of this Config. ValueError names the file."""
    with error_prefix(folder / "config.json"):
        eagle = eagle_of(hf, config)
        return eagle, config_from_hf(eagle.layer)


def eagle_of(hf: dict, target: Config) -> Eagle:
    """The draft's settings, for a target of this Config. ValueError names the unsupported key and value."""
    hf = Section(hf)
    for key in ("transformer_layer_config", "eagle_config"):
        if not isinstance(hf.get(key) or {}, dict):
            raise hf.refused(key, "must be an object")
    layer = Section(hf.get("transformer_layer_config") or hf)
    layer.prefix = "transformer_layer_config." if layer.keys() != hf.keys() else ""
    layer["tie_word_embeddings"] = False  # the draft's head is stored
    if layer.size("num_hidden_layers", 1) != 1:
        raise layer.refused("num_hidden_layers", "is not supported; an EAGLE-3 draft of 1 layer is")
    if layer.setdefault("model_type", "llama") != "llama":
        raise layer.refused("model_type", "is not supported as an EAGLE-3 draft; supported: 'llama'")
    target_dim = hf.size("target_hidden_size", target.dim)
    if target_dim != target.dim:
        raise hf.refused("target_hidden_size", f"is of another target: this one has hidden_size = {target.dim}")
    nested = hf.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError("config.json: eagle_config.use_aux_hidden_state = False is not supported; only true is")
    aux_layer_ids, assumption = aux_layer_ids_of(hf, nested, target)
    draft_vocab_size = hf.size("draft_vocab_size", layer.size("vocab_size"))
    # ModelOpt writes the switches into eagle_config.
    switches = {key: switch_of(hf, nested, key) for key in SWITCHES}
    return Eagle(dict(layer), draft_vocab_size, aux_layer_ids, target_dim, **switches, assumption=assumption)


def switch_of(hf: Section, nested: dict, key: str) -> bool:
    """A switch of config.json, or of its eagle_config."""
    section = hf if hf.get(key) is not None else Section(nested)
    return section.flag(key)


def stored_layer_ids(hf: Section, nested: dict) -> tuple[str, object]:
    """The key that names the target's layers, and its value, None without one."""
    names = (STATES_KEY, "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    values = {name: hf.get(name) or nested.get(name) for name in names}
    key = next((name for name in names if values[name]), names[1])
    return key, values[key]


def aux_layer_ids_of(hf: Section, nested: dict, target: Config) -> tuple[tuple[int, ...], str]:
    """The layers whose inputs the draft reads, and the assumption that this rests on, or "".

    Without a key they are 2, L // 2 and L - 3. Ids that begin with 1 are outputs, except those for gpt-oss, and others
    are inputs (SGLang, pull requests 25454 and 32334, which measured the acceptance of published heads). vLLM reads
    inputs alone.
    """
    key, layer_ids = stored_layer_ids(hf, nested)
    L = target.n_layers
    is_guess = layer_ids is None
    layer_ids = [2, L // 2, L - 3] if is_guess else layer_ids
    is_valid = isinstance(layer_ids, list) and len(layer_ids) > 0
    if not is_valid or not all(type(i) is int and 0 <= i <= L for i in layer_ids):
        raise ValueError(f"config.json: {key} = {layer_ids!r} must be hidden states of the target, 0 to {L}")
    if is_guess:
        message = "its config.json names no layers of the target, so the draft reads hidden states"
        return tuple(layer_ids), f"{message} {layer_ids}"
    if key == STATES_KEY or layer_ids[0] != 1:
        return tuple(layer_ids), ""
    if target.family == "gpt_oss":
        return tuple(layer_ids), f"{key} = {layer_ids} is read as hidden states, as in other drafts for gpt-oss"
    outputs = [i + 1 for i in layer_ids]
    if max(outputs) > L:
        reason = f"begins with 1, which counts outputs of layers 0 to {L - 1}"
        raise ValueError(f"config.json: {key} = {layer_ids!r} {reason}")
    return tuple(outputs), f"{key} = {layer_ids} begins with 1 and is read as outputs, hidden states {outputs}"
