"""Tasks that options name, as on the command line: prompts, rewards and the environment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from grpo_jax.data.generators import PREFIX, AnswerIn, parse_generators
from grpo_jax.data.rows import read_rows
from grpo_jax.data.text import uses_chat
from grpo_jax.data.types import rng
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import make_chat
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.options import Bound, Size
from grpo_jax.rewards.reward import RewardLike, open_rewards, parse_reward
from grpo_jax.rewards.worker import digest_of_source, load_function
from grpo_jax.tasks.task import Task, text_task

# Strict and lenient grading are both logged: a model that learns only the format raises just the strict reward.
# Published scores of GSM8K are those of its own pattern.
_REWARDS = {
    "gsm8k": ("strict=gsm8k_answer", "lenient=0*gsm8k_answer(lenient=True)", "official=0*gsm8k_official"),
    "math": ("strict=math_answer", "lenient=0*math_answer(lenient=True)"),
}


@dataclass(frozen=True)
class TaskOptions:
    """Options of the task: prompts, rewards and the environment."""

    task: str = ""
    """gsm8k, math, your own rows (a file, a folder with train.jsonl, an id on the hub), or generators:
    reasoning_gym:weight*name?option=value&option=value,name."""
    data: str = ""
    """Folder, file or hub id with the rows of gsm8k or math. math needs it."""
    reward: tuple[str, ...] = ()
    """Rewards, each as name=weight*function(argument=value), where only the function is needed: file.py:function or a
    built-in one, such as exact_answer or length. Weight 0 only logs."""
    environment: str = ""
    """file.py:make, a function that returns the environment, which answers each turn of the policy. Needs --max-turns
    and --environment-tokens. Without --reward its rewards count."""
    tools: str = ""
    """Functions that the policy may call: file.py:function,function, with type hints and docstrings. Needs a chat
    template, --max-turns and --environment-tokens."""
    environment_factory: str = ""
    """file.py:Class, written for environment_factory of TRL. Its methods are tools, and its reset adds to prompts.
    Without --reward its get_reward counts."""
    agent: str = ""
    """file.py:run, a function (example, client) -> reward that talks to the policy as to OpenAI's API.
    Needs a chat template, --max-turns and --environment-tokens."""
    prompt_column: str = "prompt"
    """Column of your own rows with the prompt: text, or a list of chat messages."""
    template: str | None = None
    """Prompt with {column} where the text of a column goes, such as "Q: {question} A:". It replaces prompt_column or
    the task's own. None: no template."""
    answer_in: AnswerIn = "tags"
    """Place of a generator's answer, which the prompt states: <answer> tags, the last line, the whole text, or the text
    before the first --stop."""
    chat: bool | None = None
    """Put prompts that are text into the chat template, as the user's message. None: if the tokenizer has one."""
    system: str | None = None
    """System message before prompts that have none; needs a chat template."""
    heldout: str = ""
    """Rows that are only evaluated, in the format of `task`: a file, folder or hub id. Empty: part of your rows is held
    out."""
    num_heldout: Size | None = None
    """Largest number of held-out prompts. None: in training 200, at most a tenth of your own prompts, or all of
    --heldout; in evaluations all."""
    reward_deadline: Bound = 10.0
    """Seconds that a reward may take for the completions of one prompt. Then the call is killed, and these completions
    get no number."""
    reward_budget: Bound = 60.0
    """Seconds that each reward may take for a whole rollout. The remaining completions get no number from it."""
    reward_memory_mb: Size | None = None
    """Megabytes that a reward's process may allocate beyond what loading it took; None: no limit."""
    reply_deadline: Bound = 10.0
    """Seconds that one reply of the environment, or the calls of one turn, may take. Then the process is killed, and
    the episode ends."""
    reply_budget: Bound = 60.0
    """Seconds that the replies to one turn of all episodes of a rollout may take. Episodes without a reply end."""
    reply_memory_mb: Size | None = None
    """Megabytes that a process of the environment may allocate beyond what loading it took; None: no limit."""


_ANSWERING = ("environment", "tools", "environment_factory", "agent")
_OF_REPLIES = ("reply_deadline", "reply_budget", "reply_memory_mb")


