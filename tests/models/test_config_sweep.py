"""Each key of each family's config.json, changed: logits change as transformers' do, or the file is refused by name.

`golden/sweep.py` recorded what transformers computes, and says what a case is. By default, files that become the same
configuration must have the same logits in transformers, so no change is lost. The slow tests compute the logits.
"""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from golden import sweep
from tiny import slow_unless, states_of_texts

from grpo_jax.errors import UsageError
from grpo_jax.functional.numerics import softcapped
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.files.families import config_from_huggingface
from grpo_jax.models.files.weights import load_params
from grpo_jax.models.policy import decoder_policy

# Key -> values that are refused although transformers computes something, in some families. As far as we know, no
# released language model has them. Embedding models have is_causal and use_bidirectional_attention. Gemma 4 scales
# nothing, and windows of OLMo 3 and Gemma 3 turn without scaling.
REFUSED = {
    "attn_logit_softcapping": {"1.5"},  # in Gemma 3, whose class ignores it
    "attention_dropout": {"0.1"},  # in Phi
    "hidden_act": {'"gelu"', '"gelu_new"', '"gelu_pytorch_tanh"', '"relu"'},  # with delta nets
    "is_causal": {"false"},
    "use_bidirectional_attention": {"true", '"all"'},
    "partial_rotary_factor": {"0.5"},  # in families whose class ignores it
    "rope_scaling": {"longrope", "proportional"},  # longrope: of other lengths
    "rope_parameters": {"longrope", "proportional", "default"},  # default with a partial_rotary_factor
    "rope_parameters.full_attention": {"dynamic", "longrope", "proportional", "default", "linear", "llama3", "yarn"},
    "rope_parameters.sliding_attention": {"dynamic", "longrope", "proportional", "default", "linear", "llama3", "yarn"},
    "shared_expert_intermediate_size": {"0"},
    "swiglu_alpha": {"1.0"},
    "vocab_size": {"16", "40"},  # of Gemma 4, without the same vocab_size_per_layer_input
    "vocab_size_per_layer_input": {"12"},
    "num_attention_heads": {'"(absent)"'},  # a default that does not fit the other sizes
}
QUICK = ("llama_biases", "gemma3_capped", "gemma4_small")


class Case(NamedTuple):
    """A changed config.json, and what transformers makes of it."""

    base: str
    path: tuple[str, ...]
    value: Any
    shapes: dict[str, tuple[int, ...]] | None  # of the tensors in files; None: transformers does not load it
    logits: np.ndarray

    @property
    def config(self) -> ModelConfig:
        """The configuration without fields that do not change logits."""
        changed = sweep.changed(self.base, self.path, self.value)
        config = config_from_huggingface(changed, longest_text=sweep.IDS.shape[-1])
        return replace(config, max_position_embeddings=None, initializer_range=0.02)


@cache
def record() -> dict[str, list[Case]]:
    """Returns the cases of each folder that transformers loads; the first of them changes nothing."""
    stored = np.load(sweep.RECORD)
    text = json.loads(stored["text"].tobytes())
    by_base: dict[str, list[Case]] = {}
    for (base, path, value, number), logits in zip(text["cases"], stored["logits"], strict=True):
        if number is not None:
            by_base.setdefault(base, []).append(Case(base, tuple(path), value, text["layouts"][number], logits))
    return by_base


@cache
def accepted(base: str) -> dict[ModelConfig, list[Case]]:
    """Returns the cases that are not refused, by configuration. REFUSED lists those that may be."""
    by_config: dict[ModelConfig, list[Case]] = {}
    for case in record()[base]:
        kind = case.value.get("rope_type") if isinstance(case.value, dict) else json.dumps(case.value)
        try:
            by_config.setdefault(case.config, []).append(case)
        except UsageError:
            # The class of Gemma 3 and of OLMo 3 ignores parameters that do not name the kind of layer.
            is_flat = case.path == ("rope_parameters",) and base.startswith(("gemma3", "olmo3"))
            if kind not in REFUSED.get(".".join(case.path), ()) and not is_flat:
                raise
    return by_config


@pytest.mark.parametrize("base", slow_unless(QUICK, sweep.BASES))
def test_no_change_of_logits_is_lost(base):
    for cases in accepted(base).values():
        for case in cases:
            assert case.shapes == cases[0].shapes, case[:3]
            np.testing.assert_allclose(case.logits, cases[0].logits, atol=1e-5, rtol=1e-5, err_msg=str(case[:3]))


@pytest.mark.slow
@pytest.mark.parametrize("base", sweep.BASES)
def test_changed_logits_are_those_of_transformers(base, tmp_path):
    for config, (case, *_) in accepted(base).items():
        np.testing.assert_allclose(logits(config, case, tmp_path), case.logits, atol=1e-4, rtol=1e-4, err_msg=str(case))


def logits(config: ModelConfig, case: Case, folder: Path) -> np.ndarray:
    """Computes the logits of a folder like the one that transformers loaded."""
    sweep.write_folder(folder, {}, case.shapes)
    policy, params = decoder_policy(config), load_params(folder, config)
    with jax.disable_jit():  # operations are compiled once for many configurations
        states = states_of_texts(policy, params, sweep.IDS, np.ones_like(sweep.IDS))[0, -1]
        return softcapped(states @ policy.unembedding(params).T, policy.softcap)[: sweep.NUM_LOGITS]


@pytest.mark.slow
@pytest.mark.parametrize("base", sweep.BASES)
def test_the_installed_transformers_computes_what_was_recorded(base):
    pytest.importorskip("torch")
    cases = {(case.path, json.dumps(case.value)): case for case in record()[base]}
    for path, value in [((), None), *sweep.cases(base)]:
        result, case = sweep.transformers_result(sweep.changed(base, path, value)), cases.get((path, json.dumps(value)))
        assert (result is None) == (case is None), (path, value)
        if result and case:
            assert {name: list(shape) for name, shape in result[0].items()} == case.shapes
            np.testing.assert_allclose(result[1], case.logits, atol=1e-4, rtol=1e-4, err_msg=str((path, value)))


def test_page_lists_all_read_and_refused_keys():
    page = (Path(__file__).parents[2] / "docs/pretrained.md").read_text()
    read = set(page.split("These keys change logits")[1].split("```")[1].split()[1:])
    refused = set(re.findall(r"`(\w+)", page.split("Some values are rejected")[1].split("\n\n")[0]))
    refused -= {"proportional"}
    assert {name.split(".")[0] for name in REFUSED} - read == refused
    changing = set()
    for base in sweep.BASES:
        first, *cases = record()[base]
        close = (np.allclose(case.logits, first.logits, atol=1e-5) and case.shapes == first.shapes for case in cases)
        changing |= {case.path[0] for case, is_close in zip(cases, close, strict=True) if not is_close}
    assert read == changing - refused
