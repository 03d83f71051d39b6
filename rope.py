"""Rotary positions: the frequencies that a config asks for, and the rotation.

    rope_frequencies    default | linear | llama3 | yarn | longrope
    Rope                cos and sin of a call's positions;  apply_rope  the rotation of queries and keys

This file knows positions and pairs of numbers: no attention, no cache.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from config import Config


def rope_frequencies(config: Config, stretch: tuple[float, ...] = ()) -> Tensor:
    """Inverse frequencies (rotated dimensions / 2,) in float32, stretched as `config.rope_type` says. longrope's are
    divided by `stretch`, by default that of short texts.

    Sources: RoFormer arXiv:2104.09864 eq. 15; linear interpolation arXiv:2306.15595; llama3 the published
    Llama 3.1 reference; yarn arXiv:2309.00071 §3.2 (NTK-by-parts); longrope arXiv:2402.13753 §3.
    """
    E, theta, factor = config.rope_dim or config.head_dim, config.rope_theta, config.rope_factor
    inv_freq = 1.0 / theta ** (torch.arange(0, E, 2, dtype=torch.float32, device="cpu") / E)  # (E/2,)
    if config.rope_type == "longrope":
        return inv_freq / torch.tensor(stretch or config.rope_short, dtype=torch.float32, device="cpu")
    if config.rope_type == "linear":
        return inv_freq / factor
    if config.rope_type == "llama3":
        rotations = config.rope_original_length * inv_freq / (2 * math.pi)  # turns within the original context
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        keep = ((rotations - low) / (high - low)).clamp(0, 1)  # 1: fast pairs stay, 0: slow pairs are stretched
        return inv_freq / factor * (1 - keep) + inv_freq * keep
    if config.rope_type == "yarn":

        def pair_that_turns(times: float) -> float:  # index of the pair that turns so often in the original context
            return E * math.log(config.rope_original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(config.rope_beta_fast), pair_that_turns(config.rope_beta_slow)
        if config.rope_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, E - 1)
        ramp = (torch.arange(E // 2, dtype=torch.float32, device="cpu") - low) / ((high - low) or 0.001)
        keep = 1 - ramp.clamp(0, 1)
        return inv_freq / factor * (1 - keep) + inv_freq * keep
    return inv_freq


class Rope(nn.Module):
    """cos and sin of position times frequency, float32 whatever the weights are.

    A 16-bit table loses whole positions at long context, so a cast of the model rebuilds it instead.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)  # (rotated dimensions / 2,)
        long = rope_frequencies(config, config.rope_long) if config.rope_long else None
        self.register_buffer("long", long, persistent=False)  # in place of inv_freq, for long texts
        plain = {"rope_type": "default", "rope_theta": config.rope_local_theta, "rope_attention_factor": 1.0}
        self.local = Rope(replace(config, turns=(), **plain)) if 1 in config.turns else None

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)  # moves between devices, and out of meta; a cast must not survive
        self.inv_freq = rope_frequencies(self.config).to(self.inv_freq.device)
        if self.long is not None:
            self.long = rope_frequencies(self.config, self.config.rope_long).to(self.inv_freq.device)
        return self

    def kinds(self, pos: Tensor, ends: Tensor | None = None) -> dict[int | None, tuple | None]:
        """What each of Config's `turns` stands for, as `forward` gives it."""
        found = {None: None, 0: self(pos, ends)}
        return found if self.local is None else found | {1: self.local(pos)}

    def forward(self, pos: Tensor, ends: Tensor | None = None) -> tuple[Tensor, ...]:
        """pos (B, T) int -> cos, sin (B, 1, T, rotated dimensions / 2) float32; and where queries grow with their
        position, by how much (B, 1, T, 1). ends (B or more,): the last position that a row may come to have, by default
        the last of pos. It decides, for all of a row's positions alike, whether the row's text is a long one."""
        config, inv_freq = self.config, self.inv_freq
        if self.long is not None:
            ends = pos.amax(1) if ends is None else ends[: len(pos)]  # (B,)
            is_long = (ends >= config.rope_original_length)[:, None, None, None]
            inv_freq = torch.where(is_long, self.long, inv_freq)  # (B, 1, 1, n)
        angle = pos[:, None, :, None].float() * inv_freq  # (B, 1, T, n)
        scale = config.rope_attention_factor * math.sqrt(config.score_scale)  # of q and of k: squared in their product
        turned = angle.cos() * scale, angle.sin() * scale
        if not config.query_growth:
            return turned
        steps = pos // config.rope_original_length
        return *turned, (1 + config.query_growth * (1 + steps).log())[:, None, :, None]  # (B, 1, T, 1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the leading n pairs of x (B, heads, T, E). Pair i is (x[i], x[i + n]), or interleaved (x[2i], x[2i + 1]).
    cos and sin (B, 1, T, n)."""
    n = 2 * cos.size(-1)
    turned, rest = (x, None) if n == x.size(-1) else x.split((n, x.size(-1) - n), dim=-1)
    if interleaved:
        a, b = turned.float().unflatten(-1, (-1, 2)).unbind(-1)  # each (B, heads, T, n)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
    else:
        a, b = turned.float().chunk(2, dim=-1)  # each (B, heads, T, n)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
