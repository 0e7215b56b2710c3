"use strict";
// The page draws and handles input; all predictions come from the server, by ask().

const $ = id => document.getElementById(id);
const ROLES = ["first", "second"];
const COLORS = [[40, 150, 255], [255, 125, 25]];               // of the first and the second predicted digit, on black
const DIGITS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
const TOYS = ["animal", "human", "plane", "truck", "car"];
const PAGE = crypto.getRandomValues(new Uint32Array(1))[0];      // of this page, in all of its requests
let facts, factsKey;                                             // the answer to "start"; key of the server's facts

// ---------------------------------------------------------------- the server

const waiting = {};                                              // kind of request -> the next request of this kind
let offline = false;                                             // the last request was not answered
const times = {};                                                // kind of request -> ms from the event to the display

/** Send a request and call show(answer). One request of a kind is sent at a time; of those that wait, only the newest */
function ask(kind, fields, show) {
  const queue = waiting[kind] ??= {};
  queue.next = {fields, show, at: window.event?.timeStamp ?? performance.now()};
  if (!queue.busy) sendAll(kind, queue);
}

async function sendAll(kind, queue) {
  queue.busy = true;
  try {
    while (queue.next) {
      const {fields, show, at} = queue.next;
      queue.next = null;
      const answer = await fetchAnswer(kind, fields);
      if (answer?.stale) queue.next ??= {fields, show, at};
      else if (answer) {
        show(answer);
        requestAnimationFrame(() => (times[kind] ??= []).push(performance.now() - at));
      }
    }
  } finally {
    queue.busy = false;
  }
}

/** Return the answer, {stale: true} if a newer request has overtaken it, or null after an error, which is displayed */
async function fetchAnswer(kind, fields) {
  try {
    const reply = await fetch("/ask", {method: "POST", body: JSON.stringify({ask: kind, page: PAGE, ...fields})});
    const key = reply.headers.get("X-Facts"), answer = reply.ok ? await reply.json() : null;
    const error = key !== (factsKey ??= key) ? "The server now shows other networks or digits. Reload this page."
      : answer ? "" : await reply.text();
    if (error || offline || !pending[kind]) showError(error);      // a map's answer leaves another request's error
    offline = false;
    if (error) return null;
    Object.values(pending).filter(task => task.lost).forEach(task => debounce(task.kind, task.work));
    return answer;
  } catch {
    offline = true;
    showError(facts ? "The server does not answer. Start it again (python3 explore.py), then repeat your last change."
      : "The server does not answer. Start it again (python3 explore.py), then reload this page.");
    const outdated = facts ? `#${kind}-verdict` : ".verdict";
    document.querySelectorAll(outdated).forEach(verdict => { verdict.textContent = "No answer from the server."; });
    if (pending[kind]) pending[kind].lost = true;
    return null;
  }
}

function showError(error) {
  $("error").textContent = error;
  $("error").hidden = !error;
}

/** Start longer work after a pause in the input; work receives a function that tells whether it is still current. Work
 * that is lost because the server does not answer starts again when it answers another request */
const pending = {};
function debounce(kind, work) {
  clearTimeout(pending[kind]?.timer);
  const task = {kind, work};
  pending[kind] = task;
  task.timer = setTimeout(() => work(() => pending[kind] === task), 150);
}

// ---------------------------------------------------------------- small tools

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const decode = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const encode = bytes => btoa(Array.from(bytes, code => String.fromCharCode(code)).join(""));
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const checkedValue = name => document.querySelector(`input[name=${name}]:checked`).value;

