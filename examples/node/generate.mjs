// Streams an answer from Baton. Written from protos/baton.proto alone.
//
//   npm ci --ignore-scripts
//   node generate.mjs --target 127.0.0.1:50051 --max-tokens 50 "Once upon a time"
//   node generate.mjs --chat "What is a block table?"    through the chat template of the model
//   node generate.mjs --json "Once upon a time"          one JSON object per event
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    chat: { type: "boolean", default: false },
    target: { type: "string", default: "127.0.0.1:50051" },
    proto: { type: "string", default: fileURLToPath(new URL("../../protos/baton.proto", import.meta.url)) },
    "max-tokens": { type: "string" },
    temperature: { type: "string" },
    seed: { type: "string" },
    "timeout-s": { type: "string", default: "600" },
    json: { type: "boolean", default: false },
  },
});
if (positionals.length !== 1) {
  console.error('usage: node generate.mjs [--chat] [--target host:port] [--json] [--max-tokens N] "prompt"');
  process.exit(2);
}

// uint64 (seed, transfer_bytes) may not fit a JavaScript number: as strings.
const reading = { keepCase: true, longs: String, enums: String, oneofs: true, defaults: true };
const definition = protoLoader.loadSync(options.proto, reading);
const { baton } = grpc.loadPackageDefinition(definition);
const client = new baton.v1.BatonService(options.target, grpc.credentials.createInsecure());

const sampling = {};
if (options["max-tokens"] !== undefined) sampling.max_tokens = Number(options["max-tokens"]);
if (options.temperature !== undefined) sampling.temperature = Number(options.temperature);
if (options.seed !== undefined) sampling.seed = options.seed;

const deadline = new Date(Date.now() + 1000 * Number(options["timeout-s"]));
const [prompt] = positionals;
const call = options.chat
  ? client.Chat({ messages: [{ role: "user", content: prompt }], sampling }, { deadline })
  : client.Generate({ text: prompt, sampling }, { deadline });
process.once("SIGINT", () => call.cancel());

const nextOffset = new Map(); // of each choice

call.on("data", (response) => {
  const name = response.event;
  const event = response[name];
  if (name === "delta") checkOffset(event);
  if (options.json) console.log(JSON.stringify({ event: name, ...readable(name, event) }));
  else if (name === "delta") process.stdout.write(event.text);
});
call.on("error", (error) => fail(`${grpc.status[error.code]}: ${error.details}`));
call.on("status", ({ code }) => {
  if (code === grpc.status.OK && !options.json) process.stdout.write("\n");
  client.close();
});

// Offsets of a choice are contiguous from 0, whatever happens to the workers behind the endpoint.
function checkOffset({ index, offset, token_ids }) {
  const expected = nextOffset.get(index) ?? 0;
  nextOffset.set(index, offset + token_ids.length);
  if (offset === expected) return;
  fail(`choice ${index}: expected offset ${expected}, got ${offset}`);
  call.cancel();
}

function fail(message) {
  if (!process.exitCode) console.error(message);
  process.exitCode = 1;
}

function readable(name, event) {
  if (name === "delta" && event.logprobs === null) delete event.logprobs; // not asked for
  if (name !== "finished") return event;
  const { reason, matched_stop, ...rest } = event;
  return { finish_reason: reason.replace("FINISH_REASON_", "").toLowerCase(), ...rest };
}
