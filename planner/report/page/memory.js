// Memory over time: the chosen rank filled, the others behind it, the limit across.

class MemoryPicture extends TimePicture {
  constructor(box, data, span, rank) {
    super(box, 240, 58, span);
    Object.assign(this, { data, rank, top: 14, bottom: 26, cursor: null });
    this.limit = data.plan.limit_bytes;
    const peak = Math.max(...data.plan.peaks, ...(data.plan.measured?.peaks ?? []));
    this.far = this.limit !== null && this.limit > 4 * peak; // the limit would flatten everything: said, not drawn
    this.high = 1.08 * (this.limit !== null && !this.far ? Math.max(peak, this.limit) : peak) || 1;
    this.canvas.addEventListener("pointermove", (event) => !event.buttons && this.hover(event));
    this.canvas.addEventListener("pointerleave", () => (tooltip.hide(), (this.cursor = null), this.redraw()));
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

  hover(event) {
    this.cursor = Math.min(this.span.to, Math.max(this.span.from, this.time(this.point(event)[0])));
    const all = this.data.memory.map((_, rank) => [rank, this.held(rank, this.cursor)]);
    const rows = all.length <= 8 ? all : [...all.sort((one, other) => other[1] - one[1]).slice(0, 4), [this.rank, this.held(this.rank, this.cursor)]];
    tooltip.show(this.when(this.cursor), rows.map(([rank, bytes]) => [`rank ${rank}`, formatBytes(bytes)]), event.clientX, event.clientY);
    this.redraw();
  }

  key(event) {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.span.move(event.key === "ArrowLeft" ? -0.2 : 0.2);
    else if (event.key === "+" || event.key === "=") this.span.scale(0.5);
    else if (event.key === "-") this.span.scale(2);
    else if (event.key === "0") this.span.show(0, this.span.whole);
    else return;
    event.preventDefault();
  }
}
