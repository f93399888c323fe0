// The gauges: rates, memory, and the experts in memory.

/** Parses the Prometheus text format: name{labels} value. */
function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const at = line.lastIndexOf(" ");
    if (at > 0 && line[0] !== "#") values[line.slice(0, at)] = Number(line.slice(at + 1));
  }
  return values;
}

const sum = (values, pattern) => Object.keys(values).reduce((all, name) => pattern.test(name) ? all + values[name] : all, 0);
const percent = (part, whole) => (100 * part / whole).toFixed(1) + " %";

/** Fills a list of facts. Facts without a value are left out. */
function fillFacts(list, facts) {
  list.replaceChildren(...facts
    .filter(([, value]) => value !== null)
    .flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

const MEMORY_NAMES = {
  process: "The program itself", trunk: "Weights of every token", experts: "Experts", kv: "Keys and values",
  state: "State of sequences", workspace: "Work space", prompt_cache: "Prompt cache", requests: "Requests",
  draft: "Draft model", vision: "Image encoder",
};

const LINES = {
  tokens: new Line("Tokens per second", value => value.toFixed(1)),
  hits: new Line("Experts found in memory", value => value.toFixed(1) + " %"),
  disk: new Line("Read from the disk", value => (value / 1e6).toFixed(1) + " MB/s"),
  memory: new Line("Memory in use", bytes),
};
const RESIDENT = 'moestro_process_memory_bytes{kind="resident"}';

let previous = null, previousTime = 0;
async function drawGauges() {
  const values = parseMetrics(await (await poll("metrics")).text()), now = performance.now() / 1000;
  const since = name => previous ? Math.max(0, (values[name] || 0) - (previous[name] || 0)) : 0;
  const rate = name => previous ? since(name) / (now - previousTime) : 0;
  const share = (part, whole) => whole > 0 ? percent(part, whole) : null;
  const lookups = sum(values, /^moestro_expert_lookups_total/);
  const misses = sum(values, /^moestro_expert_lookups_total.*result="miss"/);
  const drafted = sum(values, /^moestro_draft_tokens_total/);
  const accepted = sum(values, /^moestro_draft_tokens_total.*"accepted"/);
  const reused = sum(values, /^moestro_prompt_cache_hits_total/), isStreaming = values.moestro_ssd_reads_total > 0;
  fillFacts($("now"), [
    ["Tokens per second", rate("moestro_generated_tokens_total").toFixed(1)],
    ["Requests running", number(values.moestro_requests_running || 0)],
    ["Requests waiting", number(values.moestro_requests_queued || 0)],
    ["Experts found in memory", share(lookups - misses, lookups)],
    ["Read from the disk", isStreaming ? (rate("moestro_ssd_disk_bytes_total") / 1e6).toFixed(1) + " MB/s" : null],
    ["Time waiting for the disk", isStreaming && previous ? percent(since("moestro_ssd_stall_seconds_total"), now - previousTime) : null],
    ["Prompts found in the cache", share(reused, reused + (values.moestro_prompt_cache_misses_total || 0))],
    ["Drafted tokens accepted", share(accepted, drafted)],
  ]);
  drawMemory(values);
  if (previous) {
    const counted = pattern => sum(values, pattern) - sum(previous, pattern), all = counted(/^moestro_expert_lookups_total/);
    const missed = counted(/^moestro_expert_lookups_total.*result="miss"/);
    LINES.tokens.add(previousTime, now, rate("moestro_generated_tokens_total"));
    LINES.hits.add(previousTime, now, all > 0 ? 100 * (all - missed) / all : null);
    LINES.disk.add(previousTime, now, rate("moestro_ssd_disk_bytes_total"));
    LINES.memory.add(previousTime, now, values[RESIDENT] || null);
  }
  previous = values;
  previousTime = now;
}

/** Memory that the plan reserves is not all in use: the process has its own line. */
function drawMemory(values) {
  const reserved = Object.keys(values)
    .map(name => [/^moestro_memory_bytes\{kind="(.*)"\}$/.exec(name)?.[1], values[name]])
    .filter(([kind, held]) => kind && held > 0);
  reserved.sort((a, b) => b[1] - a[1]);
  const resident = values[RESIDENT];
  fillFacts($("memory"), [
    ["In use by the server", resident ? bytes(resident) : null],
    ["Limit", bytes(values.moestro_memory_limit_bytes || 0)]
  ]);
  fillFacts($("reserved"), reserved.map(([kind, held]) => [MEMORY_NAMES[kind] || kind.replaceAll("_", " "), bytes(held)]));
}

/** Draws one square per expert and one row per layer. Experts that were selected more often are stronger in colour. */
async function drawExperts() {
  const {layers} = await (await request("experts", {isBackground: true})).json(), canvas = $("experts");
  for (const id of ["experts", "experts-title", "experts-help"]) $(id).hidden = !layers.length;
  if (!layers.length) return;
  const isDark = getComputedStyle(document.body).colorScheme === "dark"
    || (settings.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  const drawn = layers.join() + isDark;
  if (canvas.drawn === drawn) return;
  canvas.drawn = drawn;
  const width = layers[0].length, scale = Math.max(1, Math.min(14, Math.floor(272 / width))), height = Math.max(scale, 2);
  canvas.width = width * scale;
  canvas.height = layers.length * height;
  const context = canvas.getContext("2d");
  layers.forEach((layer, y) => [...layer].forEach((digit, x) => {
    const heat = digit === "." ? 0 : (Number(digit) + 3) / 12;
    context.fillStyle = heat ? `hsl(172 60% ${isDark ? 15 + 55 * heat : 85 - 55 * heat}%)` : isDark ? "#1e2125" : "#f1eee9";
    context.fillRect(x * scale, y * height, scale, height);
  }));
}
