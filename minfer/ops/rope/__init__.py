"""rope: rotary position embedding of q and k (Su et al., RoFormer, 2021). Each pair of a head's first `rotary_dim` elements
is rotated by an angle of the token's position; the others stay as they are.

A pair (a, b) becomes (a cos - b sin, b cos + a sin). It is (x[i], x[i + rotary_dim / 2]), as in GPT-NeoX and Llama, or with
`interleaved` (x[2i], x[2i + 1]), as in the paper. `backward` is the gradient, which is the rotation by the negative angle.
q is (batch, seq, heads, head_dim), k the same with kv_heads, which may be 0: one tensor alone.

Cosines and sines are inputs, fp32 tables (positions, rotary_dim / 2), because that is what models give their kernels: they
compute them once, with whatever scaling of frequencies they have, and read them in every layer. Arithmetic is fp32, and a
result is rounded once.

`params.positions` is counted, where token s of each sequence has row s of the tables and `positions` is empty, or given,
where positions[b, s] is the row. `params.place` is in, where q_out and k_out are changed in place and q and k are empty, or
out.
"""

from __future__ import annotations

import random
from functools import cache

import torch

from minfer.ops import (
    DTYPES,
    GBPS,
    Case,
    Draw,
    Expected,
    Op,
    Spec,
    Tensors,
    compiled,
    given,
    inout,
    made_by,
    out,
    size,
    within,
)  # fmt: skip
from minfer.ops.axes import Axis, Sizes

BASE = 10000.0
U = 2.0**-24
Tensor = torch.Tensor


