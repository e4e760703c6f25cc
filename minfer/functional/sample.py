"""`sample` draws a token of each row of logits, through `torch.ops.minfer.sample` or `torch.ops.minfer.sample_rows`."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch

from minfer.functional import library, prepared
from minfer.functional.contract import Contract

MOST = 1 << 19  # tokens of a vocabulary; the sums of our kernels have bits for no more
# The kernel that draws u itself takes up to so many rows, because up to there each thread of `torch.rand` draws one number on
# every GPU of Hopper, and so many logits, because from there on it may be slower than another one.
MOST_ROWS, MOST_LOGITS = 1 << 15, 1 << 21
STEP = 4  # by which `torch.rand` of so many rows moves a generator's offset

TAKES = Contract(
    "sample",
    """
    logits: float32 | bfloat16 (rows, vocab)
    u: float32 (rows)
    temperature: float32 (rows)
    top_k: int32 | int64 (rows)
    top_p: float32 (rows)
    min_p: float32 (rows)
    -> int32 (rows)
    """,
    vocab=range(1, MOST + 1),
)
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_reserving = threading.Lock()


@library.public
def sample(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token of each row, (rows,) int32, of logits (rows, vocab), float32 or bfloat16; vocab is at most 524288.

    With p = softmax(logits / temperature), a token is kept under three conditions: its logit is at least the `top_k`-th
    largest (0: no limit; equal logits are kept together); the tokens with larger logits have less than `top_p` of the mass
    that top_k keeps; and p is at least `min_p` times the largest p. One of the kept tokens is drawn with a probability
    proportional to p, by one random number for each row from `generator`, or from PyTorch's own. A temperature of 0 takes the
    first of the largest logits. A row of NaN gives token 0. If some logits of a row are NaN, or all are -inf,
    the token is arbitrary: a mask must leave at least one token.

    temperature, top_k, top_p and min_p are numbers, or tensors with one setting for each row: (rows,), float32, top_k
    int32 or int64. The host does not check the elements of tensors, because it would have to wait for the device. In a
    tensor, a temperature that is negative or NaN counts as 0, and a negative top_k counts as 0. top_p and min_p are
    clamped to [0, 1], and ignored where they are NaN; a top_p of 0 in a tensor keeps the likeliest tokens.

    The function is not differentiable, and autograd records nothing. Raises ValueError for arguments that do not fit.
    Two ops take the random numbers as an argument u, (rows,) float32 in [0, 1). The same u gives the same tokens.
    `torch.ops.minfer.sample(logits, u, temperature, top_k, top_p, min_p)` takes numbers, and
    `torch.ops.minfer.sample_rows` takes tensors, or None for the default. Works under `torch.compile`. If a number
    changes between calls, the graph is compiled once more, with the number as an input; further values compile nothing.
    A generator breaks the graph, as in PyTorch's own functions. To avoid that, draw u outside of the graph, and call
    the op. The numbers are those that `torch.rand(rows)` would draw. On an H100 or H200 a kernel may draw them itself;
    give each thread a generator of its own there, because two threads that draw at once may draw the same numbers."""
    logits = logits.detach() if logits.requires_grad else logits
    rows = logits.shape[0] if logits.dim() else 0
    of_rows = (
        isinstance(temperature, torch.Tensor)
        or isinstance(top_k, torch.Tensor)
        or isinstance(top_p, torch.Tensor)
        or isinstance(min_p, torch.Tensor)
    )
    found: torch.Tensor
    if not of_rows and _draws_itself(logits, generator) and rows <= MOST_ROWS and temperature != 0:
        seed, offset = _reserve(torch.cuda.default_generators[logits.get_device()] if generator is None else generator)
        found, _ = _sample_seeded_op(logits, seed, offset, temperature, top_k, top_p, min_p)
        return found
    if generator is None and torch.compiler.is_compiling():
        u = torch.rand(rows, device=logits.device)
    else:  # the same numbers in less host time; and `rand` with a generator takes no symbolic shape
        u = prepared.new_vector(rows, torch.float32, logits.device).uniform_(generator=generator)
    if of_rows or (torch.compiler.is_compiling() and _any_is_an_input(temperature, top_p, min_p)):
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        found = _sample_rows_op(logits, u, *(_for_each_row(logits, name, x) for name, x in settings.items()))
    elif temperature == 0:
        for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            _check_setting(name, value)
        found = _sample_op(logits, torch.zeros_like(u), 1.0, 1, 1.0, 0.0)
    else:
        found = _sample_op(logits, u, temperature, top_k, top_p, min_p)
    return found


