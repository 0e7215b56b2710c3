"""Compares one function with the reference, in values, gradients and properties, and reports what it finds."""
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from . import calls, facts, naming, reference
from .calls import Unusable, arrange, last_line
from .kinds import KINDS
from .naming import difference
from .properties import Trials
from .wording import percent, plural, power

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
DIRECTIONS = 6                     # random directions along which gradients are compared
MARGINS = [0.2, 0.5, 0.9]          # of the spread loss
CLOSE = 1e-6                       # differences that float32 in a part of a function, or unusual epsilons, explain
SECONDS_FOR_ORDERS = 10.0          # for other orders of the axes, where no mistakes explain the first
SECONDS_FOR_A_LIST = 0.5           # or only to say which others fit
OF_E_STEPS = {"exponent", "with_activation", "over", "with_scale", "densities", "more", "schedule"}    # after the first


# ---- what is compared ----

def probe(kind, sizes, seed=0):
    """Return random inputs, by name, for which mistakes show: most output capsules have lengths from 0.2 to 0.8."""
    rng, N, I, J, D, E, H, K = np.random.default_rng(seed), *(sizes[letter] for letter in "NIJDEHK")
    if kind == "spread-loss":
        a, labels = rng.uniform(0.05, 0.95, (N, K)), (1 + np.arange(N)) % K
        a[0, labels[0]] = 0.97                                 # and beyond the margin 0.2
        return {"a": a, "present": np.eye(K)[labels]}
    if kind == "margin-loss":
        lengths, labels = rng.uniform(0.02, 0.98, (N, K)), (1 + np.arange(N)) % K
        lengths[0, labels[0]], lengths[1, labels[1]] = 0.95, 0.4       # both sides of the margin 0.9
        lengths[0, labels[0] - 1], lengths[1, labels[1] - 1] = 0.05, 0.7            # and of 0.1
        return {"lengths": lengths, "present": np.eye(K)[labels]}
    if kind == "em":                                           # alike for all parents, so that they compete
        V = rng.uniform(-1, 1, (N, I, 1, H)) + 0.25 * rng.uniform(-1, 1, (N, I, J, H))
        return {"V": V, "a": rng.uniform(0.2, 1, (N, I)), "beta_u": rng.uniform(-0.5, 2.5, J),
                "beta_a": rng.uniform(-1, 1, J)}
    if kind == "dynamic":
        u_hat = rng.normal(size=(N, 1, J, E)) + 0.8 * rng.normal(size=(N, I, J, E))
        u_hat *= rng.uniform(0.6, 1.4, (N, I, 1, 1))
        u_hat[:, ::7] *= -1                                    # which disagree, so that the sign of an agreement shows
        return {"u_hat": u_hat * (1.2 * J / np.median(np.linalg.norm(u_hat.sum(1), axis=-1)))}
    u, W = rng.normal(size=(N, I, D)) + rng.normal(size=(N, 1, D)), rng.normal(size=(I, J, E, D)) + rng.normal(
        size=(1, J, E, D))
    return {"u": u, "W": W * (1.1 * J / np.median(np.linalg.norm(np.einsum("nid,ijed->nje", u, W), axis=-1)))}


def expected(kind, inputs, n, lambdas=(), **settings):
    """Return the reference's outputs, or None if it has none with these settings."""
    if kind == "em":
        return reference.em_routing(*inputs.values(), lambdas[:n], **settings)
    if kind == "margin-loss":
        return [reference.margin_loss(*inputs.values(), **settings)]
    if kind == "spread-loss":
        return [reference.spread_loss(*inputs.values(), n, **settings)]
    u_hat = inputs["u_hat"] if kind == "dynamic" else np.einsum("nid,ijed->nije", inputs["u"], inputs["W"])
    routed = reference.dynamic_routing(u_hat, n, **settings)
    return None if routed is None else [routed]


def finite(arrays):
    return all(bool(np.isfinite(y).all()) for y in arrays)


# what a property that does not hold says about the function; the text begins with the name of a kind where it shows one
RANDOM_OR_KEPT = ("A repeated call gives another output. Something is random, or a call leaves something behind, such "
                  "as logits kept from the batch before.")
RANDOM = "Something is random. Start from logits of 0, fix the weights, and switch dropout off."
KEPT = "logits kept from the batch before, or something else that a call leaves behind: start every call from b = 0"
PLACE = ("initial logits trained per batch slot, or something else that depends on the place in the batch: use no "
         "parameter of shape (N, ...)")
INFLUENCE = ("The samples of a batch influence each other. Sum, average and normalize over other axes only. A module "
             "with batch normalization or dropout: call its eval() first.")
ROTATION = "Rotated votes do not give rotated outputs: the entries of a capsule are not treated as one vector."
EPSILON = "no epsilon in the squash, forward: write v = s |s| / (1 + |s|^2), with |s| = sqrt(sum(s^2) + 1e-9)"
EPSILON_GRADIENT = "no epsilon in the squash, gradient: put it inside the root, |s| = sqrt(sum(s^2) + 1e-9)"
NOT_ZERO = "An output capsule without votes is not 0, as with a bias; without votes v must be 0."
FLOOR = ("The votes of a child with activation 0 change the output, as with a floor under the weights of children: use "
         "r = R * a, in the variance, too, without clamp() and without dividing by its sum over the parents, and "
         "normalize R over the parents.")
VARIANCE = "EM: no epsilon on the variance: add one, such as 1e-4, to sigma^2"
DENSITY = ("Where the votes for a parent are equal, the output is NaN or infinite: its density is very large there. "
           "Compute with logarithms of densities.")
UNUSED = ("The output does not depend on W. Use the W that is passed; \"A module with weights of its own\" in "
          "docs/reference/conformance.md shows how to set the weights of a module.")
SINGLE = "A batch of one sample fails, perhaps by squeeze() without an axis. Name the axes that are removed."
CHANGED = "Your function changes its inputs. Work on copies: the votes of a training step are used again."
WITH_A_BIAS = "Without votes the output is not 0, as with a bias. Set the bias to 0 and check again."
FIXED_BATCH = "The loss of two samples is not that of three with one left out. Divide by len(lengths)."
EXPLAINED = (INFLUENCE, ROTATION, FLOOR, NOT_ZERO, DENSITY)    # by mistakes that the values show, if there are any
WITHOUT_VOTES = {                  # where Eq. 1 of 2017 is 0 / 0, or a variance is 0, and what shows of it
    EPSILON: "Where an output capsule has no votes, the output is NaN or infinite.",
    EPSILON_GRADIENT: "Where an output capsule has no votes, the gradient is NaN or infinite.",
    VARIANCE: "Where the votes for a parent are equal, the output is NaN or infinite."}
SQUASH_EPSILONS = [({"place": place}, ("epsilon",)) for place in ("root", "norm", "all", "product", "product norm")]
EM_EPSILONS = [({}, ("epsilon", *more)) for more in ((), ("cost_epsilon",), ("mass_epsilon",), (
    "mass_epsilon", "log_epsilon"), ("mass_epsilon", "activation_epsilon"))]
