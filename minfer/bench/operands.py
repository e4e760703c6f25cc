"""The tensors of a case: made from a seed, outputs poisoned, each with guard zones around it."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Sequence

import torch

from minfer.ops import DTYPES, Case, Draw, Op, Spec, Tensors
from minfer.ops.tensors import Floats, PageTable, Undo

GUARD_BYTES, ALIGNMENT = 16384, 512  # before and after each tensor; more than any alignment that kernels ask for

# NaN as float16, as bfloat16 and, twice over, as float32; a large number as an integer. Whoever reads a guard computes
# NaN or an index out of bounds, and a write to it is noticed. A byte of it, 0x7F, is NaN in both fp8 formats.
POISON, POISON_BYTE = 0x7FA5, 0x7F

SHARED: dict[tuple[Spec, torch.device], torch.Tensor] = {}  # the shared tensors of this process
MUCH = 64 << 20  # bytes of a case's shared tensors, for which those of other cases are freed

# These change one tensor: the op's first input of plain floats, such as its activations. All other tensors are normal.
# With "clustered", sequences share pages, too.
TAILED, CLUSTERED = STRUCTURES = ("tailed", "clustered")
TAIL, EACH = 16.0, 64  # how many times as large an outlier is, and of how many elements one is an outlier
CLUSTER, COLUMNS = 8.0, 16  # how many times as large the columns of a cluster are, and how many there are

LIBC = ctypes.CDLL(None, use_errno=True)
MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # all pages at once, and not each at its first use


class Operands:
    """The tensors of one case by name, in the op's order. The same seed makes the same values, on the same kind of device.

    `distribution` is the name of that of floats, as in `minfer.ops.tensors.Draw`, or one of STRUCTURES.

    `fenced`, on a CPU: each tensor ends less than ALIGNMENT bytes before a protected page. A kernel that reads from this page
    crashes, even if it discards what it read."""

    def __init__(
        self, op: Op, case: Case, seed: int, distribution: str, device: torch.device, fenced: bool = False
    ) -> None:
        self.op, self.case, self.distribution = op, case, distribution
        self.specs = op.specs(case)
        self.own = [spec for spec in self.specs if not spec.shared]
        self._guards: list[torch.Tensor]
        found = self._allocate_fenced() if fenced and device.type == "cpu" else self._allocate(device)
        found |= shared_tensors(self.specs, device)
        self.tensors = {spec.name: found[spec.name] for spec in self.specs}
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Make all values anew, in place."""
        device = next(iter(self.tensors.values())).device
        structure = self.distribution if self.distribution in STRUCTURES else ""
        draw = Draw(
            torch.Generator(device).manual_seed(seed), random.Random(seed), "normal" if structure else self.distribution
        )
        made: dict[str, torch.Tensor] = {}
        for spec in self.own:
            tensor = made[spec.name] = self.tensors[spec.name]
            if spec.role == "out":
                poison(tensor)
            else:
                spec.fill.make(tensor, made, draw)
                if structure and takes_structure(spec):
                    add_structure(structure, tensor, draw)
                    structure = ""
                if self.distribution == CLUSTERED and isinstance(spec.fill, PageTable):
                    share_pages(tensor, spec.fill.used)

    def _allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        """All tensors in one piece of memory, whose rest is guards."""
        starts, end = [], GUARD_BYTES
        for spec in self.own:
            starts.append(end)
            end += -(-(spec.nbytes + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        memory = torch.empty(end, dtype=torch.uint8, device=device)
        memory.view(torch.int16).fill_(POISON)
        ends = [start + spec.nbytes for start, spec in zip(starts, self.own, strict=True)]
        self._guards = [memory[begin:stop] for begin, stop in zip([0, *ends], [*starts, end], strict=True)]
        return {
            spec.name: spec.view(memory[start : start + spec.nbytes].view(DTYPES[spec.dtype]))
            for spec, start in zip(self.own, starts, strict=True)
        }

    def _allocate_fenced(self) -> dict[str, torch.Tensor]:
        """Each tensor in pages of its own, with guards before it and in the rest of its last page. All are mapped at once, in
        half of the time."""
        sizes = [-(-(GUARD_BYTES + spec.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE for spec in self.own]
        pages = mmap.mmap(-1, sum(sizes) + len(sizes) * mmap.PAGESIZE, flags=MAPPED)
        torch.frombuffer(pages, dtype=torch.int16).fill_(POISON)
        found, self._guards, begin = {}, [], 0
        for spec, size in zip(self.own, sizes, strict=True):
            memory = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=begin)
            protect(memory.data_ptr() + size)
            start = (size - spec.nbytes) // ALIGNMENT * ALIGNMENT
            end = start + spec.nbytes
            self._guards += [memory[:start], memory[end:]]
            found[spec.name] = spec.view(memory[start:end].view(DTYPES[spec.dtype]))
            begin += size + mmap.PAGESIZE
        return found

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What a kernel is called with."""
        return tuple(self.tensors.values())

    def named(self, *roles: str) -> dict[str, torch.Tensor]:
        """The tensors of these roles, but for shared ones."""
        return {spec.name: self.tensors[spec.name] for spec in self.own if spec.role in roles}

    def is_breached(self) -> bool:
        """Whether anything was written outside the tensors."""
        return bool(self.find_breach())

    def find_breach(self) -> torch.Tensor:
        """The same as a tensor, so that nothing waits for a GPU."""
        return torch.stack([is_overwritten(edge) for edge in self._guards]).any()


def takes_structure(spec: Spec) -> bool:
    """Whether a tensor is an input of plain floats. Fills that ops derive from `Floats` have a structure of their own."""
    return (
        spec.role == "in"
        and type(spec.fill) is Floats
        and spec.numel > 0
        and bool(spec.shape)
        and DTYPES[spec.dtype].itemsize > 1
    )


def add_structure(structure: str, tensor: torch.Tensor, draw: Draw) -> None:
    """Make some values large, in place. Activations of language models have such outliers.

    tailed: in each row of the last axis one of each 64 elements is 16 times as large; their places are random. exp overflows
    if a kernel does not subtract the row's maximum. In float16 a square may overflow, too.
    clustered: 16 neighbouring columns, the same in all rows, are 8 times as large as the others. So the largest elements of a
    row are neighbours, and tokens that choose experts by them all choose the same."""
    row = tensor.shape[-1]
    if structure == TAILED:
        first = torch.arange(0, row, EACH, device=tensor.device)
        places = torch.empty((*tensor.shape[:-1], len(first)), dtype=torch.int64, device=tensor.device)
        places.random_(0, EACH, generator=draw.generator).remainder_((row - first).clamp(max=EACH)).add_(first)
        tensor.scatter_(-1, places, tensor.gather(-1, places) * TAIL)
    else:
        begin = draw.random.randrange(max(1, row - COLUMNS + 1))
        tensor[..., begin : begin + COLUMNS] *= CLUSTER


def share_pages(table: torch.Tensor, used: Sequence[int]) -> None:
    """Let all sequences begin with the pages of the first one, as requests with the same prompt do. The last page of each,
    which may end early, stays its own."""
    for row, count in enumerate(used):
        same = min(used[0], count) - 1
        table[row, : max(0, same)] = table[0, : max(0, same)]


def shared_tensors(specs: Sequence[Spec], device: torch.device) -> dict[str, torch.Tensor]:
    """The shared tensors among these, by name. They are made when they are first asked for, and freed when those of another
    case need much memory."""
    wanted = {(spec, device): spec for spec in specs if spec.shared}
    if sum(spec.nbytes for spec in wanted.values()) >= MUCH:
        for key in SHARED.keys() - wanted.keys():
            del SHARED[key]
    draw = Draw(torch.Generator(device), random.Random(0), "normal")
    for key, spec in wanted.items():
        if key not in SHARED:
            tensor = spec.view(torch.empty(spec.numel, dtype=DTYPES[spec.dtype], device=device))
            spec.fill.make(tensor, {}, draw)
            SHARED[key] = tensor
    return {spec.name: SHARED[key] for key, spec in wanted.items()}


def change(op: Op, case: Case, tensors: Tensors, seed: int, distribution: str) -> Undo:
    """Change the inputs of a timed round a little, in place, by the seed; returns what takes it back."""
    if not tensors:
        return lambda: None
    rng, device = random.Random(seed), next(iter(tensors.values())).device
    draw = Draw(torch.Generator(device).manual_seed(seed), rng, distribution)
    if op.change is not None:
        return op.change(case, tensors, draw)
    chosen = [s for s in op.specs(case) if s.role != "out" and s.fill.changes and s.numel and not s.shared]
    if not chosen:
        return lambda: None
    spec = rng.choice(chosen)
    return spec.fill.change(tensors[spec.name], tensors, draw)


def protect(address: int) -> None:
    """Let nobody read or write the page of the CPU's memory that begins here."""
    if LIBC.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect failed")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers of the same size."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def guard(edge: torch.Tensor) -> None:
    """Fill bytes with poison, the lower byte of it where their address is even."""
    odd = edge.storage_offset() % 2
    edge[odd::2], edge[1 - odd :: 2] = POISON & 0xFF, POISON >> 8


def is_overwritten(edge: torch.Tensor) -> torch.Tensor:
    """Whether a guard's bytes were written, as a tensor."""
    odd = edge.storage_offset() % 2
    even = edge[odd : odd + (len(edge) - odd) // 2 * 2]
    wrong = (even.view(torch.int16) != POISON).any()
    return wrong if not odd else wrong | (edge[0] != POISON >> 8)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor so that what is not written shows: NaN, or a large integer."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.fill_(float("nan"))
    elif tensor.element_size() > 1:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 0x5A)
    else:
        tensor.view(torch.uint8).fill_(POISON_BYTE)
