// The method picker: presets, search, and a list with paper, year, cost and badges.
"use strict";
window.vitreousPicker = (h) => (root, catalogue, chosen, change) => {
  const limit = catalogue.limit;
  const search = h("input", {
    type: "search", id: "v-method-search", placeholder: "Search, or write a recipe", title: "By name, author, year, family or cost; or a spelling such as decompx.skipplus.propagate",
    "aria-label": "Search methods", autocomplete: "off",
  });
  const chips = h("div", { class: "v-chips", role: "list", "aria-label": "Methods shown" });
  const presets = h("div", { class: "v-presets", role: "group", "aria-label": "Presets" });
  const list = h("div", { class: "v-methods", tabindex: "-1" });
  const note = h("p", { class: "v-note", role: "status" });

  const matches = (one, words) => words.every((word) => one.text.includes(word));
  for (const one of catalogue.methods) {
    one.text = [one.spelling, one.paper, one.year, one.family, one.summary, one.cost].join(" ").toLowerCase();
  }

  function toggle(spelling) {
    const now = chosen();
    if (!now.includes(spelling) && now.length >= limit) {
      note.textContent = `At most ${limit} methods are shown at once.`;
      return;
    }
    note.textContent = "";
    change(now.includes(spelling) ? now.filter((one) => one !== spelling) : [...now, spelling]);
  }

  function row(one) {
    const on = chosen().includes(one.spelling);
    const badges = [h("span", { class: `v-badge v-cost-${one.speed}`, title: "cost" }, one.cost)];
    if (one.signed) badges.push(h("span", { class: "v-badge", title: "It also shows what speaks against" }, "for and against"));
    if (!one.classSpecific) badges.push(h("span", { class: "v-badge v-warn" }, "same for every class"));
    return h("button", {
      class: "v-method", type: "button", "aria-pressed": on, title: one.summary, "data-method": one.spelling,
      onclick: () => toggle(one.spelling),
    },
    h("span", { class: "v-method-name" }, one.spelling, h("small", {}, `${one.author} ${one.year}`)),
    h("span", { class: "v-badges" }, badges));
  }

  function render() {
    const now = chosen(), words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    chips.replaceChildren(...now.map((spelling) => h("button", {
      class: "v-chip", type: "button", role: "listitem", "aria-label": `Remove ${spelling}`, onclick: () => toggle(spelling),
    }, spelling, h("span", { "aria-hidden": true }, "×"))));
    presets.replaceChildren(...catalogue.presets.map((preset) => h("button", {
      class: "v-preset", type: "button", title: preset.hint, "data-preset": preset.name,
      "aria-pressed": preset.methods.join() === now.join(), onclick: () => { note.textContent = ""; change(preset.methods); },
    }, preset.name)));
    const found = catalogue.methods.filter((one) => matches(one, words));
    const families = [...new Set(found.map((one) => one.family))];
    const parts = families.flatMap((family) => [
      h("h4", {}, family), ...found.filter((one) => one.family === family).map(row),
    ]);
    const spelled = search.value.trim();
    if (spelled && (!found.length || /[.:]/.test(spelled)) && !found.some((one) => one.spelling === spelled)) {
      parts.push(h("button", { class: "v-method v-recipe", type: "button", onclick: () => add(spelled) },
        h("span", { class: "v-method-name" }, `Use the recipe “${spelled}”`)));
    }
    list.replaceChildren(...parts);
  }

  function add(spelled) {
    search.value = "";
    if (!chosen().includes(spelled)) toggle(spelled);
    render();
  }

  search.addEventListener("input", render);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !search.value.trim()) return;
    event.preventDefault();
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = catalogue.methods.filter((one) => matches(one, words));
    add(found.length === 1 ? found[0].spelling : search.value.trim());
  });
  root.replaceChildren(presets, chips, search, list, note);
  render();
  return { render };
};
