"use strict";
// Draws the charts of a page, saved or live. A live page also takes in what is new, and follows a log.

const WIDTH = 420, HEIGHT = 190, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 24;
const LEAST_USAGE = 0.1; // what the axis of a chart of usage reaches at least, in CPUs, GiB or GPUs
const UPDATE_MS = 2000, LOG_MS = 1000, LOST_MS = 20000; // the last one: where a run or the server is gone

const served = new Map(); // the parts of a live page, as they were sent last
const view = { log: false, smooth: 0, from: null, to: null }; // of all charts
let points = { runs: [], tags: {} }, lastStep = 1, isDragging = false, hovered = null;

function svg(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}

function short(value) {
  const text = String(Number(value.toPrecision(4)));
  return text.length <= 8 ? text : value.toExponential(2).replace("e+", "e");
}

function stepText(step) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (step >= 10 * size || (step >= size && step % size === 0)) return step / size + unit;
  return String(step);
}

// Round numbers between low and high.
function ticks(low, high, most) {
  const span = high - low;
  if (!Number.isFinite(span) || span <= 0) return [low];
  const power = 10 ** Math.floor(Math.log10(span / most));
  const size = [1, 2, 5, 10, 20].map((times) => times * power).find((each) => span / each <= most);
  const found = [];
  for (let number = Math.ceil(low / size); number * size <= high; number++) found.push(number * size);
  return found;
}

// Round numbers between two powers of ten: 1, 2 and 5 of each, or of many powers some.
function logTicks(bottom, top) {
  if (top - bottom > 3) return ticks(bottom, top, 5).filter(Number.isInteger).map((power) => 10 ** power);
  const found = [];
  for (let power = Math.floor(bottom); power <= top; power++)
    for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
  const inside = found.filter((number) => bottom <= Math.log10(number) && Math.log10(number) <= top);
  return inside.length > 1 ? inside : ticks(10 ** bottom, 10 ** top, 4);
}

// ------------------------------------------------------------------------------------------------------ data of a chart

// Strokes as lists of [step, value]. The page has steps as distances, which takes fewer bytes.
function strokesOf(strokes) {
  return strokes.map((numbers) => {
    const stroke = [];
    let step = 0;
    for (let i = 0; i < numbers.length; i += 2) stroke.push([(step += numbers[i]), numbers[i + 1]]);
    return stroke;
  });
}

// An exponential mean that is not drawn to its first value. A gap begins it anew: nothing is known across it.
function smoothed(stroke) {
  let mean = 0, weight = 0;
  return stroke.map(([step, value]) => {
    mean = view.smooth * mean + (1 - view.smooth) * value;
    weight = view.smooth * weight + (1 - view.smooth);
    return [step, mean / weight];
  });
}

// What is drawn of a stroke: within the range of steps, and on a log scale what is above 0.
function* visible(stroke) {
  let part = [];
  for (let i = 0; i < stroke.length; i++) {
    const [step, value] = stroke[i];
    const isNear = (view.from === null || (stroke[i + 1] ?? stroke[i])[0] >= view.from)
      && (view.to === null || (stroke[i - 1] ?? stroke[i])[0] <= view.to);
    if (isNear && (!view.log || value > 0)) part.push([step, value]);
    else if (part.length) { yield part; part = []; }
  }
  if (part.length) yield part;
}

// The place of a point in a chart, in its units.
function scaleOf(tag, curves) {
  let low = Infinity, high = -Infinity;
  for (const strokes of curves)
    for (const stroke of strokes ?? [])
      for (const part of visible(stroke))
        for (const [step, value] of part) {
          if ((view.from ?? 0) <= step && step <= (view.to ?? Infinity)) {
            low = Math.min(low, value);
            high = Math.max(high, value);
          }
        }
  if (low > high) [low, high] = [view.log ? 1 : 0, 1];
  if (tag.startsWith("usage/") && !view.log) [low, high] = [0, Math.max(high, LEAST_USAGE)];
  const there = view.log ? Math.log10 : (value) => value;
  let [bottom, top] = [there(low), there(high)];
  const margin = (top - bottom) * 0.04 || Math.abs(top) * 0.1 || 1;
  if (Number.isFinite(margin)) [bottom, top] = [bottom - margin, top + margin];
  const from = view.from ?? 0, to = view.to ?? lastStep;
  return {
    low, high, bottom, top, from, to,
    x: (step) => LEFT + ((WIDTH - LEFT - RIGHT) * (step - from)) / (to - from),
    // Each divided by two first: the difference of two huge numbers may be infinite.
    y: (value) => HEIGHT - BOTTOM
      - ((HEIGHT - TOP - BOTTOM) * (there(value) / 2 - bottom / 2)) / (top / 2 - bottom / 2),
    step: (x) => from + ((x - LEFT) * (to - from)) / (WIDTH - LEFT - RIGHT),
  };
}

