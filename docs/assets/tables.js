// Long tables scroll in a box with a fixed header; a click on a header sorts by its column, a second click turns the order.
(function () {
  "use strict";
  var LONG = 12; // rows

  function value(row, column) {
    var cell = row.cells[column];
    var text = cell ? cell.textContent.trim() : "";
    var number = parseFloat(text.replace(/[,%×]/g, ""));
    return { text: text, number: /^[-+−]?[\d.]/.test(text) && !isNaN(number) ? number : null };
  }

  function compare(first, second, column, direction) {
    var a = value(first, column), b = value(second, column);
    var empty = function (one) { return one.text === "" || one.text === "-" || one.text === "–"; };
    if (empty(a) || empty(b)) { return empty(a) - empty(b); } // always last
    if (a.number !== null && b.number !== null) { return direction * (a.number - b.number); }
    return direction * a.text.localeCompare(b.text);
  }

  function sort(table, column, header) {
    var direction = header.getAttribute("aria-sort") === "descending" ? 1 : -1;
    var body = table.tBodies[0];
    var rows = Array.prototype.slice.call(body.rows);
    if (value(rows[0], column).number === null && !header.hasAttribute("aria-sort")) { direction = 1; }
    rows.sort(function (a, b) { return compare(a, b, column, direction); });
    rows.forEach(function (row) { body.appendChild(row); });
    Array.prototype.forEach.call(header.parentNode.cells, function (cell) { cell.removeAttribute("aria-sort"); });
    header.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  }

  function prepare(table) {
    if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < 4) { return; }
    table.classList.add("sortable");
    if (table.tBodies[0].rows.length >= LONG) {
      var box = document.createElement("div");
      box.className = "long-table";
      table.parentNode.insertBefore(box, table);
      box.appendChild(table);
    }
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (header, column) {
      header.tabIndex = 0;
      header.title = "Sort by this column";
      header.addEventListener("click", function () { sort(table, column, header); });
      header.addEventListener("keydown", function (event) {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(table, column, header); }
      });
    });
  }

  function start() {
    Array.prototype.forEach.call(document.querySelectorAll(".md-typeset table:not([class])"), prepare);
  }
  if (document.readyState === "loading") { document.addEventListener("DOMContentLoaded", start); } else { start(); }
})();
