"""GRPO in five lines: a model, a reward and prompts. `train.train` is for everything else."""

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from grpo_jax.config import GRPOConfig, ModelOptions, with_options
from grpo_jax.data import episodes
from grpo_jax.data.episodes import ReplyFn
from grpo_jax.data.rows import SUFFIXES, read_rows
from grpo_jax.data.text import Message, prompt_limit
from grpo_jax.data.turns import reply_encoder
from grpo_jax.data.types import Component, Reward, Rewards
from grpo_jax.devices import devices_of, load_shardings, parts, size
from grpo_jax.errors import UsageError, user_path
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.lora import Adapted, merge
from grpo_jax.models.params import format_of
from grpo_jax.models.trainable import join, split
from grpo_jax.options import option_types, suggestion
from grpo_jax.rewards.worker import check_takes_examples_first
from grpo_jax.rl.grpo import check_teacher
from grpo_jax.rl.guards import length_warning
from grpo_jax.runs import terminal
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder, fresh_folder
from grpo_jax.runs.pretrained import (
    keep_description,
    keep_files,
    load_model,
    load_teacher,
    planned,
    restore,
    say_plan,
)
from grpo_jax.tasks.adapters import trl_environment, trl_rows, trl_tools
from grpo_jax.tasks.dataset import text_task
from grpo_jax.tasks.task import Task
from grpo_jax.tasks.tools import count_calls, reply_with, schemas_of
from grpo_jax.train import grpo_programs, train


@dataclasses.dataclass(frozen=True)
class _Options:
    """What a trainer may be told."""

    train: GRPOConfig = GRPOConfig()
    model: ModelOptions = ModelOptions()


# Of options, by their types; True and False are no numbers.
_KINDS: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    bool: (bool, "True or False"),
}


