"""Writes a checkpoint that follows a script. The standard library suffices.

A script is a list of rules. The chat template chooses the first rule whose condition holds, and the model gives the
answer of that rule. A condition is an expression of Jinja with these names:

    names    names of the tools of the request
    results  number of results of tools in the conversation
    since    number of results of tools since the last answer without a call
    asked    text of all messages of the user
    said     text of all messages of the model
    shown    text of all results of tools
    last     text of the last message of the user
    images   number of images in the conversation

The script is in the weights. The two layers, a delta net and attention, add too little to change the residual, so the
logits depend on the last token alone. With both kinds of layers, prompts are cached in memory and on the disk like those of a real
model. Each token of the script has its own direction in the embeddings, and the row of the next token in the head has
the same. The chat template ends the prompt with a token that starts an answer. The tokenizer is that of the demo model,
so long prompts have a realistic number of tokens. The vision tower is that of tests/fixtures/vision.
"""
import json, pathlib, struct

ROOT = pathlib.Path(__file__).parents[2]
DEMO = ROOT / "models/demo/moestro-demo"
VISION = ROOT / "tests/fixtures/vision/mlx_4bit"
HIDDEN, HEAD, EXPERTS, INNER = 128, 64, 4, 64  # HIDDEN is that of the vision tower
IMAGE = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]

# Renders a conversation as the template of the demo does, calls as the model writes them, and chooses the rule.
TEMPLATE = """{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- set ns = namespace(results=0, since=0, images=0, asked='', said='', shown='', last='') %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- set ns.text = '' %}
    {%- if message.content is string %}
        {%- set ns.text = message.content %}
    {%- else %}
        {%- for part in message.content or [] %}
            {%- if part.type == 'text' %}
                {%- set ns.text = ns.text + part.text %}
            {%- else %}
                {%- set ns.images = ns.images + 1 %}
                {%- set ns.text = ns.text + 'IMAGE' %}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- ns.text }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in (call.function.arguments or {}) | items %}
            {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- if message.role == 'tool' %}
        {%- set ns.results = ns.results + 1 %}
        {%- set ns.since = ns.since + 1 %}
        {%- set ns.shown = ns.shown + ns.text + '\\n' %}
    {%- elif message.role == 'user' %}
        {%- set ns.last = ns.text %}
        {%- set ns.asked = ns.asked + ns.text + '\\n' %}
    {%- elif message.role == 'assistant' %}
        {%- set ns.said = ns.said + ns.text + '\\n' %}
        {%- set ns.since = ns.since if message.tool_calls else 0 %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list %}
    {%- set results, since, images, last = ns.results, ns.since, ns.images, ns.last %}
    {%- set asked, said, shown = ns.asked, ns.said, ns.shown %}
    {{- '<|im_start|>assistant\\n' }}
    RULES
{%- endif %}
"""


def call(tool, **parameters):
    """The text of a call."""
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return f"<tool_call>\n<function={tool}>\n{parameters}</function>\n</tool_call>"


