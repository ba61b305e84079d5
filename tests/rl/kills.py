"""Kills at random: runs of the command line are stopped again and again, resumed, and must end with the same bytes.

  python tests/rl/kills.py FOLDER [KILLS]

The folder keeps a model, the runs that nobody stopped, and tally.json with every case so far; called again, the script
goes on where it stopped. A case is a run of RUNS that is killed up to four times, by a signal of SIGNALS at a moment of
MOMENTS, and then resumed to its end. Its number alone decides which, so a case can be repeated. The same
metrics.jsonl, rollouts.jsonl, results.json and inputs.json must be left as in the run that nobody stopped, and no
process of graders or environments.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOMENTS = ("imports", "compile", "rollout", "reward", "update", "evaluate", "save")
SAVING = "checkpoints/*/*.orbax-checkpoint-tmp"
COMPARED = ("metrics.jsonl", "rollouts.jsonl", "results.json", "inputs.json")
ENDINGS = (0, 75, 130, *(-number for number in SIGNALS))  # 0: the run was at its end
MARK = "GRPO_JAX_KILLS"  # in the environment of all processes of a case
SECONDS = 600  # after which a process hangs

REWARDS = """
import time

def low(rows, texts):
    time.sleep(0.05)
    return [sum(map(text.count, "01234")) for text in texts]
"""
ENVIRONMENT = """
import asyncio, random
from grpo_jax.data.episodes import Reply
from grpo_jax.data.types import rng

async def reply(example, transcript, key):
    await asyncio.sleep(random.random() / 50)
    said = transcript[-1].action
    return Reply("".join(str(int(x)) for x in rng(*key).integers(0, 8, 2)), reward=float(said.count("3")))

def make():
    return reply
