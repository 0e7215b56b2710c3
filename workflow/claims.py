"""The claims of the papers that are tested here, and what was measured of each. reproduce.py lists
and checks them; docs/reference/claims.md has a section for each.

A measure has a name, which is unique within its claim, a label, and a mark as results/render.py
reads it: EXPERIMENT SETTING[ minus SETTING], KEY[, STYLE]. A document refers to it by its name,
CLAIM NAME. The name says what is compared: the condition, one network, vs the other, the metric;
what all measures of a claim have in common is left out.

A claim of a paper has tests: every pair of published settings that differs in what the claim names,
with the facts by which workflow/rule.py finds the tests that decide. Which seeds were planned, and
how many configurations were tried for each network, is in workflow/history.py. A pair of
settings is one test: of several evaluations the one that its plan names, or else the paper's. For
the toys' networks of the paper's kind that is novel viewpoints at matched familiar accuracy, where
the network that is the more accurate at familiar viewpoints on average is stopped; all others were
planned to be tested at the end of training. Not among the tests are tables that serve
another purpose: padding, no-padding, components other than routing, the pretrained networks,
networks that were trained again to be measured.

A claim without a number of the paper's is a finding of ours, and has no verdict.
"""
from typing import NamedTuple

SABOUR, HINTON, GU = "Sabour et al. 2017", "Hinton et al. 2018", "Gu & Tresp 2020"


class Measure(NamedTuple):
    """One number: of a setting, or the difference between two"""
    name: str                      # unique within the claim
    label: str
    mark: str


class Test(NamedTuple):
    """A measure that tests a claim, and how near it is to the paper's test (workflow/rule.py)"""
    name: str
    label: str
    mark: str                      # the papers' side first; with `reversed`, the side after `minus`
    data: str                      # paper, shorter, ours
    task: str                      # paper, another
    control: str                   # paper, another, or "" of an accuracy
    network: str                   # paper, narrow, another
    is_matched: bool = False       # whether one of the networks is stopped at the other's accuracy


class Arms(NamedTuple):
    """Networks on the same data, among which the strongest control is found: {setting: label}"""
    experiment: str
    key: str                       # of the claim's measure
    ours: dict
    controls: dict


class Claim(NamedTuple):
    """A claim: what the paper reports, and what was measured"""
    name: str
    sentence: str
    paper: str                     # source and number
    tests: tuple = ()              # of Test
    measures: tuple = ()           # of Measure: what else was measured
    quick: tuple = ()              # of Measure: networks in weights/, in place of trained ones
    theirs: float = None           # the paper's number, in percent or percentage points
    is_accuracy: bool = False      # or a difference
    arms: tuple = ()               # of Arms, one for each data set: where the strongest control is


def test(measure, data, task, control, network, is_matched=False):
    """Return the Test of a measure"""
    return Test(*measure, data, task, control, network, is_matched)


def pair(name, label, experiment, one, other, key, style="points"):
    """Return the measure of a difference between two settings, paired by seed"""
    return Measure(name, label, f"{experiment} {one} minus {other}, {key}, {style}")


def of(name, label, experiment, setting, key, style="3 digits"):
    """Return the measure of one setting"""
    return Measure(name, label, f"{experiment} {setting}, {key}, {style}")


def multi(name, label, one, other, key="test_exact_match", style="points"):
    """Return the measure of a difference on MultiMNIST"""
    return pair(name, label, "multimnist", one, other, key, style)


def affine(name, label, one, other, key="affine_accuracy"):
    """Return the measure of a difference on affine digits"""
    return pair(name, label, "affnist", one, other, key)


def auroc(name, label, setting, key):
    """Return the measure of an AUROC: the range over seeds, since a t interval can leave 0..1"""
    return of(name, label, "affnist", setting, key, "2 digits, range")


def toys(name, label, one, other, key="novel"):
    """Return the measure of a difference on toys"""
    return pair(name, label, "smallnorb", one, other, key)


def background(name, label, setting, layer, when="after"):
    """Return the measure of a layer's activation over background minus over the toy, after or
    before the training"""
    setting = f"background-activity/{setting}"
    key = f"background_activity.{when}.a.{layer}"
    return pair(name, label, "smallnorb", setting, setting, f"{key}.0 vs {key}.1", "3 digits")


def r_squared(factor, words, table="dimensions"):
    """Return the measures of one factor: R² from capsules minus that from vectors. table:
    "dimensions", or "centered_differences" of two drawings of each digit at the center"""
    key = f"{table}.trained.{factor}"
    name = factor.replace("_", "-")
    if table == "centered_differences":
        name += "-differences"
        words = f"two drawings at the center, {words}"
    return tuple(
        pair(f"{model}-{name}", f"R², {words}: {model} minus vector-gap", "affnist",
             f"dimensions/{model}", "dimensions/vector-gap", key, "2 digits")
        for model in ("capsnet", "capsnet-shared"))


def replaced(name, words):
    """Return the measures of one way to replace the coupling coefficients: exact match and
    reconstruction error minus those with the network's own"""
    setting, keys = "coefficients/iters-3", f"coefficients.{words}"
    label = f"tested with {WORDS_OF_COEFFICIENTS[name]}"
    own = "coefficients.trained"
    return (multi(name, label, setting, setting, f"{keys}.exact_match vs {own}.exact_match"),
            multi(f"{name}-mse", f"{label}: reconstruction MSE per pixel", setting, setting,
                  f"{keys}.recon_mse vs {own}.recon_mse", "4 digits"))


def more_iterations(n):
    """Return the measures of a network that was trained with n iterations, minus that with 3"""
    one, other = f"iterations/iters-{n}", "iterations/iters-3"
    label = f"trained and tested with {n} iterations"
    return (multi(f"trained-with-{n}", label, one, other),
            multi(f"trained-with-{n}-mse", f"{label}: reconstruction MSE per pixel", one, other,
                  "test_recon_mse", "4 digits"))


def attacked(experiment, data, capsules, cnn):
    """Return the measures of attacks on a capsule network, a CNN and a GAP-CNN: robustness,
    capsules minus each CNN, in the white box; minus the CNN, to images made against other networks
    of the three models. data: "toys" or "digits". capsules, cnn: models"""
    setting = f"attacks/{data}"
    compared = [(attack, words, control, name)
                for attack, words in (("pgd", "PGD"), ("bim", "BIM"), ("fgsm", "FGSM"))
                for control, name in ((cnn, "CNN"), ("cnn-gap", "GAP-CNN"))]
    compared += [(attack, words, cnn, "CNN")
                 for attack, words in ((f"bim from {cnn}", "BIM made for another CNN"),
                                       (f"bim from {capsules}", "BIM made for other capsules"),
                                       ("bim from cnn-gap", "BIM made for a GAP-CNN"),
                                       ("noise", "random signs"))]
    return tuple(
        pair(f"{data}-{attack.replace(' ', '-')}-vs-{control}",
             f"{data}, {words}: capsules minus {name}", experiment, setting, setting,
             f"robustness.{capsules}.{attack} vs robustness.{control}.{attack}", "3 digits")
        for attack, words, control, name in compared)


