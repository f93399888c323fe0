// Shortcuts of the keyboard, and the list of them.

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);
const editLast = () => {
  const last = conversation.messages.findLast(message => message.role === "user");
  if (last) editTurn(turnOf(last), last);
};
const togglePanel = name => setPanel(name, !$(name).classList.contains("open"));
const regenerateLast = () => {
  const last = conversation.messages.at(-1);
  if (last?.role === "assistant") regenerate(last);
};

/** Keys with Ctrl, or with the command key of a Mac: [key, with Shift, what it does, action]. */
const SHORTCUTS = [
  ["k", false, "Search conversations", () => { setPanel("list", true); $("search").focus(); $("search").select(); }],
  ["o", true, "New chat", startNewChat],
  ["b", false, "Show or hide conversations", () => togglePanel("list")],
  [".", false, "Show or hide gauges", () => togglePanel("gauges")],
  [",", false, "Settings", () => $("show-settings").click()],
  ["Enter", true, "Regenerate the last answer", regenerateLast],
  ["Backspace", true, "Delete this conversation", () => { if (keptTitle(conversation.id)) deleteConversation(keptTitle(conversation.id)); }],
  ["/", false, "List of shortcuts", () => showShortcuts()],
];
/** Keys that work in one place: [keys, what they do]. */
const OTHER_KEYS = [
  [["Enter"], "Send"], [["Shift", "Enter"], "Break the line"], [["Escape"], "Stop the answer"],
  [["↑"], "Edit the last message, in the empty field"], [["←"], "Version before, at the arrows of a message"],
  [["→"], "Version after, at the arrows of a message"], [["?"], "List of shortcuts, outside of fields"],
];

function showShortcuts() {
  const rows = [
    ...SHORTCUTS.map(([key, hasShift, text]) =>
      [[isMac ? "⌘" : "Ctrl", ...hasShift ? ["Shift"] : [], key.length > 1 ? key : key.toUpperCase()], text]),
    ...OTHER_KEYS,
  ];
  $("shortcut-list").replaceChildren(...rows.flatMap(([keys, text]) =>
    [make("dt", "", text), make("dd", "", ...keys.flatMap((key, index) => [index ? " " : "", make("kbd", "", key)]))]));
  $("shortcuts").showModal();
}

/** True if the user writes: a key is then a letter. */
const isField = element => /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName);

document.addEventListener("keydown", event => {
  const isCommand = (isMac ? event.metaKey : event.ctrlKey) && !event.altKey;
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const found = isCommand && SHORTCUTS.find(([key, hasShift]) =>
    key.toLowerCase() === event.key.toLowerCase() && (hasShift === event.shiftKey || key === "/"));
  const step = {ArrowLeft: -1, ArrowRight: 1}[event.key], turn = event.target.closest?.(".versions") && event.target.closest(".turn");
  if (found) found[3]();
  else if (step && turn) showVersion(turn.message, step);
  else if (event.key === "?" && !isField(event.target)) showShortcuts();
  else if (event.key === "ArrowUp" && event.target === $("say") && !$("say").value) editLast();
  else if (event.key === "Escape" && !isField(event.target) && !event.target.closest?.(".panel")) running.get(conversation.id)?.stop();
  else return;
  event.preventDefault();
});
$("show-shortcuts").onclick = showShortcuts;
