// The service as a whole: serving ranks (GET /v1/fault_tolerance/status), speed (GET /throughput) and facts
// (GET /server_info). Polled separately, because a large model's GET /experts/load is polled less often, and a lost rank
// should be visible at once.

import { clock, duration, exact, percent, short } from "./format.js";
import { healthOf } from "./health.js";
import { poll } from "./poll.js";
import { showTiles } from "./tiles.js";
import { countAxis, fullAxis, timeAxis, Timeline } from "./timeline.js";

const ADDRESSES = { ranks: "v1/fault_tolerance/status", speed: "throughput", facts: "server_info" }; // relative, because there may be a path prefix
const FACTS_EVERY_MS = 30000;
const SMALL = 150; // height of a chart in pixels

const line = (title, kind, field) => ({ title, kind, value: (point) => point[field] ?? null });
const CHARTS = [
  {
    name: "speed", title: "Tokens per second", axisOf: countAxis,
    lines: [line("generated", "first", "generation_tokens_per_s"), line("prompts", "second", "prompt_tokens_per_s")],
  },
  {
    name: "ttft", title: "Time to first token", axisOf: timeAxis,
    lines: [line("p50", "first", "ttft_p50_s"), line("p99", "second", "ttft_p99_s")],
  },
  {
    name: "itl", title: "Time between tokens", axisOf: timeAxis,
    lines: [line("p50", "first", "itl_p50_s"), line("p99", "second", "itl_p99_s")],
  },
  {
    name: "e2e", title: "Time of a whole request", axisOf: timeAxis,
    lines: [line("p50", "first", "e2e_p50_s"), line("p99", "second", "e2e_p99_s")],
  },
  {
    name: "queue", title: "Requests", axisOf: countAxis,
    lines: [line("running", "first", "running"), line("waiting", "second", "waiting")],
  },
  { name: "kv", title: "KV cache in use", axisOf: fullAxis, lines: [line("all ranks", "first", "kv_usage")] },
  {
    name: "hits", title: "Prompt tokens found in the prefix cache", axisOf: fullAxis,
    lines: [line("all", "first", "prefix_hit_rate"), { title: "in host memory, on disk, or on another node", kind: "second", value: ofTiers }],
  },
];

export class Service {
  /**
   * @param tiles element for the figures
   * @param parent element for the charts
   * @param onChange called after each change of `health`, `status`, `speed` or `facts`
   */
  constructor({ tiles, parent, onChange }) {
    Object.assign(this, { tiles, onChange });
    this.health = this.status = this.speed = this.facts = null; // unknown
    this.points = [];
    this.charts = CHARTS.map(({ name, title, axisOf, lines }) => {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      figure.id = name;
      caption.textContent = title;
      figure.append(caption);
      parent.append(figure);
      return new Timeline(figure, { label: `${title} over time`, lines, axisOf, height: SMALL, describe: describePoint });
    });
  }

  /** Poll forever. */
  run() {
    const forget = (...names) => () => this.#take(Object.fromEntries(names.map((name) => [name, null])));
    poll(ADDRESSES.ranks, {
      onAnswer: (status) => this.#take({ status, health: healthOf(status) }),
      onFailure: forget("status", "health"),
    });
    poll(ADDRESSES.speed, {
      onAnswer: (answer) => this.#take({ speed: answer, points: pointsOf(answer.series) }),
      onFailure: forget("speed"),
    });
    poll(ADDRESSES.facts, {
      onAnswer: (facts) => this.#take({ facts }),
      onFailure: forget("facts"), // this page has no API key
      every_ms: FACTS_EVERY_MS,
    });
  }

  /** Draw the charts of a time range. */
  show(marks, range_s) {
    for (const chart of this.charts) chart.show(this.points, marks, range_s);
  }

  #take(known) {
    Object.assign(this, known);
    showTiles(this.tiles, tilesOf(this.health, this.speed?.now));
    this.onChange();
  }
}

function tilesOf(health, now) {
  const ranks = health ? [health.ranks, health.note, health.kind] : ["–", "unknown"];
  const none = "none in the last 10 s";
  const noteOf = (value, text) => (now ? (value === null || value === undefined ? none : text) : "");
  return [
    ["Serving ranks", ...ranks],
    ["Generated tokens/s", short(now?.generation_tokens_per_s), now ? `prompts ${short(now.prompt_tokens_per_s)} tokens/s${draftsOf(now)}` : ""],
    ["Requests running", exact(now?.running), now ? `${exact(now.waiting)} waiting` : ""],
    ["Time to first token", duration(now?.ttft_p50_s), noteOf(now?.ttft_p50_s, `median; p99 ${duration(now?.ttft_p99_s)}`)],
    ["Time between tokens", duration(now?.itl_p50_s), noteOf(now?.itl_p50_s, `median; p99 ${duration(now?.itl_p99_s)}`)],
    ["KV cache in use", percent(now?.kv_usage), now ? `${hitsOf(now)} in the last 10 s` : ""],
  ];
}

/** The share of looked-up prompt tokens that tiers had; null without tiers. */
function ofTiers(speed) {
  return isKnown(speed.host_hit_rate) ? speed.host_hit_rate + speed.disk_hit_rate + (speed.peer_hit_rate ?? 0) : null;
}

function hitsOf(speed) {
  const peers = speed.peer_hit_rate ? `, other nodes ${percent(speed.peer_hit_rate)}` : "";
  const tiers = isKnown(speed.host_hit_rate) ? ` (host ${percent(speed.host_hit_rate)}, disk ${percent(speed.disk_hit_rate)}${peers})` : "";
  return `prefix hits ${percent(speed.prefix_hit_rate)}${tiers}`;
}

function isKnown(value) {
  return value !== null && value !== undefined;
}

function draftsOf(speed) {
  return isKnown(speed.draft_acceptance) ? `; drafts accepted ${percent(speed.draft_acceptance)}` : "";
}

/** A series' columns as points. */
function pointsOf(series) {
  const names = Object.keys(series);
  return series.time.map((_, index) => Object.fromEntries(names.map((name) => [name, series[name][index]])));
}

function describePoint(point) {
  const both = (name) => `${duration(point[`${name}_p50_s`])}, p99 ${duration(point[`${name}_p99_s`])}`;
  const lines = [
    clock(point.time),
    `generated ${short(point.generation_tokens_per_s)} tokens/s`,
    `prompts ${short(point.prompt_tokens_per_s)} tokens/s`,
    `running ${point.running}, waiting ${point.waiting}`,
    `time to first token ${both("ttft")}`,
    `between tokens ${both("itl")}`,
    `whole requests ${both("e2e")}`,
    `KV cache ${percent(point.kv_usage)}, ${hitsOf(point)}${draftsOf(point)}`,
  ];
  if (point.refused_per_s || point.busy_per_s || point.failed_per_s)
    lines.push(`errors/s: 4xx ${short(point.refused_per_s)}, 429 ${short(point.busy_per_s)}, 5xx ${short(point.failed_per_s)}`);
  return lines.join("\n");
}
