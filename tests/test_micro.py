"""The two micro files: their gradients, eight digits learned by heart, and the experiments compared with them."""
import gzip
import hashlib
import io

import lab
import smallnorb_novel_viewpoint as norb

import numpy as np
import pytest
from capsule_conformance.conform import examine
from conftest import EXPERIMENTS, ROOT, idx, toy_digits
from gradcheck import check_coordinates, check_directions, check_op, normal

import micro_matrix_capsnet
import microcapsnet

MICRO = {"microcapsnet": microcapsnet, "micro_matrix_capsnet": micro_matrix_capsnet}
LOSS_ARGUMENTS = {"microcapsnet": (), "micro_matrix_capsnet": (0.9,)}                  # the margin
END = {"microcapsnet": "longest capsules", "micro_matrix_capsnet": "last iteration"}
every_micro_file = pytest.mark.parametrize("name", MICRO)
every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
SHAPES = [(2, 7, 3, 5), (1, 1, 2, 4), (3, 5, 1, 2), (1, 9, 4, 16)]                     # N, I, J, D
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_count = pytest.mark.parametrize("n_iters", [1, 2, 3, 4])


def digits(n, dtype):
    """Return n images and labels as the micro files take them, one of every class in turn"""
    images, labels = toy_digits()["train"]
    return images[:n, :, :, None].astype(dtype) / 255, labels[:n].astype(int)


def initial_params(module, dtype):
    """Return parameters none of which is 0, as the biases are at first"""
    params, rng = module.init(np.random.default_rng(0)), np.random.default_rng(1)
    return {name: (a + 0.1 * rng.standard_normal(a.shape) * (not a.any())).astype(dtype) for name, a in params.items()}


def close(found, expected, tolerance):
    """Assert that arrays agree to a part of the largest entry"""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


# -------------------------------------------------------------- each file by itself

@every_micro_file
def test_the_gradient_of_the_whole_loss(name):
    """Of every parameter array, in float64; a hundredth more of any of them is found out"""
    module = MICRO[name]
    params, (x, labels) = initial_params(module, float), digits(4, float)
    x = 0.5 * x + 0.5 * np.random.default_rng(2).random(x.shape)           # one gray everywhere meets many ReLUs' kinks

    def loss(params):
        return module.loss_and_grads(params, x, labels, *LOSS_ARGUMENTS[name])[0]

    _, grads, _ = module.loss_and_grads(params, x, labels, *LOSS_ARGUMENTS[name])
    check_directions(loss, params, grads, n=1, h=1e-7)
    check_coordinates(loss, params, grads, n=2)
    for wrong in params:
        with pytest.raises(AssertionError, match=wrong):
            check_coordinates(lambda one: loss(params | one), {wrong: params[wrong]}, {wrong: 1.01 * grads[wrong]},
                              n=1)


@every_count
def test_the_gradient_of_routing(n_iters):
    """Of every vote, through all iterations"""
    check_op(lambda u_hat: microcapsnet.route(u_hat, n_iters), microcapsnet.route_back, normal(2, 5, 3, 4))


@every_micro_file
def test_float32_stays_float32(name):
    module, (x, labels) = MICRO[name], digits(4, np.float32)
    params = module.init(np.random.default_rng(0))
    _, grads, scores = module.loss_and_grads(params, x, labels, *LOSS_ARGUMENTS[name])
    assert {a.dtype for a in (*params.values(), *grads.values(), scores)} == {np.dtype(np.float32)}


@every_micro_file
def test_it_overfits_eight_digits(name):
    module, (x, labels) = MICRO[name], digits(8, np.float32)
    params = module.init(np.random.default_rng(0))
    m1, m2 = ({name: np.zeros_like(a) for name, a in params.items()} for _ in range(2))
    losses = []
    for step in range(1, 61):
        loss, grads, scores = module.loss_and_grads(params, x, labels, *LOSS_ARGUMENTS[name])
        module.adam(params, grads, m1, m2, step, 0.005)
        losses.append(loss)
    assert (scores.argmax(axis=1) == labels).all() and losses[-1] < 0.05 * losses[0], losses[::10]


@every_micro_file
def test_the_program(name, run_script, tmp_path):
    """On the digits of small files"""
    for part, n in ("train", 32), ("t10k", 40):
        images, labels = (a[:n] for a in toy_digits()["train"])
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    done = run_script("-c", f"import os, {name}; os.environ['MNIST_DIR'] = {str(tmp_path)!r}; {name}.main()")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "of the 40 test images are right" in done.stdout and END[name] in done.stdout


