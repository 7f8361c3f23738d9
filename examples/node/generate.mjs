// Streams an answer from Baton. Written from protos/baton.proto alone.
//
//   npm ci --ignore-scripts
//   node generate.mjs --target 127.0.0.1:50051 --max-tokens 50 "Once upon a time"
//   node generate.mjs --chat "What is a block table?"    through the chat template of the model
//   node generate.mjs --json "Once upon a time"          one JSON object per event
//   node generate.mjs --target host:50051,host:50053 …   two routers: if one dies, the other continues the stream
//   BATON_API_KEY=baton-… node generate.mjs --ca ca.pem …  a service with API keys and TLS (baton certs)
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const USAGE = `usage: node generate.mjs [options] "prompt"

  --chat                    put the prompt through the model's chat template
  --target HOST:PORT,...    routers; if one dies, the next continues (BATON_TARGET, or 127.0.0.1:50051)
  --max-tokens N            maximum number of tokens
  --temperature T           0 is greedy
  --seed N                  the same seed gives the same answer
  --timeout-s S             for the complete answer (600)
  --json                    one JSON object per event instead of the text
  --ca FILE                 CA certificate (PEM); turns TLS on (BATON_TLS_CA)
  --proto FILE              baton.proto; default: two folders above
  -h, --help                show this
An API key is read from BATON_API_KEY.`;

function parsed() {
  try {
    return parseArgs({ allowPositionals: true, options: OPTIONS });
  } catch (error) {
    if (!error.code?.startsWith("ERR_PARSE_ARGS")) throw error;
    misused(error.message);
  }
}

function misused(message) {
  console.error(`${message}\n${USAGE}`);
  process.exit(2);
}

const OPTIONS = {
  chat: { type: "boolean", default: false },
  target: { type: "string", default: process.env.BATON_TARGET || "127.0.0.1:50051" },
  proto: { type: "string", default: fileURLToPath(new URL("../../protos/baton.proto", import.meta.url)) },
  "max-tokens": { type: "string" },
  temperature: { type: "string" },
  seed: { type: "string" },
  "timeout-s": { type: "string", default: "600" },
  json: { type: "boolean", default: false },
  ca: { type: "string", default: process.env.BATON_TLS_CA },
  help: { type: "boolean", short: "h", default: false },
};
const { values: options, positionals } = parsed();
if (options.help) {
  console.log(USAGE);
  process.exit(0);
}
if (positionals.length !== 1) misused("one prompt is needed, in quotes");

// uint64 values (seed, transfer_bytes) are read as strings: they may exceed a JavaScript number.
const reading = { keepCase: true, longs: String, enums: String, oneofs: true, defaults: true };
const definition = protoLoader.loadSync(options.proto, reading);
const { baton } = grpc.loadPackageDefinition(definition);
const { createInsecure, createSsl } = grpc.credentials;
const credentials = options.ca ? createSsl(readFileSync(options.ca)) : createInsecure();
const alive = { "grpc.keepalive_time_ms": 15_000, "grpc.keepalive_timeout_ms": 5_000 }; // detects a router that hangs
const clients = options.target.split(",").map((target) => new baton.v1.BatonService(target.trim(), credentials, alive));

// The key is not an option, since other users of the machine can read the arguments of a process.
const metadata = new grpc.Metadata();
if (process.env.BATON_API_KEY) metadata.set("authorization", `Bearer ${process.env.BATON_API_KEY}`);

const sampling = {};
if (options["max-tokens"] !== undefined) sampling.max_tokens = Number(options["max-tokens"]);
if (options.temperature !== undefined) sampling.temperature = Number(options.temperature);
if (options.seed !== undefined) sampling.seed = options.seed;

const deadline = new Date(Date.now() + 1000 * Number(options["timeout-s"]));
const [prompt] = positionals;
const request = options.chat ? { messages: [{ role: "user", content: prompt }], sampling } : { text: prompt, sampling };

const MAX_BREAKS = 16;
let router = 0; // index of the current target
let breaks = 0; // since the last event
let started = null;
let complete = false; // every choice is finished
let withRequest = false; // the request is sent again, because no router knows the stream
const received = new Map(); // of each choice: index, token_ids, text_bytes, finished
let call = follow(clients[0][options.chat ? "Chat" : "Generate"](request, metadata, { deadline }));
process.once("SIGINT", () => call.cancel());

function follow(stream) {
  stream.on("data", (response) => take(response.event, response[response.event]));
  stream.on("error", (error) => {
    if (stream !== call) return;
    if (complete) return end();
    if (process.exitCode || !resumable(error)) return end(`${grpc.status[error.code]}: ${error.details}`);
    setTimeout(resume, Math.min(2000, 50 * 2 ** breaks));
  });
  stream.on("status", ({ code }) => {
    if (code !== grpc.status.OK) return;
    if (!options.json) process.stdout.write("\n");
    end();
  });
  return stream;
}

// A stream that breaks after its first event is resumed at the next router, after the received tokens.
function resumable({ code }) {
  if (!started?.resume_token) return false;
  if (code === grpc.status.NOT_FOUND && !withRequest) return (withRequest = true);
  return code === grpc.status.UNAVAILABLE && ++breaks <= MAX_BREAKS;
}

function resume() {
  router = (router + 1) % clients.length;
  const { request_id, resume_token, seed } = started;
  const message = { request_id, resume_token, choices: [...received.values()] };
  if (withRequest) message[options.chat ? "chat" : "generate"] = { ...request, sampling: { ...sampling, seed } };
  call = follow(clients[router].Resume(message, metadata, { deadline }));
}

function take(name, event) {
  if (name === "started" && started) return; // a resumed stream repeats it
  if (name === "started") started = event;
  if (name === "delta") count(event);
  if (name === "finished") of(event.index).finished = true;
  complete = Boolean(event.usage);
  breaks = 0;
  if (options.json) console.log(JSON.stringify({ event: name, ...readable(name, event) }));
  else if (name === "delta") process.stdout.write(event.text);
}

function of(index) {
  if (!received.has(index)) received.set(index, { index, token_ids: [], text_bytes: 0, finished: false });
  return received.get(index);
}

// The offsets of a choice are contiguous from 0, also over failures of routers and workers.
function count({ index, offset, token_ids, text }) {
  const choice = of(index);
  if (offset !== choice.token_ids.length) {
    fail(`choice ${index}: expected offset ${choice.token_ids.length}, got ${offset}`);
    call.cancel();
  }
  choice.token_ids.push(...token_ids);
  choice.text_bytes += Buffer.byteLength(text);
}

function end(message) {
  if (message) fail(message);
  for (const client of clients) client.close();
}

function fail(message) {
  if (!process.exitCode) console.error(message);
  process.exitCode = 1;
}

function readable(name, event) {
  if (name === "delta" && event.logprobs === null) delete event.logprobs; // not requested
  if (name === "started") return { ...event, resume_token: undefined }; // a credential of this stream
  if (name !== "finished") return event;
  const { reason, matched_stop, ...rest } = event;
  return { finish_reason: reason.replace("FINISH_REASON_", "").toLowerCase(), ...rest };
}
