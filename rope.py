"""Rotary positions: the frequencies that a config asks for, and the rotation.

    rope_frequencies    default | linear | llama3 | yarn
    Rope                cos and sin of a call's positions;  apply_rope  the rotation of queries and keys

This file knows positions and pairs of numbers: no attention, no cache.
"""

import math

import torch
from torch import Tensor, nn

from config import Config


def rope_frequencies(config: Config) -> Tensor:
    """Inverse frequencies (E/2,) in float32, stretched as `config.rope_type` says.

    Sources: RoFormer arXiv:2104.09864 eq. 15; linear interpolation arXiv:2306.15595; llama3 the published
    Llama 3.1 reference; yarn arXiv:2309.00071 §3.2 (NTK-by-parts).
    """
    E, theta, factor = config.head_dim, config.rope_theta, config.rope_factor
    inv_freq = 1.0 / theta ** (torch.arange(0, E, 2, dtype=torch.float32, device="cpu") / E)  # (E/2,)
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
        ramp = (torch.arange(E // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
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
        self.register_buffer("inv_freq", rope_frequencies(config), persistent=False)  # (E/2,)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)  # moves between devices, and out of meta; a cast must not survive
        self.inv_freq = rope_frequencies(self.config).to(self.inv_freq.device)
        return self

    def forward(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """pos (B, T) int -> cos, sin (B, 1, T, E/2) float32."""
        angle = pos[:, None, :, None].float() * self.inv_freq  # (B, 1, T, E/2)
        scale = self.config.rope_attention_factor
        return angle.cos() * scale, angle.sin() * scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, n, T, E), half-split layout: pair i is (x[i], x[i + E/2])."""
    a, b = x.float().chunk(2, dim=-1)  # each (B, n, T, E/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
