"""conformance/literal.py against values computed by hand, central differences, and the formulas' exact invariances."""
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conformance import literal

ROOT = Path(__file__).resolve().parents[2]


def flat(x):
    """Return the numbers in nested lists, in order."""
    return [number for item in x for number in flat(item)] if isinstance(x, (list, tuple)) else [x]


def close(x, y, tolerance=1e-12):
    """Tell whether nested lists x and y agree, entry by entry."""
    x, y = flat(x), flat(y)
    return len(x) == len(y) and all(abs(a - b) <= tolerance * max(1, abs(b)) for a, b in zip(x, y))


def draw(seed, *shape, low=-1.0, high=1.0):
    """Return nested lists of uniform random numbers."""
    rng = random.Random(seed)

    def nested(*shape):
        return [nested(*shape[1:]) for _ in range(shape[0])] if shape else rng.uniform(low, high)
    return nested(*shape)


def central_differences(f, x, step=1e-5):
    """Return the numerical derivative of f with respect to every entry of x, flat."""
    def replaced(node, path, change):
        if not path:
            return node + change
        return [replaced(item, path[1:], change) if k == path[0] else item for k, item in enumerate(node)]

    def paths(node, path=()):
        if not isinstance(node, list):
            return [path]
        return [longer for k, item in enumerate(node) for longer in paths(item, path + (k,))]
    return [(f(replaced(x, path, step)) - f(replaced(x, path, -step))) / (2 * step) for path in paths(x)]


def rotated(vector, angle):
    """Return a vector with its first two entries rotated and the others kept."""
    x, y = vector[:2]
    return [math.cos(angle) * x - math.sin(angle) * y, math.sin(angle) * x + math.cos(angle) * y, *vector[2:]]


def each(function, x, depth):
    """Return nested lists with function applied to every item at that depth."""
    return function(x) if depth == 0 else [each(function, item, depth - 1) for item in x]


def scaled(x, factor):
    return [scaled(item, factor) for item in x] if isinstance(x, list) else factor * x


# ---- independence ----

