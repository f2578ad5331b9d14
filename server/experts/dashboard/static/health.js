// What GET /v1/fault_tolerance/status says: who serves, who is away, and what that means for who asks. Knows no DOM.

import { clock, counted, duration, list, sentence } from "./format.js";

const PHASES = {
  starting: "The service is starting: ranks are still on their way",
  regrouping: "The ranks are meeting anew. Requests wait for a moment, and streams go on",
  waiting: "Nothing is served until a rank is back: those that are left cannot hold all experts. Requests wait",
};

/**
 * The service's health.
 * @returns kind "whole" or "lost"; `ranks` such as "1 of 2"; `note` for a tile; `banner`, "" where all is well
 */
export function healthOf(status) {
  const serving = status.engines.filter((engine) => engine.status === "healthy").length;
  const ranks = `${serving} of ${status.total_engines}`;
  const note = noteOf(status);
  if (serving === status.total_engines) return { kind: "whole", ranks, note, banner: "" };
  const lines = [
    `${ranks} ranks serve.`,
    ...status.missing.map((each) => `Rank ${each.rank} is away since ${clock(each.since)} (${duration(Math.round(each.seconds))}): ${each.reason}.`),
    ...status.faults.map((each) => `Rank ${each.rank}'s steps broke off: ${each.reason}.`),
    sentence(PHASES[status.phase] ?? "Its requests went on at the ranks that are left, and the load below is theirs alone"),
  ];
  return { kind: "lost", ranks, note, banner: lines.join(" ") };
}

function noteOf(status) {
  const away = status.missing.map((each) => each.rank);
  if (away.length) return `away: rank ${list(away, 6)}`;
  if (status.phase !== "serving") return status.phase;
  return status.losses ? `${counted(status.losses, "loss", "losses")} since the start` : "none lost since the start";
}
