"""Problems and the kernels that solve them.

An `Op` is a problem: inputs, an fp64 reference, FLOPs and bytes. A `Kernel` is one implementation, in one file. A
`Case` is one cell of the matrix: op x kernel x dtype x parameters x shape. Nothing here knows how kernels are timed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]

DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    `params` are the op's own choices that change the numbers or the memory layout (for hgemm: `layout`,
    `accumulate`); `shape` maps the op's axes to sizes. Both are in the op's order, so that `key` is stable.
    """

    op: str
    kernel: str
    dtype: str
    params: Mapping[str, str]
    shape: Mapping[str, int]

    @property
    def key(self) -> str:
        """A stable name of this cell, such as `hgemm/v01_naive/float16/layout=TN,accumulate=float32/m=512,n=512,k=512`."""
        return f"{self.op}/{self.kernel}/{self.problem}"

    @property
    def problem(self) -> str:
        """`key` without op and kernel: what two kernels must share to be comparable."""
        params = ",".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.dtype}/{params}/{self.shape_name}"

    @property
    def shape_name(self) -> str:
        return ",".join(f"{k}={v}" for k, v in self.shape.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "kernel": self.kernel,
            "dtype": self.dtype,
            "params": dict(self.params),
            "shape": dict(self.shape),
        }


_OPS: dict[str, Op] = {}

# A support rule looks at a case and returns why it cannot be run, or None.
Rule = Callable[[Case], str | None]


def multiples(**factors: int) -> Rule:
    """The rule that each named axis be a multiple of the given factor."""

    def rule(case: Case) -> str | None:
        for axis, factor in factors.items():
            if case.shape[axis] % factor:
                return f"needs {axis} to be a multiple of {factor}, got {case.shape[axis]}"
        return None

    return rule


def at_most(**limits: int) -> Rule:
    """The rule that each named axis be no longer than the given limit."""

    def rule(case: Case) -> str | None:
        for axis, limit in limits.items():
            if case.shape[axis] > limit:
                return f"needs {axis} to be at most {limit}, got {case.shape[axis]}"
        return None

    return rule


