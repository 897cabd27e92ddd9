"use strict";
// The page's data: its JSON, with the packed columns as typed arrays. Times are ticks there, seconds here.

const LETTERS = "FBIW";
const FORWARD = 0, WEIGHT = 3;

async function unpack({ columns, data }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 4;
  const made = {};
  let place = 0;
  for (const [name, length] of columns) {
    const column = (made[name] = new Int32Array(length));
    let value = 0;
    for (let row = 0; row < length; row++, place++) {
      value += planes[place] | (planes[count + place] << 8) | (planes[2 * count + place] << 16) | (planes[3 * count + place] << 24);
      column[row] = value;
    }
  }
  return made;
}

/** The first place in [low, high) whose value is over `value`. */
function upperBound(values, value, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Every action of every rank, and which action hands over to which. */
class Actions {
  constructor(plan, columns) {
    this.stages = plan.stages;
    this.numRanks = plan.num_ranks;
    this.numMicrobatches = plan.num_microbatches;
    this.stage = columns.stage;
    this.letter = columns.letter;
    this.microbatch = columns.microbatch;
    this.length = this.stage.length;
    this.first = new Int32Array(this.numRanks + 1);
    columns.actions.forEach((count, rank) => (this.first[rank + 1] = this.first[rank] + count));
    this.rank = new Int32Array(this.length);
    for (let rank = 0; rank < this.numRanks; rank++) this.rank.fill(rank, this.first[rank], this.first[rank + 1]);
    this.index = new Int32Array(3 * this.stages.length * this.numMicrobatches).fill(-1);
    for (let i = 0; i < this.length; i++) this.index[this.key(this.kind(i), this.stage[i], this.microbatch[i])] = i;
    this.sentBy = this.inverse("sends");
    this.returnedBy = this.inverse("returns");
    this.chunk = this.chunks();
  }

  /** 0: F, 1: B or I, 2: W. */
  kind(i) {
    return this.letter[i] === FORWARD ? 0 : this.letter[i] === WEIGHT ? 2 : 1;
  }

  key(kind, stage, microbatch) {
    return (kind * this.stages.length + stage) * this.numMicrobatches + microbatch;
  }

  find(kind, stage, microbatch) {
    return this.index[this.key(kind, stage, microbatch)];
  }

  name(i) {
    return `${this.stage[i]}${LETTERS[this.letter[i]]}${this.microbatch[i]}`;
  }

  inverse(kind) {
    const made = this.stages.map(() => []);
    this.stages.forEach((stage, from) => stage[kind].forEach(([to, bytes]) => made[to].push([from, bytes])));
    return made;
  }

  /** How many lower stages share each stage's rank. */
  chunks() {
    const seen = new Map();
    return this.stages.map(({ rank }) => {
      seen.set(rank, (seen.get(rank) ?? -1) + 1);
      return seen.get(rank);
    });
  }

  /** The actions that read what this one makes, with bytes (0: on the same rank, or it is there already). */
  readers(i) {
    const kind = this.kind(i);
    if (kind === 2) return [];
    const entries = this.stages[this.stage[i]][kind === 0 ? "sends" : "returns"];
    return entries.map(([to, bytes]) => ({ i: this.find(kind, to, this.microbatch[i]), bytes })).filter(({ i }) => i >= 0);
  }

  /** The actions whose messages this one reads. */
  makers(i) {
    const kind = this.kind(i);
    if (kind === 2) return [];
    const entries = (kind === 0 ? this.sentBy : this.returnedBy)[this.stage[i]];
    return entries.map(([from, bytes]) => ({ i: this.find(kind, from, this.microbatch[i]), bytes })).filter(({ i }) => i >= 0);
  }
}

/** When every action ran, as predicted or as measured. */
class Times {
  constructor(actions, starts, durations, tick, messages) {
    this.actions = actions;
    this.tick = tick;
    this.start = Float64Array.from(starts, (ticks) => ticks * tick);
    this.end = Float64Array.from(starts, (ticks, i) => (ticks + durations[i]) * tick);
    if (messages) this.readMessages(messages);
  }

  /** When each message arrived; they are told action by action, in the order of the lists of its stage. */
  readMessages({ left, travel }) {
    const { actions } = this;
    this.arrival = new Map();
    let place = 0;
    for (let i = 0; i < actions.length; i++) {
      for (const reader of actions.readers(i)) {
        if (!reader.bytes || actions.rank[reader.i] === actions.rank[i]) continue;
        const gone = this.end[i] + left[place] * this.tick;
        this.arrival.set(i * actions.stages.length + actions.stage[reader.i], gone + travel[place] * this.tick);
        place++;
      }
    }
  }

  /** When what one action makes is there for the stage of another; undefined where that was not measured. */
  arrives(from, to) {
    const known = this.arrival?.get(from * this.actions.stages.length + this.actions.stage[to]);
    return known ?? (this.actions.rank[from] === this.actions.rank[to] ? this.end[from] : undefined);
  }

  /** The action that runs on a rank at a time, or -1. */
  at(rank, time) {
    const { first } = this.actions;
    const i = upperBound(this.start, time, first[rank], first[rank + 1]) - 1;
    return i >= first[rank] && time < this.end[i] ? i : -1;
  }

  /** The action of a rank nearest to a time. */
  nearest(rank, time) {
    const { first } = this.actions;
    const i = Math.max(first[rank], upperBound(this.start, time, first[rank], first[rank + 1]) - 1);
    if (i + 1 < first[rank + 1] && this.start[i + 1] - time < time - this.end[i]) return i + 1;
    return i;
  }
}

async function loadData() {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.plan) return data;
  const columns = await unpack(data.plan.packed);
  const actions = new Actions(data.plan, columns);
  const tick = data.plan.tick_s;
  const messages = { left: columns.left, travel: columns.travel };
  data.predicted = new Times(actions, columns.start, columns.duration, tick, messages);
  if (columns.measured_start) data.measured = new Times(actions, columns.measured_start, columns.measured_duration, tick);
  data.actions = actions;
  let place = 0;
  data.memory = Array.from(columns.levels, (count) => {
    const times = Float64Array.from(columns.level_time.subarray(place, place + count), (ticks) => ticks * tick);
    const bytes = Float64Array.from(columns.level_size.subarray(place, place + count), (size) => size * data.plan.memory_unit);
    place += count;
    return { times, bytes };
  });
  return data;
}
