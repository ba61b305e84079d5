"""Errors in the DeepSeekMath chapter of Hugging Face's course, with the numbers that show them.

`experiments.walkthrough` prints them step by step: the chapter's claim, the right answer, and a number. Errors that
need a model to show are in the walkthrough itself.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import functional as F

TITLE = "Advanced Understanding of Group Relative Policy Optimization (GRPO) in DeepSeekMath"
ADDRESS = "https://huggingface.co/learn/llm-course/chapter12/3b"

group_advantages, kl_full = jax.jit(F.group_advantages), jax.jit(F.kl_full)  # compiled whole, which is quicker


def signed(values: jax.Array) -> str:
    """Formats numbers with signs, in a row."""
    return " ".join(f"{value:+.4f}" for value in np.ravel(values))


def about_sampling(tokenizer: Any, prompt: str) -> list[str]:
    """Corrects the prompts of the two groups and the number of sampled tokens."""
    outputs = jnp.array([5, 6, 7, 5, 10, 2, 5, 5])  # as the chapter prints them, all of the first prompt
    second = group_advantages((outputs[4:] == 9).astype(float))
    one_group = group_advantages((outputs == 5).astype(float))
    five, ten = (len(tokenizer.encode(prompt + text)) - len(tokenizer.encode(prompt)) for text in ("5.0", "10.0"))
    return [
        "The chapter samples with num_return_sequences = batch_size * num_generations: 8 completions of one prompt, "
        "and x = 4 is never asked. The last four outputs that it prints, 10.0 2.0 5.0 5.0, would as answers to x = 4 "
        f"have advantages of {signed(second)}; its text has 10 2 9 9. As one group of 8, which they are, the right "
        f"ones get {one_group[0]:.4f}, not 0.8660.",
        "The chapter prints 5.0 and 10.0 as outputs of max_new_tokens=1, which samples one token: here they take "
        f"{five} tokens and {ten} after the prompt.",
    ]


def about_advantages() -> list[str]:
    """Corrects deviations, digits, parentheses, equal rewards and shapes."""
    four, eight, equal = jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([1.0, 0.0] * 4), np.full(7, 0.7, np.float32)
    as_written = (equal - equal.mean()) / (equal.std(ddof=1) + 1e-8)
    product = np.ones((8, 1)) * np.ones(8)
    return [
        f"The chapter's deviation of 8 rewards, 0.53, is that with n − 1, {eight.std(ddof=1):.4f}; with n it is "
        f"{eight.std():.4f}. With n − 1 the group's size matters: where half are right, advantages are "
        f"±{group_advantages(eight)[0]:.4f} among 8, ±{group_advantages(four)[0]:.4f} among 4, and with n "
        f"±{group_advantages(four, ddof=0)[0]:.4f}.",
        "The chapter prints 0.8659 beside −0.8660: advantages of a group add up to 0. With its ε of 1e-8 they are "
        f"{signed(group_advantages(four, eps=1e-8))}, with 1e-4 {signed(group_advantages(four, eps=1e-4))}.",
        f'The chapter writes "1 - 0.5 / 0.5774", which is {1 - 0.5 / 0.5774:.4f}; meant is (1 - 0.5) / 0.5774 = '
        f"{(1 - 0.5) / 0.5774:.4f}.",
        "The chapter divides by the deviation + 1e-8, which does not silence equal rewards: seven times 0.7 get "
        f"{as_written[0]:.2f} each in float32, from rounding. group_advantages compares the rewards first: "
        f"{group_advantages(jnp.asarray(equal))[0]:.2f}.",
        'The chapter has unsqueeze(1) "to match the logits shape": that is (8, T, V). What (8, 1) matches is the '
        f"ratio, (8, T). Without it, (8, 1) times (8,) is {product.shape}: every ratio with every advantage, and no "
        "error.",
    ]


def about_logprobs() -> list[str]:
    """Corrects probabilities that are used as log-probabilities."""
    return [
        'The chapter takes per_token_logps from "F.softmax(logits, dim=-1)": they are log_softmax, at the sampled ids. '
        f"With probabilities, the ratio of 0.9 to 0.5 would be exp(0.9 − 0.5) = {np.exp(0.9 - 0.5):.2f} instead of "
        f"{0.9 / 0.5:.2f}."
    ]


@jax.jit
def surrogate(log_ratio: jax.Array, advantage: jax.Array) -> jax.Array:
    """min(ρA, clip(ρ)A) with the chapter's ε."""
    return -F.clipped_surrogate(log_ratio, advantage, epsilon_low=0.2, epsilon_high=0.2)


