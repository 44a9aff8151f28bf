"""Rotary positions (RoPE) with fp32 angles, in the half-split form of Llama and Qwen.

Owns the frequencies and the turn. A key turned by the angles of -p is its un-rotated self again: what re-phasing needs.
Source: arXiv 2104.09864; the llama3 stretching as in transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treadle.nn.config import Llama3Scaling, ModelConfig

Angles = tuple[Tensor, Tensor]  # cos, sin, each [T, 1, head_dim / 2] fp32


class Rope:
    """The frequencies of one model: fp32 [head_dim / 2]."""

    def __init__(self, config: ModelConfig) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        self.frequencies = frequencies if config.rope_scaling is None else _stretched(frequencies, config.rope_scaling)

    def angles(self, positions: Tensor) -> Angles:
        """Cosine and sine for `positions` [T] int64 (negative turns back), computed in fp32 whatever the model's dtype."""
        turned = torch.outer(positions.to(torch.float32), self.frequencies).unsqueeze(1)
        return turned.cos(), turned.sin()


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turn `heads` [T, n, head_dim] by `angles`; a new tensor of the same dtype. The halves of a head are its pairs."""
    cos, sin = angles
    if heads.dtype != cos.dtype:
        cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _stretched(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between."""
    lengths = 2 * math.pi / frequencies
    ramp = (scaling.original_positions / lengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)
