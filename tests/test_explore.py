"""explore.py: every answer is the experiment's own forward of the picture shown; what is wrong is refused in one line;
nothing stays behind."""
import base64
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import explore
import numpy as np
import pytest
from conftest import EXPERIMENTS, ROOT, SMALL, toy
from explore import affnist, multi, norb, pictures

RNG = np.random.default_rng(0)
PLACE = {"digit": 3, "turn": 20, "shear": -0.1, "down": 1.1, "across": 0.9}
TOY = {"category": 4, "toy": 1, "elevation": 35.5, "light": 2}


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("MNIST_DIR", raising=False)
        yield explore.Guide()


@pytest.fixture(scope="module")
def server(guide):
    with explore.Server(("127.0.0.1", 0), explore.Handler) as server:
        server.guide = guide
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def ask(server):
    """ask(field=value, ...) -> the answer, over HTTP"""
    def ask(**fields):
        status, body, _ = request(server, "POST", "/ask", json.dumps(fields).encode())
        assert status == 200, body
        return json.loads(body)
    return ask


def request(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    found = reply.status, reply.read(), reply.headers
    connection.close()
    return found


def raw(server, data):
    """What comes back for these bytes, after which nothing more is sent"""
    with socket.create_connection(server.server_address, timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def bytes_of(text, *shape):
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


def assert_bits(answer, expected):
    np.testing.assert_array_equal(np.array(answer, expected.dtype), expected)


def as_bytes(pixels):
    return np.rint(255 * pixels).astype(np.uint8)


def two_digits(guide):
    """A composite of two of the digits to pick, (36, 36) uint8"""
    pair = multi.generate_multimnist(guide.images, guide.labels, 1, np.random.default_rng(3))
    return pair["composites"][0]


# ---------------------------------------------------------------- answers

@pytest.mark.parametrize("routed", [1, 0])
def test_a_pair_is_answered_by_the_network_itself(guide, ask, routed):
    image, net = two_digits(guide), multi.load_network(multi.WEIGHTS)
    found = ask(ask="pair", image=explore.coded(image), routed=routed)
    config = net.config if routed else explore.dataclasses.replace(net.config, routing_iters=1)
    batch = multi.to_batch({"composites": image[None], "sources": image[None], "labels": np.zeros((1, 2))}, slice(None))
    out, _ = multi.forward(net.weights, batch["images"], config)
    assert_bits(found["lengths"], out["lengths"][0])
    assert found["digits"] == out["digits"][0].tolist()
    assert_bits(found["v"], out["v"][0, found["digits"]])
    for k in range(2):
        assert_bits(bytes_of(found["redrawn"][k], 36, 36), as_bytes(out["recon"][0, k]))
    weight = np.linalg.norm(out["u"][0], axis=-1)                      # what is left of a place's coupling, less 1
    last = np.broadcast_to(out["c"][-1], (1, 10, len(weight)))[0, found["digits"]].reshape(2, 16, -1)
    share = (last * weight.reshape(16, -1)).sum(-1) / weight.reshape(16, -1).sum(-1)
    np.testing.assert_allclose(found["change"][-1], 10 * share - 1, atol=1e-5)
    assert len(found["change"]) == config.routing_iters and found["grid"] == 4

    v = np.array(found["v"], np.float32)
    v[1, 5] += np.float32(0.2)                                         # a slider of the second digit's capsule
    moved = ask(ask="redraw", a=found["digits"][0], b=found["digits"][1], v=v.ravel().tolist())["redrawn"]
    assert moved[0] == found["redrawn"][0] and moved[1] != found["redrawn"][1]
    capsules = np.zeros((1, 10, 16), np.float32)
    capsules[0, found["digits"][1]] = v[1]
    masked, _ = multi.mask_forward(capsules, np.array([[found["digits"][1]]]))
    assert_bits(bytes_of(moved[1], 1296), as_bytes(multi.layers_forward(net.weights, masked, multi.decoder(
        net.config))[0][0]))


def test_a_picture_becomes_the_canvas_that_image_makes_of_it(ask):
    gray = np.full((60, 90), 250, np.uint8)
    gray[10:50, 30:36] = gray[10:16, 30:60] = 20
    found = ask(ask="picture", width=90, gray=explore.coded(gray))
    assert_bits(bytes_of(found["image"], 36, 36), as_bytes(pictures.to_canvas(pictures.find_ink(gray / 255, "x"))))


def test_a_moved_digit_is_answered_by_every_network_itself(guide, ask):
    names = [name for name in explore.NETWORKS[affnist] if (ROOT / "weights" / f"{name}.npz").exists()]
    networks = [affnist.load_network(ROOT / "weights" / f"{name}.npz") for name in names]
    found = ask(ask="digit", **PLACE, y=-7.0, x=4)
    shown = bytes_of(found["image"], 1, 40, 40)
    assert len(found["answers"]) == len(networks) >= 2
    for answer, net in zip(found["answers"], networks):
        out, _ = affnist.forward(net.weights, affnist.to_batch({"images": shown}, slice(None))["images"], net.config)
        assert_bits(answer["scores"], out["scores"][0])
        assert ("redrawn" in answer) == ("recon" in out)
        if "recon" in out:
            assert_bits(bytes_of(answer["redrawn"], 40, 40), as_bytes(out["recon"][0, 0]))
    factors = {name: PLACE[name] for name in affnist.REST}              # in the middle: as the experiment puts it there
    middle, _ = affnist.affine_digits(guide.images[[3]], affnist.affine_matrix(**factors), None, 40)
    assert_bits(bytes_of(ask(ask="digit", **PLACE, y=0, x=0)["image"], 1, 40, 40), middle)
    for k, net in enumerate(networks):
        of_places, at = ask(ask="map", **PLACE, network=k), RNG.integers(0, 13, 2)
        assert len(of_places["named"]) == len(of_places["whole"]) == 169 and of_places["whole"][84]
        there = ask(ask="digit", **PLACE, y=int(2 * at[0] - 12), x=int(2 * at[1] - 12))["answers"][k]["scores"]
        assert of_places["named"][13 * at[0] + at[1]] == np.argmax(there)


def test_a_toy_is_answered_by_every_network_itself(ask):
    networks = [norb.load_network(ROOT / "weights" / f"{name}.npz") for name in explore.NETWORKS[norb]]
    found, ring = ask(ask="toy", **TOY, azimuth=130.0), ask(ask="ring", **TOY)["named"]
    views = norb.draw_view(norb.make_toy(4, norb.TOY_SPLITS["test"][1], 0), 35.5, 130.0, 96)
    assert_bits(bytes_of(found["image"], 96, 96), views[2, 0])
    samples = {"images": norb.halve(views)[[2]], "labels": np.array([4])}
    for k, net in enumerate(networks):
        batch = norb.to_batch(next(norb.prepared(samples, "toys")), slice(None))
        assert_bits(found["answers"][k], norb.forward(net.weights, batch["images"], net.config)[0]["scores"][0])
        assert len(ring[k]) == 36 and ring[k][13] == np.argmax(found["answers"][k])


def test_the_start_and_the_chapters(guide, ask):
    found = ask(ask="start")
    assert_bits(bytes_of(found["digits"], len(guide.labels), 28, 28), guide.images)
    assert [len(names) for names in found["networks"]] == [len(of) for of in guide.networks.values()]
    for k, module in enumerate(explore.NETWORKS):
        assert ask(ask="chapter", tab=k)["text"] == (ROOT / "docs" / f"{module.__name__}.md").read_text()


def test_a_network_of_ones_own(call, tmp_path):
    paths = []
    for name, module in EXPERIMENTS.items():
        config, data = toy(name, **({"data": "toys", "preset": "small"} if module is norb else {}))
        weights = module.init_params(config)
        weights |= module.init_state(weights)
        paths.append(str(tmp_path / f"{name}.npz"))
        module.save_weights(paths[-1], config, weights, {"source": "synthetic", "epochs": [], "seconds": 0, "steps": 0})
    assert SMALL and [len(of) for of in explore.Guide(paths).networks.values()] == [
        1, 1 + len(explore.Guide().moved), 1 + len(explore.Guide().toys)]
    (tmp_path / "broken.npz").write_bytes(b"PK")
    with pytest.raises(explore.InputError, match="broken.npz: no trained network"):
        explore.Guide([str(tmp_path / "broken.npz")])


# ---------------------------------------------------------------- refusals

PAIR = explore.coded(np.zeros(1296, np.uint8))
BAD = [b"", b"{", b"[]", b"3", b"null", b'"pair"', b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"ask": 1}', b'{"ask": []}',
       b'{"ask": "answer"}', b'{"ask": "__init__"}', b'{"ask": "pair"}', b'{"ask": "start", "more": 1}']
BAD += [json.dumps(fields).encode() for fields in (
    *({"ask": "pair", "image": image, "routed": 1} for image in (
        None, 3, [], {}, "", PAIR[:-4], PAIR + "AAAA", PAIR[:-1], "é" * 1728, "====" * 432, [PAIR], "../../etc/passwd")),
    *({"ask": "pair", "image": PAIR, "routed": routed} for routed in (None, True, 1.0, "1", -1, 2, 10 ** 400, [1])),
    *({"ask": "digit", **PLACE, "y": 0, "x": 0} | wrong for wrong in (
        {"turn": float("nan")}, {"turn": float("inf")}, {"x": 1e300}, {"y": 10 ** 400}, {"shear": "0"}, {"down": 0},
        {"across": None}, {"digit": 0.5}, {"digit": 10 ** 9}, {"digit": -1}, {"x": [0]}, {"x": False}, {"z": 0})),
    *({"ask": "redraw", "a": 1, "b": 2, "v": v} for v in (
        0, [], [0] * 31, [0] * 33, [[0] * 16] * 2, [float("nan")] * 32, ["0"] * 32, [1e9] * 32, {str(k): 0 for k in range(32)})),
    *({"ask": "picture", "width": width, "gray": PAIR} for width in (0, 36.0, 35, 1296, 10 ** 6)),
    {"ask": "picture", "width": 36, "gray": PAIR},                                      # no ink
    {"ask": "map", **PLACE, "network": 99}, {"ask": "chapter", "tab": "../x"}, {"ask": "chapter", "tab": 3},
    {"ask": "toy", **TOY, "azimuth": 1e9}, {"ask": "ring", **TOY, "category": 5}, {"ask": "ring", **TOY, "is_late": 0})]


def test_what_is_wrong_is_refused_in_one_line(server, ask):
    before = ask(ask="pair", image=PAIR, routed=1)
    for body in BAD:
        status, text, _ = request(server, "POST", "/ask", body)
        assert status == 400 and text.count(b"\n") == 1 and text.endswith(b"\n"), (body[:80], status, text)
        assert b"Traceback" not in text and len(text) < 200
    assert ask(ask="pair", image=PAIR, routed=1) == before


def test_other_hosts_origins_paths_and_methods_are_refused(server):
    port = server.server_address[1]
    for path in explore.PAGE:
        status, text, headers = request(server, "GET", path)
        assert status == 200 and text.decode() == (ROOT / "explore" / explore.PAGE[path][0]).read_text()
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert request(server, "GET", "/", Host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == 200
    for headers in ({"Host": "evil.example"}, {"Host": "127.0.0.1"}, {"Origin": "null"}, {"Origin": "http://evil.example"},
                    {"Origin": f"http://127.0.0.1:{port}.evil.example"}, {"Origin": f"https://127.0.0.1:{port}"}):
        assert request(server, "GET", "/", **headers)[0] == request(server, "POST", "/ask", b"{}", **headers)[0] == 403
    for path in ("/explore.py", "/ask", "/../explore.py", "/%2e%2e/explore.py", "/?x", "/explore"):
        assert request(server, "GET", path)[0] == 404
    assert request(server, "POST", "/", b"{}")[0] == 404 and request(server, "PUT", "/ask", b"{}")[0] == 501
    ours = f"POST /ask HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n".encode()
    for rest in (b"\r\n", b"Content-Length: 9\r\n\r\n{}", b"Content-Length: -1\r\n\r\n{}", b"Content-Length: x\r\n\r\n{}",
                 b"Content-Length: 1000001\r\n\r\n{}", b"Content-Length: 99999999999999999999\r\n\r\n{}"):
        assert raw(server, ours + rest).split()[1] == b"400"
    assert b"400" in raw(server, b"\x16\x03\x01\x00 rubbish\r\n\r\n")


def test_of_a_flood_the_newest_wins(server, guide):
    asks = [{"ask": "ring", **TOY, "elevation": 30 + k} for k in range(8)]
    found = {}

    def send(k):
        found[k] = guide.answer(dict(asks[k]))
    threads = [threading.Thread(target=send, args=(k,)) for k in range(len(asks))]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    assert found[7] == guide.answer(dict(asks[7])) and explore.STALE in found.values()
    assert all("named" in answer or answer == explore.STALE for answer in found.values())


# ---------------------------------------------------------------- nothing stays behind

def test_no_thread_and_no_socket_stays(guide):
    before = threading.enumerate()
    server = explore.Server(("127.0.0.1", 0), explore.Handler)
    server.guide = guide
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    idle = socket.create_connection(server.server_address)                      # as a browser's spare connection
    idle.sendall(b"POST /ask HTTP/1.1\r\n")
    assert request(server, "GET", "/")[0] == 200
    server.shutdown()
    server.server_close()
    thread.join()
    assert threading.enumerate() == before and server.socket.fileno() == -1
    with pytest.raises(OSError):
        socket.create_connection(server.server_address, timeout=2)
    idle.close()


def test_the_command_takes_the_next_port_and_stops_cleanly(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"HOME": str(tmp_path), "PATH": "", "http_proxy": "http://127.0.0.1:9"}
        with subprocess.Popen([sys.executable, str(ROOT / "explore.py"), "--no-browser", "--port", str(port)], env=env,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
    assert f"port {port} is taken: http://127.0.0.1:" in line and "Ctrl-C" in line
    assert process.returncode == 0 and out == "\nstopped\n" and not err
