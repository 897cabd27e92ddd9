// The layers in the order of the stages: what each costs, what a cut behind it would send, where the cuts are.

class LayersPicture extends Picture {
  constructor(box, layers) {
    super(box, layers.arcs.length ? 380 : 320, 58);
    Object.assign(this, { layers, count: layers.names.length, cursor: -1 });
    this.loads = layers.names.map((_, i) => layers.times.reduce((sum, column) => sum + column[i], 0));
    this.highLoad = Math.max(...this.loads) * 1.05 || 1;
    this.highCut = Math.max(...layers.cut_bytes) * 1.25 || 1;
    const gap = 26, arcs = layers.arcs.length ? 70 : 0;
    const room = (this.height - arcs - 2 * gap - 26) / 2;
    this.loadTop = 20;
    this.loadFloor = this.loadTop + room;
    this.arcFloor = this.loadFloor + arcs + (arcs ? 6 : 0);
    this.cutTop = this.arcFloor + gap;
    this.cutFloor = this.height - 26;
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.pointAt(-1));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.pointAt(-1));
  }

  x(place) {
    return this.left + (place / this.count) * (this.width - this.left - 1);
  }

  draw() {
    const { layers } = this;
    this.drawStages();
    this.drawScale(this.highLoad, this.loadTop, this.loadFloor, 10, formatSeconds);
    this.drawScale(this.highCut, this.cutTop, this.cutFloor, 2, formatBytes);
    this.write("time of each layer", this.left, 8, { colour: colours.text, weight: 600 });
    this.drawLegend(this.left + this.measure("time of each layer", 11) + 14);
    const gap = this.x(1) - this.x(0) > 5 ? 1 : 0;
    for (let i = 0; i < this.count; i++) {
      let floor = this.loadFloor;
      layers.times.forEach((column, part) => {
        const height = (column[i] / this.highLoad) * (this.loadFloor - this.loadTop);
        this.pen.fillStyle = colours.fills[[0, 2, 3][part]];
        this.pen.fillRect(this.x(i) + gap, floor - height, Math.max(0.7, this.x(i + 1) - this.x(i) - 2 * gap), height);
        floor -= height;
      });
    }
    this.drawArcs();
    this.drawCuts();
    this.drawHeading("bytes a cut behind it sends", this.cutTop - 12);
    if (this.cursor >= 0) {
      this.pen.fillStyle = colours.text;
      this.pen.globalAlpha = 0.12;
      this.pen.fillRect(this.x(this.cursor), this.loadTop, this.x(this.cursor + 1) - this.x(this.cursor), this.cutFloor - this.loadTop);
      this.pen.globalAlpha = 1;
    }
  }

  /** On a ground of its own: the rules of cuts run through its line. */
  drawHeading(text, y) {
    this.pen.font = "600 11px system-ui, sans-serif";
    this.pen.fillStyle = colours.card;
    this.pen.fillRect(this.left, y - 8, this.pen.measureText(text).width + 6, 16);
    this.write(text, this.left, y, { colour: colours.text, weight: 600 });
  }

  drawLegend(x) {
    ["F", "I", "W"].forEach((letter, place) => {
      this.pen.fillStyle = colours[letter];
      this.pen.fillRect(x + 34 * place, 1, 18, 14);
      this.write(letter, x + 34 * place + 9, 8, { colour: colours[`${letter}-text`], align: "center", weight: 600 });
    });
  }

  drawScale(high, top, floor, base, format) {
    for (const mark of axisMarks(0, high, 3, base)) {
      const y = floor - (mark / high) * (floor - top);
      this.rule(this.left, y, this.width, y);
      this.write(mark ? format(mark) : "0", this.left - 6, y, { align: "right", size: 10 });
    }
  }

  /** Alternate stages on a ground of their own, their numbers where there is room. */
  drawStages() {
    const { starts } = this.layers;
    starts.forEach((start, stage) => {
      const from = this.x(start), to = this.x(starts[stage + 1] ?? this.count);
      if (stage % 2) {
        this.pen.fillStyle = colours.dim;
        this.pen.globalAlpha = 0.1;
        this.pen.fillRect(from, this.loadTop, to - from, this.cutFloor - this.loadTop);
        this.pen.globalAlpha = 1;
      }
      const label = [`stage ${stage}`, `${stage}`].find((text) => this.measure(text, 11) + 6 <= to - from);
      if (label) this.write(label, (from + to) / 2, this.height - 10, { align: "center", colour: colours.text });
    });
  }

  /** Tensors that are read further on than by the next layer. */
  drawArcs() {
    const { pen } = this;
    const floor = this.loadFloor + 4;
    pen.strokeStyle = colours.dim;
    for (const [from, to, bytes] of this.layers.arcs) {
      const x1 = this.x(from + 0.5), x2 = this.x(to + 0.5);
      const depth = Math.min(this.arcFloor - floor, 12 + ((to - from) / this.count) * 2 * (this.arcFloor - floor));
      const touched = this.cursor === from || this.cursor === to;
      pen.strokeStyle = touched ? colours.accent : colours.dim;
      pen.globalAlpha = touched ? 1 : 0.55;
      pen.lineWidth = touched ? 2 : 1;
      pen.beginPath();
      pen.moveTo(x1, floor);
      pen.bezierCurveTo(x1, floor + depth, x2, floor + depth, x2, floor);
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  drawCuts() {
    const { pen, layers } = this;
    const y = (bytes) => this.cutFloor - (bytes / this.highCut) * (this.cutFloor - this.cutTop);
    pen.beginPath();
    for (let i = 0; i < this.count; i++) {
      pen.lineTo(this.x(i + 0.5), y(layers.cut_bytes[i]));
      pen.lineTo(this.x(Math.min(this.count, i + 1.5)), y(layers.cut_bytes[i]));
    }
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 1.8;
    pen.stroke();
    const cuts = layers.starts.slice(1).map((start) => [this.x(start), layers.cut_bytes[start - 1]]);
    const apart = Math.min(...cuts.map(([x], i) => x - (cuts[i - 1]?.[0] ?? -this.width)));
    const crowded = apart < 18; // as of 64 stages: fine lines and small dots, which leave the layers in sight
    for (const [x, bytes] of cuts) {
      pen.globalAlpha = crowded ? 0.35 : 1;
      this.rule(x, this.loadTop, x, this.cutFloor, colours.text, crowded ? [] : [4, 3]);
      pen.globalAlpha = 1;
      pen.fillStyle = colours.text;
      pen.beginPath();
      pen.arc(x, y(bytes), Math.max(1.2, Math.min(4, apart / 3.5)), 0, 7);
      pen.fill();
    }
    if (cuts.length < 10) for (const [x, bytes] of cuts) this.label(formatBytes(bytes), x, y(bytes));
  }

  describe(i) {
    const { layers } = this;
    const stage = layers.starts.length ? upperBound(layers.starts, i, 0, layers.starts.length) - 1 : null;
    const rows = [["kind", layers.kinds[i]], ...(stage === null ? [] : [["stage", stage]])];
    ["F", "I", "W"].forEach((letter, part) => rows.push([letter, formatSeconds(layers.times[part][i])]));
    rows.push(["parameters", formatBytes(layers.parameter_bytes[i])], ["saved", formatBytes(layers.saved_bytes[i])]);
    rows.push(["cut behind it", formatBytes(layers.cut_bytes[i])]);
    return [layers.names[i], rows];
  }

  pointAt(i, x, y) {
    this.cursor = i;
    if (i < 0) tooltip.hide();
    else {
      const [heading, rows] = this.describe(i);
      tooltip.show(heading, rows, x, y);
    }
    this.redraw();
  }

  hover(event) {
    const place = Math.floor(((this.point(event)[0] - this.left) / (this.width - this.left)) * this.count);
    this.pointAt(place >= 0 && place < this.count ? place : -1, event.clientX, event.clientY);
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -this.count, End: this.count, PageUp: -10, PageDown: 10 };
    if (event.key === "Escape") return this.pointAt(-1);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const i = Math.min(this.count - 1, Math.max(0, this.cursor + moves[event.key]));
    const box = this.canvas.getBoundingClientRect();
    this.pointAt(i, box.left + this.x(i + 1), box.top + this.loadTop);
    const [heading, rows] = this.describe(i);
    say(`${heading}: ${rows.map((row) => row.join(" ")).join(", ")}`);
  }
}
