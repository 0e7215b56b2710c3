"""EM routing in NumPy.

    python3 conformance/check.py conformance/examples/numpy_em.py:em_route --em
"""
import numpy as np


def em_route(V, a, beta_u, beta_a, lambdas):
    R = np.full(V.shape[:3], 1 / V.shape[2])                   # V: (N, I, J, H), a: (N, I)
    for lambda_ in lambdas:
        r = R * a[:, :, None]
        mass = r.sum(1)
        mu = np.einsum("nij,nijh->njh", r, V) / mass[..., None]
        square = (V - mu[:, None]) ** 2
        sigma2 = np.einsum("nij,nijh->njh", r, square) / mass[..., None] + 1e-4
        cost = (beta_u[:, None] + np.log(sigma2) / 2).sum(-1) * mass
        a_out = 1 / (1 + np.exp(-lambda_ * (beta_a - cost)))
        log_p = -(square / (2 * sigma2[:, None])).sum(-1) - np.log(sigma2).sum(-1)[:, None] / 2
        ap = a_out[:, None] * np.exp(log_p - log_p.max(2, keepdims=True))
        R = ap / ap.sum(2, keepdims=True)
    return mu, a_out
