// Requests to the server, the API key, and event streams.

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
    if (response.ok) return response;
    if (response.status === 401 && !options.isBackground && await askKey()) continue;
    const body = await response.json().catch(() => null);
    throw Object.assign(new Error(body?.error?.message || `The server answered with status ${response.status}.`),
      {status: response.status});
  }
}

/** The data of server-sent events, in lists of those that arrived together. */
async function* eventLists(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  for (let rest = ""; ;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, {stream: true})).split("\n");
    rest = lines.pop();
    yield lines.filter(line => line.startsWith("data: ")).map(line => line.slice(6));
  }
}
