"""Held-out evaluation, whose completions do not depend on the shape of the sampler's calls."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.config import GRPOConfig
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Completion
from grpo_jax.devices import all_rows, place
from grpo_jax.errors import UsageError
from grpo_jax.hosts import share_out
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.rewards.reward import RewardSums
from grpo_jax.rl.grade import decode_groups, final_texts
from grpo_jax.rl.source import Sampler
from grpo_jax.rl.types import EVALUATION, noise_of
from grpo_jax.sampling.sampler import Completions
from grpo_jax.statistics import best_of, bootstrap, majority
from grpo_jax.tasks.task import Task

# Numbers of completions have 32 bits: 12 bits for the completion of a prompt, the rest for the prompt.
_MAX_SAMPLES = 2**12 - 1
_MAX_PROMPTS = 2**19
_BLOCK = 256  # completions in a call of the reward, as in a step of 32 prompts with 8 completions each


class Samples(NamedTuple):
    """One call of the sampler: N groups of G completions."""

    prompts: Prompts  # N prompts
    numbers: np.ndarray  # int32 [N, G], numbers of the completions, which key their noise
    greedy: np.ndarray  # bool [N, G]
    counted: np.ndarray  # bool [N, G], false for completions that only fill the shape
    completions: Completions  # NumPy arrays; None before they are sampled


class Evaluation(NamedTuple):
    """Rewards of M held-out prompts with n sampled completions and one greedy completion each.

    In fields of n + 1 completions the last one is greedy.
    """

    rewards: np.ndarray  # float64 [M, n], the metric of sampled completions, 0 if not graded
    greedy: np.ndarray  # float64 [M], the metric of greedy completions
    graded: np.ndarray  # bool [M, n + 1], true if the metric is a finite number
    components: dict[str, np.ndarray]  # name -> float32 [M, n + 1], unweighted, NaN where the reward does not apply
    lengths: np.ndarray  # int [M, n + 1], in tokens, including EOS
    truncated: np.ndarray  # bool [M, n + 1]
    texts: list[list[Completion]]  # [M][n + 1]
    answers: list[list[Hashable | None]] | None  # [M][n]; None if the task has none


def num_heldout_calls(task: Task, config: GRPOConfig) -> int:
    """Returns the number of calls of `sample_heldout`."""
    sampling, samples = config.sampling, config.logging.eval_samples
    samples = sampling.group_size - 1 if samples is None else samples
    groups = -(-(samples + 1) // sampling.group_size) * len(task.heldout.examples)
    return -(-groups // sampling.num_prompts)


def sample_heldout(sampler: Sampler, params: Params, task: Task, config: GRPOConfig) -> Iterator[Samples]:
    """Samples n completions of each held-out prompt, and one greedily.

    Calls have the shape of training, so that evaluation compiles no program. The noise of a completion depends on the
    seed, the number of its prompt and its own number, but not on the shape or on n. It is the same at every evaluation,
    so that differences between two evaluations come from the parameters. The shape changes rounding, which rarely
    changes a token.

    Args:
      sampler: Samples completions on the devices of the run.
      params: The parameters of the policy.
      task: Supplies the held-out prompts.
      config: Supplies the shape of the calls, the temperature of sampled completions, the seed, and n
        (`eval_samples`). A prompt takes ⌈(n + 1) / G⌉ groups.

    Yields:
      The calls. Counted completions are in the order of prompts, and the greedy completion of a prompt is its last.

    Raises:
      UsageError: There are no prompts, too many prompts, or n is out of range.
    """
    params, shape = sampler.take(place(params, sampler.devices)), config.sampling

    def start(call: Samples) -> Samples:
        temperatures = np.where(call.greedy, 0, shape.temperature).astype(np.float32)
        noise = noise_of(config.seed, EVALUATION, 0)
        _, completions = sampler.sample(params, call.prompts, call.numbers, temperatures, noise)
        return call._replace(completions=completions)

    def fetch(started: Samples) -> Samples:
        return started._replace(completions=all_rows(started.completions, sampler.devices))

    samples, counts = config.logging.eval_samples, {"num_prompts": shape.num_prompts, "group_size": shape.group_size}
    calls = map(start, heldout_calls(task.heldout, **counts, samples=samples))
    started = next(calls)
    for following in calls:  # the devices sample this call while the host reads the previous call
        yield fetch(started)
        started = following
    yield fetch(started)


def heldout_calls(
    heldout: Prompts, *, num_prompts: int, group_size: int, samples: int | None = None
) -> Iterator[Samples]:
    """Yields the calls of `sample_heldout` without completions. n is `samples`, by default G − 1."""
    samples, total = group_size - 1 if samples is None else samples, len(heldout.examples)
    if not 1 <= samples <= _MAX_SAMPLES:
        raise UsageError(f"{samples} samples of each held-out prompt are asked for: it must be 1 to {_MAX_SAMPLES}")
    if not 1 <= total <= _MAX_PROMPTS:
        raise UsageError(f"the task has {total} held-out prompts: an evaluation takes 1 to {_MAX_PROMPTS}")
    groups = -(-(samples + 1) // group_size)  # for each prompt
    for start in range(0, total * groups, num_prompts):
        group = np.arange(start, start + num_prompts)[:, None]
        prompt = np.minimum(group // groups, total - 1)
        sample = group % groups * group_size + np.arange(group_size)
        counted = (group < total * groups) & (sample <= samples)
        # Copies of the greedy completion fill up the shape: they end when it ends, so they take no extra steps.
        sample = np.where(counted, sample, samples)
        numbers = (prompt * (_MAX_SAMPLES + 1) + sample).astype(np.int32)
        yield Samples(heldout.take(prompt[:, 0]), numbers, sample == samples, counted, None)  # type: ignore[arg-type]


def evaluate(calls: Iterable[Samples], task: Task, *, metric: str = "", block: int = _BLOCK) -> Evaluation:
    """Grades completions with the task's reward.

    Each call of the reward gets whole prompts, with up to `block` completions (but at least one prompt), independent of
    the sampler's shape. So a reward that compares completions of a prompt sees all n + 1 of them, including the greedy
    completion, and the deadlines of a `Grader` cover about as many completions as in training. A reward that compares
    prompts depends on `block`.

    Args:
      calls: All calls of `sample_heldout`.
      task: Supplies the reward, and the answers for majority votes.
      metric: The component to evaluate. Default: the weighted sum.
      block: The largest number of completions in a call of the reward. Pass that of a step of training, for which
        deadlines of a `Grader` are set. Default: 256.

    Returns:
      The evaluation. A metric that is None, NaN or infinite counts as 0 and as not graded.

    Raises:
      UsageError: There is no such component, or `Rewards.grade` raised the error.
    """
    if metric and metric not in (names := task.rewards.components):
        raise UsageError(f"the task has no reward {metric!r} to evaluate: its rewards are {', '.join(names)}")
    total = len(task.heldout.examples)
    flat: list[Completion] = []
    lengths, truncated = [], []
    for call in calls:
        decoded = decode_groups(call.completions, task)
        flat += [decoded[i][j] for i, j in np.argwhere(call.counted)]
        lengths.append(call.completions.completion_mask.sum(-1)[call.counted])
        truncated.append(call.completions.truncated[call.counted])
    width = len(flat) // total
    texts = [flat[start : start + width] for start in range(0, len(flat), width)]
    examples = task.heldout.examples
    finals = [final_texts(task, [example] * width, group) for example, group in zip(examples, texts, strict=True)]
    earned = _graded(task, finals, block)
    values = earned.components[metric] if metric else np.where(earned.applicable, earned.rewards, np.nan)
    graded = np.isfinite(values)
    rewards = np.where(graded, values, 0).astype(np.float64)
    answer, answers = task.answer, None
    if answer is not None:
        pairs = zip(examples, finals, strict=True)
        answers = [[answer(example, text) for text in group[:-1]] for example, group in pairs]
    return Evaluation(
        rewards=rewards[:, :-1],
        greedy=rewards[:, -1],
        graded=graded,
        components=earned.components,
        lengths=np.concatenate(lengths).reshape(graded.shape),
        truncated=np.concatenate(truncated).reshape(graded.shape),
        texts=texts,
        answers=answers,
    )


@np.errstate(invalid="ignore", over="ignore")  # the run warns about an infinite reward
def summary(evaluation: Evaluation, ks: Sequence[int] | None = None) -> dict[str, float]:
    """Returns the metrics of an evaluation, by name.

    The metrics avg (avg@n, over sampled completions), greedy, pass_at_k and, if the task has answers, maj_at_n are
    means over prompts. The bounds of their 95% intervals (`bootstrap`) have the suffixes `_low` and `_high`. For
    rewards other than 0 and 1, pass_at_k is the mean best of k. With several rewards the mean of each component is
    included. Lengths (in tokens, including EOS) and shares cover sampled completions, but `not_graded_share` covers
    all.

    Args:
      evaluation: The result of `evaluate`.
      ks: The values of k for pass_at_k. Default: powers of two from 2 to n.

    Returns:
      The metrics; NaN if a metric is undefined.

    Raises:
      UsageError: A k is out of range.
    """
    n = evaluation.rewards.shape[1]
    rewards, greedy = (_if_graded(values, evaluation) for values in (evaluation.rewards, evaluation.greedy))
    binary = bool(np.isin(rewards, (0, 1)).all() and np.isin(greedy, (0, 1)).all())
    ks = [2**i for i in range(1, n.bit_length())] if ks is None else ks
    estimates = {"avg": rewards.mean(-1), "greedy": greedy}
    estimates |= {f"pass_at_{k}": best_of(rewards, k) for k in ks}
    if evaluation.answers is not None and n > 1:
        estimates[f"maj_at_{n}"] = majority(rewards, evaluation.answers)
    numbers: dict[str, float] = {}
    for name, values in estimates.items():
        numbers |= bootstrap(values, binary=binary).named(name)
    if len(evaluation.components) > 1:
        for name, values in evaluation.components.items():
            applies = values[:, :-1][~np.isnan(values[:, :-1])]
            numbers[f"reward_{name}"] = float(applies.mean()) if applies.size else np.nan
    return numbers | {
        "length": float(evaluation.lengths[:, :-1].mean()),
        "ended_share": float(1 - evaluation.truncated[:, :-1].mean()),
        "not_graded_share": float(1 - evaluation.graded.mean()),
    }


@np.errstate(invalid="ignore", over="ignore")
def prompt_means(evaluation: Evaluation) -> np.ndarray:
    """Returns avg@n of each prompt, `[M]`; NaN if no completion of the evaluation was graded."""
    means: np.ndarray = _if_graded(evaluation.rewards, evaluation).mean(-1)
    return means


def _if_graded(values: np.ndarray, evaluation: Evaluation) -> np.ndarray:
    """Returns the values, or NaN if no completion of the evaluation was graded."""
    return values if evaluation.graded.any() else np.full_like(values, np.nan)


def _graded(task: Task, texts: list[list[Completion]], size: int) -> RewardSums:
    """Computes rewards `[M, n + 1]` in blocks of whole prompts, which are distributed over hosts."""
    step = max(1, size // len(texts[0]))
    starts = range(0, len(texts), step)

    def block(start: int) -> RewardSums:
        groups = texts[start : start + step]
        examples = task.heldout.examples[start : start + step]
        flat = [(example, text) for example, group in zip(examples, groups, strict=True) for text in group]
        earned = task.rewards.grade([example for example, _ in flat], [text for _, text in flat])
        by_prompt: RewardSums = jax.tree.map(lambda x: x.reshape(len(groups), -1), earned)
        return by_prompt

    blocks = share_out("rewards of held-out prompts", starts, block)
    joined: RewardSums = jax.tree.map(lambda *x: np.concatenate(x), *blocks)
    return joined
