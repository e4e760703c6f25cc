"""What a call uses besides time: device memory beyond its operands, and how many kernels it launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


def workspace_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory that PyTorch's allocator holds during a call, beyond what it holds before: temporaries of a GPU."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def launches(call: Callable[[], object], device: torch.device) -> int:
    """The kernels that a call launches, by the CUDA graph that it is captured in; copies and fills do not count. The call
    must have been made once before, because a first call may do what cannot be captured.

    Raises RuntimeError where the call cannot be captured, or PyTorch does not keep the graph."""
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    driver, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(raw, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)))
    found = 0
    for node in nodes:
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        found += kind.value == KERNEL_NODE
    return found


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver returned error {status} for the nodes of a graph")
