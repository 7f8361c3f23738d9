// How many tokens an answer may have: as many as were asked for, or the room that the conversation leaves.

import { call } from "./api.js";

const COUNT_MS = 15_000;

/** {most, note}; the note says where it is fewer than `asked`. Throws where there is no room, and as `call` does. */
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
