"""Training: it learns, it is reproducible to the bit, it survives being killed, it stops when it diverges."""
import dataclasses
import json
import os
import signal
from pathlib import Path

import multimnist_capsnet as mc
import numpy as np
import pytest
from conftest import TINY, assert_same, toy_digits


def train(digits, callback=None, every=0, **changes):
    return mc.train(dataclasses.replace(TINY, **changes), callback, every, digits)


def without_seconds(history):
    """history with the wall-clock times taken out"""
    return {**history, "seconds": 0, "epochs": [{**epoch, "seconds": 0} for epoch in history["epochs"]]}


@pytest.fixture(scope="module")
def reference(digits):
    """The toy run that others must equal: 2 epochs of 2 batches of 3 shards"""
    return train(digits)


# ---------------------------------------------------------------- it learns

def test_overfits_8_examples(digits):
    params, history = train(digits, n_epochs=150, n_train=8, batch_size=8, n_val=1, fixed_pool=True, lr=1e-2, conv1_channels=6,
                            primary_types=2, primary_dim=6, digit_dim=8, decoder_hidden1=32, decoder_hidden2=64)
    first, last = history["epochs"][0], history["epochs"][-1]
    assert last["train_set_accuracy"] == 1 and last["train_margin"] < 0.05 * first["train_margin"]
    assert last["train_recon"] < 0.5 * first["train_recon"]


def test_pinned_losses(reference):
    """Numbers of this very run, written down: they move when the arithmetic does. Update them only if it was meant to."""
    _, history = reference
    losses = [epoch[name] for epoch in history["epochs"] for name in ("train_loss", "train_margin", "train_recon", "val_loss")]
    assert losses == pytest.approx(PINNED, rel=1e-3)


PINNED = [1.88360, 1.60413, 558.951, 1.83688, 1.82338, 1.54394, 558.893, 1.78855]


def test_train_is_adam_on_fresh_batches_with_the_scheduled_rate(digits):
    """The training loop written out: 2 epochs of 2 batches of one shard, learning rate lr * (1 + cos(pi step/4)) / 2"""
    config = dataclasses.replace(TINY, n_train=32, batch_size=16)
    params = mc.init_params(config)
    m, v = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    step = 0
    for epoch in range(2):
        pairs, = mc.epoch_pairs(digits, epoch, config)
        for rows in (slice(0, 16), slice(16, 32)):
            _, grads = mc.loss_and_grads(params, mc.to_batch(pairs, rows), config)
            lr, step = config.lr * (1 + np.cos(np.pi * step / 4)) / 2, step + 1
            for name, g in grads.items():
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g ** 2
                params[name] = params[name] - np.float32(lr) * (m[name] / (1 - 0.9 ** step)) / (
                    np.sqrt(v[name] / (1 - 0.999 ** step)) + 1e-8)
    trained, _ = mc.train(config, digits=digits)
    for name in params:
        moved = np.abs(params[name] - mc.init_params(config)[name]).mean()
        assert np.abs(trained[name] - params[name]).mean() < 1e-3 * moved, name


def test_history_says_what_happened(reference, digits):
    params, history = reference
    assert history["digits"] == "synthetic" and history["steps"] == 4 and history["seconds"] > 0
    assert [(epoch["epoch"], epoch["step"]) for epoch in history["epochs"]] == [(1, 2), (2, 4)]
    last = history["epochs"][-1]
    assert last["train_loss"] == pytest.approx(last["train_margin"] + 0.0005 * last["train_recon"])
    with mc.Runner(1) as runner:
        val = mc.evaluate(params, mc.draw_pairs(digits, "val", TINY.n_val, TINY, "evaluation", 0), TINY, runner)
    assert {name: last["val_" + name] for name in ("loss", "recon_mse", "set_accuracy", "any_accuracy")} == \
        {name: val[name] for name in ("loss", "recon_mse", "set_accuracy", "any_accuracy")}


@pytest.mark.parametrize("changes", [
    dict(routing_grad="detached"), dict(routing_iters=1), dict(merge="add"), dict(fixed_pool=True), dict(min_iou=0.0),
    dict(lr_schedule="constant"), dict(lr_schedule="exponential"), dict(lr=1e-3), dict(recon_weight=0.0)], ids=str)
def test_every_setting_has_an_effect(reference, digits, changes):
    params, _ = train(digits, **changes)
    assert not np.array_equal(params["W"], reference[0]["W"])


# ---------------------------------------------------------------- same bits