class GRPOTrainer:
    """Trains a model towards what a reward prefers among completions of the same prompt."""

    run: RunFolder  # of the newest call of `train`: metrics, rollouts, checkpoints, curves, report.html

    def __init__(
        self,
        model: str | Path | Pretrained,
        reward_model: Reward | Mapping[str, Reward | Component],
        *,
        clip_epsilon: float | None = None,
        environment: ReplyFn | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        teacher: str | Path | None = None,
        environment_factory: Callable[[], Any] | None = None,
        run_dir: str | Path = "runs/grpo_trainer",
        **options: Any,
    ) -> None:
        """Loads the model.

        Args:
          model: folder of a Hugging Face model, its id on the hub, or what `load_pretrained` returned.
          reward_model: (examples, completions) -> a number for each completion, or None where it does not apply; may be
            async. An example is a dict: "prompt", and the other columns of its row. Several rewards are given by name
            and added up; `data.types.Component` gives one a weight other than 1.
          clip_epsilon: epsilon_low and epsilon_high in one; None: the preset's.
          environment: (example, transcript, key) -> `data.episodes.Reply`, which answers each turn of the policy; may
            be async. `data.episodes.episode_return` is the reward of what it gives. It needs max_turns and
            environment_tokens. Where the tokenizer has a chat template, a prompt that is a text is then a user's
            message.
          tools: functions that the policy may call, with type hints and docstrings, in place of an environment. The
            tokenizer needs a chat template.
          teacher: folder of a Hugging Face model, or its id on the hub, with the model's tokenizer; the option
            `distillation` says what is learned from it.
          environment_factory: a class written for TRL, in place of both: its methods are tools, and what its `reset`
            returns stands behind the prompt. `tasks.adapters.trl_reward` makes a reward of what it earned.
          run_dir: folder of the run; a number is added if it holds one.
          **options: as for `config.recipe`, and fields of `ModelOptions`, with their defaults: steps 100, learning_rate
            1e-6, group_size 8, max_tokens 64, lora_rank 0 (all parameters are trained) … But num_prompts (32) is
            lowered to the prompts that there are and what minibatches, microbatches and devices divide, and there is no
            eval_every and no eval_samples, for nothing is held out.

        Raises:
          UsageError: one sentence that says what to change.
        """
        options = _checked_options(options)
        if clip_epsilon is not None:
            clip_epsilon = _checked("clip_epsilon", clip_epsilon, float)
            if {"epsilon_low", "epsilon_high"} & options.keys():
                raise UsageError("clip_epsilon is epsilon_low and epsilon_high in one: give it or them")
            options |= {"epsilon_low": clip_epsilon, "epsilon_high": clip_epsilon}
        pretrained = model if isinstance(model, Pretrained) else None
        if pretrained:
            for name in {"dtype", "param_dtype", "quantize", "remat", "attention", "router"} & options.keys():
                raise UsageError(f"the model is loaded already: give {name} to load_pretrained")
            options |= {"model": str(pretrained.folder), "param_dtype": str(pretrained.params["embedding"].dtype)}
            options |= {"remat": pretrained.config.remat, "router": pretrained.config.router}
            options |= {"quantize": format_of(pretrained.params)}
        elif isinstance(model, str | Path):
            options |= {"model": str(model)}
        else:
            kind = type(model).__name__
            raise UsageError(f"model is of type {kind}: give a folder, an id on the hub, or load_pretrained of either")
        for name, path in {"run_dir": run_dir, "teacher": teacher or ""}.items():
            if not isinstance(path, str | Path):
                raise UsageError(f"{name} is of type {type(path).__name__}: give the path of a folder")
        if not isinstance(tools, Sequence) or not all(callable(tool) and hasattr(tool, "__name__") for tool in tools):
            raise UsageError("tools must be a list of functions, each with a name: write a def around a partial")
        for name, function in {"environment": environment, "environment_factory": environment_factory}.items():
            if not (function is None or callable(function)):
                raise UsageError(f"{name} is of type {type(function).__name__}: it must be a function or a class")
        self._options, self._lower_num_prompts = with_options(_Options(), **options), "num_prompts" not in options
        if (environment is not None) + bool(tools) + (environment_factory is not None) > 1:
            raise UsageError("environment, tools and environment_factory all answer the policy: give one of them")
        self._factory, self._tools = environment_factory, {tool.__name__: tool for tool in tools}
        self._reply = reply_with(self._tools) if tools else environment
        if environment_factory is not None:
            self._tools, self._reply = trl_tools(environment_factory), trl_environment(environment_factory)
        self._reward, self._run_dir = _checked_reward(reward_model), user_path(run_dir)
        train = self._options.train
        check_teacher(train, has_teacher=teacher is not None)
        sharding = load_shardings(devices_of(train))
        self._loaded = load_model(self._options.model, seed=train.seed, pretrained=pretrained, sharding=sharding)
        self._teacher = None
        if teacher is not None:
            self._teacher = load_teacher(teacher, self._options.model, self._loaded.pretrained, sharding=sharding)

    def train(self, prompts: str | Path | Iterable[str | Sequence[Message] | Mapping[str, Any]]) -> Pretrained:
        """Trains from the model given, in a new run; a second call begins there again.

        The run's folder gets what `grpo-jax train` leaves in it, but for a command and for what is held out.

        Args:
          prompts: texts, lists of chat messages, or rows, whose "prompt" is either; or a file of rows (.jsonl, .json).
            All of them are trained on.

        Returns:
          The trained model, adapters merged in: with quantize into the original weights, which are read again.
          `save_pretrained` writes its params and config, with its folder as the source. The model given stays as it
          was.

        Raises:
          UsageError: one sentence that says what to change.
          FloatingPointError: gradients were not finite too many times in a row.
        """
        started = time.perf_counter()
        pretrained, options, rows = self._loaded.pretrained, self._options, _rows(prompts)
        rows = rows if self._factory is None else trl_rows(self._factory, rows)
        config, model, longest = options.train, options.model, pretrained.config.max_position_embeddings

        chat = bool(self._reply and pretrained.tokenizer.chat_template)
        if self._tools and not chat:
            raise UsageError("tools need a tokenizer with a chat template, which tells the model of them")
        roles = ("tool", "user") if self._tools else ("user",)
        answers = self._reply and episodes.environment(
            self._reply, reply_encoder(pretrained.tokenizer, pretrained.eos_ids, roles=roles)
        )

        def task_of(num_prompts: int) -> Task:
            task = text_task(
                pretrained.tokenizer,
                pretrained.eos_ids,
                rows,
                vocab_size=pretrained.config.vocab_size,
                num_prompts=num_prompts,
                seed=config.seed,
                reward=self._reward,
                heldout_share=0.0,
                max_prompt_tokens=prompt_limit(model.max_prompt_tokens, longest, config.sampling.row_tokens),
                overlong=model.overlong,
                chat=chat,
                tools=schemas_of(self._tools) if self._tools else None,
            )
            measure = count_calls if self._tools else None
            return task._replace(environment=answers and answers._replace(measure=measure))

        if self._lower_num_prompts:
            left = len(task_of(1).heldout.examples)  # without the empty and overlong ones
            options = with_options(options, num_prompts=_fitting_num_prompts(config, left))
            config = options.train
        task = task_of(config.sampling.num_prompts)
        devices = devices_of(config)
        options, loaded, plan = planned(
            options,
            config,
            self._loaded,
            task,
            devices=size(devices),
            parts=parts(devices),
            teacher=self._teacher.pretrained.config if self._teacher else None,
        )
        config, (_, params, pretrained) = options.train, loaded
        programs, start = grpo_programs(loaded, self._teacher, task, config)
        self.run = RunFolder(fresh_folder(self._run_dir), dataclasses.asdict(options))
        self.run.console.print(f"run folder: {self.run.path}", markup=False, highlight=False, soft_wrap=True)
        say_plan(self.run, plan)
        self.run.warn(length_warning(task.heldout.ids.shape[1] + config.sampling.row_tokens, longest))
        keep_description(self.run, loaded, model, chat)
        if self._teacher:
            keep_files(self.run, "teacher", self._teacher.pretrained.folder)
        state = train(start, task, config, self.run, programs, phase="grpo")
        curves = terminal.curves_of(self.run, [("length_mean", "tokens")])
        terminal.save_results(self.run, {}, params_sha256(state.params["policy"]), curves, ["grpo"])
        terminal.say_end(self.run, started)
        trained = join(state.params["policy"], split(params)[1])
        if model.quantize != "none":
            trained = restore(self.run.path, "grpo", None).merged()
        return pretrained._replace(params=merge(trained) if isinstance(trained, Adapted) else trained)


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    hints = option_types(_Options)
    known = [name for name in hints if name not in ("model", "eval_every", "eval_samples")]
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option {name}: {suggestion(name, known)}")
    return {name: _checked(name, value, hints[name]) for name, value in options.items()}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value as its type, NumPy's numbers as Python's."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UsageError(f"{name} is {value!r}: choose among {', '.join(get_args(hint))}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{name} is {value!r}: give a list of texts")
        return tuple(value)
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    kind, words = _KINDS[kinds[0]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kinds[0] is not bool):
        raise UsageError(f"{name} is {value!r}: it must be {words}")
    return kinds[0](value)


