// The service as a whole: who serves (GET /v1/fault_tolerance/status) and how fast (GET /throughput). Two polls of its own,
// because a large model's GET /experts/load is asked for less often, and a lost rank should be seen at once.

import { clock, duration, exact, percent, short } from "./format.js";
import { healthOf } from "./health.js";
import { poll } from "./poll.js";
import { showTiles } from "./tiles.js";
import { countAxis, Timeline } from "./timeline.js";

const ADDRESSES = { ranks: "v1/fault_tolerance/status", speed: "throughput" }; // relative: there may be a prefix

export class Service {
  /**
   * @param tiles where the figures go
   * @param parent where the lines of tokens per second go
   * @param onChange called when something new is known; `health` and `points` say what
   */
  constructor({ tiles, parent, onChange }) {
    Object.assign(this, { tiles, onChange });
    this.health = null; // not known
    this.now = null; // likewise
    this.points = [];
    this.timeline = new Timeline(parent, {
      label: "Tokens per second over time",
      axisOf: countAxis,
      lines: [
        { title: "generated tokens/s", kind: "first", value: (point) => point.generation_tokens_per_s },
        { title: "prompt tokens/s", kind: "second", value: (point) => point.prompt_tokens_per_s },
      ],
      describe: describePoint,
    });
  }

  /** Poll for ever. */
  run() {
    const forget = (name) => () => this.#take({ [name]: null });
    poll(ADDRESSES.ranks, {
      onAnswer: (status) => this.#take({ health: healthOf(status) }),
      onFailure: forget("health"),
    });
    poll(ADDRESSES.speed, {
      onAnswer: (answer) => this.#take({ now: answer.now, points: pointsOf(answer.series) }),
      onFailure: forget("now"),
    });
  }

  /** Draw the lines of a time range. */
  show(history, range_s) {
    this.timeline.show(this.points, history, range_s);
  }

  #take(known) {
    Object.assign(this, known);
    showTiles(this.tiles, tilesOf(this.health, this.now));
    this.onChange();
  }
}

function tilesOf(health, now) {
  const ranks = health ? [health.ranks, health.note, health.kind] : ["–", "not known"];
  const [ttft, slowest] = [now?.ttft_s, now?.ttft_max_s];
  return [
    ["Ranks that serve", ...ranks],
    ["Generated tokens/s", short(now?.generation_tokens_per_s), now ? `prompts ${short(now.prompt_tokens_per_s)} tokens/s${draftsOf(now)}` : ""],
    ["Requests running", exact(now?.running), now ? `${exact(now.waiting)} waiting` : ""],
    ["Time to first token", duration(ttft), now ? (slowest ? `mean of the last 10 s; slowest ${duration(slowest)}` : "none in the last 10 s") : ""],
    ["KV cache in use", percent(now?.kv_usage), now ? `prefix hits ${percent(now.prefix_hit_rate)} in the last 10 s` : ""],
  ];
}

function draftsOf(speed) {
  const share = speed.draft_acceptance;
  return share === null || share === undefined ? "" : `; drafts accepted ${percent(share)}`;
}

/** Columns as points. */
function pointsOf(series) {
  const names = Object.keys(series);
  return series.time.map((_, index) => Object.fromEntries(names.map((name) => [name, series[name][index]])));
}

function describePoint(point) {
  const lines = [
    clock(point.time),
    `generated ${short(point.generation_tokens_per_s)} tokens/s`,
    `prompts ${short(point.prompt_tokens_per_s)} tokens/s`,
    `running ${point.running}, waiting ${point.waiting}`,
    `time to first token ${duration(point.ttft_s)}`,
    `KV cache ${percent(point.kv_usage)}${draftsOf(point)}`,
  ];
  return lines.join("\n");
}
