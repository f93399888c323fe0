// The shown conversation, the list of all conversations, and the answers in progress.

let conversation = new Conversation();
/** Records of all conversations, also of deleted ones, newest first. */
let titles = [];
/** Answers in progress, by the id of their conversation. */
const running = new Map();
/** Tells other tabs which conversation has changed. */
const tabs = new BroadcastChannel("moestro");

const DAY = 24 * 60 * 60 * 1000;
/** Deleted conversations can be restored for this long. */
const KEPT_AFTER_DELETION = 30 * DAY;

const keptTitle = id => titles.find(kept => kept.id === id);
const titleOf = id => keptTitle(id)?.title || "Untitled";

/** The list is drawn after this event, because list.js uses names of this script. */
const titlesChanged = () => dispatchEvent(new Event("titles"));

/** Runs work that changes the database. Shows a failure and returns its sentence. Returns an empty text if it succeeds. */
async function keep(id, what, work) {
  try {
    await work();
    tabs.postMessage(id);
    if (!await database) notify("This browser does not keep conversations: they are gone when the page is closed.");
    return "";
  } catch (error) {
    const reason = error?.message || "the browser's storage failed";
    const problem = `Cannot keep ${what}: ${reason}. Delete old conversations for good to make room.`;
    notify(problem, true);
    return problem;
  }
}

/** Keeps messages of a conversation that are new or have changed. Returns what `keep` returns. */
async function save(owner, ...messages) {
  const updated = Date.now();
  owner.title = keptTitle(owner.id)?.title || owner.title;
  titles = [{...keptTitle(owner.id), id: owner.id, title: owner.title, updated, choices: owner.choices},
    ...titles.filter(other => other.id !== owner.id)];
  titlesChanged();
  for (const message of messages) unsaved.set(unsavedKey(owner.id, message.id), {owner, message});
  // A message that could not be kept before is tried again.
  const tried = [...unsaved].filter(([, entry]) => entry.owner.id === owner.id), changes = unsavedChanges.get(owner.id);
  const problem = await keep(owner.id, "this conversation", () => keepMessages(owner, tried.map(([, {message}]) => message), updated, changes));
  if (problem) return problem;
  forgetChanges(owner.id, changes);
  for (const [key, entry] of tried) {
    const isDone = unsaved.get(key) === entry && running.get(owner.id)?.message !== entry.message;
    if (isDone) { unsaved.delete(key); forgetRescued(key); }
  }
  return "";
}

/** Changes the record of a conversation here and in the database. A change that could not be kept is tried again with the
 *  next one, or with the next message. Returns what `keep` returns. */
async function setTitle(id, changes) {
  const all = {...unsavedChanges.get(id), ...changes};
  unsavedChanges.set(id, all);
  titles = titles.map(kept => kept.id === id ? {...kept, ...all} : kept);
  titlesChanged();
  const problem = await keep(id, "this change", () => changeTitle(id, kept => kept && {...kept, ...all}));
  // The database may not have the conversation: the change is kept with its messages then.
  if (!problem && !unsavedOwner(id)) forgetChanges(id, all);
  return problem;
}

/** The conversation with this id if the database may not have all of its messages. */
const unsavedOwner = id => [...unsaved.values()].find(({owner}) => owner.id === id)?.owner;

/** Changes of a record are in the database. Later ones may not be. */
function forgetChanges(id, changes) {
  if (!changes || unsavedChanges.get(id) !== changes) return;
  unsavedChanges.delete(id);
  forgetRescued(id);
}

async function readTitles() {
  const kept = await inDatabase("readonly", titleStore => titleStore.getAll());
  if (kept) titles = kept.map(title => ({...title, ...unsavedChanges.get(title.id)})).sort((a, b) => b.updated - a.updated);
  titlesChanged();
}

