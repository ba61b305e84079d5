"""What an iteration computes: which scores it needs, and gradients by hand, in pieces and over devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import PARAMS, POLICY, D, V
from losses import loss_of
from rl_helpers import assert_close, recorder
from tiny import refused, slow_unless

from grpo_jax import functional as F
from grpo_jax.config import PPOConfig, recipe, run_of, with_options
from grpo_jax.devices import place, to_devices, to_numpy
from grpo_jax.functional.presets import PRESETS
from grpo_jax.models.heads import Headed
from grpo_jax.models.params import split
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.iteration import compile_programs
from grpo_jax.rl.optimizer import has_weight_decay, make_optimizer
from grpo_jax.rl.ppo import ppo_method
from grpo_jax.rl.scorers import hidden_states, needs_old_logprobs, score_completion_tokens
from grpo_jax.rl.types import REWARD_AXES, Batch, RewardArrays
from grpo_jax.rl.update import minibatch_order
from grpo_jax.tasks.task import Task

N, G, P, T = 16, 4, 2, 3
TASK = Task(None, None, None, None, (0,), 1, V)
HEAD = jnp.linspace(-1, 1, D)


@cache
def a_batch(num_prompts: int = N) -> Batch:
    """Ragged completions, some of them empty, and old and sampled probabilities that are not far from the policy's."""
    noise = np.random.default_rng(0)
    shape = num_prompts, G, T
    ids = noise.integers(0, V, shape).astype(np.int32)
    mask = np.arange(T) < noise.integers(0, T + 1, (num_prompts, G, 1))
    batch = Batch(
        noise.integers(0, V, (num_prompts, P)).astype(np.int32),
        np.ones((num_prompts, P), bool),
        ids,
        mask,
        noise.uniform(0.8, 1.2, shape[:2]).astype(np.float32),
        truncated=noise.random(shape[:2]) < 0.3,
    )
    scores = jax.device_get(jax.jit(partial(score_completion_tokens, POLICY))(PARAMS, batch))
    near = [scores.logprobs + noise.normal(0, 0.3, shape).astype(np.float32) for _ in range(3)]
    return batch._replace(
        sampler_logprobs=near[0],
        old_logprobs=near[1],
        ref_logprobs=near[2],
        old_entropy=scores.entropy,
        old_values=noise.normal(size=(*shape[:2], T + 1)).astype(np.float32),
    )


def some_rewards(num_prompts: int = N, components: int = 0) -> RewardArrays:
    """A few of them do not apply."""
    noise = np.random.default_rng(1)
    rewards = noise.normal(size=(num_prompts, G)).astype(np.float32)
    applicable = noise.random((num_prompts, G)) < 0.9
    if not components:
        return RewardArrays(rewards, applicable)
    parts = noise.normal(size=(num_prompts, G, components)).astype(np.float32)
    parts[~applicable] = np.nan
    return RewardArrays(rewards, applicable, parts, np.linspace(0.5, 1, components, dtype=np.float32))


@cache
def programs_of(config, devices):
    """Programs of a run with a recorder for an optimizer, and where it starts."""
    run = with_options(run_of(config), devices=devices)
    method, params = grpo_method(POLICY, run), {"policy": PARAMS}
    if isinstance(config, PPOConfig):
        method = ppo_method(POLICY, POLICY, config)
        decoder = None if config.critic.critic == "shared" else {"before": 0.9 * PARAMS["before"]}
        params["critic"] = Headed(decoder, HEAD)
    method = method._replace(optimizer=recorder(run.optimizer.epochs * run.optimizer.minibatches))
    return compile_programs(method, POLICY, TASK, run), params


def learned(config, batch, rewards, *, devices=1):
    """(state, what was learned) after an iteration. Without a KL the batch has no numbers of a reference."""
    programs, params = programs_of(config, devices)
    if not run_of(config).loss.kl_coef:
        batch = batch._replace(ref_logprobs=None)
    trained, frozen = split(place(params, devices))
    state = place(programs.initial_state(trained), devices)
    clock = to_devices(np.array([3, 5], np.uint32), devices, axes=None)
    rewards = to_devices(rewards, devices, axes=REWARD_AXES)
    return to_numpy(programs.learn(state, frozen, None, to_devices(batch, devices), rewards, clock))


def gradient_of(config, batch, rewards, **options):
    """The gradient of the first optimizer step, and the metrics."""
    state, actual = learned(config, batch, rewards, **options)
    return jax.tree.map(lambda x: x[0], state.opt_state.gradients["policy"]), actual.metrics


def assert_same_gradient(one, other, tolerance=1e-6):
    """‖Δ‖/‖g‖ of each leaf."""
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert 0 < np.linalg.norm(x) < np.inf
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(x)


# ---- scores


