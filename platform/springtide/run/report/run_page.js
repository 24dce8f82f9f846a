"use strict";
// Draws the charts of a run from the data in the page.
(() => {
  const NS = "http://www.w3.org/2000/svg", LEFT = 56, RIGHT = 10, TOP = 6, BOTTOM = 20, HEIGHT = 170;
  const COLORS = ["#2563eb", "#93b4f5", "#dc6803", "#0f9d76"];
  let data, host, note, drawn = [], cursor = null;
  const shows = { log: false, time: false };

  const element = (tag, attributes = {}, text = "") => {
    const isPicture = ["svg", "path", "line", "circle", "text", "g"].includes(tag);
    const made = isPicture ? document.createElementNS(NS, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    return made;
  };
  const number = value => {
    const size = Math.abs(value);
    for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= limit) return String(+(value / (letter === "k" ? 1e3 : limit)).toPrecision(4)) + letter;
    }
    return String(+value.toPrecision(4));
  };
  const ticks = (low, high, most) => {
    const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 2.5, 5, 10].find(one => one * power >= rough);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
    return found;
  };
  // index of the last x that is not above `at`
  const before = (x, at) => {
    let low = 0, high = x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] <= at) low = middle + 1; else high = middle;
    }
    return low - 1;
  };
  const nearest = (x, at) => {
    const left = before(x, at);
    return left + 1 < x.length && (left < 0 || x[left + 1] - at < at - x[left]) ? left + 1 : left;
  };
  const between = (from, to, at) => {
    const left = Math.max(0, Math.min(before(from, at), from.length - 2));
    if (from.length < 2) return to[0] ?? 0;
    const span = from[left + 1] - from[left];
    return to[left] + (span ? (at - from[left]) / span : 0) * (to[left + 1] - to[left]);
  };
  // moving average over a fiftieth of the curve, centered
  const smoothed = y => {
    const reach = Math.floor(y.length / 100), sums = [0];
    for (const value of y) sums.push(sums[sums.length - 1] + value);
    return y.map((_, at) => {
      const from = Math.max(0, at - reach), to = Math.min(y.length, at + reach + 1);
      return (sums[to] - sums[from]) / (to - from);
    });
  };
  const onAxis = step => shows.time ? between(data.minutes.x, data.clock, step) : step;

  const drawChart = (chart, width, low, high) => {
    const box = element("figure"), head = element("figcaption"), isLog = shows.log && /^(loss|sources)$/.test(chart.id);
    head.append(element("b", {}, chart.title + " "), element("small", {}, chart.unit));
    const lines = chart.series.filter(one => one.x.length).map(one =>
      ({ ...one, y: one.style === "mean" ? smoothed(one.y) : one.y }));
    const shown = lines.flatMap(one => isLog ? one.y.filter(value => value > 0) : one.y);
    let bottom = shown.reduce((a, b) => Math.min(a, b), Infinity), top = shown.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!shown.length) [bottom, top] = [isLog ? 0.1 : 0, 1];
    if (chart.zero) bottom = Math.min(0, bottom);
    if (top === bottom) top = bottom + (Math.abs(bottom) || 1) * (isLog ? 1 : 0.1);
    const scale = isLog ? Math.log : value => value, first = scale(bottom), last = scale(top);
    const X = step => LEFT + (onAxis(step) - low) / (high - low || 1) * (width - LEFT - RIGHT);
    const Y = value => TOP + (last - scale(value)) / (last - first) * (HEIGHT - TOP - BOTTOM);
    const picture = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": chart.title });
    const marksY = isLog ? [...new Set(ticks(first, last, 4).map(at => +Math.exp(at).toPrecision(2)))] : ticks(bottom, top, 4);
    for (const at of marksY) {
      if (Y(at) < TOP - 1 || Y(at) > HEIGHT - BOTTOM + 1) continue;
      picture.append(element("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: Y(at), y2: Y(at) }));
      picture.append(element("text", { x: LEFT - 6, y: Y(at) + 4, "text-anchor": "end" }, number(at)));
    }
    for (const at of ticks(low, high, width / 75)) {
      const x = LEFT + (at - low) / (high - low || 1) * (width - LEFT - RIGHT);
      picture.append(element("text", { x, y: HEIGHT - 5, "text-anchor": "middle" }, number(at) + (shows.time ? " min" : "")));
    }
    for (const [step, kind] of data.marks) {
      picture.append(element("line", { class: "mark " + kind, x1: X(step), x2: X(step), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    const values = [];
    for (const [at, one] of lines.entries()) {
      const color = COLORS[at % COLORS.length], points = [];
      for (const [number, x] of one.x.entries()) if (!isLog || one.y[number] > 0) points.push([X(x).toFixed(1), Y(one.y[number]).toFixed(1)]);
      const join = ([x, y], number) => !number ? `M${x},${y}` : one.style === "step" ? `H${x}V${y}` : `L${x},${y}`;
      if (one.style === "points" || points.length === 1) {
        for (const [x, y] of points) picture.append(element("circle", { cx: x, cy: y, r: 2.5, fill: color }));
      } else {
        const path = element("path", { class: "curve " + one.style, d: points.map(join).join(""), stroke: color });
        one.style === "faint" ? picture.prepend(path) : picture.append(path);
      }
      const value = element("output"), label = element("span", { class: "key", style: `--key: ${color}` }, one.name + " ");
      label.append(value);
      head.append(label);
      values.push({ one, value });
    }
    const hair = element("line", { class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    picture.append(hair);
    box.append(head, picture);
    host.append(box);
    drawn.push({ picture, hair, values, X });
  };

  const point = () => {
    for (const { hair, values, X } of drawn) {
      hair.setAttribute("visibility", cursor === null ? "hidden" : "visible");
      for (const { one, value } of values) {
        const at = cursor === null ? one.x.length - 1 : nearest(one.x, cursor);
        value.textContent = at < 0 ? "" : number(one.y[at]);
      }
      if (cursor !== null) for (const end of ["x1", "x2"]) hair.setAttribute(end, X(cursor));
    }
    if (cursor === null) {
      note.textContent = `last step ${data.last.toLocaleString("en")}`;
      return;
    }
    const [x] = drawn.length ? [drawn[0].X(cursor)] : [0];
    const near = data.marks.filter(one => Math.abs(drawn[0].X(one[0]) - x) < 5).map(one => one[2]).slice(-1);
    const minutes = between(data.minutes.x, data.minutes.y, cursor);
    note.textContent = [`step ${Math.round(cursor).toLocaleString("en")}`, `${minutes.toFixed(1)} min`, ...near].join(" · ");
  };

  const draw = () => {
    let latest = -Infinity;
    data.clock = data.minutes.y.map(value => latest = Math.max(latest, value));
    const ends = data.charts.flatMap(chart => chart.series.flatMap(one => one.x.length ? [one.x[0], one.x[one.x.length - 1]] : []));
    const steps = [ends.reduce((a, b) => Math.min(a, b), Infinity), ends.reduce((a, b) => Math.max(a, b), -Infinity)];
    host.textContent = "";
    drawn = [];
    const [low, high] = ends.length ? steps.map(onAxis) : [0, 1];
    const width = Math.max(240, host.clientWidth);
    for (const chart of data.charts) drawChart(chart, width, low, high);
    const move = event => {
      const { left, width: shownWidth } = drawn[0].picture.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, ((event.clientX - left) * width / shownWidth - LEFT) / (width - LEFT - RIGHT)));
      const at = low + share * (high - low);
      cursor = shows.time ? between(data.clock, data.minutes.x, at) : at;
      point();
    };
    for (const { picture } of drawn) {
      picture.addEventListener("pointermove", move);
      picture.addEventListener("pointerdown", move);
      picture.addEventListener("pointerleave", () => { cursor = null; point(); });
    }
    point();
  };

  document.addEventListener("DOMContentLoaded", () => {
    data = JSON.parse(document.getElementById("data").textContent);
    host = document.getElementById("charts");
    const controls = element("p", { id: "controls" });
    for (const [name, text] of [["log", "log scale of the loss"], ["time", "time instead of steps"]]) {
      const box = element("input", { type: "checkbox", id: `shows-${name}` }), label = element("label", {}, " " + text);
      box.addEventListener("change", () => { shows[name] = box.checked; draw(); });
      label.prepend(box);
      controls.append(label);
    }
    note = element("output", { id: "note" });
    controls.append(note);
    const frame = element("div");  // the switches stay in sight beside the charts, not beyond them
    host.before(frame);
    frame.append(controls, host);
    host.classList.add("drawn");
    draw();
    new ResizeObserver(() => {
      if (drawn.length && Math.max(240, host.clientWidth) !== drawn[0].picture.viewBox.baseVal.width) draw();
    }).observe(host);
  });
})();
