// The server's state, its model and the charts of /stats.

import { ApiError, get, health } from "./api.js";
import { Chart } from "./charts.js";

const INTERVAL = 250; // milliseconds; a chart shows the last 30 s
const LOADING_INTERVAL = 1000;
const percent = (share) => `${Math.round(100 * share)} %`;

export class Monitor {
  // onState: called with "ready", "loading", "key", "gone", ... and a text to display.
  constructor(parent, onState) {
    this.onState = onState;
    this.model = null;
    this.batch = new Chart(parent, { id: "batch", title: "Batch, rows", top: 1 });
    this.k = new Chart(parent, { id: "k", title: "Draft tokens per round, k", top: 4 });
    this.acceptance = new Chart(parent, { id: "acceptance", title: "Acceptance", top: 1, show: percent });
    this.pace = new Chart(parent, { id: "pace", title: "Tokens/s", top: 10, show: (value) => value.toFixed(0) });
  }

  async run() {
    for (;;) {
      const pause = document.hidden ? LOADING_INTERVAL : await this.look();
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  async look() {
    try {
      const { status } = await health();
      if (status !== "ready") return this.say(status === "stalled" ? "gone" : "loading", status);
      this.model ??= (await get("v1/models")).data[0];
      this.show(await get("stats"));
      this.onState("ready", "ready");
      return INTERVAL;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return this.say("key", "needs an API key");
      return this.say("gone", "no connection");
    }
  }

  say(state, words) {
    this.onState(state, words);
    return LOADING_INTERVAL;
  }

  show(stats) {
    const idle = stats.running === 0;
    const waiting = stats.waiting ? `, ${stats.waiting} waiting` : "";
    const length = stats.mean_acceptance_length;
    this.batch.push(stats.running, `of ${stats.capacity}${waiting}`);
    this.k.push(idle ? 0 : stats.num_speculative_tokens, idle ? "idle" : "in the last round");
    const note = length === null ? "" : `mean acceptance length ${length.toFixed(2)}`;
    this.acceptance.push(idle ? null : stats.acceptance_rate, note);
    const used = idle || stats.utilisation === null ? "" : `, ${(100 * stats.utilisation).toFixed(1)} % of the peak`;
    this.pace.push(stats.tokens_per_second, `all answers together${used}`);
  }
}
