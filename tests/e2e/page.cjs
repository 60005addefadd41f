// Uses the page of a server as a person would, and prints what was seen as JSON.
// node page.cjs URL HOSTILE_ID [KEY]; with a key only what a server asks that wants one.
const { chromium } = require("playwright-core");

const [url, hostileId, key] = process.argv.slice(2);
const seen = { console: [], errors: [], outside: [] };

function watch(page) {
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) seen.console.push(message.text());
  });
  page.on("pageerror", (error) => seen.errors.push(error.stack));
  page.on("request", (request) => {
    if (!request.url().startsWith(url + "/")) seen.outside.push(request.url());
  });
  return page;
}

const focused = (page) => page.evaluate(() => {
  const element = document.activeElement;
  return element.id || element.value || element.className || element.tagName;
});

async function talk(page, text, maxTokens) {
  await page.fill("#max_tokens", String(maxTokens));
  await page.fill("#message", text);
  await page.press("#message", "Enter");
}

const finished = (page, number) => page.waitForFunction(
  (wanted) => document.querySelectorAll(".answer .foot button").length === wanted, number);

async function tabs(page) {
  const order = [];
  for (let i = 0; i < 9; i++) {
    await page.keyboard.press("Tab");
    order.push(await focused(page));
  }
  return order;
}

async function answer(page) {
  await talk(page, "<img src=x onerror=alert(1)>", 12);
  await finished(page, 1);
  seen.question = await page.textContent(".question p");
  seen.answer = await page.evaluate(() => [...document.querySelectorAll(".token")].map((each) => each.textContent));
  seen.markup = await page.evaluate(() => document.querySelectorAll("#log img, #log i, #calls img, #inspect img").length);
  seen.id = await page.evaluate(async () => {
    const reply = await (await fetch("/v1/paceline/live")).json();
    return reply.slowest.find((call) => call.path.includes("chat")).id;
  });
  seen.waterfall = await page.evaluate(() =>
    [...document.querySelectorAll(".waterfall tbody tr")].map((row) => [row.dataset.part, Number(row.dataset.ms)]));
  seen.sum = await page.textContent(".waterfall tfoot td:nth-child(3)");
  await page.check("input[name=mode][value=ttft]");
  seen.sumFirst = await page.textContent(".waterfall tfoot td:nth-child(3)");
  await page.check("input[name=mode][value=whole]");
}

async function walk(page) {
  await page.focus(".token[tabindex='0']");
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  seen.tip = await page.evaluate(() => [...document.querySelectorAll("#tip p")].map((line) => line.textContent));
  seen.described = await page.evaluate(() => document.activeElement.getAttribute("aria-describedby"));
  seen.tabStops = await page.evaluate(() => document.querySelectorAll(".token[tabindex='0']").length);
  await page.keyboard.press("Escape");
  seen.tipAfterEscape = await page.isVisible("#tip");
}

async function stop(page) {
  await talk(page, "go on", 15000);
  await page.waitForFunction(() => document.querySelectorAll(".answer:nth-of-type(2) .token").length > 20
    || document.querySelectorAll(".token").length > 60);
  await page.click("#stop");
  await finished(page, 2);
  seen.stopped = await page.textContent(".answer:last-of-type .foot span");
}

async function openSlow(page) {
  await page.waitForFunction((id) => [...document.querySelectorAll("#calls button")].some((each) => each.textContent === id), hostileId);
  await page.evaluate((id) => [...document.querySelectorAll("#calls button")].find((each) => each.textContent === id).click(), hostileId);
  await page.waitForFunction((id) => document.querySelector(".who").textContent.startsWith(id), hostileId);
  seen.who = await page.textContent(".who");
  seen.focusAfterOpen = await focused(page);
}

async function giveKey(page) {
  await page.waitForSelector("#state.gone");
  seen.state = await page.textContent("#state-text");
  await page.fill("#key", key);
  await page.press("#key", "Enter");
  await page.waitForSelector("#state.idle");
  seen.formAfterKey = await page.isVisible("#key-form");
  await talk(page, "go on", 5);
  await finished(page, 1);
  seen.answer = await page.textContent(".tokens");
}

