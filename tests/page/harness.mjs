// A browser and a proxy. The proxy forwards requests to the server, or answers chat requests from a script.
import http from "node:http";
import path from "node:path";
import puppeteer from "puppeteer-core";

export const sleep = milliseconds => new Promise(done => setTimeout(done, milliseconds));

/** The longest wait. A busy machine may start a browser, load a page or answer slowly. */
const PATIENCE = 120000;
/** Whether a part of the machine is made slow, see run.sh, and by how many milliseconds. */
export const isSlow = part => (process.env.PAGE_SLOW || "").split(" ").includes(part);
const DELAY = 300;

/** Waits until `condition()` is true. The page's own conditions are for `page.until`. */
export async function eventually(condition, what) {
  for (const end = Date.now() + PATIENCE; !await condition(); await sleep(20)) if (Date.now() > end) throw new Error("never: " + what);
}

/** Runs in the page before its scripts. */
function slowDown(isDatabaseSlow, areMessagesSlow, delay) {
  const { transaction } = IDBDatabase.prototype, { postMessage } = BroadcastChannel.prototype;
  if (isDatabaseSlow) IDBDatabase.prototype.transaction = function (names, mode) {
    // A transaction ends when it has no more requests.
    const slow = transaction.call(this, names, mode), store = slow.objectStore(slow.objectStoreNames[0]), end = performance.now() + delay;
    const wait = () => { if (performance.now() < end) store.count().onsuccess = wait; };
    wait();
    return slow;
  };
  if (areMessagesSlow) BroadcastChannel.prototype.postMessage = function (message) { setTimeout(() => postMessage.call(this, message), delay); };
}

/** Forwards everything to `upstream`, unless `proxy.routes` has a handler for "METHOD /path". */
export async function startProxy(upstream) {
  const proxy = { routes: {}, requests: [], isDown: false, isFrozen: false };
  const server = http.createServer((incoming, outgoing) => {
    if (proxy.isDown) return incoming.destroy();
    if (proxy.isFrozen) return;
    const parts = [];
    incoming.on("data", part => parts.push(part));
    incoming.on("end", async () => {
      if (isSlow("network")) await sleep(DELAY);
      const body = Buffer.concat(parts), route = `${incoming.method} ${new URL(incoming.url, upstream).pathname}`;
      const handler = proxy.routes[route];
      if (incoming.method === "POST") proxy.requests.push({ route, body: JSON.parse(body), headers: incoming.headers });
      if (handler) {
        try { await handler(outgoing, body.length ? JSON.parse(body) : null, incoming); } catch (error) { console.log(`        ${route}: ${error}`); outgoing.destroy(); }
        return;
      }
      const target = new URL(incoming.url, upstream), headers = { ...incoming.headers, host: target.host };
      delete headers.origin;
      const forward = http.request(target, { method: incoming.method, headers }, response => {
        outgoing.writeHead(response.statusCode, response.headers);
        response.pipe(outgoing);
      });
      forward.on("error", () => outgoing.destroy());
      outgoing.on("close", () => forward.destroy());
      forward.end(body);
    });
  });
  await new Promise(done => server.listen(Number(process.env.PAGE_PROXY_PORT || 0), "127.0.0.1", done));
  proxy.url = `http://127.0.0.1:${server.address().port}/`;
  proxy.lastChat = () => proxy.requests.findLast(request => request.route.endsWith("/chat/completions")).body;
  /** Answers the next chat requests with these deltas. A delta may also be a function that gets the open response. */
  proxy.script = (deltas, { finish = "stop", usage = {}, timings, pause = 0 } = {}) => {
    proxy.routes["POST /v1/chat/completions"] = async outgoing => {
      outgoing.writeHead(200, { "content-type": "text/event-stream" });
      const send = chunk => outgoing.write(`data: ${JSON.stringify(chunk)}\n\n`);
      for (const delta of deltas) {
        if (outgoing.destroyed) return;
        if (typeof delta === "function") await delta(send, outgoing);
        else send({ choices: [{ index: 0, delta: typeof delta === "string" ? { content: delta } : delta, finish_reason: null }] });
        if (pause) await sleep(pause);
      }
      if (outgoing.destroyed || outgoing.writableEnded) return;
      send({ choices: [{ index: 0, delta: {}, finish_reason: finish }] });
      send({ choices: [], usage: { prompt_tokens: 20, completion_tokens: deltas.length, total_tokens: 20 + deltas.length, ...usage }, timings });
      outgoing.end("data: [DONE]\n\n");
    };
  };
  proxy.json = (route, body, status = 200) => {
    proxy.routes[route] = outgoing => { outgoing.writeHead(status, { "content-type": "application/json" }); outgoing.end(JSON.stringify(body)); };
  };
  /** Breaks all connections, as a server does that is killed. */
  proxy.breakAll = () => server.closeAllConnections();
  proxy.close = () => { server.closeAllConnections(); server.close(); };
  return proxy;
}

