"""Shared by the tests of smallNORB: tiny networks, few images, files, slow literal references."""
import math

import smallnorb_novel_viewpoint as sn

import golden
import numpy as np
from references import conv_reference, routing_reference, squash_reference

PARTS = ("train", "familiar", "novel")
TRAINED = tuple(sn.MODELS)
sn.SIZES["tiny"] = sn.Size(3, 1, 2, 2, 2, 2)                              # a preset for tests, of no run
PRESET = next(f for f in sn.SETTINGS if f.name == "preset")
PRESET.metadata = PRESET.metadata | {"choices": (*PRESET.metadata["choices"], "tiny")}


def tiny(model="matrix-capsnet", **changes):
    """Return the Config of a tiny network, changed by what applies to it"""
    given = dict(model=model, data="shapes", seed=1, preset="tiny", width=2, routing_iters=2, threads=1, quiet=True)
    return sn.Config(**golden.applying(sn.EXPERIMENT, given | changes))


def few(config, n_train=40, n_test=10):
    """load_data's dict of some of the shapes' images"""
    data = sn.load_data(config)
    for name in PARTS:
        rows = np.random.default_rng(0).permutation(len(data[name]["labels"]))[:n_train if name == "train" else n_test]
        data[name] = {key: array[rows] for key, array in data[name].items()}
    return data


def params64(config, seed=3):
    """Return initial weights in float64; biases and betas off zero, so that no unit sits on a ReLU's kink; votes of
    vector capsules long enough that they compete"""
    rng = np.random.default_rng(seed)
    params = {name: p.astype(np.float64) * (5 if name in ("W", "coordinate_W") else 1)
              for name, p in sn.init_params(config).items()}
    return {name: p + 0.1 * (p.ndim == 1) * rng.standard_normal(p.shape) for name, p in params.items()}


def running64(config, seed=4):
    """Return running statistics, unlike those of a batch"""
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(0.2, 2, x.shape) if name.endswith("_var") else 0.3 * rng.standard_normal(x.shape)
            for name, x in sn.initial_state(config)["running"].items()}


def batch64(config, n, seed=5):
    """n random images with labels, a margin for the spread loss and, with dropout, masks"""
    rng = np.random.default_rng(seed)
    batch = {"images": rng.random((n, 32, 32, sn.N_CHANNELS[config.data])), "labels": rng.permutation(np.arange(n) % 5),
             "margin": np.full(n, 0.8)}
    if config.dropout:
        batch["dropout_mask"] = 2.0 * rng.integers(0, 2, (n, sn.param_shapes(config)["fc2_w"][0]))
    return batch


def outputs(params, batch, config):
    """Return forward's outputs for a batch: with the batch's statistics, unless `params` holds running ones"""
    statistics = None if params.keys() & sn.initial_state(config)["running"].keys() else {}
    return sn.forward(params, batch["images"], config, statistics, batch.get("dropout_mask"))[0]


# ---------------------------------------------------------------- smallNORB's files

def norb_bytes(kind, array, magic=None, dims=None, order="<"):
    """A file of smallNORB's format: magic, ndim, max(3, ndim) sizes, data; sizes beyond ndim are 1"""
    dims = list(array.shape if dims is None else dims)
    header = [magic or {"dat": 0x1E3D4C55}.get(kind, 0x1E3D4C54), len(dims)] + dims + [1] * (3 - len(dims))
    return np.array(header, order + "i4").tobytes() + array.astype("u1" if kind == "dat" else order + "i4").tobytes()


def write_norb(folder, n, seed=0):
    """All six files with valid random content -> {(split, kind): array as in the file}"""
    rng, arrays = np.random.default_rng(seed), {}
    for split, kind in sn.NORB_FILES:
        toys = sn.TOY_SPLITS[split]
        arrays[split, kind] = {
            "dat": lambda: rng.integers(0, 256, (n, 2, 96, 96), np.uint8), "cat": lambda: rng.integers(0, 5, n),
            "info": lambda toys=toys: np.stack([rng.choice(toys, n), rng.integers(0, 9, n), 2 * rng.integers(0, 18, n),
                                                rng.integers(0, 6, n)], 1)}[kind]()
        (folder / sn.NORB_FILES[split, kind]).write_bytes(norb_bytes(kind, arrays[split, kind]))
    return arrays


# ---------------------------------------------------------------- slow literal references

