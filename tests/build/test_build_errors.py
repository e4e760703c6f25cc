"""What a build that fails says: the compiler's own words, in one line."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from minfer import build, ops
from minfer.bench.timing import Timing
from minfer.build import cache, device_code, forks, toolchain
from minfer.build.errors import BuildError, first_error
from minfer.ops import Kernel
from minfer.plan.shard import Shard
from minfer.process import forked
from minfer.worker import sandboxed
from minfer.worker.compiler import Compiler
from tests.workshop import DEVICE, SOUND, Workshop, needs_nvcc


def failure(kernel: Kernel, arch: str = "") -> str:
    with pytest.raises(BuildError) as caught:
        build.build(kernel, arch)
    message = str(caught.value)
    assert message and "\n" not in message and str(kernel.source.parent) not in message
    assert cache.find(kernel, arch) is None
    return message


def test_a_mistake_in_cpp_is_the_compilers_first_error(workshop: Workshop) -> None:
    kernel = workshop.kernel("broken.cpp", "int fine;\nint tile() { return no_such_name + nor_this; }\n")
    with pytest.raises(BuildError) as caught:
        build.build(kernel)
    assert "nor_this" in caught.value.log  # all that the compiler said
    message = failure(kernel)
    assert message.startswith("broken.cpp:2:") and "error" in message and "no_such_name" in message
    kernel.source.write_text(SOUND)  # and it can be mended
    assert Path(build.build(kernel).library).is_file()


def test_a_mistake_beside_a_comment_that_is_no_utf_8_is_the_compilers_first_error(workshop: Workshop) -> None:
    kernel = workshop.kernel("latin.cpp")
    kernel.source.write_bytes("int tile() { return nor_this; }  // Größe\n".encode("latin-1"))
    message = failure(kernel)
    assert message.startswith("latin.cpp:1:") and "nor_this" in message
    kernel.source.write_bytes(SOUND.encode() + "// Größe\n".encode("latin-1"))
    assert Path(build.build(kernel).library).is_file()


def test_a_mistake_in_a_header_names_the_header(workshop: Workshop) -> None:
    workshop.write("deeper.h", "#error four warps are too few\n")
    message = failure(workshop.kernel())
    assert message.startswith("deeper.h:1:") and "four warps are too few" in message


def test_a_header_that_is_not_there(workshop: Workshop) -> None:
    message = failure(workshop.kernel("broken.cpp", '#include "tyle.h"\n'))
    assert message.startswith("broken.cpp:1:") and "tyle.h" in message


@needs_nvcc
def test_a_mistake_in_cuda_is_the_compilers_first_error(workshop: Workshop) -> None:
    kernel = workshop.kernel("broken.cu", "__global__ void k(int* p) { *p = no_such_name; }\n")
    message = failure(kernel, "sm_80")
    assert message.startswith("broken.cu(1)") and "error" in message and "no_such_name" in message
    with pytest.raises(BuildError, match="no_such_name"):
        device_code.compile_cubin(kernel, "sm_80", workshop.folder)


@needs_nvcc
def test_too_much_shared_memory_is_told_by_ptxas(workshop: Workshop) -> None:
    text = "__global__ void k(int* p) { __shared__ int s[99999]; s[*p] = 1; __syncthreads(); *p = s[0]; }\n"
    message = failure(workshop.kernel("greedy.cu", text), "sm_80")
    assert "ptxas" in message and "shared data" in message


@needs_nvcc
def test_an_architecture_that_does_not_exist_is_told_by_nvcc(workshop: Workshop) -> None:
    message = failure(workshop.kernel("device.cu", DEVICE), "sm_11")
    assert "nvcc fatal" in message and "sm_11" in message.replace("compute_11", "sm_11")


def test_a_cache_that_cannot_be_written(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose home folder does not exist. A sandbox's build is kept there, too."""
    (workshop.folder / "a file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(workshop.folder / "a file"))
    kernel = workshop.kernel("sound.cpp", SOUND)
    where = workshop.folder / "a file" / "minfer"
    wanted = (
        f"cannot keep compiled kernels in {where}: Not a directory; set TORCH_EXTENSIONS_DIR to a folder that you can"
    )
    with pytest.raises(BuildError, match=re.escape(wanted)):
        build.build(kernel)
    built = {"seconds": 1.0, "registers": None, "shared_bytes": None, "local_bytes": None}
    with pytest.raises(BuildError, match=re.escape(wanted)):
        sandboxed.store(kernel, "", built, b"a library")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("what", ("lock", "half a build", "half a cubin"))
def test_a_cache_where_another_user_began_this_build(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ops.get("hgemm").kernels["cpu_naive"]
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # pytest's own folders are closed to others
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", shared)
        folder = cache.directory(kernel, "")
        folder.mkdir(parents=True)
        (folder.with_suffix(".lock") if what == "lock" else folder / "build.ninja").touch(0o644)
        for path, mode in ((Path(shared), 0o755), (folder.parent, 0o777), (folder, 0o777 if what == "lock" else 0o755)):
            path.chmod(mode)
        os.seteuid(65534)
        try:
            with pytest.raises(BuildError) as caught:
                device_code.cached_cubin(kernel, "sm_90a") if what == "half a cubin" else build.build(kernel)
        finally:
            os.seteuid(0)
        assert str(caught.value) == (
            f"cannot keep compiled kernels in {folder.parent}: Permission denied; "
            "set TORCH_EXTENSIONS_DIR to a folder that you can write to"
        )


def test_no_cpp_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    kernel = workshop.kernel()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler '/nonexistent'.*CXX"):
        build.build(kernel)


def test_no_cuda_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "toolkit", lambda: None)
    kernel = workshop.kernel("device.cu", DEVICE)
    for attempt in (
        lambda: build.build(kernel, "sm_80"),
        lambda: device_code.compile_cubin(kernel, "sm_80", workshop.folder),
    ):
        with pytest.raises(BuildError, match="CUDA_HOME"):
            attempt()


def test_the_command_line_ends_with_the_error_in_the_last_line(workshop: Workshop) -> None:
    process = workshop.start(workshop.kernel("broken.cpp", "int tile() { return no_such_name; }\n"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "" and "Traceback" not in err
    assert err.splitlines()[-1].startswith("broken.cpp:1:") and "no_such_name" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name what to build: python -m minfer.build OP KERNEL"),
        (["hgemm"], "name what to build: python -m minfer.build OP KERNEL"),
        (["hgemm", "v99"], "hgemm has no kernel v99; it has torch, "),
        (["hgem", "v01_naive"], "there is no op hgem; there are "),
    ],
)
def test_a_command_line_that_names_no_kernel_is_one_sentence(words: list[str], sentence: str) -> None:
    done = forked.run("minfer.build", *words, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1].startswith(sentence)


# What a build says that compiled, and then cannot be used


ABORTS = """#include <cstdlib>
static int now = (abort(), 1);
"""


def test_a_library_that_aborts_when_it_is_loaded_says_so(workshop: Workshop) -> None:
    kernel = workshop.kernel("aborts.cpp", ABORTS)
    register = workshop.write("register.py", f"from minfer import ops\nops.get('hgemm').cpp({str(kernel.source)!r})\n")
    shard = Shard("0000", "test", str(workshop.folder), "", "cpu", [], Timing(), 60, 300, extra=[str(register)])
    (workshop.folder / "logs").mkdir()
    why = Compiler(shard, "", lambda **event: None)._one("hgemm", "aborts")
    assert why == "the process that compiles and loads it died by SIGABRT"


@pytest.mark.parametrize(
    ("errors", "why"),
    [
        ("W1124 10:00:00.0 7 torch/x.py:1] No CUDA runtime\n", "{}"),
        ("x: too many\nI0102 1:00 torch\n", "{}: x: too many"),
    ],
)
def test_what_pytorch_warns_of_is_not_why_a_build_died(errors: str, why: str, workshop: Workshop) -> None:
    (workshop.folder / "logs").mkdir()
    shard = Shard("0000", "test", str(workshop.folder), "", "cpu", [], Timing(), 60, 60)
    died = "the process that compiles and loads it died by SIGABRT"
    compiler = Compiler(shard, "", lambda **event: None)
    assert compiler.explain("x", -signal.SIGABRT, errors) == why.format(died)
    assert compiler.explain("x", 7, errors) == (
        why.removeprefix("{}: ") if ": " in why else "the build died with status 7"
    )


def test_an_exception_that_nobody_caught_is_why_a_build_died() -> None:
    """As PyTorch's of a schema that it cannot parse."""
    errors = (
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  \nunknown type specifier:\n"
        "op_k(Tensorr y) -> ()\n     ~~~~~~~ <--- HERE\n (originally from f.h)\n"
    )
    died = "the process that compiles and loads it died by SIGABRT"
    assert forks.explain(-signal.SIGABRT, errors) == f"{died}: unknown type specifier: op_k(Tensorr y) -> ()"


@pytest.mark.parametrize(("op", "macro"), [("hgemm", "MINFER_HGEMM"), ("scale_rows", "MINFER_OP")])
def test_a_kernel_that_registers_another_name_is_told_its_own(op: str, macro: str, workshop: Workshop) -> None:
    source = workshop.write("renamed.cpp", "int nothing;\n")
    kernel = Kernel(op, "renamed", "cpp", source)
    with pytest.raises(BuildError) as caught:
        build.function(kernel)
    assert str(caught.value) == f"renamed.cpp registers no {op}_renamed; end it with {macro}({op}_renamed, ...)"


NINJA = """Error building extension 'hgemm_x': [1/2] c++ -MMD -MF x.o.d -DTORCH_EXTENSION_NAME=hgemm_x -I/opt/minfer \
-isystem /opt/torch/include -fPIC -std=c++17 -O3 -c /opt/minfer/ops/hgemm/x.cpp -o x.o
FAILED: [code=1] x.o
c++ -MMD -MF x.o.d -Werror=format -c /opt/minfer/ops/hgemm/x.cpp -o x.o
{}
ninja: build stopped: subcommand failed.
"""

SAMPLES: dict[str, tuple[str, str]] = {
    "g++": (
        "/opt/minfer/ops/hgemm/x.cpp: In function ‘int f()’:\n"
        "/opt/minfer/ops/hgemm/x.cpp:1:9: warning: unused variable ‘error’ [-Wunused]\n"
        "/opt/minfer/ops/hgemm/x.cpp:2:18: error: ‘undeclared’ was not declared in this scope\n"
        "    2 | int f() { return undeclared; }\n"
        "/opt/minfer/ops/hgemm/x.cpp:3:1: error: expected declaration",
        "x.cpp:2:18: error: ‘undeclared’ was not declared in this scope",
    ),
    "g++, in a header": (
        "In file included from /opt/minfer/ops/hgemm/x.cpp:4:\n"
        "/opt/minfer/cuda/tile.cuh:7:10: fatal error: mma.h: No such file or directory\ncompilation terminated.",
        "tile.cuh:7:10: fatal error: mma.h: No such file or directory",
    ),
    "g++, in a template": (
        "/opt/x.cpp: In instantiation of ‘struct Tile<1>’:\n/opt/x.cpp:2:6:   required from here\n"
        "/opt/x.cpp:1:43: error: static assertion failed: N must exceed one",
        "x.cpp:1:43: error: static assertion failed: N must exceed one",
    ),
    "g++, option": (
        "cc1plus: error: bad value ‘nonsense’ for ‘-march=’ switch",
        "cc1plus: error: bad value ‘nonsense’ for ‘-march=’ switch",
    ),
    "g++, killed": (
        "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
        "c++: fatal error: Killed signal terminated program cc1plus",
    ),
    "g++, full disk": (
        "/opt/x.cpp:9:1: fatal error: error writing to /tmp/ccQ.s: No space left on device\ncompilation terminated.",
        "x.cpp:9:1: fatal error: error writing to ccQ.s: No space left on device",
    ),
    "nvcc": (
        "/opt/minfer/ops/hgemm/x.cu(12): warning #177-D: variable \"error\" was declared but never referenced\n"
        "/opt/minfer/ops/hgemm/x.cu(14): error: identifier \"undeclared\" is undefined\n"
        "  __attribute__((global)) void k(int* p) { *p = undeclared; }\n"
        "                                                ^\n\n1 error detected in the compilation of \"x.cu\".",
        "x.cu(14): error: identifier \"undeclared\" is undefined",
    ),
    "nvcc, static assertion": (
        "/opt/x.cu(3): error: static assertion failed with \"K must be a multiple of 32\"\n1 error detected",
        "x.cu(3): error: static assertion failed with \"K must be a multiple of 32\"",
    ),
    "nvcc, option": ("nvcc fatal   : Unsupported gpu architecture 'sm_30'",
                     "nvcc fatal   : Unsupported gpu architecture 'sm_30'"),
    "ptxas": (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas /tmp/tmpxft_00001885_00000000-6_x.ptx, line 27; error   : Not a name of any known instruction: 'bogus'\n"
        "ptxas fatal   : Ptx assembly aborted due to errors",
        "ptxas tmpxft_00001885_00000000-6_x.ptx, line 27; error   : Not a name of any known instruction: 'bogus'",
    ),
    "ptxas, resources": (
        "ptxas error   : Entry function '_Z1kPi' uses too much shared data (0x61a80 bytes, 0xc000 max)",
        "ptxas error   : Entry function '_Z1kPi' uses too much shared data (0x61a80 bytes, 0xc000 max)",
    ),
    "ld, library": (
        "/usr/bin/ld: cannot find -lcudart: No such file or directory\ncollect2: error: ld returned 1 exit status",
        "ld: cannot find -lcudart: No such file or directory",
    ),
    "ld, symbol": (
        "/usr/bin/ld: /tmp/cc85XFQS.o: in function `g()':\nx.cpp:(.text+0x5): undefined reference to `missing()'\n"
        "collect2: error: ld returned 1 exit status",
        "x.cpp:(.text+0x5): undefined reference to `missing()'",
    ),
    "ninja": (
        "ninja: error: '/opt/minfer/x.cpp', needed by 'x.o', missing and no known rule to make it",
        "ninja: error: '/opt/minfer/x.cpp', needed by 'x.o', missing and no known rule to make it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", SAMPLES)
def test_the_first_error_of_every_tool_is_found(tool: str) -> None:
    said, expected = SAMPLES[tool]
    assert first_error(said) == expected
    assert first_error(NINJA.format(said)) == expected


@pytest.mark.parametrize("log", ["", "\n \n", "Segmentation fault", "something\nelse"])
def test_there_is_always_something_to_say(log: str) -> None:
    message = first_error(log)
    assert message.strip() and "\n" not in message
