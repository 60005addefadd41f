// The parts of a request's time in plain words (docs/ledger.md defines them), and their colours.

const OWN = "--own", PROMPT = "--prompt", OTHERS = "--others", WAIT = "--wait", FRONT = "--front", LOSS = "--loss",
  SMALL = "--small";

const PARTS = {
  receive: ["receiving the request", FRONT, "reading the request from the network"],
  load: ["loading its model", WAIT, "waiting until its model was loaded"],
  parse: ["checking the request", FRONT, "checking the request’s JSON"],
  template: ["chat template", FRONT, "writing the messages as a prompt"],
  tokenise: ["tokenising", FRONT, "cutting the prompt into tokens"],
  queue_budget: ["waiting for its turn", WAIT, "waiting for a free seat, or for the step that ran when it came"],
  queue_kv: ["waiting for KV memory", WAIT, "waiting for KV memory that others held"],
  queue_prefix: ["waiting for a shared prefix", WAIT, "waiting for another request to compute the prefix they share"],
  turn: ["other models", OTHERS, "the steps of the server’s other models"],
  cache_lookup: ["prefix cache", SMALL, "looking its prompt up in the prefix cache"],
  engine: ["engine overhead", SMALL, "the engine’s own bookkeeping"],
  prefill: ["its own prompt", PROMPT, "computing its own prompt"],
  prefill_others: ["others, during its prompt", OTHERS, "others’ tokens in the steps of its prompt"],
  recompute: ["computing again", LOSS, "computing again what was given up for memory, or for want of a seat"],
  decode: ["its own new tokens", OWN, "computing its own new tokens"],
  decode_others: ["others, during its tokens", OTHERS, "others’ tokens in the steps of its answer"],
  draft: ["drafting", SMALL, "guessing tokens ahead"],
  verify: ["checking drafts", LOSS, "checking drafted tokens"],
  gil_wait: ["Python’s lock", SMALL, "waiting for Python’s global lock"],
  grammar: ["grammar", SMALL, "keeping its answer to a grammar"],
  sample: ["choosing tokens", SMALL, "choosing tokens from the model’s scores"],
  detokenise: ["tokens to text", SMALL, "turning tokens into text"],
  handoff: ["between threads", SMALL, "handing work from thread to thread"],
  send: ["sending", FRONT, "sending the answer; a client that reads slowly counts here"],
  residual: ["unexplained", LOSS, "something that no part explains"],
  unbooked: ["this moment", SMALL, "waiting, or in a step that still runs"],
};

const KINDS = { prefill: "prompt", recompute: "recomputed", decode: "decoding", verify: "drafted" };

// A part that is newer than this page shows under its own name.
const part = (name) => PARTS[name] || [name.replaceAll("_", " "), SMALL, name.replaceAll("_", " ")];
export const partName = (name) => part(name)[0];
export const partColor = (name) => `var(${part(name)[1]})`;
export const partReason = (name) => part(name)[2];
export const kindName = (name) => KINDS[name] || name.replaceAll("_", " ");

// The caller's own name for a request where it is short, else the beginning of the answer's id.
export function shortName(call) {
  const { id, request_id: given } = call;
  const name = given && given.length < 28 ? given : id || given || "no id";
  return name.length < 28 ? name : name.slice(0, 20) + "…";
}

export function largestPart(parts) {
  return Object.entries(parts).reduce((best, each) => (each[1] > best[1] ? each : best), ["residual", -1]);
}
