"""config.json of Hugging Face: fields, what families leave unsaid, what is refused, and the way back."""

import math
from dataclasses import replace

import pytest
from tiny import GOLDEN, refused

from experiments.new_models import config_to_huggingface
from grpo_jax.models.config import ExpertsConfig, ModelConfig, RopeScaling
from grpo_jax.models.files.families import config_from_huggingface, text_config
from grpo_jax.models.files.weights import read_json

CONFIG_JSON = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
WINDOW = {"sliding_window": 5}
QWEN_WINDOW = WINDOW | {"model_type": "qwen2", "use_sliding_window": True}
MOE = {"model_type": "qwen3_moe"}


def test_config_of_earlier_transformers():
    expected = ModelConfig(100, 32, 64, 3, 4, 2, 8, rope_theta=5000.0, rms_norm_eps=1e-5, remat="layer")
    assert config_from_huggingface(CONFIG_JSON, remat="layer") == expected


@pytest.mark.parametrize("scaling", [{}, LLAMA3], ids=["plain", "llama3"])
def test_rotations_of_earlier_and_later_transformers(scaling):
    renamed = {name: value for name, value in CONFIG_JSON.items() if not name.startswith("rope_")}
    renamed["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0} | scaling
    config = config_from_huggingface(renamed)
    assert config == config_from_huggingface(CONFIG_JSON | {"rope_scaling": scaling or None})
    assert config.rope_theta == 5000.0
    assert config.rope_scaling == (RopeScaling("llama3", 8.0, 8192, 1.0, 4.0) if scaling else None)


def window(size, layers=None):
    return {"sliding_window": size, "sliding_layers": layers}


def only(*names):
    """Returns all fields of biases and norms, of which these are true."""
    return {name: name in names for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")}


def experts(*fields, norm_topk_prob=False):
    return {"experts": ExpertsConfig(*fields, norm_topk_prob=norm_topk_prob)}


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
YARNED = RopeScaling("yarn", 8.0, 8192)

# Where a file does not say something, it means what transformers takes it to mean.
FIELDS = [
    ({"model_type": "mistral"} | WINDOW, window(5)),
    ({"model_type": "mistral", "sliding_window": None}, window(None)),
    ({"model_type": "mistral"}, window(4096)),
    (WINDOW, window(None)),  # Llama has none
    (QWEN_WINDOW | {"use_sliding_window": False}, window(None)),
    (QWEN_WINDOW | {"max_window_layers": 0}, window(5)),
    (QWEN_WINDOW | {"max_window_layers": 1}, window(5, (1, 2))),
    (QWEN_WINDOW, window(None)),  # from layer 28 on
    (QWEN_WINDOW | {"model_type": "qwen3", "max_window_layers": 2}, window(5, (2,))),
    (QWEN_WINDOW | {"model_type": "qwen3_moe", "max_window_layers": 2}, window(5)),
    (WINDOW | {"model_type": "mixtral"}, window(5)),
    ({"model_type": "mixtral"}, window(None)),
    (QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, window(5, (0,))),
    ({"attention_bias": True}, only("qkv_bias", "o_bias")),
    ({"mlp_bias": True}, only("mlp_bias")),
    ({"model_type": "mistral", "attention_bias": True, "mlp_bias": True}, only()),  # it has none
    ({"model_type": "qwen2", "mlp_bias": True}, only("qkv_bias")),
    ({"model_type": "qwen3", "attention_bias": True}, only("qk_norm", "qkv_bias", "o_bias")),
    ({"model_type": "qwen3"}, only("qk_norm") | {"head_dim": 128, "experts": None}),
    ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
    ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
    ({"head_dim": 16}, {"head_dim": 16}),
    ({"rope_scaling": {"type": "default"}}, {"rope_theta": 5000.0, "rope_scaling": None}),
    (MOE, experts(128, 8, 768)),
    (MOE | {"num_experts": 4, "num_experts_per_tok": 2}, experts(4, 2, 768)),
    (MOE | {"num_local_experts": 16, "norm_topk_prob": True}, experts(16, 8, 768, norm_topk_prob=True)),
    (MOE | {"mlp_only_layers": [], "decoder_sparse_step": 1}, experts(128, 8, 768)),
    (
        MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2},
        {"experts": None, "dense_layers": ()},
    ),
    ({"model_type": "mixtral", "rope_theta": None}, experts(8, 2, 64, norm_topk_prob=True) | {"rope_theta": 1e6}),
    ({"model_type": "mixtral", "num_local_experts": 3}, experts(3, 2, 64, norm_topk_prob=True)),
    ({"model_type": "olmo3"}, window(4096)),
    (
        {"model_type": "olmo3", "rope_theta": 500000.0, "rope_scaling": YARN, "num_hidden_layers": 4},
        window(4096, (0, 1, 2)) | {"rope_scaling": YARNED, "rope_local_base_freq": 500000.0},
    ),
    # transformers reads it only if all layers have the same scaling
    ({"model_type": "olmo3", "rope_scaling": YARN | {"truncate": False}}, {"rope_scaling": YARNED}),
    ({"rope_scaling": YARN | {"truncate": False}}, {"rope_scaling": YARNED._replace(truncate=False)}),
    ({"model_type": "granite", "attention_multiplier": 0.1}, {"attention_multiplier": 0.1, "logits_scaling": 1.0}),
    ({"logits_scaling": 2.0}, {"logits_scaling": 1.0}),  # Llama has none
    (
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
        {"rope_scaling": RopeScaling("yarn", 8.0, 8192, mscale=1.0, mscale_all_dim=0.7)},
    ),
    (
        {"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 16384},
        {"rope_scaling": RopeScaling("yarn", 2.0, 8192)},
    ),
    # SOLAR-0-70b
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096},
        {"rope_scaling": RopeScaling("dynamic", 2.0, 4096)},
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}},
        {"rope_scaling": RopeScaling("dynamic", 2.0, 2048)},  # of max_position_embeddings
    ),
    ({"model_type": "glm4"}, only("qkv_bias") | {"partial_rotary_factor": 0.5, "norms": "around"}),
    ({"model_type": "glm4", "attention_bias": False}, only()),
    ({"model_type": "phi3"}, only() | window(None) | {"partial_rotary_factor": 1.0}),
    # Phi-4-mini
    (
        {"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 262144}
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1, 1.5, 2]}},
        window(262144)
        | {"partial_rotary_factor": 0.75}
        | {"rope_scaling": RopeScaling("longrope", 32.0, 4096, short_factor=(1.0,) * 3, long_factor=(1, 1.5, 2))},
    ),
]


