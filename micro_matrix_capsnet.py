#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy>=2.0.0"]
# ///
"""Matrix capsules with EM routing: the complete algorithm, forward and backward, in one file.

Hinton, Sabour & Frosst, "Matrix capsules with EM routing" (ICLR 2018): a capsule has a pose, a
4 x 4 matrix, and an activation, the probability that something is in the image. Primary capsules
vote for the poses of the class capsules. EM routing fits a Gaussian to the votes for each class,
which is active if many votes agree. The network is that of Section 4, but smaller: a second
convolution before the primary capsules replaces the two convolutional capsule layers after them.
The convolutions have no biases; the images are MNIST's.

    layer      what it does                                        output
    conv1      convolution 5 x 5, stride 2, ReLU                   12 x 12 x 32
    conv2      convolution 3 x 3, stride 2, ReLU                   5 x 5 x 64
    primary    convolution 3 x 3, 17 channels for a capsule        3 x 3 x 8 = 72 capsules
    votes      a matrix W for every type of capsule and class      72 x 10 poses
    routing    2 iterations of EM                                  10 class capsules

    python3 micro_matrix_capsnet.py

trains for two epochs, about 140 seconds on one core, classifies about 99.0% of the test images
correctly, and prints how the primary capsules of one of them are divided among the classes after
the first and after the last iteration. MNIST (11 MB) is downloaded once.

How to read it: a function NAME that gradients pass is followed by NAME_back, its backward pass. The
gradient of the loss with respect to an array x is called dx, and has the shape of x. NAME_back
takes the gradients with respect to what NAME returned, and then the arguments of NAME. Some NAME
also return, last, a tuple of what is needed again: NAME_back then takes this tuple, `kept`, in
place of the arguments. "Line 3" is line 3 of the paper's procedure that the docstring of the
function names in brackets.
Axes: N images, I children (primary capsules), J parents (classes), D = 16 entries h of a pose.
"""
import gzip
import hashlib
import os
import sys
import time
import urllib.request
from pathlib import Path

for library in ("OPENBLAS_NUM", "OMP_NUM", "MKL_NUM", "VECLIB_MAXIMUM"):
    os.environ[f"{library}_THREADS"] = "1"              # one core; set before numpy is imported

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

POSITIONS, TYPES, J, D = 9, 8, 10, 16
I = POSITIONS * TYPES
# The inverse temperature lambda [M-STEP, line 6] of every iteration; the paper gives no values.
# (1 / 16,): one iteration, no routing; as accurate here (99.0%).
LAMBDAS = (1 / 64, 1 / 16)
VARIANCE_FLOOR = 1e-4                   # a parent with a single vote has no variance
MASS_FLOOR = 1e-9                       # a parent without votes has no mass


# ------------------------------------------------------------ EM routing, spread loss

def sigmoid(z):
    """Return 1 / (1 + exp(-z)), written so that nothing overflows."""
    return 0.5 + 0.5 * np.tanh(0.5 * z)

def softmax(b):
    """Return the exponentials of b (N, I, J, 1), divided by their sum over the parents j."""
    exp = np.exp(b - b.max(axis=2, keepdims=True))                  # (N, I, J, 1)
    return exp / exp.sum(axis=2, keepdims=True)

def softmax_back(dR, R):
    """Return db (N, I, J, 1), from the result R of the softmax in place of b."""
    return R * (dR - (R * dR).sum(axis=2, keepdims=True))

def m_step(a, R, V, beta_u, beta_a, lambda_):
    """Fit a Gaussian to the votes for every parent, and decide how active it is [M-STEP].

    a (N, I, 1, 1): the children's activations; R (N, I, J, 1): how they are divided among the
    parents; V (N, I, J, D): their votes; beta_u, beta_a (J,): of every parent. Return the means mu
    (N, 1, J, D), the variances sigma2 (N, 1, J, D), and z (N, 1, J, 1), whose sigmoid is the
    parent's activation.
    """
    r = R * a                                                       # line 2: (N, I, J, 1)
    mass = r.sum(axis=1, keepdims=True) + MASS_FLOOR                # (N, 1, J, 1)
    mu = (r * V).sum(axis=1, keepdims=True) / mass                  # line 3: (N, 1, J, D)
    off = V - mu                                        # (N, I, J, D): how far off a vote is
    variance = (r * off ** 2).sum(axis=1, keepdims=True) / mass     # line 4: (N, 1, J, D)
    sigma2 = variance + VARIANCE_FLOOR                              # (N, 1, J, D)
    log_sigma = np.log(sigma2) / 2                                  # (N, 1, J, D)
    cost = (beta_u[:, None] + log_sigma) * mass                     # line 5: (N, 1, J, D)
    total = cost.sum(axis=3, keepdims=True)                         # (N, 1, J, 1)
    z = lambda_ * (beta_a[:, None] - total)             # line 6 without its logistic: (N, 1, J, 1)
    return mu, sigma2, z, (a, R, r, mass, off, variance, sigma2, total, lambda_)

