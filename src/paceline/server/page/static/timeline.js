// The timeline of one request, asked for again while it runs; only new steps are sent each time.
import { getJson } from "./key.js";

export class Timeline {
  constructor(id) {
    this.id = id;
    this.steps = [];
    this.call = null; // as the server told it last
    this.isLooking = false;
  }

  get isOver() {
    return this.call !== null && this.call.outcome !== "running";
  }

  // The call with all steps that were ever seen of its first choice.
  get whole() {
    const [choice] = this.call.choices;
    return choice ? { ...this.call, choices: [{ ...choice, steps: this.steps }] } : this.call;
  }

  // Returns whether there is news.
  async look() {
    if (this.isLooking) return false;
    this.isLooking = true;
    try {
      const last = this.steps.at(-1);
      this.call = await getJson(`/v1/requests/${encodeURIComponent(this.id)}/timeline?after_step=${last ? last.step : -1}`);
      this.steps.push(...(this.call.choices[0]?.steps || []));
      return true;
    } finally {
      this.isLooking = false;
    }
  }
}
