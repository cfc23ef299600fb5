// The curves: one panel per entry of `data.panels`, and the stacked areas of time.
"use strict";

const Figures = (() => {
  const NUM_COLORS = 8;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const EVENT_KINDS = ["sync", "evaluation", "fault", "restart"];
  const hidden = { groups: new Set(), events: new Set() };
  const PRINT_WIDTH = { panel: 320, wide: 660 };
  let data, eventRun = 0, timeRun = 0, plots = [], marked = null, isZooming = false, isPrinting = false;

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function color(number) {
    return css(`--c${number % NUM_COLORS}`);
  }

  // For styles that follow the theme by themselves.
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

  function curveTraces(panel) {
    const names = curveNames(panel);
    return panel.curves.filter((curve) => !hidden.groups.has(curve.group)).flatMap((curve) => {
      const style = styleOf(curve.group, names.indexOf(curve.name));
      const single = curve.x.length === 1;
      const line = {
        x: curve.x, y: curve.y, mode: single ? "markers" : "lines", type: "scatter",
        line: { color: style.color, dash: style.dash, width: 1.8 }, marker: { color: style.color },
      };
      if (!curve.low) return [line];
      const edge = { x: curve.x, mode: "lines", type: "scatter", line: { width: 0 } };
      return [
        { ...edge, y: curve.low },
        { ...edge, y: curve.high, fill: "tonexty", fillcolor: faded(style.color, 0.18) },
        line,
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
        x: points.x, y: points.y, mode: "markers", type: "scatter",
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
      const steps = [...new Set(shownEvents().filter((event) => event.kind === kind).map((event) => event.step))];
      const isSync = kind === "sync";
      return {
        x: steps.flatMap((step) => [step, step, null]), y: steps.flatMap(() => [0, isSync ? 0.04 : 1, null]),
        yaxis: "y2", mode: "lines", type: "scatter",
        line: {
          color: faded(css(`--${kind}`), isSync ? 1 : 0.55), width: isSync ? 1.5 : 1,
          dash: { evaluation: "dot", restart: "dash" }[kind] || "solid",
        },
      };
    });
  }

  // The same in every panel, so that a step is at one place in all.
  function stepRange() {
    const steps = data.panels.flatMap((panel) => [...panel.curves, ...panel.points].flatMap(({ x }) => [x[0], x[x.length - 1]]));
    const [low, high] = [Math.min(...steps), Math.max(...steps)];
    const margin = Math.max(0.5, 0.02 * (high - low));
    return [low - margin, high + margin];
  }

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
  function bands() {
    const rects = [];
    for (const step of marked?.steps ?? []) {
      const last = rects[rects.length - 1];
      if (last && step === last.x1 + 0.5) last.x1 = step + 0.5;
      else rects.push({ type: "rect", layer: "below", yref: "paper", y0: 0, y1: 1, x0: step - 0.5, x1: step + 0.5, line: { width: 0 }, fillcolor: faded(css("--fault"), 0.12) });
    }
    return rects;
  }

  function layoutOf(extra) {
    const axis = {
      color: css("--quiet"), gridcolor: css("--line"), zeroline: false, tickfont: { size: 11 },
      automargin: true,
    };
    return {
      uirevision: "kept", width: isPrinting ? PRINT_WIDTH.panel : undefined,
      height: 240, margin: { l: 48, r: 8, t: 8, b: 38 }, showlegend: false, hovermode: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: css("--raised"),
      font: { family: css("--sans"), color: css("--ink"), size: 12 },
      xaxis: { ...axis, showgrid: false, title: { text: "step", standoff: 4, font: { size: 11 } }, tickformat: ",d", range: stepRange() },
      yaxis: { ...axis, tickformat: ",~g", ...extra },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: bands(),
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

  // What a panel shows at a step, and nothing of its neighbours: colour, name and value.
  function valuesAt(panel, step) {
    const names = curveNames(panel), points = pointNames(panel), one = data.groups.length === 1;
    const isShown = (part) => !hidden.groups.has(part.group) && part.x.includes(step);
    const curves = panel.curves.filter(isShown).map((curve) => {
      const label = one ? curve.name : `${data.groups[curve.group].label}: ${curve.name}`;
      return [styleOf(curve.group, names.indexOf(curve.name)).color, label, number(curve.y[curve.x.indexOf(step)], 4)];
    });
    return curves.concat(panel.points.filter(isShown).map((scores) => [
      color(one ? names.length + points.indexOf(scores.name) : scores.group),
      data.runs.length > 1 ? `${scores.run}: ${scores.name}` : scores.name, percent(scores.y[scores.x.indexOf(step)]),
    ]));
  }

  function phasesAt(step) {
    const at = data.phases[timeRun].x.indexOf(step);
    return at < 0 ? [] : data.phases[timeRun].phases.map((phase, nth) => [color(nth), phase.name, `${number(phase.y[at])} s`]);
  }

  // The step under the pointer; an evaluation, fault or restart within a few pixels comes first.
  function stepAt(axis, x) {
    const nearest = (steps) => steps.reduce((best, step) => (Math.abs(axis.d2p(step) - x) < Math.abs(axis.d2p(best) - x) ? step : best), steps[0] ?? null);
    const parts = [data.phases[timeRun], ...data.panels.flatMap((panel) => [...panel.curves, ...panel.points])];
    const rare = shownEvents().filter((event) => event.kind !== "sync").map((event) => event.step);
    const near = rare.filter((step) => Math.abs(axis.d2p(step) - x) <= 4);
    return nearest(near.length ? near : [...new Set(parts.flatMap((part) => part.x))]);
  }

  function point(step) {
    const events = shownEvents().filter((event) => event.step === step).map((event) => [css(`--${event.kind}`), event.text, ""]);
    for (const { plot, values } of [...plots.map((entry) => ({ plot: entry.plot, values: (at) => valuesAt(entry.panel, at) })), { plot: byId("time-plot"), values: phasesAt }]) {
      plot.querySelector(".pointer")?.remove();
      const axis = plot._fullLayout.xaxis, x = step === null ? -1 : axis.d2p(step);
      if (x < 0 || x > axis._length) continue;
      const lines = [...values(step), ...events].map(([shade, name, value]) => {
        const swatch = el("i", { class: "key point" });
        swatch.style.setProperty("--key", shade);
        return el("div", {}, swatch, name, value && el("b", {}, ` ${value}`));
      });
      const tip = el("div", { class: `pointer ${x > axis._length / 2 ? "left" : ""}` }, el("div", { class: "tip" }, `step ${whole(step)}`, ...lines));
      tip.style.left = `${axis._offset + x}px`;
      plot.append(tip);
    }
  }

  function synchronise(plot) {
    plot.addEventListener("mousemove", (event) => {
      const axis = plot._fullLayout.xaxis;
      point(stepAt(axis, event.clientX - plot.getBoundingClientRect().left - axis._offset));
    });
    plot.addEventListener("mouseleave", () => point(null));
    if (plot.id === "time-plot") return;
    plot.on("plotly_relayout", (change) => {
      if (isZooming) return;
      const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (range[0] === undefined) return;
      isZooming = true;
      Promise.all(
        plots.filter((other) => other.plot !== plot).map((other) => Plotly.relayout(other.plot, { "xaxis.range": range }))
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
    const layout = { ...layoutOf({ ticksuffix: " s" }), height: 270, width: isPrinting ? PRINT_WIDTH.wide : undefined };
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
    eventRun = Math.max(0, data.runs.findIndex((other) => other.name === run));
    redraw();
    plots.find(({ panel }) => panel.title === title).plot.closest("figure").scrollIntoView({ block: "center" });
  }

  function redraw(forPrint = false) {
    isPrinting = forPrint;
    legends();
    const drawn = plots.map(({ panel, plot, keys }) => {
      keys.replaceChildren(...keysOf(panel));
      return draw(panel, plot);
    });
    return Promise.all([...drawn, drawTime()]);
  }

  function show(newest) {
    data = newest;
    eventRun = Math.min(eventRun, data.runs.length - 1);
    timeRun = Math.min(timeRun, data.runs.length - 1);
    if (plots.length !== data.panels.length) {
      plots = data.panels.map(() => ({ plot: el("div", { class: "plot" }), keys: el("div", { class: "keys" }) }));
      byId("panels").replaceChildren(...plots.map(({ plot, keys }, number) => {
        const panel = data.panels[number];
        const unit = panel.unit ? el("small", {}, ` ${panel.unit}`) : "";
        const note = panel.note ? [el("p", { class: "note" }, panel.note)] : [];
        return el("figure", { class: "panel" }, el("h3", {}, panel.title, unit), ...note, keys, plot);
      }));
    }
    plots.forEach((entry, number) => { entry.panel = data.panels[number]; });
    return redraw().then(() => {
      for (const plot of [...plots.map((entry) => entry.plot), byId("time-plot")]) {
        if (!plot.dataset.synchronised) {
          plot.dataset.synchronised = "yes";
          synchronise(plot);
        }
      }
    });
  }

  return { show, redraw, variable, has, mark };
})();
