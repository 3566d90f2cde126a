"use strict";
// Draws every figure from the data it carries (data-chart) and lets the reader look closer: what is under the
// pointer, other axes, smoothing, runs on and off. Strings become SVG through the HTML parser, so no text of a
// run gets past escape().
(() => {
const DASHES = ["", "12 3", "3 3", "12 3 3 3", "6 4", "18 4", "2 4", "6 2 2 2"];
const DOTS = 25, SMOOTHED_FROM = 40;
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const escape = (text) => String(text).replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
const view = { axis: "", log: false, share: 40, hidden: new Set(), only: null, place: null };
const charts = all("[data-chart]").map((figure) => ({ figure, off: new Set(), ...JSON.parse(figure.dataset.chart) }));

// ---- numbers

const short = (value) => {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${+(value / (letter === "k" ? 1e3 : unit)).toPrecision(4)}${letter}`;
  }
  return size >= 0.0001 || size === 0 ? String(+value.toPrecision(4)) : value.toExponential(0);
};
const exact = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const places = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) places.push(+(place * step).toPrecision(12));
  return places;
}
function logTicks(low, high) {
  const places = [], factors = high / low > 100 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) if (factor * 10 ** power >= low && factor * 10 ** power <= high) places.push(+(factor * 10 ** power).toPrecision(12));
  }
  return places.length > 1 ? places : ticks(low, high, 4);
}
function mean(values, width) {
  const sums = [0];
  values.forEach((value) => sums.push(sums[sums.length - 1] + value));
  return values.map((_, index) => {
    const start = Math.max(0, index - (width >> 1)), end = Math.min(values.length, index + (width >> 1) + 1);
    return (sums[end] - sums[start]) / (end - start);
  });
}

// ---- curves

function curves(chart) {
  const axis = chart.axes[view.axis] ? view.axis : Object.keys(chart.axes)[0];
  const log = chart.log === null ? view.log : chart.log || view.log;
  return { axis, log, series: chart.series.flatMap((series, index) => {
    if (chart.off.has(index) || (chart.runs && view.hidden.has(series.colour))) return [];
    const good = series.y.map((value, at) => at).filter((at) => !log || (series.low ? series.low[at] : series.y[at]) > 0);
    const pick = (values) => values && good.map((at) => values[at]);
    const raw = pick(series.y), places = pick(series.x[axis] || []);
    if (!places.length || !raw.length) return [];
    const smooth = chart.smooth && view.share && raw.length >= SMOOTHED_FROM ? mean(raw, Math.round(raw.length / view.share)) : null;
    return [{ ...series, index, places, raw, y: smooth || raw, smooth, low: pick(series.low), high: pick(series.high) }];
  }) };
}

function drawLines(chart) {
  const { axis, log, series } = curves(chart);
  const width = Math.max(260, chart.plot.clientWidth), height = Math.round(Math.min(300, Math.max(210, width * 0.55)));
  const [left, right, top, bottom] = [54, 12, 10, 40];
  const xs = series.flatMap((s) => s.places), ys = series.flatMap((s) => [...s.raw, ...(s.low || []), ...(s.high || [])]);
  if (!xs.length) { chart.plot.innerHTML = '<p class="note">Nothing to draw: every run is hidden, or none recorded this.</p>'; chart.at = null; return; }
  const span = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const [x0, x1] = span(xs); let [y0, y1] = span(ys);
  if (y0 === y1) [y0, y1] = y0 ? [y0 - Math.abs(y0) * 0.1, y1 + Math.abs(y1) * 0.1] : [0, 1];
  if (log && y0 <= 0) y0 = y1 / 10;
  const up = log ? Math.log10 : (value) => value;
  const pad = (up(y1) - up(y0)) * 0.03, bottomValue = up(y0) - pad, topValue = up(y1) + pad;
  const x = (value) => left + (x1 === x0 ? 0.5 : (value - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - (up(value) - bottomValue) / (topValue - bottomValue) * (height - top - bottom);
  const path = (places, values) => places.map((place, at) => `${x(place).toFixed(1)},${y(values[at]).toFixed(1)}`).join(" ");
  const parts = [];
  for (const tick of log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    parts.push(`<line class="grid" x1="${left}" x2="${width - right}" y1="${y(tick)}" y2="${y(tick)}"/><text text-anchor="end" x="${left - 6}" y="${y(tick) + 4}">${short(tick)}</text>`);
  }
  for (const tick of x1 > x0 ? ticks(x0, x1, Math.max(2, Math.floor(width / 110))) : [x0]) {
    parts.push(`<line class="grid" x1="${x(tick)}" x2="${x(tick)}" y1="${top}" y2="${height - bottom}"/><text text-anchor="middle" x="${x(tick)}" y="${height - bottom + 16}">${short(tick)}</text>`);
  }
  parts.push(`<text class="axis" text-anchor="end" x="${width - right}" y="${height - 6}">${escape(chart.axes[axis])}</text>`);
  for (const s of series) {
    const dim = view.only !== null && chart.runs && view.only !== s.colour ? " dim" : "";
    const dash = chart.runs || s.dash ? DASHES[(s.dash || (s.colour >> 3)) % DASHES.length] : "";
    const marks = [`<title>${escape(s.name)}</title>`];
    if (s.low) marks.push(`<polygon class="band" points="${path(s.places, s.high)} ${path([...s.places].reverse(), [...s.low].reverse())}"/>`);
    if (s.smooth && !s.low) marks.push(`<polyline class="raw" points="${path(s.places, s.raw)}"/>`);
    marks.push(`<polyline stroke-dasharray="${dash}" points="${path(s.places, s.y)}"/>`);
    if (s.places.length <= DOTS) s.places.forEach((place, at) => marks.push(`<circle cx="${x(place)}" cy="${y(s.y[at])}" r="3"/>`));
    const [endX, endY] = [x(s.places[s.places.length - 1]), y(s.y[s.y.length - 1])];
    if (s.end) marks.push(`<path class="cross" d="M${endX - 5} ${endY - 5}l10 10m0 -10l-10 10"><title>${escape(s.name)}: ${escape(s.end)}</title></path>`);
    parts.push(`<g class="series colour-${s.colour % 8}${dim}" data-series="${s.index}">${marks.join("")}</g>`);
  }
  parts.push('<g class="crosshair"></g>');
  const what = `${chart.title}: ${chart.y} by ${chart.axes[axis]}`;
  chart.plot.innerHTML = `<svg class="plot" width="${width}" height="${height}" role="img" tabindex="0" aria-label="${escape(what)}">${parts.join("")}</svg><div class="readout" hidden></div>`;
  chart.at = { axis, series, x, y, left, right, width, height, top, bottom, value: (pixel) => x0 + (pixel - left) / (width - left - right) * (x1 - x0) };
}

function nearest(places, place) {
  let low = 0, high = places.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (places[middle] < place) low = middle; else high = middle; }
  return Math.abs(places[low] - place) <= Math.abs(places[high] - place) ? low : high;
}

// The crosshair stands at the same place of every chart with the same axis; the readout only where the reader is.
function crosshair(place, own) {
  for (const chart of charts.filter((other) => other.at)) {
    const { axis, series, x, y, width, height, top, bottom } = chart.at;
    const cross = chart.plot.querySelector(".crosshair"), readout = chart.plot.querySelector(".readout");
    readout.hidden = true; cross.innerHTML = "";
    if (place === null || axis !== own.at.axis) continue;
    const hits = series.map((s) => ({ s, at: nearest(s.places, place) })).filter(({ s, at }) => at >= 0 && place <= s.places[s.places.length - 1] * 1.02 + 1e-9);
    if (!hits.length) continue;
    const line = x(hits[0].s.places[hits[0].at]);
    cross.innerHTML = `<line x1="${line}" x2="${line}" y1="${top}" y2="${height - bottom}"/>` +
      hits.map(({ s, at }) => `<circle class="colour-${s.colour % 8}" cx="${x(s.places[at])}" cy="${y(s.y[at])}" r="3.5"/>`).join("");
    if (chart !== own) continue;
    hits.sort((a, b) => b.s.y[b.at] - a.s.y[a.at]);
    readout.innerHTML = `<b>${escape(axis)} ${exact(hits[0].s.places[hits[0].at])}</b>` + hits.slice(0, 14).map(({ s, at }) =>
      `<div><i class="colour-${s.colour % 8}"></i>${escape(s.name)} <b>${exact(s.y[at])}</b>${s.smooth ? ` <span>(${exact(s.raw[at])})</span>` : ""}</div>`).join("");
    readout.hidden = false;
    readout.style.left = line < width / 2 ? `${line + 12}px` : "auto";
    readout.style.right = line < width / 2 ? "auto" : `${width - line + 12}px`;
  }
}

// ---- bars

function drawBars(chart) {
  const width = Math.max(260, chart.plot.clientWidth), thick = 15, gap = 9, top = 4, right = 64;
  const shown = chart.series.map((_, index) => index).filter((index) => !chart.off.has(index));
  const left = Math.min(170, width * 0.36), each = chart.stacked ? 1 : Math.max(1, shown.length);
  const total = (row) => shown.reduce((sum, index) => sum + (row.values[index] || 0), 0);
  const reach = (row) => chart.stacked ? total(row) : Math.max(0, ...shown.map((index) => (row.values[index] || 0) + ((row.errors || [])[index] || 0)));
  const most = Math.max(...chart.rows.map(reach)) || 1, height = top + chart.rows.length * (each * thick + gap) + 40;
  const x = (value) => left + value / most * (width - left - right), parts = [];
  for (const tick of ticks(0, most, Math.max(2, Math.floor((width - left) / 90)))) {
    parts.push(`<line class="grid" x1="${x(tick)}" x2="${x(tick)}" y1="${top}" y2="${height - 36}"/><text text-anchor="middle" x="${x(tick)}" y="${height - 20}">${short(tick)}</text>`);
  }
  parts.push(`<text class="axis" text-anchor="end" x="${width - 4}" y="${height - 4}">${escape(chart.unit)}</text>`);
  const groups = shown.map(() => []);
  chart.rows.forEach((row, number) => {
    const base = top + number * (each * thick + gap), label = `<text class="name" text-anchor="end" x="${left - 6}" y="${base + each * thick / 2 + 4}">${escape(row.label)}</text>`;
    parts.push(row.href ? `<a href="${escape(row.href)}">${label}</a>` : label);
    let before = 0;
    shown.forEach((index, place) => {
      const value = row.values[index], y = base + (chart.stacked ? 0 : place * thick), error = (row.errors || [])[index];
      if (value === null) { if (!chart.stacked) groups[place].push(`<text class="tick" x="${left + 5}" y="${y + 12}">not measured</text>`); return; }
      const start = x(before), end = x(before + value), hollow = chart.planned.includes(chart.series[index]);
      if (chart.stacked) before += value;
      groups[place].push(`<rect class="${hollow ? "hollow" : "full"}" x="${start}" y="${y + 1.5}" width="${Math.max(0.8, end - start)}" height="${thick - 3}"><title>${escape(row.label)}, ${escape(chart.series[index])}: ${exact(value)} ${escape(chart.unit)}</title></rect>`);
      if (error) groups[place].push(`<path class="whisker" d="M${x(Math.max(0, value - error))} ${y + thick / 2}H${x(value + error)}m0 -4v8M${x(Math.max(0, value - error))} ${y + thick / 2 - 4}v8"/>`);
      if (!chart.stacked) groups[place].push(`<text class="value" x="${x(value + (error || 0)) + 5}" y="${y + 12}">${exact(+value.toPrecision(3))}</text>`);
    });
  });
  groups.forEach((marks, place) => parts.push(`<g class="series colour-${shown[place]}" data-series="${shown[place]}">${marks.join("")}</g>`));
  chart.plot.innerHTML = `<svg class="plot" width="${width}" height="${height}" role="img" aria-label="${escape(`${chart.title}, ${chart.unit}`)}">${parts.join("")}</svg>`;
}

// ---- what can be pressed

const draw = (chart) => (chart.kind === "lines" ? drawLines : drawBars)(chart);
const drawAll = () => charts.forEach(draw);
const press = (button, on) => button.setAttribute("aria-pressed", String(on));

for (const chart of charts) {
  chart.plot = chart.figure.querySelector(".plot-here");
  const names = chart.kind === "lines" ? chart.series.map((s) => s.name) : chart.series;
  if (!chart.runs && names.length > 1) {
    const legend = document.createElement("div");
    legend.className = "legend";
    legend.innerHTML = names.map((name, index) => `<button type="button" class="colour-${index % 8}" data-series="${index}" aria-pressed="true"><i></i>${escape(name)}</button>`).join("");
    chart.plot.after(legend);
    legend.addEventListener("click", (event) => {
      const button = event.target.closest("button"); if (!button) return;
      const index = +button.dataset.series, on = chart.off.has(index);
      if (on) chart.off.delete(index); else chart.off.add(index);
      press(button, on); draw(chart);
    });
  }
  chart.plot.addEventListener("pointermove", (event) => {
    if (!chart.at) return;
    view.place = chart.at.value(event.clientX - chart.plot.getBoundingClientRect().left);
    crosshair(view.place, chart);
  });
  chart.plot.addEventListener("pointerleave", () => chart.at && crosshair(null, chart));
  chart.plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !chart.at) return;
    const places = chart.at.series[0].places, now = view.place === null ? 0 : nearest(places, view.place);
    view.place = places[Math.max(0, Math.min(places.length - 1, now + by))];
    crosshair(view.place, chart); event.preventDefault();
  });
}

const controls = document.querySelector(".controls");
if (controls) {
  controls.hidden = false;
  controls.addEventListener("input", () => {
    const form = new FormData(controls);
    view.axis = form.get("axis"); view.log = form.has("log"); view.share = +form.get("smooth"); drawAll();
  });
  view.axis = new FormData(controls).get("axis");
}

// The table of runs: sorted by a column's head, a run shown or hidden, pinned to the top, picked out by the pointer.
const table = document.querySelector(".runs table");
const legend = document.querySelector(".legend.all-runs");
if (table && legend) {
  const body = table.tBodies[0], rows = [...body.rows];
  const swatch = (index) => `<svg class="swatch colour-${index % 8}" width="28" height="8" aria-hidden="true"><line x1="0" x2="28" y1="4" y2="4" stroke-dasharray="${DASHES[(index >> 3) % 8]}"/></svg>`;
  legend.innerHTML = rows.map((row, index) => `<button type="button" class="colour-${index % 8}" data-run="${index}" aria-pressed="true">${swatch(index)}${escape(row.cells[0].textContent)}</button>`).join("")
    + (rows.length > 2 ? '<button type="button" data-all aria-pressed="true">all</button>' : "");
  rows.forEach((row, index) => {
    row.dataset.run = index;
    row.cells[0].insertAdjacentHTML("afterbegin", `<button type="button" class="pin" data-pin aria-pressed="false" title="pin to the top">&#9650;</button>${swatch(index)} `);
  });
  const show = (index, on) => {
    if (on) view.hidden.delete(index); else view.hidden.add(index);
    press(legend.querySelector(`[data-run="${index}"]`), on);
    rows[index].classList.toggle("hidden-run", !on);
  };
  const toggled = (button) => {
    if (button.dataset.all !== undefined) { const on = view.hidden.size > 0; rows.forEach((_, index) => show(index, on)); press(button, on); }
    else show(+button.dataset.run, view.hidden.has(+button.dataset.run));
    drawAll();
  };
  legend.addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) toggled(button); });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr"), pin = event.target.closest("[data-pin]");
    if (pin) { press(pin, pin.getAttribute("aria-pressed") !== "true"); arrange(); } else if (row && !String(getSelection())) { show(+row.dataset.run, view.hidden.has(+row.dataset.run)); drawAll(); }
  });
  let key = -1, down = false;
  const value = (row) => { const text = row.cells[key].textContent, figure = parseFloat(text.replace(/,/g, "")); return Number.isNaN(figure) ? text : figure; };
  const order = (a, b) => {
    if (key < 0) return a.dataset.run - b.dataset.run;
    const [left, right] = [value(a), value(b)];
    if (typeof left !== typeof right) return typeof left === "number" ? -1 : 1;  // what is absent stands last either way
    return (down ? -1 : 1) * (typeof left === "number" ? left - right : left.localeCompare(right));
  };
  const pinned = (row) => row.querySelector("[data-pin]").getAttribute("aria-pressed") === "true";
  const arrange = () => body.append(...[...rows].sort((a, b) => pinned(b) - pinned(a) || order(a, b)));
  all("th", table.tHead).forEach((head, column) => {
    head.innerHTML = `<button type="button">${head.innerHTML}</button>`;
    head.addEventListener("click", () => {
      down = key === column && !down; key = column;
      all("th", table.tHead).forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending"); arrange();
    });
  });
  for (const place of [legend, body]) {
    place.addEventListener("pointerover", (event) => {
      const at = event.target.closest("[data-run]"), only = at ? +at.dataset.run : null;
      if (only !== view.only) { view.only = only; drawAll(); }
    });
    place.addEventListener("pointerleave", () => { view.only = null; drawAll(); });
  }
}

drawAll();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
})();
