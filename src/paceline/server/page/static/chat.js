// The chat: sends a conversation, shows the answer as it streams, then what each token cost.
import { Answer, hideTip } from "./answer.js";
import { byId, count, make, ms } from "./dom.js";
import { clearInspection, inspect, markToken } from "./inspect.js";
import { ask } from "./key.js";
import { Timeline } from "./timeline.js";

const LOOK_EVERY_MS = 1000;
const form = byId("composer"), message = byId("message"), log = byId("log");
const send = byId("send"), stop = byId("stop"), fresh = byId("fresh"), news = byId("news");
let history = []; // messages of the conversation
let running = null; // the AbortController of the answer that streams
let selected = null; // the answer whose time is shown
let model = "";
let isScrolling = false, isAtEnd = true;

export function setModel(name) {
  model = name;
}

export const hasNoSelection = () => selected === null;

export function deselect() {
  selected = null;
}

function select(answer) {
  selected = answer;
  inspect(answer.timeline.whole);
}

function requestBody() {
  const body = { model, messages: history, stream: true, logprobs: true };
  for (const knob of ["temperature", "top_p", "max_tokens"]) {
    if (byId(knob).value !== "") body[knob] = Number(byId(knob).value);
  }
  return body;
}

// Once a frame, and only while the reader is at the end: laying out after each token would cost
// more than the token.
function followText() {
  if (isScrolling || !isAtEnd) return;
  isScrolling = true;
  requestAnimationFrame(() => {
    log.scrollTop = log.scrollHeight;
    isScrolling = false;
  });
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (kept + value).split("\n\n");
    kept = blocks.pop();
    for (const block of blocks) {
      const payload = block.replace(/^data: /, "");
      if (payload !== "[DONE]") yield JSON.parse(payload);
    }
  }
}

async function talk(text) {
  byId("hint")?.remove();
  history.push({ role: "user", content: text });
  const question = make("div", log, undefined, "question");
  make("h3", question, "You", "hidden");
  make("p", question, text);
  const answer = new Answer(log, (each, number) => { if (each === selected) markToken(number); });
  selected = answer;
  isAtEnd = true;
  followText();
  running = new AbortController();
  setBusy(true);
  news.textContent = "The model answers.";
  let error = null;
  try {
    await stream(answer, running.signal);
  } catch (failure) {
    if (failure.name !== "AbortError") error = failure.message;
  }
  running = null;
  answer.close(error);
  setBusy(false);
  if (answer.content) history.push({ role: "assistant", content: answer.content });
  else history.pop();
  await settle(answer);
  foot(answer);
  news.textContent = error || `Answer finished: ${count(answer.numTokens, "token")}.`;
}

async function stream(answer, signal) {
  const reply = await ask("/v1/chat/completions", {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(requestBody()), signal,
  });
  if (!reply.ok) {
    const body = await reply.json().catch(() => null);
    throw new Error(body?.error?.message || `the server answered ${reply.status}`);
  }
  const timer = setInterval(() => look(answer).catch(() => {}), LOOK_EVERY_MS);
  try {
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      answer.timeline ??= new Timeline(event.id);
      for (const choice of event.choices) {
        const { content, reasoning_content: thought } = choice.delta;
        answer.add(thought || content || "", choice.logprobs?.content || [], Boolean(thought));
      }
      followText();
    }
  } finally {
    clearInterval(timer);
  }
}

async function look(answer) {
  if (!answer.timeline || !(await answer.timeline.look())) return;
  answer.match(answer.timeline);
  if (selected === answer) inspect(answer.timeline.whole);
}

// The call ends a moment after its last byte: look until it has.
async function settle(answer) {
  for (let tries = 0; tries < 40 && answer.timeline; tries++) {
    await look(answer).catch(() => {});
    if (answer.timeline.isOver) return;
    await new Promise((done) => setTimeout(done, 50));
  }
}

function foot(answer) {
  const call = answer.timeline?.call;
  if (!call) return;
  const facts = [
    count(call.completion_tokens, "token"), `first after ${ms(call.ttft_ms)}`,
    call.tpot_ms === null ? null : `then ${ms(call.tpot_ms)} each (${(1000 / call.tpot_ms).toFixed(1)} a second)`,
    call.outcome === "ok" ? null : call.outcome,
  ];
  make("span", answer.foot, facts.filter(Boolean).join(" · "));
  const button = make("button", answer.foot, "Where its time went", "link");
  button.type = "button";
  button.addEventListener("click", () => {
    select(answer);
    byId("inspect-title").focus();
  });
}

function setBusy(isBusy) {
  send.disabled = isBusy;
  stop.disabled = !isBusy;
  fresh.disabled = isBusy || !history.length;
  log.setAttribute("aria-busy", String(isBusy));
}

export function startChat() {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = message.value.trim();
    if (!text || running || !form.reportValidity()) return;
    message.value = "";
    talk(text);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  log.addEventListener("scroll", () => {
    isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  }, { passive: true });
  stop.addEventListener("click", () => { running?.abort(); message.focus(); });
  fresh.addEventListener("click", () => {
    history = [];
    log.replaceChildren();
    hideTip();
    deselect();
    clearInspection("Ask something, or choose a request below.");
    setBusy(false);
    message.focus();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
}
