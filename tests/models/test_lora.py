"""Adapters against loops, merged weights, and the files of PEFT; and what is trained in any tree of parameters."""

import dataclasses
import math
import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from tiny import GOLDEN, change_json, decoded_states, load_golden, randomly_adapted, refused, two_groups

from experiments.new_models import save_new_model
from grpo_jax.models.decoder.heads import Headed
from grpo_jax.models.files.peft import adaptable, load_adapter, save_adapter, targets_of
from grpo_jax.models.files.weights import load_params, read_json, write_model_json
from grpo_jax.models.params.lora import TARGETS, add_adapters, fingerprint, merge, sites
from grpo_jax.models.params.tree import Adapted, join, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.step import init_state

ADAPTER = GOLDEN / "llama/adapter"  # q_proj, v_proj, o_proj and down_proj with r = 3, by PEFT
CONFIG, BASE = load_golden("llama")  # all seven kernels have different shapes
POLICY = decoder_policy(CONFIG)
RANK, ALPHA = 3, 6.0
ADAPTED = randomly_adapted(BASE, RANK, ALPHA)


@jax.jit
def hidden(params):
    """Hidden states of the batch, compiled once for plain and once for adapted parameters."""
    return POLICY.hidden(params, *two_groups())


def loss(params):
    """Sums the states of the first completion token, in which all projections take part: a smaller program."""
    prompt, completions = two_groups()
    weights = np.random.default_rng(1).normal(size=(2, 1, 1, 16)).astype(np.float32)
    return jnp.sum(weights * POLICY.hidden(params, prompt, completions[..., :1]))


# ---- what adapters compute


def test_new_adapters_change_nothing():
    new = add_adapters(BASE, jax.random.key(0), rank=RANK, alpha=ALPHA)
    np.testing.assert_array_equal(hidden(new), hidden(BASE))


def test_adapters_equal_merged_weights():
    plain, merged = hidden(BASE), hidden(jax.jit(merge)(ADAPTED))
    assert np.abs(merged - plain).max() > 0.1
    np.testing.assert_allclose(hidden(ADAPTED), merged, atol=2e-5)


def test_decoding_has_the_adapters_too():
    states = jax.jit(partial(decoded_states, POLICY))(ADAPTED, *two_groups())
    np.testing.assert_allclose(states[:, :, :4], hidden(ADAPTED), atol=2e-5)


def test_merged_kernels_against_a_loop():
    merged = merge(ADAPTED)
    for block, name in sites(BASE["layers"]):
        before, after = (np.asarray(params["layers"][block][name]["kernel"]) for params in (BASE, merged))
        a, b = (np.asarray(ADAPTED.adapters["layers"][block][name][matrix]) for matrix in "ab")
        for layer in range(CONFIG.num_hidden_layers):
            change = sum(np.multiply.outer(a[layer, ..., r], b[layer, r]) for r in range(RANK))
            np.testing.assert_allclose(after[layer], before[layer] + ALPHA / RANK * change, atol=1e-5, err_msg=name)
    assert merged["embedding"] is BASE["embedding"]


def test_merging_keeps_the_dtype_of_the_base():
    half = ADAPTED._replace(base=load_params(GOLDEN / "llama", CONFIG, dtype=jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(merge, half))} == {jnp.dtype("bfloat16")}


def test_merging_keeps_changes_below_bfloat16s_resolution():
    """Their sum stays in the mean, and in float32 each stays."""
    base = load_params(GOLDEN / "llama", CONFIG, dtype=jnp.bfloat16)
    small = Adapted(base, ADAPTED.adapters, jnp.float32(1e-5))
    exact = merge(small._replace(base=jax.tree.map(lambda x: x.astype(jnp.float32), base)))
    before, wanted, rounded = (
        np.concatenate([np.ravel(x["layers"][block][name]["kernel"]) for block, name in sites(x["layers"])])
        for x in (base, exact, merge(small))
    )
    in_float32 = merge(small, jnp.float32)["layers"]["attention"]["q_proj"]["kernel"]
    np.testing.assert_array_equal(in_float32, exact["layers"]["attention"]["q_proj"]["kernel"])
    before, rounded = before.astype(np.float32), rounded.astype(np.float32)
    change = wanted - before
    assert (wanted.astype(ml_dtypes.bfloat16).astype(np.float32) == before).mean() > 0.9
    assert np.vdot(rounded - before, change) / np.vdot(change, change) == pytest.approx(1, abs=0.3)


