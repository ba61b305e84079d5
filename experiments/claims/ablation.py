"""What all questions to the sources share: settings, and runs that are kept on disk.

A question is a script with a function of a `Bench` that returns a `findings.Finding`: a table over seeds, and claims
that it bears on. `findings.main` answers one; `experiments.claims.reproduce` answers all, and writes them down.

Letters: S steps, E evaluations, M held-out prompts, n samples of each (and a greedy one).
"""

import dataclasses
import hashlib
import inspect
import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console

import grpo_jax
from experiments.claims import testbeds
from experiments.claims.testbeds import ADDITIONS, Testbed
from experiments.whole_run import (
    DeviceTask,
    Heldout,
    History,
    by_prompt,
    compile_runs,
    heldout_of,
    prompts_of,
    stacked,
    whole_run,
)
from grpo_jax.checks import validate
from grpo_jax.config import GRPOConfig, PPOConfig, recipe, run_of, with_options
from grpo_jax.errors import UsageError
from grpo_jax.functional.presets import PRESETS
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.options import options_of
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.ppo import add_critic, critic_policy, ppo_method
from grpo_jax.rl.types import Method
from grpo_jax.runs.folder import RunFolder, differing_options, read_object
from grpo_jax.runs.progress import in_time


class Size(NamedTuple):
    """The size of a preset."""

    seeds: int  # of the first look
    steps: int  # of a run
    num_prompts: int  # of a step, at 8 completions each
    heldout: int  # prompts, or as many as the task has
    evaluations: int  # during a run, at equal distances
    warm_steps: int  # supervised ones before


SIZES = {
    "smoke": Size(seeds=2, steps=4, num_prompts=8, heldout=16, evaluations=2, warm_steps=5),
    "cpu": Size(seeds=10, steps=60, num_prompts=32, heldout=1000, evaluations=1, warm_steps=700),
    "gpu": Size(seeds=20, steps=200, num_prompts=64, heldout=1000, evaluations=4, warm_steps=700),
}
SAMPLES = 7  # of a held-out prompt: with the greedy one a group of 8, so that no completion only fills the shape
Preset = Literal["smoke", "cpu", "gpu"]
START, COIN = "no training", "coin toss"  # the controls of every table
TUNED_ON = (10, 11, 12, 13, 14)  # seeds that settings were chosen on; no question uses them
# Eight updates for each rollout, at a smaller rate, with which they learned in earlier runs on `ARITHMETIC`.
REUSED: dict[str, Any] = {"epochs": 2, "minibatches": 4, "learning_rate": 4e-4}


@dataclass(frozen=True)
class Config:
    """Options of a question to the sources."""

    preset: Preset = "cpu"
    """smoke: tests that everything works; minutes, most of them compilation. cpu: 10 seeds of 60 steps, for two cores.
    gpu: 20 seeds of 200 larger steps, side by side."""
    seed: int = 0
    """The first random seed. Seeds 10 to 14 are skipped: settings were tuned on them."""
    num_seeds: int | None = None
    """Runs of each setting, with seeds from `seed` on; None: the preset's number. Runs of other numbers are shared:
    more seeds are new runs for the new seeds alone."""
    run_dir: Path = Path("runs/ablations")
    """Folder of the runs, with a folder for each preset. A run that is there is not repeated."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that the next start reads them."""


def size_of(config: Config) -> Size:
    """The size of the preset, with as many seeds as are asked for.

    Raises:
      UsageError: there are none.
    """
    size = SIZES[config.preset]
    if config.num_seeds is None:
        return size
    if not 1 <= config.num_seeds <= 1000:
        raise UsageError(f"num_seeds is {config.num_seeds}: it must be at least 1, and at most 1000")
    return size._replace(seeds=config.num_seeds)


# ---- settings


