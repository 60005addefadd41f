// Asks a model that thinks, twice, and prints what the page showed and sent as JSON.
// node page_thinking.cjs URL
const { chromium } = require("playwright-core");

(async () => {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
  const page = await browser.newPage();
  const seen = { errors: [] };
  page.on("pageerror", (error) => seen.errors.push(error.stack));
  page.on("request", (request) => {
    if (request.method() === "POST") seen.sent = JSON.parse(request.postData()).messages;
  });
  await page.goto(process.argv[2]);
  await page.waitForFunction(() => document.getElementById("models").options.length);
  for (const number of [1, 2]) {
    await page.fill("#max_tokens", "20");
    await page.fill("#message", "Hi");
    await page.press("#message", "Enter");
    await page.waitForFunction((wanted) => document.querySelectorAll(".answer .foot button").length === wanted, number);
  }
  const text = (selector) => page.$$eval(selector, (spans) => spans.map((span) => span.textContent).join(""));
  seen.thought = await text(".answer:last-of-type .token.thought");
  seen.said = await text(".answer:last-of-type .token:not(.thought):not(.end)");
  console.log(JSON.stringify(seen));
  await browser.close();
})();