# ---- what is trained


def test_gradients_are_those_of_the_product():
    trained, frozen = split(ADAPTED)
    gradients = jax.jit(jax.grad(lambda trained: loss(join(trained, frozen))))(trained)
    assert jax.tree.structure(gradients) == jax.tree.structure(ADAPTED.adapters)
    of_kernels = jax.jit(jax.grad(loss))(merge(ADAPTED))
    for block, name in sites(BASE["layers"]):
        a, b = (np.asarray(trained["layers"][block][name][matrix]) for matrix in "ab")
        layers = a.shape[0]
        left, right = a.reshape(layers, -1, RANK), b.reshape(layers, RANK, -1)
        of_kernel = np.asarray(of_kernels["layers"][block][name]["kernel"]).reshape(*left.shape[:2], right.shape[2])
        expected = {"a": of_kernel @ right.swapaxes(1, 2), "b": left.swapaxes(1, 2) @ of_kernel}
        for matrix, gradient in gradients["layers"][block][name].items():
            difference = gradient - (ALPHA / RANK * expected[matrix]).reshape(gradient.shape)
            assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(gradient), (name, matrix)


# ---- new adapters


def test_adapters_start_as_those_of_peft():
    new = add_adapters(BASE, jax.random.key(0), rank=40, alpha=10.0)
    assert new.base is BASE
    assert new.scale == 0.25
    seen = []
    for block, name in sites(BASE["layers"]):
        kernel, adapter = (jax.tree.map(np.asarray, tree["layers"][block][name]) for tree in (BASE, new.adapters))
        inputs = {"o_proj": 16, "down_proj": 20}.get(name, 16)
        assert not adapter["b"].any()
        assert adapter["a"].size * adapter["b"].size == kernel["kernel"].size * 40**2 * CONFIG.num_hidden_layers
        # U(−1/√in, 1/√in), which is Kaiming's with a = √5; 640 draws or more for each layer come close to both ends.
        assert 0.97 < np.abs(adapter["a"]).max() * inputs**0.5 <= 1
        assert abs(adapter["a"].mean()) * inputs**0.5 < 0.1
        seen += [row.flatten()[:5].tolist() for row in adapter["a"]]
    assert len({tuple(start) for start in seen}) == len(seen)  # no two layers or projections alike


def test_only_targets_have_adapters():
    new = add_adapters(BASE, jax.random.key(0), rank=1, alpha=1.0, targets=("v_proj", "up_proj"))
    names = [(block, name) for block, modules in new.adapters["layers"].items() for name in modules]
    assert names == [("attention", "v_proj"), ("mlp", "up_proj")]


IMPOSSIBLE_ADAPTERS = [
    ({"rank": 0}, "rank"),
    ({"alpha": 0.0}, "alpha"),
    ({"alpha": math.inf}, "alpha"),
    ({"targets": ()}, "target"),
    ({"targets": ("q_proj", "vproj")}, "target"),
]


@pytest.mark.parametrize(("options", "words"), IMPOSSIBLE_ADAPTERS)
def test_adapters_that_cannot_be_are_refused(options, words):
    with refused(words):
        add_adapters(BASE, jax.random.key(0), **({"rank": 2, "alpha": 1.0} | options))


# ---- folders of PEFT


