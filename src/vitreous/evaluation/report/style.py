"""What the page adds to the common style: wide tables, lines and shapes of charts, rows of small pictures."""

from __future__ import annotations

# Told apart by people who do not see all colours, on white and on black.
LINES = 8

STYLE = """
:root { --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0478b; --c4: #8a6d00; --c5: #2d95c9; --c6: #7a4fd0;
  --c7: #6e6e6e; }
@media (prefers-color-scheme: dark) { :root { --c0: #4aa8e0; --c1: #ff8a3c; --c2: #2fd0a0; --c3: #ee86c4; --c4: #e0c040;
  --c5: #8cd3f7; --c6: #b497ff; --c7: #b5b5b5; } }
body { padding: 1.2rem clamp(0.8rem, 3vw, 2.5rem) 4rem; max-width: 84rem; }
h2 { font-size: 1.35rem; margin: 2.6rem 0 0.4rem; padding-top: 1rem; border-top: 2px solid var(--line); }
p { max-width: 70ch; }
.faint, figcaption, .interval { color: var(--faint); font-size: 0.86rem; }
table { font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; min-width: 6.5rem; font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
td:first-child, code { font-family: ui-monospace, monospace; font-size: 0.86rem; }
table.published td, table.published th { text-align: left; color: var(--faint); }
td .interval { display: block; }
td .mean { font-weight: 400; } td.best .mean { font-weight: 700; }
td.best .mean::before { content: "★ "; color: var(--c4); }
.rank { color: var(--faint); font-size: 0.8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem; font-size: 0.92rem; margin: 0.6rem 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); gap: 1rem; }
.charts.wide { grid-template-columns: minmax(0, 38rem); }
figure { padding: 0.8rem; border-radius: 0.6rem; }
figcaption { margin-bottom: 0.3rem; font-weight: 600; color: var(--ink); }
svg { width: 100%; } svg text { fill: var(--faint); font: 11px system-ui, sans-serif; }
.gridline { stroke: var(--line); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.line.other { stroke: var(--faint); stroke-width: 1; opacity: 0.3; }
.shape { stroke-width: 2.2; fill-opacity: 0.06; }
.c0 { stroke: var(--c0); fill: var(--c0); } .c1 { stroke: var(--c1); fill: var(--c1); }
.c2 { stroke: var(--c2); fill: var(--c2); } .c3 { stroke: var(--c3); fill: var(--c3); }
.c4 { stroke: var(--c4); fill: var(--c4); } .c5 { stroke: var(--c5); fill: var(--c5); }
.c6 { stroke: var(--c6); fill: var(--c6); } .c7 { stroke: var(--c7); fill: var(--c7); }
.line.c0, .line.c1, .line.c2, .line.c3, .line.c4, .line.c5, .line.c6, .line.c7 { fill: none; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 0.5rem 0; padding: 0; }
.legend li { display: flex; align-items: center; gap: 0.45rem; font-size: 0.86rem; }
.legend svg { width: 1.6rem; flex: none; }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
.strip { display: flex; flex-wrap: wrap; gap: 0.5rem; }
.strip div { width: 132px; font-size: 0.75rem; color: var(--faint);
  overflow-wrap: anywhere; line-height: 1.25; } .strip img { width: 132px; border-radius: 0.3rem; display: block; }
.texts .strip div { width: 100%; }
.images h4 { margin: 0.5rem 0 0.2rem; font-size: 0.82rem; color: var(--faint); font-weight: 600; }
.note { border-left: 4px solid var(--c1); padding: 0.3rem 0.8rem; background: var(--card); }
details { margin: 1rem 0; } summary { cursor: pointer; color: var(--faint); }
pre { overflow-x: auto; background: var(--card); padding: 0.8rem; border-radius: 0.6rem;
  font-size: 0.78rem; line-height: 1.4; }
"""
