// The data of GET /v1/fault_tolerance/status for display: serving and missing ranks, and the effect on requests. Uses no DOM.

import { clock, counted, duration, list, sentence } from "./format.js";

const PHASES = {
  starting: "The service is starting: not all ranks are ready yet",
  regrouping: "The ranks are forming a new group. Requests pause for a moment, and streams continue",
  waiting: "No rank can serve until a lost rank is back: the others cannot hold all experts. Requests wait",
};

/**
 * The service's health.
 * @returns kind "whole" or "lost"; `ranks` such as "1 of 2"; `note` for a tile; `banner`, "" if all is well
 */
export function healthOf(status) {
  const serving = status.engines.filter((engine) => engine.status === "healthy").length;
  const ranks = `${serving} of ${status.total_engines}`;
  const note = noteOf(status);
  if (serving === status.total_engines) return { kind: "whole", ranks, note, banner: "" };
  const lines = [
    `${ranks} ranks serve.`,
    ...status.missing.map((each) => `Rank ${each.rank} has been away since ${clock(each.since)} (${duration(Math.round(each.seconds))}): ${each.reason}.`),
    ...status.faults.map((each) => `Steps on rank ${each.rank} failed: ${each.reason}.`),
    sentence(PHASES[status.phase] ?? "Its requests continue on the other ranks, and the load below covers these ranks only"),
  ];
  return { kind: "lost", ranks, note, banner: lines.join(" ") };
}

function noteOf(status) {
  const away = status.missing.map((each) => each.rank);
  if (away.length) return `away: rank ${list(away, 6)}`;
  if (status.phase !== "serving") return status.phase;
  if (status.resize?.is_scaling_elastic_ep) return `${status.resize.phase}: ${status.resize.requested_data_parallel_size} ranks`;
  const draining = (status.draining ?? []).map((each) => each.rank);
  if (draining.length) return `draining: rank ${list(draining, 6)}`;
  return status.losses ? `${counted(status.losses, "loss", "losses")} since the start` : "none lost since the start";
}
