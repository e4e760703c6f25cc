"""What tutorials and papers say of these kernels, and which rows answer it.

A claim is data: a sentence, how it is read, and queries. A query names an op, a kernel and the shapes whose rows it wants,
and what it shows of them: a share of the measured peak, a ratio to another kernel's throughput, a counter, or a ratio of two
measured peaks. Add a claim here and run `python analysis/make.py claims`; a claim without measured rows says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GEMM = {"layout": "TN", "accumulate": "float32"}


@dataclass(frozen=True)
class Share:
    """Throughput in percent of what the measured peaks allow, cold and steady."""


@dataclass(frozen=True)
class Over:
    """Throughput over another kernel's at the same problem, cold and steady; in percent of it."""

    kernel: str


@dataclass(frozen=True)
class Counter:
    """One of the row's `metrics`, or the ratio of two."""

    name: str
    over: str = ""


@dataclass(frozen=True)
class Peaks:
    """One measured peak over another, in percent: the best of all rows of the device; `per_clock` as operations a cycle,
    each at the clock that it was measured at."""

    name: str
    over: str
    per_clock: bool = False


@dataclass(frozen=True)
class Schedulers:
    """The number of warp schedulers of a multiprocessor: its warps, divided by the warps of one scheduler. By Little's law the
    warps of a scheduler are the instructions that it issues a cycle, times the cycles that a warp spends from one instruction
    to its next."""


Shown = Share | Over | Counter | Peaks | Schedulers


