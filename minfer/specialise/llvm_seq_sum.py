"""`seq_sum` of padded fp32 sequences of one length as LLVM's intermediate representation: unrolled, in vectors.

The length is a constant, so no loop has a bound to test within UNROLL elements, and the rest is narrower vectors instead of a
loop over single elements. Four sums of a vector each are in flight, as additions take four cycles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch

from minfer.specialise.buckets import Key

LANES, SUMS = 16, 4
UNROLL = 1024  # elements of a loop's body; shorter sequences have no loop


def source(symbol: str, key: Key) -> str:
    """IR of `void symbol(float* y, float* x, int64 rows, int64 y_stride, int64 x_stride)`; strides are in elements.
    Raises ValueError for a range of lengths."""
    if key[0].low != key[0].high:
        raise ValueError(f"an LLVM variant of seq_sum is for one length, not for {key[0].low} to {key[0].high}")
    return "\n".join(_lines(symbol, key[0].high)) + "\n"


def _lines(symbol: str, length: int) -> Iterator[str]:
    rounds, zero = length // UNROLL, "zeroinitializer"
    vector = f"<{LANES} x float>"
    yield from (
        f"; {symbol}: {length} elements a sequence.",
        f"declare float @llvm.vector.reduce.fadd.v{LANES}f32(float, {vector})",
        *(f"declare float @llvm.vector.reduce.fadd.v{width}f32(float, <{width} x float>)" for width in (8, 4, 2)),
        f"define void @{symbol}(ptr noalias %y, ptr noalias readonly %x, i64 %rows, i64 %y_stride, i64 %x_stride) {{",
        "entry:",
        "  %none = icmp sle i64 %rows, 0",
        "  br i1 %none, label %done, label %row",
        "row:",
        "  %r = phi i64 [ 0, %entry ], [ %r.next, %write.end ]",
        "  %x.at = mul i64 %r, %x_stride",
        "  %x.row = getelementptr float, ptr %x, i64 %x.at",
        "  %y.at = mul i64 %r, %y_stride",
        "  %y.row = getelementptr float, ptr %y, i64 %y.at",
    )
    sums = [zero] * SUMS
    if rounds:
        yield from ("  br label %read", "read:", "  %i = phi i64 [ 0, %row ], [ %i.next, %read ]")
        yield from (f"  %in{n} = phi {vector} [ {zero}, %row ], [ %out{n}, %read ]" for n in range(SUMS))
        yield "  %x.i = getelementptr float, ptr %x.row, i64 %i"
        sums = [f"%in{n}" for n in range(SUMS)]
        for step in range(UNROLL // LANES):
            out = f"%out{step % SUMS}" if step >= UNROLL // LANES - SUMS else f"%s{step}"
            yield from _load(f"%v{step}", "%x.i", step * LANES, LANES)
            yield f"  {out} = fadd {vector} {sums[step % SUMS]}, %v{step}"
            sums[step % SUMS] = out
        yield f"  %i.next = add i64 %i, {UNROLL}"
        yield f"  %more = icmp ult i64 %i.next, {rounds * UNROLL}"
        yield "  br i1 %more, label %read, label %rest"
    else:
        yield "  br label %rest"
    yield "rest:"
    at = rounds * UNROLL
    for step in range((length - at) // LANES):
        yield from _load(f"%w{step}", "%x.row", at, LANES)
        yield f"  %t{step} = fadd {vector} {sums[step % SUMS]}, %w{step}"
        sums[step % SUMS] = f"%t{step}"
        at += LANES
    yield f"  %a = fadd {vector} {sums[0]}, {sums[1]}"
    yield f"  %b = fadd {vector} {sums[2]}, {sums[3]}"
    yield f"  %c = fadd {vector} %a, %b"
    yield f"  %sum{LANES} = call reassoc float @llvm.vector.reduce.fadd.v{LANES}f32(float 0.0, {vector} %c)"
    total, pieces = f"%sum{LANES}", list(_pieces(length - at))
    for width in pieces:
        yield from _load(f"%p{width}", "%x.row", at, width)
        if width == 1:
            yield f"  %sum1 = fadd float {total}, %p1"
        else:
            of = f"<{width} x float>"
            yield f"  %sum{width} = call reassoc float @llvm.vector.reduce.fadd.v{width}f32(float {total}, {of} %p{width})"
        total, at = f"%sum{width}", at + width
    yield f"  %one = insertelement {vector} poison, float {total}, i64 0"
    yield f"  %all = shufflevector {vector} %one, {vector} poison, <{LANES} x i32> zeroinitializer"
    if rounds:
        yield from ("  br label %write", "write:", "  %j = phi i64 [ 0, %rest ], [ %j.next, %write ]")
        yield "  %y.j = getelementptr float, ptr %y.row, i64 %j"
        for step in range(UNROLL // LANES):
            yield from _store("%all", f"%k{step}", "%y.j", step * LANES, LANES)
        yield f"  %j.next = add i64 %j, {UNROLL}"
        yield f"  %again = icmp ult i64 %j.next, {rounds * UNROLL}"
        yield "  br i1 %again, label %write, label %write.end"
    else:
        yield "  br label %write.end"
    yield "write.end:"
    at = rounds * UNROLL
    for step in range((length - at) // LANES):
        yield from _store("%all", f"%l{step}", "%y.row", at, LANES)
        at += LANES
    for width in pieces:
        part = total
        if width > 1:
            part = f"%all{width}"
            lanes = f"<{width} x i32> zeroinitializer"
            yield f"  {part} = shufflevector {vector} %all, {vector} poison, {lanes}"
        yield from _store(part, f"%m{width}", "%y.row", at, width)
        at += width
    yield from (
        "  %r.next = add i64 %r, 1",
        "  %last = icmp eq i64 %r.next, %rows",
        "  br i1 %last, label %done, label %row",
        "done:",
        "  ret void",
        "}",
    )


def _pieces(rest: int) -> Iterator[int]:
    """Powers of two below LANES that add up to the rest."""
    return (width for width in (8, 4, 2, 1) if rest & width)


def _of(width: int) -> str:
    return "float" if width == 1 else f"<{width} x float>"


def _load(name: str, base: str, at: int, width: int) -> Iterator[str]:
    yield f"  {name}.p = getelementptr float, ptr {base}, i64 {at}"
    yield f"  {name} = load {_of(width)}, ptr {name}.p, align 4"


def _store(value: str, name: str, base: str, at: int, width: int) -> Iterator[str]:
    yield f"  {name} = getelementptr float, ptr {base}, i64 {at}"
    yield f"  store {_of(width)} {value}, ptr {name}, align 4"


def bind(address: int, key: Key) -> Callable[..., None]:
    """The op's function over the machine code, in the calling thread. It raises ValueError for what it is not for."""
    length, pointer, number = key[0].high, ctypes.c_void_p, ctypes.c_int64
    machine_code = ctypes.CFUNCTYPE(None, pointer, pointer, number, number, number)(address)
    float32 = torch.float32

    def seq_sum(y: torch.Tensor, x: torch.Tensor, seqlens: torch.Tensor) -> None:
        rows, longest = x.shape
        (y_stride, y_last), (x_stride, x_last) = y.stride(), x.stride()
        if longest != length or y.shape != x.shape or x.dtype is not float32 or y.dtype is not float32 or len(seqlens):
            raise ValueError(f"seq_sum: this variant takes full float32 sequences of {length}, got {tuple(x.shape)}")
        if (y_last != 1 or x_last != 1) and length > 1:
            raise ValueError("seq_sum: x and y must be contiguous in their last dimension")
        machine_code(y.data_ptr(), x.data_ptr(), rows, y_stride, x_stride)

    return seq_sum
