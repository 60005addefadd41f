// An answer in the chat: its text token by token, each with what it cost.
import { byId, count, make, ms, percent } from "./dom.js";
import { emissions, median } from "./steps.js";
import { kindName } from "./words.js";

const SHADES = [[8, "slow3"], [3, "slow2"], [1.5, "slow1"]]; // times the median gap
const tip = byId("tip");

export class Answer {
  constructor(parent, onFocus) {
    this.box = make("article", parent, undefined, "answer");
    make("h3", this.box, "Answer", "hidden");
    this.text = make("p", this.box, undefined, "tokens");
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer; the arrow keys walk through its tokens");
    this.foot = make("div", this.box, undefined, "foot");
    this.pieces = []; // {span, first, tokens}: what became visible together; `first` numbers its tokens
    this.pending = [];
    this.numTokens = 0;
    this.sentAt = performance.now();
    this.onFocus = onFocus;
    this.text.addEventListener("keydown", (event) => this.walk(event));
    this.text.addEventListener("pointerover", (event) => this.point(event.target));
    this.text.addEventListener("pointerleave", () => hideTip());
    this.text.addEventListener("focusin", (event) => this.point(event.target));
    this.text.addEventListener("focusout", () => hideTip());
  }

  get content() {
    return this.pieces.map(({ span }) => span.dataset.end || span.dataset.thought ? "" : span.textContent).join("");
  }

  // A chunk of the stream: text that became visible, and tokens whose text may be still to come.
  add(text, tokens, isThought) {
    this.pending.push(...tokens);
    if (!text) return;
    const span = this.show(text);
    if (!isThought) return;
    span.dataset.thought = "true";
    span.classList.add("thought");
  }

  show(text) {
    const span = make("span", this.text, text, "token");
    const idx = this.pieces.length;
    span.tabIndex = idx ? -1 : 0;
    span.dataset.idx = idx;
    this.pieces.push({ span, first: this.numTokens, tokens: this.pending, at: performance.now() });
    this.numTokens += this.pending.length;
    this.pending = [];
    return span;
  }

  // The stream is over: what was held back, or shows no text, stands as an end mark.
  close(error) {
    if (this.pending.length) {
      const span = this.show("◂");
      span.dataset.end = "true";
      span.classList.add("end");
    }
    if (error) make("p", this.box, error, "bad").setAttribute("role", "alert");
  }

  // Give each token its step. Steps that the server forgot are the oldest: of an ended answer
  // the last ones match.
  match(timeline) {
    this.ttftMs = timeline.call.ttft_ms;
    this.isOver = timeline.isOver;
    const given = emissions(timeline.steps);
    const skipped = timeline.isOver ? Math.max(this.numTokens - given.length, 0) : 0;
    const usual = median(given.map((step) => step.gap_ms).filter((gap) => gap !== null));
    this.pieces.forEach((piece) => {
      const own = piece.tokens.map((_, idx) => given[piece.first + idx - skipped]).filter(Boolean);
      if (!own.length) return;
      piece.steps = own;
      piece.usual = usual;
      const gap = Math.max(...own.map((step) => step.gap_ms || 0));
      const shade = usual ? SHADES.find(([times]) => gap > times * usual) : null;
      piece.span.classList.remove("slow1", "slow2", "slow3");
      if (shade) piece.span.classList.add(shade[1]);
    });
  }

  walk(event) {
    const from = this.pieces.findIndex((piece) => piece.span === event.target);
    if (from < 0) return;
    const last = this.pieces.length - 1;
    const to = { ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hideTip();
    if (to === undefined || !this.pieces[to]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    this.pieces[to].span.tabIndex = 0;
    this.pieces[to].span.focus();
  }

  point(span) {
    const piece = this.pieces[span.dataset.idx];
    if (!piece) return;
    tip.replaceChildren();
    describe(this, piece).forEach((line, idx) => make("p", tip, line, idx ? "" : "strong"));
    span.setAttribute("aria-describedby", "tip");
    tip.hidden = false;
    place(span.getClientRects()[0]);
    this.onFocus(this, piece.first + 1);
  }
}

function describe(answer, piece) {
  const texts = piece.tokens.map((token) => `“${token.token}”`).join(" ");
  const title = piece.tokens.length ? `Token ${piece.first + 1}: ${texts}` : "Text that was held back";
  const lines = [piece.span.dataset.end ? "End of the answer" : title];
  if (piece.tokens.length === 1) lines.push(`Probability ${percent(Math.exp(piece.tokens[0].logprob))}`);
  if (!piece.steps) {
    lines.push(`Seen ${ms(piece.at - answer.sentAt)} after sending`);
    lines.push(answer.isOver ? "Its step is not known" : "What it cost follows shortly");
    return lines;
  }
  piece.steps.forEach((step) => lines.push(...describeStep(step, piece, answer)));
  const isDrafted = piece.steps.some((step) => step.isDrafted);
  lines.push(isDrafted ? "Drafted, and confirmed by the model" : "Chosen by the model, not drafted");
  return lines;
}

function describeStep(step, piece, answer) {
  const took = step.end_ms - step.begin_ms;
  const lines = [];
  if (step.gap_ms === null) {
    lines.push(`First token: ${ms(answer.ttftMs ?? step.end_ms)} after the request’s first byte`);
  } else {
    lines.push(`${ms(step.gap_ms)} after the token before (half of them within ${ms(piece.usual)})`);
  }
  lines.push(`Step ${step.step} took ${ms(took)}`);
  const waited = step.gap_ms === null ? 0 : step.gap_ms - took;
  if (waited > 1) lines.push(`${ms(waited)} passed between its steps`);
  const drafts = step.num_drafted ? ` with ${count(step.num_drafted, "drafted token")}` : "";
  const own = step.kind === "decode" ? "this token" + drafts : `${count(step.num_tokens, "token")} of its own prompt`;
  const others = step.others.map(([kind, number]) => count(number, `${kindName(kind)} token`)).join(" and ");
  const seqs = step.num_seqs - 1;
  lines.push(seqs > 0 ? `In the step: ${own}, beside ${others} of ${count(seqs, "other sequence")}` : `In the step: ${own} alone`);
  return lines;
}

export function hideTip() {
  tip.hidden = true;
}

function place(rect) {
  const width = Math.min(tip.offsetWidth, innerWidth - 16);
  const left = Math.max(8, Math.min(rect.left, innerWidth - width - 8));
  const below = rect.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = left + "px";
  tip.style.top = (below ? rect.bottom + 8 : Math.max(8, rect.top - tip.offsetHeight - 8)) + "px";
}
