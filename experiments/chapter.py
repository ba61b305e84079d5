"""What the DeepSeekMath chapter of Hugging Face's course has wrong, with the numbers that show it.

https://huggingface.co/learn/llm-course/chapter12/3b, as `experiments.walkthrough` prints it step by step. What takes a
model to show is in the walk itself.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import functional as F

group_advantages, kl_full = jax.jit(F.group_advantages), jax.jit(F.kl_full)  # compiled whole, which is quicker


def shown(values: jax.Array) -> str:
    """Numbers with signs, in a row."""
    return " ".join(f"{value:+.4f}" for value in np.ravel(values))


def about_sampling(tokenizer: Any, prompt: str) -> list[str]:
    """One prompt for two groups; more than one token where one is asked for."""
    outputs = jnp.array([5, 6, 7, 5, 10, 2, 5, 5])  # as the chapter prints them, all of the first prompt
    second = group_advantages((outputs[4:] == 9).astype(float))
    one_group = group_advantages((outputs == 5).astype(float))
    five, ten = (len(tokenizer.encode(prompt + text)) - len(tokenizer.encode(prompt)) for text in ("5.0", "10"))
    return [
        "num_return_sequences = batch_size * num_generations samples 8 completions of one prompt: x = 4 is not asked. "
        f"As answers to x = 4, the last four outputs, 10 2 5 5, get {shown(second)}; the text has 10 2 9 9. As what "
        f"they are, one group of 8, the right ones get {one_group[0]:.4f} and not 0.8660.",
        f'max_new_tokens=1 samples one token. Of the outputs printed, this tokenizer writes "5.0" as {five} and "10" '
        "as "
        f"{ten} after the prompt.",
    ]


def about_advantages() -> list[str]:
    """Deviations, digits, parentheses, equal rewards, shapes."""
    four, eight, equal = jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([1.0, 0.0] * 4), np.full(7, 0.7, np.float32)
    as_written = (equal - equal.mean()) / (equal.std(ddof=1) + 1e-8)
    product = np.ones((8, 1)) * np.ones(8)
    return [
        f"The deviation 0.53 of 8 rewards is that with n − 1, {eight.std(ddof=1):.4f}; with n it is {eight.std():.4f}. "
        f"With n − 1 the group's size matters: where half are right, advantages are ±{group_advantages(eight)[0]:.4f} "
        f"among 8, ±{group_advantages(four)[0]:.4f} among 4, and with n ±{group_advantages(four, ddof=0)[0]:.4f}.",
        f"0.8659 beside −0.8660 cannot be: advantages of a group add up to 0. With the chapter's ε of 1e-8 they are "
        f"{shown(group_advantages(four, eps=1e-8))}, with 1e-4 {shown(group_advantages(four, eps=1e-4))}.",
        f'"1 - 0.5 / 0.5774" is {1 - 0.5 / 0.5774:.4f}; meant is (1 - 0.5) / 0.5774 = {(1 - 0.5) / 0.5774:.4f}.',
        f"ε = 1e-8 does not silence equal rewards: for seven times 0.7 the formula gives {as_written[0]:.2f} each in "
        f"float32, from rounding. group_advantages compares the rewards first: "
        f"{group_advantages(jnp.asarray(equal))[0]:.2f}.",
        "unsqueeze(1) does not match the logits, (8, T, V), but the ratio, (8, T). Without it, (8, 1) times (8,) is "
        f"{product.shape}: every ratio with every advantage, and no error.",
    ]


def about_logprobs() -> list[str]:
    """Probabilities are no log-probabilities."""
    return [
        "per_token_logps are log_softmax(logits) at the sampled ids. From F.softmax, which the chapter names, the "
        f"ratio of 0.9 to 0.5 would be exp(0.9 − 0.5) = {np.exp(0.9 - 0.5):.2f} instead of {0.9 / 0.5:.2f}."
    ]


@jax.jit
def surrogate(log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """min(ρA, clip(ρ)A) at the chapter's ε."""
    return -F.clipped_surrogate(log_ratio, advantage, epsilon_low=0.2, epsilon_high=0.2)