async function pause(page) {
  await page.click("#pause");
  seen.pressed = await page.getAttribute("#pause", "aria-pressed");
  await page.waitForTimeout(300);
  let asked = 0;
  page.on("request", (request) => { asked += request.url().includes("/live"); });
  await page.waitForTimeout(1600);
  seen.askedWhilePaused = asked;
}

// What the charts and their legends are drawn in: runs in the page.
function colours(tones) {
  const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const counts = Object.fromEntries(tones.map((tone) => [tone, 0]));
  for (const canvas of document.querySelectorAll(".charts canvas")) {
    copy.canvas.width = canvas.width;
    copy.canvas.height = canvas.height;
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
      const tone = "#" + [...data.subarray(i, i + 3)].map((value) => value.toString(16).padStart(2, "0")).join("");
      if (tone in counts && data[i + 3] === 255) counts[tone] += 1;
    }
  }
  const markers = [...document.querySelectorAll(".charts .u-series:not(:first-child) .u-marker")].map((each) => getComputedStyle(each));
  return {
    legend: markers.map((style) => (style.borderTopWidth === "0px" ? style.backgroundColor : style.borderTopColor)),
    counts,
  };
}

// The system's colours change while the page is open, and nothing new comes that would draw.
async function changeScheme(page) {
  const tones = [];
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme });
    tones.push(await page.evaluate(() => getComputedStyle(document.documentElement).getPropertyValue("--own").trim()));
  }
  seen.schemes = [];
  for (const scheme of ["light", "dark", "light"]) {
    await page.emulateMedia({ colorScheme: scheme });
    await page.waitForTimeout(300);
    const { legend, counts } = await page.evaluate(colours, tones);
    seen.schemes.push({ legend, drawn: tones.map((tone) => counts[tone]) });
  }
}

async function looks(browser) {
  for (const [scheme, motion] of [["light", "no-preference"], ["dark", "reduce"]]) {
    const page = watch(await browser.newPage({ colorScheme: scheme, reducedMotion: motion, viewport: { width: 360, height: 780 } }));
    await page.goto(url + "/");
    await page.waitForSelector(".tile");
    seen[scheme] = await page.evaluate(() => ({
      background: getComputedStyle(document.body).backgroundColor,
      width: document.documentElement.scrollWidth,
      moves: getComputedStyle(document.querySelector(".meter div")).transitionDuration,
    }));
    await page.close();
  }
}

(async () => {
  const executablePath = process.env.CHROMIUM;
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
  const page = watch(await browser.newPage({ viewport: { width: 1280, height: 900 } }));
  page.setDefaultTimeout(120000);
  page.on("dialog", (dialog) => { seen.errors.push("a dialog: " + dialog.message()); dialog.dismiss(); });
  await page.goto(url + "/");
  if (key) await giveKey(page);
  else await useAll(page, browser);
  await browser.close();
  console.log(JSON.stringify(seen));
})().catch((error) => {
  console.error(error, JSON.stringify(seen));
  process.exit(1);
});

async function useAll(page, browser) {
  await page.waitForSelector("#state.idle");
  await page.waitForSelector("#calls button");
  seen.tabs = await tabs(page);
  await answer(page);
  await walk(page);
  await stop(page);
  await openSlow(page);
  seen.charts = await page.evaluate(() => document.querySelectorAll(".charts canvas").length);
  seen.tiles = await page.evaluate(() =>
    Object.fromEntries([...document.querySelectorAll(".tile")].map((tile) => [tile.children[0].textContent, tile.children[1].textContent])));
  seen.unnamed = await page.evaluate(() => [...document.querySelectorAll("button, input, textarea")]
    .filter((each) => !(each.textContent.trim() || each.labels?.length || each.getAttribute("aria-label"))).length);
  await pause(page);
  await changeScheme(page);
  await page.close();
  await looks(browser);
}