def test_same_seed_same_bits_and_different_seed_different_bits(reference, digits):
    params, history = train(digits)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])
    other, _ = train(digits, seed=2)
    assert not any(np.array_equal(other[name], params[name]) for name in params)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_change_a_bit(reference, digits, threads):
    params, history = train(digits, threads=threads)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_blas_has_one_thread(name):
    assert os.environ[name] == "1"


def test_a_callback_cannot_change_the_run(reference, digits):
    seen = []

    def vandal(step, params, terms):
        seen.append((step, terms and terms["loss"], {name: p.copy() for name, p in params.items()}))
        for p in params.values():
            p.fill(np.nan)
        if terms:
            terms.clear()
        np.random.seed(0)
        np.random.random(7)

    params, history = train(digits, vandal, 3)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])
    assert [step for step, *_ in seen] == [0, 3, 4] and seen[0][1] is None and seen[1][1] > 0
    assert_same(seen[0][2], mc.init_params(TINY))
    assert_same(seen[-1][2], params)


def test_train_leaves_global_random_numbers_alone(digits):
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    train(digits, n_epochs=1)
    assert np.random.random() == expected


class OnlyCounted:
    """Images nobody may look at: all that can be asked is how many there are."""

    def __len__(self):
        return 60

    def __getattr__(self, name):
        raise AssertionError(f"train looked at the test images ({name})")

    def __getitem__(self, key):
        raise AssertionError("train looked at the test images")

    __array__ = __iter__ = __getitem__


def test_train_never_looks_at_the_test_images(reference, digits):
    params, _ = mc.train(TINY, digits=digits | {"test": (OnlyCounted(), OnlyCounted())})
    assert_same(params, reference[0])


# ---------------------------------------------------------------- killed and resumed

