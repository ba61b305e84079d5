"""Adapters against loops, against merged weights, and against the files of PEFT."""

import dataclasses
import json
import math
import shutil
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import save_pretrained
from grpo_jax.models.lora import TARGETS, add_adapters, fingerprint, merge, sites
from grpo_jax.models.params import Adapted
from grpo_jax.models.peft import load_adapter, save_adapter
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.trainable import join, split
from grpo_jax.models.transformer import Linear
from grpo_jax.models.weights import load_params, read_json
from grpo_jax.rl.optimizer import init_state

GOLDEN = Path(__file__).parents[1] / "golden/llama"
ADAPTER = GOLDEN / "adapter"  # q_proj, v_proj, o_proj and down_proj with r = 3, by PEFT
# That of GOLDEN. All seven kernels have different shapes.
CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    head_dim=4,
    rope_theta=100.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
POLICY = decoder_policy(CONFIG)
RANK, ALPHA = 3, 6.0


@cache
def base():
    return load_params(GOLDEN, CONFIG)


@cache
def adapted():
    """All seven projections adapted, by random matrices: a B of 0 would hide mistakes."""
    new = add_adapters(base(), jax.random.key(0), rank=RANK, alpha=ALPHA)
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32), new.adapters)
    return new._replace(adapters=random)


def ragged_batch():
    """Prompts of 2 and 5 tokens, and two completions of 4 for each."""
    rng = np.random.default_rng(0)
    mask = np.arange(5) >= np.array([[3], [0]])
    return rng.integers(0, 24, (2, 5), np.int32) * mask, mask, rng.integers(0, 24, (2, 2, 4), np.int32)


@jax.jit
def hidden(params):
    """Hidden states of the batch, compiled once for plain and once for adapted parameters."""
    return POLICY.hidden(params, *ragged_batch())


@jax.jit
def decoded(params):
    """The same token by token, and after the last token."""
    ids, mask, completions = ragged_batch()
    first, decode, cache = POLICY.prefill(params, ids, mask, 2, 5)

    def step(cache, token):
        state, cache = decode(cache, *token)
        return cache, state

    _, states = jax.lax.scan(step, cache, (completions.transpose(2, 0, 1), jnp.arange(4)))
    return jnp.concatenate([jnp.broadcast_to(first[:, None], (1, *states.shape[1:])), states]).transpose(1, 2, 0, 3)


def loss(params):
    """Of what predicts the first completion token, which all projections take part in: half the program to compile."""
    ids, mask, completions = ragged_batch()
    weights = np.random.default_rng(1).normal(size=(2, 1, 1, 16)).astype(np.float32)
    return jnp.sum(weights * POLICY.hidden(params, ids, mask, completions[..., :1]))


# ---- what adapters compute


def test_new_adapters_change_nothing():
    new = add_adapters(base(), jax.random.key(0), rank=RANK, alpha=ALPHA)
    np.testing.assert_array_equal(hidden(new), hidden(base()))


def test_adapters_equal_merged_weights():
    plain, merged = hidden(base()), hidden(jax.jit(merge)(adapted()))
    assert np.abs(merged - plain).max() > 0.1
    np.testing.assert_allclose(hidden(adapted()), merged, atol=2e-5)


def test_decoding_has_the_adapters_too():
    np.testing.assert_allclose(decoded(adapted())[:, :, :4], hidden(adapted()), atol=2e-5)


@pytest.mark.parametrize("in_shape", [(5,), (2, 3)], ids=["one axis", "heads and features"])
def test_linear_layer_against_a_loop(in_shape):
    rng = np.random.default_rng(0)
    x, kernel, bias, a, b = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((4, *in_shape), (*in_shape, 2, 4), (2, 4), (*in_shape, RANK), (RANK, 2, 4))
    )
    expected = np.tile(bias.astype(np.float64), (4, 1, 1))
    for row, *outputs in np.ndindex(4, 2, 4):
        for inputs in np.ndindex(*in_shape):
            weight = kernel[(*inputs, *outputs)] + sum(a[(*inputs, r)] * b[(r, *outputs)] for r in range(RANK))
            expected[(row, *outputs)] += x[(row, *inputs)] * weight
    linear = Linear((2, 4), use_bias=True, in_axes=len(in_shape))
    variables = {"params": {"kernel": kernel, "bias": bias}, "lora": {"a": a, "b": b}}
    np.testing.assert_allclose(jax.jit(linear.apply)(variables, x), expected, atol=1e-5)


