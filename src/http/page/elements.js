// Finds and makes elements, and writes numbers.

const $ = id => document.getElementById(id);

/** Creates an element. Children are nodes or strings. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function button(text, className, action) {
  const element = make("button", className, text);
  element.type = "button";
  element.onclick = action;
  return element;
}

const bytes = count => count >= 1e9 ? (count / 1e9).toFixed(1) + " GB"
  : count >= 1e6 ? (count / 1e6).toFixed(1) + " MB"
  : Math.ceil(count / 1e3) + " kB";
const number = count => Number(count).toLocaleString("en");
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

const isNarrow = () => matchMedia("(max-width: 999px)").matches;
const isSubmitKey = event => event.key === "Enter" && !event.shiftKey && !event.isComposing;
