// Calls of this service, each with a timeout. The API key is kept in this module's memory only.

const ANSWER_MS = 4_000;
const SILENCE_MS = 300_000; // maximum time without bytes in a stream: a long prompt delays the first token

let key = "";

export function useKey(text) {
  key = text;
}

/** Error: the server answered with an error status. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Error: the server did not answer, or its answer is incomplete. */
export class Unreachable extends Error {}

/** Call `path` and return the JSON of the answer. Throws Refused, Unreachable, or the reason of an aborted `signal`. */
export async function call(path, { body, signal, boundMs = ANSWER_MS } = {}) {
  const bound = AbortSignal.timeout(boundMs);
  const ended = signal ? AbortSignal.any([signal, bound]) : bound;
  try {
    return await (await send(path, body, ended)).json();
  } catch (error) {
    throw explained(error, signal, bound, `The server did not answer within ${boundMs / 1000} s.`);
  }
}

/**
 * Yield the parsed events of a streamed answer. `heard` is called when the server accepts the request, and whenever
 * bytes arrive. Throws as `call` does, and Unreachable for an incomplete stream.
 */
export async function* events(path, body, { signal, headers, heard }) {
  const silence = new AbortController();
  let timer = 0;
  const restart = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  restart();
  try {
    const response = await send(path, body, AbortSignal.any([signal, silence.signal]), headers);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      restart();
      heard();
      const { done, value } = await reader.read();
      if (done) throw new Unreachable("The connection ended before the answer did.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue; // comments only keep the connection alive
        const text = part.slice("data: ".length);
        if (text === "[DONE]") return;
        const event = JSON.parse(text);
        if (event.error) throw new Refused(response.status, event.error.message);
        yield event;
      }
    }
  } catch (error) {
    throw explained(error, signal, silence.signal, `The server sent nothing for ${SILENCE_MS / 1000} s.`);
  } finally {
    clearTimeout(timer);
  }
}

async function send(path, body, signal, headers = {}) {
  const sent = { ...headers };
  if (body) sent["content-type"] = "application/json";
  if (key) sent.authorization = `Bearer ${key}`;
  const options = { signal, headers: sent, cache: "no-store", credentials: "omit" };
  const response = await fetch(path, body ? { ...options, method: "POST", body: JSON.stringify(body) } : options);
  if (response.ok) return response;
  const refusal = await response.json().catch(() => null);
  throw new Refused(response.status, refusal?.error?.message ?? `The server answered ${response.status}.`);
}

function explained(error, signal, bound, tooLate) {
  if (signal?.aborted) return signal.reason;
  if (bound.aborted) return new Unreachable(tooLate);
  if (error instanceof Refused || error instanceof Unreachable) return error;
  if (error instanceof SyntaxError) return new Unreachable("The answer is not of the form that this server sends.");
  if (error instanceof TypeError) return new Unreachable("The server is not reachable."); // fetch's error for a failed connection
  return error;
}
