"""What can be said of a function that no set of mistakes explains: facts in place of a diagnosis."""
import itertools

import numpy as np

from . import naming, reference
from .wording import plural

ALIKE = 1e-7                       # relative: what holds exactly, up to an epsilon
OF_COUPLINGS = {"normalize", "mean", "scale", "cosine", "sign", "replace", "average"}      # not shown by one iteration


def of(check, found):
    """Return the mistakes that explain a part of the outputs, and sentences that hold of the function.

    found: outputs for each number of iterations, or each margin.
    """
    if check.ambiguous:
        sets = dict.fromkeys(" + ".join(m.name for m in chosen) for chosen in check.ambiguous)
        sets = "; or ".join(sets)
        return (), [f"In {check.report.precision} these cannot be distinguished: {sets}. Compute in float64."]
    if not found or not all(np.isfinite(y).all() for part in found.values() for y in part):
        return (), []
    if check.is_loss:
        return (), of_a_loss(found) + other_losses(check, found)
    partly, sentences = begins(check, found)
    if check.kind == "em":
        one, more = apart(check, found)
        partly, sentences = partly or one, sentences + more + of_assignments(check, found) + of_activations(found)
    else:
        sentences += of_capsules(check, found)
    return partly, sentences + unused(check, max(found))


def named(chosen):
    return " and ".join(mistake.name for mistake in chosen)


def certain(known):
    """Return those mistakes that one iteration shows, with its uniform coupling coefficients."""
    return tuple(mistake for mistake in known if not mistake.settings.keys() & (OF_COUPLINGS | {"start"}))


def part(check, found, predict=None):
    """Return the sets of up to two mistakes that explain these outputs, all as well."""
    matches, worst, epsilon = naming.explain_with_epsilon(found, predict or check.predict, check.mistakes_for(found),
                                                          check.tolerance, check.places, most=2)
    if worst is None or worst > max(check.tolerance, ALIKE):
        return []
    return [check.with_epsilon(found, chosen, epsilon) for chosen in matches]


def begins(check, found):
    """Return mistakes that explain the first iterations, and where the difference begins.

    One iteration shows uniform coupling coefficients, and so their size, but not what the softmax normalizes over.
    """
    counts = list(found)
    if check.kind != "em" and len(counts) > 1 and all(np.array_equal(found[n][0], found[counts[0]][0]) for n in counts):
        matches = part(check, {1: found[counts[0]]})
        if len(matches) == 1 and matches[0]:
            return certain(matches[0]), [f"The output equals that of one iteration with {named(matches[0])}."]
        return (), []
    if counts[:1] != [1] or len(counts) < 2:
        return (), []
    later = "the E-step or what enters it" if check.kind == "em" else "the agreement, the logits, or their softmax"
    known, until = (), 0
    for n in list(found)[:-1]:
        matches = part(check, {k: found[k] for k in found if k <= n})
        if len(matches) != 1:
            if matches and n == 1:
                sets = "; or ".join(named(chosen) for chosen in matches[:4])
                return (), [f"One iteration alone equals the paper's with one of these: {sets}. More differs from two "
                            "iterations on."]
            break
        known, until = matches[0], n
    if not until and check.kind == "em" and check.same(found[1][:1], check.predict({}, 1)[:1]):
        return (), ["After one iteration mu agrees, a does not: by something in the activation or its cost."]
    if not until:
        where = "M-step" if check.kind == "em" else "first coupling coefficients, the weighted sum, or the squash"
        return (), [f"One iteration already differs: by something in the {where}."]
    words = "One iteration" if until == 1 else "Two iterations"
    if known:
        equal = "equals" if until == 1 else "equal"
        text = f"{words} alone {equal} the paper's with {named(known)}. More differs from " \
               f"{'two' if until == 1 else 'three'} iterations on: in {later}."
        return known if until > 1 else certain(known), [text]
    gradients = check.gradient_agrees
    agreed = "in values"
    if not check.by_differences and all(gradients.get(n) for n in found if n <= until):
        agreed = "in values and gradients"
    if until == 1:
        return (), [f"{words} agrees {agreed}: the mistake lies in {later}."]
    return (), [f"{words} agree {agreed}: the mistake lies in {later}, as the third iteration first uses them."]


