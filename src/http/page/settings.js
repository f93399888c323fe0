// The settings, their dialog, and their place in localStorage.

const SETTINGS_KEY = "moestro.settings";
let settings = readSettings();

function readSettings() {
  try { return JSON.parse(localStorage.getItem(SETTINGS_KEY)) || {}; } catch { return {}; }
}

function changeSettings(changes) {
  Object.assign(settings, changes);
  for (const name of Object.keys(settings)) if (settings[name] === "") delete settings[name];
  try {
    localStorage.setItem(SETTINGS_KEY, JSON.stringify(settings));
  } catch { notify("This browser does not keep the settings.", true); }
  document.documentElement.style.colorScheme = settings.theme || "";
}

/** Returns the tools of the settings. Throws a sentence that says what is wrong: the server refuses the same. */
function parseTools(text) {
  if (!text?.trim()) return undefined;
  let tools;
  try { tools = JSON.parse(text); } catch (error) { throw new Error(`The tools are not valid JSON: ${error.message}.`); }
  if (!Array.isArray(tools)) throw new Error("The tools must be a JSON list: [ ... ].");
  tools.forEach((tool, index) => {
    const problem = toolProblem(tool);
    if (problem) throw new Error(`Tool ${index + 1} ${problem}`);
  });
  return tools;
}

function toolProblem(tool) {
  const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);
  if (!isObject(tool) || tool.type !== "function" || !isObject(tool.function)) return "needs \"type\": \"function\" and a \"function\".";
  const {name, parameters} = tool.function;
  if (typeof name !== "string" || !/^[A-Za-z0-9._-]{1,128}$/.test(name)) {
    return "needs a \"name\" of 1 to 128 letters, digits, dots, dashes or underscores.";
  }
  return parameters !== undefined && parameters !== null && !isObject(parameters) ? "needs a JSON schema, an object, as \"parameters\"." : "";
}

function checkTools() {
  let problem = "";
  try { parseTools(settings.tools); } catch (error) { problem = error.message; }
  $("tools-problem").textContent = problem;
  $("settings").querySelector("[name=tools]").ariaInvalid = problem ? "true" : null;
  return problem;
}

function fillSettings() {
  for (const field of $("settings").querySelectorAll("[name]")) field.value = settings[field.name] ?? "";
  checkTools();
}

/** True if all settings can be sent. If not, opens the settings at the first wrong field. */
function settingsAreValid() {
  const fields = [...$("settings").querySelectorAll("[name]")], problem = checkTools();
  const wrong = fields.find(field => !field.checkValidity()) || (problem && fields.find(field => field.name === "tools"));
  if (!wrong) return true;
  if (!$("settings").open) $("settings").showModal();
  wrong.focus();
  wrong.reportValidity();
  return false;
}

$("settings").oninput = event => { changeSettings({[event.target.name]: event.target.value}); checkTools(); };
$("show-settings").onclick = () => { keepReset(null); fillSettings(); $("settings").showModal(); };
/** The browser checks numbers itself. */
$("settings").querySelector("form").onsubmit = event => {
  if (!checkTools()) return;
  event.preventDefault();
  $("settings").querySelector("[name=tools]").focus();
};

/** The settings before they were reset. */
let beforeReset = null;
function keepReset(kept) {
  beforeReset = kept;
  $("reset").textContent = kept ? "Undo reset" : "Reset all";
}
$("reset").onclick = () => {
  const other = beforeReset || {};
  keepReset(beforeReset ? null : settings);
  settings = other;
  changeSettings({});
  fillSettings();
};
