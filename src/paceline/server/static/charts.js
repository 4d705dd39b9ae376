// Small step charts of the last seconds. Gaps are intervals without a measurement.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 48;
export const SAMPLES = 120; // four a second: 30 s

function svg(name, attributes) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function text(name, className, content) {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = content;
  return element;
}

export class Chart {
  // top: initial maximum of the vertical axis; it grows with the values.
  constructor(parent, { id, title, top, show = String }) {
    Object.assign(this, { title, top, show, values: [] });
    this.figure = document.createElement("figure");
    this.figure.id = `chart-${id}`;
    this.value = text("span", "value", "–"); // no live region: it changes four times a second
    this.scale = text("span", "scale", "");
    const caption = document.createElement("figcaption");
    caption.append(text("span", "title", title), this.value);
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