def test_files_of_peft_come_back_bit_by_bit(tmp_path):
    save_adapter(tmp_path / "out", CONFIG, load_adapter(ADAPTER, CONFIG, BASE), base="llama")
    saved, original = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", ADAPTER))
    assert saved.keys() == original.keys()
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensor, original[name], strict=True)
    written, read = (read_json(folder / "adapter_config.json") for folder in (tmp_path / "out", ADAPTER))
    assert set(written.pop("target_modules")) == set(read["target_modules"])
    assert written.pop("task_type") == "CAUSAL_LM"  # so that PEFT's AutoPeftModelForCausalLM takes it
    assert written == {name: read[name] for name in written}


@pytest.mark.parametrize("targets", [TARGETS, ("gate_proj", "o_proj")])
def test_adapters_come_back_bit_by_bit(tmp_path, targets):
    layers = {}
    for block, name in sites(BASE["layers"], targets):
        layers.setdefault(block, {})[name] = ADAPTED.adapters["layers"][block][name]
    params = Adapted(BASE, {"layers": layers}, jnp.float32(0.1))  # no float32 is a tenth
    save_adapter(tmp_path / "out", CONFIG, params, base="llama")
    loaded = load_adapter(tmp_path / "out", CONFIG, BASE)
    assert loaded.base is BASE
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), loaded, params)


WITH_TOWERS = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}}
ALONE = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}, "vision_config": {}}


@pytest.mark.parametrize(
    ("file", "module"), [(WITH_TOWERS, "model.language_model"), (ALONE, "model")], ids=["gemma3", "qwen3_5"]
)
def test_adapters_of_multimodal_bases_name_peft_modules(file, module, tmp_path):
    """Those of the class that AutoModelForCausalLM takes. PEFT would ignore others, and leave the base as it is."""
    (tmp_path / "base").mkdir()
    write_model_json(tmp_path / "base/config.json", file)
    folder = save_adapter(tmp_path / "out", CONFIG, ADAPTED, base=str(tmp_path / "base"))
    names = load_file(folder / "adapter_model.safetensors")
    assert {name.partition(".layers.")[0] for name in names} == {f"base_model.model.{module}"}
    targets = read_json(folder / "adapter_config.json")["target_modules"]
    if module != "model":
        assert re.fullmatch(targets, "model.language_model.layers.0.self_attn.q_proj")
        assert not re.fullmatch(targets, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    jax.tree.map(np.testing.assert_array_equal, load_adapter(folder, CONFIG, BASE).adapters, ADAPTED.adapters)


def test_projections_of_one_module_share_its_adapter(tmp_path):
    """Rows of A are those of q, k and v, and B is block diagonal; the adapter of o_proj is filled up with zeros."""
    config, params = load_golden("phi4_mini")
    adapted = randomly_adapted(params, 2, 3.0, targets=("q_proj", "v_proj", "o_proj"))
    folder = save_adapter(tmp_path / "out", config, adapted, base="base")
    written, tensors = read_json(folder / "adapter_config.json"), load_file(folder / "adapter_model.safetensors")
    assert (written["target_modules"], written["r"], written["lora_alpha"]) == (["o_proj", "qkv_proj"], 4, 6.0)
    stem, of_layer = "base_model.model.model.layers.1.self_attn", adapted.adapters["layers"]["attention"]
    q, v = (jax.tree.map(lambda x: np.asarray(x[1]), of_layer[name]) for name in ("q_proj", "v_proj"))
    np.testing.assert_array_equal(tensors[f"{stem}.qkv_proj.lora_A.weight"], np.hstack([q["a"], v["a"]]).T)
    whole = np.zeros((32 + 2 * 16, 4), np.float32)
    whole[:32, :2], whole[48:, 2:] = q["b"].reshape(2, 32).T, v["b"].reshape(2, 16).T
    np.testing.assert_array_equal(tensors[f"{stem}.qkv_proj.lora_B.weight"], whole)
    assert not tensors[f"{stem}.o_proj.lora_A.weight"][2:].any()
    assert tensors[f"{stem}.o_proj.lora_B.weight"].shape == (32, 4)


@pytest.fixture
def adapter(tmp_path):
    """A copy of PEFT's adapter, to change."""
    return shutil.copytree(ADAPTER, tmp_path / "adapter")


def configure(folder, **changes):
    change_json(folder / "adapter_config.json", **changes)


@pytest.mark.parametrize(("use_rslora", "expected"), [(False, 12 / 3), (True, 12 / 3**0.5)])
def test_scale(adapter, use_rslora, expected):
    configure(adapter, use_rslora=use_rslora)
    assert load_adapter(adapter, CONFIG, BASE).scale == np.float32(expected)


UNSUPPORTED_PEFT_OPTIONS = [
    ({"peft_type": "IA3"}, "IA3"),
    ({"use_dora": True}, "use_dora"),
    ({"lora_bias": True}, "lora_bias"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),  # of layers that are twice in the model
    ({"kasa_config": {"beta": 1e-4}}, "kasa_config"),
    ({"arrow_config": {"top_k": 2}}, "arrow_config"),
    # These take their start out of the base, so the base in the folder is not what was adapted.
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"r": 4}, r"q_proj.lora_A.weight must be floats of shape \(4, 16\)"),
    *(({"lora_alpha": x}, "lora_alpha") for x in (None, "x", True, [1], math.nan, math.inf, 10**400)),
]


