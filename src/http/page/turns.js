// Turns of the shown conversation: messages of the user, and answers with reasoning, tool calls and their results.

function drawConversation() {
  const {messages} = conversation, generation = running.get(conversation.id);
  // The running answer may be in a version that is not shown.
  if (generation) generation.view = null;
  $("turns").replaceChildren(...messages.length ? messages.map(drawTurn) : [drawWelcome()]);
  document.title = conversation.title ? conversation.title + " · Moestro" : "Moestro";
  isFollowing = true;
  followEnd();
  updateSendButton();
}

/** Draws the messages that another tab has changed. */
function drawChanged(changed) {
  const shown = [...$("turns").children].map(box => box.message), {messages} = conversation;
  const isSamePath = messages.length === shown.length && messages.every((message, index) => message === shown[index]);
  // A field that the user may be filling stays.
  if ($("turns").querySelector("textarea")) return;
  if (!isSamePath) return drawConversation();
  for (const box of [...$("turns").children]) {
    if (changed.some(message => isSibling(message, box.message))) box.replaceWith(drawTurn(box.message));
  }
  followEnd();
}

const isSibling = (message, other) => conversation.parentOf(message) === conversation.parentOf(other);
const turnOf = message => [...$("turns").children].find(box => box.message === message);

function drawTurn(message) {
  const box = message.role === "user" ? drawUserTurn(message) : drawAnswerTurn(message);
  box.message = message;
  return box;
}

function drawAnswerTurn(message) {
  const generation = running.get(conversation.id), isRunning = generation?.message === message;
  const view = new AnswerView(message);
  if (isRunning) generation.view = view;
  view.draw(isRunning ? generation : null);
  return view.box;
}

function turnBox(role, label) {
  const box = make("article", "turn " + role);
  box.setAttribute("aria-label", label);
  return box;
}

function drawUserTurn(message) {
  const box = turnBox("user", "You"), bubble = make("div", "bubble");
  if (message.files?.length || message.images?.length) bubble.append(drawAttached(message));
  if (message.content) bubble.append(make("div", "words", message.content));
  const copy = button("Copy", "plain", () => copyText(message.content, copy));
  box.append(bubble, make("div", "actions", ...drawVersions(message), copy, button("Edit", "plain", () => editTurn(box, message))));
  return box;
}

/** Buttons that show the version before and after this one, and its number. Nothing if there is one version. */
function drawVersions(message) {
  const versions = conversation.versions(message), at = versions.indexOf(message);
  if (versions.length < 2) return [];
  const arrow = (sign, label, step) => {
    const made = button(sign, "plain", () => showVersion(message, step));
    made.setAttribute("aria-label", label);
    made.title = label;
    made.dataset.step = step;
    made.disabled = !versions[at + step];
    return made;
  };
  const place = `${at + 1}/${versions.length}`;
  return [make("span", "versions", arrow("‹", "Previous version", -1), place, arrow("›", "Next version", 1)), " "];
}

addEventListener("version", ({detail: {message, step}}) => {
  const [back, forward] = turnOf(message).querySelectorAll("[data-step]");
  const isForward = step > 0 ? !forward.disabled : back.disabled;
  (isForward ? forward : back).focus();
  turnOf(message).scrollIntoView({block: "nearest"});
  const versions = conversation.versions(message);
  announce(`Version ${versions.indexOf(message) + 1} of ${versions.length}`);
});

function drawAttached({files = [], images = []}) {
  const drawnFiles = files.map(file => make("details", "",
    make("summary", "", `${file.name}, ${bytes(file.text.length)}`), make("pre", "", file.text)));
  return make("div", "attached", ...images.map(drawImage), ...drawnFiles);
}