def scores_of(config, batch=None):
    """The batch with its scores; the reference is not the policy."""
    batch = a_batch() if batch is None else batch
    unscored = batch._replace(old_logprobs=None, ref_logprobs=None, old_entropy=None, old_values=None)
    programs, devices = compile_programs(grpo_method(POLICY, config), POLICY, TASK, config), config.devices
    trained, frozen = split(place({"policy": PARAMS}, devices))
    reference = jax.tree.map(lambda x: 1.1 * x, trained["policy"])
    return to_numpy(programs.score(trained, {}, frozen, reference, to_devices(unscored, devices)))


@pytest.mark.parametrize(
    ("options", "needs_old", "scored"),
    [
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
    ],
)
def test_there_is_a_pass_for_what_an_update_needs(options, needs_old, scored):
    config = recipe(**options)
    assert needs_old_logprobs(config) == needs_old
    assert bool(grpo_method(POLICY, config).scorers) == scored


@pytest.mark.parametrize("config", [recipe("dppo"), recipe("grpo", old_logprobs="sampler", epochs=2)])
def test_a_ratio_to_the_sampler_is_against_what_it_reported(config):
    scored = scores_of(with_options(config, num_prompts=4, group_size=G), a_batch(4))
    np.testing.assert_array_equal(scored.old_logprobs, a_batch(4).sampler_logprobs)


def test_the_ratio_of_the_only_step_is_one_to_the_bit():
    batch = a_batch(4)._replace(old_logprobs=None, ref_logprobs=None)
    config = recipe("dapo", num_prompts=4, group_size=G)
    metrics = learned(config, batch, some_rewards(4))[1].metrics
    assert metrics["ratio"] == 1
    assert metrics["clip_low"] == metrics["clip_high"] == 0
    assert metrics["ratio_deviation"] > 0.01  # that is against the sampler


@pytest.mark.parametrize("changes", [{"microbatches": 4}, {"devices": 8}])
def test_scores_do_not_depend_on_pieces_and_devices(changes):
    config = recipe("grpo", num_prompts=N, group_size=G, epochs=2, top_entropy=0.5)
    whole, other = scores_of(config), scores_of(with_options(config, **changes))
    assert whole.old_values is None
    for name in ("old_logprobs", "ref_logprobs", "old_entropy"):
        assert getattr(whole, name).shape == (N, G, T)
        np.testing.assert_allclose(getattr(other, name), getattr(whole, name), atol=1e-5)
    assert np.abs(whole.old_logprobs - whole.ref_logprobs).max() > 0.01


# ---- gradients by hand

GRPO = recipe("grpo", num_prompts=4, group_size=G, kl_coef=0.2, epsilon_low=0.1, epsilon_high=0.15)


def by_hand(batch: Batch, *, advantages=None, mask=None, on_policy=None, **options) -> optax.Params:
    """GRPO's gradient, put together from functions of arrays alone."""
    mask = batch.completion_mask if mask is None else mask
    rewards, kept = some_rewards(4), 1 if advantages is None else advantages

    def loss(params):
        advantages = F.group_advantages(rewards.rewards, where=rewards.applicable)[..., None] * kept
        states = POLICY.hidden(params, batch.prompt_ids, batch.prompt_mask, batch.completion_ids)
        logprobs, _ = F.token_logprobs(
            states, params["after"], batch.completion_ids, temperature=batch.temperature[..., None]
        )
        seen = advantages if on_policy is None else advantages * on_policy(logprobs, advantages)
        return F.grpo_loss(
            logprobs,
            batch.old_logprobs,
            jnp.broadcast_to(seen, mask.shape),
            mask,
            ref_logprobs=batch.ref_logprobs,
            weights=F.sequence_mean_weights(mask, num_completions=4 * G),
            **{"kl_coef": 0.2, "epsilon_low": 0.1, "epsilon_high": 0.15} | options,
        )[0]

    return jax.jit(jax.grad(loss))(PARAMS)


def unlikely_now(batch, threshold):
    """Tokens of completions that are kept, by their drift from the sampler."""

    def keep(logprobs, advantages):
        drift = jnp.where(batch.completion_mask, batch.sampler_logprobs - logprobs, 0).sum(-1, keepdims=True)
        length = batch.completion_mask.sum(-1, keepdims=True)
        return jax.lax.stop_gradient((drift / length <= threshold) | (advantages >= 0))

    return keep


def of_high_entropy(batch, share):
    """Of n tokens the 1 + ⌊share (n − 1)⌋ of the highest entropy."""
    of_tokens = np.sort(np.asarray(batch.old_entropy)[batch.completion_mask])[::-1]
    return batch.completion_mask & (batch.old_entropy >= of_tokens[int(share * (len(of_tokens) - 1))])


