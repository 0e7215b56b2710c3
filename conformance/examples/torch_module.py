"""A PyTorch layer with its weights inside, and the six lines that let check.py set them.

    python3 conformance/check.py conformance/examples/torch_module.py:layer --layer
"""
import torch
from torch import nn
from torch_right import squash


class DigitCaps(nn.Module):
    def __init__(self, n_inputs, n_classes, input_size, output_size, n_iters=3):
        super().__init__()
        self.n_iters = n_iters
        self.W = nn.Parameter(0.05 * torch.randn(1, n_inputs, n_classes, output_size, input_size))

    def forward(self, u):
        u_hat = (self.W @ u[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros_like(u_hat[..., 0])
        for _ in range(self.n_iters):
            v = squash((torch.softmax(b, dim=2)[..., None] * u_hat).sum(1))
            b = b + (u_hat * v[:, None]).sum(-1)
        return v


def layer(u, W, n_iters):                                      # u: (N, I, D), W: (I, J, E, D)
    I, J, E, D = W.shape
    caps = DigitCaps(I, J, D, E, n_iters)
    return torch.func.functional_call(caps, {"W": W[None]}, (u,))
