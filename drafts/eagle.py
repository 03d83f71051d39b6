"""EAGLE-3 (arXiv:2503.01840): one layer drafts from the target's hidden states before each token.

A token is paired with a state of the position before it (hidden_states.PairModel). For a decided
token `fuse` makes it from several of the target's states; for a drafted token it is the draft's own
from the pass before. Attention reads token and state side by side, so the inputs of its product
for queries, keys and values are twice as wide, and the state alone is the residual stream.

    EagleModel      pairs (token, state before it) -> logits at the target's ids; its drafter is a
                    PairDraft
    EagleSource     a folder in any of three published layouts: SafeAILab's
                    (github.com/SafeAILab/EAGLE, tensors `midlayer.*`), speculators'
                    (github.com/vllm-project/speculators, `layers.0.*`), and DeepSpec's
                    (github.com/deepseek-ai/DeepSpec, likewise, with a layer of Qwen3);  eagle_of
                    and state_ids_of read its config.json
"""

import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafts.hidden_states import HiddenStateSource, PairDraft, PairModel
from drafts.published import (
    STATES_KEY,
    check_target,
    inner_section,
    layer_config,
    neighbours,
    read_state_ids,
)
from loading.checkpoint import Checkpoint
from loading.config import Section
from model import Caches, Config, Linear, RMSNorm

# Other programs' keys of config.json that name the target's layers.
LAYER_ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OPEN_SWITCHES = ("norm_before_residual", "norm_output")  # no tensor tells how they were trained


class Eagle(NamedTuple):
    layer: dict  # config.json of a Llama or Qwen3 with one layer
    vocab_size: int  # of the draft's head
    state_ids: tuple[int, ...]  # of the target, which go into `fc`
    target_dim: int
    norm_before_residual: bool  # the residual stream begins with the normed state
    norm_before_fc: bool  # one norm over all inputs of `fc`
    fc_norm: bool  # one norm for each state that enters `fc`
    norm_output: bool  # a drafted token's state is normed, as the head's input is
    assumption: str = ""  # how config.json was read where it leaves `state_ids` open


class EagleModel(PairModel):
    """One block whose attention reads a token's embedding and a state (B, T, D), the target's or
    the draft's."""

    def __init__(
        self,
        config: Config,
        eagle: Eagle,
        has_embed: bool,
    ):
        super().__init__(config, eagle.vocab_size)
        D = config.dim
        eps = config.norm_eps
        num_inputs = len(eagle.state_ids) * eagle.target_dim
        self.eagle = eagle
        self.recycles_normed = eagle.norm_output
        self.state_ids = eagle.state_ids
        attention = self.layers[0].attention
        attention.qkv = Linear(2 * D, attention.qkv.out_features, bias=config.qkv_bias)
        if not has_embed:
            self.embed = None
        self.layers[0].hidden_norm = RMSNorm(D, eps)
        self.fc = Linear(num_inputs, D, bias=False)
        self.input_norm = RMSNorm(num_inputs, eps) if eagle.norm_before_fc else nn.Identity()
        num_norms = len(eagle.state_ids) if eagle.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(eagle.target_dim, eps) for _ in range(num_norms))

    def fuse(self, *states: Tensor) -> Tensor:
        """The target's states (B, T, D of the target) -> one state (B, T, D)."""
        if self.eagle.fc_norm:
            states = [norm(x) for norm, x in zip(self.fc_norm, states)]
        x = torch.cat(states, dim=-1)
        return self.fc(self.input_norm(x))

    def stream(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches,
        state: Tensor,
    ) -> Tensor:
        layer = self.layers[0]
        embedded = layer.attention_norm(self.embedded(tokens))
        normed = layer.hidden_norm(state)
        inputs = torch.cat((embedded, normed), dim=-1)  # (B, T, 2D)
        visible = self.visible_by_window(pos, caches, inputs.dtype)[self.windows[0]]
        rope = self.rope(pos, caches.max_seq_length)
        x = normed if self.eagle.norm_before_residual else state
        x = x + layer.attention(inputs, pos, rope, visible, caches.layers[0])
        return x + layer.ffn(layer.ffn_norm(x))

    def fill(self, checkpoint: Checkpoint, target: Config) -> None:
        """As in other models, under either name of the first layer."""
        is_safeai = any(name.startswith("midlayer.") for name in checkpoint.tensors)
        super().fill(checkpoint, target, "midlayer" if is_safeai else "layers.0")
        if self.eagle.assumption:
            note = f"{self.eagle.assumption}. {self.advice}"
            print(f"{checkpoint.path}: {note}", file=sys.stderr)


