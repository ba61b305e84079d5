"""GRPO in one file: a small transformer learns to sort digits from rewards only.

The prompt is five digits, such as 3 1 4 1 5. The reward is the share of digits in their right place. The model starts
with random weights and never sees a sorted list. In each step it writes eight completions for each prompt. Each is
scored and compared with the other seven, and two updates make the better ones more likely.

  python examples/grpo.py                    # about one minute on two CPU cores
  python examples/grpo.py --reward random    # the control: nothing can be learned from random rewards

  step   0 reward 0.063 sorted 0.000         # of all completions, the share that is sorted
  step  60 reward 0.726 sorted 0.211
  step 160 reward 0.981 sorted 0.922         # in the control it is 0.000 throughout

A stopped run resumes with the same command from its last checkpoint. Its results are the same to the bit.
Several devices share the prompts. XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two devices of one CPU.

This file leaves out what large models need: pretrained weights, text, prompts of several lengths, a cache of keys and
values for sampling, minibatches, and models sharded over devices. `grpo-jax train` has all of these. There is no
held-out set either, because every step has new prompts.

Letters: N prompts, G completions of each, P tokens of a prompt, T tokens of a completion, V tokens in the vocabulary.
Inside `jax.pmap`, N counts the prompts of one device.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from grpo_jax import functional as F

N, P, T, V = 32, 5, 6, 11
EOS = 10  # ends a completion; the tokens 0 to 9 are the digits
group_size = 8  # G
epsilon_low, epsilon_high = 0.2, 0.2  # the loss rewards no probability ratio outside [1 - 0.2, 1 + 0.2]
kl_coef = 0.04  # weight of the KL divergence from the reference
# The published method: its advantages, ratio, clip, KL and weights of tokens.
method = F.PRESETS["grpo"].with_constants(epsilon_low=epsilon_low, epsilon_high=epsilon_high, kl_coef=kl_coef)
reference_steps = 50  # every 50 steps the policy becomes the new reference
updates_per_rollout = 2


# ==== model
class Transformer(nn.Module):
    """A decoder that maps tokens [..., L] to logits of the next token [..., L, V]."""

    width: int = 64
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(V, self.width)(tokens) + nn.Embed(P + T, self.width)(jnp.arange(tokens.shape[-1]))
        for _ in range(self.layers):
            x += nn.SelfAttention(4, use_bias=False)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(V, use_bias=False, name="unembedding")(nn.LayerNorm(name="last_norm")(x))


model, optimizer = Transformer(), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))


class State(NamedTuple):
    """The state that training changes and checkpoints store."""

    params: Any
    opt_state: Any
    ref_params: Any


# Every jax.pmap has the same axis name. Otherwise each function would be compiled again for the other's sharding.
@partial(jax.pmap, axis_name="devices", out_axes=None)
def initial_state(seed):
    params = model.init(jax.random.key(seed), jnp.zeros((1, P + T), int))
    return State(params, optimizer.init(params), params)


def completion_logprobs(params, tokens):
    """Returns the log-probability of each completion token, [N, G, T], for tokens [N, G, P + T]."""
    logits = model.apply(params, tokens)[:, :, P - 1 : -1]  # [N, G, T, V]: the token before predicts a token
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, :, P:, None], axis=-1)[..., 0]


# ==== rollout: prompts -> completions
def sample(params, prompt_ids, noise):
    """Writes G completions token by token: prompts [N, P], Gumbel noise [N, G, T, V] -> tokens [N, G, P + T]."""
    prompts = jnp.repeat(prompt_ids[:, None], group_size, axis=1)  # [N, G, P]

    def step(tokens, t):
        logits = model.apply(params, tokens)[:, :, P + t - 1]  # [N, G, V]; with Gumbel noise their argmax is a sample
        return tokens.at[:, :, P + t].set(jnp.argmax(logits + noise[:, :, t], axis=-1)), None

    return jax.lax.scan(step, jnp.pad(prompts, ((0, 0), (0, 0), (0, T))), jnp.arange(T))[0]


@partial(jax.pmap, axis_name="devices", in_axes=(None, 0, 0))
def rollout(state, prompt_ids, noise):
    tokens = sample(state.params, prompt_ids, noise)
    completion_ids = tokens[:, :, P:]
    is_eos = completion_ids == EOS
    return {
        "tokens": tokens,  # [N, G, P + T]; the others are [N, G, T]
        "completion_ids": completion_ids,
        "completion_mask": jnp.cumsum(is_eos, axis=-1) - is_eos == 0,  # true up to the first EOS, including it
        "old_logprobs": completion_logprobs(state.params, tokens),
        "ref_logprobs": completion_logprobs(state.ref_params, tokens),
    }


# ==== score: completions -> rewards
def sorting_reward(prompt, completion, rng):
    """Returns the share of digits in their right place. Missing and additional digits count as wrong."""
    right = sum(x == y for x, y in zip(completion, sorted(prompt), strict=False))
    return right / max(len(completion), len(prompt))


def score(prompt_ids, batch, reward, rng):
    """Returns rewards [N, G] and the share of sorted completions. It runs on the host, as most rewards do."""
    ids, mask = (np.asarray(batch[name]).reshape(N, -1, T) for name in ("completion_ids", "completion_mask"))
    rewards, is_sorted = np.zeros((N, group_size), np.float32), np.zeros((N, group_size), bool)
    for n, g in np.ndindex(N, group_size):
        prompt, completion = prompt_ids[n].tolist(), ids[n, g][mask[n, g] & (ids[n, g] != EOS)].tolist()
        rewards[n, g], is_sorted[n, g] = reward(prompt, completion, rng), completion == sorted(prompt)
    return rewards, is_sorted.mean()


# ==== update: advantages -> parameters
def loss_fn(params, batch, weights):
    """Returns GRPO's loss, a sum over tokens of weight times (clipped objective + kl_coef * KL), and metrics."""
    return method.loss(
        completion_logprobs(params, batch["tokens"]),
        batch["old_logprobs"],
        batch["advantages"],
        batch["completion_mask"],
        ref_logprobs=batch["ref_logprobs"],
        weights=weights,
    )


