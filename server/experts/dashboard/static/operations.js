// The operator's view: the ranks, their events, and facts about the service.

import { clock, counted, day, duration, exact, gib, list, percent, sentence } from "./format.js";
import { fillTable } from "./table.js";

const DAY_S = 86400;
const RANK_COLUMNS = [
  ["rank", (rank) => `${rank.rank}`, ""],
  ["pool", (rank) => rank.pool ?? "–", "text"],
  ["state", (rank) => rank.state, "text"],
  ["host", (rank) => rank.host ?? "–", "text"],
  ["process", (rank) => (rank.pid === undefined ? "–" : `${rank.pid}`), ""],
  ["running", (rank) => exact(rank.running), ""],
  ["waiting", (rank) => exact(rank.waiting), ""],
  ["KV in use", (rank) => percent(rank.kv_usage), ""],
  ["up for", (rank) => duration(rank.up_s), ""],
  ["restarts", (rank) => exact(rank.restarts), ""],
];
const EVENT_COLUMNS = [
  ["time", (event) => when(event.time), ""],
  ["what", (event) => WORDS[event.kind] ?? event.kind, "text"],
  ["cause", (event) => sentence(event.text), "text"],
  ["took", (event) => duration(event.seconds), ""],
];
const WORDS = {
  rank_lost: "rank lost",
  rank_back: "rank back",
  regrouped: "ranks serve",
  waiting: "service waits",
  stopped: "steps failed",
  pool_joined: "pool joins",
  pool_lost: "pool lost",
  role: "role changed",
  draining: "rank drains",
  drained: "rank drained",
  undrained: "rank undrained",
  resizing: "resize begins",
  resized: "resize done",
  resize_failed: "resize failed",
};

/** A pool's name with its role, unless the name is the role. */
export function withRole(pool, role) {
  return pool === role ? pool : `${pool} (${role})`;
}

/** Fill the table of ranks; return whether it has rows. */
export function showRankTable(parent, status, speed, now_s) {
  const known = new Map((speed?.ranks ?? []).map((rank) => [rank.rank, rank]));
  const draining = new Map((status?.draining ?? []).map((each) => [each.rank, `draining, ${counted(each.requests, "request")} left`]));
  const pools = status?.pools ?? [];
  const poolOf = new Map(pools.flatMap(({ pool, role, ranks }) => ranks.map((rank) => [rank, withRole(pool, role)])));
  const rows = (status?.engines ?? []).map(({ id, status: state, fault_info }) => {
    const rank = known.get(id) ?? { rank: id };
    const up_s = rank.since === undefined ? null : Math.max(0, now_s - rank.since);
    return { ...rank, rank: id, pool: poolOf.get(id), up_s, state: fault_info ? `${state}: ${fault_info}` : draining.get(id) ?? state, isLost: state !== "healthy" };
  });
  const columns = RANK_COLUMNS.filter(([name]) => name !== "pool" || pools.length > 1);
  fillTable(parent, columns, rows, (row) => (row.isLost ? "lost" : ""));
  return rows.length > 0;
}

/** Fill the table of events, newest first. */
export function showEvents(parent, events) {
  fillTable(parent, EVENT_COLUMNS, [...events].reverse(), (event) => (event.kind === "rank_lost" || event.kind === "waiting" ? "lost" : ""));
}

/** An event as a mark for charts. */
export function markOfEvent(event) {
  const took = event.seconds === null ? "" : `\ntook ${duration(event.seconds)}`;
  return { time: event.time, kind: "incident", text: `${clock(event.time)}  ${WORDS[event.kind] ?? event.kind}\n${sentence(event.text)}${took}` };
}

/** Fill the list of facts about the service. */
export function showCard(parent, { facts, speed, status }, load, now_s) {
  const tiers = status?.tiers ?? [];
  const errors = speed?.http_errors;
  const rows = [
    ["Model", load?.model ?? facts?.served_model_name],
    ["Version", facts && `WideEP ${facts.version}`],
    ["Device", facts?.device],
    ["Context", facts && `${exact(facts.context_length)} tokens`],
    ["KV cache", facts && `${exact(facts.max_total_num_tokens)} tokens`],
    ["KV in host memory", sizeOf(tiers, "host")],
    ["KV on disk", sizeOf(tiers, "disk")],
    ["KV faults", tiers.length && `${exact(sumOf(tiers, "faults"))} damaged and ${exact(sumOf(tiers, "dropped"))} dropped blocks`],
    ["Concurrency", facts && `${exact(facts.max_running_requests)} requests`],
    ["Started", speed && `${when(speed.since)} (${duration(now_s - speed.since)} ago)`],
    ["HTTP errors", errors && `4xx ${exact(errors["4xx"])}, 429 ${exact(errors["429"])}, 5xx ${exact(errors["5xx"])}`],
  ];
  parent.replaceChildren(
    ...rows.filter(([, value]) => value).flatMap(([name, value]) => {
      const [term, text] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      text.textContent = value;
      return [term, text];
    }),
  );
}

/** The size of a tier over all nodes, "" without one. */
function sizeOf(tiers, name) {
  const room = sumOf(tiers, `${name}_capacity_bytes`);
  const failed = tiers.filter((node) => name === "disk" && node.is_disk_off).map((node) => node.host);
  const off = failed.length ? `, disabled after an error on ${list(failed)}` : "";
  return room ? `${gib(sumOf(tiers, `${name}_bytes`))} of ${gib(room)}${off}` : "";
}

function sumOf(tiers, field) {
  return tiers.reduce((sum, node) => sum + node[field], 0);
}

function when(time) {
  return Date.now() / 1e3 - time > DAY_S ? day(time) : clock(time);
}
