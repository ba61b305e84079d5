"""Supervised training: packed rows have the loss and the gradients of texts alone; skipped steps, and resuming."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_helpers import Stop, assert_same_files, stopping
from tiny import random_params, tiny_config

from grpo_jax.data.packing import pack, packed_batches, packed_pieces
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.data.types import pad_completions
from grpo_jax.functional import token_mean_weights
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.phase import FitObjective, SupervisedConfig, make_fit_programs
from grpo_jax.offline.sft import sft_objective, text_nll
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.progress import programs_so_far
from grpo_jax.step import Batch, Logs
from grpo_jax.training.phases import fit

POLICY = decoder_policy(tiny_config(16))
PARAMS = random_params(tiny_config(16))


def texts(count: int, seed: int = 0):
    """Prompts, and completions that repeat the prompt's first token."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 15, rng.integers(1, 5)).tolist() for _ in range(count)]
    return prompts, [[prompt[0]] * int(rng.integers(1, 4)) + [15] for prompt in prompts]


def test_rows_hold_every_text_whole_and_little_else():
    prompts, completions = texts(40)
    packed = pack(prompts, completions, width=16)
    actual = []
    for ids, text, learned in zip(packed.ids, packed.texts, packed.completion_mask, strict=True):
        used = int((text > 0).sum())
        assert (text[:used] > 0).all()
        assert (np.diff(text[:used]) >= 0).all()
        for number in range(1, text.max() + 1):
            mine = text == number
            actual.append((ids[mine & ~learned].tolist(), ids[mine & learned].tolist()))
        assert not learned[text == 0].any()
    assert sorted(actual) == sorted(zip(prompts, completions, strict=True))
    needed = sum(map(len, prompts)) + sum(map(len, completions))
    assert len(packed.ids) <= -(-needed // 16) + 1  # one more than if texts could be cut
    again = pack(prompts, completions, width=16)
    np.testing.assert_array_equal(again.ids, packed.ids)


def test_each_epoch_of_batches_has_every_row_once():
    rows = pack(*texts(40), width=16)
    total, batches = len(rows.ids), packed_batches(rows, 3, seed=0)
    drawn = np.concatenate([batches(step).ids for step in range(3 * total)])
    for epoch in np.split(drawn[: 6 * total], 6):
        np.testing.assert_array_equal(sorted(epoch.tolist()), sorted(rows.ids.tolist()))


def test_first_token_without_a_prompt_is_masked():
    packed = pack([[], [1]], [[3, 4, 5], [6]], width=5)
    np.testing.assert_array_equal(packed.ids, [[3, 4, 5, 1, 6]])
    np.testing.assert_array_equal(packed.completion_mask, [[False, True, True, False, True]])


def test_packing_changes_neither_loss_nor_gradients():
    prompts, completions = texts(9)
    packed = pack(prompts, completions, width=16)
    ids, mask = pad_completions([[completion] for completion in completions], 5)
    padded = pad_prompts(prompts, [{} for _ in prompts], width=4, pad_id=0)
    alone = Batch(padded.tokens, ids, mask, np.ones((len(prompts), 1), np.float32))
    loss_fn = sft_objective(POLICY).loss_fn

    def loss(params, batch):
        batch = batch._replace(weights=token_mean_weights(jnp.asarray(batch.completion_mask)))
        return loss_fn(params, batch)[0]

    values_and_grads = [jax.jit(jax.value_and_grad(loss))(PARAMS, batch) for batch in (packed, alone)]
    (value, grads), (expected, expected_grads) = values_and_grads
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6), grads, expected_grads)
    totals, tokens = text_nll(POLICY, PARAMS, [packed])
    np.testing.assert_allclose(totals.sum() / tokens.sum(), expected, rtol=1e-5)


