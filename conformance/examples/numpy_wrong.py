"""Dynamic routing in NumPy with two mistakes.

    python3 conformance/check.py conformance/examples/numpy_wrong.py:route
"""
import numpy as np


def route(u_hat, n_iters):
    b = np.zeros(u_hat.shape[:3])                              # u_hat: (N, I, J, E)
    for _ in range(n_iters):
        c = np.exp(b) / np.exp(b).sum(1, keepdims=True)        # wrong: over the input capsules
        s = (c[..., None] * u_hat).sum(1)
        norm = np.sqrt((s * s).sum(-1, keepdims=True) + 1e-9)
        v = s * norm / (1 + norm * norm)
        b = (u_hat * v[:, None]).sum(-1)                       # wrong: replaces the logits
    return v
