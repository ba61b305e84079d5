"""Episodes sampled, scored and differentiated in float64, where nothing but a defect can make a difference.

`test_sampled_episodes` runs this as a process of its own: the library names float32 in many places, and here it means
float64 from the first import on. Prints the largest differences as JSON.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":  # before the library is imported, and in no other process
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64

import test_sampled_episodes as episodes

from grpo_jax.rl.scorers import score_completion_tokens
from grpo_jax.rl.source import to_batch
from grpo_jax.rl.types import Batch

PLACES = [(0, 0), (0, 2), (1, 1)]


def main():
    config = episodes.dataclasses.replace(episodes.WINDOW, attention="shared")
    object.__setattr__(config, "dtype", "float64")  # which no configuration may ask for
    policy, params = episodes.decoder_policy(config), episodes.params_of(config)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float64")}
    out = episodes.played(config)
    batch = to_batch(*episodes.PROMPTS, np.full((episodes.N, episodes.G), 1.3), out)
    own, weights = out.completion_mask, np.random.default_rng(0).normal(size=out.completion_mask.shape)

    def total(params, batch, mask, weights):
        logprobs = score_completion_tokens(policy, params, batch).logprobs
        return jnp.sum(jnp.where(mask, logprobs * weights, 0)), logprobs

    value_and_grad = jax.jit(jax.value_and_grad(total, has_aux=True))
    chosen = np.zeros_like(own)
    for place in PLACES:
        chosen[place] = own[place]
    (_, logprobs), gradient = value_and_grad(params, batch, chosen, weights)
    alone = [value_and_grad(params, *of_one(batch, weights, out, place)) for place in PLACES]
    parts = jax.tree.map(lambda *leaves: sum(leaves), *(found[1] for found in alone))
    rows = [np.asarray(found[0][1])[0, 0] for found in alone]
    differences = [
        np.abs(row - np.asarray(logprobs)[place][: len(row)])[own[place][: len(row)]].max()
        for place, row in zip(PLACES, rows, strict=True)
    ]
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)))
    apart = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), gradient, parts))
    found = {
        "turns": int(out.turn.max()),
        "sampler": float(np.abs(np.asarray(logprobs) - out.sampler_logprobs)[own].max()),
        "alone": float(max(differences)),
        "gradient": float(np.sqrt(sum(map(float, apart))) / norm),
    }
    print(json.dumps(found))


def of_one(batch, weights, out, place):
    """One episode by itself: no other of its group, no padding."""
    row, length = place[0], int((out.turn[place] > 0).sum())
    prompt = episodes.PROMPTS[0][row][episodes.PROMPTS[1][row]][None]
    ids, mask = (x[place][None, None, :length] for x in (out.completion_ids, out.completion_mask))
    one = Batch(prompt, np.ones_like(prompt, bool), ids, mask, np.full((1, 1), 1.3))
    return one, mask, weights[place][None, None, :length]


if __name__ == "__main__":
    main()
