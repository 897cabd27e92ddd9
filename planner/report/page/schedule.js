// The schedule: a row a rank, every action as a block with its colour and letter, messages on hover.

const WORDS = ["forward", "backward", "backward for the input", "backward for the weights"];

function rowHeight(numRanks) {
  return numRanks <= 8 ? 32 : numRanks <= 16 ? 24 : numRanks <= 32 ? 18 : numRanks <= 80 ? 14 : Math.max(4, Math.floor(1100 / numRanks));
}

class SchedulePicture extends TimePicture {
  constructor(box, data, times, span, onPick) {
    const row = rowHeight(data.plan.num_ranks);
    super(box, 24 + row * data.plan.num_ranks + 4, 58, span);
    Object.assign(this, { data, times, row, actions: data.actions, onPick, picked: -1 });
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => !event.buttons && this.hover(...this.point(event), event));
    canvas.addEventListener("pointerleave", () => onPick(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => onPick(-1));
  }

  y(rank) {
    return 22 + rank * this.row;
  }

  draw() {
    this.drawAxis(8, this.height - 4);
    const { numRanks } = this.actions;
    const every = Math.ceil(12 / this.row);
    for (let rank = 0; rank < numRanks; rank++) {
      const middle = this.y(rank) + this.row / 2;
      if (rank % every === 0) this.write(`rank ${rank}`, 0, middle, { colour: colours.text, size: Math.min(12, Math.max(9, this.row - 3)) });
      this.drawRank(rank);
    }
    this.drawClosings();
    if (this.picked >= 0) this.drawPicked(this.picked);
  }

  /** Blocks where there is room; else, pixel by pixel, the colours mixed by their shares, as strong as they are busy. */
  drawRank(rank) {
    const { times, actions, span } = this;
    const first = Math.max(actions.first[rank], upperBound(times.start, span.from, actions.first[rank], actions.first[rank + 1]) - 1);
    const top = this.y(rank) + 1, height = this.row - 2;
    let shares = null;
    for (let i = first; i < actions.first[rank + 1] && times.start[i] < span.to; i++) {
      const from = Math.max(this.left, this.x(times.start[i])), to = Math.min(this.width, this.x(times.end[i]));
      if (to - from >= 2.5) this.drawBlock(i, from, to, top, height);
      else if (to > from) {
        shares ??= new Float32Array(4 * (Math.ceil(this.inner) + 2));
        for (let column = Math.floor(from - this.left); column + this.left < to; column++) {
          shares[4 * column + actions.letter[i]] += Math.min(to, column + 1 + this.left) - Math.max(from, column + this.left);
        }
      }
    }
    if (shares) this.drawMixed(shares, top, height);
  }

  drawMixed(shares, top, height) {
    const { pen } = this;
    for (let column = 0; 4 * column < shares.length; column++) {
      const own = shares.subarray(4 * column, 4 * column + 4);
      const busy = own[0] + own[1] + own[2] + own[3];
      if (busy < 0.02) continue;
      const mixed = [0, 1, 2].map((part) => own.reduce((sum, share, letter) => sum + (share * colours.mixing[letter][part]) / busy, 0));
      pen.globalAlpha = Math.min(1, busy);
      pen.fillStyle = `rgb(${mixed.map(Math.round)})`;
      pen.fillRect(this.left + column, top, 1, height);
    }
    pen.globalAlpha = 1;
  }

  drawBlock(i, from, to, top, height) {
    const { pen, actions } = this;
    const letter = actions.letter[i], chunk = actions.chunk[actions.stage[i]];
    const gap = to - from >= 6 ? 1 : 0.5;
    pen.fillStyle = colours.fills[letter];
    pen.fillRect(from, top, to - from - gap, height);
    if (chunk && height >= 8) {
      pen.fillStyle = colours.writing[letter]; // upper stages of a rank wear a bar
      pen.globalAlpha = 0.75;
      pen.fillRect(from, top, to - from - gap, Math.min(3, height / 5));
      pen.globalAlpha = 1;
    }
    const size = Math.min(12, height - 2);
    if (size < 8 || to - from < size * 0.8) return;
    const several = this.data.plan.virtual > 1;
    const short = LETTERS[letter], numbered = `${short}${actions.microbatch[i]}`;
    const full = several ? `${actions.stage[i]}${numbered}` : numbered;
    const label = [full, numbered, short].find((text) => this.measure(text, size) <= to - from - gap - 2);
    if (label) this.write(label, (from + to - gap) / 2, top + height / 2 + (chunk ? 1 : 0), { colour: colours.writing[letter], size, align: "center", weight: 600 });
  }

  /** What follows a rank's backwards: all-reduces, tied parameters, the optimizer: outlined, as they are no actions. */
  drawClosings() {
    const { pen } = this;
    for (const [rank, , , start, end] of this.closings) {
      const from = Math.max(this.left, this.x(start)), to = Math.min(this.width, this.x(end));
      if (to - from < 1) continue;
      pen.fillStyle = colours.dim;
      pen.globalAlpha = 0.35;
      pen.fillRect(from, this.y(rank) + this.row - 4, to - from, 3);
      pen.globalAlpha = 1;
    }
  }

