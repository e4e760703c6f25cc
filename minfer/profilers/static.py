"""The profiler `static`: what the compiled machine code of a kernel says, for any architecture, without a GPU.

The metrics of an architecture `A` are `static.A.<name>`: `registers` and `stack_bytes` a thread, `shared_bytes` (static)
and `max_threads` (the launch bound) a block, `local_store_bytes` and `local_load_bytes` (of a thread's spills, and of
arrays indexed at run time), `occupancy_percent`, `instructions`, and the mix of `sass.Function.mix`, such as
`HMMA.16816.F32` or `LDG.128`. Instructions are counted as they stand in the code: what is in a loop counts once.
Occupancy is theoretical: it needs a launch bound, and does not know of dynamic shared memory, which a launch chooses.

Which device function belongs to a case. A kernel's file has one for every template instance. Of those
  - whose element types fit: the first of `__half`, `__nv_bfloat16`, `float`, ... among the template arguments is the case's
    dtype; the others are its `accumulate`, where the op has such a parameter, else dtypes of the case's tensors, or `float`;
    without any among the template arguments, the case's dtype is among the function's parameters, or no element type is;
  - whose enumerators fit: where an enumeration of the kernel's own sources has one of the case's parameters (`TN`) or its
    call (`backward`), a
    template argument of that type is this enumerator;
it is the one with the most tensor-core instructions, then with the most multiply-adds, then the longest. What else fits
and has another name, such as the kernel that adds up what the first one left, is `static.A.<its name>.<metric>`.

A Triton kernel is compiled for what it is called with, so a case that was measured is called here once, and has metrics
for this GPU's architecture alone; `dynamic_shared_bytes` is then the shared memory of the launch, and in the occupancy.
Where a call launches several kernels, it is the one that the same order puts first.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from minfer import ops
from minfer.bench import device as devices
from minfer.build import device_code, toolchain
from minfer.build.errors import BuildError
from minfer.ops import Case, Kernel
from minfer.ops.sources import read_source
from minfer.plan.counters import LIMITS
from minfer.profilers import Finding, Job, occupancy, sass
from minfer.profilers.calls import attempt, prepare_call
from minfer.profilers.jit import find_launched
from minfer.profilers.sass import Function

RUNS_KERNELS = False
OF_CUB = re.compile(r"(void )?cub::")  # PyTorch's headers include it, and it leaves an empty kernel in every file

ELEMENTS = {
    "__half": "float16", "__nv_bfloat16": "bfloat16", "float": "float32", "__nv_fp8_e4m3": "float8_e4m3fn",
    "__nv_fp8_e5m2": "float8_e5m2",
}  # fmt: skip
ELEMENT = re.compile(rf"\b({'|'.join(ELEMENTS)})\b")


def profile(job: Job) -> Iterator[Finding]:
    """A finding for each case. Kernels and architectures are compiled several at once, and found again in the cache."""
    archs: list[str] = job.options["archs"]
    read: dict[tuple[str, str, str], Future[list[Function]]] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for case in job.cases:
            kernel = ops.get(case.op).kernels[case.kernel]
            for arch in archs:
                key = (case.op, case.kernel, arch)
                if key not in read and refusal(kernel, case, archs) is None and kernel.builds_for(arch):
                    read[key] = pool.submit(functions, kernel, arch, job.build_timeout_s)
        for case in job.cases:
            kernel = ops.get(case.op).kernels[case.kernel]
            if kernel.backend == "triton" and job.device == "cuda" and case.key in job.measured:
                yield attempt(find_triton, kernel, case)
                continue
            if why := refusal(kernel, case, archs):
                yield Finding(why=why)
                continue
            yield find(
                kernel, case, {arch: read[case.op, case.kernel, arch] for arch in archs if kernel.builds_for(arch)}
            )


def refusal(kernel: Kernel, case: Case, archs: list[str]) -> str | None:
    """Why a case has no machine code to read, as a sentence, or None."""
    if kernel.backend == "triton":
        return "a Triton kernel has machine code only after a call on a GPU"
    if kernel.backend != "cuda":
        return "reads CUDA kernels only"
    if not any(kernel.builds_for(arch) for arch in archs):
        return f"the kernel needs {kernel.archs}, asked for {', '.join(archs)}"
    return kernel.unsupported(case, None)


def functions(kernel: Kernel, arch: str, timeout_s: float) -> list[Function]:
    """The device functions of a CUDA kernel's file. Raises BuildError."""
    home = toolchain.toolkit()
    cubin = device_code.cached_cubin(kernel, arch, timeout_s)
    assert home is not None  # it has compiled just now
    try:
        return sass.read(cubin, arch, home)
    except OSError as error:
        raise BuildError(f"{error.filename} does not run: {error.strerror}; install cuobjdump and nvdisasm") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{Path(error.cmd[0]).name} cannot read the cubin: {error.stderr.strip()}") from error


