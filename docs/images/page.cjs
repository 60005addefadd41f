// Makes page.png: a chat beside which a long prompt came, a late token's box, and the live figures.
//   paceline serve smollm2-135m &
//   CHROMIUM=$(command -v chromium) node docs/images/page.cjs http://127.0.0.1:8000 docs/images/page.png
// Needs playwright-core, as the tests of the page do.
const { chromium } = require("playwright-core");

const [url, file] = process.argv.slice(2);
const ROUNDS = 5; // of load before the chat, so that the charts have something to show

async function complete(prompt, max_tokens) {
  const { data } = await (await fetch(`${url}/v1/models`)).json();
  const body = JSON.stringify({ model: data[0].id, prompt, max_tokens, ignore_eos: true });
  const headers = { "content-type": "application/json" };
  await (await fetch(`${url}/v1/completions`, { method: "POST", headers, body })).arrayBuffer();
}

async function load() {
  for (let round = 0; round < ROUNDS; round++) {
    await Promise.all([complete(`Round ${round}. Once upon a time`, 40), complete(`${round} ${"word ".repeat(120)}`, 20)]);
  }
}

(async () => {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
  const page = await browser.newPage({ viewport: { width: 1200, height: 1000 }, colorScheme: "light" });
  page.setDefaultTimeout(300000);
  await page.goto(url + "/");
  await page.waitForSelector("#state.idle");
  await load();
  await page.fill("#temperature", "0");
  await page.fill("#max_tokens", "90");
  await page.fill("#message", "Why is the sky blue?");
  await page.press("#message", "Enter");
  await page.waitForFunction(() => document.querySelectorAll(".token").length > 30);
  const long = complete("word ".repeat(700), 1);
  await page.waitForSelector(".answer .foot button");
  await long;
  await page.waitForTimeout(2500); // the figures come once a second
  await page.hover(".token.slow3");
  await page.screenshot({ path: file });
  await browser.close();
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
