"""MTP heads ("NextN"): one decoder layer in the target's own files drafts from the target's last
state before each token.

    Mtp         how a family's head is stored and fed;  HEADS  model_type -> Mtp
    MtpModel    pairs (token, state before it) -> logits
    mtp_of      the Mtp of a target's family;  switch_keys  of config.json
    MtpSource   a folder with a head, whose config.json head_of reads

With t a token and h the state before it,

    m = block(eh_proj(cat(enorm(embed(t)), hnorm(h))))
    logits of the token after t = lm_head(norm(m))

`embed` and `lm_head` are the target's; copies of them inside the head's layer are not read. A
drafted token is paired with the head's own state in place of the target's, so one head drafts any
number of tokens. The first pair is of t_1, whose embedding vLLM zeroes; here it is read.

Whether a state is normed decides about acceptance alone, and implementations disagree. Sources:
transformers, modeling_layers.py (GLM-4.5, Mellum 2); exllamav3, hy_v3_mtp.py and mimo_mtp.py (vLLM
recycles MiMo's state normed); vLLM, exaone_moe_mtp.py; FastDeploy, ernie4_5_mtp.py; llama.cpp,
glm4-moe.cpp.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.errors import UserError
from drafts.hidden_states import TRY_VARIANTS, HiddenStateSource, PairDraft, PairModel
from drafts.published import check_target, fill_parts
from loading.checkpoint import Checkpoint
from loading.config import Section
from loading.families import FAMILIES
from loading.weight_names import pieces
from model import Caches, Config, Linear, RMSNorm, Transformer

HEAD_MODULES = ("enorm", "hnorm", "eh_proj", "norm")  # what a head has besides its layer
COPIES = ("embed_tokens.weight", "head.weight")  # ends of the names of copies of the target's
# Keys of config.json that declare heads, in transformers' two spellings and MiniMax's.
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
SWITCHES = ("state_first", "reads_normed", "recycles_normed")  # of Mtp
LAYER_TYPES = ("full_attention", "sliding_attention")
MLP_TYPES = ("dense", "sparse")


class Mtp(NamedTuple):
    """A family's MTP head; the defaults are those of most."""

    prefix: str = "model.layers.{}."  # of its tensors; {}: the number of the target's layers
    # The stored names of HEAD_MODULES. Without the last one the target's norm takes its place.
    names: tuple[str, ...] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    layer: str = ""  # between `prefix` and the names of the decoder layer's tensors
    state_first: bool = False  # does eh_proj read the state before the embedding?
    reads_normed: bool = True  # is the target's state read after the target's last norm?
    recycles_normed: bool = True  # and the head's own after `norm`?
    # Of the layer, where config.json does not say it.
    layer_type: str = "full_attention"
    mlp_type: str = "dense"


# K-EXAONE's, and Mellum's
EXAONE_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
GGUF_NAMES = ("nextn.enorm", "nextn.hnorm", "nextn.eh_proj", "nextn.shared_head_norm")
HEADS = {
    "glm4_moe": Mtp(mlp_type="sparse"),
    "hy_v3": Mtp(names=("enorm", "hnorm", "eh_proj", "final_layernorm"), mlp_type="sparse"),
    "exaone_moe": Mtp(prefix="mtp.", names=EXAONE_NAMES, layer="layers.0."),
    "mellum": Mtp(
        prefix="mtp.",
        names=EXAONE_NAMES,
        layer="layers.0.",
        layer_type="sliding_attention",
        mlp_type="sparse",
    ),
    "mimo": Mtp(
        prefix="model.mtp_layers.0.",
        names=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        state_first=True,
        reads_normed=False,
        recycles_normed=False,
    ),
    "ernie4_5_moe": Mtp(
        prefix="model.",
        names=("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"),
        layer="mtp_block.0.",
        reads_normed=False,
        recycles_normed=False,
    ),
}


def mtp_of(target: Config) -> Mtp:
    """Of a target's family. A head for one that was published without heads, as
    scripts.distill_draft trains it, is in GLM-4.5's layout."""
    return HEADS.get(target.family, Mtp())


def switch_keys(mtp: Mtp) -> dict[str, bool]:
    """Our own keys of config.json, which say how a head is fed: scripts.distill_draft writes them,
    and they go before HEADS."""
    return {f"mtp_{name}": getattr(mtp, name) for name in SWITCHES}


