// The data of GET /experts/load: a check, and figures computed from it. Uses no DOM.
// Legend: L layers, E experts, R ranks; a view has the numbers of one phase, or of all steps.

const PHASES = ["prefill", "decode"];

/** Check an answer's shape. Throws an Error that names a missing or misshapen field. */
export function checkLoad(load) {
  for (const name of ["layers", "num_experts", "num_ranks", "window", "phases", "rank_tokens", "ranks", "placement", "series"])
    if (load?.[name] === undefined) throw new Error(`the server's answer has no "${name}"`);
  const layers = load.layers.length;
  for (const phase of PHASES) {
    if (!load.phases[phase]) throw new Error(`the server's answer has no phase "${phase}"`);
    checkMatrix(`phases.${phase}.tokens`, load.phases[phase].tokens, layers, load.num_experts);
    checkMatrix(`rank_tokens.${phase}`, load.rank_tokens[phase], layers, load.num_ranks);
  }
  return load;
}

function checkMatrix(name, matrix, rows, columns) {
  const fits = Array.isArray(matrix) && matrix.length === rows && matrix.every((row) => row.length === columns);
  if (!fits) throw new Error(`"${name}" of the server's answer is not ${rows} rows of ${columns} numbers`);
}

/** The numbers of one phase ("prefill", "decode"), or of all steps together ("all"). */
export function viewOf(load, phase) {
  const phases = phase === "all" ? PHASES : [phase];
  const tokens = sum(phases.map((name) => load.phases[name].tokens));
  const rankTokens = sum(phases.map((name) => load.rank_tokens[name]));
  const perLayer = rankTokens.map(meanOverMax);
  return { tokens, rankTokens, perLayer, ...aggregate(perLayer), total: total(tokens) };
}

/** Balancedness of one layer: mean rank over fullest rank, or null without tokens. */
function meanOverMax(row) {
  const fullest = Math.max(...row);
  return fullest > 0 ? add(row) / row.length / fullest : null;
}

/** Mean, median and worst over the layers that had tokens, or null if none had. */
export function aggregate(perLayer) {
  const known = perLayer.filter((value) => value !== null).sort((a, b) => a - b);
  if (!known.length) return { mean: null, median: null, worst: null, worstLayer: null };
  const middle = known.length >> 1;
  const median = known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
  return { mean: add(known) / known.length, median, worst: known[0], worstLayer: perLayer.indexOf(known[0]) };
}

/** Each number over its row's mean; null in rows without tokens. */
export function overMean(matrix) {
  return matrix.map((row) => {
    const mean = add(row) / row.length;
    return row.map((value) => (mean > 0 ? value / mean : null));
  });
}

/** Bytes of each pair of ranks over the mean pair. A rank and itself count as a pair only if bytes were sent. */
export function overMeanPair(bytes) {
  const isPair = (from, to) => from !== to || bytes[from][to] > 0;
  const known = bytes.flatMap((row, from) => row.filter((_, to) => isPair(from, to)));
  const mean = add(known) / known.length;
  return bytes.map((row, from) => row.map((value, to) => (mean > 0 && isPair(from, to) ? value / mean : null)));
}

/** The expert that is furthest above its layer's mean: {layer, expert, ratio}, or null without tokens. */
export function hottest(ratios) {
  let found = null;
  ratios.forEach((row, layer) =>
    row.forEach((ratio, expert) => {
      if (ratio !== null && (!found || ratio > found.ratio)) found = { layer, expert, ratio };
    }),
  );
  return found;
}

/** The ranks that hold an expert of a layer, ascending. */
export function ranksOf(load, layer, expert) {
  const row = load.placement[layer] ?? [];
  const slots = row.length / load.num_ranks;
  return row.flatMap((held, slot) => (held === expert ? [load.ranks[Math.floor(slot / slots)].rank] : []));
}

/** The experts of a place in a layer, ascending. Places equal ranks if no rank is away. */
export function expertsOf(load, layer, place) {
  const row = load.placement[layer] ?? [];
  const slots = row.length / load.num_ranks;
  return row.slice(place * slots, (place + 1) * slots).filter((held) => held >= 0).sort((a, b) => a - b);
}

/** The figures of each rank in the window, per step or per token if that is clearer. */
export function rankFigures(load) {
  const served = new Array(load.num_ranks).fill(0);
  for (const phase of PHASES)
    for (const row of load.rank_tokens[phase]) row.forEach((value, place) => (served[place] += value));
  return load.ranks.map((rank, place) => ({
    ...rank,
    served: served[place],
    perTokenUs: served[place] ? (rank.experts_s / served[place]) * 1e6 : null,
    dispatchMs: rank.steps ? (rank.dispatch_wait_s / rank.steps) * 1e3 : null,
    combineMs: rank.steps ? (rank.combine_wait_s / rank.steps) * 1e3 : null,
  }));
}

const CAUSES = {
  prefill: "a prompt elsewhere",
  decodes: "more sequences elsewhere",
  contexts: "longer contexts elsewhere",
  experts: "busier experts elsewhere",
  other: "other causes",
};

/** A sentence about the share of step time that ranks wait for others in the window, by cause; "" without steps. */
export function waitsInWords(ranks) {
  const steps = add(ranks.map((rank) => rank.step_s));
  if (!steps || ranks.length < 2) return "";
  const percent = (seconds) => `${((100 * seconds) / steps).toFixed(1)} %`;
  const waited = Object.keys(CAUSES).map((cause) => [cause, add(ranks.map((rank) => rank.wait_causes_s[cause]))]);
  const named = waited.filter(([, seconds]) => seconds / steps >= 0.001).sort((left, right) => right[1] - left[1]);
  const total = percent(add(waited.map(([, seconds]) => seconds)));
  const parts = named.map(([cause, seconds]) => `${CAUSES[cause]} ${percent(seconds)}`);
  return `Ranks spend ${total} of their step time waiting for others${parts.length ? `: ${parts.join(", ")}` : ""}.`;
}

function sum(matrices) {
  return matrices.reduce((left, right) => left.map((row, y) => row.map((value, x) => value + right[y][x])));
}

function total(matrix) {
  return add(matrix.map(add));
}

/** The sum of some numbers. */
export function add(numbers) {
  return numbers.reduce((left, right) => left + right, 0);
}
