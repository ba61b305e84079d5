"""What an iteration computes: which scores it needs, and gradients by hand, in pieces and over devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rl_helpers
from bigrams import PARAMS, POLICY, D, V
from tiny import recorder, slow_unless

from grpo_jax import functional as F
from grpo_jax.config import PPO, recipe, with_options
from grpo_jax.devices import place, to_numpy
from grpo_jax.models.decoder import heads
from grpo_jax.models.decoder.heads import Headed
from grpo_jax.optimizer import has_weight_decay, make_optimizer
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_method, make_method_programs
from grpo_jax.rl.scorers import needs_old_logprobs
from grpo_jax.rl.update import minibatch_order
from grpo_jax.scoring import score_completion_tokens, states_of
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task

N, G, P, T = 16, 4, 2, 3
TASK = Task(None, None, None, None, (0,), 1, V)
HEAD = jnp.linspace(-1, 1, D)


@cache
def a_batch(num_prompts: int = N) -> Batch:
    """Completions of a policy that is near; some of them are empty."""
    return rl_helpers.near(POLICY, PARAMS, rl_helpers.ragged_batch((num_prompts, G, P, T), V))


@cache
def programs_of(config):
    """Programs of a run with a recorder for an optimizer, and where it starts."""
    params = {"policy": PARAMS}
    method = make_method({"policy": POLICY, "critic": POLICY}, config)
    if config.has_critic:
        decoder = None if config.critic.critic == "shared" else {"before": 0.9 * PARAMS["before"]}
        params["critic"] = Headed(decoder, HEAD)
    method = method._replace(optimizer=recorder(config.optimizer.epochs * config.optimizer.minibatches))
    return make_method_programs(method, POLICY, TASK, config), params


def learned(config, batch, rewards):
    """(state, what was learned) after an iteration. Without a KL the batch has no numbers of a reference."""
    programs, params = programs_of(config)
    if not config.loss.kl_coef:
        batch = batch._replace(ref_logprobs=None)
    return rl_helpers.placed(programs, params, batch, rewards).learned(programs)


def gradient_of(config, batch, rewards):
    """The gradient of the first optimizer step, and the metrics."""
    state, actual = learned(config, batch, rewards)
    return jax.tree.map(lambda x: x[0], state.opt_state.gradients["policy"]), actual.metrics


# ---- scores


PASSES = [
    ({"preset": "dapo"}, False, False),  # the only step takes its own numbers
    ({"preset": "dapo", "minibatches": 2}, True, True),
    ({"preset": "dapo", "epochs": 2}, True, True),
    ({"preset": "dapo", "minibatches": 2, "old_logprobs": "sampler"}, False, False),
    ({"preset": "dapo", "top_entropy": 0.5}, False, True),
    ({"preset": "dppo", "minibatches": 2}, False, False),  # its ratio is to the sampler
    ({"preset": "dppo", "kl_in_reward": True, "kl_coef": 0.1}, False, True),
    ({"preset": "grpo"}, False, True),
    ({"preset": "grpo", "divergence": "full"}, False, False),  # its reference runs in the loss
    ({"preset": "grpo", "kl_in_reward": True, "kl_coef": 0.1}, True, True),
    ({"preset": "dapo", "kl_in_reward": True, "kl_coef": 0.0}, False, False),
    ({"preset": "rloo"}, True, True),
]


@pytest.mark.parametrize(("options", "needs_old", "scored"), PASSES)
def test_scoring_passes_match_what_updates_need(options, needs_old, scored):
    config = recipe(**options)
    assert needs_old_logprobs(config) == needs_old
    assert bool(grpo_method(POLICY, config).scorers) == scored


@pytest.mark.parametrize("config", [recipe("dppo"), recipe("grpo", old_logprobs="sampler", epochs=2, kl_coef=0.0)])
def test_sampler_ratios_use_the_reported_logprobs(config):
    config = with_options(config, num_prompts=4, group_size=G)
    programs, params = programs_of(config)
    start = rl_helpers.placed(programs, params, a_batch(4)._replace(old_logprobs=None), rl_helpers.ragged_rewards(4, G))
    np.testing.assert_array_equal(start.scored(programs).batch.old_logprobs, a_batch(4).sampler_logprobs)


# ---- gradients by hand

GRPO = recipe("grpo", num_prompts=N, group_size=G, kl_coef=0.2, epsilon_low=0.1, epsilon_high=0.15)
OPTIONS = {"delta": 1.2, "kl_bias_correction": True, "top_entropy": 0.4}
OPTIONS |= {"mask_truncated": True, "off_policy_threshold": 0.1}
OFF = {"delta": 1e9, "kl_bias_correction": False, "top_entropy": 1.0}
OFF |= {"mask_truncated": False, "off_policy_threshold": 1e9}


@partial(jax.jit, static_argnames="kl_bias_correction")
def gradient_by_hand(params, batch: Batch, mask, delta, off_policy_threshold, *, kl_bias_correction) -> optax.Params:
    """GRPO's gradient at tokens of a mask, put together from functions of arrays alone."""

    def loss(params):
        states = POLICY.hidden(params, batch.prompt, batch.completion_ids)
        logprobs, _ = F.token_logprobs(
            states, POLICY.unembedding(params), batch.completion_ids, temperature=batch.temperature[..., None]
        )
        counted = batch.completion_mask
        drift = jnp.where(counted, batch.sampler_logprobs - logprobs, 0).sum(-1) / jnp.maximum(counted.sum(-1), 1)
        is_near = jax.lax.stop_gradient(drift <= off_policy_threshold)[..., None]
        return F.grpo_loss(
            logprobs,
            batch.old_logprobs,
            jnp.where(is_near | (batch.advantages >= 0), batch.advantages, 0),
            mask,
            ref_logprobs=batch.ref_logprobs,
            weights=F.sequence_mean_weights(mask, num_completions=N * G),
            kl_coef=0.2,
            epsilon_low=0.1,
            epsilon_high=0.15,
            delta=delta,
            kl_bias_correction=kl_bias_correction,
        )[0]

    return jax.grad(loss)(params)


