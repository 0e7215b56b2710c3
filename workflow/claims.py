"""The claims of the papers that are tested here, and what was measured of each. reproduce.py lists and checks them;
docs/claims.md has a section for each.

A measure is a label and a mark as results/render.py reads it: EXPERIMENT SETTING[ minus SETTING], KEY[, STYLE]. Each
claim has one or two primary comparisons, chosen by hand: (a) under the paper's condition, as far as it could be had,
against the paper's kind of control; (b) against the strongest control that we have. The verdict follows from (a) alone
(results/render.py, verdict). A finding of our own, where the papers say nothing, has none.
"""
from typing import NamedTuple

SABOUR, HINTON, GU = "Sabour et al. 2017", "Hinton et al. 2018", "Gu & Tresp 2020"


class Primary(NamedTuple):
    """A primary comparison. With `reversed` in its mark the papers' side is the setting after `minus`, or the lower
    number"""
    label: str                     # in README, before the number
    mark: str
    reason: str                    # why this one
    cell: str = "{label}: {number}"                    # what README shows; {mark}: any other number


class Claim(NamedTuple):
    """A claim: what the paper reports, and what was measured"""
    name: str
    sentence: str
    paper: str                     # source and number
    measures: tuple                # ((label, mark), ...): all comparisons
    quick: tuple = ()              # measures of the networks in weights/, in place of trained ones
    a: Primary = None
    b: Primary = None
    theirs: float = None           # the paper's number, in percent or percentage points
    chance: float = 0.0            # the number that says that there is no effect


def pair(label, experiment, one, other, key, style="points"):
    """Return the measure of a difference between two settings, paired by seed"""
    return label, f"{experiment} {one} minus {other}, {key}, {style}"


def of(label, experiment, setting, key, style="3 digits"):
    """Return the measure of one setting"""
    return label, f"{experiment} {setting}, {key}, {style}"


def multi(label, one, other, key="test_exact_match", style="points"):
    return pair(label, "multimnist", one, other, key, style)


def affine(label, one, other, key="affine_accuracy"):
    return pair(label, "affnist", one, other, key)


def auroc(label, setting, key):
    """Return the measure of an AUROC: the range over the seeds, since a t interval can leave 0..1"""
    return of(label, "affnist", setting, key, "2 digits, range")


def toys(label, one, other, key="novel"):
    return pair(label, "smallnorb", one, other, key)


def stopped(label, cnn):
    """Return the measure of matrix-capsnet minus a CNN that was stopped at its familiar accuracy"""
    capsules = cnn.split("/")[0] + "/matrix-capsnet"
    return pair(label, "smallnorb", cnn, capsules, "novel once familiar", "points, reversed")


