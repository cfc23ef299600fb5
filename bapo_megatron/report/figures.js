// The curves: one panel per entry of `data.panels`, and the stacked areas of time.
"use strict";

const Figures = (() => {
  const NUM_COLORS = 8;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const EVENT_KINDS = ["push", "evaluation", "fault", "restart"];
  const hidden = { groups: new Set(), events: new Set() };
  const PRINT_WIDTH = { panel: 320, wide: 660 };
  let data, eventRun = 0, timeRun = 0, plots = [], isHovering = false, isZooming = false, isPrinting = false;

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
    const isNamed = data.groups.length > 1;
    return panel.curves.filter((curve) => !hidden.groups.has(curve.group)).flatMap((curve) => {
      const style = styleOf(curve.group, names.indexOf(curve.name));
      const label = isNamed ? `${data.groups[curve.group].label}: ${curve.name}` : curve.name;
      const single = curve.x.length === 1;
      const line = {
        x: curve.x, y: curve.y, name: label, mode: single ? "markers" : "lines", type: "scatter",
        line: { color: style.color, dash: style.dash, width: 1.8 }, marker: { color: style.color },
        hovertemplate: "%{y:.4~g}<extra>%{fullData.name}</extra>",
      };
      if (!curve.low) return [line];
      const edge = {
        x: curve.x, mode: "lines", type: "scatter", line: { width: 0 }, hoverinfo: "skip",
      };
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
        name: data.runs.length > 1 ? `${points.run}: ${points.name}` : points.name,
        marker: { color: shown, size: 8, symbol: ["circle", "diamond", "square"][number % 3] },
        error_y: {
          type: "data", symmetric: false, thickness: 1.5, width: 4, color: shown,
          array: difference(points.high, points.y), arrayminus: difference(points.y, points.low),
        },
        hovertemplate: "%{y:.1%}<extra>%{fullData.name}</extra>",
      };
    });
  }

  function eventTraces() {
    return EVENT_KINDS.filter((kind) => !hidden.events.has(kind)).map((kind) => {
      const events = data.runs[eventRun].events.filter((event) => event.kind === kind);
      const steps = [...new Set(events.map((event) => event.step))];
      const texts = steps.map((step) => events.filter((event) => event.step === step).map((event) => event.text).join("; "));
      const top = kind === "push" ? 0.035 : 1;
      return {
        x: steps.flatMap((step) => [step, step, null]), y: steps.flatMap(() => [0, top, null]),
        yaxis: "y2", mode: "lines", type: "scatter",
        text: texts.flatMap((text) => [text, text, null]),
        ...(kind === "push" ? { hoverinfo: "skip" } : { hovertemplate: "%{text}<extra></extra>" }),
        line: {
          color: faded(css(`--${kind}`), 0.55), width: 1,
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

  function layoutOf(extra) {
    const axis = {
      color: css("--quiet"), gridcolor: css("--line"), zeroline: false, tickfont: { size: 11 },
      automargin: true,
    };
    return {
      uirevision: "kept", width: isPrinting ? PRINT_WIDTH.panel : undefined,
      height: 240, margin: { l: 48, r: 8, t: 8, b: 38 }, showlegend: false, hovermode: "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: css("--raised"),
      font: { family: css("--sans"), color: css("--ink"), size: 12 },
      hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { size: 11 } },
      xaxis: {
        ...axis, showgrid: false, hoverformat: ".0f", title: { text: "step", standoff: 4, font: { size: 11 } }, tickformat: "d", range: stepRange(),
        spikecolor: css("--quiet"), spikethickness: 1, spikedash: "dot",
      },
      yaxis: { ...axis, tickformat: ",~g", ...extra },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    };
  }

  const OPTIONS = { displayModeBar: false, responsive: true };

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
    const layout = layoutOf(panel.log ? { type: "log" } : {});
    return Plotly.react(plot, traces, layout, OPTIONS);
  }

  function synchronise(plot) {
    plot.on("plotly_hover", (event) => {
      if (isHovering || !event.points.length) return;
      isHovering = true;
      for (const other of plots) {
        if (other.plot !== plot) Plotly.Fx.hover(other.plot, { xval: event.points[0].x }, "xy");
      }
      isHovering = false;
    });
    plot.on("plotly_unhover", () => {
      for (const other of plots) if (other.plot !== plot) Plotly.Fx.unhover(other.plot);
    });
    plot.on("plotly_relayout", (change) => {
      if (isZooming) return;
      const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      const update = change["xaxis.autorange"]
        ? { "xaxis.autorange": true }
        : range[0] === undefined ? null : { "xaxis.range": range };
      if (!update) return;
      isZooming = true;
      Promise.all(
        plots.filter((other) => other.plot !== plot).map((other) => Plotly.relayout(other.plot, update))
      ).finally(() => { isZooming = false; });
    });
  }

  function drawTime() {
    const run = data.phases[timeRun];
    byId("time-title").textContent = `Seconds per step: ${run.run}`;
    byId("time-keys").replaceChildren(...run.phases.map(
      (phase, number) => key(phase.name, { color: color(number) }, "area")
    ));
    const traces = run.phases.map((phase, number) => ({
      x: run.x, y: phase.y, name: phase.name, type: "scatter", mode: "lines", stackgroup: "time",
      line: { width: 0, shape: "hvh" }, fillcolor: faded(color(number), 0.75),
      hovertemplate: "%{y:.3~g} s<extra>%{fullData.name}</extra>",
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
      key(`${kind === "push" ? "pushe" : kind}s (${counts(kind)})`, { color: css(`--${kind}`) }, kind)
    ));
    const pick = pickRun("Events of", eventRun, (number) => { eventRun = number; redraw(); });
    byId("event-legend").replaceChildren(...pick, ...kinds);
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

  function redraw(forPrint = false) {
    isPrinting = forPrint;
    legends();
    const drawn = plots.map(({ panel, plot, keys }) => {
      keys.replaceChildren(...keysOf(panel));
      return draw(panel, plot);
    });
    return Promise.all([...drawn, drawTime()]);
  }

  function show(given) {
    data = given;
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
      for (const { plot } of plots) {
        if (!plot.dataset.synchronised) {
          plot.dataset.synchronised = "yes";
          synchronise(plot);
        }
      }
    });
  }

  return { show, redraw, variable };
})();
