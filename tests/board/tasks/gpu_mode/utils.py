"""What the problems share."""

import torch


def compare(data, output, reference):
    expected = reference(data)
    return bool(torch.allclose(output, expected, rtol=1e-2, atol=1e-2)), ""
