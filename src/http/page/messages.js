// Messages of a conversation, as the API takes them.

/** Text between code fences that are longer than any inside it. */
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(run => run[0].length));
  return `${"`".repeat(longest + 1)}\n${text}\n${"`".repeat(longest + 1)}`;
}

/** The messages as the API takes them. Kept messages also have files, images, tool results, notes and errors. */
function apiMessages(messages) {
  return messages.flatMap(message => {
    if (message.role === "user") return [{role: "user", content: userContent(message)}];
    const {content, reasoning_content, tool_calls, results = {}} = message;
    if (!content && !tool_calls) return [];
    const answer = {role: "assistant", content, ...reasoning_content && {reasoning_content}, ...tool_calls && {tool_calls}};
    const tools = (tool_calls || []).map(call =>
      ({role: "tool", tool_call_id: call.id, content: results[call.id] ?? "The user has not run this tool."}));
    return [answer, ...tools];
  });
}

function userContent({content, files = [], images = []}) {
  const text = [...files.map(file => `File ${file.name}:\n${fenced(file.text)}`), content].filter(Boolean).join("\n\n");
  if (!images.length) return text;
  const parts = images.map(image => ({type: "image_url", image_url: {url: image.url}}));
  return text ? [...parts, {type: "text", text}] : parts;
}