function drawImage({name, url}) {
  const image = make("img");
  if (/^data:image\//.test(url)) image.src = url;
  image.alt = name;
  return make("span", "", image);
}

/** Replaces a message of the user by a form. Sending it makes a new version of the message. */
function editTurn(box, message) {
  const field = make("textarea", "", message.content);
  field.setAttribute("aria-label", "Edit message");
  field.value = message.content;
  const restore = () => box.replaceWith(drawTurn(message));
  const send = () => {
    if ((!field.value.trim() && !message.files?.length && !message.images?.length) || !settingsAreValid()) return;
    const {files, images} = message;
    ask({role: "user", content: field.value.trim(), ...files && {files}, ...images && {images}}, message.parent);
  };
  field.onkeydown = event => { if (event.key === "Escape") restore(); if (isSubmitKey(event)) { event.preventDefault(); send(); } };
  box.replaceChildren(make("div", "bubble editor", field, button("Send", "main", send), " ", button("Cancel", "", restore)));
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

/** An answer of the model: reasoning, text, tool calls, and what is known about how it was made. */
class AnswerView {
  constructor(message) {
    this.message = message;
    this.box = turnBox("assistant", "Answer");
    this.waiting = make("div", "soft");
    this.text = make("div", "text");
    this.cards = make("div");
    this.foot = make("div", "foot", ...drawVersions(message));
    this.box.append(this.waiting, this.text, this.cards, this.foot);
    this.markdown = new MarkdownView(this.text);
  }

  /** Draws the message. `generation` is null if the answer is complete. */
  draw(generation) {
    const {message} = this, isComplete = !generation;
    this.box.setAttribute("aria-busy", String(!isComplete));
    this.drawWaiting(generation);
    if (message.reasoning_content) this.drawReasoning(generation);
    if (message.content) this.markdown.show(message.content, isComplete);
    if (message.tool_calls) this.drawCalls(isComplete);
    if (isComplete) this.drawFoot();
  }

  drawWaiting(generation) {
    const isWaiting = generation && !generation.firstToken, {progress} = generation || {};
    this.waiting.hidden = !isWaiting;
    if (!isWaiting) return;
    if (!this.bar) {
      this.bar = make("progress");
      this.bar.setAttribute("aria-label", "Progress of the prompt");
      this.label = make("span");
      this.waiting.append(this.bar, " ", this.label);
    }
    if (progress?.total) { this.bar.max = progress.total; this.bar.value = progress.processed; }
    const computed = progress ? progress.processed - progress.cache : 0, rest = progress ? progress.total - progress.processed : 0;
    const seconds = computed > 0 ? Math.ceil(progress.time_ms / 1000 * rest / computed) : 0;
    const left = seconds > 1 ? `, ${seconds} s left` : "";
    this.label.textContent = progress ? `Reading the prompt: ${number(progress.processed)} of ${number(progress.total)} tokens${left}`
      : generation.isLoading ? "Loading the model. This can take minutes." : "Waiting for the first token";
  }

  drawReasoning(generation) {
    const {message} = this, isReasoning = generation && !message.content && !message.tool_calls;
    if (!this.reasoning) {
      const text = make("div", "text");
      this.reasoning = make("details", "reasoning", make("summary"), text);
      this.reasoning.open = Boolean(isReasoning && settings.opensReasoning);
      this.reasoningMarkdown = new MarkdownView(text);
      // A user who opens the reasoning of a running answer wants to see that of the next one.
      this.reasoning.querySelector("summary").onclick = () => {
        if (running.has(conversation.id)) changeSettings({opensReasoning: !this.reasoning.open});
      };
      this.reasoning.ontoggle = () => this.showReasoning();
      this.box.insertBefore(this.reasoning, this.text);
    }
    const seconds = isReasoning ? Math.round((performance.now() - generation.firstToken) / 1000) : message.reasoning_seconds;
    const summary = isReasoning ? `Reasoning, ${seconds} s` : seconds ? `Reasoned for ${seconds} s` : "Reasoning";
    if (this.reasoning.firstChild.textContent !== summary) this.reasoning.firstChild.textContent = summary;
    this.showReasoning(!isReasoning);
  }

  /** Hidden reasoning costs nothing: it is drawn once it is opened. */
  showReasoning(isComplete = this.message.content || !running.has(conversation.id)) {
    if (this.reasoning.open) this.reasoningMarkdown.show(this.message.reasoning_content, isComplete);
  }

  drawCalls(isComplete) {
    const {message} = this, results = message.results || {};
    message.tool_calls.filter(Boolean).forEach((call, index) => {
      if (!this.cards.children[index]) {
        const card = make("div", "card", "Tool call ", make("b", "", call.function.name), make("pre"));
        card.setAttribute("role", "group");
        card.setAttribute("aria-label", "Tool call " + call.function.name);
        this.cards.append(card);
      }
      const card = this.cards.children[index], shown = isComplete ? prettyJson(call.function.arguments) : call.function.arguments;
      if (card.querySelector("pre").textContent !== shown) card.querySelector("pre").textContent = shown;
      if (!isComplete || message.error || card.querySelector(".result")) return;
      card.append(results[call.id] === undefined ? this.resultField(call)
        : make("details", "result", make("summary", "", "Result"), make("pre", "", prettyJson(results[call.id]))));
    });
    const isOpen = isComplete && !message.error && message.tool_calls.some(call => results[call.id] === undefined);
    if (isOpen && !this.sendResults) {
      this.sendResults = button("Send results", "main last-only", () => this.submitResults());
      this.cards.after(this.sendResults);
    }
  }

  resultField(call) {
    const field = make("textarea");
    field.onkeydown = event => { if (isSubmitKey(event)) { event.preventDefault(); this.submitResults(); } };
    field.dataset.call = call.id;
    return make("label", "result soft last-only", `Result of ${call.function.name} `, field);
  }

  submitResults() {
    if (running.has(conversation.id) || !settingsAreValid()) return;
    this.message.results = Object.fromEntries(
      [...this.cards.querySelectorAll("textarea")].map(field => [field.dataset.call, field.value]));
    save(conversation, this.message);
    ask(null, this.message.id);
  }

  drawFoot() {
    const {message} = this, copy = button("Copy", "plain", () => copyText(message.content, copy));
    const again = button(message.error ? "Try again" : "Regenerate", "plain", () => regenerate(message));
    const parts = [...drawVersions(message), message.content ? copy : "", again, message.note || ""].filter(Boolean);
    this.foot.replaceChildren(...message.error ? [make("div", "error", message.error)] : [], ...parts.flatMap(part => [part, " "]));
  }
}

function prettyJson(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

addEventListener("redraw", ({detail}) => detail ? drawChanged(detail) : drawConversation());
addEventListener("find", ({detail}) => turnOf(conversation.nodes.get(detail))?.scrollIntoView({block: "start"}));
