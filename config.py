"""Everything that a model's arithmetic depends on, in one flat place.

What a config.json may say, and how it is read, stands in reading/config.py; what the fields mean, in model.py and
rope.py.
"""

from dataclasses import dataclass, field

from reading.config import config_fields


@dataclass(frozen=True)
class Config:
    """Everything that the arithmetic depends on, in one flat place. Build it with `Config.from_hf`."""

    dim: int  # D
    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G
    head_dim: int  # E
    ffn_dim: int  # F
    vocab_size: int  # V
    max_seq_length: int  # positions the model was trained for
    norm_eps: float
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    gate_limit: float | None = None  # of a feed-forward's gate and up
    gate_alpha: float = 1.0
    qk_norm: str | None = None  # of "heads" one by one, of "rotated" heads, or of all heads as one "whole"
    norms_after: bool = False  # of what attention and feed-forward give, not of what they take
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add
    score_scale: float = 1.0  # of q k / sqrt(E)
    logit_scale: float = 1.0
    sinks: bool = False  # a logit of each head that the softmax counts and drops
    sparse: tuple[bool, ...] = ()  # per layer: experts in place of one feed-forward; nothing: in none
    n_experts: int = 0
    n_chosen: int = 0  # experts that a token takes
    expert_dim: int = 0  # F of an expert
    expert_bias: bool = False
    router_bias: bool = False
    router_norm: bool = True  # do the weights of the chosen experts sum to 1?
    shared_dim: int = 0  # F of an expert that every token takes
    windows: tuple[int | None, ...] = ()  # per layer: tokens attended, itself included; None is all of them
    rope_theta: float = 10000.0
    turns: tuple[int | None, ...] = ()  # per layer: 0 rotates as below, 1 with theta alone, None not at all
    rope_local_theta: float = 10000.0  # of turns that are 1
    rope_dim: int = 0  # leading dimensions of a head that are rotated; 0: all
    rope_interleaved: bool = False  # pairs are (x[2 i], x[2 i + 1])
    rope_type: str = "default"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 0  # llama3, yarn, longrope: the context before it was stretched
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float = 1.0  # multiplies cos and sin
    rope_short: tuple[float, ...] = ()  # longrope: stretch of each pair in texts of up to the original length
    rope_long: tuple[float, ...] = ()  # and in longer ones
    query_growth: float = 0.0  # queries grow by it times log(1 + position // original length)
    dtype: str | None = None  # what the checkpoint says its weights are; no part of the arithmetic
    family: str = field(default="llama", compare=False)  # whose names the tensors have; no part of the arithmetic

    @staticmethod
    def from_hf(hf: dict) -> "Config":
        """The Config of a config.json, transformers v4 or v5 spelling. ValueError names key and value of what this file
        would compute wrongly."""
        return Config(**config_fields(hf))
