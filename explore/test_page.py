"""The page of explore.py in a headless browser: draws, drags, moves sliders, and prints how long each takes. With
SCREENSHOTS=viz/explore it writes the documents' screenshots again, with MNIST digits if $MNIST_DIR has them."""
import base64
import os
import re
import shutil
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import explore

driven = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: requirements-dev.txt")
BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium, or no chromedriver, "
                                                   "on this machine")]
SHOTS = os.environ.get("SCREENSHOTS")
PREDICTIONS = ("return [...document.getElementById(arguments[0]).querySelectorAll('.prediction')]"
               ".map(node => node.textContent)")


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    """A server of explore.py, with MNIST for the SCREENSHOTS alone"""
    with pytest.MonkeyPatch.context() as patch, explore.Server(("127.0.0.1", 0), explore.Handler) as server:
        for name in ("HOME", "USERPROFILE"):
            patch.setenv(name, str(tmp_path_factory.mktemp("home")))
        if not SHOTS:
            patch.delenv("MNIST_DIR", raising=False)
        server.guide = explore.Guide()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(explorer, tmp_path_factory):
    """The browser, with the server's guide and, for each kind of request, ms from an event to its display"""
    options = driven.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    page = driven.Chrome(options=options, service=driven.ChromeService(DRIVER))
    page.js, page.guide, page.times = page.execute_script, explorer.guide, {}
    try:
        page.get(f"http://127.0.0.1:{explorer.server_address[1]}/")
        until(lambda: page.js("return pair.answer"))
        yield page
        assert not [line for line in page.get_log("browser") if line["level"] == "SEVERE"]
    finally:
        page.quit()
    for what, ms in page.times.items():
        print(f"explore.py, {what}: {statistics.median(ms):.0f} ms from the event to its display, {len(ms)} times")
        assert statistics.median(ms) < 2000                    # however busy the machine


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)


def settled(page):
    """Wait until no request is sent or answered"""
    until(lambda: page.js("return Object.values(waiting).every(queue => !queue.busy)"))
    until(lambda: not re.search("computing|…", page.js("return document.querySelector('main').innerText")))
    for what, ms in page.js("return times").items():
        page.times[what] = max(page.times.get(what, []), ms, key=len)


def drag(page, node, *points, keys=""):
    """Press the mouse at the first of some points, in fractions of a node's sides, and drag it through the others"""
    node, hand = page.find_element("id", node), driven.ActionChains(page, duration=15)
    page.js("arguments[0].scrollIntoView({block: 'center'})", node)
    for k, at in enumerate(points):
        hand.move_to_element_with_offset(node, *(round((fraction - 0.5) * node.size["width"]) for fraction in at))
        hand = hand.click_and_hold() if k == 0 else hand
    hand.release().send_keys(keys).perform()
    settled(page)


def test_two_strokes_are_classified_and_a_dimension_of_a_capsule_changes_pixels(page):
    page.js("document.querySelector('input[value=draw]').click()")                     # on an empty sheet
    drag(page, "pair-stage", (0.35, 0.25), (0.35, 0.5), (0.33, 0.75))
    drag(page, "pair-stage", (0.3, 0.3), (0.65, 0.3), (0.6, 0.5), (0.5, 0.75))
    image, verdict = page.js("return [encode(pair.image), $('pair-verdict').textContent]")
    found = page.guide.answer({"ask": "pair", "image": image, "routing": 1})
    assert page.js("return pair.answer") == found | {"isEmpty": False}
    (a, b), lengths = found["digits"], found["lengths"]
    assert f": {a} and {b} (lengths {lengths[a]:.2f} and {lengths[b]:.2f})." in verdict
    look = "return [$('reconstruction-0'), $('coupling')].map(canvas => canvas.toDataURL())"
    recon, coupling = page.js(look)
    page.find_element("css selector", "#dimensions input").send_keys(driven.Keys.END)
    settled(page)
    assert page.js(look)[0] != recon and page.js("$('pair-reset').click();" + look) == [recon, coupling]
    page.js("$('routing').click()")
    settled(page)
    assert page.js(look)[1] != coupling and page.js("return pair.answer.couplings.length") == 1
    page.js("$('routing').click()")
    settled(page)
    assert page.js(look)[1] == coupling and page.js("return $('iteration').value") == "3"


def test_only_the_left_button_or_one_finger_draws(page):
    page.js("document.querySelector('input[value=draw]').click(); $('pair-stage').scrollIntoView({block: 'center'})")
    left, top, side = page.js("const box = $('pair-stage').getBoundingClientRect(); return [box.x, box.y, box.width]")
    spots = [{"x": left + x * side, "y": top + y * side} for x, y in ((0.2, 0.2), (0.25, 0.2), (0.8, 0.8), (0.3, 0.2))]
    added = []                                                     # ink of a right button, one finger, two fingers
    for kind in ("right", "touch", "two"):
        before = page.js("return pair.image.reduce((sum, ink) => sum + ink)")
        for name, where in (("Pressed", 0), ("Moved", 1), ("Released", 1)) if kind == "right" else ():
            page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": f"mouse{name}", "button": "right"} | spots[where])
        for name, touching in (("Start", [0]), ("Start", [0, 2]), ("Move", [1, 2]), ("Move", [3, 2]), ("End", [])):
            points = [spots[k] | {"id": int(k == 2)} for k in touching if kind == "two" or k != 2]
            if kind != "right" and (kind == "two" or touching != [0, 2]):
                page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": f"touch{name}", "touchPoints": points})
        settled(page)
        added.append(page.js("return pair.image.reduce((sum, ink) => sum + ink)") - before)
        page.js("$('pair-clear').click()")
        settled(page)
    assert added[0] == 0 < added[1] == added[2], added


