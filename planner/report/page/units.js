// Readable quantities, as the command line writes them.

function threeDigits(value) {
  if (Number.isInteger(value) && value < 1000) return String(value);
  return value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0);
}

function formatBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = Math.abs(count), unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${count < 0 ? "-" : ""}${threeDigits(value)} ${units[unit]}`;
}

function formatSeconds(seconds) {
  const sign = seconds < 0 ? "-" : "", value = Math.abs(seconds);
  if (!value) return "0 s";
  if (value >= 120) return `${sign}${Math.floor(value / 60)} min ${(value % 60).toFixed(0)} s`;
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    if (value * factor >= 1) return `${sign}${threeDigits(value * factor)} ${unit}`;
  }
  return `${sign}${threeDigits(value * 1e9)} ns`;
}

/** Round values to mark on an axis from `low` to `high`: at most about `most`; `base`: 10, or 2 for bytes. */
function axisMarks(low, high, most, base = 10) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, most);
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const step = power * ([1, 2, 5, 10].find((times) => times * power >= rough) ?? 10);
  const marks = [];
  for (let mark = Math.ceil(low / step) * step; mark <= high + step * 1e-9; mark += step) marks.push(mark);
  return marks;
}

/** A mark on a time axis, with as many digits as the step to the next needs. */
function formatMark(seconds, step) {
  if (!seconds) return "0";
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6], ["ns", 1e9]]) {
    if (Math.abs(seconds) * factor >= 1 || unit === "ns") {
      const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step * factor) - 1e-9)));
      return `${(seconds * factor).toFixed(digits)} ${unit}`;
    }
  }
}
