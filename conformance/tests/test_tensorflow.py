"""conformance/check.py with TensorFlow: float32 and below, a layer of Keras, a loss, gradients by GradientTape."""
import pytest
from test_check import named, run  # noqa: F401  (run is a fixture)

pytest.importorskip("tensorflow")
ROUTE = '''
import tensorflow as tf

def squash(s):
    square = tf.reduce_sum(s ** 2, -1, keepdims=True)
    return s * tf.sqrt(square + 1e-9) / (1 + square)

def forward(u_hat, n_iters):
    b = tf.zeros(u_hat.shape[:3], u_hat.dtype)
    for t in range(n_iters):
        c = tf.nn.softmax(b, axis=2)
        v = squash(tf.reduce_sum(c[..., None] * u_hat, 1))
        b = b + tf.reduce_sum(u_hat * v[:, None], -1)
    return v

def backward(dv, u_hat, n_iters):
    u_hat = tf.constant(u_hat, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(u_hat)
        v = forward(u_hat, n_iters)
    return tape.gradient(v, u_hat, dv)

def route(u_hat, n_iters):
    return forward(tf.cast(u_hat, tf.float64), n_iters)
'''
OVER_INPUTS = ("axis=2", "axis=1")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_function_in_low_precision_is_right_up_to_precision_and_a_mistake_is_named(run, dtype):  # noqa: F811
    low = ("tf.cast(u_hat, tf.float64)", f"tf.cast(u_hat, tf.{dtype})")
    code, text = run(ROUTE, changes=[low])
    assert code == 0 and "VALUES RIGHT UP TO PRECISION, GRADIENT NOT CHECKED" in text and dtype in text, text
    code, text = run(ROUTE, changes=[low, OVER_INPUTS])
    assert code == 1 and named(text) == ["softmax over input capsules"], text


def test_a_gradient_tape_shows_a_stopped_gradient(run, tmp_path):  # noqa: F811
    code, text = run(ROUTE, "--backward", f"{tmp_path}/mine.py:backward", "--require-gradient")
    assert code == 0 and "RIGHT: your function" in text and "VALUES" not in text, text
    code, text = run(ROUTE, "--backward", f"{tmp_path}/mine.py:backward", changes=[
        ("c[..., None]", "tf.stop_gradient(c)[..., None]")])
    assert code == 1 and named(text) == ["gradient of inner iterations stopped"], text


LAYER = '''
import tensorflow as tf

class Capsules(tf.keras.layers.Layer):
    def __init__(self, n_capsules, n_entries, n_iters):
        super().__init__()
        self.n_capsules, self.n_entries, self.n_iters = n_capsules, n_entries, n_iters

    def build(self, shape):
        self.W = self.add_weight(shape=(shape[1], self.n_capsules, self.n_entries, shape[2]), name="W")

    def call(self, u):
        u_hat = tf.einsum("nid,ijed->nije", u, self.W)
        b = tf.zeros(tf.shape(u_hat)[:3])
        for t in range(self.n_iters):
            s = tf.einsum("nij,nije->nje", tf.nn.softmax(b, axis=2), u_hat)
            square = tf.reduce_sum(s ** 2, -1, keepdims=True)
            v = s * tf.sqrt(square + 1e-9) / (1 + square)
            b = b + tf.einsum("nije,nje->nij", u_hat, v)
        return v

def layer(u, W, n_iters):
    caps = Capsules(W.shape[1], W.shape[2], n_iters)
    caps.build(u.shape)
    caps.set_weights([W])
    return caps(u)
'''


def test_a_layer_of_keras_and_one_planted_mistake(run):  # noqa: F811
    code, text = run(LAYER, "--layer")
    assert code == 0 and "RIGHT UP TO PRECISION" in text, text
    code, text = run(LAYER, "--layer", changes=[("b = b + tf", "b = tf")])
    assert code == 1 and named(text) == ["logits not accumulated"], text


def test_a_margin_loss(run):  # noqa: F811
    source = '''
import tensorflow as tf

def loss(y_true, y_pred):
    y_true, y_pred = tf.cast(y_true, tf.float32), tf.cast(y_pred, tf.float32)
    L = y_true * tf.maximum(0., 0.9 - y_pred) ** 2 + 0.5 * (1 - y_true) * tf.maximum(0., y_pred - 0.1) ** 2
    return tf.reduce_mean(tf.reduce_sum(L, 1))
'''
    code, text = run(source, "--margin-loss")
    assert code == 0 and "RIGHT UP TO PRECISION" in text, text
    code, text = run(source, "--margin-loss", changes=[("0.5 *", "0.25 *")])
    assert code == 1 and named(text) == ["factor 0.5 squared"], text
