// Requests that run or were slow, each with its reason; one opens in the panel above.
import { deselect, hasNoSelection } from "./chat.js";
import { byId, count, make, ms, percent } from "./dom.js";
import { clearInspection, inspect, onOpen, why } from "./inspect.js";
import { Timeline } from "./timeline.js";
import { largestPart, partColor, partName, shortName } from "./words.js";

const box = byId("calls");
let rank = "wall";
let key = "";
let opened = null; // the timeline that was chosen here

export const chosenRank = () => rank;

export function startCalls(onChange) {
  document.querySelectorAll("input[name=by]").forEach((input) => {
    input.addEventListener("change", () => { rank = input.value; onChange(); });
  });
  onOpen(open);
}

// Redrawn only when something changed, so that a focus on a row stays.
export function showCalls(running, slowest) {
  const rows = [...running, ...slowest];
  const now = JSON.stringify(rows.map((call) => [call.id, call.outcome, call.outcome === "running" ? call.wall_ms : 0]));
  if (now === key) return;
  key = now;
  const focused = document.activeElement?.dataset?.call;
  box.replaceChildren();
  if (!rows.length) {
    make("p", box, "No request has come yet.", "hint");
    return;
  }
  const table = make("table", box, undefined, "calls");
  make("caption", table, "Running requests first, then the slowest", "hidden");
  const head = make("tr", make("thead", table));
  ["request", "whole time", "first token", "a token", "why"].forEach((title) => make("th", head, title).setAttribute("scope", "col"));
  const body = make("tbody", table);
  rows.forEach((call) => row(body, call));
  if (focused) [...box.querySelectorAll("[data-call]")].find((each) => each.dataset.call === focused)?.focus();
}

function row(body, call) {
  const line = make("tr", body, undefined, call.outcome);
  const id = call.id || call.request_id || "";
  const name = make("th", line);
  name.setAttribute("scope", "row");
  const button = make("button", name, shortName(call), "link");
  button.type = "button";
  button.dataset.call = id;
  button.addEventListener("click", () => open(id));
  make("span", name, `${call.outcome} · ${count(call.prompt_tokens, "token")} in, ${call.completion_tokens} out`, "note");
  const cell = (title, text) => { make("td", line, text, "number").dataset.title = title; };
  cell("whole time", ms(call.wall_ms));
  cell("first token", ms(call.ttft_ms));
  cell("a token", ms(call.tpot_ms));
  const reason = make("td", line, undefined, "reason");
  strip(reason, call);
  make("span", reason, why(call), "note");
}

// All parts in one bar.
function strip(parent, call) {
  const bar = make("div", parent, undefined, "strip");
  const [largest] = largestPart(call.parts_ms);
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `mostly ${partName(largest)}`);
  Object.entries(call.parts_ms).filter(([, value]) => value > 0.002 * call.wall_ms).forEach(([name, value]) => {
    const piece = make("i", bar);
    piece.style.width = (100 * value) / call.wall_ms + "%";
    piece.style.background = partColor(name);
    piece.title = `${partName(name)} ${ms(value)} (${percent(value / call.wall_ms)})`;
  });
}

async function open(id) {
  const title = byId("inspect-title");
  deselect();
  opened = new Timeline(id);
  try {
    await opened.look();
    inspect(opened.whole);
  } catch (error) {
    opened = null;
    clearInspection(error.message);
  }
  title.scrollIntoView({ block: "nearest" });
  title.focus({ preventScroll: true });
}

// A request that still runs goes on in the panel while nothing else is chosen.
export async function followOpened() {
  const timeline = opened;
  if (timeline && !timeline.isOver && hasNoSelection() && (await timeline.look())) {
    if (opened === timeline && hasNoSelection()) inspect(timeline.whole);
  }
}
