// What the pictures share: a sharp canvas, the theme's colours, the span of time that all of them show, the tooltip.

const colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["F", "B", "I", "W", "F-text", "B-text", "I-text", "W-text", "ground", "card", "line", "text", "dim", "accent", "warning"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  colours.fills = [...LETTERS].map((letter) => colours[letter]);
  colours.mixing = colours.fills.map((fill) => [1, 3, 5].map((place) => parseInt(fill.slice(place, place + 2), 16)));
  colours.writing = [...LETTERS].map((letter) => colours[`${letter}-text`]);
}

/** The span of time on show, shared by the schedule and the memory; pictures of it are redrawn when it moves. */
class Span {
  constructor(whole, least) {
    Object.assign(this, { whole, least, from: 0, to: whole, watchers: [] });
  }

  get zoom() {
    return this.whole / (this.to - this.from);
  }

  show(from, to) {
    const length = Math.min(this.whole, Math.max(this.least, to - from));
    const start = Math.min(Math.max(0, from + (to - from - length) / 2), this.whole - length);
    [this.from, this.to] = [start, start + length];
    this.watchers.forEach((watch) => watch());
  }

  /** Zoom in (factor under 1) or out, keeping a time where it is. */
  scale(factor, time = (this.from + this.to) / 2) {
    const length = Math.min(this.whole, Math.max(this.least, (this.to - this.from) * factor));
    const share = (time - this.from) / (this.to - this.from);
    this.show(time - share * length, time + (1 - share) * length);
  }

  move(share) {
    const step = share * (this.to - this.from);
    this.show(this.from + step, this.to + step);
  }

  /** Bring a stretch into view, zooming in so far that it is at least `share` of it. */
  reveal(start, end, share) {
    const wanted = Math.min(this.to - this.from, Math.max(end - start, this.least) / share);
    const inside = start >= this.from && end <= this.to;
    if (inside && wanted >= (this.to - this.from) * 0.999) return;
    const middle = (start + end) / 2;
    this.show(middle - wanted / 2, middle + wanted / 2);
  }
}

/** A canvas of its box's width, as sharp as the screen, or as a printer. */
class Picture {
  static all = [];
  static printing = false;
  static widths = new Map();

  constructor(box, height, left = 0) {
    Object.assign(this, { box, height, left, due: false });
    this.canvas = box.querySelector("canvas");
    this.pen = this.canvas.getContext("2d");
    Picture.all.push(this);
    new ResizeObserver(() => this.redraw()).observe(box);
  }

  redraw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    this.due = false;
    const sharp = Picture.printing ? 3 : window.devicePixelRatio || 1;
    this.width = Math.max(160, this.box.clientWidth);
    const [wide, high] = [Math.round(this.width * sharp), Math.round(this.height * sharp)];
    if (this.canvas.width !== wide || this.canvas.height !== high) [this.canvas.width, this.canvas.height] = [wide, high];
    this.canvas.style.height = `${this.height}px`;
    this.pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    this.pen.clearRect(0, 0, this.width, this.height);
    this.labels = [];
    this.draw();
  }

  write(text, x, y, { colour = colours.dim, size = 11, align = "left", weight = 400 } = {}) {
    const { pen } = this;
    pen.font = `${weight} ${size}px system-ui, sans-serif`;
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    pen.fillText(text, x, y);
  }

  /** A label beside a point: above it or below, to its right or left (`align` right: only that), where it meets no other
   * label and stays within the picture; else not at all. What lies under it gives way to it. */
  label(text, x, y, { colour = colours.text, align = "any", weight = 400 } = {}) {
    const { pen } = this;
    const size = 11, half = 7;
    pen.font = `${weight} ${size}px system-ui, sans-serif`;
    const wide = pen.measureText(text).width;
    const lefts = align === "right" ? [x - wide] : [x + 6, x - 6 - wide];
    const places = lefts.flatMap((left) => [y - 9, y + 9].map((middle) => [left, middle - half, left + wide, middle + half]));
    const apart = (one, other) => one[2] + 4 < other[0] || other[2] + 4 < one[0] || one[3] <= other[1] || other[3] <= one[1];
    const found = places.find((place) => place[0] >= this.left && place[2] <= this.width && place[1] >= 0 && place[3] <= this.height && this.labels.every((other) => apart(place, other)));
    if (!found) return;
    this.labels.push(found);
    pen.strokeStyle = colours.card;
    pen.lineWidth = 4;
    pen.lineJoin = "round";
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.strokeText(text, found[0], found[1] + half);
    this.write(text, found[0], found[1] + half, { colour, size, weight });
  }

  /** How wide a label of an action is: a letter and digits, which are all as wide as one another. */
  measure(text, size) {
    const key = `${size} ${text.replace(/\d/g, "0")}`;
    if (!Picture.widths.has(key)) {
      this.pen.font = `600 ${size}px system-ui, sans-serif`;
      Picture.widths.set(key, this.pen.measureText(text.replace(/\d/g, "0")).width);
    }
    return Picture.widths.get(key);
  }

  rule(x1, y1, x2, y2, colour = colours.line, dash = []) {
    const { pen } = this;
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
    pen.setLineDash([]);
  }

  /** Where the pointer is, in the picture's own pixels. */
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

