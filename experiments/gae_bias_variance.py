"""Does λ trade bias for variance, and so do the steps K that an advantage looks ahead?

Seed 003, of GAE: "λ → 0: Trust only immediate predictions (low variance, high bias). λ → 1: Trust all future
predictions equally (high variance, low bias)", "λ = 0.9 (Balanced)"; "Larger K: More future context, potentially more
accurate", "Smaller K: Less future context, faster, but might miss important future effects". The bullseye is "the true
advantage value". Here that is known: a completion of an addition has at most 4 tokens of 14, so all 14⁴ of 16 held-out
prompts are counted up, and bias, variance and mean squared error of Â given state and token are exact. Means are over
the tokens that the policy writes; a reward is all or nothing, and advantages are not whitened. The policy is that of 20
steps of PPO without KL, the same in all rows. Its own critic is that of the run, with λ from 0 to 1, and with K from 1
to all at the seed's λ = 0.9. "no training" has a critic whose values are all 0, "coin toss" one that learned coin
tosses for 20 steps, both at λ = 0.9. K = 1 is λ = 0, which has no variance at all: the next state is known once the
token is. At λ = 1 the bias is V − V_critic, which is the same for all tokens of a state and so no bias of the gradient:
"tilt" leaves it out. Expect variance to rise with λ and tilt to fall to 0; the bias itself falls only where the critic's
mistakes differ between a state and the next. Half a minute for the cpu preset on two cores.

  python -m experiments.gae_bias_variance --preset cpu
"""

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np

from experiments.ablation import COIN, START, Bench, Claim, Finding, at_once, main, minus, ppo
from experiments.beds import ARITHMETIC, first
from experiments.enumeration import Quality, all_rows, grow, quality
from grpo_jax.functional import generalized_advantages, rewards_at_end
from grpo_jax.models import heads
from grpo_jax.models.policy import decoder_policy
from grpo_jax.sampling.sampler import Completions
from grpo_jax.tasks.arithmetic import EOS_ID, MAX_TOKENS, PAD_ID, VOCAB_SIZE
from grpo_jax.training.ppo import ActorCritic, critic_policy

TRAINED, TOSSED = ppo(kl_coef=0.0, steps=20, eval_every=20), ppo(kl_coef=0.0, coin=1.0, steps=20, eval_every=20)
LAMBDAS, STEPS = (0.0, 0.5, 0.9, 1.0), (1, 2, 3)
PREFIXES = all_rows(VOCAB_SIZE, MAX_TOKENS - 1)

gae = jax.jit(generalized_advantages, static_argnames="num_steps")
critic_values = jax.jit(partial(heads.values, critic_policy(ARITHMETIC.model)))


def measure(bench: Bench) -> Finding:
    jobs = [(setting, seed) for setting in (TRAINED, TOSSED) for seed in bench.seeds]
    width, params = at_once(len(jobs)), []
    for begin in range(0, len(jobs), width):
        several = bench.histories(jobs[begin : begin + width], width)[0].params
        params += [jax.tree.map(lambda x, i=i: x[i], several) for i in range(width)]
    seeds = len(bench.seeds)
    found = [of_seed(bench, params[i], params[seeds + i]) for i in range(seeds)]
    titles = {"bias²": "bias", "tilt²": "tilt", "variance": "variance", "error": "error"}
    rows = {
        name: {title: [getattr(one[name], field) for one in found] for title, field in titles.items()}
        for name in found[0]
    }
    ends = np.minimum(rows["λ 0"]["error"], rows["λ 1"]["error"])

    def claim(words: str, measure: str, values: np.ndarray) -> Claim:
        return Claim("003, GAE", words, measure, values)

    claims = [
        claim("λ → 1: high variance", "variance at λ 1 minus at λ 0", minus(rows, "variance", "λ 1", "λ 0")),
        claim("λ → 0: high bias, λ → 1: low bias", "bias² at λ 0 minus at λ 1", minus(rows, "bias²", "λ 0", "λ 1")),
        claim("the same, of the gradient", "tilt² at λ 0 minus at λ 1", minus(rows, "tilt²", "λ 0", "λ 1")),
        claim("λ = 0.9: balanced", "error at the better end minus that at λ 0.9", ends - rows["λ 0.9"]["error"]),
        claim("K small: might miss effects", "bias² of K 1 minus all", minus(rows, "bias²", "K 1", "λ 0.9")),
        claim("K large: noisier", "variance of all K minus K 1", minus(rows, "variance", "λ 0.9", "K 1")),
        claim("K large: more accurate", "error of K 1 minus all", minus(rows, "error", "K 1", "λ 0.9")),
    ]
    return Finding(rows, claims, drawn=["bias²", "tilt²", "variance", "error"], note="K at λ 0.9; all K is its row.")


def of_seed(bench: Bench, trained: ActorCritic, tossed: ActorCritic) -> Mapping[str, Quality]:
    """All rows, for the policy of a run, with its critic, one without training, and one of coin tosses."""
    task, prompts = bench.task(TRAINED, 0), first(bench.task(TRAINED, 0).task.heldout, 16)
    given, shape = (prompts.ids, prompts.mask), {"length": MAX_TOKENS, "eos_id": EOS_ID, "pad_id": PAD_ID}
    tree = grow(decoder_policy(ARITHMETIC.model), trained.policy, *given, **shape)
    ids, mask = (np.broadcast_to(x, (16, *x.shape)) for x in (tree.ids, tree.mask))
    written = Completions(ids, mask, None, None, None)  # rewards read the tokens alone
    rewards = np.asarray(task.gold(task.targets(prompts.examples), written, jax.random.key(0)))

    def row(critic: heads.Headed, lam: float, steps: int | None = None) -> Quality:
        prefixes = np.broadcast_to(PREFIXES, (16, *PREFIXES.shape))
        values = np.asarray(critic_values(critic, *given, prefixes, np.ones_like(prefixes, bool)))
        values = values[:, np.arange(len(tree.ids)) // VOCAB_SIZE]
        return quality(tree, rewards, gae(rewards_at_end(rewards, mask), values, mask, lam=lam, num_steps=steps))

    untrained = trained.critic._replace(head=np.zeros_like(trained.critic.head))
    rows = {START: row(untrained, 0.9), COIN: row(tossed.critic, 0.9)}
    rows |= {f"λ {lam:g}": row(trained.critic, lam) for lam in LAMBDAS}
    return rows | {f"K {steps}": row(trained.critic, 0.9, steps) for steps in STEPS}


if __name__ == "__main__":
    main(measure, __doc__)