  get closings() {
    return this.times === this.data.predicted ? this.data.plan.closings : this.data.plan.measured.closings;
  }

  /** The outline of an action, and the ways of its messages from their makers and to their readers. */
  drawPicked(i) {
    const { pen, times, actions } = this;
    for (const maker of actions.makers(i)) this.drawWay(maker.i, i);
    for (const reader of actions.readers(i)) this.drawWay(i, reader.i);
    const from = this.x(times.start[i]), to = this.x(times.end[i]);
    pen.strokeStyle = colours.text;
    pen.lineWidth = 2;
    pen.strokeRect(from, this.y(actions.rank[i]) + 1, Math.max(2, to - from - 1), this.row - 2);
  }

  drawWay(from, to) {
    const { pen, times, actions } = this;
    if (actions.rank[from] === actions.rank[to]) return;
    const there = times.arrives(from, to) ?? times.start[to];
    const x1 = this.x(times.end[from]), x2 = this.x(there), x3 = this.x(times.start[to]);
    const y1 = this.y(actions.rank[from]) + this.row / 2, y2 = this.y(actions.rank[to]) + this.row / 2;
    const bend = Math.max(12, Math.abs(x2 - x1) / 2);
    pen.strokeStyle = colours.text;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    pen.stroke();
    pen.setLineDash([2, 3]); // there, but not yet taken in
    pen.beginPath();
    pen.moveTo(x2, y2);
    pen.lineTo(x3, y2);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = colours.text;
    for (const [x, y] of [[x1, y1], [x3, y2]]) {
      pen.beginPath();
      pen.arc(x, y, 3, 0, 7);
      pen.fill();
    }
  }

  hover(x, y, event) {
    const rank = Math.floor((y - 22) / this.row);
    const inside = x >= this.left && rank >= 0 && rank < this.actions.numRanks;
    const i = inside ? this.times.at(rank, this.time(x)) : -1;
    if (i >= 0) this.onPick(i, event.clientX, event.clientY, this);
    else {
      this.onPick(-1);
      if (inside) this.tellIdle(rank, this.time(x), event);
    }
  }

  tellIdle(rank, time, event) {
    const { times, actions } = this;
    const closing = this.closings.find(([of, , , start, end]) => of === rank && time >= start && time < end);
    if (closing) {
      const [, kind, what, start, end] = closing;
      tooltip.show(`${kind} ${what}`.trim(), [["rank", rank], ["from", this.when(start)], ["takes", formatSeconds(end - start)]], event.clientX, event.clientY);
      return;
    }
    const next = upperBound(times.start, time, actions.first[rank], actions.first[rank + 1]);
    const from = next > actions.first[rank] ? times.end[next - 1] : 0;
    const rows = [["rank", rank], ["at", this.when(time)]];
    if (next < actions.first[rank + 1]) rows.push(["for", formatSeconds(times.start[next] - from)], ["until", actions.name(next)], ...this.waited(next));
    tooltip.show("idle", rows, event.clientX, event.clientY);
  }

  /** What an action that starts after a gap waited for: the last of what it reads to be there. */
  waited(i) {
    const { times, actions } = this;
    const before = i > actions.first[actions.rank[i]] ? times.end[i - 1] : 0;
    if (times.start[i] - before <= 1e-9 * this.span.whole) return [];
    let last = -1, moment = -1;
    for (const { i: maker } of actions.makers(i)) {
      const there = times.arrives(maker, i) ?? times.end[maker];
      if (there > moment) [last, moment] = [maker, there];
    }
    return last < 0 ? [] : [["waits for", `${actions.name(last)} of rank ${actions.rank[last]}`]];
  }

  /** Heading and rows about an action. */
  describe(i) {
    const { times, actions, data } = this;
    const stage = data.plan.stages[actions.stage[i]];
    const rows = [
      ["rank, stage", `${actions.rank[i]}, ${actions.stage[i]}`],
      ["layers", stage.name],
      ["micro-batch", actions.microbatch[i]],
      ["starts", this.when(times.start[i])],
      ["takes", formatSeconds(times.end[i] - times.start[i])],
    ];
    const other = times === data.predicted ? data.measured : data.predicted;
    if (other) rows.push([other === data.measured ? "measured" : "predicted", `${formatSeconds(other.end[i] - other.start[i])}, from ${this.when(other.start[i])}`]);
    rows.push(...this.waited(i));
    for (const { i: reader, bytes } of actions.readers(i)) {
      if (actions.rank[reader] === actions.rank[i]) continue;
      const there = times.arrives(i, reader);
      const later = there - times.end[i];
      const arrives = there === undefined ? "" : later > 0 ? `, there ${formatSeconds(later)} later` : ", there at once";
      rows.push(["sends", `${bytes ? formatBytes(bytes) : "word"} to ${actions.name(reader)} on rank ${actions.rank[reader]}${arrives}`]);
    }
    for (const { i: maker, bytes } of actions.makers(i)) {
      if (actions.rank[maker] !== actions.rank[i]) rows.push(["reads", `${bytes ? formatBytes(bytes) : "word"} of ${actions.name(maker)} on rank ${actions.rank[maker]}`]);
    }
    return [`${actions.name(i)} ${WORDS[actions.letter[i]]}`, rows.length > 14 ? [...rows.slice(0, 14), ["…", `${rows.length - 14} more`]] : rows];
  }

