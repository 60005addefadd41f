// What the server does now: tiles, and charts over the last two minutes.
import { byId, count, make, ms, percent, scaled } from "./dom.js";
import { axes, plot } from "./plot.js";

const SHOWN_S = 120;
const columns = {}; // name -> values, one a second, as the server sent them
const charts = [];
const tiles = {};

// Take the seconds of a reply; the last one that was known may have grown.
export function take(seconds) {
  const { at_s: fresh } = seconds;
  const known = columns.at_s || [];
  const keep = fresh.length ? known.filter((at) => at < fresh[0]).length : known.length;
  for (const [name, values] of Object.entries(seconds)) {
    columns[name] = [...(columns[name] || []).slice(0, keep), ...values].slice(-SHOWN_S);
  }
}

// The server counts seconds from a start of its own: a new server begins anew.
export function forget() {
  for (const name of Object.keys(columns)) delete columns[name];
}

export const lastSecond = () => columns.at_s?.at(-1) ?? 0;

function tile(name, title, value, note, share) {
  if (!tiles[name]) {
    const box = make("div", byId("tiles"), undefined, "tile");
    make("dt", box, title);
    tiles[name] = { box, value: make("dd", box, "–", "value"), note: make("dd", box, "", "note") };
  }
  if (share !== undefined) tiles[name].meter ??= make("div", make("dd", tiles[name].box, undefined, "meter"));
  tiles[name].value.textContent = value;
  tiles[name].note.textContent = note;
  if (tiles[name].meter) tiles[name].meter.style.width = 100 * Math.min(share || 0, 1) + "%";
}

