// Conversations as files: export as Markdown and JSON, and import of JSON.

const fileName = title => title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";

async function readConversation(kept) {
  return running.get(kept.id)?.conversation || new Conversation(kept, await readNodes(kept.id) || []);
}

async function exportAsMarkdown(kept) {
  const parts = apiMessages((await readConversation(kept)).messages).map(({role, content, tool_calls: calls}) => {
    const words = typeof content === "string" ? content : content.map(part => part.text || "(image)").join("\n\n");
    const called = (calls || []).map(call => fenced(`${call.function.name} ${call.function.arguments}`));
    return [`## ${{user: "You", assistant: "Answer", tool: "Tool result"}[role]}`, words, ...called].filter(Boolean).join("\n\n");
  });
  download(fileName(kept.title) + ".md", "text/markdown", `# ${kept.title}\n\n${parts.join("\n\n")}\n`);
}

/** Writes one conversation or a list. `messages` is the shown path as the API takes it, `nodes` has all versions. */
async function exportAsJson(records) {
  const written = [];
  for (const kept of records) {
    const {title, choices, messages, nodes} = await readConversation(kept);
    const plain = [...nodes.values()].map(({conversation: _, ...node}) => node);
    written.push({title, messages: apiMessages(messages), choices, nodes: plain});
  }
  const isOne = written.length === 1, name = isOne ? fileName(written[0].title) : "conversations";
  download(name + ".json", "application/json", JSON.stringify(isOne ? written[0] : written, null, 2));
}

async function importFiles(files) {
  let imported = null, count = 0, refused = "";
  const problems = [];
  for (const file of files) {
    try {
      for (const read of importedConversations(JSON.parse(await file.text()))) {
        imported = read;
        count += 1;
        refused = await save(read, ...read.nodes.values()) || refused;
      }
    } catch (error) {
      const reason = error instanceof SyntaxError ? "it is not a JSON file that this page has saved" : error.message;
      problems.push(`Cannot import ${file.name}: ${reason}.`);
    }
  }
  if (imported) showConversation(imported);
  if (refused) problems.push(refused);
  notify([count ? plural(count, "conversation") + " imported." : "", ...problems].filter(Boolean).join(" "), problems.length > 0);
}

/** Conversations of a file, all checked. They get new ids, so that an import never replaces anything. */
function importedConversations(file) {
  const all = Array.isArray(file) && !file[0]?.role ? file : [Array.isArray(file) ? {messages: file} : file];
  if (!all.length) throw new Error("it has no messages");
  return all.map(record => {
    const {title, messages, nodes = chainOf(keptMessages(messages)), choices} = record || {};
    if (!Array.isArray(nodes) || !nodes.length) throw new Error("it has no messages");
    nodes.forEach(checkNode);
    openCircles(new Map(nodes.map(node => [node.id, node])));
    const name = String(title || nodes[0].content || "Imported").split("\n")[0].slice(0, 60);
    return new Conversation({title: name, choices}, nodes);
  });
}

/** Makes messages that follow themselves first messages. */
function openCircles(nodes) {
  for (const node of nodes.values()) {
    const passed = new Set();
    for (let at = node; at; at = nodes.get(at.parent)) {
      if (passed.has(at)) { node.parent = null; break; }
      passed.add(at);
    }
  }
}

/** Messages of the API as this page keeps them: results of tools belong to the answer that called them. */
function keptMessages(messages) {
  if (!Array.isArray(messages)) throw new Error("it has no messages");
  const kept = [];
  for (const message of messages) {
    const {role, content, reasoning_content, tool_calls, tool_call_id: call} = message || {};
    const parts = Array.isArray(content) ? content : [{text: content ?? ""}], last = kept.at(-1);
    const text = parts.map(part => part.text).filter(Boolean).join("\n\n");
    const images = parts.map(part => part.image_url?.url).filter(Boolean).map(url => ({name: "image", url}));
    if (role === "tool" && last?.role === "assistant") last.results = {...last.results, [call]: text};
    else if (role !== "system") {
      const answer = {...reasoning_content && {reasoning_content}, ...tool_calls && {tool_calls}};
      kept.push({role, content: text, ...images.length && {images}, ...answer});
    }
  }
  return kept;
}

function checkNode(node) {
  const isText = value => typeof value === "string";
  const areAll = (list, check) => list === undefined || (Array.isArray(list) && list.every(check));
  const isSound = ["user", "assistant"].includes(node?.role) && isText(node.content) && isText(node.id)
    && [node.reasoning_content, node.note, node.error].every(value => value === undefined || isText(value))
    && areAll(node.files, file => isText(file?.name) && isText(file.text))
    && areAll(node.images, image => isText(image?.name) && isText(image.url))
    && areAll(node.tool_calls, call => isText(call?.id) && isText(call.function?.name) && isText(call.function.arguments))
    && Object.values(node.results || {}).every(isText);
  if (!isSound) throw new Error("a message in it is damaged");
}