"""
STEPS = ("--steps", "10", "--learning-rate", "1e-2", "--checkpoint-every", "3", "--eval-every", "5")
ROLLOUTS = ("--num-prompts", "4", "--max-tokens", "4", "--rollouts-every", "1", *STEPS)
GRPO = (*ROLLOUTS, "--group-size", "4", "--task", "rows.jsonl")
ON_PAIRS = ("dpo", "kto")  # which have no rollouts
KTO = ("--log-every", "1", "--devices", "2", "--microbatches", "2")
# name -> devices, options
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pmap": (2, (*GRPO, "--reward", "rewards.py:low", "--parallel", "pmap", "--devices", "2")),
    "mesh": (2, (*GRPO, "--reward", "rewards.py:low", "--parallel", "mesh", "--devices", "2", "--fsdp", "2")),
    "lora": (1, (*GRPO, "--reward", "rewards.py:low", "--lora-rank", "2")),
    "ppo": (1, ("--method", "ppo", *ROLLOUTS, "--task", "rows.jsonl", "--reward", "rewards.py:low")),
    "dpo": (1, ("--method", "dpo", "--data", "rows.jsonl", "--num-pairs", "8", *STEPS, "--log-every", "1")),
    "kto": (2, ("--method", "kto", "--data", "rows.jsonl", "--num-completions", "16", *STEPS, *KTO)),
    "staleness": (1, (*GRPO, "--reward", "rewards.py:low", "--staleness", "4", "--correction", "token")),
    "environment": (
        1,
        (*GRPO, "--environment", "environment.py:make", "--max-turns", "2", "--environment-tokens", "4"),
    ),
}


def prepare(folder: Path) -> None:
    """A random model with a tokenizer, rows, a reward and an environment, unless they are there."""
    if (folder / "rows.jsonl").exists():
        return
    import jax

    from experiments.tasks import arithmetic
    from grpo_jax.models.config import ModelConfig
    from grpo_jax.models.huggingface import save_pretrained
    from grpo_jax.models.policy import decoder_policy

    config = ModelConfig(arithmetic.TEXT.vocab_size, 16, 32, 1, 2, 1, 8)
    save_pretrained(folder / "model", jax.jit(decoder_policy(config).init)(jax.random.key(3)), config)
    arithmetic.TEXT.save_tokenizer(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "environment.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{i}+{j}=", "chosen": str(i + j), "rejected": str(i)} for i in range(8) for j in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- a process of a run, which says on its output what it does


def run_and_tell(args: list[str]) -> None:
    """`grpo-jax train`; a line for each program that it compiles, and for each part of a step that begins."""
    import jax

    from grpo_jax.commands import train
    from grpo_jax.runs.folder import RunFolder

    def tell(word: str) -> None:
        print(f"\nat {word}", flush=True)

    timed = RunFolder.timed

    def telling(self: RunFolder, part: str) -> Any:
        tell(part)
        return timed(self, part)

    RunFolder.timed = telling  # type: ignore[method-assign]
    written = "/jax/core/compile/jaxpr_to_mlir_module_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: tell("compile") if event == written else None
    )
    train.command(args)


class Process:
    """A run that is started or resumed, and what it has said so far."""

    def __init__(self, folder: Path, name: str, run: Path, mark: str, *more: str) -> None:
        """Starts it in `folder`; `mark` is how its processes are found."""
        devices, options = RUNS[name]
        resumed = (run / "config.json").exists()
        given = ["--resume"] if resumed else ["--model", "model", *options]
        self.seen: Counter[str] = Counter()
        self.words: list[str] = []
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *filter(None, sys.path)]),
            "XDG_CACHE_HOME": str(folder / "cache"),
            MARK: mark,
        }
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "train", *given, *more, "--run-dir", str(run)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.words.append(line.rstrip())
            if line.startswith("at "):
                self.seen[line[3:].strip()] += 1

    def wait_until(self, reached: Any) -> bool:
        """Whether that was reached before the process ended."""
        while not reached():
            if self.process.poll() is not None:
                return False
            time.sleep(0.001)
        return True

    def end(self) -> int:
        """Waits for it; its exit status, or −1000 where it hangs."""
        try:
            return self.process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -1000


def kill(process: Process, run: Path, moment: str, number: int, dice: random.Random) -> dict[str, Any]:
    """Waits for a moment, sends a signal, and waits for the end; what happened."""
    before = set(run.glob(SAVING))  # of an earlier kill
    if moment == "imports":
        reached = True
        time.sleep(dice.uniform(0, 6))
    elif moment == "save":
        reached = process.wait_until(lambda: bool(set(run.glob(SAVING)) - before))
        time.sleep(dice.uniform(0, 0.02))
    else:
        count = dice.randrange(1, 12)
        reached = process.wait_until(lambda: process.seen[moment] >= count)
        time.sleep(dice.uniform(0, 0.1))
    hit = reached and process.process.poll() is None
    process.process.send_signal(number)
    status = process.end()
    saving = sorted(path.name for path in set(run.glob(SAVING)) - before)
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    found: dict[str, Any] = {"moment": moment, "signal": signal.Signals(number).name, "hit": hit, "status": status}
    found |= {"line": lines[-1][:30] if lines else "", "half_saved": saving}
    # A traceback is Python's own where Ctrl-C meets the imports.
    traced = status != -signal.SIGINT and any(word.startswith("Traceback") for word in process.words)
    return found | ({"said": process.words[-30:]} if traced or status not in ENDINGS else {})


def left(mark: str) -> list[int]:
    """Processes of a case that are still there after ten seconds."""
    for _ in range(100):
        found = []
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdecimal() and f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:  # it has ended, or is another's
                continue
        if not found:
            return []
        time.sleep(0.1)
    return found


def bytes_of(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in COMPARED if (run / name).exists()}


def whole(folder: Path, name: str) -> dict[str, bytes]:
    """What the run leaves that nobody stops; it is made once."""
    run = folder / "whole" / name
    if not (run / "finished").exists():
        shutil.rmtree(run, ignore_errors=True)
        process = Process(folder, name, run, f"whole-{name}")
        assert process.end() == 0, process.words
        (run / "finished").touch()
    return bytes_of(run)


def case(folder: Path, number: int) -> dict[str, Any]:
    """Kills and resumes a run; what happened, and whether it ended with the same bytes."""
    dice = random.Random(number)
    name, mark = list(RUNS)[number % len(RUNS)], f"case-{number}-{os.getpid()}"
    expected, run = whole(folder, name), folder / f"killed-{number}"
    shutil.rmtree(run, ignore_errors=True)
    kills = []
    for _ in range(dice.randrange(1, 5)):
        moment = dice.choice([word for word in MOMENTS if name not in ON_PAIRS or word not in ("rollout", "reward")])
        cold = ("--no-compilation-cache",) if moment == "compile" else ()
        kills.append(kill(Process(folder, name, run, mark, *cold), run, moment, dice.choice(SIGNALS), dice))
    last = Process(folder, name, run, mark)
    status, found = last.end(), bytes_of(run)
    differing = sorted(file for file in expected.keys() | found.keys() if expected.get(file) != found.get(file))
    result = {"case": number, "run": name, "kills": kills, "status": status, "differing": differing, "left": left(mark)}
    if status == 0 and not differing:
        shutil.rmtree(run)
        return result
    return result | {"said": last.words[-30:]}


def is_same(result: dict[str, Any]) -> bool:
    """Whether a case ended as it should: its bytes, no process left, no traceback on the way."""
    told = any("said" in kill for kill in result["kills"])
    return result["status"] == 0 and not result["differing"] and not result["left"] and not told


def main(folder: Path, wanted: int) -> None:
    """Adds cases to the tally until so many kills hit a run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would runs
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    file = folder / "tally.json"
    tally = json.loads(file.read_text()) if file.exists() else []
    while (hits := sum(kill["hit"] for result in tally for kill in result["kills"])) < wanted:
        result = case(folder, len(tally))
        tally.append(result)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(tally, indent=1) + "\n")
        os.replace(temporary, file)
        print(f"{result['run']}: {hits} kills and {sum(kill['hit'] for kill in result['kills'])} more", flush=True)
        if not is_same(result):
            print(json.dumps(result, indent=1), flush=True)
    by = {word: Counter(kill[word] for result in tally for kill in result["kills"] if kill["hit"]) for word in _BY}
    by["run"] = Counter(result["run"] for result in tally for kill in result["kills"] if kill["hit"])
    print(f"{hits} kills in {len(tally)} runs, of which {sum(map(is_same, tally))} ended as they should")
    print("\n".join(f"{word}: {dict(counts)}" for word, counts in by.items()))


_BY = ("moment", "signal")

if __name__ == "__main__":
    if sys.argv[1] == "train":
        run_and_tell(sys.argv[2:])
    else:
        main(Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
