"""Routing as the papers define it, in NumPy, with one switch for each known mistake: what the check compares with.

dynamic_routing, margin_loss, spread_loss and em_routing compute the papers' formulas. Each keyword is a switch that
puts one kind of mistake in; MISTAKES lists the switches with their names and remedies. Sets of up to three of them are
tried together, because public implementations combine as many. Tests compare the functions with literal.py and with the
experiments' own functions.

All functions take real or complex arrays and are analytic, so that derivatives can be computed by the complex step; see
`derivative`. Axes: N sample, I input capsule, J output capsule, E entry of an output capsule, H entry of a pose.
"""
import itertools
from collections import namedtuple

import numpy as np

from .kinds import KINDS

STEP = 1e-30                       # of the complex step: its square vanishes beside any real part

# name: of the kind. settings: the switches that it turns. fix: what to change; {I}, {J}, ... are the sizes of axes,
# {logits} the user's order of the logits' axes, {axis} the place of J among them. what: one sentence, for kinds that
# kinds.py does not describe. most: mistakes in the sets in which it is tried
Mistake = namedtuple("Mistake", "name settings fix what most", defaults=("", 3))


def describe(mistake):
    """Return one sentence: what the mistake computes, and which equation says otherwise."""
    return mistake.what or next(kind[1] for kind in KINDS if kind[0] == mistake.name)


def combinations(mistakes, most=3):
    """Return all sets of at most that many mistakes that turn different switches, smallest first, as tuples."""
    sets = []
    for n in range(most + 1):
        for chosen in itertools.combinations(mistakes, n):
            turned = [switch for mistake in chosen for switch in mistake.settings]
            if len(set(turned)) == len(turned) and all(n <= mistake.most for mistake in chosen):
                sets.append(chosen)
    return sets


def settings_of(chosen):
    """Return the keywords of a set of mistakes."""
    return {switch: value for mistake in chosen for switch, value in mistake.settings.items()}


def derivative(f, x, direction):
    """Return the derivative of f, one real number or an array of them, at x along a direction, exact to rounding."""
    return np.imag(f(x + 1j * STEP * direction)) / STEP


def frozen(x, stopped=True):
    """Return x as a constant for `derivative`, if it is stopped."""
    return x.real if stopped else x


