"""What the ops of attention share: the sizes of heads, inputs that a careless softmax fails on, and the reference in fp64 with
its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minfer.ops.case import Case, Rule
from minfer.ops.tensors import Draw, Floats, Tensors

U = 2.0**-24
LATENT = (192, 128)  # head_dim and v_dim of DeepSeek's models
Tensor = torch.Tensor


def v_dim(case: Case) -> int:
    """The length of the rows of v and out."""
    return case.shape.get("v_dim", case["head_dim"])


def heads_of(*dims: int, latent: bool = False) -> Rule:
    """The rule that rows of q, k, v and out have one of these lengths; with `latent` also those of latent attention."""
    *others, last = dims
    said = f"takes heads of {', '.join(map(str, others))} or {last}" + (", or of 192 with values of 128" * latent)

    def rule(case: Case) -> str | None:
        dim, of_v = case["head_dim"], v_dim(case)
        if (dim == of_v and dim in dims) or (latent and (dim, of_v) == LATENT):
            return None
        return f"{said}, got {dim}" + ("" if dim == of_v else f" with values of {of_v}")

    return rule


@dataclass(frozen=True)
class Rows(Floats):
    """Floats. The uniform ones, with which nothing is timed, have rows that a careless softmax fails on: every 32nd query,
    from the fourth on, has scores of several hundred, of both signs; with every 32nd from the twentieth on, every fourth key
    has large products that cancel."""

    is_query: bool = True

    def make(self, tensor: Tensor, made: Tensors, draw: Draw) -> None:
        super().make(tensor, made, draw)
        if draw.distribution != "uniform":
            return
        half = tensor.shape[-1] // 2
        if self.is_query:
            tensor[..., 3::32, :, :] *= 256
            rows = tensor[..., 19::32, :, :] * 64
            tensor[..., 19::32, :, :] = torch.cat((rows[..., :half], -rows[..., :half]), -1)
        else:
            rows = tensor[..., 1::4, :, :]
            rows[..., half:] = rows[..., :half]


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float, dtype: torch.dtype, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, its bound, the log-sum-exp and its bound, of (queries, heads, dim) over keys of which `seen` (queries, keys) count.
    Rows of v may have another length than those of k. scale is 1 / sqrt(head_dim) unless given.

    Let n be the keys, p the probabilities, h the unit roundoff of `dtype` and u that of fp32.

    A score is a dot product of head_dim terms, off by at most 4 sqrt(head_dim) u scale |q| |k| (see `dot`, and the
    Cauchy-Schwarz inequality). Scaling it and subtracting the maximum, in either order, takes up to 8 u times the largest
    score; a tanh 8 u softcap; the power of 2 itself 8 u. Together e: p and the sum that divides it are off by e relatively,
    and out by e (sum p |v| + |out|).
    The sums of n terms, and their scaling whenever the maximum grows, take (4 sqrt(n) + 16) u of the same.
    Kernels that multiply with tensor cores round each p to `dtype`, relatively by h; in float16 by 2^-25 of the largest p where
    it is subnormal. These errors are independent of each other, but for equal scores, whose part of p v has random signs
    then: 6 standard deviations, 6 sqrt(sum (h p v)^2), and h |out| for what all p have in common."""
    heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    group, queries, n, scale = heads // kv_heads, q.shape[0], k.shape[0], scale or dim**-0.5
    q = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # (kv_heads, group * queries, dim)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    hidden = ~seen.repeat(group, 1)

    scores = (q @ k.transpose(1, 2)).mul_(scale)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(hidden, -math.inf)
    most = scores.amax(-1, keepdim=True)
    exponentials = scores.sub_(most.clamp_min(-1e300)).exp_()  # -inf where nothing is seen
    total = exponentials.sum(-1, keepdim=True)
    p = exponentials.div_(total.clamp_min(1e-300))

    largest = scale * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1)[:, None, None]
    e = ((4 * dim**0.5 + 8) * largest + 8 * softcap + 8) * U
    sums = (4 * n**0.5 + 16) * U
    value = p @ v
    bound = (p @ v.abs()).add_(value.abs()).mul_(e + sums)
    h = torch.finfo(dtype).eps / 2
    subnormal = 2.0**-25 if dtype == torch.float16 else 0.0
    rounded = p.mul_(h).add_(subnormal / total.clamp_min(1)).masked_fill_(hidden, 0.0).square_()
    bound += (rounded @ v.square()).sqrt_().mul_(6).add_(value.abs(), alpha=h)

    def back(x: Tensor) -> Tensor:
        return x.unflatten(1, (group, queries)).permute(2, 0, 1, 3).flatten(1, 2)

    lse = most + total.log()
    lse_bound = (e + sums + 8 * U + 4 * U * largest).expand_as(lse)
    return back(value), back(bound), back(lse).squeeze(-1), back(lse_bound).squeeze(-1)