def m_step_back(dmu, dsigma2, dz, kept):
    """Return da, dR, dV, dbeta_u (J,), dbeta_a (J,): the lines of m_step from last to first."""
    a, R, r, mass, off, variance, sigma2, total, lambda_ = kept
    D = off.shape[3]
    dbeta_a = lambda_ * dz.sum(axis=(0, 1, 3))                      # line 6
    dtotal = -lambda_ * dz                                          # (N, 1, J, 1)
    dbeta_u = D * (dtotal * mass).sum(axis=(0, 1, 3))   # line 5: beta_u is in D costs
    dmass = dtotal * total / mass                       # (N, 1, J, 1): total is mass times a sum
    dsigma2 = dsigma2 + dtotal * mass / (2 * sigma2)    # line 5, by log_sigma: (N, 1, J, D)

    # Lines 4 and 3 are averages with the weights r. The derivative of an average with respect to a
    # weight is (value - average) / mass. The derivative of line 4 with respect to mu is
    # -2 sum_i r off / mass, which is 0 up to MASS_FLOOR, since mu is the average of V.
    dV = r * (dmu + 2 * dsigma2 * off) / mass                       # (N, I, J, D)
    dr_h = (dmu * off + dsigma2 * (off ** 2 - variance)) / mass     # (N, I, J, D): by each entry h
    dr = dr_h.sum(axis=3, keepdims=True) + dmass                    # (N, I, J, 1)

    da = (dr * R).sum(axis=2, keepdims=True)                        # line 2: (N, I, 1, 1)
    dR = dr * a                                                     # (N, I, J, 1)
    return da, dR, dV, dbeta_u, dbeta_a

def e_step(mu, sigma2, z, V):
    """Return R (N, I, J, 1): divide every child among the parents that its votes fit [E-STEP]."""
    off = V - mu                                                    # (N, I, J, D)
    # Line 2 as a logarithm, (N, I, J, 1). The factor 2 pi is left out, since it cancels in line 3.
    log_p = -(off ** 2 / sigma2 + np.log(sigma2)).sum(axis=3, keepdims=True) / 2
    log_a = -np.logaddexp(0, -z)                                    # (N, 1, J, 1): log sigmoid(z)
    log_ap = log_a + log_p                                          # (N, I, J, 1)
    R = softmax(log_ap)                                             # line 3: (N, I, J, 1)
    return R, (R, off, sigma2, z)

def e_step_back(dR, kept):
    """Return dmu, dsigma2, dz, dV: the lines of e_step from last to first."""
    R, off, sigma2, z = kept
    dlog_ap = softmax_back(dR, R)                                   # line 3: (N, I, J, 1)
    dz = dlog_ap.sum(axis=1, keepdims=True) * sigmoid(-z)           # by log_a: (N, 1, J, 1)
    dsigma2_i = dlog_ap * (off ** 2 / sigma2 - 1) / (2 * sigma2)    # line 2: (N, I, J, D)
    dsigma2 = dsigma2_i.sum(axis=1, keepdims=True)                  # (N, 1, J, D)
    doff = -dlog_ap * off / sigma2                                  # (N, I, J, D)
    dmu = -doff.sum(axis=1, keepdims=True)                          # (N, 1, J, D)
    dV = doff
    return dmu, dsigma2, dz, dV

def em_route(a, V, beta_u, beta_a, lambdas=LAMBDAS):
    """Return the parents' poses mu (N, J, D) and activations (N, J) [Procedure 1].

    a (N, I): the children's activations; V (N, I, J, D): their votes; beta_u and beta_a (J,).
    Every array has V's four axes here. An axis along which it would not change has length 1.
    """
    N, I, J, D = V.shape
    a = a[:, :, None, None]                                         # (N, I, 1, 1)
    R = np.full((N, I, J, 1), 1 / J, V.dtype)                       # line 2
    steps = []
    for lambda_ in lambdas:                                         # line 3
        mu, sigma2, z, fitted = m_step(a, R, V, beta_u, beta_a, lambda_)        # line 4
        R, divided = e_step(mu, sigma2, z, V)                       # line 5
        steps.append((R, fitted, divided))
    activation = sigmoid(z)[:, 0, :, 0]                             # (N, J)
    return mu[:, 0], activation, (activation, steps)