// ---------------------------------------------------------------------------------------------------------- one chart

function draw(figure) {
  const tag = figure.dataset.tag, data = points.tags[tag] ?? [], chart = figure.querySelector("svg");
  chart.replaceChildren();
  const raw = data.map((curve) => curve && strokesOf(curve.strokes));
  const curves = view.smooth ? data.map((curve) => curve && strokesOf(curve.means ?? curve.strokes).map(smoothed)) : raw;
  const scale = scaleOf(tag, [...raw, ...curves]), isOne = data.length === 1;
  svg(chart, "title", {}, `${tag} by step, from ${short(scale.low)} to ${short(scale.high)}`);
  const marks = view.log ? logTicks(scale.bottom, scale.top) : ticks(scale.bottom, scale.top, 5);
  for (const value of marks) {
    const y = scale.y(value);
    svg(chart, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" });
    svg(chart, "text", { x: LEFT - 6, y: y + 4, class: "y" }, short(value));
  }
  for (const step of ticks(scale.from, scale.to, 5))
    if (Number.isInteger(step)) svg(chart, "text", { x: scale.x(step), y: HEIGHT - 6, class: "x" }, stepText(step));
  // An inner svg cuts off what is outside of it.
  const width = WIDTH - LEFT - RIGHT;
  const inside = svg(chart, "svg", { x: LEFT, width, height: HEIGHT, viewBox: `${LEFT} 0 ${width} ${HEIGHT}` });
  points.runs.forEach((run, number) => {
    for (const step of run.restarts)
      if (scale.from < step && step <= scale.to)
        svg(inside, "line", { x1: scale.x(step), x2: scale.x(step), y1: TOP, y2: HEIGHT - BOTTOM,
          class: isOne ? "restart" : `restart of-run s${number % 8}` });
  });
  curves.forEach((strokes, number) => {
    if (view.smooth && raw[number]) line(inside, raw[number], scale, `line faint s${number % 8}`);
    if (strokes) line(inside, strokes, scale, `line s${number % 8}`);
    const bad = data[number]?.bad ?? null;
    if (bad !== null && scale.from <= bad && bad <= scale.to) {
      const text = svg(inside, "text", { x: scale.x(bad), y: TOP + 10, class: "bad" }, "NaN");
      svg(text, "title", {}, "the first value that is not finite");
    }
  });
  if (view.log && raw.flat(2).some((point) => point && point[1] <= 0))
    svg(inside, "text", { x: LEFT + 4, y: HEIGHT - BOTTOM - 4 }, "values of 0 and below are left out");
  figure.scale = scale;
  figure.curves = curves;
  svg(chart, "line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" });
  svg(chart, "rect", { y: TOP, height: HEIGHT - TOP - BOTTOM, class: "zoom", visibility: "hidden" });
  if (hovered?.tag === tag) hover(figure, hovered.at); // over an update, too
}

function line(parent, strokes, scale, className) {
  let path = "";
  for (const stroke of strokes)
    for (const part of visible(stroke)) {
      const places = part.map(([step, value]) => `${scale.x(step).toFixed(1)} ${scale.y(value).toFixed(1)}`);
      path += `M${places.join("L")}`;
      // A path of one point draws nothing.
      if (part.length === 1) svg(parent, "circle",
        { cx: scale.x(part[0][0]), cy: scale.y(part[0][1]), r: 2, class: className.replace("line", "dot") });
    }
  svg(parent, "path", { d: path, class: className });
}