def by_hand(batch: Batch, *, top_entropy, mask_truncated, params=PARAMS, **constants) -> optax.Params:
    mask, rewards = batch.completion_mask, rl_helpers.ragged_rewards(N, G)
    learned_from = mask & ~batch.truncated[..., None] if mask_truncated else mask
    # Of n tokens that are learned from, the 1 + ⌊share (n − 1)⌋ of the highest entropy.
    of_tokens = np.sort(np.asarray(batch.old_entropy)[learned_from])[::-1]
    has_advantage = batch.old_entropy >= of_tokens[int(top_entropy * (len(of_tokens) - 1))]
    advantages = F.group_advantages(rewards.rewards, where=rewards.applicable)[..., None] * has_advantage
    return gradient_by_hand(params, batch._replace(advantages=advantages), learned_from, **constants)


def test_every_option_has_its_functions_gradient():
    batch = a_batch()
    # Truncated completions have the highest entropies, but take no part of the share of tokens.
    batch = batch._replace(old_entropy=batch.old_entropy + 9 * batch.truncated[..., None].astype(np.float32))
    actual, metrics = gradient_of(with_options(GRPO, **OPTIONS), batch, rl_helpers.ragged_rewards(N, G))
    assert 0 < metrics["on_policy_share"] < 1
    rl_helpers.assert_close(actual, by_hand(batch, **OPTIONS), rtol=1e-4, atol=1e-7)
    for name in OPTIONS:
        without = by_hand(batch, **OPTIONS | {name: OFF[name]})
        assert optax.global_norm(jax.tree.map(jnp.subtract, actual, without)) > 0.01 * optax.global_norm(without), name


