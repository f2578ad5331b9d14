// Figures over time as lines, rebalances as marks. The service keeps the points, the coarser the older; what is drawn is
// the time range that was chosen, up to the last point.

import { clock, day, short } from "./format.js";
import { describeChange, isQuiet } from "./history.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 220;
const [LEFT, RIGHT, TOP, BOTTOM] = [40, 12, 10, 22];
const SHORTEST_S = 60; // of the time shown
const DAY_S = 86400;
const NEAR = 7; // pixels from a mark

/** An axis from the tenth below everything shown up to 1. */
export function shareAxis(values) {
  const low = Math.max(0, Math.min(0.9, Math.floor(Math.min(1, ...values) * 10 - 0.2) / 10));
  return { low, high: 1, step: 1 - low > 0.55 ? 0.2 : 0.1, text: (value) => value.toFixed(1) };
}

/** An axis from 0 to the next round number above everything shown. */
export function countAxis(values) {
  const most = Math.max(1, ...values);
  const power = 10 ** Math.floor(Math.log10(most));
  const high = power * [1, 2, 4, 5, 8, 10].find((digit) => digit * power >= most);
  return { low: 0, high, step: high / 4, text: short };
}

export class Timeline {
  /**
   * @param label what the picture shows, for those who cannot see it
   * @param lines [{title, kind: "first" or "second", value: a point's figure or null}]
   * @param axisOf shareAxis or countAxis
   * @param describe a point as text
   */
  constructor(parent, { label, lines, axisOf, describe }) {
    Object.assign(this, { lines, axisOf, describe });
    this.points = []; // {time, ...}, oldest first
    this.svg = make("svg", { height: HEIGHT, role: "img", "aria-label": label });
    parent.append(this.svg, legend(lines));
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", hideTip);
  }

  /** @param range_s seconds to show; Infinity: all there is */
  show(points, history, range_s) {
    Object.assign(this, { points, history, range_s });
    this.draw();
  }

  draw() {
    const width = this.svg.parentElement.clientWidth;
    if (!this.points.length || !width) return;
    this.width = width;
    const last = this.points.at(-1).time;
    this.from = Math.max(this.points[0].time, last - this.range_s);
    this.to = Math.max(last, this.from + SHORTEST_S);
    this.shown = this.points.filter((point) => point.time >= this.from);
    const values = this.shown.flatMap((point) => this.lines.map((line) => line.value(point)));
    this.axis = this.axisOf(values.filter((value) => value !== null));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...this.#axes(), ...this.#marks(), ...this.#paths());
  }

  #x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  #y(value) {
    const { low, high } = this.axis;
    return TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  }

  #axes() {
    const parts = [];
    const { low, high, step, text } = this.axis;
    for (let value = high; value > low - step / 1e6; value -= step) {
      const y = this.#y(value);
      parts.push(make("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      parts.push(make("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, text(value)));
    }
    const times = [this.from, (this.from + this.to) / 2, this.to];
    const said = this.to - this.from > DAY_S ? day : clock;
    ["start", "middle", "end"].forEach((anchor, index) =>
      parts.push(make("text", { x: this.#x(times[index]), y: HEIGHT - 5, "text-anchor": anchor }, said(times[index]))),
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

  #paths() {
    return this.lines.map(({ kind, value: figure }) => {
      let pen = "M"; // lifted where there is nothing
      let path = "";
      for (const point of this.shown) {
        const value = figure(point);
        if (value !== null) path += `${pen}${this.#x(point.time).toFixed(1)} ${this.#y(value).toFixed(1)}`;
        pen = value === null ? "M" : "L";
      }
      return make("path", { class: `line ${kind}`, d: path, "stroke-linecap": "round" });
    });
  }

  #point(event) {
    if (!this.points.length) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const change = this.#changes().find((each) => Math.abs(this.#x(each.time) - x) < NEAR);
    showTip(change ? describeChange(change) : this.describe(this.#nearest(x)), event.clientX, event.clientY);
  }

  #nearest(x) {
    const away = (point) => Math.abs(this.#x(point.time) - x);
    return this.shown.reduce((best, point) => (away(point) < away(best) ? point : best));
  }
}

function legend(lines) {
  const box = document.createElement("p");
  box.className = "legend";
  const entries = [...lines.map((line) => [line.kind, line.title]), ["moved", "placement changed (short: it did not)"]];
  for (const [kind, text] of entries) {
    const entry = document.createElement("span");
    const sample = document.createElement("i");
    sample.className = kind;
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
