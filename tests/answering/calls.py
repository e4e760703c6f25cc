"""Calls a kernel, and prints its library and what the call raises. Its arguments are the op, the kernel, an architecture or
nothing, and the arguments of the call in Python."""

from __future__ import annotations

import sys

import torch

from minfer import build, ops

op, name, arch, call = sys.argv[1:]
kernel = ops.get(op).kernels[name]
print(build.build(kernel, arch).library)
try:
    build.function(kernel, arch)(*eval(call, {"torch": torch}))
except RuntimeError as error:
    print(error)
