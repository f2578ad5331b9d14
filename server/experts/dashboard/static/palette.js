// Colours from the style sheet's variables, so that a canvas follows the theme.
// A load is coloured by its ratio to the mean on a logarithmic scale: twice the mean is as far from the neutral
// middle as half the mean.

const STEPS = 256;
const STOPS = ["--cold-2", "--cold-1", "--even", "--hot-1", "--hot-2"];

/** A style sheet's colour. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Red, green and blue of STEPS colours from far below to far above the mean, read again for each drawing. */
export function divergingTable() {
  const stops = STOPS.map((name) => parse(colour(name)));
  const table = new Uint8ClampedArray(3 * STEPS);
  for (let step = 0; step < STEPS; step++) {
    const place = (step / (STEPS - 1)) * (stops.length - 1);
    const left = Math.min(Math.floor(place), stops.length - 2);
    for (let part = 0; part < 3; part++)
      table[3 * step + part] = stops[left][part] + (stops[left + 1][part] - stops[left][part]) * (place - left);
  }
  return table;
}

/** The table's step for a ratio; `octaves` is the number of doublings up to the last colour. */
export function stepOf(ratio, octaves) {
  const place = ratio > 0 ? Math.log2(ratio) / octaves : -1;
  return Math.round(((Math.max(-1, Math.min(1, place)) + 1) / 2) * (STEPS - 1));
}

/** A table's colour for CSS. */
export function cssOf(table, step) {
  return `rgb(${table[3 * step]} ${table[3 * step + 1]} ${table[3 * step + 2]})`;
}

/** "#rrggbb" as three numbers. */
export function parse(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