WORDS_OF_COEFFICIENTS = {
    "uniform": "uniform coefficients",
    "random": "random coefficients",
    "shuffled": "its own coefficients, shuffled over the digits",
    "mean": "the mean of its own over training pairs",
    "another-pair": "the coefficients of another pair",
    "5-iterations": "5 iterations",
    "10-iterations": "10 iterations"}
SIZE = "matrix-capsnet-paper"      # of the paper's small network
THREE_SETS = "toys2-azimuth+toys3-azimuth+toys4-azimuth"
SIX_SETS = "+".join(f"toys{toy_seed}-azimuth" for toy_seed in range(5, 11))


# from the least to the most accurate at familiar viewpoints, mean over the seeds
FAMILIAR = {"azimuth": ("cnn-dropout", "matrix-capsnet", "cnn", "matrix-capsnet-paper", "cnn-bn", "cnn-paper"),
            "elevation": ("cnn-dropout", "matrix-capsnet", "cnn", "cnn-bn", "matrix-capsnet-paper", "cnn-paper")}
TOY_NETWORKS = {
    "matrix-capsnet-paper": "the paper's small network", "matrix-capsnet": "matrix-capsnet",
    "cnn-paper": "the paper's CNN", "cnn": "a narrow version of the paper's CNN without dropout",
    "cnn-dropout": "a narrow version of the paper's CNN",
    "cnn-bn": "a narrow version of it with batch normalization"}


def matched_viewpoints(split):
    """Return the tests of matrix capsules minus CNN at novel azimuths or elevations, at matched
    familiar accuracy: the more accurate network is stopped"""
    found = []
    for ours in ("matrix-capsnet-paper", "matrix-capsnet"):
        for control in ("cnn-paper", "cnn", "cnn-dropout", "cnn-bn"):
            name = f"matched-{ours}-vs-{control}"
            label = f"{TOY_NETWORKS[ours]} minus {TOY_NETWORKS[control]}, matched"
            settings = f"paper-{split}/{ours}", f"paper-{split}/{control}"
            if FAMILIAR[split].index(ours) > FAMILIAR[split].index(control):
                measure = toys(name, label, *settings, "novel once familiar")
            else:
                measure = pair(name, label, "smallnorb", *reversed(settings), "novel once familiar",
                               "points, reversed")
            kind = "another" if control == "cnn-bn" else "paper"
            found.append(test(measure, "ours", "paper", kind, "narrow", is_matched=True))
    return tuple(found)


def other_viewpoints(split):
    """Return the tests of matrix capsules minus CNN at novel azimuths or elevations at the end of
    training, not matched"""
    paper, small, heads = f"paper-{split}/{SIZE}", f"paper-{split}/matrix-capsnet", f"heads-{split}"
    sets = "+".join(f"toys{k}-{split}" for k in (2, 3, 4))
    end = "not matched"
    return (
        test(toys("three-sets-matrix-capsnet-vs-cnn",
                  f"matrix-capsnet minus the narrow CNN, three other sets of toys, {end}",
                  f"{sets}/matrix-capsnet", f"{sets}/cnn"), "ours", "another", "paper", "narrow"),
        test(toys("paper-small-vs-cnn-gap",
                  f"the paper's small network minus a GAP-CNN with half as many parameters, {end}",
                  paper, f"{heads}/cnn-gap"), "ours", "another", "another", "narrow"),
        test(toys("paper-small-vs-wide-cnn-gap",
                  f"the paper's small network minus a larger GAP-CNN, {end}",
                  paper, f"wide-{split}/cnn-gap"), "ours", "another", "another", "narrow"),
        test(toys("three-sets-matrix-capsnet-vs-cnn-gap",
                  f"matrix-capsnet minus GAP-CNN, three other sets of toys, {end}",
                  f"{sets}/matrix-capsnet", f"{sets}/cnn-gap"),
             "ours", "another", "another", "narrow"),
        test(toys("matrix-capsnet-vs-cnn-gap", f"matrix-capsnet minus GAP-CNN, {end}",
                  small, f"{heads}/cnn-gap"), "ours", "another", "another", "narrow"),
        test(toys("matrix-capsnet-vs-wide-cnn-gap", f"matrix-capsnet minus a larger GAP-CNN, {end}",
                  small, f"wide-{split}/cnn-gap"), "ours", "another", "another", "narrow"),
        test(toys("matrix-head-vs-cnn-gap",
                  f"matrix capsules on a small CNN (matrix-head) minus GAP-CNN, {end}",
                  f"{heads}/matrix-head", f"{heads}/cnn-gap"),
             "ours", "another", "another", "another"))


def toy_arms(split):
    """Return the networks among which the strongest control at novel viewpoints is found"""
    return (Arms(
        "smallnorb", "novel",
        ours={f"paper-{split}/{SIZE}": "the paper's small network",
              f"paper-{split}/matrix-capsnet": "matrix-capsnet",
              f"heads-{split}/matrix-head": "matrix-head"},
        controls={f"paper-{split}/cnn-paper": "the paper's CNN", f"paper-{split}/cnn": "narrow CNN",
                  f"paper-{split}/cnn-bn": "narrow CNN with batch normalization",
                  f"paper-{split}/cnn-dropout": "narrow CNN with dropout",
                  f"heads-{split}/cnn-gap": "GAP-CNN", f"wide-{split}/cnn-gap": "larger GAP-CNN"}),)