class MtpModel(PairModel):
    """A decoder layer whose input is made of a token's embedding and the state before it."""

    advice = (
        "The MTP head may belong to other weights than the target's, as after fine-tuning without"
        f" it, or read states at the other side of a norm. {TRY_VARIANTS}"
    )

    def __init__(
        self,
        config: Config,
        mtp: Mtp,
        n_layers: int,
    ):
        """`config`: of its layer; n_layers: of the target."""
        super().__init__(config, config.vocab_size)
        self.mtp = mtp
        self.recycles_normed = mtp.recycles_normed
        self.n_layers = n_layers
        self.state_ids = (n_layers,)
        self.embed = None
        self.lm_head = None
        self.enorm = RMSNorm(config.dim, config.norm_eps)
        self.hnorm = RMSNorm(config.dim, config.norm_eps)
        self.eh_proj = Linear(2 * config.dim, config.dim, bias=False)
        self.target_norm = nn.Identity()
        if len(mtp.names) < len(HEAD_MODULES):
            self.norm = None

    def borrow(self, target: Transformer) -> None:
        super().borrow(target)
        if self.mtp.reads_normed:
            self.target_norm = target.norm
        if self.norm is None:
            self.norm = target.norm

    def fuse(self, x: Tensor) -> Tensor:
        """What leaves the target's last layer (B, T, D) -> the state that is read."""
        return self.target_norm(x)

    def stream(
        self,
        tokens: Tensor,
        pos: Tensor,
        caches: Caches,
        state: Tensor,
    ) -> Tensor:
        parts = [self.enorm(self.embedded(tokens)), self.hnorm(state)]
        if self.mtp.state_first:
            parts.reverse()
        x = self.eh_proj(torch.cat(parts, dim=-1))  # (B, T, 2D) -> (B, T, D)
        visible = self.visible_by_window(pos, caches, x.dtype)[self.windows[0]]
        rope = self.rope.by_type(pos, caches.max_seq_length)[self.rope_types[0]]
        return self.layers[0](x, pos, rope, visible, caches.layers[0])

    def stored_parts(self) -> Iterator[tuple[str, Tensor]]:
        prefix = self.mtp.prefix.format(self.n_layers)
        names = dict(zip(HEAD_MODULES, self.mtp.names))
        for name, parameter in self.named_parameters():
            module, _, suffix = name.rpartition(".")
            if module in names:
                yield f"{prefix}{names[module]}.{suffix}", parameter
                continue
            for source, part in pieces(self.config, name, parameter):
                yield source.replace("model.layers.0.", prefix + self.mtp.layer), part

    def fill(self, checkpoint: Checkpoint, target: Config) -> None:
        """Copy the head's tensors, which stand among those of a target of this Config, into the
        model. UserError names those that do not fit."""
        parts = dict(self.stored_parts())
        # What the target leaves unused belongs to the head. Unknown tensors there are refused.
        unused = FAMILIES[target.family].unused
        prefixes = tuple(prefix.format(n_layers=target.n_layers) for prefix in unused)
        tensors = {
            name: stored
            for name, stored in checkpoint.tensors.items()
            if name in parts or (name.startswith(prefixes) and not name.endswith(COPIES))
        }
        fill_parts(checkpoint.path, tensors, parts)


class MtpDraft(PairDraft):
    """The drafter of an MtpModel. Heads that were trained with their models show an acceptance of
    0.76 and more (vllm-project/vllm#48892)."""

    trained_acceptance = 0.5


class MtpSource(HiddenStateSource):
    """A folder or a GGUF file with an MTP head."""

    draft_class = MtpDraft

    def check(self, config: Config) -> None:
        self.n_layers = config.n_layers
        self.mtp, self.config = head_of(self.origin, config)

    def choices(self) -> dict[str, list]:
        return {key: [value, not value] for key, value in switch_keys(self.mtp).items()}

    def new_model(self) -> MtpModel:
        return MtpModel(self.config, self.mtp, self.n_layers)


def head_of(checkpoint: Checkpoint, config: Config) -> tuple[Mtp, Config]:
    """How the head is stored and fed, and its layer's Config, for a target of this Config.
    UserError names what declares a head that cannot be read, or the tensor that is missing."""
    hf = Section(checkpoint.hf)
    for key in COUNTS:
        if hf.count(key) > 1:
            raise hf.refused(key, "declares several MTP heads in a row; supported: 1")
    if hf.get("model_type") != config.family:
        raise hf.refused("model_type", f"is of another target: this one is {config.family!r}")
    check_target(
        hf,
        {
            "hidden_size": config.dim,
            "num_hidden_layers": config.n_layers,
            "vocab_size": config.vocab_size,
        },
    )
    mtp = mtp_of(config)
    prefix = mtp.prefix.format(config.n_layers)
    if checkpoint.is_gguf:
        has_norm = f"{prefix}{GGUF_NAMES[-1]}.weight" in checkpoint.tensors
        mtp = mtp._replace(names=GGUF_NAMES if has_norm else GGUF_NAMES[:-1])
    eh_proj = f"{prefix}{mtp.names[2]}.weight"
    if eh_proj not in checkpoint.tensors:
        raise UserError(
            f"the MTP head is missing: there is no tensor {eh_proj}; mtp:DIR reads the head of"
            f" another folder"
        )
    keys = switch_keys(mtp)
    if config.family not in HEADS and not keys.keys() <= hf.keys():
        raise UserError(
            f"no MTP head of {config.family} is known, and config.json does not say how this one is"
            f" fed; its keys {', '.join(keys)} would"
        )
    switches = {name: hf.flag(key) for name, key in zip(SWITCHES, keys) if hf.get(key) is not None}
    mtp = mtp._replace(**switches)
    return mtp, head_config(hf, config, mtp)


def head_config(hf: Section, config: Config, mtp: Mtp) -> Config:
    """The Config of the head's layer, for a target of this Config. UserError names key and
    value."""
    family = FAMILIES[config.family]
    hf = Section({**family.defaults, **hf})

    def entry(key: str, default: object, allowed: tuple = ()) -> object:
        return default if hf.get(key) is None else hf.entries(key, 1, "MTP heads", allowed)[0]

    window = None
    rope_type = family.full_rope_type
    if entry("mtp_layer_types", mtp.layer_type, LAYER_TYPES) == "sliding_attention":
        key = "mtp_sliding_windows"
        # A Section checks the value as a size; without it the window is that of the other layers.
        window = Section({key: entry(key, None)}).count(key) or hf.size("sliding_window")
        rope_type = family.sliding_rope_type
    mlp_type = entry("mtp_mlp_layer_types", mtp.mlp_type, MLP_TYPES)
    return replace(
        config,
        n_layers=1,
        windows=(window,),
        rope_types=(rope_type if config.rope_types else 0,),
        sparse=(mlp_type == "sparse",),
        tie_embeddings=False,
    )
