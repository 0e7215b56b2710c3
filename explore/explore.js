"use strict";
// The page draws and listens; what networks say comes from the server, by ask().

const $ = id => document.getElementById(id);
const ROLES = ["first", "second"];
const COLORS = [[40, 150, 255], [255, 125, 25]];               // of the first and the second name, on black
const DIGITS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
const TOYS = ["animal", "human", "plane", "truck", "car"];
let facts;                                                       // the answer to "start"

// ---------------------------------------------------------------- the server

const waiting = {};                                              // of each kind of ask: what is to be asked next
const times = {};                                                // of each kind: ms from the event to its picture

/** Ask the server; show(answer) when it comes. Of asks of one kind one is under way, and only the newest waits. */
function ask(what, fields, show) {
  const kind = waiting[what] ??= {};
  kind.next = {fields, show, at: window.event?.timeStamp ?? performance.now()};
  if (!kind.busy) answerAll(what, kind);
}

async function answerAll(what, kind) {
  kind.busy = true;
  while (kind.next) {
    const {fields, show, at} = kind.next;
    kind.next = null;
    const found = await answerOf(what, fields);
    if (found?.stale) kind.next ??= {fields, show, at};
    else if (found) {
      show(found);
      requestAnimationFrame(() => (times[what] ??= []).push(performance.now() - at));
    }
  }
  kind.busy = false;
}

/** -> the answer, {stale: true} if a newer ask overtook it, null after a fault, which is shown */
async function answerOf(what, fields) {
  try {
    const reply = await fetch("/ask", {method: "POST", body: JSON.stringify({ask: what, ...fields})});
    const fault = reply.ok ? "" : await reply.text();
    say(fault);
    return fault ? null : await reply.json();
  } catch {
    say("The server does not answer. Start it again: python3 explore.py");
    return null;
  }
}

function say(fault) {
  $("fault").textContent = fault;
  $("fault").hidden = !fault;
}

/** Work that takes longer: begun when the hand has rested for a moment, dropped when it moves again */
const rested = {};
function whenRested(what, work) {
  clearTimeout(rested[what]?.timer);
  const turn = {};
  rested[what] = turn;
  turn.timer = setTimeout(() => work(() => rested[what] === turn), 150);
}

// ---------------------------------------------------------------- small tools

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const bytesOf = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const textOf = bytes => btoa(Array.from(bytes, code => String.fromCharCode(code)).join(""));
const limited = (x, low, high) => Math.min(high, Math.max(low, x));
const chosen = name => document.querySelector(`input[name=${name}]:checked`).value;

/** Gray bytes on a canvas of that many pixels; more than one picture: each in its color, added */
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

/** A network's scores as shares of what it believes: capsules' lengths as they are, a CNN's by a softmax */
function shares(scores, isCapsules) {
  if (isCapsules) return scores;
  const top = Math.max(...scores), powers = scores.map(x => Math.exp(x - top));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map(x => x / sum);
}

const largest = scores => scores.indexOf(Math.max(...scores));

/** Pointer moves over a node, in its own units: begin(x, y) -> what is done with every further (x, y), or null */
function onDrag(node, units, begin) {
  let go = null;
  const at = event => {
    const box = node.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width * units, (event.clientY - box.top) / box.height * units];
  };
  node.addEventListener("pointerdown", event => {
    go = begin(...at(event), event.target);
    if (!go) return;
    node.setPointerCapture(event.pointerId);
    event.preventDefault();
    node.focus?.({preventScroll: true});
  });
  node.addEventListener("pointermove", event => go?.(...at(event)));
  for (const end of ["pointerup", "pointercancel"]) node.addEventListener(end, () => { go = null; });
}

/** Arrow keys and square brackets on a node: move(across, down, turn), each -1, 0 or 1 */
function onKeys(node, move) {
  const keys = {ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, -1, 0], ArrowDown: [0, 1, 0],
    "[": [0, 0, 1], "]": [0, 0, -1]};
  node.addEventListener("keydown", event => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(...keys[event.key]);
  });
}

