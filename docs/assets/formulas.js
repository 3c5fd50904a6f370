// Typeset the formulas of a page with KaTeX, which is beside this file: nothing is loaded from other servers.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".latex")) {
    window.katex.render(element.textContent, element, { displayMode: true, throwOnError: false, strict: "ignore" });
  }
});
