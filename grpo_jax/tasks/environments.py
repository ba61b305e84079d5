"""Environments and tools that a command line names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo_jax.data.episodes import Environment, episode_return as episode_return
from grpo_jax.data.turns import reply_encoder
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.rewards.environments import environment_in_processes
from grpo_jax.rewards.worker import digest_of_source
from grpo_jax.tasks.adapters import load_factory, trl_tools
from grpo_jax.tasks.options import TaskOptions
from grpo_jax.tasks.tools import count_calls, load_tools, schemas_of as schemas_of


@contextmanager
def open_environment(options: TaskOptions, pretrained: Pretrained, chat: bool) -> Iterator[Environment]:
    """Opens what answers the policy, as the options say, in processes that end with the block."""
    spec, arguments = options.environment, dict[str, str]()
    named = options.tools or options.environment_factory
    if options.tools:
        spec, arguments = "grpo_jax.tasks.tools:environment_of_tools", {"tools": named}
    elif options.environment_factory:
        spec, arguments = "grpo_jax.tasks.adapters:environment_of_factory", {"factory": named}
    roles: tuple[str, ...] = ("user",) if chat else ()
    with environment_in_processes(
        spec,
        reply_encoder(pretrained.tokenizer, pretrained.eos_ids, roles=("tool", "user") if named else roles),
        arguments=arguments,
        deadline=options.reply_deadline,
        budget=options.reply_budget,
        memory_mb=options.reply_memory_mb,
    ) as environment:
        if named:
            environment = environment._replace(measure=count_calls, source=digest_of_source(named))
        yield environment


def tools_of(options: TaskOptions) -> dict[str, Callable[..., Any]]:
    """Returns what the policy may call, by name."""
    if options.environment_factory:
        return trl_tools(load_factory(options.environment_factory))
    return load_tools(options.tools) if options.tools else {}
