// The curves: one panel per entry of `data.panels`, and the stacked areas of time.
"use strict";

const Figures = (() => {
  const NUM_COLORS = 8;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const EVENT_KINDS = ["sync", "evaluation", "fault", "restart"];
  const hidden = { groups: new Set(), events: new Set() };
  const PRINT_WIDTH = { panel: 320, wide: 660 };
  const WIDTH = 1.8;
  let data, eventRun = 0, timeRun = 0, plots = [], marked = null, isZooming = false, isPrinting = false;
  let axis = "step", smoothing = 0, places = new Map(), steps = [];

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function color(number) {
    return css(`--c${number % NUM_COLORS}`);
  }

  // For styles that follow the theme without redrawing.
  function variable(number) {
    return `var(--c${number % NUM_COLORS})`;
  }

  function faded(hex, alpha) {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  // One configuration: colours tell the curves apart. Several: colours are theirs, dashes the curves'.
  function styleOf(group, curve) {
    return data.groups.length === 1
      ? { color: color(curve), dash: "solid" }
      : { color: color(group), dash: DASHES[curve % DASHES.length] };
  }

  function curveNames(panel) {
    return [...new Set(panel.curves.map((curve) => curve.name))];
  }

  function pointNames(panel) {
    return [...new Set(panel.points.map((points) => points.name))];
  }

  const isStep = () => axis === "step";
  const groupOf = (run) => data.groups.findIndex((group) => group.runs.includes(run));
  const runNamed = (name) => Math.max(0, data.runs.findIndex((run) => run.name === name));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  // Mean tokens or prompts that runs had used at a step, interpolated between recorded steps.
  function place(runs, step) {
    if (isStep()) return step;
    const key = `${runs} ${step}`;
    if (!places.has(key)) {
      places.set(key, mean(runs.map((run) => {
        const { step: known, [axis]: used } = data.runs[run].progress;
        const next = known.findIndex((other) => other >= step);
        const at = Math.max(1, next < 0 ? known.length - 1 : next);
        return known.length < 2 ? 0 : used[at - 1] + (used[at] - used[at - 1]) * (step - known[at - 1]) / (known[at] - known[at - 1]);
      })));
    }
    return places.get(key);
  }

  const runsOf = (part) => (part.run === undefined ? data.groups[part.group].runs : [runNamed(part.run)]);
  const xOf = (part) => part.x.map((step) => place(runsOf(part), step));

  // A bias-corrected exponential moving average of the recorded values.
  function smoothed(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + 1 - smoothing;
      return sum / weight;
    });
  }

  function curveTraces(panel) {
    const names = curveNames(panel);
    return panel.curves.filter((curve) => !hidden.groups.has(curve.group)).flatMap((curve) => {
      const style = styleOf(curve.group, names.indexOf(curve.name));
      const line = {
        x: xOf(curve), y: curve.y, mode: curve.x.length === 1 ? "markers" : "lines", type: "scatter",
        line: { color: style.color, dash: style.dash, width: WIDTH },
        marker: { color: style.color, size: 6 },
      };
      const isSmooth = smoothing > 0 && curve.x.length > 1;
      const lines = isSmooth
        ? [{ ...line, line: { ...line.line, color: faded(style.color, 0.3), width: 1, dash: "solid" } }, { ...line, y: smoothed(curve.y) }]
        : [line];
      if (!curve.low) return lines;
      const edge = { x: line.x, mode: "lines", type: "scatter", line: { width: 0 } };
      return [
        { ...edge, y: curve.low },
        { ...edge, y: curve.high, fill: "tonexty", fillcolor: faded(style.color, 0.18) },
        ...lines,
      ];
    });
  }

  function pointTraces(panel) {
    const names = pointNames(panel), first = curveNames(panel).length;
    return panel.points.filter((points) => !hidden.groups.has(points.group)).map((points) => {
      const number = names.indexOf(points.name);
      const shown = data.groups.length === 1 ? color(first + number) : color(points.group);
      const difference = (from, to) => from.map((value, at) => value - to[at]);
      return {
        x: xOf(points), y: points.y, mode: "markers", type: "scatter",
        marker: { color: shown, size: 8, symbol: ["circle", "diamond", "square"][number % 3] },
        error_y: {
          type: "data", symmetric: false, thickness: 1.5, width: 4, color: shown,
          array: difference(points.high, points.y), arrayminus: difference(points.y, points.low),
        },
      };
    });
  }

  const shownEvents = () => data.runs[eventRun].events.filter((event) => !hidden.events.has(event.kind));

  function eventTraces() {
    return EVENT_KINDS.map((kind) => {
      const shown = new Set(shownEvents().filter((event) => event.kind === kind).map((event) => event.step));
      const at = [...shown].map((step) => place([eventRun], step)), isSync = kind === "sync";
      return {
        x: at.flatMap((x) => [x, x, null]), y: at.flatMap(() => [0, isSync ? 0.04 : 1, null]),
        yaxis: "y2", mode: "lines", type: "scatter",
        line: {
          color: faded(css(`--${kind}`), isSync ? 1 : 0.55), width: isSync ? 1.5 : 1,
          dash: { evaluation: "dot", restart: "dash" }[kind] || "solid",
        },
      };
    });
  }

  // The same in every panel, so that a step is at one place in all.
  function stepRange(isTime) {
    const ends = data.panels.flatMap((panel) => [...panel.curves, ...panel.points].flatMap(
      (part) => [part.x[0], part.x[part.x.length - 1]].map((step) => (isTime ? step : place(runsOf(part), step)))
    ));
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    const margin = Math.max(0.5, 0.02 * (high - low));
    return [low - margin, high + margin];
  }

  // No tick between two steps, however short the run or the part of it that is shown.
  const tickOf = ([low, high]) => (high - low < 6 ? 1 : null);

  // Values that cannot be negative get no axis below 0, noise fills no panel, and a logarithmic axis
  // has two labels at least.
  function valueAxis(panel) {
    const parts = [...panel.curves, ...panel.points].filter((part) => !hidden.groups.has(part.group));
    const values = parts.flatMap((part) => [part.y, part.low ?? [], part.high ?? []]).flat();
    if (panel.log) {
      const steps = [1, 2, 5, 10], positive = values.filter((value) => value > 0);
      const round = (value, isUp) => {
        const power = 10 ** Math.floor(Math.log10(value));
        const wanted = isUp ? steps.find((step) => step * power >= value) : steps.findLast((step) => step * power <= value);
        return Math.log10(wanted * power);
      };
      const [low, high] = positive.length ? [round(Math.min(...positive), false), round(Math.max(...positive), true)] : [0, 1];
      const margin = 0.04 * (high - low || 1);
      return { type: "log", range: [low - margin, high + margin], dtick: high - low > 2 ? 1 : "D2" };
    }
    let low = Math.min(...values), high = Math.max(...values, panel.min_top);
    if (low >= 0 && (panel.from_zero || low < high / 4 || low === high)) low = 0;
    const margin = 0.06 * (high - low || Math.abs(high) || 1);
    return { range: [low - margin, high + margin] };
  }

  // Neighbouring steps are one band.
  function bands(isTime) {
    const rects = [];
    for (const step of marked?.steps ?? []) {
      const last = rects[rects.length - 1];
      if (last && step === last.x1 + 0.5) last.x1 = step + 0.5;
      else rects.push({ type: "rect", layer: "below", yref: "paper", y0: 0, y1: 1, x0: step - 0.5, x1: step + 0.5, line: { width: 0 }, fillcolor: faded(css("--fault"), 0.12) });
    }
    return isTime ? rects : rects.map((rect) => ({ ...rect, x0: place([eventRun], rect.x0), x1: place([eventRun], rect.x1) }));
  }

  function layoutOf(extra, isTime = false) {
    const common = {
      color: css("--quiet"), gridcolor: css("--line"), zeroline: false, tickfont: { size: 11 },
      automargin: true,
    };
    const range = stepRange(isTime);
    return {
      uirevision: isTime ? "step" : axis, width: isPrinting ? PRINT_WIDTH.panel : undefined,
      height: 240, margin: { l: 48, r: 8, t: 8, b: 38 }, showlegend: false, hovermode: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: css("--raised"),
      font: { family: css("--sans"), color: css("--ink"), size: 12 },
      xaxis: {
        ...common, showgrid: false, title: { text: isTime ? "step" : axis, standoff: 4, font: { size: 11 } },
        tickformat: isTime || isStep() ? ",d" : "~s", range, dtick: tickOf(range),
      },
      yaxis: { ...common, tickformat: ",~g", ...extra },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: bands(isTime),
    };
  }

  const OPTIONS = { displayModeBar: false, responsive: true, doubleClick: "reset" };

  function key(label, style, kind) {
    const line = el("i", { class: `key ${kind}` });
    line.style.setProperty("--key", style.color);
    if (kind === "curve") line.style.borderTopStyle = { dash: "dashed", dot: "dotted", dashdot: "dashed" }[style.dash] || "solid";
    return el("span", {}, line, label);
  }

  function keysOf(panel) {
    const names = curveNames(panel), points = pointNames(panel), one = data.groups.length === 1;
    const all = names.map((name, number) => {
      const style = styleOf(0, number);
      return key(name, one ? style : { ...style, color: css("--quiet") }, "curve");
    });
    return [...all, ...points.map((name, number) => key(
      name, { color: one ? color(names.length + number) : css("--quiet") }, "point"
    ))];
  }

  function draw(panel, plot) {
    const traces = [...eventTraces(), ...curveTraces(panel), ...pointTraces(panel)];
    return Plotly.react(plot, traces, layoutOf(valueAxis(panel)), OPTIONS);
  }

  // What a panel shows at each group's step, and nothing of its neighbours: colour, name and value.
  function valuesAt(panel, at) {
    const names = curveNames(panel), points = pointNames(panel), one = data.groups.length === 1;
    const isShown = (part) => !hidden.groups.has(part.group) && part.x.includes(at[part.group]);
    const curves = panel.curves.filter(isShown).map((curve) => {
      const label = one ? curve.name : `${data.groups[curve.group].label}: ${curve.name}`;
      const nth = curve.x.indexOf(at[curve.group]), value = number(curve.y[nth], 4);
      const shown = smoothing > 0 && curve.x.length > 1 ? `${value} (smoothed ${number(smoothed(curve.y)[nth], 4)})` : value;
      return [styleOf(curve.group, names.indexOf(curve.name)).color, label, shown];
    });
    return curves.concat(panel.points.filter(isShown).map((scores) => [
      color(one ? names.length + points.indexOf(scores.name) : scores.group),
      data.runs.length > 1 ? `${scores.run}: ${scores.name}` : scores.name, percent(scores.y[scores.x.indexOf(at[scores.group])]),
    ]));
  }

  function phasesAt(step) {
    const at = data.phases[timeRun].x.indexOf(step);
    return at < 0 ? [] : data.phases[timeRun].phases.map((phase, nth) => [color(nth), phase.name, `${number(phase.y[at])} s`]);
  }

  // The step of each group under the pointer, and the group that it is nearest to; an evaluation,
  // fault or restart within a few pixels comes first. A group that ended before has none.
  function stepsAt(plot, x) {
    const { xaxis } = plot._fullLayout, isTime = plot.id === "time-plot";
    const placed = (group, step) => place(data.groups[group].runs, step);
    const away = (group, step) => Math.abs(xaxis.d2p(isTime ? step : placed(group, step)) - x);
    const least = (values, cost) => values.reduce((best, value) => (cost(value) < cost(best) ? value : best), values[0]);
    const nearest = (group) => least(steps[group], (step) => away(group, step));
    const visible = [...steps.keys()].filter((group) => !hidden.groups.has(group) && steps[group].length);
    if (!visible.length) return null;
    const rare = shownEvents().filter((event) => event.kind !== "sync").map((event) => event.step);
    const eventGroup = groupOf(eventRun), event = least(rare, (step) => away(eventGroup, step));
    const isEvent = event !== undefined && away(eventGroup, event) <= 4;
    const first = isEvent ? eventGroup : isTime ? groupOf(timeRun) : least(visible, (group) => away(group, nearest(group)));
    const step = isEvent ? event : nearest(first), value = placed(first, step);
    const at = steps.map((known, group) => {
      if (group === first || isStep()) return step;
      return value <= placed(group, known[known.length - 1]) ? least(known, (other) => Math.abs(placed(group, other) - value)) : null;
    });
    return { first, at };
  }

  function point(found) {
    const run = eventRun, step = found?.at[groupOf(run)];
    const events = shownEvents().filter((event) => event.step === step).map((event) => [css(`--${event.kind}`), event.text, ""]);
    const here = found && place(data.groups[found.first].runs, found.at[found.first]);
    const all = plots.map(({ panel, plot }) => ({ plot, x: here, values: () => valuesAt(panel, found.at) }));
    const phase = found?.at[groupOf(timeRun)] ?? null;
    for (const { plot, x: value, values } of [...all, { plot: byId("time-plot"), x: phase, values: () => phasesAt(phase) }]) {
      plot.querySelector(".pointer")?.remove();
      const { xaxis } = plot._fullLayout, x = value === null ? -1 : xaxis.d2p(value);
      if (x < 0 || x > xaxis._length) continue;
      const lines = [...values(), ...events].map(([shade, name, text]) => {
        const swatch = el("i", { class: "key point" });
        swatch.style.setProperty("--key", shade);
        return el("div", {}, swatch, name, text && el("b", {}, ` ${text}`));
      });
      const title = isStep() || plot.id === "time-plot" ? `step ${whole(value)}`
        : `${whole(Math.round(value))} ${axis}${data.groups.length === 1 ? `, step ${whole(step)}` : ""}`;
      const tip = el("div", { class: `pointer ${x > xaxis._length / 2 ? "left" : ""}` }, el("div", { class: "tip" }, title, ...lines));
      tip.style.left = `${xaxis._offset + x}px`;
      plot.append(tip);
    }
  }

  function synchronise(plot) {
    plot.addEventListener("mousemove", (event) => {
      point(stepsAt(plot, event.clientX - plot.getBoundingClientRect().left - plot._fullLayout.xaxis._offset));
    });
    plot.addEventListener("mouseleave", () => point(null));
    const together = () => (plot.id === "time-plot" ? [plot] : plots.map((other) => other.plot));
    plot.on("plotly_relayout", (change) => {
      if (isZooming) return;
      const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (range[0] === undefined) return;
      isZooming = true;
      Promise.all(
        together().map((other) => Plotly.relayout(other, { "xaxis.range": range, "xaxis.dtick": tickOf(range) }))
      ).finally(() => { isZooming = false; });
    });
  }

  function drawTime() {
    const run = data.phases[timeRun];
    byId("time-title").textContent = `Seconds per step: ${run.run}`;
    byId("time-keys").replaceChildren(...run.phases.map(
      (phase, number) => key(phase.name, { color: color(number) }, "area")
    ));
    // Half a step more at both ends, so that the first and the last step are as wide as the others.
    const ends = (values, by) => (values.length ? [values[0] - by, ...values, values[values.length - 1] + by] : []);
    const traces = run.phases.map((phase, number) => ({
      x: ends(run.x, 0.5), y: ends(phase.y, 0), type: "scatter", mode: "lines", stackgroup: "time",
      line: { width: 0, shape: "hvh" }, fillcolor: faded(color(number), 0.75),
    }));
    const layout = { ...layoutOf({ ticksuffix: " s" }, true), height: 270, width: isPrinting ? PRINT_WIDTH.wide : undefined };
    delete layout.yaxis2;
    return Plotly.react(byId("time-plot"), traces, layout, OPTIONS);
  }

  function legends() {
    byId("group-legend").replaceChildren(...(data.groups.length < 2 ? [] : data.groups.map(
      (group, number) => toggle(hidden.groups, number, key(group.label, styleOf(number, 0), "curve"))
    )));
    const counts = (kind) => data.runs[eventRun].events.filter((event) => event.kind === kind).length;
    const kinds = EVENT_KINDS.filter(counts).map((kind) => toggle(
      hidden.events, kind,
      key(`${kind === "sync" ? "weight sync" : kind}s (${counts(kind)})`, { color: css(`--${kind}`) }, kind)
    ));
    const pick = pickRun("Events of", eventRun, (number) => { eventRun = number; redraw(); });
    const unmark = marked ? [button(`Unmark ${whole(marked.steps.length)} steps`, () => mark(marked.title, []), { class: "link" })] : [];
    byId("event-legend").replaceChildren(...pick, ...kinds, ...unmark);
    byId("time-runs").replaceChildren(
      ...pickRun("Run", timeRun, (number) => { timeRun = number; drawTime(); })
    );
  }

  function toggle(set, value, label) {
    const box = el("input", { type: "checkbox" });
    box.checked = !set.has(value);
    box.addEventListener("change", () => {
      if (box.checked) set.delete(value); else set.add(value);
      redraw();
    });
    return el("label", { class: "toggle" }, box, label);
  }

  function pickRun(label, chosen, pick) {
    if (data.runs.length < 2) return [];
    const select = el("select", {}, ...data.runs.map((run, number) => el("option", { value: number }, run.name)));
    select.value = chosen;
    select.addEventListener("change", () => pick(Number(select.value)));
    return [el("label", {}, `${label} `, select)];
  }

  const has = (title) => data.panels.some((panel) => panel.title === title);

  // Mark steps in all panels, and go to the one with this title.
  function mark(title, steps, run) {
    marked = steps.length ? { title, steps } : null;
    eventRun = runNamed(run);
    redraw();
    plots.find(({ panel }) => panel.title === title).plot.closest("figure").scrollIntoView({ block: "center" });
  }

  function redraw(forPrint = false) {
    isPrinting = forPrint;
    legends();
    return Promise.all([...plots.map(drawEntry), drawTime()]);
  }

  function addPanel(panel, isFirst = false) {
    const plot = el("div", { class: "plot" }), keys = el("div", { class: "keys" });
    const entry = { panel, plot, keys }, note = panel.note ? [el("p", { class: "note" }, panel.note)] : [];
    const close = panel.isPicked ? [button("×", () => remove(entry), { class: "close", "aria-label": `Remove ${panel.title}` })] : [];
    const unit = panel.unit ? el("small", {}, ` ${panel.unit}`) : "";
    const figure = el("figure", { class: "panel" }, el("h3", {}, panel.title, unit), ...close, ...note, keys, plot);
    if (isFirst) byId("panels").prepend(figure); else byId("panels").append(figure);
    plots.push(entry);
    return entry;
  }

  function remove(entry) {
    plots = plots.filter((other) => other !== entry);
    Plotly.purge(entry.plot);
    entry.plot.closest("figure").remove();
    byId("pick-metric").querySelector(`[value="${CSS.escape(entry.panel.title)}"]`).disabled = false;
  }

  function drawEntry({ panel, plot, keys }) {
    keys.replaceChildren(...keysOf(panel));
    return draw(panel, plot);
  }

  // A panel of any metric, before the others.
  function pickMetric(event) {
    const name = event.target.value;
    event.target.value = "";
    event.target.querySelector(`[value="${CSS.escape(name)}"]`).disabled = true;
    const entry = addPanel({ title: name, unit: "", curves: data.metrics[name], points: [], min_top: 0, isPicked: true }, true);
    drawEntry(entry).then(() => synchronise(entry.plot));
  }

  function controls() {
    const names = Object.keys(data.runs[0].progress).filter((name) => data.runs.every((run) => run.progress[name]));
    byId("pick-axis").replaceChildren(...names.map((name) => el("option", {}, name)));
    byId("pick-axis").addEventListener("change", (event) => {
      [axis, places] = [event.target.value, new Map()];
      redraw();
    });
    let timer;
    byId("smoothing").addEventListener("input", (event) => {
      smoothing = Number(event.target.value);
      byId("smoothing-value").textContent = smoothing.toFixed(2);
      byId("smoothing-note").hidden = !smoothing;
      clearTimeout(timer);
      timer = setTimeout(redraw, 60);
    });
    const metrics = Object.keys(data.metrics), kindOf = (name) => name.split("/")[0];
    byId("pick-metric").replaceChildren(el("option", { value: "" }, `choose of ${metrics.length}`), ...[...new Set(metrics.map(kindOf))].map(
      (kind) => el("optgroup", { label: kind }, ...metrics.filter((name) => kindOf(name) === kind).map((name) => el("option", { value: name }, name)))
    ));
    byId("pick-metric").addEventListener("change", pickMetric);
  }

  function show(all) {
    data = all;
    steps = data.groups.map((_, group) => {
      const parts = data.panels.flatMap((panel) => [...panel.curves, ...panel.points]).concat(Object.values(data.metrics).flat());
      return [...new Set(parts.filter((part) => part.group === group).flatMap((part) => part.x))].sort((a, b) => a - b);
    });
    controls();
    data.panels.forEach((panel) => addPanel(panel));
    return redraw().then(() => [...plots.map((entry) => entry.plot), byId("time-plot")].forEach(synchronise));
  }

  return { show, redraw, variable, has, mark };
})();
