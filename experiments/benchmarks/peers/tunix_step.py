# mypy: ignore-errors
"""Seconds per GRPO step of Tunix's GRPOLearner on CPU, for a small Qwen2 decoder with random weights.

`python -m experiments.benchmarks.peers` starts this script with a file that describes the decoder and prompts.
"""

from experiments.benchmarks.peers import peer_common as common

common.set_up()  # before jax
SHAPE = common.shape_from_arguments(__doc__)
STEPS = len(SHAPE.prompts)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOLearner

from experiments.benchmarks.peers.tunix_learner import make_learner, one_device

# Padding is outside of the vocabulary, so that it is never sampled and in no prompt. If completions are padded, it must
# have an embedding, since a missing embedding is NaN.
PAD = SHAPE.vocabulary - 1 if SHAPE.ends else SHAPE.vocabulary
EOS = SHAPE.vocabulary + 1
LENGTHS: list[int] = []  # of the completions of a step


class IdTokenizer:
    """A tokenizer of decimal ids that are separated by blanks."""

    def encode(self, text, **_):
        return [int(word) for word in str(text).split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 0  # the sampler then adds no BOS to the prompt

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def make_model(mesh: Mesh) -> Qwen2:
    """Makes Tunix's decoder, and draws all matrices, because its constructor leaves the MLP at zero."""
    config = ModelConfig(
        num_layers=SHAPE.layers,
        vocab_size=SHAPE.vocabulary,
        embed_dim=SHAPE.hidden,
        hidden_dim=SHAPE.ffn,
        num_heads=SHAPE.heads,
        head_dim=SHAPE.head_dim,
        num_kv_heads=SHAPE.kv_heads,
        rope_theta=int(common.ROPE_THETA),
        norm_eps=common.NORM_EPS,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    with mesh:
        model = Qwen2(config, rngs=nnx.Rngs(0))
        draw = np.random.default_rng(0)
        state = nnx.state(model, nnx.Param)
        state = jax.tree.map(
            lambda x: jnp.asarray(draw.standard_normal(x.shape, np.float32) * SHAPE.init) if x.ndim > 1 else x, state
        )
        nnx.update(model, state)
    return model


def reward(prompts, completions, **_):
    return [common.reward_of([int(word) for word in text.split()]) for text in completions]


class Timed(GRPOLearner):
    steps: common.Steps

    def _run_global_step(self, *args, **kwargs):
        super()._run_global_step(*args, **kwargs)
        if self.rl_cluster.actor_trainer.train_steps > self.steps.count:
            jax.block_until_ready(nnx.state(self.rl_cluster.actor_trainer.model))
            self.steps.end(LENGTHS)


def time_sampling(cluster: clusters.RLCluster, learner: Timed) -> None:
    generate = cluster.generate

    def timed(*args, **kwargs):
        with learner.steps.generating():
            output = generate(*args, **kwargs)
        LENGTHS[:] = [len(tokens) for tokens in output.tokens]
        return output

    cluster.generate = timed


def main() -> None:
    mesh = one_device()
    actor, reference = make_model(mesh), make_model(mesh)
    data = [{"prompts": texts} for texts in np.array(SHAPE.texts).reshape(STEPS, -1)]
    learner = make_learner(
        Timed,
        actor,
        reference,
        IdTokenizer(),
        reward,
        mesh=mesh,
        steps=STEPS,
        group=SHAPE.group,
        learning_rate=common.LEARNING_RATE,
        sizes=(SHAPE.longest_prompt, SHAPE.completion),
        ends=SHAPE.ends,
    )
    cluster = learner.rl_cluster
    time_sampling(cluster, learner)
    model = cluster.actor_trainer.model
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameters == SHAPE.parameters, (parameters, SHAPE.parameters)
    jax.block_until_ready(nnx.state(model))
    learner.steps = common.Steps()
    learner.train(data)


if __name__ == "__main__":
    main()
