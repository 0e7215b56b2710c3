"""The claims of the papers that are tested here, and what was measured of each. reproduce.py lists
and checks them; docs/claims.md has a section for each.

A measure has a name, which is unique within its claim, a label, and a mark as results/render.py
reads it: EXPERIMENT SETTING[ minus SETTING], KEY[, STYLE]. A document refers to it by its name,
CLAIM NAME. The name says what is compared: the condition, one network, vs the other, the metric;
what all measures of a claim have in common is left out.

Each claim has one or two primary comparisons, chosen by hand: (a) under the paper's condition, as
far as it could be had, against the paper's kind of control; (b) against the strongest control that
we have. The verdict follows from (a) alone (results/render.py, verdict). A finding of our own,
where the papers say nothing, has none.
"""
from typing import NamedTuple

SABOUR, HINTON, GU = "Sabour et al. 2017", "Hinton et al. 2018", "Gu & Tresp 2020"


class Measure(NamedTuple):
    """One number: of a setting, or the difference between two"""
    name: str                      # unique within the claim
    label: str
    mark: str


class Primary(NamedTuple):
    """A primary comparison. With `reversed` in its mark the papers' side is the setting after
    `minus`, or the lower number."""
    name: str                      # of the measure that it repeats, or one of its own
    label: str                     # in README, before the number
    mark: str
    reason: str                    # why this one
    cell: str = "{label}: {number}"                    # what README shows; {mark}: any other number


class Claim(NamedTuple):
    """A claim: what the paper reports, and what was measured"""
    name: str
    sentence: str
    paper: str                     # source and number
    measures: tuple                # of Measure: all comparisons
    quick: tuple = ()              # of Measure: networks in weights/, in place of trained ones
    a: Primary = None
    b: Primary = None
    theirs: float = None           # the paper's number, in percent or percentage points
    chance: float = 0.0            # the number that says that there is no effect


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


def stopped(name, label, cnn):
    """Return the measure of matrix-capsnet minus a CNN that was stopped at its familiar accuracy"""
    capsules = cnn.split("/")[0] + "/matrix-capsnet"
    return pair(name, label, "smallnorb", cnn, capsules, "novel once familiar", "points, reversed")


def background(name, label, setting, layer, when="after"):
    """Return the measure of a layer's activation over background minus over the toy, after or
    before the training"""
    setting = f"background-activity/{setting}"
    key = f"background_activity.{when}.a.{layer}"
    return pair(name, label, "smallnorb", setting, setting, f"{key}.0 vs {key}.1", "3 digits")


