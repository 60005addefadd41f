// One request's time: its largest part in words, the waterfall of all parts, each token's wait.
import { byId, count, make, ms, percent } from "./dom.js";
import { axes, plot } from "./plot.js";
import { emissions } from "./steps.js";
import { largestPart, partColor, partName, partReason, shortName } from "./words.js";

const SMALL_SHARE = 0.005; // parts below it share one line
const MAX_BARS = 400;
const box = byId("inspect");
let shown = null; // {id, mode, chart}
let openCall = () => {};

export function onOpen(open) {
  openCall = open;
}

// The largest part in plain words, and what others cost.
export function why(call) {
  const [name, value] = largestPart(call.parts_ms);
  const lines = [`${percent(value / call.wall_ms)} of ${ms(call.wall_ms)} went into ${partReason(name)}.`];
  const blame = call.blame;
  if (blame && blame.prefill_ms > 0.05 * call.wall_ms) lines.push(`Others’ prompts cost it ${ms(blame.prefill_ms)}.`);
  if (blame && blame.decode_ms > 0.1 * call.wall_ms) lines.push(`Others’ answers cost it ${ms(blame.decode_ms)}.`);
  if (blame && blame.num_preemptions) {
    lines.push(`${count(blame.num_preemptions, "preemption")} cost it ${ms(blame.preemption_ms)}.`);
  }
  return lines.join(" ");
}

export function clearInspection(text) {
  shown = null;
  box.replaceChildren();
  make("p", box, text, "hint");
}

export function inspect(call) {
  if (!shown || shown.id !== call.id || call.id === null) build(call);
  shown.call = call;
  update();
}

function build(call) {
  box.replaceChildren();
  shown = { id: call.id, mode: "whole", isLong: false, chart: null };
  shown.who = make("p", box, undefined, "who");
  shown.why = make("p", box, undefined, "why");
  const modes = make("div", box, undefined, "ranks");
  modes.setAttribute("role", "radiogroup");
  modes.setAttribute("aria-label", "Time shown");
  [["whole", "whole request"], ["ttft", "to the first token"]].forEach(([mode, title]) => {
    const label = make("label", modes);
    const input = make("input", label);
    Object.assign(input, { type: "radio", name: "mode", value: mode, checked: mode === "whole" });
    input.addEventListener("change", () => { shown.mode = mode; update(); });
    label.append(" " + title);
    shown.radio = input;
  });
  shown.table = make("table", box, undefined, "waterfall");
  shown.blame = make("p", box, undefined, "blame");
  shown.gapsTitle = make("h3", box, "The wait for each token");
  shown.gaps = make("div", box, undefined, "gaps");
}

function update() {
  const call = shown.call;
  shown.who.textContent = [
    shortName(call), call.outcome, `${count(call.prompt_tokens, "token")} in, ${call.completion_tokens} out`,
    call.ttft_ms === null ? null : `first token ${ms(call.ttft_ms)}`,
    call.tpot_ms === null ? null : `then ${ms(call.tpot_ms)} each`,
  ].filter(Boolean).join(" · ");
  shown.why.textContent = why(call);
  shown.radio.disabled = !call.ttft_parts_ms;
  const isFirst = shown.mode === "ttft" && call.ttft_parts_ms;
  waterfall(isFirst ? call.ttft_parts_ms : call.parts_ms, isFirst ? call.ttft_ms : call.wall_ms);
  blame(call);
  gaps(call);
}

