// Balancedness over time as lines, rebalances as marks. The lines begin at the service's start: it keeps a series of
// points, the coarser the older it is; the last point is the present window.

import { balance, clock } from "./format.js";
import { describeChange, isQuiet } from "./history.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 220;
const [LEFT, RIGHT, TOP, BOTTOM] = [40, 12, 10, 22];
const SHORTEST_S = 60; // of the time shown
const NEAR = 7; // pixels from a mark
const LINES = [
  ["mean", "--first", ""],
  ["worst", "--second", "5 3"],
];

export class Timeline {
  constructor(parent) {
    this.points = []; // {time, views: {phase: {mean, median, worst}}}
    this.svg = make("svg", { height: HEIGHT, role: "img", "aria-label": "Balancedness over time" });
    parent.append(this.svg, legend());
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", hideTip);
  }

  /** Take what one answer says: the series, and the views of the present window. */
  take(series, time, views) {
    const valueAt = (columns, index) =>
      Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]]));
    const viewsAt = (index) =>
      Object.fromEntries(Object.entries(series.views).map(([phase, columns]) => [phase, valueAt(columns, index)]));
    this.points = series.time.map((then, index) => ({ time: then, views: viewsAt(index) }));
    if (!this.points.length || time > this.points.at(-1).time) this.points.push({ time, views });
  }

  show(phase, history) {
    Object.assign(this, { phase, history });
    this.draw();
  }

  draw() {
    const width = this.svg.parentElement.clientWidth;
    if (!this.points.length || !width) return;
    this.width = width;
    this.from = this.points[0].time;
    this.to = Math.max(this.points.at(-1).time, this.from + SHORTEST_S);
    this.low = this.#lowest();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...this.#axes(), ...this.#marks(), ...this.#lines());
  }

  /** Where the axis begins: the tenth below everything shown. */
  #lowest() {
    const worst = this.points.map((point) => point.views[this.phase].worst).filter((value) => value !== null);
    return Math.max(0, Math.min(0.9, Math.floor(Math.min(1, ...worst) * 10 - 0.2) / 10));
  }

  #x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  #y(value) {
    return TOP + ((1 - value) / (1 - this.low)) * (HEIGHT - TOP - BOTTOM);
  }

  #axes() {
    const parts = [];
    const step = 1 - this.low > 0.55 ? 0.2 : 0.1;
    for (let value = 1; value > this.low - 1e-6; value -= step) {
      const y = this.#y(value);
      parts.push(make("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      parts.push(make("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, value.toFixed(1)));
    }
    const times = [this.from, (this.from + this.to) / 2, this.to];
    ["start", "middle", "end"].forEach((anchor, index) =>
      parts.push(
        make("text", { x: this.#x(times[index]), y: HEIGHT - 5, "text-anchor": anchor }, clock(times[index])),
      ),
    );
    return parts;
  }

  #marks() {
    return this.#changes().map((change) => {
      const [x, quiet] = [this.#x(change.time), isQuiet(change)];
      const y1 = quiet ? HEIGHT - BOTTOM - 8 : TOP;
      return make("line", { class: `mark ${quiet ? "quiet" : ""}`, x1: x, x2: x, y1, y2: HEIGHT - BOTTOM });
    });
  }

  /** The entries of the history in the time shown. */
  #changes() {
    return this.history.filter((change) => change.time >= this.from && change.time <= this.to);
  }

  #lines() {
    return LINES.map(([name, colour, dashes]) => {
      let pen = "M"; // lifted where nothing was routed
      let path = "";
      for (const { time, views } of this.points) {
        const value = views[this.phase][name];
        if (value !== null) path += `${pen}${this.#x(time).toFixed(1)} ${this.#y(value).toFixed(1)}`;
        pen = value === null ? "M" : "L";
      }
      const attributes = { class: "line", d: path, stroke: `var(${colour})`, "stroke-dasharray": dashes };
      return make("path", { ...attributes, "stroke-linecap": "round" });
    });
  }

  #point(event) {
    if (!this.points.length) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const change = this.#changes().find((each) => Math.abs(this.#x(each.time) - x) < NEAR);
    showTip(change ? describeChange(change) : this.#describe(x), event.clientX, event.clientY);
  }

  #describe(x) {
    const away = (point) => Math.abs(this.#x(point.time) - x);
    const near = this.points.reduce((best, point) => (away(point) < away(best) ? point : best));
    const view = near.views[this.phase];
    if (view.mean === null) return `${clock(near.time)}: nothing was routed`;
    return `${clock(near.time)}\nmean over layers ${balance(view.mean)}\nmedian ${balance(view.median)}\nworst layer ${balance(view.worst)}`;
  }
}

function legend() {
  const box = document.createElement("p");
  box.className = "legend";
  const entries = [
    ["first", "mean over layers"],
    ["second", "worst layer"],
    ["moved", "placement changed (short: it did not)"],
  ];
  for (const [name, text] of entries) {
    const entry = document.createElement("span");
    const sample = document.createElement("i");
    sample.className = name;
    entry.append(sample, text);
    box.append(entry);
  }
  return box;
}

function make(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== "") element.setAttribute(key, value);
  element.textContent = text;
  return element;
}