@partial(jax.pmap, axis_name="devices", in_axes=(None, 0), out_axes=None)
def update(state, batch):
    # The weights add up to 1 over all devices, so the sum of the devices' gradients is that of the whole batch.
    weights = method.aggregation(batch["completion_mask"], axis_name="devices")
    for _ in range(updates_per_rollout):
        gradients, metrics = jax.grad(loss_fn, has_aux=True)(state.params, batch, weights)
        gradients, metrics = jax.lax.psum((gradients, metrics), "devices")
        changes, opt_state = optimizer.update(gradients, state.opt_state)
        state = state._replace(params=optax.apply_updates(state.params, changes), opt_state=opt_state)
    return state, {name: total / count for name, (total, count) in metrics.items()}


# ==== the loop
def shard(x):
    """Divides the prompts among the devices: [N, ...] -> [devices, N / devices, ...]."""
    return x.reshape(jax.device_count(), -1, *x.shape[1:])


def train(steps, reward, folder, save_steps=50):
    state = initial_state(jnp.zeros(jax.device_count(), int))
    with ocp.CheckpointManager(folder.absolute()) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        for step in range(done, steps):
            # ---- rollout: everything random is a function of the step, so a resumed run draws the same
            rng = np.random.default_rng(step)
            prompt_ids, noise = rng.integers(0, 10, (N, P)), rng.gumbel(size=(N, group_size, T, V))
            batch = rollout(state, shard(prompt_ids), shard(noise.astype(np.float32)))
            # ---- score
            rewards, accuracy = score(prompt_ids, batch, reward, rng)
            # ---- advantages: (reward - mean of its group) / standard deviation of its group, [N, G]
            lengths = np.asarray(batch["completion_mask"]).reshape(N, group_size, T).sum(-1)
            batch["advantages"] = shard(np.asarray(method.advantages(rewards, lengths)))
            # ---- update
            state, metrics = update(state, batch)
            if (step + 1) % reference_steps == 0:
                state = state._replace(ref_params=state.params)
            # ---- log
            if step % 20 == 0 or step + 1 == steps:
                numbers = {"reward": rewards.mean(), "sorted": accuracy, **metrics}
                print(f"step {step:3}", *(f"{name} {value:.3f}" for name, value in numbers.items()), flush=True)
            if (step + 1) % save_steps == 0 or step + 1 == steps:
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reward", choices=["sorting", "random"], default="sorting")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="of the checkpoints (default: runs/example-REWARD)")
    args = parser.parse_args()
    reward = {"sorting": sorting_reward, "random": lambda prompt, completion, rng: rng.uniform()}[args.reward]
    train(args.steps, reward, args.folder or Path(f"runs/example-{args.reward}"))
