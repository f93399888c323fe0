// The list of conversations, the search in it, and the deleted conversations.

/** Texts of all messages, in lower case, for the search: {conversation, id, text}. */
let texts = [], textsTime = -Infinity;
const TEXTS_MAX_AGE = 5000;
/** Conversations that the search has found, with a message and the words around the match. Null without a search. */
let found = null;

/** Everything that is shown of a message. */
const searchedText = message =>
  [message.content, message.reasoning_content, ...(message.files || []).flatMap(file => [file.name, file.text])].join("\n");

async function readTexts() {
  if (performance.now() - textsTime < TEXTS_MAX_AGE) return;
  const read = [];
  await inDatabase("readonly", (_, nodeStore) => {
    const request = nodeStore.openCursor();
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) return;
      read.push({conversation: cursor.value.conversation, id: cursor.value.id, text: searchedText(cursor.value)});
      cursor.continue();
    };
    return null;
  });
  texts = read;
  textsTime = performance.now();
}

/** The words around a match. */
function excerpt(text, at) {
  const from = Math.max(0, at - 30);
  return (from ? "…" : "") + text.slice(from, at + 60).replace(/\s+/g, " ").trim() + "…";
}

async function search() {
  const query = $("search").value.trim().toLowerCase();
  if (query) await readTexts().catch(() => {});
  if (query !== $("search").value.trim().toLowerCase()) return;
  found = query ? new Map() : null;
  for (const {id, title} of found ? titles : []) if (title.toLowerCase().includes(query)) found.set(id, {});
  for (const {conversation: id, id: message, text} of found ? texts : []) {
    const at = text.toLowerCase().indexOf(query);
    if (at >= 0) found.set(id, {message, excerpt: excerpt(text, at)});
  }
  drawTitles();
  if (found) announce(plural($("titles").children.length, "conversation") + " found");
}

/** Draws the lists. */
function drawTitles() {
  const kept = titles.filter(({id, deleted}) => !deleted && (!found || found.has(id))), deleted = titles.filter(title => title.deleted);
  drawItems($("titles"), kept, drawTitle);
  $("no-titles").textContent = found && !kept.length ? "Nothing found." : "Conversations are kept in this browser only.";
  $("deleted").hidden = !deleted.length;
  $("deleted-count").textContent = `Deleted (${deleted.length})`;
  drawItems($("deleted-titles"), deleted, drawDeletedTitle);
  $("save-all").hidden = !titles.length;
}

/** Fills a list. An item whose place and text stay the same is not replaced, because it may have the focus or a click. */
function drawItems(list, records, draw) {
  const drawn = new Map([...list.children].map(item => [item.dataset.id, item]));
  records.forEach((kept, at) => {
    const item = drawn.get(kept.id) || make("li");
    drawn.delete(kept.id);
    draw(item, kept);
    if (list.children[at] !== item) list.insertBefore(item, list.children[at]);
  });
  drawn.forEach(item => item.remove());
}

function drawTitle(item, {id, title}) {
  const isShown = id === conversation.id, match = found?.get(id), text = JSON.stringify([title, isShown, match]);
  if (item.dataset.text === text) return;
  Object.assign(item.dataset, {id, text});
  item.ariaCurrent = isShown ? "true" : null;
  const open = button(title || "Untitled", "open-chat", () => openFromList(id, match?.message));
  open.title = title;
  item.replaceChildren(open, ...match?.excerpt ? [make("p", "soft", match.excerpt)] : []);
  if (!isShown) return;
  item.append(make("div", "actions",
    button("Rename", "plain", () => renameConversation(keptTitle(id))),
    button("Delete", "plain", () => deleteConversation(keptTitle(id))),
    button("Save as Markdown", "plain", () => exportAsMarkdown(keptTitle(id))),
    button("Save as JSON", "plain", () => exportAsJson([keptTitle(id)]))));
}

function drawDeletedTitle(item, {id, title}) {
  if (item.dataset.id === id) return;
  item.dataset.id = id;
  item.append(make("span", "", title || "Untitled"), " ", button("Restore", "plain", () => restoreConversation(id)));
}

async function openFromList(id, messageId) {
  if (isNarrow()) setPanel("list", false);
  await openConversation(id, messageId);
  if (messageId) dispatchEvent(new CustomEvent("find", {detail: messageId}));
}

$("search").oninput = search;
$("search").onkeydown = event => {
  if (event.key !== "Escape" || !$("search").value) return;
  event.stopPropagation();
  $("search").value = "";
  search();
};
$("delete-for-good").onclick = askToDeleteForGood;
$("save-all").onclick = () => exportAsJson(titles.filter(kept => !kept.deleted));
$("import").onclick = () => $("import-files").click();
$("import-files").onchange = () => { importFiles([...$("import-files").files]); $("import-files").value = ""; };
addEventListener("titles", drawTitles);