def test_second_epoch_starts_from_the_first_epochs_parameters():
    state, _ = learned(with_options(GRPO, epochs=2), a_batch(), rl_helpers.ragged_rewards(N, G))
    first, second = (jax.tree.map(lambda x, i=i: x[i], state.opt_state.gradients["policy"]) for i in (0, 1))
    moved = jax.tree.map(lambda x, gradient: x - 0.1 * gradient, PARAMS, first)
    for gradient, params in ((first, PARAMS), (second, moved)):
        rl_helpers.assert_close(gradient, by_hand(a_batch(), params=params, **OFF), rtol=1e-4, atol=1e-7)
    assert optax.global_norm(jax.tree.map(jnp.subtract, first, second)) > 0.01 * optax.global_norm(first)


def test_ppo_iterations_have_the_gradient_of_their_loss():
    programs, models = programs_of(with_options(PPO, num_prompts=4, group_size=G, kl_coef=0.1))
    unscored = a_batch(4)._replace(old_logprobs=None, ref_logprobs=None, old_entropy=None, old_values=None)
    reference, rewards = jax.tree.map(lambda x: 1.1 * x, PARAMS), rl_helpers.ragged_rewards(4, G)
    start = rl_helpers.placed(programs, models, unscored, rewards).scored(programs, reference)
    score = jax.jit(partial(score_completion_tokens, POLICY))
    np.testing.assert_allclose(start.batch.old_logprobs, score(PARAMS, unscored).logprobs, atol=1e-5)
    np.testing.assert_allclose(start.batch.ref_logprobs, score(reference, unscored).logprobs, atol=1e-5)
    values = heads.values(POLICY, models["critic"], *unscored[:3])[..., :-1]
    np.testing.assert_allclose(start.batch.old_values, values, atol=1e-5)
    method = programs.method
    batch, advantages, _ = method.advantage(rewards, start.batch, 0.1)
    batch = batch._replace(weights=method.aggregation(batch.completion_mask, num_completions=4 * G))
    expected = jax.jit(jax.grad(lambda models: rl_helpers.loss_of(method)(models, batch)[0]))(models)
    state, actual = start.learned(programs)
    rl_helpers.assert_same_gradient(expected, jax.tree.map(lambda x: x[0], state.opt_state.gradients), 1e-5)
    np.testing.assert_allclose(actual.advantages, advantages, atol=1e-5)


def test_masked_tokens_change_no_gradient():
    batch, noise, config = a_batch(), np.random.default_rng(1), with_options(GRPO, **OPTIONS)

    def rubbish(x):
        return np.where(batch.completion_mask, x, noise.choice([np.nan, np.inf, -1e30], x.shape)).astype(np.float32)

    names = "old_logprobs", "ref_logprobs", "sampler_logprobs", "old_entropy"
    spoiled = batch._replace(
        completion_ids=np.where(batch.completion_mask, batch.completion_ids, 3),
        **{name: rubbish(getattr(batch, name)) for name in names},
    )
    rl_helpers.assert_same_gradient(
        *(gradient_of(config, each, rl_helpers.ragged_rewards(N, G))[0] for each in (batch, spoiled))
    )


def test_single_step_has_ratio_one_despite_environment_room():
    """Of Dr. GRPO, whose length is a constant: the gradient is that of a batch without the room."""
    config = recipe("dr_grpo", num_prompts=4, group_size=G, max_tokens=T)
    batch = a_batch(4)._replace(old_logprobs=None, ref_logprobs=None, old_entropy=None, old_values=None)
    by_token = ("completion_ids", "completion_mask", "sampler_logprobs")
    room = {name: np.pad(getattr(batch, name), [(0, 0), (0, 0), (0, 5)]) for name in by_token}
    wide = batch._replace(**room, turn=room["completion_mask"].astype(np.int32))
    (expected, metrics), (actual, _) = (
        gradient_of(config, each, rl_helpers.ragged_rewards(4, G)) for each in (batch, wide)
    )
    rl_helpers.assert_same_gradient(expected, actual, 1e-5)
    assert metrics["ratio"] == 1
    assert metrics["clip_low"] == metrics["clip_high"] == 0
    assert metrics["ratio_deviation"] > 0.01  # that is against the sampler


