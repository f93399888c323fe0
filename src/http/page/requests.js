// Requests to the server, the API key, and event streams.

/** When the server last answered anything, and whether it has stopped to answer. */
let lastAnswer = new Date(), isDown = false;
/** Milliseconds in which a server that runs answers a small request. */
const ANSWER_TIME = 2500;

function serverAnswered() {
  lastAnswer = new Date();
  if (isDown) showConnection(false);
}

/** Says for how long the server has not answered. */
function showConnection(nowDown) {
  isDown = nowDown;
  const time = lastAnswer.toLocaleTimeString("en-GB");
  document.body.classList.toggle("down", isDown);
  const advice = "Check that it is running. This page tries again every second.";
  $("down").textContent = isDown ? `No answer from the server since ${time}. ${advice}` : "";
  $("gauges-time").textContent = isDown ? `As of ${time}` : "";
  announce(isDown ? "The server does not answer" : "The server answers again");
}

/** Fetches something small that is read again and again. Failing means that the server does not answer. */
async function poll(path) {
  const since = lastAnswer;
  try {
    const response = await fetch(path, {signal: AbortSignal.timeout(ANSWER_TIME)});
    serverAnswered();
    return response;
  } catch (error) {
    // Parts of an answer may have arrived meanwhile.
    if (lastAnswer === since && !isDown) showConnection(true);
    throw error;
  }
}

let keyQuestion = null;

/** Asks for the API key, once for all requests that need it. Returns true if the user gives one. */
async function askKey() {
  const text = settings.key ? "The server does not accept the key. Check it and try again."
    : "The key is kept in this browser and sent to this server only.";
  keyQuestion ||= askUser({title: "This server needs an API key", text, label: "API key", type: "password", action: "Continue"});
  const key = await keyQuestion;
  keyQuestion = null;
  if (key !== null) changeSettings({key});
  return key !== null;
}

/** Sends a request. On 401 it asks for the key and tries again. Throws a sentence for the user. */
async function request(path, options = {}) {
  for (;;) {
    const headers = {
      ...options.body && {"content-type": "application/json"},
      ...settings.key && {authorization: "Bearer " + settings.key}
    };
    let response;
    try {
      response = await fetch(path, {...options, headers});
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer. Check that it is running.");
    }
    serverAnswered();
    if (response.ok) return response;
    if (response.status === 401 && !options.isBackground && await askKey()) continue;
    const body = await response.json().catch(() => null);
    throw Object.assign(new Error(body?.error?.message || `The server answered with status ${response.status}.`),
      {status: response.status});
  }
}

const DONE = "[DONE]";
const BROKEN = "The connection to the server broke before the answer was complete. The text so far is kept.";
const GARBLED = "The server sent something that is no part of an answer. The text so far is kept.";

/** The data of server-sent events, parsed, in lists of those that arrived together. Throws a sentence for the user. */
async function* eventLists(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  for (let rest = ""; ;) {
    const {value, done} = await reader.read()
      .catch(error => { throw error.name === "AbortError" ? error : new Error(BROKEN); });
    if (done) return;
    serverAnswered();
    const lines = (rest + decoder.decode(value, {stream: true})).split("\n");
    rest = lines.pop();
    yield lines.filter(line => line.startsWith("data: ")).map(line => parseEvent(line.slice(6)));
  }
}

function parseEvent(data) {
  if (data === DONE) return DONE;
  try { return JSON.parse(data); } catch { throw new Error(GARBLED); }
}