class Setting(NamedTuple):
    """A method with its options on a testbed; it is run with every seed."""

    testbed: Testbed
    method: Literal["grpo", "ppo"]
    shape: Mapping[str, Any]  # options that change the compiled program
    numbers: Mapping[str, float]  # options, also of the reward, that are traced: they do not change the program

    def changed(self, **changes: Any) -> "Setting":
        """The setting with some options of the method or the reward replaced."""
        known = options_of(PPOConfig()).keys() | self.testbed.options.keys()
        if changes.keys() - known:
            unknown = ", ".join(sorted(changes.keys() - known))
            reward = f"the reward of {self.testbed.name}"
            raise UsageError(f"{unknown}: neither GRPOConfig, PPOConfig nor {reward} has such an option")
        numbers = {name: value for name, value in changes.items() if name in self.numbers}
        shape = {name: value for name, value in changes.items() if name not in self.numbers}
        return self._replace(shape={**self.shape, **shape}, numbers={**self.numbers, **numbers})


def grpo(testbed: Testbed = ADDITIONS, preset: str = "introduction_post", **changes: Any) -> Setting:
    """The algorithm of the posts or another preset, with its constants and the testbed's learning rate.

    β is 0.01 where a preset has a KL, so that presets differ in what they are.

    Args:
      testbed: the task.
      preset: of `functional.presets`.
      changes: as for `Setting.changed`. With `kl_coef` there is a KL, at 0 as well.
    """
    published = PRESETS[preset]
    numbers = {"learning_rate": testbed.learning_rate, "temperature": 1.0, "temperature_spread": 0.0}
    numbers |= {"entropy_coef": 0.0} | dict(published.constants) | dict(testbed.options)
    if published.kl_coef or "kl_coef" in changes:  # if it were traced elsewhere, the program would need a reference
        numbers["kl_coef"] = 0.01
    shape = {"preset": preset, "group_size": 8}  # the posts' own is 12: all methods have as many
    return Setting(testbed, "grpo", shape, numbers).changed(**changes)


def ppo(testbed: Testbed = ADDITIONS, **changes: Any) -> Setting:
    """PPO with a critic of its own, on groups like GRPO's.

    Its settings are those of `experiments.ppo`, which were chosen by the training reward on seeds 10 and 11.
    """
    numbers = {"learning_rate": testbed.learning_rate, "critic_learning_rate": 1e-3, "value_clip": 0.2}
    numbers |= {"kl_coef": 0.02, "gae_lambda": 0.95, "epsilon_low": 0.2, "epsilon_high": 0.2, "entropy_coef": 0.0}
    numbers |= dict(testbed.options)
    return Setting(testbed, "ppo", {"group_size": 8}, numbers).changed(**changes)


# ---- runs


class Runs(NamedTuple):
    """A setting's runs, one for each seed."""

    metrics: dict[str, np.ndarray]  # name -> [seeds, S]
    scores: np.ndarray  # gold scores of held-out completions, [seeds, E, M, n + 1, ...]; the greedy one is last

    @property
    def curve(self) -> np.ndarray:
        """Mean of sampled completions over held-out prompts, `[seeds, E, ...]`."""
        return self.scores[:, :, :, :-1].mean((2, 3))

    @property
    def diverged(self) -> int:
        """How many runs diverged: from then on their score is its floor."""
        return int(self.metrics["diverged"].any(1).sum())

    @property
    def final(self) -> np.ndarray:
        """`curve` at the last evaluation, `[seeds, ...]`."""
        return self.curve[:, -1]


