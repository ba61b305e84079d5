# mypy: ignore-errors
"""A learner of Tunix with the loss, the optimizer and the sampling of this library."""

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rollout.base_rollout import RolloutConfig

from experiments.benchmarks.peers import peer_common as common


def one_device() -> Mesh:
    """Returns the mesh of the first device."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def make_learner(
    learner, actor, reference, tokenizer, reward, *, mesh, steps, group, learning_rate, sizes, ends, training=None
):
    """Makes a learner, whose `rl_cluster` samples in this process.

    Args:
      learner: `GRPOLearner`, or a class derived from it.
      actor, reference: The models.
      tokenizer: An object with Tunix's methods of a tokenizer.
      reward: (prompts, completions, **columns) -> rewards.
      mesh: The mesh of both models.
      steps: The number of optimizer steps.
      group: The number of completions of a prompt.
      learning_rate: The constant learning rate of AdamW.
      sizes: The lengths of the longest prompt and of the longest completion, in tokens.
      ends: The ids that end a completion; none: the tokenizer's.
      training: Further options of `RLTrainingConfig`. Default: none.
    """
    roles, (prompt, completion) = clusters.Role, sizes
    optimizer = optax.chain(
        optax.clip_by_global_norm(common.MAX_GRAD_NORM), optax.adamw(learning_rate, weight_decay=0.0)
    )
    cluster = clusters.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer,
        cluster_config=clusters.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
            rollout_engine="vanilla",
            training_config=clusters.RLTrainingConfig(
                actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=steps, **(training or {})
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=completion,
                max_prompt_length=prompt,
                kv_cache_size=prompt + completion,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=ends or None,
            ),
        ),
    )
    loss = GRPOConfig(
        num_generations=group,
        num_iterations=1,
        beta=common.BETA,
        epsilon=common.CLIP,
        kl_loss_mode="low_var_kl",  # k3
        loss_agg_mode="sequence-mean-token-mean",
    )
    return learner(rl_cluster=cluster, algo_config=loss, reward_fns=reward)
