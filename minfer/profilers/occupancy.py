"""How many warps of a kernel a multiprocessor can hold."""

from __future__ import annotations

from minfer.build.device_code import RESERVED_SHARED
from minfer.plan.counters import LIMITS

WARP = 32
PARTITIONS = 4  # of a multiprocessor, each with its own part of the registers
REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
SHARED_UNIT = 128  # bytes; shared memory is given to a block in multiples of this


def blocks(arch: str, threads: int, registers: int, shared_bytes: int) -> int:
    """How many blocks fit on a multiprocessor at once; 0 when not even one does.

    `threads` a block, `registers` a thread, `shared_bytes` a block, static and dynamic, without what CUDA reserves. The
    rules, and the units above, are those of `cudaOccMaxActiveBlocksPerMultiprocessor` (cuda_occupancy.h) for compute
    capabilities 8.0 to 9.0. KeyError for an architecture without limits here.
    """
    limits = LIMITS[arch]
    warps = _ceil(threads, WARP)
    by_warps = limits.warps // warps
    a_warp = _ceil(max(registers, 1) * WARP, REGISTER_UNIT) * REGISTER_UNIT
    by_registers = limits.registers // PARTITIONS // a_warp * PARTITIONS // warps
    a_block = _ceil(shared_bytes + RESERVED_SHARED, SHARED_UNIT) * SHARED_UNIT
    return min(limits.blocks, by_warps, by_registers, limits.shared_bytes // a_block)


def percent(arch: str, threads: int, registers: int, shared_bytes: int) -> float:
    """Theoretical occupancy: the warps of the blocks that fit, of the warps that a multiprocessor holds, in percent."""
    warps = blocks(arch, threads, registers, shared_bytes) * _ceil(threads, WARP)
    return 100.0 * warps / LIMITS[arch].warps


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
