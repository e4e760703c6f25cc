"""Kernels that go wrong, each in one way. Loaded with `extra=[tests/faults/kernels.py]`."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

import torch

from minfer import ops

op = ops.get("hgemm")
HERE = Path(__file__).resolve().parent


def honest(out, a, b, alpha=1.0, beta=0.0):
    ops.get("hgemm").kernels["torch"].function(out, a, b, alpha, beta)


def segfaults(out, a, b, alpha=1.0, beta=0.0):
    ctypes.string_at(0)


def hangs(out, a, b, alpha=1.0, beta=0.0):
    while True:
        time.sleep(1)


def slow(out, a, b, alpha=1.0, beta=0.0):
    if not hasattr(slow, "waited"):
        time.sleep(10)
        slow.waited = True
    zeros(out, a, b)


def zeros(out, a, b, alpha=1.0, beta=0.0):
    out.zero_()


def reads_too_far(out, a, b, alpha=1.0, beta=0.0):
    ctypes.string_at(b.data_ptr() + b.nbytes, 4096)  # and discards it
    honest(out, a, b, alpha, beta)


def hungry(out, a, b, alpha=1.0, beta=0.0):
    torch.empty(1 << 60, dtype=torch.uint8, device=out.device)


def raises(out, a, b, alpha=1.0, beta=0.0):
    raise ValueError("these operands do not please me")


def exits(out, a, b, alpha=1.0, beta=0.0):
    os._exit(0)


def killed(out, a, b, alpha=1.0, beta=0.0):
    os.kill(os.getpid(), signal.SIGKILL)


def noisy(out, a, b, alpha=1.0, beta=0.0):
    print('{"row": {"status": "ok"}, "usable": true}', flush=True)
    os.write(2, b"and on stderr\n")
    honest(out, a, b, alpha, beta)


def fills(out, a, b, alpha=1.0, beta=0.0):
    """Fills the disk of the run's folder, as another process may, and prints."""
    if (filler := Path(os.environ["MINFER_FILLS"])) and not filler.exists():
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        print("x" * 8192, flush=True)
    honest(out, a, b, alpha, beta)


def never_silent(out, a, b, alpha=1.0, beta=0.0):
    while True:
        os.write(1, b"x" * (1 << 20))


def compiles(out, a, b, alpha=1.0, beta=0.0):
    """Has Triton compile, for a GPU that need not be there, and then computes on the CPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = op.kernels["triton_tiled"].module().kernel
    constants = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 8, "READ_C": False}
    types = dict.fromkeys(("c_ptr", "a_ptr", "b_ptr"), "*fp16") | dict.fromkeys(("alpha", "beta"), "fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 89, 32))
    honest(out, a, b, alpha, beta)


for function in (
    honest,
    segfaults,
    reads_too_far,
    hangs,
    slow,
    zeros,
    hungry,
    raises,
    exits,
    killed,
    noisy,
    fills,
    never_silent,
    compiles,
):
    op.torch(function.__name__, function)
op.cpp(str(HERE / "does_not_compile.cpp"))
op.cuda(str(HERE / "illegal_access.cu"))
op.cuda(str(HERE / "spins.cu"))
