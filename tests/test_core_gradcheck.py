"""The checker itself: right gradients pass, wrong ones do not."""
import numpy as np
import pytest
from gradcheck import check_coordinates, check_directions, check_loss, check_op

x = np.random.default_rng(0).standard_normal((2, 3)) + 2


def cube(x):
    return x ** 3, x


@pytest.mark.parametrize(
    "backward",
    [lambda dy, x: 1.01 * 3 * x**2 * dy, lambda dy, x: 3 * x**2 * dy * np.where(x == x.max(), 1.01, 1),
     lambda dy, x: np.multiply(dy, 3 * x**2, out=dy), lambda dy, x: 0 * x, lambda dy, x: np.nan * x,
     lambda dy, x: (3 * x**2 * dy)[:1], lambda dy, x: (3 * x**2 * dy).astype(np.float32),
     lambda dy, x: (3 * x**2 * dy, x)],
    ids=["1% off", "one 1% off", "mutates dout", "zero", "nan", "shape", "dtype", "count"])
def test_check_op_fails_a_wrong_gradient(backward):
    check_op(cube, lambda dy, x: 3 * x ** 2 * dy, x)                                    # and passes a right one
    with pytest.raises(AssertionError):
        check_op(cube, backward, x)


def test_check_op_fails_a_function_without_influence():
    with pytest.raises(AssertionError, match="no influence"):
        check_op(lambda x: (np.ones(2), x), lambda dy, x: 0 * x, x)


@pytest.mark.parametrize("factor", [1.01, 0, np.nan])
def test_the_other_checks_tell_right_from_wrong(factor):
    params = {"a": x, "b": x[0] + 1}
    right = {"a": 2 * x * params["b"].sum(), "b": np.full(3, (x ** 2).sum())}
    wrong = {name: g * factor for name, g in right.items()}
    for check in (check_directions, check_coordinates):
        check(lambda p: (p["a"] ** 2).sum() * p["b"].sum(), params, right)
        with pytest.raises(AssertionError):
            check(lambda p: (p["a"] ** 2).sum() * p["b"].sum(), params, wrong)
    check_loss(lambda y, t: (((y - t) ** 2).sum(), 2 * (y - t)), x, x - 1)
    with pytest.raises(AssertionError):
        check_loss(lambda y, t: (((y - t) ** 2).sum(), factor * 2 * (y - t)), x, x - 1)
