"""Slow literal references that the tests of several experiments share."""
import numpy as np


def squash_reference(s):
    """Eq. 1 along the last axis, with the root's 1e-9"""
    length = np.sqrt((s * s).sum(-1, keepdims=True) + 1e-9)
    return length ** 2 / (1 + length ** 2) * s / length


def softmax_reference(b):
    return np.exp(b) / sum(np.exp(b[:, k:k + 1]) for k in range(b.shape[1]))


def routing_reference(u_hat, n_iters):
    """Procedure 1. u_hat (N, J, I, D). Return c (N, J, I) and v (N, J, D) of every iteration"""
    b, steps = np.zeros(u_hat.shape[:3]), []
    for _ in range(n_iters):
        c = softmax_reference(b)
        v = squash_reference(np.einsum("nji,njid->njd", c, u_hat))
        b = b + np.einsum("njid,njd->nji", u_hat, v)
        steps.append((c, v))
    return steps


def conv_reference(x, w, b, stride):
    """Valid convolution of one image, pixel by pixel. x (H, W, C)"""
    Kh, Kw = w.shape[:2]
    return np.array([[b + np.einsum("yxc,yxcf->f", x[oy:oy + Kh, ox:ox + Kw], w)
                      for ox in range(0, x.shape[1] - Kw + 1, stride)]
                     for oy in range(0, x.shape[0] - Kh + 1, stride)])
