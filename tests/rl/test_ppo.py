"""PPO: its advantages and gradients against those by hand and of GRPO, and its loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS as TABLE, POLICY, D, V
from rl_helpers import assert_close, loss_of, near, ragged_batch

from grpo_jax.config import PPO, GRPOConfig, recipe, with_options
from grpo_jax.functional import centered_advantages, critic_loss, weighted_sum
from grpo_jax.functional.presets import PRESETS
from grpo_jax.models.decoder import heads
from grpo_jax.models.decoder.heads import Headed
from grpo_jax.rl.grpo import grpo_method, kl_in_reward
from grpo_jax.rl.ppo import explained_variance, token_advantages
from grpo_jax.rl.programs import make_method
from grpo_jax.rl.types import RewardArrays
from grpo_jax.step import Batch

PARAMS = {"policy": TABLE, "critic": Headed({"before": TABLE["before"]}, jnp.zeros(D))}
HEAD = jnp.linspace(-1, 1, D)


def of_ppo(**options) -> GRPOConfig:
    """The defaults, but for these options."""
    return with_options(PPO, **options)


def a_batch() -> Batch:
    """Ragged rows, and log-probabilities near those of PARAMS."""
    batch = near(POLICY, PARAMS["policy"], ragged_batch((4, 2, 3, 3), V, shortest=1), scale=0.2)
    returns, advantages = np.random.default_rng(2).normal(0, 1, (2, 4, 2, 3)).astype(np.float32)
    return batch._replace(returns=returns, advantages=advantages)


def valued(batch: Batch, values=None, truncated=None) -> Batch:
    """With what a critic said, and what was cut off."""
    shape = batch.completion_mask.shape
    values = np.zeros((*shape[:2], shape[2] + 1), np.float32) if values is None else values
    ends = np.take_along_axis(values, batch.completion_mask.sum(-1, keepdims=True), -1)
    truncated = np.zeros(shape[:2], bool) if truncated is None else truncated
    return batch._replace(old_values=values[..., :-1], end_values=ends, truncated=truncated)


# ---- advantages


@pytest.mark.parametrize("steps", [None, 2])
def test_advantages_are_those_of_a_loop(steps):
    batch = a_batch()
    noise = np.random.default_rng(1)
    rewards, values = noise.normal(size=(4, 2)), noise.normal(size=(4, 2, 4))
    goes_on = noise.random((4, 2)) < 0.5
    assert goes_on.any()
    assert not goes_on.all()
    config = of_ppo(gamma=0.9, gae_lambda=0.8, gae_steps=steps, kl_coef=0.3, whiten=False, bootstrap_truncated=True)
    penalty, _, _ = kl_in_reward(batch, config.loss, 0.3)
    actual, returns = token_advantages(
        rewards.astype(np.float32), valued(batch, values.astype(np.float32), goes_on), penalty, options=config.critic
    )
    expected = np.zeros(batch.completion_mask.shape)
    for row in np.ndindex(4, 2):
        length = int(batch.completion_mask[row].sum())
        reward = -0.3 * (batch.old_logprobs[row] - batch.ref_logprobs[row])[:length].astype(float)
        reward[-1] += rewards[row]
        value = values[row].copy()
        value[length] = value[length] if goes_on[row] else 0
        deltas = [reward[t] + 0.9 * value[t + 1] - value[t] for t in range(length)]
        for t in range(length):
            ahead = deltas[t : t + steps if steps else None]
            expected[row][t] = sum(0.72**k * delta for k, delta in enumerate(ahead))
    mask = batch.completion_mask
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(returns, expected + np.where(mask, values[..., :-1], 0), atol=1e-5)


def test_whitening_covers_all_tokens_despite_nan_rows():
    batch, rewards = a_batch(), np.arange(8, dtype=np.float32).reshape(4, 2)
    actual, returns = token_advantages(rewards, valued(batch), None, options=of_ppo().critic)
    mask = batch.completion_mask
    of_tokens = np.asarray(actual)[mask]
    assert of_tokens.mean() == pytest.approx(0, abs=1e-5)
    assert of_tokens.std(ddof=1) == pytest.approx(1, abs=1e-3)
    assert np.asarray(returns).max() == 7  # the critic learns rewards as they are
    rewards[1, 0] = np.nan
    actual, _ = token_advantages(rewards, valued(batch), None, options=of_ppo().critic)
    assert np.isnan(actual[1, 0][mask[1, 0]]).all()
    others = np.delete(np.asarray(actual).reshape(8, -1), 2, axis=0)
    assert np.isfinite(others).all()
    assert others.any()


def test_explained_variance():
    returns, mask = np.array([0.0, 1.0, 2.0, 9.0]), np.array([True, True, True, False])
    assert explained_variance(returns + 3, returns, mask) == 1
    assert explained_variance(np.ones(4), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert np.isnan(explained_variance(returns, np.ones(4), mask))


# ---- gradients


def test_group_mean_critic_gives_grpos_gradient():
    batch, rewards = a_batch(), np.arange(8, dtype=np.float32).reshape(4, 2) ** 2
    config = of_ppo(kl_coef=0.1, kl_in_reward=False, gae_lambda=1.0, whiten=False)
    centered = np.asarray(centered_advantages(jnp.asarray(rewards)))
    by_token, returns = token_advantages(centered, valued(batch), None, options=config.critic)
    weights = config.loss.objective.aggregation(batch.completion_mask)
    of_grpo = batch._replace(advantages=centered, weights=weights)
    for_ppo = of_grpo._replace(advantages=by_token, returns=returns, old_values=np.zeros_like(batch.old_values))
    loss_of_both = loss_of(make_method({"policy": POLICY, "critic": POLICY}, config))
    loss_alone = loss_of(grpo_method(POLICY, recipe("lite_ppo", kl_coef=0.1)))

    @jax.jit
    def gradients(params):
        of_both = jax.grad(lambda params: loss_of_both(params, for_ppo)[0])(params)
        alone = jax.grad(lambda policy: loss_alone({"policy": policy}, of_grpo)[0])(params["policy"])
        return of_both, alone, POLICY.hidden(params["policy"], *batch[:2])

    actual, expected, hidden = gradients(PARAMS)
    assert_close(actual["policy"], expected, atol=1e-6)
    # The critic feels only its own part of the loss, ½ (0 − R)² in this case, and below a head of 0 nothing.
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(actual["critic"].decoder))
    slope = -config.critic.value_coef * np.einsum("ngt,ngtd->d", weights * returns, hidden)
    np.testing.assert_allclose(actual["critic"].head, slope, rtol=1e-3, atol=1e-5)


def test_critic_gradient_is_that_of_clipped_squares():
    batch = a_batch()
    config = of_ppo(kl_coef=0.0, value_coef=2.0)
    weights = np.asarray(PRESETS["lite_ppo"].aggregation(batch.completion_mask))
    params = PARAMS | {"critic": PARAMS["critic"]._replace(head=HEAD)}
    # What is in masked places counts nowhere.
    returns = np.where(batch.completion_mask, batch.returns, np.nan)
    batch = batch._replace(weights=weights, ref_logprobs=None, returns=returns)
    gradient = jax.value_and_grad(loss_of(make_method({"policy": POLICY, "critic": POLICY}, config)), has_aux=True)

    @jax.jit
    def everything(params):
        values = heads.values(POLICY, params["critic"], *batch[:3])[..., :-1]
        return gradient(params, batch), values, POLICY.hidden(params["policy"], *batch[:2])

    ((_, logs), actual), values, hidden = jax.device_get(everything(params))
    old_values = batch.old_values
    clipped = np.clip(values, old_values - 0.2, old_values + 0.2)
    bound = (clipped - returns) ** 2 > (values - returns) ** 2
    slope = np.where(bound | ~batch.completion_mask, 0, values - returns)
    np.testing.assert_allclose(
        actual["critic"].head, 2 * np.einsum("ngt,ngtd->d", weights * slope, hidden), rtol=1e-3, atol=1e-5
    )
    total, count = logs.means["value_clip"]
    assert total == bound[batch.completion_mask].sum() > 0
    assert count == batch.completion_mask.sum()


def test_shared_decoders_add_both_gradients():
    params, config = PARAMS | {"critic": Headed(None, HEAD)}, of_ppo(critic="shared", kl_coef=0.0, value_coef=2.0)
    batch = a_batch()._replace(ref_logprobs=None)
    batch = batch._replace(weights=config.loss.objective.aggregation(batch.completion_mask))

    def critic_alone(params):
        values = heads.values(POLICY, Headed(params["policy"], params["critic"].head), *batch[:3])[..., :-1]
        error = critic_loss(values, batch.returns, old_values=batch.old_values, clip=config.critic.value_clip)
        return weighted_sum(error, batch.weights, batch.completion_mask)

    def policy_alone(params):
        return loss_of(grpo_method(POLICY, config))(params, batch)[0]

    def whole(params):
        return loss_of(make_method({"policy": POLICY, "critic": POLICY}, config))(params, batch)[0]

    @jax.jit
    def gradients(params):
        losses = whole, policy_alone, critic_alone
        return [jax.grad(loss)(params) for loss in losses]

    actual, of_policy, of_critic = gradients(params)
    assert_close(actual, jax.tree.map(lambda x, y: x + 2.0 * y, of_policy, of_critic), rtol=1e-4, atol=1e-5)
    assert min(np.abs(leaf).max() for leaf in (of_critic["policy"]["before"], of_critic["critic"].head)) > 1e-3


# ---- options


def test_policy_and_critic_have_their_own_rates():
    """The first step of Adam is the rate, whatever the gradient."""
    optimizer = make_method(
        {"policy": POLICY, "critic": POLICY}, of_ppo(learning_rate=1e-2, critic_learning_rate=1e-3)
    ).optimizer
    params = {"policy": {"kernel": jnp.ones((2, 2))}, "critic": {"kernel": jnp.ones((2, 2))}}
    updates = jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params)[0])(params)
    np.testing.assert_allclose(updates["policy"]["kernel"], -1e-2, rtol=1e-3)
    np.testing.assert_allclose(updates["critic"]["kernel"], -1e-3, rtol=1e-3)


def test_unrewarded_rows_are_excluded_and_truncated_ones_bootstrapped():
    config = of_ppo(gae_lambda=1.0, kl_coef=0.0, bootstrap_truncated=True, whiten=False)
    truncated, applicable = np.zeros((4, 2), bool), np.ones((4, 2), bool)
    truncated[0], applicable[0, 1] = True, False
    rewards = np.where(applicable, 0.5, 0).astype(np.float32)
    batch = a_batch()._replace(ref_logprobs=None, truncated=truncated)
    method = make_method({"policy": POLICY, "critic": POLICY}, config)
    actual, advantages, logs = method.advantage(RewardArrays(rewards, applicable), batch, 0.0)
    expected = np.full((4, 2), 0.5)
    expected[0] = [0.5 + batch.end_values[0, 0, 0], 0]
    returns = expected[..., None] * batch.completion_mask
    np.testing.assert_allclose(actual.returns, returns, atol=1e-5)
    assert advantages.shape == (4, 2)
    assert not actual.completion_mask[0, 1].any()
    kept = actual.completion_mask
    assert logs["returns_mean"] == pytest.approx(returns[kept].mean(), abs=1e-5)
    ended, _, _ = method.advantage(
        RewardArrays(rewards, applicable), batch._replace(truncated=np.zeros_like(truncated)), 0.0
    )
    np.testing.assert_allclose(ended.returns[0, 0], 0.5 * batch.completion_mask[0, 0], atol=1e-5)


def test_masked_truncated_rows_do_not_shift_advantages():
    config = of_ppo(kl_coef=0.0, mask_truncated=True)
    truncated = np.arange(8).reshape(4, 2) % 3 == 0
    rewards, everyone = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones((4, 2), bool)
    batch = valued(a_batch()._replace(ref_logprobs=None), truncated=truncated)
    method, results = make_method({"policy": POLICY, "critic": POLICY}, config), []
    for missed in (0.0, -50.0):  # the rewards of truncated completions count for nothing
        earned = RewardArrays(np.where(truncated, missed, rewards).astype(np.float32), everyone)
        results.append(method.advantage(earned, batch, 0.0)[0])
    mask = results[0].completion_mask
    assert mask.any()
    assert not mask[truncated].any()
    np.testing.assert_array_equal(results[0].advantages, results[1].advantages)
    assert np.asarray(results[0].advantages)[mask].mean() == pytest.approx(0, abs=1e-5)
