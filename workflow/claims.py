"""The claims of the papers that are tested here, and what was measured of each. reproduce.py lists and checks them.

A measure is a label and a mark as results/render.py reads it: EXPERIMENT SETTING[ minus SETTING], KEY[, STYLE]. The
first measure of a claim is its headline.
"""
from typing import NamedTuple

SABOUR, HINTON, GU = "Sabour et al. 2017", "Hinton et al. 2018", "Gu & Tresp 2020"
REPRODUCED, PART, NOT = "reproduced", "reproduced in part", "not reproduced"
OURS = "our own finding"           # where the papers say nothing


class Claim(NamedTuple):
    """A claim: what the paper reports, and what was measured"""
    name: str
    sentence: str
    paper: str                     # source and number
    verdict: str
    measures: tuple                # ((label, mark), ...)
    quick: tuple = ()              # measures of the networks in weights/, in place of trained ones


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


AFTER, BEFORE = "background_activity.after.a", "background_activity.before.a"
THREE_SETS = "toys2-azimuth+toys3-azimuth+toys4-azimuth"
SIX_SETS = "+".join(f"toys{toy_seed}-azimuth" for toy_seed in range(5, 11))
CLAIMS = (
    Claim("multimnist-accuracy", "A capsule network classifies both of two overlapping digits.",
          f"exact match 94.8% ({SABOUR}, Table 1)",
          f"{REPRODUCED}: by a deeper network, two seeds",
          (of("paper's protocol, 1.2 million pairs", "multimnist", "main/paper-protocol", "test_exact_match",
              "percent"),
           of("harder pairs (IoU >= 0.8), 1.2 million", "multimnist", "main/residual", "test_exact_match", "percent"),
           of("harder pairs, 72,000: the default command", "multimnist", "main/deep", "test_exact_match", "percent"),
           of("paper's protocol, 1.92 million pairs", "multimnist", "main/paper-protocol-long", "test_exact_match",
              "percent, plain"),
           of("the same, normalization statistics recomputed", "multimnist", "weights/paper-protocol-long-recomputed",
              "test_exact_match", "percent, plain")),
          (of("paper's protocol, 1.92 million pairs, normalization statistics recomputed", "multimnist",
              "weights/paper-protocol-long-recomputed", "test_exact_match", "percent, plain"),
           of("pretrained network, harder pairs (IoU >= 0.8)", "multimnist", "weights/residual", "test_exact_match",
              "percent"),)),
    Claim("multimnist-cnn", "The capsule network classifies more pairs of digits than a CNN.",
          f"94.8% against 91.9%: +2.9 points ({SABOUR}, Table 1)",
          f"{PART}: over CNNs with a dense layer; little over a CNN with GAP, except in `half-digit`",
          (multi("default CapsNet minus CNN with a dense layer, 72,000 pairs", "main/deep", "control/cnn"),
           multi("default CapsNet minus ten vectors from a dense layer (vector-dense)", "main/deep",
                 "control/vector-dense"),
           multi("paper's protocol, 1.2 million pairs: CapsNet minus CNN with GAP", "main/paper-protocol",
                 "control/cnn-paper-protocol"),
           multi("default CapsNet minus CNN with GAP, 72,000 pairs", "main/deep", "control/cnn-head-gap"),
           multi("default CapsNet minus CNN with GAP, 22 configurations tried for each", "main/deep",
                 "control/cnn-head-gap-tuned"),
           multi("CapsNet with 1 iteration minus that CNN", "control/iters-1", "control/cnn-head-gap-tuned"),
           multi("CapsNet without reconstruction minus that CNN", "control/no-recon", "control/cnn-head-gap-tuned"),
           multi("`half-digit`, 72,000 pairs: CapsNet minus CNN with GAP", "half-digit/iters-3",
                 "half-digit/cnn-head-gap"),
           multi("`half-digit`, 72,000 pairs: CapsNet minus CNN with a dense layer", "half-digit/iters-3",
                 "half-digit/cnn"))),
    Claim("multimnist-routing", "Three routing iterations are better than one.",
          f"94.8% against 92.5%: +2.3 points ({SABOUR}, Table 1)",
          f"{PART}: a small gain; a larger one in the less accurate `half-digit`",
          (multi("default network, 72,000 pairs: 3 iterations minus 1", "main/deep", "control/iters-1"),
           multi("`half-digit` (capsules see half a digit), 72,000 pairs", "half-digit/iters-3", "half-digit/iters-1"),
           multi("`half-digit`, 360,000 pairs", "half-digit-long/iters-3",
                 "half-digit-long/iters-1"),
           multi("`residual`, a deeper network, 1.2 million pairs", "main/residual", "control/residual-iters-1"),
           affine("affine digits, capsnet", "backbone/capsnet", "backbone/capsnet-iters-1"),
           toys("rendered toys, novel azimuths, capsnet", "heads-azimuth/capsnet", "heads-azimuth/capsnet-iters-1"),
           multi("`half-digit`, both tested with 1 iteration: trained with 3 minus with 1",
                 "half-digit-uniform/iters-3", "half-digit/iters-1"),
           multi("`classic` (a narrow version of the paper's network), 72,000 pairs", "main/classic",
                 "control/classic-iters-1"))),
    Claim("multimnist-switched-off", "Networks trained with dynamic routing lose less than one point on average "
          "when tested without it.", "no number", OURS,
          (multi("default network: with routing minus without", "main/deep", "main-uniform/deep"),
           multi("`half-digit`: with routing minus without", "half-digit/iters-3", "half-digit-uniform/iters-3"),
           affine("affine digits, capsnet: with routing minus without", "backbone/capsnet", "backbone-uniform/capsnet"),
           multi("default network: reconstruction MSE per pixel, with minus without", "main/deep",
                 "main-uniform/deep", "test_recon_mse", "4 digits"))),
    Claim("multimnist-reconstruction", "Each of two overlapping digits is reconstructed from its own capsule.",
          f"shown in pictures ({SABOUR}, Fig. 5)", f"{REPRODUCED}: less than half of the mean image's error",
          (multi("reconstruction MSE per pixel, CapsNet minus a CNN's ten vectors with squash and margin loss "
                 "(vector-dense)", "main/deep", "control/vector-dense", "test_recon_mse", "4 digits"),
           multi("reconstruction MSE per pixel, CapsNet minus a CNN's ten vectors with ReLU (cnn-vectors)", "main/deep",
                 "control/cnn-vectors", "test_recon_mse", "4 digits"),
           of("reconstruction MSE per pixel, CapsNet", "multimnist", "main/deep", "test_recon_mse", "4 digits"),
           of("reconstruction MSE per pixel, mean image", "multimnist", "main/deep", "baseline_recon_mse", "4 digits"),
           multi("exact match, CapsNet minus cnn-vectors", "main/deep", "control/cnn-vectors"),
           multi("reconstruction MSE per pixel, CapsNet with 3 iterations minus with 1", "main/deep", "control/iters-1",
                 "test_recon_mse", "5 digits"))),
    Claim("mnist", "A capsule network classifies MNIST with hardly an error.",
          f"test accuracy 99.75 +- 0.005%, 1 iteration 99.71% ({SABOUR}, Table 1)", f"{NOT}: just below the paper",
          (of("small network with 1 iteration", "affnist", "mnist/capsnet-shared", "test_accuracy",
              "percent, 2 digits"),
           of("the paper's network (8.2 million parameters, 3 iterations), 15 epochs", "affnist",
              "mnist/capsnet-paper", "test_accuracy", "percent, 2 digits, plain"))),
    Claim("affnist-translation", "Of two networks that classify translated digits equally well, the capsule network is "
          "more accurate on affine digits.", f"affNIST: 79% against 66%: +13 points ({SABOUR}, section 5.2)",
          f"{PART}: over CNNs without pooling",
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
           affine("the same, capsnet with 3 iterations minus cnn-dense", "backbone/capsnet", "backbone/cnn-dense"))),
    Claim("affnist-centered", "The capsule network's advantage is robustness to affine transformations.",
          f"the paper's reading of 79% against 66% ({SABOUR}, section 5.2)",
          f"{NOT} at matched accuracy",
          (affine("affine digits, centered, CapsNet minus narrow CNN", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn", "centered_accuracy"),
           affine("the same, CNN with convolutions as wide as the CapsNet's", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn-64", "centered_accuracy"),
           affine("centered, after 96,000 translated digits each, CapsNet minus narrow CNN", "equal-training/capsnet",
                  "equal-training/cnn", "centered_accuracy"),
           affine("centered, CapsNet minus CNN with max pooling (cnn-dense)", "matched-accuracy/capsnet",
                  "matched-accuracy/cnn-dense", "centered_accuracy"),
           affine("centered, on a modern backbone, capsnet-shared minus cnn-gap", "backbone/capsnet-shared",
                  "backbone/cnn-gap", "centered_accuracy"),
           affine("centered, on a modern backbone, capsnet-shared minus vector-gap", "backbone/capsnet-shared",
                  "backbone/vector-gap", "centered_accuracy"),
           affine("centered, on a modern backbone, one iteration: shared matrices minus one per position",
                  "backbone/capsnet-shared", "backbone/capsnet-iters-1", "centered_accuracy"))),
    Claim("affnist-any-position", "Where no position is new, no advantage of a capsule network over a CNN of matched "
          "accuracy is measurable.", "no number", OURS,
          (affine("trained at any position to 95% validation accuracy, CapsNet minus narrow CNN",
                  "any-position-matched/capsnet", "any-position-matched/cnn"),
           affine("trained at any position, 96,000 digits each, CapsNet minus narrow CNN", "any-position/capsnet",
                  "any-position/cnn"),
           affine("trained at any position to 95% validation accuracy, centered", "any-position-matched/capsnet",
                  "any-position-matched/cnn", "centered_accuracy"))),
    Claim("affnist-equal-training", "After equal training a CNN with max pooling is ahead of the capsule network.",
          "no number", OURS,
          (affine("CapsNet minus CNN with max pooling (cnn-dense), 96,000 digits", "equal-training/capsnet",
                  "equal-training/cnn-dense"),
           affine("CapsNet minus narrow CNN, 96,000 digits", "equal-training/capsnet", "equal-training/cnn"))),
    Claim("affnist-pooling", "On one modern backbone, ten pooled vectors do as well as a CapsNet without routing.",
          f"sharing matrices, without routing: 93.2% on affNIST ({GU})", OURS,
          (affine("vector-gap minus capsnet-shared", "backbone/vector-gap", "backbone/capsnet-shared"),
           affine("capsnet-shared minus cnn-gap", "backbone/capsnet-shared", "backbone/cnn-gap"),
           of("capsnet-shared", "affnist", "backbone/capsnet-shared", "affine_accuracy", "percent"),
           affine("cnn-gmp minus capsnet-shared", "backbone/cnn-gmp", "backbone/capsnet-shared"),
           affine("capsnet-shared minus capsnet with 3 iterations", "backbone/capsnet-shared", "backbone/capsnet")),
          (affine("pretrained: capsnet-shared minus cnn-gap", "weights/capsnet-shared", "weights/cnn-gap"),)),
    Claim("affnist-few-digits", "With ten training digits per class, a CapsNet is ahead of a GAP-CNN.", "no number",
          OURS,
          (affine("capsnet-shared minus cnn-gap", "few-10/capsnet-shared", "few-10/cnn-gap"),
           affine("capsnet-shared minus vector-gap", "few-10/capsnet-shared", "few-10/vector-gap"),
           affine("capsnet-shared minus cnn-gmp", "few-10/capsnet-shared", "few-10/cnn-gmp"),
           affine("centered, capsnet-shared minus vector-gap", "few-10/capsnet-shared", "few-10/vector-gap",
                  "centered_accuracy"))),
    Claim("smallnorb-azimuth", "Matrix capsules are more accurate than a CNN at novel azimuths.",
          f"smallNORB, familiar views matched: error 13.5% against 20.0%: +6.5 points ({HINTON}, Table 2)",
          f"{PART}: on one set of toys, over a small CNN without batch normalization",
          (toys("our toys, matrix-capsnet minus cnn", "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn"),
           toys("our toys, matrix-capsnet minus cnn-bn", "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-bn"),
           toys("familiar azimuths, matrix-capsnet minus cnn", "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn",
                "familiar"),
           toys("three other sets of toys, matrix-capsnet minus cnn", f"{THREE_SETS}/matrix-capsnet",
                f"{THREE_SETS}/cnn"),
           toys("our toys, matrix-capsnet minus cnn-gap, which is larger", "paper-azimuth/matrix-capsnet",
                "heads-azimuth/cnn-gap"),
           toys("at matched familiar accuracy, cnn (stopped) minus matrix-capsnet", "paper-azimuth/cnn",
                "paper-azimuth/matrix-capsnet", "novel once familiar"),
           toys("at matched familiar accuracy, cnn-bn (stopped) minus matrix-capsnet", "paper-azimuth/cnn-bn",
                "paper-azimuth/matrix-capsnet", "novel once familiar"),
           toys("at matched familiar accuracy, matrix-capsnet (stopped) minus cnn with dropout",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-dropout", "novel once familiar"),
           toys("at the end of training, not matched, matrix-capsnet minus cnn with dropout",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-dropout"),
           toys("matrix-capsnet minus the paper's CNN, with its width and dropout (4.25M parameters)",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/cnn-paper"),
           toys("at matched familiar accuracy, that CNN (stopped) minus matrix-capsnet", "paper-azimuth/cnn-paper",
                "paper-azimuth/matrix-capsnet", "novel once familiar"))),
    Claim("smallnorb-elevation", "Matrix capsules are more accurate than a CNN at novel elevations.",
          f"smallNORB, familiar views matched: error 12.3% against 17.8%: +5.5 points ({HINTON}, Table 2)",
          NOT,
          (toys("our toys, matrix-capsnet minus cnn", "paper-elevation/matrix-capsnet", "paper-elevation/cnn"),
           toys("our toys, matrix-capsnet minus cnn-bn", "paper-elevation/matrix-capsnet", "paper-elevation/cnn-bn"),
           toys("at matched familiar accuracy, matrix-capsnet (stopped) minus cnn with dropout",
                "paper-elevation/matrix-capsnet", "paper-elevation/cnn-dropout", "novel once familiar"),
           toys("at the end of training, not matched, matrix-capsnet minus cnn with dropout",
                "paper-elevation/matrix-capsnet", "paper-elevation/cnn-dropout"),
           toys("matrix-capsnet minus the paper's CNN, with its width and dropout (4.25M parameters)",
                "paper-elevation/matrix-capsnet", "paper-elevation/cnn-paper"),
           toys("at matched familiar accuracy, that CNN (stopped) minus matrix-capsnet", "paper-elevation/cnn-paper",
                "paper-elevation/matrix-capsnet", "novel once familiar"))),
    Claim("smallnorb-vector-capsules", "On the first set of toys, vector capsules with shared matrices are ahead of a "
          "GAP-CNN at novel azimuths.", "no number", OURS,
          (toys("first set of toys, capsnet-shared minus cnn-gap", "wide-azimuth/capsnet-shared",
                "wide-azimuth/cnn-gap"),
           toys("three other sets of toys", f"{THREE_SETS}/capsnet-shared", f"{THREE_SETS}/cnn-gap"),
           toys("novel elevations, first set", "wide-elevation/capsnet-shared", "wide-elevation/cnn-gap"),
           toys("six further sets of toys", f"{SIX_SETS}/capsnet-shared", f"{SIX_SETS}/cnn-gap"),
           toys("all nine other sets", f"{THREE_SETS}+{SIX_SETS}/capsnet-shared", f"{THREE_SETS}+{SIX_SETS}/cnn-gap"))),
    Claim("shapes", "On five simple shapes, no difference between matrix capsules and a GAP-CNN is measurable at "
          "novel azimuths.", "no number", OURS,
          (toys("matrix-capsnet minus cnn-gap", "shapes/matrix-capsnet", "shapes/cnn-gap"),
           toys("matrix-capsnet minus cnn", "shapes/matrix-capsnet", "shapes/cnn"),
           toys("nearest neighbor minus matrix-capsnet", "shapes/nearest", "shapes/matrix-capsnet"))),
    Claim("em-routing", "Matrix capsules need EM routing.",
          f"standard smallNORB, error with 1 and 2 iterations: 9.7%, 2.2%: 7.5 points ({HINTON}, Table 1)",
          f"{REPRODUCED}: in both networks",
          (toys("matrix-head trained with 2 iterations minus with 1, novel azimuths", "heads-azimuth/matrix-head",
                "heads-azimuth/matrix-head-iters-1"),
           toys("the same, novel elevations", "heads-elevation/matrix-head", "heads-elevation/matrix-head-iters-1"),
           toys("matrix-capsnet, tested as trained minus with 1 iteration, familiar azimuths",
                "em-iterations/matrix-capsnet", "em-iterations-uniform/matrix-capsnet", "familiar"),
           toys("matrix-head, tested as trained minus with 1 iteration, novel azimuths", "em-iterations/matrix-head",
                "em-iterations-uniform/matrix-head"),
           toys("matrix-head trained with 2 iterations minus with 1, familiar azimuths", "heads-azimuth/matrix-head",
                "heads-azimuth/matrix-head-iters-1", "familiar"),
           toys("matrix-head trained with 2 iterations minus with 1, repeated on another machine",
                "em-iterations/matrix-head", "heads-azimuth/matrix-head-iters-1"),
           toys("matrix-capsnet trained with 3 iterations minus with 2, two epochs of the standard task",
                "standard/matrix-capsnet-iters-3", "standard/matrix-capsnet-iters-2"),
           toys("matrix-capsnet trained with 2 iterations minus with 1, novel azimuths", "paper-azimuth/matrix-capsnet",
                "paper-azimuth/matrix-capsnet-iters-1"),
           toys("matrix-capsnet trained with 2 iterations minus with 1, familiar azimuths",
                "paper-azimuth/matrix-capsnet", "paper-azimuth/matrix-capsnet-iters-1", "familiar"),
           toys("matrix-capsnet trained with 2 iterations minus with 1, two epochs of the standard task",
                "standard/matrix-capsnet-iters-2", "standard/matrix-capsnet-iters-1"))),
    Claim("background-activity", "Trained matrix capsules are more active over background than over the object.",
          "no number", OURS,
          tuple(pair(f"{label}, primary capsules, activation over background minus over the toy", "smallnorb",
                     f"background-activity/{name}", f"background-activity/{name}",
                     f"{AFTER}.primary.0 vs {AFTER}.primary.1", "3 digits") for label, name in (
              ("azimuth split", "matrix-capsnet"), ("spread loss", "spread"), ("elevation split", "elevation"),
              ("another set of toys", "toys2"))) + tuple(
              pair(f"{label}, capsules after EM routing", "smallnorb", "background-activity/matrix-capsnet",
                   "background-activity/matrix-capsnet", f"{when}.conv.0 vs {when}.conv.1", "3 digits")
              for label, when in (("azimuth split", AFTER), ("before training", BEFORE))) + (
              pair("before training, primary capsules", "smallnorb", "background-activity/matrix-capsnet",
                   "background-activity/matrix-capsnet", f"{BEFORE}.primary.0 vs {BEFORE}.primary.1", "3 digits"),)),
    Claim("confidence-on-noise", "A capsule's length is the probability that its entity is present.",
          f"length is the probability that the entity is present ({SABOUR}, section 2)",
          f"{PART}: ranks digits above noise in one of two networks",
          (auroc("AUROC, digits against noise (chance 0.5): capsnet-shared, longest capsule", "probes/capsnet-shared",
                 "detection.noise.length"),
           auroc("capsnet-shared, difference of the two longest", "probes/capsnet-shared", "detection.noise.margin"),
           auroc("capsnet, longest capsule", "probes/capsnet", "detection.noise.length"),
           auroc("vector-gap, longest vector", "probes/vector-gap", "detection.noise.length"),
           auroc("cnn-gap, largest softmax probability", "probes/cnn-gap", "detection.noise.probability")),
          (auroc("pretrained capsnet-shared, longest capsule", "probes/pretrained-capsnet-shared",
                 "detection.noise.length"),
           auroc("pretrained capsnet-shared, difference of the two longest", "probes/pretrained-capsnet-shared",
                 "detection.noise.margin"))))
# README's table: claim, sentence with a link to its chapter, the paper's number, ours with {k} for measure k
MULTI, AFFINE, NORB_CHAPTER = ("docs/multimnist_capsnet.md", "docs/affnist_capsnet.md",
                               "docs/smallnorb_novel_viewpoint.md")
TABLE = (
    ("multimnist-accuracy", f"A CapsNet [classifies two overlapping digits]({MULTI}) (both digits correct)", "94.8%",
     "paper's pairs, a deeper network; 1.2 million deformed training pairs (paper: 60 million): {1}; 1.92 million: "
     "{4}; {5} with normalization statistics recomputed on training pairs, a remedy found after that test"),
    ("multimnist-cnn", "... and makes fewer errors than a CNN", "+2.9",
     "paper's pairs, 1.2 million, CNN with GAP: {3}; pairs that overlap more, 72,000, CNN with GAP: {5}, with a dense "
     "layer: {1}; `half-digit`, with GAP: {8}, with a dense layer: {9}"),
    ("multimnist-routing", f"[Three routing iterations]({MULTI}#ablations) are better than one", "+2.3",
     "pairs that overlap more; default network, 72,000: {1}; a narrow version of the paper's (`classic`), 72,000: {8}; "
     "`half-digit`, 72,000: {2}, 360,000: {3}; `residual`, 1.2 million: {4}"),
    ("multimnist-reconstruction", f"Each digit is [reconstructed]({MULTI}#results) from its own capsule",
     "pictures", "MSE per pixel, lower is better: CapsNet {3}, mean image {4}; CapsNet minus a CNN's ten vectors with "
     "squash and margin loss (`vector-dense`): {1}"),
    ("mnist", f"A CapsNet classifies [MNIST]({AFFINE}#mnist)", "99.75% (1 iteration: 99.71%)",
     "a small network with 1 iteration: {1}; the paper's network, 3 iterations, 15 epochs: {2}"),
    ("affnist-translation", f"CapsNets are more robust to [affine transformations]({AFFINE}) than CNNs that are as "
     "accurate on translated digits", "+13", "any position; CNN with max pooling (as in the paper): {4}; narrow CNN: "
     "{1}; CNN as wide as the CapsNet: {2}. Modern backbone, not matched: `capsnet-shared` minus GAP-CNN {6}, "
     "`capsnet` minus GAP-CNN {7}"),
    ("affnist-centered", "... also at the center, where no position is new", "+13 (its interpretation)", "CNN with max "
     "pooling: {4}; narrow CNN: {1}; CNN as wide as the CapsNet: {2}. Modern backbone, not matched: `capsnet-shared` "
     "minus GAP-CNN {5}"),
    ("smallnorb-azimuth", f"Matrix capsules are better at [novel azimuths]({NORB_CHAPTER}) than CNNs", "+6.5",
     "rendered toys; a small version of the paper's CNN, without its dropout: {1}, on three other sets {4}; with "
     "batch normalization, as in our capsules: {2}; with dropout, matched familiar accuracy: {8}; the paper's CNN: "
     "{10}; a GAP-CNN: {5}"),
    ("smallnorb-elevation", "... and at novel elevations", "+5.5",
     "rendered toys; a small version of the paper's CNN, without its dropout: {1}; with batch normalization: {2}; with "
     "dropout of 0.5, matched familiar accuracy: {3}; the paper's CNN: {5}"),
    ("em-routing", f"Matrix capsules [need EM routing]({NORB_CHAPTER}#ablations): 2 iterations against 1",
     "+7.5 (standard test)", "toys; `matrix-capsnet`: standard test after two epochs {10}, familiar azimuths {9}, "
     "novel azimuths {8}; `matrix-head`, on a small CNN: familiar azimuths {5}, novel azimuths {1}, novel elevations "
     "{2}"),
    ("confidence-on-noise", f"A capsule's length is the [probability]({AFFINE}#inside-the-network) that its entity is "
     "present", "definition", "AUROC, digits against noise (chance 0.5), range of seeds: 3 iterations, a matrix per "
     "position, as in the paper {3}; 1 iteration, shared matrices {1}"))
BY_NAME = {claim.name: claim for claim in CLAIMS}