class EagleSource(HiddenStateSource):
    """An EAGLE-3 folder in any of these layouts. UserError for a wrong config.json."""

    draft_class = PairDraft

    def check(self, config: Config) -> None:
        hf = self.origin.hf
        self.eagle = eagle_of(hf, config)
        layer = Section(self.eagle.layer)
        self.config = layer_config(layer, Section(hf))
        if not {"embed_tokens.weight", "lm_head.weight"} <= self.origin.tensors.keys():
            check_target(layer, {"hidden_size": config.dim})  # it lends what the folder lacks

    def choices(self) -> dict[str, list]:
        L = self.target_config.n_layers
        readings = neighbours(self.eagle.state_ids, L)
        default = default_state_ids(L)
        num_states = len(self.eagle.state_ids)  # that `fc` reads
        if L >= 3 and len(default) == num_states and default not in readings:
            readings.append(default)
        settings = settings_of(self.origin.hf)
        unset_keys = [key for key in OPEN_SWITCHES if settings.get(key) is None]
        return {STATES_KEY: readings, **{key: [False, True] for key in unset_keys}}

    def new_model(self) -> EagleModel:
        return EagleModel(self.config, self.eagle, has_embed=True)


def eagle_of(hf: dict, target: Config) -> Eagle:
    """The draft's settings, for a target of this Config. UserError names the unsupported key and
    value."""
    hf = Section(hf)
    layer = inner_section(hf, "transformer_layer_config") or Section(hf)
    layer["tie_word_embeddings"] = False  # the head is the folder's own, or the target's
    layer["model_type"] = layer.get("model_type") or "llama"
    if layer["model_type"] not in ("llama", "qwen3"):
        raise layer.refused(
            "model_type", "is not supported as an EAGLE-3 draft; supported: 'llama', 'qwen3'"
        )
    if layer.size("num_hidden_layers") != 1:
        raise layer.refused("num_hidden_layers", "is not supported; an EAGLE-3 draft has 1 layer")
    check_target(hf, {"target_hidden_size": target.dim})
    vocab_size = hf.size("draft_vocab_size", layer.size("vocab_size"))
    settings = settings_of(hf)
    if settings.get("use_aux_hidden_state") is False:
        raise settings.refused("use_aux_hidden_state", "is not supported; only true is")
    state_ids, assumption = state_ids_of(settings, target)
    switches = {key: settings.flag(key) for key in SWITCHES}
    return Eagle(dict(layer), vocab_size, state_ids, target.dim, **switches, assumption=assumption)


def settings_of(hf: dict) -> Section:
    """The keys of config.json. ModelOpt writes those of the draft into eagle_config."""
    settings = Section(inner_section(Section(hf), "eagle_config"))
    settings |= {key: value for key, value in hf.items() if value is not None}
    return settings


def default_state_ids(L: int) -> list[int]:
    """Those of a draft for a target of L >= 3 layers whose config.json names none."""
    return [2, L // 2, L - 3]


def state_ids_of(settings: Section, target: Config) -> tuple[tuple[int, ...], str]:
    """The states of the target that the draft reads, and the assumption that this rests on, or "".

    DeepSpec's `target_layer_ids` are outputs. Without a key the states are 2, L // 2 and L - 3.
    Other published files disagree on whether ids count layer inputs or outputs: a list that starts
    with 1 is read as outputs (except for gpt-oss), any other as inputs, as in SGLang (pull requests
    25454 and 32334, which measured the acceptance of published heads). vLLM always reads inputs.
    """
    L = target.n_layers
    if settings.get(STATES_KEY):
        return read_state_ids(settings, STATES_KEY, L), ""
    if settings.get("target_layer_ids"):
        return read_state_ids(settings, "target_layer_ids", L, are_outputs=True), ""
    key = next((key for key in LAYER_ID_KEYS if settings.get(key)), None)
    if key is None and L >= 3:
        return tuple(default_state_ids(L)), "its config.json names no layers of the target"
    state_ids = read_state_ids(settings, key or STATES_KEY, L)  # UserError without any key
    if state_ids[0] != 1:
        return state_ids, ""
    assumption = f"{key} = {settings[key]} begins with 1"
    if target.family == "gpt_oss":
        return state_ids, f"{assumption}, and is read as in other drafts for gpt-oss"
    state_ids = read_state_ids(settings, key, L, are_outputs=True)
    return state_ids, f"{assumption}, and is read as outputs of layers from 0"