@pytest.mark.parametrize(
    ("options", "differently"),
    [
        pytest.param({"delta": 1.2}, lambda batch: {"delta": 1.2}, marks=pytest.mark.slow),
        pytest.param({"kl_bias_correction": True}, lambda batch: {"kl_bias_correction": True}, marks=pytest.mark.slow),
        ({"top_entropy": 0.4}, lambda batch: {"advantages": of_high_entropy(batch, 0.4)}),
        ({"mask_truncated": True}, lambda batch: {"mask": batch.completion_mask & ~batch.truncated[..., None]}),
        ({"off_policy_threshold": 0.1}, lambda batch: {"on_policy": unlikely_now(batch, 0.1)}),
    ],
    ids=["delta", "kl_bias_correction", "top_entropy", "mask_truncated", "off_policy_threshold"],
)
def test_an_option_has_the_gradient_of_its_functions(options, differently):
    batch, rewards = a_batch(4), some_rewards(4)
    actual, _ = gradient_of(with_options(GRPO, **options), batch, rewards)
    expected = by_hand(batch, **differently(batch))
    assert_close(actual, expected, rtol=1e-4, atol=1e-7)
    plain = by_hand(batch)
    assert optax.global_norm(jax.tree.map(jnp.subtract, actual, plain)) > 0.01 * optax.global_norm(plain)


def test_the_reference_of_the_loss_is_the_one_that_moves():
    changes = {"critic": "shared", "divergence": "reverse", "kl_in_reward": False, "ref_mixup_alpha": 0.5}
    config = with_options(PPOConfig(), num_prompts=4, group_size=G, ref_sync_steps=1, **changes)
    state, actual = learned(config, a_batch(4)._replace(ref_logprobs=None), some_rewards(4))
    assert actual.metrics["kl"] == pytest.approx(0, abs=1e-6)  # it began as the policy, and nothing else was given
    assert state.extras["reference"].keys() == PARAMS.keys()  # of the policy only
    for name, start in PARAMS.items():
        end, half = state.params["policy"][name], state.extras["reference"][name]
        assert np.abs(end - start).max() > 1e-3
        np.testing.assert_allclose(half, (start + end) / 2, atol=1e-6)


# ---- presets

# A preset for each loss; those that differ in advantages and constants alone are the same program.
DIFFERENT_LOSSES = sorted({(a.term, a.aggregation): name for name, a in PRESETS.items()}.values())


