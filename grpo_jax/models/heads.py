"""A scalar head on the decoder: a reward model reads it at the end of a text, a critic at every token.

v = w·h with h the state after the last norm. There is no bias: a classifier of transformers has none, a preference
loss does not see one, and `center_coef` of `functional.bradley_terry_loss` holds the rewards near 0.

Letters as in `transformer`; T tokens of a completion.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models import lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.params import Adapted, Headed as Headed, Params
from grpo_jax.models.policy import Policy, decoder_policy


def add_head(config: ModelConfig, params: Params) -> tuple[ModelConfig, Headed]:
    """A decoder with a new head, and the configuration that computes it.

    The head is zero: all values are then 0, so that the first preference loss is log 2 whatever the seed, and no noise
    of an initial w has to be unlearned. Nothing needs breaking, for w has a gradient where w is 0; the decoder has one
    from the second step on.

    Args:
      config: the decoder's shape.
      params: of the decoder, or `lora.Adapted`. The same arrays are in the result, but for an unembedding.

    Returns:
      The configuration, whose embeddings count as tied, since there is no unembedding; and the parameters.
    """

    base = params.base if isinstance(params, Adapted) else params
    rest = {name: value for name, value in base.items() if name != "unembedding"}
    decoder = params._replace(base=rest) if isinstance(params, Adapted) else rest
    return without_vocabulary(config), Headed(decoder, jnp.zeros(config.hidden_size, jnp.float32))


def without_vocabulary(config: ModelConfig) -> ModelConfig:
    """The configuration of a decoder that has no unembedding."""
    return dataclasses.replace(config, tie_word_embeddings=True)


def values(
    policy: Policy,
    params: Headed,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    completion_ids: jax.Array,
    completion_mask: jax.Array,
) -> jax.Array:
    """w·h after the prompt and after every token of each completion. The prompt is computed once for its G completions.

    Padding may stand anywhere, also between tokens: it moves no value but by rounding.

    Args:
      policy: of the decoder.
      params: its parameters and the head.
      prompt_ids: int `[N, P]`.
      prompt_mask: bool `[N, P]`, at least one true a row.
      completion_ids: int `[N, G, T]`.
      completion_mask: bool `[N, G, T]`.

    Returns:
      float32 `[N, G, T + 1]`. Number t is after the prompt and t tokens: for a critic the value of the state in which
      token t is chosen, and the last of a row that of its end. Beyond a row's tokens there is rubbish.
    """
    prompt_ids, prompt_mask = _gathered(prompt_ids, prompt_mask, at_end=True)
    completion_ids, _ = _gathered(completion_ids, completion_mask, at_end=False)
    # Hidden state t predicts token t: one column more, and there is one behind the last token.
    one_more = jnp.pad(completion_ids, [(0, 0), (0, 0), (0, 1)])
    hidden = policy.hidden(params.decoder, prompt_ids, prompt_mask, one_more)
    return read(hidden, params.head)


def read(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """w·h of states `[..., D]`, float32 `[...]`."""
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), head)


def scores(
    policy: Policy,
    params: Headed,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    completion_ids: jax.Array,
    completion_mask: jax.Array,
) -> jax.Array:
    """The value at the last token of each text: of a completion without tokens, the prompt's last.

    Args:
      policy, params, prompt_ids, prompt_mask, completion_ids, completion_mask: as in `values`.

    Returns:
      float32 `[N, G]`.
    """
    everywhere = values(policy, params, prompt_ids, prompt_mask, completion_ids, completion_mask)
    length = jnp.sum(completion_mask, axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.take_along_axis(everywhere, length, axis=-1)[..., 0]


@partial(jax.jit, static_argnums=0)
def score_groups(config: ModelConfig, params: Headed, *arrays: Any) -> jax.Array:
    """`scores` of a decoder of this configuration, compiled once for each shape. The arrays are as there."""
    return scores(decoder_policy(config), params, *arrays)


def merge(params: Headed) -> Headed:
    """Adapters multiplied into the decoder, where there are any."""
    decoder = params.decoder
    return Headed(lora.merge(decoder) if isinstance(decoder, Adapted) else decoder, params.head)


def _gathered(ids: jax.Array, mask: jax.Array, *, at_end: bool) -> tuple[jax.Array, jax.Array]:
    """Tokens in their order at one end of each row, padding at the other."""
    order = jnp.argsort(mask if at_end else ~mask, axis=-1, stable=True)
    return jnp.take_along_axis(ids, order, axis=-1), jnp.take_along_axis(mask, order, axis=-1)
