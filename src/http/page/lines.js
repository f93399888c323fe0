// Lines of the last five minutes.

const LINE_SECONDS = 300, LINE_HEIGHT = 40;
const SVG = document.querySelector("svg").namespaceURI;

/** A line of values, each of which holds for a span of time. */
class Line {
  constructor(name, format) {
    Object.assign(this, {name, format, samples: []});
    this.caption = make("figcaption", "soft");
    this.picture = document.createElementNS(SVG, "svg");
    this.path = document.createElementNS(SVG, "path");
    this.picture.setAttribute("viewBox", `0 0 ${LINE_SECONDS} ${LINE_HEIGHT}`);
    this.picture.setAttribute("preserveAspectRatio", "none");
    this.picture.setAttribute("role", "img");
    this.picture.append(this.path);
    this.figure = make("figure", "line", this.caption, this.picture);
    this.figure.hidden = true;
    $("lines").append(this.figure);
  }

  /** Adds the value from one time to another, in seconds. Null means that nothing was measured, and leaves a gap. */
  add(from, to, value) {
    this.samples = [...this.samples.filter(sample => sample.to > to - LINE_SECONDS), {from, to, value}];
    const values = this.samples.map(sample => sample.value).filter(value => value !== null), most = Math.max(0, ...values);
    this.figure.hidden = !most;
    const text = `${this.name}, at most ${this.format(most)}`, x = time => Math.max(0, LINE_SECONDS - (to - time)).toFixed(1);
    const y = value => (LINE_HEIGHT - 2 - (LINE_HEIGHT - 4) * value / (most || 1)).toFixed(1);
    this.caption.textContent = text;
    this.picture.setAttribute("aria-label", `Last five minutes: ${text}, now ${value === null ? "nothing" : this.format(value)}`);
    let last = null;
    this.path.setAttribute("d", this.samples.map(sample => {
      const isNext = last !== null && last.to === sample.from && last.value !== null;
      last = sample;
      if (sample.value === null) return "";
      return `${isNext ? "L" : "M"}${x(sample.from)} ${y(sample.value)}L${x(sample.to)} ${y(sample.value)}`;
    }).join(""));
  }
}
