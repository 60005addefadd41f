// Chooses the second model on the page of a server of two, asks it, and prints what was seen as JSON.
// node page_models.cjs URL
const { chromium } = require("playwright-core");

const url = process.argv[2];

(async () => {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
  const page = await browser.newPage();
  const seen = { errors: [] };
  page.on("pageerror", (error) => seen.errors.push(error.stack));
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("models").options.length);
  seen.choices = await page.$$eval("#models option", (options) => options.map((option) => option.value));
  seen.isHidden = await page.isHidden("#models");
  const told = () => page.textContent("#model");
  seen.first = await told();
  if (seen.choices.length > 1) {
    await page.selectOption("#models", seen.choices[1]);
    await page.waitForFunction((name) => document.getElementById("model").textContent.startsWith(name), seen.choices[1]);
    seen.second = await told();
    await page.fill("#max_tokens", "4");
    await page.fill("#message", "Hi");
    await page.press("#message", "Enter");
    await page.waitForFunction(() => document.querySelectorAll(".answer .foot button").length === 1);
    await page.waitForFunction(() => !document.getElementById("model").textContent.includes("not in memory"));
  }
  console.log(JSON.stringify(seen));
  await browser.close();
})();