def em_reference(votes, a, beta_u, beta_a, n_iters, lambda_=1 / 16):
    """Procedure 1 for one image. votes[i] = {parent: 16 numbers}: the parents that see child i; a parent's name ends in
    its type. The mass is counted in parents / children.

    -> {parent: mu}, {parent: sigma2}, {parent: x}, whose logistic is the activation, and R[i][parent] of every
    iteration
    """
    children = {}
    for i, seen in enumerate(votes):
        for j in seen:
            children.setdefault(j, []).append(i)
    ratio = len(children) / len(votes)
    R = [{j: 1 / len(seen) for j in seen} for seen in votes]
    history = []
    for _ in range(n_iters):
        history.append(R)
        mu, sigma2, x = {}, {}, {}
        for j, of_j in children.items():                                                       # M-step
            r = {i: R[i][j] * a[i] for i in of_j}
            mass = sum(r.values())
            mu[j] = sum(r[i] * votes[i][j] for i in of_j) / mass
            sigma2[j] = sum(r[i] * (votes[i][j] - mu[j]) ** 2 for i in of_j) / mass + 5e-4
            cost = sum((beta_u[j[-1]] + math.log(math.sqrt(of_h))) * mass * ratio for of_h in sigma2[j])
            x[j] = beta_a[j[-1]] - lambda_ * cost
        R = []
        for seen in votes:                                                                     # E-step
            log_p = {j: -math.log(1 + math.exp(-x[j])) - sum(
                (vote - mu[j]) ** 2 / (2 * sigma2[j]) + 0.5 * np.log(2 * math.pi * sigma2[j]))
                for j, vote in seen.items()}
            most = max(log_p.values(), default=0)
            total = sum(math.exp(value - most) for value in log_p.values())
            R.append({j: math.exp(value - most) / total for j, value in log_p.items()})
    return mu, sigma2, x, history


def logistic(x):
    return 1 / (1 + np.exp(-x))