@cache
def cases() -> dict[str, jax.Array]:
    """Returns the columns of a table: the chapter's two cases of the clip, each with both signs of the advantage."""
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
    """Corrects the term that min selects, its slope, and the ratio of a token or response."""
    smaller, slope = cases()["min"], cases()["slope"]
    log_ratio, advantage = jnp.log(1.4), jnp.array(-0.866)
    product = jnp.exp(log_ratio) * advantage * 1.2 * advantage
    tokens, mask = jnp.log(jnp.array([1.1, 1.1])), jnp.ones(2, bool)
    whole = F.sequence_log_ratio(tokens, jnp.zeros(2), mask)
    return [
        'The chapter has "Clip 0.8" for its case 2, a ratio of 0.4: that is what the clip gives, not what counts. With '
        f"A > 0 min takes {smaller[2]:.1f}, and its slope of {slope[2]:.1f} pulls the probability back up; with A < 0 "
        f'it takes {smaller[3]:.1f}, without a slope. And "Clip 1.2" of case 1 counts for A > 0 alone: with A < 0 min '
        f"takes {smaller[1]:.1f}, and its slope stays.",
        "The chapter's objective has no comma in its min. For ρ = 1.4 and A = −0.8660 what is printed, the product of "
        f"both, is {product:+.4f}; the smaller of both is {surrogate(log_ratio, advantage):+.4f}.",
        'The chapter says that from 0.5 to 0.7 the model "tends to reinforce" what is right: at a ratio of 1.4, with '
        f"A = 0.94, the slope is {jax.grad(surrogate)(log_ratio, jnp.array(0.94)):.4f}. What reinforced was the step "
        "before, from a ratio of 1.",
        "The chapter's formula has the ratio of a response, its code one of each token. Two tokens of 1.1 make a "
        f"response of {jnp.exp(whole[0]):.2f}, beyond 1.2, while neither is. DeepSeekMath has tokens, and their mean "
        "1/|o| Σ, which the formula lacks.",
    ]


def about_kl() -> list[str]:
    """Corrects the softmax's axis, the KL's direction, and a missing mean and mask."""
    row, old_row = jnp.log(jnp.array([0.9])), jnp.log(jnp.array([0.5]))
    policy, old = jnp.log(jnp.array([0.9, 0.1])), jnp.log(jnp.array([0.5, 0.5]))
    losses, mask = jnp.array([[-2.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), jnp.array([[True, False, False], [True, True, True]])
    of_rows, of_tokens = (
        F.weighted_sum(losses, w(mask), mask) for w in (F.sequence_mean_weights, F.token_mean_weights)
    )
    return [
        "The chapter's per_token_kl takes a softmax of per_token_logps: over the tokens of a row, not over the "
        f"vocabulary. With one token it is {kl_full(old_row, row):.4f} whatever the policies are; for 0.9 after 0.5, "
        f"k3 is {F.kl_k3(row, old_row)[0]:.4f}. With more, it is one number a row, added to each of its tokens.",
        "The chapter calls F.kl_div(log p, q), which is KL(q ‖ p), with the old policy as q: the other direction than "
        f"its formula. Of (0.9, 0.1) and (0.5, 0.5) the formula's is {kl_full(policy, old):.4f}, the code's "
        f"{kl_full(old, policy):.4f}.",
        "The chapter ends with per_token_loss, and makes no number of it. How matters: of two rows with losses −2 and "
        f"1 1 1 the mean of rows is {of_rows:+.2f}, of tokens {of_tokens:+.2f}. Nor is it masked: padding would be "
        f"trained like what was sampled, here {mask.size - int(mask.sum())} of {mask.size} places.",
    ]
