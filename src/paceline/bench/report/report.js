// Draws the report from the JSON in the page. Text reaches the page as text, never as markup.
"use strict";
const { result, plots } = JSON.parse(document.getElementById("data").textContent);
const stages = result.stages;
const COLORS = ["#2f6fde", "#e07b28", "#2e9e6b", "#a04fc4", "#c63d5a", "#3fa7b8", "#8a7a2e", "#666f7a"];
const OUTCOME_COLORS = {
  ok: "#2f6fde", refused: "#e07b28", error: "#c0392b", broken: "#8e2020", timeout: "#a04fc4", cut: "#8a939e",
};
const NUM_DETAILED = 6;
const NAMES = { ttft: "TTFT", ttfo: "TTFO", tpot: "TPOT", itl: "ITL", e2e: "E2E" };
const OWNERS = { ok: "complete answers", warmup: "warm-up requests", cut: "requests that the end cut", error: "failed requests",
  broken: "broken ones", timeout: "timed-out ones", refused: "refused ones" };
const main = document.getElementById("main");
const style = getComputedStyle(document.body);
const INK = style.getPropertyValue("--soft").trim();
const GRID = style.getPropertyValue("--line").trim();

function make(tag, parent, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
}

function section(title, text, parent = main) {
  const box = make("section", parent);
  make("h2", box, title);
  if (text) make("p", box, text);
  return box;
}

function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return (value / 1000).toFixed(value >= 10000 ? 1 : 2) + " s";
  return value.toFixed(value >= 100 ? 0 : 1) + " ms";
}

function interval({ low, high }) {
  if (low === null || high === null) return "unbounded";
  const [from, unit] = ms(low).split(" ");
  return (ms(high).endsWith(" " + unit) ? from : ms(low)) + " to " + ms(high);
}

function number(value) {
  return value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toLocaleString("en");
}

function name(stage) {
  const parts = [stage.target];
  if (stage.rate !== undefined) parts.push(stage.rate + "/s");
  if (stage.round !== undefined) parts.push("round " + (stage.round + 1));
  return parts.join(", ");
}

function table(box, titles, rows) {
  const element = make("table", box);
  const head = make("tr", make("thead", element));
  titles.forEach((title) => make("th", head, title));
  const body = make("tbody", element);
  rows.forEach((row) => {
    const line = make("tr", body);
    row.forEach((cell) => {
      const place = make("td", line);
      if (cell && cell.value !== undefined) {
        make("span", place, ms(cell.value));
        make("span", place, interval(cell), "interval");
      } else if (cell && cell.bad !== undefined) {
        make("span", place, cell.bad, "bad");
      } else place.textContent = cell;
    });
  });
}

function about() {
  const config = result.config;
  const targets = Object.entries(config.targets).map(([key, url]) => `${key} = ${url} (${config.models[key]})`);
  const load = config.concurrency ? `closed loop, ${config.concurrency} users`
    : config.rate || config.sweep || config.arrival || result.searches.length ? `open loop, ${config.arrival || "poisson"}` : "closed loop, 1 user";
  document.getElementById("about").textContent = [
    ...targets, `workload ${config.workload}`, load, `seed ${config.seed}`,
    result.machine, `paceline ${result.paceline}`,
    result.interrupted ? "interrupted: what was measured until then" : null,
  ].filter(Boolean).join(" · ");
}

function overview() {
  const box = section("Results", "Medians and tails of complete answers. Failed requests count against the objective.");
  const hasObjective = stages.some((stage) => Object.keys(stage.goodput.objectives_ms).length);
  const failed = (r) => r.refused + r.error + r.broken + r.timeout;
  const at = (metric, figure) => (stage) => {
    const found = stage.latency_ms[metric];
    return found.count ? ms(found[figure].value) : "–";
  };
  // Columns: title, what a stage has there, and whether it is shown.
  const columns = [
    ["", name, true],
    ["ok", (s) => s.requests.ok, true],
    ["failed", (s) => (failed(s.requests) ? { bad: failed(s.requests) } : 0), true],
    ["cut", (s) => s.requests.cut, stages.some((s) => s.requests.cut)],
    ["not sent", (s) => (s.requests.unsent ? { bad: s.requests.unsent } : 0), stages.some((s) => s.requests.unsent)],
    ["TTFT p50", at("ttft", "p50"), true],
    ["TTFT p95", at("ttft", "p95"), true],
    ["TPOT mean", at("tpot", "mean"), true],
    ["ITL p99", at("itl", "p99"), true],
    ["E2E p95", at("e2e", "p95"), true],
    ["output tok/s", (s) => number(s.throughput.output_tokens_per_s), true],
    ["requests /s", (s) => number(s.throughput.requests_per_s), true],
    ["within objective", (s) => (s.goodput.attainment ? (100 * s.goodput.attainment.value).toFixed(1) + " %" : "–"), hasObjective],
    ["good requests /s", (s) => number(s.goodput.requests_per_s), hasObjective],
  ].filter((column) => column[2]);
  table(box, columns.map((column) => column[0]), stages.map((stage) => columns.map((column) => column[1](stage))));
  result.searches.forEach((search) => {
    if (search.rate === null && search.held_not_at === null) {
      make("p", box, `${search.target}: the search ended before a rate was judged`);
      return;
    }
    const held = search.rate === null ? "no rate that was tried" : number(search.rate) + " requests/s";
    const edge = search.held_not_at === null ? "" : ` (not at ${number(search.held_not_at)})`;
    make("p", box, `${search.target}: at least ${number(100 * search.at_least)} % within the objective up to ${held}${edge}`);
  });
  Object.entries(result.knees).forEach(([target, knee]) =>
    make("p", box, `${target} keeps up with ${knee === null ? "none of the rates" : number(knee) + " requests/s"}`));
  stages.forEach((stage) => {
    stage.errors.forEach((error) => make("p", box, `${name(stage)}: ${error.count} × ${error.what}`, "bad"));
    if (stage.client.is_bottleneck) {
      make("p", box, `${name(stage)}: the client was the bottleneck: ${stage.client.reasons.join("; ")}`, "bad");
    }
  });
}