def conv_votes(pose, active, W, stride):
    """3x3 convolution of capsules. pose (H, W, B, 16), active (H, W, B), W (9*B, J, 4, 4)
    -> votes for em_reference, with parents (row, column, type), and the activations, in the order of the children"""
    height, width, B = active.shape
    votes, a = [], []
    for y, x, b in np.ndindex(height, width, B):
        votes.append({})
        a.append(active[y, x, b])
        for py, px in np.ndindex((height - 3) // stride + 1, (width - 3) // stride + 1):
            if 0 <= y - stride * py < 3 and 0 <= x - stride * px < 3:
                for j in range(W.shape[1]):
                    matrix = W[((y - stride * py) * 3 + x - stride * px) * B + b, j]
                    votes[-1][py, px, j] = (pose[y, x, b].reshape(4, 4) @ matrix).ravel()
    return votes, a


def conv_caps_reference(pose, active, W, beta_u, beta_a, n_iters, stride, lambda_=1 / 16):
    """Convolutional capsules of one image -> mu (Ho, Wo, J, 16), a (Ho, Wo, J)"""
    mu, _, x, _ = em_reference(*conv_votes(pose, active, W, stride), beta_u, beta_a, n_iters, lambda_)
    grid = tuple(np.max(list(mu), 0) + 1)
    return (np.array([mu[at] for at in np.ndindex(grid)]).reshape(*grid, 16),
            logistic(np.array([x[at] for at in np.ndindex(grid)]).reshape(grid)))


def field(position, config):
    """First and last pixel, on one axis, that the last positions of capsules see, one layer below the other"""
    backbone = (3, 1), (2, 2), (3, 1), (3, 1), (2, 2), (3, 1), (3, 1)                          # (kernel, stride)
    first = last = position
    for kernel, stride in ((3, 1), (3, 2), (1, 1), (5, 2)) if config.model == "matrix-capsnet" else backbone:
        first, last = stride * first, stride * last + kernel - 1
    return first, last


def coordinate(position, config):
    """The center of a position's receptive field, from -1 at the image's left or upper edge to 1"""
    return (sum(field(position, config)) / 2 - 15.5) / 16


def norm_reference(p, x, name):
    """Batch normalization with running statistics, channel by channel"""
    y = np.empty_like(x)
    for c in range(x.shape[-1]):
        gamma, beta, mean, var = (p[f"{name}_norm_{end}"][c] for end in ("gamma", "beta", "mean", "var"))
        y[..., c] = gamma * (x[..., c] - mean) / math.sqrt(var + 1e-5) + beta
    return y


def max_pool(x):
    H, W, C = x.shape
    return np.array([[[max(x[2 * y + dy, 2 * k + dx, c] for dy in (0, 1) for dx in (0, 1)) for c in range(C)]
                      for k in range(W // 2)] for y in range(H // 2)])


def normal_conv(p, x, name, stride=1):
    """Convolution without bias, normalization, ReLU"""
    return np.maximum(norm_reference(p, conv_reference(x, p[name + "_w"], 0, stride), name), 0)


def backbone_reference(p, image):
    """What all heads share, (5, 5, channels)"""
    x = max_pool(normal_conv(p, normal_conv(p, image, "conv1"), "conv2"))
    return max_pool(normal_conv(p, normal_conv(p, x, "conv3"), "conv4"))


def primary_reference(p, x):
    """The primary capsules' convolution and its normalization"""
    return norm_reference(p, conv_reference(x, p["primary_w"], 0, 1), "primary")


def em_network_reference(p, image, config):
    """matrix-capsnet and matrix-head for one image, layer by layer -> mu (5, 16), x (5,) of the classes"""
    h = normal_conv(p, image, "conv1", 2) if config.model == "matrix-capsnet" else backbone_reference(p, image)
    x = primary_reference(p, h)
    B = x.shape[2] // 17
    pose, active = x[..., :16 * B].reshape(*x.shape[:2], B, 16), logistic(x[..., 16 * B:])
    for name, stride in (("conv", 2), ("conv2", 1)) if config.model == "matrix-capsnet" else ():
        weights = (p[name + end] for end in ("_W", "_beta_u", "_beta_a"))
        pose, active = conv_caps_reference(pose, active, *weights, config.routing_iters, stride,
                                           config.inverse_temperature)
    votes, a = [], []
    side, _, types = active.shape
    for b, py, px in np.ndindex(types, side, side):
        votes.append({(j,): (pose[py, px, b].reshape(4, 4) @ p["class_W"][b, j]).ravel() for j in range(5)})
        a.append(active[py, px, b])
        for vote in votes[-1].values() if config.coordinates else ():
            vote[3] += coordinate(px, config)                               # x: first of the right column
            vote[7] += coordinate(py, config)                               # y: second
    mu, _, x, _ = em_reference(votes, a, p["class_beta_u"], p["class_beta_a"], config.routing_iters,
                               config.inverse_temperature)
    return np.array([mu[j,] for j in range(5)]), np.array([x[j,] for j in range(5)])


def vector_network_reference(p, image, config):
    """capsnet and capsnet-shared for one image -> v (5, 16), and c (children, 5) of every iteration"""
    x = primary_reference(p, backbone_reference(p, image))
    types, votes = x.shape[2] // 8, []
    for i, (py, px, b) in enumerate(np.ndindex(*x.shape[:2], types)):
        u = squash_reference(x[py, px, 8 * b:8 * b + 8])
        W = p["W"][i if config.model == "capsnet" else b]                                  # (8, 5, 16)
        votes.append(np.einsum("e,ejd->jd", u, W))
        if config.model != "capsnet" and config.coordinates:
            at = np.linalg.norm(u) * np.array([coordinate(px, config), coordinate(py, config)])
            votes[-1] += np.einsum("k,kjd->jd", at, p["coordinate_W"])
    steps = routing_reference(np.stack(votes, 1)[None], config.routing_iters)
    return steps[-1][1][0], [c[0].T for c, _ in steps]


def cnn_reference(p, image, config):
    """Scores (5,) of the CNNs for one image"""
    def linear(x, name):
        return x @ p[name + "_w"] + p[name + "_b"]

    def conv(x, name):
        if config.model == "cnn-bn":
            return normal_conv(p, x, name)
        return np.maximum(conv_reference(x, p[name + "_w"], p[name + "_b"], 1), 0)

    def padded(x):
        return np.pad(x, ((2, 2), (2, 2), (0, 0))) if config.preset == "paper" else x

    if config.model in sn.PAPER_CNNS:
        x = max_pool(conv(padded(max_pool(conv(padded(image), "conv1"))), "conv2"))
        return linear(np.maximum(linear(x.reshape(-1), "fc1"), 0), "fc2")
    x = backbone_reference(p, image)
    for axis in (1, 0) if config.coordinates else ():  # x, then y, of 5 by 5 positions
        at = (4 * np.arange(5.0) + 7.5 - 15.5) / 16                                     # fields of 16 px, 4 px apart
        x = np.concatenate([x, np.moveaxis(np.broadcast_to(at, (1, 5, 5)), -1, 1 + axis)[0][..., None]], -1)
    return linear(normal_conv(p, x, "conv5").mean((0, 1)), "fc1")