export const isFirefox = executablePath => path.basename(executablePath).startsWith("firefox");
export const launch = executablePath => isFirefox(executablePath) ? puppeteer.launch({ executablePath, browser: "firefox", timeout: PATIENCE })
  : puppeteer.launch({ executablePath, timeout: PATIENCE, args: ["--no-sandbox", "--disable-dev-shm-usage"] });

/** A page in its own browser context, so with its own storage, and what it did wrong. */
export async function openPage(browser, url, width, { height = width < 600 ? 720 : 800, waits = true } = {}) {
  const context = await browser.createBrowserContext();
  return prepare(await context.newPage(), context, url, width, { height, waits });
}

/** Another tab of the same browser context, so with the same storage. */
export const openTab = page => page.context.newPage().then(other => prepare(other, page.context, page.url(), page.width, { height: 800, waits: true }));

async function prepare(page, context, url, width, { height, waits }) {
  const seen = { errors: [], origins: new Set() }, inFirefox = (await context.browser().version()).startsWith("firefox");
  page.on("console", message => { if (["error", "warn"].includes(message.type())) seen.errors.push(message.text()); });
  page.on("pageerror", error => seen.errors.push(String(error)));
  page.on("request", request => { if (/^\w+:\/\//.test(request.url())) seen.origins.add(new URL(request.url()).origin); });
  await page.setViewport({ width, height });
  page.setDefaultNavigationTimeout(PATIENCE);
  await page.evaluateOnNewDocument(slowDown, isSlow("database"), isSlow("messages"), DELAY);
  // Puppeteer has this for Chromium only.
  if (isSlow("processor") && !inFirefox) await page.emulateCPUThrottling(10);
  await page.goto(url);
  const until = (what, ...args) => page.waitForFunction(what, { timeout: PATIENCE, polling: 50 }, ...args);
  if (waits) await until(() => document.querySelector("#model option"));
  return Object.assign(page, {
    seen, context, until, width, isFirefox: inFirefox,
    // In one step each: `$eval` finds an element first, and the page may replace it before the second step.
    text: selector => page.evaluate(selector => { const found = document.querySelector(selector); if (!found) throw new Error("no " + selector); return found.textContent; }, selector),
    texts: selector => page.evaluate(selector => [...document.querySelectorAll(selector)].map(element => element.textContent), selector),
    /** Waits until the elements have these texts. */
    haveTexts: (selector, texts) => until((selector, texts) => JSON.stringify([...document.querySelectorAll(selector)].map(element => element.textContent)) === texts, selector, JSON.stringify(texts)),
    count: selector => page.evaluate(selector => document.querySelectorAll(selector).length, selector),
    /** Clicks the button with this text, in `selector` or anywhere, as soon as it is shown. */
    press: async (text, selector = "body") => {
      const shown = (text, selector) => [...document.querySelector(selector)?.querySelectorAll("button") || []].findLast(button => button.textContent === text && button.checkVisibility());
      const handle = await until(shown, text, selector).catch(cause => { throw new Error(`no button ${text} in ${selector}`, { cause }); });
      await handle.click();
    },
    say: async words => { await page.type("#say", words); await page.keyboard.press("Enter"); },
    isIdle: () => until(() => document.querySelector("#send").textContent === "Send" && document.querySelectorAll("[aria-busy=true]").length === 0),
    isBusy: () => until(() => document.querySelector("#send").textContent === "Stop"),
    answer: () => page.evaluate(() => [...document.querySelectorAll(".turn.assistant > .text")].at(-1).innerText),
    /** Forgets what the browser says about requests that a test breaks. Anything else on the console is a fault. */
    isOnlyDisturbed: () => { seen.errors = seen.errors.filter(error => !/net::|NetworkError|Failed to load resource/.test(error)); },
    isOpen: id => page.$eval("#" + id, element => element.classList.contains("open")),
    set: async (name, value) => page.evaluate((name, value) => changeSettings({ [name]: value }), name, value),
  });
}