CLAIMS = (
    Claim(
        "multimnist-accuracy",
        "A capsule network classifies both of two overlapping digits.",
        f"exact match 94.8% ({SABOUR}, Table 1)",
        tests=(
            test(of("paper-pairs", "deeper network (residual), the paper's pairs, 1.2 million of them",
                    "multimnist", "main/paper-protocol", "test_exact_match", "percent"),
                 "shorter", "paper", "", "another"),
            test(of("paper-pairs-recomputed",
                    "the same network, 1.92 million, normalization statistics recomputed",
                    "multimnist", "weights/paper-protocol-long-recomputed", "test_exact_match",
                    "percent"),
                 "shorter", "paper", "", "another"),
        ),
        measures=(
            of("paper-pairs-long",
               "paper's pairs, 1.92 million, running statistics of batch normalization",
               "multimnist", "main/paper-protocol-long", "test_exact_match", "percent, range"),
            of("harder-pairs", "deeper network (residual), harder pairs (IoU >= 0.8), 1.2 million",
               "multimnist", "main/residual", "test_exact_match", "percent"),
            of("default-network", "default network, harder pairs, 72,000",
               "multimnist", "main/deep", "test_exact_match", "percent"),
            of("classic", "the paper's network, narrow (classic), harder pairs, 72,000",
               "multimnist", "main/classic", "test_exact_match", "percent"),
            of("half-digit", "capsules that see half a digit, harder pairs, 72,000",
               "multimnist", "half-digit/iters-3", "test_exact_match", "percent"),
            of("half-digit-long", "the same, 360,000 pairs",
               "multimnist", "half-digit-long/iters-3", "test_exact_match", "percent"),
            of("adam", "default network trained by Adam, harder pairs, 72,000",
               "multimnist", "main/adam", "test_exact_match", "percent"),
        ),
        quick=(
            of("pretrained-paper-pairs",
               "paper's pairs, 1.92 million, normalization statistics recomputed",
               "multimnist", "weights/paper-protocol-long-recomputed", "test_exact_match",
               "percent"),
            of("pretrained-harder-pairs", "pretrained network, harder pairs (IoU >= 0.8)",
               "multimnist", "weights/residual", "test_exact_match", "percent"),
        ),
        theirs=94.8,
        is_accuracy=True,
    ),
    Claim(
        "multimnist-cnn",
        "The capsule network classifies more pairs of digits than a CNN.",
        f"94.8% against 91.9%: +2.9 points ({SABOUR}, Table 1)",
        tests=(
            test(multi("paper-pairs-vs-gap-cnn",
                       "deeper CapsNet minus GAP-CNN, the paper's pairs, 1.2 million",
                       "main/paper-protocol", "control/cnn-paper-protocol"),
                 "shorter", "paper", "another", "another"),
            test(multi("paper-pairs-recomputed-vs-gap-cnn",
                       "the same, 1.92 million, normalization statistics recomputed",
                       "weights/paper-protocol-long-recomputed",
                       "weights/cnn-paper-protocol-long-recomputed"),
                 "shorter", "paper", "another", "another"),
            test(multi("paper-pairs-recomputed-vs-tuned-gap-cnn",
                       "the same, with the GAP-CNN's best settings of six",
                       "weights/paper-protocol-long-recomputed",
                       "weights/cnn-paper-protocol-long-tuned-recomputed"),
                 "shorter", "paper", "another", "another"),
            test(multi("default-vs-dense-cnn", "default CapsNet minus CNN with a dense layer",
                       "main/deep", "control/cnn"), "ours", "paper", "paper", "another"),
            test(multi("default-vs-tuned-dense-cnn",
                       "default CapsNet minus CNN with a dense layer, tuned",
                       "main/deep", "control/cnn-tuned"), "ours", "paper", "paper", "another"),
            test(multi("default-vs-gap-cnn", "default CapsNet minus GAP-CNN",
                       "main/deep", "control/cnn-head-gap"), "ours", "paper", "another", "another"),
            test(multi("default-vs-tuned-gap-cnn", "default CapsNet minus GAP-CNN, tuned",
                       "main/deep", "control/cnn-head-gap-tuned"),
                 "ours", "paper", "another", "another"),
            test(multi("default-vs-gap-cnn-decoder",
                       "default CapsNet minus tuned GAP-CNN with the CapsNet's decoder",
                       "main/deep", "control/cnn-gap-decoder"),
                 "ours", "paper", "another", "another"),
            test(multi("default-vs-vector-dense",
                       "default CapsNet minus ten vectors from a dense layer (vector-dense)",
                       "main/deep", "control/vector-dense"), "ours", "paper", "another", "another"),
            test(multi("default-vs-cnn-vectors",
                       "default CapsNet minus ten vectors with ReLU (cnn-vectors)",
                       "main/deep", "control/cnn-vectors"), "ours", "paper", "another", "another"),
            test(multi("no-reconstruction-vs-dense-cnn",
                       "default CapsNet without reconstruction minus CNN with a dense layer",
                       "control/no-recon", "control/cnn"), "ours", "paper", "paper", "another"),
            test(multi("no-reconstruction-vs-tuned-dense-cnn",
                       "default CapsNet without reconstruction minus CNN with a dense layer, tuned",
                       "control/no-recon", "control/cnn-tuned"),
                 "ours", "paper", "paper", "another"),
            test(multi("no-reconstruction-vs-gap-cnn",
                       "default CapsNet without reconstruction minus GAP-CNN",
                       "control/no-recon", "control/cnn-head-gap"),
                 "ours", "paper", "another", "another"),
            test(multi("no-reconstruction-vs-tuned-gap-cnn",
                       "default CapsNet without reconstruction minus GAP-CNN, tuned",
                       "control/no-recon", "control/cnn-head-gap-tuned"),
                 "ours", "paper", "another", "another"),
            test(multi("half-digit-vs-dense-cnn",
                       "capsules that see half a digit minus CNN with a dense layer",
                       "half-digit/iters-3", "half-digit/cnn"), "ours", "paper", "paper", "another"),
            test(multi("half-digit-vs-gap-cnn", "capsules that see half a digit minus GAP-CNN",
                       "half-digit/iters-3", "half-digit/cnn-head-gap"),
                 "ours", "paper", "another", "another"),
        ),
        measures=(
            multi("one-iteration-vs-tuned-gap-cnn", "CapsNet with 1 iteration minus tuned GAP-CNN",
                  "control/iters-1", "control/cnn-head-gap-tuned"),
            multi("one-iteration-no-reconstruction-vs-tuned-gap-cnn",
                  "CapsNet with 1 iteration and without reconstruction minus tuned GAP-CNN",
                  "control/iters-1-no-recon", "control/cnn-head-gap-tuned"),
            multi("paper-pairs-running-vs-gap-cnn",
                  "deeper CapsNet minus GAP-CNN, the paper's pairs, 1.92 million, running statistics",
                  "main/paper-protocol-long", "control/cnn-paper-protocol-long"),
            multi("gap-cnn-decoder-vs-tuned-gap-cnn", "tuned GAP-CNN with a decoder minus without",
                  "control/cnn-gap-decoder", "control/cnn-head-gap-tuned"),
        ),
        theirs=2.9,
        arms=(
            Arms("multimnist", "test_exact_match",
                 ours={"main/deep": "default CapsNet", "control/iters-1": "default CapsNet, 1 iteration",
                       "main/classic": "classic",
                       "half-digit/iters-3": "half-digit"},
                 controls={"control/cnn": "CNN with a dense layer",
                           "control/cnn-tuned": "tuned CNN with a dense layer",
                           "control/cnn-head-gap": "GAP-CNN",
                           "control/cnn-head-gap-tuned": "tuned GAP-CNN",
                           "control/cnn-gap-decoder": "tuned GAP-CNN with a decoder",
                           "control/cnn-vectors": "cnn-vectors",
                           "control/vector-dense": "vector-dense",
                           "half-digit/cnn": "half-digit CNN",
                           "half-digit/cnn-head-gap": "half-digit GAP-CNN"}),
            Arms("multimnist", "test_exact_match",
                 ours={"main/paper-protocol": "CapsNet",
                       "weights/paper-protocol-long-recomputed": "CapsNet",
                       "weights/paper-protocol-long-iters-1-recomputed": "CapsNet with 1 iteration"},
                 controls={"control/cnn-paper-protocol": "GAP-CNN",
                           "weights/cnn-paper-protocol-long-recomputed": "GAP-CNN",
                           "weights/cnn-paper-protocol-long-tuned-recomputed": "tuned GAP-CNN"}),
        ),
    ),
    Claim(
        "multimnist-routing",
        "Three routing iterations are better than one.",
        f"94.8% against 92.5%: +2.3 points ({SABOUR}, Table 1)",
        tests=(
            test(multi("paper-pairs-recomputed",
                       "deeper network (residual), the paper's pairs, 1.92 million, normalization "
                       "statistics recomputed",
                       "weights/paper-protocol-long-recomputed",
                       "weights/paper-protocol-long-iters-1-recomputed"),
                 "shorter", "paper", "paper", "another"),
            test(multi("classic", "the paper's network, narrow (classic)",
                       "main/classic", "control/classic-iters-1"),
                 "ours", "paper", "paper", "narrow"),
            test(multi("default-network", "default network",
                       "main/deep", "control/iters-1"), "ours", "paper", "paper", "another"),
            test(multi("no-reconstruction", "default network without reconstruction",
                       "control/no-recon", "control/iters-1-no-recon"),
                 "ours", "paper", "paper", "another"),
            test(multi("residual", "deeper network (residual), harder pairs, 1.2 million",
                       "main/residual", "control/residual-iters-1"),
                 "ours", "paper", "paper", "another"),
            test(multi("half-digit", "capsules that see half a digit",
                       "half-digit/iters-3", "half-digit/iters-1"),
                 "ours", "paper", "paper", "another"),
            test(multi("half-digit-long", "the same, 360,000 pairs",
                       "half-digit-long/iters-3", "half-digit-long/iters-1"),
                 "ours", "paper", "paper", "another"),
            test(affine("affine-digits", "affine digits, a matrix per position (capsnet)",
                        "backbone/capsnet", "backbone/capsnet-iters-1"),
                 "ours", "another", "paper", "another"),
            test(affine("affine-digits-shared",
                        "affine digits, shared matrices, no squash, no decoder",
                        "components/routing", "components/transformation"),
                 "ours", "another", "paper", "another"),
            test(toys("novel-azimuths", "toys at novel azimuths, a matrix per position (capsnet)",
                      "heads-azimuth/capsnet", "heads-azimuth/capsnet-iters-1"),
                 "ours", "another", "paper", "another"),
            test(toys("novel-azimuths-shared", "toys at novel azimuths, shared matrices",
                      "heads-azimuth/capsnet-shared", "heads-azimuth/capsnet-shared-iters-1"),
                 "ours", "another", "paper", "another"),
            test(toys("novel-azimuths-shared-wide", "the same, wide",
                      "wide-azimuth/capsnet-shared", "ablations/capsnet-shared-iters-1"),
                 "ours", "another", "paper", "another"),
            test(toys("novel-elevations-shared", "toys at novel elevations, shared matrices",
                      "heads-elevation/capsnet-shared", "heads-elevation/capsnet-shared-iters-1"),
                 "ours", "another", "paper", "another"),
        ),
        measures=(
            multi("half-digit-tested-with-1",
                  "half-digit, both tested with 1 iteration: trained with 3 minus with 1",
                  "half-digit-uniform/iters-3", "half-digit/iters-1"),
        ),
        theirs=2.3,
    ),
    Claim(
        "multimnist-switched-off",
        "Networks trained with dynamic routing lose less than one point on average when tested "
        "without it.",
        "no number",
        measures=(
            multi("default-network", "default network: with routing minus without",
                  "main/deep", "main-uniform/deep"),
            multi("half-digit", "`half-digit`: with routing minus without",
                  "half-digit/iters-3", "half-digit-uniform/iters-3"),
            affine("affine-digits", "affine digits, capsnet: with routing minus without",
                   "backbone/capsnet", "backbone-uniform/capsnet"),
            multi("default-network-mse",
                  "default network: reconstruction MSE per pixel, with minus without",
                  "main/deep", "main-uniform/deep", "test_recon_mse", "4 digits"),
        ),
    ),
    Claim(
        "multimnist-coefficients",
        "What a CapsNet trained with three routing iterations loses if its coupling coefficients "
        "are replaced, or if it has more iterations.",
        "no number; Paik et al. (2019): often worse than uniform or random coefficients",
        measures=(
            *replaced("uniform", "uniform"),
            *replaced("random", "random"),
            *replaced("shuffled", "shuffled"),
            *replaced("mean", "mean"),
            *replaced("another-pair", "another pair"),
            *replaced("5-iterations", "5 iterations"),
            *replaced("10-iterations", "10 iterations"),
            *more_iterations(5),
            *more_iterations(10),
        ),
    ),
    Claim(
        "multimnist-reconstruction",
        "Each of two overlapping digits is reconstructed from its own capsule, with less than half "
        "of the mean image's error; a linear map from the image and the class has a smaller one.",
        f"shown in pictures ({SABOUR}, Fig. 5)",
        measures=(
            multi("vs-vector-dense",
                  "reconstruction MSE per pixel, CapsNet minus a CNN's ten vectors with squash "
                  "and margin loss (vector-dense)",
                  "main/deep", "control/vector-dense", "test_recon_mse", "4 digits"),
            multi("vs-cnn-vectors",
                  "reconstruction MSE per pixel, CapsNet minus a CNN's ten vectors with ReLU "
                  "(cnn-vectors)",
                  "main/deep", "control/cnn-vectors", "test_recon_mse", "4 digits"),
            of("capsnet", "reconstruction MSE per pixel, CapsNet",
               "multimnist", "main/deep", "test_recon_mse", "4 digits"),
            of("linear", "reconstruction MSE per pixel, linear least squares from the composite and the class",
               "multimnist", "linear/pairs", "test_recon_mse", "4 digits"),
            of("mean-image", "reconstruction MSE per pixel, mean image",
               "multimnist", "main/deep", "baseline_recon_mse", "4 digits"),
            multi("vs-gap-cnn-decoder",
                  "MSE per pixel, CapsNet minus tuned GAP-CNN with the CapsNet's decoder",
                  "main/deep", "control/cnn-gap-decoder", "test_recon_mse", "4 digits"),
            multi("vs-cnn-vectors-exact-match", "exact match, CapsNet minus cnn-vectors",
                  "main/deep", "control/cnn-vectors"),
            multi("3-vs-1-iterations",
                  "reconstruction MSE per pixel, CapsNet with 3 iterations minus with 1",
                  "main/deep", "control/iters-1", "test_recon_mse", "5 digits"),
        ),
    ),
    Claim(
        "mnist",
        "A capsule network classifies MNIST with hardly an error.",
        f"test accuracy 99.75 +- 0.005%, 1 iteration 99.71% ({SABOUR}, Table 1)",
        tests=(
            test(of("paper-network",
                    "the paper's network (8.2 million parameters, 3 iterations), 15 epochs",
                    "affnist", "mnist/capsnet-paper", "test_accuracy", "percent, 2 digits"),
                 "shorter", "paper", "", "paper"),
            test(of("small-network", "small network with 1 iteration and shared matrices, 10 epochs",
                    "affnist", "mnist/capsnet-shared", "test_accuracy", "percent, 2 digits"),
                 "shorter", "paper", "", "another"),
        ),
        theirs=99.75,
        is_accuracy=True,
    ),
    Claim(
        "affnist-translation",
        "Of two networks that classify translated digits equally well, the capsule network is "
        "more accurate on affine digits.",
        f"affNIST: 79% against 66%: +13 points ({SABOUR}, section 5.2)",
        tests=(
            test(affine("matched-vs-max-pooling",
                        "CapsNet minus CNN with max pooling, matched",
                        "matched-accuracy/capsnet", "matched-accuracy/cnn-dense"),
                 "ours", "paper", "paper", "narrow", is_matched=True),
            test(affine("matched-vs-narrow-cnn",
                        "CapsNet minus CNN without pooling (the paper's for MNIST, narrow), matched",
                        "matched-accuracy/capsnet", "matched-accuracy/cnn"),
                 "ours", "paper", "another", "narrow", is_matched=True),
            test(affine("matched-vs-wide-cnn",
                        "the same CNN, its convolutions as wide as the CapsNet's, matched",
                        "matched-accuracy/capsnet", "matched-accuracy/cnn-64"),
                 "ours", "paper", "another", "narrow", is_matched=True),
            test(affine("equal-training-vs-max-pooling",
                        "CapsNet minus CNN with max pooling, equal training",
                        "equal-training/capsnet", "equal-training/cnn-dense"),
                 "ours", "another", "paper", "narrow"),
            test(affine("equal-training-vs-narrow-cnn",
                        "CapsNet minus CNN without pooling, equal training",
                        "equal-training/capsnet", "equal-training/cnn"),
                 "ours", "another", "another", "narrow"),
            test(affine("any-position-vs-max-pooling",
                        "trained at any position: CapsNet minus CNN with max pooling",
                        "any-position/capsnet", "any-position/cnn-dense"),
                 "ours", "another", "paper", "narrow"),
            test(affine("any-position-vs-narrow-cnn",
                        "trained at any position: CapsNet minus CNN without pooling",
                        "any-position/capsnet", "any-position/cnn"),
                 "ours", "another", "another", "narrow"),
            test(affine("any-position-matched-vs-narrow-cnn",
                        "the same, both stopped at 95% validation accuracy",
                        "any-position-matched/capsnet", "any-position-matched/cnn"),
                 "ours", "another", "another", "narrow", is_matched=True),
            test(affine("backbone-capsnet-vs-cnn-dense",
                        "modern backbone: a matrix per position (capsnet) minus CNN with max pooling",
                        "backbone/capsnet", "backbone/cnn-dense"),
                 "ours", "another", "paper", "another"),
            test(affine("backbone-capsnet-vs-cnn-gap",
                        "modern backbone: a matrix per position (capsnet) minus GAP-CNN",
                        "backbone/capsnet", "backbone/cnn-gap"),
                 "ours", "another", "another", "another"),
            test(affine("backbone-capsnet-vs-cnn-gmp",
                        "modern backbone: a matrix per position (capsnet) minus CNN with global max pooling",
                        "backbone/capsnet", "backbone/cnn-gmp"),
                 "ours", "another", "another", "another"),
            test(affine("backbone-capsnet-vs-vector-gap",
                        "modern backbone: a matrix per position (capsnet) minus ten average-pooled vectors",
                        "backbone/capsnet", "backbone/vector-gap"),
                 "ours", "another", "another", "another"),
            test(affine("backbone-capsnet-vs-vector-gmp",
                        "modern backbone: a matrix per position (capsnet) minus ten max-pooled vectors",
                        "backbone/capsnet", "backbone/vector-gmp"),
                 "ours", "another", "another", "another"),
            test(affine("backbone-capsnet-shared-vs-cnn-dense",
                        "modern backbone: shared matrices (capsnet-shared) minus CNN with max pooling",
                        "backbone/capsnet-shared", "backbone/cnn-dense"),
                 "ours", "another", "paper", "another"),
            test(affine("backbone-capsnet-shared-vs-cnn-gap",
                        "modern backbone: shared matrices (capsnet-shared) minus GAP-CNN",
                        "backbone/capsnet-shared", "backbone/cnn-gap"),
                 "ours", "another", "another", "another"),
            test(affine("backbone-capsnet-shared-vs-cnn-gmp",
                        "modern backbone: shared matrices (capsnet-shared) minus CNN with global max pooling",
                        "backbone/capsnet-shared", "backbone/cnn-gmp"),
                 "ours", "another", "another", "another"),
            test(affine("backbone-capsnet-shared-vs-vector-gap",
                        "modern backbone: shared matrices (capsnet-shared) minus ten average-pooled vectors",
                        "backbone/capsnet-shared", "backbone/vector-gap"),
                 "ours", "another", "another", "another"),
            test(affine("backbone-capsnet-shared-vs-vector-gmp",
                        "modern backbone: shared matrices (capsnet-shared) minus ten max-pooled vectors",
                        "backbone/capsnet-shared", "backbone/vector-gmp"),
                 "ours", "another", "another", "another"),
            test(affine("few-digits-vs-cnn-gap",
                        "ten training digits per class: capsnet-shared minus GAP-CNN",
                        "few-10/capsnet-shared", "few-10/cnn-gap"),
                 "ours", "another", "another", "another"),
            test(affine("few-digits-vs-cnn-gmp",
                        "ten training digits per class: capsnet-shared minus CNN with global max pooling",
                        "few-10/capsnet-shared", "few-10/cnn-gmp"),
                 "ours", "another", "another", "another"),
            test(affine("few-digits-vs-vector-gap",
                        "ten training digits per class: capsnet-shared minus ten average-pooled vectors",
                        "few-10/capsnet-shared", "few-10/vector-gap"),
                 "ours", "another", "another", "another"),
        ),
        measures=(
            affine("matched-vs-narrow-cnn-translated",
                   "translated digits at any position, CapsNet minus CNN without pooling, matched",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn", "any_position_accuracy"),
            affine("matched-vs-wide-cnn-translated",
                   "the same, CNN as wide as the CapsNet",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn-64", "any_position_accuracy"),
        ),
        theirs=13.0,
        arms=(
            Arms("affnist", "affine_accuracy",
                 ours={"matched-accuracy/capsnet": "small CapsNet",
                       "equal-training/capsnet": "small CapsNet",
                       "backbone/capsnet": "capsnet", "backbone/capsnet-shared": "capsnet-shared"},
                 controls={"matched-accuracy/cnn": "narrow CNN",
                           "matched-accuracy/cnn-64": "wide CNN",
                           "matched-accuracy/cnn-dense": "small CNN with max pooling",
                           "equal-training/cnn": "narrow CNN",
                           "equal-training/cnn-dense": "small CNN with max pooling",
                           "backbone/cnn-dense": "CNN with max pooling",
                           "backbone/cnn-gap": "GAP-CNN", "backbone/cnn-gmp": "GMP-CNN",
                           "backbone/vector-gap": "average-pooled vectors",
                           "backbone/vector-gmp": "max-pooled vectors"}),
        ),
    ),
    Claim(
        "affnist-centered",
        "At the center of the canvas, where no position is new and only the shape differs, CNNs "
        "matched in validation accuracy are ahead of the CapsNet.",
        f"the paper's reading of 79% against 66% ({SABOUR}, section 5.2)",
        measures=(
            affine("matched-vs-narrow-cnn", "affine digits, centered, CapsNet minus narrow CNN",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn", "centered_accuracy"),
            affine("matched-vs-wide-cnn",
                   "the same, CNN with convolutions as wide as the CapsNet's",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn-64", "centered_accuracy"),
            affine("equal-training-vs-narrow-cnn",
                   "centered, after 96,000 translated digits each, CapsNet minus narrow CNN",
                   "equal-training/capsnet", "equal-training/cnn", "centered_accuracy"),
            affine("matched-vs-max-pooling",
                   "centered, CapsNet minus CNN with max pooling (cnn-dense)",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn-dense", "centered_accuracy"),
            affine("backbone-capsnet-shared-vs-cnn-gap",
                   "centered, modern backbone, not matched, capsnet-shared minus cnn-gap",
                   "backbone/capsnet-shared", "backbone/cnn-gap", "centered_accuracy"),
            affine("backbone-capsnet-shared-vs-vector-gap",
                   "centered, modern backbone, not matched, capsnet-shared minus vector-gap",
                   "backbone/capsnet-shared", "backbone/vector-gap", "centered_accuracy"),
            affine("backbone-shared-vs-per-position",
                   "centered, modern backbone, not matched, one iteration: shared matrices "
                   "minus one per position",
                   "backbone/capsnet-shared", "backbone/capsnet-iters-1", "centered_accuracy"),
        ),
    ),
    Claim(
        "affnist-any-position",
        "Where no position is new, no advantage of a capsule network over a CNN of matched "
        "accuracy is measurable.",
        "no number",
        measures=(
            affine("matched",
                   "trained at any position to 95% validation accuracy, CapsNet minus narrow "
                   "CNN",
                   "any-position-matched/capsnet", "any-position-matched/cnn"),
            affine("equal-training",
                   "trained at any position, 96,000 digits each, CapsNet minus narrow CNN",
                   "any-position/capsnet", "any-position/cnn"),
            affine("matched-centered",
                   "trained at any position to 95% validation accuracy, centered, CapsNet "
                   "minus narrow CNN",
                   "any-position-matched/capsnet", "any-position-matched/cnn", "centered_accuracy"),
        ),
    ),
    Claim(
        "affnist-equal-training",
        "After equal training a small CNN with max pooling is ahead of the small CapsNet.",
        "no number",
        measures=(
            affine("vs-max-pooling",
                   "CapsNet minus CNN with max pooling (cnn-dense), 96,000 digits",
                   "equal-training/capsnet", "equal-training/cnn-dense"),
            affine("vs-narrow-cnn", "CapsNet minus narrow CNN, 96,000 digits",
                   "equal-training/capsnet", "equal-training/cnn"),
        ),
    ),
    Claim(
        "affnist-pooling",
        "On one modern backbone, ten pooled vectors do as well as a CapsNet without routing.",
        f"sharing matrices, without routing: 93.2% on affNIST ({GU})",
        measures=(
            affine("vector-gap-vs-capsnet-shared", "vector-gap minus capsnet-shared",
                   "backbone/vector-gap", "backbone/capsnet-shared"),
            affine("capsnet-shared-vs-cnn-gap", "capsnet-shared minus cnn-gap",
                   "backbone/capsnet-shared", "backbone/cnn-gap"),
            of("capsnet-shared", "capsnet-shared",
               "affnist", "backbone/capsnet-shared", "affine_accuracy", "percent"),
            affine("cnn-gmp-vs-capsnet-shared", "cnn-gmp minus capsnet-shared",
                   "backbone/cnn-gmp", "backbone/capsnet-shared"),
            affine("capsnet-shared-vs-3-iterations",
                   "capsnet-shared minus capsnet with 3 iterations",
                   "backbone/capsnet-shared", "backbone/capsnet"),
        ),
        quick=(
            affine("pretrained-capsnet-shared-vs-cnn-gap",
                   "pretrained: capsnet-shared minus cnn-gap",
                   "weights/capsnet-shared", "weights/cnn-gap"),
        ),
    ),
    Claim(
        "affnist-few-digits",
        "With ten training digits per class, a CapsNet is ahead of a GAP-CNN.",
        "no number",
        measures=(
            affine("vs-cnn-gap", "capsnet-shared minus cnn-gap",
                   "few-10/capsnet-shared", "few-10/cnn-gap"),
            affine("vs-vector-gap", "capsnet-shared minus vector-gap",
                   "few-10/capsnet-shared", "few-10/vector-gap"),
            affine("vs-cnn-gmp", "capsnet-shared minus cnn-gmp",
                   "few-10/capsnet-shared", "few-10/cnn-gmp"),
            affine("vs-vector-gap-centered", "centered, capsnet-shared minus vector-gap",
                   "few-10/capsnet-shared", "few-10/vector-gap", "centered_accuracy"),
        ),
    ),
    Claim(
        "smallnorb-azimuth",
        "Matrix capsules are more accurate than a CNN at novel azimuths.",
        f"smallNORB, familiar views matched: error 13.5% against 20.0%: +6.5 points ({HINTON}, "
        "Table 2)",
        tests=(
            *matched_viewpoints("azimuth"),
            *other_viewpoints("azimuth"),
            test(toys("trained-on-0-to-60-vs-cnn",
                      "trained on azimuths 0 to 60: matrix-capsnet minus the narrow CNN",
                      "gap-toys/matrix-capsnet", "gap-toys/cnn"),
                 "ours", "another", "paper", "narrow"),
            test(toys("trained-on-0-to-60-vs-cnn-bn",
                      "the same, minus the narrow CNN with batch normalization",
                      "gap-toys/matrix-capsnet", "gap-toys/cnn-bn"),
                 "ours", "another", "another", "narrow"),
            test(toys("trained-on-0-to-60-vs-cnn-gap",
                      "trained on azimuths 0 to 60: matrix-capsnet minus GAP-CNN",
                      "gap-toys/matrix-capsnet", "gap-toys/cnn-gap"),
                 "ours", "another", "another", "narrow"),
            test(toys("shapes-on-0-to-60-vs-cnn",
                      "five shapes, trained on azimuths 0 to 60: matrix-capsnet minus the narrow CNN",
                      "gap-shapes/matrix-capsnet", "gap-shapes/cnn"),
                 "ours", "another", "paper", "narrow"),
            test(toys("shapes-on-0-to-60-vs-cnn-gap",
                      "five shapes, trained on azimuths 0 to 60: matrix-capsnet minus GAP-CNN",
                      "gap-shapes/matrix-capsnet", "gap-shapes/cnn-gap"),
                 "ours", "another", "another", "narrow"),
            test(toys("shapes-vs-cnn", "five shapes: matrix-capsnet minus the narrow CNN",
                      "shapes/matrix-capsnet", "shapes/cnn"),
                 "ours", "another", "paper", "narrow"),
            test(toys("shapes-vs-cnn-gap", "five shapes: matrix-capsnet minus GAP-CNN",
                      "shapes/matrix-capsnet", "shapes/cnn-gap"),
                 "ours", "another", "another", "narrow"),
        ),
        measures=(
            toys("end-paper-small-vs-paper-cnn",
                 "the paper's small network minus the paper's CNN, at the end of training",
                 f"paper-azimuth/{SIZE}", "paper-azimuth/cnn-paper"),
            *(toys(f"end-matrix-capsnet-vs-{control}",
                   f"matrix-capsnet minus {TOY_NETWORKS[control]}, at the end of training",
                   "paper-azimuth/matrix-capsnet", f"paper-azimuth/{control}")
              for control in ("cnn", "cnn-bn", "cnn-dropout", "cnn-paper")),
            pair("interpolated-paper-small-vs-paper-cnn",
                 "the paper's small network minus the paper's CNN, which is interpolated between "
                 "its epochs to exactly the capsules' familiar accuracy",
                 "smallnorb", "paper-azimuth/cnn-paper", f"paper-azimuth/{SIZE}",
                 "novel when familiar", "points, reversed"),
            toys("paper-small-vs-matrix-capsnet",
                 "the paper's small network minus matrix-capsnet, which is smaller",
                 f"paper-azimuth/{SIZE}", "paper-azimuth/matrix-capsnet"),
        ),
        theirs=6.5,
        arms=toy_arms("azimuth"),
    ),
    Claim(
        "smallnorb-elevation",
        "Matrix capsules are more accurate than a CNN at novel elevations.",
        f"smallNORB, familiar views matched: error 12.3% against 17.8%: +5.5 points ({HINTON}, "
        "Table 2)",
        tests=(
            *matched_viewpoints("elevation"),
            *other_viewpoints("elevation"),
        ),
        measures=(
            toys("end-paper-small-vs-paper-cnn",
                 "the paper's small network minus the paper's CNN, at the end of training",
                 f"paper-elevation/{SIZE}", "paper-elevation/cnn-paper"),
            *(toys(f"end-matrix-capsnet-vs-{control}",
                   f"matrix-capsnet minus {TOY_NETWORKS[control]}, at the end of training",
                   "paper-elevation/matrix-capsnet", f"paper-elevation/{control}")
              for control in ("cnn", "cnn-bn", "cnn-dropout", "cnn-paper")),
            pair("interpolated-paper-small-vs-paper-cnn",
                 "the paper's small network minus the paper's CNN, which is interpolated between "
                 "its epochs to exactly the capsules' familiar accuracy",
                 "smallnorb", "paper-elevation/cnn-paper", f"paper-elevation/{SIZE}",
                 "novel when familiar", "points, reversed"),
            toys("paper-small-vs-matrix-capsnet",
                 "the paper's small network minus matrix-capsnet, which is smaller",
                 f"paper-elevation/{SIZE}", "paper-elevation/matrix-capsnet"),
        ),
        theirs=5.5,
        arms=toy_arms("elevation"),
    ),
    Claim(
        "smallnorb-vector-capsules",
        "On the first set of toys, vector capsules with shared matrices are ahead of a GAP-CNN "
        "at novel azimuths.",
        "no number",
        measures=(
            toys("first-set", "first set of toys, capsnet-shared minus cnn-gap",
                 "wide-azimuth/capsnet-shared", "wide-azimuth/cnn-gap"),
            toys("three-sets", "three other sets of toys",
                 f"{THREE_SETS}/capsnet-shared", f"{THREE_SETS}/cnn-gap"),
            toys("elevations", "novel elevations, first set",
                 "wide-elevation/capsnet-shared", "wide-elevation/cnn-gap"),
            toys("six-sets", "six further sets of toys",
                 f"{SIX_SETS}/capsnet-shared", f"{SIX_SETS}/cnn-gap"),
            toys("nine-sets", "all nine other sets",
                 f"{THREE_SETS}+{SIX_SETS}/capsnet-shared", f"{THREE_SETS}+{SIX_SETS}/cnn-gap"),
        ),
    ),
    Claim(
        "shapes",
        "On five simple shapes, no difference between matrix capsules and a GAP-CNN is "
        "measurable at novel azimuths.",
        "no number",
        measures=(
            toys("matrix-capsnet-vs-cnn-gap", "matrix-capsnet minus cnn-gap",
                 "shapes/matrix-capsnet", "shapes/cnn-gap"),
            toys("matrix-capsnet-vs-cnn", "matrix-capsnet minus cnn",
                 "shapes/matrix-capsnet", "shapes/cnn"),
            toys("nearest-vs-matrix-capsnet", "nearest neighbor minus matrix-capsnet",
                 "shapes/nearest", "shapes/matrix-capsnet"),
        ),
    ),
    Claim(
        "em-routing",
        "Three EM iterations are better than one in matrix capsules.",
        f"standard smallNORB, error with 1 and 3 iterations: 9.7%, 1.8%: +7.9 points ({HINTON}, "
        "Table 1)",
        tests=(
            test(toys("standard-matrix-capsnet-3-vs-1",
                      "matrix-capsnet, two epochs of the standard task (novel toys)",
                      "standard/matrix-capsnet-iters-3", "standard/matrix-capsnet-iters-1"),
                 "ours", "paper", "paper", "narrow"),
            test(toys("paper-small-3-vs-1-familiar",
                      "the paper's small network, trained on a third of the azimuths, tested there",
                      f"paper-azimuth/{SIZE}-iters-3", f"paper-azimuth/{SIZE}-iters-1", "familiar"),
                 "ours", "another", "paper", "narrow"),
        ),
        measures=(
            toys("matrix-head-2-vs-1-novel",
                 "matrix-head trained with 2 iterations minus with 1, novel azimuths",
                 "heads-azimuth/matrix-head", "heads-azimuth/matrix-head-iters-1"),
            toys("matrix-head-2-vs-1-novel-elevations", "the same, novel elevations",
                 "heads-elevation/matrix-head", "heads-elevation/matrix-head-iters-1"),
            toys("matrix-capsnet-tested-with-1-familiar",
                 "matrix-capsnet, tested as trained minus with 1 iteration, familiar azimuths",
                 "em-iterations/matrix-capsnet", "em-iterations-uniform/matrix-capsnet",
                 "familiar"),
            toys("matrix-head-tested-with-1-novel",
                 "matrix-head, tested as trained minus with 1 iteration, novel azimuths",
                 "em-iterations/matrix-head", "em-iterations-uniform/matrix-head"),
            toys("matrix-head-2-vs-1-familiar",
                 "matrix-head trained with 2 iterations minus with 1, familiar azimuths",
                 "heads-azimuth/matrix-head", "heads-azimuth/matrix-head-iters-1", "familiar"),
            toys("repeated-matrix-head-2-vs-1-novel",
                 "matrix-head trained with 2 iterations minus with 1, novel azimuths, repeated "
                 "on another machine",
                 "em-iterations/matrix-head", "heads-azimuth/matrix-head-iters-1"),
            toys("standard-matrix-capsnet-3-vs-2",
                 "matrix-capsnet trained with 3 iterations minus with 2, two epochs of the "
                 "standard task",
                 "standard/matrix-capsnet-iters-3", "standard/matrix-capsnet-iters-2"),
            toys("matrix-capsnet-2-vs-1-novel",
                 "matrix-capsnet trained with 2 iterations minus with 1, novel azimuths",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/matrix-capsnet-iters-1"),
            toys("matrix-capsnet-2-vs-1-familiar",
                 "matrix-capsnet trained with 2 iterations minus with 1, familiar azimuths",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/matrix-capsnet-iters-1",
                 "familiar"),
            toys("standard-matrix-capsnet-2-vs-1",
                 "matrix-capsnet trained with 2 iterations minus with 1, two epochs of the "
                 "standard task",
                 "standard/matrix-capsnet-iters-2", "standard/matrix-capsnet-iters-1"),
            toys("paper-small-2-vs-1-novel",
                 "the paper's small network trained with 2 iterations minus with 1, novel azimuths",
                 f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-1"),
            toys("paper-small-2-vs-3-familiar",
                 "the paper's small network trained with 2 iterations minus with 3, familiar azimuths",
                 f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-3", "familiar"),
            toys("paper-small-2-vs-3-novel",
                 "the paper's small network trained with 2 iterations minus with 3, novel azimuths",
                 f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-3"),
            toys("paper-small-3-vs-1-novel",
                 "the paper's small network trained with 3 iterations minus with 1, novel azimuths",
                 f"paper-azimuth/{SIZE}-iters-3", f"paper-azimuth/{SIZE}-iters-1"),
            toys("paper-small-2-vs-1-familiar",
                 "the paper's small network trained with 2 iterations minus with 1, familiar "
                 "azimuths",
                 f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-1", "familiar"),
        ),
        theirs=7.9,
    ),
    Claim(
        "background-activity",
        "Trained matrix capsules are more active over background than over the object.",
        "no number",
        measures=(
            background("primary",
                       "azimuth split, primary capsules, activation over background minus over "
                       "the toy",
                       "matrix-capsnet", "primary"),
            background("primary-spread-loss",
                       "spread loss, primary capsules, activation over background minus over "
                       "the toy",
                       "spread", "primary"),
            background("primary-elevation",
                       "elevation split, primary capsules, activation over background minus "
                       "over the toy",
                       "elevation", "primary"),
            background("primary-other-toys",
                       "another set of toys, primary capsules, activation over background "
                       "minus over the toy",
                       "toys2", "primary"),
            background("after-routing", "azimuth split, capsules after EM routing",
                       "matrix-capsnet", "conv"),
            background("after-routing-untrained", "before training, capsules after EM routing",
                       "matrix-capsnet", "conv", "before"),
            background("primary-untrained", "before training, primary capsules",
                       "matrix-capsnet", "primary", "before"),
            background("primary-paper-small",
                       "azimuth split, the paper's small network, primary capsules",
                       SIZE, "primary"),
        ),
    ),
    Claim(
        "attacks",
        "How far sign attacks (FGSM, BIM, PGD) reduce the accuracy of capsule networks and of CNNs.",
        f"curves, no number: less vulnerable in the white box, about as vulnerable in the black box "
        f"({HINTON}, section 5)",
        measures=(
            *attacked("smallnorb", "toys", "matrix-capsnet", "cnn"),
            *attacked("affnist", "digits", "capsnet", "cnn-dense"),
        ),
    ),
    Claim(
        "capsule-dimensions",
        "How well a linear map reads position, rotation, shear, scale and stroke thickness from a "
        "digit's capsule, and from a CNN's vector.",
        f"no number: pictures of dimensions that hold scale, thickness, skew, position ({SABOUR}, "
        "section 5.1)",
        measures=(
            *r_squared("x", "position x"),
            *r_squared("y", "position y"),
            *r_squared("rotation", "rotation"),
            *r_squared("shear", "shear"),
            *r_squared("scale_x", "scale x"),
            *r_squared("scale_y", "scale y"),
            *r_squared("thickness", "stroke thickness"),
            *r_squared("rotation", "rotation", "centered_differences"),
            *r_squared("shear", "shear", "centered_differences"),
            *r_squared("scale_x", "scale x", "centered_differences"),
            *r_squared("scale_y", "scale y", "centered_differences"),
            *r_squared("thickness", "stroke thickness", "centered_differences"),
        ),
    ),
    Claim(
        "confidence-on-noise",
        "For uniform noise the longest capsule is usually longer than for digits in a CapsNet with "
        "shared matrices and one iteration, and shorter in one with a matrix per position and three.",
        f"length is the probability that the entity is present ({SABOUR}, section 2)",
        measures=(
            auroc("capsnet-shared-longest",
                  "AUROC, digits against noise (chance 0.5): capsnet-shared, longest capsule",
                  "probes/capsnet-shared", "detection.noise.length"),
            auroc("capsnet-shared-margin", "capsnet-shared, difference of the two longest",
                  "probes/capsnet-shared", "detection.noise.margin"),
            auroc("capsnet-longest", "capsnet, longest capsule",
                  "probes/capsnet", "detection.noise.length"),
            auroc("vector-gap-longest", "vector-gap, longest vector",
                  "probes/vector-gap", "detection.noise.length"),
            auroc("cnn-gap-probability", "cnn-gap, largest softmax probability",
                  "probes/cnn-gap", "detection.noise.probability"),
        ),
        quick=(
            auroc("pretrained-longest", "pretrained capsnet-shared, longest capsule",
                  "probes/pretrained-capsnet-shared", "detection.noise.length"),
            auroc("pretrained-margin", "pretrained capsnet-shared, difference of the two longest",
                  "probes/pretrained-capsnet-shared", "detection.noise.margin"),
        ),
    ),
)
# README's table: claim, its sentence with a link to its section, the paper's number
TABLE = (
    ("multimnist-accuracy", "[Classifies two overlapping digits](docs/reference/claims.md#multimnist-accuracy)",
     "94.8%"),
    ("multimnist-cnn", "[... better than a CNN](docs/reference/claims.md#multimnist-cnn)", "+2.9"),
    ("multimnist-routing",
     "[Three routing iterations beat one](docs/reference/claims.md#multimnist-routing)", "+2.3"),
    ("mnist", "[Classifies MNIST](docs/reference/claims.md#mnist)", "99.75%"),
    ("affnist-translation",
     "[More accurate on affine digits](docs/reference/claims.md#affnist-translation) than a CNN", "+13"),
    ("smallnorb-azimuth",
     "[Matrix capsules beat a CNN](docs/reference/claims.md#smallnorb-azimuth) at novel azimuths", "+6.5"),
    ("smallnorb-elevation", "[... and at novel elevations](docs/reference/claims.md#smallnorb-elevation)",
     "+5.5"),
    ("em-routing", "[Three EM iterations beat one](docs/reference/claims.md#em-routing) in matrix capsules",
     "+7.9"))
# README's names of nearest tests, "CLAIM TEST": a few words; of other tests their labels
SHORT = {
    "multimnist-accuracy paper-pairs-recomputed": "deeper network, paper's pairs, recomputed statistics",
    "multimnist-cnn paper-pairs-recomputed-vs-gap-cnn": "deeper CapsNet minus GAP-CNN",
    "multimnist-cnn paper-pairs-recomputed-vs-tuned-gap-cnn": "deeper CapsNet minus tuned GAP-CNN",
    "multimnist-routing paper-pairs-recomputed": "deeper network, paper's pairs",
    "mnist paper-network": "the paper's network, 15 epochs",
    "affnist-translation matched-vs-max-pooling": "minus CNN with max pooling, matched",
    "smallnorb-azimuth matched-matrix-capsnet-paper-vs-cnn-paper": "small network minus paper's CNN, matched",
    "smallnorb-elevation matched-matrix-capsnet-paper-vs-cnn-paper": "small network minus paper's CNN, matched",
    "em-routing standard-matrix-capsnet-3-vs-1": "small network, settings chosen for two"}
BY_NAME = {claim.name: claim for claim in CLAIMS}


def marks(claim):
    """Return {name: mark} of what a document can ask of a claim"""
    return {one.name: one.mark for one in (*claim.tests, *claim.measures, *claim.quick)}


def comparisons(claim):
    """Return the measures of a claim: its tests, and what else was measured"""
    return (*claim.tests, *claim.measures)
