// The server's state, its models and the values of /stats/stream, four times a second.

import { ApiError, get, watch } from "./api.js";
import { byId } from "./dom.js";

const RETRY = 1000; // milliseconds until the server is asked again

export class Monitor {
  // onModels: called once with the entries of /v1/models. onStats: called with each document of /stats.
  constructor(onModels, onStats = () => {}) {
    Object.assign(this, { onModels, onStats, models: [] });
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
      showState("gone", "no connection");
    } catch (error) {
      if (error.name === "AbortError") return;
      const locked = error instanceof ApiError && error.status === 401;
      showState(locked ? "key" : "gone", locked ? "needs an API key" : "no connection");
    } finally {
      document.removeEventListener("visibilitychange", onChange);
    }
  }

  async take(status, stats) {
    if (status !== "ready") {
      showState(status === "stalled" ? "gone" : "loading", status);
      return;
    }
    if (this.models.length === 0) this.takeModels((await get("v1/models")).data);
    this.onStats(stats);
    showState("ready", "ready");
  }

  takeModels(models) {
    this.models = models;
    byId("model").textContent = models[0].id;
    this.onModels(models);
  }
}

function showState(state, words) {
  byId("state").dataset.state = state;
  if (byId("state").textContent !== words) byId("state").textContent = words;
  if (state === "key") byId("key-field").hidden = false;
}
