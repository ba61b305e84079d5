"""Opens the task that options name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from grpo_jax.data.generators import PREFIX, parse_generators
from grpo_jax.data.rows import read_rows
from grpo_jax.data.text import Overlong, uses_chat
from grpo_jax.data.types import rng
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import make_chat
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.rewards.reward import open_rewards

# Strict and lenient grading are both logged: a model that learns only the format raises just the strict reward.
# Published scores of GSM8K are those of its own pattern.
from grpo_jax.tasks.options import TaskOptions, check_task_options, has_environment, usual_num_heldout
from grpo_jax.tasks.problems import GSM8K, gsm8k_rows, math_rows, problem_task
from grpo_jax.tasks.task import Task, text_task


@contextmanager
def open_task(
    options: TaskOptions,
    pretrained: Pretrained,
    *,
    num_prompts: int,
    group_size: int,
    seed: int,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    stop: Sequence[str] = (),
    chat_template_kwargs: str = "",
    training: bool = True,
    has_levels: bool = False,
) -> Iterator[Task]:
    """Opens the task that the options name. Its rewards run in child processes that end with the block.

    Args:
      options: The task's options on the command line.
      pretrained: The model whose tokenizer encodes the prompts.
      num_prompts: The number of prompts in a step, N.
      group_size: The number of completions of a prompt in training, G.
      seed: The seed of the order of prompts.
      max_prompt_tokens, overlong: See `encode_prompts`.
      stop: Texts that end a completion: see the option `stop`.
      chat_template_kwargs: Variables of the chat template, as JSON.
      training: False if the task is only evaluated, so that all rows may be held out.
      has_levels: True for a curriculum, in which the levels of generators rise.

    Yields:
      The task.

    Raises:
      UsageError: The task does not exist, or cannot be opened.
    """
    texts = check_task_options(options)
    chat = uses_chat(options.chat, pretrained.tokenizer)
    tools: Any = None
    environment_of: AbstractContextManager[Any] = nullcontext()
    if has_environment(options):
        from grpo_jax.tasks import environments  # imported only by tasks with an environment

        tools = environments.schemas_of(environments.tools_of(options)) or None
        writer = make_chat(pretrained.tokenizer, pretrained.eos_ids, chat_template_kwargs)
        environment_of = environments.open_environment(options, writer, chat)
    if tools and not chat:
        flag = "--tools" if options.tools else "--environment-factory"
        raise UsageError(f"{flag} needs a model with a chat template, which tells it of the tools, and --chat")
    make = _task_maker(options, training, has_levels)
    graded = open_rewards(
        texts,
        group_size=group_size,
        deadline=options.reward_deadline,
        budget=options.reward_budget,
        memory_mb=options.reward_memory_mb,
    )
    rewarded = graded if texts else nullcontext(environments.episode_return)
    with environment_of as environment, rewarded as rewards:
        task = make(
            pretrained.tokenizer,
            pretrained.eos_ids,
            reward=rewards,
            chat=chat,
            vocab_size=pretrained.config.vocab_size,
            num_prompts=num_prompts,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            overlong=overlong,
            stop=stop,
            template=options.template,
            system=options.system,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
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
    if options.task == "gsm8k":
        training_rows, test_rows = (gsm8k_rows(options.data or GSM8K, split=split) for split in ("train", "test"))
        number = 200 if most is None and training else most
        return partial(problem_task, "gsm8k", rows=training_rows, heldout_rows=test_rows, num_heldout=number)
    read, source = (math_rows, options.data) if options.task == "math" else (read_rows, options.task)
    rows: Sequence[Mapping[str, Any]] = read(source)
    heldout_rows: Sequence[Mapping[str, Any]] | None = read(options.heldout) if options.heldout else None
    has_bare_replies = options.environment and options.chat is False and options.template is None
    # There may be a million rows, so only runs that may be refused read them here.
    if has_bare_replies and any(isinstance(row.get(options.prompt_column), list) for row in rows):
        raise UsageError("--chat False gives replies no chat template, but the rows hold messages: leave it out")
    if options.environment_factory:
        from grpo_jax.tasks.adapters import load_factory, trl_rows

        factory = load_factory(options.environment_factory)
        rows, heldout_rows = trl_rows(factory, rows), heldout_rows and trl_rows(factory, heldout_rows)
    if not training and most is not None:
        rows = [rows[i] for i in np.sort(rng(0).permutation(len(rows))[:most])]
    held: dict[str, Any] = {"heldout_rows": heldout_rows, "num_heldout": most}
    if heldout_rows is None and training:
        held = {"num_heldout": usual_num_heldout(len(rows)) if most is None else most}
    elif heldout_rows is None:
        held = {"heldout_share": 0.0}
    if options.task == "math":
        return partial(problem_task, "math", rows=rows, **held)
    return partial(text_task, rows=rows, prompt_column=options.prompt_column, **held)