def find(kernel: Kernel, case: Case, read: dict[str, Future[list[Function]]]) -> Finding:
    """What the code of a case says, for every architecture."""
    metrics: dict[str, float] = {}
    names: dict[str, str] = {}
    problems = []
    for arch, future in read.items():
        try:
            chosen = choose(case, kernel, future.result())
        except BuildError as error:
            problems.append(f"for {arch}: {error}")
            continue
        if not chosen:
            problems.append(f"for {arch}: no device function takes {case.dtype} with this case's parameters")
        for place, function in chosen.items():
            scope = f"{arch}.{place}" if place else arch
            names[scope] = function.name
            metrics |= {f"{scope}.{name}": value for name, value in describe(function, arch).items()}
    return Finding(metrics, names, "; ".join(problems) or "ok")


def describe(function: Function, arch: str, dynamic_shared_bytes: int = 0) -> dict[str, float]:
    """The metrics of a function. `dynamic_shared_bytes` a block, where they are known, count for the occupancy."""
    found: dict[str, float] = {
        "registers": function.registers,
        "stack_bytes": function.stack_bytes,
        "local_store_bytes": function.local_bytes("STL"),
        "local_load_bytes": function.local_bytes("LDL"),
        "shared_bytes": function.shared_bytes,
        "instructions": function.opcodes.total(),
    }
    if function.max_threads is not None:
        shared = function.shared_bytes + dynamic_shared_bytes
        found["max_threads"] = function.max_threads
        found["occupancy_percent"] = occupancy.percent(arch, function.max_threads, function.registers, shared)
    return found | function.mix()


def find_triton(kernel: Kernel, case: Case) -> Finding:
    """What the code says that one call of a Triton case on this GPU launches."""
    module = kernel.module()
    binaries = find_launched(module, prepare_call(case, "cuda"))
    if not binaries:
        return Finding(why=f"{kernel.source.name} launched no @triton.jit function that it names itself")
    arch = devices.arch(devices.pick("cuda"))
    if arch not in LIMITS:
        return Finding(why=f"knows no {arch}; known: {', '.join(LIMITS)}")
    read = [describe_triton(binary.asm["cubin"], arch, binary.metadata.shared) for binary in binaries]
    function, metrics = max(read, key=lambda pair: pair[0].rank)
    return Finding({f"{arch}.{name}": value for name, value in metrics.items()}, {arch: function.name})


def describe_triton(cubin: bytes, arch: str, shared_bytes: int) -> tuple[Function, dict[str, float]]:
    """The function and its metrics of a compiled Triton kernel: its `asm["cubin"]` and `metadata.shared`, all dynamic.

    Raises OSError or CalledProcessError when the disassemblers are absent or refuse it."""
    home = toolchain.toolkit()
    if home is None:
        raise FileNotFoundError("no CUDA toolkit that fits this PyTorch; set CUDA_HOME")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        function = max(sass.read(path, arch, home), key=lambda f: f.rank)
    return function, describe(function, arch, shared_bytes) | {"dynamic_shared_bytes": shared_bytes}