# Of terms and aggregations alone it is held for every preset by the tests of `functional`.
@pytest.mark.parametrize("preset", slow_unless(("dapo", "vespo"), DIFFERENT_LOSSES))
def test_masked_tokens_change_no_gradient(preset):
    batch, noise = a_batch(4), np.random.default_rng(1)

    def rubbish(x):
        return np.where(batch.completion_mask, x, noise.choice([np.nan, np.inf, -1e30], x.shape)).astype(np.float32)

    numbers = {name: rubbish(getattr(batch, name)) for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")}
    spoiled = batch._replace(completion_ids=np.where(batch.completion_mask, batch.completion_ids, 3), **numbers)
    config = recipe(preset, num_prompts=4, group_size=G)
    clean, dirty = (gradient_of(config, each, some_rewards(4))[0] for each in (batch, spoiled))
    assert_same_gradient(clean, dirty)


@pytest.mark.parametrize("divergence", ["full", pytest.param("reverse", marks=pytest.mark.slow)])
def test_a_divergence_of_the_whole_vocabulary_has_the_gradient_of_that_of_all_logits(divergence):
    batch, config = a_batch(4)._replace(ref_logprobs=None), with_options(GRPO, kl_coef=0.3, divergence=divergence)
    batch = batch._replace(
        weights=F.sequence_mean_weights(batch.completion_mask), advantages=np.ones((4, G), np.float32)
    )
    reference = jax.tree.map(lambda x: 1.2 * x, PARAMS)
    loss, rest = (loss_of(grpo_method(POLICY, each)) for each in (config, with_options(GRPO, kl_coef=0.0)))

    def actual(params):
        value, logs = loss({"policy": params, "reference": reference}, batch)
        return value, logs.means["kl"]

    def expected(params):
        logits = [
            hidden_states(POLICY, p, batch) @ POLICY.unembedding(p).T / batch.temperature[..., None, None]
            for p in (params, reference)
        ]
        kl = jnp.where(batch.completion_mask, F.kl_full(*logits, reverse=divergence == "reverse"), 0)
        return rest({"policy": params}, batch)[0] + 0.3 * jnp.sum(batch.weights * kl), F.masked_sum(
            kl, batch.completion_mask
        )

    (values, one), (others, other) = (
        jax.jit(jax.value_and_grad(fn, has_aux=True))(PARAMS) for fn in (actual, expected)
    )
    assert_close(values, others, rtol=1e-4)
    assert_same_gradient(one, other, 1e-5)
    with refused("needs the parameters of a reference"):
        loss({"policy": PARAMS}, batch)


# ---- pieces and devices


@pytest.mark.parametrize(
    ("preset", "devices", "microbatches"),
    [
        ("dapo", 2, 2),  # weights of tokens
        *(pytest.param(x, 8, 1, marks=pytest.mark.slow) for x in ("dapo", "grpo", "dr_grpo", "luspo")),
        pytest.param("grpo", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_split_batch_has_the_gradient_of_the_whole(preset, devices, microbatches):
    config, rewards = recipe(preset, num_prompts=N, group_size=G, max_tokens=T), some_rewards()
    whole, metrics = gradient_of(config, a_batch(), rewards)
    parts, others = gradient_of(with_options(config, microbatches=microbatches), a_batch(), rewards, devices=devices)
    assert_same_gradient(whole, parts, 2e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(others[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_constant_length_of_dr_grpo_does_not_count_tokens_of_an_environment():
    """The gradient is that of a batch whose rows have no room for an environment."""
    config, batch = recipe("dr_grpo", num_prompts=4, group_size=G, max_tokens=T), a_batch(4)
    batch = batch._replace(ref_logprobs=None, old_entropy=None, old_values=None)
    by_token = ("completion_ids", "completion_mask", "sampler_logprobs", "old_logprobs")
    room = {name: np.pad(getattr(batch, name), [(0, 0), (0, 0), (0, 5)]) for name in by_token}
    wide = batch._replace(**room, turn=room["completion_mask"].astype(np.int32))
    expected, actual = (gradient_of(config, each, some_rewards(4))[0] for each in (batch, wide))
    assert_same_gradient(expected, actual, 1e-5)


@pytest.mark.parametrize(
    ("config", "components"),
    [
        pytest.param(recipe("grpo", minibatches=2, epochs=2, kl_coef=0.2), 0, id="grpo"),
        *(
            pytest.param(config, components, id=name, marks=pytest.mark.slow)
            for name, components, config in (
                ("gdpo", 3, recipe("dapo", advantages_of="components", minibatches=2)),
                ("ppo_own", 0, with_options(PPOConfig(), minibatches=2, kl_coef=0.1, kl_target=0.05)),
                ("ppo_shared", 0, with_options(PPOConfig(), critic="shared", epochs=2, bootstrap_truncated=True)),
                (
                    "lite_ppo",
                    0,
                    recipe("lite_ppo", minibatches=2, top_entropy=0.5, mask_truncated=True, correction="token"),
                ),
            )
        ),
    ],
)
def test_eight_devices_learn_what_one_does(config, components):
    config = with_options(config, num_prompts=N, group_size=G, kl_horizon=64)
    rewards = some_rewards(components=components)
    (one, by_one), (eight, by_eight) = (learned(config, a_batch(), rewards, devices=devices) for devices in (1, 8))
    gradients = one.opt_state.gradients
    assert all(leaf.any(axis=tuple(range(1, leaf.ndim))).all() for leaf in jax.tree.leaves(gradients))
    assert_same_gradient((gradients, one.params), (eight.opt_state.gradients, eight.params), 1e-5)
    assert by_one.metrics.keys() == by_eight.metrics.keys()
    for name, value in by_one.metrics.items():
        np.testing.assert_allclose(by_eight.metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(by_eight.advantages, by_one.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(by_eight.order, by_one.order)
    assert one.extras.keys() == eight.extras.keys() == ({"kl_coef"} if run_of(config).reference.kl_target else set())
    if one.extras:
        assert one.extras["kl_coef"] != pytest.approx(0.1, rel=1e-3)
        np.testing.assert_allclose(eight.extras["kl_coef"], one.extras["kl_coef"], rtol=1e-5)


def test_every_epoch_has_all_prompts_once_in_an_order_of_seed_and_step():
    def of(seed, step, epochs):
        return np.asarray(jax.jit(lambda: minibatch_order(seed, step, 8, epochs=epochs, minibatches=4))())

    order = of(3, 5, 3)
    assert order.shape == (12, 2)
    assert np.sort(order.reshape(3, 8), axis=-1).tolist() == [list(range(8))] * 3
    epochs = {tuple(epoch) for epoch in order.reshape(3, 8).tolist()}
    others = {tuple(np.ravel(of(*clock, 1)).tolist()) for clock in [(4, 5), (3, 7)]}
    assert len(epochs | others) == 5


# ---- gradients that are not finite


def test_the_minibatch_that_is_skipped_is_told_and_moves_nothing():
    config = recipe("dapo", num_prompts=N, group_size=G, minibatches=4, epochs=2)
    rewards = some_rewards()
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
