"""A convolution, a bias and a ReLU."""

import torch


class Model(torch.nn.Module):
    def __init__(self, inside, outside, kernel):
        super().__init__()
        self.conv = torch.nn.Conv2d(inside, outside, kernel, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))


def get_inputs():
    return [torch.randn(2, 3, 10, 12)]


def get_init_inputs():
    return [3, 4, 3]
