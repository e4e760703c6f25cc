"""`sample`: a token of each row of logits as one function of PyTorch, `torch.ops.minfer.sample`."""

from __future__ import annotations

import torch

from minfer.functional import library

MOST = 1 << 19  # tokens of a vocabulary, which the sums of our kernels have bits for


@library.public
def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A token of each row, (rows,) int32, of logits (rows, vocab), float32 or bfloat16; vocab is at most 524288.

    With p = softmax(logits / temperature), a token is kept under three conditions: its logit is at least the `top_k`-th
    largest (0: no limit; equal logits are kept together); the tokens with larger logits have less than `top_p` of the mass
    that top_k keeps; and p is at least `min_p` times the largest p. One of the kept tokens is drawn with a probability
    proportional to p, by one random number for each row from `generator`, or from PyTorch's own. A temperature of 0 takes the
    first of the largest logits. A row of NaN gives token 0.

    It is not differentiable, and autograd records nothing. Raises ValueError for arguments that do not fit.
    `torch.ops.minfer.sample(logits, u, temperature, top_k, top_p, min_p)` takes the random numbers u, (rows,) float32 in
    [0, 1), which determine the tokens. Works under `torch.compile`, which compiles again when temperature, top_p or min_p
    changes. A generator breaks the graph there, as in PyTorch's own functions: draw u outside of the graph, and call the
    op."""
    _check(logits)
    if temperature == 0:
        u = torch.zeros(logits.shape[0], device=logits.device)
        temperature, top_k, top_p, min_p = 1.0, 1, 1.0, 0.0
    else:
        u = torch.empty(logits.shape[0], device=logits.device).uniform_(generator=generator)
    found: torch.Tensor = _sample_op(logits.detach(), u, temperature, top_k, top_p, min_p)
    return found


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
    logits: torch.Tensor, u: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    _check(logits)
    if u.shape != logits.shape[:1] or u.dtype != torch.float32 or u.device != logits.device:
        raise ValueError(
            f"minfer.sample takes u as float32 ({logits.shape[0]},) on {logits.device}, got {u.dtype} {tuple(u.shape)} on "
            f"{u.device}"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"minfer.sample takes a temperature from 0, got {temperature}")
    if top_k < 0:
        raise ValueError(f"minfer.sample takes a top_k of at least 0, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"minfer.sample takes top_p above 0 and at most 1, got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"minfer.sample takes min_p from 0 to 1, got {min_p}")
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


_sample_op = library.define(
    "sample(Tensor logits, Tensor u, float temperature, SymInt top_k, float top_p, float min_p) -> Tensor",
    _sample,
    _fake,
)


def _check(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or not 0 < logits.shape[1] <= MOST:
        raise ValueError(
            f"minfer.sample takes logits (rows, vocab) with vocab from 1 to {MOST}, got {tuple(logits.shape)}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"minfer.sample takes float32 or bfloat16 logits, got {logits.dtype}")
