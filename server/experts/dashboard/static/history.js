// The service's rebalances as a table, newest first: a line of numbers, and below it the reason and what moved, which is long.

import { clock, counted, duration, percent, short } from "./format.js";

const MOST = 50;
const COLUMNS = [
  ["time", (change) => clock(change.time), ""],
  ["what", (change) => change.kind, "text"],
  ["placement", (change) => `${change.version}`, ""],
  ["predicted", (change) => percent(change.predicted_gain), ""],
  ["measured", (change) => percent(change.measured_gain), ""],
];

/** Whether the placement stayed as it was; new shares change it without a move. */
export function isQuiet(change) {
  return change.kind === "nothing" || Boolean(change.failed);
}

/** All of an entry's numbers as lines. */
export function describeChange(change) {
  const lines = [`${clock(change.time)}  ${change.kind}, placement ${change.version}`, reasonOf(change)];
  if (change.predicted_gain !== null) lines.push(`predicted gain ${percent(change.predicted_gain, 2)}`);
  if (change.measured_gain !== null) lines.push(`measured gain ${percent(change.measured_gain, 2)}`);
  if (change.moves) lines.push(movedBy(change));
  return lines.filter(Boolean).join("\n");
}

/** Fill an element with the table. */
export function showHistory(parent, history) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const [title, , kind] of COLUMNS) head.append(cell("th", title, kind));
  const body = table.createTBody();
  for (const change of history.slice(-MOST).reverse()) {
    const [row, below] = [body.insertRow(), body.insertRow()];
    row.className = below.className = isQuiet(change) ? "quiet" : "";
    for (const [, text, kind] of COLUMNS) row.append(cell("td", text(change), kind));
    const said = change.moves ? `${reasonOf(change)}; ${movedBy(change)}` : reasonOf(change);
    below.append(cell("td", said, "reason"));
    below.firstChild.colSpan = COLUMNS.length;
  }
  parent.replaceChildren(...(history.length ? [table] : []));
}

function movedBy(change) {
  return `${counted(change.moves, "slot")} filled, ${short(change.bytes)}B in ${duration(change.seconds)}`;
}

function reasonOf(change) {
  return change.failed ? `dropped, because ${change.failed}` : change.reason;
}

function cell(name, text, kind) {
  const element = document.createElement(name);
  element.textContent = text;
  element.className = kind;
  return element;
}
