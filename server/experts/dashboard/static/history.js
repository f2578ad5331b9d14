// The service's rebalances as a table, newest first, and as marks in charts.

import { clock, counted, duration, percent, sentence, short } from "./format.js";
import { fillTable } from "./table.js";

const MOST = 50;
const WORDS = {
  nothing: "kept the placement",
  shares: "changed the shares of copies",
  repair: "moved experts",
  plan: "placed all experts again",
  apply: "applied a given placement",
  rollback: "went back to the previous placement",
};
const COLUMNS = [
  ["time", (change) => clock(change.time), ""],
  ["what", (change) => wordsOf(change), "text"],
  ["placement", (change) => `${change.version}`, "optional"],
  ["predicted gain", (change) => percent(change.predicted_gain), ""],
  ["measured gain", (change) => percent(change.measured_gain), "optional"],
  ["moved", (change) => (change.moves ? movedBy(change) : "–"), "text"],
  ["details", (change) => sentence(reasonOf(change)), "text details"],
];

/** Whether the placement was not changed. New shares change it without a move. */
export function isQuiet(change) {
  return change.kind === "nothing" || Boolean(change.failed);
}

/** A rebalance as a chart's mark. */
export function markOfChange(change) {
  return { time: change.time, kind: isQuiet(change) ? "kept" : "moved", text: describeChange(change) };
}

/** Fill an element with the table. */
export function showHistory(parent, history) {
  fillTable(parent, COLUMNS, history.slice(-MOST).reverse(), (change) => (isQuiet(change) ? "quiet" : ""));
}

function describeChange(change) {
  const lines = [`${clock(change.time)}  ${wordsOf(change)}, placement ${change.version}`];
  if (change.predicted_gain !== null) lines.push(`predicted gain ${percent(change.predicted_gain, 2)}`);
  if (change.measured_gain !== null) lines.push(`measured gain ${percent(change.measured_gain, 2)}`);
  if (change.moves) lines.push(movedBy(change));
  lines.push(reasonOf(change));
  return lines.filter(Boolean).join("\n");
}

function wordsOf(change) {
  return WORDS[change.kind] ?? change.kind;
}

function movedBy(change) {
  return `${counted(change.moves, "slot")}, ${short(change.bytes)}B in ${duration(change.seconds)}`;
}

function reasonOf(change) {
  return change.failed ? `dropped, because ${change.failed}` : change.reason;
}
