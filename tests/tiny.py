"""Tiny models, parameters, prompts and tasks that many tests need."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.new_models import save_new_model
from grpo_jax.data.prompts import Prompts, pad_prompts
from grpo_jax.data.types import rng
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.files.families import config_from_huggingface
from grpo_jax.models.files.weights import load_params, read_json
from grpo_jax.models.params.lora import TARGETS, add_adapters
from grpo_jax.models.params.tree import Adapted
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens, rows_of_texts
from grpo_jax.sampling.sampler import Completions, sample_groups
from grpo_jax.sampling.stopping import Stop, TokenBytes, make_stop
from grpo_jax.tasks.task import Task

# Models and outputs of transformers, made by golden/make.py.
GOLDEN = Path(__file__).parent / "golden"
# Data sets, tokenizers and a small pretrained model, which not every machine has.
DATA = Path(__file__).parents[2] / "shared/data"
STORIES = DATA / "stories260K-hf"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs the shared data")


@contextlib.contextmanager
def refused(words: str) -> Iterator[pytest.ExceptionInfo]:
    """Asserts that the block raises a `UsageError` of one line that matches the pattern `words`."""
    with pytest.raises(UsageError, match=words) as error:
        yield error
    assert "\n" not in str(error.value)


def slow_unless(quick: Any, values: Any) -> list[Any]:
    """Returns parameters of a test, values or tuples of values, and marks all that are not in `quick` as slow."""

    def parameter(x: Any) -> Any:
        several = x if isinstance(x, tuple) else (x,)
        return pytest.param(*several, id="-".join(map(str, several)), marks=() if x in quick else pytest.mark.slow)

    return [parameter(x) for x in values]


# ---- models


def tiny_config(vocab_size: int, **changes: Any) -> ModelConfig:
    """Returns the configuration of a decoder with one layer, which compiles fast, with some fields changed."""
    return replace(ModelConfig(vocab_size, 16, 32, 1, 2, 1, 8, initializer_range=0.3), **changes)


def random_like(shapes: Any, scale: float = 0.3, seed: int = 0) -> Any:
    """Returns random leaves of these shapes, with norms near 1. Initial biases and norms would hide mistakes."""
    noise = np.random.default_rng(seed)

    def leaf(path: Any, x: Any) -> jax.Array:
        drawn = noise.normal(scale=scale, size=x.shape).astype(np.float32)
        return jnp.asarray(1 + drawn if path[-1].key == "scale" else drawn)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@cache
def random_params(config: ModelConfig, scale: float = 0.3) -> Any:
    """Returns parameters of a decoder with random biases and norms."""
    return random_like(jax.eval_shape(decoder_policy(config).init, jax.random.key(0)), scale)


def randomly_adapted(
    params: Any, rank: int = 2, alpha: float = 4.0, scale: float = 0.3, targets: Sequence[Any] = TARGETS
) -> Adapted:
    """Returns parameters with random adapters on all projections, because the initial B of 0 would hide mistakes."""
    new = add_adapters(params, jax.random.key(0), rank=rank, alpha=alpha, targets=targets)
    return new._replace(adapters=random_like(new.adapters, scale))


@cache
def load_golden(name: str) -> tuple[ModelConfig, Any]:
    """Returns the configuration and the parameters of a folder in golden/, for its texts of 30 tokens."""
    config = config_from_huggingface(read_json(GOLDEN / name / "config.json"))
    config = replace(config, longest_text=30) if config.longest_short_text else config
    return config, load_params(GOLDEN / name, config)


def states_of_texts(policy: Policy, params: Any, ids: Any, texts: Any) -> jax.Array:
    """Returns the state at each token, `[R, S, D]`. Texts get one more token, because states precede a token.

    Args:
      policy: The functions of the model.
      params: The parameters of the model.
      ids: The tokens, int `[R, S]`.
      texts: The number of each token's text, from 1, int `[R, S]`.
    """
    ids, texts = (jnp.pad(jnp.asarray(x), [(0, 0), (0, 1)]) for x in (ids, texts))
    return policy.states(params, rows_of_texts(ids, texts))[0][:, 0, 1:]


def sampler_of(policy: Policy, **options: Any) -> Callable[..., Completions]:
    """Returns a compiled sampler: (params, prompt, rows, key, temperature, limits) -> outputs."""

    def sample(params, prompt, rows, key, temperature=1.0, limits=None):
        limits = {"temperature": temperature, "limits": limits}
        return sample_groups(policy, params, prompt, rows, key, **limits, **options)

    return jax.jit(sample)


def decoded_states(policy: Policy, params: Any, prompt: PromptTokens, completions: Any) -> jax.Array:
    """Returns the state before each token of completions `[N, G, T]` and behind the last, `[N, G, T + 1, D]`.

    The tokens are decoded one after the other.
    """
    _, group_size, tokens = completions.shape
    first, decode, cache = policy.prefill(params, prompt, group_size, tokens + 1)

    def step(cache: Any, token: Any) -> Any:
        state, cache = decode(cache, *token)
        return cache, state

    _, states = jax.lax.scan(step, cache, (completions.transpose(2, 0, 1), jnp.arange(tokens)))
    first = jnp.broadcast_to(first[:, None], states.shape[1:])
    return jnp.concatenate([first[None], states]).transpose(1, 2, 0, 3)


# ---- prompts and tasks


def whole_prompts(ids: Any) -> PromptTokens:
    """Returns prompts `[N, P]` without padding."""
    return PromptTokens(ids, np.ones(ids.shape, bool))


def ragged_prompts(lengths: Any, vocab_size: int, width: int | None = None) -> PromptTokens:
    """Returns prompts `[N, P]` of random ids, padded on the left with 0."""
    lengths = np.asarray(lengths)[:, None]
    width = lengths.max() if width is None else width
    mask = np.arange(width) >= width - lengths
    return PromptTokens(np.random.default_rng(0).integers(0, vocab_size, mask.shape, np.int32) * mask, mask)


def two_groups() -> tuple[PromptTokens, np.ndarray]:
    """Returns prompts of 2 and 5 tokens, and two completions of 4 tokens for each, of 24 ids."""
    return ragged_prompts([2, 5], 24), np.random.default_rng(0).integers(0, 24, (2, 2, 4), np.int32)


def row_numbers(num_prompts: int, group_size: int) -> np.ndarray:
    """Returns the numbers of completions, int32 `[N, G]`."""
    return np.arange(num_prompts * group_size, dtype=np.int32).reshape(num_prompts, group_size)


def digits(ids: Any) -> str:
    """Returns the text of a completion, its concatenated ids."""
    return "".join(map(str, ids))


def digit_prompts(step: int, count: int = 8, length: int = 2, pad_id: int = 7) -> Prompts:
    """Returns the prompts of a step, random ids below 6, padded to `length` + 1 tokens."""
    tokens = rng(step).integers(0, 6, (count, length)).tolist()
    return pad_prompts(tokens, [{"prompt": str(x)} for x in tokens], width=length + 1, pad_id=pad_id)


def digit_task(reward: Any, prompts: Callable[[int], Prompts] = digit_prompts, vocab_size: int = 8) -> Task:
    """Returns a task with prompts of digits, in which 6 ends a completion and 7 is padding."""
    return Task(prompts, reward, prompts(999), digits, (6,), 7, vocab_size)


def digit_stop(*texts: str, vocab_size: int = 8) -> Stop | None:
    """Returns stop texts for the tokens of `digits`."""
    words, none = [str(i).encode() for i in range(vocab_size)], np.zeros(vocab_size, bool)
    return make_stop(texts, TokenBytes(words, words, none, none)) if texts else None


def says_three(examples: Any, completions: Sequence[str]) -> list[float]:
    """Rewards the share of threes among three characters."""
    return [text.count("3") / 3 for text in completions]


def task_of_tokens(eos_ids: tuple[int, ...], pad_id: int, vocab_size: int) -> Task:
    """Returns a task for samplers, which has only special tokens and a vocabulary size."""
    return Task(None, None, None, None, eos_ids, pad_id, vocab_size)  # type: ignore[arg-type]


# A chat template of the names of tools and the contents of messages.
TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
TEMPLATE += "{% for m in messages %}{{ m.content }}{% endfor %}"


class Characters:
    """A tokenizer of one character a token, whose chat template writes the roles."""

    pad_token_id = None
    bos_token_id = None
    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % 256 for character in text]

    def __call__(self, texts: list[str], add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool, tokenize: bool) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


# ---- optimizers


class Recorded(NamedTuple):
    """The optimizer state of `recorder`: the gradients of all steps so far."""

    count: jax.Array
    gradients: optax.Params  # [U, ...]


def recorder(updates: int, rate: float = 0.1, step=None) -> optax.GradientTransformation:
    """Returns plain gradient descent that records every gradient.

    Args:
      updates: The largest number of gradients to record (U).
      rate: The learning rate.
      step: (number of the update, gradients) -> gradients for the step instead; None: no change.
    """

    def init(params):
        return Recorded(jnp.int32(0), jax.tree.map(lambda x: jnp.zeros((updates, *x.shape), x.dtype), params))

    def update(gradients, state, params=None):
        del params
        every = jax.tree.map(lambda all_, one: all_.at[state.count].set(one), state.gradients, gradients)
        along = gradients if step is None else step(state.count, gradients)
        return jax.tree.map(lambda x: -rate * x, along), Recorded(state.count + 1, every)

    return optax.GradientTransformation(init, update)


# ---- folders


def save_tiny_model(folder: Path, text: Any, **changes: Any) -> Path:
    """Saves a random model of one layer and a tokenizer of characters, and returns the folder. `changes` are fields."""
    config = tiny_config(**{"vocab_size": text.vocab_size} | changes)
    save_new_model(folder, random_params(config), config)
    text.save_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, size: int) -> None:
    """Writes a tokenizer of the words t0, t1 …, with t5 as EOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t5"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def change_json(file: Path, **changes: Any) -> None:
    """Replaces some fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    """Writes each row as a line of JSON, and returns the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_lines(file: Path) -> list[dict]:
    """Returns the objects of a file that has one on each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]