def pieces(text, used):
    """The tokens of an answer: at least three, so that calls and words are cut somewhere, or fewer if others have them."""
    for size in range(-(-len(text) // 3), len(text) + 1):
        cut = [text[at:at + size] for at in range(0, len(text), size)]
        if len(set(cut)) == len(cut) and not used.intersection(cut):
            return cut
    raise ValueError(f"{text!r} is a token already")


def write(out, rules, context=131_072):
    """Writes the checkpoint to the folder `out`. A rule is a pair of a condition and the text of an answer."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}

    def add(content, special=False):
        ids[content] = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
        tokenizer["added_tokens"].append({"id": ids[content], "content": content, "single_word": False, "lstrip": False,
                                          "rstrip": False, "normalized": False, "special": special})
        return ids[content]

    end = ids["<|im_end|>"]
    image = [add(token, True) for token in IMAGE]
    texts = list(dict.fromkeys(text for _, text in rules))
    chains = []
    for n, text in enumerate(texts):
        cut = pieces(text, ids.keys() | tokenizer["model"]["vocab"].keys())
        chains.append([add(f"<|answer_{n}|>", True), *map(add, cut), end])
    vocabulary = -(-(max(ids.values()) + 1) // 64) * 64
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = [f"{{%- {'el' if n else ''}if {condition} %}}{{{{- '<|answer_{texts.index(text)}|>' }}}}"
             for n, (condition, text) in enumerate(rules)]
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.replace("RULES", "\n    ".join(words + ["{%- endif %}"])).replace("IMAGE", "".join(IMAGE))
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    text = json.loads((DEMO / "config.json").read_text())["text_config"]
    text.update(hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=vocabulary, max_position_embeddings=context,
                num_attention_heads=1, num_key_value_heads=1, head_dim=HEAD, linear_num_key_heads=1,
                linear_num_value_heads=2, linear_key_head_dim=HEAD, linear_value_head_dim=HEAD,
                layer_types=["linear_attention", "full_attention"], num_experts=EXPERTS, num_experts_per_tok=2,
                moe_intermediate_size=INNER, shared_expert_intermediate_size=INNER, mtp_num_hidden_layers=0)
    vision = json.loads((VISION / "config.json").read_text())["vision_config"]
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text,
              "vision_config": vision, "vision_start_token_id": image[0], "image_token_id": image[1],
              "vision_end_token_id": image[2], "eos_token_id": end, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "temperature": 0.6}))
    (out / "preprocessor_config.json").write_bytes((VISION / "preprocessor_config.json").read_bytes())
    write_weights(out / "model.safetensors", chains, vocabulary, end)


def vision_tensors():
    """The tensors of the vision tower: name, type, shape and bytes."""
    with open(VISION / "model.safetensors", "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(size)), file.read()
    for name, tensor in header.items():
        if name.startswith("vision_tower."):
            begin, end = tensor["data_offsets"]
            yield name, (tensor["dtype"], tensor["shape"], data[begin:end])


def write_weights(path, chains, vocabulary, end):
    one, gain = struct.pack("<H", 0x3F80), struct.pack("<H", 0x4080)  # 1.0 and 4.0 in bf16
    # 2^-100, too small to change a sum. The server logs a matrix that is zero.
    tiny = struct.pack("<H", 0x0D80)
    tensors = dict(vision_tensors())

    def tensor(name, *shape, fill=tiny, kind="BF16"):
        size = 1
        for n in shape:
            size *= n
        tensors["language_model." + name] = (kind, shape, bytearray((fill if kind == "BF16" else bytes(4)) * size))
        return tensors["language_model." + name][2]

    ends = "model.embed_tokens.weight", "lm_head.weight"
    embeddings, head = (tensor(name, vocabulary, HIDDEN, fill=b"\0\0") for name in ends)

    def put(matrix, row, column, value):
        at = 2 * (row * HIDDEN + column)
        matrix[at:at + 2] = value

    steps = [step for chain in chains for step in zip(chain, chain[1:])]
    assert len(steps) < HIDDEN and len({last for last, _ in steps}) == len(steps), "a token has two successors"
    for direction, (last, following) in enumerate(steps):
        put(embeddings, last, direction, one)
        put(head, following, direction, gain)
    # Any other token ends the answer.
    for token in set(range(vocabulary)) - {last for last, _ in steps}:
        put(embeddings, token, HIDDEN - 1, one)
    put(head, end, HIDDEN - 1, gain)
    tensor("model.norm.weight", HIDDEN, fill=one)
    at = "model.layers.0."
    tensor(at + "linear_attn.A_log", 2, kind="F32")
    tensor(at + "linear_attn.conv1d.weight", 4 * HEAD, 4, 1)
    tensor(at + "linear_attn.dt_bias", 2)
    tensor(at + "linear_attn.in_proj_a.weight", 2, HIDDEN)
    tensor(at + "linear_attn.in_proj_b.weight", 2, HIDDEN)
    tensor(at + "linear_attn.in_proj_qkv.weight", 4 * HEAD, HIDDEN)
    tensor(at + "linear_attn.in_proj_z.weight", 2 * HEAD, HIDDEN)
    tensor(at + "linear_attn.norm.weight", HEAD, fill=one)
    tensor(at + "linear_attn.out_proj.weight", HIDDEN, 2 * HEAD)
    at = "model.layers.1."
    tensor(at + "self_attn.q_proj.weight", 2 * HEAD, HIDDEN)  # query and gate
    tensor(at + "self_attn.k_proj.weight", HEAD, HIDDEN)
    tensor(at + "self_attn.v_proj.weight", HEAD, HIDDEN)
    tensor(at + "self_attn.o_proj.weight", HIDDEN, HEAD)
    tensor(at + "self_attn.q_norm.weight", HEAD, fill=one)
    tensor(at + "self_attn.k_norm.weight", HEAD, fill=one)
    for at in ("model.layers.0.", "model.layers.1."):
        tensor(at + "input_layernorm.weight", HIDDEN, fill=one)
        tensor(at + "post_attention_layernorm.weight", HIDDEN, fill=one)
        tensor(at + "mlp.gate.weight", EXPERTS, HIDDEN)
        tensor(at + "mlp.shared_expert_gate.weight", 1, HIDDEN)
        for part, shape in (("shared_expert", ()), ("switch_mlp", (EXPERTS,))):
            tensor(f"{at}mlp.{part}.gate_proj.weight", *shape, INNER, HIDDEN)
            tensor(f"{at}mlp.{part}.up_proj.weight", *shape, INNER, HIDDEN)
            tensor(f"{at}mlp.{part}.down_proj.weight", *shape, HIDDEN, INNER)
    header, offset = {"__metadata__": {"format": "mlx"}}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _, _, data in tensors.values():
            file.write(data)
