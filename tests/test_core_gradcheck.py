"""The checker itself: right gradients pass, wrong ones do not."""
import numpy as np
import pytest
from gradcheck import check_coordinates, check_directions, check_loss, check_op

x = np.random.default_rng(0).standard_normal((2, 3)) + 2


def cube(x):
    return x ** 3, x


def one_coordinate_off(dy, x):
    dx = 3 * x ** 2 * dy
    dx[1, 2] *= 1.01
    return dx


def mutates(dy, x):
    dy *= 3 * x ** 2
    return dy


@pytest.mark.parametrize(
    "backward",
    [lambda dy, x: 1.01 * 3 * x**2 * dy, one_coordinate_off, mutates, lambda dy, x: 0 * x, lambda dy, x: np.nan * x,
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


@pytest.mark.parametrize("factor, good", [(1, True), (1.01, False), (0, False), (np.nan, False)])
def test_check_loss_directions_and_coordinates_tell_right_from_wrong(factor, good):
    params = {"a": x, "b": x[0] + 1}
    grads = {"a": 2 * x * params["b"].sum() * factor, "b": np.full(3, (x ** 2).sum())}

    def loss(p):
        return (p["a"] ** 2).sum() * p["b"].sum()

    for check in (lambda: check_directions(loss, params, grads), lambda: check_coordinates(loss, params, grads),
                  lambda: check_loss(lambda y, t: (((y - t) ** 2).sum(), factor * 2 * (y - t)), x, x - 1)):
        if good:
            check()
        else:
            with pytest.raises(AssertionError):
                check()
