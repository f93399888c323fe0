"""The scenarios of run.py. The script of the model is in `rules`, see scripted_model.py."""
import dataclasses, json, pathlib, typing

from scripted_model import call

HERE = pathlib.Path(__file__).parent
ENDED = "The script has ended."


@dataclasses.dataclass
class Turn:
    """One start of the agent. The server is started again for each."""
    arguments: list
    limit: int  # of tokens of prompts that the server may compute
    text: str = ENDED  # in the output
    files: dict = dataclasses.field(default_factory=dict)  # files of the project that the turn writes, with their texts
    most: int = 10**9  # tokens that the server may compute in each request but the `large` ones
    large: int = 0
    statuses: tuple = ()  # outside 2xx that are expected


@dataclasses.dataclass
class Scenario:
    agent: str
    rules: typing.Callable  # rules of the scripted model for the folder of the project
    turns: list
    context: int = 131_072
    seconds: int = 600
    is_nightly: bool = False


def shell(agent, command):
    """A call of the agent's shell."""
    tool, parameter, more = {
        "claude": ("Bash", "command", {"description": "Test"}), "codex": ("exec_command", "cmd", {}),
        "opencode": ("bash", "command", {"description": "Test"}), "continue": ("Bash", "command", {}),
        "qwen": ("run_shell_command", "command", {"is_background": "false", "description": "Test"}),
        "copilot": ("bash", "command", {"description": "Test"}), "pi": ("bash", "command", {}),
    }[agent]
    return call(tool, **{parameter: command}, **more)


# The tool that shows an image to the model, and its parameter. Qwen Code and Copilot CLI have no setting for a model that
# reads images, so they do not send it.
PICTURE = {"claude": ("Read", "file_path"), "codex": ("view_image", "path"), "opencode": ("read", "filePath"),
           "qwen": ("read_file", "file_path"), "copilot": ("view", "path"), "pi": ("read", "path")}
SHOWN = {"claude", "codex", "opencode", "pi"}
WRITES = {"proof.txt": "ran\n", "second.txt": "two\n"}


def several_tools(agent):
    """Several calls in one turn: two commands, and a tool that shows an image. Then the answer says whether there is one."""
    def rules(project):
        calls = [shell(agent, "echo ran > proof.txt"), shell(agent, "echo two > second.txt")]
        if agent in PICTURE:
            tool, parameter = PICTURE[agent]
            calls.append(call(tool, **{parameter: project / "picture.jpg"}))
        return [("names and since == 0", "\n".join(calls)), ("images", f"{ENDED} It has an image."), ("true", ENDED)]

    return rules


def two_turns(agent, first, again, limits):
    text = f"{ENDED} It has an image." if agent in SHOWN else ENDED
    turns = [Turn(arguments, limit, text, WRITES) for arguments, limit in zip((first, again), limits)]
    return Scenario(agent, several_tools(agent), turns)


def edits(project):
    """aider has no tools. It applies blocks of its edit format `whole`."""
    return [("results == 0 and 'Write the file' in asked or 'Again' in asked", "proof.txt\n```\nran\n```\n"), ("true", ENDED)]


def searches(project):
    """Claude Code searches for a tool of an MCP server, and then calls it."""
    search = call("ToolSearch", query="select:mcp__many__run", max_results=5)
    write_mcp(project)
    return [("'ToolSearch' in names and results == 0", search),
            ("names and (results == 1 or since == 0)", call("mcp__many__run", command="echo ran > proof.txt")), ("true", ENDED)]


def write_mcp(project):
    server = {"command": "python3", "args": [str(HERE / "many_tools.py")]}
    (project.parent / "mcp.json").write_text(json.dumps({"mcpServers": {"many": server}}))


def sub_agents(project):
    """Claude Code starts two agents in one turn. Each of them writes a file. Their prompts are equal up to the task, after which
    the list of deferred tools stands."""
    def agent(word):
        return call("Agent", description="Write a file", prompt=f"Please write {word}.txt.", subagent_type="general-purpose")

    tasks = [(f"names and 'Please write {word}.txt' in asked and since == 0", shell("claude", f"echo {word} > {word}.txt"))
             for word in ("one", "two")]
    return [*tasks, ("'Agent' in names and results == 0", agent("one") + "\n" + agent("two")), ("true", ENDED)]


def forty_turns(project):
    """Calls of a tool, with a search for it at the start and for another tool in the middle."""
    write_mcp(project)
    searches = [call("ToolSearch", query=f"select:mcp__many__{tool}", max_results=5) for tool in ("run", "tool_7")]
    calls = [call(f"mcp__many__{tool}", command="echo ran >> proof.txt") for tool in ("run", "tool_7")]
    return [("'detailed summary' in last", "<summary>The summary of the script: it runs a command.</summary>"),
            ("'ToolSearch' in names and since == 0 and 'Work' in last", searches[0]),
            ("'ToolSearch' in names and since == 0 and 'Again' in last", searches[1]),
            ("names and since < 20 and 'The summary of the script' in asked and since == 1", calls[1]),
            ("names and since < 20", calls[0]), ("true", ENDED)]


