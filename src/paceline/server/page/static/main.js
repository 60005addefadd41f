// Starts the page, and asks for the live figures once a second while somebody looks.
import { chosenRank, followOpened, showCalls, startCalls } from "./calls.js";
import { setModel, startChat } from "./chat.js";
import { byId, count } from "./dom.js";
import { getJson, startKey } from "./key.js";
import { forget, lastSecond, showCharts, showTiles, take } from "./live.js";

const EVERY_MS = 1000;
const pause = byId("pause"), state = byId("state"), stateText = byId("state-text");
let isPaused = false;
let isAsking = false;

function setState(name, text) {
  if (stateText.textContent !== text) stateText.textContent = text;
  state.className = name;
}

async function refresh() {
  if (isAsking) return;
  isAsking = true;
  try {
    const reply = await getJson(`/v1/paceline/live?by=${chosenRank()}&after_s=${Math.max(lastSecond() - 1, 0)}`);
    if (reply.now_s < lastSecond()) forget();
    setModel(reply.model);
    const threads = count(reply.num_threads, "thread");
    byId("model").textContent = `${reply.model} · ${threads} · Paceline ${reply.version}`
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
