// The server's state, its model and the charts of /stats/stream, four values a second.

import { ApiError, get, watch } from "./api.js";
import { Chart } from "./charts.js";

const RETRY = 1000; // milliseconds until the server is asked again
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
      if (!document.hidden) await this.follow();
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }

  // Shows what the server sends until the page is hidden or the connection ends.
  async follow() {
    const leaving = new AbortController();
    const onChange = () => document.hidden && leaving.abort();
    document.addEventListener("visibilitychange", onChange);
    try {
      for await (const { status, stats } of watch("stats/stream", leaving.signal)) await this.take(status, stats);
      this.onState("gone", "no connection");
    } catch (error) {
      if (error.name === "AbortError") return;
      const locked = error instanceof ApiError && error.status === 401;
      this.onState(locked ? "key" : "gone", locked ? "needs an API key" : "no connection");
    } finally {
      document.removeEventListener("visibilitychange", onChange);
    }
  }

  async take(status, stats) {
    if (status !== "ready") {
      this.onState(status === "stalled" ? "gone" : "loading", status);
      return;
    }
    this.model ??= (await get("v1/models")).data[0];
    this.show(stats);
    this.onState("ready", "ready");
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
