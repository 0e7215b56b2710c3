"""Dynamic routing in PyTorch with three mistakes: one in the values, one in the gradient, one where there are no votes.

    python3 conformance/check.py conformance/examples/torch_wrong.py:route
"""
import torch


def squash(s):
    norm = s.norm(dim=-1, keepdim=True)
    return norm ** 2 / (1 + norm ** 2) * s / norm              # wrong: 0 / 0 where a capsule gets no votes


def route(u_hat, n_iters):
    b = torch.zeros_like(u_hat[..., :1])                       # u_hat: (N, I, J, E)
    for t in range(n_iters):
        c = torch.softmax(b, dim=2)
        votes = u_hat if t == n_iters - 1 else u_hat.detach()  # wrong: the inner iterations have a gradient, too
        v = squash((c * votes).sum(1, keepdim=True))
        b = b + (votes * v).sum(-1, keepdim=True).mean(0, keepdim=True)    # wrong: averages over the batch
    return v.squeeze(1)
