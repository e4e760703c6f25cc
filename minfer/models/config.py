"""The description of a decoder. `families.py` reads it from a checkpoint's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from minfer.models.rotary import Rotary


class ConfigError(ValueError):
    """minfer cannot run a config; the message is one sentence."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token has `per_token` of `count` experts, of `ffn` columns each. `block`, `router` and
    `gate_up_down` are names in a checkpoint."""

    count: int
    per_token: int
    ffn: int
    normalize: bool  # the weights of a token's experts sum to 1
    factor: float = 1.0  # multiplies what the chosen experts add
    shared: int = 0  # columns of the experts that every token has
    block: str = "mlp"
    router: str = "gate"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    limit: float = 0.0  # above 0: experts as in gpt-oss, with biases, and clamped at `limit`
    alpha: float = 1.702


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): sizes of the latent, and of a head's parts."""

    rank: int
    nope: int  # of a key: the part that is not rotated
    rotated: int
    value: int


@dataclass(frozen=True)
class Config:
    family: str
    vocab: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    longest: int  # positions
    rotary: Rotary
    windows: tuple[int, ...]  # of each layer: how many keys a query sees, 0 for all
    mixed: tuple[bool, ...]  # of each layer: whether it has experts
    eps: float = 1e-6
    scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    tied: bool = False  # the head's weight is the embedding's
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # q and k are normalised per head
    post_norms: bool = False  # the outputs of attention and feed-forward layer are normalised, too
    norm_offset: float = 0.0  # added to the weights of norms
    embedding_scale: float = 1.0
    activation: str = "silu"
    softcap: float = 0.0  # of scores
    final_softcap: float = 0.0  # of logits
    sinks: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    stop: tuple[int, ...] = ()  # ids of tokens that end a text

    @property
    def layers(self) -> int:
        return len(self.windows)