// Say what each run has at the point next to a step, and mark the step.
function hover(figure, at) {
  const output = figure.querySelector("output"), cursor = figure.querySelector(".cursor");
  output.replaceChildren();
  hovered = at === null ? null : { tag: figure.dataset.tag, at };
  if (at === null) return cursor.setAttribute("visibility", "hidden");
  const found = figure.curves.map((strokes) => nearest(strokes, at));
  const steps = found.filter(Boolean).map((point) => point[0]);
  if (!steps.length) return;
  const step = steps.reduce((one, other) => (Math.abs(one - at) <= Math.abs(other - at) ? one : other));
  figure.at = step;
  cursor.setAttribute("x1", figure.scale.x(step));
  cursor.setAttribute("x2", figure.scale.x(step));
  cursor.setAttribute("visibility", "visible");
  output.append(`step ${step}${view.smooth ? ", smoothed" : ""}: `);
  found.forEach((point, number) => {
    if (!point) return;
    const value = document.createElement("span");
    value.className = found.length > 1 ? `s${number % 8}` : "";
    value.textContent = `${short(point[1])}${point[0] === step ? "" : ` at ${point[0]}`} `;
    output.append(value);
  });
}

function nearest(strokes, at) {
  let best = null;
  for (const stroke of strokes ?? [])
    for (const point of stroke)
      if ((!view.log || point[1] > 0) && (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)))
        best = point;
  return best;
}

function listen(figure) {
  const chart = figure.querySelector("svg"), zoom = () => figure.querySelector(".zoom");
  const place = (event) => {
    const box = chart.getBoundingClientRect();
    return Math.min(WIDTH - RIGHT, Math.max(LEFT, ((event.clientX - box.left) * WIDTH) / box.width));
  };
  let begin = null;
  chart.addEventListener("pointerdown", (event) => {
    begin = place(event);
    isDragging = true;
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    const x = place(event);
    hover(figure, figure.scale.step(x));
    if (begin === null || Math.abs(x - begin) < 5) return;
    zoom().setAttribute("x", Math.min(x, begin));
    zoom().setAttribute("width", Math.abs(x - begin));
    zoom().setAttribute("visibility", "visible");
  });
  chart.addEventListener("pointerup", (event) => {
    const [left, right] = [begin, place(event)].sort((one, other) => one - other);
    if (begin !== null && right - left >= 5) {
      [view.from, view.to] = [Math.floor(figure.scale.step(left)), Math.ceil(figure.scale.step(right))];
      drawAll();
    }
    begin = null;
    isDragging = false;
  });
  chart.addEventListener("pointercancel", () => { begin = null; isDragging = false; });
  chart.addEventListener("pointerleave", () => hover(figure, null));
  chart.addEventListener("blur", () => hover(figure, null));
  chart.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const steps = figure.curves.flatMap((strokes) => (strokes ?? []).flat().map((point) => point[0]));
    const ahead = steps.filter((step) => (step - (figure.at ?? -1)) * way > 0);
    if (ahead.length) hover(figure, way > 0 ? Math.min(...ahead) : Math.max(...ahead));
  });
}

function drawAll() {
  // Charts in a folded part are drawn when it is opened.
  for (const figure of document.querySelectorAll("figure[data-tag]"))
    if (!figure.closest("details:not([open])")) draw(figure);
}

function take() {
  const found = document.getElementById("points");
  if (!found) return;
  points = JSON.parse(found.textContent);
  const strokes = Object.values(points.tags).flat().flatMap((curve) => curve?.strokes ?? []);
  lastStep = Math.max(1, ...strokes.map((numbers) => numbers.reduce((sum, number, i) => (i % 2 ? sum : sum + number), 0)));
  document.querySelectorAll("figure[data-tag]").forEach(listen);
  document.querySelectorAll("[data-live=curves] details").forEach((part) => part.addEventListener("toggle", drawAll));
  drawAll();
}

function begin() {
  const tools = document.querySelector(".tools");
  if (tools) {
    tools.hidden = false;
    tools.addEventListener("submit", (event) => event.preventDefault());
    tools.addEventListener("input", () => {
      view.log = tools.elements.log.checked;
      view.smooth = Number(tools.elements.smooth.value);
      tools.querySelector("output").value = view.smooth.toFixed(2);
      drawAll();
    });
    tools.querySelector("button").addEventListener("click", (event) => {
      event.preventDefault();
      view.from = view.to = null;
      drawAll();
    });
  }
  // Before the charts are drawn: later answers are compared with what was sent.
  for (const part of document.querySelectorAll("[data-live]")) served.set(part.dataset.live, part.outerHTML);
  take();
  if (!document.body.classList.contains("live")) return;
  document.querySelectorAll("select.log").forEach(follow);
  setTimeout(update, UPDATE_MS);
}

