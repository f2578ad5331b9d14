// The page: polls GET /experts/load, keeps one state (loading, empty, live, refused, gone), and draws. service.js shows
// the service as a whole, including lost ranks.

import { balance, clock, counted, duration, exact, list, percent, sentence, short, times } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { isQuiet, markOfChange, showHistory } from "./history.js";
import {
  add,
  checkLoad,
  expertsOf,
  hottest,
  overMean,
  overMeanPair,
  rankFigures,
  ranksOf,
  viewOf,
  waitsInWords,
} from "./load.js";
import { markOfEvent, showCard, showEvents, showRankTable, withRole } from "./operations.js";
import { poll, Refusal } from "./poll.js";
import { Service } from "./service.js";
import { Strips } from "./strips.js";
import { showTiles } from "./tiles.js";
import { shareAxis, Timeline } from "./timeline.js";

const POOL = new URLSearchParams(location.search).get("pool"); // null: the first one
// Relative, because the service may have a path prefix.
const ADDRESS = POOL === null ? "experts/load" : `experts/load?pool=${encodeURIComponent(POOL)}`;
const PHASES = ["all", "prefill", "decode"];
const at = (name) => document.getElementById(name);

const experts = new HeatMap(at("experts"), {
  octaves: 3,
  label: "Load of each expert in each layer",
  rowTitle: "layer",
  columnTitle: "expert",
});
const ranks = new HeatMap(at("ranks"), {
  octaves: 1,
  label: "Load of each rank in each layer",
  rowTitle: "layer",
  columnTitle: "rank",
});
const traffic = new HeatMap(at("traffic"), {
  octaves: 2,
  label: "Bytes dispatched from each rank to each other rank",
  rowTitle: "from rank",
  columnTitle: "to rank",
});
const timeline = new Timeline(at("timeline"), {
  label: "Balancedness over time",
  axisOf: shareAxis,
  lines: [
    { title: "mean over layers", kind: "first", value: (point) => point.views[phase].mean },
    { title: "worst layer", kind: "second", value: (point) => point.views[phase].worst },
  ],
  describe: describePoint,
});
const service = new Service({ tiles: at("service"), parent: at("charts"), onChange: showService });
const strips = new Strips(at("strips"));

let load = null; // the last good answer
let seen = null; // its time, by the server's clock
let points = []; // of balancedness over time: {time, views: {phase: {mean, median, worst}}}
let phase = "all";
let range_s = 1800; // of the charts; the default in index.html
let status = "connecting";

function take(answer, time) {
  load = checkLoad(answer);
  seen = time;
  const views = Object.fromEntries(PHASES.map((name) => [name, viewOf(load, name)]));
  const isEmpty = views.all.total === 0 && !load.series.time.length;
  if (!isEmpty) points = pointsOf(load.series, time, views);
  at("model").textContent = ` · ${load.model}`;
  at("shape").textContent = shapeOf(load);
  enter(isEmpty ? "empty" : "live", `${isEmpty ? "idle" : "live"}, ${clock(time)}`);
  if (isEmpty) explainEmpty();
  else draw(views[phase]);
}

function shapeOf(load) {
  const slots = load.slots_per_rank * load.num_ranks;
  return (
    `${counted(load.layers.length, "MoE layer")} × ${counted(load.num_experts, "expert")} in ${exact(slots)} slots ` +
    `on ${counted(load.num_ranks, "rank")} · placement ${load.placement_version}`
  );
}

/** The points over time of an answer: its series, and the views of the current window. */
function pointsOf(series, time, views) {
  const valuesAt = (columns, index) =>
    Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]]));
  const viewsAt = (index) =>
    Object.fromEntries(Object.entries(series.views).map(([name, columns]) => [name, valuesAt(columns, index)]));
  const found = series.time.map((then, index) => ({ time: then, views: viewsAt(index) }));
  const isNewer = !found.length || time > found.at(-1).time;
  if (isNewer && load.num_ranks > 1) found.push({ time, views });
  return found;
}

function describePoint({ time, views }) {
  const view = views[phase];
  if (view.mean === null) return `${clock(time)}: no tokens`;
  return `${clock(time)}\nmean over layers ${balance(view.mean)}\nmedian ${balance(view.median)}\nworst layer ${balance(view.worst)}`;
}