@every_micro_file
def test_without_mnist_it_says_how_to_get_it(name, run_script):
    done = run_script(f"{name}.py")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "refused" in done.stderr, done.stderr
    assert "error: train-images-idx3-ubyte.gz cannot be downloaded" in done.stderr and "MNIST_DIR" in done.stderr


@every_micro_file
def test_a_folder_without_the_files_is_refused(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MNIST_DIR", str(tmp_path / "empty"))
    with pytest.raises(SystemExit, match="^2$"):
        MICRO[name].mnist("train")
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(tmp_path / "empty") in err and not (tmp_path / "empty").exists()


@every_micro_file
def test_a_download_goes_into_the_cache_if_it_is_the_right_file(name, monkeypatch, tmp_path, capsys):
    """The first mirror has another file here; afterwards nothing is downloaded any more"""
    module, file = MICRO[name], "t10k-labels-idx1-ubyte"
    there = dict(zip(module.MIRRORS, (b"another", b"the right one")))
    asked = []

    def urlopen(address, timeout):
        asked.append(address)
        return io.BytesIO(gzip.compress(there[address.removesuffix(f"{file}.gz")]))
    monkeypatch.setattr(module.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(module.Path, "home", lambda: tmp_path)
    monkeypatch.setitem(module.MNIST, file, hashlib.sha256(b"the right one").hexdigest())
    assert module.mnist_file(file) == module.mnist_file(file) == b"the right one"
    assert len(asked) == 2
    assert [path.name for path in (tmp_path / ".cache" / "hinton-mnist").iterdir()] == [f"{file}.gz"]
    monkeypatch.setitem(module.MNIST, "other", "")
    with pytest.raises(SystemExit, match="^2$"):
        module.mnist_file("other")


@every_micro_file
def test_the_changes_of_one_line_that_are_measured(name):
    """bench/micro.py finds the line that it changes, and what it makes of the file runs"""
    from bench import micro
    texts = {change: micro.changed(name, change) for change in micro.CHANGES[name]}
    assert len({*texts.values()}) == len(texts) > 1
    for text in texts.values():
        exec(compile(text, name, "exec"), {"__name__": name})


def test_they_are_no_experiments():
    assert not {*MICRO} & {*lab.experiments()}
    assert not any(hasattr(module, "train") or (ROOT / "results" / name).exists() for name, module in MICRO.items())


def test_what_is_of_one_name_in_both_files_has_the_same_text():
    texts = [(ROOT / f"{name}.py").read_text("utf-8") for name in MICRO]
    functions = [{part.split("(")[0]: part.strip() for part in text.split("\ndef ")[1:]} for text in texts]
    for name in ("windows", "conv", "conv_back", "adam", "mnist_file", "mnist", "show"):
        assert functions[0][name] == functions[1][name], name


# -------------------------------------------------------------- the papers' formulas: the conformance check

def route(u_hat, n_iters):
    return microcapsnet.route(u_hat, n_iters)[0]


def route_back(dv, u_hat, n_iters):
    return microcapsnet.route_back(dv, microcapsnet.route(u_hat, n_iters)[1])


def margin_loss(lengths, present):
    return microcapsnet.margin_loss(lengths, present)[0]


def margin_loss_back(lengths, present):
    return microcapsnet.margin_loss(lengths, present)[1]


def em_route(a, V, beta_u, beta_a, lambdas):
    return micro_matrix_capsnet.em_route(a, V, beta_u, beta_a, lambdas)[:2]


def em_route_back(dmu, da_parent, a, V, beta_u, beta_a, lambdas):
    kept = micro_matrix_capsnet.em_route(a, V, beta_u, beta_a, lambdas)[2]
    return micro_matrix_capsnet.em_route_back(dmu, da_parent, kept)


def spread_loss(a, present, m):
    return micro_matrix_capsnet.spread_loss(a, present, m)[0]


def spread_loss_back(a, present, m):
    return micro_matrix_capsnet.spread_loss(a, present, m)[1]


@pytest.mark.parametrize("kind, function, backward", [
    ("dynamic", route, route_back), ("margin-loss", margin_loss, margin_loss_back),
    ("em", em_route, em_route_back), ("spread-loss", spread_loss, spread_loss_back)])
def test_the_conformance_check_finds_them_right(kind, function, backward):
    """Values and gradients"""
    report = examine(lambda: function, kind, function.__name__, backward=backward, require_gradient=True)
    assert report.passed and report.verdict == "RIGHT", report.text


# -------------------------------------------------------------- the experiments against them

@every_experiment
@every_shape
def test_squash(experiment, shape):
    s, dv = normal(*shape), normal(*shape, seed=1)
    v, cache = experiment.squash_forward(s)
    close(v, microcapsnet.squash(s), 1e-12)
    close(experiment.squash_backward(dv, cache), microcapsnet.squash_back(dv, s), 1e-12)


@every_experiment
@every_shape
@every_count
def test_dynamic_routing(experiment, shape, n_iters):
    """The experiments' axes are (N, J, I, D)"""
    N, I, J, D = shape
    u_hat, dv = normal(*shape), normal(N, J, D, seed=1)
    v, cache = experiment.routing_forward(u_hat.transpose(0, 2, 1, 3), n_iters)
    du_hat = experiment.routing_backward(dv, cache).transpose(0, 2, 1, 3)
    expected, kept = microcapsnet.route(u_hat, n_iters)
    close(v, expected, 1e-12)
    close(du_hat, microcapsnet.route_back(dv, kept), 1e-12)


@every_experiment
def test_margin_loss(experiment):
    lengths = np.random.default_rng(0).random((5, 7))
    present = np.eye(7)[[0, 3, 3, 6, 2]]
    loss, dlengths = experiment.margin_loss(lengths, present)
    expected, dexpected = microcapsnet.margin_loss(lengths, present)
    assert abs(loss - expected) <= 1e-12 * expected
    close(dlengths, dexpected, 1e-12)


@pytest.mark.parametrize("margin", [0.2, 0.9])
def test_spread_loss(margin):
    a, labels = np.random.default_rng(0).random((5, 7)), np.array([0, 3, 3, 6, 2])
    loss, da = norb.spread_loss(a, labels, margin)
    expected, dexpected = micro_matrix_capsnet.spread_loss(a, np.eye(7)[labels], margin)
    assert abs(loss - expected) <= 1e-12 * expected
    close(da, dexpected, 1e-12)


@pytest.mark.parametrize("N, I, J", [(2, 7, 3), (1, 1, 2), (3, 6, 1), (2, 13, 5)])
@every_count
def test_em_routing(N, I, J, n_iters, monkeypatch):
    """smallNORB's multiplies the mass by J / I, and its beta_a is the paper's times lambda. Its mass has a floor in the
    variance, too; both floors are set so low that this does not show. The axes are (N, J, I, D)"""
    monkeypatch.setattr(norb, "MASS_EPS", 1e-15)
    monkeypatch.setattr(micro_matrix_capsnet, "MASS_FLOOR", 1e-15)
    monkeypatch.setattr(micro_matrix_capsnet, "VARIANCE_FLOOR", norb.SIGMA2_EPS)
    V, a = normal(N, I, J, 16), np.random.default_rng(1).uniform(0.1, 1, (N, I))
    beta_u, beta_a, norb_lambda = normal(J, seed=2), normal(J, seed=3), 0.05
    dmu, da_parent = normal(N, J, 16, seed=4), normal(N, J, seed=5)

    lambda_ = norb_lambda * J / I
    mu, a_parent, kept = micro_matrix_capsnet.em_route(a, V, beta_u, beta_a / lambda_, [lambda_] * n_iters)
    da, dV, dbeta_u, dbeta_a = micro_matrix_capsnet.em_route_back(dmu, da_parent, kept)

    V = V.transpose(0, 2, 1, 3)
    (norb_mu, x), cache = norb.em_routing_forward(V, a, beta_u, beta_a, n_iters, norb_lambda)
    dx = da_parent * norb.sigmoid(x) * norb.sigmoid(-x)
    norb_dV, norb_da, norb_dbeta_u, norb_dbeta_a = norb.em_routing_backward(dmu, dx, cache)
    close(norb_mu, mu, 1e-10)
    close(norb.sigmoid(x), a_parent, 1e-10)
    close(norb_dV.transpose(0, 2, 1, 3), dV, 1e-10)
    close(norb_da, da, 1e-10)
    close(norb_dbeta_u, dbeta_u, 1e-10)
    close(norb_dbeta_a, dbeta_a / lambda_, 1e-10)
