"""How the page looks: colours are Gradio's own, so that light and dark both fit."""

from __future__ import annotations

CSS = """
.gradio-container { max-width: 86rem !important; margin: 0 auto !important; }
:root { --body-text-color-subdued: #565d6b !important; --block-info-text-color: #565d6b !important; }
.dark { --body-text-color-subdued: #aab2c0 !important; --block-info-text-color: #aab2c0 !important; }
.gradio-container h2 { font-size: 1.15rem !important; margin: .6rem 0 .4rem !important; }
.gradio-container h1 { font-size: 1.7rem; margin: 0; }
.vitreous-faint { color: var(--body-text-color-subdued); }
.vitreous-bar { align-items: center; }
.gradio-container a { color: var(--link-text-color); text-decoration: underline; }
#vitreous-title { margin: .25rem 0 0; }
#vitreous-title p { margin: .1rem 0 .5rem; color: var(--body-text-color-subdued); }
.vitreous-grid, .vitreous-curves .grid { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 15.5rem), 1fr)); margin: .4rem 0 1rem; }
.vitreous-curves .grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
.vitreous-grid figure, .vitreous-curves figure { margin: 0; padding: .5rem; border-radius: .5rem;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.vitreous-grid img { display: block; margin: 0 auto !important; border-radius: .25rem; }
.vitreous-grid figcaption, .vitreous-curves figcaption { margin-top: .4rem; font-size: .9rem; overflow-wrap: anywhere; }
.vitreous-grid figcaption span { color: var(--body-text-color-subdued); display: block; font-size: .8rem; }
.vitreous-curves svg { max-width: 100%; height: auto; display: block; margin: 0 auto; }
.entry { display: flex; gap: .45rem; align-items: center; } .entry svg { flex: none; margin: 0 !important; }
.vitreous-words { --vitreous-strength: 1; }
.dark .vitreous-words { --vitreous-strength: .62; }
.vitreous-words h3 { font-size: 1.05rem; margin: .8rem 0 .2rem; }
.vitreous-texts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.vitreous-texts figcaption { margin: 0 0 .4rem; font-weight: 600; }
.vitreous-texts p { line-height: 1.75; overflow-wrap: anywhere; }
.vitreous-strongest { display: flex; flex-wrap: wrap; gap: .2rem .9rem; list-style: none; margin: .6rem 0 0 !important;
  padding: .45rem 0 0 !important; border-top: 1px solid var(--border-color-primary); font-size: .85rem; }
.vitreous-strongest li { margin: 0 !important; overflow-wrap: anywhere; }
.vitreous-strongest li > span:first-child { padding: 0 .3em; border-radius: .2em; }
.vitreous-strongest .number { color: var(--body-text-color-subdued); font-variant-numeric: tabular-nums; }
.vitreous-maps h3, .vitreous-rows h3, .vitreous-curves h3 { font-size: 1.05rem; margin: .6rem 0 .3rem; }
.bars { display: grid; grid-template-columns: fit-content(50%) 1fr 3.6rem; gap: .3rem .6rem; align-items: center; }
.bar { height: .65rem; border-radius: .35rem; overflow: hidden; background: var(--background-fill-secondary);
  border: 1px solid var(--border-color-primary); }
.bar span { display: block; height: 100%; background: var(--color-accent); }
.bars .number { text-align: right; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 2rem; font-size: .85rem; color: var(--body-text-color-subdued); }
.legend div { display: flex; gap: .5rem; align-items: center; }
.legend img { width: 8rem; height: .7rem !important; border-radius: .2rem; margin: 0 !important; }
.vitreous-status { margin: 0; min-height: 1.5rem; display: flex; gap: .75rem; align-items: center; flex-wrap: wrap; }
.vitreous-status progress { flex: 1 1 8rem; accent-color: var(--color-accent); }
.vitreous-error { color: var(--error-text-color, #b91c1c); font-weight: 600; }
.dark .vitreous-error { color: #fca5a5; }
.vitreous-papers { font-size: .85rem; margin: .25rem 0; }
.vitreous-methods label { width: 100%; align-items: flex-start !important; }
.vitreous-methods label span { white-space: normal; }
.gradio-container :focus-visible { outline: 2px solid var(--color-accent); outline-offset: 2px; }
.label-wrap span { text-align: left; }
.vitreous-grid figcaption code { font-size: .85rem; padding: 0; }
#vitreous-photo img { cursor: crosshair; }
/* A phone shows one column: the photo, then the maps, then the long list of methods. */
@media (max-width: 640px) {
  .gradio-container, .gradio-container > main { padding: .25rem !important; }
  .vitreous-columns { flex-direction: column; flex-wrap: nowrap; align-items: stretch; }
  .vitreous-column { display: contents; }
  .vitreous-shown { order: 1; } .vitreous-choices { order: 2; } .vitreous-more { order: 3; }
  .vitreous-grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 9rem), 1fr)); gap: .4rem; }
  .vitreous-grid figure { padding: .3rem; }
  .vitreous-texts { grid-template-columns: 1fr; }
  .vitreous-texts figure { padding: .5rem; }
}
"""