def em_route_back(dmu, dactivation, kept):
    """Return da, dV, dbeta_u, dbeta_a, through all iterations, from the last to the first."""
    activation, steps = kept
    dmu = dmu[:, None]                                              # (N, 1, J, D)
    dz = (dactivation * activation * (1 - activation))[:, None, :, None]        # (N, 1, J, 1)
    dR = 0                                              # the last R is not used
    da, dV, dbeta_u, dbeta_a = 0, 0, 0, 0
    for _, fitted, divided in reversed(steps):
        dmu_e, dsigma2, dz_e, dV_e = e_step_back(dR, divided)                   # line 5
        da_m, dR, dV_m, dbeta_u_m, dbeta_a_m = m_step_back(dmu + dmu_e, dsigma2, dz + dz_e, fitted)
        da = da + da_m
        dV = dV + dV_e + dV_m
        dbeta_u = dbeta_u + dbeta_u_m
        dbeta_a = dbeta_a + dbeta_a_m
        dmu, dz = 0, 0                      # those of the iteration before feed its E-step only
    return da[:, :, 0, 0], dV, dbeta_u, dbeta_a

def spread_loss(a, right, margin):
    """Return the loss [Eq. 3], averaged over the images, and its gradient da (N, J).

    a (N, J): the classes' activations; right (N, J): 1 for the class of the image, else 0.
    """
    a_t = (a * right).sum(axis=1, keepdims=True)                    # (N, 1)
    lack = np.maximum(0, margin - (a_t - a)) * (1 - right)          # (N, J)
    da = 2 * lack - 2 * lack.sum(axis=1, keepdims=True) * right     # (N, J)
    return (lack ** 2).sum() / len(a), da / len(a)


# ------------------------------------------------------------ the network

def windows(x, K, stride):
    """Return the K x K windows (N, G, G, C, K, K) of the images x (N, H, H, C): a grid of G x G."""
    return sliding_window_view(x, (K, K), axis=(1, 2))[:, ::stride, ::stride]

def conv(x, w, stride):
    """Return the convolution y (N, G, G, F) of the images x with the kernels w (K, K, C, F)."""
    return np.einsum("nghcij,ijcf->nghf", windows(x, len(w), stride), w, optimize=True)

def conv_back(dy, x, w, stride):
    """Return dx (N, H, H, C) and dw (K, K, C, F)."""
    K, G = len(w), dy.shape[1]
    dw = np.einsum("nghcij,nghf->ijcf", windows(x, K, stride), dy, optimize=True)
    dx = np.zeros_like(x)
    for i in range(K):                                  # pixel (i, j) of all windows at once
        for j in range(K):
            at_ij = dy @ w[i, j].T                                  # (N, G, G, C)
            dx[:, i:i + stride * G:stride, j:j + stride * G:stride] += at_ij
    return dx, dw

def init(rng):
    """Return the parameters: random weights, matrices W near the identity, and 0 for the others."""
    params = {
        "conv1": rng.normal(0, 0.28, (5, 5, 1, 32)),
        "conv2": rng.normal(0, 0.08, (3, 3, 32, 64)),
        "primary": rng.normal(0, 0.04, (3, 3, 64, TYPES * 17)),
        "W": np.eye(4) + rng.normal(0, 0.1, (TYPES, J, 4, 4)),
        "beta_u": np.zeros(J),
        "beta_a": np.zeros(J),
    }
    return {name: array.astype(np.float32) for name, array in params.items()}