def test_packing_does_not_change_each_texts_nll():
    prompts, completions = texts(9)
    packed = pack(prompts, completions, width=16)
    totals, tokens = text_nll(POLICY, PARAMS, packed_pieces(packed, 2))
    alone = [pack([prompt], [text], width=16) for prompt, text in zip(prompts, completions, strict=True)]
    expected = [text_nll(POLICY, PARAMS, [one])[0].item() for one in alone]
    assert sorted(tokens) == sorted(map(len, completions))
    np.testing.assert_allclose(sorted(totals), sorted(expected), rtol=1e-4)


# ---- the loop of phases

CONFIG = SupervisedConfig(10, 1e-2, log_every=5, checkpoint_every=4, eval_every=5)
START = {"mean": jnp.zeros(())}


class Rows(NamedTuple):
    """Numbers, to learn the mean of."""

    values: Any  # [N, 1]
    completion_mask: Any
    weights: Any = None


def squares(params, batch):
    return jnp.sum(batch.weights * (batch.values - params["mean"]) ** 2), Logs({}, {})


OBJECTIVE = FitObjective(squares, token_mean_weights)


def batches(*bad: int):
    """Step, from 0 -> rows that hold its number; those of `bad` steps, counted from 1, are NaN."""

    def batch(step: int) -> Rows:
        value = np.nan if step + 1 in bad else step + 1
        return Rows(np.array([[step + 1], [value]], np.float32), np.ones((2, 1), bool))

    return batch


def trained(folder, batch):
    def evaluate(params, step):
        return {"heldout_mean": float(params["mean"])}

    state = fit(OBJECTIVE, START, batch, CONFIG, RunFolder(folder, {}), phase="phase", evaluate=evaluate)
    return jax.device_get(state.params["mean"])


def test_phases_with_one_objective_and_configuration_share_programs(tmp_path):
    assert make_fit_programs(OBJECTIVE, CONFIG) is make_fit_programs(OBJECTIVE, CONFIG)
    assert make_fit_programs(OBJECTIVE, CONFIG) is not make_fit_programs(OBJECTIVE, replace(CONFIG, steps=11))
    trained(tmp_path / "first", batches())
    before = programs_so_far()
    trained(tmp_path / "second", batches())
    assert programs_so_far() == before


@pytest.mark.parametrize("bad", [(3,), (5,), (3, 4), (7, 8, 9)])
def test_skipped_steps_log_and_dump_their_batch(tmp_path, bad):
    trained(tmp_path, batches(*bad))
    dumped = {file.name: np.load(file)["values"][0, 0] for file in tmp_path.glob("skipped_*.npz")}
    assert dumped == {f"skipped_phase_{step:06d}.npz": step for step in bad}
    lines = RunFolder(tmp_path, {}).lines()
    in_a_row = {line["step"]: line["skipped"] for line in lines if "skipped" in line}
    assert in_a_row == {5: 0, 10: 0} | {step: number for number, step in enumerate(bad, 1)}
    assert [line["step"] for line in lines if "heldout_mean" in line] == [0, 5, 10]


@pytest.mark.parametrize("cut", [5, 8, 10])
def test_resumed_runs_keep_lines_of_skipped_steps(tmp_path, cut):
    whole = trained(tmp_path / "whole", batches(3, 7))
    with pytest.raises(Stop):
        trained(tmp_path / "cut", stopping(batches(3, 7), cut - 1))
    assert trained(tmp_path / "cut", batches(3, 7)) == whole
    assert_same_files(tmp_path / "whole", tmp_path / "cut", ["metrics.jsonl"])


def test_consecutive_skipped_steps_end_original_and_resumed_runs(tmp_path):
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="5 times in a row"):
            trained(tmp_path, batches(*range(2, 10)))
        assert [line["step"] for line in RunFolder(tmp_path, {}).lines() if "loss" in line] == [2, 3, 4, 5, 6]
        assert sorted(path.name for path in (tmp_path / "checkpoints/phase").iterdir()) == ["4"]
