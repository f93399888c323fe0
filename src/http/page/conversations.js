// The shown conversation, the list of all conversations, and the answers in progress. They are kept in IndexedDB: the store
// `titles` has {id, title, updated}, `messages` has {id, messages}. Without a database they live as long as the page.

const database = new Promise(resolve => {
  try {
    const request = indexedDB.open("moestro", 1);
    request.onupgradeneeded = () => ["titles", "messages"].forEach(name => request.result.createObjectStore(name, {keyPath: "id"}));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  } catch { resolve(null); }
});

/** Runs `work(titles, messages)` in one transaction and returns the result of the request that it returns. */
async function inDatabase(mode, work) {
  const db = await database;
  if (!db) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(["titles", "messages"], mode);
    const request = work(transaction.objectStore("titles"), transaction.objectStore("messages"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

let conversation = newConversation();
let titles = [];
/** Answers in progress, by the id of their conversation. */
const running = new Map();

function newConversation() {
  return {id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "", messages: []};
}

async function save(kept) {
  const {id, title, messages} = kept, updated = Date.now();
  titles = [{id, title, updated}, ...titles.filter(other => other.id !== id)];
  drawTitles();
  try {
    await inDatabase("readwrite", (titleStore, messageStore) => {
      titleStore.put({id, title, updated});
      return messageStore.put({id, messages});
    });
    if (!await database) notify("This browser does not keep conversations: they are gone when the page is closed.");
  } catch (error) {
    const reason = error?.message || "the browser's storage failed";
    notify(`Cannot keep this conversation: ${reason}. Delete old conversations to make room.`, true);
  }
}

async function readTitles() {
  const kept = await inDatabase("readonly", titleStore => titleStore.getAll());
  if (kept) titles = kept.sort((a, b) => b.updated - a.updated);
  drawTitles();
}

async function openConversation(id) {
  const title = titles.find(kept => kept.id === id)?.title || "";
  const messages = running.get(id)?.conversation.messages
    || (await inDatabase("readonly", (_, messageStore) => messageStore.get(id)))?.messages;
  if (messages) showConversation({id, title, messages});
}

function showConversation(shown) {
  conversation = running.get(shown.id)?.conversation || shown;
  rememberCurrent();
  notify();
  redraw();
  drawTitles();
}

/** Draws the shown conversation again. It is an event, because turns.js, which draws, uses names of this script. */
function redraw() {
  dispatchEvent(new Event("redraw"));
}

/** Remembers the shown conversation for a reload of this tab. */
function rememberCurrent() {
  try { sessionStorage.setItem("moestro.current", conversation.id); } catch { /* A reload shows a new chat. */ }
}

function startNewChat() {
  showConversation(newConversation());
  if (isNarrow()) setPanel("list", false);
  $("say").focus();
}

async function renameConversation(kept) {
  const title = await askUser({title: "Rename conversation", label: "Name", value: kept.title, action: "Rename"});
  if (!title?.trim()) return;
  kept.title = title.trim();
  const shown = running.get(kept.id)?.conversation || (conversation.id === kept.id ? conversation : null);
  if (shown) shown.title = kept.title;
  drawTitles();
  await inDatabase("readwrite", titleStore => titleStore.put(kept));
}

async function deleteConversation(kept) {
  const text = "The messages are deleted from this browser. This cannot be undone.";
  if (!await askUser({title: `Delete “${kept.title}”?`, text, action: "Delete"})) return;
  running.get(kept.id)?.stop();
  running.delete(kept.id);
  titles = titles.filter(other => other.id !== kept.id);
  await inDatabase("readwrite", (titleStore, messageStore) => {
    titleStore.delete(kept.id);
    return messageStore.delete(kept.id);
  });
  if (conversation.id === kept.id) startNewChat(); else drawTitles();
}

async function exportConversation(kept, asMarkdown) {
  if (conversation.id !== kept.id) await openConversation(kept.id);
  const name = kept.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";
  const messages = apiMessages(conversation.messages);
  if (!asMarkdown) return download(name + ".json", "application/json", JSON.stringify({title: kept.title, messages}, null, 2));
  const parts = messages.map(({role, content, tool_calls: calls}) => {
    const words = typeof content === "string" ? content : content.map(part => part.text || "(image)").join("\n\n");
    const called = (calls || []).map(call => fenced(`${call.function.name} ${call.function.arguments}`));
    return [`## ${{user: "You", assistant: "Answer", tool: "Tool result"}[role]}`, words, ...called].filter(Boolean).join("\n\n");
  });
  download(name + ".md", "text/markdown", `# ${kept.title}\n\n${parts.join("\n\n")}\n`);
}

/** Draws the list. An item whose place and text stay the same is not replaced, because it may have the focus or a click. */
function drawTitles() {
  $("no-titles").hidden = false;
  const list = $("titles"), drawn = new Map([...list.children].map(item => [item.dataset.id, item]));
  titles.forEach((kept, at) => {
    const item = drawn.get(kept.id) || make("li");
    drawn.delete(kept.id);
    drawTitle(item, kept);
    if (list.children[at] !== item) list.insertBefore(item, list.children[at]);
  });
  drawn.forEach(item => item.remove());
}

function drawTitle(item, {id, title}) {
  const isShown = id === conversation.id, text = JSON.stringify([title, isShown]);
  if (item.dataset.text === text) return;
  Object.assign(item.dataset, {id, text});
  item.ariaCurrent = isShown ? "true" : null;
  const kept = () => titles.find(kept => kept.id === id);
  const open = button(title || "Untitled", "open-chat", () => { openConversation(id); if (isNarrow()) setPanel("list", false); });
  open.title = title;
  item.replaceChildren(open);
  if (!isShown) return;
  item.append(make("div", "actions",
    button("Rename", "plain", () => renameConversation(kept())),
    button("Delete", "plain", () => deleteConversation(kept())),
    button("Save as Markdown", "plain", () => exportConversation(kept(), true)),
    button("Save as JSON", "plain", () => exportConversation(kept(), false))));
}
