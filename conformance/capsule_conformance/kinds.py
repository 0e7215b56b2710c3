"""Kinds of mistake in capsule implementations, as data.

Each entry of KINDS is a tuple:
    name                the kind, short
    description         one sentence: what is computed, and which equation says otherwise; 2017 is Sabour, Frosst and
                        Hinton, "Dynamic routing between capsules", 2018 is Hinton, Sabour and Frosst, "Matrix capsules
                        with EM routing"
    symptom             what a user sees in training or in the outputs
    finite_differences  whether comparing an implementation's gradient with finite differences of its own forward pass
                        shows it: "yes", "no", or where
    n_implementations   how many of the public implementations surveyed on 2026-11-26 have it: 22 of dynamic routing, 5
                        of EM routing; some were read and not run, and some deviate on purpose and say so

"No visible symptom" means that outputs and losses look ordinary: only a test of meaning shows the mistake.
"""

FIELDS = ("name", "description", "symptom", "finite_differences", "n_implementations")

KINDS = (
    # dynamic routing
    ("softmax over input capsules",
     "The softmax normalizes over the input capsules i, but 2017, Eq. 3 normalizes over the output capsules j of one "
     "input capsule.",
     "Output capsules do not compete for votes, and s starts I / J times smaller; it trains with larger "
     "transformation matrices.",
     "no", 6),
    ("logits averaged over the batch",
     "The agreements are averaged over the samples of a batch, but in 2017, Procedure 1 every sample has its own "
     "logits.",
     "The outputs for a sample depend on the other samples of its batch, in evaluation, too; hidden at batch size 1.",
     "no", 7),
    ("logits not accumulated",
     "Each iteration replaces the logits by the newest agreement, but 2017, Procedure 1, line 7 adds it to them.",
     "No visible symptom; invisible at one or two iterations, less concentrated coupling coefficients from three on.",
     "no", 2),
    ("one iteration more",
     "The loop runs n + 1 times for n routing iterations, while 2017, Procedure 1 computes v exactly n times.",
     "No visible symptom; more concentrated coupling coefficients, and n = 1 is not uniform coupling.",
     "no", 1),
    ("one iteration fewer",
     "The loop runs 2 times where the experiments of 2017 run Procedure 1 for 3 iterations.",
     "No visible symptom; less concentrated coupling coefficients.",
     "no", 1),
    ("gradient of inner iterations stopped",
     "Votes or coupling coefficients are constants for the gradient in all but the last iteration, but the output of "
     "2017, Procedure 1 depends on the votes through every iteration.",
     "The forward pass is exact, but the gradient of the transformation matrices is wrong; no effect at one "
     "iteration.",
     "yes", 3),
    ("squash of each component",
     "The squash normalizes over an axis of length 1, so it acts on every component alone, but 2017, Eq. 1 uses the "
     "length of the whole vector.",
     "Lengths can exceed 1, up to the square root of the capsule's dimension.",
     "no", 3),
    ("squash over output capsules",
     "The squash takes its norm over the output capsules, but 2017, Eq. 1 takes it over the entries of one capsule.",
     "Lengths can exceed 1, and each output capsule's length depends on the other output capsules.",
     "no", 2),
    ("final squash missing",
     "The output is s of the last iteration, but 2017, Procedure 1, line 6 squashes it (Eq. 1).",
     "Lengths exceed 1 and grow in proportion to the votes.",
     "no", 1),
    ("squash with 0.5 in place of 1",
     "The squash divides by 0.5 + |s|^2, but 2017, Eq. 1 divides by 1 + |s|^2.",
     "No visible symptom; the same votes give longer capsules.",
     "no", 1),
    ("no epsilon in the squash, forward",
     "The squash divides by |s| without an epsilon, so 2017, Eq. 1 is 0 / 0 at s = 0, where its limit is 0.",
     "NaN in outputs, loss and weights after the first sample whose votes for an output capsule are all 0.",
     "only where all votes for an output capsule are 0, as NaN", 12),
    ("no epsilon in the squash, gradient",
     "An epsilon outside the square root keeps the squash (2017, Eq. 1) finite at s = 0 but not the derivative of "
     "|s|.",
     "NaN in the gradient and then in the weights, while outputs and loss are still finite.",
     "only where all votes for an output capsule are 0, as NaN", 1),
    ("bias in the output capsules",
     "A trained bias is added to s before the squash, but 2017, Eq. 2 is the weighted sum of the votes alone.",
     "No visible symptom; an output capsule has a length without any vote.",
     "no", 3),
    ("initial logits trained per batch slot",
     "The initial logits are a trained parameter for every slot of the batch, but they are 0 in 2017, Procedure 1, "
     "and its text allows learned priors only if they do not depend on the input.",
     "After training, the outputs for a sample depend on its slot in the batch.",
     "no", 2),
    # primary capsules
    ("primary squash over positions",
     "The primary capsules' squash takes its norm over positions, but 2017, Eq. 1 takes it over the entries of one "
     "capsule.",
     "A change of the image at one position changes the primary capsules at all positions.",
     "no", 3),
    ("primary capsules grouped across positions",
     "A reshape without a transpose fills one primary capsule from several positions, but in 2017, Section 4 its 8 "
     "entries are channels at one position.",
     "No visible symptom; a change at one position changes 256 capsules in place of 32.",
     "no", 5),
    ("primary capsules divided before the squash",
     "The primary capsules are the squash of the convolution's output divided by 32, while 2017, Section 4 applies "
     "Eq. 1 to that output.",
     "Primary capsules are about 1000 times shorter while s is small, so the votes start small.",
     "no", 2),
    ("ReLU before the primary squash",
     "A ReLU precedes the squash of the primary capsules, but in 2017, Section 4 Eq. 1 is their only nonlinearity.",
     "No visible symptom; primary capsules have no negative entries.",
     "no", 3),
    # losses and decoder of the 2017 paper
    ("margin loss without squares",
     "The margin loss sums max(0, m+ - |v|) and max(0, |v| - m-), but 2017, Eq. 4 sums their squares.",
     "No visible symptom; larger loss values, and gradients that do not decrease near the margins.",
     "no", 3),
    ("margin loss of softmaxed lengths",
     "The lengths pass a softmax before the margin loss, but 2017, Eq. 4 uses the lengths themselves.",
     "The loss cannot reach 0: with ten classes, a perfect answer still costs 0.446.",
     "no", 1),
    ("margin loss averaged over classes",
     "The margin loss is averaged over the classes, but 2017, Section 3 sums Eq. 4 over them.",
     "No visible symptom; with ten classes, the reconstruction loss weighs at least 10 times as much as in the paper.",
     "no", 2),
    ("reconstruction loss averaged over pixels",
     "The weight 0.0005 multiplies the mean of the squared differences, but in 2017, Section 4.1 it multiplies their "
     "sum.",
     "The reconstruction loss weighs 784 times less (28x28 pixels), so it hardly influences the capsules.",
     "no", 4),
    ("decoder masked by the longest capsule in training",
     "In training, the decoder receives the longest capsule, but in 2017, Section 4.1 it receives that of the true "
     "class.",
     "No visible symptom; on misclassified samples the reconstruction trains the capsule of a wrong class.",
     "no", 7),
    ("reconstruction targets outside [0, 1]",
     "The target images are standardized, but the decoder of 2017, Section 4.1 ends in a sigmoid, which stays in (0, "
     "1).",
     "The reconstruction loss stays high, because part of the target cannot be reached.",
     "no", 5),
    # EM routing
    ("EM: children's activations cancel",
     "R_ij a_i is normalized over the parents, which cancels a_i, but 2018, Procedure 1, M-STEP, line 2 uses the "
     "product itself.",
     "No visible symptom; inactive children vote as strongly as active ones.",
     "no", 2),
    ("EM: floor under the weights of children",
     "R_ij a_i has a lower limit, but in 2018, Procedure 1, M-STEP, line 2 it goes to 0 with a_i or R_ij.",
     "No visible symptom; inactive or unassigned children still pull the parents' means.",
     "no", 1),
    ("EM: wrong exponent of the density",
     "The normal density has another factor than 1 / (2 sigma^2) before the squared difference in the exponent, "
     "unlike 2018, Procedure 1, E-STEP, line 2.",
     "No visible symptom; assignments that are too uniform or too concentrated.",
     "no", 2),
    ("EM: log of the variance in the cost",
     "The cost contains log sigma^2, but 2018, Procedure 1, M-STEP, line 5 has log sigma, which is half of it.",
     "No visible symptom; activations react twice as strongly to the spread of the votes.",
     "no", 1),
    ("EM: mass factor in the cost",
     "The sum of r_ij in the cost is multiplied by parents / children (Gritzman 2019), but 2018, Procedure 1, M-STEP, "
     "line 5 has no factor.",
     "No visible symptom; a documented choice that keeps the cost from growing with the number of children.",
     "no", 1),
    ("EM: softmax in place of the logistic",
     "The parents' activations are a softmax over the parents, but in 2018, Procedure 1, M-STEP, line 6 each is a "
     "logistic of its own cost.",
     "The activations always sum to 1: no parent can be inactive unless another one is active.",
     "no", 1),
    ("EM: activation missing in the E-step",
     "The assignments are p_j / sum_k p_k, but 2018, Procedure 1, E-STEP, line 3 weights every density p_j by a_j.",
     "No visible symptom; inactive parents keep their children.",
     "no", 1),
    ("EM: no competition over positions",
     "Assignments are normalized over the parent types of one position, but the sum of 2018, Procedure 1, E-STEP, "
     "line 3 runs over the parents at all positions.",
     "No visible symptom; the assignments of a child sum to the number of parent positions that see it, up to 9 for "
     "3x3.",
     "no", 2),
    ("EM: gradient of the assignments stopped",
     "Assignments are constants for the gradient, but the output of 2018, Procedure 1 depends on them in every "
     "iteration, and its authors report stopping no gradient.",
     "The forward pass is exact, but gradients are wrong from two iterations on.",
     "yes", 1),
    ("EM: no epsilon on the variance",
     "The variance of 2018, Procedure 1, M-STEP, line 4 is used without an epsilon, as printed, and is 0 for a parent "
     "with one child or with equal votes.",
     "Infinite or NaN costs and densities, when the variance of a parent's votes vanishes.",
     "only where a variance is 0, as NaN", 1),
    ("EM: coordinates added to other entries",
     "Coordinate addition changes other entries of the vote than the first two of the right-hand column (2018, "
     "Section 4).",
     "No visible symptom; the right-hand column of the vote does not hold the position.",
     "no", 1),
)