function comparison() {
  if (!result.comparison.length) return;
  const box = section("Comparison", "Ratios are first / other, paired by round, with 95 % intervals. " +
    "A verdict is given only where the interval excludes 1, and of latencies to nobody who answered fewer requests.");
  table(box, ["metric", "rate", "first", "median", "other", "median", "ratio", "verdict"],
    result.comparison.map((row) => {
      let ratio = "–";
      if (row.ratio) {
        ratio = row.ratio.value.toFixed(2);
        if (row.ratio.low !== null) ratio += ` [${row.ratio.low.toFixed(2)}, ${row.ratio.high.toFixed(2)}]`;
      }
      return [`${row.metric} (${row.unit})`, row.rate ?? "–", row.first, number(row.first_median), row.other,
        number(row.other_median), ratio, row.verdict ? row.verdict + " is better" : "no verdict"];
    }));
}

function latencies(stage) {
  const box = section(stages.length > 1 ? "Latency: " + name(stage) : "Latency", "With 95 % intervals.");
  const columns = ["mean", "p50", "p90", "p95", "p99"];
  const rows = [];
  const add = (title, figures) => {
    if (figures.count) rows.push([title, ms(figures.min), ...columns.map((column) => figures[column]), ms(figures.max), ms(figures.std)]);
  };
  // TTFO is shown where it is not TTFT: answers began to reason.
  const addAll = (prefix, latency) => Object.keys(NAMES)
    .filter((metric) => metric !== "ttfo" || JSON.stringify(latency.ttfo) !== JSON.stringify(latency.ttft))
    .forEach((metric) => add(prefix + NAMES[metric], latency[metric]));
  addAll("", stage.latency_ms);
  const kinds = Object.entries(stage.classes);
  if (kinds.length > 1) kinds.forEach(([kind, figures]) => addAll(kind + " ", figures.latency_ms));
  Object.entries(stage.server_ms).forEach(([phase, figures]) => add("server: " + phase, figures));
  add("client: sending late", stage.client.send_lag_ms);
  table(box, ["", "min", ...columns, "max", "sd"], rows);
}

function load(stage) {
  const rates = stage.throughput, figures = ["min", "mean", "p50", "p90", "p99", "max"];
  const box = section(stages.length > 1 ? "Load and lengths: " + name(stage) : "Load and lengths");
  const rows = [["input tokens of a request", stage.tokens.input], ["output tokens of a request", stage.tokens.output],
    ["tok/s of a reader", rates.user_tokens_per_s]].filter((row) => row[1].count);
  table(box, ["", ...figures], rows.map(([title, found]) => [title, ...figures.map((key) => number(found[key].value ?? found[key]))]));
  const peak = rates.peak_output_tokens_per_s;
  make("p", box, [
    `${number(stage.concurrency.mean)} requests open on average, ${stage.concurrency.peak} at most`,
    peak === null ? null : `${number(peak)} output tok/s in the best second`,
    `tok/s counts ${number(rates.output_tokens)} tokens that came in the window: `
      + Object.entries(rates.output_tokens_of).map(([owner, num]) => `${number(num)} of ${OWNERS[owner]}`).join(", "),
  ].filter(Boolean).join("; "));
  const { checked, valid } = stage.requests, { unread_events: unread, output_from: sources } = stage.tokens;
  make("p", box, [
    ...Object.entries(stage.price).map(([key, value]) => `${key.replaceAll("_", " ")}: ${number(value)}`),
    checked ? `${valid} of ${checked} answers are valid` : null,
    unread ? `${unread} events of the streams are no JSON object` : null,
    sources.events ? `${sources.events} answers came without usage: their tokens are counted as text events` : null,
    `the client took ${Math.round(100 * stage.client.cpu_share)} % of a core`,
  ].filter(Boolean).join("; "));
}