def test_loss_uses_the_synced_reference():
    changes = {"critic": "shared", "divergence": "reverse", "kl_in_reward": False, "ref_mixup_alpha": 0.5}
    config = with_options(PPO, num_prompts=4, group_size=G, ref_sync_steps=1, **changes)
    state, actual = learned(config, a_batch(4)._replace(ref_logprobs=None), rl_helpers.ragged_rewards(4, G))
    assert actual.metrics["kl"] == pytest.approx(0, abs=1e-6)  # it began as the policy, and nothing else was given
    assert state.extras["reference"].keys() == PARAMS.keys()  # of the policy only
    for name, start in PARAMS.items():
        end, half = state.params["policy"][name], state.extras["reference"][name]
        assert np.abs(end - start).max() > 1e-3
        np.testing.assert_allclose(half, (start + end) / 2, atol=1e-6)


# ---- the whole vocabulary


@pytest.mark.parametrize("divergence", ["full", pytest.param("reverse", marks=pytest.mark.slow)])
def test_full_divergence_has_the_gradient_of_all_logits(divergence):
    batch, config = a_batch(4)._replace(ref_logprobs=None), with_options(GRPO, kl_coef=0.3, divergence=divergence)
    batch = batch._replace(
        weights=F.sequence_mean_weights(batch.completion_mask), advantages=np.ones((4, G), np.float32)
    )
    reference = jax.tree.map(lambda x: 1.2 * x, PARAMS)
    loss, rest = (rl_helpers.loss_of(grpo_method(POLICY, each)) for each in (config, with_options(GRPO, kl_coef=0.0)))

    def actual(params):
        value, logs = loss({"policy": params, "reference": reference}, batch)
        return value, logs.means["kl"]

    def expected(params):
        logits = [
            states_of(POLICY, p, batch).hidden @ POLICY.unembedding(p).T / batch.temperature[..., None, None]
            for p in (params, reference)
        ]
        kl = jnp.where(batch.completion_mask, F.kl_full(*logits, reverse=divergence == "reverse"), 0)
        return rest({"policy": params}, batch)[0] + 0.3 * jnp.sum(batch.weights * kl), F.masked_sum(
            kl, batch.completion_mask
        )

    (values, one), (others, other) = (
        jax.jit(jax.value_and_grad(fn, has_aux=True))(PARAMS) for fn in (actual, expected)
    )
    rl_helpers.assert_close(values, others, rtol=1e-4)
    rl_helpers.assert_same_gradient(one, other, 1e-5)


# ---- pieces and devices

SPLITS = {
    "dapo": (recipe("dapo", epochs=2, minibatches=2, kl_coef=0.2, top_entropy=0.5), 0),  # weights of tokens
    "grpo": (recipe("grpo", kl_coef=0.2), 0),
    "dr_grpo": (recipe("dr_grpo"), 0),
    "luspo": (recipe("luspo"), 0),
    "lite_ppo": (recipe("lite_ppo", minibatches=2, mask_truncated=True, correction="token"), 0),
    "gdpo": (recipe("dapo", advantages_of="components", minibatches=2), 3),
    "ppo_own": (with_options(PPO, minibatches=2, kl_coef=0.1, kl_target=0.05), 0),
    "ppo_shared": (with_options(PPO, critic="shared", epochs=2, bootstrap_truncated=True), 0),
}


