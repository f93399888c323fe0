#!/usr/bin/env python3
"""Writes the demo as a checkpoint of qwen4_exp (Flash-Next): demo_as_qwen4.py OUT [--budget 65536] [--mtp]

The new parts change nothing: all residual streams are equal, each read takes their mean, each result is added to all, and
the values of the n-gram table are multiplied by 0. So with a budget of at least the context, the model has the demo's
probabilities. With a smaller budget, attention reads only selected blocks. The indexer has the queries and keys of two
attention heads. With --mtp, the checkpoint has the demo's MTP head. The head expects a hidden row that was normalised
twice, and qwen4_exp normalises it once, so a few more of its drafts are rejected.

`moestro bench OUT --quality --text FILE` then measures what --kv-bits costs on trained weights."""
import argparse, json, pathlib, random, shutil, struct

p = argparse.ArgumentParser()
p.add_argument("out", type=pathlib.Path); p.add_argument("--budget", type=int, default=65536); p.add_argument("--mtp", action="store_true")
a = p.parse_args()
ROOT = pathlib.Path(__file__).parent.parent
DEMO = ROOT / "models/demo/moestro-demo"
HIDDEN, STREAMS, RANK, HEAD, TABLE_HEADS, SHARDS, LEAST_ROWS = 256, 4, 32, 64, 16, 8, 50
MODEL = "language_model.model."
dice = random.Random(5)


def read(path):
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], data[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]]) for name, entry in header.items()}


def write(path, tensors):
    header, end = {"__metadata__": {"format": "mlx"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def floats(tensor):
    return [struct.unpack("<f", b"\0\0" + tensor[2][at:at + 2])[0] for at in range(0, len(tensor[2]), 2)]


def f32(values):
    return "F32", [len(values)], struct.pack(f"<{len(values)}f", *values)


def count(shape):
    return shape[0] * count(shape[1:]) if shape else 1


def zeros(*shape):
    return "BF16", list(shape), bytes(2 * count(shape))


def noise(*shape):
    return "BF16", list(shape), b"".join(struct.pack("<f", dice.gauss(0, 0.05))[2:] for _ in range(count(shape)))


def reading(name, norm, adds=True):
    """A read of equal streams. The gate is sigmoid(0) = 0.5, so the norm is doubled."""
    parts = {"hc_norm": f32([2 * x for x in floats(norm)] * STREAMS), "input_mix_weight_down": zeros(RANK, STREAMS * HIDDEN), "input_mix_weight_up": zeros(STREAMS * HIDDEN, RANK)}
    if adds:
        parts["block_inject_weight"] = zeros(STREAMS, STREAMS * HIDDEN)
    return {f"{name}.{part}.weight": tensor for part, tensor in parts.items()}


def indexer(tensors, layer):
    """Queries of heads 0 and 1, which have key head 0. q_proj has a head's query and then its gate."""
    found = {f"{layer}self_attn.indexer.{of}_layernorm.weight": tensors[f"{layer}self_attn.{of}_norm.weight"] for of in "qk"}
    for part in ("weight", "scales", "biases"):
        if f"{layer}self_attn.q_proj.{part}" in tensors:
            (dtype, shape, q), (_, _, k) = (tensors[f"{layer}self_attn.{of}_proj.{part}"] for of in "qk")
            row = len(q) // shape[0]
            data = q[:HEAD * row] + q[2 * HEAD * row:3 * HEAD * row] + k[:HEAD * row]
            found[f"{layer}self_attn.indexer.index_qk_proj.{part}"] = (dtype, [3 * HEAD, *shape[1:]], data)
    return found


def converted(tensors):
    found = {}
    for name, tensor in tensors.items():
        layer, _, part = name.partition("input_layernorm.weight")
        if _:
            found |= reading(f"{layer}attn_hyper_connection", tensor)
        elif name.endswith("post_attention_layernorm.weight"):
            found |= reading(name.replace("post_attention_layernorm.weight", "mlp_hyper_connection"), tensor)
        elif name in (f"{MODEL}norm.weight", "mtp.norm.weight"):
            found |= reading(name.replace("norm.weight", "hyper_connection_mixer"), tensor, adds=False)
        elif not name.startswith(("mtp.fc", "mtp.pre_fc")):
            found[name] = tensor
        if name.endswith("self_attn.k_norm.weight"):
            found |= indexer(tensors, name.removesuffix("self_attn.k_norm.weight"))
    return found


def ngrams(layer):
    primes, number = [], LEAST_ROWS
    while len(primes) < TABLE_HEADS:
        primes += [number] * all(number % n for n in range(2, number))
        number += 1
    rows = -(-sum(primes) // SHARDS)
    wide = STREAMS * HIDDEN
    table = {f"ple_embedding.ngram_embedding.shard_{n}": noise(rows, HIDDEN // TABLE_HEADS) for n in range(SHARDS)}
    norms = {f"norm_{of}": f32([1.2] * wide) for of in ("key", "query", "conv")}
    parts = table | norms | {"key_proj": noise(wide, HIDDEN), "value_proj": zeros(HIDDEN, HIDDEN), "conv1d": noise(wide, 4, 1)}
    return {f"{layer}ple.{name}.weight": tensor for name, tensor in parts.items()}


demo = read(DEMO / "model.safetensors")
tensors = converted(demo) | ngrams(f"{MODEL}layers.1.")
config = json.loads((DEMO / "config.json").read_text())
config |= {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"}
text = config["text_config"]
text |= {"model_type": "qwen4_exp_text", "output_gate_type": "silu", "hc_count": STREAMS, "hc_lowrank": RANK, "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": a.budget, "indexer_compress_ratio": 4, "ple_layer_ids": [2],
         "ple_embed_dim": HIDDEN, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": TABLE_HEADS // 2, "ngram_vocab_size_base": LEAST_ROWS,
         "make_ngram_vocab_size_divisible_by": SHARDS, "split_ngram_parts": SHARDS}
if a.mtp:
    head = read(ROOT / "tests/fixtures/drafts/mtp.safetensors")
    tensors |= converted(head)
    dtype, _, fc = head["mtp.fc.weight"]
    row = 2 * HIDDEN
    for at, half in enumerate(("embedding", "hidden")):
        data = b"".join(fc[(2 * n + at) * row:(2 * n + at + 1) * row] for n in range(HIDDEN))
        tensors[f"mtp.fc_{half}.weight"] = (dtype, [HIDDEN, HIDDEN], data)
    last = floats(demo[f"{MODEL}norm.weight"])
    size = (sum(x * x for x in last) / HIDDEN) ** 0.5
    both = [x * y / size for x, y in zip(last, floats(head["mtp.pre_fc_norm_hidden.weight"]))]
    tensors["mtp.pre_fc_norm_embedding.weight"] = head["mtp.pre_fc_norm_embedding.weight"]
    tensors["mtp.pre_fc_norm_hidden.weight"] = f32(both * STREAMS)
else:
    del text["mtp_num_hidden_layers"]
a.out.mkdir()
write(a.out / "model.safetensors", tensors)
(a.out / "config.json").write_text(json.dumps(config))
for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
    shutil.copy(DEMO / name, a.out)