/** Opens a conversation, and shows the path to a message of it. */
async function openConversation(id, messageId) {
  const nodes = await readNodes(id) || [];
  const opened = running.get(id)?.conversation || unsavedOwner(id) || new Conversation(keptTitle(id), nodes);
  opened.merge(nodes);
  if (!opened.messages.length) return;
  if (opened.nodes.has(messageId)) opened.choose(opened.nodes.get(messageId));
  showConversation(opened);
}

function showConversation(shown) {
  conversation = shown;
  rememberCurrent();
  notify();
  redraw();
  titlesChanged();
}

/** Draws the shown conversation again, or only `changed` messages. It is an event, because turns.js uses names of this script. */
function redraw(changed = null) {
  dispatchEvent(new CustomEvent("redraw", {detail: changed}));
}

/** Takes what another tab has written. */
async function takeFromOtherTabs() {
  if (document.hidden) return;
  await readTitles();
  const shown = conversation, kept = keptTitle(shown.id);
  if (!kept) return;
  shown.title = kept.title;
  const changed = shown.merge(await readNodes(shown.id) || []);
  if (changed.length && conversation === shown) redraw(changed);
}

tabs.onmessage = () => takeFromOtherTabs().catch(() => {});
document.addEventListener("visibilitychange", () => takeFromOtherTabs().catch(() => {}));

/** Remembers the shown conversation for a reload of this tab. */
function rememberCurrent() {
  try { sessionStorage.setItem("moestro.current", conversation.id); } catch { /* A reload shows a new chat. */ }
}

function startNewChat() {
  showConversation(new Conversation());
  if (isNarrow()) setPanel("list", false);
  $("say").focus();
}

/** Shows another version of a message: the one before it (-1) or after it (1). */
function showVersion(message, step) {
  const versions = conversation.versions(message), other = versions[versions.indexOf(message) + step];
  if (!other) return;
  conversation.choose(other);
  redraw();
  if (keptTitle(conversation.id)) setTitle(conversation.id, {choices: {...conversation.choices}});
  dispatchEvent(new CustomEvent("version", {detail: {message: other, step}}));
}

async function renameConversation(kept) {
  const title = await askUser({title: "Rename conversation", label: "Name", value: kept.title, action: "Rename"});
  if (!title?.trim()) return;
  const shown = running.get(kept.id)?.conversation || (conversation.id === kept.id ? conversation : null);
  if (shown) shown.title = title.trim();
  await setTitle(kept.id, {title: title.trim()});
}

/** Moves a conversation to the deleted ones. */
async function deleteConversation(kept) {
  running.get(kept.id)?.stop();
  if (conversation.id === kept.id) startNewChat();
  if (await setTitle(kept.id, {deleted: Date.now()})) return;
  notify(`“${titleOf(kept.id)}” is deleted.`, false, button("Undo", "", () => { notify(); restoreConversation(kept.id); }));
}

async function restoreConversation(id) {
  if (!await setTitle(id, {deleted: 0})) await openConversation(id);
}

async function deleteForGood(ids) {
  for (const id of ids) {
    const problem = await keep(id, "this change", () => inDatabase("readwrite", (titleStore, nodeStore) => {
      titleStore.delete(id);
      return nodeStore.delete(nodesOf(id));
    }));
    if (problem) continue;
    titles = titles.filter(other => other.id !== id);
    forgetUnsaved(id);
  }
  titlesChanged();
}

async function askToDeleteForGood() {
  const deleted = titles.filter(kept => kept.deleted), text = "This cannot be undone.";
  if (await askUser({title: `Delete ${plural(deleted.length, "conversation")} for good?`, text, action: "Delete"})) {
    await deleteForGood(deleted.map(kept => kept.id));
  }
}

/** Deletes conversations for good that were deleted long ago. */
function emptyBin() {
  return deleteForGood(titles.filter(kept => kept.deleted && Date.now() - kept.deleted > KEPT_AFTER_DELETION).map(kept => kept.id));
}
