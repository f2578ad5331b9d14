// Per-rank bars, one strip per figure, one column per rank. If there are many ranks, neighbours share a column, which
// shows their maximum. If there are few, strips are side by side. All strips share the pointer, to compare a rank's figures.

import { counted, duration, exact, short } from "./format.js";
import { pace } from "./heatmap.js";
import { colour } from "./palette.js";
import { hideTip, showTip } from "./tip.js";

const [LEFT, STRIP, GAP, BOTTOM] = [40, 72, 24, 20];
const [NARROWEST, WIDEST] = [3, 40];
const TITLE = 190; // pixels of the longest title
const STRIPS = [
  ["tokens served by its experts", (rank) => rank.served, short],
  ["expert time per token, µs", (rank) => rank.perTokenUs, short],
  ["wait at dispatch per step, ms", (rank) => rank.dispatchMs, short],
  ["wait at combine per step, ms", (rank) => rank.combineMs, short],
];

export class Strips {
  constructor(parent) {
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "Tokens, expert time and waits of each rank");
    parent.append(this.canvas);
    this.at = null; // the column under the pointer
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
  }

  /** @param ranks the result of load.js's rankFigures */
  show(ranks) {
    this.ranks = ranks;
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.ranks?.length || !width) return;
    const least = LEFT + Math.max(TITLE, this.ranks.length * WIDEST);
    this.across = [4, 2].find((count) => count * least <= width) ?? 1;
    this.stripWidth = width / this.across;
    const room = this.stripWidth - LEFT - (this.across > 1 ? GAP : 0);
    this.group = Math.ceil(this.ranks.length / Math.floor(room / NARROWEST));
    this.numColumns = Math.ceil(this.ranks.length / this.group);
    this.columnWidth = Math.min(room / this.numColumns, 4 * WIDEST);
    const height = (STRIPS.length / this.across) * (STRIP + GAP) + BOTTOM;
    Object.assign(this.canvas, { width: width * devicePixelRatio, height: height * devicePixelRatio });
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    STRIPS.forEach((strip, index) => {
      const left = (index % this.across) * this.stripWidth + LEFT;
      this.#paintStrip(context, strip, left, Math.floor(index / this.across) * (STRIP + GAP) + GAP);
      if (index >= STRIPS.length - this.across) this.#labelRanks(context, left, height);
    });
  }

  #members(column) {
    return this.ranks.slice(column * this.group, (column + 1) * this.group);
  }

  #paintStrip(context, [title, figure, text], left, top) {
    const values = Array.from({ length: this.numColumns }, (_, column) =>
      Math.max(...this.#members(column).map((rank) => figure(rank) ?? 0)),
    );
    const most = Math.max(...values);
    const bar = Math.max(1, Math.min(WIDEST, this.columnWidth - (this.columnWidth > 5 ? 2 : 0.5)));
    context.fillStyle = colour("--soft");
    context.textAlign = "left";
    context.fillText(title, left, top - 7);
    context.textAlign = "right";
    context.fillText(text(most), left - 6, top + 8);
    context.fillText("0", left - 6, top + STRIP);
    context.fillStyle = colour("--line");
    context.fillRect(left, top + STRIP, this.numColumns * this.columnWidth, 1);
    values.forEach((value, column) => {
      const high = most > 0 ? (value / most) * STRIP : 0;
      context.fillStyle = colour(column === this.at ? "--second" : "--first");
      context.fillRect(left + (column + 0.5) * this.columnWidth - bar / 2, top + STRIP - high, bar, high);
    });
  }

  #labelRanks(context, left, height) {
    context.fillStyle = colour("--soft");
    context.textAlign = "center";
    const every = pace((34 * this.group) / this.columnWidth);
    for (let rank = 0; rank < this.ranks.length; rank += every) {
      const column = Math.floor(rank / this.group);
      context.fillText(this.ranks[rank].rank, left + (column + 0.5) * this.columnWidth, height - 6);
    }
  }

  #point(event) {
    if (!this.ranks) return;
    const column = Math.floor(((event.offsetX % this.stripWidth) - LEFT) / this.columnWidth);
    if (column < 0 || column >= this.numColumns) return this.#leave();
    this.at = column;
    this.draw();
    showTip(this.#members(column).map(describe).join("\n\n"), event.clientX, event.clientY);
  }

  #leave() {
    if (this.at === null) return;
    this.at = null;
    this.draw();
    hideTip();
  }
}

function describe(rank) {
  const lines = [
    `rank ${rank.rank} on ${rank.host ?? "an unknown host"}, ${counted(rank.steps, "step")}`,
    `${exact(rank.served)} tokens served by its experts`,
    `${exact(rank.tokens)} tokens of the rank's requests`,
    `experts ${duration(rank.experts_s)}, ${short(rank.perTokenUs)} µs per token`,
    `waits per step: dispatch ${short(rank.dispatchMs)} ms, combine ${short(rank.combineMs)} ms`,
  ];
  return lines.join("\n");
}