function plot(parent, title, text, options, data) {
  const box = section(title, text, parent);
  const width = Math.max(240, Math.min(box.clientWidth - 32, 1140));
  const axis = { stroke: INK, grid: { stroke: GRID, width: 1 }, ticks: { stroke: GRID, width: 1 } };
  new uPlot({
    width, height: 260, ...options,
    axes: options.axes.map((each) => ({ ...axis, ...each })),
  }, data, box);
}

// uPlot wants one x axis for all series: take every x, and leave gaps open where a series has none.
function joined(series) {
  return uPlot.join(series.map((points) => [points.map((p) => p[0]), points.map((p) => p[1])]),
    series.map(() => series.map(() => 0)));
}

function curves(parent) {
  ["ttft", "tpot", "itl", "e2e"].forEach((metric) => {
    const shown = plots.map((each, idx) => ({ points: unique(each.curves[metric]), label: name(stages[idx]) }))
      .filter((each) => each.points.length > 1).slice(0, COLORS.length);
    if (!shown.length) return;
    const values = shown.flatMap((each) => each.points.map((p) => p[0]));
    const isWide = Math.max(...values) > 20 * Math.max(Math.min(...values), 1e-3) && Math.min(...values) > 0;
    plot(parent, `${NAMES[metric]}: share of ${metric === "itl" ? "gaps" : "answers"} at or below`, null, {
      scales: { x: { time: false, distr: isWide ? 3 : 1 }, y: { range: [0, 1] } },
      axes: [{ values: (u, ticks) => ticks.map((t) => (t === null ? "" : ms(t))), space: 70 },
        { values: (u, ticks) => ticks.map((t) => Math.round(100 * t) + " %") }],
      series: [{ label: NAMES[metric], value: (u, v) => ms(v) }, ...shown.map((each, idx) => ({
        label: each.label, stroke: COLORS[idx], width: 2, spanGaps: true,
        value: (u, v) => (v === null || v === undefined ? "–" : (100 * v).toFixed(1) + " %"),
      }))],
    }, joined(shown.map((each) => each.points)));
  });
}

function unique(points) {
  return points.filter((point, idx) => idx + 1 === points.length || points[idx + 1][0] > point[0]);
}

function overTime(parent, idx) {
  const points = plots[idx].points;
  if (!points.length) return;
  const suffix = stages.length > 1 ? ": " + name(stages[idx]) : "";
  const outcomes = Object.keys(OUTCOME_COLORS).filter((o) => points.some((p) => p[3] === o && (o === "ok" ? p[1] !== null : true)));
  const dots = (color) => ({ stroke: color, fill: color, paths: () => null, points: { show: true, size: 5, fill: color } });
  plot(parent, "TTFT over time" + suffix, "By the moment the request was due. Requests without a first text stand at their end.", {
    scales: { x: { time: false } },
    axes: [{ values: (u, ticks) => ticks.map((t) => t + " s") }, { values: (u, ticks) => ticks.map(ms), size: 70 }],
    series: [{ label: "due", value: (u, v) => (v === null ? "–" : v.toFixed(1) + " s") },
      ...outcomes.map((o) => ({ label: o, value: (u, v) => ms(v), ...dots(OUTCOME_COLORS[o]) }))],
  }, [points.map((p) => p[0]), ...outcomes.map((o) => points.map((p) => (p[3] === o ? p[1] ?? p[2] : null)))]);
  const series = plots[idx].series;
  if (series.at.length < 2) return;
  plot(parent, "Load and output" + suffix, null, {
    scales: { x: { time: false }, tokens: { range: (u, a, b) => [0, Math.max(b, 1)] }, open: { range: (u, a, b) => [0, Math.max(b, 1)] } },
    axes: [{ values: (u, ticks) => ticks.map((t) => t + " s") }, { scale: "tokens", label: "output tok/s", labelSize: 20 },
      { scale: "open", side: 1, grid: { show: false }, label: "open requests", labelSize: 20 }],
    series: [{ label: "at", value: (u, v) => (v === null ? "–" : v + " s") },
      { label: "output tok/s", scale: "tokens", stroke: COLORS[0], width: 2 },
      { label: "open requests", scale: "open", stroke: COLORS[1], width: 2 }],
  }, [series.at, series.tokens_per_s, series.open]);
}