def forward(p, x):
    """Return the poses mu (N, J, D) and activations (N, J) of the classes.

    p: the parameters; x (N, 28, 28, 1): images.
    """
    h1 = np.maximum(0, conv(x, p["conv1"], 2))                      # (N, 12, 12, 32): ReLU
    h2 = np.maximum(0, conv(h1, p["conv2"], 2))                     # (N, 5, 5, 64): ReLU
    y = conv(h2, p["primary"], 1)                                   # (N, 3, 3, 136)
    y = y.reshape(-1, I, 17)                            # (N, I, 17): 17 channels are a capsule
    M = y[..., :16].reshape(-1, POSITIONS, TYPES, 1, 4, 4)          # poses; 1 is the axis of J
    a = sigmoid(y[..., 16])                                         # (N, I): activations

    V = M @ p["W"]                                      # (N, POSITIONS, TYPES, J, 4, 4) [Section 2]
    # Coordinate addition [Section 4]: a capsule's position is added to the right-hand column.
    row, column = np.indices((3, 3)).reshape(2, POSITIONS, 1, 1) / 3            # (POSITIONS, 1, 1)
    V[..., 0, 3] += row
    V[..., 1, 3] += column
    V = V.reshape(-1, I, J, D)                                      # (N, I, J, D)
    mu, activation, routed = em_route(a, V, p["beta_u"], p["beta_a"])           # (N, J, D), (N, J)
    return mu, activation, (p, x, h1, h2, M, a, routed)

def backward(dmu, dactivation, kept):
    """Return the gradients of the parameters, by name."""
    p, x, h1, h2, M, a, routed = kept
    grads = {}
    da, dV, grads["beta_u"], grads["beta_a"] = em_route_back(dmu, dactivation, routed)
    dV = dV.reshape(-1, POSITIONS, TYPES, J, 4, 4)

    # V_rc = sum_m M_rm W_mc, for every image n, position s, type t and class j
    grads["W"] = np.einsum("nstrm,nstjrc->tjmc", M[:, :, :, 0], dV, optimize=True)
    dM = np.einsum("nstjrc,tjmc->nstrm", dV, p["W"], optimize=True)             # M without axis J
    dy = np.empty((len(x), I, 17), x.dtype)                         # (N, I, 17)
    dy[..., :16] = dM.reshape(-1, I, 16)
    dy[..., 16] = da * a * (1 - a)                                  # sigmoid

    dy = dy.reshape(-1, 3, 3, TYPES * 17)                           # (N, 3, 3, 136)
    dh2, grads["primary"] = conv_back(dy, h2, p["primary"], 1)      # (N, 5, 5, 64)
    dh1, grads["conv2"] = conv_back(dh2 * (h2 > 0), h1, p["conv2"], 2)          # (N, 12, 12, 32)
    _, grads["conv1"] = conv_back(dh1 * (h1 > 0), x, p["conv1"], 2)
    return grads

def loss_and_grads(p, x, labels, margin):
    """Return the loss of images x (N, 28, 28, 1), its gradients, and the activations (N, J)."""
    right = np.eye(J, dtype=x.dtype)[labels]                        # (N, J)
    mu, activation, kept = forward(p, x)                            # (N, J, D), (N, J)
    loss, dactivation = spread_loss(activation, right, margin)      # dactivation (N, J)
    dmu = np.zeros_like(mu)                             # the poses are not in the loss
    return loss, backward(dmu, dactivation, kept), activation

def adam(params, grads, m1, m2, step, rate):
    """Change params by one step of Adam (Kingma & Ba, 2015). The first step is number 1."""
    for name, d in grads.items():
        m1[name] += 0.1 * (d - m1[name])                # running mean
        m2[name] += 0.001 * (d * d - m2[name])          # running mean square
        mean = m1[name] / (1 - 0.9 ** step)             # both are corrected for starting at 0
        mean_square = m2[name] / (1 - 0.999 ** step)
        params[name] -= rate * mean / (np.sqrt(mean_square) + 1e-8)

def classify(p, x):
    """Return the class (n,) of any number of images x (n, 28, 28, 1): the most active capsule."""
    found = []
    for k in range(0, len(x), 500):
        _, activation, _ = forward(p, x[k:k + 500])                 # (500, J)
        found.append(activation.argmax(axis=1))
    return np.concatenate(found)


# ------------------------------------------------------------ MNIST, and the program

MIRRORS = ("https://storage.googleapis.com/cvdf-datasets/mnist/",
           "https://ossci-datasets.s3.amazonaws.com/mnist/")
MNIST = {                               # the files, and the SHA-256 of their contents
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

def give_up(fault):
    """Say how to get MNIST, and end the program."""
    print(f"error: {fault}. Get {', '.join(MNIST)}, each packed as .gz, from {MIRRORS[0]}, and set "
          "the environment variable MNIST_DIR to their folder", file=sys.stderr)
    sys.exit(2)

def download(name, path):
    """Download a file of MNIST from the first mirror that has it."""
    for mirror in MIRRORS:
        print(f"downloading {mirror}{name}.gz", flush=True)
        try:
            packed = urllib.request.urlopen(f"{mirror}{name}.gz", timeout=10).read()
            digest = hashlib.sha256(gzip.decompress(packed)).hexdigest()
        except Exception as error:                      # no network, or a page in place of the file
            fault = error
            continue
        if digest == MNIST[name]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".part").write_bytes(packed)
            path.with_suffix(".part").replace(path)
            return
        fault = f"{mirror} has another file"
    give_up(f"{name}.gz cannot be downloaded ({fault})")