/** A picture whose width is the span of time on show. */
class TimePicture extends Picture {
  constructor(box, height, left, span) {
    super(box, height, left);
    this.span = span;
    span.watchers.push(() => this.redraw());
    this.listen();
  }

  get inner() {
    return this.width - this.left - 1;
  }

  x(time) {
    return this.left + ((time - this.span.from) / (this.span.to - this.span.from)) * this.inner;
  }

  time(x) {
    return this.span.from + ((x - this.left) / this.inner) * (this.span.to - this.span.from);
  }

  /** A moment, as exactly as what is on show can be read. */
  when(time) {
    return formatMark(time, (this.span.to - this.span.from) / 1000);
  }

  drawAxis(y, bottom) {
    const marks = axisMarks(this.span.from, this.span.to, this.inner / 90);
    const step = marks.length > 1 ? marks[1] - marks[0] : this.span.to;
    for (const mark of marks) {
      const x = this.x(mark);
      this.rule(x, y + 9, x, bottom);
      const edge = x > this.width - 30 ? "right" : x < this.left + 20 ? "left" : "center";
      this.write(formatMark(mark, step), x, y, { align: edge });
    }
  }

  /** Drag moves, two fingers or the wheel with Ctrl zoom, a double click zooms in; the wheel with Shift moves. */
  listen() {
    const { canvas, span } = this;
    const pointers = new Map();
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) span.scale(Math.exp(event.deltaY * 0.002), this.time(this.point(event)[0]));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) span.move((event.deltaX || event.deltaY) / this.inner);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => span.scale(1 / 3, this.time(this.point(event)[0])));
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (before === undefined) return;
      const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      pointers.set(event.pointerId, event.clientX);
      if (others.length) {
        const gap = Math.max(8, Math.abs(event.clientX - others[0]));
        span.scale(Math.max(8, Math.abs(before - others[0])) / gap, this.time(this.point(event)[0]));
      } else if (span.zoom > 1) span.move((before - event.clientX) / this.inner);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => pointers.delete(event.pointerId));
  }
}

/** The one tooltip: a heading and rows of words and figures, beside a point of the window; where there is room it leaves
 * the box `clear` in sight. */
const tooltip = {
  show(heading, rows, x, y, swatch, clear) {
    const box = document.getElementById("tooltip");
    box.replaceChildren();
    const title = box.appendChild(document.createElement("strong"));
    if (swatch) title.appendChild(document.createElement("i")).style.background = swatch;
    title.append(heading);
    const list = box.appendChild(document.createElement("dl"));
    for (const [word, figure] of rows) {
      list.appendChild(document.createElement("dt")).textContent = word;
      list.appendChild(document.createElement("dd")).textContent = figure;
    }
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 14 + width > window.innerWidth - 8 ? Math.max(8, x - width - 14) : x + 14;
    let top = y + 16 + height > window.innerHeight - 8 ? Math.max(8, y - height - 12) : y + 16;
    if (clear && clear.bottom + height < window.innerHeight - 8) top = clear.bottom;
    else if (clear && clear.top - height > 8) top = clear.top - height;
    box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  },
  hide() {
    document.getElementById("tooltip").hidden = true;
  },
};