/** Show the ranks' health. A lost rank must be visible in every state of the page. */
function showService() {
  const { health } = service;
  document.body.dataset.ranks = health?.kind ?? "unknown";
  at("health").textContent = health?.banner ?? "";
  at("health").hidden = !health?.banner;
  showStatus();
  showPools();
  showOperations();
  if (load) service.show(marks(), range_s);
}

/** Links to the experts of each pool with its role, if there are several. */
function showPools() {
  const pools = service.status?.pools ?? [];
  at("pools").hidden = pools.length < 2;
  at("pools").replaceChildren(
    ...pools.flatMap(({ pool, role }, index) => {
      const isShown = POOL === null ? index === 0 : pool === POOL;
      const entry = document.createElement(isShown ? "strong" : "a");
      entry.textContent = withRole(pool, role);
      if (!isShown) entry.href = `?pool=${encodeURIComponent(pool)}`;
      return [index ? " · " : "Experts of pool ", entry];
    }),
  );
}

/** Rebalances and rank events as marks for charts. */
function marks() {
  return [...(load.history ?? []).map(markOfChange), ...(service.status?.events ?? []).map(markOfEvent)];
}

function showOperations() {
  const now_s = Date.now() / 1e3;
  const events = service.status?.events ?? [];
  const isKnown = showRankTable(at("rank-table"), service.status, service.speed, now_s);
  showEvents(at("events"), events);
  at("events-note").textContent = events.length ? "" : "No rank has been lost since the service started.";
  showCard(at("card"), service, load, now_s);
  at("operations").hidden = !isKnown;
}

function showStatus() {
  const { health } = service;
  const isLost = health?.kind === "lost";
  at("status").textContent = isLost ? `${health.ranks} ranks, ${status}` : status;
  const name = load ? `${load.model} on WideEP` : "WideEP";
  document.title = isLost ? `(${health.ranks} ranks) ${name}` : name;
}

function draw(view) {
  const window = `${counted(load.window.steps, "step")} in ${duration(load.window.seconds)}`;
  showFigures(view, window);
  showExperts(view);
  showRanks(view);
  showTraffic();
  const history = load.history ?? [];
  timeline.show(points, marks(), range_s);
  service.show(marks(), range_s);
  at("timeline-note").textContent =
    "Mean load over the fullest rank's load, per layer; 1 is even. Each point covers the steps of one window.";
  at("rebalances").hidden = !history.length;
  showHistory(at("history"), history);
  at("why").textContent = sentence(load.why?.sentence);
  at("waits").textContent = waitsInWords(load.ranks);
  strips.show(rankFigures(load));
}

function showFigures(view, window) {
  const hot = hottest(overMean(view.tokens));
  const worst = view.worstLayer === null ? "–" : `layer ${load.layers[view.worstLayer]}`;
  const even =
    load.num_ranks > 1 // a single rank always equals the mean
      ? [[balance(view.mean), `over the layers; median ${balance(view.median)}`], [balance(view.worst), worst]]
      : [["–", "one rank has nothing to balance"], ["–", ""]];
  const tiles = [
    ["Balancedness, mean", ...even[0]],
    ["Balancedness, worst", ...even[1]],
    ["Hottest expert", hot ? times(hot.ratio) : "–", hot ? `expert ${hot.expert} of layer ${load.layers[hot.layer]}` : ""],
    ["Tokens to experts", short(view.total), `in ${window}`],
    ["Placement", `${load.placement_version}`, lastMove()],
  ];
  showTiles(at("tiles"), tiles);
}

function lastMove() {
  if (load.placement_version === 0) return "unchanged since the start";
  const times = (load.history ?? []).filter((change) => !isQuiet(change)).map((change) => change.time);
  times.push(...(service.status?.events ?? []).filter((event) => event.kind === "regrouped").map((event) => event.time));
  return times.length ? `since ${clock(Math.max(...times))}` : "changed since the start";
}

function showExperts(view) {
  const ratios = overMean(view.tokens);
  const sums = view.tokens.map(add);
  const describe = (row, expert) => {
    const held = ranksOf(load, row, expert);
    const lines = [
      `layer ${load.layers[row]}, expert ${expert}`,
      `${exact(view.tokens[row][expert])} tokens, ${times(ratios[row][expert])} the layer's mean`,
      `${percent(sums[row] ? view.tokens[row][expert] / sums[row] : null, 2)} of the layer`,
      held.length ? `on rank ${list(held)}` : "on no rank",
    ];
    return lines.join("\n");
  };
  experts.show({ ratios, rows: load.layers, describe });
  at("experts-note").textContent =
    `Tokens of each expert over its layer's mean.` + shared(experts, "experts");
}

