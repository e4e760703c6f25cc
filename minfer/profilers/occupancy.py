"""How many warps of a kernel a multiprocessor can hold."""

from __future__ import annotations

from dataclasses import dataclass

from minfer.build import RESERVED_SHARED

WARP = 32
PARTITIONS = 4  # of a multiprocessor, each with its own part of the registers
REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
SHARED_UNIT = 128  # bytes; shared memory is given to a block in multiples of this


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor has room for."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 64 << 10


# CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability".
LIMITS = {
    "sm_80": Limits(warps=64, blocks=32, shared_bytes=164 << 10),
    "sm_86": Limits(warps=48, blocks=16, shared_bytes=100 << 10),
    "sm_89": Limits(warps=48, blocks=24, shared_bytes=100 << 10),
    "sm_90": Limits(warps=64, blocks=32, shared_bytes=228 << 10),
    "sm_90a": Limits(warps=64, blocks=32, shared_bytes=228 << 10),
}


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