def test_merged_kernels_against_a_loop():
    merged = merge(adapted())
    for block, name in sites():
        before, after = (np.asarray(params["layers"][block][name]["kernel"]) for params in (base(), merged))
        a, b = (np.asarray(adapted().adapters["layers"][block][name][matrix]) for matrix in "ab")
        for layer in range(CONFIG.num_hidden_layers):
            change = sum(np.multiply.outer(a[layer, ..., r], b[layer, r]) for r in range(RANK))
            np.testing.assert_allclose(after[layer], before[layer] + ALPHA / RANK * change, atol=1e-5, err_msg=name)
    assert merged["embedding"] is base()["embedding"]


def test_merging_keeps_the_dtype_of_the_base():
    half = adapted()._replace(base=load_params(GOLDEN, CONFIG, dtype=jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(merge, half))} == {jnp.dtype("bfloat16")}


# ---- what is trained


def test_gradients_are_those_of_the_product():
    trained, frozen = split(adapted())
    gradients = jax.jit(jax.grad(lambda trained: loss(join(trained, frozen))))(trained)
    assert jax.tree.structure(gradients) == jax.tree.structure(adapted().adapters)
    of_kernels = jax.jit(jax.grad(loss))(merge(adapted()))
    for block, name in sites():
        a, b = (np.asarray(trained["layers"][block][name][matrix]) for matrix in "ab")
        layers = a.shape[0]
        left, right = a.reshape(layers, -1, RANK), b.reshape(layers, RANK, -1)
        of_kernel = np.asarray(of_kernels["layers"][block][name]["kernel"]).reshape(*left.shape[:2], right.shape[2])
        expected = {"a": of_kernel @ right.swapaxes(1, 2), "b": left.swapaxes(1, 2) @ of_kernel}
        for matrix, gradient in gradients["layers"][block][name].items():
            difference = gradient - (ALPHA / RANK * expected[matrix]).reshape(gradient.shape)
            assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(gradient), (name, matrix)


def test_split_and_join_are_inverse_and_copy_nothing():
    for params in (base(), adapted()):
        trained, frozen = split(params)
        joined = join(trained, frozen)
        assert jax.tree.structure(joined) == jax.tree.structure(params)
        assert all(x is y for x, y in zip(jax.tree.leaves(joined), jax.tree.leaves(params), strict=True))
    assert split(base()) == (base(), None)
    assert split(adapted())[0] is adapted().adapters


# ---- new adapters


def test_adapters_start_as_those_of_peft():
    new = add_adapters(base(), jax.random.key(0), rank=40, alpha=10.0)
    assert new.base is base()
    assert new.scale == 0.25
    seen = []
    for block, name in sites():
        kernel, adapter = (jax.tree.map(np.asarray, tree["layers"][block][name]) for tree in (base(), new.adapters))
        inputs = {"o_proj": 16, "down_proj": 20}.get(name, 16)
        assert not adapter["b"].any()
        assert adapter["a"].size * adapter["b"].size == kernel["kernel"].size * 40**2 * CONFIG.num_hidden_layers
        # U(−1/√in, 1/√in), which is Kaiming's with a = √5; 640 draws or more for each layer come close to both ends.
        assert 0.97 < np.abs(adapter["a"]).max() * inputs**0.5 <= 1
        assert abs(adapter["a"].mean()) * inputs**0.5 < 0.1
        seen += [row.flatten()[:5].tolist() for row in adapter["a"]]
    assert len({tuple(start) for start in seen}) == len(seen)  # no two layers or projections alike


def test_only_targets_have_adapters():
    new = add_adapters(base(), jax.random.key(0), rank=1, alpha=1.0, targets=("v_proj", "up_proj"))
    names = [(block, name) for block, modules in new.adapters["layers"].items() for name in modules]
    assert names == [("attention", "v_proj"), ("mlp", "up_proj")]


