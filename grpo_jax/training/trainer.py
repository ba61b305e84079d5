"""GRPO in five lines: a model, a reward and prompts. Use `training.phases.train` for everything else."""

import dataclasses
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from grpo_jax.config import GRPOConfig, check_effects, constant_names, name_preset, recipe, validate, with_options
from grpo_jax.data.episodes import Environment, ReplyFn, environment as environment_of, episode_return
from grpo_jax.data.generators import PREFIX, parse_generators
from grpo_jax.data.rows import SUFFIXES, read_rows, remove_nulls
from grpo_jax.data.text import Message, uses_chat
from grpo_jax.data.types import Component, hash_values, sources_of
from grpo_jax.devices import devices_of, num_shards
from grpo_jax.errors import UsageError, abbreviate, user_path
from grpo_jax.models.chat import make_chat
from grpo_jax.models.files.families import NOT_IN_FILES
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.params.lora import merge
from grpo_jax.models.params.tree import Adapted, format_of, join, split
from grpo_jax.options import check_known, check_ranges, check_type, check_types, option_types, options_of
from grpo_jax.report import finish, print_results
from grpo_jax.rewards.reward import RewardLike, Rewards, to_rewards
from grpo_jax.rewards.worker import check_takes_examples_first
from grpo_jax.rl.iteration import OnRollout
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.files import import_wandb
from grpo_jax.runs.folder import RunFolder, choose_folder, open_folder, options_of_run
from grpo_jax.runs.pretrained import restore
from grpo_jax.runs.runner import OnLine
from grpo_jax.tasks.adapters import trl_environment, trl_rows, trl_tools
from grpo_jax.tasks.generated import generated_task
from grpo_jax.tasks.task import Task, text_task
from grpo_jax.tasks.tools import in_chat_template, reply_with, schemas_of
from grpo_jax.training.phases import PHASES, train, train_with_control
from grpo_jax.training.prepare import RunOptions, begin, load_models, prepare, prompt_options

Prompt = str | Sequence[Message] | Mapping[str, Any]  # a text, chat messages or a row


