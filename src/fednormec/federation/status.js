"use strict";
// Every two seconds: fetch the page again and put its content in the place of the old; say so if nobody answers.
const silent = document.getElementById("silent");
let since = new Date();

async function look() {
  try {
    const answer = await fetch("/", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(answer.status);
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (getSelection().isCollapsed) document.querySelector("main").replaceWith(found.querySelector("main"));
    document.title = found.title;
    since = new Date();
    silent.hidden = true;
  } catch {
    silent.textContent = `The server has not answered since ${since.toLocaleTimeString()}. What follows is old.`;
    silent.hidden = false;
  }
  setTimeout(look, 2000);
}

setTimeout(look, 2000);
