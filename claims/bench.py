"""Runs of settings on testbeds, one for each seed, kept on disk.

Letters: S steps, E evaluations, M held-out prompts, n samples of each (and a greedy one).
"""

import dataclasses
import hashlib
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
from claims.testbeds import TESTBEDS, Testbed
from experiments import whole_run
from grpo_jax.config import PPO, GRPOConfig, recipe, validate, with_options
from grpo_jax.errors import UsageError
from grpo_jax.functional.presets import PRESETS
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.options import options_of
from grpo_jax.rl.ppo import add_critic, critic_policy
from grpo_jax.runs.folder import RunFolder
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
TUNED_ON = (10, 11, 12, 13, 14)  # seeds that settings were chosen on; no question uses them
# Eight updates for each rollout, at a smaller rate, with which they learned in earlier runs on `ARITHMETIC`.
REUSED: dict[str, Any] = {"epochs": 2, "minibatches": 4, "learning_rate": 4e-4}


@dataclass(frozen=True)
class Config:
    """Options of the claims."""

    preset: Literal["smoke", "cpu", "gpu"] = "cpu"
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
    only: tuple[str, ...] = ()
    """Questions to answer and print, without pages; names of files in claims/questions."""
    look: Literal[10, 20, 40] | None = None
    """Seeds of the look, for questions that the looks before left open. None: the first look, or `num_seeds`."""
    out: Path = Path("runs/results")
    """Folder for RESULTS.md, and for its other pages in docs/. `--out .` replaces the pages of this repository."""
    add_to: Path | None = None
    """File of numbers that gets the seeds of --only, after those that it has. None: they are only printed."""
    numbers: tuple[Path, ...] = ()
    """Files of numbers to make the pages of, instead of runs. The first decides; others, of other machines, are put
    beside it."""


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

# PPO as in `experiments.ppo`, whose settings were chosen by the training reward on seeds 10 and 11.
PPO_NUMBERS = {"critic_learning_rate": 1e-3, "value_clip": 0.2, "kl_coef": 0.02, "gae_lambda": 0.95}
PPO_NUMBERS |= {"epsilon_low": 0.2, "epsilon_high": 0.2}


class Setting(NamedTuple):
    """A method with its options on a testbed; it is run with every seed."""

    testbed: Testbed
    method: Literal["grpo", "ppo"]
    shape: Mapping[str, Any]  # options that change the compiled program
    numbers: Mapping[str, float]  # options, also of the reward, that are traced: they do not change the program


def make_setting(
    testbed: str | Testbed = "additions",
    method: Literal["grpo", "ppo"] = "grpo",
    preset: str = "introduction_post",
    *,
    reused: bool = False,
    **options: Any,
) -> Setting:
    """Returns a method on a testbed, with the testbed's learning rate.

    GRPO has the constants of its preset, and β is 0.01 where a preset has a KL, so that presets differ in what they
    are. PPO has a critic of its own, on groups like GRPO's.

    Args:
      testbed: one of `testbeds.TESTBEDS`.
      method: "grpo" or "ppo".
      preset: of `functional.presets`, for GRPO; the default is the algorithm of the posts.
      reused: whether each rollout has the eight updates of `REUSED`.
      options: of the method and of the testbed's reward. With `kl_coef` there is a KL, at 0 as well. `prompts` is a
        factor on the preset's prompts of a step, `evaluations` replaces the preset's number of them.

    Raises:
      UsageError: there is no such testbed or option.
    """
    if isinstance(testbed, str) and testbed not in TESTBEDS:
        raise UsageError(f"there is no testbed {testbed!r}: name one of {', '.join(TESTBEDS)}")
    bed = TESTBEDS[testbed] if isinstance(testbed, str) else testbed
    unknown = options.keys() - options_of(PPO).keys() - bed.options.keys() - {"prompts", "evaluations"}
    if unknown:
        reward = f"the reward of {bed.name}"
        raise UsageError(f"{', '.join(sorted(unknown))}: neither GRPOConfig nor {reward} has such an option")
    numbers = {"learning_rate": bed.learning_rate, "entropy_coef": 0.0} | dict(bed.options)
    shape: dict[str, Any] = {"group_size": 8}  # the posts' own is 12: all methods have as many
    if method == "ppo":
        numbers |= PPO_NUMBERS
    else:
        published, shape["preset"] = PRESETS[preset], preset
        numbers |= {"temperature": 1.0, "temperature_spread": 0.0} | dict(published.constants)
        if published.kl_coef or "kl_coef" in options:  # if it were traced elsewhere, the program would need a reference
            numbers["kl_coef"] = 0.01
    for name, value in ((REUSED if reused else {}) | options).items():
        (numbers if name in numbers else shape)[name] = value
    return Setting(bed, method, shape, numbers)