@pytest.mark.parametrize(("changes", "named"), UNSUPPORTED_PEFT_OPTIONS)
def test_options_of_peft_that_are_refused(adapter, changes, named):
    configure(adapter, **changes)
    with refused(named):
        load_adapter(adapter, CONFIG, BASE)


Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def change_tensors(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


# What is wrong -> how to make it so, and what the sentence names.
BROKEN = {
    "missing": (lambda x: x.pop(Q_PROJ), f"{Q_PROJ} .* is missing"),
    "transposed": (lambda x: x.update({Q_PROJ: x[Q_PROJ].T.copy()}), Q_PROJ),
    "integers": (lambda x: x.update({Q_PROJ: x[Q_PROJ].astype(np.int8)}), "I8"),
    "unknown module": (lambda x: x.update({Q_PROJ.replace("q_proj", "qkv_proj"): x[Q_PROJ]}), "qkv_proj"),
    "nothing": (lambda x: x.clear(), "does not have"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit_are_refused(adapter, name):
    change, words = BROKEN[name]
    change_tensors(adapter, change)
    with refused(words):
        load_adapter(adapter, CONFIG, BASE)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_lacks_a_file_is_refused(adapter, file):
    (adapter / file).unlink()
    with refused(file):
        load_adapter(adapter, CONFIG, BASE)


def test_a_folder_in_use_is_kept(adapter):
    with refused("exists"):
        save_adapter(adapter, CONFIG, ADAPTED, base="llama")
    assert (adapter / "golden.npz").exists()


def test_other_sizes_than_the_bases_are_refused(adapter):
    wide = dataclasses.replace(CONFIG, hidden_size=32)
    shapes = jax.eval_shape(decoder_policy(wide).init, jax.random.key(0))
    with refused(r"\(3, 32\)"):
        load_adapter(adapter, CONFIG, shapes)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt_oss", ("q_proj", "k_proj", "v_proj", "o_proj")),  # an expert is no module
        ("gemma4_moe", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("qwen3_moe_dense", ("q_proj", "k_proj", "v_proj", "o_proj")),  # an MLP is named like an expert
        ("phi4_mini", TARGETS[:7]),  # several projections are one module
        ("glm4", TARGETS[:7]),
        ("qwen3_next", ("q_proj", "k_proj", "v_proj", "o_proj", *TARGETS[7:])),
        ("qwen3_moe", TARGETS[:7]),
    ],
)
def test_adapters_that_peft_cannot_hold_are_not_targets(name, targets, tmp_path):
    config, params = load_golden(name)
    assert adaptable(config) == targets_of(config, TARGETS) == targets
    if "up_proj" not in targets:
        with refused("lora_targets"):
            targets_of(config, ("q_proj", "up_proj"))
        with refused("PEFT cannot hold adapters of .*'up_proj'"):
            save_adapter(tmp_path / "out", config, randomly_adapted(params, RANK, ALPHA), base="base")


def test_adapters_where_plain_parameters_are_needed_are_refused(tmp_path):
    for use in (
        lambda: save_new_model(tmp_path / "out", ADAPTED, CONFIG),
        lambda: add_adapters(ADAPTED, jax.random.key(0), rank=1, alpha=1.0),
        lambda: init_state(ADAPTED, optax.sgd(1.0)),
    ):
        with refused("have adapters"):
            use()
    assert not list(tmp_path.iterdir())


def test_a_fingerprint_tells_weights_that_were_trained_further():
    assert fingerprint(BASE) == fingerprint(load_params(GOLDEN / "llama", CONFIG))
    assert fingerprint(BASE) != fingerprint(merge(ADAPTED))


# ---- what is trained, in any tree

PLAIN = {"embedding": jnp.arange(6.0).reshape(3, 2), "layers": {"kernel": jnp.ones((2, 2))}}
ADAPTERS = {"layers": {"kernel": {"a": jnp.ones((2, 1)), "b": jnp.zeros((1, 2))}}}
WITH_ADAPTERS = Adapted(PLAIN, ADAPTERS, jnp.float32(2))
HEAD = jnp.linspace(-1, 1, 2)
TEACHER = {"embedding": jnp.full((4, 5), 3.0)}

# name -> parameters, and what of them is trained
CASES = {
    "plain": (PLAIN, PLAIN),
    "adapted": (WITH_ADAPTERS, ADAPTERS),
    "headed": (Headed(PLAIN, HEAD), Headed(PLAIN, HEAD)),
    "headed and adapted": (Headed(WITH_ADAPTERS, HEAD), Headed(ADAPTERS, HEAD)),
    "a head on another model's decoder": (Headed(None, HEAD), Headed(None, HEAD)),
    "a policy": ({"policy": PLAIN}, {"policy": PLAIN}),
    "with a critic": (
        {"policy": WITH_ADAPTERS, "critic": Headed(WITH_ADAPTERS, HEAD)},
        {"policy": ADAPTERS, "critic": Headed(ADAPTERS, HEAD)},
    ),
    "with a head that shares the decoder": (
        {"policy": WITH_ADAPTERS, "critic": Headed(None, HEAD)},
        {"policy": ADAPTERS, "critic": Headed(None, HEAD)},
    ),
    "with a teacher": ({"policy": WITH_ADAPTERS, "teacher": TEACHER}, {"policy": ADAPTERS}),
    "with an adapted teacher": ({"policy": PLAIN, "teacher": WITH_ADAPTERS}, {"policy": PLAIN}),
    "with all": (
        {"policy": PLAIN, "critic": Headed(PLAIN, HEAD), "teacher": TEACHER},
        {"policy": PLAIN, "critic": Headed(PLAIN, HEAD)},
    ),
}


def assert_same_arrays(one, other):
    """The trees have one structure, and their leaves are the same arrays, not copies."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(x is y for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_split_is_joined_again_and_copies_nothing(name):
    params, expected = CASES[name]
    trained, frozen = split(params)
    assert_same_arrays(trained, expected)
    assert_same_arrays(join(trained, frozen), params)


@pytest.mark.parametrize("name", ["plain", "headed", "a policy"])
def test_without_adapters_and_teacher_nothing_is_frozen(name):
    assert not jax.tree.leaves(split(CASES[name][0])[1])
