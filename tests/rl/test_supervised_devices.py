"""Phases on given data over eight virtual devices, and over a mesh of them, against one device: the same numbers."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from rl_helpers import recorder, some_pairs
from test_devices import (
    ALL,
    DECODER,
    FSDP,
    MODEL,
    PMAP,
    TEACHER,
    TENSOR,
    N,
    a_batch,
    case_of,
    compare,
    on,
)

from grpo_jax.config import DistillationConfig
from grpo_jax.data.packing import Packed
from grpo_jax.devices import Devices, place, to_devices, to_numpy
from grpo_jax.functional import dpo_loss
from grpo_jax.models.heads import Headed, add_head
from grpo_jax.models.params import split
from grpo_jax.offline import phase
from grpo_jax.offline.pairs import (
    kto_objective,
    pad_pairs,
    pair_logprobs,
    pair_rewards,
    preference_objective,
    reward_model_objective,
    score_pairs,
)
from grpo_jax.offline.phase import Objective, SupervisedConfig, make_fit_programs
from grpo_jax.offline.sft import DistillationTarget, distillation_objective, mean_divergence, sft_objective, text_nll

WIDTH = 8


def start_of(name: str) -> Any:
    """Parameters of the policy in a case of reinforcement learning."""
    return case_of(name).start["policy"]


CONFIG = SupervisedConfig(4, 1e-2, microbatches=2)
SHAPE, HEADLESS = add_head(MODEL, start_of("decoder"))
NOISE = np.random.default_rng(3)
HEADED = Headed(HEADLESS.decoder, NOISE.normal(size=MODEL.hidden_size).astype(np.float32))


def packed_rows() -> Packed:
    """Rows of two texts and padding, of which the last tokens are learned."""
    lengths = NOISE.integers(2, 5, (N, 2))
    places = np.arange(WIDTH)
    texts = (places < lengths.sum(1, keepdims=True)) * (1 + (places >= lengths[:, :1]))
    last = np.stack([places == lengths[:, :1] - 1, places == lengths.sum(1, keepdims=True) - 1]).any(0)
    return Packed(NOISE.integers(0, 64, (N, WIDTH)).astype(np.int32), texts.astype(np.int32), last)


PAIRS, ROWS = some_pairs(N, 64)._replace(margins=[0.1 * i for i in range(N)]), packed_rows()
REFERENCE = NOISE.normal(-8, 1, (N, 2)).astype(np.float32)
TAUGHT = {"policy": start_of("decoder"), "teacher": jax.jit(TEACHER.init)(jax.random.key(5))}
LESSON = DistillationTarget(TEACHER, DistillationConfig("forward_kl"), nll_coef=0.3)


class Case(NamedTuple):
    """What a phase minimises, and where it starts."""

    objective: Objective
    batch: Any
    start: Any


def case_named(name: str) -> Case:
    pairs = pad_pairs(PAIRS, np.arange(N), WIDTH, WIDTH)
    if name == "reward model":
        return Case(reward_model_objective(SHAPE, center_coef=0.01), pairs, HEADED)
    if name == "dpo":
        objective = preference_objective(DECODER, partial(dpo_loss, beta=0.5))
        return Case(objective, pairs._replace(ref_logprobs=REFERENCE), start_of("lora"))
    if name == "kto":  # z₀ is above 0, and pieces and devices have different parts of it
        reference = REFERENCE - np.array([0, 8], np.float32)
        rated = pairs._replace(desirable=np.arange(N) % 3 > 0, ref_logprobs=reference)
        return Case(kto_objective(DECODER), rated, start_of("lora"))
    if name == "teacher":
        return Case(distillation_objective(DECODER, LESSON), ROWS, TAUGHT)
    batch = ROWS if name == "packed" else a_batch()
    return Case(sft_objective(DECODER), batch, start_of("decoder"))


@cache
def gradients(name: str, devices: Devices) -> Any:
    """Of a step in two pieces, and its metrics."""
    case, config = case_named(name), on(devices, CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase, "make_optimizer", lambda *_, **__: recorder(1))
        programs = make_fit_programs(case.objective, config)
    trained, frozen = (place(part, devices) for part in split(case.start))
    state = place(programs.init_state(trained), devices)
    state, metrics = programs.train_step(state, to_devices(case.batch, devices), frozen)
    return to_numpy((state.opt_state.gradients, metrics))


NAMES = ("prompts", "packed", "teacher", "dpo", "kto", "reward model")
QUICK = {("packed", ALL)}


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(name, devices, marks=() if (name, devices) in QUICK else pytest.mark.slow)
        for name in NAMES
        for devices in (PMAP, FSDP, TENSOR, ALL)
    ],
)
def test_a_step_has_the_gradients_of_one_device(name, devices):
    (expected, metrics), (actual, others) = gradients(name, 1), gradients(name, devices)
    assert min(np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected)) > 0
    compare((expected, metrics, 0), (actual, others, 0))
    assert name != "kto" or metrics["kl"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [PMAP, ALL])
def test_evaluations_have_the_numbers_of_one_device(devices):
    start, headed = start_of("decoder"), HEADED
    for score in (
        lambda devices: text_nll(DECODER, place(start, devices), [ROWS], devices=devices),
        lambda devices: mean_divergence(DECODER, place(TAUGHT, devices), [ROWS], target=LESSON, devices=devices),
        lambda devices: score_pairs(pair_logprobs, DECODER, place(start, devices), PAIRS, num_pairs=N, devices=devices),
        lambda devices: score_pairs(pair_rewards, SHAPE, place(headed, devices), PAIRS, num_pairs=N, devices=devices),
    ):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), score(devices), score(1))
