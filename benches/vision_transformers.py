#!/usr/bin/env python3
"""Seconds of transformers' vision tower on the CPU, with random weights of the same dimensions and for the same images
as `cargo bench --bench vision`: vision_transformers.py [--threads N] [HEIGHTxWIDTH]...

The sides of an image must be multiples of 32. Prints the median of three runs after a first one."""
import argparse, statistics, time
import torch, transformers
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

parser = argparse.ArgumentParser()
parser.add_argument("sizes", nargs="*", default=["480x640", "1024x1024"])
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()

torch.set_num_threads(args.threads)
config = Qwen3_5MoeVisionConfig(
    depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304, num_position_embeddings=2304, out_hidden_size=128,
    patch_size=16, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
print(f"transformers {transformers.__version__}, torch {torch.__version__}, {args.threads} threads")
for dtype in (torch.float32, torch.bfloat16):
    tower = Qwen3_5MoeVisionModel._from_config(config, dtype=dtype).eval()
    for size in args.sizes:
        height, width = (int(side) // 16 for side in size.split("x"))
        patches, grid = torch.randn(height * width, 1536, dtype=dtype), torch.tensor([[1, height, width]])
        seconds = []
        with torch.inference_mode():
            for _ in range(4):
                start = time.monotonic()
                tower(patches, grid_thw=grid)
                seconds.append(time.monotonic() - start)
        print(f"{size} {str(dtype).removeprefix('torch.')}: {statistics.median(seconds[1:]):.2f} s ({height * width // 4} tokens)", flush=True)
