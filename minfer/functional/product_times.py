"""Which of the kernels for Hopper takes the least time for a product with many rows, by models of their times that are written
in C++ (`product_times.cpp`). `preferred.py` uses them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from minfer.build import host
from minfer.build.errors import BuildError
from minfer.ops import Kernel

SOURCE = Kernel("hgemm", "product_times", "cpp", Path(__file__).with_name("product_times.cpp"))
DEFAULT = "v18_fitted"
SIZE = 512  # of the text of all times, in bytes


def fastest(m: int, n: int, k: int, is_tn: bool) -> str:
    """The kernel's name. The first call compiles the models. Without a C++ compiler it is always v18_fitted, which is at most a
    few percent slower."""
    models = _models()
    return models.minfer_fastest_product(m, n, k, is_tn).decode() if models else DEFAULT


def explained(m: int, n: int, k: int, is_tn: bool) -> str:
    """The times by the models, least first, such as "v18_fitted 22.4 us (tiles of 96 x 64, k in 1 part), v17_one_wave 25.1
    us"; empty without a C++ compiler."""
    text = ctypes.create_string_buffer(SIZE)
    if models := _models():
        models.minfer_product_times(m, n, k, int(is_tn), text, SIZE)
    return text.value.decode()


@cache
def _models() -> ctypes.CDLL | None:
    try:
        library = host.load(SOURCE)
    except BuildError:
        return None
    library.minfer_fastest_product.argtypes = (ctypes.c_int,) * 4
    library.minfer_fastest_product.restype = ctypes.c_char_p
    return library