function rates(parent) {
  const swept = stages.filter((stage) => stage.rate !== undefined);
  if (new Set(swept.map((stage) => stage.rate)).size < 2) return;
  const targets = [...new Set(swept.map((stage) => stage.target))];
  const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const line = (target, value) => {
    const byRate = new Map();
    swept.filter((stage) => stage.target === target && value(stage) !== null).forEach((stage) => {
      byRate.set(stage.rate, [...(byRate.get(stage.rate) || []), value(stage)]);
    });
    return [...byRate].map(([rate, values]) => [rate, middle(values)]).sort((a, b) => a[0] - b[0]);
  };
  const draw = (title, text, value, shown, range) => plot(parent, title, text, {
    scales: { x: { time: false }, ...(range && { y: { range } }) },
    axes: [{ label: "offered requests/s", labelSize: 20 }, { values: (u, ticks) => ticks.map(shown), size: 70 }],
    series: [{ label: "rate" }, ...targets.map((target, idx) => ({
      label: target, stroke: COLORS[idx], width: 2, spanGaps: true, points: { show: true, size: 7 },
      value: (u, v) => (v === null || v === undefined ? "–" : shown(v)),
    }))],
  }, joined(targets.map((target) => line(target, value))));
  if (swept.some((stage) => Object.keys(stage.goodput.objectives_ms).length)) {
    draw("Goodput against rate", "Requests a second within the objective.", (s) => s.goodput.requests_per_s, number);
    draw("Share within the objective", "Requests that the end cut count as missed.",
      (s) => s.goodput.attainment_if_cut_missed, (v) => Math.round(100 * v) + " %", [0, 1.05]);
  }
  draw("TTFT p95 against rate", null, (s) => (s.latency_ms.ttft.count ? s.latency_ms.ttft.p95.value : null), ms);
  draw("Output against rate", "Tokens a second.", (s) => s.throughput.output_tokens_per_s, number);
}

const PARTS = { lag: ["sent late", "#8a939e"], connect: ["connecting", "#3fa7b8"], wait: ["waiting for the first text", "#e07b28"],
  stream: ["receiving text", "#2f6fde"], rest: ["to the end", "#c0392b"] };

function waterfall(idx) {
  const worst = plots[idx].worst;
  if (!worst.length) return;
  const box = section("Slowest requests" + (stages.length > 1 ? ": " + name(stages[idx]) : ""),
    "From the moment each was due. White ticks are arrivals of text.");
  const key = make("div", box, undefined, "key");
  Object.values(PARTS).forEach(([label, color]) => {
    const item = make("span", key);
    make("i", item).style.background = color;
    item.append(label);
  });
  const grid = make("div", box, undefined, "waterfall");
  const longest = Math.max(...worst.map((line) => line.e2e_ms));
  worst.forEach((line) => {
    const failed = line.outcome === "ok" ? "" : " " + line.outcome;
    make("span", grid, `#${line.id} ${line.class}${failed}, ${ms(line.e2e_ms)}`, failed ? "bad" : "");
    const bar = make("div", grid, undefined, "bar");
    const total = line.gaps_ms.reduce((a, b) => a + b, 0);
    const edges = [["lag", line.lag_ms || 0], ["connect", line.connect_ms || 0]];
    const before = edges.reduce((sum, each) => sum + each[1], 0);
    if (line.ttft_ms === null) edges.push(["rest", line.e2e_ms - before]);
    else edges.push(["wait", line.ttft_ms - before], ["stream", total], ["rest", line.e2e_ms - line.ttft_ms - total]);
    let at = 0;
    edges.forEach(([part, length]) => {
      const piece = make("div", bar, undefined, "part");
      piece.style.cssText = `left:${100 * at / longest}%;width:${100 * Math.max(length, 0) / longest}%;background:${PARTS[part][1]}`;
      piece.title = `${PARTS[part][0]}: ${ms(length)}`;
      at += Math.max(length, 0);
    });
    if (line.ttft_ms === null) return;
    at = line.ttft_ms;
    const every = Math.ceil(line.gaps_ms.length / 150);
    line.gaps_ms.forEach((gap, position) => {
      at += gap;
      if (position % every === 0) make("div", bar, undefined, "tick").style.left = `${100 * at / longest}%`;
    });
  });
}

about();
overview();
comparison();
const grid = make("div", main, undefined, "grid plots");
rates(grid);
curves(grid);
const detailed = stages.map((_, idx) => idx).slice(0, NUM_DETAILED);
if (stages.length > NUM_DETAILED) {
  make("p", main, `Of ${stages.length} stages the first ${COLORS.length} have curves, and the first ${NUM_DETAILED} plots over time, latencies and slowest requests.`);
}
detailed.forEach((idx) => overTime(grid, idx));
detailed.forEach((idx) => { latencies(stages[idx]); load(stages[idx]); });
detailed.forEach((idx) => waterfall(idx));
