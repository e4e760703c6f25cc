"""Links between the calls of a block: an input of call i+1 depends on the result of call i.

In a linked block, some elements of an input of call i+1 change their signs between call i and call i+1. The result of
call i decides which ones. Let the input have n elements. The result's elements j, j + n, j + 2n, ... decide about its
element j. It changes its sign if an odd number of them have a sign bit that differs from the lowest bit of their
exponent. Rounding rarely changes these bits, so a kernel cannot choose them. Nor can it compute the result of a later
call before it has the results of all earlier ones. `minfer.worker.isolated` applies the links in the kernel's process.
The judge does not rely on that: it computes the inputs from the results that it finds.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minfer.bench.arena import driver
from minfer.ops import DTYPES, Case, Op, Spec
from minfer.ops.tensors import Floats

EXPONENT_BITS = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11, "float8_e4m3fn": 4, "float8_e5m2": 5}
FOLDED = 64  # most elements of the result that decide about one of the input; of a larger result only some count
THREADS, MOST_BLOCKS = 256, 264  # of the kernel in link.ptx


@dataclass(frozen=True)
class Link:
    """How the result of a call changes the input of the next one. A link sees both as integers of `width` bytes. An
    element of the input consists of `per_input` of them, and one of the result of `per_result`. Of each element, one
    integer counts."""

    input: str
    result: str
    width: int
    per_input: int
    per_result: int
    first: int  # which integer of an element of the result counts
    step: int  # of so many elements of the result, the first counts
    shift: int  # from the bit that is compared with the sign, to the sign bit

    @staticmethod
    def between(op: Op, case: Case) -> Link | None:
        """The link for the tensors of a case; None if there is no input of floats, or no result, of which a call uses
        every element.

        The input is the smallest one that has at least two axes and a 64th of the result's number of elements, if there
        is one. Usually these are the activations. A bias would not do: a kernel could compute the result first, and add
        the change."""
        whole = [
            spec for spec in op.specs(case) if 0 < spec.nbytes <= op.bytes(case)
        ]  # not a cache or an embedding's table
        floats = [spec for spec in whole if isinstance(spec.fill, Floats) and spec.dtype in EXPONENT_BITS]
        results = _first([spec for spec in whole if spec.role == role] for role in ("out", "inout"))
        inputs = [spec for spec in floats if spec.role != "out"]
        if not results or not inputs:
            return None
        result = max(results, key=lambda spec: spec.numel)
        large = [spec for spec in inputs if len(spec.shape) > 1 and spec.numel * FOLDED >= result.numel]
        only_read = [spec for spec in large if spec.role == "in"]
        changed = min(only_read or large or inputs, key=lambda spec: spec.nbytes)
        sizes = DTYPES[changed.dtype].itemsize, DTYPES[result.dtype].itemsize
        width = min(*sizes, 4)
        exponent = EXPONENT_BITS.get(result.dtype)
        last = 8 * width - 1
        return Link(
            input=changed.name,
            result=result.name,
            width=width,
            per_input=sizes[0] // width,
            per_result=sizes[1] // width,
            first=0 if exponent is None else sizes[1] // width - 1,
            step=max(1, result.numel // (FOLDED * changed.numel)) | 1,
            shift=last if exponent is None else min(exponent, last),
        )

    def views(self, tensors: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Views of the integers that count: of the input, in `tensors`, and of the result, in `results`."""
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[self.width]
        flat = [_flat(tensor).view(integers) for tensor in (tensors[self.input], results[self.result])]
        return [flat[0][self.per_input - 1 :: self.per_input], flat[1][self.first :: self.per_result * self.step]]

    def prepare(self, tensors: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> Callable[[], object]:
        """A function that changes the input by the result. All else is done here in advance, so that on a CPU a link
        takes no longer than a short call."""
        changed, result = self.views(tensors, results)
        if changed.device.type == "cuda":
            return lambda: _launch(self, changed, result)
        return _on_cpu(self.shift, changed.numpy(), result.numpy())


def _first(found: Iterable[list[Spec]]) -> list[Spec]:
    """The first list that is not empty."""
    return next(filter(None, found), [])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of the memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _on_cpu(shift: int, changed: np.ndarray[Any, Any], result: np.ndarray[Any, Any]) -> Callable[[], object]:
    size, sign = len(changed), np.array(np.iinfo(changed.dtype).min, changed.dtype)
    bits = np.empty_like(result, order="C")
    rows, rest = divmod(len(bits), size)
    folded = np.empty(size, changed.dtype) if rows > 1 or (rows and rest) else bits
    turns, left = divmod(size, len(folded))

    def link() -> None:
        np.left_shift(result, shift, out=bits)
        np.bitwise_xor(bits, result, out=bits)
        if folded is not bits:
            np.bitwise_xor.reduce(bits[: rows * size].reshape(rows, size), axis=0, out=folded)
            if rest:
                folded[:rest] ^= bits[rows * size :]
        np.bitwise_and(folded, sign, out=folded)
        if turns == 1:
            np.bitwise_xor(changed[: len(folded)], folded, out=changed[: len(folded)])
        else:
            many = changed[: turns * len(folded)].reshape(turns, len(folded))  # a view, as `changed` has one stride
            np.bitwise_xor(many, folded, out=many)
        if left:
            changed[-left:] ^= folded[:left]

    return link


def _launch(link: Link, changed: torch.Tensor, result: torch.Tensor) -> None:
    """Launch the kernel of link.ptx on the current stream."""
    numbers = (changed.numel(), changed.stride(0), result.numel(), result.stride(0), link.shift)
    held = [ctypes.c_uint64(changed.data_ptr()), ctypes.c_uint64(result.data_ptr()), *map(ctypes.c_int64, numbers)]
    arguments = (ctypes.c_void_p * len(held))(*[ctypes.addressof(each) for each in held])
    blocks = min(MOST_BLOCKS, math.ceil(changed.numel() / THREADS))
    stream = ctypes.c_void_p(torch.cuda.current_stream(changed.device).cuda_stream)
    function = _function(link.width, changed.device.index or 0)
    one, shared = ctypes.c_uint(1), ctypes.c_uint(0)
    grid = (ctypes.c_uint(blocks), one, one, ctypes.c_uint(THREADS), one, one)
    driver("cuLaunchKernel", function, *grid, shared, stream, arguments, None)


@functools.cache
def _function(width: int, index: int) -> ctypes.c_void_p:
    """The kernel for integers of `width` bytes, on the GPU `index`, whose context must be current."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), Path(__file__).with_name("link.ptx").read_bytes() + b"\0")
    driver("cuModuleGetFunction", ctypes.byref(function), module, f"link_{width}".encode())
    return function