def softmax(b, axis):
    powers = np.exp(b - b.real.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


# ---- dynamic routing (Sabour et al. 2017) ----

def squash(s, form="paper", epsilon=0.0, place="root"):
    """Return v = |s|^2 / (1 + |s|^2) s / |s| (Eq. 1), with s, v: (N, J, E), or another form.

    epsilon is added to |s|^2 inside the root ("root"), to |s| outside it ("norm"), or to |s|^2 everywhere ("all"). The
    product form s |s| / (1 + |s|^2) has the epsilon inside the root ("product") or outside ("product norm").
    """
    if form == "none":
        return s
    square = s * s if form == "component" else (s * s).sum({"outputs": 1, "batch": 0}.get(form, 2), keepdims=True)
    if place == "all":
        square = square + epsilon
    norm = np.sqrt(square + (epsilon if place in ("root", "product") else 0))
    norm = norm + (epsilon if place in ("norm", "product norm") else 0)
    if form == "not divided by the length":
        return s * square / (1 + square)
    zero = np.abs(norm) == 0                                   # the limit of Eq. 1 at s = 0 is 0
    unit = np.where(zero, 0, s / np.where(zero, 1, norm))
    if form == "length in place of its square":
        return unit * (np.sqrt(square) / (1 + np.sqrt(square)))
    if form == "unit":
        return unit
    if form == "exponential":
        return unit * (1 - np.exp(-np.sqrt(square)))
    if form == "length above its square":
        return unit * (np.sqrt(square) / (1 + square))
    one = 0.5 if form == "0.5" else 1.0
    return s * norm / (one + square) if place.startswith("product") else unit * (square / (one + square))


UNROUTED = ("nothing", "uniform", "mean")                   # coupling coefficients that never change


def couplings(b, normalize="outputs"):
    """Return c, (N, I, J), from the logits b, by the softmax over the output capsules (Eq. 3) or another function.

    normalize: what the softmax normalizes over. "leaky": the output capsules and one more, of logit 0. "each": a
    logistic function in place of the softmax. (n, m), for J = n m: m neighbors at a time; (-n, m): each m-th, n at a
    time. One of UNROUTED: a constant, which is 1, 1 / J, or 1 / I.
    """
    if normalize == "each":
        return 1 / (1 + np.exp(-b))
    if normalize in UNROUTED:
        N, I, J = b.shape
        return np.full_like(b, {"nothing": 1, "uniform": 1 / J, "mean": 1 / I}[normalize])
    if normalize == "leaky":
        return softmax(np.concatenate([np.zeros_like(b[:, :, :1]), b], 2), 2)[:, :, 1:]
    if isinstance(normalize, tuple):
        n, m = normalize
        return softmax(b.reshape(*b.shape[:2], abs(n), m), 3 if n > 0 else 2).reshape(b.shape)
    return softmax(b, {"inputs": 1, "outputs": 2, "batch": 0}[normalize])


def unit_vectors(v):
    square = (v * v).sum(-1, keepdims=True)
    return v / np.sqrt(np.where(np.abs(square) == 0, 1, square))


def dynamic_routing(u_hat, n_iters, normalize="outputs", scale="", average=False, replace=False, more=0, form="paper",
                    last="squash", first="squash", sign=1, cosine="", mean=False, bias=0.0, stop="", epsilon=0.0,
                    place="root"):
    """Compute the output capsules by dynamic routing (Procedure 1). u_hat: (N, I, J, E). Return v, (N, J, E).

    normalize: see `couplings`. scale: "root" divides the logits by sqrt(E) in the softmax, "maximum" divides them after
    each iteration by their largest over the output capsules. average: agreements over the batch ("sum": sum). replace:
    the logits by the newest agreement. more: iterations than asked for. form: of the squash. last, first: "none" leaves
    the squash of the last iteration, or of all others, away. sign: of the agreement. cosine: agreement with v / |v|
    ("v"), of the votes' directions, too ("both"). mean: of the weighted votes, in place of their sum. bias: added to s,
    (J, E). stop: what is a constant for the gradient: "couplings", "v" or "votes" in the agreement, or the votes in the
    "sums" of all iterations but the last. None if no iteration is left.
    """
    if n_iters + more < 1:
        return None
    N, I, J, _ = u_hat.shape
    b = np.zeros((N, I, J))
    for t in range(n_iters + more):
        c = couplings(b / u_hat.shape[3] ** 0.5 if scale == "root" else b, normalize) / (I if mean else 1)
        is_last = t == n_iters + more - 1
        s = np.einsum("nij,nije->nje", frozen(c, stop == "couplings"), frozen(u_hat, stop == "sums" and not is_last))
        v = squash(s + bias, form if (last if is_last else first) == "squash" else "none", epsilon, place)
        votes, outputs = frozen(u_hat, stop == "votes"), frozen(v, stop == "v")
        outputs = unit_vectors(outputs) if cosine else outputs
        agreement = sign * np.einsum("nije,nje->nij", unit_vectors(votes) if cosine == "both" else votes, outputs)
        if average:
            shared = agreement.sum(0, keepdims=True) / (1 if average == "sum" else N)
            agreement = np.broadcast_to(shared, (N, I, J))
        b = agreement if replace else b + agreement
        if scale == "maximum":
            b = b / np.take_along_axis(b, b.real.argmax(2)[:, :, None], 2)
    return v


def bias_of(v, settings):
    """Return the bias b with which the squash of b, without votes, is v, (J, E); None if it cannot be told from v."""
    if settings.get("last") == "none":
        return v
    form = settings.get("form", "paper")
    if form in ("batch", "none") or settings.get("mean"):
        return None

    def length(v):
        if form == "component":
            return np.abs(v)
        return np.linalg.norm(v, axis=0 if form == "outputs" else -1, keepdims=True)
    size = length(v)
    unit = v / np.where(size == 0, 1, size)
    low, high = np.zeros_like(size), np.full_like(size, 1e3)
    for _ in range(200):                                       # bisection: all forms grow with |s|
        middle = (low + high) / 2
        y = squash((middle * unit)[None], form)[0]
        short = length(y) < size
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return low * unit


SOFTMAX_FIX = "apply the softmax over the {J} output capsules: for logits b {logits}, softmax(b, axis={axis})"
SQUASH_FIX = "v = s |s| / (1 + |s|^2), with |s|^2 summed over the {E} entries of a capsule, keepdims=True"
ROUTING = (
    Mistake("softmax over input capsules", {"normalize": "inputs"}, SOFTMAX_FIX),
    Mistake("softmax over the batch", {"normalize": "batch"}, SOFTMAX_FIX,
            "The softmax normalizes over the samples of the batch, but 2017, Eq. 3 normalizes over the output capsules "
            "j of one input capsule."),
    Mistake("softmax over an axis of length 1", {"normalize": "nothing"}, SOFTMAX_FIX,
            "The softmax runs over an axis of length 1, so all coupling coefficients are 1; 2017, Eq. 3 normalizes "
            "over the output capsules j of one input capsule."),
    Mistake("logistic function in place of the softmax", {"normalize": "each"}, SOFTMAX_FIX,
            "The coupling coefficients are a logistic function of the logits, but in 2017, Eq. 3 those of one input "
            "capsule sum to 1."),
    Mistake("leaky routing", {"normalize": "leaky"}, SOFTMAX_FIX,
            "The softmax has one more class with the logit 0, whose share is dropped, but in 2017, Eq. 3 the coupling "
            "coefficients of one input capsule sum to 1 over the output capsules."),
    Mistake("logits divided by the square root of the dimension", {"scale": "root"}, "softmax(b), without a factor",
            "The softmax is that of the logits divided by the root of the number of entries of v, but in 2017, Eq. 3 "
            "it is that of the logits."),
    Mistake("logits divided by their maximum", {"scale": "maximum"}, "b = b + agreement, and nothing more",
            "The logits are divided by their largest over the output capsules after each iteration, but 2017, "
            "Procedure 1, line 7 only adds the agreement."),
    Mistake("votes averaged over input capsules", {"mean": True}, "sum the votes over the {I} input capsules",
            "The weighted votes are averaged over the input capsules, but 2017, Eq. 2 sums them."),
    Mistake("agreement subtracted", {"sign": -1}, "b = b + agreement",
            "The agreement is subtracted from the logits, but 2017, Procedure 1, line 7 adds it."),
    Mistake("agreement with the direction of v", {"cosine": "v"},
            "agreement = sum(u_hat v), with the squashed v itself",
            "The agreement is the dot product with v / |v|, but 2017, Procedure 1, line 7 has that with v, so that "
            "short capsules attract less."),
    Mistake("cosine in place of the agreement", {"cosine": "both"},
            "agreement = sum(u_hat v), with the votes themselves",
            "The agreement is the cosine of a vote and v, but 2017, Procedure 1, line 7 has their dot product."),
    Mistake("logits averaged over the batch", {"average": True},
            "give b the shape {logits}, and do not average the agreements over the {N} samples"),
    Mistake("logits summed over the batch", {"average": "sum"},
            "give b the shape {logits}, and do not sum the agreements over the {N} samples",
            "The agreements are summed over the samples of a batch, but in 2017, Procedure 1 every sample has its own "
            "logits."),
    Mistake("logits not accumulated", {"replace": True}, "b = b + agreement, in place of b = agreement"),
    Mistake("one iteration more", {"more": 1}, "run the loop n_iters times; the first time with uniform couplings"),
    Mistake("one iteration fewer", {"more": -1}, "run the loop n_iters times; the first time with uniform couplings",
            "The loop runs n - 1 times for n iterations, while 2017, Procedure 1 computes v exactly n times."),
    Mistake("squash of each component", {"form": "component"}, SQUASH_FIX),
    Mistake("squash over output capsules", {"form": "outputs"}, SQUASH_FIX),
    Mistake("squash over the batch", {"form": "batch"}, SQUASH_FIX,
            "The squash takes its norm over the samples of the batch, but 2017, Eq. 1 takes it over the entries of one "
            "capsule."),
    Mistake("squash with 0.5 in place of 1", {"form": "0.5"}, SQUASH_FIX),
    Mistake("unit vector in place of the squash", {"form": "unit"}, SQUASH_FIX,
            "The output is s / |s|, of length 1, but 2017, Eq. 1 scales it by |s|^2 / (1 + |s|^2)."),
    Mistake("exponential in the squash", {"form": "exponential"}, SQUASH_FIX,
            "The squash scales the unit vector by 1 - exp(-|s|), as Mazzia et al. 2021 do, but 2017, Eq. 1 scales it "
            "by |s|^2 / (1 + |s|^2)."),
    Mistake("squash without the square", {"form": "length in place of its square"}, SQUASH_FIX,
            "The squash scales the unit vector by |s| / (1 + |s|), but 2017, Eq. 1 scales it by |s|^2 / (1 + |s|^2)."),
    Mistake("squash with the square below only", {"form": "length above its square"}, SQUASH_FIX,
            "The squash scales the unit vector by |s| / (1 + |s|^2), but 2017, Eq. 1 scales it by |s|^2 / (1 + |s|^2)"
            "."),
    Mistake("squash not divided by the length", {"form": "not divided by the length"}, SQUASH_FIX,
            "The squash scales s itself by |s|^2 / (1 + |s|^2), but 2017, Eq. 1 scales the unit vector s / |s| by it."),
    Mistake("final squash missing", {"last": "none"}, "squash s in the last iteration, too, and return that v"),
    Mistake("squash in the last iteration only", {"first": "none"},
            "compute the agreement with the squashed v, in every iteration",
            "The agreements are computed with s, but in 2017, Procedure 1, lines 6 and 7, with its squash v."),
)
NOTHING_ROUTED = tuple(
    Mistake("nothing is routed", settings,
            "update the logits with the agreement, and take their softmax in every iteration",
            f"The output is {words} after any number of iterations: nothing is routed, but in 2017, Procedure 1 the "
            "coupling coefficients follow the agreement.", 2)
    for words, settings in (
        ("the mean of the votes", {"normalize": "mean", "last": "none"}),
        ("the squash of the mean of the votes", {"normalize": "mean"}),
        ("the sum of the votes", {"normalize": "nothing", "last": "none"}),
        ("the sum of the votes divided by the number of output capsules", {"normalize": "uniform", "last": "none"}),
        ("that of one iteration", {"normalize": "uniform"})))


def per_position(J):
    """Return the mistakes of a softmax over a part of the J output capsules, such as the types of one position."""
    splits = [(n, J // n) for n in range(2, J // 2 + 1) if J % n == 0]
    return tuple(Mistake(
        "softmax per position", {"normalize": split}, SOFTMAX_FIX + ", or keep it and say so",
        f"The softmax normalizes over {size} of the {J} output capsules at a time, such as the types of one position, "
        "but 2017, Eq. 3 normalizes over all that an input capsule votes for.")
        for n, m in splits for split, size in (((n, m), m), ((-n, m), n)))


STOPS = (
    Mistake("gradient of inner iterations stopped", {"stop": "couplings"},
            "remove detach(), no_grad() or stop_gradient() from the votes and the coupling coefficients in the loop"),
    Mistake("output capsules stopped in the agreement", {"stop": "v"},
            "remove detach(), no_grad() or stop_gradient() from v in the agreement",
            "v is a constant for the gradient in the agreement, but the logits of 2017, Procedure 1 depend on it."),
    Mistake("votes stopped in the agreement", {"stop": "votes"},
            "remove detach(), no_grad() or stop_gradient() from the votes in the agreement",
            "The votes are constants for the gradient in the agreement, but the logits of 2017, Procedure 1 depend on "
            "them."),
    Mistake("votes stopped in the inner sums", {"stop": "sums"},
            "remove detach(), no_grad() or stop_gradient() from the votes in the weighted sum of the inner iterations",
            "The votes are constants for the gradient in the weighted sums of all iterations but the last; the output "
            "of 2017, Procedure 1 depends on them."),
)


# ---- margin loss (Sabour et al. 2017) ----

def margin_loss(lengths, present, squares=True, mean_over_classes=False, input="lengths", weight=0.5, halved=False,
                hinge=True, weighted="absent", upper=0.9, lower=0.1, epsilon=0.0, place=""):
    """Return the margin loss (Eq. 4) of each sample, (N,). lengths: |v_k|, (N, K). present: T_k, (N, K). epsilon: added
    to |v|^2 inside the root, which is its only place."""
    lengths = np.sqrt(lengths * lengths + epsilon) if place else lengths
    if input == "squared":
        lengths = lengths * lengths
    elif input == "softmaxed":
        lengths = softmax(lengths, 1)
    short, long = upper - lengths, lengths - lower
    if hinge:
        short, long = short * (short.real > 0), long * (long.real > 0)
    if squares:
        short, long = short * short, long * long
    losses = present * short * (weight if weighted == "present" else 1) \
        + (1 - present) * long * (weight if weighted == "absent" else 1)
    return (losses.mean(1) if mean_over_classes else losses.sum(1)) * (0.5 if halved else 1)


MARGIN = (
    Mistake("margin loss without squares", {"squares": False}, "square both hinges: max(0, 0.9 - |v|)^2"),
    Mistake("margin loss of softmaxed lengths", {"input": "softmaxed"}, "pass the lengths |v| themselves"),
    Mistake("margin loss of squared lengths", {"input": "squared"}, "pass |v|, the square root of sum(v^2)",
            "The squared lengths enter the margin loss, but 2017, Eq. 4 uses the lengths."),
    Mistake("margin loss averaged over classes", {"mean_over_classes": True},
            "sum over the {K} classes, then average over the samples"),
    Mistake("margin loss halved", {"halved": True}, "remove the factor 0.5 in front of the whole loss",
            "The whole loss is multiplied by 0.5; in 2017, Eq. 4 only the absent classes are."),
    Mistake("absent classes not down-weighted", {"weight": 1.0}, "multiply the term of absent classes by 0.5",
            "The loss of absent classes has the weight 1, but in 2017, Eq. 4 it has lambda = 0.5."),
    Mistake("factor 0.5 squared", {"weight": 0.25}, "multiply the square of the term of absent classes by 0.5",
            "The loss of absent classes has the weight 0.25, but in 2017, Eq. 4 lambda = 0.5 is outside the square."),
    Mistake("present classes down-weighted", {"weighted": "present"}, "multiply the term of absent classes by 0.5",
            "The factor 0.5 multiplies the loss of present classes; in 2017, Eq. 4 it multiplies that of absent ones."),
    Mistake("margin loss without max", {"hinge": False}, "max(0, 0.9 - |v|)^2 and max(0, |v| - 0.1)^2",
            "The differences to the margins are not clipped at 0, but 2017, Eq. 4 has max(0, ...)."),
    Mistake("margins exchanged", {"upper": 0.1, "lower": 0.9}, "the margins are m+ = 0.9 and m- = 0.1",
            "Present classes have the margin 0.1 and absent ones 0.9, but in 2017, Eq. 4 m+ = 0.9 and m- = 0.1."),
    Mistake("margins 1 and 0", {"upper": 1.0, "lower": 0.0}, "the margins are m+ = 0.9 and m- = 0.1",
            "The margins are 1 and 0, but in 2017, Eq. 4 they are m+ = 0.9 and m- = 0.1."),
)


# ---- spread loss (Hinton et al. 2018) ----

def spread_loss(a, present, m, squares=True, hinge=True, true_class=False, over="sum", sign=1, halved=False,
                softmaxed=False):
    """Return the spread loss (Eq. 3) of each sample, (N,). a: activations, (N, K). present: T_k, (N, K).

    m: margin. true_class: its own term m^2 is not left out. over: how the terms of the other classes are combined:
    "sum", "mean", "mean of others", "max", or "square of the sum". sign: of the difference a_t - a_i.
    """
    a = softmax(a, 1) if softmaxed else a
    short = m - sign * ((a * present).sum(1, keepdims=True) - a)
    short = short * (short.real > 0) if hinge else short
    short = short if true_class else short * (1 - present)
    if over == "square of the sum":
        return short.sum(1) ** 2
    terms = short * short if squares else short
    K = a.shape[1]
    if over == "max":
        return np.take_along_axis(terms, terms.real.argmax(1)[:, None], 1)[:, 0]
    return terms.sum(1) / {"sum": 1, "mean": K, "mean of others": K - 1}[over] * (0.5 if halved else 1)


SPREAD = (
    Mistake("spread loss without squares", {"squares": False}, "square each term: max(0, m - (a_t - a_i))^2",
            "The spread loss sums max(0, m - (a_t - a_i)), but 2018, Eq. 3 sums their squares."),
    Mistake("spread loss without max", {"hinge": False}, "max(0, m - (a_t - a_i))^2",
            "The differences to the margin are not clipped at 0, but 2018, Eq. 3 has max(0, ...)."),
    Mistake("true class in the spread loss", {"true_class": True}, "leave the true class out of the sum",
            "The sum has the term m^2 of the true class, but in 2018, Eq. 3 it runs over the other classes."),
    Mistake("spread loss averaged over classes", {"over": "mean"},
            "sum over the classes, then average over the samples",
            "The spread loss is averaged over all classes, but 2018, Eq. 3 sums over them."),
    Mistake("spread loss averaged over the other classes", {"over": "mean of others"},
            "sum over the classes, then average over the samples",
            "The spread loss is averaged over the wrong classes, but 2018, Eq. 3 sums over them."),
    Mistake("largest term of the spread loss alone", {"over": "max"}, "sum over all classes but the true one",
            "The spread loss is the largest term, but 2018, Eq. 3 sums the terms of all wrong classes."),
    Mistake("square of the sum in the spread loss", {"over": "square of the sum"}, "square each term, then sum",
            "The sum of the differences to the margin is squared, but 2018, Eq. 3 sums their squares."),
    Mistake("spread loss halved", {"halved": True}, "remove the factor 0.5",
            "The whole loss is multiplied by 0.5; 2018, Eq. 3 has no factor."),
    Mistake("difference reversed in the spread loss", {"sign": -1}, "max(0, m - (a_t - a_i))^2",
            "The loss has a_i - a_t, but 2018, Eq. 3 has a_t - a_i: it decreases when wrong classes are more active."),
    Mistake("spread loss of softmaxed activations", {"softmaxed": True}, "pass the activations a themselves",
            "The activations pass a softmax before the loss, but 2018, Eq. 3 uses the activations themselves."),
)


# ---- EM routing (Hinton et al. 2018) ----

def log_logistic(z):
    """Return log(1 / (1 + exp(-z))), without overflow."""
    return np.where(z.real > 0, 0, z) - np.log(1 + np.exp(np.where(z.real > 0, -z, z)))


def shared(beta, form):
    """Return beta, (J,), or its "first" value, its "mean", or 0, "none", for all parents."""
    return 0 * beta + {"first": beta[0], "mean": beta.mean(), "none": 0.0}[form] if form else beta


def em_routing(V, a, beta_u, beta_a, lambdas, weights="product", exponent="paper", log_variance=False, mass="paper",
               activation="logistic", with_activation=True, over="parents", start="uniform", once=False,
               temperature="all", with_scale=True, centered=True, schedule="paper", more=0, standardized=False,
               one_beta_u="", one_beta_a="", densities="", stop="", epsilon=0.0, log_epsilon=0.0, mass_epsilon=0.0,
               activation_epsilon=0.0, cost_epsilon=0.0):
    """Compute EM routing (Procedure 1). V: (N, I, J, H); a: (N, I); beta_u, beta_a: (J,); lambdas: one per iteration.

    weights: "renormalized" divides R_ij a_i by its sum over the parents. exponent: of the density. log_variance: in
    place of log sigma in the cost ("minus": -log sigma). standardized: the cost, over the parents. one_beta_u,
    one_beta_a: the "first" or the "mean" for all parents. mass: "ratio" multiplies it by parents / children, "none"
    leaves it out of the cost. activation: "softmax" over the parents. with_activation: of the parents, in the E-step.
    over: what R is normalized over. start: "ones" for R = 1. once: beta_u once per parent, not once per entry.
    temperature: "cost" multiplies the cost alone by lambda, "none" neither; "sum" adds the cost. with_scale: the
    density's factor 1 / sigma. centered: the variance is around mu, not 0. schedule: "last" or "first" lambda in all
    iterations. more: iterations than asked for. densities: the E-step is the softmax of a_j p_j, with ("2 pi") or
    without ("plain") the density's factor (2 pi)^(-H/2). stop: "assignments" are constants for the gradient. epsilon:
    added to the variance. log_epsilon: to sigma in its logarithm, mass_epsilon: to sum_i r_ij, activation_epsilon: to
    a_j in its logarithm, cost_epsilon: to the standard deviation of the cost.
    Return mu, (N, J, H), and the parents' activations, (N, J). None if no iteration is left.
    """
    beta_u, beta_a = shared(beta_u, one_beta_u), shared(beta_a, one_beta_a)
    T = len(lambdas) + more
    if T < 1:
        return None
    N, I, J, H = V.shape
    R, mu, sigma2, logit = np.full((N, I, J), 1 / J if start == "uniform" else 1.0), None, None, None
    for t in range(T):
        lambda_ = lambdas[{"last": -1, "first": 0}.get(schedule, min(t, len(lambdas) - 1))]
        if t:
            R = frozen(e_step(V, mu, sigma2, logit, exponent, with_activation, over, with_scale, activation,
                              activation_epsilon, densities), stop == "assignments")
        r = R * a[..., None]
        if weights == "renormalized":
            r = r / r.sum(2, keepdims=True)
        total = r.sum(1) + mass_epsilon                        # (N, J)
        mu = np.einsum("nij,nijh->njh", r, V) / total[..., None]
        difference = V - mu[:, None] if centered else V
        sigma2 = np.einsum("nij,nijh->njh", r, difference * difference) / total[..., None]
        sigma2 = sigma2 + epsilon
        log_sigma = np.log(np.sqrt(sigma2) + log_epsilon) * {True: 2, False: 1, "minus": -1}[log_variance]
        beta = beta_u[:, None] * np.where(np.arange(H) == 0, 1.0, 0.0 if once else 1.0)
        in_cost = {"paper": total, "ratio": total * (J / I), "none": np.ones_like(total)}[mass]
        cost = ((beta + log_sigma) * in_cost[..., None]).sum(2)
        if standardized:
            cost = cost - cost.mean(1, keepdims=True)
            cost = cost / (np.sqrt((cost * cost).mean(1, keepdims=True)) + cost_epsilon)
        logit = beta_a * (lambda_ if temperature in ("all", "sum") else 1) - cost * (
            {"none": 1, "sum": -lambda_}.get(temperature, lambda_))
    return mu, softmax(logit, 1) if activation == "softmax" else np.exp(log_logistic(logit))


def e_step(V, mu, sigma2, logit, exponent="paper", with_activation=True, over="parents", with_scale=True,
           activation="logistic", epsilon=0.0, densities=""):
    """Compute R_ij = a_j p_j(V_ij) / sum_k a_k p_k(V_ij), (N, I, J), from logarithms.

    densities: see `em_routing`. A density is too large for exp() in a softmax only where it decides alone.
    """
    square = (V - mu[:, None]) ** 2
    spread = sigma2[:, None]
    density = {"paper": -square / (2 * spread), "without 2": -square / spread, "1/4": -square / (4 * spread),
               "without sigma": -square / 2, "without 2 sigma": -square}[exponent]
    log_p = (density - (np.log(sigma2)[:, None] / 2 if with_scale else 0)).sum(3)
    if with_activation:
        log_a = np.log(softmax(logit, 1)) if activation == "softmax" else log_logistic(logit)
        log_p = log_p + (log_a if isinstance(epsilon, float) and epsilon == 0 else np.log(np.exp(log_a) + epsilon))[
            :, None]
    if densities:
        log_p = np.exp(log_p - (V.shape[3] / 2 * np.log(2 * np.pi) if densities == "2 pi" else 0))
    return softmax(log_p, 2 if over == "parents" else 1)


DENSITY_FIX = "log p = -sum_h ((V - mu)^2 / (2 sigma^2) + log(sigma) + log(2 pi) / 2)"
EM = (
    Mistake("EM: children's activations cancel", {"weights": "renormalized"},
            "r = R * a; do not divide it by its sum over the {J} parents"),
    *(Mistake("EM: wrong exponent of the density", {"exponent": form}, DENSITY_FIX, text) for form, text in (
        ("without 2", "The density has exp(-(V - mu)^2 / sigma^2), but 2018, Procedure 1, E-STEP, line 2 divides by "
                      "2 sigma^2."),
        ("1/4", "The density has exp(-(V - mu)^2 / (4 sigma^2)), but 2018, Procedure 1, E-STEP, line 2 divides by "
                "2 sigma^2."),
        ("without sigma", "The density has exp(-(V - mu)^2 / 2), but 2018, Procedure 1, E-STEP, line 2 divides by "
                          "2 sigma^2."),
        ("without 2 sigma", "The density has exp(-(V - mu)^2), but 2018, Procedure 1, E-STEP, line 2 divides by "
                            "2 sigma^2."))),
    Mistake("EM: density without 1 / sigma", {"with_scale": False}, DENSITY_FIX,
            "The density lacks the factor 1 / sigma, so that wide parents attract all votes; 2018, Procedure 1, "
            "E-STEP, line 2 has it."),
    Mistake("EM: log of the variance in the cost", {"log_variance": True}, "log(sigma) = log(sigma^2) / 2"),
    Mistake("EM: log sigma subtracted in the cost", {"log_variance": "minus"},
            "cost_h = (beta_u + log sigma_h) * sum_i r_ij",
            "The cost has beta_u - log sigma, but 2018, Procedure 1, M-STEP, line 5 adds log sigma."),
    Mistake("EM: variance around 0", {"centered": False}, "sigma^2 = sum_i r (V - mu)^2 / sum_i r",
            "The variance is the mean of V^2, but 2018, Procedure 1, M-STEP, line 4 subtracts mu from V."),
    Mistake("EM: mass factor in the cost", {"mass": "ratio"},
            "multiply by sum_i r_ij alone, or keep the factor and say so: it is Gritzman's (2019)"),
    Mistake("EM: mass missing in the cost", {"mass": "none"}, "cost_h = (beta_u + log sigma_h) * sum_i r_ij",
            "The cost is not multiplied by sum_i r_ij, but 2018, Procedure 1, M-STEP, line 5 is."),
    Mistake("EM: cost standardized over the parents", {"standardized": True}, "a = logistic(lambda (beta_a - cost))",
            "The cost is divided by its standard deviation over the parents after its mean is subtracted, but 2018, "
            "Procedure 1, M-STEP, line 6 uses the cost itself."),
    *(Mistake(f"EM: one {name} for all parents", {f"one_{name}": form}, f"give {name} one value for each of the {{J}} "
              "parents", f"One {name}, the {form} of them, acts on all parents, but in 2018, Procedure 1, M-STEP, line "
              f"{line} every parent has its own.", 2) for name, line in (("beta_u", 5), ("beta_a", 6))
      for form in ("first", "mean")),
    *(Mistake(f"EM: {name} missing", {f"one_{name}": "none"}, f"add {name}: {formula}", f"{name} is missing, but 2018, "
              f"Procedure 1, M-STEP, line {line} has it.", 2) for name, line, formula in (
        ("beta_u", 5, "cost_h = (beta_u + log sigma_h) * sum_i r_ij"),
        ("beta_a", 6, "a = logistic(lambda (beta_a - cost))"))),
    Mistake("EM: beta_u once per parent", {"once": True}, "add beta_u to each of the {H} costs, or keep it and say so",
            "beta_u is added once per parent, as in 2018, Eq. 2, but Procedure 1, M-STEP, line 5 adds it for every "
            "entry h; trained values can make up for it."),
    Mistake("EM: softmax in place of the logistic", {"activation": "softmax"}, "a = logistic(lambda (beta_a - cost))"),
    Mistake("EM: activation missing in the E-step", {"with_activation": False},
            "R = a p / sum a p: add log(a_j) to log(p_j)"),
    *(Mistake("EM: softmax of the densities", {"densities": form},
              "R = a p / sum a p, or the softmax of log(a) + log(p)",
              "The assignments are the softmax of a_j p_j, which is nearly uniform for small densities, but 2018, "
              "Procedure 1, E-STEP, line 3 divides a_j p_j by its sum over the parents.", 2)
      for form in ("2 pi", "plain")),
    Mistake("EM: assignments normalized over the children", {"over": "children"},
            "normalize R over the {J} parents of each child",
            "The assignments are normalized over the children i, but 2018, Procedure 1, E-STEP, line 3 normalizes over "
            "the parents of one child."),
    Mistake("EM: initial assignments not divided", {"start": "ones"}, "start from R = 1 / {J}",
            "The assignments start at 1, but 2018, Procedure 1, line 2 starts them at 1 / (number of parents)."),
    Mistake("EM: lambda multiplies the cost alone", {"temperature": "cost"},
            "a = logistic(lambda * (beta_a - cost)), or keep it and say so: for one lambda, beta_a can make up for it",
            "The activation is logistic(beta_a - lambda cost), but in 2018, Procedure 1, M-STEP, line 6 lambda "
            "multiplies beta_a, too."),
    Mistake("EM: cost added", {"temperature": "sum"}, "a = logistic(lambda * (beta_a - cost))",
            "The activation is logistic(lambda (beta_a + cost)), but 2018, Procedure 1, M-STEP, line 6 subtracts the "
            "cost."),
    Mistake("EM: last lambda in all iterations", {"schedule": "last"}, "use the t-th lambda in the t-th iteration",
            "All iterations use the last lambda, but that of 2018, Procedure 1, M-STEP, line 6 follows a schedule."),
    Mistake("EM: first lambda in all iterations", {"schedule": "first"}, "use the t-th lambda in the t-th iteration",
            "All iterations use the first lambda, but that of 2018, Procedure 1, M-STEP, line 6 follows a schedule."),
    Mistake("EM: lambda missing", {"temperature": "none"}, "a = logistic(lambda * (beta_a - cost))",
            "The activation is logistic(beta_a - cost), but 2018, Procedure 1, M-STEP, line 6 multiplies by lambda."),
    Mistake("EM: one iteration more", {"more": 1}, "run the loop once per lambda, the last time without an E-step",
            "The loop runs n + 1 times for n iterations, while 2018, Procedure 1 runs n M-steps."),
    Mistake("EM: one iteration fewer", {"more": -1}, "run the loop once per lambda, the last time without an E-step",
            "The loop runs n - 1 times for n iterations, while 2018, Procedure 1 runs n M-steps."),
)
EM_STOPS = (Mistake("EM: gradient of the assignments stopped", {"stop": "assignments"},
                    "remove detach(), no_grad() or stop_gradient() from R"),)

MISTAKES = {"dynamic": ROUTING, "layer": ROUTING, "em": EM, "margin-loss": MARGIN, "spread-loss": SPREAD}