class GRPOTrainer:
    """A trainer that fine-tunes a language model with rewards by GRPO."""

    run: RunFolder  # the folder of the last call of `train`: metrics, rollouts, checkpoints, report.html

    def __init__(
        self,
        model: str | Path | Pretrained,
        reward_model: RewardLike | None = None,
        *,
        clip_epsilon: float | None = None,
        environment: ReplyFn | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Callable[[], Any] | None = None,
        agent: Callable[..., Any] | None = None,
        chat: bool | None = None,
        tokenizer: Any = None,
        heldout: str | Path | Iterable[Prompt] | None = None,
        on_rollout: OnRollout = lambda step, rollout: None,
        on_line: OnLine = lambda step, line: None,
        run_dir: str | Path = "runs/grpo_trainer",
        resume: bool = False,
        wandb: str = "",
        **options: Any,
    ) -> None:
        """Loads the model.

        Args:
          model: The folder of a Hugging Face model, its id on the hub, or the result of `load_pretrained`.
          reward_model: (examples, completions) -> a number for each completion, or None if the reward does not apply.
            May be async. An example is a dict with "prompt" and the other columns of its row. Pass a dict from names to
            rewards to sum several. `data.types.Component` sets a weight other than 1. It is required.
          clip_epsilon: Sets both epsilon_low and epsilon_high. Default: those of the preset.
          environment: (example, transcript, key) -> `data.episodes.Reply`. Answers each turn of the policy; may be
            async. Needs max_turns and environment_tokens. The reward `data.episodes.episode_return` sums the rewards of
            its replies.
          tools: Functions that the policy may call, with type hints and docstrings, instead of an environment. The
            tokenizer needs a chat template.
          environment_factory: A class written for TRL, instead of `environment` and `tools`. Its methods are tools, and
            the result of its `reset` is appended to the prompt. `tasks.adapters.trl_reward` makes a reward from it.
          agent: (example, client) -> reward. Talks to the policy as to OpenAI's API, instead of an environment: see
            `tasks.agents.open_agent`. Without `reward_model`, what it returns counts.
          chat: Puts prompts that are text, and replies, into the chat template, as the user's messages. Default: if the
            tokenizer has one, as in the command.
          tokenizer: A tokenizer of transformers, if the model's folder has none or another.
          heldout: Prompts that are only evaluated, in the format of `prompts` in `train`, before, during and after
            training. They enable the options eval_every (20), eval_samples, keep_best and patience.
          on_rollout, on_line: Called with each rollout and each line of metrics.jsonl: see `train`.
          run_dir: The folder of the run. If it already holds a run, a number is appended.
          resume: True to continue the newest run in run_dir where it stopped. It keeps its options. Options, model
            files and prompts must not differ from those that it began with.
          wandb: Project of Weights & Biases to log to. Needs the package wandb.
          **options: Options of `config.recipe`, fields of `ModelOptions`, and `stop`, with their defaults: steps 100,
            learning_rate 1e-6, group_size 8, max_tokens 64, lora_rank 0 (all parameters are trained) … `optimizer` may
            be an optax transformation, or a function such as `optax.lion` from a schedule to one. The default
            num_prompts (32) is lowered if there are fewer prompts, and to a multiple of minibatches and devices.

        Raises:
          UsageError: Arguments do not work. The message says what to change.
        """
        if clip_epsilon is not None:
            if {"epsilon_low", "epsilon_high"} & options.keys():
                raise UsageError("clip_epsilon is epsilon_low and epsilon_high in one: give it or them")
            clip_epsilon = _checked("clip_epsilon", clip_epsilon, float)
            options |= {"epsilon_low": clip_epsilon, "epsilon_high": clip_epsilon}
        options = _checked_options(options, has_heldout=heldout is not None)
        hooks: dict[str, Any] = {"on_rollout": on_rollout, "on_line": on_line}
        functions: dict[str, Any] = {"environment": environment, "tools": tools}
        functions |= {"environment_factory": environment_factory, "agent": agent}
        settings: dict[str, Any] = {"model": model, "reward_model": reward_model, "chat": chat, "run_dir": run_dir}
        settings |= {"resume": resume, "wandb": wandb, **functions, **hooks}
        hints = get_type_hints(GRPOTrainer.__init__)
        for name, value in settings.items():
            check_type(name, value, hints[name])
        for name, hook in hooks.items():
            _check_arguments(name, hook, "step", name.removeprefix("on_"))
        if tokenizer is not None and not hasattr(tokenizer, "apply_chat_template"):
            raise UsageError(f"tokenizer is {abbreviate(tokenizer)}: give a tokenizer of transformers")
        names = [getattr(tool, "__name__", "") for tool in tools]
        if "" in names or len({*names}) < len(names):
            raise UsageError(f"tools are {names}: each must be a function with a name of its own, defined by def")
        if sum(function is not None and function != () for function in functions.values()) > 1:
            raise UsageError(
                "environment, tools, environment_factory and agent all answer the policy: give one of them"
            )
        reward_model = episode_return if reward_model is None and agent is not None else reward_model
        self._reward, self._run_dir = _checked_reward(reward_model), user_path(run_dir)
        self._factory, self._tools = environment_factory, dict(zip(names, tools, strict=True))
        self._reply, self._agent = reply_with(self._tools) if tools else environment, agent
        if environment_factory is not None:
            self._tools, self._reply = trl_tools(environment_factory), trl_environment(environment_factory)
        self._chat, self._wandb, self._hooks = chat, wandb, hooks
        self._heldout = None if heldout is None else self._reset(_rows(heldout, "heldout"))
        if isinstance(self._heldout, str):
            raise UsageError(_HELDOUT_ROWS)
        if wandb:
            import_wandb()  # before the weights are loaded
        default = RunOptions(recipe(eval_every=0 if heldout is None else 20))
        self._resumed = choose_folder(self._run_dir, resume=True) if resume else None
        if self._resumed:
            default = options_of_run(default, self._resumed)
        pretrained, self._lower_num_prompts = None, "num_prompts" not in options and not resume
        if isinstance(model, Pretrained):
            check_types(Pretrained, model._asdict())
            pretrained, settings = model, _settings_of(model)
            for name in settings.keys() & options.keys():
                raise UsageError(f"the model is loaded already: give {name} to load_pretrained")
            options, model = options | settings, model.folder
            if pretrained.tokenizer is None and tokenizer is None:
                raise UsageError("the model has no tokenizer: give one as tokenizer")
        self._options = with_options(default, model=str(model), **options)
        run = self._options.train
        check_ranges(self._options)
        check_effects(self._options)
        fitting = with_options(run, num_prompts=_divisor(run)) if self._lower_num_prompts else run
        validate(fitting, num_devices=num_shards(devices_of(run)))
        self._models = load_models(self._options.model, run, pretrained=pretrained, tokenizer=tokenizer)

    def train(self, prompts: str | Path | Iterable[Prompt]) -> Pretrained:
        """Trains in a new run from the original model, or continues the run to resume.

        The run's folder gets the files of `grpo-jax train`, except the command.

        Args:
          prompts: Texts, lists of chat messages, or rows whose "prompt" is either, or a file of rows (.jsonl, .json).
            The trainer uses all of them for training. "reasoning_gym:NAME?option=value" takes rows from generators, for
            the reward `rewards.builtin.generator_score()`: see the option --task of the command.

        Returns:
          The trained model with adapters merged. With quantize they are merged into the original weights, which are
          loaded again. `save_pretrained` writes its params and config, with its folder as the source. The original
          model does not change. With `keep_best`, `load_run` of `runs.pretrained` loads the best checkpoint.

        Raises:
          UsageError: Prompts or options do not work. The message says what to change.
          FloatingPointError: Gradients were not finite too many times in a row.
        """
        with self._open_environment() as environment:
            return self._train(self._reset(_rows(prompts, "prompts")), environment)

    def _train(self, rows: str | list[Mapping[str, Any]], environment: Environment | None) -> Pretrained:
        """Trains on rows: see `train`."""
        started = time.perf_counter()
        task = self._task(rows, environment)
        options = with_options(self._options, num_prompts=len(task.prompts(0).examples))
        prepared = prepare(options, self._models, task)
        folder = self._resumed or choose_folder(self._run_dir, resume=False)
        self.run = open_folder(folder, dataclasses.asdict(prepared.options), wandb=self._wandb)
        sources = {name: sources_of(component.reward) for name, component in self._reward.components.items()}
        named = {f"source of reward {name}": hash_values(*source) for name, source in sources.items() if source}
        self.run.keep_inputs("rewards", named)
        begin(self.run, prepared, chat=self._chat)
        programs, phase = prepared.programs, PHASES[0]
        arguments = (prepared.params, task, programs.config, self.run, programs)
        results: dict[str, Any] = {}
        if self._heldout is None:
            state = train(*arguments, phase=phase, **self._hooks)
        else:
            results, _, state = train_with_control(*arguments, phases=[phase], **self._hooks)
            print_results(self.run, f"{len(task.heldout.examples)} held-out prompts [95% interval]", results)
        finish(self.run, results, params_sha256(state.params["policy"]), started)
        if options.model.quantize != "none":
            params = restore(self.run.path, phase, None).merged()
        else:
            params = join(state.params, split(prepared.params)[1])["policy"]
            params = merge(params) if isinstance(params, Adapted) else params
        trained = prepared.models["policy"]._replace(params=params)
        return trained._replace(folder=self.run.path / "model") if trained.brings_tokenizer else trained

    def _reset(self, rows: str | list[Mapping[str, Any]]) -> Any:
        """Returns rows, to whose prompts an environment written for TRL adds the result of its `reset`."""
        if self._factory is None and self._agent is None:
            return rows
        if isinstance(rows, str):
            raise UsageError("environment_factory and agent get the columns of rows, and generators have none")
        return rows if self._factory is None else trl_rows(self._factory, rows)

    def _open_environment(self) -> AbstractContextManager[Environment | None]:
        """Opens what answers the policy, if anything does."""
        pretrained, kwargs = self._models["policy"], self._options.model.chat_template_kwargs
        in_chat = uses_chat(self._chat, pretrained.tokenizer)
        if self._tools and not in_chat:
            raise UsageError("tools need a tokenizer with a chat template, which tells the model of them, and chat")
        chat = make_chat(pretrained.tokenizer, pretrained.eos_ids, kwargs)
        if self._agent is not None:
            from grpo_jax.tasks.agents import open_agent  # imported only by runs with an agent
            from grpo_jax.tasks.chat_api import request_values

            sampling = self._options.train.sampling
            return open_agent(self._agent, chat, request_values(sampling, options_of(self._options)["stop"]))
        if self._reply is None:
            return nullcontext()
        encode, more = in_chat_template(chat, in_chat, has_tools=bool(self._tools))
        return nullcontext(environment_of(self._reply, encode)._replace(**more))

    def _task(self, rows: str | Sequence[Mapping[str, Any]], environment: Environment | None) -> Task:
        """Makes a task from rows, with the held-out set if there is one, or from generators."""
        run, pretrained = self._options.train, self._models["policy"]
        begin_rows = environment.begin if environment else list
        lower = partial(_fitting_num_prompts, run) if self._lower_num_prompts else lambda _: run.sampling.num_prompts
        if not isinstance(rows, str):
            held: Any = {"heldout_share": 0.0} if self._heldout is None else {"heldout_rows": begin_rows(self._heldout)}
            make: Any = partial(text_task, rows=begin_rows(rows), num_prompts=lower, **held)
        elif self._heldout is None:
            generators = parse_generators(rows.removeprefix(PREFIX))
            make = partial(generated_task, generators=generators, num_prompts=lower(sys.maxsize))
        else:
            raise UsageError(_HELDOUT_ROWS)
        task = make(
            pretrained.tokenizer,
            pretrained.eos_ids,
            vocab_size=pretrained.config.vocab_size,
            seed=run.seed,
            reward=self._reward,
            chat=uses_chat(self._chat, pretrained.tokenizer),
            tools=schemas_of(self._tools) if self._tools else None,
            **prompt_options(self._options, run.sampling, pretrained),
        )
        return task._replace(environment=environment)


