"""conformance/check.py with JAX: float32 and its vjp as --backward."""
import pytest
from test_check import named, run  # noqa: F401  (run is a fixture)

pytest.importorskip("jax")
ROUTE = '''
import jax
import jax.numpy as jnp

def backward(dv, u_hat, n_iters):
    return jax.vjp(lambda x: route(x, n_iters), jnp.asarray(u_hat))[1](jnp.asarray(dv, jnp.float32))[0]

def route(u_hat, n_iters):
    u_hat = jnp.asarray(u_hat, jnp.float32)
    b = jnp.zeros(u_hat.shape[:3])
    for t in range(n_iters):
        c = jax.nn.softmax(b, axis=2)
        s = (c[..., None] * u_hat).sum(1)
        square = (s * s).sum(-1, keepdims=True)
        v = s * jnp.sqrt(square + 1e-9) / (1 + square)
        b = b + (u_hat * v[:, None]).sum(-1)
    return v
'''


def test_a_right_function(run, tmp_path):  # noqa: F811
    code, text = run(ROUTE)
    assert code == 0 and "VALUES RIGHT UP TO PRECISION, GRADIENT NOT CHECKED" in text, text
    code, text = run(ROUTE, "--backward", f"{tmp_path}/mine.py:backward", "--require-gradient")
    assert code == 0 and "gradient agrees" in text, text


def test_mistakes_of_values_and_of_the_gradient(run, tmp_path):  # noqa: F811
    code, text = run(ROUTE, changes=[("axis=2", "axis=1"), ("s * jnp.sqrt(square + 1e-9)", "s")])
    assert code == 1 and set(named(text)) == {"softmax over input capsules", "squash with the square below only"}, text
    stopped = [("* v[:", "* jax.lax.stop_gradient(v)[:")]
    code, text = run(ROUTE, "--backward", f"{tmp_path}/mine.py:backward", changes=stopped)
    assert code == 1 and named(text) == ["output capsules stopped in the agreement"], text
