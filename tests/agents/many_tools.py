#!/usr/bin/env python3
"""An MCP server on stdin and stdout with many tools: `run` runs a command in a shell, and the others do nothing. Agents
with a tool search do not send so many tools to the model before it has searched for them. Uses the standard library only.
"""
import json, subprocess, sys

COUNT = 60


def tool(name, description):
    schema = {"type": "object", "properties": {"command": {"type": "string", "description": "A command. " * 20}}, "required": ["command"]}
    return {"name": name, "description": description, "inputSchema": schema}


TOOLS = [tool("run", "Runs a command in a shell.")] + [tool(f"tool_{n}", f"Does nothing, number {n}.") for n in range(COUNT)]


def result(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "many", "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        if params["name"] == "run":
            subprocess.run(params["arguments"]["command"], shell=True, check=True)
        return {"content": [{"type": "text", "text": "done"}]}
    return {}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        answer = {"jsonrpc": "2.0", "id": request["id"], "result": result(request["method"], request.get("params", {}))}
        print(json.dumps(answer), flush=True)