def rotary() -> Axis:
    """The even sizes up to head_dim. Half of those drawn are multiples of 16, as kernels with vectors need them."""

    def check(size: int, sizes: Sizes) -> str | None:
        most = sizes["head_dim"]
        return f"must be even and at most head_dim={most}" if size % 2 or size > most else None

    def draw(rng: random.Random, sizes: Sizes) -> int:
        step = 16 if sizes["head_dim"] >= 16 and rng.random() < 0.5 else 2
        return step * rng.randint(1, sizes["head_dim"] // step)

    return Axis(check, draw)


def even(most: int) -> Axis:
    """The even sizes. Half of those drawn are multiples of 16."""

    def draw(rng: random.Random, sizes: Sizes) -> int:
        step = rng.choice([2, 16])
        return step * rng.randint(1, most // step)

    return Axis(lambda size, sizes: "must be even" if size % 2 else None, draw)


KV_HEADS = Axis(lambda size, sizes: None, lambda rng, sizes: rng.randint(0, 5), least=0)


def counted(case: Case) -> bool:
    return case.params["positions"] == "counted"


def table(rows: int, half: int, device: torch.device) -> Tensor:
    """The angles, (rows, half), fp32 as models compute them: position * 10000^(-i / half)."""
    frequency = BASE ** (torch.arange(half, dtype=torch.float32, device=device) / -half)
    return torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequency


def tensors(case: Case) -> list[Spec]:
    batch, seq, dim, half = case["batch"], case["seq"], case["head_dim"], case["rotary_dim"] // 2
    in_place, tokens = case.params["place"] == "in", batch * seq
    written, read = (inout, 0) if in_place else (out, seq)
    rows = seq if counted(case) else 2 * tokens

    def places(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        """Each token has a row of its own, so that all rows that are read are as many as tokens."""
        found = draw.random.sample(range(rows), 0 if counted(case) else tokens)
        return torch.tensor(found, dtype=torch.int32, device=device).reshape(batch, 0 if counted(case) else seq)

    def poisoned(values: Tensor, made: Tensors) -> Tensor:
        """NaN in the rows that no token has."""
        if not counted(case):
            unread = torch.ones(rows, dtype=torch.bool, device=values.device)
            unread[made["positions"].flatten().long()] = False
            values.masked_fill_(unread[:, None], float("nan"))
        return values

    def cosines(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        return poisoned(table(rows, half, device).cos(), made)

    def sines(made: Tensors, draw: Draw, device: torch.device) -> Tensor:
        return poisoned(table(rows, half, device).sin(), made)

    return [
        written("q_out", batch, seq, case["heads"], dim),
        written("k_out", batch, seq, case["kv_heads"], dim),
        given("q", batch, read, case["heads"], dim),
        given("k", batch, read, case["kv_heads"], dim),
        given("positions", batch, 0 if counted(case) else seq, dtype="int32", fill=made_by(places)),
        given("cos", rows, half, dtype="float32", fill=made_by(cosines)),
        given("sin", rows, half, dtype="float32", fill=made_by(sines)),
    ]


def sources(q_out: Tensor, k_out: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What is read: q and k, or where these are empty what is changed in place."""
    return (q, k) if q.shape[1] else (q_out, k_out)


def rows_of(values: Tensor, positions: Tensor) -> Tensor:
    """Those of each token, (batch or 1, seq, 1, rotary_dim / 2)."""
    return (values[positions] if positions.shape[1] else values[None]).unsqueeze(2)


def turned(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def doubled(values: Tensor, interleaved: bool) -> Tensor:
    """Those of each pair at both of its elements."""
    return values.repeat_interleave(2, -1) if interleaved else torch.cat((values, values), -1)


def reference(case: Case, t: Tensors, backward: bool, interleaved: bool) -> dict[str, Expected]:
    """Two products and a sum round three times, each by at most u (|a| + |b|). Three more such are for kernels that compute
    cosine and sine themselves, from the angle in fp32, to two ulps each."""
    cos, sin = (doubled(rows_of(t[name], t["positions"]), interleaved) for name in ("cos", "sin"))
    sin = -sin if backward else sin
    before = (t["q_out"], t["k_out"]) if case.params["place"] == "in" else (t["q"], t["k"])
    found = {}
    for name, x in zip(("q_out", "k_out"), before, strict=True):
        rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        other = turned(rotated, interleaved)
        slack = (rotated.abs() + other.abs()) * (6 * U)
        value = torch.cat((rotated * cos + other * sin, rest), -1)
        found[name] = within(value, torch.cat((slack, torch.zeros_like(rest)), -1))
    return found


def traffic(case: Case) -> tuple[float, float]:
    """q and k, of which only what is rotated where they are changed in place, and the rows of the tables that tokens have."""
    tokens, item = case["batch"] * case["seq"], DTYPES[case.dtype].itemsize
    dim = case["rotary_dim"] if case.params["place"] == "in" else case["head_dim"]
    moved = 1.0 * tokens * (case["heads"] + case["kv_heads"]) * dim * item
    entries = 4.0 * case["rotary_dim"]
    angles = entries * case["seq"] if counted(case) else (entries + 4) * tokens
    return moved + angles, moved


def rotate(
    q_out: Tensor, k_out: Tensor, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
    backward: bool = False, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As models in PyTorch write it, x * cos + rotate_half(x) * sin, into new tensors."""
    cos, sin = (doubled(rows_of(values, positions), interleaved) for values in (cos, sin))
    sin = -sin if backward else sin

    def one(x: Tensor) -> Tensor:
        rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        found = (rotated * cos + turned(rotated, interleaved) * sin).to(x.dtype)
        return torch.cat((found, rest), -1) if rest.shape[-1] else found

    first, second = sources(q_out, k_out, q, k)
    return one(first), one(second)


def liger(
    q_out: Tensor, k_out: Tensor, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
    backward: bool = False, interleaved: bool = False,
) -> None:  # fmt: skip
    """Liger's, which works in place and takes (batch, heads, seq, dim), transposed from how they lie, as in models of
    Hugging Face. The cosines are (1, seq, rotary_dim / 2), so it must be told rotary_dim, which it else takes from them."""
    from liger_kernel.ops.rope import rope_backward, rope_forward

    function = rope_backward if backward else rope_forward
    rotary_dim = 2 * cos.shape[-1]
    function(q_out.transpose(1, 2), k_out.transpose(1, 2), cos[None], sin[None], rotary_dim=rotary_dim)


@cache
def flashinfer_table(rows: int, rotary_dim: int, device: torch.device) -> Tensor:
    """Cosines and sines side by side, which a model that uses FlashInfer makes once."""
    angles = table(rows, rotary_dim // 2, device)
    return torch.cat((angles.cos(), angles.sin()), 1)


def flashinfer(
    q_out: Tensor, k_out: Tensor, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
    backward: bool = False, interleaved: bool = False,
) -> None:  # fmt: skip
    """FlashInfer's in-place kernel for a table and positions."""
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    both = flashinfer_table(cos.shape[0], 2 * cos.shape[1], cos.device)
    rows = [x.flatten(0, 1).flatten(1) for x in (q_out, k_out)]
    apply_rope_with_cos_sin_cache_inplace(positions.flatten(), *rows, q_out.shape[3], both, is_neox=not interleaved)


@cache
def engine_angles(rows: int, rotary_dim: int, interleaved: bool, device: torch.device) -> Tensor:
    """Angles as Transformer Engine takes them, (rows, 1, 1, rotary_dim), which a model makes once."""
    return doubled(table(rows, rotary_dim // 2, device), interleaved)[:, None, None]


def transformer_engine(
    q_out: Tensor, k_out: Tensor, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
    backward: bool = False, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Transformer Engine's, which computes cosine and sine from the angle: a call for q and one for k."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles = engine_angles(cos.shape[0], 2 * cos.shape[1], interleaved, cos.device)
    first, second = (
        apply_rotary_pos_emb(x, angles, tensor_format="bshd", interleaved=interleaved, fused=True) if x.shape[2] else x
        for x in (q, k)
    )
    return first, second


def some_keys(case: Case) -> str | None:
    return None if case["kv_heads"] else "needs kv_heads to be at least 1"


def vectors(case: Case) -> str | None:
    """The rule that both halves of what is rotated, and what is not, are of 16-byte pieces."""
    for axis, factor in (("rotary_dim", 16), ("head_dim", 8)):
        if case[axis] % factor:
            return f"needs {axis} to be a multiple of {factor}, got {case[axis]}"
    return None


def shape(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    return {
        "batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim
    }  # fmt: skip


op = Op(
    "rope",
    axes={
        "batch": size(2),
        "seq": size(6),
        "heads": size(8),
        "kv_heads": KV_HEADS,
        "head_dim": even(96),
        "rotary_dim": rotary(),
    },
    params={"positions": ("counted", "given"), "place": ("out", "in")},
    tensors=tensors,
    reference=reference,
    calls={
        "forward": {"backward": False, "interleaved": False},
        "backward": {"backward": True, "interleaved": False},
        "interleaved": {"backward": False, "interleaved": True},
        "interleaved_backward": {"backward": True, "interleaved": True},
    },
    flops=lambda case: 3.0 * case["batch"] * case["seq"] * (case["heads"] + case["kv_heads"]) * case["rotary_dim"],
    arithmetic=lambda case: ("fma", "float32"),
    traffic=traffic,
    metric=GBPS,
    strided=("q_out", "k_out", "q", "k", "cos", "sin"),
    odd_shapes=(shape(2, 3, 3, 2, 40, 32), shape(1, 2, 1, 0, 22, 14)),
    sizes={
        "small": [shape(1, 1, 1, 1, 2, 2), shape(3, 2, 5, 1, 48, 48)],
        "large": [
            shape(1, 128, 32, 8, 128, 128),
            shape(1, 2049, 32, 8, 128, 128),
            shape(3, 500, 8, 0, 256, 256),
            shape(2, 300, 128, 1, 192, 64),
        ],
    },
)

ALL = ("float32", "float16", "bfloat16")
HALVES: dict[str, tuple[str, ...]] = {"call": ("forward", "backward")}
COUNTED: dict[str, tuple[str, ...]] = {"positions": ("counted",)}
FORWARD: dict[str, tuple[str, ...]] = {"call": ("forward", "interleaved")}
IN: dict[str, tuple[str, ...]] = {"place": ("in",)}
OUT: dict[str, tuple[str, ...]] = {"place": ("out",)}

op.torch("torch", rotate, baseline=True, returns=(0, 1), dtypes=ALL)
op.torch("torch_compile", compiled(rotate), returns=(0, 1), dtypes=ALL)
op.peer("liger", liger, package="liger_kernel", dtypes=ALL, params=COUNTED | IN | HALVES, requires=some_keys)
op.peer(
    "flashinfer",
    flashinfer,
    package="flashinfer",
    params={"positions": ("given",)} | IN | FORWARD,
    requires=some_keys,
)
op.peer(
    "transformer_engine",
    transformer_engine,
    package="transformer_engine",
    params=COUNTED | OUT | FORWARD,
    returns=(0, 1),
)
op.cuda("v01_naive.cu", dtypes=ALL)
op.cuda("v02_vectors.cu", dtypes=ALL, requires=vectors)
op.triton("triton_heads.py", dtypes=ALL)
op.cpp("cpu_naive.cpp", dtypes=ALL)
op.cpp("cpu_vectors.cpp", dtypes=ALL)
