"""A scalar head on the decoder. A reward model reads it at the end of a text, and a critic at every token.

v = w·h, where h is the hidden state after the last norm. There is no bias: classifiers in transformers have none, a
preference loss does not depend on it, and `center_coef` of `functional.bradley_terry_loss` keeps the rewards near 0.

Letters: see `transformer`. A completion has T tokens.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.params import lora
from grpo_jax.models.params.tree import Adapted, Headed as Headed, Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens


def add_head(config: ModelConfig, params: Params) -> tuple[ModelConfig, Headed]:
    """Adds a new head to a decoder, and returns the matching configuration too.

    The head is zero, so all values are 0. The first preference loss is then log 2 for any seed, and training need not
    unlearn the noise of an initial w. A random start is not needed to break a symmetry: w has a gradient at 0, and the
    decoder has one from the second step on.

    Args:
      config: The configuration of the decoder.
      params: The parameters of the decoder, plain or `lora.Adapted`. The result shares their arrays, except for an
        unembedding, which is dropped.

    Returns:
      The configuration, whose embeddings count as tied because there is no unembedding, and the parameters.
    """

    base = params.base if isinstance(params, Adapted) else params
    rest = {name: value for name, value in base.items() if name != "unembedding"}
    decoder = params._replace(base=rest) if isinstance(params, Adapted) else rest
    return without_vocabulary(config), Headed(decoder, jnp.zeros(config.hidden_size, jnp.float32))


def without_vocabulary(config: ModelConfig) -> ModelConfig:
    """Returns the configuration of the decoder without an unembedding."""
    return dataclasses.replace(config, tie_word_embeddings=True)


def values(
    policy: Policy,
    params: Headed,
    prompt: PromptTokens,
    completion_ids: jax.Array,
    completion_mask: jax.Array,
) -> jax.Array:
    """w·h after the prompt and after every token of each completion. The prompt is computed once for its G completions.

    Padding may be anywhere, even between tokens. It changes values only by rounding.

    Args:
      policy: The functions of the decoder.
      params: The parameters of the decoder and the head.
      prompt: The prompts, `[N, P]`, each of at least one token.
      completion_ids: The tokens of the completions, int `[N, G, T]`.
      completion_mask: True on tokens of the completion, bool `[N, G, T]`.

    Returns:
      Values, float32 `[N, G, T + 1]`. Value t is computed after the prompt and t tokens. For a critic it is the value
      of the state in which token t is chosen, or, after the last token, of the final state. Later values are arbitrary.
    """
    ids, mask = _gathered(prompt.ids, prompt.mask, at_end=True)
    completion_ids, _ = _gathered(completion_ids, completion_mask, at_end=False)
    # Hidden state t predicts token t. One more column yields the state after the last token.
    one_more = jnp.pad(completion_ids, [(0, 0), (0, 0), (0, 1)])
    hidden = policy.hidden(params.decoder, dataclasses.replace(prompt, ids=ids, mask=mask), one_more)
    return read(hidden, params.head)


def read(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """w·h for hidden states `[..., D]`, float32 `[...]`."""
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), head)


def judge_texts(
    policy: Policy,
    params: Headed,
    prompt: PromptTokens,
    completion_ids: jax.Array,
    completion_mask: jax.Array,
) -> jax.Array:
    """Returns the value at the last token of each text, which is the prompt's last token if the completion is empty.

    Args:
      policy, params, prompt, completion_ids, completion_mask: See `values`.

    Returns:
      The values, float32 `[N, G]`.
    """
    everywhere = values(policy, params, prompt, completion_ids, completion_mask)
    length = jnp.sum(completion_mask, axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.take_along_axis(everywhere, length, axis=-1)[..., 0]


@partial(jax.jit, static_argnums=0)
def judge_groups(config: ModelConfig, params: Headed, *arrays: Any) -> jax.Array:
    """Calls `judge_texts` with these arrays and a decoder of this configuration. Compiles once per shape."""
    return judge_texts(decoder_policy(config), params, *arrays)


def merge_decoder(params: Headed) -> Headed:
    """Merges adapters into the decoder, if it has any."""
    decoder = params.decoder
    return Headed(lora.merge(decoder) if isinstance(decoder, Adapted) else decoder, params.head)


def _gathered(ids: jax.Array, mask: jax.Array, *, at_end: bool) -> tuple[jax.Array, jax.Array]:
    """Moves tokens, in their order, to one end of each row, and padding to the other end."""
    order = jnp.argsort(mask if at_end else ~mask, axis=-1, stable=True)
    return jnp.take_along_axis(ids, order, axis=-1), jnp.take_along_axis(mask, order, axis=-1)
