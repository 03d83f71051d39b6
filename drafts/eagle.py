"""EAGLE-3 (arXiv:2503.01840): one layer drafts from the target's hidden states before each token.

    EagleModel      pairs (token, state before it) -> logits at the target's ids
    EagleDraft      its drafter
    eagle_of        reads the config.json of three published layouts: SafeAILab's
                    (github.com/SafeAILab/EAGLE, tensors `midlayer.*`), speculators'
                    (github.com/vllm-project/speculators, `layers.0.*`), and DeepSpec's
                    (github.com/deepseek-ai/DeepSpec, likewise, with a layer of Qwen3)
    check           reads the config.json of a folder in any of these layouts

A token is paired with the hidden state of the position before it (hidden_states.PairModel).
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafts.hidden_states import (
    PairDraft,
    PairModel,
    check_target,
    layer_config,
    loader,
    read_layer_ids,
)
from loading.checkpoint import Checkpoint
from loading.config import Section
from model import Caches, Config, Linear, RMSNorm

# Keys of config.json that name the target's layers. The first is our own, because the others count
# inputs in one file and outputs in the next.
STATES_KEY = "target_hidden_states"
OUTER_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle(NamedTuple):
    layer: dict  # config.json of a Llama or Qwen3 with one layer
    vocab_size: int  # of the draft's head
    # The target's layers whose inputs go into `fc`; their number is the last output.
    aux_layer_ids: tuple[int, ...]
    target_dim: int
    norm_before_residual: bool  # the residual stream begins with the normed state
    norm_before_fc: bool  # one norm over all inputs of `fc`
    fc_norm: bool  # a norm for every layer's input of `fc`
    norm_output: bool  # a drafted token's state is normed, as the head's input is
    assumption: str = ""  # how config.json was read where it leaves `aux_layer_ids` open


class EagleModel(PairModel):
    """One block whose attention reads a token's embedding and a state (B, T, D), the target's or
    the draft's."""

    layers_key = f'"{STATES_KEY}": [...]'

    def __init__(
        self,
        config: Config,
        eagle: Eagle,
        has_embed: bool,
    ):
        super().__init__(config, eagle.vocab_size)
        D = config.dim
        eps = config.norm_eps
        num_inputs = len(eagle.aux_layer_ids) * eagle.target_dim
        self.eagle = eagle
        self.aux_layer_ids = eagle.aux_layer_ids
        attention = self.layers[0].attention
        attention.qkv = Linear(2 * D, attention.qkv.out_features, bias=config.qkv_bias)
        if not has_embed:
            self.embed = None
        self.layers[0].hidden_norm = RMSNorm(D, eps)
        self.fc = Linear(num_inputs, D, bias=False)
        self.input_norm = RMSNorm(num_inputs, eps) if eagle.norm_before_fc else nn.Identity()
        num_norms = len(eagle.aux_layer_ids) if eagle.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(eagle.target_dim, eps) for _ in range(num_norms))

    def fuse(self, *aux_states: Tensor) -> Tensor:
        """The residual streams (B, T, D of the target) that entered the auxiliary layers -> a state
        (B, T, D)."""
        if self.eagle.fc_norm:
            aux_states = [norm(x) for norm, x in zip(self.fc_norm, aux_states)]
        x = torch.cat(aux_states, dim=-1)
        return self.fc(self.input_norm(x))

    @property
    def recycles_normed(self) -> bool:
        return self.eagle.norm_output

    def stream(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches,
        state: Tensor,
    ) -> Tensor:
        """tokens and pos (B, T), the state (B, T, D) before each token -> the block's output (B, T,
        D), not normed."""
        layer = self.layers[0]
        embedded = layer.attention_norm(self.embedded(tokens))
        normed = layer.hidden_norm(state)
        inputs = torch.cat((embedded, normed), dim=-1)  # (B, T, 2D)
        visible = self.visible_by_window(pos, caches, inputs.dtype)[self.windows[0]]
        x = normed if self.eagle.norm_before_residual else state
        x = x + layer.attention(
            inputs, pos, self.rope(pos, caches.max_seq_length), visible, caches.layers[0]
        )
        return x + layer.ffn(layer.ffn_norm(x))

    def fill(self, checkpoint: Checkpoint, target: Config) -> None:
        """As in other models, in either layout."""
        is_safeai = any(name.startswith("midlayer.") for name in checkpoint.tensors)
        super().fill(checkpoint, target, "midlayer" if is_safeai else "layers.0")
        if self.eagle.assumption:
            note = f"{self.eagle.assumption}. {self.advice}"
            print(f"{checkpoint.path}: {note}", file=sys.stderr)