def test_killed_in_the_middle_of_an_epoch_and_resumed_is_never_killed(reference, digits, tmp_path):
    path = str(tmp_path / "run.npz")

    def power_cut(step, params, terms):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(digits, power_cut, 1, checkpoint=path, resume=True)                              # nothing there yet: starts anew
    assert mc.load_checkpoint(path)[3]["step"] == 2
    steps = []
    params, history = train(digits, lambda step, *_: steps.append(step), 1, checkpoint=path, resume=True, threads=2)
    assert steps == [2, 3, 4]
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])
    before = Path(path).read_bytes()
    again, _ = train(digits, checkpoint=path, resume=True)                                     # nothing left to do
    assert_same(again, reference[0])
    assert Path(path).read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["home", "run.npz"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from conftest import TINY, mc, toy_digits
import dataclasses, numpy as np
saved, savez = [], np.savez
def half(file, **arrays):
    saved.append(1)
    savez(file, **arrays)
    if len(saved) == 2:
        file.truncate(999)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
def callback(step, *_):
    if step == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
np.savez = half
mc.train(dataclasses.replace(TINY, checkpoint={path!r}), callback, 1, toy_digits())
"""


@pytest.mark.parametrize("at", [3, -1], ids=["in an epoch", "while saving"])
def test_a_process_that_is_killed_leaves_a_whole_checkpoint(reference, digits, tmp_path, run_script, at):
    path = str(tmp_path / "run.npz")
    killed = run_script("-c", KILLED.format(tests=str(Path(__file__).parent), path=path, at=at))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert mc.load_checkpoint(path)[3]["step"] == 2
    params, history = train(digits, checkpoint=path, resume=True)
    assert_same(params, reference[0])
    assert without_seconds(history) == without_seconds(reference[1])


def test_a_checkpoint_holds_the_run(reference, digits, tmp_path):
    path = str(tmp_path / "run.npz")
    train(digits, checkpoint=path)
    params, adam_m, adam_v, meta = mc.load_checkpoint(path)
    assert_same(params, reference[0])
    assert adam_m.keys() == adam_v.keys() == params.keys() and all(v.min() >= 0 and v.any() for v in adam_v.values())
    config = mc.config_of(meta, path)
    assert all(getattr(config, f.name) == getattr(TINY, f.name) for f in dataclasses.fields(TINY)
               if not f.metadata.get("runtime") and f.name != "n_test")
    with pytest.raises(mc.InputError, match="run.npz: a checkpoint of another experiment"):
        mc.config_of({"config": meta["config"] | {"azimuths": 6}}, path)
    assert oct(os.stat(path).st_mode & 0o777) == oct(0o666 & ~mc.UMASK)


@pytest.mark.parametrize("changes, named", [
    (dict(conv1_channels=4), "conv1_channels 3, now 4"), (dict(seed=2), "seed 1, now 2"),
    (dict(n_epochs=3), "n_epochs 2, now 3"), (dict(merge="add"), "merge max, now add")], ids=str)
def test_a_checkpoint_of_another_run_is_refused(digits, tmp_path, changes, named):
    path = tmp_path / "run.npz"
    train(digits, checkpoint=str(path), n_epochs=2, n_train=40)
    before = path.read_bytes()
    with pytest.raises(mc.InputError, match=named):
        train(digits, checkpoint=str(path), resume=True, **{"n_train": 40} | changes)
    with pytest.raises(mc.InputError, match="source synthetic, now mnist"):
        train(digits | {"source": "mnist"}, checkpoint=str(path), resume=True, n_train=40)
    assert path.read_bytes() == before


def meta_only(meta):
    return lambda path: np.savez(path, meta=np.array(meta))


def strip(path, name):
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if key != name}
    np.savez(path, **arrays)


def npy(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))


def flip_directory(path):
    """One bit of the zip's directory: the first entry's compression method"""
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 10] ^= 4
    path.write_bytes(raw)


SPOILS = {
    "empty": lambda p: p.write_bytes(b""), "text": lambda p: p.write_text("hello"),
    "zip stub": lambda p: p.write_bytes(b"PK\x03\x04"),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1000]), "half": lambda p: p.write_bytes(p.read_bytes()[:9999]),
    "flipped": lambda p: p.write_bytes(p.read_bytes()[:5000] + b"?" + p.read_bytes()[5001:]),
    "without meta": lambda p: np.savez(p, a=np.zeros(3)), "meta is no json": meta_only("hello"),
    "other format": meta_only('{"format": 2}'), "only meta": meta_only('{"format": 1}'),
    "pickle": lambda p: np.savez(p, meta=np.array({"format": 1}, object)),
    "npy": npy, "directory flipped": flip_directory, "a parameter is missing": lambda p: strip(p, "params/W"),
    "a moment is missing": lambda p: strip(p, "adam_v/W")}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_is_not_a_whole_checkpoint_is_refused_in_one_line(digits, tmp_path, spoil):
    path = tmp_path / "run.npz"
    train(digits, checkpoint=str(path), n_train=40)
    SPOILS[spoil](path)
    before = path.read_bytes()
    with pytest.raises(mc.InputError, match="run.npz") as error:
        train(digits, checkpoint=str(path), resume=True, n_train=40)
    assert "\n" not in str(error.value) and path.read_bytes() == before


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(mc.InputError, match="nothing.npz: no such file"):
        mc.load_checkpoint(tmp_path / "nothing.npz")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "result"
    mc.write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"new")
        raise OSError(28, "No space left on device")

    with pytest.raises(mc.InputError, match="No space left"):
        mc.write_atomically(path, fail)
    assert path.read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["home", "result"]


# ---------------------------------------------------------------- divergence

@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("lr", [1e20, 1e38])
def test_a_huge_learning_rate_stops_the_run(digits, lr):
    with pytest.raises(mc.InputError, match="diverged; lower --lr"):
        train(digits, lr=lr, n_epochs=4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint(digits, tmp_path, monkeypatch, bad):
    path, calls, good = tmp_path / "run.npz", [], mc.loss_and_grads

    def goes_wrong(*args):
        calls.append(1)
        terms, grads = good(*args)
        return {**terms, "loss": bad if len(calls) > 8 else terms["loss"]}, grads              # 3 shards a step: in the third

    monkeypatch.setattr(mc, "loss_and_grads", goes_wrong)
    with pytest.raises(mc.InputError, match=f"loss is {bad} at step 3.*last good state is in .*run.npz"):
        train(digits, checkpoint=str(path))
    params, _, _, meta = mc.load_checkpoint(path)
    assert meta["step"] == 2 and all(np.isfinite(p).all() for p in params.values())


def test_weights_that_are_not_finite_never_reach_the_checkpoint(digits, tmp_path, monkeypatch):
    path, steps, good = tmp_path / "run.npz", [], mc.adam_step

    def goes_wrong(params, *args):
        good(params, *args)
        steps.append(1)
        if len(steps) == 4:                                                    # after the last step: no loss would show it
            params["dec3_b"][5] = np.nan

    monkeypatch.setattr(mc, "adam_step", goes_wrong)
    with pytest.raises(mc.InputError, match="diverged"):
        train(digits, checkpoint=str(path))
    assert mc.load_checkpoint(path)[3]["step"] == 2


# ---------------------------------------------------------------- settings

def test_toy_digits_are_the_ones_other_processes_make(digits):
    assert all(np.array_equal(digits[split][0], toy_digits()[split][0]) for split in ("train", "val", "test"))


def test_history_survives_json(reference):
    assert json.loads(json.dumps(reference[1])) == reference[1]