LOSS_EPSILONS = [({"place": "lengths"}, ("epsilon",))]         # of a loss that takes capsules
PLACES = {-1: "the last", 0: "the first"}                   # among the arrays that fit an output
EPSILON_WORDS = {"lengths": "to |v|^2 inside the root", "root": "to |s|^2 inside the root", "norm": "to |s|", "all":
                 "to |s|^2", "product": "to |s|^2 inside the root", "product norm": "to |s|", "epsilon": "to the "
                 "variance", "mass_epsilon": "to sum_i r_ij", "log_epsilon": "to sigma in its logarithm",
                 "activation_epsilon": "to a_j in its logarithm", "cost_epsilon": "to the standard deviation of the "
                 "cost"}
LARGEST_OF_OTHERS = 1e-3 * (1 + 1e-6)                          # epsilons above these change what is computed
LARGEST = {"em": 0.01 * (1 + 1e-6)}                            # which are fitted, with rounding


BIAS = reference.Mistake("bias in the output capsules", {"bias": True}, "remove it, or set it to 0 for the check")


@dataclass
class Report:
    """What was found. text: the whole report. mistakes: their names. facts: sentences that hold of the function. lines:
    what was compared, and whether it holds. passed: nothing is wrong but what is allowed. reason: why it is not passed,
    beside the mistakes."""
    target: str
    against: str
    verdict: str = ""
    passed: bool = False
    mistakes: list = field(default_factory=list)
    allowed: list = field(default_factory=list)
    facts: list = field(default_factory=list)
    epsilons: dict = field(default_factory=dict)
    precision: str = "float64"
    gradient: str = ""
    lines: list = field(default_factory=list)
    reason: str = ""
    text: str = ""

    def say(self, text=""):
        self.text += text + "\n"


