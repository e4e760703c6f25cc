"""The angles of the rotary position embedding (Su et al., RoFormer, 2021), and how models stretch them to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """Rotation of the first `dim` elements of a head. Pair i turns by position * theta ** (-2 i / dim), scaled by `kind`:

    default  as it is
    linear   divided by `factor` (Chen et al., Extending context window of large language models, 2023)
    llama3   Llama 3.1's: wavelengths above original / low are divided by `factor`, those below original / high stay, and
             between them the frequency is interpolated
    yarn     (Peng et al., YaRN, 2023): pairs that turn more than `fast` times in `original` positions stay, those that turn
             less than `slow` times are divided by `factor`, with a ramp between them; cos and sin are multiplied by
             `amplitude`"""

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    divisors: tuple[float, ...] = ()  # of each pair's frequency, where a file has them
    interleaved: bool = False

    def frequencies(self) -> torch.Tensor:
        """Radians a position of each pair, (dim / 2,) float32."""
        index = torch.arange(0, self.dim, 2, dtype=torch.float32)
        plain = 1.0 / self.theta ** (index / self.dim)
        if self.divisors:
            return plain / torch.tensor(self.divisors)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original * plain / (2 * math.pi)  # in the original context
            kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
            return plain / self.factor * (1 - kept) + plain * kept
        if self.kind == "yarn":
            first, last = self._pair_that_turns(self.fast), self._pair_that_turns(self.slow)
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.dim - 1)
            ramp = (torch.arange(self.dim // 2) - first) / max(last - first, 0.001)
            kept = 1 - ramp.clamp(0, 1)
            return plain / self.factor * (1 - kept) + plain * kept
        return plain

    def _pair_that_turns(self, times: float) -> float:
        """The pair, not rounded, that turns so many times in the original context."""
        return self.dim * math.log(self.original / (times * 2 * math.pi)) / (2 * math.log(self.theta))

    def tables(self, longest: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, (longest, dim / 2) float32 each, as `minfer.rope_` takes them."""
        angles = torch.outer(torch.arange(longest, dtype=torch.float32), self.frequencies())
        return (angles.cos() * self.amplitude).to(device), (angles.sin() * self.amplitude).to(device)


def growth(factor: float, by: float = 1.0) -> float:
    """YaRN's factor for attention over a context that is `factor` times as long: 0.1 * by * ln(factor) + 1."""
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0