def check_task_options(options: TaskOptions, *, needs_reward: bool = True) -> tuple[str, ...]:
    """Checks the options before a model is loaded, and returns the texts of the rewards to open.

    Args:
      options: The task's options on the command line.
      needs_reward: False if completions need no reward.

    Raises:
      UsageError: The options are invalid. The message is one sentence that says what to change.
    """
    is_generated = options.task.startswith(PREFIX)
    has_rows = options.task not in _REWARDS and not is_generated
    if not options.task:
        raise UsageError("--task is needed: gsm8k, math, or a file with rows of your own")
    if is_generated and options.heldout:
        raise UsageError("--heldout is for rows: generators make held-out prompts of their own, so leave it out")
    if not is_generated and options.answer_in != "tags":
        raise UsageError("--answer-in is for generators: leave it out, or take --task reasoning_gym:NAME")
    if options.data and options.task not in ("gsm8k", "math"):
        raise UsageError("--data belongs to the tasks gsm8k and math: give your own rows as --task")
    if options.task == "math" and not options.data:
        raise UsageError("--data is needed for math: a file or folder with its problems, or an id on the hub")
    if options.heldout and options.task == "gsm8k":
        raise UsageError("--heldout is not for gsm8k, which has test rows of its own: leave it out")
    if options.prompt_column != "prompt" and not has_rows:
        raise UsageError(f"--prompt-column is for rows of your own, not for {options.task}: leave it out")
    if sum(bool(getattr(options, name)) for name in _ANSWERING) > 1:
        raise UsageError(
            "--environment, --tools, --environment-factory and --agent all answer the policy: give one of them"
        )
    replies = [name for name in _OF_REPLIES if getattr(options, name) != getattr(TaskOptions, name)]
    if replies and not any(getattr(options, name) for name in _ANSWERING):
        raise UsageError(f"{replies[0]} is for tasks with an environment, and this one has none: leave it out")
    if options.environment_factory and (
        not has_rows or options.template is not None or options.prompt_column != "prompt"
    ):
        raise UsageError(
            "--environment-factory gives the columns of your own rows to reset, and adds to their prompt: give rows as "
            "--task, and leave out --template and --prompt-column"
        )
    is_told = options.template is not None or options.system is not None or options.prompt_column != "prompt"
    if options.agent and (is_told or not has_rows):
        raise UsageError(
            "--agent gets the columns of your own rows, and its first request is the prompt: give rows as --task, and "
            "leave out --template, --system and --prompt-column"
        )
    if options.agent and replies not in ([], ["reply_deadline"]):
        raise UsageError(f"{replies[-1]} is for processes, and agents run in this process: leave it out")
    texts = options.reward or _usual_rewards(options)
    if not texts and not (options.environment or options.agent) and needs_reward:
        raise UsageError(
            f"--reward is needed for {options.task}: name your function as file.py:function, or exact_answer for rows "
            "with a column answer"
        )
    for text in texts:
        parse_reward(text)
    return tuple(texts)


def _usual_rewards(options: TaskOptions) -> tuple[str, ...]:
    """Returns the default rewards. There are none if the environment's rewards are added up."""
    if options.environment_factory:
        return (f"get_reward=grpo_jax.tasks.adapters:reward_of_factory(factory={options.environment_factory!r})",)
    if options.task.startswith(PREFIX) and not options.environment:
        return (f"score=generator_score(generators={options.task.removeprefix(PREFIX)!r})",)
    return () if options.environment or options.agent else _REWARDS.get(options.task, ())