AFTER, BEFORE = "background_activity.after.a", "background_activity.before.a"
SIZE = "matrix-capsnet-paper"      # of the paper's small network
THREE_SETS = "toys2-azimuth+toys3-azimuth+toys4-azimuth"
SIX_SETS = "+".join(f"toys{toy_seed}-azimuth" for toy_seed in range(5, 11))
CLAIMS = (
    Claim("multimnist-accuracy", "A capsule network classifies both of two overlapping digits.",
          f"exact match 94.8% ({SABOUR}, Table 1)",
          (of("paper's protocol, 1.2 million pairs", "multimnist", "main/paper-protocol", "test_exact_match",
              "percent"),
           of("harder pairs (IoU >= 0.8), 1.2 million", "multimnist", "main/residual", "test_exact_match", "percent"),
           of("harder pairs, 72,000: the default command", "multimnist", "main/deep", "test_exact_match", "percent"),
           of("paper's protocol, 1.92 million pairs", "multimnist", "main/paper-protocol-long", "test_exact_match",
              "percent, range"),
           of("the same, normalization statistics recomputed", "multimnist", "weights/paper-protocol-long-recomputed",
              "test_exact_match", "percent")),
          (of("paper's protocol, 1.92 million pairs, normalization statistics recomputed", "multimnist",
              "weights/paper-protocol-long-recomputed", "test_exact_match", "percent"),
           of("pretrained network, harder pairs (IoU >= 0.8)", "multimnist", "weights/residual", "test_exact_match",
              "percent"),),
          a=Primary("a deeper network, paper's pairs", "multimnist main/paper-protocol, test_exact_match, percent",
                    "the length and the seeds that were planned first"), theirs=94.8),
    Claim("multimnist-cnn", "The capsule network classifies more pairs of digits than a CNN.",
          f"94.8% against 91.9%: +2.9 points ({SABOUR}, Table 1)",
          (multi("default CapsNet minus CNN with a dense layer, 72,000 pairs", "main/deep", "control/cnn"),
           multi("default CapsNet minus ten vectors from a dense layer (vector-dense)", "main/deep",
                 "control/vector-dense"),
           multi("paper's protocol, 1.2 million pairs: CapsNet minus CNN with GAP", "main/paper-protocol",
                 "control/cnn-paper-protocol"),
           multi("default CapsNet minus CNN with GAP, 72,000 pairs", "main/deep", "control/cnn-head-gap"),
           multi("default CapsNet minus CNN with GAP, 22 configurations tried for each", "main/deep",
                 "control/cnn-head-gap-tuned"),
           multi("CapsNet with 1 iteration minus (b)'s CNN", "control/iters-1", "control/cnn-head-gap-tuned"),
           multi("CapsNet without reconstruction minus (b)'s CNN", "control/no-recon", "control/cnn-head-gap-tuned"),
           multi("`half-digit`, 72,000 pairs: CapsNet minus CNN with GAP", "half-digit/iters-3",
                 "half-digit/cnn-head-gap"),
           multi("`half-digit`, 72,000 pairs: CapsNet minus CNN with a dense layer", "half-digit/iters-3",
                 "half-digit/cnn"),
           multi("paper's protocol, 1.92 million pairs, statistics recomputed: CapsNet minus CNN with GAP",
                 "weights/paper-protocol-long-recomputed", "weights/cnn-paper-protocol-long-recomputed")),
          a=Primary("CNN with a dense layer, tuned less",
                    "multimnist main/deep minus control/cnn, test_exact_match, points",
                    "CapsNet minus CNN; the paper's CNN has dense layers, too; 3 configurations, the CapsNet 22"),
          b=Primary("CNN with GAP, tuned as much", "multimnist main/deep minus control/cnn-head-gap-tuned, "
                    "test_exact_match, points", "CapsNet minus CNN; 22 configurations were tried for each"),
          theirs=2.9),
    Claim("multimnist-routing", "Three routing iterations are better than one.",
          f"94.8% against 92.5%: +2.3 points ({SABOUR}, Table 1)",
          (multi("default network, 72,000 pairs: 3 iterations minus 1", "main/deep", "control/iters-1"),
           multi("3 iterations minus 1: `half-digit` (capsules see half a digit), 72,000 pairs", "half-digit/iters-3",
                 "half-digit/iters-1"),
           multi("3 iterations minus 1: `half-digit`, 360,000 pairs", "half-digit-long/iters-3",
                 "half-digit-long/iters-1"),
           multi("3 iterations minus 1: `residual`, a deeper network, 1.2 million pairs", "main/residual",
                 "control/residual-iters-1"),
           affine("3 iterations minus 1: affine digits, capsnet", "backbone/capsnet", "backbone/capsnet-iters-1"),
           toys("3 iterations minus 1: rendered toys, novel azimuths, capsnet", "heads-azimuth/capsnet",
                "heads-azimuth/capsnet-iters-1"),
           multi("`half-digit`, both tested with 1 iteration: trained with 3 minus with 1",
                 "half-digit-uniform/iters-3", "half-digit/iters-1"),
           multi("3 iterations minus 1: `classic` (the paper's network, narrow), 72,000 pairs", "main/classic",
                 "control/classic-iters-1"),
           multi("3 iterations minus 1: `residual`, paper's protocol, 1.92 million pairs, statistics recomputed",
                 "weights/paper-protocol-long-recomputed", "weights/paper-protocol-long-iters-1-recomputed")),
          a=Primary("default network, 3 against 1",
                    "multimnist main/deep minus control/iters-1, test_exact_match, points",
                    "the default network with one setting changed, ten seeds"), theirs=2.3),
    Claim("multimnist-switched-off", "Networks trained with dynamic routing lose less than one point on average "
          "when tested without it.", "no number",
          (multi("default network: with routing minus without", "main/deep", "main-uniform/deep"),
           multi("`half-digit`: with routing minus without", "half-digit/iters-3", "half-digit-uniform/iters-3"),
           affine("affine digits, capsnet: with routing minus without", "backbone/capsnet", "backbone-uniform/capsnet"),
           multi("default network: reconstruction MSE per pixel, with minus without", "main/deep",
                 "main-uniform/deep", "test_recon_mse", "4 digits"))),
    Claim("multimnist-reconstruction", "Each of two overlapping digits is reconstructed from its own capsule.",
          f"shown in pictures ({SABOUR}, Fig. 5)",
          (multi("reconstruction MSE per pixel, CapsNet minus a CNN's ten vectors with squash and margin loss "
                 "(vector-dense)", "main/deep", "control/vector-dense", "test_recon_mse", "4 digits"),
           multi("reconstruction MSE per pixel, CapsNet minus a CNN's ten vectors with ReLU (cnn-vectors)", "main/deep",
                 "control/cnn-vectors", "test_recon_mse", "4 digits"),
           of("reconstruction MSE per pixel, CapsNet", "multimnist", "main/deep", "test_recon_mse", "4 digits"),
           of("reconstruction MSE per pixel, mean image", "multimnist", "main/deep", "baseline_recon_mse", "4 digits"),
           multi("exact match, CapsNet minus cnn-vectors", "main/deep", "control/cnn-vectors"),
           multi("reconstruction MSE per pixel, CapsNet with 3 iterations minus with 1", "main/deep", "control/iters-1",
                 "test_recon_mse", "5 digits")),
          a=Primary("error", "multimnist main/deep minus main/deep, test_recon_mse vs baseline_recon_mse, 4 digits, "
                    "reversed", "of the mean image minus of the CapsNet; the best constant image needs no capsule",
                    "MSE {multimnist main/deep, test_recon_mse, 4 digits, plain}, of the mean image "
                    "{multimnist main/deep, baseline_recon_mse, 4 digits, plain} (n = 10)"),
          b=Primary("error", "multimnist main/deep minus control/vector-dense, "
                    "test_recon_mse, 4 digits, reversed",
                    "of a CNN's ten vectors with squash, margin loss and the same "
                    "decoder (`vector-dense`) minus of the CapsNet",
                    "CNN's ten vectors: MSE {multimnist control/vector-dense, test_recon_mse, 4 digits, plain} "
                    "(n = 5)")),
    Claim("mnist", "A capsule network classifies MNIST with hardly an error.",
          f"test accuracy 99.75 +- 0.005%, 1 iteration 99.71% ({SABOUR}, Table 1)",
          (of("small network with 1 iteration", "affnist", "mnist/capsnet-shared", "test_accuracy",
              "percent, 2 digits"),
           of("the paper's network (8.2 million parameters, 3 iterations), 15 epochs", "affnist",
              "mnist/capsnet-paper", "test_accuracy", "percent, 2 digits")),
          a=Primary("their network, 15 epochs",
                    "affnist mnist/capsnet-paper, test_accuracy, percent, 2 digits",
                    "the paper's network, three iterations; trained for 15 epochs"), theirs=99.75),
    Claim("affnist-translation", "Of two networks that classify translated digits equally well, the capsule network is "
          "more accurate on affine digits.", f"affNIST: 79% against 66%: +13 points ({SABOUR}, section 5.2)",
          (affine("affine digits at any position, CapsNet minus narrow CNN", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn"),
           affine("the same, CNN with convolutions as wide as the CapsNet's", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn-64"),
           affine("translated digits at any position, narrow CNN", "matched-accuracy/capsnet", "matched-accuracy/cnn",
                  "any_position_accuracy"),
           affine("affine digits, any position, CapsNet minus CNN with max pooling (cnn-dense)",
                  "matched-accuracy/capsnet", "matched-accuracy/cnn-dense"),
           affine("translated digits at any position, CNN as wide as the CapsNet", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn-64", "any_position_accuracy"),
           affine("affine digits, any position, on a modern backbone, not matched: capsnet-shared minus cnn-gap",
                  "backbone/capsnet-shared", "backbone/cnn-gap"),
           affine("the same, capsnet with 3 iterations minus cnn-gap", "backbone/capsnet", "backbone/cnn-gap"),
           affine("the same, capsnet with 3 iterations minus cnn-dense (max pooling)", "backbone/capsnet",
                  "backbone/cnn-dense")),
          a=Primary("CNN with max pooling, their kind", "affnist matched-accuracy/capsnet minus "
                    "matched-accuracy/cnn-dense, affine_accuracy, points",
                    "CapsNet minus CNN; the paper's CNN had max pooling; both stopped at the same accuracy"),
          b=Primary("pooled vectors; CapsNet with a matrix per position", "affnist backbone/capsnet minus "
                    "backbone/vector-gap, affine_accuracy, points",
                    "`capsnet` minus `vector-gap`: no primary capsules, no routing"),
          theirs=13.0),
    Claim("affnist-centered", "The capsule network's advantage is robustness to affine transformations.",
          f"the paper's reading of 79% against 66% ({SABOUR}, section 5.2)",
          (affine("affine digits, centered, CapsNet minus narrow CNN", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn", "centered_accuracy"),
           affine("the same, CNN with convolutions as wide as the CapsNet's", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn-64", "centered_accuracy"),
           affine("centered, after 96,000 translated digits each, CapsNet minus narrow CNN", "equal-training/capsnet",
                  "equal-training/cnn", "centered_accuracy"),
           affine("centered, CapsNet minus CNN with max pooling (cnn-dense)", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn-dense", "centered_accuracy"),
           affine("centered, modern backbone, not matched, capsnet-shared minus cnn-gap", "backbone/capsnet-shared",
                  "backbone/cnn-gap", "centered_accuracy"),
           affine("centered, modern backbone, not matched, capsnet-shared minus vector-gap", "backbone/capsnet-shared",
                  "backbone/vector-gap", "centered_accuracy"),
           affine("centered, modern backbone, not matched, one iteration: shared matrices minus one per position",
                  "backbone/capsnet-shared", "backbone/capsnet-iters-1", "centered_accuracy")),
          a=Primary("CNN with max pooling, their kind", "affnist matched-accuracy/capsnet minus "
                    "matched-accuracy/cnn-dense, centered_accuracy, points",
                    "CapsNet minus CNN; at the center no position is new"),
          b=Primary("pooled vectors; CapsNet with a matrix per position", "affnist backbone/capsnet minus "
                    "backbone/vector-gap, centered_accuracy, points",
                    "`capsnet` minus `vector-gap`: no primary capsules, no routing")),
    Claim("affnist-any-position", "Where no position is new, no advantage of a capsule network over a CNN of matched "
          "accuracy is measurable.", "no number",
          (affine("trained at any position to 95% validation accuracy, CapsNet minus narrow CNN",
                  "any-position-matched/capsnet", "any-position-matched/cnn"),
           affine("trained at any position, 96,000 digits each, CapsNet minus narrow CNN", "any-position/capsnet",
                  "any-position/cnn"),
           affine("trained at any position to 95% validation accuracy, centered, CapsNet minus narrow CNN",
                  "any-position-matched/capsnet",
                  "any-position-matched/cnn", "centered_accuracy"))),
    Claim("affnist-equal-training", "After equal training a small CNN with max pooling is ahead of the small CapsNet.",
          "no number",
          (affine("CapsNet minus CNN with max pooling (cnn-dense), 96,000 digits", "equal-training/capsnet",
                  "equal-training/cnn-dense"),
           affine("CapsNet minus narrow CNN, 96,000 digits", "equal-training/capsnet", "equal-training/cnn"))),
    Claim("affnist-pooling", "On one modern backbone, ten pooled vectors do as well as a CapsNet without routing.",
          f"sharing matrices, without routing: 93.2% on affNIST ({GU})",
          (affine("vector-gap minus capsnet-shared", "backbone/vector-gap", "backbone/capsnet-shared"),
           affine("capsnet-shared minus cnn-gap", "backbone/capsnet-shared", "backbone/cnn-gap"),
           of("capsnet-shared", "affnist", "backbone/capsnet-shared", "affine_accuracy", "percent"),
           affine("cnn-gmp minus capsnet-shared", "backbone/cnn-gmp", "backbone/capsnet-shared"),
           affine("capsnet-shared minus capsnet with 3 iterations", "backbone/capsnet-shared", "backbone/capsnet")),
          (affine("pretrained: capsnet-shared minus cnn-gap", "weights/capsnet-shared", "weights/cnn-gap"),)),
    Claim("affnist-few-digits", "With ten training digits per class, a CapsNet is ahead of a GAP-CNN.", "no number",
          (affine("capsnet-shared minus cnn-gap", "few-10/capsnet-shared", "few-10/cnn-gap"),
           affine("capsnet-shared minus vector-gap", "few-10/capsnet-shared", "few-10/vector-gap"),
           affine("capsnet-shared minus cnn-gmp", "few-10/capsnet-shared", "few-10/cnn-gmp"),
           affine("centered, capsnet-shared minus vector-gap", "few-10/capsnet-shared", "few-10/vector-gap",
                  "centered_accuracy"))),
    Claim("smallnorb-azimuth", "Matrix capsules are more accurate than a CNN at novel azimuths.",
          f"smallNORB, familiar views matched: error 13.5% against 20.0%: +6.5 points ({HINTON}, Table 2)",
          (toys("matrix-capsnet minus cnn, a small version of the paper's CNN without its dropout",
           "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn"),
           toys("matrix-capsnet minus cnn-bn, the same with batch normalization", "paper-azimuth/matrix-capsnet",
                "paper-azimuth/cnn-bn"),
           toys("familiar azimuths, matrix-capsnet minus cnn", "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn",
                "familiar"),
           toys("three other sets of toys, matrix-capsnet minus cnn", f"{THREE_SETS}/matrix-capsnet",
                f"{THREE_SETS}/cnn"),
           toys("our toys, matrix-capsnet minus cnn-gap, which is larger", "paper-azimuth/matrix-capsnet",
                "heads-azimuth/cnn-gap"),
           stopped("at matched familiar accuracy, matrix-capsnet minus cnn (stopped)", "paper-azimuth/cnn"),
           stopped("at matched familiar accuracy, matrix-capsnet minus cnn-bn (stopped)", "paper-azimuth/cnn-bn"),
           toys("at matched familiar accuracy, matrix-capsnet (stopped) minus cnn with dropout of 0.5",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-dropout", "novel once familiar"),
           toys("at the end of training, not matched, matrix-capsnet minus cnn with dropout of 0.5",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-dropout"),
           toys("matrix-capsnet minus the paper's CNN, with its width and dropout (4.25M parameters)",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-paper"),
           stopped("at matched familiar accuracy, matrix-capsnet minus that CNN (stopped)", "paper-azimuth/cnn-paper"),
           toys("at the end of training, not matched, (a)'s capsules minus (a)'s CNN", f"paper-azimuth/{SIZE}",
                "paper-azimuth/cnn-paper"),
           toys("(a)'s capsules minus matrix-capsnet, which is smaller", f"paper-azimuth/{SIZE}",
                "paper-azimuth/matrix-capsnet"),
           pair("(a), the CNN interpolated between its epochs to exactly the capsules' familiar accuracy", "smallnorb",
                "paper-azimuth/cnn-paper", f"paper-azimuth/{SIZE}", "novel when familiar", "points, reversed"),
           toys("(a)'s capsules minus a GAP-CNN with half as many parameters", f"paper-azimuth/{SIZE}",
                "heads-azimuth/cnn-gap")),
          a=Primary("their small network, their CNN, about matched", f"smallnorb paper-azimuth/cnn-paper minus "
                    f"paper-azimuth/{SIZE}, novel once familiar, points, reversed",
                    "the paper's small network minus its CNN; the CNN at its first epoch with the capsules' "
                    "familiar accuracy; the paper stopped its capsules, which were the more accurate"),
          b=Primary("larger GAP-CNN, not matched", f"smallnorb paper-azimuth/{SIZE} minus wide-azimuth/cnn-gap, "
                    "novel, points", "capsules minus CNN, the most accurate with ten seeds"), theirs=6.5),
    Claim("smallnorb-elevation", "Matrix capsules are more accurate than a CNN at novel elevations.",
          f"smallNORB, familiar views matched: error 12.3% against 17.8%: +5.5 points ({HINTON}, Table 2)",
          (toys("matrix-capsnet minus cnn, a small version of the paper's CNN without its dropout",
           "paper-elevation/matrix-capsnet", "paper-elevation/cnn"),
           toys("matrix-capsnet minus cnn-bn, the same with batch normalization", "paper-elevation/matrix-capsnet",
                "paper-elevation/cnn-bn"),
           toys("at matched familiar accuracy, matrix-capsnet (stopped) minus cnn with dropout of 0.5",
                "paper-elevation/matrix-capsnet", "paper-elevation/cnn-dropout", "novel once familiar"),
           toys("at the end of training, not matched, matrix-capsnet minus cnn with dropout of 0.5",
                "paper-elevation/matrix-capsnet", "paper-elevation/cnn-dropout"),
           toys("matrix-capsnet minus the paper's CNN, with its width and dropout (4.25M parameters)",
                "paper-elevation/matrix-capsnet", "paper-elevation/cnn-paper"),
           stopped("at matched familiar accuracy, matrix-capsnet minus that CNN (stopped)",
                   "paper-elevation/cnn-paper"),
           toys("(a)'s capsules minus matrix-capsnet, which is smaller", f"paper-elevation/{SIZE}",
                "paper-elevation/matrix-capsnet"),
           pair("(a), the CNN interpolated between its epochs to exactly the capsules' familiar accuracy", "smallnorb",
                "paper-elevation/cnn-paper", f"paper-elevation/{SIZE}", "novel when familiar", "points, reversed"),
           toys("(a)'s capsules minus a GAP-CNN with half as many parameters", f"paper-elevation/{SIZE}",
                "heads-elevation/cnn-gap")),
          a=Primary("their small network, their CNN, about matched", f"smallnorb paper-elevation/cnn-paper minus "
                    f"paper-elevation/{SIZE}, novel once familiar, points, reversed",
                    "the paper's small network minus its CNN; the CNN at its first epoch with the capsules' "
                    "familiar accuracy; the paper stopped its capsules, which were the more accurate"),
          b=Primary("their CNN, not matched", f"smallnorb paper-elevation/{SIZE} minus "
                    "paper-elevation/cnn-paper, novel, points",
                    "capsules minus CNN, the most accurate at novel elevations"),
          theirs=5.5),
    Claim("smallnorb-vector-capsules", "On the first set of toys, vector capsules with shared matrices are ahead of a "
          "GAP-CNN at novel azimuths.", "no number",
          (toys("first set of toys, capsnet-shared minus cnn-gap", "wide-azimuth/capsnet-shared",
                "wide-azimuth/cnn-gap"),
           toys("three other sets of toys", f"{THREE_SETS}/capsnet-shared", f"{THREE_SETS}/cnn-gap"),
           toys("novel elevations, first set", "wide-elevation/capsnet-shared", "wide-elevation/cnn-gap"),
           toys("six further sets of toys", f"{SIX_SETS}/capsnet-shared", f"{SIX_SETS}/cnn-gap"),
           toys("all nine other sets", f"{THREE_SETS}+{SIX_SETS}/capsnet-shared", f"{THREE_SETS}+{SIX_SETS}/cnn-gap"))),
    Claim("shapes", "On five simple shapes, no difference between matrix capsules and a GAP-CNN is measurable at "
          "novel azimuths.", "no number",
          (toys("matrix-capsnet minus cnn-gap", "shapes/matrix-capsnet", "shapes/cnn-gap"),
           toys("matrix-capsnet minus cnn", "shapes/matrix-capsnet", "shapes/cnn"),
           toys("nearest neighbor minus matrix-capsnet", "shapes/nearest", "shapes/matrix-capsnet"))),
    Claim("em-routing", "Two EM iterations are better than one in matrix capsules.",
          f"standard smallNORB, error with 1 and 2 iterations: 9.7%, 2.2%: 7.5 points ({HINTON}, Table 1)",
          (toys("matrix-head trained with 2 iterations minus with 1, novel azimuths", "heads-azimuth/matrix-head",
                "heads-azimuth/matrix-head-iters-1"),
           toys("the same, novel elevations", "heads-elevation/matrix-head", "heads-elevation/matrix-head-iters-1"),
           toys("matrix-capsnet, tested as trained minus with 1 iteration, familiar azimuths",
                "em-iterations/matrix-capsnet", "em-iterations-uniform/matrix-capsnet", "familiar"),
           toys("matrix-head, tested as trained minus with 1 iteration, novel azimuths", "em-iterations/matrix-head",
                "em-iterations-uniform/matrix-head"),
           toys("matrix-head trained with 2 iterations minus with 1, familiar azimuths", "heads-azimuth/matrix-head",
                "heads-azimuth/matrix-head-iters-1", "familiar"),
           toys("matrix-head trained with 2 iterations minus with 1, novel azimuths, repeated on another machine",
                "em-iterations/matrix-head", "heads-azimuth/matrix-head-iters-1"),
           toys("matrix-capsnet trained with 3 iterations minus with 2, two epochs of the standard task",
                "standard/matrix-capsnet-iters-3", "standard/matrix-capsnet-iters-2"),
           toys("matrix-capsnet trained with 2 iterations minus with 1, novel azimuths", "paper-azimuth/matrix-capsnet",
                "paper-azimuth/matrix-capsnet-iters-1"),
           toys("matrix-capsnet trained with 2 iterations minus with 1, familiar azimuths",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/matrix-capsnet-iters-1", "familiar"),
           toys("matrix-capsnet trained with 2 iterations minus with 1, two epochs of the standard task",
                "standard/matrix-capsnet-iters-2", "standard/matrix-capsnet-iters-1"),
           *(toys(f"(a)'s network trained with {one} iterations minus with {other}, {kind} azimuths",
                  f"paper-azimuth/{SIZE}", f"paper-azimuth/{SIZE}-iters-{other}", kind)
             for one, other, kind in ((2, 1, "novel"), (2, 3, "familiar"), (2, 3, "novel"))),
           *(toys(f"(a)'s network trained with 3 iterations minus with 1, {kind} azimuths",
                  f"paper-azimuth/{SIZE}-iters-3", f"paper-azimuth/{SIZE}-iters-1", kind)
             for kind in ("familiar", "novel"))),
          a=Primary("2 iterations against 1, familiar azimuths", f"smallnorb paper-azimuth/{SIZE} minus "
                    f"paper-azimuth/{SIZE}-iters-1, familiar, points",
                    "the paper's small network; the paper's test has familiar viewpoints; settings chosen with two "
                    "iterations"),
          theirs=7.5),
    Claim("background-activity", "Trained matrix capsules are more active over background than over the object.",
          "no number",
          tuple(pair(f"{label}, primary capsules, activation over background minus over the toy", "smallnorb",
                     f"background-activity/{name}", f"background-activity/{name}",
                     f"{AFTER}.primary.0 vs {AFTER}.primary.1", "3 digits") for label, name in (
              ("azimuth split", "matrix-capsnet"), ("spread loss", "spread"), ("elevation split", "elevation"),
              ("another set of toys", "toys2"))) + tuple(
              pair(f"{label}, capsules after EM routing", "smallnorb", "background-activity/matrix-capsnet",
                   "background-activity/matrix-capsnet", f"{when}.conv.0 vs {when}.conv.1", "3 digits")
              for label, when in (("azimuth split", AFTER), ("before training", BEFORE))) + (
              pair("before training, primary capsules", "smallnorb", "background-activity/matrix-capsnet",
                   "background-activity/matrix-capsnet", f"{BEFORE}.primary.0 vs {BEFORE}.primary.1", "3 digits"),
              pair("azimuth split, the paper's small network, primary capsules", "smallnorb",
                   f"background-activity/{SIZE}", f"background-activity/{SIZE}",
                   f"{AFTER}.primary.0 vs {AFTER}.primary.1", "3 digits"))),
    Claim("confidence-on-noise", "A capsule's length is the probability that its entity is present.",
          f"length is the probability that the entity is present ({SABOUR}, section 2)",
          (auroc("AUROC, digits against noise (chance 0.5): capsnet-shared, longest capsule", "probes/capsnet-shared",
                 "detection.noise.length"),
           auroc("capsnet-shared, difference of the two longest", "probes/capsnet-shared", "detection.noise.margin"),
           auroc("capsnet, longest capsule", "probes/capsnet", "detection.noise.length"),
           auroc("vector-gap, longest vector", "probes/vector-gap", "detection.noise.length"),
           auroc("cnn-gap, largest softmax probability", "probes/cnn-gap", "detection.noise.probability")),
          (auroc("pretrained capsnet-shared, longest capsule", "probes/pretrained-capsnet-shared",
                 "detection.noise.length"),
           auroc("pretrained capsnet-shared, difference of the two longest", "probes/pretrained-capsnet-shared",
                 "detection.noise.margin")),
          a=Primary("AUROC, digits over noise", "affnist probes/capsnet, detection.noise.length, 2 digits",
                    "three iterations and a matrix per position, as in the paper",
                    "the paper's routing, AUROC: {affnist probes/capsnet, detection.noise.length, 2 digits, range} "
                    "(range, n = 5)"),
          b=Primary("CNN with softmax", "affnist probes/cnn-gap, detection.noise.probability, 2 digits, range",
                    "what a CNN gives in place of a length",
                    "CNN with softmax: {affnist probes/cnn-gap, detection.noise.probability, 2 digits, range} "
                    "(range, n = 5)"),
          chance=0.5))
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


def comparisons(claim):
    """Return all measures of a claim, its primary comparisons first"""
    primary = [(one.label, one.mark) for one in (claim.a, claim.b) if one]
    known = {mark.removesuffix(", reversed") for _, mark in primary}
    return (*primary, *(measure for measure in claim.measures if measure[1] not in known))
