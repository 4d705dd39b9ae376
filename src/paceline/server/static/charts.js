// Small step charts of the last seconds. Gaps are intervals without a measurement.

import { element } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 48;
const SAMPLES = 120; // four a second: 30 s

function svg(name, attributes) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

class Chart {
  // top: initial maximum of the vertical axis; it grows with the values.
  constructor(parent, { id, title, top, show = String }) {
    Object.assign(this, { title, top, show, values: [] });
    this.figure = element("figure");
    this.figure.id = `chart-${id}`;
    this.value = element("span", "value", "–"); // no live region: it changes four times a second
    this.scale = element("span", "scale", "");
    const caption = element("figcaption");
    caption.append(element("span", "title", title), this.value);
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.picture.append(this.area, this.line);
    this.figure.append(caption, this.picture, this.scale);
    parent.append(this.figure);
  }

  push(value, note = "") {
    this.values.push(value);
    if (this.values.length > SAMPLES) this.values.shift();
    this.value.textContent = value === null ? "–" : this.show(value);
    this.scale.textContent = note;
    this.draw();
  }

  draw() {
    const top = Math.max(this.top, ...this.values.filter((value) => value !== null));
    const x = (i) => ((i + SAMPLES - this.values.length) / SAMPLES) * WIDTH;
    const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 6);
    let line = "";
    let area = "";
    this.values.forEach((value, i) => {
      if (value === null) return;
      const [left, right, height] = [x(i), x(i + 1), y(value)].map((number) => number.toFixed(1));
      const joined = i > 0 && this.values[i - 1] !== null;
      line += `${joined ? "V" : `M${left} `}${height}H${right}`;
      area += `M${left} ${HEIGHT}V${height}H${right}V${HEIGHT}Z`;
    });
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

const percent = (share) => `${Math.round(100 * share)} %`;

// The four charts of /stats.
export class Charts {
  constructor(parent) {
    this.batch = new Chart(parent, { id: "batch", title: "Batch, rows", top: 1 });
    this.k = new Chart(parent, { id: "k", title: "Draft tokens per round, k", top: 4 });
    this.acceptance = new Chart(parent, { id: "acceptance", title: "Acceptance", top: 1, show: percent });
    this.pace = new Chart(parent, { id: "pace", title: "Tokens/s", top: 10, show: (value) => value.toFixed(0) });
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