def mnist_file(name):
    """Return the content of a file in the folder $MNIST_DIR or, without one, in the cache."""
    given = os.environ.get("MNIST_DIR")
    folder = Path(given or Path.home() / ".cache" / "hinton-mnist")
    if (folder / name).exists():
        return (folder / name).read_bytes()
    path = folder / f"{name}.gz"
    if given and not path.exists():
        give_up(f"{path} does not exist")
    if not path.exists():
        download(name, path)
    return gzip.decompress(path.read_bytes())

def mnist(part):
    """Return the images (n, 28, 28, 1), from 0 to 1, and labels (n,) of a part: train or t10k."""
    # 16 and 8 bytes of header are skipped.
    images = np.frombuffer(mnist_file(f"{part}-images-idx3-ubyte"), np.uint8, offset=16)
    labels = np.frombuffer(mnist_file(f"{part}-labels-idx1-ubyte"), np.uint8, offset=8)
    return images.reshape(-1, 28, 28, 1).astype(np.float32) / 255, labels.astype(int)

def show(images):
    """Print images (n, 28, 28, 1) without borders side by side, a character for two pixels."""
    for row in range(2, 26, 2):
        for image in images:
            pixels = image[row:row + 2, 2:26, 0].mean(axis=0)       # (24,)
            print("".join(" .:-=+*#%@"[int(9.99 * pixel)] for pixel in pixels), end="  ")
        print()

def show_routing(p, x):
    """Print how the children of one image x (1, 28, 28, 1) are divided among the classes."""
    _, activation, kept = forward(p, x)                             # (1, J)
    *_, a, routed = kept                                            # a: (1, I)
    _, steps = routed                                   # of every iteration R, and more
    shares = []                                                     # (J,) and (J,)
    for R in (steps[0][0], steps[-1][0]):                           # (1, I, J, 1)
        shares.append((R[0, :, :, 0] * a[0, :, None]).sum(axis=0) / a.sum())
    print("\nclass    after the first iteration   after the last iteration    activation")
    for j in range(J):
        line = f"{j:5}"
        for share in shares:
            line += f"    {'#' * round(20 * share[j]):20}{share[j]:4.0%}"
        print(f"{line}    {activation[0, j]:.2f}")

def main(seed=0, epochs=2):
    """Train on MNIST, print the progress, and show a routing. Return the test accuracy."""
    rng = np.random.default_rng(seed)
    params = init(rng)
    m1 = {name: np.zeros_like(array) for name, array in params.items()}
    m2 = {name: np.zeros_like(array) for name, array in params.items()}
    x, labels = mnist("train")                                      # (60000, 28, 28, 1), (60000,)
    test_x, test_labels = mnist("t10k")                             # (10000, 28, 28, 1), (10000,)

    order = np.concatenate([rng.permutation(len(x)) for _ in range(epochs)])
    batches = order.reshape(-1, 32)                                 # (3750, 32)
    right = []
    start = time.time()
    for step, rows in enumerate(batches, 1):
        margin = 0.2 + 0.7 * step / len(batches)                    # [Section 4.1]
        loss, grads, activation = loss_and_grads(params, x[rows], labels[rows], margin)
        rate = 0.003 * (1 - step / (len(batches) + 1))              # decays to 0
        adam(params, grads, m1, m2, step, rate)
        right.append((activation.argmax(axis=1) == labels[rows]).mean())
        if step % 250 == 0:
            print(f"step {step} of {len(batches)}: loss {loss:.3f}, {np.mean(right[-250:]):.1%} of "
                  f"the last 8,000 images right, {time.time() - start:.0f} seconds", flush=True)

    accuracy = (classify(params, test_x) == test_labels).mean()
    print(f"\n{accuracy:.2%} of the {len(test_x):,} test images are right. The first, and how its "
          f"{I} primary capsules are divided among the classes:\n")
    show(test_x[:1])
    show_routing(params, test_x[:1])
    return accuracy


if __name__ == "__main__":
    main()
