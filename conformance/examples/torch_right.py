"""Dynamic routing in PyTorch.

    python3 conformance/check.py conformance/examples/torch_right.py:route
"""
import torch


def squash(s):
    square = (s * s).sum(-1, keepdim=True)
    return s * torch.sqrt(square + 1e-9) / (1 + square)


def route(u_hat, n_iters):
    b = torch.zeros_like(u_hat[..., 0])                        # u_hat: (N, J, I, E)
    for t in range(n_iters):
        c = torch.softmax(b, dim=1)                            # over the output capsules
        v = squash(torch.einsum("nji,njie->nje", c, u_hat))
        if t < n_iters - 1:
            b = b + torch.einsum("njie,nje->nji", u_hat, v)
    return v
