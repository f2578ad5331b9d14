// Numbers and times as text. "–" is an unknown value.

const NONE = "–";

/** Three significant digits with a suffix: 1234567 is 1.23M. */
export function short(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${suffix}`;
  return `${Number(value.toPrecision(3))}`;
}

/** Bytes in GiB: 3221225472 is 3 GiB. */
export function gib(bytes) {
  return `${Number((bytes / 2 ** 30).toPrecision(3))} GiB`;
}

/** All digits, grouped: 1234567 is 1,234,567. */
export function exact(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en-US", { maximumFractionDigits: 1 });
}

/** A balancedness. */
export function balance(value) {
  return value === null || value === undefined ? NONE : value.toFixed(3);
}

/** A share of 1, as a percentage. */
export function percent(value, digits = 1) {
  return value === null || value === undefined ? NONE : `${(value * 100).toFixed(digits)} %`;
}

/** A load relative to the mean. */
export function times(ratio) {
  return ratio === null || ratio === undefined ? NONE : `${ratio.toFixed(ratio < 10 ? 2 : 1)}×`;
}

/** Seconds as a duration. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Number((seconds / 3600).toPrecision(3))} h`;
}

/** Seconds since 1970 as this browser's time of day. */
export function clock(seconds) {
  return new Date(seconds * 1e3).toLocaleTimeString("en-GB");
}

/** Seconds since 1970 as a day and its time, for ranges of several days. */
export function day(seconds) {
  const at = new Date(seconds * 1e3);
  return `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock(seconds).slice(0, 5)}`;
}

/** The first `most` numbers of a list, and how many follow. */
export function list(numbers, most = 12) {
  const shown = numbers.slice(0, most).join(", ");
  return numbers.length > most ? `${shown} and ${numbers.length - most} more` : shown;
}

/** A text as a sentence. */
export function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
}

/** A count and its word, in the plural unless it is 1. */
export function counted(number, word, words = `${word}s`) {
  return `${exact(number)} ${number === 1 ? word : words}`;
}
