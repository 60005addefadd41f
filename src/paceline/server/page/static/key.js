// The API key, where the server asks for one; it is kept for this tab alone.
import { byId } from "./dom.js";

const NAME = "paceline-key";
const form = byId("key-form"), field = byId("key");

// `fetch` with the key; a refusal for want of one shows the form.
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(NAME);
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const reply = await fetch(path, { ...options, headers });
  form.hidden = reply.status !== 401;
  return reply;
}

// Throws with the server's own words where it refuses.
export async function getJson(path) {
  const reply = await ask(path, { cache: "no-store" });
  const body = await reply.json().catch(() => null);
  if (!reply.ok) throw Object.assign(new Error(body?.error?.message || `${path}: ${reply.status}`), { status: reply.status });
  return body;
}

export function startKey(onKey) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(NAME, field.value.trim());
    field.value = "";
    onKey();
  });
}
