// The browser's database. The store `titles` has {id, title, updated, choices, deleted} for each conversation, `nodes` has one
// record for each message: {conversation, id, parent, ...}. A tab writes only messages that it has made or changed, so that
// two tabs do not overwrite each other's. Without a database, conversations live as long as the page.

const database = new Promise(resolve => {
  try {
    const request = indexedDB.open("moestro", 2);
    request.onupgradeneeded = event => createStores(request.result, request.transaction, event.oldVersion);
    request.onblocked = () => notify("Close the other tabs with this page: an older version of it is open there.", true);
    request.onsuccess = () => {
      // A newer version of the page, in another tab, can change the stores.
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => resolve(null);
  } catch { resolve(null); }
});

function createStores(db, transaction, oldVersion) {
  const nodes = db.createObjectStore("nodes", {keyPath: ["conversation", "id"]});
  if (!oldVersion) { db.createObjectStore("titles", {keyPath: "id"}); return; }
  // Version 1 had a store `messages` of {id, messages}.
  transaction.objectStore("messages").openCursor().onsuccess = ({target: {result: cursor}}) => {
    if (!cursor) { db.deleteObjectStore("messages"); return; }
    for (const node of chainOf(cursor.value.messages)) nodes.put({...node, conversation: cursor.value.id});
    cursor.continue();
  };
}

/** Messages with an id and a parent each: every message follows the one before it. */
function chainOf(messages) {
  const idOf = index => "0-" + String(index).padStart(6, "0");
  return messages.map((message, index) => ({...message, id: idOf(index), parent: index ? idOf(index - 1) : null}));
}

/** Runs `work(titles, nodes)` in one transaction and returns the result of the request that it returns. */
async function inDatabase(mode, work) {
  const db = await database;
  if (!db) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(["titles", "nodes"], mode);
    const request = work(transaction.objectStore("titles"), transaction.objectStore("nodes"));
    transaction.oncomplete = () => resolve(request?.result);
    // It follows every error. The transaction has no `error` before it.
    transaction.onabort = () => reject(transaction.error);
  });
}

const nodesOf = id => IDBKeyRange.bound([id], [id, []]);
const readNodes = id => inDatabase("readonly", (_, nodeStore) => nodeStore.getAll(nodesOf(id)));

/** Changes the record of a conversation. `change` gets the record, which is undefined if there is none. */
function changeTitle(id, change) {
  return inDatabase("readwrite", (titleStore, nodeStore) => {
    const request = titleStore.get(id);
    request.onsuccess = () => {
      const changed = change(request.result, nodeStore);
      if (changed) titleStore.put(changed);
    };
    return request;
  });
}

/** Keeps these messages and changes of a conversation, and all of its messages if the database does not have it. */
function keepMessages(owner, messages, updated, changes) {
  return changeTitle(owner.id, (kept, nodeStore) => {
    for (const message of kept ? messages : owner.nodes.values()) nodeStore.put({...message, conversation: owner.id});
    const changed = {...kept, ...changes};
    return {title: owner.title, ...changed, id: owner.id, updated, choices: {...changed.choices, ...owner.choices}};
  });
}

/** Messages whose last change the database may not have, with their conversations. An import keeps the ids of messages, so
 *  that messages of two conversations can have the same id. */
const unsaved = new Map();
const unsavedKey = (conversationId, messageId) => `${conversationId}/${messageId}`;
/** Changes of the records of conversations that the database may not have, by the id of the conversation. */
const unsavedChanges = new Map();
const RESCUE = "moestro.unsaved.";

/** Keeps outside the database what it may not have. A page that is closed has no time for a transaction. */
function rescue() {
  const rescued = [...unsavedChanges].map(([id, changes]) => [id, {id, changes}]);
  for (const [key, {owner: {id, title, choices}, message}] of unsaved) {
    rescued.push([key, {id, title, choices, message, changes: unsavedChanges.get(id)}]);
  }
  for (const [key, record] of rescued) {
    try {
      localStorage.setItem(RESCUE + key, JSON.stringify(record));
    } catch { /* The storage is full: the database has what it has not refused, as it was half a second ago. */ }
  }
}

function forgetRescued(key) {
  try { localStorage.removeItem(RESCUE + key); } catch { /* Nothing can be kept there, either. */ }
}

/** Forgets what this page and closed ones have not saved of a conversation. */
function forgetUnsaved(id) {
  const isOfIt = key => key === id || key.startsWith(unsavedKey(id, ""));
  unsavedChanges.delete(id);
  for (const key of [...unsaved.keys()].filter(isOfIt)) unsaved.delete(key);
  for (const key of rescuedKeys().filter(isOfIt)) forgetRescued(key);
}

function rescuedKeys() {
  try {
    return Object.keys(localStorage).filter(key => key.startsWith(RESCUE)).map(key => key.slice(RESCUE.length));
  } catch { return []; }
}

/** Moves what closed pages have rescued to the database. */
async function recover() {
  if (!await database) return;
  for (const key of rescuedKeys()) {
    try {
      const {id, title, choices, message, changes} = JSON.parse(localStorage.getItem(RESCUE + key));
      const nodes = new Map([[message?.id, message]]);
      if (message) await keepMessages({id, title, choices, nodes}, [message], Date.now(), changes);
      else await changeTitle(id, kept => kept && {...kept, ...changes});
    } catch (error) {
      // The database may have room later. Other errors say that this page has not written it.
      if (error instanceof DOMException) continue;
    }
    forgetRescued(key);
  }
}
