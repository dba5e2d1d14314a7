"use strict";
// Draw every plot, and again in the other colours when the page becomes dark or light.
const items = JSON.parse(document.getElementById("items").textContent);
const views = Promise.all(items.map((item) => Bokeh.embed.embed_item(item)));
views.then(() => document.body.setAttribute("data-drawn", items.length));

function repaint() {
  views.then((managers) => {
    for (const manager of managers) for (const root of manager.roots) root.invalidate_render?.();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// A link to a folded answer opens it, and whatever it is in.
function reveal() {
  let place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!place) return;
  for (let around = place; around; around = around.parentElement) if (around.tagName === "DETAILS") around.open = true;
  place.scrollIntoView();
  (place.querySelector("summary, h2") ?? place).focus?.();
}
addEventListener("hashchange", reveal);
views.then(reveal);
for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => setTimeout(reveal));

// All modules of the tree, folded or open.
document.getElementById("fold")?.addEventListener("click", (event) => {
  const modules = [...document.querySelectorAll("details.module")];
  const open = !modules.some((module) => module.open);
  for (const module of modules) module.open = open;
  event.target.textContent = open ? "Fold all modules" : "Open all modules";
});

// On paper everything is open.
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details:not([open])")) folded.open = true;
});
