"use strict";
// Line charts of the last two minutes, drawn as SVG. Each says its newest values in words as well.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240, HEIGHT = 100, LINES_MAX = 4;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

class Chart {
  constructor(parent, title, unit) {
    this.title = title;
    this.unit = unit;
    this.series = new Map(); // name -> values, newest last; null where nothing was
    this.now = element("span", { class: "now" });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.scale = element("p", { class: "scale", "aria-hidden": "true" });
    parent.append(element("figure", { "data-chart": title }, element("figcaption", {}, element("span", {}, title), this.now), this.svg, this.scale));
  }

  add(values) {
    for (const name of Object.keys(values)) {
      if (!this.series.has(name) && this.series.size < LINES_MAX) this.series.set(name, []);
    }
    for (const [name, points] of this.series) {
      points.push(values[name] ?? null);
      if (points.length > POINTS_MAX) points.shift();
    }
    this.draw();
  }

  draw() {
    const all = [...this.series.values()].flat().filter((value) => value !== null);
    const low = this.unit === "%" ? Math.min(99, ...all) : Math.min(0, ...all);
    const high = this.unit === "%" ? 100 : Math.max(low + 1e-9, ...all);
    const lines = [], words = [];
    let number = 0;
    this.now.replaceChildren();
    for (const [name, points] of this.series) {
      const line = document.createElementNS(SVG, "polyline");
      const place = (value, index) => `${(WIDTH * (POINTS_MAX - points.length + index) / (POINTS_MAX - 1)).toFixed(1)},${(HEIGHT - 4 - (HEIGHT - 8) * (value - low) / (high - low || 1)).toFixed(1)}`;
      line.setAttribute("points", points.map((value, index) => (value === null ? "" : place(value, index))).join(" "));
      line.setAttribute("class", `s${number}`);
      lines.push(line);
      const newest = told(points[points.length - 1], this.unit);
      words.push(`${name} ${newest}`);
      this.now.append(number ? " · " : "", element("span", { class: `s${number}` }, `${name} ${newest}`));
      number += 1;
    }
    this.svg.replaceChildren(...lines);
    this.scale.textContent = all.length ? `${told(low, this.unit)} to ${told(high, this.unit)}, last ${POINTS_MAX} s` : "nothing yet";
    this.svg.setAttribute("aria-label", `${this.title}: ${words.join(", ")}; between ${told(low, this.unit)} and ${told(high, this.unit)}`);
  }
}
