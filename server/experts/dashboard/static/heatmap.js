// A heat map on a canvas: ratios by row and column, coloured around 1, with numbers at the pointer.
// If a cell would be too small to see, neighbours share one, coloured by the hottest of them: the other ranks wait for the
// hottest, and a mean would hide it. The text at the pointer names it.

import { colour, cssOf, divergingTable, stepOf, parse } from "./palette.js";
import { hideTip, showTip } from "./tip.js";

const LEFT = 40; // pixels for row labels
const BOTTOM = 22; // for column labels
const LEGEND = 26;
const LEGEND_ROOM = 340; // pixels for titles and colours on one line; with less they take two lines
const BARS = 58; // for the bars at the right
const NARROWEST = 2.5; // pixels of a cell
const MOST_ROWS = 128;
const HEIGHT = 384; // target in pixels

export class HeatMap {
  /**
   * @param octaves number of doublings of the mean up to the last colour
   * @param label description of the canvas for screen readers
   */
  constructor(parent, { octaves, label, rowTitle, columnTitle }) {
    this.octaves = octaves;
    this.titles = [rowTitle, columnTitle];
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${label}; arrow keys move from cell to cell`);
    parent.append(this.canvas);
    this.cells = document.createElement("canvas"); // one pixel per cell
    this.at = null; // the cell under the pointer
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("blur", () => this.#leave());
    this.canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  /**
   * @param ratios [rows][columns] over the mean, null without data
   * @param rows labels of the rows
   * @param describe returns the text of a cell, given its row and column
   * @param bars a number from 0 to 1 or null for each row; optional
   */
  show({ ratios, rows, describe, bars = null }) {
    Object.assign(this, { ratios, rows, describe, bars });
    this.draw();
  }

  /** Numbers of neighbours that share a cell: [rows, columns]. */
  get grouped() {
    return [this.rowGroup, this.columnGroup];
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.ratios?.length || !width) return;
    const columns = this.ratios[0].length;
    this.plotWidth = width - LEFT - (this.bars ? BARS : 0);
    this.columnGroup = Math.ceil(columns / Math.floor(this.plotWidth / NARROWEST));
    this.rowGroup = Math.ceil(this.ratios.length / MOST_ROWS);
    this.numColumns = Math.ceil(columns / this.columnGroup);
    this.numRows = Math.ceil(this.ratios.length / this.rowGroup);
    this.rowHeight = Math.max(3, Math.min(28, Math.floor(HEIGHT / this.numRows)));
    this.cellWidth = this.plotWidth / this.numColumns;
    this.plotHeight = this.numRows * this.rowHeight;
    this.#paintCells();
    this.#paint(width);
    if (this.at && this.tipAt) showTip(this.#text(), ...this.tipAt);
  }

  /** The hottest [row, column] of a cell's neighbours, or null if none has a ratio. */
  #hottest(cellRow, cellColumn) {
    let found = null;
    const lastRow = Math.min((cellRow + 1) * this.rowGroup, this.ratios.length);
    const lastColumn = Math.min((cellColumn + 1) * this.columnGroup, this.ratios[0].length);
    for (let row = cellRow * this.rowGroup; row < lastRow; row++)
      for (let column = cellColumn * this.columnGroup; column < lastColumn; column++) {
        const ratio = this.ratios[row][column];
        if (ratio !== null && (!found || ratio > this.ratios[found[0]][found[1]])) found = [row, column];
      }
    return found;
  }

  #paintCells() {
    this.table = divergingTable();
    const none = parse(colour("--none"));
    Object.assign(this.cells, { width: this.numColumns, height: this.numRows });
    const context = this.cells.getContext("2d");
    const image = context.createImageData(this.numColumns, this.numRows);
    for (let row = 0, at = 0; row < this.numRows; row++)
      for (let column = 0; column < this.numColumns; column++, at += 4) {
        const hot = this.#hottest(row, column);
        const step = hot ? stepOf(this.ratios[hot[0]][hot[1]], this.octaves) : 0;
        image.data.set(hot ? this.table.subarray(3 * step, 3 * step + 3) : none, at);
        image.data[at + 3] = 255;
      }
    context.putImageData(image, 0, 0);
  }

  #paint(width) {
    this.legendLines = this.plotWidth < LEGEND_ROOM ? 2 : 1;
    const height = this.plotHeight + BOTTOM + this.legendLines * LEGEND;
    const scale = devicePixelRatio;
    Object.assign(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cells, LEFT, 0, this.plotWidth, this.plotHeight);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    if (this.cellWidth >= 8 && this.rowHeight >= 4) this.#rule(context);
    this.#labelAxes(context);
    if (this.bars) this.#paintBars(context);
    this.#paintLegend(context);
    if (this.at) this.#outline(context);
  }

  /** Draw lines between cells that are large enough. */
  #rule(context) {
    context.fillStyle = colour("--card");
    for (let column = 1; column < this.numColumns; column++)
      context.fillRect(LEFT + column * this.cellWidth - 0.5, 0, 1, this.plotHeight);
    if (this.rowHeight >= 8)
      for (let row = 1; row < this.numRows; row++)
        context.fillRect(LEFT, row * this.rowHeight - 0.5, this.plotWidth, 1);
  }

  #labelAxes(context) {
    context.fillStyle = colour("--soft");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const everyRow = pace(13 / this.rowHeight);
    for (let row = 0; row < this.numRows; row += everyRow)
      context.fillText(this.rows[row * this.rowGroup], LEFT - 6, Math.max(6, (row + 0.5) * this.rowHeight));
    context.textAlign = "center";
    const everyColumn = pace((34 * this.columnGroup) / this.cellWidth);
    for (let column = 0; column < this.ratios[0].length; column += everyColumn)
      context.fillText(
        column,
        LEFT + (Math.floor(column / this.columnGroup) + 0.5) * this.cellWidth,
        this.plotHeight + 10,
      );
  }

  #paintBars(context) {
    const left = LEFT + this.plotWidth + 8;
    const room = BARS - 8;
    this.bars.forEach((value, row) => {
      if (value === null) return;
      const [top, height] = [row * this.rowHeight + 0.5, Math.max(1, Math.min(14, this.rowHeight - 1))];
      context.fillStyle = colour("--line");
      context.fillRect(left, top, room, height);
      context.fillStyle = colour("--first");
      context.fillRect(left, top, room * value, height);
    });
    context.fillStyle = colour("--soft");
    context.textAlign = "left";
    context.fillText("0", left, this.plotHeight + 10);
    context.textAlign = "right";
    context.fillText("1", left + room, this.plotHeight + 10);
  }

  #paintLegend(context) {
    let top = this.plotHeight + BOTTOM + 4;
    const [room, most] = [120, 2 ** this.octaves];
    context.fillStyle = colour("--soft");
    context.textAlign = "left";
    context.fillText(`↓ ${this.titles[0]}   → ${this.titles[1]}`, LEFT, top + 5);
    top += (this.legendLines - 1) * 18;
    const left = LEFT + this.plotWidth - room - 28;
    context.textAlign = "right";
    context.fillText(`mean × 1/${most}`, left - 6, top + 5);
    context.textAlign = "left";
    context.fillText(`${most}`, left + room + 6, top + 5);
    for (let x = 0; x < room; x++) {
      context.fillStyle = cssOf(this.table, Math.round((x / (room - 1)) * 255));
      context.fillRect(left + x, top, 1.5, 9);
    }
  }

  #outline(context) {
    const [row, column] = this.at;
    context.strokeStyle = colour("--ink");
    context.lineWidth = 1.5;
    context.strokeRect(
      LEFT + column * this.cellWidth - 0.5,
      row * this.rowHeight - 0.5,
      this.cellWidth + 1,
      this.rowHeight + 1,
    );
  }

  #point(event) {
    const column = Math.floor((event.offsetX - LEFT) / this.cellWidth);
    const row = Math.floor(event.offsetY / this.rowHeight);
    const inside = row >= 0 && row < this.numRows && column >= 0 && column < this.numColumns;
    if (inside) this.#moveTo([row, column], [event.clientX, event.clientY]);
    else this.#leave();
  }

  #step(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.ratios) return;
    event.preventDefault();
    const [row, column] = this.at ?? [-move[0], -move[1]];
    const to = [clamp(row + move[0], this.numRows), clamp(column + move[1], this.numColumns)];
    const box = this.canvas.getBoundingClientRect();
    const x = box.left + LEFT + (to[1] + 1) * this.cellWidth;
    this.#moveTo(to, [x, box.top + (to[0] + 1) * this.rowHeight]);
  }

  #moveTo(cell, place) {
    [this.at, this.tipAt] = [cell, place];
    this.#paint(this.canvas.parentElement.clientWidth);
    showTip(this.#text(), ...place);
  }

  #leave() {
    if (!this.at) return;
    this.at = this.tipAt = null;
    this.#paint(this.canvas.parentElement.clientWidth);
    hideTip();
  }

  #text() {
    const [row, column] = this.at;
    const hot = this.#hottest(row, column) ?? [row * this.rowGroup, column * this.columnGroup];
    const members = this.columnGroup * this.rowGroup;
    return this.describe(...hot) + (members > 1 ? `\n(the hottest of ${members} neighbours in this cell)` : "");
  }
}

/** The smallest of 1, 2, 5, 10, 20, 50 ... that is at least `least`. */
export function pace(least) {
  for (let size = 1; ; size *= 10)
    for (const digit of [1, 2, 5]) if (digit * size >= least) return digit * size;
}

function clamp(value, count) {
  return Math.max(0, Math.min(count - 1, value));
}
