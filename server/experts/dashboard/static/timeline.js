// Figures over time as lines, and events and rebalances as marks. The service keeps more points for recent times. The chart
// shows the chosen time range, up to the last point.

import { clock, day, duration, short } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 220;
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 12, 10, 22];
const SHORTEST_S = 60; // of the displayed time
const DAY_S = 86400;
const NEAR = 7; // pixels from a mark
const AFTER_S = 5; // an event may be newer than the last point
const MARKS = [
  ["moved", "placement changed"],
  ["kept", "rebalance without a change"],
  ["incident", "rank lost or back"],
];

/** An axis from the next lower tenth below all values up to 1. */
export function shareAxis(values) {
  const low = Math.max(0, Math.min(0.9, Math.floor(Math.min(1, ...values) * 10 - 0.2) / 10));
  return { low, high: 1, step: 1 - low > 0.55 ? 0.2 : 0.1, text: (value) => value.toFixed(1) };
}

/** An axis from 0 to the next round number above all values. */
function roundAxis(most, text) {
  const power = 10 ** Math.floor(Math.log10(most));
  const high = power * [1, 2, 4, 5, 8, 10].find((digit) => digit * power >= most * (1 - 1e-9));
  return { low: 0, high, step: high / 4, text };
}

/** An axis of counts or rates. */
export const countAxis = (values) => roundAxis(Math.max(1, ...values), short);

/** An axis of seconds. */
export const timeAxis = (values) => roundAxis(Math.max(0.001, ...values), duration);

/** An axis of shares from 0 to 1. */
export const fullAxis = () => ({ low: 0, high: 1, step: 0.25, text: (value) => `${value * 100} %` });

export class Timeline {
  /**
   * @param label description of the picture for screen readers
   * @param lines [{title, kind: "first" or "second", value: returns a point's figure or null}]
   * @param axisOf shareAxis, countAxis, timeAxis or fullAxis
   * @param describe returns a point's text
   * @param height in pixels
   */
  constructor(parent, { label, lines, axisOf, describe, height = HEIGHT }) {
    Object.assign(this, { lines, axisOf, describe, height });
    this.points = []; // {time, ...}, oldest first
    this.svg = make("svg", { height, role: "img", "aria-label": label });
    this.legend = document.createElement("p");
    this.legend.className = "legend";
    parent.append(this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", hideTip);
  }

  /**
   * @param marks [{time, text, kind: "moved", "kept" or "incident"}]
   * @param range_s seconds to show, or Infinity for all
   */
  show(points, marks, range_s) {
    Object.assign(this, { points, marks, range_s });
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
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.#explain();
    this.svg.replaceChildren(...this.#axes(), ...this.#marks(), ...this.#paths());
  }

  #x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  #y(value) {
    const { low, high } = this.axis;
    return TOP + ((high - value) / (high - low)) * (this.height - TOP - BOTTOM);
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
      parts.push(make("text", { x: this.#x(times[index]), y: this.height - 5, "text-anchor": anchor }, said(times[index]))),
    );
    return parts;
  }

  #marks() {
    return this.#shownMarks().map(({ time, kind }) => {
      const x = this.#x(Math.min(time, this.to));
      const bottom = this.height - BOTTOM;
      return make("line", { class: `mark ${kind}`, x1: x, x2: x, y1: kind === "kept" ? bottom - 8 : TOP, y2: bottom });
    });
  }

  #shownMarks() {
    return this.marks.filter((mark) => mark.time >= this.from && mark.time <= this.to + AFTER_S);
  }

  /** Show a legend for the lines and for the kinds of marks in the chart. */
  #explain() {
    const kinds = new Set(this.#shownMarks().map((mark) => mark.kind));
    const entries = this.lines.map((line) => [line.kind, line.title]);
    for (const [kind, title] of MARKS) if (kinds.has(kind)) entries.push([kind, title]);
    this.legend.replaceChildren(...entries.map(([kind, title]) => {
      const entry = document.createElement("span");
      const sample = document.createElement("i");
      sample.className = kind;
      entry.append(sample, title);
      return entry;
    }));
  }

  #paths() {
    return this.lines.map(({ kind, value: figure }) => {
      let pen = "M"; // a gap without values
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
    const mark = this.#shownMarks().find((each) => Math.abs(this.#x(each.time) - x) < NEAR);
    showTip(mark ? mark.text : this.describe(this.#nearest(x)), event.clientX, event.clientY);
  }

  #nearest(x) {
    const away = (point) => Math.abs(this.#x(point.time) - x);
    return this.shown.reduce((best, point) => (away(point) < away(best) ? point : best));
  }
}

function make(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== "") element.setAttribute(key, value);
  element.textContent = text;
  return element;
}