def _settings_of(pretrained: Pretrained) -> dict[str, Any]:
    """Returns the fields of `ModelOptions` that a loaded model determines."""
    settings = {name: getattr(pretrained.config, name) for name in NOT_IN_FILES}
    dtype = str(pretrained.params["embedding"].dtype)
    return settings | {"param_dtype": dtype, "quantize": format_of(pretrained.params)}


def _divisor(config: GRPOConfig) -> int:
    """Returns the number that must divide the prompts of a step."""
    return config.optimizer.minibatches * num_shards(devices_of(config))


def _fitting_num_prompts(config: GRPOConfig, num_left: int) -> int:
    """Returns the largest number of prompts for a step that its parts divide, up to the default."""
    least = _divisor(config)
    if num_left < least:
        raise UsageError(
            f"there are {num_left} prompts for {least} parts of a step (minibatches x devices / tensor): lower these, "
            "or give more prompts"
        )
    return max(min(config.sampling.num_prompts, num_left) // least, 1) * least


# ---- checks of arguments


_ARGUMENTS = ("model", "reward_model", "run_dir", "resume", "wandb", "heldout", "tokenizer", "on_rollout", "on_line")
_HELDOUT_ROWS = "heldout is for rows: generators make held-out prompts of their own, so leave it out"


def _checked_options(options: Mapping[str, Any], *, has_heldout: bool) -> dict[str, Any]:
    """Checks the names and types of options, and returns the converted options."""
    hints = option_types(RunOptions)
    hints["optimizer"] = Any  # `validate` checks it
    del hints["model"]
    preset = name_preset(options.get("preset", "grpo"))
    if isinstance(preset, str):
        hints |= dict.fromkeys(constant_names(preset) - hints.keys(), float)
    check_known(options, [*hints, *_ARGUMENTS])
    for name in ("eval_every", "eval_samples", "keep_best", "patience"):
        if name in options and not has_heldout:
            raise UsageError(f"{name} is for held-out prompts: give them as heldout")
    options = {**options, **({"preset": preset} if "preset" in options else {})}
    return {name: _checked(name, value, hints[name]) for name, value in options.items()}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Checks a value against its type hint. Converts NumPy scalars, lists, paths and dicts, which become JSON."""
    value = value.item() if isinstance(value, np.generic) else tuple(value) if isinstance(value, list) else value
    value = str(value) if isinstance(value, Path) and hint is str else value
    if isinstance(value, Mapping) and hint is str:  # chat_template_kwargs
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{name} must hold values that JSON has: {error}") from None
    check_type(name, value, hint)
    return value


def _check_arguments(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raises if a function does not take these arguments in this order."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UsageError(f"{name} must take ({', '.join(arguments)}), but: {error}") from None
    except ValueError:  # some functions in C have no signature
        return


def _checked_reward(reward: RewardLike | None) -> Rewards:
    """Checks the arguments of a reward, and returns it as one value."""
    if reward is None or reward == {}:
        raise UsageError("reward_model is empty: give at least one reward")
    named = reward if isinstance(reward, Mapping) else {}
    if not all(isinstance(name, str) and name for name in named):
        raise UsageError(f"the names in reward_model are {[*named]}: each must be a text that is not empty")
    for component in named.values():
        check_types(Component, component._asdict() if isinstance(component, Component) else {})
    rewards = to_rewards(reward)
    for name, component in rewards.components.items():
        check_takes_examples_first(f"the reward {name}" if named else "reward_model", component.reward)
    return rewards


def _rows(prompts: Any, name: str) -> str | list[Mapping[str, Any]]:
    """Converts prompts of any kind to rows. Names of generators stay a text. Errors have the name of the argument."""
    if isinstance(prompts, str) and prompts.startswith(PREFIX):
        return prompts
    if isinstance(prompts, str) and not prompts.endswith(SUFFIXES):
        raise UsageError(f"{name} is one text: put it into brackets, or name a file that ends in {SUFFIXES[0]}")
    is_table = isinstance(prompts, Mapping) or hasattr(prompts, "iterrows")  # iterates over names of columns
    if is_table or isinstance(prompts, Set | bytes) or not isinstance(prompts, Iterable | Path):
        raise UsageError(f"{name} is {abbreviate(prompts)}: give a list of texts, messages or rows, or a file of rows")
    if isinstance(prompts, str | Path):
        return list(read_rows(prompts))
    rows = [prompt if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in prompts]
    if not rows:
        raise UsageError(f"{name} is empty: give at least one")
    for number, row in enumerate(rows):
        if names := [column for column in row if not isinstance(column, str)]:
            raise UsageError(f"row {number} has a column {abbreviate(names[0])}: names of columns must be texts")
    if hasattr(prompts, "features"):  # a table of the package datasets, which makes new objects for its rows
        remove_nulls(rows, name)
    return rows
