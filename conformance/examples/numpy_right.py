"""Dynamic routing in NumPy, with its backward pass.

    python3 conformance/check.py conformance/examples/numpy_right.py:route --backward \
        conformance/examples/numpy_right.py:route_backward
"""
import numpy as np


def route(u_hat, n_iters, keep=None):
    b = np.zeros(u_hat.shape[:3])                              # u_hat: (N, I, J, E)
    for _ in range(n_iters):
        c = np.exp(b - b.max(2, keepdims=True))
        c /= c.sum(2, keepdims=True)                           # over the output capsules
        s = np.einsum("nij,nije->nje", c, u_hat)
        norm = np.sqrt((s * s).sum(-1, keepdims=True) + 1e-12)
        v = s * norm / (1 + norm * norm)
        b = b + np.einsum("nije,nje->nij", u_hat, v)
        if keep is not None:
            keep.append((c, s, norm, v))
    return v


def route_backward(dv, u_hat, n_iters):
    steps, du_hat, db = [], np.zeros_like(u_hat), 0
    route(u_hat, n_iters, keep=steps)
    for t in reversed(range(n_iters)):
        c, s, norm, _ = steps[t]
        scale, slope = norm / (1 + norm ** 2), (1 - norm ** 2) / (norm * (1 + norm ** 2) ** 2)
        ds = scale * dv + slope * s * (s * dv).sum(-1, keepdims=True)
        dc = np.einsum("nje,nije->nij", ds, u_hat)
        du_hat += np.einsum("nij,nje->nije", c, ds)
        db = db + c * (dc - (c * dc).sum(2, keepdims=True))
        if t:                                                  # the agreement that was added before this iteration
            du_hat += np.einsum("nij,nje->nije", db, steps[t - 1][3])
            dv = np.einsum("nij,nije->nje", db, u_hat)
    return du_hat
