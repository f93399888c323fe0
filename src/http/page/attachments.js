// Files and images that are attached to the next message.

const MAX_FILE = 2e6, MAX_IMAGE = 20e6;
/** Images of more bytes are scaled to at most this many pixels a side, because a request has at most 16 MiB. */
const LARGE_IMAGE = 1e6, MAX_SIDE = 2048;
/** Attached, but not sent yet. */
let waiting = {files: [], images: []};

async function addFiles(files) {
  const problems = [];
  for (const file of files) {
    try { await addFile(file); } catch (error) { problems.push(`Cannot attach ${file.name}: ${error.message}`); }
  }
  notify(problems.join(" "), true);
  drawWaitingFiles();
  $("say").focus();
}

async function addFile(file) {
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return addImage(file);
  if (file.size > MAX_FILE) throw new Error(`it has ${bytes(file.size)}, and the limit is ${bytes(MAX_FILE)}.`);
  let text;
  try { text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer()); } catch { text = "\0"; }
  if (text.includes("\0")) throw new Error("it is not a text file.");
  waiting.files.push({name: file.name, text});
}

async function addImage(file) {
  if (!acceptsImages()) throw new Error("the model does not take images.");
  if (file.size > MAX_IMAGE) throw new Error(`it has ${bytes(file.size)}, and the limit is ${bytes(MAX_IMAGE)}.`);
  waiting.images.push({name: file.name, url: file.size > LARGE_IMAGE ? await scaledImage(file) : await dataUrl(file)});
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("it cannot be read."));
    reader.readAsDataURL(file);
  });
}

async function scaledImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => { throw new Error("the browser cannot read this image."); });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height)), canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function drawWaitingFiles() {
  const remove = (list, entry) => {
    const taken = button("Remove", "plain", () => { list.splice(list.indexOf(entry), 1); drawWaitingFiles(); $("say").focus(); });
    taken.setAttribute("aria-label", "Remove " + entry.name);
    return taken;
  };
  const {files, images} = waiting;
  $("waiting-files").replaceChildren(
    ...images.map(image => { const shown = drawImage(image); shown.append(remove(images, image)); return shown; }),
    ...files.map(file => make("span", "", `${file.name}, ${bytes(file.text.length)} `, remove(files, file))));
}

const hasFiles = event => event.dataTransfer?.types.includes("Files");
$("attach").onclick = () => $("files").click();
$("files").onchange = () => { addFiles([...$("files").files]); $("files").value = ""; };
$("say").onpaste = event => {
  if (event.clipboardData.files.length) { event.preventDefault(); addFiles([...event.clipboardData.files]); }
};
document.ondragover = event => { if (hasFiles(event)) { event.preventDefault(); document.body.classList.add("dropping"); } };
document.ondragleave = event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); };
document.ondrop = event => {
  document.body.classList.remove("dropping");
  if (hasFiles(event)) { event.preventDefault(); addFiles([...event.dataTransfer.files]); }
};
