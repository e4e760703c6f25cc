"""What a plan and a summary must know of the profilers: which counters there are, and of which hardware."""

from __future__ import annotations

from dataclasses import dataclass

# The instructions of the tensor cores, by their opcode up to the first dot.
TENSOR = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "BMMA", "DMMA")

STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip

# Our names, and Nsight Compute's (`ncu --query-metrics`; all exist on ad102 and gh100).
SETS: dict[str, dict[str, str]] = {
    "roofline": {
        "dram_read_bytes": "dram__bytes_read.sum",
        "dram_write_bytes": "dram__bytes_write.sum",
        "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "l2_hit_percent": "lts__t_sector_hit_rate.pct",
        "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm_mhz": "sm__cycles_elapsed.avg.per_second",
    },
    "memory": {
        "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
        "l2_bytes": "lts__t_bytes.sum",
        "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "global_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
        "global_store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    },
    "occupancy": {
        "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
        "registers": "launch__registers_per_thread",
        "shared_bytes": "launch__shared_mem_per_block",
        "block_threads": "launch__block_size",
        "grid_blocks": "launch__grid_size",
        "waves": "launch__waves_per_multiprocessor",
        "blocks_by_registers": "launch__occupancy_limit_registers",
        "blocks_by_shared": "launch__occupancy_limit_shared_mem",
        "blocks_by_warps": "launch__occupancy_limit_warps",
    },
    "bank_conflicts": {
        "shared_load_instructions": "smsp__sass_inst_executed_op_shared_ld.sum",
        "shared_load_wavefronts": "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "ldmatrix_conflicts": "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
        "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
        "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    },
    "divergence": {
        "active_threads": "smsp__thread_inst_executed_per_inst_executed.ratio",
        "unpredicated_threads": "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio",
        "branches": "smsp__inst_executed_op_branch.sum",
        "divergent_branch_targets": "smsp__sass_branch_targets_threads_divergent.sum",
        "uniform_branch_percent": "smsp__sass_average_branch_targets_threads_uniform.pct",
    },
    "stalls": {
        "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
        **{f"stall_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS},
    },
}
SETS["full"] = {name: metric for chosen in list(SETS.values()) for name, metric in chosen.items()}


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