// The mean over the last seconds, the unfinished one left out.
function recent(name, seconds = 5) {
  const values = (columns[name] || []).slice(-seconds - 1, -1).filter((value) => value !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

export function showTiles(reply) {
  const { engine, itl_ms: itl, ttft_ms: ttft, limits } = reply;
  tile("ttft", "First token", ms(ttft.p50), ttft.count
    ? `p95 ${ms(ttft.p95)} · p99 ${ms(ttft.p99)} · ${count(ttft.count, "request")} in 5 min` : "no answer in 5 min");
  const kv = engine.num_blocks ? engine.num_live_blocks / engine.num_blocks : 0;
  if (reply.ledger) {
    tile("itl", "Next token", ms(itl.p50), itl.count
      ? `p95 ${ms(itl.p95)} · p99 ${ms(itl.p99)} · ${count(itl.count, "gap")} in 1 min` : "no token in 1 min");
    tile("rate", "Output", `${(recent("new_tokens") || 0).toFixed(1)} tok/s`, `${(recent("steps") || 0).toFixed(1)} steps a second`);
  }
  tile("running", "Running", String(engine.num_running),
    `${engine.num_waiting} waiting · ${reply.max_num_seqs} seats`, engine.num_running / reply.max_num_seqs);
  const facts = [
    `${engine.num_live_blocks.toLocaleString("en")} of ${count(engine.num_blocks, "block")}`,
    engine.num_cached_blocks ? `${engine.num_cached_blocks.toLocaleString("en")} kept for reuse` : null,
    engine.num_prefix_queried ? `prefix hits ${percent(engine.num_prefix_hit / engine.num_prefix_queried)}` : null,
    engine.num_preemptions ? count(engine.num_preemptions, "preemption") : null,
  ];
  tile("kv", "KV memory", percent(kv), facts.filter(Boolean).join(" · "), kv);
  const read = recent("read_bytes_per_s");
  if (columns.read_bytes_per_s) {
    const share = read && limits.read_bytes_per_s ? read / limits.read_bytes_per_s : null;
    tile("read", "Bandwidth", share === null ? scaled(read, "B/s") : percent(share),
      limits.read_bytes_per_s ? `${scaled(read, "B/s")} of ${scaled(limits.read_bytes_per_s, "B/s")} while computing`
        : "the machine’s own is measured when idle", share ?? 0);
    const macs = recent("macs_per_s");
    const peak = limits.macs_per_s;
    tile("macs", "Multiply-adds", macs && peak ? percent(macs / peak) : scaled(macs, "/s"),
      peak ? `${scaled(macs, "MAC/s")} of ${scaled(peak, "MAC/s")} while computing`
        : `for a share of the machine’s: paceline roofline --threads ${reply.num_threads}, once`,
      peak ? (macs || 0) / peak : undefined);
  }
}

const seconds = (v) => (v === 0 ? "now" : `${v} s`);
const line = (label, stroke, value, extra = {}) => ({
  label, stroke, width: 2, value: (u, v) => value(v), points: { show: false }, ...extra,
});
const area = (label, tone, value) => line(label, tone, value, {
  fill: tone, width: 0, paths: uPlot.paths.stepped({ align: 1 }),
});
const fromZero = { range: (u, low, high) => [0, Math.max(high * 1.1, 1e-3)] };
const decades = { distr: 3, range: (u, low, high) => [Math.min(low || 1, 1) / 1.5, Math.max(high || 1, 100) * 1.5] };
const whole = (v) => (v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en"));

function chart(title, text, series, y, scale, data) {
  const box = make("section", byId("charts"), undefined, "card");
  make("h3", box, title);
  make("p", box, text, "note");
  const drawn = plot(box, {
    height: 190, label: `Chart: ${title}. ${text}`,
    scales: { x: { time: false, range: () => [-SHOWN_S, 0] }, y: scale },
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: "live" } },
    axes: axes({ x: seconds, y, incrs: [10, 15, 30, 60], isLog: scale.distr === 3, isWhole: y === whole }),
    series: [{ label: "time", value: (u, v) => (v === null ? "–" : seconds(v)) }, ...series],
  }, data());
  charts.push(() => drawn.setData(data()));
}

const ago = () => (columns.at_s || []).map((at) => at - lastSecond());
const column = (name, map = (v) => v) => (columns[name] || []).map((v) => (v === null ? null : map(v)));
const sums = (names) => (columns.at_s || []).map((_, idx) => names.reduce((sum, name) => sum + columns[name][idx], 0));

function build(reply) {
  if (reply.ledger) {
    chart("Latency", "Gaps between tokens, and the first tokens of answers that ended.", [
      line("next token, p50", "--own", ms), line("p99", "--others", ms),
      line("first token", "--prompt", ms, { paths: () => null, points: { show: true, size: 6 } }),
    ], ms, decades, () => [ago(), column("itl_p50_ms"), column("itl_p99_ms"), column("ttft_ms")]);
    const kinds = ["decode", "verify", "prefill", "recompute"];
    // Drawn from the tallest sum down; the legend shows each kind by itself.
    const own = (name) => (u, v, s, idx) => whole(idx === null ? null : columns[name][idx]);
    const layer = (label, tone, name) => ({ ...area(label, tone, whole), value: own(name) });
    chart("Tokens computed", "What the steps of each second were made of.", [
      layer("computed again", "--loss", "recompute"), layer("prompts", "--prompt", "prefill"),
      layer("drafts", "--wait", "verify"), layer("answers", "--own", "decode"),
    ], whole, fromZero, () => [4, 3, 2, 1].reduce((all, end) => [...all, sums(kinds.slice(0, end))], [ago()]));
  }
  chart("Requests", "Running and waiting, while this page was open.", [
    area("running", "--own", whole), line("waiting", "--wait", whole),
  ], whole, { range: (u, low, high) => [0, Math.max(high * 1.1, 4)] }, () => [ago(), column("running"), column("waiting")]);
  if (columns.read_bytes_per_s) {
    const unit = (v) => scaled(v, "B/s");
    const limit = () => reply.limits.read_bytes_per_s;
    chart("Memory bandwidth", "Bytes that the steps had to read, while they computed, beside what the machine can.", [
      line("read", "--prompt", unit), line("the machine", "--soft", unit, { dash: [6, 4], width: 1 }),
    ], unit, fromZero, () => [ago(), column("read_bytes_per_s"), (columns.at_s || []).map(limit)]);
  }
}

let latest = null;

export function showCharts(reply) {
  latest = reply;
  if (!charts.length) build({ ...reply, get limits() { return latest.limits; } });
  charts.forEach((redraw) => redraw());
}