def config_of(setting: Setting, size: Size) -> GRPOConfig:
    """Returns the configuration of a setting's runs, without the numbers that are traced."""
    shape = dict(setting.shape)
    steps = shape.get("steps", size.steps)
    shape = {
        "steps": steps,
        "num_prompts": int(size.num_prompts * shape.pop("prompts", 1)),
        "max_tokens": setting.testbed.max_tokens,
        "eval_samples": SAMPLES,
        "eval_every": max(1, steps // shape.pop("evaluations", size.evaluations)),
        "learning_rate": setting.testbed.learning_rate,
    } | shape
    if "staleness" in shape:
        shape["staleness"] = min(shape["staleness"], steps - 1)
    return with_options(PPO, **shape) if setting.method == "ppo" else recipe(**shape)


# ---- runs


class Runs(NamedTuple):
    """A setting's runs, one for each seed."""

    setting: Setting
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


# Several whole runs, compiled as one program, and what they are evaluated on.
Program = tuple[Callable[..., whole_run.History], whole_run.Heldout]


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
        self.preset, self.size, self.say = config.preset, size_of(config), say
        some = range(config.seed, config.seed + self.size.seeds + len(TUNED_ON))
        self.seeds = [seed for seed in some if seed not in TUNED_ON][: self.size.seeds]
        options = {"code": code_checksum(), **self.size._replace(seeds=0)._asdict()}
        options |= {"jax": jax.__version__, "backend": jax.default_backend()}
        folder = config.run_dir.expanduser() / config.preset
        try:
            self.run = RunFolder(folder, options)
        except (UsageError, OSError, ValueError) as error:
            raise UsageError(f"{folder} cannot be used ({error}): name another --run-dir") from None
        (self.run.path / "runs").mkdir(exist_ok=True)
        self._starts_folder = RunFolder(self.run.path / "starts", options, console=Console(quiet=True))
        self._starts: dict[tuple[str, int], Any] = {}
        self._programs: dict[tuple[str, int], Program] = {}

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
        return {name: self._read(setting) for name, setting in settings.items()}

    def _read(self, setting: Setting) -> Runs:
        loaded = [read_run(self.file(setting, seed)) for seed in self.seeds]
        names = loaded[0].keys() - {"setting", "scores"}
        metrics = {name: np.stack([run[name] for run in loaded]) for name in sorted(names)}
        return Runs(setting, metrics, np.stack([run["scores"] for run in loaded]))

    def check(self, setting: Setting) -> None:
        """Refuses impossible numbers. A critic's learning rate may be 0, which keeps the critic as it is."""
        config = config_of(setting, self.size)
        known = options_of(config).keys() - {"critic_learning_rate"}
        numbers: dict[str, Any] = {name: value for name, value in setting.numbers.items() if name in known}
        validate(with_options(config, **numbers))

    def trained(self, setting: Setting) -> list[Any]:
        """Returns the models by role at the end of runs, for each seed. They are not kept on disk."""
        jobs = [(setting, seed) for seed in self.seeds]
        width = at_once(len(jobs))
        parts = [self.histories(jobs[i : i + width], width)[0].params for i in range(0, len(jobs), width)]
        return [jax.tree.map(lambda x, i=i: x[i], part) for part in parts for i in range(width)][: len(jobs)]

    def start(self, testbed: Testbed, seed: int) -> Params:
        """The parameters that training starts from."""
        if (testbed.name, seed) not in self._starts:
            self.say(f"a start of {testbed.name}, seed {seed}")
            params = testbed.start(seed, self.size.warm_steps, self._starts_folder)
            self._starts[testbed.name, seed] = jax.device_get(params)
        return self._starts[testbed.name, seed]

    def task(self, setting: Setting, seed: int) -> whole_run.DeviceTask:
        """The task of a setting's runs with a seed."""
        num_prompts = config_of(setting, self.size).sampling.num_prompts
        return setting.testbed.task(num_prompts=num_prompts, seed=seed, heldout=self.size.heldout)

    def histories(self, jobs: Sequence[tuple[Setting, int]], width: int) -> tuple[whole_run.History, whole_run.Heldout]:
        """Runs settings of one program with their seeds at once.

        Fewer than `width` are filled up with copies of the last one, so that only one shape is compiled.
        """
        key = self.program(jobs[0][0]), width
        if key not in self._programs:
            self._programs[key] = self._compile(jobs[0][0], width)
        (run_all, heldout), filled = self._programs[key], [*jobs, *[jobs[-1]] * (width - len(jobs))]
        setting, steps = jobs[0][0], config_of(jobs[0][0], self.size).steps
        starts = [self.start(setting.testbed, seed) for _, seed in filled]
        is_ppo, model = setting.method == "ppo", setting.testbed.model
        models = [add_critic(model, params) if is_ppo else {"policy": params} for params in starts]
        prompts = [whole_run.prompts_of(self.task(setting, seed), steps) for _, seed in filled]
        numbers = {name: np.array([s.numbers[name] for s, _ in filled], np.float32) for name in setting.numbers}
        seeds = [seed for _, seed in filled]
        if "draw" in numbers:  # so that each seed has spoilt rewards of its own
            numbers["draw"] = np.array(seeds, np.float32)
        history = run_all(whole_run.stacked(models), whole_run.stacked(prompts), heldout, seeds, numbers)
        return jax.device_get(history), heldout

    def file(self, setting: Setting, seed: int) -> Path:
        """The file of a run, named by a checksum of its options."""
        digest = hashlib.sha256(self._description(setting, seed).encode()).hexdigest()[:16]
        return self.run.path / "runs" / f"{setting.testbed.name}-{setting.method}-{digest}.npz"

    def program(self, setting: Setting) -> str:
        """A key that is equal for settings which share a compiled program."""
        shape = options_of(config_of(setting, self.size))
        model = dataclasses.asdict(setting.testbed.model)
        return json.dumps([setting.testbed.name, model, setting.method, shape, sorted(setting.numbers)])

    def _description(self, setting: Setting, seed: int) -> str:
        return json.dumps([self.program(setting), dict(sorted(setting.numbers.items())), seed])

    def _run_jobs(self, jobs: Sequence[tuple[Setting, int]], width: int) -> None:
        """Runs settings of one program, and writes their files."""
        history, heldout = self.histories(jobs, width)
        for i, (setting, seed) in enumerate(jobs):
            file = self.file(setting, seed)
            numbers: dict[str, Any] = {name: values[i] for name, values in history.metrics.items()}
            scores = whole_run.by_prompt(heldout, np.asarray(history.heldout[i]))
            most = config_of(setting, self.size).optimizer.max_skipped
            numbers["diverged"] = np.maximum.accumulate(numbers["skipped"] >= most)  # where the ordinary loop stops
            if numbers["diverged"].any():
                self.run.console.print(f"seed {seed} of {setting.method} on {setting.testbed.name} diverged")
                numbers["gold"] = np.where(numbers["diverged"], 0.0, numbers["gold"])
                scores = with_floor(scores, numbers["diverged"])
            temporary = file.with_suffix(f".{os.getpid()}.tmp")
            with temporary.open("wb") as out:
                np.savez_compressed(out, setting=self._description(setting, seed), scores=scores, **numbers)
            os.replace(temporary, file)

    def _compile(self, setting: Setting, width: int) -> Program:
        config, task, model = config_of(setting, self.size), self.task(setting, 0), setting.testbed.model
        policies = {"policy": setting.testbed.policy(model), "critic": critic_policy(model)}
        run = whole_run.whole_run(policies, task, config, heldout_temperature=1.0)
        on_cpu = jax.default_backend() == "cpu"
        run_all = whole_run.compile_runs(run, side_by_side=not on_cpu, devices=width if on_cpu else 1)
        return run_all, whole_run.heldout_of(task, config)


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
    (floored if floored.ndim == 3 else floored[..., 0])[late] = 0
    return floored


def code_checksum() -> str:
    """A checksum of the code that makes runs: parts of the package, settings, testbeds, and what those start from.

    The rule, pages, and the words of claims are not in it: when they change no run is repeated.
    """
    return hashlib.sha256(b"".join(file.read_bytes() for file in _sources())).hexdigest()[:16]


def _sources() -> list[Path]:
    experiments, package = Path(whole_run.__file__).parent, Path(grpo_jax.__file__).parent
    parts = ("functional", "models", "sampling", "data", "tasks", "rl", "offline")
    folders = [experiments / "tasks", *(package / part for part in parts)]
    of_package = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    of_starts = [experiments / name for name in ("arithmetic.py", "common.py", "multi_objective.py", "whole_run.py")]
    steps = [package / name for name in ("config.py", "step.py", "training/phases.py")]
    return [*steps, *of_package, *of_starts, Path(__file__), Path(__file__).with_name("testbeds.py")]


def read_run(file: Path) -> dict[str, np.ndarray]:
    """Returns the metrics and scores of a run.

    Raises:
      UsageError: the file is damaged.
    """
    try:
        return dict(np.load(file))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{file} is damaged ({error}): delete it, and the run is done again") from None
