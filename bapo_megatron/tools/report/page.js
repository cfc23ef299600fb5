// The page around figures and reader: words, tables and themes.
"use strict";

function byId(id) {
  return document.getElementById(id);
}

// Text becomes text nodes, never markup.
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function whole(value) {
  return value.toLocaleString("en-US");
}

function number(value, digits = 3) {
  if (value === null) return "?";
  const rounded = Number(value.toPrecision(digits));
  return (Math.abs(rounded) < 1000 ? String(rounded) : whole(rounded)).replace("-", "−");
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

function button(text, act, attributes = {}) {
  const element = el("button", { type: "button", ...attributes }, text);
  element.addEventListener("click", act);
  return element;
}

const RESULTS = ["found", "not measured", "passed in few steps", "passed"];
const THEMES = ["automatic", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let theme = "automatic";

function card(group, number) {
  const swatch = el("i", { class: "key point" });
  swatch.style.setProperty("--key", Figures.variable(number));
  const seed = group.rows.length === 1 && group.rows[0][1] !== "" ? ` · seed ${group.rows[0][1]}` : "";
  const findings = group.findings.map((finding) => el(
    "li", { class: `finding ${finding.level}` },
    el("b", {}, finding.level === "fault" ? "Likely defect: " : "Check: "),
    finding.run ? `${finding.run}: ` : "", finding.text, ...evidence(finding, group.rows[0][0])
  ));
  const figures = group.rows.length > 1 ? sortable(group) : el("dl", { class: "figures" }, ...group.headings.slice(2).map(
    (label, at) => el("div", {}, el("dd", {}, group.rows[0][at + 2]), el("dt", {}, label))
  ));
  const count = (result) => group.results.filter((other) => other === result).length;
  const total = RESULTS.filter(count).map((result) => `${count(result)} ${result}`).join(", ");
  const fine = `All ${group.results.length - count("not measured")} checks with enough data passed.`;
  return el(
    "article", { class: "card" }, el("h3", {}, swatch, group.label + seed), el("p", {}, group.words), figures,
    el("ul", { class: "findings" }, ...(findings.length ? findings : [el("li", { class: "finding fine" }, fine)])),
    folded(`Checks: ${total}`, group.checks), folded("Configuration, commit and versions", group.settings)
  );
}

// Where to see what a check found.
function evidence(finding, onlyRun) {
  const run = finding.run || onlyRun;
  const links = [];
  if (Figures.has(finding.panel)) links.push(button("Show the curve", () => Figures.mark(finding.panel, finding.steps, run), { class: "link" }));
  if (finding.rollouts && Reader.has(run)) links.push(button("Show the rollouts", () => Reader.group(run, finding.rollouts), { class: "link" }));
  return links.flatMap((link) => [" ", link]);
}

function folded(summary, table) {
  return el("details", {}, el("summary", {}, summary), sortable(table));
}

function sortable(table) {
  const body = el("tbody");
  const fill = (rows) => body.replaceChildren(...rows.map((row) => el("tr", {}, ...row.map(
    (cell, at) => el(at ? "td" : "th", at ? {} : { scope: "row" }, cell)
  ))));
  const value = (cell) => {
    const parsed = parseFloat(String(cell).replace(/[,+ ]/g, "").replace("−", "-"));
    return Number.isNaN(parsed) ? null : parsed;
  };
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    return x !== null && y !== null ? x - y : String(a).localeCompare(String(b));
  };
  const heads = table.headings.map((heading, at) => {
    const sort = button(heading, () => {
      const isUp = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isUp ? "descending" : "ascending");
      fill([...table.rows].sort((a, b) => (isUp ? -1 : 1) * compare(a[at], b[at])));
    });
    const head = el("th", { scope: "col" }, sort);
    return head;
  });
  fill(table.rows);
  const scroll = el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body));
  const frame = el("div", { class: "table" }, scroll);
  // A shadow on the side where there are more columns.
  const mark = () => frame.classList.toggle("wide-table", scroll.scrollLeft + scroll.clientWidth < scroll.scrollWidth - 1);
  scroll.addEventListener("scroll", mark);
  new ResizeObserver(() => requestAnimationFrame(mark)).observe(scroll);
  return frame;
}

function tableOr(id, table, otherwise) {
  byId(id).replaceChildren(table.rows.length ? sortable(table) : el("p", { class: "note" }, otherwise));
}

function eventTable(runs) {
  const events = runs.flatMap((run) => run.events.filter((event) => event.kind !== "sync").map(
    (event) => [run.name, event.step, event.kind, event.text]
  ));
  byId("events").querySelector("summary").textContent = `Events as a table (${events.length}, without weight syncs)`;
  tableOr("event-table", { headings: ["run", "step", "kind", "event"], rows: events }, "None.");
}

function timeTable(phases) {
  const names = [...new Set(phases.flatMap((run) => run.phases.map((phase) => phase.name)))];
  const cell = (phase) => (phase ? `${phase.total_s.toFixed(1)} s (${percent(phase.share)})` : "");
  tableOr("time-table", {
    headings: ["run", ...names],
    rows: phases.map((run) => [run.run, ...names.map((name) => cell(run.phases.find((phase) => phase.name === name)))]),
  }, "No times were recorded.");
}

function show(data) {
  const labels = data.groups.map((group) => group.label);
  byId("title").textContent = labels.length > 3 ? `${data.runs.length} runs` : labels.join(" · ");
  const seeds = data.groups.some((group) => group.runs.length > 1);
  byId("cards").className = seeds ? "full" : "";
  for (const part of document.querySelectorAll("#differences, [href='#differences']")) part.hidden = data.runs.length === 1;
  tableOr("difference-table", data.differences, "All runs have the same configuration, apart from their seeds.");
  byId("seed-table").replaceChildren(...(data.seeds.rows.length ? [sortable(data.seeds)] : []));
  tableOr("evaluation-table", data.evaluations, "No evaluations.");
  byId("evaluation-note").hidden = !data.evaluations.rows.length;
  byId("seeds-note").hidden = !seeds;
  eventTable(data.runs);
  timeTable(data.phases);
  Reader.show(data.rollouts);
  const drawn = Figures.show(data);
  byId("cards").replaceChildren(...data.cards.map(card));
  return drawn;
}

function setTheme(name) {
  const wanted = name === "automatic" ? (prefersDark.matches ? "dark" : "light") : name;
  document.documentElement.dataset.theme = wanted;
  byId("theme").textContent = `Theme: ${theme}`;
}

function applyTheme(name, forPrint = false) {
  setTheme(name);
  Figures.redraw(forPrint);
}

window.addEventListener("error", (event) => {
  byId("failure").hidden = false;
  byId("failure").textContent = `This page failed: ${event.message}`;
});
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  applyTheme(theme);
});
prefersDark.addEventListener("change", () => applyTheme(theme));
window.addEventListener("beforeprint", () => applyTheme("light", true));
window.addEventListener("afterprint", () => applyTheme(theme));

setTheme(theme);
show(JSON.parse(byId("data").textContent)).then(() => {
  // The browser looked for the address's section before there was anything above it; #rollout=0.3
  // names a response (reader.js).
  byId(location.hash.slice(1).split("=")[0])?.scrollIntoView({ behavior: "instant" });
  document.documentElement.dataset.drawn = "yes";
});