def test_the_image_stays_where_it_is_while_the_verdict_changes(page):
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 360, "height": 780, "deviceScaleFactor": 1,
                                                                "mobile": True})
    tops = [page.js("showPairAnswer({...pair.answer, isEmpty: arguments[0], lengths: pair.answer.lengths.map((_, k) => "
                    "arguments[1] + k / 100)}); return $('pair-stage').getBoundingClientRect().top", empty, length)
            for empty, length in ((True, 0), (False, 0.01), (False, 0.9))]
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert len(set(tops)) == 1, tops


def test_another_example_keeps_the_transformation_of_a_drawn_digit_which_has_no_class(page):
    assert page.js("return $('pair-label').value") == ""
    page.js("document.querySelector('input[value=move]').click()")
    drag(page, "pair-stage", (0.5, 0.5), (0.75, 0.5), keys="[" * 37)                   # past 180 degrees
    before = page.js("const {x, rotation} = pair.layers[0]; return [x, rotation]")
    assert before[0] > 5 and before[1] == -175
    assert page.js("return $('pair-rotation').nextElementSibling.value") == "-175°"
    page.js("$('pair-other').click()")
    settled(page)
    assert page.js("const {x, rotation} = pair.layers[0]; return [x, rotation]") == before
    assert page.js("return $('pair-label').value === String(facts.labels[pair.layers[0].index])")


def test_a_digit_dragged_to_the_edge_is_classified_as_by_the_networks(page):
    page.find_element("id", "tab-pair").send_keys(driven.Keys.ARROW_RIGHT)
    drag(page, "digit-stage", (0.5, 0.5), (0.6, 0.6), (0.75, 0.75))
    x, y, fields = page.js("return [digit.x, digit.y, digitFields()]")
    found = page.guide.answer({"ask": "digit", **fields, "y": y, "x": x})["answers"]
    assert min(x, y) >= 9 and [int(text[0]) for text in page.js(PREDICTIONS, "digit")] == [
        np.argmax(answer["scores"]) for answer in found]
    page.js("$('digit-edge').click()")                                                 # all its ink, and no gap
    settled(page)
    found = page.guide.answer({"ask": "digit", **fields, **page.js("return {y: digit.y, x: digit.x}")})
    ink = np.frombuffer(base64.b64decode(found["image"]), np.uint8).reshape(40, 40)
    assert ink[-1].any() and ink[:, -1].any() and ink.sum() == page.guide.images[fields["digit"]].sum()
    page.js("changeDigit({shear: 0.5})")
    y, x = page.js("return toCanvas(...POINTS['handle-rotation']).map(px => px / SIDE)")
    drag(page, "digit-frame", (x, y), (x + 0.01, y), (x, y))
    assert abs(page.js("return digit.rotation")) <= 2
    page.js("changeDigit({shear: 0, rotation: 0}); moveTo(10, 10)")
    drag(page, "digit-frame", (0.75, 0.4), (0.85, 0.45))                               # the handle that rotates it
    chart = page.guide.answer({"ask": "map", **page.js("return digitFields()"), "network": 0})
    correct = sum(np.equal(chart["predicted"], page.guide.labels[fields["digit"]]) & chart["visible"])
    assert page.js("return digit.rotation") < -10
    assert f"correct at {correct} of {sum(chart['visible'])} positions" == page.js(
        "return document.querySelector('#digit figcaption').textContent")


def test_a_toy_rotates(page):
    page.js("$('tab-toy').click()")
    drag(page, "toy-stage", (0.3, 0.5), (0.7, 0.4), keys=driven.Keys.ARROW_RIGHT)
    fields = page.js("const {predicted, ...fields} = toy; return fields")
    found = page.guide.answer({"ask": "toy", **fields})["answers"]
    assert fields["azimuth"] > 60 and fields["elevation"] < 40
    kinds = [kind for _, _, kind, *_ in page.guide.start()["networks"][2]]
    for text, scores, kind, k in zip(page.js(PREDICTIONS, "toy"), found, kinds, range(3)):
        bars = page.js(f"return [...$('toy-cards').children[{k}].querySelectorAll('i')].map(bar => "
                       "parseFloat(bar.style.getPropertyValue('--size')))")
        shares = np.exp(scores) / np.exp(scores).sum() if kind == "probability" else scores
        assert bars == pytest.approx(100 * np.array(shares)) and text == (
            f"{explore.norb.NORB_NAMES[np.argmax(scores)]} ({kind} {max(shares):.2f})")
    assert page.js("return document.querySelectorAll('#ring .correct, #ring .wrong').length") == 36 * len(found)


@pytest.mark.parametrize("width, mode", [(360, "dark"), (360, "light"), (1080, "dark"), (1080, "light")])
def test_every_tab_fits_the_screen(page, tmp_path, width, mode):
    folder = Path(SHOTS) if SHOTS and (width, mode) == (1080, "light") else tmp_path
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": 780, "deviceScaleFactor": 1, "mobile": width < 500})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": mode}]})
    for tab in ("pair", "digit", "toy"):
        page.js(f"location.hash = '{tab}'; location.reload()")
        until(lambda: page.js("return typeof facts === 'object' && times[location.hash.slice(1)]"))
        settled(page)
        sides = page.js("return [document.documentElement.scrollWidth, document.body.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": sides[1], "scale": 1}
        shot = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})["data"]
        (folder / f"{tab}.png").write_bytes(base64.b64decode(shot))
        assert sides[0] <= width
