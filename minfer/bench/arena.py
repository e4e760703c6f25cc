"""Memory that two processes see, and the guarded tensors in it: a file without a name on a CPU, an IPC handle on a GPU."""

from __future__ import annotations

import base64
import fcntl
import math
import mmap
import os
import pickle
from typing import Any

import torch

from minfer.bench.operands import ALIGNMENT, GUARD_BYTES, guard, overwritten


class Arena:
    """Hands out tensors of its memory. `handle` and `describe` are JSON for the other process's `attach` and `view`."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.handle: dict[str, Any]
        self.fds: tuple[int, ...] = ()  # for the other process to inherit
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if device.type == "cuda":
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            shared = self._memory.untyped_storage()._share_cuda_()
            self.handle = {"cuda": base64.b64encode(pickle.dumps(shared)).decode()}
        else:
            fd = os.memfd_create("minfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            # Who maps a file that another process makes shorter is killed when it reads it (SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self.fds, self.handle = (fd,), {"fd": fd, "bytes": nbytes}
            self._memory = attach(self.handle)
        self.clear()

    def clear(self) -> None:
        """Take all tensors back."""
        self._used = 0
        self._guards: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a dense tensor, strides and all, with guard zones around it."""
        size = tensor.numel() * tensor.element_size()
        start = self._used + GUARD_BYTES
        end = start + size
        self._used = -(-(end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        if self._used > len(self._memory):
            raise MemoryError(f"{self._used} bytes of tensors do not fit in an arena of {len(self._memory)}")
        for edge in (self._memory[start - GUARD_BYTES : start], self._memory[end : end + GUARD_BYTES]):
            guard(edge)
            self._guards.append(edge)
        flat = self._memory[start:end].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset()).copy_(tensor)

    def breached(self) -> bool:
        """Whether anything was written outside the tensors."""
        return any(bool(overwritten(edge)) for edge in self._guards)

    def describe(self, tensor: torch.Tensor) -> dict[str, Any]:
        offset = tensor.data_ptr() - self._memory.data_ptr()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"offset": offset, "dtype": dtype, "shape": list(tensor.shape), "stride": list(tensor.stride())}

    def close(self) -> None:
        """The memory lives on until the last process and tensor lets go of it."""
        for fd in self.fds:
            os.close(fd)


def attach(handle: dict[str, Any]) -> torch.Tensor:
    """The memory of an arena, as bytes."""
    if "fd" in handle:
        return torch.frombuffer(mmap.mmap(handle["fd"], handle["bytes"]), dtype=torch.uint8)
    torch.cuda.init()  # PyTorch does not do it here, and crashes without
    storage = torch.UntypedStorage._new_shared_cuda(*pickle.loads(base64.b64decode(handle["cuda"])))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view(memory: torch.Tensor, description: dict[str, Any]) -> torch.Tensor:
    """The tensor of a description."""
    dtype = getattr(torch, description["dtype"])
    end = description["offset"] + dtype.itemsize * math.prod(description["shape"])
    flat = memory[description["offset"] : end].view(dtype)
    return flat.as_strided(description["shape"], description["stride"], flat.storage_offset())


def guarded_bytes(nbytes: int, tensors: int) -> int:
    """At most how much of an arena so many bytes in so many tensors take."""
    return nbytes + tensors * (2 * GUARD_BYTES + ALIGNMENT)
