// Asks the model for answers. A Generation is an answer in progress.

function chatRequest(messages) {
  const body = {stream: true, stream_options: {include_usage: true}, return_progress: true};
  if (chosenModel()) body.model = chosenModel();
  for (const name of ["temperature", "top_p", "top_k", "seed", "max_tokens", "thinking_budget"]) {
    if (settings[name] !== undefined) body[name] = Number(settings[name]);
  }
  const tools = parseTools(settings.tools);
  if (tools?.length) body.tools = tools;
  if (settings.reasoning) body.chat_template_kwargs = {enable_thinking: settings.reasoning === "on"};
  body.messages = [...settings.system ? [{role: "system", content: settings.system}] : [], ...apiMessages(messages)];
  return body;
}

/** Milliseconds between two drawings of an answer. */
const DRAW_INTERVAL = 100;
/** Drawing takes at most one part in this many of the time. */
const DRAW_SHARE = 12;
/** A page that is killed loses at most the text of this time. */
const SAVE_INTERVAL = 400;
const sleep = milliseconds => new Promise(done => setTimeout(done, milliseconds));

/** True while the browser leaves or reloads the page. It may break the streams before it closes the page. */
let isLeaving = false;
addEventListener("beforeunload", () => {
  isLeaving = true;
  // The user may stay.
  setTimeout(() => { isLeaving = false; }, 2000);
});

/** One answer: reads the stream into `message` and draws it while its conversation is shown. */
class Generation {
  constructor(owner, message) {
    Object.assign(this, {conversation: owner, message, controller: new AbortController(), progress: null, usage: null});
    this.start = performance.now();
    this.firstToken = this.nextDraw = this.nextSave = 0;
    this.isLoading = models.some(model => model.id === chosenModel() && !model.loaded);
    running.set(owner.id, this);
  }

  stop() {
    this.controller.abort();
  }

  async run() {
    const {message, conversation: owner} = this;
    // Kept if the page is closed before the end.
    message.note = "interrupted";
    updateSendButton();
    try {
      const body = JSON.stringify(chatRequest(owner.messages.slice(0, -1)));
      const response = await request("v1/chat/completions", {method: "POST", body, signal: this.controller.signal});
      let isComplete = false;
      for await (const list of eventLists(response)) {
        for (const event of list) if (event === DONE) isComplete = true; else this.take(event);
        await this.schedule();
      }
      if (!isComplete) throw new Error(BROKEN);
      message.note = this.summary();
    } catch (error) {
      if (error.name === "AbortError") message.note = "stopped";
      else if (!isLeaving) { message.error = error.message; message.note = ""; }
    }
    this.end();
  }

