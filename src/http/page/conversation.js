// A conversation is a tree of messages, of which one path is shown. Editing or regenerating a message adds a sibling to it, so
// that nothing is replaced.

let lastTime = 0;

/** Ids sort by the time at which they were made. */
function makeId() {
  lastTime = Math.max(Date.now(), lastTime + 1);
  return `${lastTime}-${Math.random().toString(36).slice(2)}`;
}

const isSameMessage = (one, other) =>
  JSON.stringify({...one, conversation: ""}) === JSON.stringify({...other, conversation: ""});

class Conversation {
  constructor({id = makeId(), title = "", choices = {}} = {}, nodes = []) {
    Object.assign(this, {id, title, choices: {...choices}, nodes: new Map(nodes.map(node => [node.id, node]))});
    this.follow();
  }

  /** The message before this one. A message whose parent is missing is a first message. */
  parentOf(message) {
    return this.nodes.has(message.parent) ? message.parent : "";
  }

  /** All versions of a message, oldest first. */
  versions(message) {
    const parent = this.parentOf(message);
    return [...this.nodes.values()].filter(other => this.parentOf(other) === parent).sort((a, b) => a.id < b.id ? -1 : 1);
  }

  /** Adds a message after `parent`, which is null for a first message, and shows it. */
  add(message, parent) {
    const added = {...message, id: makeId(), parent};
    this.nodes.set(added.id, added);
    this.choose(added);
    return added;
  }

  /** Shows the path through this message. */
  choose(message) {
    for (let at = message; at; at = this.nodes.get(at.parent)) this.choices[this.parentOf(at)] = at.id;
    this.follow();
  }

  /** Sets the shown messages: from the first one to a last one, along the chosen or else the newest versions. */
  follow() {
    const next = new Map();
    for (const node of this.nodes.values()) {
      const parent = this.parentOf(node), other = next.get(parent);
      const isChosen = this.choices[parent] === node.id;
      const isNewer = other && this.choices[parent] !== other.id && node.id > other.id;
      if (isChosen || !other || isNewer) next.set(parent, node);
    }
    this.messages = [];
    for (let at = next.get(""); at; at = next.get(at.id)) this.messages.push(at);
  }

  /** Takes messages of another tab, except those that this tab is writing. Returns those that are new or changed. */
  merge(nodes) {
    const changed = nodes.filter(node => {
      const own = this.nodes.get(node.id);
      if (own && (unsaved.has(unsavedKey(this.id, node.id)) || isSameMessage(own, node))) return false;
      for (const name of Object.keys(own || {})) if (!(name in node)) delete own[name];
      if (own) Object.assign(own, node); else this.nodes.set(node.id, node);
      return true;
    });
    this.follow();
    return changed.map(node => this.nodes.get(node.id));
  }
}
