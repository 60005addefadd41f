// uPlot with the page's colours, which follow the light or dark scheme, and as wide as its box.
import { color, make } from "./dom.js";

const charts = new Set();

const isDecade = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
const decades = (u, ticks) => ticks.map((tick) => (isDecade(tick) ? tick : null));

// `incrs` are the distances that ticks of x may have; `isLog` thins the ticks of y out.
export function axes({ x, y, incrs, isLog, isWhole }) {
  const base = {
    stroke: () => color("--soft"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: () => color("--line"), width: 1 },
    ticks: { stroke: () => color("--line"), width: 1, size: 4 },
  };
  const thin = isLog && {
    filter: decades, grid: { ...base.grid, filter: decades }, ticks: { ...base.ticks, filter: decades },
  };
  return [
    { ...base, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : x(tick))), space: 60, size: 28, ...(incrs && { incrs }) },
    { ...base, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : y(tick))), size: 62, space: 30,
      ...thin, ...(isWhole && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] }) },
  ];
}

// `tone` names a CSS variable, asked for at every drawing.
function toned(series) {
  const { stroke, fill, ...rest } = series;
  return {
    ...rest,
    ...(stroke && { stroke: () => color(stroke) }),
    ...(fill && { fill: () => color(fill) }),
  };
}

// Colours by name: uPlot sets those of a legend once, and a name follows the scheme.
function markers(series) {
  const named = (variable) => (variable ? `var(${variable})` : null);
  return {
    stroke: (u, idx) => named(series[idx].width && series[idx].stroke),
    fill: (u, idx) => named(series[idx].fill),
  };
}

export function plot(box, options, data) {
  const { label, series, ...rest } = options;
  const frame = make("div", box, undefined, "plot");
  frame.setAttribute("role", "img");
  frame.setAttribute("aria-label", `${label} Shown: ${series.slice(1).map((each) => each.label).join("; ")}.`);
  const chart = new uPlot({
    width: Math.max(frame.clientWidth, 200),
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
    legend: { live: true, markers: markers(series) },
    ...rest,
    series: series.map(toned),
  }, data, frame);
  chart.root.setAttribute("aria-hidden", "true"); // its legend is a table, of what a pointer points at
  chart.frame = frame;
  charts.add(chart);
  resized.observe(frame);
  return chart;
}

const resized = new ResizeObserver(() => {
  for (const chart of charts) {
    if (!chart.frame.isConnected) charts.delete(chart);
    else if (chart.frame.clientWidth && chart.frame.clientWidth !== chart.width) {
      chart.setSize({ width: chart.frame.clientWidth, height: chart.height });
    }
  }
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.redraw(false);
});
