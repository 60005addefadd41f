// Starts the page, and asks for the live figures once a second while somebody looks.
import { chosenRank, followOpened, showCalls, startCalls } from "./calls.js";
import { setModel, startChat } from "./chat.js";
import { byId, count, make } from "./dom.js";
import { getJson, startKey } from "./key.js";
import { forget, lastSecond, showCharts, showTiles, take } from "./live.js";

const EVERY_MS = 1000;
const models = byId("models");
const pause = byId("pause"), state = byId("state"), stateText = byId("state-text");
let isPaused = false;
let isAsking = false;

// Of several models the one that is asked and looked at; a server of one shows no choice.
function showModels(names) {
  if (models.options.length) return;
  for (const name of names) make("option", models, name).value = name;
  models.hidden = names.length < 2;
}

function setState(name, text) {
  if (stateText.textContent !== text) stateText.textContent = text;
  state.className = name;
}

async function refresh() {
  if (isAsking) return;
  isAsking = true;
  try {
    const asked = models.value;
    const since = Math.max(lastSecond() - 1, 0);
    const reply = await getJson(`/v1/paceline/live?by=${chosenRank()}&after_s=${since}&model=${encodeURIComponent(asked)}`);
    if (models.value !== asked) return; // another was chosen meanwhile
    if (reply.now_s < lastSecond()) forget();
    showModels(reply.models);
    setModel(reply.model);
    const threads = count(reply.num_threads, "thread");
    byId("model").textContent = `${reply.model} · ${threads} · Paceline ${reply.version}`
      + (reply.loaded ? "" : " · not in memory, loaded when asked")
      + (reply.ledger ? "" : " · --no-ledger: steps and parts are not kept");
    take(reply.seconds);
    showTiles(reply);
    showCharts(reply);
    showCalls(reply.running, reply.slowest);
    await followOpened().catch(() => {});
    setState(reply.engine.num_running ? "busy" : "idle", reply.engine.num_running ? "computing" : "idle");
  } catch (error) {
    setState("gone", error.status === 401 ? "waiting for an API key" : "the server does not answer");
    byId("news").textContent = stateText.textContent;
  } finally {
    isAsking = false;
  }
}

models.addEventListener("change", () => {
  forget();
  refresh();
});
pause.addEventListener("click", () => {
  isPaused = !isPaused;
  pause.setAttribute("aria-pressed", String(isPaused));
  if (!isPaused) refresh();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused) refresh(); });
setInterval(() => { if (!document.hidden && !isPaused) refresh(); }, EVERY_MS);
startKey(refresh);
startChat();
startCalls(refresh);
refresh();
