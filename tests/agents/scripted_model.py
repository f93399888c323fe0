#!/usr/bin/env python3
"""Writes a checkpoint that follows a script: scripted_model.py DIR [--search] TOOL ARGUMENT [WORD]...

The first answer of a conversation that has a tool TOOL calls it with the command "echo ran > proof.txt" as the
parameter ARGUMENT. Each WORD is a further parameter, NAME=VALUE. An answer after the result of a tool, or without the
tool, is text. TOOL "-" writes a block of aider's edit format "whole" instead of a call. With --search, the first answer
calls Claude Code's ToolSearch for TOOL, and the second answer calls TOOL. Later turns call TOOL at once.

The script is in the weights. The two layers, a delta net and attention, add zero to the residual, so the logits depend
on the last token alone. With both kinds of layers, prompts are cached in memory and on the disk like those of a real
model. Each token of the script has its own direction in the embeddings, and the row of the next token in the head has
the same. The chat template ends the prompt with a token that starts the call or the text. The tokenizer is that of the
demo model, so long prompts have a realistic number of tokens. Uses the standard library only.
"""
import json, pathlib, struct, sys

DEMO = pathlib.Path(__file__).parents[2] / "models/demo/moestro-demo"
HIDDEN, HEAD, EXPERTS, INNER = 128, 64, 4, 64
CONTEXT = 131_072
COMMAND = ["echo ran", " > proof.txt"]
TEXT = ["The script", " has ended."]
CALL, SAY, SEARCH = "<|script_call|>", "<|script_say|>", "<|script_search|>"

# Renders a conversation as the demo's template does, and chooses the script.
TEMPLATE = """{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- set ns = namespace(ran=false, results=0) %}
{%- for message in messages %}
    {%- set ns.ran = message.role == 'tool' or (ns.ran and message.role != 'user') %}
    {%- set ns.results = ns.results + (1 if message.role == 'tool' else 0) %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n' + call.function.name + '\\n</tool_call>' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list %}
    {{- '<|im_start|>assistant\\n' + (CHOICE) }}
{%- endif %}
"""


def call(tool, parameters):
    """The text of a call."""
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function={tool}>\n{parameters}</function>\n</tool_call>"


def script(tool, parameters):
    """The pieces of the answer that calls the tool."""
    if tool == "-":
        return ["proof.txt\n```\n", "ran\n``", "`\n"]
    (first, command), *others = parameters
    others = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in others)
    return ["<tool_call>", f"\n<function={tool}>\n<parameter={first}>\n", *command, f"\n</parameter>\n{others}</function>\n",
            "</tool_call>"]


def main():
    out, *arguments = sys.argv[1:]
    searches = arguments[0] == "--search"
    tool, argument, *words = arguments[searches:]
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    parameters = [(argument, COMMAND)] + [tuple(word.split("=", 1)) for word in words]
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}

    def add(content, special=False):
        assert content not in tokenizer["model"]["vocab"], f"{content!r} is a token already"
        if content not in ids:
            ids[content] = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
            tokenizer["added_tokens"].append({"id": ids[content], "content": content, "single_word": False, "lstrip": False,
                                              "rstrip": False, "normalized": False, "special": special})
        return ids[content]

    end = ids["<|im_end|>"]
    chains = [[add(CALL, True)] + [add(piece) for piece in script(tool, parameters)] + [end],
              [add(SAY, True)] + [add(piece) for piece in TEXT] + [end]]
    if searches:
        # One token, because the parts of a call have other successors in the other script.
        chains.append([add(SEARCH, True), add(call("ToolSearch", [("query", f"select:{tool}"), ("max_results", 5)])), end])
    vocabulary = -(-(max(ids.values()) + 1) // 64) * 64
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    when = "messages | length > 1" if tool == "-" else f"'{tool}' in names"
    choice = f"'{CALL}' if {when} and not ns.ran else '{SAY}'"
    if searches:
        choice = f"'{SEARCH}' if 'ToolSearch' in names and ns.results == 0 else '{CALL}' if ns.results == 1 or not ns.ran else '{SAY}'"
    settings["chat_template"] = TEMPLATE.replace("CHOICE", choice)
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    text = json.loads((DEMO / "config.json").read_text())["text_config"]
    text.update(hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=vocabulary, max_position_embeddings=CONTEXT,
                num_attention_heads=1, num_key_value_heads=1, head_dim=HEAD, linear_num_key_heads=1,
                linear_num_value_heads=2, linear_key_head_dim=HEAD, linear_value_head_dim=HEAD,
                layer_types=["linear_attention", "full_attention"], num_experts=EXPERTS, num_experts_per_tok=2,
                moe_intermediate_size=INNER, shared_expert_intermediate_size=INNER, mtp_num_hidden_layers=0)
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text,
              "eos_token_id": end, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "temperature": 0.6}))
    write_weights(out / "model.safetensors", chains, vocabulary, end)


def write_weights(path, chains, vocabulary, end):
    one, gain = struct.pack("<H", 0x3F80), struct.pack("<H", 0x4080)  # 1.0 and 4.0 in bf16
    tensors = {}

    def tensor(name, *shape, fill=b"\0\0", kind="BF16"):
        size = 1
        for n in shape:
            size *= n
        tensors["language_model." + name] = (kind, shape, bytearray((fill if kind == "BF16" else bytes(4)) * size))
        return tensors["language_model." + name][2]

    embeddings, head = tensor("model.embed_tokens.weight", vocabulary, HIDDEN), tensor("lm_head.weight", vocabulary, HIDDEN)

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


main()