function fill(select, words) {
  select.replaceChildren(...words.map((word, k) => make("option", {value: k}, String(word))));
}

/** Shade a slider from one value to another */
function shade(slider, low, high) {
  const share = x => `${limited((x - slider.min) / (slider.max - slider.min), 0, 1) * 100}%`;
  slider.classList.add("shaded");
  slider.style.setProperty("--low", share(low));
  slider.style.setProperty("--high", share(high));
}

/** The next test digit of a class after one, around */
function nextOf(label, after) {
  for (let k = 1; k <= facts.labels.length; k++) {
    const index = (after + k) % facts.labels.length;
    if (facts.labels[index] === label) return index;
  }
  return after;
}

const pixelsOf = index => facts.pixels.subarray(784 * index, 784 * (index + 1));

// ---------------------------------------------------------------- two digits

const CANVAS = 36, FINE = 8, SHEET = CANVAS * FINE;              // px of the network's picture; finer px to draw on
const MIDDLE = SHEET / 2;

class Layer {
  /** One digit: a sheet it is drawn on, and how the sheet lies on the canvas */
  constructor() {
    this.sheet = make("canvas", {width: SHEET, height: SHEET});
    this.clear();
  }

  clear() {
    this.sheet.width = SHEET;                                    // empties it
    Object.assign(this, {x: 0, y: 0, turn: 0, bend: 0, index: null});
  }

  /** Gray bytes, side x side, as ink in the sheet's middle */
  take(bytes, side, index = null) {
    this.clear();
    const small = make("canvas", {width: side, height: side}), image = new ImageData(side, side);
    bytes.forEach((ink, k) => image.data.set([255, 255, 255, ink], 4 * k));
    small.getContext("2d").putImageData(image, 0, 0);
    const context = this.sheet.getContext("2d"), corner = (SHEET - side * FINE) / 2;
    context.imageSmoothingEnabled = false;
    context.drawImage(small, corner, corner, side * FINE, side * FINE);
    this.index = index;
  }

  /** The sheet moved, turned, and bent: its rows shifted along a parabola */
  draw(context) {
    context.save();
    context.translate(MIDDLE + this.x * FINE, MIDDLE + this.y * FINE);
    context.rotate(-this.turn * Math.PI / 180);
    const rows = this.bend ? CANVAS * 2 : 1, height = SHEET / rows;
    for (let r = 0; r < rows; r++) {
      const far = rows > 1 ? (r + 0.5 - CANVAS) / (14 * 2) : 0;
      const shift = this.bend * FINE * (rows > 1 ? far * far - 1 / 3 : 0);
      context.drawImage(this.sheet, 0, r * height, SHEET, height, shift - MIDDLE, r * height - MIDDLE, SHEET, height);
    }
    context.restore();
  }

