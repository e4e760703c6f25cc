"""How an op is specialised: what makes a kernel for one key, from a source in which the key's sizes are constants."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minfer import build
from minfer.build import cache
from minfer.ops import Case, Kernel, get
from minfer.specialise import llvm
from minfer.specialise.buckets import Key, text

SUFFIX = {"cpp": ".cpp", "cuda": ".cu", "triton": ".py", "llvm": ".ll"}
REGISTERED: dict[str, Recipe] = {}


@dataclass(frozen=True)
class Recipe:
    """How variants of an op's kernel are made.

    A variant is called as every kernel of the op is, with the op's tensors in its order, and must be right and faster than
    `fallback` at the largest sizes of its key.

    name: what sentences and traces call it; unique.
    op, fallback: the op, and its kernel that serves every size.
    backend: "cpp", "cuda", "triton" or "llvm": what `source` is written in.
    axes: the op's axes that the numbers of a key are, in order.
    source: `source(symbol, key)` is the text of a file that defines one kernel: the torch op `minfer::<symbol>` in C++ and
        CUDA, a function called as the op in Triton, `void @<symbol>(...)` in LLVM's IR.
    rest: the sizes of the other axes in the trial.
    dtype, params: of the trial. For others a variant may raise ValueError, or fail a check, before it writes anything; the
        fallback serves them.
    bind: for LLVM: `bind(address, key)` makes the function of Python that calls the machine code.
    file: the Python file that makes this recipe; the background process loads it. None: the one that calls `Recipe`.
    """

    name: str
    op: str
    fallback: str
    backend: str
    axes: tuple[str, ...]
    source: Callable[[str, Key], str]
    rest: Mapping[str, int]
    dtype: str = "float32"
    params: Mapping[str, str] = field(default_factory=dict)
    bind: Callable[[int, Key], Callable[..., None]] | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.backend not in SUFFIX:
            raise ValueError(f"recipe {self.name}: a backend is {' or '.join(SUFFIX)}, not {self.backend!r}")
        if (self.backend == "llvm") != (self.bind is not None):
            raise ValueError(f"recipe {self.name}: `bind` belongs to the backend llvm, and to no other")
        try:
            op = get(self.op)
        except KeyError:
            raise ValueError(f"recipe {self.name}: there is no op {self.op!r}") from None
        if self.fallback not in op.kernels:
            raise ValueError(
                f"recipe {self.name}: {self.op} has no kernel {self.fallback!r}, only {', '.join(op.kernels)}"
            )
        if sorted([*self.axes, *self.rest]) != sorted(op.axes):
            raise ValueError(
                f"recipe {self.name}: `axes` and `rest` must be the axes of {self.op}: {', '.join(op.axes)}"
            )
        # Two frames up: below is the __init__ that dataclass wrote.
        file = self.file or Path(sys._getframe(2).f_globals.get("__file__", "unknown.py")).absolute()
        object.__setattr__(self, "file", file)
        if (other := REGISTERED.get(self.name)) and other.file and other.file.resolve() != file.resolve():
            raise ValueError(f"recipe {self.name}: {other.file} has one of that name")
        REGISTERED[self.name] = self

    @property
    def device(self) -> str:
        """The kind of device that variants run on."""
        return "cpu" if self.backend in ("cpp", "llvm") else "cuda"

    def named(self, key: Key) -> str:
        """A variant, as a sentence has it."""
        return f"{self.name} {text(key)}"

    def case(self, key: Key, kernel: str = "") -> Case:
        """The case of the trial: the largest sizes of the key."""
        if len(key) != len(self.axes):
            raise ValueError(f"{self.name} has keys of {', '.join(self.axes)}, got {text(key)}")
        shape = {**self.rest, **dict(zip(self.axes, (span.high for span in key), strict=True))}
        return get(self.op).case(kernel or self.fallback, self.dtype, shape, self.params)

    def generic(self) -> Kernel:
        return get(self.op).kernels[self.fallback]

    def kernel(self, key: Key) -> Kernel:
        """The variant as a kernel, whose file is then in the build cache. Raises OSError where it cannot be written."""
        stem = f"{self.name}_{text(key).replace('-', '_')}"
        stem += "_" + hashlib.sha256(self.source(stem, key).encode()).hexdigest()[:8]
        written = self.source(f"{self.op}_{stem}", key)
        path = cache.root() / "specialised" / f"{stem}{SUFFIX[self.backend]}"
        if not path.is_file() or path.read_text() != written:
            write(path, written)

        def requires(case: Case) -> str | None:
            inside = all(span.low <= case[axis] <= span.high for axis, span in zip(self.axes, key, strict=True))
            return None if inside else f"is for {text(key)}"

        about: dict[str, Any] = {"dtypes": (self.dtype,), "requires": requires}
        about["params"] = {name: (value,) for name, value in self.params.items()}
        if self.bind is None:
            archs = "sm_80+" if self.device == "cuda" else ""
            return Kernel(self.op, stem, self.backend, path, archs=archs, **about)
        return Kernel(self.op, stem, "torch", path, lambda *t, **c: self._missing(), **about)  # loaded by `function`

    def _missing(self) -> None:
        raise AssertionError("an LLVM variant is called as `function` returns it")

    def function(self, key: Key, arch: str = "") -> Callable[..., None]:
        """The variant, compiled now unless it is in the build cache. Raises BuildError or OSError."""
        kernel = self.kernel(key)
        if self.bind is None:
            return build.function(kernel, arch)
        return self.bind(llvm.load(kernel.source, f"{self.op}_{kernel.name}"), key)

    def held_bytes(self, key: Key, arch: str = "") -> int:
        """What the variant's machine code takes: the size of its library or object; of a Triton variant that of what this
        process compiled or loaded for it, 0 before its first call."""
        kernel = self.kernel(key)
        if self.backend == "triton":
            functions = vars(kernel.module()).values()
            caches = [cache for each in functions for cache in getattr(each, "device_caches", {}).values()]
            return sum(len(binary.asm["cubin"]) for cache in caches for binary in cache[0].values())
        built = cache.find(kernel, arch) if kernel.needs_build else None
        path = Path(built.library) if built else llvm.object_file(kernel.source) if self.bind else None
        return path.stat().st_size if path and path.is_file() else 0


def write(path: Path, content: str) -> None:
    """Replace a file at once: other processes see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
        Path(partial).replace(path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
