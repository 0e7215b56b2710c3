"""Shared by the tests of the second experiment: toy settings, toy weights, toy files, slow literal references."""
import dataclasses
import gzip
import math

import smallnorb_novel_viewpoint as sn

import numpy as np

TRAINED = sn.CAPSULES + sn.CNNS    # the networks that are trained
PARTS = ("train", "familiar", "held_out")

# 80 training images in 4 azimuths, hence 2 steps an epoch of 3 shards (16, 16 and 8)
TINY = sn.Config(
    data="shapes", seed=1, n_epochs=2, batch_size=40, lr=3e-3, weight_decay=1.0, dropout=0.5, n_train_views=4,
    n_test_views=2, n_elev=1, n_per_combo=4, n_test_per_combo=1, conv1_channels=3, primary_types=1, conv_types=2,
    conv2_types=2, routing_iters=2, final_lambda=0.5, baseline="none", threads=1, quiet=True)
OWN = {**dict.fromkeys(sn.HEADS, {"trunk_channels": 2, "head_types": 2}), "cnn": {"width": 3}}
OWN |= {model: own | {"width": 2} for model, own in OWN.items() if model != "dynamic-shared"}


def tiny(model="caps", **changes):
    """TINY, without what means nothing to `model`, with tiny sizes of its own, changed"""
    own = OWN.get(model, {})
    if model == "nearest":                                                         # does not train
        own = {f.name: f.default for f in sn.options(TINY) if f.metadata["group"] == "training" and f.name != "seed"}
    return dataclasses.replace(sn.for_model(TINY, model), **own | changes)


def flags_of(config):
    """The command line whose Config is `config`"""
    flags = []
    for f in sn.given_options(config):
        flags += [sn.flag_of(f.name)] + ([] if f.type is bool else [str(getattr(config, f.name))])
    return flags


def params64(config, seed=3):
    """Toy weights in float64; biases and betas off zero, so that no unit sits on a ReLU's kink"""
    rng = np.random.default_rng(seed)
    return {name: p.astype(np.float64) + (0.1 * rng.standard_normal(p.shape) if p.ndim == 1 else 0)
            for name, p in sn.init_params(config).items()}


def batch64(config, n, seed=5):
    """n random images with labels, a margin for the spread loss and a dropout mask"""
    rng = np.random.default_rng(seed)
    kept = rng.random((n, sn.n_dropped(config))) >= 0.4
    kept[0, :2] = True, False
    return {"images": rng.random((n, 32, 32, sn.N_CHANNELS[config.data])), "labels": rng.permutation(np.arange(n) % 5),
            "margin": np.full(n, 0.8), "dropout_mask": kept / 0.6}


def outputs(params, batch, config):
    """forward's out of a batch"""
    return sn.forward(params, batch["images"], config, dropout_mask=batch.get("dropout_mask"))[0]


# ---------------------------------------------------------------- smallNORB's files

MAGIC = {"dat": 0x1E3D4C55, "cat": 0x1E3D4C54, "info": 0x1E3D4C54}


def norb_bytes(kind, array, magic=None, dims=None, ndim=None, order="<"):
    """A file of smallNORB's format: magic, ndim, max(3, ndim) sizes, data; sizes beyond ndim are 1"""
    dims = list(array.shape if dims is None else dims)
    ndim = len(dims) if ndim is None else ndim
    header = [magic or MAGIC[kind], ndim] + dims + [1] * (3 - len(dims))
    return np.array(header, order + "i4").tobytes() + array.astype("u1" if kind == "dat" else order + "i4").tobytes()


def write_norb(folder, n, gz=False, seed=0):
    """All six files with valid random content -> {(split, kind): array as in the file}"""
    rng, arrays = np.random.default_rng(seed), {}
    for (split, kind), name in sn.NORB_FILES.items():
        arrays[split, kind] = {
            "dat": lambda: rng.integers(0, 256, (n, 2, 96, 96), np.uint8), "cat": lambda: rng.integers(0, 5, n),
            "info": lambda: np.stack([rng.integers(0, 10, n), rng.integers(0, 9, n), 2 * rng.integers(0, 18, n),
                                      rng.integers(0, 6, n)], 1)}[kind]()
        raw = norb_bytes(kind, arrays[split, kind])
        (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(raw, 1) if gz else raw)
    return arrays


# ---------------------------------------------------------------- slow literal references

def em_reference(votes, a, beta_u, beta_a, config):
    """Procedure 1 for one image. votes[i] = {parent: 16 numbers}: the parents that see child i; a parent's name ends in
    its type. The mass is counted in parents / children.

    -> {parent: mu}, {parent: sigma2}, {parent: activation}, and R[i][parent] of every iteration
    """
    children = {}
    for i, seen in enumerate(votes):
        for j in seen:
            children.setdefault(j, []).append(i)
    ratio = len(children) / len(votes)
    R = [{j: 1 / len(seen) for j in seen} for seen in votes]
    history = []
    for t in range(config.em_iters):
        history.append(R)
        lambda_ = config.final_lambda * (1 - 0.95 ** (t + 1))
        mu, sigma2, act = {}, {}, {}
        for j, of_j in children.items():                                                       # M-step
            r = [R[i][j] * a[i] for i in of_j]
            mass = sum(r)
            mu[j] = [sum(r_i * votes[i][j][h] for r_i, i in zip(r, of_j)) / mass for h in range(16)]
            sigma2[j] = [sum(r_i * (votes[i][j][h] - mu[j][h]) ** 2 for r_i, i in zip(r, of_j)) / mass + 5e-4
                         for h in range(16)]
            cost = sum((beta_u[j[-1]] + math.log(math.sqrt(sigma2[j][h]))) * mass * ratio for h in range(16))
            act[j] = 1 / (1 + math.exp(-lambda_ * (beta_a[j[-1]] - cost)))
        R = []
        for seen in votes:                                                                     # E-step
            log_p = {j: math.log(act[j]) + sum(-(vote[h] - mu[j][h]) ** 2 / (2 * sigma2[j][h])
                                               - 0.5 * math.log(2 * math.pi * sigma2[j][h]) for h in range(16))
                     for j, vote in seen.items()}
            most = max(log_p.values(), default=0)
            total = sum(math.exp(value - most) for value in log_p.values())
            R.append({j: math.exp(value - most) / total for j, value in log_p.items()})
    return mu, sigma2, act, history