@pytest.mark.parametrize(("change", "fields"), FIELDS)
def test_fields(change, fields):
    file = {name: value for name, value in (CONFIG_JSON | change).items() if name != "rope_theta" or value}
    config = config_from_huggingface(file)
    assert {name: getattr(config, name) for name in fields} == fields


# Field -> values that no model has.
BAD = {
    "model_type": ["gpt2", "phimoe", None],
    "num_hidden_layers": [10**9, -1],
    "hidden_size": ["x", 10**30],
    "num_attention_heads": [0],
    "num_key_value_heads": [3],
    "head_dim": [0],
    "rope_theta": ["x", -5, math.nan],
    "rms_norm_eps": [-1000],
    "max_position_embeddings": ["long"],
    "tie_word_embeddings": ["no"],
    "hidden_act": ["gelu_fast"],
    "is_causal": [False],
    "transformers_weights": ["other.safetensors"],
    "partial_rotary_factor": [0.5],
    "quantization_config": [{"bits": 4}],
}
LISTS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
# Family, further fields, and what the sentence names.
BAD_IN_FAMILIES = [
    ("llama", {"hidden_size": 63}, "attention heads"),
    ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok"),
    ("qwen3_moe", {"num_experts": "x"}, "num_experts"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("gemma3", {"text_config": {}}, "towers for images"),
    ("pixtral", {"vision_config": {"depth": 2}}, "towers for images"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "transformers cannot read config.json"),
    ("olmo3", {"rope_parameters": {"sliding_attention": YARN | {"rope_theta": 10.0}}}, "layers with a window"),
    # transformers would take its defaults. OLMo 3 was saved so by early versions of transformers 5.
    ("olmo3", {"rope_parameters": YARN | {"rope_theta": 10.0}}, "only .* for full_attention and sliding_attention"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 10.0}}, "only .* for full_attention and sliding_attention"),
    ("qwen3", {"rope_parameters": {"full_attention": YARN | {"rope_theta": 10.0}}}, "only .* for all layers"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling"),
    ("granite", {"residual_multiplier": "x"}, "residual_multiplier"),
    ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("glm4", {"head_dim": 10}, "head_dim"),
    ("glm4", {"rope_scaling": {"type": "proportional", "factor": 2.0}}, "proportional"),
    ("glm4_moe", {}, "glm4_moe"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
    ("phi3", {"embd_pdrop": 0.1}, "embd_pdrop"),
    ("phi3", {"attention_dropout": 0.1}, "attention_dropout"),
    ("phi3", {"rope_scaling": {"type": "su"} | LISTS}, "original_max_position_embeddings"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "longrope"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "long_factor"),
    ("phi3", {"rope_scaling": {"type": "longrope"} | LISTS | {"long_factor": [1.0] * 3}}, "long_factor"),
    ("phi3", {"rope_scaling": {"type": "longrope"} | LISTS | {"long_factor": [0.0] * 4}}, "long_factor"),
    ("smollm3", {"no_rope_layers": [1]}, "transformers cannot read config.json"),
    ("smollm3", {"no_rope_layer_interval": 0}, "transformers cannot read config.json"),
    ("mistral", {"sliding_window": -1}, "sliding_window"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "layer_types"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1.5}, "max_window_layers"),
]
# Kind of rotary scaling, its fields, and what the sentence names.
BAD_SCALINGS = [
    ("proportional", {"factor": 2.0}, "proportional"),
    ("linear", {}, "factor"),
    ("linear", {"factor": -2.0}, "factor"),
    ("dynamic", {}, "factor"),
    ("longrope", {"factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}, "longrope has 8 numbers"),
    ("llama3", {"factor": 8.0}, "low_freq_factor"),
    ("yarn", {"factor": 0.0}, "factor"),
]


def refusals():
    """Yields a change of the file, and what the sentence names."""
    yield from (({field: value}, field) for field, values in BAD.items() for value in values)
    yield from (({"model_type": family} | change, words) for family, change, words in BAD_IN_FAMILIES)
    yield from (({"rope_scaling": {"type": kind} | change}, words) for kind, change, words in BAD_SCALINGS)
    yield {"rope_scaling": "llama3"}, "rope_parameters"


@pytest.mark.parametrize(("change", "words"), list(refusals()))
def test_a_file_that_is_not_supported_is_refused(change, words):
    with refused(words):
        config_from_huggingface(CONFIG_JSON | change)


FULL = {"rope_type": "proportional", "rope_theta": 10.0, "factor": 2.0}
BAD_GEMMA4 = [
    ({"vocab_size_per_layer_input": 4}, "vocab_size_per_layer_input"),
    ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config"),
    ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 4}, "per_layer_config"),
    ({"layer_types": ["chunked_attention", "full_attention"] * 4}, "layer_types"),
    ({"num_kv_shared_layers": 7}, "num_kv_shared_layers"),
    ({"num_kv_shared_layers": 8}, "num_kv_shared_layers"),
    ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
    ({"enable_moe_block": True, "num_experts": 4}, "enable_moe_block needs top_k_experts, moe_intermediate_size"),
    ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}, "use_double_wide"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ({"rope_parameters": {"full_attention": FULL, "sliding_attention": FULL | {"rope_type": "default"}}}, "scaling"),
    ({"per_layer_config": {str(i): {"head_dim": 7} for i in range(1, 8, 2)}}, "even head_dim"),
]