def apart(check, found):
    """Return mistakes that explain one of the outputs mu and a of EM routing, and what is right in which of them."""
    known, sentences = (), []
    for k, (name, other) in enumerate((("mu", "a"), ("a", "mu"))):
        def predict(settings, n, k=k):
            wanted = check.predict(settings, n)
            return None if wanted is None else [wanted[k]]
        matches = part(check, {n: [y[k]] for n, y in found.items()}, predict=predict)
        if matches == [()]:
            where = "the activation or its cost" if name == "mu" else "the mean"
            sentences.append(f"{name} agrees in all iterations, {other} does not: the mistake lies in {where}.")
        elif len(matches) == 1:
            known = known or matches[0]
            sentences.append(f"{name} alone equals the paper's with {named(matches[0])}.")
    return known, sentences


def of_capsules(check, found):
    """Return what can be seen of output capsules v, (N, J, E)."""
    v, = found[max(found)]
    lengths, sentences = np.linalg.norm(v, axis=-1), []
    spread = v.std(-1)
    if np.abs(v.mean(-1)).max() <= 1e-6 * spread.max():
        even = " and equal variance" if np.ptp(spread) <= 1e-3 * spread.max() else ""
        sentences.append(f"The entries of every output capsule have zero mean{even}, as after layer normalization.")
    if np.ptp(lengths) <= ALIKE * lengths.max():
        sentences.append(f"All output capsules have the length {lengths.mean():.4g}.")
    elif lengths.max() > 1 + ALIKE:
        sentences.append(f"Outputs are longer than 1, up to {lengths.max():.3g}.")
    if v.min() >= 0:
        sentences.append("No entry of an output is negative, as after a ReLU or a softmax.")
    if check.kind == "dynamic" and 1 in found and not check.same(found[1], check.predict({}, 1)):
        v, total = found[1][0], check.inputs["u_hat"].sum(1)
        cosine = (v * total).sum(-1) / np.maximum(np.linalg.norm(v, axis=-1) * np.linalg.norm(total, axis=-1), 1e-300)
        if np.abs(cosine - 1).max() <= ALIKE:
            sentences.append("After one iteration every output has the direction of the sum of the votes, so that only "
                             "its length can differ: by the squash, or by the size of the coupling coefficients.")
        check.call.renew()
        twice = check.call(check.inputs | {"u_hat": 2 * check.inputs["u_hat"]}, 1)[0]
        if np.abs(twice - 2 * v).max() <= ALIKE * np.abs(v).max():
            sentences.append("Votes twice as long give outputs twice as long after one iteration, as without a squash.")
    return sentences


def of_assignments(check, found):
    """Return whether the assignments of EM routing stay as they start, by mu of one and two iterations."""
    if not {1, 2} <= found.keys() or naming.difference(found[2][:1], found[1][:1]) > max(check.tolerance, 1e-5):
        return []
    return ["The second iteration changes nothing: the assignments stay uniform, as with a softmax of densities "
            "instead of their logarithms."]


def of_activations(found):
    """Return what can be seen of a parent's activation a, (N, J)."""
    a = found[max(found)][1]
    if a.min() < 0 or a.max() > 1:
        return [f"Activations lie between {a.min():.3g} and {a.max():.3g}, outside of 0 to 1."]
    if np.abs(a.sum(1) - 1).max() <= ALIKE:
        return ["The activations of a sample sum to 1, as after a softmax."]
    return []


def of_a_loss(found):
    sentences = []
    if any(y[0].min() < 0 for y in found.values()):
        sentences.append("The loss is negative, but the paper's is a sum of squares.")
    if len(found) > 1 and all(np.array_equal(y[0], found[min(found)][0]) for y in found.values()):
        sentences.append("The margin m changes nothing.")
    return sentences


