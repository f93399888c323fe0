"""Runs scenarios of real coding agents: see run.sh."""
import json, os, pathlib, shutil, subprocess, sys, threading, time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
import scripted_model
from free_port import free_port
from scenarios import SCENARIOS

HERE = pathlib.Path(__file__).parent


class Failed(Exception):
    pass


def requests_in(log, allowed):
    """The prompts of all answers in a log: pairs of tokens and computed tokens, in the order of their ends."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    is_status = lambda line: 200 <= line.get("status", 200) < 300 or line["status"] in allowed
    wrong = [line for line in lines if line["level"] in ("WARN", "ERROR") and line.get("status") not in allowed or not is_status(line)]
    answers = [line for line in lines if line.get("completion_tokens")]
    if wrong or not answers:
        raise Failed(f"{len(answers)} answers; not expected: {wrong}")
    return [(line["prompt_tokens"], line["prompt_tokens"] - line["cached_tokens"]) for line in answers]


def run(scenario, binary, cache, folder):
    """Runs the turns of a scenario. Returns a summary."""
    home, project = folder / "home", folder / "project"
    home.mkdir(parents=True)
    project.mkdir()
    scripted_model.write(folder / "scripted", scenario.rules(project), scenario.context)
    port = free_port()
    # Nothing of the caller's environment reaches the agent or the server.
    environment = {
        "HOME": str(home), "PATH": f"{cache}/node_modules/.bin:{cache}/aider/bin:{os.environ['PATH']}", "LANG": "C.UTF-8",
        "MOESTRO_LOG_LEVEL": "debug", "MOESTRO_LOG_FORMAT": "json", "CONTINUE_TELEMETRY_ENABLED": "0", "COPILOT_OFFLINE": "true",
    }
    summary = []
    for number, turn in enumerate(scenario.turns):
        for file in turn.files:
            (project / file).unlink(missing_ok=True)
        shutil.copy(HERE / "../fixtures/pictures/baseline.jpg", project / "picture.jpg")
        command = [binary, "launch", scenario.agent, "--yes", "--model", folder / "scripted", "--port", str(port), "--", *turn.arguments]
        with open(folder / f"out-{number}", "w") as out, open(folder / f"err-{number}", "w") as err:
            status = subprocess.run(command, cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                    timeout=scenario.seconds).returncode
        log = home / ".local/state/moestro/launch.log"
        log = log.rename(folder / f"log-{number}")
        if status != 0:
            raise Failed(f"turn {number} ended with {status}")
        prompts = requests_in(log, turn.statuses)
        computed = [computed for _, computed in prompts]
        summary.append(f"{sum(computed)} of {sum(tokens for tokens, _ in prompts)} in {len(prompts)} requests")
        for file, text in turn.files.items():
            if not (project / file).exists() or (project / file).read_text() != text:
                raise Failed(f"turn {number}: {file} is not as expected; computed {prompts}")
        if turn.text not in (folder / f"out-{number}").read_text():
            raise Failed(f"turn {number}: the output has no {turn.text!r}; computed {prompts}")
        if sum(computed) > turn.limit or sum(tokens > turn.most for tokens in computed) > turn.large:
            raise Failed(f"turn {number}: of {prompts} too many tokens were computed, {sum(computed)} in total")
    return "; ".join(summary)


def main():
    binary, cache, scratch, *names = sys.argv[1:]
    is_nightly = "--nightly" in names
    names = [name for name in names if name != "--nightly"]
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        sys.exit(f"there is no scenario {unknown}; there are {list(SCENARIOS)}")
    chosen = names or [name for name, scenario in SCENARIOS.items() if scenario.is_nightly == is_nightly]
    failed, begun = [], time.monotonic()

    def check(name):
        folder = pathlib.Path(scratch) / name
        try:
            summary = run(SCENARIOS[name], binary, cache, folder)
            print(f"ok      {name} ({time.monotonic() - begun:.0f} s): computed {summary}", flush=True)
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            files = [file for file in sorted(folder.iterdir()) if file.is_file()]
            ends = [f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-40:]) for file in files]
            print("\n".join([*ends, f"FAILED  {name}: {error}"]), flush=True)

    threads = [threading.Thread(target=check, args=[name]) for name in chosen]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    sys.exit(bool(failed))


main()