class Bench:
    """Runs settings with the seeds of a preset, and keeps their results on disk."""

    def __init__(self, config: Config, say: Callable[[str], None] = lambda words: None) -> None:
        """Opens the folder of a preset.

        Args:
          config: the options.
          say: called with a few words on the progress.

        Raises:
          UsageError: the seed is impossible, or the folder has runs of another size, code, jax or kind of device.
        """
        if not 0 <= config.seed < 2**31:
            raise UsageError(f"seed is {config.seed}: it must be between 0 and 2^31 - 1")
        self.size, self.say = size_of(config), say
        some = range(config.seed, config.seed + self.size.seeds + len(TUNED_ON))
        self.seeds = [seed for seed in some if seed not in TUNED_ON][: self.size.seeds]
        options = {"code": code_checksum(), **self.size._replace(seeds=0)._asdict()}
        options |= {"jax": jax.__version__, "backend": jax.default_backend()}
        folder = config.run_dir.expanduser() / config.preset
        try:
            self.run = RunFolder(folder, options)
        except UsageError as refused:
            try:
                differing = ", ".join(differing_options(read_object(folder / "config.json"), options))
            except UsageError:
                raise refused from None
            raise UsageError(f"{folder} has runs that differ in {differing}: name another --run-dir") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} cannot be used ({error}): name another --run-dir") from None
        (self.run.path / "runs").mkdir(exist_ok=True)
        self._starts_folder = RunFolder(self.run.path / "starts", options, console=Console(quiet=True))
        self._starts: dict[tuple[str, int], Any] = {}
        self._programs: dict[tuple[str, int], Program] = {}

    @property
    def of_what(self) -> str:
        """What the numbers of tables are means over."""
        seeds = ", ".join(map(str, self.seeds))
        return f"seed{'s' * (len(self.seeds) > 1)} {seeds}; runs of {self.size.steps} steps"

    def runs(self, settings: Mapping[str, Setting]) -> dict[str, Runs]:
        """The runs of settings, by name. Runs that are not on disk yet are done first."""
        missing: dict[str, dict[Path, tuple[Setting, int]]] = {}  # a setting with two names is run once
        for setting in settings.values():
            of_setting = [(setting, seed) for seed in self.seeds]
            new = {file: job for job in of_setting if not (file := self.file(*job)).exists()}
            if new:
                self.check(setting)
                missing.setdefault(self.program(setting), {}).update(new)
        everything = len(settings) * len(self.seeds)
        left, timed, spent = sum(map(len, missing.values())), 0, 0.0  # runs; those without compilation, and their time
        for program, files in missing.items():
            of_one_program = list(files.values())
            width = at_once(len(of_one_program))
            for begin in range(0, len(of_one_program), width):
                compiles, started = (program, width) not in self._programs, time.perf_counter()
                words = f"{everything - left} of {everything} runs are done"
                words += f", about {in_time(spent / timed * left)} left" if timed else ""
                self.say(words + ("; compiling (may take minutes)" if compiles else ""))
                several = of_one_program[begin : begin + width]
                self._run_jobs(several, width)
                left -= len(several)
                if not compiles:
                    timed, spent = timed + len(several), spent + time.perf_counter() - started
        return {name: _read([self.file(setting, seed) for seed in self.seeds]) for name, setting in settings.items()}

    def check(self, setting: Setting) -> None:
        """Refuses impossible numbers. A critic's learning rate may be 0, which keeps the critic as it is."""
        config = self.config(setting)
        known = options_of(config)
        given: dict[str, Any] = {name: value for name, value in setting.numbers.items() if name in known}
        validate(run_of(with_options(config, **given)), compares_groups=setting.method == "grpo")

    def trained(self, setting: Setting) -> list[Any]:
        """Returns the models by role at the end of runs, for each seed. They are not kept on disk."""
        jobs, params = [(setting, seed) for seed in self.seeds], list[Any]()
        width = at_once(len(jobs))
        for begin in range(0, len(jobs), width):
            self.say(f"{begin} of {len(jobs)} runs")
            history, _ = self.histories(jobs[begin : begin + width], width)
            params += [jax.tree.map(lambda x, i=i: x[i], history.params) for i in range(width)]
        return params[: len(jobs)]

    def start(self, testbed: Testbed, seed: int) -> Params:
        """The parameters that training starts from."""
        if (testbed.name, seed) not in self._starts:
            self.say(f"a start of {testbed.name}, seed {seed}")
            params = testbed.start(seed, self.size.warm_steps, self._starts_folder)
            self._starts[testbed.name, seed] = jax.device_get(params)
        return self._starts[testbed.name, seed]

    def config(self, setting: Setting) -> GRPOConfig | PPOConfig:
        """The configuration of a setting's runs, without the numbers that are traced."""
        shape: dict[str, Any] = {
            "steps": self.size.steps,
            "num_prompts": self.size.num_prompts,
            "max_tokens": setting.testbed.max_tokens,
            "eval_samples": SAMPLES,
            "learning_rate": setting.testbed.learning_rate,
        } | dict(setting.shape)
        shape.setdefault("eval_every", max(1, shape["steps"] // self.size.evaluations))
        return with_options(PPOConfig(), **shape) if setting.method == "ppo" else recipe(**shape)

    def task(self, setting: Setting, seed: int) -> DeviceTask:
        """The task of a setting's runs with a seed."""
        num_prompts = run_of(self.config(setting)).sampling.num_prompts
        return setting.testbed.task(num_prompts=num_prompts, seed=seed, heldout=self.size.heldout)

    def histories(self, jobs: Sequence[tuple[Setting, int]], width: int) -> tuple[History, Heldout]:
        """Runs settings of one program with their seeds at once.

        Fewer than `width` are filled up with copies of the last one, so that only one shape is compiled.
        """
        key = self.program(jobs[0][0]), width
        if key not in self._programs:
            self._programs[key] = self._compile(jobs[0][0], width)
        program, filled = self._programs[key], [*jobs, *[jobs[-1]] * (width - len(jobs))]
        setting, steps = jobs[0][0], run_of(self.config(jobs[0][0])).steps
        starts = [self.start(setting.testbed, seed) for _, seed in filled]
        is_ppo, model = setting.method == "ppo", setting.testbed.model
        models = [add_critic(model, params) if is_ppo else {"policy": params} for params in starts]
        prompts = [prompts_of(self.task(setting, seed), steps) for _, seed in filled]
        numbers = {name: np.array([s.numbers[name] for s, _ in filled], np.float32) for name in setting.numbers}
        seeds = [seed for _, seed in filled]
        if "draw" in numbers:  # so that each seed has spoilt rewards of its own
            numbers["draw"] = np.array(seeds, np.float32)
        history = program.run_all(stacked(models), stacked(prompts), program.heldout, seeds, numbers)
        return jax.device_get(history), program.heldout

    def file(self, setting: Setting, seed: int) -> Path:
        """The file of a run, named by a checksum of its options."""
        digest = hashlib.sha256(self._description(setting, seed).encode()).hexdigest()[:16]
        return self.run.path / "runs" / f"{setting.testbed.name}-{setting.method}-{digest}.npz"

    def program(self, setting: Setting) -> str:
        """A key that is equal for settings which share a compiled program."""
        shape = options_of(self.config(setting))
        model = dataclasses.asdict(setting.testbed.model)
        return json.dumps([setting.testbed.name, model, setting.method, shape, sorted(setting.numbers)])

    def _description(self, setting: Setting, seed: int) -> str:
        described = [self.program(setting), dict(sorted(setting.numbers.items())), seed]
        source = Path(inspect.getsourcefile(getattr(setting.testbed.task, "func", setting.testbed.task)) or "")
        if source not in _sources():  # a testbed of the user, whose reward may change
            described.append(hashlib.sha256(source.read_bytes()).hexdigest())
        return json.dumps(described)

    def _run_jobs(self, jobs: Sequence[tuple[Setting, int]], width: int) -> None:
        """Runs settings of one program, and writes their files."""
        history, heldout = self.histories(jobs, width)
        for i, (setting, seed) in enumerate(jobs):
            file = self.file(setting, seed)
            numbers: dict[str, Any] = {name: values[i] for name, values in history.metrics.items()}
            scores = by_prompt(heldout, np.asarray(history.heldout[i]))
            most = run_of(self.config(setting)).optimizer.max_skipped
            numbers["diverged"] = np.maximum.accumulate(numbers["skipped"] >= most)  # where the ordinary loop stops
            if numbers["diverged"].any():
                self.run.console.print(f"seed {seed} of {setting.method} on {setting.testbed.name} diverged")
                numbers["gold"] = np.where(numbers["diverged"], 0.0, numbers["gold"])
                scores = with_floor(scores, numbers["diverged"])
            temporary = file.with_suffix(f".{os.getpid()}.tmp")
            with temporary.open("wb") as out:
                np.savez_compressed(out, setting=self._description(setting, seed), scores=scores, **numbers)
            os.replace(temporary, file)

    def _compile(self, setting: Setting, width: int) -> "Program":
        config, task, model = self.config(setting), self.task(setting, 0), setting.testbed.model

        def of_ppo(policy: Policy, config: Any) -> Method:
            return ppo_method(policy, critic_policy(model), config)

        method = of_ppo if setting.method == "ppo" else grpo_method
        run = whole_run(setting.testbed.policy(model), task, config, method, heldout_temperature=1.0)
        on_cpu = jax.default_backend() == "cpu"
        return Program(
            compile_runs(run, side_by_side=not on_cpu, devices=width if on_cpu else 1), heldout_of(task, run_of(config))
        )


class Program(NamedTuple):
    """Several whole runs, compiled as one program."""

    run_all: Callable[..., History]
    heldout: Heldout


def at_once(count: int) -> int:
    """How many of `count` runs one call does: one for each core, or up to 40 side by side on an accelerator."""
    if jax.default_backend() != "cpu":
        return min(count, 40)
    return max(1, min(count, jax.local_device_count(), cores()))


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_floor(scores: np.ndarray, diverged: np.ndarray) -> np.ndarray:
    """Scores `[E, M, n + 1, ...]` with 0 for the first number of evaluations after a step that diverged, bool `[S]`."""
    late = np.linspace(0, len(diverged), len(scores)) > np.argmax(diverged)
    floored = scores.astype(np.float32)
    of_score = floored if floored.ndim == 3 else floored[..., 0]
    of_score[late] = 0
    return floored


def code_checksum() -> str:
    """A checksum of the code that makes runs: parts of the package, settings, testbeds, and what those start from.

    The rule, pages, and the words of claims are not in it: when they change no run is repeated.
    """
    return hashlib.sha256(b"".join(file.read_bytes() for file in _sources())).hexdigest()[:16]


def _sources() -> list[Path]:
    experiments, package = Path(__file__).parents[1], Path(grpo_jax.__file__).parent
    parts = ("functional", "models", "sampling", "data", "tasks", "rl", "offline")
    of_package = [file for part in parts for file in sorted((package / part).rglob("*.py"))]
    of_starts = [experiments / name for name in ("arithmetic.py", "common.py", "multi_objective.py", "whole_run.py")]
    return [package / "config.py", *of_package, *of_starts, Path(__file__), Path(testbeds.__file__)]


def _read(files: Sequence[Path]) -> Runs:
    loaded = [_numbers_of(file) for file in files]
    names = loaded[0].keys() - {"setting", "scores"}
    metrics = {name: np.stack([run[name] for run in loaded]) for name in sorted(names)}
    return Runs(metrics, np.stack([run["scores"] for run in loaded]))


def _numbers_of(file: Path) -> dict[str, np.ndarray]:
    """What `_run_jobs` wrote."""
    try:
        return dict(np.load(file))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{file} is damaged ({error}): delete it, and the run is done again") from None


def smaller_steps(bench: Bench) -> dict[str, int]:
    """Options for steps of half as many prompts as the preset's, for testbeds with longer completions."""
    return {"num_prompts": bench.size.num_prompts // 2}
