// Calls of this service. The key lives in this module's memory and nowhere else.

let key = "";

export function useKey(text) {
  key = text;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response, if it is a good one. Throws Refused with what the service says, TypeError where it does not answer. */
export async function call(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refused(response.status, told?.error?.message ?? `the service answered ${response.status}`);
}

/** The events of a streamed answer, parsed. Throws where the stream tells of an error, or ends before its time. */
export async function* events(path, body, options) {
  const response = await call(path, { ...options, method: "POST", body: JSON.stringify(body) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment, which keeps the connection alive
      const text = part.slice("data: ".length);
      if (text === "[DONE]") return;
      const event = JSON.parse(text);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
