#!/usr/bin/env python3
"""Several agents at the same time: python3 benches/agents.py URL TURNS.json [--tokens 32] [--llama]

TURNS.json is [[[token, ...], ...], ...]: for each agent the tokens of each of its prompts. An agent sends its next prompt
when it has the whole answer, which has --tokens tokens. Prints the total time, and the median and longest time to the
first token. --llama sends to llama-server's own endpoint.
"""
import argparse, json, statistics, threading, time

import timed_stream

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("turns")
parser.add_argument("--tokens", type=int, default=32)
parser.add_argument("--llama", action="store_true")
args = parser.parse_args()
first_tokens = []


def ask(prompt):
    path = "/completion" if args.llama else "/v1/completions"
    length = {"n_predict": args.tokens, "ignore_eos": True} if args.llama else {"max_tokens": args.tokens}
    first_tokens.append(timed_stream.ask(args.url + path, {"prompt": prompt, "cache_prompt": True} | length)[0])


begun = time.perf_counter()
with open(args.turns) as file:
    agents = [threading.Thread(target=lambda turns=turns: [ask(prompt) for prompt in turns]) for turns in json.load(file)]
[agent.start() for agent in agents]
[agent.join() for agent in agents]
print(f"{len(agents)} agents, {len(first_tokens)} answers: {time.perf_counter() - begun:.1f} s; first token median "
      f"{statistics.median(first_tokens):.2f} s, longest {max(first_tokens):.2f} s")
