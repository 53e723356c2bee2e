"use strict";

// Knobs: the state that they make is looked up among those drawn ahead.

async function unpacked(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

for (const widget of document.querySelectorAll(".knobs")) {
  const find = (selector) => widget.querySelector(selector);
  const knobs = [...widget.querySelectorAll(".knob")];
  const pressed = (knob) => knob.querySelector("[aria-pressed=true]");
  const value = (knob) => Number((knob.querySelector("select") ?? pressed(knob)).value);
  const press = (button) => {
    pressed(button.parentElement).setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", "true");
  };
  let data; // a promise, from the first turn on: a lesson's states together take a moment to unpack

  async function redraw() {
    data ??= unpacked(find("script"));
    try {
      const { knobs: described, states, shown, pieces } = await data;
      const state = knobs.reduce((sum, knob, index) => sum * described[index].options.length + value(knob), 0);
      const [picture, words] = shown[states[state]].map((part) => part.map((piece) => pieces[piece]).join(""));
      find("figure").innerHTML = picture;
      find("[role=status]").textContent = find("figure title")?.textContent ?? words;
      find(".words").textContent = words;
      widget.querySelectorAll(".wide").forEach(fit);
    } catch (problem) {
      find("[role=status]").textContent = find(".words").textContent = `This browser cannot unpack the pictures: ${problem}`;
    }
  }

  widget.addEventListener("change", redraw);
  widget.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.className === "reset") {
      for (const knob of knobs) {
        const select = knob.querySelector("select");
        if (select) select.value = "0";
        else press(knob.querySelector("button"));
      }
    } else {
      press(button);
    }
    redraw();
  });
  find(".controls").hidden = false;
}

// Predictions: an answer unfolds what was asked about. It is kept where the browser lets a page from a folder keep anything.

const KEY = "rawgrad-answers";
let answers = {};

function recall() {
  try {
    answers = { ...JSON.parse(localStorage.getItem(KEY)) };
  } catch {
    // nothing is kept here: the answers last as long as the page
  }
}

function keep() {
  try {
    localStorage.setItem(KEY, JSON.stringify(answers));
  } catch {
    // as above
  }
}

function show(name) {
  const of = (kind) => document.querySelectorAll(`${kind}[data-name="${name}"]`);
  const answer = answers[name];
  for (const asked of of(".prediction")) {
    for (const button of asked.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.value === answer));
    }
    asked.querySelector("[role=status]").textContent = answer ? `You predict ${answer}. The outputs up to its outcome are unfolded.` : "";
  }
  for (const fold of of(".fold")) {
    fold.open = Boolean(answer);
    fold.firstElementChild.textContent = answer ? "Output" : `Output, folded until you answer ${name}`;
  }
  for (const outcome of of(".outcome")) {
    const says = JSON.parse(outcome.dataset.says);
    outcome.textContent = says[answer] ?? says[""];
  }
}

// The last cell: first and last answers, beside what happened.

function replay() {
  for (const box of document.querySelectorAll(".replay")) {
    const lines = Object.entries(JSON.parse(box.dataset.right)).map(([name, right]) => {
      const [first, last] = [answers[`${name} first`], answers[name]];
      if (!last) return `${name}  you: no answer`; // what is right stays folded until then
      const [said, changed] = first && first !== last ? [`${first}, then ${last}`, "  you changed your mind"] : [last, ""];
      return `${name}  you: ${said.padEnd(9)}  it is: ${right}${changed}`;
    });
    box.textContent = lines.join("\n");
  }
}

const names = [...document.querySelectorAll(".prediction")].map((asked) => asked.dataset.name);
for (const asked of document.querySelectorAll(".prediction")) {
  asked.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    recall(); // another lesson may stand open beside this one
    answers[asked.dataset.name] = button.value;
    answers[`${asked.dataset.name} first`] ??= button.value;
    keep();
    show(asked.dataset.name);
    replay();
  });
}
const forget = document.getElementById("forget");
forget.hidden = false;
forget.addEventListener("click", () => {
  answers = {};
  keep();
  names.forEach(show);
  replay();
  forget.textContent = "Forgotten";
});
recall();
names.forEach(show);
replay();

// A box that scrolls is a stop for the keyboard, and one that does not is none.

function fit(box) {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  else box.removeAttribute("tabindex");
}

const watch = new ResizeObserver((entries) => entries.forEach((entry) => fit(entry.target)));
document.querySelectorAll(".wide").forEach((box) => watch.observe(box));