def usual_num_heldout(num_prompts: int) -> int:
    """Returns the default number of held-out prompts: a tenth of the different prompts, at least 1, at most 200."""
    return min(200, max(1, num_prompts // 10))


# ---- opening


@contextmanager
def open_task(
    options: TaskOptions,
    pretrained: Pretrained,
    *,
    group_size: int,
    chat_template_kwargs: str = "",
    training: bool = True,
    has_levels: bool = False,
    needs_reward: bool = True,
    decoding: Any = None,
    **prompts: Any,
) -> Iterator[Task]:
    """Opens the task that the options name. Its rewards run in child processes that end with the block.

    Args:
      options: The task's options on the command line.
      pretrained: The model whose tokenizer encodes the prompts.
      group_size: The number of completions of a prompt in training, G.
      chat_template_kwargs: Variables of the chat template, as JSON.
      training: False if the task is only evaluated, so that all rows may be held out.
      has_levels: True for a curriculum, in which the levels of generators rise.
      needs_reward: False if the task may have no reward. It then has none.
      decoding: The sampling options of the run, which requests of an agent may repeat. Only --agent needs them.
      prompts: Further arguments of `text_task`: num_prompts and seed, and others such as stop and max_prompt_tokens.

    Yields:
      The task.

    Raises:
      UsageError: The task does not exist, or cannot be opened.
    """
    texts = check_task_options(options, needs_reward=needs_reward)
    chat = uses_chat(options.chat, pretrained.tokenizer)
    schemas, named = None, {"tools": options.tools, "factory": options.environment_factory}
    opened: AbstractContextManager[Any] = nullcontext()
    otherwise: RewardLike = {}
    if options.environment or any(named.values()):
        from grpo_jax.tasks import environments  # imported only by tasks with an environment

        schemas, source = environments.describe_tools(**named, in_chat=chat)
        opened = environments.open_environment(
            make_chat(pretrained.tokenizer, pretrained.eos_ids, chat_template_kwargs),
            chat,
            environment=options.environment,
            **named,
            source=source,
            deadline=options.reply_deadline,
            budget=options.reply_budget,
            memory_mb=options.reply_memory_mb,
        )
        otherwise = environments.episode_return if options.environment else {}
    make = _task_maker(options, training, has_levels)
    if options.agent:
        from grpo_jax.data.episodes import episode_return  # imported only by tasks with an agent
        from grpo_jax.tasks.agents import open_agent
        from grpo_jax.tasks.chat_api import request_values

        run, otherwise = load_function("agent", options.agent), episode_return
        opened = open_agent(
            run,
            make_chat(pretrained.tokenizer, pretrained.eos_ids, chat_template_kwargs),
            request_values(decoding, prompts.get("stop", ())),
            deadline=options.reply_deadline,
            source=digest_of_source(options.agent),
        )
    graded = open_rewards(
        texts,
        group_size=group_size,
        deadline=options.reward_deadline,
        budget=options.reward_budget,
        memory_mb=options.reward_memory_mb,
    )
    rewarded = graded if texts else nullcontext(otherwise)
    with opened as environment, rewarded as rewards:
        if options.agent:
            rows = {name: make.keywords[name] for name in ("rows", "heldout_rows") if make.keywords.get(name)}
            make = partial(make, **{name: environment.begin(several) for name, several in rows.items()})
        task = make(
            pretrained.tokenizer,
            pretrained.eos_ids,
            reward=rewards,
            chat=chat,
            vocab_size=pretrained.config.vocab_size,
            template=options.template,
            system=options.system,
            tools=schemas,
            chat_template_kwargs=chat_template_kwargs,
            **prompts,
        )
        yield task._replace(environment=environment)


def _task_maker(options: TaskOptions, training: bool, has_levels: bool) -> Any:
    """Returns the function that makes the task from a tokenizer and the arguments common to all tasks."""
    most = options.num_heldout
    if options.task.startswith(PREFIX):
        from grpo_jax.tasks.generated import generated_task  # imported only by tasks with generators

        generators, place = parse_generators(options.task.removeprefix(PREFIX)), options.answer_in
        maker: Any = partial(generated_task, generators=generators, num_heldout=most or 200)
        return partial(maker, has_levels=has_levels, answer_in=place)
    make: Any = partial(text_task, prompt_column=options.prompt_column)
    read: Callable[[str], Sequence[Mapping[str, Any]]] = read_rows
    if options.task in _REWARDS:
        from grpo_jax.tasks import problems  # imported only by GSM8K and MATH

        make, read = partial(problems.problem_task, options.task), problems.math_rows
    rows: Sequence[Mapping[str, Any]]
    heldout_rows: Sequence[Mapping[str, Any]] | None
    if options.task == "gsm8k":
        source, most = options.data or problems.GSM8K, 200 if most is None and training else most
        rows, heldout_rows = (problems.gsm8k_rows(source, split=split) for split in ("train", "test"))
    else:
        rows, heldout_rows = read(options.data or options.task), read(options.heldout) if options.heldout else None
    has_bare_replies = options.environment and options.chat is False and options.template is None
    # There may be a million rows, so only runs that may be refused read them here.
    if has_bare_replies and any(isinstance(row.get(options.prompt_column), list) for row in rows):
        raise UsageError("--chat False gives replies no chat template, but the rows hold messages: leave it out")
    if options.environment_factory:
        from grpo_jax.tasks.environments import rows_of_factory

        begun = partial(rows_of_factory, options.environment_factory)
        rows, heldout_rows = begun(rows), heldout_rows and begun(heldout_rows)
    held: dict[str, Any] = {"heldout_rows": heldout_rows, "num_heldout": most}
    if heldout_rows is None and training:
        held = {"num_heldout": usual_num_heldout if most is None else most}
    elif heldout_rows is None:
        rows, held = [rows[i] for i in np.sort(rng(0).permutation(len(rows))[:most])], {"heldout_share": 0.0}
    return partial(make, rows=rows, **held)