@pytest.mark.parametrize(
    ("options", "named"), [({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha"), ({"targets": ()}, "target")]
)
def test_adapters_that_cannot_be(options, named):
    with pytest.raises(UsageError, match=named):
        add_adapters(base(), jax.random.key(0), **({"rank": 2, "alpha": 1.0} | options))


# ---- folders of PEFT


def test_files_of_peft_come_back_bit_by_bit(tmp_path):
    save_adapter(tmp_path / "out", load_adapter(ADAPTER, base()), base="llama")
    saved, original = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", ADAPTER))
    assert saved.keys() == original.keys()
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensor, original[name], strict=True)
    written, read = (read_json(folder / "adapter_config.json") for folder in (tmp_path / "out", ADAPTER))
    assert set(written.pop("target_modules")) == set(read["target_modules"])
    assert written.pop("task_type") == "CAUSAL_LM"  # so that PEFT's AutoPeftModelForCausalLM takes it
    assert written == {name: read[name] for name in written}


@pytest.mark.parametrize("targets", [TARGETS, ("k_proj",), ("gate_proj", "o_proj")])
def test_adapters_come_back_bit_by_bit(tmp_path, targets):
    layers = {}
    for block, name in sites(targets):
        layers.setdefault(block, {})[name] = adapted().adapters["layers"][block][name]
    params = Adapted(base(), {"layers": layers}, jnp.float32(0.1))  # no float32 is a tenth
    save_adapter(tmp_path / "out", params, base="llama")
    loaded = load_adapter(tmp_path / "out", base())
    assert loaded.base is base()
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), loaded, params)


@pytest.fixture
def adapter(tmp_path):
    """A copy of PEFT's adapter, to change."""
    return shutil.copytree(ADAPTER, tmp_path / "adapter")


def configure(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(read_json(file) | changes))


@pytest.mark.parametrize(("use_rslora", "expected"), [(False, 12 / 3), (True, 12 / 3**0.5)])
def test_scale(adapter, use_rslora, expected):
    configure(adapter, use_rslora=use_rslora)
    assert load_adapter(adapter, base()).scale == np.float32(expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        # These take their start out of the base, so the base in the folder is not what was adapted.
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 4}, r"q_proj.lora_A.weight must be floats of shape \(4, 16\)"),
    ],
)
def test_options_of_peft_that_are_refused(adapter, changes, named):
    configure(adapter, **changes)
    with pytest.raises(UsageError, match=named) as error:
        load_adapter(adapter, base())
    assert "\n" not in str(error.value)


Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(Q_PROJ), f"{Q_PROJ} .* is missing"),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].T.copy()}), Q_PROJ),
        (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].astype(np.int8)}), "I8"),
        (lambda tensors: tensors.update({Q_PROJ.replace("q_proj", "qkv_proj"): tensors[Q_PROJ]}), "qkv_proj"),
        (lambda tensors: tensors.clear(), "does not have"),
    ],
    ids=["missing", "transposed", "integers", "unknown module", "nothing"],
)
def test_tensors_that_do_not_fit(adapter, change, named):
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=named) as error:
        load_adapter(adapter, base())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_folders_that_lack_a_file(adapter, file):
    (adapter / file).unlink()
    with pytest.raises(UsageError, match=file) as error:
        load_adapter(adapter, base())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("alpha", [None, "x", True, [1], math.nan, math.inf, 10**400])
def test_an_alpha_that_is_no_number_is_refused(adapter, alpha):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": alpha}))
    with pytest.raises(UsageError, match=r"lora_alpha in .* must be a finite number"):
        load_adapter(adapter, base())


def test_a_folder_in_use_is_kept(adapter):
    with pytest.raises(UsageError, match="exists"):
        save_adapter(adapter, adapted(), base="llama")
    assert (adapter / "golden.npz").exists()


def test_other_sizes_than_the_bases_are_refused(adapter):
    wide = dataclasses.replace(CONFIG, hidden_size=32)
    shapes = jax.eval_shape(decoder_policy(wide).init, jax.random.key(0))
    with pytest.raises(UsageError, match=r"\(3, 32\)"):
        load_adapter(adapter, shapes)


def test_adapters_where_plain_parameters_are_needed_are_refused(tmp_path):
    for use in (
        lambda: save_pretrained(tmp_path / "out", adapted(), CONFIG),
        lambda: add_adapters(adapted(), jax.random.key(0), rank=1, alpha=1.0),
        lambda: init_state(adapted(), optax.sgd(1.0)),
    ):
        with pytest.raises(UsageError, match="have adapters"):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"targets": ("q_proj", "vproj")}, {"targets": ()}, {"alpha": float("inf")}])
def test_adapters_that_make_no_sense_are_refused(options):
    with pytest.raises(UsageError, match="of LoRA"):
        add_adapters(base(), jax.random.key(0), **{"rank": 1, "alpha": 1.0} | options)


def test_a_fingerprint_tells_weights_that_were_trained_further():
    assert fingerprint(base()) == fingerprint(load_params(GOLDEN, CONFIG))
    assert fingerprint(base()) != fingerprint(merge(adapted()))
