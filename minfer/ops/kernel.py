"""A kernel: one implementation of an op, in one file, and what it supports."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from minfer.ops.axes import Ragged
from minfer.ops.case import Case, Rule
from minfer.ops.sources import MOST_FILES, MOST_TOTAL, SourceError, quoted_includes, read_source
from minfer.ops.tensors import DTYPES

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, and what it supports.

    `archs` is `"sm_80+"` (that capability or newer) or one exact architecture such as `"sm_90a"`; it is empty for
    code that needs no GPU architecture of its own. `params` narrows the op's parameters to the values supported.
    """

    op: str
    name: str
    backend: str  # "torch", "cuda", "triton", "cpp", or "function": one of minfer's own, which chooses among kernels
    source: Path
    function: Callable[..., Any] | None = None  # backends "torch" and "function": the implementation itself
    archs: str = ""
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    requires: Rule | None = None
    returns: tuple[
        int, ...
    ] = ()  # backends "torch" and "function": for these of its arguments it returns new tensors instead of writing
    left_out: Mapping[str, str] = field(default_factory=dict)  # values of the op's parameters that a case may leave out
    deterministic: bool = True  # False: two runs may differ in their bits, as with floating-point atomics
    package: str = (
        ""  # backend "torch": the module, not PyTorch's, that the implementation is of; it runs on a GPU only
    )
    root: Path = PACKAGE  # the folder `minfer` whose headers it includes; another one for another revision's kernel
    composes: tuple[str, ...] = ()  # the ops whose functions it calls; empty for backend "function": its own op's
    modules: tuple[Path, ...] = ()  # the files that call them
    against: str = ""  # the kernel that its ratios are against; empty: the op's baseline
    # What `minfer.functional.best` has to know of it.
    least_measured: str = ""  # an axis: the kernel is not chosen where it is shorter than in all of its measurements
    preferred: str = (
        ""  # a rule of `minfer.functional.preferred`: the kernel is taken where it holds and nothing was measured
    )
    before_hopper: str = ""  # such a rule for GPUs before Hopper, where it takes the place of `preferred`
    entries: tuple[str, ...] = ()  # further torch ops that it registers, named as its own with `_<entry>` behind
    early: bool = False  # `minfer.functional.early` calls it, by its first entry if it has one

    @property
    def devices(self) -> tuple[str, ...]:
        if self.package:
            return ("cuda",)
        both = ("cpu", "cuda")
        return {"torch": both, "function": both, "cpp": ("cpu",)}.get(self.backend, ("cuda",))

    def elsewhere(self, device: str) -> str | None:
        """Why this kernel does not run on a kind of device, "cuda" or "cpu", as half a sentence, or None."""
        if device in self.devices:
            return None
        return "needs a CUDA GPU" if device == "cpu" else "runs on a CPU only (device=cpu)"

    def takes(self, case: Case) -> str | None:
        """Why this kernel is for other parameters than a case's, as half a sentence, or None."""
        for name, allowed in self.params.items():
            if (value := case.params.get(name, self.left_out.get(name, ""))) not in allowed:
                return f"supports {name}={' or '.join(allowed)}, not {value}"
        return None

    def unsupported(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        """Why this kernel cannot run `case`, as half a sentence, or None. `capability` None: the GPU is not known yet."""
        if case.dtype not in self.dtypes:
            has = f"{' and '.join(self.dtypes)}, not {case.dtype}"
            if self.source.is_relative_to(self.root):
                return f"supports {has}"
            return f"is registered for {has}; if it supports {case.dtype}, add it to dtypes= where you register it"
        if why := self.takes(case):
            return why
        if self.archs and capability is not None:
            major, minor = divmod(int(re.sub(r"\D", "", self.archs)), 10)
            fits = capability >= (major, minor) if self.archs.endswith("+") else capability == (major, minor)
            if not fits:
                return f"needs {self.archs}, this GPU is sm_{capability[0]}{capability[1]}"
        if self.package and capability is not None and importlib.util.find_spec(self.package) is None:
            return f"needs the package {self.package}: pip install 'minfer[peers]'"
        return self._ask_rule(case)

    def _ask_rule(self, case: Case) -> str | None:
        """What the rule `requires` says. Raises TypeError if that is a condition, and whatever the rule raises."""
        why = self.requires(case) if self.requires else None
        if why is None or isinstance(why, str):
            return why
        raise TypeError(
            f"it returned {why!r}; return None if the kernel runs the case, else a string that says why not"
        )

    def check(self, params: Mapping[str, Any]) -> None:
        """Raises ValueError for a mistake in what it says that it supports; `params` are the op's, with `call`."""

        def refuse(what: str, value: object, takes: str) -> NoReturn:
            raise ValueError(f"{what}= of kernel {self.name} is {value!r}; it takes {takes}")

        known = ", ".join(DTYPES)
        if not self.dtypes or not isinstance(self.dtypes, tuple | list) or not set(self.dtypes) <= DTYPES.keys():
            refuse("dtypes", self.dtypes, f"a tuple of names, such as ('float32',), from {known}")
        if self.archs and not re.fullmatch(r"sm_\d{2,3}(\+|[af]?)", self.archs):
            refuse(
                "archs", self.archs, "'sm_80+' for that architecture and newer ones, or a single one such as 'sm_90a'"
            )
        if self.requires is not None and not callable(self.requires):
            refuse("requires", self.requires, "a function of a case, such as multiples(n=8)")
        if not isinstance(self.returns, tuple | list) or not all(isinstance(place, int) for place in self.returns):
            refuse("returns", self.returns, "a tuple of places among its arguments, such as (0,)")
        for name, allowed in self.params.items():
            if name not in params:
                refuse("params", dict(self.params), f"only the parameters of {self.op}: {', '.join(params)}")
            if not isinstance(allowed, tuple | list):
                refuse("params", dict(self.params), f"a tuple of values for each parameter, such as ({allowed!r},)")
            valid = params[name]
            if not isinstance(valid, Ragged) and not set(allowed) <= set(valid):
                refuse(f"params[{name!r}]", tuple(allowed), f"only values of {name}: {', '.join(valid)}")

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
        return self.op if self.backend == "triton" else re.sub(r"\W", "_", f"{self.op}_{self.name}")

    def module(self) -> ModuleType:
        """A Triton kernel's module; imported only when the kernel runs, because Triton is absent on some machines."""
        return load_file(self.source)

    @property
    def include_paths(self) -> tuple[Path, ...]:
        """Where its compiler looks for headers of ours; a kernel's own folder comes before these."""
        beside = self.root / "ops" / self.op  # a kernel elsewhere can include the headers that one in this folder can
        return (self.root,) if self.source.is_relative_to(self.root) else (self.root, beside)

    def sources(self) -> list[Path]:
        """The source file and every header of ours that it includes by a name between quotation marks, directly or not.
        This project's files come first, so that a hash of the files of a kernel from outside does not depend on where its
        folder sorts. Raises SourceError."""
        found: dict[Path, int] = {}  # with the length of each
        seen, queue = set(), [self.source]
        while queue:
            path = queue.pop()
            if (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            text = read_source(path)
            found[path] = len(text)
            included = {} if path.suffix == ".py" else dict.fromkeys(quoted_includes(text))
            if len(found) + len(included) > MOST_FILES or sum(found.values()) > MOST_TOTAL:
                has = f"{len(found) + len(included):,} files, {sum(found.values()):,} bytes of them read by {path.name}"
                raise SourceError(f"{self.source.name} includes {has}; it may have {MOST_FILES:,} and {MOST_TOTAL:,}")
            for name in included:
                places = (path.parent / name, *(folder / name for folder in self.include_paths))
                queue += [p for p in places if os.path.isfile(p)][:1]  # noqa: PTH113 - it raises nothing
        return sorted(found, key=lambda path: (not path.is_relative_to(self.root), path))


class Returning:
    """A PyTorch function that returns new tensors, called as every kernel is: then it copies them to the outputs.

    `compute` does not, so that a timing need not contain a copy that the function's users do not make."""

    def __init__(self, function: Callable[..., Any], places: Sequence[int]) -> None:
        self.function, self.places = function, places

    def compute(self, *tensors: torch.Tensor, **call: Any) -> tuple[torch.Tensor, ...]:
        """The new tensors, in the order of `places`."""
        found = self.function(*tensors, **call)
        return found if isinstance(found, tuple) else (found,)

    def write(self, computed: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Copy what was computed to the outputs among the tensors. Raises ValueError where it is not of them."""
        wanted = ", ".join(str(tuple(tensors[place].shape)) for place in self.places)
        found = ", ".join(
            str(tuple(x.shape)) if isinstance(x, torch.Tensor) else f"{type(x).__name__}" for x in computed
        )
        if found != wanted:
            raise ValueError(
                f"it returned {found}; with returns={self.places} it must return tensors of the shapes {wanted}"
            )
        for result, place in zip(computed, self.places, strict=True):
            tensors[place].copy_(result)

    def __call__(self, *tensors: torch.Tensor, **call: Any) -> None:
        self.write(self.compute(*tensors, **call), tensors)


def check_name(what: str, name: str) -> None:
    """Raises ValueError for a name that cannot be part of a case's key, of a file's name and of a table."""
    if not re.fullmatch(r"[\w@+-][\w.@+-]{0,99}", name, re.ASCII):
        allowed = "a name is at most 100 letters, digits and the signs _ - . @ +, and begins with no dot"
        raise ValueError(f"{what} is called {name[:100]!r}; {allowed}")


def is_loaded(path: Path) -> bool:
    """Whether `load_file` has imported this path in this process."""
    return _module_name(path) in sys.modules


def _module_name(path: Path) -> str:
    return f"minfer_file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"


@cache
def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path: a Triton kernel, or a user's own file that registers ops and kernels."""
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
