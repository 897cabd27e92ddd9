// Memory over time: the chosen rank filled, the others behind it, the limit across.

class MemoryPicture extends TimePicture {
  constructor(box, data, span, rank, onRank) {
    super(box, 240, 58, span);
    Object.assign(this, { data, rank, onRank, top: 14, bottom: 26, cursor: null });
    this.limit = data.plan.limit_bytes;
    const peak = Math.max(...data.plan.peaks, ...(data.plan.measured?.peaks ?? []));
    this.far = this.limit !== null && this.limit > 4 * peak; // the limit would flatten everything: said, not drawn
    this.high = 1.08 * (this.limit !== null && !this.far ? Math.max(peak, this.limit) : peak) || 1;
    this.canvas.addEventListener("pointermove", (event) => !event.buttons && this.hover(event));
    for (const leaving of ["pointerleave", "blur"]) this.canvas.addEventListener(leaving, () => this.pointAt(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  y(bytes) {
    return this.height - this.bottom - (bytes / this.high) * (this.height - this.top - this.bottom);
  }

  draw() {
    const floor = this.y(0);
    for (const mark of axisMarks(0, this.high, 4, 2)) {
      this.rule(this.left, this.y(mark), this.width, this.y(mark));
      this.write(mark ? formatBytes(mark) : "0", this.left - 6, this.y(mark), { align: "right", size: 10 });
    }
    const marks = axisMarks(this.span.from, this.span.to, this.inner / 90);
    const step = marks.length > 1 ? marks[1] - marks[0] : this.span.to;
    for (const mark of marks) this.write(formatMark(mark, step), this.x(mark), floor + 13, { align: this.x(mark) > this.width - 30 ? "right" : "center" });
    for (let rank = 0; rank < this.data.memory.length; rank++) if (rank !== this.rank) this.drawRank(rank, false);
    this.drawRank(this.rank, true);
    const limit = this.limit !== null && !this.far ? this.y(this.limit) : null;
    const peak = this.data.plan.measured?.peaks[this.rank];
    if (limit !== null) this.rule(this.left, limit, this.width, limit, colours.warning, [6, 4]);
    if (peak) this.rule(this.left, this.y(peak), this.width, this.y(peak), colours.text, [2, 3]);
    if (this.far) this.write(`limit ${formatBytes(this.limit)}, far above`, this.width - 4, 8, { align: "right" });
    if (limit !== null) this.label(`limit ${formatBytes(this.limit)}`, this.width - 4, limit, { colour: colours.warning, align: "right", weight: 600 });
    if (peak) this.label(`measured peak ${formatBytes(peak)}`, this.left, this.y(peak));
    if (this.cursor !== null) this.rule(this.x(this.cursor), this.top, this.x(this.cursor), floor, colours.text);
  }

  drawRank(rank, chosen) {
    const { pen, span } = this;
    const { times, bytes } = this.data.memory[rank];
    const floor = this.y(0);
    let place = Math.max(0, upperBound(times, span.from, 0, times.length) - 1);
    pen.beginPath();
    pen.moveTo(this.left, this.y(bytes[place]));
    // where many levels share a pixel, its highest and lowest are drawn
    for (let next = place + 1; next <= times.length; ) {
      const x = Math.min(this.width, next < times.length ? this.x(times[next]) : this.width);
      pen.lineTo(x, this.y(bytes[next - 1]));
      if (next >= times.length || times[next] > span.to) break;
      let low = bytes[next], high = bytes[next];
      let last = next;
      while (last + 1 < times.length && this.x(times[last + 1]) - x < 0.5) {
        last++;
        low = Math.min(low, bytes[last]);
        high = Math.max(high, bytes[last]);
      }
      pen.lineTo(x, this.y(high));
      if (low < high) pen.lineTo(x, this.y(low));
      pen.lineTo(x, this.y(bytes[last]));
      next = last + 1;
    }
    pen.strokeStyle = chosen ? colours.accent : colours.dim;
    pen.lineWidth = chosen ? 1.6 : 0.8;
    pen.globalAlpha = chosen ? 1 : Math.max(0.15, Math.min(0.5, 4 / this.data.memory.length));
    pen.stroke();
    if (chosen) {
      pen.lineTo(this.width, floor);
      pen.lineTo(this.left, floor);
      pen.globalAlpha = 0.15;
      pen.fillStyle = colours.accent;
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  held(rank, time) {
    const { times, bytes } = this.data.memory[rank];
    return bytes[Math.max(0, upperBound(times, time, 0, times.length) - 1)];
  }

  /** What ranks hold at a moment: all of them, or of many those that hold most, and the chosen one. */
  told(time) {
    const all = this.data.memory.map((_, rank) => [rank, this.held(rank, time)]);
    if (all.length <= 8) return all;
    const most = [...all].sort((one, other) => other[1] - one[1]).slice(0, 4);
    return most.some(([rank]) => rank === this.rank) ? most : [...most, all[this.rank]];
  }

  pointAt(time, x, y) {
    this.cursor = time;
    if (time === null) tooltip.hide();
    else tooltip.show(this.when(time), this.told(time).map(([rank, bytes]) => [`rank ${rank}`, formatBytes(bytes)]), x, y);
    this.redraw();
  }

  hover(event) {
    const time = this.time(this.point(event)[0]);
    this.pointAt(Math.min(this.span.to, Math.max(this.span.from, time)), event.clientX, event.clientY);
  }

  /** Arrows go from change to change of what the chosen rank holds, and from rank to rank; with Shift they move. */
  key(event) {
    const { span, data } = this;
    const { times } = data.memory[this.rank];
    const next = this.cursor === null ? 0 : upperBound(times, this.cursor, 0, times.length);
    let before = next - 1;
    while (before > 0 && times[before] >= this.cursor) before--;
    const places = { ArrowLeft: before, ArrowRight: next, Home: 0, End: times.length - 1 };
    const ranks = { ArrowUp: this.rank - 1, ArrowDown: this.rank + 1 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) span.move(event.key === "ArrowLeft" ? -0.2 : 0.2);
    else if (event.key in places) this.goTo(times[Math.min(times.length - 1, Math.max(0, places[event.key]))]);
    else if (event.key in ranks) {
      this.onRank(Math.min(data.memory.length - 1, Math.max(0, ranks[event.key])));
      this.goTo(this.cursor ?? span.from);
    } else if (event.key === "+" || event.key === "=") span.scale(0.5, this.cursor ?? undefined);
    else if (event.key === "-") span.scale(2, this.cursor ?? undefined);
    else if (event.key === "0") span.show(0, span.whole);
    else if (event.key === "Escape") this.pointAt(null);
    else return;
    event.preventDefault();
  }

  goTo(time) {
    if (time < this.span.from || time > this.span.to) this.span.move((time - (this.span.from + this.span.to) / 2) / (this.span.to - this.span.from));
    const box = this.canvas.getBoundingClientRect();
    const bytes = this.held(this.rank, time);
    this.pointAt(time, box.left + this.x(time), box.top + this.y(bytes));
    say(`${this.when(time)}: rank ${this.rank} holds ${formatBytes(bytes)}${this.limit === null ? "" : ` of ${formatBytes(this.limit)}`}`);
  }
}
