// Ask the service again and again, politely: not while nobody looks, and never for more than a tenth of the time,
// however large the answer is.

const EVERY_MS = 2000;
const PATIENCE_MS = 15000;
const REST = 9; // times as long as an answer took

/** An answer that says no: `status` and the server's own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Poll an address forever.
 * @param onAnswer called with the JSON and the server's time in seconds since 1970
 * @param every_ms the least time between two requests
 * @param onFailure called with a Refusal, or with another Error when there was no answer or none that makes sense
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

/** Resolves when the page can be seen. */
function visible() {
  return new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });
}