class Check:
    """Calls one function, compares it with the reference, and reports what was found."""

    def __init__(self, kind, call, lambdas, iterations, tolerance, backward, allow=(), require_gradient=False):
        self.kind, self.call, self.lambdas, self.iterations = kind, call, lambdas, iterations
        self.asked, self.backward, self.failed, self.notes = tolerance, backward, [], []
        self.allow, self.require_gradient = allow, require_gradient
        self.is_loss, self.inside, self.bias, self.biases, self.ambiguous = "loss" in kind, "", None, {}, []
        self.close = 0.0                                       # difference that float32 in a part leaves
        self.nearly = 0.0                                      # or that several epsilons leave
        self.has_bias = self.unchanged = False                 # whether outputs without votes, or all, are alike
        self.also = []                                         # flags for other orders of the axes that fit
        self.inputs = probe(kind, call.sizes)
        self.per_sample, self.combine = True, "mean"           # form of a margin loss
        self.unreached, self.raised = {}, False                # n -> inputs without a gradient; whether gradients fail
        self.mistakes = reference.MISTAKES.get(kind, reference.ROUTING)
        if kind in ("dynamic", "layer"):
            self.mistakes += reference.per_position(call.sizes["J"])
        self.stops = () if self.is_loss else reference.EM_STOPS if kind == "em" else reference.STOPS
        self.places = [] if self.is_loss else EM_EPSILONS if kind == "em" else SQUASH_EPSILONS
        rng = np.random.default_rng(1)
        self.weights = [rng.normal(size=[call.sizes[letter] for letter in axes])
                        for axes in call.interface.outputs.values()]
        if self.is_loss:
            self.weights = [np.ones(call.sizes["N"])]
        self.directions = [{name: rng.normal(size=x.shape) for name, x in self.inputs.items() if name != "present"}
                           for _ in range(DIRECTIONS)]

    @property
    def tolerance(self):
        return self.asked or max(TOLERANCES.get(dtype, 1e-9) for dtype in self.precisions)

    @property
    def precisions(self):
        return self.call.found_dtype, self.call.dtype, self.inside

    @property
    def by_differences(self):
        return not self.backward and self.call.framework == "numpy"

    # ---- values ----

    def predict(self, settings, n, inputs=None):
        """Return what the reference computes for n iterations, combined over the samples as the function does."""
        if "bias" in settings:
            form = tuple(settings.get(name) for name in ("form", "last", "first"))
            if form not in self.biases:
                self.biases[form] = reference.bias_of(self.bias, settings)
            settings = settings | {"bias": self.biases[form]}
            if settings["bias"] is None:
                return None
        wanted = expected(self.kind, inputs or self.inputs, n, self.lambdas, **settings)
        if self.is_loss and not self.per_sample:
            wanted = [np.asarray(wanted[0].mean() if self.combine == "mean" else wanted[0].sum())]
        return wanted

    def values(self):
        """Call the function for every number of iterations. Return case -> outputs; self.errors has what it raised."""
        found, self.errors = {}, {}
        for n in self.iterations:
            self.call.renew()
            try:
                found[n] = self.call(self.inputs, n)
            except Exception as error:
                self.errors[n] = last_line(error)
        self.per_sample = not (self.is_loss and found and next(iter(found.values()))[0].ndim == 0)
        return found

    def mistakes_for(self, found):
        """Return the mistakes that these outputs can show.

        A number of iterations shows only where the reference then runs at least two: with one, the coupling
        coefficients are uniform, for which there are other reasons. That nothing is routed shows where the number of
        iterations changes nothing.
        """
        known = tuple(mistake for mistake in self.mistakes if "more" not in mistake.settings
                      or any(n + mistake.settings["more"] > 1 for n in found))
        alike = len({y[0].tobytes() for y in found.values()}) == 1
        if self.kind in ("dynamic", "layer") and alike and max(found) > 1:
            known += reference.NOTHING_ROUTED
        return known

    def explain(self, found, mistakes):
        """Return the sets of mistakes that explain the outputs, the difference, and settings of an epsilon."""
        if self.bias is not None:
            def biased(settings, n):
                return self.predict(settings | BIAS.settings, n)
            matches, worst, epsilon = naming.explain_with_epsilon(found, biased, mistakes, self.tolerance, self.places)
            return [(BIAS, *chosen) for chosen in matches], worst, epsilon
        best = self.explain_here(found, mistakes)
        if self.is_loss and not self.per_sample:      # the paper does not say how samples are combined
            self.combine = "sum"
            summed = self.explain_here(found, mistakes)
            if summed[0] and (not best[0] or len(summed[0][0]) < len(best[0][0])):
                self.notes.append("The samples are summed; the paper does not say how they are combined.")
                return summed
            self.combine = "mean"
        return best

    def explain_here(self, found, mistakes):
        """As `explain`, without a bias and for the present way to combine samples. A loss, of which there may be one
        number, is explained by an epsilon only if it is small, and without mistakes."""
        places = [] if self.is_loss else self.places
        best = naming.explain_with_epsilon(found, self.predict, mistakes, self.tolerance, places)
        if self.kind == "em" and mistakes and not best[0] and 1 in found and len(found) > 1:
            return self.explain_in_steps(found, mistakes)
        if self.is_loss and self.places and (best[1] is None or best[1] > self.tolerance):
            matches, worst, epsilon = naming.explain_with_epsilon(found, self.predict, (), self.tolerance, self.places)
            if matches and worst <= self.tolerance and epsilon["epsilon"] <= LARGEST_OF_OTHERS:
                return matches, worst, epsilon
        return best

    def explain_in_steps(self, found, mistakes):
        """As `explain` of EM routing, with up to four mistakes of the M-step, which one iteration shows, and its
        epsilon; then up to two of what follows."""
        if self.tolerance > 1e-3 or difference(found[1], self.predict({}, 1)) <= self.tolerance:
            return [], None, {}
        one_step = [mistake._replace(most=4) for mistake in mistakes if not mistake.settings.keys() & OF_E_STEPS
                    and not {"first", "mean"} & set(mistake.settings.values())]        # of a beta: too many sets
        later = [mistake for mistake in mistakes if mistake.settings.keys() & OF_E_STEPS]
        first = naming.explain_with_epsilon({1: found[1]}, self.predict, one_step, self.tolerance, self.places[:1],
                                            most=4)
        for chosen in first[0][:4]:
            settings = reference.settings_of(chosen)

            def predict(more, n, settings=settings):
                return self.predict(settings | more, n)
            matches, worst, epsilon = naming.explain_with_epsilon(
                found, predict, later, self.tolerance, self.places, most=2)
            if matches:
                return [(*chosen, *more) for more in matches], worst, epsilon
        return [], None, {}

    def differ(self, one, other, found):
        """Return whether two sets of mistakes compute different outputs."""
        pairs = [[self.predict(reference.settings_of(chosen), n) for chosen in (one, other)] for n in found]
        return any(a is None or b is None or difference(a, b) > 1e-9 for a, b in pairs)

    def output_without_votes(self, n):
        """Return the output without any vote, (J, E), if it is not 0 and alike for all samples; else None."""
        name = self.call.interface.votes
        try:
            self.call.renew()
            v, = self.call(self.inputs | {name: np.zeros_like(self.inputs[name])}, n)
        except Exception:
            return None
        alike = finite([v]) and np.abs(v).max() > self.tolerance and np.abs(v - v[:1]).max() <= self.tolerance
        return v[0] if alike else None

    def precision_inside(self, found):
        """Return the precision inside a function of float64, as its rounding shows: "float32", "float16", "bfloat16",
        or "".

        Steps of 1e-7 change a smooth function of float64 evenly, to about 1e-12; with float32 inside they do not. Steps
        of 1e-4 do so to about 1e-6; with float16 or bfloat16 inside, of which smaller ones show nothing, they do not.
        """
        if self.asked or not found or self.precisions[:2] != ("float64", "float64"):
            return ""
        n = max(found)
        if difference(found[n], self.predict({}, n)) <= self.tolerance:
            return ""

        def at(h, d):
            self.call.renew()
            return self.call(self.inputs | {name: self.inputs[name] + h * d[name] for name in d}, n)

        def bend(h):
            return max(difference([a + c for a, c in zip(at(-h, d), at(h, d))], [2 * b for b in middle])
                       for d in self.directions[:3])

        def rounding(h, low, high):                            # what bends a smooth function grows by 100
            noise = bend(h)
            return noise if low < noise < high and bend(10 * h) < 30 * noise else 0.0
        try:
            middle = at(0, self.directions[0])
            if difference(middle, at(0, self.directions[0])) > 0:      # random
                return ""
            if noise := rounding(1e-4, 2e-5, 0.05):
                return "float16" if noise < 3e-3 else "bfloat16"
            return "float32" if rounding(1e-7, 1e-10, 2e-5) else ""
        except Exception:
            return ""

    # ---- gradients ----

    def slopes(self, n, settings):
        """Return the reference's derivatives along the directions, by input: name -> (DIRECTIONS,); None if it has
        none."""
        if self.predict(settings, n) is None:
            return None

        def total(name, x):
            wanted = self.predict(settings, n, self.inputs | {name: x})
            return sum((y * (w if y.ndim else 1)).sum() for y, w in zip(wanted, self.weights))
        return {name: np.array([reference.derivative(lambda x, name=name: total(name, x), self.inputs[name], d[name])
                                for d in self.directions]) for name in self.directions[0]}

    def gradients(self, inputs, n):
        """Return the gradients by the user's backward pass or by autograd: name -> array, None if not reached."""
        names = list(self.directions[0])
        if not self.backward:
            return self.call.gradients(inputs, n, self.weights, names)
        given = self.call.arguments(inputs)
        g = [] if self.is_loss else [
            self.call.tensor(arrange(w, self.call.interface.outputs[name], self.layouts[name]))
            for name, w in zip(self.call.interface.outputs, self.weights)]
        with calls.silenced(), self.call.precision():
            returned = calls.arrays_of(self.backward(*g, *self.call.in_order(given, n)))
        if len(returned) < len(names):
            raise ValueError(f"--backward returned {plural(len(returned), 'gradient')} for {', '.join(names)}")
        names = [name for name in self.call.order if name in names]
        return {name: self.gradient_of(name, y, np.shape(given[name])) for name, y in zip(names, returned)}

    def gradient_of(self, name, y, shape):
        """Return a gradient that a backward pass returned, in canonical order; its axes may be in another one."""
        if tuple(np.shape(y)) == tuple(shape) or self.is_loss:
            return self.call.canonical(y, name)
        axes = self.call.interface.inputs[name]
        layout = calls.find_layout(np.shape(y), axes, self.call.sizes)
        if layout is None:
            raise ValueError(f"returned {tuple(np.shape(y))} as the gradient of {name} {tuple(shape)}")
        self.notes.append(f"--backward returns the gradient of {name} with the axes {layout}, where {name} itself has "
                          f"{self.call.reading[name]}. It is compared in its own order.")
        return calls.restore(calls.to_numpy(y).astype(float), axes, layout)

    def found_slopes(self, n):
        """Return the user's derivatives along the directions, by input; None for an input that is not reached."""
        if not self.by_differences:
            return {name: None if g is None else np.array([(g * d[name]).sum() for d in self.directions])
                    for name, g in self.gradients(self.inputs, n).items()}
        h = 1e-5 if self.tolerance <= 1e-8 else self.tolerance ** (1 / 3)

        def total(name, step):
            y = self.call(self.inputs | {name: self.inputs[name] + step}, n)
            return sum((part * (w if part.ndim else 1)).sum() for part, w in zip(y, self.weights))
        return {name: np.array([(total(name, h * d[name]) - total(name, -h * d[name])) / (2 * h)
                                for d in self.directions]) for name in self.directions[0]}

    def gradient(self, n, chosen, epsilon):
        """Compare the gradients after n iterations. Return a text, and the mistakes of the gradient that explain it:
        None in place of a mistake if the mistakes of the values do; an empty list if nothing is wrong."""
        tolerance = min(0.1, max(20 * self.tolerance, 1e-7, 100 * (self.worst or 0)))
        if self.by_differences:
            if self.tolerance > 1e-6:
                return "not compared in this precision", []
            if not finite(self.call(self.inputs, n)):
                return "not compared, since the output is NaN or infinite", []
            if not self.same(self.call(self.inputs, n), self.call(self.inputs, n)):
                return "not compared, since a repeated call gives another output", []
            tolerance = max(tolerance, 1e-5 if self.tolerance <= 1e-8 else 100 * self.tolerance ** (2 / 3))
        found = self.found_slopes(n)
        unreached = [name for name, slope in found.items() if slope is None]
        if unreached:
            self.unreached[n] = ", ".join(unreached)
            return f"does not reach {self.unreached[n]}", ["unreached"]

        def differs(settings):                                 # relative to each input's, or 1/1000 of the largest
            wanted = self.slopes(n, settings | epsilon)
            if wanted is None:
                return float("inf")
            sizes = {name: np.abs(y).max() for name, y in wanted.items()}
            largest = max(*sizes.values(), 1e-30)              # with which a slope of 0 is compared
            return np.max([np.abs(found[name] - y).max() / (        # NaN if one is; max() would lose it
                max(sizes[name], 1e-3 * largest) if sizes[name] > 1e-6 * largest else largest)
                for name, y in wanted.items()])
        right = differs({})
        if right <= tolerance:
            return "agrees", []
        if self.predict(reference.settings_of(chosen), n) is None:
            return "not compared", []
        stops = (None,) if self.by_differences else (None, *self.stops)      # central differences see what is stopped
        fitting = [stop for stop in stops if (chosen or stop) and differs(
            reference.settings_of(chosen) | (stop.settings if stop else {})) <= tolerance]
        if not fitting and not self.by_differences:
            fitting = self.times(found, self.slopes(n, reference.settings_of(chosen) | epsilon), tolerance)
        return f"differs by {percent(right)}", fitting or ["unnamed"]

    def times(self, found, wanted, tolerance):
        """Return a mistake in a list if every gradient is a constant times the right one, else an empty list."""
        factors = {}
        for name, y in wanted.items():
            factor = (found[name] @ y) / max(y @ y, 1e-300)
            error = np.abs(found[name] - factor * y).max()     # which may be NaN
            if not (abs(factor) >= 1e-3 and error <= tolerance * np.abs(factor * y).max()):
                return []
            factors[name] = f"{factor:.3g}"
        wrong = {name: factor for name, factor in factors.items() if factor != "1"}
        if not wrong:
            return []
        alike = len(set(factors.values())) == 1
        texts = wrong.values() if alike else [f"{factor} (of {name})" for name, factor in wrong.items()]
        text = " and ".join(dict.fromkeys(texts))
        return [reference.Mistake(f"gradient multiplied by {text}", {}, "remove the factor, or a sum or a mean that "
                                  "the forward pass does not have", "The gradient is this constant times the right "
                                  "one; the gradient of the function itself has no such factor.")]

    # ---- what must hold for every input ----

    def same(self, one, other):
        return difference(one, other) <= self.slack

    def invariances(self, n):
        """Yield (property, whether it holds, what it shows if it does not)."""
        call, x, kind = self.call, self.inputs, self.kind
        batch = [name for name, axes in call.interface.inputs.items() if "N" in axes]

        def samples(keep):
            return x | {name: x[name][keep] for name in batch}
        call.renew()
        first = call(x, n)
        if not finite(first):
            yield "finite output", False, ""
            return
        again = call(x, n)
        call.renew()
        if hasattr(call.fresh, "is_given") and not self.same(again, first):
            yield "repeated call: same output", False, RANDOM_OR_KEPT
            return
        if not self.same(call(x, n), first):
            yield "module imported again: same output", False, RANDOM
            return
        yield "repeated call: same output", self.same(again, first), KEPT
        given = call.arguments(x)
        call.call(given, n)
        if not all((calls.to_numpy(y) == calls.to_numpy(z)).all()
                   for y, z in zip(given.values(), call.arguments(x).values())):
            yield "inputs: left as they are", False, CHANGED
        if kind == "layer" and self.same(call(x | {"W": x["W"][::-1] ** 3}, n), first):     # 2 W may be normalized
            yield "other W: other output", False, UNUSED
            return
        if self.per_sample:
            call.renew()
            yield "batch reversed: output reversed", self.same(
                [y[::-1] for y in call(samples(slice(None, None, -1)), n)], first), PLACE
        call.renew()
        try:
            fewer = call(samples(slice(0, 2)), n)
        except Exception:                                      # a function that works for one batch size only
            fewer = None
        if fewer is not None and self.per_sample:
            yield "only the first two samples: same output for them", self.same(
                fewer, [y[:2] for y in first]), INFLUENCE
        elif fewer is not None and self.matches:
            yield "only the first two samples: their loss", self.same(fewer, self.predict(
                reference.settings_of(self.matches[0]) | self.epsilon, n, samples(slice(0, 2)))), FIXED_BATCH
        if self.is_loss:
            return
        if fewer is not None:
            yield "a batch of one sample: as many axes", self.one_sample(samples(slice(0, 1)), n), SINGLE
        name, axes = call.interface.votes, call.interface.inputs[call.interface.votes]
        j, e = axes.index("J"), axes.index("H" if kind == "em" else "E")
        call.renew()
        if kind == "em":
            silent = x | {"a": np.where(np.arange(x["a"].shape[1]) == 0, 0, x["a"])}
            moved = silent | {"V": x["V"] + np.where(np.arange(x["V"].shape[1]) == 0, 0.3, 0)[:, None, None]}
            yield "other votes of a child with activation 0: same output", self.same(
                call(moved, n), call(silent, n)), FLOOR
            equal = x["V"].copy()
            equal[:, :, 0] = equal[:, :1, 0]
            settings = reference.settings_of(self.matches[0]) | self.epsilon if self.matches else {}
            has_epsilon = settings.get("epsilon", 0) > 1e-12 or "densities" in settings
            yield "equal votes for one parent: finite output", finite(call(x | {"V": equal}, n)), (
                DENSITY if has_epsilon else VARIANCE)
            return
        size = x[name].shape[e]
        Q = np.linalg.qr(np.random.default_rng(2).normal(size=(size, size)))[0]
        turned = x | {name: np.moveaxis(np.moveaxis(x[name], e, -1) @ Q.T, -1, e)}
        yield "votes rotated: output rotated", self.same(call(turned, n), [first[0] @ Q.T]), ROTATION
        zero = np.moveaxis(np.abs(x[name]), j, 0)             # all agree: no logit is below 0
        zero[0] = 0
        zero = x | {name: np.moveaxis(zero, 0, j)}
        call.renew()
        v = call(zero, n)
        yield "no votes for one output capsule: finite output", finite(v), EPSILON
        if not finite(v):
            return
        small = self.slack if self.matches[:1] == [()] else 1e-12      # such as an epsilon that is added to v
        yield "no votes for one output capsule: its output is 0", bool(np.abs(v[0][:, 0]).max() <= small), NOT_ZERO
        if not self.by_differences:
            grads = [g for g in self.gradients(zero, n).values() if g is not None]
            yield "no votes for one output capsule: finite gradient", finite(grads), EPSILON_GRADIENT

    def one_sample(self, inputs, n):
        """Return whether a batch of one sample gives outputs with as many axes as a batch of several."""
        self.call.renew()
        try:
            one = self.call.call(self.call.arguments(inputs), n)
            many = self.call.match(self.call.call(self.call.arguments(self.inputs), n), self.call.sizes)
        except Exception:
            return False
        return all(k < len(one) and np.ndim(one[k]) == len(layout) for k, layout in many.values())

    # ---- the report ----

    def run(self, first, others, report):
        """Write the whole report. first: a reading and its output layouts; others: an iterator of more of them."""
        call = self.call
        self.report = report
        if self.is_loss:
            first, others = self.best_loss([first, *others])
        call.reading, self.layouts = first
        if self.backward:
            try:
                self.gradients(self.inputs, max(self.iterations))
            except Exception as error:
                raise Unusable(f"--backward raised {last_line(error)}. It is called with the gradients of the outputs, "
                               "the inputs, and the number of iterations") from None
        if self.kind == "spread-loss":
            order = call.reading["order"].replace(",", ", ").replace("present", "labels" if (
                call.reading["present"] == "N") else "present")
            if call.count is not None:
                order += ", m"
            report.target += f"({order})"
        report.say(f"{report.target} against {report.against}")
        self.slack, self.worst = self.tolerance, 0.0
        found = self.chosen_values()
        self.inside = self.precision_inside(found)
        self.explain_values(found)
        small = np.prod([x.size for x in self.inputs.values()]) < 1e6   # else trying the others takes long
        other = ""
        if small and self.matches[:1] != [()]:
            other, found = self.other_readings(others, found)
        self.head()
        report.precision = next((name for name in self.precisions if name and name != "float64"), "float64")
        inside = f" with {self.inside} inside" if self.inside else ""
        report.say(f"  {'PyTorch' if call.framework == 'torch' else 'NumPy'} {call.found_dtype}{inside}, relative "
                   f"tolerance {power(self.tolerance)}\n")
        self.compare(found)
        self.verdict(found, other)
        return report

    def chosen_values(self):
        """Return values(): of several arrays that fit an output, such as one per iteration, the last, unless fewer
        mistakes explain the first or another."""
        def count(found):
            matches = self.explain(found, self.mistakes_for(found))[0] if found else []
            return len(matches[0]) if matches else 99
        found = self.values()
        several = {name: n for name, n in self.call.fitting.items() if n > 1}
        if not several:
            return found
        best, least = dict.fromkeys(several, -1), count(found)
        for places in itertools.islice(itertools.product(*((-1, 0, *range(1, n - 1)) for n in several.values())), 1, 7):
            if least == 0:
                break
            self.call.take = dict(zip(several, places))
            if (fewer := count(self.values())) < least:
                best, least = self.call.take, fewer
        self.call.take = best
        which = " and ".join(f"{PLACES.get(k, f'number {k + 1}')} is compared as {name}"
                             for name, k in best.items())
        self.notes.append(f"Several arrays that your function returns have the shape of an output: {which}. If another "
                          "is meant, return it alone, or a dict with its name.")
        return self.values()

    def best_loss(self, fits):
        """Return the first of the readings in the same order of arguments that is explained, else the first; and the
        other ones."""
        one_class = self.inputs["present"]
        two_classes = one_class.copy()
        if self.kind == "margin-loss":                         # the spread loss has one true class
            two_classes[0, -1] = 1
        for best in [*(fit for fit in fits if fit[0]["order"] == fits[0][0]["order"]), fits[0]]:
            self.call.reading = best[0]
            self.places = LOSS_EPSILONS if best[0][self.call.scores] == "NKE" else []
            self.inputs["present"] = one_class if best[0]["present"] == "N" else two_classes
            self.slack, self.worst = self.tolerance, 0.0
            found = self.values()
            if self.explain(found, self.mistakes_for(found))[0]:
                break
        self.combine, self.notes = "mean", []
        return best, (fit for fit in fits if fit[0] != best[0])

    def head(self):
        """Say the axes, or the arguments of a loss."""
        call = self.call
        if self.is_loss:
            names = {call.scores: {"NK": call.scores, "NKE": "capsules"}[call.reading[call.scores]], "present": {
                "NK": "present (0 and 1)", "N": "labels (numbers)"}[call.reading["present"]]}
            self.report.say(f"  arguments: {', '.join(names[n] for n in call.reading['order'].split(','))}")
            return
        texts = [", ".join(f"{name} {calls.shape_text(layout, call.sizes)}" for name, layout in given.items())
                 for given in (call.reading, self.layouts)]
        letters = "".join(call.interface.inputs.values()) + "".join(call.interface.outputs.values())
        self.report.say("  " + " -> ".join(texts))
        if call.order[:len(call.reading)] != list(call.reading):
            self.report.say(f"  arguments, by their names: {', '.join(call.order)}")
        self.report.say("  " + ", ".join(f"{a} {words}" for a, words in calls.AXES.items() if a in letters))

    def explain_values(self, found):
        """Find the mistakes and the epsilon that explain the outputs, or that they are nearly right."""
        self.matches, self.worst, self.epsilon, self.ambiguous = [], None, {}, []
        self.close = self.nearly = 0.0
        self.slack = self.tolerance
        if not found:
            return
        right = {n: difference(y, self.predict({}, n)) for n, y in found.items()}
        agrees = all(d <= self.tolerance for d in right.values())
        self.bias = None
        if not agrees and self.kind in ("dynamic", "layer"):
            self.bias = self.output_without_votes(max(found))
        self.biases = {}
        self.has_bias = self.bias is not None
        self.matches, self.worst, self.epsilon = ([()], 0.0, {}) if agrees else self.explain(
            found, self.mistakes_for(found))
        if not self.matches:
            self.bias = None
        names = {tuple(mistake.name for mistake in match) for match in self.matches}
        if self.tolerance > 1e-7 and len(names) > 1 and any(
                self.differ(self.matches[0], match, found) for match in self.matches[1:]):
            self.ambiguous, self.matches = self.matches, []    # rounding hides in what they differ
        if self.combine == "sum":
            right = {n: difference(y, self.predict({}, n)) for n, y in found.items()}
        near = max(right.values(), default=1.0)
        self.slack = max(self.tolerance, 10 * near if near < 1e-5 else 0)       # an epsilon moves everything
        if self.matches == [()] and self.worst > self.tolerance:    # right but for an epsilon in an unusual place
            if self.worst <= CLOSE and not self.errors:
                self.close = self.worst
            else:
                self.matches = []
        if not self.matches and not self.errors and near <= CLOSE:
            self.matches, self.worst, self.epsilon, self.close = [()], near, {}, near
        elif not self.matches and not self.errors and near <= naming.NEARLY and self.tolerance < naming.NEARLY:
            self.matches, self.worst, self.epsilon, self.nearly = [()], near, {}, near
            self.slack = 10 * near
        elif self.matches and self.matches[0] and self.worst > max(self.tolerance, naming.LOOSE):
            self.nearly = self.worst
            self.slack = 10 * self.worst
        self.unchanged = len(found) > 1 and all(difference(y, found[max(found)]) == 0 for y in found.values())
        settings = reference.settings_of(self.matches[0]) if self.matches else {}
        unrouted = settings.get("normalize") in reference.UNROUTED
        if self.unchanged and settings.keys() & facts.OF_COUPLINGS and not unrouted:
            self.matches = []                                  # a single iteration shows no more than their size
        self.report.epsilons = {name: value for name, value in self.epsilon.items() if not isinstance(value, str)}
        named = [self.with_epsilon(found, chosen, self.epsilon) for chosen in self.matches]
        if named != self.matches:
            self.matches, self.epsilon = named, {}             # it is one of the mistakes

    def compare(self, found):
        """Compare values, gradients and properties, and write a line for each."""
        epsilon = self.epsilon if self.matches else {}         # not every iteration needs the mistakes
        right = {n: difference(y, self.predict(epsilon, n)) for n, y in found.items()}
        agrees = bool(self.matches) and self.matches[0] == () and not self.nearly
        unrouted = self.nothing_is_routed()
        chosen = self.matches[0] if self.matches else ()
        explained, self.gradient_agrees, self.failed_values = [], {}, False
        for n in self.iterations:
            what = {"margin-loss": "", "spread-loss": f"m = {n}"}.get(self.kind, plural(n, "iteration"))
            if n in self.errors:
                self.line(what, f"raised {self.errors[n]}", False)
                continue
            ok = agrees or right[n] <= self.tolerance
            text = "output agrees" if ok else f"output differs by {percent(right[n])}"
            try:
                gradient, stops = self.gradient(n, chosen, self.epsilon)
            except Exception as error:
                gradient, stops, self.raised = f"raised {last_line(error)}", ["unnamed"], True
            self.gradient_agrees[n] = gradient == "agrees"
            self.failed_values |= not ok
            if stops and stops != ["unreached"]:
                explained.append(stops)
            label = "numerical derivative" if self.by_differences else "gradient"
            self.line(what, f"{text}, {label} {gradient}", ok and not stops)
        self.stops_found = [stop for stop in (explained or [[]])[0] if all(stop in stops for stops in explained)]
        self.unnamed_gradient = bool(explained) and (not self.stops_found or "unnamed" in self.stops_found)
        self.shown = []
        try:
            for words, holds, shows in self.invariances(max(found, default=self.iterations[-1])):
                self.line("", words, holds)
                if not holds and shows:
                    self.shown.append(shows)
        except Exception as error:
            self.errors["changed inputs"] = last_line(error)
            self.line("changed inputs", f"raised {last_line(error)}", False)
        if self.matches and not self.errors and found and not set(self.shown) & {KEPT, RANDOM, RANDOM_OR_KEPT, UNUSED}:
            self.try_other_inputs()
        if self.unchanged and not agrees and not self.is_loss and not unrouted:
            self.notes.append("The number of iterations changes nothing. If your function always runs as many, say so, "
                              "such as: --iterations 3")

    def nothing_is_routed(self):
        settings = reference.settings_of(self.matches[0]) if self.matches else {}
        return settings.get("normalize") in reference.UNROUTED

    def try_other_inputs(self):
        """Compare other inputs, such as one sample, with what explains these, and write a line for them."""
        self.call.renew()
        if not finite(self.call(self.inputs, max(self.iterations))):
            return
        settings = reference.settings_of(self.matches[0]) | self.epsilon
        trials = Trials(self, settings, probe, no_epsilon=VARIANCE in self.shown)
        holding = trials.run()
        if holding:
            what = "output agrees" if self.matches[0] == () else "output as with the mistakes below"
            words = [trials.words(name) for name in holding]
            middle = (len(words) + 1) // 2 if len(words) > 5 else len(words)
            self.line("", f"{', '.join(words[:middle])}: {what}", True)
            if words[middle:]:
                self.line("", f"{', '.join(words[middle:])}: {what}", True)
        if SINGLE in self.shown:                               # which has been said
            trials.wrong.pop("one sample", None)
        for name, text in trials.wrong.items():
            self.line(trials.words(name), "another output", False)
            self.shown.append(text)
        for name, text in trials.unchecked.items():
            self.notes.append(f"Not checked with {trials.words(name)}, since your function raised an error: {text}")

    def with_epsilon(self, found, chosen, epsilon):
        """Return a set of mistakes, and with them an epsilon that is so large that it is one."""
        values = [value for value in epsilon.values() if not isinstance(value, str)]
        if max(values, default=0) <= LARGEST.get(self.kind, LARGEST_OF_OTHERS):
            return chosen
        settings = reference.settings_of(chosen)
        effect = max(difference(y, self.predict(settings, n)) for n in found
                     if (y := self.predict(settings | epsilon, n)) is not None)
        paper, usual = ("2018, Procedure 1", "1e-4") if self.kind == "em" else ("2017, Eq. 1", "1e-9")
        return (*chosen, reference.Mistake(
            f"large {epsilon_text(epsilon)}", dict(epsilon), f"lower it, such as to {usual}",
            f"This epsilon changes the outputs by {percent(effect)}; {paper} has none."))

    def line(self, what, text, ok):
        line = f"{what}{': ' if what else ''}{text}"
        if not ok:
            self.failed.append(line)
        self.report.lines.append({"holds": bool(ok), "what": line})
        self.report.say(f"  {'ok ' if ok else 'NO '} {line}")

    def other_readings(self, fits, found):
        """Look at other orders of the axes whose outputs have the right shape. Return a sentence about those with which
        all outputs agree, or an empty one, and the outputs to compare.

        If no mistakes explain the first order, the one that needs the fewest is taken. If they do, no other order is
        tried, unless the mistakes mix up axes. A singleton that is added can hide a mistake over another axis, and is
        not tried.
        """
        call = self.call
        first, state = (call.reading, self.layouts), (self.errors, self.per_sample, self.combine, list(self.notes))
        settings = reference.settings_of(self.matches[0]) if self.matches else {}
        mixed = settings.get("normalize") == "batch" or settings.get("form") in ("batch", "outputs")
        if not self.matches and not self.repeats(found):       # random, in any order
            return "", found
        search = mixed or not self.matches and not (self.kind == "dynamic" and self.has_its_axes(found))
        call.deadline = time.monotonic() + (SECONDS_FOR_ORDERS if search else SECONDS_FOR_A_LIST)
        agreeing, fewest = [], []
        for reading, layouts in fits:
            if [len(layout) for layout in reading.values()] != [len(layout) for layout in first[0].values()]:
                continue
            flags = " ".join(f"{name}={layout}" for name, layout in reading.items() if first[0][name] != layout)
            self.also.append(flags)
            if search:
                call.reading, self.layouts = reading, layouts
                count = self.count_mistakes(not self.matches)
                if count == 0:
                    agreeing.append(flags)
                elif count is not None:
                    fewest.append((count, len(fewest), reading, layouts))
            call.stopped = time.monotonic() > call.deadline
            if len(agreeing) == 3 or call.stopped:
                break
        call.deadline = None
        call.reading, self.layouts = first
        self.errors, self.per_sample, self.combine, self.notes = state
        if call.stopped and search:
            self.notes.append(f"Not all orders of the axes were tried within {SECONDS_FOR_ORDERS:.0f} s. If the one "
                              "above is not yours, give yours to --axes.")
        if fewest and not agreeing and not self.matches:
            found = self.take_reading(min(fewest)[2:], found)
        if not agreeing:
            return "", found
        but = " but for a bias" if self.has_bias else ""
        orders = ", or ".join(f"--axes {flags}" for flags in agreeing)
        return f"With another order that fits, too, it agrees{but}. If that is yours, add: {orders}", found

    def repeats(self, found):
        """Return whether another call gives the same outputs."""
        n = max(found, default=0)
        return not n or self.same(self.call(self.inputs, n), found[n])

    def has_its_axes(self, found):
        """Return whether samples are alone and entries one vector in this order of the axes: no other is the right one,
        since the sizes tell input from output capsules."""
        n, u_hat = max(found), self.inputs["u_hat"]
        size = u_hat.shape[3]
        Q = np.linalg.qr(np.random.default_rng(2).normal(size=(size, size)))[0]
        try:
            turned, fewer = self.call({"u_hat": u_hat @ Q.T}, n), self.call({"u_hat": u_hat[:2]}, n)
        except Exception:
            return False
        return self.same(turned, [found[n][0] @ Q.T]) and self.same(fewer, [found[n][0][:2]])

    def count_mistakes(self, with_mistakes):
        """Return how many mistakes explain the outputs in the present reading, roughly; None if none do."""
        bias = self.bias
        try:
            self.call.renew()
            found = self.values()
            if self.errors or not found:
                return None
            if self.has_bias:
                self.bias, self.biases = self.output_without_votes(max(found)), {}
            right, worst, _ = self.explain(found, ())
            if right and worst <= max(self.tolerance, CLOSE):
                return 0
            if not with_mistakes or self.tolerance > 1e-3:
                return None
            matches, _ = naming.explain(found, self.predict, self.mistakes_for(found), max(self.tolerance, 1e-4))
            return len(matches[0]) or None if matches else None
        except Exception:                                      # of a reading that is not the user's
            return None
        finally:
            self.bias, self.biases = bias, {}

    def take_reading(self, reading, found):
        """Take another order of the axes if mistakes explain it. Return the outputs to compare."""
        first = self.call.reading, self.layouts
        self.call.reading, self.layouts = reading
        others = self.values()
        self.explain_values(others)
        if self.matches:
            flags = " ".join(f"{name}={layout}" for name, layout in first[0].items() if reading[0][name] != layout)
            self.notes.append("Of the orders of the axes that fit, the one above needs the fewest mistakes.")
            self.also = [flags]
            return others
        self.call.reading, self.layouts = first
        self.values()
        self.explain_values(found)
        return found

    def verdict(self, found, other):
        """Write the verdict, and what leads to it."""
        report = self.report
        if self.epsilon and self.matches:
            settings = reference.settings_of(self.matches[0])
            effect = max(difference(y, self.predict(settings, n)) for n in found
                         if (y := self.predict(settings | self.epsilon, n)) is not None)
            words = epsilon_text(self.epsilon)
            self.notes.append(f"Your function has an {words}, which changes its outputs by {percent(effect)} here."
                              if self.worst <= self.tolerance else
                              f"It comes nearest with an {words}; your function's may be in another place.")
        stops = [stop for stop in self.stops_found if isinstance(stop, reference.Mistake)]
        if None in self.stops_found:                           # the mistakes of the values explain the gradients, too
            stops = []
        chosen, partly = (self.matches[0] if self.matches else ()) + tuple(stops[:1]), ()
        if not self.matches and self.has_bias:
            report.facts = [WITH_A_BIAS]
        elif not self.matches and self.failed_values and not set(self.shown) & {RANDOM, RANDOM_OR_KEPT}:
            partly, report.facts = facts.of(self, found)
        if chosen and self.nearly:
            self.notes.append(f"What is left is at most {power(self.worst)}, as several epsilons would make it.")
        every = [text for text in dict.fromkeys(self.shown) if text != SINGLE or INFLUENCE not in self.shown]
        shown = [text for text in every if text not in EXPLAINED and (
            self.matches or text not in WITHOUT_VOTES and text != SINGLE)]
        if not self.matches or self.matches == [()] and not chosen and not shown and not self.nearly:
            of_a_bias = (NOT_ZERO, ROTATION) if self.has_bias else ()
            report.facts += [WITHOUT_VOTES.get(text, text) for text in every if text not in (*shown, *of_a_bias)]
        report.mistakes = [mistake.name for mistake in chosen or partly] + [
            name for text in shown if (name := kind_of(text))]
        report.say()
        for note in dict.fromkeys(self.notes):
            report.say(note)
        attributed = not self.unnamed_gradient and not self.errors and not self.unreached and all(
            text in EXPLAINED or kind_of(text) for text in every)
        if self.nearly and attributed and not chosen and not shown:
            self.say_nearly()
        elif not self.failed or (self.matches == [()] and attributed and not chosen
                                 and set(every) <= WITHOUT_VOTES.keys()):
            self.say_right(shown)
        else:
            self.say_wrong(found, other, chosen, partly, shown)
        report.allowed = [name for name in report.mistakes if any(plain(name).startswith(plain(text))
                                                                  for text in self.allow)]
        if not report.passed and self.matches and attributed and report.mistakes == report.allowed != []:
            report.passed = True
            report.say(f"\nAllowed: {', '.join(report.allowed)}.")
        if self.require_gradient and report.passed and report.gradient in ("not checked", "numerical"):
            report.passed = False
            report.reason = "gradient required, not checked"
            report.say("\nThe gradient is required, and was not checked. Give --backward, or leave --require-gradient "
                       "out.")
        if self.also and not report.passed and not other:
            more = f" (or {len(self.also) - 1} more)" if len(self.also) > 1 else ""
            report.say(f"\nAlso fits, by the shape of its output: --axes {self.also[0]}{more}")

    def say_right(self, shown):
        """Say that everything agrees; shown: what happens where there are no votes."""
        report = self.report
        checked = not self.by_differences and all(self.gradient_agrees.values())
        report.gradient = "agrees" if checked else self.unchecked()
        rough = self.close > 0 or self.tolerance > 1e-7 and report.precision != "float64"
        without = (" EXCEPT WITH EQUAL VOTES" if VARIANCE in shown else " EXCEPT WITHOUT VOTES") if shown else ""
        precision = " UP TO PRECISION" if rough else ""
        report.verdict = f"RIGHT{precision}{without}"
        if not checked:
            report.verdict = f"VALUES {report.verdict}, GRADIENT NOT CHECKED"
        report.passed = not shown
        report.say(f"{report.verdict}: your function computes what the paper says" + (
            f", to {percent(self.close)}, as with float32 in a part of it, or with small epsilons." if self.close
            else f", to {percent(self.tolerance)}. Smaller mistakes do not show in {report.precision}." if rough
            else "."))
        for text in shown:
            self.say_property(text)
        if VARIANCE in shown or EPSILON in shown:
            report.say('  The paper prints no epsilon either. If you mean it so, add: --allow "no epsilon"')
        if not checked:
            before = "\n" if shown else ""
            report.say(f"{before}Numerical derivatives do not see a stopped gradient. To check a backward pass of your "
                       "own, or automatic differentiation in JAX or TensorFlow, add --backward.")

    def say_nearly(self):
        """Say that only a small difference is left, and which tolerance accepts it."""
        report = self.report
        report.gradient = self.unchecked() if self.by_differences else "agrees"
        report.verdict = "NEARLY RIGHT"
        accepting = 10.0 ** np.ceil(np.log10(2 * self.nearly))
        report.reason = f"differs by at most {power(self.nearly)}; --tolerance {power(accepting)} accepts it"
        report.say(f"NEARLY RIGHT: your function differs from the paper's by at most {power(self.nearly)}, as several "
                   f"epsilons would; --tolerance {power(accepting)} accepts it.")

    def unchecked(self):
        """Return what is said of a gradient without a backward pass: derivatives of the function itself, or none."""
        return "numerical" if self.by_differences and any(self.gradient_agrees.values()) else "not checked"

    def say_wrong(self, found, other, chosen, partly, shown):
        """Say what differs: by name where the mistakes of the reference explain the function, else by facts."""
        report = self.report
        order = self.call.reading.get("u_hat", "NIJE").replace("1", "").replace("E", "")
        words = self.call.sizes | {"logits": f"({', '.join(order)})", "axis": order.index("J")}
        report.gradient = self.unchecked() if self.by_differences else "differs" if (
            self.unnamed_gradient or self.stops_found or self.unreached) else "agrees"
        report.verdict = "WRONG"
        if other:
            report.verdict, report.reason = "DIFFERS", f"with its axes in this order. {other.rstrip('.')}"
            report.say(f"DIFFERS, with its axes in this order. {other}")
            if not chosen:
                return
            report.say("If the order above is yours:\n")
        if chosen:
            exact = f", to {max(self.worst or 0, 1e-16):.0e}," if self.matches[:1] != [()] or self.nearly else ""
            report.say(f"WRONG: your function equals{exact} the paper's with {plural(len(chosen), 'mistake')}:")
            self.say_mistakes(chosen, words)
            equal = [" + ".join(m.name for m in match) for match in self.matches[1:4]]
            if equal:
                report.say(f"\nThe same outputs come from: {'; or '.join(equal)}.")
        elif partly:
            report.say(f"WRONG: a part of your function equals the paper's with {plural(len(partly), 'mistake')}, and "
                       "more differs:")
            self.say_mistakes(partly, words)
        elif self.matches or self.errors or not self.failed_values or shown:
            how = ". Its outputs here are right, but not all that must hold for every input." if (
                self.matches[:1] == [()] and not self.unnamed_gradient and not self.nearly) else "."
            report.say(f"WRONG: the function differs from the paper{how}")
        else:
            report.verdict = "NOT THIS PROCEDURE"
            report.say("NOT THIS PROCEDURE: no mistake that is known here explains the outputs.")
        if shown and chosen:
            report.say("\nAlso:")
        for text in shown:
            self.say_property(text)
        if report.facts:
            report.say("\nWhat is known:")
            for text in report.facts:
                report.say(f"- {text}")
        if self.unreached:
            self.say_unreached()
        elif self.matches and self.unnamed_gradient and KEPT not in self.shown and not self.raised:
            report.say("\n* The gradient is that of no known mistake. Compare it with the test vectors, "
                       "dynamic_routing.json or em_routing.json, number by number.")

    def say_unreached(self):
        """Say which inputs the gradient does not reach, and after how many iterations if it is not all."""
        names = ", ".join(dict.fromkeys(self.unreached.values()))
        if len(self.unreached) < len([n for n in self.iterations if n not in self.errors]):
            counts = [str(n) for n in self.unreached]
            words = " and ".join(filter(None, (", ".join(counts[:-1]), counts[-1])))
            iterations = "iteration" if words == "1" else "iterations"
            self.report.say(f"\n* The gradient does not reach {names} at {words} {iterations}, as "
                            "with a stop in the first iterations, which are the last ones there.")
            return
        weights = "" if self.is_loss else ("; set weights by torch.func.functional_call, and not by .data or under "
                                           "no_grad()")
        self.report.say(f"\n* The gradient does not reach {names}. Do not detach the output, or {names} in the "
                        f"function{weights}.")

    def say_property(self, text):
        kind = next((kind for kind in KINDS if text.startswith(kind[0])), None)
        self.report.say(f"\n* {text}" + (f"\n  In training: {kind[2]}" if kind else ""))

    def say_mistakes(self, chosen, words):
        for mistake in chosen:
            symptom = next((kind[2] for kind in KINDS if kind[0] == mistake.name), "")
            self.report.say(f"\n* {mistake.name}\n  {reference.describe(mistake)}")
            self.report.say(f"  To mend: {mistake.fix.format(**words)}")
            if symptom:
                self.report.say(f"  In training: {symptom}")


def epsilon_text(epsilon):
    """Return the epsilons in words."""
    place = epsilon.get("place")
    return " and ".join(f"epsilon {value:.2g} added {EPSILON_WORDS[place or name]}".replace("e-0", "e-")
                        for name, value in epsilon.items() if not isinstance(value, str))


def kind_of(text):
    """Return the name of the kind of mistake with which a property's text begins, or None."""
    return next((kind[0] for kind in KINDS if text.startswith(kind[0])), None)


def plain(name):
    """Return the name of a kind, for comparisons."""
    return name.removeprefix("EM: ").lower()