// ---------------------------------------------------------------------------------------------------------- a live page

// Fetch the page again and put in the parts that differ. What a reader has opened and selected in them stays.
async function update() {
  const begun = performance.now(), lost = document.getElementById("lost");
  let least = UPDATE_MS;
  if (!document.hidden && !isDragging) {
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) throw new Error(`the server says: ${await answer.text()}`);
      const other = new DOMParser().parseFromString(await answer.text(), "text/html");
      let isNew = false;
      for (const part of isDragging ? [] : document.querySelectorAll("[data-live]")) {
        const now = other.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
        if (!now || now.outerHTML === served.get(part.dataset.live)) continue;
        served.set(part.dataset.live, now.outerHTML);
        keep(part, now);
        part.replaceWith(now);
        isNew ||= part.dataset.live === "curves";
      }
      for (const choice of document.querySelectorAll("select.log")) {
        // A run that was opened before its start has logs by now. What was chosen stays.
        const now = other.getElementById(choice.id), chosen = choice.value;
        if (!now || now.innerHTML === choice.innerHTML) continue;
        choice.replaceChildren(...now.children);
        choice.value = chosen;
        if (!choice.value) choice.selectedIndex = 0; // fewer ranks than before
      }
      if (isNew) take();
      lost.hidden = true;
    } catch (error) {
      const why = error instanceof TypeError ? "toolkit serve does not answer" : error.message;
      lost.textContent = `This page is not up to date: ${why}.`;
      lost.hidden = false;
      least = LOST_MS;
    }
  }
  // A page that takes long to make is fetched more rarely, and at once where it has read a part of a long file.
  const isPart = document.querySelector("#points[data-unread]");
  setTimeout(update, isPart && lost.hidden ? 100 : Math.max(least, 5 * (performance.now() - begun)));
}

function keep(before, now) {
  for (const part of before.querySelectorAll("details[open]")) {
    const same = now.querySelector(`details[data-open="${CSS.escape(part.dataset.open)}"]`);
    if (same) same.open = true;
  }
  for (const box of before.querySelectorAll("input:checked")) {
    const same = now.querySelector(`input[value="${CSS.escape(box.value)}"]`);
    if (same) same.checked = true;
  }
  const scrolled = [...before.querySelectorAll(".scroll, pre")];
  const ways = scrolled.map((part) => [part.scrollLeft, part.scrollTop]);
  requestAnimationFrame(() => [...now.querySelectorAll(".scroll, pre")].forEach((part, number) => {
    if (ways[number]) [part.scrollLeft, part.scrollTop] = ways[number];
  }));
}

// Show the end of the chosen log, and what is added to it. A new attempt begins a new log.
function follow(choice) {
  const text = choice.closest("section").querySelector("pre");
  const ended = text.appendChild(document.createTextNode("")), drawn = text.appendChild(document.createTextNode(""));
  let at = -1, attempt = 0, name = choice.value;
  const read = async () => {
    let wait = LOG_MS;
    if (!document.hidden) {
      if (name !== choice.value) [name, at] = [choice.value, -1];
      const asked = name, query = new URLSearchParams({ run: choice.dataset.run, log: asked, attempt, at });
      try {
        const answer = await fetch(`log?${query}`, { cache: "no-store" });
        const piece = answer.ok ? await answer.json() : null;
        if (!piece) wait = LOST_MS;
        if (piece && asked === choice.value) {
          const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
          if (piece.isNew) ended.data = "";
          // A reader has no use for more, and a browser would become slow.
          ended.data = (ended.data + piece.text).slice(-500000);
          drawn.data = piece.drawn;
          ({ at, attempt } = piece);
          if (isAtEnd) text.scrollTop = text.scrollHeight;
          if (piece.isMore) wait = 0;
        }
      } catch {
        wait = LOST_MS; // the update of the page says that nothing answers
      }
    }
    setTimeout(read, wait);
  };
  choice.addEventListener("change", () => { ended.data = drawn.data = ""; });
  read();
}

begin();
