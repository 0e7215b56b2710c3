"""Gradients against centered differences, in float64."""
from types import SimpleNamespace

import numpy as np

SMOOTH, RELU = 1e-6, 1e-4          # asserted relative errors: of smooth functions, of those with kinks


def normal(*shape, seed=0, off=0.0):
    """Standard normal numbers, pushed away from zero by `off`"""
    x = np.random.default_rng(seed).standard_normal(shape)
    return x + off * np.sign(x)


def poison(shape, dtype):
    """An np.empty that shows whoever reads memory it has not written"""
    return np.full(shape, np.nan, dtype)


def float_dtypes(tree):
    """dtypes of all float arrays in nested tuples, lists, dicts and namespaces"""
    if isinstance(tree, SimpleNamespace):
        tree = vars(tree)
    if isinstance(tree, (tuple, list, dict)):
        return set().union(*map(float_dtypes, tree.values() if isinstance(tree, dict) else tree))
    return {tree.dtype} if isinstance(tree, np.ndarray) and tree.dtype.kind == "f" else set()


def relative_error(analytic, numeric):
    """Largest |a - n| / |n|, with numbers under 1% of the largest n measured against that 1%."""
    return np.max(np.abs(analytic - numeric) / np.maximum(np.abs(numeric), 0.01 * np.max(np.abs(numeric))))


def difference(f, x, at, h):
    """Centerd difference of f at the coordinate `at` of x."""
    ends = []
    for step in (h, -h):
        moved = x.copy()
        moved[at] += step
        ends.append(f(moved))
    return (ends[0] - ends[1]) / (2 * h)


def check_op(forward, backward, *args, tol=SMOOTH, h=1e-5):
    """Every coordinate of every argument of forward(*args) -> (out, cache), whose vjp is backward(dout, cache).

    The scalar that is differentiated is <dout, out> for a random dout. The backward must leave dout as it was, give
    the same answer when asked twice, and no argument's gradient may be identically zero.
    """
    out, cache = forward(*[a.copy() for a in args])
    dout = np.random.default_rng(99).standard_normal(out.shape)                              # no argument has this seed
    kept = dout.copy()
    grads, again = ((g if isinstance(g, tuple) else (g,)) for g in (backward(dout, cache), backward(dout, cache)))
    assert np.array_equal(dout, kept), "backward changed its dout"
    assert len(grads) == len(args)
    for k, (x, grad) in enumerate(zip(args, grads)):
        assert grad.shape == x.shape and grad.dtype == x.dtype, f"argument {k}"
        assert np.array_equal(grad, again[k]), f"argument {k}: backward spoilt its cache"

        def f(moved, k=k):
            return np.vdot(kept, forward(*[moved if i == k else a.copy() for i, a in enumerate(args)])[0])

        numeric = np.array([difference(f, x, at, h) for at in np.ndindex(x.shape)]).reshape(x.shape)
        assert np.any(numeric != 0), f"argument {k} has no influence"
        error = relative_error(grad, numeric)
        assert error < tol, f"argument {k}: relative error {error:.1e}"


def check_loss(loss, prediction, *target, **options):
    """loss(prediction, target) -> (loss, dprediction)"""
    def forward(x):
        value, dx = loss(x, *target)
        return np.array(value), dx
    check_op(forward, lambda dout, dx: dout * dx, prediction, **options)


def check_step(module, params, batch, config, loss):
    """What a module's loss_and_grads says of a batch, beside its gradients' values: loss(params); a gradient of every
    parameter; of a share of the batch, that share of all. It changes no input, and float32 stays float32. Return the
    terms of the loss and the gradients"""
    before = {name: a.copy() for name, a in (params | batch).items()}
    terms, grads, _ = module.loss_and_grads(params, batch, config)
    assert all(np.array_equal(a, before[name]) for name, a in (params | batch).items()), "an input has changed"
    assert abs(loss(params) - terms["loss"]) <= 1e-9 * abs(terms["loss"])
    for name, g in grads.items():
        assert g.shape == params[name].shape and np.abs(g).max() > 1e-9, f"{name} is identically zero"
    share, share_grads, _ = module.loss_and_grads(params, batch, config, share=1 / 3)
    for whole, third in ((terms, share), (grads, share_grads)):
        assert all(np.allclose(3 * third[name], whole[name], rtol=1e-9, atol=1e-15) for name in whole)
    single = ({name: a.astype(np.float32) if a.dtype == float else a for name, a in of.items()}
              for of in (params, batch))
    assert float_dtypes(module.loss_and_grads(*single, config)[1:]) == {np.dtype(np.float32)}
    return terms, grads


def check_directions(loss, params, grads, tol=RELU, n=3, h=1e-6):
    """loss(params) -> float along random directions, for every parameter alone and for all of them together. Where a
    step of h is too short for float64, a slope next to zero, one of 10 h must agree: a wrong gradient meets neither."""
    rng = np.random.default_rng(98)
    assert grads.keys() == params.keys()
    for names in (*([name] for name in params), list(params)):
        for _ in range(n):
            d = {name: rng.standard_normal(params[name].shape) for name in names}
            analytic = sum(np.vdot(grads[name], d[name]) for name in names)
            for step in (h, 10 * h):
                up, down = (loss({**params, **{name: params[name] + by * d[name] for name in names}})
                            for by in (step, -step))
                numeric = (up - down) / (2 * step)
                if near := abs(analytic - numeric) < tol * abs(numeric):
                    break
            assert numeric != 0, f"{names} has no influence"
            assert near, f"{names}: {analytic} should be {numeric}"


def check_coordinates(loss, params, grads, tol=RELU, n=3, h=1e-5):
    """For every parameter, the coordinates of the n largest gradients and n random ones."""
    rng = np.random.default_rng(1)
    for name, p in params.items():
        flat = [*np.argsort(-np.abs(grads[name]), axis=None)[:n], *rng.integers(0, p.size, n)]
        at = [np.unravel_index(k, p.shape) for k in flat]
        numeric = np.array([difference(lambda moved, name=name: loss({**params, name: moved}), p, k, h) for k in at])
        error = relative_error(np.array([grads[name][k] for k in at]), numeric)
        assert error < tol, f"{name}: relative error {error:.1e}"
