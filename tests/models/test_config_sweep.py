"""Each key of each family's config.json, changed: logits are transformers', or the file is refused by name.

`golden/sweep.py` makes the record, and says what a case is.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from golden import sweep
from tiny import states_of_texts

from grpo_jax.errors import UsageError
from grpo_jax.functional.numerics import softcapped
from grpo_jax.models.families import config_from_huggingface
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.weights import load_params


class Case(NamedTuple):
    """A changed config.json, and what transformers makes of it."""

    base: str
    path: tuple[str, ...]
    value: Any
    shapes: dict[str, tuple[int, ...]] | None  # of the tensors in files; None: transformers does not load it
    logits: np.ndarray


@cache
def record() -> dict[str, list[Case]]:
    """Returns the cases of each folder; the first of them changes nothing."""
    stored = np.load(sweep.RECORD)
    text = json.loads(stored["text"].tobytes())
    by_base: dict[str, list[Case]] = {}
    for (base, path, value, number), logits in zip(text["cases"], stored["logits"], strict=True):
        shapes = None if number is None else text["layouts"][number]
        by_base.setdefault(base, []).append(Case(base, tuple(path), value, shapes, logits))
    return by_base


def config_of(case: Case) -> Any:
    """Returns the configuration without fields that do not change logits, or the words of the refusal."""
    try:
        config = config_from_huggingface(sweep.changed(case.base, case.path, case.value))
    except UsageError as error:
        return str(error)
    return replace(config, max_position_embeddings=None, initializer_range=0.02)


def logits_of(config: Any, case: Case, folder: Any) -> np.ndarray:
    """Computes the recorded logits from a folder with these tensors."""
    sweep.write_folder(folder, {}, case.shapes)
    policy, params = decoder_policy(config), load_params(folder, config)
    with jax.disable_jit():
        states = states_of_texts(policy, params, sweep.IDS, np.ones_like(sweep.IDS))[0, -1]
        return softcapped(states @ policy.unembedding(params).T, policy.softcap)[: sweep.NUM_LOGITS]


def faults(base: str, folder: Any) -> tuple[list[str], list[str]]:
    first, *cases = record()[base]
    config, wrong, refused = config_of(first), [], []
    known = {(config, json.dumps(first.shapes)): first.logits}
    for case in cases:
        name = f"{base}: {'.'.join(case.path)} = {json.dumps(case.value)}"
        if case.shapes is None:
            continue
        try:
            config = config_of(case)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__} {error}")
            continue
        if isinstance(config, str):
            refused.append(f"{name}: {config}")
            continue
        key = config, json.dumps(case.shapes)
        try:
            if key not in known:
                known[key] = logits_of(config, case, folder)
        except UsageError as error:
            refused.append(f"{name}: tensors {error}")
            continue
        if not np.allclose(known[key], case.logits, atol=1e-4, rtol=1e-4):
            wrong.append(f"{name}: {np.abs(known[key] - case.logits).max():.2g}")
    return wrong, refused


@pytest.mark.parametrize("base", sweep.BASES)
def test_sweep(base, tmp_path):
    import time
    t = time.time()
    wrong, refused = faults(base, tmp_path)
    print(*wrong, sep="\n"); print("---- refused"); print(*refused, sep="\n"); print(time.time() - t)
    assert not wrong