def fits(check, found, losses):
    """Return whether an output is these losses per sample, (N,), or their mean or sum."""
    forms = [losses] if found[0].ndim else [losses.mean(), losses.sum()]
    return any(naming.difference(found, [np.asarray(form)]) <= max(check.tolerance, ALIKE) for form in forms)


def other_losses(check, found):
    """Return the margins that explain a loss, or that it is a cross-entropy."""
    (scores, x), (_, present) = check.inputs.items()
    m, found = max(found.items())
    one_class = check.inputs | {"present": np.eye(x.shape[1])[present.argmax(1)]}
    if (present.sum(1) > 1).any() and check.same(check.call(one_class, m), check.predict({}, m, one_class)):
        return ["For samples of one class it agrees, for one of two classes it does not: 2017, Eq. 4 sums over all "
                "classes that are present. A loss that takes one of them, as by argmax(), does not."]
    hundredths = np.arange(1, 101) / 100
    if check.kind == "spread-loss":
        for other in hundredths:
            if fits(check, found, reference.spread_loss(x, present, other)):
                return [f"With m = {m}, the loss equals that with m = {other:.4g}."]
    else:
        for upper, lower in itertools.product(hundredths[49:], [0, *hundredths[:50]]):
            if fits(check, found, reference.margin_loss(x, present, upper=upper, lower=lower)):
                return [f"The loss equals that with the margins m+ = {upper:.4g} and m- = {lower:.4g}; 2017, Eq. 4 has "
                        "0.9 and 0.1."]
    near = [check.call({**check.inputs, scores: np.where(present == 1, small, x)}, m)[0].max()
            for small in (1e-3, 1e-6)]
    if near[1] - near[0] > 1:
        return [f"The loss is unbounded as the {scores} of true classes go to 0, as cross-entropy is."]
    if fits(check, found, -(present * np.log(reference.softmax(x, 1))).sum(1)):
        return [f"The loss equals the cross-entropy of softmaxed {scores}."]
    return []


def unused(check, n):
    """Return a sentence if the output does not depend on the votes between some pairs of capsules."""
    name = check.call.interface.votes
    x, axes = check.inputs[name], check.call.interface.inputs[name]
    i, j = axes.index("I"), axes.index("J")
    I, J = x.shape[i], x.shape[j]
    if not check.by_differences:
        try:
            g = check.gradients(check.inputs, n)[name]
        except Exception:                                      # the report's lines say what it raised
            return []
        used = np.ones((I, J), bool) if g is None else np.moveaxis(g, (i, j), (0, 1)).reshape(I, J, -1).any(-1)
    elif I * J <= 100:
        used = np.ones((I, J), bool)
        first = check.call(check.inputs, n)
        for pair in np.ndindex(I, J):
            other = np.moveaxis(x.copy(), (i, j), (0, 1))
            other[pair] *= -1.5
            check.call.renew()
            y = check.call(check.inputs | {name: np.moveaxis(other, (0, 1), (i, j))}, n)
            used[pair] = any((a != b).any() for a, b in zip(y, first))
    else:
        return []
    if used.all():
        return []
    what = "W_ij" if check.kind == "layer" else "votes"
    without = [f"(i, j) = ({a}, {b})" for a, b in zip(*np.nonzero(~used))]
    rows, columns = np.nonzero(~used.any(1))[0], np.nonzero(~used.any(0))[0]
    where = f"every input capsule i = {', '.join(map(str, rows))}" if len(rows) and used[used.any(1)].all() else \
        f"every output capsule j = {', '.join(map(str, columns))}" if len(columns) and used[:, used.any(0)].all() else \
        f"{plural(len(without), 'pair')} of capsules, such as {without[0]}"
    return [f"The output does not depend on the {what} of {where}."]