@pytest.mark.parametrize("name", slow_unless(("dapo",), SPLITS))
def test_split_batches_have_the_gradient_of_the_whole(name):
    """In pieces of one prompt, on two devices; and the scores of the whole."""
    config, components = SPLITS[name]
    config = with_options(config, num_prompts=N, group_size=G, max_tokens=T)
    scored, updates = [], []
    for each in (config, with_options(config, devices=2, piece_tokens=P + G * T - 1)):
        programs, params = programs_of(each)
        reference = jax.tree.map(lambda x: 1.1 * x, PARAMS) if config.loss.objective.has_reference else None
        unscored = a_batch()._replace(old_logprobs=None, ref_logprobs=None, old_entropy=None, old_values=None)
        start = rl_helpers.placed(programs, params, unscored, rl_helpers.ragged_rewards(N, G, components))
        start = start.scored(programs, place(reference, programs.sampler.devices))
        scored.append(to_numpy(start.batch))
        updates.append(start.learned(programs))
    rl_helpers.assert_close(scored[1], scored[0], atol=1e-5)
    if name == "dapo":
        assert np.abs(scored[0].old_logprobs - scored[0].ref_logprobs).max() > 0.01
    (one, by_one), (other, by_other) = updates
    for state in (one, other):
        assert all(x.any(axis=tuple(range(1, x.ndim))).all() for x in jax.tree.leaves(state.opt_state.gradients))
    rl_helpers.assert_same_gradient(
        (one.opt_state.gradients, one.params), (other.opt_state.gradients, other.params), 1e-5
    )
    rl_helpers.assert_same_means(by_one.metrics, by_other.metrics)
    np.testing.assert_allclose(by_other.advantages, by_one.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(by_other.order, by_one.order)
    assert one.extras.keys() == other.extras.keys() == ({"kl_coef"} if config.loss.kl_target else set())
    if one.extras:
        assert one.extras["kl_coef"] != pytest.approx(0.1, rel=1e-3)
        np.testing.assert_allclose(other.extras["kl_coef"], one.extras["kl_coef"], rtol=1e-5)


def test_epochs_use_each_prompt_once_in_seeded_order():
    orders = jax.jit(partial(minibatch_order, epochs=3, minibatches=4, num_prompts=8))
    epochs = set()
    for seed_and_step in ((3, 5), (4, 5), (3, 6)):
        order = np.asarray(orders(*map(np.uint32, seed_and_step)))
        assert order.shape == (12, 2)
        assert np.sort(order.reshape(3, 8), axis=-1).tolist() == [list(range(8))] * 3
        epochs |= {tuple(epoch) for epoch in order.reshape(3, 8).tolist()}
    assert len(epochs) == 9


# ---- gradients that are not finite


def test_skipped_minibatches_are_reported_and_change_nothing():
    config = recipe("dapo", num_prompts=N, group_size=G, minibatches=4, epochs=2)
    rewards = rl_helpers.ragged_rewards(N, G)
    rewards.rewards[6, 1] = np.nan
    rewards.applicable[6] = True
    state, actual = learned(config, a_batch(), rewards)
    spoiled = np.flatnonzero((np.asarray(actual.order) == 6).any(-1))
    assert len(spoiled) == 2  # of eight steps, one an epoch
    assert actual.metrics["skipped_update"] == spoiled[0]
    assert actual.metrics["skipped"] == 1 + (spoiled[1] == spoiled[0] + 1)
    assert state.opt_state.count == 6
    for start, end, gradients in zip(
        *map(jax.tree.leaves, ({"policy": PARAMS}, state.params, state.opt_state.gradients)), strict=True
    ):
        assert np.isfinite(end).all()
        np.testing.assert_allclose(end, start - 0.1 * gradients[:6].sum(0), atol=1e-6)


# ---- what decays


def test_norms_and_biases_do_not_decay():
    params = {
        "embedding": jnp.ones((3, 2)),
        "final_norm": {"offset": jnp.ones(2)},
        "layers": {"norm": {"scale": jnp.ones((2, 2))}, "q_proj": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}},
    }
    decays = {
        "embedding": True,
        "final_norm": {"offset": False},
        "layers": {"norm": {"scale": False}, "q_proj": {"kernel": True, "bias": False}},
    }
    assert has_weight_decay(params) == decays
    optimizer = make_optimizer(0.5, weight_decay=0.2)

    @jax.jit
    def step(params):
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    updates = step(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, -0.1 * y), updates, decays)


def test_a_large_epsilon_shortens_steps_of_small_gradients():
    # The first step of Adam is -rate g / (|g| + ε).
    optimizer, gradients = make_optimizer(0.5, adam_epsilon=0.01), jnp.array([0.01, -0.09, 0.0])
    updates, _ = optimizer.update(gradients, optimizer.init(gradients), gradients)
    np.testing.assert_allclose(updates, [-0.25, 0.45, 0.0], rtol=1e-4)
