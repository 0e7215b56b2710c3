"""Inputs for which functions are wrong that are right for others: one sample, equal sizes, strided votes and so on.

The axes are known here, so that two of them may have one size. What a function returns is compared with the reference
and the mistakes that were found. Several features are tried in one call, and apart only if that call shows something.
"""
import time

import numpy as np

from .calls import WrongShape, last_line
from .naming import difference
from .wording import plural, power

MORE = 2                           # iterations than the check compares otherwise
FEATURES = {"later": "{} iterations", "permuted": "permuted capsules and samples", "strided": "strided arrays", "one "
            "sample": "one sample", "one capsule": "one output capsule", "equal": "equal sizes", "large": "large votes",
            "batch": "more samples", "again": "two calls in a row"}
TRIALS = (("later", "permuted", "strided"), ("one sample", "one capsule"), ("equal",), ("large", "batch"), ("again",))
FEATURES_OF_LOSSES = ("permuted", "strided", "one sample", "equal", "batch", "again")
ROOM = 30                          # for an epsilon, whose effect grows as capsules become shorter, at least up to
LEAST = 1e-6
LARGEST_LOGIT = 60.0               # of large votes: beyond a clip at 10, and without overflow of exp() in float32
SECONDS = 3.0                      # for the search of the smallest input


