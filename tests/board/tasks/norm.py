"""A layer norm with weights."""

import torch


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(6, 5, 32)]


def get_init_inputs():
    return [32]
