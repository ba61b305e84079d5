"""What the tests of several hosts start on each of them: a run of a small policy, updates of a decoder, a command.

Under pytest eight virtual devices are set; XLA_FLAGS of the tests of hosts set fewer.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo_jax import hosts
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.training.phases import train_with_evaluation


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=4,
        num_prompts=8,
        group_size=4,
        max_tokens=3,
        learning_rate=3e-2,
        kl_coef=0.1,
        max_rollouts=3,
        rollouts_every=1,
        eval_every=2,
        checkpoint_every=2,
    )
    output: flags.RunConfig = flags.RunConfig(Path("run"))
    mode: str = ""
    """What happens to host 1 after a few steps."""


class Threes:
    """The share of threes; a completion without any number below 3 gets none, and is counted."""

    def __init__(self, mode: str) -> None:
        self.mode, self.calls = mode, 0
        self.counts = {"no number": 0}
        self.messages: dict[str, str] = {}

    def __call__(self, examples, completions):
        self.calls += 1
        if self.mode and hosts.count() > 1 and self.calls > 4:
            print("step", flush=True)
            time.sleep(0.3)
        if self.mode == "raise" and hosts.index() == 1 and self.calls == 8:
            raise ZeroDivisionError("of host 1")
        if self.mode == "nan" and hosts.index() == 1 and self.calls >= 8:
            return [float("nan")] * len(completions)
        rewards = [text.count("3") / 3 if set(text) & set("012") else None for text in completions]
        self.counts["no number"] += rewards.count(None)
        self.messages["no number"] = "there is none below 3"
        return rewards


def run(config: Config) -> None:
    """Trains, with evaluations. Each host prints the calls of its hooks; host 0 prints the checksum."""
    from bigrams import PARAMS, POLICY, TASK  # arrays: JAX has to know the hosts before

    task = TASK._replace(reward=Threes(config.mode))
    programs = make_programs(POLICY, task, config.train)
    folder = flags.open_run(config)
    hooks = {
        "on_rollout": lambda step, rollout: print("hook", step, rollout.graded.rewards.tolist(), flush=True),
        "on_line": lambda step, line: print("hook", step, line.get("reward"), line.get("heldout_avg"), flush=True),
    }
    models = {"policy": PARAMS}
    state, _ = train_with_evaluation(models, task, config.train, folder, programs, phase="grpo", **hooks)
    checksum = params_sha256(state.params)
    if folder.writes:
        print("checksum", checksum, flush=True)


def updates(folder: Path, options: hosts.HostOptions) -> None:
    """Gradients, completions, and bytes exchanged, of a decoder on meshes of all devices; host 0 keeps them."""
    hosts.start(options, print, print)
    import jax
    import test_devices as cases
    import test_traffic as traffic

    number = jax.device_count()
    for name, mesh in (("decoder", cases.Mesh(fsdp=number)), ("ppo", cases.Mesh(2, number // 2))):
        expected = cases.gradients(name, cases.first_devices(mesh))
        if hosts.is_first():
            np.savez(folder / f"{name}.npz", *jax.tree.leaves(expected))
    actual = cases.sampled(cases.first_devices(cases.Mesh(2, number // 2)))
    if hosts.is_first():
        np.savez(folder / "sampled.npz", ids=actual.completion_ids, logprobs=actual.sampler_logprobs)
    shape, run = traffic.shape_and_run(number)
    program = traffic.lowered(traffic.MODEL, run, traffic.P, programs=("learn",))["learn"].compile()
    exchanged = traffic.by_purpose(traffic.sizes(traffic.collectives(str(program.as_text()))))
    if hosts.is_first():
        planned = traffic.planned(traffic.learn_traffic(traffic.MODEL, shape))
        (folder / "exchanged.json").write_text(json.dumps([exchanged, planned]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["updates"]:
        address, number, own, folder = sys.argv[2:]
        updates(Path(folder), hosts.HostOptions(False, address, int(number), int(own)))
    elif sys.argv[1:2] == ["command"]:
        from grpo_jax.commands import train

        train.command(sys.argv[2:])
    else:
        flags.main(Config, run, None)
