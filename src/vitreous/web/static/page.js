// The photo tab in the browser: what is shown and asked for. The server computes, this draws.
"use strict";
window.vitreous = (() => {
  const { prepare, draw, locate } = window.vitreousMaps;
  const config = window.vitreousConfig;
  const settings = { sign: "both", threshold: 0, opacity: config.opacity, smooth: true, context: false, wipe: 0 };
  const state = { view: null, methods: [...config.methods], questions: [], depth: null, command: {}, trust: null };
  const faint = 0.1; // the part of the strongest score below which nothing can be seen
  let picker = null, tiles = [], waiting = 0, changed = false, shown = { photo: "", rows: 0 };

  // Elements ----------------------------------------------------------------------------------------------------------

  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "class") element.className = value;
      else if (value !== null && value !== undefined && value !== "") element.setAttribute(name, value);
    }
    element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }

  const part = (name) => document.querySelector(`#v-${name}`);
  const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

  // Requests ----------------------------------------------------------------------------------------------------------

  // Press a hidden button; Gradio then asks request() for the text that goes to the server.
  function send(button, command = {}) {
    clearTimeout(waiting);
    changed = false;
    state.command = command;
    const found = document.querySelector(`#vitreous-${button}`);
    if (found) (found.tagName === "BUTTON" ? found : found.querySelector("button")).click();
  }

  function request() {
    const { methods, questions, depth, command } = state;
    return JSON.stringify({ methods, questions, depth, settings, ...command });
  }

  function ask(change) {
    Object.assign(state, change);
    clearTimeout(waiting);
    if (picker) picker.render();
    renderPredictions();
    if (!state.view) return;
    changed = true;
    waiting = setTimeout(() => send("show"), 120); // several clicks are one request
  }

  const toggleQuestion = (question) => {
    const there = state.questions.some((one) => same(one, question));
    if (there && state.questions.length === 1) return;
    if (!there && state.questions.length >= config.limits.questions) {
      say(`At most ${config.limits.questions} questions are shown at once: remove one first.`);
      return;
    }
    const rest = state.questions.filter((one) => !same(one, question));
    ask({ questions: there ? rest : [...state.questions, question] });
  };

  // Answers -----------------------------------------------------------------------------------------------------------

  function receive(text) {
    const value = text ? JSON.parse(text) : null;
    if (!value || value.number === state.number) return;
    state.number = value.number;
    if (value.rejected) {
      if (state.view && !changed) restore(state.view);
      if (picker) picker.render();
      renderPredictions();
      return;
    }
    if (value.trust && !value.maps) { state.trust = value.trust; renderTrust(); return; }
    const image = new Image();
    image.onload = () => show(value, image);
    image.src = value.photo.src;
  }

  function restore(view) {
    state.methods = view.methods.map((one) => one.spelling);
    state.questions = view.questions.map((one) => one.key);
    state.depth = view.depth;
  }

  function show(view, image) {
    view.image = image;
    for (const row of view.maps) for (const map of row) if (!map.failed) prepare(map, view);
    state.view = view;
    state.trust = view.trust || null;
    if (!changed) restore(view); // what was chosen since is about to be sent
    render();
    if (view.measureTrust && !view.trust && !changed) waiting = setTimeout(() => send("trust"), 600); // others come first
  }

  function say(text) {
    const line = part("note");
    if (line) line.textContent = text;
  }

  // Panels ------------------------------------------------------------------------------------------------------------

  const panels = {
    examples: renderExamples, head: renderHead, toolbar: renderToolbar, predictions: renderPredictions,
    question: renderQuestions, picker: renderPicker, stage: renderStage, trust: renderTrust,
  };

  function render() {
    for (const fill of Object.values(panels)) fill();
  }

  function renderPicker() {
    const root = part("picker");
    if (!root) return;
    if (root.firstChild && picker) { picker.render(); return; }
    picker = window.vitreousPicker(h)(root, config.catalogue, () => state.methods, (methods) => {
      if (methods.length) ask({ methods });
    });
  }

  function renderExamples() {
    const root = part("examples");
    if (!root) return;
    const open = state.view ? state.view.photo.name : "";
    if (!root.firstChild) {
      root.replaceChildren(...config.examples.map((one, number) => h("button", {
        type: "button", class: "v-example", title: one.credit ? `${one.title} (${one.credit})` : one.title,
        "data-example": number, onclick: () => send("open", { example: number }),
      }, h("img", { src: one.src, alt: one.title }))));
    }
    for (const [number, button] of [...root.children].entries()) {
      button.setAttribute("aria-current", config.examples[number].name === open);
    }
  }

  function renderHead() {
    const root = part("head"), view = state.view;
    if (!root || !view) return;
    const top = view.predictions[0];
    root.replaceChildren(
      h("p", { class: "v-model" }, h("b", {}, view.model.name), ` ${view.model.knows}`),
      top ? h("p", { class: "v-says" }, "Prediction: ", h("b", {}, top.label), ` ${top.text}`) : "",
      view.warning ? h("p", { class: "v-warning", role: "note" }, view.warning) : "",
    );
  }

  function renderPredictions() {
    const root = part("predictions"), view = state.view;
    if (!root || !view) return;
    const bar = (one) => {
      const on = state.questions.some((question) => same(question, one.index));
      return h("button", {
        type: "button", class: "v-bar", "aria-pressed": on, "data-class": one.index,
        title: on ? "Shown; click to remove" : "Click to explain this class as well",
        onclick: () => toggleQuestion(one.index),
      },
      h("span", { class: "v-fill", style: `width: ${Math.round(100 * (one.value || 0))}%` }),
      h("span", { class: "v-label" }, one.label), h("span", { class: "v-number" }, one.text));
    };
    root.replaceChildren(
      h("h3", {}, "Prediction", h("small", {}, "click to add or remove a class")),
      ...view.predictions.map(bar),
      h("input", {
        type: "text", list: "v-classes", id: "v-class-search", placeholder: `Another of ${view.model.names.length} classes`,
        "aria-label": "Add a class", onchange: (event) => {
          const found = view.model.names.indexOf(event.target.value.trim());
          if (found >= 0) { event.target.value = ""; toggleQuestion(found); } else if (event.target.value.trim()) {
            say(`This model has no class “${event.target.value.trim()}”.`);
          }
        },
      }),
      h("datalist", { id: "v-classes" }, view.model.names.map((name) => h("option", { value: name }))),
      h("p", { class: "v-note", id: "v-note", role: "status" }),
    );
  }

  function renderQuestions() {
    const root = part("question"), view = state.view;
    if (!root || !view) return;
    const chosen = (id, first) => {
      const ranked = view.predictions.map((one) => one.index);
      const order = [...ranked, ...view.model.names.keys()].filter((one, place, all) => all.indexOf(one) === place);
      return h("select", { id, "aria-label": first ? "Class" : "Other class" }, order.slice(0, 1000).map((one, place) => {
        const option = h("option", { value: one }, view.model.names[one]);
        option.selected = place === (first ? 0 : 1);
        return option;
      }));
    };
    const left = chosen("v-contrast-a", true), right = chosen("v-contrast-b", false);
    const contrast = view.model.names.length < 2 ? [] : [
      h("div", { class: "v-ask" }, h("span", {}, "Why"), left, h("span", {}, "rather than"), right,
        h("button", {
          type: "button", class: "v-go", id: "v-contrast", onclick: () => {
            const question = { kind: "contrast", a: Number(left.value), b: Number(right.value) };
            if (question.a === question.b) { say("Choose two different classes."); return; }
            toggleQuestion(question);
          },
        }, "Show")),
    ];
    const text = h("input", { type: "text", id: "v-prompt", placeholder: "a photo of a cat", "aria-label": "Prompt", maxlength: 300 });
    const addPrompt = () => {
      if (text.value.trim()) toggleQuestion({ kind: "prompt", text: text.value.trim() });
    };
    text.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); addPrompt(); } });
    const prompt = view.model.text
      ? h("div", { class: "v-ask" }, h("span", {}, "Where is"), text, h("button", { type: "button", class: "v-go", id: "v-prompt-add", onclick: addPrompt }, "Show"))
      : h("p", { class: "v-note" }, "Prompts need a model of images and texts: ", h("button", {
        type: "button", class: "v-link", id: "v-use-clip", onclick: () => send("open", { model: config.promptModel }),
      }, `switch to ${config.promptModel}`));
    root.replaceChildren(h("h3", {}, "Ask more"), ...contrast, prompt);
  }

  // The toolbar -------------------------------------------------------------------------------------------------------

  function renderToolbar() {
    const root = part("toolbar"), view = state.view;
    if (!root || !view) return;
    if (!root.firstChild) buildToolbar(root);
    const depth = part("depth");
    depth.max = view.blocks;
    depth.value = view.depth || view.blocks;
    part("depth-value").textContent = `${depth.value} of ${view.blocks}`;
  }

  function buildToolbar(root) {
    const percent = (value) => `${Math.round(100 * value)}%`;
    const slider = (name, label, change, most = 1, step = 0.01) => {
      const shown = h("output", { id: `v-${name}-value` }, most === 1 ? percent(settings[name]) : "");
      const input = h("input", { type: "range", id: `v-${name}`, min: most === 1 ? 0 : 1, max: most, step, value: settings[name] });
      input.addEventListener("input", () => change(Number(input.value), shown));
      return [h("label", { class: "v-slider" }, h("span", {}, label), input, shown), input];
    };
    const live = (name) => (value, shown) => { settings[name] = value; shown.textContent = percent(value); redraw(); };
    const signs = h("div", { class: "v-segments", role: "radiogroup", "aria-label": "Sign", id: "v-sign" },
      [["both", "For and against"], ["for", "For"], ["against", "Against"]].map(([value, label]) => {
        const input = h("input", { type: "radio", name: "v-sign", value });
        input.checked = value === settings.sign;
        input.addEventListener("change", () => { settings.sign = value; redraw(); });
        return h("label", {}, input, h("span", {}, label));
      }));
    const box = (name, label) => {
      const input = h("input", { type: "checkbox", id: `v-${name}` });
      input.checked = settings[name];
      input.addEventListener("change", () => { settings[name] = input.checked; redraw(); });
      return h("label", { class: "v-check" }, input, label);
    };
    const [threshold] = slider("threshold", "Threshold", live("threshold"));
    const [opacity] = slider("opacity", "Opacity", live("opacity"));
    const [wipe] = slider("wipe", "Wipe", live("wipe"));
    const [depth, depthInput] = slider("depth", "Blocks", (value, shown) => { shown.textContent = `${value} of ${depthInput.max}`; }, 12, 1);
    depthInput.addEventListener("change", () => {
      const value = Number(depthInput.value);
      ask({ depth: value >= Number(depthInput.max) ? null : value });
    });
    root.replaceChildren(signs, threshold, opacity, wipe, depth, box("smooth", "Smooth"), box("context", "Whole photo"));
  }

  // Maps --------------------------------------------------------------------------------------------------------------

  const cites = (method) => `${method.author} ${method.year}`;

  function badges(method, map) {
    const found = [];
    if (!method.classSpecific) found.push(["same for every class", "This method does not look at the class."]);
    if (map && map.constant) found.push(["constant", "The map is the same everywhere and shows nothing."]);
    if (method.note) found.push([method.note, ""]);
    return found.map(([text, title]) => h("span", { class: "v-badge v-warn", title }, text));
  }

  // Why a map shows nothing under these settings.
  function silent(map) {
    if (settings.sign !== "against") return "";
    if (!map.signed) return "This method has no negative side.";
    if (map.low >= 0) return "Nothing speaks against.";
    const part = -map.low / Math.max(map.high, -map.low); // of the strongest score, which has the strongest colour
    return part < faint ? `Hardly anything speaks against: at most ${Math.max(1, Math.round(100 * part))}% of what speaks for.` : "";
  }

  function renderStage() {
    const root = part("stage"), view = state.view;
    if (!root || !view) return;
    tiles = [];
    const scrolled = root.scrollLeft;
    const rows = view.questions.map((question, number) => h("section", { class: "v-row", "aria-label": question.label },
      h("header", { class: "v-question" },
        question.thumb ? h("img", { src: question.thumb, alt: "" }) : "",
        h("h3", {}, question.title), h("span", { class: "v-value" }, question.text),
        view.questions.length > 1 ? h("button", {
          type: "button", class: "v-remove", "aria-label": `Remove ${question.label}`, onclick: () => toggleQuestion(question.key),
        }, "×") : ""),
      h("div", { class: "v-tiles", style: `--v-columns: ${view.methods.length + 1}` },
        tile(view, null, question, null), view.methods.map((method, column) => tile(view, view.maps[number][column], question, method)))));
    root.replaceChildren(...rows, legend(view));
    root.scrollLeft = scrolled;
    redraw();
    // A question that was added is looked at.
    const added = shown.photo === view.photo.name && rows.length > shown.rows;
    shown = { photo: view.photo.name, rows: rows.length };
    if (added) rows[rows.length - 1].scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  function tile(view, map, question, method) {
    const title = method ? h("span", { class: "v-title", title: method.summary }, h("code", {}, method.shown), h("small", {}, cites(method)))
      : h("span", { class: "v-title" }, "Photo");
    const caption = h("figcaption", {}, title, method ? h("span", { class: "v-badges" }, badges(method, map)) : "");
    if (map && map.failed) return h("figure", { class: "v-tile v-failed" }, caption, h("p", {}, map.failed));
    const canvas = h("canvas", {}), cross = h("span", { class: "v-cross" }), score = h("output", { class: "v-score" });
    const why = h("span", { class: "v-silent" });
    const label = method ? `Map of ${method.shown} for ${question.label}; click to enlarge` : "The photo; click to enlarge";
    const button = h("button", { type: "button", class: "v-canvas", "aria-label": label, onclick: () => enlarge(one) }, canvas, cross, why, score);
    const one = { canvas, cross, score, why, map, method, question, button };
    button.addEventListener("pointermove", (event) => point(event, button));
    button.addEventListener("pointerleave", () => point(null));
    tiles.push(one);
    return h("figure", { class: method ? "v-tile" : "v-tile v-photo" }, caption, button);
  }

  function legend(view) {
    const ramp = (table, low) => {
      const stops = Array.from({ length: 17 }, (_, step) => { const at = 3 * Math.round((step / 16) * 255); return `rgb(${table[at]} ${table[at + 1]} ${table[at + 2]})`; });
      return h("span", { class: "v-ramp", style: `background: linear-gradient(to right, ${stops.join(",")})`, title: low });
    };
    const kinds = new Set(view.maps.flat().filter((map) => !map.failed).map((map) => map.signed));
    return h("footer", { class: "v-legend" },
      kinds.has(true) ? h("span", {}, "against", ramp(config.tables.signed), "for the class") : "",
      kinds.has(false) ? h("span", {}, "zero", ramp(config.tables.unsigned), "highest score") : "",
      h("span", { class: "v-faint" }, "Every map has its own scale. Weak scores are transparent."),
      view.photo.credit ? h("span", { class: "v-faint" }, `Photo: ${view.photo.credit}`) : "");
  }

  function redraw() {
    const view = state.view;
    if (!view) return;
    for (const one of tiles) {
      draw(one.canvas, view, one.map, settings, config.tables, Math.max(120, one.button.clientWidth || 240));
      if (!one.map) continue;
      const text = silent(one.map);
      one.why.textContent = text;
      one.button.classList.toggle("v-grey", Boolean(text));
    }
    if (large.open) drawLarge();
  }

  const number = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e4 ? value.toExponential(2) : value.toPrecision(3));

  // One cursor over all maps: the same place of the photo, with the score and the patch.
  function point(event, button) {
    const view = state.view;
    let x = 0, y = 0;
    if (event) {
      const box = button.getBoundingClientRect();
      x = (event.clientX - box.left) / box.width;
      y = (event.clientY - box.top) / box.height;
    }
    for (const one of [...tiles, ...(large.open ? [large] : [])]) {
      const found = event && one.map ? locate(view, one.map, settings, x, y) : null;
      one.cross.style.display = event ? "block" : "none";
      one.cross.style.left = `${100 * x}%`;
      one.cross.style.top = `${100 * y}%`;
      one.score.textContent = found ? `${number(found.score)} · row ${found.row}, column ${found.column}` : "";
    }
  }

  // The enlarged map --------------------------------------------------------------------------------------------------

  const large = { open: false };

  function enlarge(one) {
    const view = state.view;
    Object.assign(large, {
      open: true, map: one.map, place: tiles.indexOf(one), canvas: h("canvas", {}), cross: h("span", { class: "v-cross" }),
      score: h("output", { class: "v-score" }),
    });
    const wipe = h("input", { type: "range", id: "v-large-wipe", min: 0, max: 1, step: 0.01, value: settings.wipe, "aria-label": "Wipe between photo and map" });
    wipe.addEventListener("input", () => {
      settings.wipe = Number(wipe.value);
      const other = part("wipe");
      if (other) { other.value = wipe.value; part("wipe-value").textContent = `${Math.round(100 * settings.wipe)}%`; }
      redraw();
    });
    const box = h("div", { class: "v-large-canvas" }, large.canvas, large.cross, large.score);
    box.addEventListener("pointermove", (event) => point(event, box));
    box.addEventListener("pointerleave", () => point(null));
    const step = (by) => enlarge(tiles[(large.place + by + tiles.length) % tiles.length]);
    const dialog = h("dialog", { id: "v-large", "aria-label": "Enlarged map" },
      h("header", {}, h("h3", {}, one.method ? `${one.method.shown}: ${one.question.title}` : view.photo.name),
        h("button", { type: "button", "aria-label": "Close", onclick: () => dialog.close() }, "×")),
      box,
      one.map ? h("label", { class: "v-slider" }, h("span", {}, "Map"), wipe, h("span", {}, "Photo")) : "",
      one.method ? h("p", { class: "v-faint" }, `${one.method.summary} `,
        h("a", { href: one.method.link, target: "_blank", rel: "noopener noreferrer" }, one.method.citation),
        `. Scores from ${number(one.map.low)} to ${number(one.map.high)}.`) : "",
      h("footer", {}, h("button", { type: "button", onclick: () => step(-1) }, "‹ Previous"), h("button", { type: "button", onclick: () => step(1) }, "Next ›")));
    const before = document.querySelector("#v-large");
    if (before) before.remove();
    dialog.addEventListener("close", () => { large.open = false; dialog.remove(); });
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("keydown", (event) => {
      if (event.target.tagName === "INPUT") return;
      if (event.key === "ArrowLeft") step(-1);
      if (event.key === "ArrowRight") step(1);
    });
    document.querySelector(".gradio-container").append(dialog);
    dialog.showModal();
    drawLarge();
  }

  function drawLarge() {
    const shown = window.vitreousMaps.region(state.view, settings);
    const room = Math.min(window.innerWidth * 0.9, (window.innerHeight * 0.72 * shown.width) / shown.height, 1100);
    large.canvas.style.width = `${room}px`;
    draw(large.canvas, state.view, large.map, settings, config.tables, room);
  }

  // Trust -------------------------------------------------------------------------------------------------------------

  function renderTrust() {
    const root = part("trust"), view = state.view, found = state.trust;
    if (!root || !view) return;
    if (!found) {
      root.className = "v-trust";
      root.replaceChildren(h("button", {
        type: "button", class: "v-go", id: "v-trust-run", onclick: () => send("trust"),
      }, "Can I trust this map? Measure it"), h("span", { class: "v-note" }, "Runs the model on parts of the photo: some ten forward passes."));
      return;
    }
    root.className = `v-trust v-${found.verdict.replace(/ /g, "-")}`;
    root.replaceChildren(
      h("h3", {}, h("span", { class: "v-verdict" }, found.verdict), `Trust in ${found.method} for ${found.target}`),
      h("p", {}, found.sentence),
      h("dl", {}, found.figures.map(([name, value, hint]) => h("div", { title: hint }, h("dt", {}, name), h("dd", {}, value)))),
      ...found.notes.map((note) => h("p", { class: "v-warning" }, note)));
  }

  // Start -------------------------------------------------------------------------------------------------------------

  // Gradio adds elements when it likes; each is filled when it is there.
  function mount() {
    for (const [name, fill] of Object.entries(panels)) {
      const root = part(name);
      if (!root || root.dataset.mounted) continue;
      root.dataset.mounted = "yes";
      fill();
      if (name === "stage") new ResizeObserver(() => redraw()).observe(root);
    }
    for (const button of document.querySelectorAll("#v-drawer-open:not([data-mounted])")) {
      button.dataset.mounted = "yes";
      button.addEventListener("click", () => {
        const open = document.querySelector(".v-drawer").classList.toggle("v-open");
        button.textContent = open ? "Close" : "Settings";
        button.setAttribute("aria-expanded", open);
      });
    }
  }
  new MutationObserver(mount).observe(document.documentElement, { childList: true, subtree: true });
  mount();
  // On a busy machine the request that opens the page may have been given up before its answers were listened to.
  for (const delay of [15000, 45000]) {
    setTimeout(() => {
      const line = document.querySelector("#vitreous-status");
      if (!state.view && line && line.innerText.trim() === "Ready.") send("open", { example: 0 });
    }, delay);
  }
  return { receive, request, state, settings };
})();
