"""LLVM's intermediate representation -> machine code for this processor, in this process, through `llvmlite`.

The object code is kept beside its source in the build cache, so that the next process only links it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from minfer.build.errors import BuildError


@cache
def _target() -> Any:
    """This processor, with all its instructions. Raises BuildError where llvmlite is missing."""
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise BuildError("no llvmlite: pip install 'minfer[llvm]'") from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


def version() -> str:
    """LLVM's own, such as "20.1.8". Raises BuildError where llvmlite is missing."""
    _target()
    import llvmlite.binding as llvm

    return ".".join(map(str, llvm.llvm_version_info))


def optimised(text: str) -> Any:
    """The module of a text of IR after LLVM's -O3 for this processor. Raises BuildError for a text that is none."""
    machine = _target()
    import llvmlite.binding as llvm

    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise BuildError(f"LLVM: {str(error).splitlines()[0]}", str(error)) from error
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return module


def object_file(source: Path) -> Path:
    """Where the machine code of a file of IR is or would be, for this LLVM and this processor."""
    machine = _target()
    import llvmlite.binding as llvm

    about = f"{source.read_text()}{llvm.llvm_version_info}{llvm.get_host_cpu_name()}"
    about += llvm.get_host_cpu_features().flatten() + machine.triple
    return source.with_name(f"{source.stem}_{hashlib.sha256(about.encode()).hexdigest()[:16]}.o")


def compile_object(source: Path) -> Path:
    """Compile a file of IR, or find its machine code. Raises BuildError or OSError."""
    path = object_file(source)
    if not path.is_file():
        code = _target().emit_object(optimised(source.read_text()))
        partial = path.with_suffix(f".{hashlib.sha256(code).hexdigest()[:8]}.tmp")
        partial.write_bytes(code)
        partial.replace(path)
    return path


_engines: list[Any] = []  # own the code that functions point into


def load(source: Path, symbol: str) -> int:
    """The address of a function of a file of IR, compiled and linked into this process. Raises BuildError or OSError."""
    path = compile_object(source)
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_copy())
    engine.add_object_file(llvm.ObjectFileRef.from_path(str(path)))
    engine.finalize_object()
    _engines.append(engine)
    if not (address := engine.get_function_address(symbol)):
        raise BuildError(f"{source.name} defines no function {symbol}")
    return address


def _target_copy() -> Any:
    """A target machine that an engine may own."""
    return _target.__wrapped__()