def _draws_itself(logits: torch.Tensor, generator: torch.Generator | None) -> bool:
    """Whether a kernel may draw u itself: there is one for this GPU, which is the current one, and for these sizes, and nobody
    has to see the draw. While a CUDA graph is captured, `uniform_` draws, because only PyTorch's own functions draw other
    numbers in each replay."""
    return (
        logits.is_cuda
        and prepared.is_seen_by_nobody()
        and _is_hopper(device := logits.device)
        and (generator is None or (isinstance(generator, torch.Generator) and generator.device == device))
        and logits.numel() <= MOST_LOGITS
        and device.index == torch._C._cuda_getDevice()
        and not torch._C._cuda_isCurrentStreamCapturing()
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _reserve(generator: torch.Generator) -> tuple[int, int]:
    """The seed of a generator, and its offset, which is moved as `torch.rand` moves it."""
    with _reserving:
        offset = generator.get_offset()
        generator.set_offset(offset + STEP)
    seed = generator.initial_seed()
    return seed if seed < 1 << 63 else seed - (1 << 64), offset  # as a signed number of 64 bits


def _any_is_an_input(*numbers: Any) -> bool:
    """Whether one of these numbers is an input of the graph that torch.compile is making."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not all(has_static_value(x) for x in numbers)


def _for_each_row(logits: torch.Tensor, name: str, setting: float | torch.Tensor) -> torch.Tensor | None:
    """A setting as `sample_rows` takes it."""
    if isinstance(setting, torch.Tensor):
        return setting
    if torch.compiler.is_compiling() and _any_is_an_input(setting):
        pass  # a comparison would become a condition of the graph
    elif setting == DEFAULTS[name]:
        return None
    else:
        _check_setting(name, setting)
    # Products, because `new_full` would make the number a constant of the graph.
    if name == "top_k":  # no vocabulary has more than MOST tokens, and MOST fits into an int32
        most: Any = torch.sym_min(setting, MOST)
        return logits.new_ones(logits.shape[:1], dtype=torch.int32) * most
    return logits.new_ones(logits.shape[:1], dtype=torch.float32) * setting


def _check_setting(name: str, value: Any) -> None:
    if name == "temperature" and not 0 <= value < float("inf"):
        raise ValueError(f"minfer.sample takes a temperature from 0, got {value}")
    if name == "top_k" and value < 0:
        raise ValueError(f"minfer.sample takes a top_k of at least 0, got {value}")
    if name == "top_p" and not 0 < value <= 1:
        raise ValueError(f"minfer.sample takes top_p above 0 and at most 1, got {value}")
    if name == "min_p" and not 0 <= value <= 1:
        raise ValueError(f"minfer.sample takes min_p from 0 to 1, got {value}")


def _sample(
    logits: torch.Tensor, u: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    tokens = _fake(logits, u, temperature, top_k, top_p, min_p)
    if not tokens.numel():
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    shape = {"rows": logits.shape[0], "vocab": logits.shape[1]}
    tensors = (tokens, logits, u.contiguous())
    library.call("sample", tensors, logits.dtype, shape, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return tokens


def _fake(
    logits: torch.Tensor, u: torch.Tensor | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    made: torch.Tensor = TAKES.make(logits, u)
    if temperature == 0:  # kernels divide by it; `minfer.sample` takes the largest logit then
        raise ValueError("torch.ops.minfer.sample takes a temperature above 0, got 0.0")
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        _check_setting(name, value)
    return made


def _sample_seeded(
    logits: torch.Tensor, seed: int, offset: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, u = _fake_seeded(logits, seed, offset, temperature, top_k, top_p, min_p)
    if library.capability_of(logits) != (9, 0):
        raise ValueError(f"torch.ops.minfer.sample_seeded takes logits on a GPU with sm_90, got {logits.device}")
    if tokens.numel():
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        library.call_entry("sample", "draw", (tokens, logits, u), seed=seed, offset=offset, **settings)
    return tokens, u


def _fake_seeded(
    logits: torch.Tensor, seed: int, offset: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = _fake(logits, None, temperature, top_k, top_p, min_p)
    return tokens, logits.new_empty(tokens.shape, dtype=torch.float32)


def _sample_rows(
    logits: torch.Tensor,
    u: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    tokens = _fake_rows(logits, u, temperature, top_k, top_p, min_p)
    if not tokens.numel():
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    settings = [
        logits.new_empty(0, dtype=dtype) if x is None else _narrow(x, dtype).contiguous()
        for x, dtype in (
            (temperature, torch.float32),
            (top_k, torch.int32),
            (top_p, torch.float32),
            (min_p, torch.float32),
        )
    ]
    shape = {"rows": logits.shape[0], "vocab": logits.shape[1]}
    only = top_k is None and top_p is None and min_p is None
    params = {"settings": "temperature" if only else "all"}
    library.call("sample_rows", (tokens, logits, u.contiguous(), *settings), logits.dtype, shape, params)
    return tokens


def _narrow(setting: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The setting of this dtype, clamped first, because a large top_k of int64 would wrap."""
    return setting if setting.dtype == dtype else setting.clamp(0, MOST).to(dtype)


def _fake_rows(
    logits: torch.Tensor,
    u: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    made: torch.Tensor = TAKES.make(logits, u, temperature, top_k, top_p, min_p)
    return made


_sample_op = library.define(
    "sample(Tensor logits, Tensor u, float temperature, SymInt top_k, float top_p, float min_p) -> Tensor",
    _sample,
    _fake,
)


_sample_seeded_op = library.define(
    "sample_seeded(Tensor logits, int seed, int offset, float temperature, SymInt top_k, float top_p, float min_p) "
    "-> (Tensor, Tensor)",
    _sample_seeded,
    _fake_seeded,
    others=("seed", "offset"),
)


_sample_rows_op = library.define(
    "sample_rows(Tensor logits, Tensor u, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> Tensor",
    _sample_rows,
    _fake_rows,
)