def choose(case: Case, kernel: Kernel, found: list[Function]) -> dict[str, Function]:
    """The functions that belong to a case, by the rule at the top: the first under "", the others under their names."""
    enumerations = enumerators(kernel)
    own = [f for f in found if not OF_CUB.match(f.name)]
    fitting = [f for f in own if _types_fit(case, f.name) and _enumerators_fit(case, f.name, enumerations)]
    chosen: dict[str, Function] = {}
    for function in sorted(fitting, key=lambda f: f.rank, reverse=True):
        name = base_name(function.name)
        if not chosen:
            chosen[""], first = function, name
        elif name != first:
            chosen.setdefault(name, function)
    return chosen


def base_name(name: str) -> str:
    """A demangled function's own name: `void a::f<T, 1>(int)` -> `f`."""
    found = re.search(r"(\w+)\s*(?:<.*>)?\(", name.replace("(anonymous namespace)", "anonymous"))
    return found[1] if found else name


def template_arguments(name: str) -> tuple[str, str]:
    """The template arguments of a demangled function, and its parameters: `void f<T, 1>(int)` -> `T, 1` and `int`."""
    name = name.replace("(anonymous namespace)", "anonymous")
    depth = 0
    begin = end = 0
    for index, letter in enumerate(name):
        if letter == "<":
            begin = index + 1 if depth == 0 else begin  # of several, as in A<1>::f<2>(), the last
            depth += 1
        elif letter == ">":
            depth -= 1
            end = index
        elif letter == "(" and depth == 0:
            arguments = name[begin:end] if name[end : end + 2] == ">(" else ""
            return arguments, name[index + 1 : name.rfind(")")]
    return "", ""


def _element_types(arguments: str) -> list[str]:
    """The element types among template arguments: those within the first one, and those that are arguments themselves. What
    another argument is a template of, as in `multiply<Shape<__half, 64>, Gemm<__half>>`, counts where there is nothing else."""
    flat, depth = "", 0
    for letter in arguments:
        depth += (letter == "<") - (letter == ">")
        flat += "\n" if letter == "," and depth == 0 else letter
    first, *others = [part.strip() for part in flat.split("\n")]
    words = ELEMENT.findall(first) + [word for word in others if word in ELEMENTS]
    return [ELEMENTS[word] for word in words or ELEMENT.findall(arguments)]


def _types_fit(case: Case, name: str) -> bool:
    arguments, parameters = template_arguments(name)
    if types := _element_types(arguments):
        accumulate = case.params.get("accumulate")
        others = {accumulate} if accumulate else {spec.dtype for spec in ops.get(case.op).specs(case)} | {"float32"}
        return types[0] == case.dtype and others.issuperset(types[1:])
    types = [ELEMENTS[word] for word in ELEMENT.findall(parameters)]
    return not types or case.dtype in types


def enumerators(kernel: Kernel) -> dict[str, list[str]]:
    """The enumerations that a kernel's sources define, without those that number their enumerators themselves."""
    text = "\n".join(re.sub(r"//.*", "", read_source(path)) for path in kernel.sources())
    found = re.findall(r"\benum\s+(?:class\s+|struct\s+)?(\w+)[^{;]*\{([\w\s,]*)\}", text)
    return {name: [word.strip() for word in body.split(",") if word.strip()] for name, body in found}


def _enumerators_fit(case: Case, name: str, enumerations: dict[str, list[str]]) -> bool:
    wanted = {*case.params.values(), ops.get(case.op).call_name(case)}
    for enumeration, value in re.findall(r"\((?:\w+::)*(\w+)\)(\d+)", template_arguments(name)[0]):
        words = enumerations.get(enumeration, [])
        if wanted & set(words) and int(value) < len(words) and words[int(value)] not in wanted:
            return False
    return True
