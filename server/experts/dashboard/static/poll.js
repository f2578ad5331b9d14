// Poll the service: never while the page is hidden, and never for more than a tenth of the time, regardless of
// the answer's size.

const EVERY_MS = 2000;
const PATIENCE_MS = 15000;
const REST = 9; // pause, as a multiple of the time that the answer took

/** An answer with an error status; the message is the server's. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Poll an address forever.
 * @param onAnswer called with the JSON and the server's time in seconds since 1970
 * @param every_ms the minimum time between two requests
 * @param onFailure called with a Refusal, or with another Error if there was no answer or an invalid one
 */
export async function poll(address, { onAnswer, onFailure, every_ms = EVERY_MS }) {
  for (;;) {
    await visible();
    const begun = performance.now();
    try {
      onAnswer(...(await ask(address)));
    } catch (error) {
      onFailure(error);
    }
    await sleep(Math.max(every_ms, REST * (performance.now() - begun)));
  }
}

async function ask(address) {
  const response = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!response.ok) throw new Refusal(response.status, await reasonOf(response));
  const server = Date.parse(response.headers.get("date") ?? "");
  return [await response.json(), (Number.isNaN(server) ? Date.now() : server) / 1e3];
}

async function reasonOf(response) {
  const said = (await response.text()).slice(0, 2000);
  try {
    return JSON.parse(said).error.message;
  } catch {
    return said || response.statusText;
  }
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Resolves when the page is visible. */
function visible() {
  return new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });
}