  take(chunk) {
    const {message} = this;
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.prompt_progress) this.progress = chunk.prompt_progress;
    this.usage = chunk.usage || this.usage;
    this.timings = chunk.timings || this.timings;
    const choice = chunk.choices?.[0], delta = choice?.delta || {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) this.firstToken ||= performance.now();
    if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content || "") + delta.reasoning_content;
    if ((delta.content || delta.tool_calls) && message.reasoning_content) {
      message.reasoning_seconds ??= Math.round((performance.now() - this.firstToken) / 1000);
    }
    if (delta.content) message.content += delta.content;
    for (const piece of delta.tool_calls || []) {
      const calls = message.tool_calls ||= [];
      const call = calls[piece.index] ||= {id: piece.id, type: "function", function: {name: piece.function.name, arguments: ""}};
      call.function.arguments += piece.function.arguments || "";
    }
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
  }

  /** Draws soon, and saves now and then. After the first token it waits until the next drawing is due: text that has gathered
   *  is read at once, and reading each token by itself costs more than drawing it. */
  async schedule() {
    if (running.get(this.conversation.id) !== this) return;
    const now = performance.now();
    if (now > this.nextSave) {
      if (this.nextSave) save(this.conversation, this.message);
      this.nextSave = now + SAVE_INTERVAL;
    }
    if (this.isScheduled || document.hidden || conversation.id !== this.conversation.id) return;
    this.isScheduled = true;
    if (this.firstToken && this.nextDraw > now) await sleep(this.nextDraw - now);
    setTimeout(() => this.draw());
  }

  /** Not in an animation frame: the scroll event of followEnd() would need a second one. */
  draw() {
    this.isScheduled = false;
    if (!this.view || conversation.id !== this.conversation.id || !running.has(this.conversation.id)) return;
    const start = performance.now();
    this.view.draw(this);
    followEnd();
    const end = performance.now();
    this.nextDraw = Math.max(start + DRAW_INTERVAL, end + DRAW_SHARE * (end - start));
  }

  summary() {
    const {usage, timings, start, firstToken} = this, tokens = usage?.completion_tokens || 0;
    const cached = usage?.prompt_tokens_details?.cached_tokens, parts = [plural(tokens, "token")];
    if (tokens > 1 && timings) parts.push(`${(1000 * (tokens - 1) / timings.predicted_ms).toFixed(1)} tokens per second`);
    if (firstToken) parts.push(`first token after ${((firstToken - start) / 1000).toFixed(2)} s`);
    if (usage) parts.push(`prompt of ${plural(usage.prompt_tokens, "token")}${cached ? `, ${number(cached)} of them cached` : ""}`);
    if (this.finishReason === "length") parts.push("cut off at the maximum of tokens");
    return parts.join(" · ");
  }

  end() {
    const {conversation: owner, message} = this;
    if (message.tool_calls) message.tool_calls = message.tool_calls.filter(Boolean);
    const isCurrent = running.get(owner.id) === this;
    if (isCurrent) running.delete(owner.id);
    save(owner, message);
    // A newer answer runs in its place.
    if (!isCurrent) return;
    updateSendButton();
    if (conversation.id !== owner.id) return;
    this.view?.draw(null);
    followEnd();
    announce(message.error || (message.note === "stopped" ? "Answer stopped" : "Answer complete"));
  }
}

/** True while the messages scroll along with a growing answer: until the user scrolls up. */
let isFollowing = true;
$("log").onscroll = () => { const log = $("log"); isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < 40; };

function followEnd() {
  if (isFollowing) $("log").scrollTop = 1e9;
}

/** Adds a message of the user after the message `parent`, unless it is null, and asks the model for an answer. */
function ask(userMessage, parent = conversation.messages.at(-1)?.id ?? null) {
  running.get(conversation.id)?.stop();
  const asked = userMessage && conversation.add(userMessage, parent);
  const answer = conversation.add({role: "assistant", content: ""}, asked?.id ?? parent);
  const words = asked?.content || asked?.files?.[0]?.name || asked?.images?.[0]?.name || "Conversation";
  conversation.title ||= words.split("\n")[0].slice(0, 60);
  startAnswer(answer, asked ? [asked] : []);
}

/** Asks for the last shown message, an empty answer. */
function startAnswer(answer, newMessages = []) {
  rememberCurrent();
  const generation = new Generation(conversation, answer);
  notify();
  redraw();
  save(conversation, ...newMessages, answer);
  if (keptTitle(conversation.id).deleted) setTitle(conversation.id, {deleted: 0});
  announce("Waiting for the answer");
  generation.run();
}

/** Asks for another version of an answer. A failed one without any text is asked for again in its place. */
function regenerate(message) {
  if (!settingsAreValid()) return;
  const isEmpty = !message.content && !message.reasoning_content && !message.tool_calls;
  if (!isEmpty || message !== conversation.messages.at(-1)) return ask(null, message.parent);
  running.get(conversation.id)?.stop();
  delete message.error;
  startAnswer(message);
}

function updateSendButton() {
  $("send").textContent = running.has(conversation.id) ? "Stop" : "Send";
}
