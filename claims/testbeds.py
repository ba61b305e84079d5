"""Testbeds of the ablations: small tasks whose rewards are computed on the device, and where their training starts.

`ADDITIONS` is made so that runs have room to differ: its start is uneven, what carries is hardly ever right in it, and
a tenth of its prompts has no answer. `COARSE` is the same with a sampler of few bits. `ARITHMETIC` is the task of
`experiments.arithmetic` with its warm start, which all good settings solve. `WORDS` are those of
`experiments.tasks.letters`, with a start that writes words at random, several right answers to a prompt, and a reward
that can be gamed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import arithmetic as additions, multi_objective as words
from experiments.common import completions_batch, warm_start
from experiments.tasks import arithmetic, letters
from experiments.whole_run import DeviceTask
from grpo_jax.config import with_options
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Example, pad_completions, rng
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.runs.folder import RunFolder
from grpo_jax.sampling.sampler import Completions
from grpo_jax.step import Batch

UNSOLVABLE = 0.1  # share of additions whose answer is never right, the same ones for every seed
WRONG, WRONG_CARRIED = 0.5, 0.97  # shares of wrong labels in the start of `ADDITIONS`
LONG_ENOUGH = 8  # letters of a word
ALL_RIGHT = 1 - 1e-6  # gold score of a word that is right
# One layer, for a word is sixteen tokens.
WRITER = ModelConfig(letters.TEXT.vocab_size, 64, 128, num_hidden_layers=1, initializer_range=0.1)


class Testbed(NamedTuple):
    """A task, and the parameters that training starts from."""

    name: str
    model: ModelConfig
    max_tokens: int
    # (num_prompts, seed, heldout: how many prompts) -> task; held-out prompts are the same for every seed
    task: Callable[..., DeviceTask]
    start: Callable[..., Params]  # (seed, steps, run) -> where training starts
    options: Mapping[str, float]  # of the reward, with what they are unless a setting says otherwise
    learning_rate: float = 4e-4
    policy: Callable[[ModelConfig], Policy] = decoder_policy


# ---- rewards


def addition_reward(
    targets: jax.Array,
    completions: Completions,
    key: jax.Array,
    *,
    graded: Any = 0.0,
    coin: Any = 0.0,
    heavy: Any = 0.0,
    sharpness: Any = 0.0,
    shift: Any = 0.0,
    scale: Any = 0.0,
    draw: Any = 0.0,
) -> jax.Array:
    """Rewards right answers, or the share of right tokens, with noise and distortions that a reward may have.

    Args:
      targets: the answers with EOS and padding, int32 `[N, T]`; −1 where nothing is right.
      completions: `[N, G, T]`.
      key: of the noise.
      graded: 1: the share of tokens that are right, in [0, 1]; 0: all or nothing.
      coin: 1: a coin toss instead.
      heavy: scale of noise with Student's t distribution at 2 degrees of freedom, whose variance is infinite.
      sharpness: c of the distortion (exp(c r) − 1) / c, which keeps the order; 0: none.
      shift: deviation of a number that is added to all rewards of a prompt, the same whenever its answer comes.
      scale: deviation of the logarithm of a factor on all rewards of a prompt, likewise.
      draw: seed of shifts and factors, a whole number.

    Returns:
      Rewards `[N, G]`.
    """
    right = completions.completion_ids == targets[:, None]
    reward = jnp.where(graded > 0, jnp.mean(right, axis=-1), jnp.all(right, axis=-1).astype(jnp.float32))
    keys, shape = jax.random.split(key, 5), reward.shape
    reward = jnp.where(coin > 0, jax.random.bernoulli(keys[0], 0.5, shape), reward)
    bent = jnp.expm1(sharpness * reward) / jnp.where(sharpness > 0, sharpness, 1)
    reward = jnp.where(sharpness > 0, bent, reward)
    u = jax.random.uniform(keys[3], shape, minval=1e-6, maxval=1 - 1e-6)
    student = (2 * u - 1) / jnp.sqrt(2 * u * (1 - u))  # its quantile
    reward += heavy * student
    number = jnp.sum(targets * arithmetic.VOCAB_SIZE ** jnp.arange(targets.shape[-1]), axis=-1)
    drawn = jax.random.key(jnp.asarray(draw, jnp.uint32))
    of_prompt = jax.vmap(lambda n: jax.random.normal(jax.random.fold_in(drawn, n), (2, 1)))(number)
    return reward * jnp.exp(scale * of_prompt[:, 0]) + shift * of_prompt[:, 1]


def word_scores(targets: jax.Array, completions: Completions, key: jax.Array) -> jax.Array:
    """The gold score of a word, and what a reward with a bonus may pay for instead.

    The gold score is a product of three shares: the prompt's letters that the word has; the word's letters that do not
    repeat an earlier one; and 8 / length for a word of more than 8 letters. "back" scores 1 for "cab:".

    Args:
      targets: letters of prompts, int32 `[N, 3]`.
      completions: `[N, G, T]`.
      key: not read.

    Returns:
      `[N, G, 3]`: the gold score, in [0, 1]; the length in letters; the share of letters that are repeated.
    """
    del key
    is_letter = completions.completion_mask & (completions.completion_ids != letters.TEXT.eos_id)
    ids = jnp.where(is_letter, completions.completion_ids, -1)
    has = jnp.any(ids[..., None] == jnp.arange(letters.TEXT.vocab_size), axis=-2)  # [N, G, V]
    inputs = jnp.mean(jnp.take_along_axis(has, targets[:, None], axis=-1), axis=-1)
    length = jnp.sum(is_letter, axis=-1)
    new = jnp.sum(has, axis=-1) / jnp.maximum(length, 1)
    gold = inputs * new * jnp.minimum(1, LONG_ENOUGH / jnp.maximum(length, 1))
    return jnp.stack([gold, length, jnp.where(length > 0, 1 - new, 0)], axis=-1)


def word_reward(
    targets: jax.Array,
    completions: Completions,
    key: jax.Array,
    *,
    coin: Any = 0.0,
    length: Any = 0.0,
    repetition: Any = 0.0,
) -> jax.Array:
    """The gold score of words, with bonuses that a reward may pay.

    Args:
      targets: letters of prompts, int32 `[N, 3]`.
      completions: `[N, G, T]`.
      key: of the coin.
      coin: 1: a coin toss in place of everything else.
      length: bonus for T letters; fewer earn their share of it.
      repetition: the same for repeated letters.

    Returns:
      Rewards `[N, G]`.
    """
    gold, letters_of, repeated = jnp.moveaxis(word_scores(targets, completions, key), -1, 0)
    share = letters_of / completions.completion_ids.shape[-1]
    reward = gold + length * share + repetition * share * repeated
    return jnp.where(coin > 0, jax.random.bernoulli(key, 0.5, reward.shape), reward)


# ---- testbeds


def _additions(*, num_prompts: int, seed: int, heldout: int, unsolvable: float = 0.0) -> DeviceTask:
    task = arithmetic.arithmetic_task(num_prompts=num_prompts, seed=seed)

    def targets(examples: Sequence[Example]) -> np.ndarray:
        answers = [[[*arithmetic.TEXT.encode(row["answer"]), arithmetic.EOS_ID]] for row in examples]
        ids, mask = pad_completions(answers, arithmetic.MAX_TOKENS)
        ids = np.where(mask, ids, arithmetic.PAD_ID)[:, 0].astype(np.int32)
        never_right = rng(262).random((100, 100))[tuple(zip(*map(summands, examples), strict=True))] < unsolvable
        return np.where(never_right[:, None], -1, ids)

    task = task._replace(heldout=first_prompts(task.heldout, heldout))
    return DeviceTask(task, targets, addition_reward, addition_reward)


def summands(example: Example) -> tuple[int, int]:
    """Both numbers of an addition."""
    first, second = example["prompt"].removesuffix("=").split("+")
    return int(first), int(second)


def has_carry(examples: Sequence[Example]) -> np.ndarray:
    """Which additions carry a one from the last digits to those before, bool `[N]`."""
    return np.array([a % 10 + b % 10 > 9 for a, b in map(summands, examples)])


def _start_of_additions(seed: int, steps: int, run: RunFolder) -> Params:
    config = additions.WarmStart(warm_steps=steps)
    return additions.warm_start(decoder_policy(additions.MODEL), config, seed, run, phase=f"additions_{seed}")


def _uneven_start(seed: int, steps: int, run: RunFolder) -> Params:
    """Trains on wrong additions: 97 in 100 carries are forgotten, and every second other label is too large by one."""
    of_start = arithmetic.arithmetic_task(num_prompts=128, seed=seed + 2**20)  # other prompts than the run's

    def batch(step: int) -> Batch:
        prompts = of_start.prompts(step)
        carries, drawn = has_carry(prompts.examples), rng(seed, 2, step).random(len(prompts.examples))
        wrong = np.where(carries, -10, 1) * (drawn < np.where(carries, WRONG_CARRIED, WRONG))
        sums = np.array([sum(summands(example)) for example in prompts.examples]) + wrong
        labels = [[[*arithmetic.TEXT.encode(str(total)[::-1]), arithmetic.EOS_ID]] for total in sums.tolist()]
        return completions_batch(prompts, *pad_completions(labels, arithmetic.MAX_TOKENS))

    warm = SupervisedConfig(steps, additions.WarmStart().warm_learning_rate)
    return warm_start(decoder_policy(additions.MODEL), batch, warm, run, seed=seed, phase=f"uneven_{seed}")


def coarse_sampler(model: ModelConfig, *, bits: int = 2) -> Policy:
    """A policy whose sampler has hidden states of few bits, as one with an inference engine of 8 bits has.

    What is scored and learned from is exact, so that the sampler's probabilities are not those of the trainer.

    Args:
      model: the decoder's shape.
      bits: of the mantissa of the last hidden state; 2: as in FP8's E5M2.
    """
    exact = decoder_policy(model)

    def coarse(hidden: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(hidden, exponent_bits=8, mantissa_bits=bits)

    def prefill(*inputs: Any) -> tuple:
        last, decode, cache = exact.prefill(*inputs)

        def step(*of_step: Any) -> tuple:
            hidden, after = decode(*of_step)
            return coarse(hidden), after

        return coarse(last), step, cache

    return exact._replace(prefill=prefill)


def _words(*, num_prompts: int, seed: int, heldout: int) -> DeviceTask:
    task = letters.letters_task(words.own_letters, num_prompts=num_prompts, seed=seed)

    def targets(examples: Sequence[Example]) -> np.ndarray:
        return np.array([letters.TEXT.encode(row["letters"]) for row in examples], np.int32)

    return DeviceTask(task._replace(heldout=first_prompts(task.heldout, heldout)), targets, word_reward, word_scores)


def _start_of_words(seed: int, steps: int, run: RunFolder) -> Params:
    config = with_options(words.Config(), seed=seed, warm_steps=max(1, steps * 3 // 7), max_tokens=letters.MAX_TOKENS)
    return words.warm_start(decoder_policy(WRITER), config, run, lengths=(3, LONG_ENOUGH), phase="words")


def first_prompts(prompts: Prompts, count: int) -> Prompts:
    """The first prompts, as many as there are, but at most `count`."""
    return prompts.take(np.arange(min(count, len(prompts.examples))))


# The last, `draw`, is the seed of a run.
_SPOILT = dict.fromkeys(("graded", "coin", "heavy", "sharpness", "shift", "scale", "draw"), 0.0)
_BONUSES = dict.fromkeys(("coin", "length", "repetition"), 0.0)
ARITHMETIC = Testbed("additions", additions.MODEL, arithmetic.MAX_TOKENS, _additions, _start_of_additions, _SPOILT)
ADDITIONS = ARITHMETIC._replace(
    name="uneven", task=partial(_additions, unsolvable=UNSOLVABLE), start=_uneven_start, learning_rate=1e-3
)
COARSE = ADDITIONS._replace(name="coarse", policy=coarse_sampler)
# The learning rate is that of PPO, of GRPO and on ranks, by the training reward on seeds 10 and 11.
WORDS = Testbed("words", WRITER, letters.MAX_TOKENS, _words, _start_of_words, _BONUSES, learning_rate=4e-3)
TESTBEDS = {"additions": ADDITIONS, "coarse": COARSE, "arithmetic": ARITHMETIC, "words": WORDS}
