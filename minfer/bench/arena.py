"""Memory that two processes see, and the guarded tensors in it: a file without a name on a CPU, an IPC handle on a GPU.

On a GPU the memory is the driver's and not PyTorch's. A handle opens the whole allocation that an address lies in, and
PyTorch's allocations also hold other tensors; it keeps a shared one until each process that opened it says that it is done,
which a killed one never does.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import math
import mmap
import os
from typing import Any

import torch

from minfer.bench.operands import ALIGNMENT, GUARD_BYTES, POISON, bits, guard

AT_ONCE = 1024  # guards that are compared together: 16 MiB
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# The driver maps an allocation in small pages in the process that opens its handle, unless its size is a multiple of this. On
# an H100 rmsnorm (67 MB read and written) took 38 us there, and 24 us otherwise.
PAGE = 2 << 20
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only value that there is


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _OnDevice:
    """Memory of a GPU by its address, as `torch.as_tensor` takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class Arena:
    """Hands out tensors of its memory. `handle` and `describe` are JSON for the other process's `attach` and `view`."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.handle: dict[str, Any]
        self.fds: tuple[int, ...] = ()  # for the other process to inherit
        unit = PAGE if device.type == "cuda" else ALIGNMENT
        nbytes = -(-nbytes // unit) * unit
        self._address = ctypes.c_uint64()  # of a GPU's memory
        if device.type == "cuda":
            _make_current(device)
            torch.cuda.empty_cache()
            handle = _Handle()
            driver("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(nbytes))
            driver("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
            self.handle = {"cuda": bytes(handle.reserved).hex(), "bytes": nbytes, "index": device.index or 0}
            self._memory = torch.as_tensor(_OnDevice(self._address.value, nbytes), device=device)
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

    def is_breached(self) -> bool:
        """Whether anything was written outside the tensors."""
        edges, found = iter(self._guards), []
        while batch := list(itertools.islice(edges, AT_ONCE)):
            odd = [
                edge for edge in batch if edge.storage_offset() % 2
            ]  # poison is a number of two bytes at even addresses
            even = [edge for edge in batch if not edge.storage_offset() % 2] + [edge[1:-1] for edge in odd]
            found.append((torch.cat([edge.view(torch.int16) for edge in even]) != POISON).any())
            if odd:
                found += [(torch.cat([edge[:1] for edge in odd]) != POISON >> 8).any()]
                found += [(torch.cat([edge[-1:] for edge in odd]) != POISON & 0xFF).any()]
        return bool(torch.stack(found).any()) if found else False

    def image(self) -> torch.Tensor:
        """A copy of what is in use, guards and all, in memory that nobody else sees."""
        return self._memory[: self._used].clone()

    def restore(self, image: torch.Tensor) -> None:
        """Put an image back."""
        copy_bits(image.view(torch.int64), self._memory[: len(image)].view(torch.int64))

    def take(self, addresses: torch.Tensor) -> torch.Tensor:
        """A copy of the bytes at these addresses, which count from the start of the memory."""
        return torch.index_select(self._memory, 0, addresses)

    def describe(self, tensor: torch.Tensor) -> dict[str, Any]:
        offset = tensor.data_ptr() - self._memory.data_ptr()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"offset": offset, "dtype": dtype, "shape": list(tensor.shape), "stride": list(tensor.stride())}

    def close(self) -> None:
        """On a CPU the memory lives on until the last process and tensor lets go of it. On a GPU it is gone; no process that
        opened it may be left."""
        for fd in self.fds:
            os.close(fd)
        if self._address.value:
            torch.cuda.synchronize()
            driver("cuMemFree_v2", self._address)


def copy_bits(tensor: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
    """`to`, or a new tensor with the same strides, with the bits of a dense tensor.

    On a GPU a kernel does it, and no copy engine. Kernels of two processes take turns on a GPU, but another process's kernel
    may run beside a copy engine. The judge times such copies, and subtracts their time from that of a block."""
    to = torch.empty_like(tensor) if to is None else to
    torch.bitwise_or(bits(tensor), 0, out=bits(to))
    return to


def attach(handle: dict[str, Any]) -> torch.Tensor:
    """The memory of an arena, as bytes."""
    if "fd" in handle:
        return torch.frombuffer(mmap.mmap(handle["fd"], handle["bytes"]), dtype=torch.uint8)
    device = torch.device("cuda", handle["index"])
    _make_current(device)
    address, theirs = ctypes.c_uint64(), _Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(handle["cuda"])))
    driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(LAZY_PEER_ACCESS))
    return torch.as_tensor(_OnDevice(address.value, handle["bytes"]), device=device)


def _make_current(device: torch.device) -> None:
    """PyTorch's context of a device in this thread, which the driver's functions need."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)


def driver(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver. Raises RuntimeError, or MemoryError where the GPU has too little memory."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        kind = MemoryError if status == OUT_OF_MEMORY else RuntimeError
        raise kind(f"the CUDA driver returned error {status} for {name}")


def view(memory: torch.Tensor, description: dict[str, Any]) -> torch.Tensor:
    """The tensor of a description."""
    dtype = getattr(torch, description["dtype"])
    end = description["offset"] + dtype.itemsize * math.prod(description["shape"])
    flat = memory[description["offset"] : end].view(dtype)
    return flat.as_strided(description["shape"], description["stride"], flat.storage_offset())


def guarded_bytes(nbytes: int, tensors: int) -> int:
    """At most how much of an arena so many bytes in so many tensors take."""
    return nbytes + tensors * (2 * GUARD_BYTES + ALIGNMENT)