function showRanks(view) {
  const ratios = overMean(view.rankTokens);
  const describe = (row, place) => {
    const held = expertsOf(load, row, place);
    const { rank } = load.ranks[place];
    const lines = [
      `layer ${load.layers[row]}, rank ${rank}` + hostOf(rank),
      `${exact(view.rankTokens[row][place])} tokens, ${times(ratios[row][place])} the layer's mean`,
      `holds ${counted(held.length, "expert")}: ${list(held)}`,
      `balancedness of the layer ${balance(view.perLayer[row])}`,
    ];
    return lines.join("\n");
  };
  const bars = load.num_ranks > 1 ? view.perLayer : null; // a single rank's bars would all be full
  ranks.show({ ratios, rows: load.layers, describe, bars });
  const barsNote = bars ? "; bars: the layer's balancedness" : "";
  at("ranks-note").textContent = `Tokens of each rank over the layer's mean${barsNote}.` + shared(ranks, "ranks");
}

function showTraffic() {
  at("traffic-card").hidden = load.num_ranks < 2; // a single rank sends nothing
  document.querySelector("main").dataset.traffic = load.num_ranks < 2 ? "none" : "some";
  const bytes = load.ranks.map((rank) => rank.dispatch_bytes);
  const ratios = overMeanPair(bytes);
  const describe = (row, place) => {
    const from = load.ranks[row].rank;
    const to = load.ranks[place].rank;
    return `from rank ${from}${hostOf(from)}\nto rank ${to}${hostOf(to)}\n${exact(bytes[row][place])} bytes, ${times(ratios[row][place])} the mean`;
  };
  traffic.show({ ratios, rows: load.ranks.map((rank) => rank.rank), describe });
  at("traffic-note").textContent = `From each rank to each rank, over the mean pair.` + shared(traffic, "pairs");
}

function hostOf(rank) {
  const found = load.ranks.find((each) => each.rank === rank);
  return found?.host ? ` on ${found.host}` : "";
}

/** A note if neighbours share a cell, "" otherwise. */
function shared(map, what) {
  const members = map.grouped[0] * map.grouped[1];
  return members > 1 ? ` A cell is the hottest of ${members} neighbouring ${what}.` : "";
}

function explainEmpty() {
  at("why-nothing").textContent =
    "The service is ready, and no token has been routed to an expert yet. Send a request:";
  const body = JSON.stringify({ model: load.model, prompt: "Hello", max_tokens: 64 });
  at("try").textContent =
    `curl ${new URL("v1/completions", location.href)} -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

function fail(error) {
  if (error instanceof Refusal) {
    enter("refused", `refused: ${error.status}`);
    complain(`The service answered GET /${ADDRESS} with ${error.status}: ${error.message}`);
  } else if (error instanceof TypeError || error.name === "TimeoutError" || error.name === "AbortError") {
    enter("gone", "no answer");
    complain(`The service at ${location.host} does not answer.`);
  } else {
    enter("refused", "not understood");
    complain(`This page does not understand the service's answer: ${error.message}.`);
    console.error(error);
  }
}

function complain(message) {
  const shown = document.querySelector("main").hidden ? "" : ` The figures shown are from ${clock(seen)}.`;
  at("banner").textContent = `${message}${shown} The page retries automatically.`;
}

/** Change the state: the visible parts and the status text. */
function enter(state, said) {
  document.body.dataset.state = state;
  status = said;
  showStatus();
  at("banner").hidden = state === "live" || state === "empty";
  if (state === "live" || state === "empty") {
    at("nothing").hidden = state !== "empty";
    document.querySelector("main").hidden = state !== "live";
  }
}

function redraw() {
  if (load && document.body.dataset.state !== "empty") draw(viewOf(load, phase));
}

at("phases").addEventListener("change", (event) => {
  phase = event.target.value;
  redraw();
});
at("ranges").addEventListener("change", (event) => {
  range_s = Number(event.target.value);
  redraw();
});
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
service.run();
poll(ADDRESS, { onAnswer: take, onFailure: fail });