def _fitting_num_prompts(config: GRPOConfig, left: int) -> int:
    """As many prompts of a step as asked for by default, or as there are, in pieces of one size."""
    pieces = max(config.optimizer.minibatches * (config.optimizer.microbatches or 1) * parts(devices_of(config)), 1)
    if left < pieces:
        raise UsageError(
            f"there are {left} prompts for {pieces} pieces of a step (minibatches x microbatches x devices / "
            "tensor): lower these, or give more prompts"
        )
    return max(min(config.sampling.num_prompts, left) // pieces, 1) * pieces


def _checked_reward(reward: Reward | Mapping[str, Reward | Component]) -> Reward | Rewards:
    if not isinstance(reward, Mapping):
        _check_callable(reward)
        return reward
    if not reward:
        raise UsageError("reward_model is empty: give at least one reward")
    parts = {name: part if isinstance(part, Component) else Component(part) for name, part in reward.items()}
    for name, part in parts.items():
        _check_callable(part.reward)
        _checked(f"the weight of reward {name}", part.weight, float)
    return parts


def _check_callable(reward: Reward) -> None:
    try:
        with contextlib.suppress(ValueError):  # what is written in C may not say
            inspect.signature(reward).bind([], [])
    except TypeError:
        raise UsageError(
            "reward_model must be called as reward(examples, completions) and return a number for each completion"
        ) from None
    check_takes_examples_first("reward_model", reward)


def _rows(prompts: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompts, str) and not prompts.endswith(SUFFIXES):
        raise UsageError(f"prompts is one text: put it into brackets, or name a file that ends in {SUFFIXES[0]}")
    if isinstance(prompts, str | Path):
        return list(read_rows(prompts))
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise UsageError("prompts must be a list of texts, of lists of chat messages or of rows, or a file of rows")
    rows = [prompt if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in prompts]
    if not rows:
        raise UsageError("prompts is empty: give at least one")
    return rows
