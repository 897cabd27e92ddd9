// Puts the page together: pictures, buttons, themes, printing.

function say(text) {
  document.getElementById("said").textContent = text;
}

function redrawAll() {
  readColours();
  Picture.all.forEach((picture) => picture.redraw());
}

/** Light, dark, or as the system says; kept where the browser lets a file keep it. */
function setUpTheme() {
  const buttons = document.querySelectorAll("[data-theme-choice]");
  const choose = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.themeChoice === theme)));
    try {
      localStorage.setItem("pipeplan-theme", theme);
    } catch { /* it may be forbidden */ }
    redrawAll();
  };
  let kept = "auto";
  try {
    kept = localStorage.getItem("pipeplan-theme") ?? "auto";
  } catch { /* it may be forbidden */ }
  buttons.forEach((button) => button.addEventListener("click", () => choose(button.dataset.themeChoice)));
  choose(kept);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}

function setUpPrint() {
  const theme = document.documentElement.dataset;
  let before;
  const paper = (on) => {
    Picture.printing = on;
    if (on) {
      before = theme.theme;
      theme.theme = "light";
    } else if (before === undefined) delete theme.theme;
    else theme.theme = before;
    readColours();
    Picture.all.forEach((picture) => picture.drawNow());
  };
  window.addEventListener("beforeprint", () => paper(true));
  window.addEventListener("afterprint", () => paper(false));
}

function setUpSchedule(data) {
  const span = new Span(data.plan.horizon_s, Math.max(data.plan.horizon_s / 1e6, 4 * data.plan.shortest_s));
  const pictures = [];
  const pick = (i, x, y, picture, spoken) => {
    pictures.forEach((one) => {
      if (one.picked !== i) {
        one.picked = i;
        one.redraw();
      }
    });
    if (i < 0) return tooltip.hide();
    const [heading, rows] = picture.describe(i);
    const few = data.plan.num_ranks <= 16; // with more, beside the pointer is near enough
    tooltip.show(heading, rows, x, y, colours.fills[data.actions.letter[i]], few ? picture.canvas.getBoundingClientRect() : undefined);
    if (spoken) say(`${heading}: ${rows.map((row) => row.join(" ")).join(", ")}`);
  };
  for (const name of ["predicted", "measured"]) {
    const box = document.getElementById(`schedule-${name}`);
    if (box) pictures.push(new SchedulePicture(box, data, data[name], span, pick));
  }
  new OverviewPicture(document.getElementById("overview"), data, data.predicted, span);
  const factor = document.getElementById("zoom");
  span.watchers.push(() => (factor.textContent = `${threeDigits(Math.round(span.zoom * 10) / 10)} ×`));
  const acts = { in: () => span.scale(0.5), out: () => span.scale(2), all: () => span.show(0, span.whole), left: () => span.move(-0.5), right: () => span.move(0.5) };
  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", acts[button.dataset.zoom]));
  return { span, pictures };
}

function setUpMemory(data, span) {
  const chosen = document.getElementById("memory-rank");
  const choose = (rank) => {
    chosen.value = String(rank);
    picture.rank = rank;
    picture.redraw();
  };
  const picture = new MemoryPicture(document.getElementById("memory"), data, span, Number(chosen.value), choose);
  chosen.addEventListener("change", () => choose(Number(chosen.value)));
  return picture;
}

async function start() {
  setUpTheme();
  setUpPrint();
  const page = (window.pipeplan = { data: await loadData() });
  if (page.data.plan) {
    Object.assign(page, setUpSchedule(page.data));
    page.memory = setUpMemory(page.data, page.span);
  }
  page.layers = new LayersPicture(document.getElementById("layers"), page.data.layers);
  document.addEventListener("keydown", (event) => event.key === "Escape" && tooltip.hide());
  for (const moving of ["wheel", "touchmove"]) window.addEventListener(moving, () => tooltip.hide(), { passive: true });
  redrawAll();
  requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.ready = "yes")));
}

start().catch((error) => {
  const box = document.getElementById("trouble");
  box.hidden = false;
  box.textContent = `The pictures cannot be drawn: ${error.message}. A browser of 2023 or later draws them; the tables below hold all the same.`;
});