@pytest.mark.parametrize(("change", "words"), BAD_GEMMA4)
def test_a_gemma4_that_is_not_supported_is_refused(change, words):
    with refused(words):
        config_from_huggingface(read_json(GOLDEN / "gemma4_small" / "config.json") | change)


def test_missing_sizes_default_as_in_transformers():
    """The config.json of Gemma 3 on the hub leaves out many sizes of its text model."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = config_from_huggingface(text_config({"model_type": "gemma3", "text_config": text}))
    sizes = config.vocab_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert sizes == (262_208, 8, 4, 256)
    assert config.rope_scaling == RopeScaling("linear", 8.0, 131_072)


NOT_FOR_TRANSFORMERS_4 = ("gemma4", "qwen3_5", "olmo3")  # OLMo 3 had one theta


@pytest.mark.parametrize("name", sorted(file.parent.name for file in GOLDEN.glob("*/config.json")))
def test_a_made_file_says_what_transformers_wrote(name):
    original = read_json(GOLDEN / name / "config.json")
    config = config_from_huggingface(original)
    made = config_to_huggingface(config)
    assert config_from_huggingface(made) == config
    before = {key: value for key, value in made.items() if key != "rope_parameters"}  # as transformers 4 reads it
    assert config_from_huggingface(before) == config or made["model_type"].startswith(NOT_FOR_TRANSFORMERS_4)
    # Mistral without a window is Llama.
    same_family = made["model_type"] == original["model_type"]
    assert same_family or (name, made["model_type"]) == ("mistral", "llama")
    shared = made.keys() & original.keys() - (set() if same_family else {"architectures", "model_type"})
    if original.get("decoder_sparse_step", 1) > 1:  # a made file lists the layers without experts
        shared -= {"decoder_sparse_step", "mlp_only_layers"}
    assert all(says(made[key], original[key]) for key in shared)


def test_a_config_without_family_becomes_the_first():
    config = config_from_huggingface(CONFIG_JSON | {"model_type": "smollm3", "no_rope_layers": [1, 1, 1]})
    assert config_to_huggingface(config)["model_type"] == "smollm3"
    assert config_to_huggingface(replace(config, model_type=None))["model_type"] == "llama"


def says(made, original):
    """Tells whether a value says all that the original does, and maybe what transformers derives by itself."""
    if not isinstance(original, dict):
        return made == original
    return original.keys() <= made.keys() and all(says(made[key], value) for key, value in original.items())


@pytest.mark.parametrize(
    "change", [{"o_bias": True}, {"unrotated_layers": (1,), "qk_norm": True}, {"qk_norm": True, "mlp_bias": True}]
)
def test_configurations_that_no_architecture_has_are_refused(change):
    with refused("combination"):
        config_to_huggingface(ModelConfig(vocab_size=24, **change))
