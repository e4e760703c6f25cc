"""`rope` and `rope_`: the kernels of rope as functions of PyTorch, `torch.ops.minfer.rope`, `rope_backward` and `rope_`."""

from __future__ import annotations

from typing import Any

import torch

from minfer.functional import library
from minfer.functional.contract import Contract

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
CONTRACTS = {
    name: Contract(
        name,
        """
        q: float32 | float16 | bfloat16 (batch, seq, heads, head_dim)
        k: q (batch, seq, kv_heads, head_dim)
        cos: float32 (longest, half)
        sin: float32 (longest, half)
        positions: int32 (batch, seq)
        -> q (batch, seq, heads, head_dim)
        -> q (batch, seq, kv_heads, head_dim)
        """,
    )
    for name in ("rope", "rope_")
}
NO_GRADIENT = "has no gradient of cos and sin: give it detached tables"
OVERWRITES = "would overwrite q and k, which need a gradient: use minfer.rope, or call it under torch.no_grad()"


@library.public
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    start: int = 0,
    interleaved: bool = False,
) -> Pair:
    """q and k with the rotary position embedding (Su et al., RoFormer, 2021), two new contiguous tensors.

    q: (batch, seq, heads, head_dim) or (seq, heads, head_dim), float32, float16 or bfloat16.
    k: the same with its own number of heads, which may be 0 (`q[..., :0, :]`) where there is q alone.
    cos, sin: float32 tables, (longest, rotary_dim / 2), a row for each position. The first rotary_dim elements of a head
        are rotated, the others are copied.
    positions: int32, (batch, seq) or (seq,) as q has it: the row of each token in the tables. None: token s of each sequence
        has row start + s. The host does not check positions, because it would have to wait for the device: at a position
        without a row nothing is read, and the rotated elements are NaN.
    interleaved: pairs are (x[2i], x[2i + 1]); else (x[i], x[i + rotary_dim / 2]), as in GPT-NeoX and Llama.

    Arithmetic is fp32 and a result is rounded once. q and k may be parts of one projection: rows that start at multiples of
    16 bytes are read in place, others are copied first. `best` picks the kernel, which is compiled at its first call. Works
    under `torch.compile` and autograd, including second derivatives; cos and sin get no gradient. Raises ValueError for
    arguments that do not fit each other."""
    library.refuse_gradients("rope", cos, sin, why=NO_GRADIENT)
    cos, sin = _rows("rope", q, cos, sin, positions, start)
    if q.dim() == 3:
        one = positions if positions is None else positions[None]
        first, second = _rope_op(q.unsqueeze(0), k.unsqueeze(0), cos, sin, one, interleaved)
        return first[0], second[0]
    found: Pair = _rope_op(q, k, cos, sin, positions, interleaved)
    return found


@library.public
def rope_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    start: int = 0,
    interleaved: bool = False,
) -> Pair:
    """`rope` in place: changes q and k, and returns them. What is not rotated is neither read nor written. q and k must not
    share elements, because these would be rotated twice; the function only checks that they are not the same tensor
    object.

    Raises RuntimeError where autograd records and q or k needs a gradient, because autograd may have saved the values that
    would be overwritten: use `rope` there. Under `torch.no_grad()` PyTorch itself notices the change: a backward that needs
    the old values raises its RuntimeError "a variable modified by an inplace operation"."""
    if q is k:
        raise ValueError("minfer.rope_ takes a q and a k that share no elements, got one tensor as both")
    library.refuse_gradients("rope_", q, k, why=OVERWRITES)
    library.refuse_gradients("rope_", cos, sin, why=NO_GRADIENT)
    cos, sin = _rows("rope_", q, cos, sin, positions, start)
    if q.dim() == 3:
        one = positions if positions is None else positions[None]
        _rope_in_place_op(q.unsqueeze(0), k.unsqueeze(0), cos, sin, one, interleaved)
    else:
        _rope_in_place_op(q, k, cos, sin, positions, interleaved)
    return q, k