function waterfall(parts, total) {
  const table = shown.table;
  const hadFocus = table.contains(document.activeElement);
  table.replaceChildren();
  make("caption", table, "Parts of the time, in the order in which a request meets them", "hidden");
  const head = make("tr", make("thead", table, undefined, "hidden"));
  ["part", "bar", "time", "share"].forEach((title) => make("th", head, title).setAttribute("scope", "col"));
  const body = make("tbody", table);
  let at = 0;
  const small = [];
  Object.entries(parts).forEach(([name, value]) => {
    if (value < SMALL_SHARE * total && !shown.isLong) small.push([name, value]);
    else { row(body, partName(name), partColor(name), at, value, total, name); at += value; }
  });
  const rest = small.reduce((sum, each) => sum + each[1], 0);
  if (small.length) {
    const line = row(body, "", partColor("engine"), at, rest, total, "smaller");
    const button = make("button", line.firstChild, count(small.length, "smaller part"), "link");
    Object.assign(button, { type: "button", title: small.map(([name, value]) => `${partName(name)} ${ms(value)}`).join(", ") });
    button.addEventListener("click", () => {
      shown.isLong = true;
      update();
      table.tabIndex = -1;
      table.focus();
    });
    if (hadFocus) button.focus();
  }
  const foot = make("tr", make("tfoot", table));
  make("th", foot, "sum").setAttribute("scope", "row");
  make("td", foot);
  make("td", foot, ms(total), "number");
  make("td", foot, "100 %", "number");
}

function row(body, title, fill, at, value, total, name) {
  const line = make("tr", body);
  line.dataset.part = name;
  line.dataset.ms = value;
  make("th", line, title).setAttribute("scope", "row");
  const track = make("div", make("td", line, undefined, "bar"), undefined, "track");
  const bar = make("div", track);
  bar.style.left = (100 * at) / total + "%";
  bar.style.width = (100 * value) / total + "%";
  bar.style.background = fill;
  make("td", line, ms(value), "number");
  make("td", line, percent(value / total), "number");
  return line;
}

// Whose prompts cost it most; each opens on a click.
function blame(call) {
  const named = (call.blame?.prefill_of || []).filter((each) => each.request && each.ms > 0.01 * call.wall_ms).slice(0, 3);
  const key = JSON.stringify(named.map((each) => each.request));
  if (shown.blameKey === key) return;
  shown.blameKey = key;
  shown.blame.replaceChildren();
  if (!named.length) return;
  shown.blame.append("Prompts that cost it most: ");
  named.forEach((each) => {
    const button = make("button", shown.blame, `${each.request.slice(0, 18)}… (${ms(each.ms)})`, "link");
    button.type = "button";
    button.addEventListener("click", () => openCall(each.request));
  });
}

function gaps(call) {
  const given = emissions(call.choices?.[0]?.steps || []).slice(1).slice(-MAX_BARS);
  shown.gapsTitle.hidden = shown.gaps.hidden = given.length < 2;
  if (given.length < 2) return;
  const offset = call.completion_tokens - given.length + 1;
  const columns = [
    given.map((_, idx) => idx + offset),
    given.map((each) => (each.hasPrompts ? null : each.gap_ms)),
    given.map((each) => (each.hasPrompts ? each.gap_ms : null)),
  ];
  if (shown.chart) {
    shown.chart.setData(columns);
    return;
  }
  const bars = uPlot.paths.bars({ size: [0.8, 24], align: 0 });
  const kind = (label, tone) => ({
    label, stroke: tone, fill: tone, width: 0, paths: bars, points: { show: false }, value: (u, v) => ms(v),
  });
  shown.chart = plot(shown.gaps, {
    height: 150,
    label: "Bars: milliseconds before each token.",
    scales: { x: { time: false, range: (u, low, high) => [low - 0.5, high + 0.5] }, y: { range: (u, low, high) => [0, high * 1.05] } },
    axes: axes({ x: (v) => v, y: ms }),
    series: [{ label: "token" }, kind("alone, or beside other answers", "--own"), kind("beside others’ prompts", "--others")],
  }, columns);
}

// Mark the bar of the token that is pointed at.
export function markToken(number) {
  if (!shown?.chart) return;
  const x = shown.chart.valToPos(number, "x");
  shown.chart.setCursor({ left: x, top: 10 });
}
