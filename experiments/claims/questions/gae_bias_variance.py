"""Does λ trade bias for variance, and so do the steps K that an advantage looks ahead?

Source 003, of GAE: "λ → 0: Trust only immediate predictions (low variance, high bias). λ → 1: Trust all future
predictions equally (high variance, low bias)", "λ = 0.9 (Balanced)"; "Larger K: More future context, potentially more
accurate", "Smaller K: [...] might miss important future effects". The bullseye is "the true advantage value". It is
known here: all 14⁴ completions of 8 additions are counted up, and bias, variance and mean squared error of Â given
state and token are exact, as means over the tokens that the policy writes, in units of the mean of A². The policy is
that of 20 steps of PPO without KL, the same in all rows, and its critic that of the run; advantages are not whitened.
"no training" has a critic of zeros, "coin toss" one that learned from coin tosses, both at λ = 0.9, as are rows of K;
K = 1 is λ = 0, and all K are λ = 0.9. At λ = 0 there is no variance: the next state is known with the token. At λ = 1
the bias is V − V_critic, the same for all tokens of a state, and none of the gradient: "tilt" is the bias without
that part, "error, tilt" is tilt² + variance. Expect variance to rise with λ, and tilt to fall to 0; of the bias it
depends on the critic. A minute for the cpu preset on two cores.

  python -m experiments.claims.questions.gae_bias_variance --preset cpu
"""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.ablation import COIN, START, Bench, ppo
from experiments.claims.columns import merge_seeds, minus
from experiments.claims.enumeration import all_completions, quality, rewards_of, values_of
from experiments.claims.findings import Also, Finding, main
from experiments.claims.testbeds import ARITHMETIC, first_prompts
from grpo_jax.functional import generalized_advantages, rewards_at_end
from grpo_jax.models.heads import Headed
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl.ppo import critic_policy
from grpo_jax.tasks.arithmetic import EOS_ID, MAX_TOKENS, PAD_ID

TRAINED, TOSSED = (ppo(kl_coef=0.0, coin=coin, steps=20, eval_every=20) for coin in (0.0, 1.0))
POLICY, CRITIC = decoder_policy(ARITHMETIC.model), critic_policy(ARITHMETIC.model)
gae = jax.jit(generalized_advantages, static_argnames="num_steps")


def measure(bench: Bench) -> Finding:
    found = [seed_rows(bench, *both) for both in zip(bench.trained(TRAINED), bench.trained(TOSSED), strict=True)]
    rows = merge_seeds(found)

    def balanced(words: str, column: str) -> Also:
        ends = np.minimum(rows["λ 0"][column], rows["λ 1"][column])
        return Also("003, GAE", words, f"{column}: better end − λ 0.9", ends - rows["λ 0.9"][column])

    def claim(words: str, column: str, one: str, other: str) -> Also:
        return Also("003, GAE", words, f"{column}: {one} − {other}", minus(rows, column, one, other))

    also = [
        claim("λ → 1: high variance", "variance", "λ 1", "λ 0"),
        claim("λ → 0: high bias, λ → 1: low bias", "bias²", "λ 0", "λ 1"),
        claim("the same, of the gradient", "tilt²", "λ 0", "λ 1"),
        balanced("λ = 0.9: balanced", "error"),
        balanced("the same, of the gradient", "error, tilt"),
        claim("Larger K: potentially more accurate", "error", "K 2", "K 3"),
    ]
    return Finding(rows, {}, also, drawn=["bias²", "tilt²", "variance", "error"])


def seed_rows(bench: Bench, trained: Params, tossed: Params) -> dict[str, dict[str, float]]:
    """All rows, for the policy of the first."""
    prompts = first_prompts((task := bench.task(TRAINED, 0)).task.heldout, 8)
    tree = all_completions(POLICY, trained["policy"], prompts, length=MAX_TOKENS, eos_id=EOS_ID, pad_id=PAD_ID)
    rewards, mask = rewards_of(task, tree, prompts), jnp.broadcast_to(tree.mask, (8, *tree.mask.shape))

    def row(critic: Headed, lam: float, steps: int | None = None) -> dict[str, float]:
        values = values_of(CRITIC, critic, tree, prompts)
        of = quality(tree, rewards, gae(rewards_at_end(rewards, mask), values, mask, lam=lam, num_steps=steps))
        return dict(zip(("bias²", "tilt²", "variance", "error"), of, strict=True)) | {"error, tilt": of[1] + of[2]}

    untrained = trained["critic"]._replace(head=jnp.zeros(ARITHMETIC.model.hidden_size))
    rows = {START: row(untrained, 0.9), COIN: row(tossed["critic"], 0.9)}
    rows |= {f"λ {lam:g}": row(trained["critic"], lam) for lam in (0.0, 0.5, 0.9, 1.0)}
    return rows | {f"K {steps}": row(trained["critic"], 0.9, steps) for steps in (2, 3)}


if __name__ == "__main__":
    main(measure, __doc__)