def _rows(name: str, q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, start: int) -> Pair:
    """The tables from the row of the first token on. Raises ValueError for q and tables that do not fit."""
    if q.dim() not in (3, 4):
        raise CONTRACTS[name].error("q of (batch, seq, heads, head_dim) or (seq, heads, head_dim)", tuple(q.shape))
    if positions is not None and start:
        raise CONTRACTS[name].error("positions or start", f"both; add start={start} to the positions")
    if start < 0:
        raise CONTRACTS[name].error("a start from 0", start)
    if not start:
        return cos, sin
    # Only the rows of these tokens, if the tables have all of them: so the shapes are the same for the next `start`.
    seq = q.shape[-3]
    end = start + seq if not torch.compiler.is_compiling() and start + seq <= len(cos) == len(sin) else None
    return cos[start:end], sin[start:end]


def _forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Pair:
    made = _fake(q, k, cos, sin, positions, interleaved)
    _call(made, (library.readable(q), library.readable(k)), cos, sin, positions, interleaved, False)
    return made


def _backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Pair:
    made = _fake(dq, dk, cos, sin, positions, interleaved)
    _call(made, (library.readable(dq), library.readable(dk)), cos, sin, positions, interleaved, True)
    return made


def _in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    _check("rope_", q, k, cos, sin, positions)
    if library.readable(q) is q and library.readable(k) is k:
        _call((q, k), (q[:, :0], k[:, :0]), cos, sin, positions, interleaved, False)
    else:  # rows that a kernel cannot read in place
        for x, rotated in zip((q, k), _forward(q, k, cos, sin, positions, interleaved), strict=True):
            x.copy_(rotated)


def _call(
    written: Pair, read: Pair, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, backward: bool
) -> None:
    """A kernel, with `read` empty where `written` is changed in place."""
    (batch, seq, heads, dim), kv_heads = written[0].shape, written[1].shape[2]
    if written[0].numel() == 0 and written[1].numel() == 0:
        return
    places = cos.new_empty(batch, 0, dtype=torch.int32) if positions is None else positions.contiguous()
    cos, sin = library.readable(cos), library.readable(sin)
    shape = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    shape["rotary_dim"] = 2 * cos.shape[1]
    params = {
        "positions": "given" if positions is not None else "counted",
        "place": "out" if read[0].shape[1] else "in",
    }
    if backward or interleaved:
        params["call"] = "_".join(["interleaved"] * interleaved + ["backward"] * backward)
    tensors = (*written, *read, places, cos, sin)
    library.call("rope", tensors, written[0].dtype, shape, params, backward=backward, interleaved=interleaved)


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Pair:
    _check("rope", q, k, cos, sin, positions)
    made: Pair = CONTRACTS["rope"].make(q, k, cos, sin, positions)
    return made


def _fake_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    _check("rope_", q, k, cos, sin, positions)


def _check(name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> None:
    contract = CONTRACTS[name]
    half = contract.check(q, k, cos, sin, positions)["half"]
    if not 1 <= half <= q.shape[3] // 2:
        raise contract.error(f"cos of 1 to head_dim / 2 = {q.shape[3] // 2} columns", half)
    if positions is None and cos.shape[0] < q.shape[1]:
        raise contract.error(f"cos with a row for each of {q.shape[1]} tokens, from start on", cos.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], output: Pair) -> None:
    _, _, cos, sin, positions, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin, positions)


def _rotate_back(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.minfer.rope_backward.default(dq, dk, *ctx.saved_tensors, ctx.interleaved), None, None, None, None


def _rotate_again(ctx: Any, ddq: Tensor, ddk: Tensor) -> tuple[Tensor | None, ...]:
    """Of backward, which is linear in the gradients: the rotation itself."""
    return *torch.ops.minfer.rope.default(ddq, ddk, *ctx.saved_tensors, ctx.interleaved), None, None, None, None


ARGUMENTS = "Tensor cos, Tensor sin, Tensor? positions, bool interleaved"
_rope_op = library.define(f"rope(Tensor q, Tensor k, {ARGUMENTS}) -> (Tensor, Tensor)", _forward, _fake)
library.define(f"rope_backward(Tensor dq, Tensor dk, {ARGUMENTS}) -> (Tensor, Tensor)", _backward, _fake)
_rope_in_place_op = library.define(f"rope_(Tensor(a!) q, Tensor(b!) k, {ARGUMENTS}) -> ()", _in_place, _fake_in_place)
torch.library.register_autograd("minfer::rope", _rotate_back, setup_context=_save, lib=library.LIBRARY)
torch.library.register_autograd("minfer::rope_backward", _rotate_again, setup_context=_save, lib=library.LIBRARY)
