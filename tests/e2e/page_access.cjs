// Measures a page for those who see little, or use no mouse or no eyes, and prints it as JSON.
// node page_access.cjs URL [FOLDER]; FOLDER takes screenshots.
const { chromium } = require("playwright-core");

const [url, folder] = process.argv.slice(2);
const SIZES = { wide: { width: 1280, height: 900 }, narrow: { width: 400, height: 860 } };

// Runs in the page: texts, placeholders and graphics whose contrast is below what WCAG 2.2 AA asks.
function faint() {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = css;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
  const luminance = (color) => {
    const [r, g, b] = color.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const parents = (element) => {
    const found = [];
    for (let each = element; each; each = each.parentElement) found.unshift(each);
    return found;
  };
  const behind = (element) => parents(element).reduce(
    (color, each) => over(rgba(getComputedStyle(each).backgroundColor), color), rgba("Canvas").slice(0, 3));
  const opacity = (element) => parents(element).reduce((all, each) => all * Number(getComputedStyle(each).opacity), 1);
  const isShown = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length
    && !element.closest(".hidden, .skip:not(:focus), :disabled");

  const found = [];
  let numTexts = 0;
  function check(what, element, css, background, needed) {
    const [r, g, b, a] = rgba(css);
    const ratio = contrast(over([r, g, b, a * opacity(element)], background), background);
    if (ratio < needed) found.push(`${what}: ${ratio.toFixed(2)} of ${needed}, ${css} on ${background.map(Math.round)}`);
  }
  const name = (element) => `${element.tagName.toLowerCase()}${element.id && "#" + element.id}.${element.className}`;

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.data.trim() || !isShown(element) || element.closest("script, noscript, option")) continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    numTexts += 1;
    check(`${name(element)} “${node.data.trim().slice(0, 30)}”`, element, style.color, behind(element), isLarge ? 3 : 4.5);
  }
  for (const field of document.querySelectorAll("input, textarea, select")) {
    if (!isShown(field) || field.type === "radio") continue;
    const style = getComputedStyle(field);
    check(`border of ${name(field)}`, field, style.borderTopColor, behind(field.parentElement), 3);
    check(`text of ${name(field)}`, field, style.color, behind(field), 4.5);
    if (field.placeholder) check(`placeholder of ${name(field)}`, field, getComputedStyle(field, "::placeholder").color, behind(field), 4.5);
  }
  const bars = document.querySelectorAll(".track div, .strip i, .meter div, .dot");
  for (const bar of bars) {
    if (isShown(bar)) check(`graphic ${name(bar)} ${bar.title}`, bar, getComputedStyle(bar).backgroundColor, behind(bar.parentElement), 3);
  }
  // What charts and the rest of the ledger's parts would be drawn in, on a card and on a bar's track.
  const root = document.documentElement;
  const tone = (variable) => getComputedStyle(root).getPropertyValue(variable);
  for (const ground of ["--card", "--track"]) {
    const background = rgba(tone(ground)).slice(0, 3);
    for (const graphic of ["--own", "--prompt", "--others", "--wait", "--front", "--loss", "--small", "--accent"]) {
      check(`${graphic} on ${ground}`, root, tone(graphic), background, 3);
    }
  }
  check("an axis' text", root, tone("--soft"), rgba(tone("--card")).slice(0, 3), 4.5);
  return { faint: found, numTexts, numBars: bars.length };
}

// What a screen reader finds without a name.
async function nameless(page) {
  const client = await page.context().newCDPSession(page);
  const { nodes } = await client.send("Accessibility.getFullAXTree");
  const roles = ["button", "textbox", "spinbutton", "combobox", "radio", "radiogroup", "link", "image", "img", "table", "heading", "region", "group"];
  const seen = nodes.filter((node) => !node.ignored && roles.includes(node.role?.value));
  return {
    numNamed: seen.length,
    roles: [...new Set(seen.map((node) => node.role.value))].sort(),
    nameless: seen.filter((node) => !node.name?.value?.trim()).map((node) => node.role.value),
  };
}

const focused = (page) => page.evaluate(() => {
  const element = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(element);
  return {
    what: element.id || element.textContent.trim().slice(0, 24) || element.value || element.tagName,
    isToken: element.classList.contains("token"),
    isOutlined: outlineStyle !== "none" && parseFloat(outlineWidth) >= 2,
  };
});

// Tab on until what has the focus `isIt`; every stop on the way must show that it has it.
async function tabTo(page, seen, isIt) {
  for (let i = 0; i < 40; i++) {
    await page.keyboard.press("Tab");
    const now = await focused(page);
    if (!now.isOutlined) seen.unmarked.push(now.what);
    if (isIt(now)) return;
  }
  throw new Error("Tab never came there: " + isIt);
}

// A question, its answer's tokens and where the time went, without a mouse.
async function byKeyboard(page, seen) {
  seen.unmarked = [];
  await tabTo(page, seen, (now) => now.what.startsWith("Skip"));
  await page.keyboard.press("Enter");
  seen.afterSkip = (await focused(page)).what;
  await page.keyboard.type("go on");
  await tabTo(page, seen, (now) => now.what === "max_tokens");
  await page.keyboard.press("Control+A");
  await page.keyboard.type("12");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".answer .foot button");
  await page.focus("h1 ~ #pause");
  await tabTo(page, seen, (now) => now.isToken);
  await page.keyboard.press("End");
  seen.tip = await page.textContent("#tip p");
  await tabTo(page, seen, (now) => now.what === "Where its time went");
  await page.keyboard.press("Enter");
  seen.afterOpen = (await focused(page)).what;
  await tabTo(page, seen, (now) => now.what === "whole");
  await page.keyboard.press("ArrowRight");
  seen.mode = await page.evaluate(() => document.querySelector("input[name=mode]:checked").value);
  await page.keyboard.press("ArrowLeft");
}

// A message that is refused, so that the words of an error are on the page.
async function beRefused(page) {
  const body = JSON.stringify({ error: { message: "the queue is full: try again later" } });
  await page.route("**/v1/chat/completions", (route) => route.fulfill({ status: 429, contentType: "application/json", body }));
  await page.fill("#message", "one more");
  await page.press("#message", "Enter");
  await page.waitForSelector(".bad");
}

async function measure(page, label, seen) {
  await page.waitForTimeout(400); // colours that move have arrived
  seen.looks[label] = { ...(await page.evaluate(faint)), width: await page.evaluate(() => document.documentElement.scrollWidth) };
  if (folder) await page.screenshot({ path: `${folder}/${label}.png`, fullPage: true });
}

(async () => {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
  const page = await browser.newPage({ viewport: SIZES.wide });
  page.setDefaultTimeout(120000);
  const seen = { errors: [], looks: {} };
  page.on("pageerror", (error) => seen.errors.push(error.stack));
  await page.goto(url + "/");
  await page.waitForSelector("#calls button");
  await byKeyboard(page, seen);
  await beRefused(page);
  await page.hover(".token"); // its box is open
  for (const scheme of ["light", "dark"]) {
    for (const [size, viewport] of Object.entries(SIZES)) {
      await page.emulateMedia({ colorScheme: scheme });
      await page.setViewportSize(viewport);
      await measure(page, `${scheme}-${size}`, seen);
    }
  }
  Object.assign(seen, await nameless(page));
  await browser.close();
  console.log(JSON.stringify(seen));
})().catch((error) => {
  console.error(error);
  process.exit(1);
});