def test_literal_needs_no_array_library_and_no_other_module_of_the_project():
    code = ("import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); import conformance.literal; "
            "print(*sorted(set(sys.modules) - before))")
    done = subprocess.run([sys.executable, "-S", "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"cmath", "math", "conformance", "conformance.literal"}


# ---- numbers and gradients ----

def test_helpers_by_hand():
    assert literal.real([1 + 2j, [3.0, 4]]) == [1, [3, 4]]
    assert literal.zeros(2, 1) == [[0], [0]]
    assert literal.inner([[1, 2], [3, 4]], [[5, 6], [7, 8]]) == 70   # 5 + 12 + 21 + 32
    assert literal.positive_part(-1 + 5j) == 0 and literal.positive_part(1 + 5j) == 1 + 5j
    assert literal.logistic(math.log(3)) == pytest.approx(0.75)   # 1 / (1 + 1/3)
    assert literal.logistic(-math.log(3)) == pytest.approx(0.25)
    assert literal.log_logistic(-math.log(3)) == pytest.approx(-math.log(4))
    assert literal.log_logistic(-2000.0) == -2000 and literal.logistic(-2000.0) == 0 and literal.logistic(2000.0) == 1
    with pytest.raises(ValueError, match="same shape"):
        literal.inner([1, 2], [1])


def test_gradient_is_exact_for_elementary_functions():
    # d/dx (x^2 y) = 2xy = 12, d/dy = x^2 = 4
    assert close(literal.gradient(lambda p: p[0] * p[0] * p[1][0], [2.0, [3.0]]), [12, 4], 1e-15)
    assert literal.gradient(literal.exp, 1.0) == pytest.approx(math.e, rel=1e-15)
    assert literal.gradient(literal.log, 4.0) == pytest.approx(0.25, rel=1e-15)    # 1 / 4
    assert literal.gradient(literal.sqrt, 4.0) == pytest.approx(0.25, rel=1e-15)   # 1 / (2 * 2)
    assert literal.gradient(literal.logistic, math.log(3)) == pytest.approx(3 / 16)   # 3/4 * 1/4
    assert literal.gradient(literal.logistic, -math.log(3)) == pytest.approx(3 / 16)
    assert literal.gradient(literal.log_logistic, -math.log(3)) == pytest.approx(0.75)   # 1 - logistic(z)
    assert literal.gradient(lambda x: 7.0, [1.0, 2.0]) == [0, 0]


# ---- dynamic routing: by hand ----

def test_squash_by_hand():
    assert close(literal.squash([3.0, 4.0]), [15 / 26, 20 / 26])   # |s| = 5; 25/26 * (3/5, 4/5)
    assert close(literal.squash([0.5]), [0.2])                     # 1/4 / (5/4)
    assert literal.squash([0.0, 0.0]) == [0, 0]                    # the limit


def test_squash_gradient_by_hand():
    # one entry: s^2 / (1 + s^2), derivative 2s / (1 + s^2)^2; at s = 1: 2 / 4
    assert literal.gradient(lambda s: literal.squash(s)[0], [1.0]) == pytest.approx([0.5])
    # at s = (3, 4), direction across s: |v| / |s| = 25/26 / 5 = 5/26, along (-4, 3) / 5
    across = literal.gradient(lambda s: (-4 * literal.squash(s)[0] + 3 * literal.squash(s)[1]) / 5, [3.0, 4.0])
    assert close(across, [-4 / 26, 3 / 26])
    assert literal.gradient(lambda s: literal.squash(s)[0], [0.0, 0.0]) == [0, 0]   # v is about s |s| there


def test_primary_capsules_by_hand():
    # one row of two positions, 4 channels: two capsules of 2 entries at each position
    conv = [[[[3.0, 4.0, 0.5, 0.0], [-1.0, 0.0, 0.0, -0.5]]]]
    # |(3, 4)| = 5: 5/26 (3, 4); |.5|: .2; |1|: 1/2, negative entries survive
    assert close(literal.primary_capsules(conv, 2), [[[15 / 26, 20 / 26], [0.2, 0], [-0.5, 0], [0, -0.2]]])


def test_votes_by_hand():
    # (1*5 + 2*6, 3*5 + 4*6) = (17, 39); second output capsule: (6, 5)
    assert literal.votes([[[5.0, 6.0]]], [[[[1, 2], [3, 4]], [[0, 1], [1, 0]]]]) == [[[[17, 39], [6, 5]]]]


def test_softmax_by_hand():
    assert close(literal.softmax([0.0, math.log(3)]), [0.25, 0.75])   # 1 / (1 + 3), 3 / (1 + 3)
    assert close(literal.softmax([1000.0, 1000.0 + math.log(3)]), [0.25, 0.75])


def test_weighted_votes_by_hand():
    # 0.25 * 4 + 0.5 * 2 = 2; 0.75 * 8 + 0.5 * 6 = 9
    assert literal.weighted_votes([[[0.25, 0.75], [0.5, 0.5]]], [[[[4.0], [8.0]], [[2.0], [6.0]]]]) == [[[2], [9]]]


def test_dynamic_routing_by_hand():
    # One input capsule; its votes have length 1 along (0.6, 0.8) and length 2 along (0.6, -0.8), so v_j keeps the
    # direction of vote j, and every agreement is (length of the vote) * (length of v_j).
    first, second, third = literal.dynamic_routing([[[[0.6, 0.8], [1.2, -1.6]]]], 3)
    # t = 1: c = 1/2; |s| = 0.5, 1; |v| = 0.25 / 1.25, 1 / 2
    assert first["b"] == [[[0, 0]]]
    assert close(first["c"], [0.5, 0.5])
    assert close(first["s"], [0.3, 0.4, 0.6, -0.8])
    assert close(first["v"], [0.2 * 0.6, 0.2 * 0.8, 0.5 * 0.6, -0.5 * 0.8])
    # t = 2: b = (1 * 0.2, 2 * 0.5) = (0.2, 1); c_1 = 1 / (1 + e^0.8) = 0.3100; |s| = (0.3100, 1.3799)
    assert close(second["b"], [0.2, 1.0])
    c_1 = 1 / (1 + math.exp(0.8))
    assert close(second["c"], [c_1, 1 - c_1])
    # |v| = (0.0961 / 1.0961, 1.9043 / 2.9043) = (0.0877, 0.6557)
    lengths = [c_1 ** 2 / (1 + c_1 ** 2), (2 - 2 * c_1) ** 2 / (1 + (2 - 2 * c_1) ** 2)]
    assert close(lengths, [0.087688, 0.655678], 1e-6)
    assert close(literal.lengths(second["v"]), lengths)
    # t = 3: b = (0.2 + 0.0877, 1 + 2 * 0.6557) = (0.2877, 2.3114); c_1 = 1 / (1 + e^2.0237) = 0.1167;
    # |s| = (0.1167, 1.7665); |v| = (0.0136 / 1.0136, 3.1206 / 4.1206) = (0.0134, 0.7573)
    assert close(third["b"], [0.2 + lengths[0], 1 + 2 * lengths[1]])
    assert close(third["c"], [0.116740, 0.883260], 1e-6)
    assert close(literal.lengths(third["v"]), [0.013445, 0.757317], 1e-6)
    assert close(third["v"], [0.008067, 0.010756, 0.454390, -0.605853], 1e-6)


def test_the_last_iteration_does_not_update_the_logits():
    u_hat = draw(1, 1, 3, 2, 2)
    long, short = literal.dynamic_routing(u_hat, 3), literal.dynamic_routing(u_hat, 2)
    assert short == long[:2]   # and what an iteration returned is not changed by a later one
    with pytest.raises(ValueError, match="at least 1"):
        literal.dynamic_routing(u_hat, 0)


def test_margin_loss_by_hand():
    # present, length 0.5: (0.9 - 0.5)^2 = 0.16; absent, 0.3: 0.5 * (0.3 - 0.1)^2 = 0.02
    assert literal.margin_loss([[0.5, 0.3]], [[1, 0]]) == pytest.approx(0.18)
    # second sample: 0.95 > 0.9 and 0.05 < 0.1 cost nothing; mean of 0.18 and 0
    assert literal.margin_loss([[0.5, 0.3], [0.95, 0.05]], [[1, 0], [1, 0]]) == pytest.approx(0.09)
    assert literal.margin_loss([[0.0] * 10], [[1, 1] + [0] * 8]) == pytest.approx(1.62)   # two digits: 2 * 0.81
    # derivatives: -2 (0.9 - 0.5) = -0.8; 0.5 * 2 (0.3 - 0.1) = 0.2
    assert close(literal.gradient(lambda x: literal.margin_loss(x, [[1, 0]]), [[0.5, 0.3]]), [-0.8, 0.2])


def test_mask_and_reconstruction_by_hand():
    assert literal.mask([[[1.0, 2.0], [3.0, 4.0]]], [0]) == [[[1, 2], [0, 0]]]
    assert literal.mask([[[1.0, 2.0], [3.0, 4.0]]], [1]) == [[[0, 0], [3, 4]]]   # the label, not the longest, decides
    # (1 - 0)^2 + (0.5 - 1)^2 = 1.25, and 0; mean 0.625
    assert literal.reconstruction_loss([[1.0, 0.5], [0.2, 0.3]], [[0.0, 1.0], [0.2, 0.3]]) == pytest.approx(0.625)
    assert literal.total_loss(0.18, 100.0) == pytest.approx(0.23)   # 0.18 + 0.0005 * 100


# ---- dynamic routing: gradients and invariances ----

def v_of(u_hat, n_iters=3, **kwargs):
    return literal.dynamic_routing(u_hat, n_iters, **kwargs)[-1]["v"]


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_gradient_of_dynamic_routing(n_iters):
    u_hat, weights = draw(2, 2, 3, 2, 2), draw(3, 2, 2, 2)

    def f(x):
        return literal.inner(v_of(x, n_iters), weights)
    assert close(literal.gradient(f, u_hat), central_differences(f, u_hat), 1e-8)


def test_gradient_with_constant_couplings():
    u_hat, weights = draw(2, 2, 3, 2, 2), draw(3, 2, 2, 2)
    iterations = literal.dynamic_routing(u_hat, 3)

    def frozen(x):   # the last iteration alone, with the couplings at u_hat
        s = literal.weighted_votes(iterations[-1]["c"], x)
        return literal.inner(each(literal.squash, s, 2), weights)

    def stopped(x):
        return literal.inner(v_of(x, constant_couplings=True), weights)
    exact = literal.gradient(lambda x: literal.inner(v_of(x), weights), u_hat)
    assert v_of(u_hat, constant_couplings=True) == v_of(u_hat)   # the outputs agree, only the gradient differs
    assert close(literal.gradient(stopped, u_hat), central_differences(frozen, u_hat), 1e-8)
    assert not close(literal.gradient(stopped, u_hat), exact, 0.01)
    # with uniform couplings, nothing is stopped
    assert close(literal.gradient(lambda x: literal.inner(v_of(x, 1, constant_couplings=True), weights), u_hat),
                 literal.gradient(lambda x: literal.inner(v_of(x, 1), weights), u_hat))


def test_gradients_of_a_whole_network():
    conv, W, image = draw(4, 2, 1, 2, 4), draw(5, 4, 2, 2, 2), draw(6, 2, 4)
    present, labels = [[1, 0], [0, 1]], [0, 1]

    def loss(conv, W):
        v = v_of(literal.votes(literal.primary_capsules(conv, 2), W))
        drawn = [[x for capsule in sample for x in capsule] for sample in literal.mask(v, labels)]
        return literal.total_loss(literal.margin_loss(literal.lengths(v), present),
                                  literal.reconstruction_loss(drawn, image))
    for f, x in ((lambda x: loss(x, W), conv), (lambda x: loss(conv, x), W)):
        assert close(literal.gradient(f, x), central_differences(f, x), 1e-8)


def test_rotating_the_votes_rotates_the_outputs():
    u_hat = draw(7, 2, 3, 2, 3)
    iterations, turned = literal.dynamic_routing(u_hat, 3), [each(lambda x: rotated(x, 0.7), u_hat[0], 2), u_hat[1]]
    after = literal.dynamic_routing(turned, 3)
    assert close([step["c"] for step in after], [step["c"] for step in iterations])   # agreement is a scalar product
    assert close(after[-1]["v"][0], each(lambda x: rotated(x, 0.7), iterations[-1]["v"][0], 1))
    assert close(after[-1]["v"][1], iterations[-1]["v"][1])   # the other sample was not rotated
    # even another rotation, or a reflection, for every output capsule
    mixed = [[[rotated(u_hat[n][i][0], 0.7), [-x for x in u_hat[n][i][1]]] for i in range(3)] for n in range(2)]
    v = iterations[-1]["v"]
    assert close(v_of(mixed), [[rotated(v[n][0], 0.7), [-x for x in v[n][1]]] for n in range(2)])


def test_permutations_permute_dynamic_routing():
    u_hat, order = draw(8, 3, 3, 3, 2), [2, 0, 1]
    v = v_of(u_hat)
    assert v_of([u_hat[n] for n in order]) == [v[n] for n in order]
    assert close(v_of([[sample[i] for i in order] for sample in u_hat]), v)
    assert close(v_of([[[child[j] for j in order] for child in sample] for sample in u_hat]),
                 [[sample[j] for j in order] for sample in v])
    assert close([v_of([sample])[0] for sample in u_hat], v)   # samples do not interact


def test_an_input_capsule_without_votes_changes_nothing():
    u_hat = draw(9, 1, 3, 2, 2)
    assert close(v_of([[*u_hat[0], literal.zeros(2, 2)]]), v_of(u_hat))


def test_one_output_capsule_has_coupling_1():
    u_hat = draw(10, 1, 3, 1, 2)
    total = [sum(u_hat[0][i][0][e] for i in range(3)) for e in range(2)]
    assert close(v_of(u_hat), literal.squash(total))


def test_splitting_an_input_capsule_changes_dynamic_routing_after_one_iteration():
    # Two halves of a vote sum to the same s, but each half agrees half as much with v: 2017 has no activation to halve.
    u_hat = draw(11, 1, 2, 2, 2, low=1.0, high=4.0)
    split = [[scaled(u_hat[0][0], 0.5), scaled(u_hat[0][0], 0.5), u_hat[0][1]]]
    assert close(v_of(split, 1), v_of(u_hat, 1))
    assert not close(v_of(split, 2), v_of(u_hat, 2), 1e-3)


def test_scaling_the_votes_scales_s_in_the_first_iteration_only():
    u_hat = draw(12, 1, 3, 2, 2)
    before, after = literal.dynamic_routing(u_hat, 2), literal.dynamic_routing(scaled(u_hat, 3.0), 2)
    assert close(after[0]["s"], scaled(before[0]["s"], 3.0))
    assert not close(after[1]["s"], scaled(before[1]["s"], 3.0), 1e-3)
    assert all(length < 1 for length in flat(literal.lengths(v_of(scaled(u_hat, 100.0)))))


# ---- EM routing: by hand ----

def test_m_step_by_hand():
    # One parent, two children with activations 1 and 1/3, votes 0 and 2 (R = 1): mass = 4/3,
    # mu = 2/3 / (4/3) = 1/2, sigma^2 = (1 * 1/4 + 1/3 * 9/4) / (4/3) = 3/4, log sigma = log(3/4) / 2 = -0.143841
    V, a, R = [[[[0.0]], [[2.0]]]], [[1.0, 1 / 3]], [[[1.0], [1.0]]]
    mu, sigma2, cost, logit = literal.m_step(V, a, R, [0.5], [2.0], 0.1)
    assert close(mu, [0.5]) and close(sigma2, [0.75])
    assert close(cost, [(0.5 + math.log(0.75) / 2) * 4 / 3])   # (0.5 - 0.143841) * 4/3 = 0.474879
    assert close(cost, [0.474879], 1e-6) and close(logit, [0.1 * (2 - 0.474879)], 1e-6)
    # epsilon 1/4 makes sigma^2 = 1 and log sigma = 0; parents / children = 1/2 halves the mass: cost = 0.5 * 2/3
    mu, sigma2, cost, logit = literal.m_step(V, a, R, [0.5], [2.0], 0.1, epsilon=0.25, mass_factor=0.5)
    assert close(mu, [0.5]) and close(sigma2, [1.0]) and close(cost, [1 / 3]) and close(logit, [0.1 * 5 / 3])


def test_log_density_by_hand():
    # log of e^(-1/2) / sqrt(2 pi) * e^(-4/8) / (2 sqrt(2 pi)) = -1 - log 2 - log(2 pi)
    assert literal.log_density([1.0, 2.0], [0.0, 0.0], [1.0, 4.0]) == pytest.approx(-1 - math.log(2 * 2 * math.pi))


def test_em_routing_by_hand():
    # Two children, active, vote 1 and -1 for parent A, 0 and 4 for parent B; beta_u = beta_a = 0, lambda = 1.
    first, second = literal.em_routing([[[[1.0], [0.0]], [[-1.0], [4.0]]]], [[1.0, 1.0]], [0.0] * 2, [0.0] * 2, [1, 1])
    # t = 1: R = 1/2, masses 1; mu = 0, 2; sigma^2 = 1, 4; cost = 0, log 2; a = 1/2, 1 / (1 + 2) = 1/3
    assert first["R"] == [[[0.5, 0.5], [0.5, 0.5]]]
    assert close(first["mu"], [0, 2]) and close(first["sigma2"], [1, 4])
    assert close(first["cost"], [0, math.log(2)]) and close(first["a"], [1 / 2, 1 / 3])
    # E-step: every vote is 1 sigma from its mean, p = e^(-1/2) / sqrt(2 pi) * (1, 1/2);
    # a p is in the ratio 1/2 : 1/6, so R = 3/4, 1/4 for both children
    assert close(first["R_next"], [3 / 4, 1 / 4, 3 / 4, 1 / 4]) and second["R"] == first["R_next"]
    # t = 2: equal R for both children keep mu and sigma; masses 3/2 and 1/2; cost = 0, log(2) / 2;
    # a = 1/2, 1 / (1 + sqrt 2) = sqrt 2 - 1
    assert close(second["mu"], [0, 2]) and close(second["sigma2"], [1, 4])
    assert close(second["cost"], [0, math.log(2) / 2]) and close(second["a"], [1 / 2, math.sqrt(2) - 1])
    # a p is in the ratio 1/2 : (sqrt 2 - 1) / 2, so R = 1 / sqrt 2 and 1 - 1 / sqrt 2
    assert close(second["R_next"], [math.sqrt(0.5), 1 - math.sqrt(0.5)] * 2)


def test_assignments_compete_over_connected_parents():
    # child 0 votes for parent 0 only, child 1 for both: 1, and 1/2 each
    connected = [[1, 0], [1, 1]]
    assert literal.uniform_assignments(2, 2) == [[0.5, 0.5], [0.5, 0.5]]
    assert literal.uniform_assignments(2, 2, connected) == [[1, 0], [0.5, 0.5]]
    # parent 1 has one child: mu is its vote and sigma^2 = epsilon. Parent 0: mu = (1 * 0 + 1/2 * 3) / (3/2) = 1,
    # sigma^2 = (1 * 1 + 1/2 * 4) / (3/2) + 1 = 3
    step = literal.em_routing([[[[0.0], [9.0]], [[3.0], [5.0]]]], [[1.0, 1.0]], [0.0] * 2, [0.0] * 2, [1.0],
                              epsilon=1.0, connected=connected)[0]
    assert close(step["mu"], [1, 5]) and close(step["sigma2"], [3, 1])
    assert step["R_next"][0][0] == [1, 0] and sum(step["R_next"][0][1]) == pytest.approx(1)


def test_a_given_initial_assignment_is_used():
    # R = (1/4, 3/4) for the child with vote 1, (3/4, 1/4) for the child with vote -1: mu = -1/2, +1/2
    step = literal.em_routing([[[[1.0], [1.0]], [[-1.0], [-1.0]]]], [[1.0, 1.0]], [0.0] * 2, [0.0] * 2, [1.0],
                              initial_R=[[0.25, 0.75], [0.75, 0.25]])[0]
    assert close(step["mu"], [-0.5, 0.5])


def test_zero_variance_needs_epsilon():
    one_child = ([[[[2.0]]]], [[1.0]], [0.0], [0.0], [1.0])
    with pytest.raises(ValueError, match="math domain|positive"):
        literal.em_routing(*one_child)
    assert close(literal.em_routing(*one_child, epsilon=0.25)[0]["sigma2"], [0.25])
    with pytest.raises(ValueError, match="lambdas is empty"):
        literal.em_routing(*one_child[:4], [])


def test_inverse_temperatures_by_hand():
    # 0.01 (1 - 0.95) = 0.0005; 0.01 (1 - 0.9025) = 0.000975
    assert close(literal.inverse_temperatures(2), [0.0005, 0.000975])


def test_procedure_1_and_equation_2_agree_with_shifted_beta_u():
    # Eq. 1: cost = sum_i -r ln P; Eq. 2: a = logistic(lambda (beta_a - beta_u sum_i r - sum_h cost)), beta_u once
    V, a, R, H = draw(20, 1, 3, 1, 2), [[0.9, 0.5, 0.7]], [[[0.5], [0.2], [1.0]]], 2
    mu, sigma2, _, logit = literal.m_step(V, a, R, [0.3], [1.5], 0.7)
    r = [a[0][i] * R[0][i][0] for i in range(3)]
    cost = sum(-r[i] * literal.log_density(V[0][i][0], mu[0][0], sigma2[0][0]) for i in range(3))
    beta_u = H * (0.3 - (1 + math.log(2 * math.pi)) / 2)
    assert close(logit, [0.7 * (1.5 - beta_u * sum(r) - cost)])


def test_spread_loss_by_hand():
    # margin 0.5: gaps 0.9 - 0.3 = 0.6 costs 0, 0.9 - 0.8 = 0.1 costs 0.4^2 = 0.16
    assert literal.spread_loss([[0.9, 0.3, 0.8]], [0], 0.5) == pytest.approx(0.16)
    assert literal.spread_loss([[0.4] * 5], [2], 0.2) == pytest.approx(0.16)   # 4 * 0.2^2
    assert literal.spread_loss([[0.9, 0.3, 0.8], [0.9, 0.3, 0.3]], [0, 0], 0.5) == pytest.approx(0.08)
    # derivatives: d/da_t = -2 * 0.4, d/da_i = +2 * 0.4
    assert close(literal.gradient(lambda a: literal.spread_loss(a, [0], 0.5), [[0.9, 0.3, 0.8]]), [-0.8, 0, 0.8])


def test_matrix_votes_by_hand():
    # M W, not W M: ((1 2), (3 4)) times ((0 1), (1 0)) exchanges the columns
    assert literal.matrix_votes([[[[1.0, 2.0], [3.0, 4.0]]]], [[[[0, 1], [1, 0]]]]) == [[[[2, 1, 4, 3]]]]


def test_coordinate_addition_by_hand():
    # entries 3 (row 0, column 3) and 7 (row 1, column 3) of a 4x4 matrix
    V = [[[[float(h) for h in range(16)]]]]
    expected = list(range(16))
    expected[3], expected[7] = 3.25, 7.75
    assert literal.coordinate_addition(V, [[0.25, 0.75]]) == [[[expected]]]
    assert literal.scaled_positions(2, 1) == [[0.25, 0.5], [0.75, 0.5]]
    with pytest.raises(ValueError, match="4x4"):
        literal.coordinate_addition([[[[0.0] * 9]]], [[0, 0]])


# ---- EM routing: gradients and invariances ----

N, I, J, H = 2, 4, 3, 2
BETA_U, BETA_A, LAMBDAS = [0.3, -0.2, 0.1], [0.5, 0.1, -0.4], [0.4, 0.7, 0.9]
VOTES, ACTIVATIONS = draw(21, N, I, J, H), draw(22, N, I, low=0.2)


def em(V=VOTES, a=ACTIVATIONS, beta_u=BETA_U, beta_a=BETA_A, lambdas=LAMBDAS, **kwargs):
    return literal.em_routing(V, a, beta_u, beta_a, lambdas, **kwargs)


def outputs(iterations, names=("mu", "sigma2", "cost", "a")):
    return [[step[name] for name in names] for step in iterations]


def scalar(iterations):
    return (literal.inner(iterations[-1]["mu"], draw(23, N, J, H)) + literal.inner(iterations[-1]["a"], draw(24, N, J)))


@pytest.mark.parametrize("kwargs", [{}, {"epsilon": 0.01, "mass_factor": 0.75},
                                    {"epsilon": 0.01, "connected": [[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1]]}])
@pytest.mark.parametrize("argument", ["V", "a", "beta_u", "beta_a"])
def test_gradient_of_em_routing(argument, kwargs):
    x = {"V": VOTES, "a": ACTIVATIONS, "beta_u": BETA_U, "beta_a": BETA_A}[argument]

    def f(x):
        return scalar(em(**{argument: x}, **kwargs))
    assert close(literal.gradient(f, x), central_differences(f, x), 1e-7)


def test_gradient_with_constant_assignments():
    R = em()[-1]["R"]

    def frozen(V):   # the last M-step alone, with the assignments at VOTES
        mu, _, _, logit = literal.m_step(V, ACTIVATIONS, R, BETA_U, BETA_A, LAMBDAS[-1])
        return scalar([{"mu": mu, "a": each(literal.logistic, logit, 2)}])
    stopped = literal.gradient(lambda V: scalar(em(V, constant_assignments=True)), VOTES)
    assert outputs(em(constant_assignments=True)) == outputs(em())
    assert close(stopped, central_differences(frozen, VOTES), 1e-7)
    assert not close(stopped, literal.gradient(lambda V: scalar(em(V)), VOTES), 0.01)


def test_gradients_of_spread_loss_coordinates_and_matrix_votes():
    M, W, positions = draw(25, 1, 4, 4, 4), draw(26, 4, 2, 4, 4), literal.scaled_positions(2, 2)

    def loss(M, W):
        V = literal.coordinate_addition(literal.matrix_votes(M, W), positions)
        iterations = literal.em_routing(V, [[0.9, 0.5, 0.7, 0.6]], [0.1, 0.2], [0.3, 0.1], [0.05, 0.1], epsilon=0.05)
        return literal.spread_loss(iterations[-1]["a"], [1], 0.9)
    for f, x in ((lambda x: loss(x, W), M), (lambda x: loss(M, x), W)):
        assert close(literal.gradient(f, x), central_differences(f, x), 1e-7)


def test_a_child_with_activation_0_changes_nothing():
    V = [[*VOTES[n], [[5.0, -7.0]] * J] for n in range(N)]
    after = em(V, [[*ACTIVATIONS[n], 0.0] for n in range(N)])
    assert close(outputs(after), outputs(em()))
    assert close([sum(child) for child in after[-1]["R"][0]], [1.0] * (I + 1))   # it is still assigned


def test_splitting_a_child_and_its_activation_changes_nothing():
    V = [[VOTES[n][0], *VOTES[n]] for n in range(N)]
    a = [[0.3 * ACTIVATIONS[n][0], 0.7 * ACTIVATIONS[n][0], *ACTIVATIONS[n][1:]] for n in range(N)]
    before, after = em(), em(V, a)
    assert close(outputs(after), outputs(before))
    assert close([step["R"][n][1:] for step in after for n in range(N)],
                 [step["R"][n] for step in before for n in range(N)])


def test_scaling_votes_shifts_the_cost():
    scaled_votes, k = scaled(VOTES, 3.0), 3.0
    before, after = em()[0], em(scaled_votes)[0]
    assert close(after["mu"], scaled(before["mu"], k)) and close(after["sigma2"], scaled(before["sigma2"], k * k))
    # the logit of a_j shifts by -lambda H mass_j log k, with mass_j = sum_i R_ij a_i, R = 1/J
    shift = [[LAMBDAS[0] * H * sum(ACTIVATIONS[n]) / J * math.log(k)] * J for n in range(N)]
    assert close([[after["logit"][n][j] + shift[n][j] for j in range(J)] for n in range(N)], before["logit"])
    # beta_u - log k takes the shift back, in all iterations
    names = ("R", "cost", "a")
    compensated = em(scaled_votes, beta_u=[beta - math.log(k) for beta in BETA_U])
    assert close(outputs(compensated, names), outputs(em(), names))
    assert close(compensated[-1]["mu"], scaled(em()[-1]["mu"], k))
    # without activations (lambda = 0) the assignments do not depend on the scale; otherwise they do
    assert close(em(scaled_votes, lambdas=[0, 0])[-1]["R"], em(lambdas=[0, 0])[-1]["R"])
    assert not close(em(scaled_votes)[-1]["R"], em()[-1]["R"], 1e-3)
    # an epsilon must be scaled, too
    assert close(em(scaled_votes, lambdas=[0, 0], epsilon=0.09)[-1]["R"], em(lambdas=[0, 0], epsilon=0.01)[-1]["R"])


def test_scaling_activations_is_an_inverse_temperature():
    # masses and costs double; half lambda and twice beta_a take it back
    halved = em(a=scaled(ACTIVATIONS, 2.0), beta_a=scaled(BETA_A, 2.0), lambdas=scaled(LAMBDAS, 0.5))
    names = ("R", "mu", "sigma2", "a")
    assert close(outputs(halved, names), outputs(em(), names))
    assert close(halved[-1]["cost"], scaled(em()[-1]["cost"], 2.0))
    # so does a mass factor of 1/2
    assert close(outputs(em(a=scaled(ACTIVATIONS, 2.0), mass_factor=0.5)), outputs(em()))


def test_translating_the_votes_for_a_parent_translates_its_pose():
    shift = draw(27, J, H)
    V = [[[[VOTES[n][i][j][h] + shift[j][h] for h in range(H)] for j in range(J)] for i in range(I)] for n in range(N)]
    names = ("R", "sigma2", "cost", "a")
    assert close(outputs(em(V), names), outputs(em(), names), 1e-11)
    mu = em()[-1]["mu"]
    assert close(em(V)[-1]["mu"], [[[mu[n][j][h] + shift[j][h] for h in range(H)] for j in range(J)] for n in range(N)])


def test_rotating_votes_changes_em_routing_unless_axes_are_exchanged_or_reversed():
    # the covariance is diagonal, so the axes of pose space matter
    assert not close(em(each(lambda x: rotated(x, 0.7), VOTES, 3))[-1]["a"], em()[-1]["a"], 1e-3)
    quarter_turn = em(each(lambda x: rotated(x, math.pi / 2), VOTES, 3))
    assert close(quarter_turn[-1]["mu"], each(lambda x: rotated(x, math.pi / 2), em()[-1]["mu"], 2))
    assert close(outputs(quarter_turn, ("R", "a")), outputs(em(), ("R", "a")))


def test_permutations_permute_em_routing():
    a, mu = em()[-1]["a"], em()[-1]["mu"]
    swapped = em(VOTES[::-1], ACTIVATIONS[::-1])[-1]
    assert swapped["a"] == a[::-1] and swapped["mu"] == mu[::-1]
    children = em([VOTES[n][::-1] for n in range(N)], [ACTIVATIONS[n][::-1] for n in range(N)])
    assert close(outputs(children), outputs(em()))
    parents = em([[child[::-1] for child in VOTES[n]] for n in range(N)], beta_u=BETA_U[::-1], beta_a=BETA_A[::-1])[-1]
    assert close(parents["a"], [a[n][::-1] for n in range(N)])
    alone = literal.em_routing(VOTES[:1], ACTIVATIONS[:1], BETA_U, BETA_A, LAMBDAS)
    assert close(alone[-1]["a"], a[:1])   # samples do not interact


def test_equal_votes_are_assigned_by_activation():
    # Two parents with the same votes and beta_u have equal densities: R_ij = a_j / sum_k a_k
    V = [[[VOTES[n][i][0]] * 2 for i in range(I)] for n in range(N)]
    step = em(V, beta_u=[0.1, 0.1], beta_a=[1.0, -1.0])[0]
    for n in range(N):
        shares = [step["a"][n][j] / sum(step["a"][n]) for j in range(2)]
        assert step["a"][n][0] > step["a"][n][1] and close(step["R_next"][n], [shares] * I)


def test_one_parent_has_assignment_1():
    V = [[[child[0]] for child in VOTES[n]] for n in range(N)]
    one, three = em(V, beta_u=[0.1], beta_a=[0.2], lambdas=[0.9]), em(V, beta_u=[0.1], beta_a=[0.2])
    assert set(flat(three[-1]["R"])) == {1.0} and close(three[-1]["a"], one[-1]["a"])   # more iterations do nothing


def test_the_authors_formulation_of_dynamic_routing_agrees():
    """As in their TensorFlow code: entries first, a logit per vote, (s / |s|) (|s|^2 / (1 + |s|^2)), bias 0."""
    votes = np.array(draw(31, 3, 7, 5, 4))                     # (N, I, J, E)
    entries_first, logits = votes.transpose(3, 0, 1, 2), np.zeros((3, 7, 5))
    for expected in literal.dynamic_routing(votes.tolist(), 3):
        route = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
        preactivate = (route * entries_first).transpose(1, 2, 3, 0).sum(1)
        norm = np.linalg.norm(preactivate, axis=2, keepdims=True)
        activation = preactivate / norm * (norm * norm / (1 + norm * norm))
        assert close(route.tolist(), expected["c"]) and close(activation.tolist(), expected["v"])
        logits = logits + (votes * activation[:, None]).sum(3)