class EagleDraft(PairDraft):
    """The drafter of an EagleModel."""


def check(checkpoint: Checkpoint, config: Config) -> Callable[..., EagleDraft]:
    """Check an EAGLE-3 folder and return its loader (drafts.registry.folder_check). UserError for
    a wrong config.json."""
    eagle = eagle_of(checkpoint.hf, config)
    layer = layer_config(Section(eagle.layer), Section(checkpoint.hf))
    return loader(checkpoint, lambda: EagleModel(layer, eagle, True), EagleDraft)


def eagle_of(hf: dict, target: Config) -> Eagle:
    """The draft's settings, for a target of this Config. UserError names the unsupported key and
    value."""
    hf = Section(hf)
    layer = Section(hf)
    if hf.get("transformer_layer_config"):
        layer = Section(hf["transformer_layer_config"])
        layer.prefix = "transformer_layer_config."
    layer["tie_word_embeddings"] = False  # the draft's head is stored
    if layer.setdefault("model_type", "llama") not in ("llama", "qwen3"):
        supported = "supported: 'llama', 'qwen3'"
        raise layer.refused("model_type", f"is not supported as an EAGLE-3 draft; {supported}")
    check_target(hf, {"target_hidden_size": target.dim})
    vocab_size = hf.size("draft_vocab_size", layer.size("vocab_size"))
    # ModelOpt writes the other keys into eagle_config.
    settings = Section(hf.get("eagle_config") or {})
    settings |= {key: value for key, value in hf.items() if value is not None}
    if settings.get("use_aux_hidden_state") is False:
        raise settings.refused("use_aux_hidden_state", "is not supported; only true is")
    aux_layer_ids, assumption = aux_layer_ids_of(settings, target)
    switches = [settings.flag(key) for key in SWITCHES]
    return Eagle(dict(layer), vocab_size, aux_layer_ids, target.dim, *switches, assumption)


def aux_layer_ids_of(settings: Section, target: Config) -> tuple[tuple[int, ...], str]:
    """The layers whose inputs the draft reads, and the assumption that this rests on, or "".

    DeepSpec's `target_layer_ids` are outputs. Without a key they default to 2, L // 2 and L - 3.
    Other published files disagree on whether ids count layer inputs or outputs: a list that starts
    with 1 is read as outputs (except for gpt-oss), any other as inputs, as in SGLang (pull requests
    25454 and 32334, which measured the acceptance of published heads). vLLM always reads inputs.
    """
    L = target.n_layers
    if settings.get("target_layer_ids"):
        outputs = read_layer_ids(settings, "target_layer_ids", L - 1)
        return tuple(i + 1 for i in outputs), ""
    keys = [key for key in (STATES_KEY, *OUTER_KEYS) if settings.get(key)]
    if not keys:
        return (2, L // 2, L - 3), "its config.json names no layers of the target"
    key = keys[0]
    layer_ids = read_layer_ids(settings, key, L)
    if key == STATES_KEY or layer_ids[0] != 1:
        return layer_ids, ""
    assumption = f"{key} = {settings[key]} begins with 1"
    if target.family == "gpt_oss":
        return layer_ids, f"{assumption}, and is read as in other drafts for gpt-oss"
    outputs = read_layer_ids(settings, key, L - 1)
    return tuple(i + 1 for i in outputs), f"{assumption}, and is read as outputs of layers from 0"
