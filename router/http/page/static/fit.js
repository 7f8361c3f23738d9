// Limit on an answer's tokens: the requested number, or fewer if the conversation leaves less of the context.

import { call } from "./api.js";

const COUNT_MS = 15_000;

/** Return {most: limit on the tokens, note: text if it is below `asked`}. Throws if no token is left, and as `call`. */
export async function fitting(model, prompt, asked, signal) {
  const { count } = await call("tokenize", { body: { model: model.name, ...prompt }, signal, boundMs: COUNT_MS });
  const room = model.max_context - count;
  if (room < 1) {
    const sizes = `${count} tokens, and at most ${model.max_context - 1} fit`;
    throw new Error(`The conversation is too long for ${model.name}: ${sizes}. Shorten it, or start a new one.`);
  }
  if (asked <= room) return { most: asked, note: "" };
  return { most: room, note: `at most ${room} tokens, not ${asked}: the prompt takes ${count} of ${model.max_context}` };
}
