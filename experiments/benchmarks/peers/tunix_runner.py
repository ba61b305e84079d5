# mypy: ignore-errors
"""Trains with Tunix's GRPOLearner by a plan."""

from experiments.benchmarks.peers import peer_common as common
from experiments.benchmarks.peers.recorder import recorder_from_arguments

common.set_up()  # before jax
RECORDER = recorder_from_arguments()
PLAN = RECORDER.plan

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tunix.models.llama3 import model as llama, params as llama_params
from tunix.models.safetensors_loader import torch_key_to_jax_key
from tunix.rl import rl_cluster as clusters
from tunix.rl.common import compute_per_token_logps
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

ENDS = [2**30] if PLAN.full_length else PLAN.ends  # an id outside of the vocabulary is never sampled


class PlannedTokenizer:
    """The model's tokenizer, with the padding of the plan."""

    def __init__(self):
        self._tokenizer = Tokenizer.from_file(PLAN.model + "/tokenizer.json")

    def encode(self, text, **_):
        return self._tokenizer.encode(str(text)).ids

    def decode(self, ids, **_):
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def bos_id(self):
        return None  # `encode` adds it, if the model has one

    def eos_id(self):
        return ENDS[0]

    def pad_id(self):
        return PLAN.pad_id


class Snapshots(GRPOLearner):
    """A learner that saves the policy after the steps of the plan."""

    updates = 0

    def _run_global_step(self, *args, **kwargs):
        super()._run_global_step(*args, **kwargs)
        trainer = self.rl_cluster.actor_trainer
        if trainer.train_steps > self.updates:
            self.updates = trainer.train_steps
            if RECORDER.is_due(self.updates):
                jax.block_until_ready(nnx.state(trainer.model))
                RECORDER.save(self.updates, lambda folder: save(trainer.model, folder))


def model_config() -> llama.ModelConfig:
    """Returns Tunix's configuration of the model, which must be a Llama decoder."""
    raw = json.loads(Path(PLAN.model, "config.json").read_text())
    assert raw["model_type"] == "llama", raw["model_type"]
    assert not any(raw.get(name) for name in ("rope_scaling", "attention_bias", "mlp_bias"))
    return llama.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=int(raw["rope_theta"]),
        norm_eps=raw["rms_norm_eps"],
        weight_tying=raw["tie_word_embeddings"],
    )


def save(model: llama.Llama3, folder: Path) -> None:
    """Writes model.safetensors with the names and shapes of the initial file: the inverse of Tunix's loader."""
    mapping = llama_params._get_key_and_transform_mapping(model_config())
    values = {".".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.state(model).flat_state()}
    tensors = {}
    for name, tensor in load_file(PLAN.model + "/model.safetensors").items():
        path, transform = torch_key_to_jax_key(mapping, name)
        order = (transform and transform[0]) or tuple(range(tensor.ndim))
        permuted = values[path].reshape([tensor.shape[axis] for axis in order])
        tensors[name] = np.ascontiguousarray(permuted.transpose(np.argsort(order)))
    save_file(tensors, folder / "model.safetensors")


def make_cluster(mesh: Mesh, actor: llama.Llama3, reference: llama.Llama3) -> clusters.RLCluster:
    """Makes the models, the optimizer and the sampler, which runs in this process."""
    roles, settings = clusters.Role, PLAN.settings
    if "train_micro_batch_size" in settings:  # the other sizes would follow it
        others = ("mini_batch_size", "rollout_micro_batch_size", "compute_logps_micro_batch_size")
        settings = dict.fromkeys(others, len(PLAN.prompts[0])) | settings
    optimizer = optax.chain(
        optax.clip_by_global_norm(common.MAX_GRAD_NORM), optax.adamw(PLAN.learning_rate, weight_decay=0.0)
    )
    return clusters.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=PlannedTokenizer(),
        cluster_config=clusters.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
            rollout_engine="vanilla",
            training_config=clusters.RLTrainingConfig(
                actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=len(PLAN.prompts), **settings
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=PLAN.max_tokens,
                max_prompt_length=PLAN.width,
                kv_cache_size=PLAN.width + PLAN.max_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=ENDS,
            ),
        ),
    )


def time_and_reseed(cluster: clusters.RLCluster) -> None:
    """Times rollouts, and gives each other random numbers; without a seed, Tunix repeats the same in every step."""
    generate, config = cluster.generate, cluster.cluster_config.rollout_config
    config.seed = PLAN.seed * 1_000_000

    def seeded(*args, **kwargs):
        config.seed += 1
        with RECORDER.sampling():
            return generate(*args, **kwargs)

    cluster.generate = seeded


def main() -> None:
    """Trains, and compares the initial model."""
    mesh, config = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")), model_config()
    # Tunix's Llama never passes its rope_theta on, so that it would always be 1,000,000.
    llama.apply_rope = partial(llama.apply_rope, rope_theta=config.rope_theta)
    load = partial(llama_params.create_model_from_safe_tensors, PLAN.model, config, mesh, dtype=jnp.float32)
    actor, reference = load(), load()
    cluster = make_cluster(mesh, actor, reference)
    time_and_reseed(cluster)
    loss = GRPOConfig(
        num_generations=PLAN.group,
        num_iterations=1,
        beta=common.BETA,
        epsilon=common.CLIP,
        kl_loss_mode="low_var_kl",  # k3
        loss_agg_mode="sequence-mean-token-mean",
    )
    learner = Snapshots(rl_cluster=cluster, algo_config=loss, reward_fns=reward)
    with RECORDER.pause():
        RECORDER.write_versions("google-tunix", "jax", "flax")
        encode = PlannedTokenizer().encode
        assert [encode(text) for text in PLAN.texts] == [ids for step in PLAN.ids for ids in step]
        assert PLAN.pad_id not in {i for step in PLAN.ids for ids in step for i in ids}
    learner.train([{"prompts": np.array(texts)} for texts in PLAN.prompts])
    RECORDER.finish(initial_logprobs(reference) if PLAN.probe else [])


def reward(prompts, completions, **_):
    return RECORDER.grade(prompts, completions)


def initial_logprobs(model: llama.Llama3) -> np.ndarray:
    """Returns a model's log-probabilities of the plan's probe."""
    ids, _ = PLAN.first_prompts()
    probe = jnp.asarray(PLAN.probe)
    return np.asarray(compute_per_token_logps(*nnx.split(model), jnp.asarray(ids), probe, PLAN.pad_id, ENDS[0]))


if __name__ == "__main__":
    main()