def overflows(agent, asks, output="seq 1 3000"):
    """Outputs that are together larger than the context. The agent asks for a summary, in a message with the text `asks`, and
    goes on."""
    def rules(project):
        has_summary = "'The summary of the script' in asked + said"
        return [(f"'{asks}' in last", "<summary>The summary of the script: it writes a file.</summary>"),
                (f"names and {has_summary} and 'is written' not in shown", shell(agent, "echo ran > proof.txt; echo It is written")),
                (f"names and not {has_summary} and since < 9", shell(agent, output)), ("true", ENDED)]

    return rules


# pi takes four characters for a token. It keeps the last 20,000 tokens and summarizes in time, so only an output whose
# characters have a token each exceeds the context.
PI = ("echo >> calls; if [ $(wc -l < calls) -lt 4 ]; then yes The capital of France is Paris. | head -n 1200; "
      "else seq -s ' ' 1 8900; fi")
CODEX = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
AIDER = ["--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--edit-format", "whole"]
SEARCH = ["--mcp-config", "../mcp.json", "--strict-mcp-config", "--allowedTools", "ToolSearch", "mcp__many__run", "mcp__many__tool_7"]
SCENARIOS = {
    "claude": two_turns("claude", ["-p", "Write the file", "--allowedTools", "Bash", "Read"],
                        ["--continue", "-p", "Again", "--allowedTools", "Bash", "Read"], (24_300, 300)),
    "codex": two_turns("codex", ["exec", *CODEX, "Write the file"], ["exec", *CODEX, "resume", "--last", "Again"], (18_700, 400)),
    "opencode": two_turns("opencode", ["run", "Write the file"], ["run", "--continue", "Again"], (16_200, 300)),
    "qwen": two_turns("qwen", ["--yolo", "-p", "Write the file"], ["--continue", "--yolo", "-p", "Again"], (38_000, 6_000)),
    "continue": two_turns("continue", ["-p", "Write the file", "--auto"], ["--resume", "-p", "Again", "--auto"], (3_400, 300)),
    "copilot": two_turns("copilot", ["-p", "Write the file", "--allow-all-tools"],
                         ["--continue", "-p", "Again", "--allow-all-tools"], (24_800, 400)),
    "pi": two_turns("pi", ["-p", "Write the file"], ["--continue", "-p", "Again"], (2_900, 300)),
    "aider": Scenario("aider", edits, [
        Turn([*AIDER, "--message", "Write the file"], 1_300, "Applied edit to proof.txt", {"proof.txt": "ran\n"}),
        Turn([*AIDER, "--restore-chat-history", "--message", "Again"], 700, "Applied edit to proof.txt", {"proof.txt": "ran\n"}),
    ]),
    "claude-search": Scenario("claude", searches, [
        Turn(["-p", "Write the file", *SEARCH], 25_400, files={"proof.txt": "ran\n"}),
        Turn(["--continue", "-p", "Again", *SEARCH], 300, files={"proof.txt": "ran\n"}),
    ]),
    "claude-agents": Scenario("claude", sub_agents, [
        Turn(["-p", "Write the files", "--allowedTools", "Bash", "Agent"], 44_000, files={"one.txt": "one\n", "two.txt": "two\n"}),
    ]),
    "claude-long": Scenario("claude", forty_turns, [
        Turn(["-p", "Work", *SEARCH], 27_000, files={"proof.txt": "ran\n" * 19}, most=300, large=3),
        Turn(["--continue", "-p", "/compact", *SEARCH], 3_500, text=""),
        Turn(["--continue", "-p", "Again", *SEARCH], 7_500, files={"proof.txt": "ran\n" * 18}, most=300, large=3),
    ], is_nightly=True),
    "claude-overflow": Scenario("claude", overflows("claude", "detailed summary"), [
        Turn(["-p", "Write the file", "--allowedTools", "Bash"], 72_000, files={"proof.txt": "ran\n"}),
    ], context=65_536, is_nightly=True),
    "codex-overflow": Scenario("codex", overflows("codex", "CHECKPOINT"), [
        Turn(["exec", *CODEX, "Write the file"], 61_000, files={"proof.txt": "ran\n"}, statuses=(400,)),
    ], context=32_768, is_nightly=True),
    "opencode-overflow": Scenario("opencode", overflows("opencode", "summar"), [
        Turn(["run", "Write the file"], 75_000, files={"proof.txt": "ran\n"}),
    ], context=40_960, is_nightly=True),
    "pi-overflow": Scenario("pi", overflows("pi", "checkpoint", PI), [
        Turn(["-p", "Write the file"], 80_000, files={"proof.txt": "ran\n"}, statuses=(400,)),
    ], context=65_536, is_nightly=True),
}
