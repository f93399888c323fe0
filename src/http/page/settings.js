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

/** Returns the tools of the settings. Throws a sentence that says what is wrong. */
function parseTools(text) {
  if (!text?.trim()) return undefined;
  let tools;
  try { tools = JSON.parse(text); } catch (error) { throw new Error(`The tools are not valid JSON: ${error.message}.`); }
  if (!Array.isArray(tools)) throw new Error("The tools must be a JSON list: [ ... ].");
  if (!tools.every(tool => tool?.function?.name)) {
    throw new Error("Each tool needs \"type\": \"function\" and a \"function\" with a \"name\".");
  }
  return tools;
}

function checkTools() {
  let problem = "";
  try { parseTools(settings.tools); } catch (error) { problem = error.message; }
  $("tools-problem").textContent = problem;
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
$("show-settings").onclick = () => { fillSettings(); $("settings").showModal(); };
$("reset").onclick = () => { settings = {}; changeSettings({}); fillSettings(); };