class Trials:
    """Calls a function with other inputs.

    check: a Check whose values are explained. settings: of the reference, which computes the same. probe: makes inputs.
    no_epsilon: a variance of EM routing may become 0, as it does after more iterations.
    """

    def __init__(self, check, settings, probe, no_epsilon):
        self.check, self.call, self.settings, self.probe = check, check.call, settings, probe
        self.no_epsilon = no_epsilon
        self.most = max(check.iterations)
        self.letters = [letter for letter in dict.fromkeys("".join(self.call.interface.inputs.values()))
                        if letter not in "HD"]
        self.unchecked, self.wrong = {}, {}                    # feature -> what it raised; feature -> sentence

    def features(self):
        """Return the features that make sense for this function."""
        check = self.check
        known = list(FEATURES_OF_LOSSES if check.is_loss else FEATURES)
        several = len(check.iterations) > 1 and self.call.count is not None and not check.is_loss
        if not several or self.no_epsilon or check.unchanged or len(check.lambdas) < self.most + MORE:
            known = [name for name in known if name != "later"]
        right_votes = not check.is_loss and check.matches[0] == () and check.tolerance <= 1e-3
        if not right_votes:
            known = [name for name in known if name != "large"]
        if not check.is_loss and check.matches[0] != ():       # a mistake may be a number that belongs to these sizes
            known = [name for name in known if name not in ("one capsule", "equal")]
        return known

    def sizes(self, features):
        """Return the sizes of the axes for these features."""
        sizes = dict(self.call.sizes)
        if "equal" in features:
            side = sizes["H"] if self.check.kind == "em" else 4
            sizes |= dict.fromkeys("NIJEDK", side)
        if "batch" in features:
            sizes["N"] = next(n for n in range(2 * sizes["N"], 99, 2) if n not in sizes.values())
        if "one sample" in features:
            sizes["N"] = 1
        if "one capsule" in features:
            sizes["J"] = 1
        return sizes

    def inputs(self, features, sizes, n):
        """Return inputs by name."""
        if "permuted" in features and sizes == self.call.sizes:
            x = self.check.inputs
        else:
            x = self.probe(self.check.kind, sizes | {"N": max(sizes["N"], 2)}, seed=5)
        axes_of, rng = self.call.interface.inputs, np.random.default_rng(6)
        x = {name: y[:sizes["N"]] if axes_of[name][0] == "N" else y for name, y in x.items()}
        if "permuted" in features:
            order = {letter: rng.permutation(sizes[letter]) for letter in "NIJK"}
            for name, axes in axes_of.items():
                for axis, letter in enumerate(axes):
                    if letter in order:
                        x[name] = np.take(x[name], order[letter], axis)
        if "large" in features:
            name = self.call.interface.votes
            if self.check.kind == "em":
                return x | {name: 10 * x[name]}
            u_hat = x["u_hat"] if name == "u_hat" else np.einsum("nid,ijed->nije", x["u"], x["W"])
            longest = np.linalg.norm(u_hat, axis=-1).max()
            return x | {name: x[name] * LARGEST_LOGIT / (longest * max(n - 1, 1))}
        return x

    def compare(self, features, sizes, n):
        """Call the function. Return the difference, its outputs, and those expected; WrongShape for another shape."""
        x = self.inputs(features, sizes, n)
        if "again" in features:
            other = self.inputs(("permuted", "large") if "large" in self.features() else ("permuted",), sizes, n)
            self.call.in_frame(other, n, self.frame, sizes)
        with np.errstate(all="ignore"):
            wanted = self.check.predict(self.settings, n, x)
        found = self.call.in_frame(x, n, self.frame, sizes, strided="strided" in features)
        return difference(found, wanted), found, wanted, x

    def is_wrong(self, features, sizes, n):
        """Return whether the output is another than expected."""
        slack = max(ROOM * self.check.slack, LEAST, 1000 * (self.check.worst or 0))
        if "large" in features:                                # where capsules are long
            slack = 10 * self.check.slack
        try:
            d, _, wanted, _ = self.compare(features, sizes, n)
        except WrongShape:
            return True
        return d > slack and all(np.isfinite(y).all() for y in wanted)

    def run(self):
        """Try all features. Return words for those that hold; self.wrong and self.unchecked have the others."""
        self.frame = self.call.frame(self.check.inputs, self.most)
        self.call.renew()
        known = self.features()
        for together in TRIALS:
            features = [name for name in together if name in known]
            if not features:
                continue
            try:
                if not self.is_wrong(features, self.sizes(features), self.iterations(features)):
                    continue
            except Exception:                                  # one of them apart may say more
                pass
            for feature in features:
                self.apart(feature)
        return [name for name in known if name not in self.unchecked and name not in self.wrong]

    def iterations(self, features):
        return self.most + MORE if "later" in features else self.most

    def words(self, feature):
        return FEATURES[feature].format(self.most + MORE)

    def apart(self, feature):
        """Try one feature alone, and note what it raised, or for which smallest input it is wrong."""
        sizes, n = self.sizes([feature]), self.iterations([feature])
        try:
            if not self.is_wrong([feature], sizes, n):
                return
        except Exception as error:
            self.unchecked[feature] = last_line(error)
            return
        sizes, n = self.smallest(feature, sizes, n)
        self.wrong[feature] = self.sentence(feature, sizes, n)

    def smallest(self, feature, sizes, n):
        """Return the smallest sizes, and the fewest iterations, for which it is still wrong."""
        until = time.monotonic() + SECONDS

        def fails(sizes, n):
            try:
                return time.monotonic() < until and self.is_wrong([feature], sizes, n)
            except Exception:
                return False
        if not self.check.is_loss:
            n = next((k for k in range(1, n) if fails(sizes, k)), n)
        if feature == "equal":
            if self.check.kind == "em":
                return sizes, n
            every = [sizes | dict.fromkeys("NIJEDK", k) for k in range(2, 4)]
            return next((smaller for smaller in every if fails(smaller, n)), sizes), n
        for letter in self.letters:
            least = 2 if letter == "I" and self.check.kind == "em" else 1      # one child has no variance
            every = [sizes | {letter: k} for k in range(least, sizes[letter])]
            sizes = next((smaller for smaller in every if fails(smaller, n)), sizes)
        return sizes, n

    def sentence(self, feature, sizes, n):
        """Return what is wrong, with the smallest input."""
        shapes = ", ".join(f"{name} {tuple(sizes[letter] for letter in axes)}"
                           for name, axes in self.call.interface.inputs.items() if len(axes) > 1)
        count = "" if self.check.is_loss else f", {plural(n, 'iteration')}"
        try:
            d, found, wanted, x = self.compare([feature], sizes, n)
        except WrongShape as error:
            return f"Wrong with {self.words(feature)}. Smallest input: {shapes}{count}: it {error}."
        text = f"Wrong with {self.words(feature)}. Smallest input: {shapes}{count}: the output differs by {amount(d)}"
        first = next(iter(x.values()))
        if first.size <= 4:
            name = next(iter(x))
            text += f" ({name} = {numbers(first)}: {numbers(found[0])} in place of {numbers(wanted[0])})"
        return text + "."


def amount(d):
    return f"{100 * d:.2g}%" if 1e-4 <= d < 10 else power(d) if d < 1e-4 else "more than itself, or is NaN"


def numbers(x):
    """Return the numbers of a small array."""
    return "[" + ", ".join(f"{y:.4g}" for y in np.ravel(x)) + "]"