/** Draw gray bytes on a canvas of as many pixels; several pictures are added, each in its color */
function paint(canvas, pictures, colors = [[255, 255, 255]]) {
  const image = new ImageData(canvas.width, canvas.height);
  for (let k = 0; k < image.data.length; k += 4) {
    for (let c = 0; c < 3; c++) {
      image.data[k + c] = pictures.reduce((sum, bytes, p) => sum + bytes[k / 4] * colors[p][c] / 255, 0);
    }
    image.data[k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Return the lengths or activations of capsules as they are, or the softmax probabilities of a CNN */
function confidences(scores, kind) {
  if (kind !== "probability") return scores;
  const top = Math.max(...scores), powers = scores.map(x => Math.exp(x - top));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map(x => x / sum);
}

const argmax = scores => scores.indexOf(Math.max(...scores));

/** Call begin(x, y), in the node's own units, when a drag starts; it returns a function for further (x, y), or null */
function onDrag(node, units, begin) {
  let go = null, pointer, box;                                     // box: at the start, since text above may grow
  const at = event => [(event.clientX - box.left) / box.width * units, (event.clientY - box.top) / box.height * units];
  node.addEventListener("pointerdown", event => {
    if (go || event.button) return;                                // one finger, or the left button
    box = node.getBoundingClientRect();
    go = begin(...at(event), event.target);
    if (!go) return;
    pointer = event.pointerId;
    node.setPointerCapture(event.pointerId);
    event.preventDefault();
    node.focus?.({preventScroll: true});
  });
  node.addEventListener("pointermove", event => event.pointerId === pointer && go?.(...at(event)));
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    node.addEventListener(end, event => { if (event.pointerId === pointer) go = null; });
  }
}

/** Call move(dx, dy, rotation), each -1, 0 or 1, for arrow keys and square brackets on a node */
function onKeys(node, move) {
  const keys = {ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, -1, 0], ArrowDown: [0, 1, 0],
    "[": [0, 0, 1], "]": [0, 0, -1]};
  node.addEventListener("keydown", event => {
    const held = event.ctrlKey || event.metaKey || event.altKey;  // some keyboards have brackets at Alt or AltGr
    if (!keys[event.key] || held && event.key.startsWith("Arrow")) return;
    event.preventDefault();
    move(...keys[event.key]);
  });
}

function setOptions(select, options) {
  select.replaceChildren(...options.map((option, k) => make("option", {value: k}, String(option))));
}

/** Set a slider, and show its value and unit beside it */
function setSlider(id, value) {
  const slider = $(id);
  slider.value = value;
  const text = (+slider.value).toFixed((slider.step.split(".")[1] ?? "").length) + (slider.dataset.unit ?? "");
  slider.nextElementSibling.textContent = text;
  slider.setAttribute("aria-valuetext", text);
}

/** Shade a range of a slider */
function shadeRange(slider, low, high) {
  const percentage = x => `${clamp((x - slider.min) / (slider.max - slider.min), 0, 1) * 100}%`;
  slider.classList.add("shaded");
  slider.style.setProperty("--low", percentage(low));
  slider.style.setProperty("--high", percentage(high));
}

/** Return the index of the next test digit of a class after a given one, cyclically */
function nextOf(label, after) {
  for (let k = 1; k <= facts.labels.length; k++) {
    const index = (after + k) % facts.labels.length;
    if (facts.labels[index] === label) return index;
  }
  return after;
}

const pixelsOf = index => facts.pixels.subarray(784 * index, 784 * (index + 1));

// ---------------------------------------------------------------- overlapping digits

const CANVAS = 36, FINE = 8, SHEET = CANVAS * FINE;              // px of the network input; pixels per px to draw on
const CENTER = SHEET / 2;

class Layer {
  /** One digit: the sheet on which it is drawn, and the sheet's position, rotation and bend on the canvas */
  constructor() {
    this.sheet = make("canvas", {width: SHEET, height: SHEET});
    this.clear();
  }

  clear() {
    this.sheet.width = SHEET;                                    // clears it
    Object.assign(this, {x: 0, y: 0, rotation: 0, bend: 0, index: null});
  }

  /** Draw gray bytes, side x side, as the only ink, at the center of the sheet */
  load(bytes, side, index = null) {
    this.sheet.width = SHEET;
    const small = make("canvas", {width: side, height: side}), image = new ImageData(side, side);
    bytes.forEach((ink, k) => image.data.set([255, 255, 255, ink], 4 * k));
    small.getContext("2d").putImageData(image, 0, 0);
    const context = this.sheet.getContext("2d"), corner = (SHEET - side * FINE) / 2;
    context.imageSmoothingEnabled = false;
    context.drawImage(small, corner, corner, side * FINE, side * FINE);
    this.index = index;
  }

  /** Draw the sheet translated, rotated and bent (its rows shifted along a parabola) */
  draw(context) {
    context.save();
    context.translate(CENTER + this.x * FINE, CENTER + this.y * FINE);
    context.rotate(-this.rotation * Math.PI / 180);
    const rows = this.bend ? CANVAS * 2 : 1, height = SHEET / rows;
    for (let r = 0; r < rows; r++) {
      const distance = rows > 1 ? (r + 0.5 - CANVAS) / (14 * 2) : 0;
      const shift = this.bend * FINE * (rows > 1 ? distance * distance - 1 / 3 : 0);
      context.drawImage(this.sheet, 0, r * height, SHEET, height, shift - CENTER, r * height - CENTER, SHEET, height);
    }
    context.restore();
  }

  /** Reset the transformation but keep the ink where it is, so that it can be drawn on */
  flatten() {
    const copy = make("canvas", {width: SHEET, height: SHEET});
    this.draw(copy.getContext("2d"));
    this.clear();
    this.sheet.getContext("2d").drawImage(copy, 0, 0);
  }

  stroke(x0, y0, x1, y1, width) {
    const context = this.sheet.getContext("2d");
    Object.assign(context, {lineWidth: width * FINE, lineCap: "round", strokeStyle: "white"});
    context.beginPath();
    context.moveTo(x0 * FINE, y0 * FINE);
    context.lineTo(x1 * FINE + 0.01, y1 * FINE);
    context.stroke();
  }
}

const pair = {layers: [], fine: null, answer: null, v: null, image: null, shown: 0};      // shown: last test digit

const activeLayer = () => pair.layers[+checkedValue("layer")];

const select = k => { document.querySelectorAll("input[name=layer]")[k].checked = true; };

/** Select the digit with ink near a point; if both or none have, leave the selection as it is */
function grab(x, y) {
  const hits = pair.layers.map(layer => {
    pair.fine.clearRect(0, 0, SHEET, SHEET);
    layer.draw(pair.fine);
    return pair.fine.getImageData((x - 1.5) * FINE, (y - 1.5) * FINE, 3 * FINE, 3 * FINE).data.some(ink => ink);
  });
  if (hits[0] === hits[1]) return;
  select(hits.indexOf(true));
  showPair();
}

/** Return the network input: the mean ink of each pixel's fine pixels, the maximum over both digits */
function composite() {
  const image = new Uint8Array(CANVAS * CANVAS), context = pair.fine;
  for (const layer of pair.layers) {
    context.clearRect(0, 0, SHEET, SHEET);
    layer.draw(context);
    const ink = context.getImageData(0, 0, SHEET, SHEET).data, sums = new Float32Array(CANVAS * CANVAS);
    for (let y = 0; y < SHEET; y++) {
      const row = CANVAS * (y >> 3);
      for (let x = 0; x < SHEET; x++) sums[row + (x >> 3)] += ink[4 * (SHEET * y + x) + 3];
    }
    sums.forEach((sum, k) => { image[k] = Math.max(image[k], Math.round(sum / (FINE * FINE))); });
  }
  return image;
}

function showPair() {
  const layer = activeLayer(), image = composite(), isEmpty = !image.some(ink => ink);
  pair.image = image;
  paint($("pair-stage"), [image]);
  $("pair-frame").firstElementChild.setAttribute("transform",
    `translate(${layer.x} ${layer.y}) rotate(${-layer.rotation} 18 18)`);
  $("pair-label").value = layer.index === null ? "" : facts.labels[layer.index];
  setSlider("pair-rotation", layer.rotation);
  setSlider("pair-bend", layer.bend);
  ask("pair", {image: encode(image), routing: +$("routing").checked}, answer => showPairAnswer({...answer, isEmpty}));
}

function showPairAnswer(answer) {
  const [a, b] = answer.digits, lengths = answer.lengths, third = [...lengths].sort((x, y) => y - x)[2];
  const [minLength, minMargin] = facts.thresholds;
  const doubt = lengths[b] < minLength ? `shorter than ${minLength}`
    : lengths[b] - third < minMargin ? `less than ${minMargin} longer than the third` : "";
  pair.answer = answer;
  pair.v = answer.v.map(v => [...v]);
  $("pair-verdict").textContent = answer.isEmpty ? "Empty. Draw a digit, select B, draw another."
    : `${doubt ? "Low confidence" : "Predicted"}: ${a} and ${b} (lengths ${lengths[a].toFixed(2)} and `
    + `${lengths[b].toFixed(2)}).`;
  $("pair-doubt").textContent = doubt && !answer.isEmpty ? `Low confidence: the second longest capsule is ${doubt}.` : "";
  [...$("pair-bars").children].forEach((bar, k) => {
    bar.style.setProperty("--size", `${100 * lengths[k]}%`);
    bar.className = ROLES[answer.digits.indexOf(k)] ?? "";
    bar.title = `${k}: length ${lengths[k].toFixed(2)}`;
  });
  showReconstructions(answer.reconstructions);
  answer.digits.forEach((digit, k) => {
    $(`reconstruction-${k}`).setAttribute("aria-label", `Reconstruction from capsule ${digit}`);
    $(`reconstruction-${k}`).nextElementSibling.textContent = answer.isEmpty ? "" : `digit ${digit}`;
    $(`capsule-${k}`).textContent = `digit ${digit}`;
  });
  if ($("iteration").max !== String(answer.couplings.length)) {              // routing was switched on or off
    $("iteration").max = answer.couplings.length;
    setSlider("iteration", answer.couplings.length);
  }
  showDimensions();
  showCoupling();
}

function showReconstructions(reconstructions) {
  const digits = reconstructions.map(decode);
  digits.forEach((bytes, k) => paint($(`reconstruction-${k}`), [bytes], [COLORS[k]]));
  paint($("reconstruction-2"), digits, COLORS);
}

function showDimensions() {
  if (!pair.v) return;
  const v = pair.v[+checkedValue("capsule")];
  [...$("dimensions").children].forEach((slider, d) => { slider.value = v[d]; });
}

/** Draw two bars at each position, over the part of the image with the centers of the receptive fields: the mean
 * coupling coefficients to both predicted digits; a full bar is 1/4 */
function showCoupling() {
  if (!pair.answer) return;
  const canvas = $("coupling"), context = canvas.getContext("2d"), {grid, square: [low, side], couplings} = pair.answer;
  const step = Math.min(+$("iteration").value, couplings.length) - 1, size = canvas.width / grid;
  Object.assign(context, {imageSmoothingEnabled: false, fillStyle: "black"});
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalAlpha = 0.55;
  context.drawImage($("pair-stage"), low + 0.5, low + 0.5, side, side, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
  for (let position = 0; position < grid * grid; position++) {
    const x = size * (position % grid), y = size * Math.floor(position / grid);
    context.strokeStyle = "#777";
    context.strokeRect(x + 0.5, y + 0.5, size, size);
    ROLES.forEach((_, k) => {
      const height = Math.min(1, 4 * couplings[step][k][position]) * (size - 4);
      context.fillStyle = `rgb(${COLORS[k]})`;
      context.fillRect(x + size * (0.14 + 0.4 * k), y + size - 2 - height, size * 0.32, height);
    });
    context.fillStyle = "#fff";
    context.fillRect(x + 3, y + size - 3 - 0.4 * (size - 4), size - 6, 2);
  }
}

/** Show the next test digit of a class, or of any class, instead of the selected digit */
function loadDigit(label) {
  const layer = activeLayer(), after = layer.index ?? pair.shown;
  pair.shown = nextOf(label ?? facts.labels[(after + 1) % facts.labels.length], after);
  layer.load(pixelsOf(pair.shown), 28, pair.shown);
  showPair();
}

async function loadPicture(file) {
  if (!file) return;
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return showError("The browser cannot read this file as a picture. Choose a PNG or JPEG file.");
  const [minSide, maxSide] = facts.sides, scale = Math.min(1, maxSide / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map(side => Math.round(side * scale));
  if (Math.min(width, height) < minSide) {
    return showError(`This picture has ${bitmap.width} x ${bitmap.height} px: it is too small or narrow. Choose one `
      + `of at least ${minSide} x ${minSide} px whose longer side is at most ${maxSide / minSide} times the shorter.`);
  }
  const context = make("canvas", {width, height}).getContext("2d");
  Object.assign(context, {fillStyle: "white", imageSmoothingQuality: "high"});
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  const data = context.getImageData(0, 0, width, height).data;
  const gray = Uint8Array.from({length: width * height}, (_, k) =>
    0.299 * data[4 * k] + 0.587 * data[4 * k + 1] + 0.114 * data[4 * k + 2]);
  ask("picture", {width, gray: encode(gray)}, answer => {
    pair.layers.forEach(layer => layer.clear());
    pair.layers[0].load(decode(answer.image), CANVAS);
    select(0);
    showPair();
  });
}

function startPair() {
  pair.fine = make("canvas", {width: SHEET, height: SHEET}).getContext("2d", {willReadFrequently: true});
  pair.layers = [new Layer(), new Layer()];
  $("pair-network").textContent = facts.networks[0][0].slice(0, 2).join(": ");
  setOptions($("pair-label"), DIGITS);
  $("pair-bars").append(...DIGITS.map(k => make("div", {"data-name": k})));
  $("dimensions").append(...pair.sliders = Array.from({length: 16}, (_, d) => make("input",
    {type: "range", min: -0.8, max: 0.8, step: "any", "aria-label": `dimension ${d + 1} of the capsule`})));
  for (const [k, label, x, y] of [[0, 4, -2, 0], [1, 7, 2, 0]]) {
    const index = nextOf(label, 0);
    pair.layers[k].load(pixelsOf(index), 28, index);
    Object.assign(pair.layers[k], {x, y});
  }
  onDrag($("pair-stage"), CANVAS, (x, y) => {
    if (checkedValue("tool") === "move") grab(x, y);
    const layer = activeLayer(), [x0, y0] = [x - layer.x, y - layer.y];
    if (checkedValue("tool") === "move") {
      return (x, y) => {
        Object.assign(layer, {x: clamp(x - x0, -18, 18), y: clamp(y - y0, -18, 18)});
        showPair();
      };
    }
    let last = [x, y];
    layer.flatten();
    const draw = (x, y) => {
      layer.stroke(...last, x, y, +$("pair-pen").value);
      last = [x, y];
      showPair();
    };
    draw(x, y);
    return draw;
  });
  onKeys($("pair-stage"), (x, y, rotation) => {
    const layer = activeLayer();
    layer.rotation = (layer.rotation + 5 * rotation + 540) % 360 - 180;
    Object.assign(layer, {x: clamp(layer.x + x, -18, 18), y: clamp(layer.y + y, -18, 18)});
    showPair();
  });
  for (const name of ["rotation", "bend"]) {
    $(`pair-${name}`).addEventListener("input", event => { activeLayer()[name] = +event.target.value; showPair(); });
  }
  $("pair-label").addEventListener("change", event => loadDigit(+event.target.value));
  $("pair-other").addEventListener("click", () => loadDigit(facts.labels[activeLayer().index]));
  const clear = () => { pair.layers.forEach(layer => layer.clear()); showPair(); };
  $("pair-clear").addEventListener("click", clear);
  $("tool").addEventListener("change", () => {
    $("pair-stage").parentElement.classList.toggle("drawing", checkedValue("tool") === "draw");
    if (checkedValue("tool") === "draw" && pair.layers.every(layer => layer.index !== null)) clear();
  });
  $("layer").addEventListener("change", showPair);
  $("routing").addEventListener("change", showPair);
  $("iteration").addEventListener("input", showCoupling);
  $("capsule").addEventListener("change", showDimensions);
  $("pair-reset").addEventListener("click", () => pair.answer && showPairAnswer(pair.answer));
  $("dimensions").addEventListener("input", event => {
    if (!pair.answer) return;
    const [a, b] = pair.answer.digits, v = pair.v;
    v[+checkedValue("capsule")][pair.sliders.indexOf(event.target)] = +event.target.value;
    ask("reconstruct", {a, b, v: v.flat()}, answer => v === pair.v && showReconstructions(answer.reconstructions));
  });
  const stage = $("pair-stage").parentElement;
  for (const name of ["dragover", "dragleave", "drop"]) {
    stage.addEventListener(name, event => {
      event.preventDefault();
      stage.classList.toggle("over", name === "dragover");
      if (name === "drop") loadPicture(event.dataTransfer.files[0]);
    });
  }
  $("pair-file").addEventListener("change", event => { loadPicture(event.target.files[0]); event.target.value = ""; });
  $("tool").dispatchEvent(new Event("change"));                    // a browser restores the controls after Back
}

// ---------------------------------------------------------------- affine digits

const IDENTITY = {rotation: 0, shear: 0, scale_y: 1, scale_x: 1}, FACTORS = Object.keys(IDENTITY);
const SIDE = 40, HALF = 10;                                      // px of the canvas; half of the box with the handles
const digit = {digit: 0, y: 0, x: 0, ...IDENTITY, maps: []};

const POINTS = {"handle-rotation": [-HALF - 4, 0], "handle-scale_y": [HALF, 0], "handle-scale_x": [0, HALF],
  "handle-shear": [-HALF, HALF]};                                  // (y, x) px from the digit's center

const digitFields = () => (({maps, y, x, ...fields}) => fields)(digit);

/** Return the position on the canvas, [y, x], of a point of the digit, (y, x) px from its center */
function toCanvas(y, x) {
  const angle = digit.rotation * Math.PI / 180, [s, c] = [Math.sin(angle), Math.cos(angle)];
  const [tall, wide] = [digit.scale_y * y, digit.shear * digit.scale_y * y + digit.scale_x * x];
  return [SIDE / 2 + digit.y + c * tall - s * wide, SIDE / 2 + digit.x + s * tall + c * wide];
}

function setPoint(id, [y, x]) {
  const node = $(id), [names, off] = node.tagName === "rect" ? [["x", "y"], 1.1] : [["cx", "cy"], 0];
  node.setAttribute(names[0], x - off);
  node.setAttribute(names[1], y - off);
}

function showDigit() {
  const corners = [[-HALF, -HALF], [-HALF, HALF], [HALF, HALF], [HALF, -HALF]].map(at => toCanvas(...at));
  const text = points => points.map(([y, x]) => `${x},${y}`).join(" ");
  const [top, [y, x]] = [toCanvas(-HALF, 0), corners[1]], knob = toCanvas(...POINTS["handle-rotation"]);
  $("digit-box").setAttribute("points", text(corners));
  $("handle-shear").setAttribute("points", text([[y - 1.6, x], [y, x + 1.6], [y + 1.6, x], [y, x - 1.6]]));
  [["y1", top[0]], ["x1", top[1]], ["y2", knob[0]], ["x2", knob[1]]].forEach(at => $("digit-stem").setAttribute(...at));
  setPoint("handle-rotation", knob);
  setPoint("handle-scale_y", toCanvas(HALF, 0));
  setPoint("handle-scale_x", toCanvas(0, HALF));
  setPoint("digit-center", toCanvas(0, 0));
  FACTORS.forEach(name => setSlider(name, digit[name]));
  digit.maps.forEach((_, k) => showMap(k));
  const label = facts.labels[digit.digit];
  ask("digit", {...digitFields(), y: digit.y, x: digit.x}, answer => showDigitAnswer(answer, label));
}

function showDigitAnswer({image, answers}, label) {
  const networks = facts.networks[1];
  paint($("digit-stage"), [decode(image)]);
  const correct = answers.map(({scores, reconstruction}, k) => {
    const card = $("digit-cards").children[k], canvas = card.querySelector(".reconstruction"), kind = networks[k][2];
    const predicted = argmax(scores);
    showPrediction(card, predicted, confidences(scores, kind)[predicted], kind, predicted === label);
    canvas.parentElement.hidden = !reconstruction;
    if (reconstruction) paint(canvas, [decode(reconstruction)]);
    return predicted === label;
  });
  $("digit-verdict").textContent = `True class: ${label}. Correctly classified by ${correct.filter(Boolean).length} of `
    + `${correct.length} networks.`;
}

/** Show a network's predicted class, and the number that says how confident it is, in its card */
function showPrediction(card, name, confidence, kind, isCorrect) {
  const prediction = card.querySelector(".prediction");
  prediction.textContent = `${name} (${kind} ${confidence.toFixed(2)})`;
  prediction.classList.toggle("correct", isCorrect);
}

/** Request the maps of all networks, one after another, after the digit or its shape has changed */
function mapDigit() {
  digit.maps = facts.networks[1].map(() => null);
  const fields = digitFields();
  debounce("map", async current => {
    for (let k = 0; k < digit.maps.length && current(); k++) {
      const at = performance.now();
      const answer = await fetchAnswer("map", {...fields, network: k});
      if (!current() || !answer) return;
      if (answer.stale) { k--; continue; }
      digit.maps[k] = answer;
      (times.map ??= []).push(performance.now() - at);
      showMap(k);
    }
  });
}

/** Draw a network's map: filled where its prediction is correct, crossed where it is wrong; and the digit's position */
function showMap(k) {
  const canvas = $("digit-cards").children[k].querySelector(".map"), context = canvas.getContext("2d");
  const [extent, step] = facts.extent, n = 2 * extent / step + 1, cell = canvas.width / n, map = digit.maps[k];
  const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name);
  const at = px => (px + extent + step / 2) / step * cell;
  let counts = [0, 0];
  context.clearRect(0, 0, canvas.width, canvas.height);
  map?.predicted.forEach((predicted, k) => {
    const x = cell * (k % n), y = cell * Math.floor(k / n), correct = predicted === facts.labels[digit.digit];
    context.fillStyle = color("--range-mark");
    if (!map.visible[k]) return context.fillRect(x + cell / 2 - 2, y + cell / 2 - 2, 4, 4);
    counts[correct ? 0 : 1]++;
    context.fillStyle = context.strokeStyle = color(correct ? "--correct" : "--wrong");
    context.lineWidth = 3;
    if (correct) return context.fillRect(x + 1, y + 1, cell - 2, cell - 2);
    context.beginPath();
    for (const [y0, y1] of [[3, cell - 3], [cell - 3, 3]]) {
      context.moveTo(x + 3, y + y0);
      context.lineTo(x + cell - 3, y + y1);
    }
    context.stroke();
  });
  Object.assign(context, {lineWidth: 3, strokeStyle: color("--ink")});
  context.setLineDash([9, 6]);
  const low = at(-facts.train_shift) - cell / 2, side = at(facts.train_shift) + cell / 2 - low;
  context.strokeRect(low, low, side, side);
  context.setLineDash([]);
  context.beginPath();
  const inside = px => clamp(px, -extent - step / 2, extent + step / 2);
  context.arc(at(inside(digit.x)), at(inside(digit.y)), 8, 0, 7);
  Object.assign(context, {fillStyle: "#e69f00", strokeStyle: "#000"});
  context.fill();
  context.stroke();
  const total = counts[0] + counts[1];
  canvas.nextElementSibling.textContent = map ? `correct at ${counts[0]} of ${total} positions` : "computing …";
}

/** Change factors or the digit, which makes the maps outdated */
function changeDigit(values) {
  Object.assign(digit, values);
  mapDigit();
  showDigit();
}

function moveTo(x, y) {
  Object.assign(digit, {x: Math.round(clamp(x, -19, 19)), y: Math.round(clamp(y, -19, 19))});
  showDigit();
}

/** Return the lower right position, [x, y], that is farthest from the center with all of the digit's ink visible */
function edge() {
  const ink = [];
  pixelsOf(digit.digit).forEach((value, k) => value && ink.push(toCanvas(Math.floor(k / 28) - 13.5, k % 28 - 13.5)));
  return [1, 0].map(axis => [digit.y, digit.x][axis] + Math.floor(SIDE - 0.5 - Math.max(...ink.map(at => at[axis]))));
}

/** Factors after dragging a handle to (x, y) px from the digit's center; s, c: sine and cosine of the rotation */
const HANDLES = {
  "handle-rotation": (x, y) => ({rotation: Math.round(clamp(
    (Math.atan2(-x, -y) - Math.atan(digit.shear)) * 180 / Math.PI, -90, 90))}),
  "handle-scale_y": (x, y, s, c) => ({scale_y: clamp((c * y + s * x) / HALF, 0.5, 1.5)}),
  "handle-scale_x": (x, y, s, c) => ({scale_x: clamp((c * x - s * y) / HALF, 0.5, 1.5)}),
  "handle-shear": (x, y, s, c) => ({shear: clamp(
    (digit.scale_x - (c * x - s * y) / HALF) / digit.scale_y, -0.8, 0.8)})};

function startDigit() {
  const networks = facts.networks[1], frame = $("trained-frame");
  ["x", "y"].forEach(name => frame.setAttribute(name, SIDE / 2 - facts.train_shift - 0.5));
  ["width", "height"].forEach(name => frame.setAttribute(name, 2 * facts.train_shift + 1));
  setOptions($("digit-label"), DIGITS);
  FACTORS.forEach(name => {
    shadeRange($(name), ...facts.ranges[name]);
    $(name).addEventListener("input", event => changeDigit({[name]: +event.target.value}));
  });
  $("digit-cards").append(...networks.map(([name, description]) => {
    const map = make("canvas", {class: "map", width: 260, height: 260, role: "img",
      "aria-label": `positions at which ${name} classifies this digit correctly`});
    const row = make("div", {class: "row"}, make("figure", {class: "wide"}, map, make("figcaption", {}, "computing …")),
      make("figure", {}, make("canvas", {class: "reconstruction", width: SIDE, height: SIDE, role: "img",
        "aria-label": `reconstruction by ${name}`}), make("figcaption", {}, "recon\u00adstruction")));
    const [extent, step] = facts.extent;
    onDrag(map, 2 * extent + step, (x, y) => {
      const go = (x, y) => moveTo(x - extent - 1, y - extent - 1);
      go(x, y);
      return go;
    });
    return make("div", {class: "card"}, make("h2", {}, name, make("small", {}, description)),
      make("p", {class: "prediction"}), row);
  }));
  onDrag($("digit-stage"), SIDE, (x, y) => {
    const [x0, y0] = [x - digit.x, y - digit.y];
    return (x, y) => moveTo(x - x0, y - y0);
  });
  onDrag($("digit-frame"), SIDE, (x0, y0, target) => {
    if (!HANDLES[target.id]) return null;
    const [y1, x1] = toCanvas(...POINTS[target.id]), [right, down] = [x0 - x1, y0 - y1];  // from the handle's center
    return (x, y) => {
      const angle = digit.rotation * Math.PI / 180;
      changeDigit(HANDLES[target.id](x - right - SIDE / 2 - digit.x, y - down - SIDE / 2 - digit.y,
        Math.sin(angle), Math.cos(angle)));
    };
  });
  onKeys($("digit-stage"), (x, y, rotation) => rotation
    ? changeDigit({rotation: clamp(digit.rotation + 5 * rotation, -90, 90)}) : moveTo(digit.x + x, digit.y + y));
  const select = label => changeDigit({digit: nextOf(label, digit.digit)});
  $("digit-label").addEventListener("change", event => select(+event.target.value));
  $("digit-other").addEventListener("click", () => select(+$("digit-label").value));
  $("digit-reset").addEventListener("click", () => changeDigit({...IDENTITY, x: 0, y: 0}));
  $("digit-edge").addEventListener("click", () => moveTo(...edge()));
  $("digit-rotate").addEventListener("click", () => changeDigit({rotation: 20}));
  $("digit-label").value = 2;
  digit.digit = nextOf(2, 0);
}

// ---------------------------------------------------------------- novel viewpoints

const toy = {category: 3, toy: 0, azimuth: 20, elevation: 40, light: 0, predicted: null};

/** Return the path of an arc between two angles, in degrees clockwise from the top */
function arc(radius, from, to) {
  const at = degrees => [Math.sin(degrees * Math.PI / 180) * radius, -Math.cos(degrees * Math.PI / 180) * radius];
  return `M ${at(from)} A ${radius} ${radius} 0 ${to - from > 180 ? 1 : 0} 1 ${at(to)}`;
}

function showToy() {
  const {predicted, ...fields} = toy;
  ["category", "light"].forEach(name => { $(name).value = toy[name]; });
  ["azimuth", "elevation"].forEach(name => setSlider(name, toy[name]));
  $("toy-number").value = toy.toy;
  $("hand").setAttribute("transform", `rotate(${toy.azimuth})`);
  ask("toy", fields, answer => showToyAnswer(answer, fields));
}

function isFamiliar(azimuth, [low, high]) {
  return (azimuth - low + 720) % 360 <= high - low;
}

function showToyAnswer({image, answers}, {category, azimuth}) {
  const networks = facts.networks[2];
  paint($("toy-stage"), [decode(image)]);
  const correct = answers.map((scores, k) => {
    const card = $("toy-cards").children[k], predicted = argmax(scores), bars = confidences(scores, networks[k][2]);
    showPrediction(card, TOYS[predicted], bars[predicted], networks[k][2], predicted === category);
    [...card.querySelectorAll("i")].forEach((bar, j) => {
      bar.style.setProperty("--size", `${100 * bars[j]}%`);
      bar.className = j !== predicted ? "" : j === category ? "correct" : "wrong";
    });
    return predicted === category;
  });
  const kinds = new Set(networks.map(network => isFamiliar(azimuth, network[3]) ? "familiar" : "novel"));
  const azimuths = [...kinds].join(" or ");                       // networks of one's own may know others
  $("toy-verdict").textContent = `True class: ${TOYS[category]}, ${azimuths} azimuth. Correctly classified by `
    + `${correct.filter(Boolean).length} of ${correct.length} networks.`;
}

function showRing() {
  facts.networks[2].forEach((_, k) => document.querySelectorAll(`#ring .of-${k}`).forEach((segment, a) => {
    const verdict = !toy.predicted ? "" : toy.predicted[k][a] === toy.category ? "correct" : "wrong";
    segment.setAttribute("class", `of-${k} ${verdict}`);
  }));
  [...$("ring-names").children].forEach((name, k) => {
    const counts = [true, false].map(familiar => {
      const azimuths = [...facts.azimuths.keys()].filter(a =>
        isFamiliar(facts.azimuths[a], facts.networks[2][k][3]) === familiar);
      return `${azimuths.filter(a => toy.predicted?.[k][a] === toy.category).length} of ${azimuths.length}`;
    });
    name.textContent = facts.networks[2][k][0]
      + (toy.predicted ? `: correct at ${counts[0]} familiar and ${counts[1]} novel azimuths` : " …");
  });
}

/** Change the toy or its view; anything but the azimuth makes the ring outdated */
function changeToy(values) {
  Object.assign(toy, values);
  if (Object.keys(values).some(name => name !== "azimuth")) {
    const {predicted, azimuth, ...fields} = toy;
    toy.predicted = null;
    showRing();
    debounce("ring", async current => {
      for (let answer = {stale: true}; answer?.stale && current();) {
        const at = performance.now();
        answer = await fetchAnswer("ring", fields);
        if (!current() || !answer || answer.stale) continue;
        toy.predicted = answer.predicted;
        (times.ring ??= []).push(performance.now() - at);
        showRing();
      }
    });
  }
  showToy();
}

function startToy() {
  const networks = facts.networks[2], [low, high] = facts.familiar_azimuths, step = facts.azimuths[1];
  const gap = Math.min(22, 90 / networks.length);                 // between rings
  setOptions($("category"), TOYS);
  setOptions($("toy-number"), [1, 2, 3, 4, 5]);
  setOptions($("light"), [1, 2, 3, 4, 5, 6]);
  $("ring").style.setProperty("--gap", gap);
  $("ring").append(make("path", {class: "familiar", d: arc(118, low, high)}),
    make("line", {id: "hand", y1: -10, y2: -108}));
  networks.forEach((_, k) => facts.azimuths.forEach(a => $("ring").append(
    make("path", {class: `of-${k}`, d: arc(98 - gap * k, a - step / 2 + 0.7, a + step / 2 - 0.7)}))));
  $("ring").append($("hand"));
  $("ring-names").append(...networks.map(() => make("li")));
  shadeRange($("azimuth"), high - 360, low);                      // the range crosses 0: shade both ends of the slider
  shadeRange($("elevation"), 30, 70);
  $("toy-cards").append(...networks.map(([name, description]) => make("div", {class: "card"},
    make("h2", {}, name, make("small", {}, description)), make("p", {class: "prediction"}),
    make("div", {class: "lines"}, ...TOYS.flatMap(name => [make("span", {}, name), make("i")])))));
  const around = degrees => Math.round((degrees % 360 + 360) % 360) % 360;
  onDrag($("toy-stage"), 96, (x0, y0) => {
    const {azimuth, elevation} = toy;
    return (x, y) => {
      const high = clamp(Math.round(elevation + y - y0), 0, 90);
      changeToy({azimuth: around(azimuth + 2 * (x - x0)), ...high === toy.elevation ? {} : {elevation: high}});
    };
  });
  onDrag($("ring"), 260, (x, y) => {
    const go = (x, y) => changeToy({azimuth: around(Math.atan2(x - 130, 130 - y) * 180 / Math.PI)});
    go(x, y);
    return go;
  });
  onKeys($("toy-stage"), (x, y) => changeToy({azimuth: around(toy.azimuth + 5 * x),
    ...y ? {elevation: clamp(toy.elevation - 5 * y, 0, 90)} : {}}));
  for (const id of ["category", "toy-number", "light", "azimuth", "elevation"]) {
    $(id).addEventListener("input", event => changeToy({[id.split("-")[0]]: +event.target.value}));
  }
}

// ---------------------------------------------------------------- the page

const TABS = ["pair", "digit", "toy"];
const OPEN = {pair: showPair, digit: () => digit.maps.length ? showDigit() : changeDigit({}),
  toy: () => toy.predicted ? showToy() : changeToy({light: toy.light})};

function openTab(name) {
  TABS.forEach(other => {
    $(other).hidden = other !== name;
    $(`tab-${other}`).setAttribute("aria-selected", other === name);
    $(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  });
  $("source").hidden = name === "toy";
  history.replaceState(null, "", `#${name}`);
  OPEN[name]();
}

async function start() {
  facts = await fetchAnswer("start", {});
  if (!facts) return;
  facts.pixels = decode(facts.digits);
  document.querySelectorAll(".slide").forEach(label => label.append(make("output", {"aria-hidden": true})));
  document.querySelectorAll(".slide input").forEach(({id, value}) => {
    $(id).addEventListener("input", event => setSlider(id, event.target.value));
    setSlider(id, value);
  });
  startPair();
  startDigit();
  startToy();
  $("source").textContent = facts.source === "MNIST" ? "Digits: MNIST test digits; no network was trained on them."
    : "Digits: 100 of MNIST's test digits, which come with this project, because MNIST is not on this machine.";
  TABS.forEach((name, k) => {
    $(`tab-${name}`).addEventListener("click", () => openTab(name));
    $(`tab-${name}`).addEventListener("keydown", event => {
      const next = {ArrowRight: 1, ArrowLeft: 2}[event.key];
      if (!next) return;
      openTab(TABS[(k + next) % 3]);
      $(`tab-${TABS[(k + next) % 3]}`).focus();
    });
  });
  const openHash = () => openTab(TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "pair");
  addEventListener("hashchange", openHash);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => digit.maps.forEach((_, k) => showMap(k)));
  for (const name of ["dragover", "drop"]) addEventListener(name, event => event.preventDefault());  // keeps the page
  openHash();
}

start();