@dataclass(frozen=True)
class Query:
    """Rows of one op, dtype and parameters: one kernel, at each of the shapes that was measured."""

    op: str
    kernel: str
    shapes: tuple[Mapping[str, int], ...]  # the first of them that a device has rows of counts
    show: Shown
    dtype: str = "bfloat16"
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A sentence that people say, and what it takes to be true."""

    said: str
    read: str  # the limits in words
    queries: tuple[Query, ...]
    least: float | None = None  # of each figure, cold and steady
    most: float | None = None


def square(*sides: int) -> tuple[Mapping[str, int], ...]:
    return tuple({"m": side, "n": side, "k": side} for side in sides)


def gemm(kernel: str, side: int, show: Shown) -> Query:
    return Query("hgemm", kernel, square(side), show, params=GEMM)


def norm(kernel: str, tokens: int, hidden: int, show: Share | Over) -> Query:
    return Query("rmsnorm", kernel, ({"tokens": tokens, "hidden": hidden},), show)


def rotation(kernel: str, seq: int, **params: str) -> Query:
    """One fp32 tensor of 32 sequences and 8 heads of 256, into a new one."""
    shape = {"batch": 32, "seq": seq, "heads": 8, "kv_heads": 0, "head_dim": 256, "rotary_dim": 256}
    given = {"positions": "counted", "place": "out"} | params
    return Query("rope", kernel, (shape,), Over("torch"), dtype="float32", params=given)


def streams(op: str, kernel: str, **params: str) -> Query:
    """A demonstration over 2²⁶ elements of fp32, which runs for long enough for reliable counts."""
    return Query(op, kernel, ({"n": 1 << 26},), Schedulers(), dtype="float32", params=params)


ROTATIONS = [(kernel, seq) for kernel in ("v02_vectors", "triton_heads") for seq in (32, 128, 512, 2048)]
SAME_WORK = "of one fp32 tensor of 32 sequences and 8 heads of 256 both make a new one, with the same tables"

CLAIMS = (
    Claim(
        "cuBLAS is basically at peak.",
        "it reaches at least 95 % of the measured peak at large squares; the peak is that of a short probe, so the steady share"
        " includes what the power limit takes",
        tuple(gemm("torch", side, Share()) for side in (4096, 8192, 16384)),
        least=95,
    ),
    Claim(
        "Beating cuBLAS is impractical.",
        "no kernel here has more than 101 % of its throughput at large squares, cold and steady",
        tuple(gemm(kernel, side, Over("torch")) for kernel, side in (
            ("v13_cooperative", 4096), ("v13_cooperative", 8192), ("v14_stream_k", 8192), ("v14_stream_k", 16384)
        )),
        most=101,
    ),
    Claim(
        "WMMA reaches about 7 % of cuBLAS.",
        "the plain WMMA rung has between 5 and 9 % of its throughput",
        tuple(gemm("v03_wmma", side, Over("torch")) for side in (2048, 4096, 8192)),
        least=5,
        most=9,
    ),
    Claim(
        "Keeping A stationary is quite slow.",
        "the rung that keeps A in registers has less than half of the throughput of the one that keeps C there",
        tuple(gemm("v09_a_stationary", side, Over("v07_tuned")) for side in (2048, 4096, 8192)),
        most=50,
    ),
    Claim(
        "Padding and XOR swizzling both remove bank conflicts.",
        "either leaves at most 0.1 conflicts a shared-memory load instruction",
        tuple(
            gemm(kernel, 2048, Counter("ncu.shared_load_conflicts", "ncu.shared_load_instructions"))
            for kernel in ("v02b_padded", "v02c_swizzled")
        ),
        most=0.1,
    ),
    Claim(
        "Swizzling is faster than padding.",
        "the swizzled tile has more throughput than the padded one, all else equal (CUDA cores, 4-byte reads)",
        tuple(gemm("v02c_swizzled", side, Over("v02b_padded")) for side in (512, 1024, 2048)),
        least=101,
    ),
    Claim(
        "mma.sync with fp32 sums runs at half the rate of fp16 sums.",
        "the measured peak with fp32 sums, in operations a cycle, is at most 60 % of that with fp16 sums",
        tuple(
            gemm("torch", 8192, Peaks(f"{kind}_float16_float32", f"{kind}_float16_float16", per_clock=True))
            for kind in ("mma", "wgmma")
        ),
        most=60,
    ),
    Claim(
        "On Hopper, mma.sync reaches about two thirds of the tensor cores' rate.",
        "its measured peak, in operations a cycle, is between 60 and 70 % of that of wgmma",
        (gemm("torch", 8192, Peaks("mma_bfloat16_float32", "wgmma_bfloat16_float32", per_clock=True)),),
        least=60,
        most=70,
    ),
    Claim(
        "Triton is as fast as CUDA C++.",
        "the best Triton kernel has at least 99 % of the throughput of the best CUDA kernel",
        (
            gemm("triton_persistent", 4096, Over("v13_cooperative")),
            gemm("triton_persistent", 8192, Over("v14_stream_k")),
            norm("triton_rows", 128, 4096, Over("v02_vectors")),
            norm("triton_rows", 4096, 4096, Over("v02_vectors")),
            norm("triton_rows", 4096, 16384, Over("v02_vectors")),
        ),
        least=99,
    ),
    Claim(
        "For what memory bounds, torch.compile is enough.",
        "its kernel has at least 99 % of the throughput of the CUDA kernel",
        tuple(norm("torch_compile", *shape, Over("v02_vectors")) for shape in ((1, 4096), (4096, 4096), (4096, 16384))),
        least=99,
    ),
    Claim(
        "A fused RoPE is 8 times as fast as eager PyTorch, forward.",
        f"it has at least 800 % of the throughput of x * cos + rotate_half(x) * sin: {SAME_WORK}",
        tuple(rotation(kernel, seq) for kernel, seq in ROTATIONS),
        least=800,
    ),
    Claim(
        "A fused RoPE is 6 times as fast as eager PyTorch, backward.",
        f"it has at least 600 % of the throughput of the same with -sin, which is the gradient: {SAME_WORK}",
        tuple(rotation(kernel, seq, call="backward") for kernel, seq in ROTATIONS),
        least=600,
    ),
    Claim(
        "A multiprocessor has 4 warp schedulers (some say 8).",
        "a multiprocessor has 3.8 to 4.2 times as many warps as one of its schedulers; a scheduler's warps are the instructions"
        " that it issues a cycle, times the cycles that a warp spends from one instruction to its next; Nsight Compute counts"
        " the warps of the multiprocessor, the instructions and the cycles",
        (
            Query("sgemm", "torch", square(4096), Schedulers(), dtype="float32"),
            Query("sgemm", "v06_deeper_tiles", square(4096), Schedulers(), dtype="float32"),
            *(streams("producer_consumer", kernel) for kernel in ("v01_waits", "v02_every_warp", "v03_producer")),
            *(streams("ilp", kernel) for kernel in ("v01_one", "v03_four", "v05_sixteen")),
        ),
        least=3.8,
        most=4.2,
    ),
)  # fmt: skip
