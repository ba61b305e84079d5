"""A sampler that gets its completions from an external engine: a server that loads weights and returns completions."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax import hosts
from grpo_jax.config import EngineOptions, GRPOConfig
from grpo_jax.devices import (
    Devices,
    jit_on_devices,
    local_numbers,
    local_rows,
    num_shards,
    sampling_devices,
    to_devices,
    to_numpy,
)
from grpo_jax.engines.completions import OTHER_SAMPLING, read_completion, request_body
from grpo_jax.engines.servers import Engine, Request
from grpo_jax.engines.supports import make_add_supports
from grpo_jax.errors import Interruption, UsageError
from grpo_jax.models import huggingface
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.files import peft
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.params.tree import Adapted, check_full_precision
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.beside import NO_JOURNAL, Journal, with_one_thread
from grpo_jax.rl.episodes import Turns, play
from grpo_jax.rl.source import Sampler
from grpo_jax.sampling.sampler import Completions
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task

_SCORED_WIDTH = 64  # texts are padded to multiples, so that few programs are compiled


def sampler_of(
    options: EngineOptions, pretrained: Pretrained, task: Task, config: GRPOConfig, *, note: Callable[[str], None]
) -> Sampler:
    """Returns a sampler that sends one request to the engine for each turn of a completion.

    Args:
      options: The options of the engine.
      pretrained: The trained model, whose parameters the engine loads.
      task: Supplies the vocabulary, and an environment if there is one.
      config: Supplies the sampling options, and the devices that score.
      note: Tells the user the reason for a delay.

    Raises:
      UsageError: No engine answers, or an engine does not support the run.
    """
    _check(pretrained, task)
    task = with_one_thread(task) if config.sampling.staleness else task
    policy, devices = decoder_policy(pretrained.config), sampling_devices(config)
    sampling, max_tokens = config.sampling, config.sampling.max_tokens
    limits = {"top_k": sampling.top_k or -1, "top_p": sampling.top_p, "min_p": sampling.min_p}

    def save(folder: Path, params: Params) -> None:
        if isinstance(params, Adapted):
            peft.save_adapter(folder, pretrained.config, params, base=str(pretrained.folder))
        elif hosts.count() > len(options.engine):
            raise UsageError(
                f"{hosts.count()} hosts share servers, which can hold adapters of both, but no other weights: set "
                "lora_rank, or name a server for each host in engine"
            )
        else:
            # A server that rounds to the nearest bfloat16 number then has the policy's numbers. On the host it need not
            # wait for the devices.
            host = jax.local_devices(backend="cpu")[0]
            params = policy.rounded(jax.device_put(params, host)) if policy.rounded else params
            huggingface.save_pretrained(folder, params, pretrained.config, source=pretrained.folder)

    copy_arrays = make_copy()

    def copy(params: Params) -> Params:  # an update never changes the base
        is_adapted = isinstance(params, Adapted)
        return params._replace(adapters=copy_arrays(params.adapters)) if is_adapted else copy_arrays(params)

    takes = bool(sampling.staleness) or hosts.count() > 1
    engine = Engine(
        _with_servers_of_host(options),
        save=save,
        score=make_score(policy, devices),
        read=partial(read_completion, vocab_size=task.vocab_size, stop=task.stop),
        dtype=pretrained.config.dtype,
        temperature=sampling.temperature,
        copy=copy,
        is_single=devices.is_single,
        note=note,
    )
    if takes:
        engine.choose_proof(longest_prompt(task), max_tokens)
    add_supports = make_add_supports(policy, sampling, devices, engine.rounding)

    def turns(journal: Journal, params, prompts: list[list[int]], numbers, temperature, noise) -> Turns:
        """Samples turns. The prompt of a request holds the ids of all turns and replies before it."""
        shape = *numbers.shape, sampling.completion_width
        out = empty_completions(shape, task.pad_id)
        replies = np.zeros(shape, np.int32), np.zeros(numbers.shape, np.int32), np.ones(numbers.shape, bool)
        for number in itertools.count(1):
            reply_ids, counts, continues = replies
            for place in np.argwhere(counts):
                append(out, place, number - 1, reply_ids[*place, : counts[*place]])
            places = np.argwhere(continues)
            requests = [
                Request(
                    i,
                    request_body(
                        prompts[i] + out.completion_ids[i, j][out.turn[i, j] > 0].tolist(),
                        temperature=float(temperature[i, j]),
                        seed=seed_of(noise, numbers[i, j], number),
                        max_tokens=max_tokens - int(out.completion_mask[i, j].sum()),
                        eos_ids=task.eos_ids,
                        stop=task.stop.texts if task.stop else (),
                        limits=limits,
                    ),
                    int(noise[-1]),
                    j,
                    number,
                )
                for i, j in places.tolist()
            ]
            answers = engine.submit(params, requests, journal).result()
            for place, (ids, logprobs) in zip(places, answers, strict=True):
                append(out, place, number, ids, logprobs)
                is_stopped = task.stop is not None and task.stop.find_end(ids) is not None
                out.truncated[*place] = ids[-1] not in task.eos_ids and not is_stopped
            replies = yield out

    def draw(journal: Journal, params, prompts, numbers, temperature, noise) -> Completions:
        given = prompts.tokens.ids, prompts.tokens.mask, numbers, temperature
        places = local_numbers(devices, len(numbers))  # each host samples the groups on its devices
        ids, mask, numbers, temperatures = local_rows(given)
        rows = [row[is_token].tolist() for row, is_token in zip(ids, mask, strict=True)]
        sampled = turns(journal, params, rows, numbers, temperatures, noise)
        with engine.turn(params):
            if task.environment:
                examples = [prompts.examples[place] for place in places]
                out = play(sampled, numbers, noise, examples, task, sampling)
            else:
                out = next(sampled)._replace(turn=None)
        out = to_devices(jax.tree.map(partial(_at_places, places, given[2].shape[0]), out), devices)
        if not sampling.kept_tokens:
            return out
        out, differences = add_supports(params, prompts.tokens, temperature, out)
        mask, is_border, differences = to_numpy((out.completion_mask, out.is_border, differences))
        compared = differences[mask & ~is_border & (temperatures > 0)[..., None]]
        difference = compared.mean() if compared.size else 0.0
        if not difference <= engine.rounding:
            raise Interruption(
                f"the engine's log-probabilities after truncation differ from the trainer's by {difference:.2g} nats a "
                f"token, where {engine.rounding:g} is possible: {OTHER_SAMPLING}"
            )
        return out

    sampler = Sampler(
        partial(draw, NO_JOURNAL),
        devices,
        cancel=engine.cancel,
        pop_times=engine.pop_times,
        balance=partial(balance_servers, len(options.engine)),
    )
    if takes:
        sampler = sampler._replace(take=engine.take)
    if sampling.staleness:  # `Engine.turn` lets one or two of the threads sample
        sampler = sampler._replace(at_once=sampling.staleness + 1)
    return sampler._replace(with_journal=lambda journal: sampler._replace(draw=partial(draw, journal)))


def make_copy() -> Callable[[Params], Params]:
    """Makes the function that copies arrays without waiting for them. With several hosts, each has the whole copy."""

    def copied(tree: Params) -> Params:
        return jax.tree.map(jnp.copy, tree)

    def copy(tree: Params) -> Params:
        if hosts.count() == 1:
            return program(tree)
        mesh = jax.tree.leaves(tree)[0].sharding.mesh
        whole = jax.jit(copied, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
        return jax.tree.map(lambda x: x.addressable_data(0), whole)

    program = jax.jit(copied)
    return copy


def _at_places(places: np.ndarray, count: int, x: np.ndarray) -> np.ndarray:
    """Returns the rows of this host at their places in those of all hosts."""
    whole = np.zeros((count, *x.shape[1:]), x.dtype)
    whole[places] = x
    return whole


def _with_servers_of_host(options: EngineOptions) -> EngineOptions:
    """Returns the options with the servers of this host: every host has others, if there are enough."""
    urls = options.engine
    return replace(options, engine=urls[hosts.index() :: hosts.count()] or (urls[hosts.index() % len(urls)],))


def longest_prompt(task: Task) -> list[int]:
    """Returns the ids of the longest prompt of the first step."""
    tokens = task.prompts(0).tokens
    return max((row[is_token].tolist() for row, is_token in zip(tokens.ids, tokens.mask, strict=True)), key=len)


def balance_servers(servers: int, trainer: float, sampler: float) -> str:
    """Returns a sentence about how many servers would keep up with the trainer.

    Args:
      servers: The number of servers.
      trainer: The share of a step for which the trainer waited for servers.
      sampler: The share of a step for which servers waited for the trainer.
    """
    balanced = servers * (1 - sampler) / max(1 - trainer, 1e-9)
    return (
        f"the trainer waited for servers {trainer:.0%} of the time, and servers for the trainer {sampler:.0%}: "
        f"{balanced:.1f} servers would balance both, and there {'are' if servers > 1 else 'is'} {servers}"
    )


def make_score(policy: Policy, devices: Devices) -> Callable[[Params, list[int], float], Callable[[], np.ndarray]]:
    """Makes the function (params, ids, temperature) -> a function that waits for the log-probabilities of all tokens of
    a text but the first."""

    def score(params: Params, prompt: PromptTokens, ids: np.ndarray, temperature: np.ndarray):
        mask = np.ones(ids.shape, bool)
        return score_completion_tokens(policy, params, Batch(prompt, ids, mask, temperature)).logprobs

    program = jit_on_devices(score, 0, devices=devices)

    def score_text(params: Params, ids: list[int], temperature: float) -> Callable[[], np.ndarray]:
        rows = num_shards(devices)  # each device scores the same text
        width = -(-len(ids) // _SCORED_WIDTH) * _SCORED_WIDTH
        text = np.zeros((rows, 1, width), np.int32)
        text[..., : len(ids)] = ids
        first = PromptTokens(text[:, 0, :1], np.ones((rows, 1), bool))
        # At temperature 0 the sampler reports log-probabilities at 1, and so does a server.
        inputs = first, text[..., 1:], np.full((rows, 1), temperature or 1.0, np.float32)
        scores = program(params, *to_devices(inputs, devices))
        return lambda: local_rows(scores)[0, 0, : len(ids) - 1]

    return score_text


def seed_of(noise: np.ndarray, number: int, turn: int = 1) -> int:
    """Returns the seed of a request, below 2³¹, which every engine accepts.

    Args:
      noise: The (seed, stream, index) of the draw.
      number: The number of the completion.
      turn: The number of the turn. Default: 1.
    """
    digest = hashlib.sha256(",".join(str(int(x)) for x in (*noise, number, turn)).encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def empty_completions(shape: tuple[int, int, int], pad_id: int) -> Completions:
    """Returns completions without tokens as NumPy arrays, `[N, G, T]`."""
    ids, mask, logprobs = np.full(shape, pad_id, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    arrays: Any = ids, mask, logprobs, None, np.ones(shape[:2], bool), np.zeros(shape, np.int32)
    return Completions(*arrays)


def append(
    out: Completions,
    place: np.ndarray,
    turn: int,
    ids: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | None = None,
) -> None:
    """Appends tokens to a completion, in place. Those of the policy have log-probabilities."""
    arrays: Any = out
    start = np.count_nonzero(arrays.turn[*place])
    tokens = (*place, slice(start, start + len(ids)))
    arrays.completion_ids[tokens], arrays.turn[tokens] = ids, turn
    if logprobs is not None:
        arrays.completion_mask[tokens], arrays.sampler_logprobs[tokens] = True, logprobs


def _check(pretrained: Pretrained, task: Task) -> None:
    """Checks that an engine supports the run, before the first request."""
    check_full_precision(
        pretrained.params, "an engine samples with the original weights, so leave out quantize, or leave out engine"
    )
    if task.stop and task.stop.strips and any(text.startswith(" ") for text in task.stop.texts):
        raise UsageError(
            "a stop text begins with a space, which the model's tokenizer drops at the beginning of a text and servers "
            "keep: leave out the space, or leave out engine"
        )
