"""An LSTM, whose first states are plain tensors of the module, and a linear layer."""

import torch


class Model(torch.nn.Module):
    def __init__(self, width, hidden, layers, classes):
        super().__init__()
        self.h0 = torch.randn(layers, 3, hidden)
        self.c0 = torch.randn(layers, 3, hidden)
        self.lstm = torch.nn.LSTM(width, hidden, layers, batch_first=True)
        self.last = torch.nn.Linear(hidden, classes)

    def forward(self, x):
        out, _ = self.lstm(x, (self.h0, self.c0))
        return self.last(out[:, -1, :])


def get_inputs():
    return [torch.randn(3, 5, 8)]


def get_init_inputs():
    return [8, 12, 2, 4]
