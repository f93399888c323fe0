// The list of models, the chosen model, and the welcome, which describes it.

let models = [], health = null, picked = null;

const chosenModel = () => picked || models.find(model => model.loaded)?.id || models[0]?.id;
const acceptsImages = () => Boolean(models.find(model => model.id === chosenModel())?.capabilities?.vision);

async function refreshModels(isBackground = false) {
  try {
    health = await poll("health").then(response => response.json());
    models = (await (await request("v1/models", {isBackground})).json()).data;
  } catch (error) {
    if (!isBackground) notify(error.message, true);
    return;
  }
  if (picked && !models.some(model => model.id === picked)) picked = null;
  const options = models.map(model => [model.id, describeModel(model)]);
  const shown = [...$("model").options].map(option => [option.value, option.textContent]);
  if (JSON.stringify(options) !== JSON.stringify(shown)) {
    $("model").replaceChildren(...options.map(([id, text]) => {
      const option = make("option", "", text);
      option.value = id;
      return option;
    }));
  }
  if (document.activeElement !== $("model") || !picked) $("model").value = chosenModel();
  if (!conversation.messages.length) {
    const welcome = $("turns").querySelector(".welcome");
    if (welcome && welcome.textContent !== drawWelcome().textContent) welcome.replaceWith(drawWelcome());
  }
}

/** Name, size and whether it fits, as the picker shows them. */
function describeModel({id, loaded, size}) {
  const facts = [!loaded && "not loaded", size && bytes(size), size && fitOf(size)].filter(Boolean);
  return facts.length ? `${id} (${facts.join(", ")})` : id;
}

/** Whether weights of this many bytes fit in memory next to what the loaded model's plan reserves for other things. */
function fitOf(size) {
  const plan = health?.plan;
  if (!plan) return "";
  const rest = plan.reserved - plan.trunk - plan.experts - plan.prompt_cache - plan.draft;
  return size + rest <= plan.limit ? "fits in memory" : "partly read from the disk";
}

/** Loads the picked model. Counting the tokens of an empty prompt is the smallest request that needs the model. */
async function loadModel(id) {
  picked = id;
  if (models.find(model => model.id === id)?.loaded) return refreshModels();
  const controller = new AbortController();
  notify(`Loading ${id}. This can take minutes.`, false, make("progress"), button("Cancel", "", () => controller.abort()));
  try {
    await request("tokenize", {method: "POST", body: JSON.stringify({model: id, prompt: ""}), signal: controller.signal});
    notify(`${id} is loaded.`);
  } catch (error) {
    if (picked === id) picked = null;
    if (error.name === "AbortError") notify(); else notify(`Cannot load ${id}: ${error.message}`, true);
  }
  return refreshModels(true);
}

$("model").onchange = () => loadModel($("model").value);
// Another API key may list other models.
$("settings").onclose = () => refreshModels();

/** Size, device and context of the loaded model, in words. */
function modelFacts() {
  const plan = health?.plan;
  if (!plan || health.model !== chosenModel()) return models.length ? "Loaded with the first message." : "";
  const whole = plan.trunk + (plan.residency ? plan.experts / plan.residency : plan.experts), held = plan.trunk + plan.experts;
  const size = plan.residency < 1 ? `${bytes(whole)}, of which ${bytes(held)} fit in memory and the rest is read from the disk`
    : `${bytes(whole)} in memory`;
  return [
    size,
    `computed on ${plan.device === "cpu" ? "the CPU" : plan.device}`,
    `context of ${number(health.context)} tokens`
  ].join(" · ");
}

const PROMPTS = [
  "Explain a mixture of experts in simple words.", "Tell me a story about a fox.", "Write a Python function fibonacci(n).",
  "Name five planets."
];
const DEMO = "moestro-demo", FIRST_MODEL = "mlx-community/Qwen3.5-4B-MLX-4bit";

function drawWelcome() {
  const box = make("div", "welcome", make("h2", "", chosenModel() || "Moestro"), make("p", "soft", modelFacts()));
  if (chosenModel() === DEMO) {
    box.append(make("p", "", "This is a 9 MB toy that does sums, capitals and short stories. A first real model (about 3 GB): ",
      make("code", "", `moestro run ${FIRST_MODEL}`)));
  }
  box.append(make("div", "", ...PROMPTS.map(text => button(text, "", () => { $("say").value = text; $("composer").requestSubmit(); }))));
  return box;
}