@cache
def cases() -> dict[str, jax.Array]:
    """The chapter's two cases of the clip, each with both signs of the advantage: columns of a table."""
    ratio, advantage = jnp.array([1.8, 1.8, 0.4, 0.4]), jnp.array([1.0, -1.0, 1.0, -1.0])
    log_ratio = jnp.log(ratio)
    return {
        "ρ": ratio,
        "A": advantage,
        "ρA": ratio * advantage,
        "clip(ρ)A": jnp.clip(ratio, 0.8, 1.2) * advantage,
        "min": surrogate(log_ratio, advantage),
        "slope": jax.vmap(jax.grad(surrogate))(log_ratio, advantage),
    }


def about_clip() -> list[str]:
    """Which of the two that min compares counts, and whether it has a slope; tokens and responses."""
    smaller, slope = cases()["min"], cases()["slope"]
    log_ratio, advantage = jnp.log(1.4), jnp.array(-0.866)
    product = jnp.exp(log_ratio) * advantage * 1.2 * advantage
    tokens, mask = jnp.log(jnp.array([1.1, 1.1])), jnp.ones(2, bool)
    whole = F.sequence_log_ratio(tokens, jnp.zeros(2), mask)
    return [
        f"The 0.8 of case 2 is what the clip gives, not what counts: with A > 0 min takes {smaller[2]:.1f}, and its "
        f"slope of {slope[2]:.1f} pulls the probability back up; with A < 0 it takes {smaller[3]:.1f}, without a "
        f"slope. And case 1 is clipped for A > 0 alone: with A < 0 min takes {smaller[1]:.1f}, and its slope stays.",
        "The objective's min lacks its comma. For ρ = 1.4 and A = −0.8660 what is printed, the product of both, is "
        f"{product:+.4f}; the smaller of both is {surrogate(log_ratio, advantage):+.4f}.",
        'From 0.5 to 0.7 the objective does not "tend to reinforce" any more: at a ratio of 1.4, with A = 0.94, its '
        "slope "
        f"is {jax.grad(surrogate)(log_ratio, jnp.array(0.94)):.4f}. What reinforced was the step before, from a ratio "
        "of 1.",
        "The formula has the ratio of a response, the code one of each token. Two tokens of 1.1 make a response of "
        f"{jnp.exp(whole[0]):.2f}, beyond 1.2, while neither is. DeepSeekMath has tokens, and their mean 1/|o| Σ, "
        "which the formula here lacks.",
    ]


def about_kl() -> list[str]:
    """A softmax over the wrong axis, the other direction; a mean, and a mask."""
    row, old_row = jnp.log(jnp.array([0.9])), jnp.log(jnp.array([0.5]))
    policy, old = jnp.log(jnp.array([0.9, 0.1])), jnp.log(jnp.array([0.5, 0.5]))
    losses, mask = jnp.array([[-2.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), jnp.array([[True, False, False], [True, True, True]])
    of_rows, of_tokens = (
        F.weighted_sum(losses, w(mask), mask) for w in (F.sequence_mean_weights, F.token_mean_weights)
    )
    return [
        "per_token_kl takes a softmax over the tokens of a row, not over the vocabulary. With one token it is "
        f"{kl_full(old_row, row):.4f} whatever the policies are; for 0.9 after 0.5, k3 is "
        f"{F.kl_k3(row, old_row)[0]:.4f}. With more, it is one number a row, that is added to each of its tokens.",
        "F.kl_div(log p, q) is KL(q ‖ p), and the code has the old policy as q: the other direction than the formula. "
        f"Of (0.9, 0.1) and (0.5, 0.5) the formula's is {kl_full(policy, old):.4f}, the code's "
        f"{kl_full(old, policy):.4f}.",
        "per_token_loss is never made a number, and how matters: of two rows with losses −2 and 1 1 1 the mean of "
        f"rows is {of_rows:+.2f}, of tokens {of_tokens:+.2f}. Nor is it masked: padding would be trained like what "
        f"was sampled, here {mask.size - int(mask.sum())} of {mask.size} places.",
    ]