  /** Arrows go from action to action, along a rank or to the same time on the next; + - 0 zoom; Escape lets go. */
  key(event) {
    const { actions, times, span } = this;
    const current = this.picked >= 0 ? this.picked : times.nearest(0, span.from);
    const rank = actions.rank[current];
    const moves = {
      ArrowLeft: () => Math.max(actions.first[rank], this.picked < 0 ? current : current - 1),
      ArrowRight: () => Math.min(actions.first[rank + 1] - 1, this.picked < 0 ? current : current + 1),
      ArrowUp: () => (rank ? times.nearest(rank - 1, times.start[current]) : current),
      ArrowDown: () => (rank + 1 < actions.numRanks ? times.nearest(rank + 1, times.start[current]) : current),
      Home: () => actions.first[rank],
      End: () => actions.first[rank + 1] - 1,
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && ["ArrowLeft", "ArrowRight"].includes(event.key)) span.move(event.key === "ArrowLeft" ? -0.2 : 0.2);
    else if (event.key in moves && actions.length) this.pickByKey(moves[event.key]());
    else if (event.key === "+" || event.key === "=") span.scale(0.5, this.picked >= 0 ? times.start[this.picked] : undefined);
    else if (event.key === "-") span.scale(2, this.picked >= 0 ? times.start[this.picked] : undefined);
    else if (event.key === "0") span.show(0, span.whole);
    else if (event.key === "Escape") this.onPick(-1);
    else return;
    event.preventDefault();
  }

  pickByKey(i) {
    const { times, span } = this;
    if (times.start[i] < span.from || times.end[i] > span.to) span.reveal(times.start[i], times.end[i], (times.end[i] - times.start[i]) / (span.to - span.from) || 0.01);
    const box = this.canvas.getBoundingClientRect();
    this.onPick(i, box.left + this.x(times.end[i]), box.top + this.y(this.actions.rank[i]) + this.row, this, true);
  }
}

/** All ranks in one strip, with the part on show marked; a click or a drag moves it. */
class OverviewPicture extends Picture {
  constructor(box, data, times, span) {
    super(box, 44, 58);
    Object.assign(this, { data, times, span });
    span.watchers.push(() => this.redraw());
    const go = (event) => {
      const share = (this.point(event)[0] - this.left) / (this.width - this.left);
      const half = (span.to - span.from) / 2;
      span.show(share * span.whole - half, share * span.whole + half);
    };
    this.canvas.addEventListener("pointerdown", (event) => (this.canvas.setPointerCapture(event.pointerId), go(event)));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && go(event));
  }

  draw() {
    const { pen, span, data } = this;
    const inner = this.width - this.left;
    if (!this.strip || this.strip.width !== Math.round(inner) || this.theme !== colours.card) this.strip = this.paint(Math.round(inner));
    pen.imageSmoothingEnabled = data.plan.num_ranks > this.height;
    pen.drawImage(this.strip, this.left, 2, inner, this.height - 4);
    this.write("all", 0, this.height / 2, {});
    const from = this.left + (span.from / span.whole) * inner, to = this.left + (span.to / span.whole) * inner;
    pen.fillStyle = colours.card;
    pen.globalAlpha = 0.72;
    pen.fillRect(this.left, 0, from - this.left, this.height);
    pen.fillRect(to, 0, this.width - to, this.height);
    pen.globalAlpha = 1;
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 2;
    pen.strokeRect(from + 1, 1, Math.max(3, to - from - 2), this.height - 2);
  }

  /** A pixel a rank and moment: the letter that runs then. */
  paint(width) {
    const { times, data, span } = this;
    const strip = document.createElement("canvas");
    [strip.width, strip.height] = [width, data.plan.num_ranks];
    const pen = strip.getContext("2d");
    for (let rank = 0; rank < data.plan.num_ranks; rank++) {
      for (let x = 0; x < width; x++) {
        const i = times.at(rank, ((x + 0.5) / width) * span.whole);
        if (i < 0) continue;
        pen.fillStyle = colours.fills[data.actions.letter[i]];
        pen.fillRect(x, rank, 1, 1);
      }
    }
    this.theme = colours.card;
    return strip;
  }
}
