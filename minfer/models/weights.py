"""A decoder put together from a config and a source of weights.

`build` asks a source for one tensor after the other, by its name in a checkpoint, and has it written straight to its place on
the device. Weights that are multiplied with the same input, such as those of q, k and v, become one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minfer.models.config import Config
from minfer.models.families import read
from minfer.models.gguf import Gguf
from minfer.models.model import Attention, Decoder, Dense, LatentAttention, Layer, Linear, Map, Mixture, Scores, Stacked
from minfer.models.sources import Checkpoint, Source, WeightsError

Tensor = torch.Tensor
FORMATS = ("", "fp8", "int4_g64", "int4_g128")
MXFP4 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)  # e2m1, by its four bits


def quantise(weight: Tensor, format: str) -> Linear:
    """A weight (out, in) rounded to the nearest values of a format of `quant_gemm`: fp8 with a scale for each row, or int4 with
    one for each group of a row, and 8 as zero."""
    if format == "fp8":
        scales = weight.float().abs().amax(1).clamp(min=1e-12) / 448
        return Linear((weight.float() / scales[:, None]).to(torch.float8_e4m3fn), None, format, scales)
    group = int(format.removeprefix("int4_g"))
    if weight.shape[1] % group:
        raise WeightsError(f"{format} takes weights whose rows are multiples of {group}, got {tuple(weight.shape)}")
    groups = weight.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / 7).clamp(min=1e-6).to(weight.dtype)
    q = (groups / scales.float()[..., None]).round().add(8).clamp(0, 15).to(torch.uint8).flatten(1)
    return Linear(q[:, ::2] | q[:, 1::2] << 4, None, format, scales)


def build(
    config: Config,
    source: Source,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    weights: str = "",
) -> Decoder:
    """A decoder with the weights of a source. With `weights`, fp8, int4_g64 or int4_g128, the linear layers of attention and of
    dense feed-forward layers are quantised when they are loaded; embedding, head, router, experts and MLA's up-projection of
    latents stay in dtype. Raises WeightsError."""
    if weights not in FORMATS:
        raise WeightsError(f"weights may be quantised to {', '.join(FORMATS[1:])}, got {weights!r}")
    if weights and dtype == torch.float32:
        raise WeightsError(f"weights of {weights} take a dtype of float16 or bfloat16, got float32")
    return _Builder(config, source, torch.device(device), dtype, weights).decoder()


class _Builder:
    def __init__(self, config: Config, source: Source, device: torch.device, dtype: torch.dtype, weights: str) -> None:
        self.config, self.source, self.device, self.dtype, self.weights = config, source, device, dtype, weights
        self.angles = config.rotary.tables(config.longest, device)
        self.eights: dict[torch.Size, Tensor] = {}  # zeros of int4, by the shape of the scales

    def tensor(self, name: str, *shape: int) -> Tensor:
        made = torch.empty(shape, device=self.device, dtype=self.dtype)
        self.source.fill(name, made)
        return made

    def norm(self, name: str, size: int) -> Tensor:
        return self.tensor(f"{name}.weight", size).add_(self.config.norm_offset)

    def stack(self, names: Sequence[str], rows: Sequence[int], *more: int) -> Tensor:
        """Tensors one under the other, (sum of rows, *more)."""
        made = torch.empty(sum(rows), *more, device=self.device, dtype=self.dtype)
        for name, part in zip(names, made.split(list(rows)), strict=True):
            self.source.fill(name, part)
        return made

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool = False, plain: bool = False
    ) -> Map:
        """A linear layer of weights one under the other. They stay packed if all are and `quant_gemm` takes the dtype."""
        weights, biases = [f"{name}.weight" for name in names], [f"{name}.bias" for name in names]
        parts = []
        if self.dtype != torch.float32 and not self.weights:
            parts = [self.source.packed(name, count, columns) for name, count in zip(weights, rows, strict=True)]
        packed = [(part[0].to(self.device), part[1]) for part in parts if part is not None]
        add = self.stack(biases, rows) if bias else None
        if packed and len(packed) == len(names):
            if len({form for _, form in packed}) == 1:
                return Linear(torch.cat([w for w, _ in packed]), add, packed[0][1])
            adds = [None] * len(names) if add is None else add.split(list(rows))
            return Stacked([Linear(w, one, form) for (w, form), one in zip(packed, adds, strict=True)])
        weight = self.stack(weights, rows, columns)
        made = quantise(weight, self.weights) if self.weights and not plain else Linear(weight)
        if made.scales is not None and made.format != "fp8":
            shape = made.scales.shape
            if shape not in self.eights:
                self.eights[shape] = torch.full_like(made.scales, 8.0)
            made.eights = self.eights[shape]
        made.bias = add
        return made

    def decoder(self) -> Decoder:
        c = self.config
        table = self.tensor("model.embed_tokens.weight", c.vocab, c.hidden)
        layers = [self.layer(i) for i in range(c.layers)]
        norm = self.norm("model.norm", c.hidden)
        head: Map = Linear(table) if c.tied else self.linear(["lm_head"], [c.vocab], c.hidden, plain=True)
        self.source.finish()
        return Decoder(c, table, layers, norm, head)

    def layer(self, i: int) -> Layer:
        c, at = self.config, f"model.layers.{i}"
        attention = self.latent(f"{at}.self_attn") if c.latent else self.attention(f"{at}.self_attn", c.windows[i])
        feed = self.mixture(at) if c.mixed[i] else self.dense(f"{at}.mlp", c.ffn)
        names = ["input_layernorm", "post_attention_layernorm"]
        if c.post_norms:
            names = [
                "input_layernorm",
                "pre_feedforward_layernorm",
                "post_attention_layernorm",
                "post_feedforward_layernorm",
            ]
        first, second, *post = (self.norm(f"{at}.{name}", c.hidden) for name in names)
        return Layer(attention, feed, (first, second), (post[0], post[1]) if post else None)

    def attention(self, at: str, window: int) -> Attention:
        c = self.config
        names = [f"{at}.{part}_proj" for part in "qkv"]
        rows = [heads * c.head_dim for heads in (c.heads, c.kv_heads, c.kv_heads)]
        sinks = self.tensor(f"{at}.sinks", c.heads).float() if c.sinks else None
        q_norm, k_norm = (self.norm(f"{at}.{name}", c.head_dim) if c.qk_norm else None for name in ("q_norm", "k_norm"))
        return Attention(
            self.linear(names, rows, c.hidden, c.qkv_bias),
            self.linear([f"{at}.o_proj"], [c.hidden], rows[0], c.out_bias),
            c.heads, c.kv_heads, Scores(c.scale or c.head_dim**-0.5, c.softcap, window, sinks),
            self.angles, q_norm, k_norm, c.eps,
        )  # fmt: skip

    def latent(self, at: str) -> LatentAttention:
        c, sizes = self.config, self.config.latent
        assert sizes is not None
        width = sizes.rank + sizes.rotated
        query = self.linear([f"{at}.q_proj"], [c.heads * c.head_dim], c.hidden)
        down = self.linear([f"{at}.kv_a_proj_with_mqa"], [width], c.hidden)
        up = Linear(self.tensor(f"{at}.kv_b_proj.weight", c.heads * (sizes.nope + sizes.value), sizes.rank))
        key, value = up.weight.unflatten(0, (c.heads, -1)).split((sizes.nope, sizes.value), 1)
        return LatentAttention(
            query, down, self.norm(f"{at}.kv_a_layernorm", sizes.rank), up,
            key.contiguous(), value.transpose(1, 2).contiguous(),
            self.linear([f"{at}.o_proj"], [c.hidden], c.heads * sizes.value),
            c.heads, sizes.rotated, Scores(c.scale), self.angles, c.eps,
        )  # fmt: skip

    def dense(self, at: str, ffn: int) -> Dense:
        hidden = self.config.hidden
        gate_up = self.linear([f"{at}.gate_proj", f"{at}.up_proj"], [ffn, ffn], hidden)
        return Dense(gate_up, self.linear([f"{at}.down_proj"], [hidden], ffn), self.config.activation)

    def mixture(self, at: str) -> Mixture:
        hidden, e = self.config.hidden, self.config.experts
        assert e is not None
        at = f"{at}.{e.block}"
        router = self.linear([f"{at}.{e.router}"], [e.count], hidden, bias=bool(e.limit), plain=True)
        routing: dict[str, Any] = {"per_token": e.per_token, "normalize": e.normalize, "factor": e.factor}
        if e.limit:
            at = f"{at}.experts"
            gate_up, down = self.gpt_oss(at, "gate_up", 2 * e.ffn, hidden), self.gpt_oss(at, "down", hidden, e.ffn)
            biases = (
                apart(self.tensor(f"{at}.gate_up_proj_bias", e.count, 2 * e.ffn)),
                self.tensor(f"{at}.down_proj_bias", e.count, hidden),
            )
            return Mixture(router, apart(gate_up), down, **routing, biases=biases, limit=e.limit, alpha=e.alpha)
        gate_up = torch.empty(e.count, 2 * e.ffn, hidden, device=self.device, dtype=self.dtype)
        down = torch.empty(e.count, hidden, e.ffn, device=self.device, dtype=self.dtype)
        for number in range(e.count):
            parts = (*gate_up[number].split(e.ffn), down[number])
            for name, part in zip(e.gate_up_down, parts, strict=True):
                self.source.fill(f"{at}.experts.{number}.{name}.weight", part)
        shared = self.dense(f"{at}.shared_experts", e.shared) if e.shared else None
        return Mixture(router, gate_up, down, **routing, shared=shared)

    def gpt_oss(self, at: str, part: str, out: int, columns: int) -> Tensor:
        """A stack (experts, out, columns) of gpt-oss. MXFP4 is unpacked, because minfer has no kernel for it. In MXFP4, 32
        values share a power of 2, and a byte holds two values."""
        e = self.config.experts
        assert e is not None
        if not self.source.has(f"{at}.{part}_proj_blocks"):
            return self.tensor(f"{at}.{part}_proj", e.count, columns, out).transpose(1, 2).contiguous()
        if columns % 32:
            raise WeightsError(f"{at}.{part}_proj_blocks takes rows of multiples of 32 values, got {columns}")
        blocks = torch.empty(e.count, out, columns // 32, 16, device=self.device, dtype=torch.uint8)
        exponents = torch.empty(e.count, out, columns // 32, device=self.device, dtype=torch.uint8)
        self.source.fill(f"{at}.{part}_proj_blocks", blocks)
        self.source.fill(f"{at}.{part}_proj_scales", exponents)
        return unpack_mxfp4(blocks, exponents, self.dtype)


def unpack_mxfp4(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Values (..., 32 n) from blocks (..., n, 16) and exponents (..., n). The first of two values is in the low half of a byte;
    a block's factor is 2 ** (exponent - 127) (OCP Microscaling formats, 2023)."""
    values = torch.tensor(MXFP4, device=blocks.device)
    made = torch.empty(*blocks.shape[:-2], 32 * blocks.shape[-2], device=blocks.device, dtype=dtype)
    for one, block, power in zip(
        made, blocks, exponents, strict=True
    ):  # an expert at a time: the values are fp32 at first
        pairs = torch.stack((values[(block & 15).int()], values[(block >> 4).int()]), -1).flatten(-2)
        one.copy_(torch.ldexp(pairs, power[..., None].int() - 127).flatten(-2))
    return made


def apart(both: Tensor) -> Tensor:
    """gpt-oss's rows (experts, 2 ffn, ...), in which gate and up alternate, reordered: first all of the gate, then up."""
    return torch.cat((both[:, ::2], both[:, 1::2]), 1)


def load(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    weights: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """The decoder of a checkpoint's folder, `config.json` and safetensors, or of a file that ends in .gguf. Raises ConfigError
    or WeightsError."""
    if Path(path).suffix == ".gguf":
        source = Gguf(path, progress)
        return build(source.config(), source, device, dtype, weights)
    return build(read(path), Checkpoint(path, progress), device, dtype, weights)
