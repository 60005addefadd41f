// Elements, numbers and words. Text reaches the page as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, parent, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0\u00a0ms";
  if (value >= 1000) return (value / 1000).toFixed(value >= 10000 ? 1 : 2) + "\u00a0s";
  return value.toFixed(value >= 100 ? 0 : value >= 1 ? 1 : 2) + "\u00a0ms";
}

export function count(value, one, many = one + "s") {
  return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return (100 * share).toFixed(share < 0.1 ? 1 : 0) + "\u00a0%";
}

export function scaled(value, unit) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0\u00a0" + unit;
  const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, prefix] = steps.find(([each]) => value >= each) || [1, ""];
  const number = value / size;
  return number.toFixed(number >= 100 ? 0 : number >= 10 ? 1 : 2) + "\u00a0" + prefix + unit;
}

export const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
