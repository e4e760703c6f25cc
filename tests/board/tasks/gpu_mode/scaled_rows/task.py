"""The types of the problem."""

import torch

input_t = tuple[torch.Tensor, float, torch.Tensor]
output_t = torch.Tensor