SIZE = "matrix-capsnet-paper"      # of the paper's small network
THREE_SETS = "toys2-azimuth+toys3-azimuth+toys4-azimuth"
SIX_SETS = "+".join(f"toys{toy_seed}-azimuth" for toy_seed in range(5, 11))
CLAIMS = (
    Claim(
        "multimnist-accuracy",
        "A capsule network classifies both of two overlapping digits.",
        f"exact match 94.8% ({SABOUR}, Table 1)",
        measures=(
            of("paper-pairs", "paper's protocol, 1.2 million pairs",
               "multimnist", "main/paper-protocol", "test_exact_match", "percent"),
            of("harder-pairs", "harder pairs (IoU >= 0.8), 1.2 million",
               "multimnist", "main/residual", "test_exact_match", "percent"),
            of("default-network", "harder pairs, 72,000: the default command",
               "multimnist", "main/deep", "test_exact_match", "percent"),
            of("paper-pairs-long", "paper's protocol, 1.92 million pairs",
               "multimnist", "main/paper-protocol-long", "test_exact_match", "percent, range"),
            of("paper-pairs-recomputed", "the same, normalization statistics recomputed",
               "multimnist", "weights/paper-protocol-long-recomputed", "test_exact_match",
               "percent"),
        ),
        quick=(
            of("pretrained-paper-pairs",
               "paper's protocol, 1.92 million pairs, normalization statistics recomputed",
               "multimnist", "weights/paper-protocol-long-recomputed", "test_exact_match",
               "percent"),
            of("pretrained-harder-pairs", "pretrained network, harder pairs (IoU >= 0.8)",
               "multimnist", "weights/residual", "test_exact_match", "percent"),
        ),
        a=Primary(
            name="paper-pairs",
            label="a deeper network, paper's pairs",
            mark="multimnist main/paper-protocol, test_exact_match, percent",
            reason="the length and the seeds that were planned first",
        ),
        theirs=94.8,
    ),
    Claim(
        "multimnist-cnn",
        "The capsule network classifies more pairs of digits than a CNN.",
        f"94.8% against 91.9%: +2.9 points ({SABOUR}, Table 1)",
        measures=(
            multi("default-vs-dense-cnn",
                  "default CapsNet minus CNN with a dense layer, 72,000 pairs",
                  "main/deep", "control/cnn"),
            multi("default-vs-vector-dense",
                  "default CapsNet minus ten vectors from a dense layer (vector-dense)",
                  "main/deep", "control/vector-dense"),
            multi("paper-pairs-vs-gap-cnn",
                  "paper's protocol, 1.2 million pairs: CapsNet minus CNN with GAP",
                  "main/paper-protocol", "control/cnn-paper-protocol"),
            multi("default-vs-gap-cnn", "default CapsNet minus CNN with GAP, 72,000 pairs",
                  "main/deep", "control/cnn-head-gap"),
            multi("default-vs-tuned-gap-cnn",
                  "default CapsNet minus CNN with GAP, 22 configurations tried for each",
                  "main/deep", "control/cnn-head-gap-tuned"),
            multi("one-iteration-vs-tuned-gap-cnn", "CapsNet with 1 iteration minus (b)'s CNN",
                  "control/iters-1", "control/cnn-head-gap-tuned"),
            multi("no-reconstruction-vs-tuned-gap-cnn",
                  "CapsNet without reconstruction minus (b)'s CNN",
                  "control/no-recon", "control/cnn-head-gap-tuned"),
            multi("half-digit-vs-gap-cnn", "`half-digit`, 72,000 pairs: CapsNet minus CNN with GAP",
                  "half-digit/iters-3", "half-digit/cnn-head-gap"),
            multi("half-digit-vs-dense-cnn",
                  "`half-digit`, 72,000 pairs: CapsNet minus CNN with a dense layer",
                  "half-digit/iters-3", "half-digit/cnn"),
            multi("paper-pairs-recomputed-vs-gap-cnn",
                  "paper's protocol, 1.92 million pairs, statistics recomputed: CapsNet minus "
                  "CNN with GAP",
                  "weights/paper-protocol-long-recomputed",
                  "weights/cnn-paper-protocol-long-recomputed"),
        ),
        a=Primary(
            name="default-vs-dense-cnn",
            label="CNN with a dense layer, tuned less",
            mark="multimnist main/deep minus control/cnn, test_exact_match, points",
            reason=(
                "CapsNet minus CNN; the paper's CNN has dense layers, too; 3 configurations, "
                "the CapsNet 22"
            ),
        ),
        b=Primary(
            name="default-vs-tuned-gap-cnn",
            label="CNN with GAP, tuned as much",
            mark=(
                "multimnist main/deep minus control/cnn-head-gap-tuned, test_exact_match, "
                "points"
            ),
            reason="CapsNet minus CNN; 22 configurations were tried for each",
        ),
        theirs=2.9,
    ),
    Claim(
        "multimnist-routing",
        "Three routing iterations are better than one.",
        f"94.8% against 92.5%: +2.3 points ({SABOUR}, Table 1)",
        measures=(
            multi("default-network", "default network, 72,000 pairs: 3 iterations minus 1",
                  "main/deep", "control/iters-1"),
            multi("half-digit",
                  "3 iterations minus 1: `half-digit` (capsules see half a digit), 72,000 pairs",
                  "half-digit/iters-3", "half-digit/iters-1"),
            multi("half-digit-long", "3 iterations minus 1: `half-digit`, 360,000 pairs",
                  "half-digit-long/iters-3", "half-digit-long/iters-1"),
            multi("residual",
                  "3 iterations minus 1: `residual`, a deeper network, 1.2 million pairs",
                  "main/residual", "control/residual-iters-1"),
            affine("affine-digits", "3 iterations minus 1: affine digits, capsnet",
                   "backbone/capsnet", "backbone/capsnet-iters-1"),
            toys("novel-azimuths", "3 iterations minus 1: rendered toys, novel azimuths, capsnet",
                 "heads-azimuth/capsnet", "heads-azimuth/capsnet-iters-1"),
            multi("half-digit-tested-with-1",
                  "`half-digit`, both tested with 1 iteration: trained with 3 minus with 1",
                  "half-digit-uniform/iters-3", "half-digit/iters-1"),
            multi("classic",
                  "3 iterations minus 1: `classic` (the paper's network, narrow), 72,000 pairs",
                  "main/classic", "control/classic-iters-1"),
            multi("paper-pairs-recomputed",
                  "3 iterations minus 1: `residual`, paper's protocol, 1.92 million pairs, "
                  "statistics recomputed",
                  "weights/paper-protocol-long-recomputed",
                  "weights/paper-protocol-long-iters-1-recomputed"),
        ),
        a=Primary(
            name="default-network",
            label="default network, 3 against 1",
            mark="multimnist main/deep minus control/iters-1, test_exact_match, points",
            reason="the default network with one setting changed, ten seeds",
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
        "multimnist-reconstruction",
        "Each of two overlapping digits is reconstructed from its own capsule.",
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
            of("mean-image", "reconstruction MSE per pixel, mean image",
               "multimnist", "main/deep", "baseline_recon_mse", "4 digits"),
            multi("vs-cnn-vectors-exact-match", "exact match, CapsNet minus cnn-vectors",
                  "main/deep", "control/cnn-vectors"),
            multi("3-vs-1-iterations",
                  "reconstruction MSE per pixel, CapsNet with 3 iterations minus with 1",
                  "main/deep", "control/iters-1", "test_recon_mse", "5 digits"),
        ),
        a=Primary(
            name="vs-mean-image",
            label="error",
            mark=(
                "multimnist main/deep minus main/deep, test_recon_mse vs baseline_recon_mse, 4 "
                "digits, reversed"
            ),
            reason=(
                "of the mean image minus of the CapsNet; the best constant image needs no "
                "capsule"
            ),
            cell=(
                "MSE {multimnist main/deep, test_recon_mse, 4 digits, plain}, of the mean "
                "image {multimnist main/deep, baseline_recon_mse, 4 digits, plain} (n = 10)"
            ),
        ),
        b=Primary(
            name="vs-vector-dense",
            label="error",
            mark=(
                "multimnist main/deep minus control/vector-dense, test_recon_mse, 4 digits, "
                "reversed"
            ),
            reason=(
                "of a CNN's ten vectors with squash, margin loss and the same decoder "
                "(`vector-dense`) minus of the CapsNet"
            ),
            cell=(
                "CNN's ten vectors: MSE {multimnist control/vector-dense, test_recon_mse, 4 "
                "digits, plain} (n = 5)"
            ),
        ),
    ),
    Claim(
        "mnist",
        "A capsule network classifies MNIST with hardly an error.",
        f"test accuracy 99.75 +- 0.005%, 1 iteration 99.71% ({SABOUR}, Table 1)",
        measures=(
            of("small-network", "small network with 1 iteration",
               "affnist", "mnist/capsnet-shared", "test_accuracy", "percent, 2 digits"),
            of("paper-network",
               "the paper's network (8.2 million parameters, 3 iterations), 15 epochs",
               "affnist", "mnist/capsnet-paper", "test_accuracy", "percent, 2 digits"),
        ),
        a=Primary(
            name="paper-network",
            label="their network, 15 epochs",
            mark="affnist mnist/capsnet-paper, test_accuracy, percent, 2 digits",
            reason="the paper's network, three iterations; trained for 15 epochs",
        ),
        theirs=99.75,
    ),
    Claim(
        "affnist-translation",
        "Of two networks that classify translated digits equally well, the capsule network is "
        "more accurate on affine digits.",
        f"affNIST: 79% against 66%: +13 points ({SABOUR}, section 5.2)",
        measures=(
            affine("matched-vs-narrow-cnn",
                   "affine digits at any position, CapsNet minus narrow CNN",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn"),
            affine("matched-vs-wide-cnn",
                   "the same, CNN with convolutions as wide as the CapsNet's",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn-64"),
            affine("matched-vs-narrow-cnn-translated",
                   "translated digits at any position, narrow CNN",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn", "any_position_accuracy"),
            affine("matched-vs-max-pooling",
                   "affine digits, any position, CapsNet minus CNN with max pooling (cnn-dense)",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn-dense"),
            affine("matched-vs-wide-cnn-translated",
                   "translated digits at any position, CNN as wide as the CapsNet",
                   "matched-accuracy/capsnet", "matched-accuracy/cnn-64", "any_position_accuracy"),
            affine("backbone-capsnet-shared-vs-cnn-gap",
                   "affine digits, any position, on a modern backbone, not matched: "
                   "capsnet-shared minus cnn-gap",
                   "backbone/capsnet-shared", "backbone/cnn-gap"),
            affine("backbone-capsnet-vs-cnn-gap",
                   "the same, capsnet with 3 iterations minus cnn-gap",
                   "backbone/capsnet", "backbone/cnn-gap"),
            affine("backbone-capsnet-vs-cnn-dense",
                   "the same, capsnet with 3 iterations minus cnn-dense (max pooling)",
                   "backbone/capsnet", "backbone/cnn-dense"),
        ),
        a=Primary(
            name="matched-vs-max-pooling",
            label="CNN with max pooling, their kind",
            mark=(
                "affnist matched-accuracy/capsnet minus matched-accuracy/cnn-dense, "
                "affine_accuracy, points"
            ),
            reason=(
                "CapsNet minus CNN; the paper's CNN had max pooling; both stopped at the same "
                "accuracy"
            ),
        ),
        b=Primary(
            name="backbone-capsnet-vs-vector-gap",
            label="pooled vectors; CapsNet with a matrix per position",
            mark="affnist backbone/capsnet minus backbone/vector-gap, affine_accuracy, points",
            reason="`capsnet` minus `vector-gap`: no primary capsules, no routing",
        ),
        theirs=13.0,
    ),
    Claim(
        "affnist-centered",
        "The capsule network's advantage is robustness to affine transformations.",
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
        a=Primary(
            name="matched-vs-max-pooling",
            label="CNN with max pooling, their kind",
            mark=(
                "affnist matched-accuracy/capsnet minus matched-accuracy/cnn-dense, "
                "centered_accuracy, points"
            ),
            reason="CapsNet minus CNN; at the center no position is new",
        ),
        b=Primary(
            name="backbone-capsnet-vs-vector-gap",
            label="pooled vectors; CapsNet with a matrix per position",
            mark="affnist backbone/capsnet minus backbone/vector-gap, centered_accuracy, points",
            reason="`capsnet` minus `vector-gap`: no primary capsules, no routing",
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
        measures=(
            toys("matrix-capsnet-vs-cnn",
                 "matrix-capsnet minus cnn, a small version of the paper's CNN without its "
                 "dropout",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn"),
            toys("matrix-capsnet-vs-cnn-bn",
                 "matrix-capsnet minus cnn-bn, the same with batch normalization",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-bn"),
            toys("matrix-capsnet-vs-cnn-familiar", "familiar azimuths, matrix-capsnet minus cnn",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn", "familiar"),
            toys("three-sets-matrix-capsnet-vs-cnn",
                 "three other sets of toys, matrix-capsnet minus cnn",
                 f"{THREE_SETS}/matrix-capsnet", f"{THREE_SETS}/cnn"),
            toys("matrix-capsnet-vs-cnn-gap",
                 "our toys, matrix-capsnet minus cnn-gap, which is larger",
                 "paper-azimuth/matrix-capsnet", "heads-azimuth/cnn-gap"),
            stopped("matched-matrix-capsnet-vs-cnn",
                    "at matched familiar accuracy, matrix-capsnet minus cnn (stopped)",
                    "paper-azimuth/cnn"),
            stopped("matched-matrix-capsnet-vs-cnn-bn",
                    "at matched familiar accuracy, matrix-capsnet minus cnn-bn (stopped)",
                    "paper-azimuth/cnn-bn"),
            toys("matched-matrix-capsnet-vs-cnn-dropout",
                 "at matched familiar accuracy, matrix-capsnet (stopped) minus cnn with "
                 "dropout of 0.5",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-dropout",
                 "novel once familiar"),
            toys("matrix-capsnet-vs-cnn-dropout",
                 "at the end of training, not matched, matrix-capsnet minus cnn with dropout "
                 "of 0.5",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-dropout"),
            toys("matrix-capsnet-vs-paper-cnn",
                 "matrix-capsnet minus the paper's CNN, with its width and dropout (4.25M "
                 "parameters)",
                 "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-paper"),
            stopped("matched-matrix-capsnet-vs-paper-cnn",
                    "at matched familiar accuracy, matrix-capsnet minus that CNN (stopped)",
                    "paper-azimuth/cnn-paper"),
            toys("paper-small-vs-paper-cnn",
                 "at the end of training, not matched, (a)'s capsules minus (a)'s CNN",
                 f"paper-azimuth/{SIZE}", "paper-azimuth/cnn-paper"),
            toys("paper-small-vs-matrix-capsnet",
                 "(a)'s capsules minus matrix-capsnet, which is smaller",
                 f"paper-azimuth/{SIZE}", "paper-azimuth/matrix-capsnet"),
            pair("interpolated-paper-small-vs-paper-cnn",
                 "(a), the CNN interpolated between its epochs to exactly the capsules' "
                 "familiar accuracy",
                 "smallnorb", "paper-azimuth/cnn-paper", f"paper-azimuth/{SIZE}",
                 "novel when familiar", "points, reversed"),
            toys("paper-small-vs-cnn-gap",
                 "(a)'s capsules minus a GAP-CNN with half as many parameters",
                 f"paper-azimuth/{SIZE}", "heads-azimuth/cnn-gap"),
        ),
        a=Primary(
            name="matched-paper-small-vs-paper-cnn",
            label="their small network, their CNN, about matched",
            mark=(
                f"smallnorb paper-azimuth/cnn-paper minus paper-azimuth/{SIZE}, novel once "
                "familiar, points, reversed"
            ),
            reason=(
                "the paper's small network minus its CNN; the CNN at its first epoch with the "
                "capsules' familiar accuracy; the paper stopped its capsules, which were the "
                "more accurate"
            ),
        ),
        b=Primary(
            name="paper-small-vs-wide-cnn-gap",
            label="larger GAP-CNN, not matched",
            mark=f"smallnorb paper-azimuth/{SIZE} minus wide-azimuth/cnn-gap, novel, points",
            reason="capsules minus CNN, the most accurate with ten seeds",
        ),
        theirs=6.5,
    ),
    Claim(
        "smallnorb-elevation",
        "Matrix capsules are more accurate than a CNN at novel elevations.",
        f"smallNORB, familiar views matched: error 12.3% against 17.8%: +5.5 points ({HINTON}, "
        "Table 2)",
        measures=(
            toys("matrix-capsnet-vs-cnn",
                 "matrix-capsnet minus cnn, a small version of the paper's CNN without its "
                 "dropout",
                 "paper-elevation/matrix-capsnet", "paper-elevation/cnn"),
            toys("matrix-capsnet-vs-cnn-bn",
                 "matrix-capsnet minus cnn-bn, the same with batch normalization",
                 "paper-elevation/matrix-capsnet", "paper-elevation/cnn-bn"),
            toys("matched-matrix-capsnet-vs-cnn-dropout",
                 "at matched familiar accuracy, matrix-capsnet (stopped) minus cnn with "
                 "dropout of 0.5",
                 "paper-elevation/matrix-capsnet", "paper-elevation/cnn-dropout",
                 "novel once familiar"),
            toys("matrix-capsnet-vs-cnn-dropout",
                 "at the end of training, not matched, matrix-capsnet minus cnn with dropout "
                 "of 0.5",
                 "paper-elevation/matrix-capsnet", "paper-elevation/cnn-dropout"),
            toys("matrix-capsnet-vs-paper-cnn",
                 "matrix-capsnet minus the paper's CNN, with its width and dropout (4.25M "
                 "parameters)",
                 "paper-elevation/matrix-capsnet", "paper-elevation/cnn-paper"),
            stopped("matched-matrix-capsnet-vs-paper-cnn",
                    "at matched familiar accuracy, matrix-capsnet minus that CNN (stopped)",
                    "paper-elevation/cnn-paper"),
            toys("paper-small-vs-matrix-capsnet",
                 "(a)'s capsules minus matrix-capsnet, which is smaller",
                 f"paper-elevation/{SIZE}", "paper-elevation/matrix-capsnet"),
            pair("interpolated-paper-small-vs-paper-cnn",
                 "(a), the CNN interpolated between its epochs to exactly the capsules' "
                 "familiar accuracy",
                 "smallnorb", "paper-elevation/cnn-paper", f"paper-elevation/{SIZE}",
                 "novel when familiar", "points, reversed"),
            toys("paper-small-vs-cnn-gap",
                 "(a)'s capsules minus a GAP-CNN with half as many parameters",
                 f"paper-elevation/{SIZE}", "heads-elevation/cnn-gap"),
        ),
        a=Primary(
            name="matched-paper-small-vs-paper-cnn",
            label="their small network, their CNN, about matched",
            mark=(
                f"smallnorb paper-elevation/cnn-paper minus paper-elevation/{SIZE}, novel once "
                "familiar, points, reversed"
            ),
            reason=(
                "the paper's small network minus its CNN; the CNN at its first epoch with the "
                "capsules' familiar accuracy; the paper stopped its capsules, which were the "
                "more accurate"
            ),
        ),
        b=Primary(
            name="paper-small-vs-paper-cnn",
            label="their CNN, not matched",
            mark=(
                f"smallnorb paper-elevation/{SIZE} minus paper-elevation/cnn-paper, novel, "
                "points"
            ),
            reason="capsules minus CNN, the most accurate at novel elevations",
        ),
        theirs=5.5,
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
        "Two EM iterations are better than one in matrix capsules.",
        f"standard smallNORB, error with 1 and 2 iterations: 9.7%, 2.2%: 7.5 points ({HINTON}, "
        "Table 1)",
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
                 "(a)'s network trained with 2 iterations minus with 1, novel azimuths",
                 f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-1"),
            toys("paper-small-2-vs-3-familiar",
                 "(a)'s network trained with 2 iterations minus with 3, familiar azimuths",
                 f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-3", "familiar"),
            toys("paper-small-2-vs-3-novel",
                 "(a)'s network trained with 2 iterations minus with 3, novel azimuths",
                 f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-3"),
            toys("paper-small-3-vs-1-familiar",
                 "(a)'s network trained with 3 iterations minus with 1, familiar azimuths",
                 f"paper-azimuth/{SIZE}-iters-3", f"paper-azimuth/{SIZE}-iters-1", "familiar"),
            toys("paper-small-3-vs-1-novel",
                 "(a)'s network trained with 3 iterations minus with 1, novel azimuths",
                 f"paper-azimuth/{SIZE}-iters-3", f"paper-azimuth/{SIZE}-iters-1"),
        ),
        a=Primary(
            name="paper-small-2-vs-1-familiar",
            label="2 iterations against 1, familiar azimuths",
            mark=(
                f"smallnorb paper-azimuth/{SIZE} minus paper-azimuth/{SIZE}-iters-1, familiar, "
                "points"
            ),
            reason=(
                "the paper's small network; the paper's test has familiar viewpoints; settings "
                "chosen with two iterations"
            ),
        ),
        theirs=7.5,
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
        "confidence-on-noise",
        "A capsule's length is the probability that its entity is present.",
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
        a=Primary(
            name="capsnet-longest-mean",
            label="AUROC, digits over noise",
            mark="affnist probes/capsnet, detection.noise.length, 2 digits",
            reason="three iterations and a matrix per position, as in the paper",
            cell=(
                "the paper's routing, AUROC: {affnist probes/capsnet, detection.noise.length, "
                "2 digits, range} (range, n = 5)"
            ),
        ),
        b=Primary(
            name="cnn-gap-probability",
            label="CNN with softmax",
            mark="affnist probes/cnn-gap, detection.noise.probability, 2 digits, range",
            reason="what a CNN gives in place of a length",
            cell=(
                "CNN with softmax: {affnist probes/cnn-gap, detection.noise.probability, 2 "
                "digits, range} (range, n = 5)"
            ),
        ),
        chance=0.5,
    ),
)
# README's table: claim, its sentence with a link to its section, the paper's number
TABLE = (
    ("multimnist-accuracy", "[Classifies two overlapping digits](docs/claims.md#multimnist-accuracy)", "94.8%"),
    ("multimnist-cnn", "[... better than a CNN](docs/claims.md#multimnist-cnn)", "+2.9"),
    ("multimnist-routing", "[Three routing iterations beat one](docs/claims.md#multimnist-routing)", "+2.3"),
    ("multimnist-reconstruction", "[Each digit is reconstructed](docs/claims.md#multimnist-reconstruction) from its "
     "capsule", "pictures"),
    ("mnist", "[Classifies MNIST](docs/claims.md#mnist)", "99.75%"),
    ("affnist-translation", "[More accurate on affine digits](docs/claims.md#affnist-translation) than a CNN", "+13"),
    ("affnist-centered", "[... also at the center](docs/claims.md#affnist-centered), where only shapes are new",
     "concluded from +13"),
    ("smallnorb-azimuth", "[Matrix capsules beat a CNN](docs/claims.md#smallnorb-azimuth) at novel azimuths of toys",
     "+6.5"),
    ("smallnorb-elevation", "[... and at novel elevations](docs/claims.md#smallnorb-elevation)", "+5.5"),
    ("em-routing", "[Two EM iterations beat one](docs/claims.md#em-routing) in matrix capsules", "+7.5"),
    ("confidence-on-noise", "[A capsule's length tells digits from noise](docs/claims.md#confidence-on-noise)",
     "a definition"))
BY_NAME = {claim.name: claim for claim in CLAIMS}


def marks(claim):
    """Return {name: mark} of what a document can ask of a claim: its measures, and its primary
    comparisons, by their names and as a and b. Where a primary comparison repeats a measure with
    the other sign, the name is that of the measure."""
    found = {measure.name: measure.mark for measure in (*claim.measures, *claim.quick)}
    for letter, primary in (("a", claim.a), ("b", claim.b)):
        if primary is not None:
            found.setdefault(primary.name, primary.mark)
            found[letter] = primary.mark
    return found


def comparisons(claim):
    """Return all measures of a claim, its primary comparisons first"""
    primary = [Measure(one.name, one.label, one.mark) for one in (claim.a, claim.b) if one]
    repeated = {one.name for one in primary}
    return (*primary, *(measure for measure in claim.measures if measure.name not in repeated))