def matrix_product(pose, matrix):
    """4x4 times 4x4, 16 numbers in rows"""
    return [sum(pose[4 * row + k] * matrix[k, column] for k in range(4)) for row in range(4) for column in range(4)]


def conv_votes(pose, active, W):
    """3x3 convolution of capsules with stride 2. pose (H, W, B, 16), active (H, W, B), W (9*B, J, 4, 4)
    -> votes for em_reference, with parents (row, column, type), and the activations, in the order of the children"""
    height, width, B = active.shape
    votes, a = [], []
    for y, x, b in np.ndindex(height, width, B):
        votes.append({})
        a.append(active[y, x, b])
        for py, px in np.ndindex((height - 3) // 2 + 1, (width - 3) // 2 + 1):
            if 0 <= y - 2 * py < 3 and 0 <= x - 2 * px < 3:
                for j in range(W.shape[1]):
                    matrix = W[((y - 2 * py) * 3 + x - 2 * px) * B + b, j]
                    votes[-1][py, px, j] = matrix_product(pose[y, x, b], matrix)
    return votes, a


def field(place, kernel):
    """First and last pixel, on one axis, that a convolutional capsule sees: 5 px stride 2, `kernel` stride 1, 3 stride
    2"""
    first, last = 2 * place, 2 * place + 2                                                     # primary capsules
    last += kernel - 1                                                        # of the first convolution's outputs
    return 2 * first, 2 * last + 4


def conv_reference(x, w, b, stride):
    """Valid convolution of one image, pixel by pixel. x (H, W, C)"""
    Kh, Kw = w.shape[:2]
    return np.array([[b + np.einsum("yxc,yxcf->f", x[oy:oy + Kh, ox:ox + Kw], w)
                      for ox in range(0, x.shape[1] - Kw + 1, stride)]
                     for oy in range(0, x.shape[0] - Kh + 1, stride)])


def caps_reference(p, image, config, kept=None):
    """The capsule networks for one image, layer by layer as the paper draws them -> mu (5, 16), a (5,) of the classes.
    kept: a row of the dropout mask"""
    dense = config.model == "dense-caps"
    if dense:
        image = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    h = np.maximum(conv_reference(image, p["conv1_w"], p["conv1_b"], 2), 0)
    if dense:
        x = (h.reshape(-1) @ p["primary_w"] + p["primary_b"])[None, None]
    else:
        x = conv_reference(h, p["primary_w"], p["primary_b"], 1)
    B = x.shape[2] // 17
    pose, active = x[..., :16 * B].reshape(*x.shape[:2], B, 16), 1 / (1 + np.exp(-x[..., 16 * B:]))
    if dense:
        children = [(b, 0, 0, pose[0, 0, b], active[0, 0, b]) for b in range(B)]
    else:
        mu, _, act, _ = em_reference(*conv_votes(pose, active, p["conv_W"]), p["conv_beta_u"], p["conv_beta_a"], config)
        children = [(f, py, px, mu[py, px, f], act[py, px, f]) for py, px, f in mu]
        children.sort(key=lambda child: child[:3])
    votes, a = [], []
    for k, (f, py, px, m, act) in enumerate(children):
        votes.append({(j,): matrix_product(m, p["class_W"][f, j]) for j in range(5)})
        a.append(act if kept is None else act * kept[k])
        for vote in votes[-1].values() if not (dense or config.no_coord_add) else ():
            vote[3] += (sum(field(px, config.primary_kernel)) / 2 - 15.5) / 16        # x: first of the right column
            vote[7] += (sum(field(py, config.primary_kernel)) / 2 - 15.5) / 16        # y: second
    mu, _, act, _ = em_reference(votes, a, p["class_beta_u"], p["class_beta_a"], config)
    return np.array([mu[j,] for j in range(5)]), np.array([act[j,] for j in range(5)])


def max_pool(x):
    H, W, C = x.shape
    return np.array([[[max(x[2 * y + dy, 2 * k + dx, c] for dy in (0, 1) for dx in (0, 1)) for c in range(C)]
                      for k in range(W // 2)] for y in range(H // 2)])


def cnn_reference(p, image, model, kept):
    """Scores (5,) of the CNNs for one image. kept: a row of the dropout mask, or 1"""
    def conv(x, name, stride):
        return np.maximum(conv_reference(x, p[name + "_w"], p[name + "_b"], stride), 0)

    if model == "cnn":
        x = conv(np.pad(image, ((2, 2), (2, 2), (0, 0))), "conv1", 2)
        x = np.maximum(x.reshape(-1) @ p["fc1_w"] + p["fc1_b"], 0)
    elif model == "cnn-pool":
        x = max_pool(conv(max_pool(conv(image, "conv1", 1)), "conv2", 1))
        x = np.maximum(x.reshape(-1) @ p["fc1_w"] + p["fc1_b"], 0)
    else:
        x = conv(conv(conv(image, "conv1", 2), "conv2", 1), "conv3", 2).mean((0, 1))
    last = "fc1" if model == "cnn-gap" else "fc2"
    return (x * kept) @ p[last + "_w"] + p[last + "_b"]
