"""Triton on a machine without a GPU: it compiles for an H100, and what it hands to its C launcher is noted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minfer.functional import library
from minfer.ops import Kernel

STREAM = 77


class Launched(list[tuple[Any, ...]]):
    """What was handed to C at each launch, with addresses for tensors. It calls the hooks that it is handed."""

    def __call__(self, *handed: Any) -> None:
        if not isinstance(handed[3], int):
            raise TypeError("the stream is no integer")
        kinds = {type(x).__name__: x for x in handed}
        for hook in [x for x in handed if type(x).__name__ == "HookChain"]:
            hook(kinds["LazyDict"])
        self.append(tuple(plain(x) for x in handed if type(x).__name__ not in ("HookChain", "LazyDict", "NoneType")))


def plain(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(plain, x))
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


@contextmanager
def faked(*kernels: Kernel) -> Iterator[Launched]:
    """Within, Triton kernels called with tensors on a CPU are compiled, and what would be launched is noted."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher

    launched = Launched()

    class Launcher(CudaLauncher):
        def __init__(self, src: Any, metadata: Any) -> None:
            self.launch, self.num_ctas, self.gsan_enabled = launched, 1, False
            self.global_scratch_size, self.global_scratch_align = metadata.global_scratch_size, 1
            self.profile_scratch_size, self.profile_scratch_align = metadata.profile_scratch_size, 1
            self.launch_cooperative_grid, self.launch_pdl = False, False
            self.arg_annotations, self.kernel_signature = [], b""

    class Utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448}

        @staticmethod
        def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
            return object(), f"{name} {hash(kernel)}", 32, 0, 1024

        @staticmethod
        def unload_module(module: Any) -> None:
            pass

    class Driver:
        utils, launcher_cls = Utils, Launcher
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: STREAM + device)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    jits = [x for kernel in kernels for x in vars(kernel.module()).values() if isinstance(x, triton.JITFunction)]
    before = triton.runtime.driver._active
    for jit in jits:
        jit.device_caches.clear()
    triton.runtime.driver.set_active(Driver())
    try:
        yield launched
    finally:
        library.forget()
        for jit in jits:
            jit.device_caches.clear()
        gc.collect()  # kernels are unloaded, by this driver
        triton.runtime.driver._active = before