  /** Keep the ink as it lies now, and lay the sheet straight, to draw on it */
  settle() {
    const now = make("canvas", {width: SHEET, height: SHEET});
    this.draw(now.getContext("2d"));
    this.clear();
    this.sheet.getContext("2d").drawImage(now, 0, 0);
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

const pair = {layers: [], fine: null, answer: null, v: null, seen: null};

const active = () => pair.layers[+chosen("layer")];

/** What the network sees: of each pixel the mean ink of its fine pixels, of two digits the larger */
function composite() {
  const seen = new Uint8Array(CANVAS * CANVAS), context = pair.fine;
  for (const layer of pair.layers) {
    context.clearRect(0, 0, SHEET, SHEET);
    layer.draw(context);
    const ink = context.getImageData(0, 0, SHEET, SHEET).data, sums = new Float32Array(CANVAS * CANVAS);
    for (let y = 0; y < SHEET; y++) {
      const row = CANVAS * (y >> 3);
      for (let x = 0; x < SHEET; x++) sums[row + (x >> 3)] += ink[4 * (SHEET * y + x) + 3];
    }
    sums.forEach((sum, k) => { seen[k] = Math.max(seen[k], Math.round(sum / (FINE * FINE))); });
  }
  return seen;
}

function showPair() {
  const layer = active();
  pair.seen = composite();
  paint($("pair-stage"), [pair.seen]);
  $("pair-frame").setAttribute("class", ROLES[+chosen("layer")]);
  $("pair-frame").firstElementChild.setAttribute("transform",
    `translate(${layer.x} ${layer.y}) rotate(${-layer.turn} 18 18)`);
  $("pair-turn").value = layer.turn;
  $("pair-bend").value = layer.bend;
  ask("pair", {image: textOf(pair.seen), routed: +$("routed").checked}, showPairAnswer);
}

function showPairAnswer(found) {
  const [a, b] = found.digits, lengths = found.lengths, third = [...lengths].sort((x, y) => y - x)[2];
  const guess = lengths[b] < facts.least[0] || lengths[b] - third < facts.least[1];
  pair.answer = found;
  pair.v = found.v.map(v => [...v]);
  $("pair-verdict").textContent = !pair.seen.some(ink => ink) ? "Nothing there. Draw something." : guess
    ? `A guess: ${a} and ${b}. No two capsules alone are long.` : `It sees a ${a} and a ${b}.`;
  [...$("pair-bars").children].forEach((bar, k) => {
    bar.style.setProperty("--size", `${100 * lengths[k]}%`);
    bar.className = ROLES[found.digits.indexOf(k)] ?? "";
    bar.title = `${k}: length ${lengths[k].toFixed(2)}`;
  });
  showRedrawn(found.redrawn);
  found.digits.forEach((digit, k) => {
    $(`redrawn-${k}`).nextElementSibling.textContent = `the ${digit}`;
    $(`whose-${k}`).textContent = `the ${digit}`;
  });
  $("iteration").max = found.shares.length;
  showNumbers();
  showCoupling();
}

function showRedrawn(redrawn) {
  const digits = redrawn.map(bytesOf);
  digits.forEach((bytes, k) => paint($(`redrawn-${k}`), [bytes], [COLORS[k]]));
  paint($("redrawn-2"), digits, COLORS);
}

function showNumbers() {
  const v = pair.v[+chosen("whose")];
  [...$("numbers").children].forEach((slider, d) => { slider.value = v[d]; });
}

/** Over each place of the picture two bars, up to a quarter: the share of its coupling that goes to either name */
function showCoupling() {
  const canvas = $("coupling"), context = canvas.getContext("2d"), {grid, shares} = pair.answer;
  const step = Math.min(+$("iteration").value, shares.length) - 1, size = canvas.width / grid;
  Object.assign(context, {imageSmoothingEnabled: false, fillStyle: "black"});
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalAlpha = 0.55;
  context.drawImage($("pair-stage"), 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
  for (let place = 0; place < grid * grid; place++) {
    const x = size * (place % grid), y = size * Math.floor(place / grid);
    context.strokeStyle = "#777";
    context.strokeRect(x + 0.5, y + 0.5, size, size);
    ROLES.forEach((_, k) => {
      const height = Math.min(1, 4 * shares[step][k][place]) * (size - 4);
      context.fillStyle = `rgb(${COLORS[k]})`;
      context.fillRect(x + size * (0.14 + 0.4 * k), y + size - 2 - height, size * 0.32, height);
    });
    context.fillStyle = "#fff";
    context.fillRect(x + 3, y + size - 2 - 0.4 * (size - 4), size - 6, 1);
  }
}

function takeDigit(layer, label) {
  const index = nextOf(label, layer.index ?? 0);
  layer.take(pixelsOf(index), 28, index);
  $("pair-label").value = label;
  showPair();
}

async function takePicture(file) {
  if (!file) return;
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return say("This file is no picture that the browser can read.");
  const scale = Math.min(1, facts.large / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map(side => Math.max(1, Math.round(side * scale)));
  const context = make("canvas", {width, height}).getContext("2d");
  Object.assign(context, {fillStyle: "white", imageSmoothingQuality: "high"});
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  const data = context.getImageData(0, 0, width, height).data;
  const gray = Uint8Array.from({length: width * height}, (_, k) =>
    0.299 * data[4 * k] + 0.587 * data[4 * k + 1] + 0.114 * data[4 * k + 2]);
  ask("picture", {width, gray: textOf(gray)}, found => {
    pair.layers[1].clear();
    pair.layers[0].take(bytesOf(found.image), CANVAS);
    showPair();
  });
}

function startPair() {
  pair.fine = make("canvas", {width: SHEET, height: SHEET}).getContext("2d", {willReadFrequently: true});
  pair.layers = [new Layer(), new Layer()];
  fill($("pair-label"), DIGITS);
  $("pair-bars").append(...DIGITS.map(k => make("div", {"data-name": k})));
  $("numbers").append(...pair.numbers = Array.from({length: 16}, (_, d) =>
    make("input", {type: "range", min: -0.8, max: 0.8, step: "any", "aria-label": `number ${d + 1} of the capsule`})));
  for (const [k, label, x, y] of [[0, 4, -2, 0], [1, 7, 2, 0]]) {
    const index = nextOf(label, 0);
    pair.layers[k].take(pixelsOf(index), 28, index);
    Object.assign(pair.layers[k], {x, y});
  }
  onDrag($("pair-stage"), CANVAS, (x, y) => {
    const layer = active(), [x0, y0] = [x - layer.x, y - layer.y];
    if (chosen("tool") === "move") {
      return (x, y) => {
        Object.assign(layer, {x: limited(x - x0, -18, 18), y: limited(y - y0, -18, 18)});
        showPair();
      };
    }
    let last = [x, y];
    layer.settle();
    const draw = (x, y) => {
      layer.stroke(...last, x, y, +$("pair-pen").value);
      last = [x, y];
      showPair();
    };
    draw(x, y);
    return draw;
  });
  onKeys($("pair-stage"), (x, y, turn) => {
    const layer = active();
    layer.turn += 5 * turn;
    Object.assign(layer, {x: limited(layer.x + x, -18, 18), y: limited(layer.y + y, -18, 18)});
    showPair();
  });
  for (const name of ["turn", "bend"]) {
    $(`pair-${name}`).addEventListener("input", event => { active()[name] = +event.target.value; showPair(); });
  }
  $("pair-label").addEventListener("change", event => takeDigit(active(), +event.target.value));
  $("pair-other").addEventListener("click", () => takeDigit(active(), +$("pair-label").value));
  const clear = () => { pair.layers.forEach(layer => layer.clear()); showPair(); };
  $("pair-clear").addEventListener("click", clear);
  $("tool").addEventListener("change", () => {
    $("pair-stage").parentElement.classList.toggle("drawing", chosen("tool") === "draw");
    if (chosen("tool") === "draw" && pair.layers.every(layer => layer.index !== null)) clear();   // an empty sheet
  });
  $("layer").addEventListener("change", () => {
    $("pair-label").value = active().index === null ? $("pair-label").value : facts.labels[active().index];
    showPair();
  });
  $("pair-label").value = 4;
  $("routed").addEventListener("change", showPair);
  $("iteration").addEventListener("input", showCoupling);
  $("whose").addEventListener("change", showNumbers);
  $("pair-reset").addEventListener("click", () => showPairAnswer(pair.answer));
  $("numbers").addEventListener("input", event => {
    pair.v[+chosen("whose")][pair.numbers.indexOf(event.target)] = +event.target.value;
    const [a, b] = pair.answer.digits;
    ask("redraw", {a, b, v: pair.v.flat()}, found => showRedrawn(found.redrawn));
  });
  const stage = $("pair-stage").parentElement;
  for (const name of ["dragover", "dragleave", "drop"]) {
    stage.addEventListener(name, event => {
      event.preventDefault();
      stage.classList.toggle("over", name === "dragover");
      if (name === "drop") takePicture(event.dataTransfer.files[0]);
    });
  }
  $("pair-file").addEventListener("change", event => { takePicture(event.target.files[0]); event.target.value = ""; });
}

// ---------------------------------------------------------------- one digit, moved

const REST = {turn: 0, shear: 0, down: 1, across: 1}, FACTORS = Object.keys(REST);
const WIDE = 40, HALF = 10;                                      // px of the canvas; of the box with handles, half
const digit = {digit: 0, y: 0, x: 0, ...REST, maps: []};

const placeOf = () => (({maps, y, x, ...fields}) => fields)(digit);

/** Where a point of the digit, (y, x) px from its middle, comes to lie on the canvas -> [y, x] */
function laid(y, x) {
  const angle = digit.turn * Math.PI / 180, [s, c] = [Math.sin(angle), Math.cos(angle)];
  const [tall, wide] = [digit.down * y, digit.shear * digit.down * y + digit.across * x];
  return [WIDE / 2 + digit.y + c * tall - s * wide, WIDE / 2 + digit.x + s * tall + c * wide];
}

function setPoint(id, [y, x]) {
  const node = $(id), [names, off] = node.tagName === "rect" ? [["x", "y"], 1.1] : [["cx", "cy"], 0];
  node.setAttribute(names[0], x - off);
  node.setAttribute(names[1], y - off);
}

function showDigit() {
  const corners = [[-HALF, -HALF], [-HALF, HALF], [HALF, HALF], [HALF, -HALF]].map(at => laid(...at));
  const text = points => points.map(([y, x]) => `${x},${y}`).join(" ");
  const [top, knob, [y, x]] = [laid(-HALF, 0), laid(-HALF - 4, 0), corners[1]];
  $("digit-box").setAttribute("points", text(corners));
  $("handle-shear").setAttribute("points", text([[y - 1.6, x], [y, x + 1.6], [y + 1.6, x], [y, x - 1.6]]));
  [["y1", top[0]], ["x1", top[1]], ["y2", knob[0]], ["x2", knob[1]]].forEach(at => $("digit-stem").setAttribute(...at));
  setPoint("handle-turn", knob);
  setPoint("handle-down", laid(HALF, 0));
  setPoint("handle-across", laid(0, HALF));
  setPoint("digit-middle", laid(0, 0));
  FACTORS.forEach(name => { $(name).value = digit[name]; });
  digit.maps.forEach((_, k) => showMap(k));
  ask("digit", {...placeOf(), y: digit.y, x: digit.x}, showDigitAnswer);
}

function showDigitAnswer(found) {
  const label = facts.labels[digit.digit], networks = facts.networks[1];
  paint($("digit-stage"), [bytesOf(found.image)]);
  const right = found.answers.map((answer, k) => {
    const card = $("digit-cards").children[k], named = largest(answer.scores);
    const share = shares(answer.scores, networks[k][2])[named];
    const said = card.querySelector(".said");
    said.textContent = `${named}, ${networks[k][2] ? "length" : "share"} ${share.toFixed(2)}`;
    said.classList.toggle("yes", named === label);
    card.querySelector(".redrawn").parentElement.hidden = !answer.redrawn;
    if (answer.redrawn) paint(card.querySelector(".redrawn"), [bytesOf(answer.redrawn)]);
    return named === label;
  });
  const n = right.filter(Boolean).length;
  $("digit-verdict").textContent = `A ${label}. ${n === right.length ? "All networks name it." : n
    ? `${n} of ${right.length} networks name it.` : "No network names it."}`;
}

/** Ask for the maps of all networks, one after the other, if the digit or its form has changed */
function mapDigit() {
  digit.maps = facts.networks[1].map(() => null);
  const fields = placeOf();
  whenRested("map", async current => {
    for (let k = 0; k < digit.maps.length && current(); k++) {
      const at = performance.now();
      const found = await answerOf("map", {...fields, network: k});
      if (!current() || !found) return;
      if (found.stale) { k--; continue; }
      digit.maps[k] = found;
      (times.map ??= []).push(performance.now() - at);
      showMap(k);
    }
  });
}

/** A network's map: filled where it is right, crossed where it is wrong, and where the digit is now */
function showMap(k) {
  const canvas = $("digit-cards").children[k].querySelector(".map"), context = canvas.getContext("2d");
  const [far, step] = facts.far, n = 2 * far / step + 1, cell = canvas.width / n, found = digit.maps[k];
  const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name);
  const at = px => (px + far + step / 2) / step * cell;
  let counts = [0, 0];
  context.clearRect(0, 0, canvas.width, canvas.height);
  found?.named.forEach((named, place) => {
    const x = cell * (place % n), y = cell * Math.floor(place / n), right = named === facts.labels[digit.digit];
    context.fillStyle = color("--line");
    if (!found.whole[place]) return context.fillRect(x + cell / 2 - 2, y + cell / 2 - 2, 4, 4);
    counts[right ? 0 : 1]++;
    context.fillStyle = context.strokeStyle = color(right ? "--right" : "--wrong");
    context.lineWidth = 3;
    if (right) return context.fillRect(x + 1, y + 1, cell - 2, cell - 2);
    context.beginPath();
    for (const [y0, y1] of [[3, cell - 3], [cell - 3, 3]]) {
      context.moveTo(x + 3, y + y0);
      context.lineTo(x + cell - 3, y + y1);
    }
    context.stroke();
  });
  Object.assign(context, {lineWidth: 3, strokeStyle: color("--ink")});
  context.setLineDash([9, 6]);
  const low = at(-facts.moved) - cell / 2;
  context.strokeRect(low, low, at(facts.moved) + cell / 2 - low, at(facts.moved) + cell / 2 - low);
  context.setLineDash([]);
  context.beginPath();
  context.arc(at(digit.x), at(digit.y), 8, 0, 7);
  Object.assign(context, {fillStyle: "#e69f00", strokeStyle: "#000"});
  context.fill();
  context.stroke();
  const total = counts[0] + counts[1];
  canvas.nextElementSibling.textContent = total ? `right in ${counts[0]} of ${total} places` : "working …";
}

/** change: factors or a digit that are new; the maps are then made anew */
function change(values) {
  Object.assign(digit, values);
  mapDigit();
  showDigit();
}

function moveTo(x, y) {
  Object.assign(digit, {x: Math.round(limited(x, -19, 19)), y: Math.round(limited(y, -19, 19))});
  showDigit();
}

/** What dragging a handle to (x, y) on the canvas makes of the digit's form */
const HANDLES = {
  "handle-turn": (across, down) => ({turn: Math.round(limited(Math.atan2(-across, -down) * 180 / Math.PI, -90, 90))}),
  "handle-down": (across, down, s, c) => ({down: limited((c * down + s * across) / HALF, 0.5, 1.5)}),
  "handle-across": (across, down, s, c) => ({across: limited((c * across - s * down) / HALF, 0.5, 1.5)}),
  "handle-shear": (across, down, s, c) => ({shear: limited(
    (digit.across - (c * across - s * down) / HALF) / digit.down, -0.8, 0.8)})};

function startDigit() {
  const networks = facts.networks[1], frame = $("trained-frame");
  [["x", -facts.moved], ["y", -facts.moved]].forEach(([name, off]) => frame.setAttribute(name, WIDE / 2 + off - 0.5));
  ["width", "height"].forEach(name => frame.setAttribute(name, 2 * facts.moved + 1));
  fill($("digit-label"), DIGITS);
  FACTORS.forEach(name => {
    shade($(name), ...facts.ranges[name]);
    $(name).addEventListener("input", event => change({[name]: +event.target.value}));
  });
  $("digit-cards").append(...networks.map(([name, words]) => {
    const map = make("canvas", {class: "map", width: 260, height: 260, role: "img",
      "aria-label": `where ${name} names this digit rightly`});
    const row = make("div", {class: "row"}, make("figure", {}, map, make("figcaption", {}, "working …")),
      make("figure", {}, make("canvas", {class: "redrawn", width: WIDE, height: WIDE}),
        make("figcaption", {}, "redrawn")));
    onDrag(map, 2 * facts.far[0] + facts.far[1], (x, y) => {
      const go = (x, y) => moveTo(x - facts.far[0] - 1, y - facts.far[0] - 1);
      go(x, y);
      return go;
    });
    return make("div", {class: "card"}, make("h2", {}, name, make("small", {}, words)),
      make("p", {class: "said"}), row);
  }));
  onDrag($("digit-stage"), WIDE, (x, y) => {
    const [x0, y0] = [x - digit.x, y - digit.y];
    return (x, y) => moveTo(x - x0, y - y0);
  });
  onDrag($("digit-frame"), WIDE, (x, y, target) => HANDLES[target.id] && ((x, y) => {
    const angle = digit.turn * Math.PI / 180;
    change(HANDLES[target.id](x - WIDE / 2 - digit.x, y - WIDE / 2 - digit.y, Math.sin(angle), Math.cos(angle)));
  }));
  onKeys($("digit-stage"), (x, y, turn) => turn ? change({turn: limited(digit.turn + 5 * turn, -90, 90)})
    : moveTo(digit.x + x, digit.y + y));
  const take = (label, after) => change({digit: nextOf(label, after)});
  $("digit-label").addEventListener("change", event => take(+event.target.value, digit.digit));
  $("digit-other").addEventListener("click", () => take(+$("digit-label").value, digit.digit));
  $("digit-rest").addEventListener("click", () => change({...REST, x: 0, y: 0}));
  $("digit-edge").addEventListener("click", () => moveTo(10, 10));
  $("digit-turned").addEventListener("click", () => change({turn: 20}));
  $("digit-label").value = 2;
  digit.digit = nextOf(2, 0);
}

// ---------------------------------------------------------------- a toy

const toy = {category: 3, toy: 0, azimuth: 20, elevation: 40, light: 0, named: null};

/** An arc of a ring, clockwise from straight up, degrees */
function arc(radius, from, to) {
  const at = degrees => [Math.sin(degrees * Math.PI / 180) * radius, -Math.cos(degrees * Math.PI / 180) * radius];
  return `M ${at(from)} A ${radius} ${radius} 0 ${to - from > 180 ? 1 : 0} 1 ${at(to)}`;
}

function showToy() {
  const {named, ...fields} = toy;
  ["category", "light", "azimuth", "elevation"].forEach(name => { $(name).value = toy[name]; });
  $("toy-number").value = toy.toy;
  $("hand").setAttribute("transform", `rotate(${toy.azimuth})`);
  ask("toy", fields, showToyAnswer);
}

function showToyAnswer(found) {
  const networks = facts.networks[2], [low, high] = facts.trained;
  paint($("toy-stage"), [bytesOf(found.image)]);
  const right = found.answers.map((scores, k) => {
    const card = $("toy-cards").children[k], named = largest(scores), said = card.querySelector(".said");
    said.textContent = TOYS[named];
    said.classList.toggle("yes", named === toy.category);
    const all = shares(scores, networks[k][2]), sum = all.reduce((a, b) => a + b);
    [...card.querySelectorAll("i")].forEach((bar, j) => {
      bar.style.setProperty("--size", `${100 * all[j] / sum}%`);
      bar.className = j !== named ? "" : j === toy.category ? "right" : "wrong";
    });
    return named === toy.category;
  });
  const seen = (toy.azimuth - low + 720) % 360 <= high - low;
  $("toy-verdict").textContent = `A ${TOYS[toy.category]}, ${seen ? "from a side as in training" : "from a new side"}: `
    + `${right.filter(Boolean).length} of ${right.length} networks name it.`;
}

function showRing() {
  facts.networks[2].forEach((_, k) => document.querySelectorAll(`#ring .of-${k}`).forEach((segment, a) => {
    const verdict = !toy.named ? "" : toy.named[k][a] === toy.category ? "right" : "wrong";
    segment.setAttribute("class", `of-${k} ${verdict}`);
  }));
  [...$("ring-names").children].forEach((name, k) => {
    const right = toy.named?.[k].filter(named => named === toy.category).length;
    name.textContent = `${facts.networks[2][k][0]}${toy.named ? `: ${right} of ${toy.named[k].length} sides` : " …"}`;
  });
}

/** change: what of the toy is new; the ring is made anew unless it is the side alone */
function changeToy(values) {
  Object.assign(toy, values);
  if (Object.keys(values).some(name => name !== "azimuth")) {
    const {named, azimuth, ...fields} = toy;
    toy.named = null;
    showRing();
    whenRested("ring", async current => {
      for (let found = {stale: true}; found?.stale && current();) {
        const at = performance.now();
        found = await answerOf("ring", fields);
        if (!current() || !found || found.stale) continue;
        toy.named = found.named;
        (times.ring ??= []).push(performance.now() - at);
        showRing();
      }
    });
  }
  showToy();
}

function startToy() {
  const networks = facts.networks[2], [low, high] = facts.trained, step = facts.azimuths[1];
  fill($("category"), TOYS);
  fill($("toy-number"), [1, 2, 3, 4, 5]);
  fill($("light"), [1, 2, 3, 4, 5, 6]);
  $("ring").append(make("path", {class: "trained", d: arc(118, low, high)}),
    make("line", {id: "hand", y1: -10, y2: -108}));
  networks.forEach((_, k) => facts.azimuths.forEach(a => $("ring").append(
    make("path", {class: `of-${k}`, d: arc(98 - 22 * k, a - step / 2 + 0.7, a + step / 2 - 0.7)}))));
  $("ring").append($("hand"));
  $("ring-names").append(...networks.map(() => make("li")));
  shade($("azimuth"), high - 360, low);                           // around the circle: the slider's two ends
  shade($("elevation"), 30, 70);
  $("toy-cards").append(...networks.map(([name, words]) => make("div", {class: "card"},
    make("h2", {}, name, make("small", {}, words)), make("p", {class: "said"}),
    make("div", {class: "lines"}, ...TOYS.flatMap(word => [make("span", {}, word), make("i")])))));
  const around = degrees => Math.round((degrees % 360 + 360) % 360) % 360;
  onDrag($("toy-stage"), 96, (x0, y0) => {
    const {azimuth, elevation} = toy;
    return (x, y) => {
      const high = limited(Math.round(elevation + y - y0), 0, 90);
      changeToy({azimuth: around(azimuth + 2 * (x - x0)), ...high === toy.elevation ? {} : {elevation: high}});
    };
  });
  onDrag($("ring"), 260, (x, y) => {
    const go = (x, y) => changeToy({azimuth: around(Math.atan2(x - 130, 130 - y) * 180 / Math.PI)});
    go(x, y);
    return go;
  });
  onKeys($("toy-stage"), (x, y) => changeToy({azimuth: around(toy.azimuth + 5 * x),
    ...y ? {elevation: limited(toy.elevation - 5 * y, 0, 90)} : {}}));
  for (const id of ["category", "toy-number", "light", "azimuth", "elevation"]) {
    $(id).addEventListener("input", event => changeToy({[id.split("-")[0]]: +event.target.value}));
  }
}

// ---------------------------------------------------------------- the page

const TABS = ["pair", "digit", "toy"];
const OPEN = {pair: showPair, digit: () => change({}), toy: () => changeToy({light: toy.light})};

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
  facts = await answerOf("start", {});
  if (!facts) return;
  facts.pixels = bytesOf(facts.digits);
  startPair();
  startDigit();
  startToy();
  $("source").textContent = facts.source === "MNIST" ? "Digits: MNIST's test digits, which no network was trained on."
    : "Digits: synthetic ones, as MNIST is not here; the networks were trained on MNIST.";
  TABS.forEach((name, k) => {
    $(`tab-${name}`).addEventListener("click", () => openTab(name));
    $(`tab-${name}`).addEventListener("keydown", event => {
      const next = {ArrowRight: 1, ArrowLeft: 2}[event.key];
      if (!next) return;
      openTab(TABS[(k + next) % 3]);
      $(`tab-${TABS[(k + next) % 3]}`).focus();
    });
  });
  openTab(TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "pair");
}

start();
