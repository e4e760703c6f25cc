"""Models and pieces of them to fuse, and a check of what they compute then and what is said of it."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

import minfer

BF16 = torch.bfloat16


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def said(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("minfer.fuse: ")]


def check(capfd, function, *inputs, fused=(), refused=(), **options):
    """It computes what it did, and exactly these are fused; each of `refused` is a part of what is said."""
    options = {"rest": "eager", "unmeasured": "fuse"} | options
    with torch.no_grad():
        want, got = function(*inputs), minfer.fuse(function, **options)(*inputs)
    lines = said(capfd)
    names = [re.match(r"minfer.fuse: (\w+) at", line)[1] for line in lines if ": fused, " in line]
    assert sorted(names) == sorted(fused), lines
    text = "\n".join(lines)
    for reason in refused:
        assert reason in text, text
    rtol, atol = (3e-2, 3e-2) if BF16 in [each.dtype for each in inputs] else (1e-5, 1e-5)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    return text


def norm(x, weight, eps=1e-6):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def swap(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def tables(seq, dim, dtype, batch=1):
    angles = torch.arange(batch * seq).view(batch, seq, 1) * 0.9 ** torch.arange(dim // 2)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Layer(nn.Module):
    """A decoder layer of Llama's, small, in plain PyTorch."""

    def __init__(self, dim=64, heads=4, kv_heads=2, hidden=96):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim // heads
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv_heads * self.dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.before, self.after = (nn.Parameter(torch.rand(dim) + 0.5) for _ in range(2))

    def forward(self, x):
        batch, seq, _ = x.shape
        angles = torch.arange(seq)[:, None] * 0.9 ** torch.arange(self.dim // 2)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        y = norm(x, self.before)
        q = self.q(y).view(batch, seq, self.heads, self.dim).transpose(1, 2)
        k, v = (each(y).view(batch, seq, self.kv_heads, self.dim).transpose(1, 2) for each in (self.k, self.v))
        q, k = q * cos + swap(q) * sin, k * cos + swap(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, seq, -1))
        y = norm(x, self.after)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


ALL = {
    BF16: ["add_rms_norm", "rms_norm", "rope", "swiglu"],
    torch.float32: ["add_rms_norm", "rms_norm", "rope", "silu_mul"],
}
