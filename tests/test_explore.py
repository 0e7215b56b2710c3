"""explore.py: every answer is the experiment's own forward pass of the image shown; wrong requests are refused in one
line; nothing is left running."""
import base64
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import HOMES, POSIX, ROOT, assert_refused

import explore
from explore import affnist, find_ink, multi, norb, pictures

DIGIT = {"digit": 3, "rotation": 20, "shear": -0.1, "scale_y": 1.1, "scale_x": 0.9}
TOY = {"category": 4, "toy": 1, "elevation": 35.5, "light": 2}


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    """A server of explore.py; nothing of it stays behind, though a browser keeps a spare connection open"""
    before, home = threading.enumerate(), str(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch, explore.Server(("127.0.0.1", 0), explore.Handler) as server:
        for name in HOMES:
            patch.setenv(name, home)
        patch.delenv("MNIST_DIR", raising=False)
        server.guide = explore.Guide()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        idle = socket.create_connection(server.server_address)
        yield server
        server.shutdown()
        thread.join()
    idle.close()
    assert {*threading.enumerate()} <= {*before} and server.socket.fileno() == -1


@pytest.fixture
def guide(explorer):
    return explorer.guide


def request(server, method, path, body=None, **headers):
    with contextlib.closing(http.client.HTTPConnection(*server.server_address, timeout=20)) as connection:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers


def ask(server, what, **fields):
    status, body, _ = request(server, "POST", "/ask", json.dumps({"ask": what, **fields}).encode())
    assert status == 200, body
    return json.loads(body)


def assert_bits(answer, expected):
    """An answer, numbers or base64 of pixels, is that of the experiment"""
    if isinstance(answer, str):
        answer = np.frombuffer(base64.b64decode(answer), np.uint8).reshape(expected.shape)
        expected = expected if expected.dtype == np.uint8 else np.rint(255 * expected)
    np.testing.assert_array_equal(np.array(answer, expected.dtype), expected)


@pytest.mark.parametrize("routing", [1, 0])
def test_a_pair_is_answered_by_the_network_itself(guide, explorer, routing):
    pairs, net = multi.generate_multimnist(guide.images, guide.labels, 1, np.random.default_rng(3)), guide.pair_network
    found = ask(explorer, "pair", image=explore.encode(pairs["composites"]), routing=routing)
    config = net.config if routing else multi.with_uniform_coupling(net.config)
    out, _ = multi.forward(net.weights, multi.to_batch(pairs, [0])["images"], config)
    a, b = predicted = out["digits"][0].tolist()
    assert found["digits"] == predicted and found["grid"] == 4 and len(found["couplings"]) == config.routing_iters
    for key, expected in (("lengths", out["scores"][0]), ("v", out["v"][0, predicted])):
        assert_bits(found[key], expected)
    for answer, expected in zip(found["reconstructions"], out["recon"][0]):
        assert_bits(answer, expected)
    weight = np.linalg.norm(out["u"][0], axis=-1).reshape(16, -1)       # coupling at each position
    last = np.broadcast_to(out["c"][-1], (1, 10, weight.size))[0, predicted].reshape(2, 16, -1)
    np.testing.assert_allclose(found["couplings"][-1], (last * weight).sum(-1) / weight.sum(-1), atol=1e-6)
    v = np.array(found["v"], np.float32)
    v[1, 5] += np.float32(0.2)                                          # a slider of the second digit's capsule
    changed = ask(explorer, "reconstruct", a=a, b=b, v=v.ravel().tolist())["reconstructions"]
    recon, _ = multi.decoder_forward(net.weights, np.repeat(v[1:], 10, 0)[None], np.array([[b]]))
    assert changed[0] == found["reconstructions"][0] and changed[1] != found["reconstructions"][1]
    assert_bits(changed[1], recon[0, 0])
    gray = np.pad(pairs["composites"][0] // 2, 9, constant_values=9)    # a picture of your own, as --image reads it
    assert_bits(ask(explorer, "picture", width=54, gray=explore.encode(gray))["image"],
                pictures.to_canvas(find_ink(gray / 255)))


def test_a_transformed_digit_is_answered_by_every_network_itself(guide, explorer):
    found, nets = ask(explorer, "digit", **DIGIT, y=-7.0, x=4), [found for *_, found in guide.digit_networks]
    shown = np.frombuffer(base64.b64decode(found["image"]), np.uint8).reshape(1, 40, 40)
    assert len(found["answers"]) == len(nets) >= 2
    matrix = affnist.affine_matrix(**{name: DIGIT[name] for name in affnist.IDENTITY})
    middle, _ = affnist.transform_digits(guide.images[[3]], matrix, None, 40)             # as the experiment draws it
    assert_bits(ask(explorer, "digit", **DIGIT, y=0, x=0)["image"], middle)
    for k, (answer, net) in enumerate(zip(found["answers"], nets)):
        out, _ = affnist.forward(net.weights, affnist.to_batch({"images": shown}, [0])["images"], net.config)
        assert_bits(answer["scores"], out["scores"][0])
        assert answer.get("reconstruction", "") == (explore.encode(out["recon"]) if "recon" in out else "")
        chart, there = ask(explorer, "map", **DIGIT, network=k), ask(explorer, "digit", **DIGIT, y=-6, x=8)["answers"]
        assert len(chart["predicted"]) == len(chart["visible"]) == 169 and chart["visible"][84]
        assert chart["predicted"][13 * 3 + 10] == np.argmax(there[k]["scores"])
    huge = {"digit": 2, "shear": 0.8, "scale_y": 1.5, "scale_x": 1.5, "rotation": 45}
    assert not any(ask(explorer, "map", **huge, network=0)["visible"]), "a part is always beyond the canvas"


def test_a_toy_is_answered_by_every_network_itself(guide, explorer):
    found, ring = ask(explorer, "toy", **TOY, azimuth=130.0), ask(explorer, "ring", **TOY)["predicted"]
    views = norb.draw_view(norb.make_toy(4, norb.TOY_SPLITS["test"][1], 0), 35.5, 130.0, 96)
    assert_bits(found["image"], views[2, 0])
    images = norb.to_batch({"images": norb.downsample(views)}, [2])["images"]
    for k, (*_, net) in enumerate(guide.toy_networks):
        out = norb.forward(net.weights, images, net.config)[0]
        assert_bits(found["answers"][k], out["a" if net.config.model in norb.MATRIX_MODELS else "scores"][0])
        assert net.config.model not in norb.CAPSULES or 0 <= min(found["answers"][k]) <= max(found["answers"][k]) <= 1
        assert len(ring[k]) == 36 and ring[k][13] == np.argmax(found["answers"][k])


def test_own_networks_are_added_and_one_for_pairs_replaces_the_pretrained_one(guide, tmp_path, call):
    names = "affnist_cnn-gap", "multimnist_capsnet", "smallnorb_matrix-capsnet"
    paths = [ROOT / "weights" / f"{name}.npz" for name in names]
    own = explore.Guide(paths)
    assert [len(of) for of in own.networks.values()] == [1, len(guide.digit_networks) + 1, len(guide.toy_networks) + 1]
    shown = own.start()["networks"]
    assert own.key != guide.key and shown[0][0][0] == "multimnist_capsnet" and shown[0][0][1].startswith("yours: ")
    assert [of[2:] for of in guide.start()["networks"][2]] == [
        [kind, (300, 400)] for kind in ("length", "probability", "activation")]
    for split, known in ("elevation", (0, 360)), ("instance", (0, 360)), ("azimuth", (300, 400)):
        assert explore.familiar_azimuths(norb.Config(split=split)) == known
    code, out, err = call(multi, explore.main, "--load", paths[1], paths[0], paths[1])
    assert (code, out, err.count("\n")) == (2, "", 1) and f"--load {paths[1]} {paths[1]}: the page shows one" in err
    config, state = multi.load(paths[1])
    state["history"]["names"] = list("abcdefghij")
    multi.save(tmp_path / "letters.npz", config, state)
    assert_refused(call(multi, explore.main, "--load", tmp_path / "letters.npz"), "other classes: a, b, c, ")
    (tmp_path / "broken.npz").write_bytes(b"PK")
    with pytest.raises(explore.InputError, match="broken.npz: not a network that the page can show"):
        explore.Guide([tmp_path / "broken.npz"])


PAIR = explore.encode(np.zeros(1296, np.uint8))
BAD = [b"", b"{", b"[]", b"3", b"null", b'"pair"', b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"ask": []}',
       b'{"ask": "pair"}', b'{"ask": "answer"}', b'{"ask": "__init__"}', b'{"ask": "start", "more": 1}']
BAD += [json.dumps(fields).encode() for fields in (
    *({"ask": "pair", "image": image, "routing": 1} for image in (
        None, 3, [], {}, "", PAIR[:-4], PAIR + "AAAA", PAIR[:-1], "é" * 1728, "====" * 432, [PAIR], "../etc/passwd")),
    *({"ask": "pair", "image": PAIR, "routing": routing} for routing in (None, True, 1.0, "1", -1, 2, 10 ** 400, [1])),
    *({"ask": "digit", **DIGIT, "y": 0, "x": 0} | wrong for wrong in (
        {"rotation": float("nan")}, {"rotation": float("inf")}, {"x": 1e300}, {"y": 10 ** 400}, {"shear": "0"},
        {"scale_y": 0}, {"scale_x": None}, {"digit": 0.5}, {"digit": 199}, {"digit": -1}, {"x": [0]},
        {"x": False}, {"z": 0}, {"page": -1}, {"page": "1"}, {"page": 2 ** 32})),
    *({"ask": "reconstruct", "a": 1, "b": 2, "v": v} for v in (
        0, [], [0] * 31, [0] * 33, [[0] * 16] * 2, [float("nan")] * 32, ["0"] * 32, [1e9] * 32, {"0": 0})),
    *({"ask": "picture", "width": width, "gray": PAIR} for width in (0, 36.0, 35, 36, 9999)),               # 36: no ink
    {"ask": "map", **DIGIT, "network": 99}, {"ask": "toy", **TOY, "azimuth": 1e9},
    {"ask": "ring", **TOY, "category": 5}, {"ask": "ring", **TOY, "is_stale": 0})]


def test_what_is_wrong_is_refused_in_one_line(explorer):
    before = ask(explorer, "pair", image=PAIR, routing=1)
    for body in BAD:
        status, text, _ = request(explorer, "POST", "/ask", body)
        assert status == 400 and text.count(b"\n") == 1 and text.endswith(b"\n") and len(text) < 200, (body[:80], text)
    for length in ("9", "-1", "x", "", "1000001", "9" * 30):                            # 9: the rest never comes
        assert request(explorer, "POST", "/ask", b"{}", **{"Content-Length": length})[0] == 400
    assert ask(explorer, "pair", image=PAIR, routing=1) == before


def test_an_editor_opens_the_page_in_its_own_pane(explorer):
    """with a query, after a HEAD request, in a frame of its own; other pages do not frame it"""
    page = request(explorer, "GET", "/")[1]
    for query in ("/?id=1", "/?vscodeBrowserReqId=17&x=/explore.js", "/explore.js?t=3"):
        status, text, headers = request(explorer, "GET", query)
        assert status == 200 and (text == page) == query.startswith("/?")
        status, text, of_head = request(explorer, "HEAD", query)
        assert (status, text, of_head["Content-Length"]) == (200, b"", headers["Content-Length"])
    assert request(explorer, "HEAD", "/nothing")[:2] == (404, b"")
    *_, ancestors = headers["Content-Security-Policy"].partition("frame-ancestors ")
    assert ancestors.split() == ["'self'", "http://localhost:*", "http://127.0.0.1:*", "vscode-webview:"]
    assert request(explorer, "GET", "/?id=1", Host="x.example")[0] == 403


def test_other_hosts_origins_paths_and_methods_are_refused(explorer):
    port = explorer.server_address[1]
    for path, (name, _) in explore.PAGE.items():
        status, text, headers = request(explorer, "GET", path, Host=f"localhost:{port}",
                                        Origin=f"http://localhost:{port}")
        assert status == 200 and text.decode() == (ROOT / "explore" / name).read_text("utf-8")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    for host in ("localhost:9000", "[::1]:1"):                          # of a browser at the end of a tunnel
        assert request(explorer, "GET", "/", Host=host)[0] == 200
    assert b"ssh -L" in request(explorer, "GET", "/", Host="a.example:80")[1]
    for headers in ({"Host": "x.example"}, {"Host": "127.0.0.1.x"}, {"Host": "localhost.a:80"},
                    {"Origin": "null"}, {"Origin": "http://x.example"},
                    {"Origin": f"http://127.0.0.1:{port}.x.example"}, {"Origin": f"https://127.0.0.1:{port}"}):
        assert {request(explorer, *at, **headers)[0] for at in (("GET", "/"), ("POST", "/ask", b"{}"))} == {403}
    for path in ("/explore.py", "/ask", "/../explore.py", "/%2e%2e/explore.py", "/explore", "/explore?/"):
        assert request(explorer, "GET", path)[0] == 404
    assert request(explorer, "POST", "/", b"{}")[0] == 404 and request(explorer, "PUT", "/ask", b"{}")[0] == 501


@pytest.mark.parametrize("n_pages", [1, 2])
def test_of_a_flood_the_newest_of_each_page_wins(guide, n_pages):
    asks = [{"ask": "ring", **TOY, "elevation": 30 + k, "page": 7 + k % n_pages} for k in range(8)]      # interleaved
    found, queue = {}, guide.queues["ring"]
    threads = [threading.Thread(target=lambda k=k: found.update({k: guide.answer(dict(asks[k]))})) for k in range(8)]
    with queue.lock:                                                     # the first is being answered
        for ticket, thread in enumerate(threads, queue.count + 1):
            thread.start()
            while queue.count < ticket:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    answers = {k: guide.answer(dict(asks[k])) for k in range(8 - n_pages, 8)}
    assert found == dict.fromkeys(range(8), explore.STALE) | answers and explore.STALE not in answers.values()
    for page in range(200):
        guide.answer({"ask": "start", "page": page})
    assert len(guide.queues["start"].newest) <= explore.MAX_PAGES + 1
    stale = {"is_stale": lambda: True}
    assert guide.ring(**TOY, **stale) == guide.map(**DIGIT, network=0, **stale) == explore.STALE


@POSIX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_takes_the_next_port_and_stops_cleanly(tmp_path, number):
    """Also where the shell ignores interrupts, as it does for a script that is started with &"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, str(ROOT / "explore.py"), "--no-browser", "--port", str(taken.getsockname()[1])]
        with subprocess.Popen(command, env={"HOME": str(tmp_path), "PATH": ""}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:
            line = process.stdout.readline()
            process.send_signal(number)
            out, err = process.communicate(timeout=20)
    assert "is taken: http://127.0.0.1:" in line and (process.returncode, out, err) == (0, "\nstopped\n", "")