def both(*rules: Rule) -> Rule:
    """The rule that each of the given ones be kept."""
    return lambda case: next((why for rule in rules if (why := rule(case))), None)


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, and what it supports.

    `archs` is `"sm_80+"` (that capability or newer) or one exact architecture such as `"sm_90a"`; it is empty for
    code that needs no GPU architecture of its own. `params` narrows the op's parameters to the values supported.
    """

    op: str
    name: str
    backend: str  # "torch", "cuda", "triton" or "cpp"
    source: Path
    function: Callable[..., None] | None = None  # backend "torch": the implementation itself
    archs: str = ""
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    requires: Rule | None = None
    deterministic: bool = True  # False: two runs may differ in their bits, as with floating-point atomics

    @property
    def devices(self) -> tuple[str, ...]:
        return {"torch": ("cpu", "cuda"), "cpp": ("cpu",)}.get(self.backend, ("cuda",))

    def elsewhere(self, device: str) -> str | None:
        """Why this kernel does not run on a kind of device, "cuda" or "cpu", as half a sentence, or None."""
        if device in self.devices:
            return None
        return "needs a CUDA GPU" if device == "cpu" else "runs on a CPU only (device=cpu)"

    def takes(self, case: Case) -> str | None:
        """Why this kernel is for other parameters than a case's, as half a sentence, or None."""
        for name, allowed in self.params.items():
            if case.params[name] not in allowed:
                return f"supports {name}={' or '.join(allowed)}, not {case.params[name]}"
        return None

    def unsupported(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        """Why this kernel cannot run `case`, as half a sentence, or None. `capability` None: the GPU is not known yet."""
        if case.dtype not in self.dtypes:
            return f"supports {' and '.join(self.dtypes)}, not {case.dtype}"
        if why := self.takes(case):
            return why
        if self.archs and capability is not None:
            major, minor = divmod(int(re.sub(r"\D", "", self.archs)), 10)
            fits = capability >= (major, minor) if self.archs.endswith("+") else capability == (major, minor)
            if not fits:
                return f"needs {self.archs}, this GPU is sm_{capability[0]}{capability[1]}"
        return self.requires(case) if self.requires else None

    def builds_for(self, arch: str) -> bool:
        """Whether the CUDA compiler may be asked for `arch` (`"sm_89"`, `"sm_90a"`)."""
        if self.archs.endswith("+"):
            return int(re.sub(r"\D", "", arch)) >= int(re.sub(r"\D", "", self.archs))
        return arch == self.archs

    @property
    def needs_build(self) -> bool:
        return self.backend in ("cuda", "cpp")

    @property
    def symbol(self) -> str:
        """The name of the function: of the torch op that a built kernel registers, or of a Triton file's function."""
        return self.op if self.backend == "triton" else f"{self.op}_{self.name}"

    def module(self) -> ModuleType:
        """A Triton kernel's module; imported only when the kernel runs, because Triton is absent on some machines."""
        return load_file(self.source)

    def sources(self) -> list[Path]:
        """The source file and every header of ours that it includes, directly or not."""
        found, queue = [], [self.source]
        while queue:
            path = queue.pop()
            if path in found:
                continue
            found.append(path)
            for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
                queue += [p for p in (path.parent / name, PACKAGE / name) if p.is_file()][:1]
        return sorted(found)

    def fingerprint(self) -> str:
        """A hash of everything of ours that decides this kernel's result and time: its sources, its op, the bench."""
        problem = PACKAGE / "ops" / self.op / "__init__.py"
        files = {*self.sources(), *(PACKAGE / "bench").glob("*.py"), *([problem] if problem.is_file() else [])}
        digest = hashlib.sha256()
        for path in sorted(files):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


@dataclass
class Op:
    """A problem and its registered kernels.

    A kernel is called as `kernel(out, *inputs, **call)` and writes `out`. `inputs(case, rand)` makes the read-only
    operands with `rand(*shape)`; `out_shape(case)` is the shape of the output, which has the case's dtype.
    `reference(out, *inputs, **call)` computes in the precision of what it is given (fp64) and returns the expected
    output and, of the same shape, the sum of the magnitudes that were added up, from which the error bound follows.
    `reduction(case)` is the length of the longest sum. `calls` are the scalar arguments under which a kernel is
    verified; the first is the one that is timed. `reads_out(**call)` says whether the call reads `out`.
    """

    name: str
    axes: tuple[str, ...]
    params: Mapping[str, tuple[str, ...]]  # every value that a case may state; the first is the default
    inputs: Callable[[Case, Callable[..., torch.Tensor]], tuple[torch.Tensor, ...]]
    out_shape: Callable[[Case], tuple[int, ...]]
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    reduction: Callable[[Case], int]
    flops: Callable[..., float]
    bytes: Callable[..., float]
    odd_shapes: tuple[Mapping[str, int], ...] = ()  # small and awkward; verified besides the case's own shape
    calls: tuple[Mapping[str, Any], ...] = ({},)
    reads_out: Callable[..., bool] = lambda **call: False
    kernels: dict[str, Kernel] = field(default_factory=dict)
    baselines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _OPS[self.name] = self

    @property
    def folder(self) -> Path:
        return PACKAGE / "ops" / self.name

    def torch(self, name: str, function: Callable[..., None], *, baseline: bool = False, **supports: Any) -> None:
        """Register a PyTorch implementation; ratios are against a baseline, of several the first that runs the case."""
        self._add(Kernel(self.name, name, "torch", self.folder / "__init__.py", function, **supports))
        if baseline:
            self.baselines.append(name)

    def cuda(self, file: str, *, name: str = "", archs: str = "sm_80+", **supports: Any) -> None:
        """Register a CUDA kernel, a `.cu` file that defines the torch op `minfer::<op>_<name>`, by default the file's
        name. A file may define several, which are registered one by one and built once."""
        self._add(Kernel(self.name, name or Path(file).stem, "cuda", self.folder / file, archs=archs, **supports))

    def triton(self, file: str, *, archs: str = "sm_80+", **supports: Any) -> None:
        """Register a Triton kernel, one `.py` file with a function named as the op."""
        self._add(Kernel(self.name, Path(file).stem, "triton", self.folder / file, archs=archs, **supports))

    def cpp(self, file: str, **supports: Any) -> None:
        """Register a C++ kernel for the CPU, one `.cpp` file that defines the torch op `minfer::<op>_<name>`."""
        self._add(Kernel(self.name, Path(file).stem, "cpp", self.folder / file, **supports))

    def _add(self, kernel: Kernel) -> None:
        if kernel.name in self.kernels:
            raise ValueError(f"{self.name} already has a kernel {kernel.name}; give {kernel.source.name} another name")
        self.kernels[kernel.name] = kernel

    def baseline(self, case: Case) -> str:
        """The name of the kernel that this case's ratios are against."""
        runs = (name for name in self.baselines if self.kernels[name].unsupported(case, None) is None)
        return next(runs, self.baselines[0])

    def case(self, kernel: str, dtype: str, shape: Mapping[str, int], params: Mapping[str, str] | None = None) -> Case:
        """A case of this op, its parameters completed by the defaults and put in order."""
        chosen = {name: (params or {}).get(name, values[0]) for name, values in self.params.items()}
        return Case(self.name, kernel, dtype, chosen, {axis: shape[axis] for axis in self.axes})

    def case_flops(self, case: Case) -> float:
        return float(self.flops(**case.shape))

    def case_bytes(self, case: Case) -> float:
        """The fewest bytes that device memory must move: each input read once, each output written once."""
        return float(self.bytes(**case.shape, size=DTYPES[case.dtype].itemsize))

    def case_input_bytes(self, case: Case) -> float:
        """The bytes of all inputs."""
        made = self.inputs(case, lambda *shape: torch.empty(shape, dtype=DTYPES[case.dtype], device="meta"))
        return float(sum(tensor.numel() * tensor.element_size() for tensor in made))


def names() -> list[str]:
    """The ops there are: the packages in this folder, and what `load_file` brought."""
    return sorted({info.name for info in pkgutil.iter_modules([str(PACKAGE / "ops")]) if info.ispkg} | set(_OPS))


def get(name: str) -> Op:
    """The op of that name; KeyError if there is none."""
    if name not in _OPS and name in names():
        importlib.import_module(f"minfer.ops.{name}")
    return _OPS[name]


@cache
def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path: a Triton kernel, or a user's own file that registers ops and kernels."""
    name = f"minfer_file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def every_kernel(backends: Iterable[str] = ("torch", "cuda", "triton", "cpp")) -> list[Kernel]:
    """Every registered kernel of the given backends, in ladder order; what the tests are parametrised over."""
    wanted = set(backends)
    return [k for name in names() for k in get(name).kernels.values() if k.backend in wanted]
