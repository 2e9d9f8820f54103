"use strict";
// Live parts, keys, and the theme. Every page works without it.

const body = document.body;
const root = body.dataset.root;
const note = document.getElementById("stream");
let stream = null;

function say(text) {
  if (note && note.textContent !== text) note.textContent = text;
}

function date(text) {
  const at = document.getElementById("as-of");
  if (at) at.textContent = text;
}

// Replace each live part that differs, except one that a person is typing in or has text selected in.
function show(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const next = fresh.getElementById(part.id);
    if (!next || next.innerHTML === part.innerHTML || isInUse(part)) continue;
    const open = [...part.querySelectorAll("details")].map((one) => one.open);
    part.replaceChildren(...next.childNodes);
    [...part.querySelectorAll("details")].forEach((one, at) => { one.open = open[at] ?? one.open; });
  }
}

function isInUse(part) {
  const selection = document.getSelection();
  const selected = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
  return selected || part.contains(document.activeElement);
}

function open_stream() {
  if (stream || !("stream" in body.dataset) || document.hidden) return;
  const path = encodeURIComponent(body.dataset.here);
  stream = new EventSource(`${root}/live?path=${path}`);
  stream.addEventListener("page", (event) => { say("live"); show(JSON.parse(event.data)); });
  stream.addEventListener("at", (event) => { say("live"); date(JSON.parse(event.data)); });
  stream.addEventListener("trouble", (event) => say(`stale: ${JSON.parse(event.data)}`));
  stream.addEventListener("ended", () => { close_stream("logged out"); });
  stream.addEventListener("error", () => {
    if (stream?.readyState !== EventSource.CLOSED) { say("connecting"); return; }
    close_stream("not live");
    setTimeout(open_stream, 30_000);
  });
}

function close_stream(why) {
  if (stream) stream.close();
  stream = null;
  say(why);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) close_stream("paused"); else open_stream();
});
addEventListener("pagehide", () => close_stream("paused"));
addEventListener("pageshow", open_stream);

function storage() {
  try { return localStorage; } catch { return null; }
}

function set_theme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

function turn_theme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  set_theme(dark ? "light" : "dark");
  storage()?.setItem("mqlayer-theme", dark ? "light" : "dark");
}

set_theme(storage()?.getItem("mqlayer-theme"));
document.getElementById("theme")?.addEventListener("click", turn_theme);

let going = false;
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = document.getElementById("keys");
  if (going) {
    going = false;
    const link = [...document.querySelectorAll("header nav a")]
      .find((one) => one.textContent.trim().toLowerCase().startsWith(event.key.toLowerCase()));
    if (link) link.click();
  } else if (event.key === "g") {
    going = true;
    setTimeout(() => { going = false; }, 1500);
  } else if (event.key === "/") {
    const field = document.querySelector("main input:not([type=hidden]), main select");
    if (field) { event.preventDefault(); field.focus(); }
  } else if (event.key === "t") {
    turn_theme();
  } else if (event.key === "?") {
    keys?.showModal();
  }
});
