"""Reward models: head, preferences, training, folders, and a model as a reward. Tiny models throughout."""

import copy
import json
from functools import partial
from itertools import zip_longest
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_helpers import assert_close, some_pairs
from scipy import special
from tiny import random_params, randomly_adapted, refused, save_tiny_model, slow_unless, tiny_config, whole_prompts

from experiments.tasks import arithmetic
from grpo_jax.data.preferences import (
    Preference,
    encode_preferences,
    parse_transcripts,
    read_preferences,
    split_preferences,
)
from grpo_jax.data.types import Completion, Prompt, Turn
from grpo_jax.models.chat import Chat, digest_of_template
from grpo_jax.models.decoder import heads
from grpo_jax.models.decoder.heads import add_head
from grpo_jax.models.files.families import config_from_huggingface
from grpo_jax.models.files.weights import load_params, read_json
from grpo_jax.models.huggingface import load_pretrained, load_tokenizer, save_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.offline.pairs import evaluate_pairs, pad_pairs, pair_weights, reward_model_objective
from grpo_jax.rewards.learned import RewardModel, load_reward_model, reward_function, save_reward_model
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.progress import programs_so_far
from grpo_jax.statistics import calibration

GOLDEN = Path(__file__).parents[1] / "golden/llama"

VOCAB = arithmetic.VOCAB_SIZE
CONFIG = tiny_config(VOCAB)
POLICY = decoder_policy(CONFIG)
_, PARAMS = add_head(CONFIG, random_params(CONFIG))
LOOKING = PARAMS._replace(head=jax.random.normal(jax.random.key(1), (16,)))  # a head that is not zero


PROMPTS = [[3, 1, 4, 1], [5, 9]]
COMPLETIONS = [[[2, 6], [], [5, 3]], [[5, 8, 9, 7], [9, 3], [2, 3, 8, 4]]]  # texts have 4 or 6 tokens


def padded(texts, width, side):
    """ids and mask `[..., width]`; "middle" has padding everywhere."""
    noise = np.random.default_rng(1)
    ids, mask = noise.integers(0, VOCAB, (len(texts), width)).astype(np.int32), np.zeros((len(texts), width), bool)
    for i, text in enumerate(texts):
        free = width - len(text)
        places = {
            "left": np.arange(free, width),
            "right": np.arange(len(text)),
            "middle": np.sort(noise.choice(width, len(text), replace=False)),
        }[side]
        ids[i, places], mask[i, places] = text, True
    return ids, mask


# ---- the head


def test_padding_changes_no_score_and_values_score_prefixes():
    @jax.jit
    def last_state(text):
        """Of a text alone: no padding, no group, no split into prompt and completion."""
        nothing = jnp.zeros((1, 1, 1), jnp.int32)
        return POLICY.hidden(LOOKING.decoder, whole_prompts(text[None]), nothing)[0, 0, 0]

    def score(prompt, text):
        return float(last_state(jnp.array(prompt + text)) @ LOOKING.head)

    pairs = list(zip(PROMPTS, COMPLETIONS, strict=True))
    expected = np.array([[score(prompt, text) for text in group] for prompt, group in pairs])
    assert np.ptp(expected) > 1
    for side in ("left", "right", "middle"):
        prompt = PromptTokens(*padded(PROMPTS, 9, side))
        arrays = (np.stack(part) for part in zip(*(padded(group, 8, side) for group in COMPLETIONS), strict=True))
        actual = heads.judge_groups(CONFIG, LOOKING, prompt, *arrays)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    arrays = [np.stack(part) for part in zip(*(padded(group, 4, "right") for group in COMPLETIONS), strict=True)]
    values = jax.jit(partial(heads.values, POLICY))(LOOKING, PromptTokens(*padded(PROMPTS, 4, "left")), *arrays)
    assert values.shape == (2, 3, 5)
    for i, j in np.ndindex(2, 3):
        beginnings = [COMPLETIONS[i][j][:t] for t in range(0, len(COMPLETIONS[i][j]) + 1, 2)]
        of_beginnings = [score(PROMPTS[i], text) for text in beginnings]
        np.testing.assert_allclose(values[i, j, : 2 * len(beginnings) : 2], of_beginnings, rtol=2e-5, atol=2e-5)


# ---- preferences


def test_transcripts_are_cut_where_they_part():
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: So?\n\nAssistant:"
    assert parse_transcripts(f"{start} Yes, a", f"{start} Yes, b") == Preference(start, " Yes, a", " Yes, b")
    pair = parse_transcripts(f"{start} Yes ", f"{start} No", chat=True)
    roles = [("user", "Hi"), ("assistant", "Hello"), ("user", "So?")]
    assert pair == Preference([{"role": role, "content": text} for role, text in roles], "Yes", "No")
    assert parse_transcripts(f"{start} a", f"{start} \n") == "with an empty answer"
    assert parse_transcripts(f"{start} a", f"{start} a") == "with equal answers"
    assert parse_transcripts(f"{start} a", f"{start} b\n\nHuman: c") == "with turns after the answer"
    assert parse_transcripts("Hi", "Ho") == "without a common prompt"


def test_rows_are_read_split_and_counted(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0", "margin": i} for i in range(40)]
    rows += [{"prompt": "0+0=", "chosen": "0", "rejected": "0"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preferences, dropped = read_preferences(tmp_path / "rows.jsonl")
    assert dropped == {"with equal answers": 1}
    assert preferences[3] == Preference("3+1=", "4", "0", 3.0)
    training, heldout = split_preferences(preferences, 0.3)
    assert sorted([*training, *heldout]) == sorted(preferences)
    assert split_preferences(preferences[::-1], 0.3)[1] == heldout[::-1]  # by the prompt alone

    arithmetic.TEXT.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    chat = Chat(tokenizer, (arithmetic.EOS_ID,))
    pairs = encode_preferences(chat, preferences, max_prompt_tokens=3, max_tokens=1, judged=True)
    assert "".join(tokenizer.convert_ids_to_tokens(pairs.prompts[-1])) == "+1="
    assert {len(ids) for answers in pairs.answers for ids in answers} == {1}
    assert pairs.notes == ("40 of 40 prompts lost their beginning", "31 of 40 pairs have an answer that lost its end")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    with refused("has no column rejected"):
        read_preferences(tmp_path / "bad.jsonl")


# ---- loss and training


PAIRS, OBJECTIVE = some_pairs(64, VOCAB), reward_model_objective(CONFIG, center_coef=0.01)


def test_pair_gradients_are_those_of_bradley_terry():
    """∂ −log σ(d − m) = −σ(m − d) ∂d with d = r_c − r_r; and ∂ c s² = 2 c s ∂s with s = r_c + r_r."""
    pairs = some_pairs(5, VOCAB)._replace(margins=[0.0, 0.5, 1.0, 0.0, 2.0])
    batch = pad_pairs(pairs, np.arange(6), (3, 4))  # the sixth is no pair
    batch = batch._replace(weights=pair_weights(batch.completion_mask))
    np.testing.assert_allclose(batch.weights, [0.2] * 5 + [0])
    gradient = jax.jit(jax.value_and_grad(partial(OBJECTIVE.loss_fn, batch=batch), has_aux=True))
    (loss, logs), grads = gradient(LOOKING)
    rewards, pull = jax.vjp(jax.jit(lambda params: heads.judge_texts(POLICY, params, *batch[:3])[:5]), LOOKING)
    chosen, rejected = np.asarray(rewards, np.float64).T
    slope, total = -special.expit(np.array(pairs.margins) - chosen + rejected), 0.02 * (chosen + rejected)
    outer = np.stack([total + slope, total - slope], -1) / 5
    assert_close(grads, pull(outer.astype(np.float32))[0], rtol=1e-3, atol=1e-5)
    by_hand = -special.log_expit(chosen - rejected - pairs.margins) + 0.01 * (chosen + rejected) ** 2
    assert float(loss) == pytest.approx(by_hand.mean(), rel=1e-5)
    accuracy, weight = logs.means["accuracy"]
    assert float(accuracy / weight) == pytest.approx(np.mean(chosen > rejected))
    (_, ties), _ = gradient(PARAMS)  # the head is zero at the start
    assert ties.means["accuracy"][0] / ties.means["accuracy"][1] == 0.5


@pytest.mark.slow
def test_adapters_below_the_head_are_merged():
    params = LOOKING._replace(decoder=randomly_adapted(LOOKING.decoder))
    arrays = pad_pairs(PAIRS, np.arange(4), (3, 4))[:3]
    whole, merged, without = (
        heads.judge_groups(CONFIG, p, *arrays) for p in (params, heads.merge_decoder(params), LOOKING)
    )
    np.testing.assert_allclose(whole, merged, rtol=1e-4, atol=1e-5)
    assert np.abs(whole - without).max() > 0.1


# ---- evaluation


def test_ties_count_half_and_calibration_compares_frequencies():
    scores = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [3.0, 0.0]] * 5)
    actual = evaluate_pairs(scores, bins=2)
    assert actual.accuracy.mean == pytest.approx(2.5 / 4)
    assert actual.accuracy.low < 2.5 / 4 < actual.accuracy.high
    assert actual.nll.mean == pytest.approx(-np.mean(special.log_expit([1, -1, 0, 3])))
    # Sorted by confidence: ½ ×5 and 5 of σ(1), one half of them right; then 5 more of σ(1), and σ(3) ×5.
    assert actual.calibration.sizes.tolist() == [10, 10]
    predicted = [(0.5 + special.expit(1)) / 2, special.expit([1, 3]).mean()]
    np.testing.assert_allclose(actual.calibration.predicted, predicted)
    assert {"accuracy_low", "nll_high", "calibration_error"} <= actual.numbers().keys()
    outcomes = np.concatenate([np.arange(50) < 30, np.arange(50) < 35])  # of 0.6 and 0.7, where 0.6 and 0.9 were said
    assert calibration(np.repeat([0.6, 0.9], 50), outcomes, bins=2).error == pytest.approx(0.1)
    assert calibration(np.array([0.5]), np.array([1]), bins=10).error == 0.5
    with refused("no predictions"):
        calibration(np.zeros(0), np.zeros(0))


# ---- folders


def test_what_transformers_wrote_scores_as_it_does_there():
    golden = np.load(GOLDEN / "classifier/golden.npz")
    config, params = load_headed(GOLDEN / "classifier")
    ids = golden["ids"]
    mask = ids != 0
    prompt = PromptTokens(ids[:, :7], mask[:, :7])
    actual = heads.judge_groups(config, params, prompt, ids[:, None, 7:], mask[:, None, 7:])
    np.testing.assert_allclose(actual, golden["logits"], rtol=1e-4, atol=1e-4)


def load_headed(folder):
    """Configuration and parameters, of a folder without a tokenizer."""
    config = heads.without_vocabulary(config_from_huggingface(read_json(folder / "config.json")))
    return config, load_params(folder, config, head=True)


# Of each family that transformers has a classifier of; without torch no program is compiled.
FAMILIES = ["llama", "mistral_window", "qwen2", "qwen3", "smollm3_window", "olmo2_biases", "olmo3"]
FAMILIES += ["phi4_mini", "glm4", "gemma", "gemma2_untied", "gemma3_capped", "qwen3_5"]
FAMILIES += ["qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "gpt_oss"]


@pytest.mark.parametrize("name", slow_unless(("llama", "gemma3_capped"), FAMILIES))
def test_transformers_reads_a_saved_reward_model(name, tmp_path):
    source = GOLDEN.parent / name
    config = config_from_huggingface(read_json(source / "config.json"))
    config, params = add_head(config, load_params(source, config))
    params = params._replace(head=jax.random.normal(jax.random.key(0), params.head.shape))
    ids = np.random.default_rng(0).integers(3, 24, (3, 12)).astype(np.int32)
    folder = save_pretrained(tmp_path / "out", params, config, source=source)
    _, again = load_headed(folder)
    assert params_sha256(again) == params_sha256(params)
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    assert model.config.num_labels == 1
    tokens = torch.tensor(ids).long()
    tokens = torch.nn.functional.pad(tokens, (0, 4), value=model.config.pad_token_id)  # it finds the end itself
    with torch.no_grad():
        expected = model(tokens, attention_mask=(tokens != model.config.pad_token_id).long()).logits.numpy()
    mask = np.ones_like(ids, bool)
    actual = heads.judge_groups(
        config, params, PromptTokens(ids[:, :5], mask[:, :5]), ids[:, None, 5:], mask[:, None, 5:]
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


# Families without a classifier in transformers
@pytest.mark.parametrize("name", ["granite", "gemma4", "qwen3_5_moe"])
def test_reward_models_that_nothing_loads_are_refused(name, tmp_path):
    source = GOLDEN.parent / name
    config = config_from_huggingface(read_json(source / "config.json"))
    with refused(f"no class for reward models of {read_json(source / 'config.json')['model_type']}"):
        save_pretrained(tmp_path / "out", add_head(config, load_params(source, config))[1], config, source=source)
    assert not (tmp_path / "out").exists()


# ---- as a reward


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", arithmetic.TEXT)


@pytest.fixture(scope="module")
def reward_model(policy_folder, tmp_path_factory):
    """Loaded from a folder, as a user would."""
    tiny = load_pretrained(policy_folder)
    model = RewardModel(CONFIG, LOOKING, tiny.tokenizer, tiny.eos_ids, tiny.folder)
    folder = save_reward_model(tmp_path_factory.mktemp("reward") / "model", model)
    loaded = load_reward_model(folder)
    assert params_sha256(loaded.params) == params_sha256(LOOKING)
    return loaded


def test_groups_batches_and_ids_change_no_reward(reward_model):
    texts = ["1", "12", "123", "1", "", "9" * 40]
    prompts = ["1+1=", "1+1=", "12+3=", "12+3=", "12+3=", "12+3="]
    rows = [{"prompt": prompt} for prompt in prompts]
    alone = [reward_model([row], [text])[0] for row, text in zip(rows, texts, strict=True)]
    assert len(set(np.round(alone, 3))) == 6
    for size in (1, 2, 64):
        actual = reward_function(reward_model, batch_size=size)(rows, texts)
        np.testing.assert_allclose(actual, alone, rtol=1e-4, atol=1e-4)
    # Ids that spell the text are taken as they are, others not.
    ids = reward_model.tokenizer.encode("12", add_special_tokens=False)
    right, wrong = (Completion("12", x) for x in (ids, ids[:1]))
    np.testing.assert_allclose(reward_model([rows[1]] * 2, [right, wrong]), [alone[1]] * 2, rtol=1e-4, atol=1e-4)
    cut = reward_function(reward_model, max_tokens=2, max_prompt_tokens=8)(rows[2:4], ["123", "12"])
    assert cut[0] == pytest.approx(cut[1])
    assert reward_model([], []) == []


@pytest.fixture
def chatting(reward_model, tmp_path):
    """The reward model with a template in which the roles user, tool and assistant are 1, 3 and 2."""
    tokenizer = copy.deepcopy(reward_model.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ {'user': '1', 'tool': '3'}.get(m.role, '2') }}{{ m.content }}="
    tokenizer.chat_template += "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": arithmetic.EOS_ID}))
    return reward_model._replace(tokenizer=tokenizer, folder=tmp_path)


USER = {"role": "user", "content": "3+4"}
# The policy has another template than the reward model.
IN_CHAT = {"prompt": Prompt("the policy's own template", [USER], template="another")}


def score_of(tokenizer, messages):
    """Returns the score of AutoModelForSequenceClassification: at the last token that is not padding, or EOS here."""
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids[-1] == arithmetic.EOS_ID
    ids = np.array(ids[:-1], np.int32)[None]
    nothing = np.zeros((1, 1, 1), np.int32)
    return float(heads.judge_groups(CONFIG, LOOKING, whole_prompts(ids), nothing, nothing > 0)[0, 0])


def episode(role, *texts):
    """Returns an episode of the policy and an environment, whose observations have the policy's delimiters."""
    messages = [{"role": role, "content": text} for text in texts[1::2]]
    heard = [(Completion(f"9{message['content']}9"), None, message) for message in messages]
    turns = [Turn(Completion(text), *rest) for text, rest in zip_longest(texts[::2], heard, fillvalue=())]
    return Completion("".join(texts), turns=turns)


ROLES = [("user", False, "user"), ("tool", False, "tool"), ("tool", True, "user")]


@pytest.mark.parametrize(("role", "is_refused", "read"), ROLES)
def test_an_episode_is_read_turn_by_turn(chatting, role, is_refused, read):
    tokenizer = chatting.tokenizer
    if is_refused:
        refusal = "{{ raise_exception('no tools') if messages[-1].role == 'tool' }}"
        tokenizer.chat_template = refusal + tokenizer.chat_template
    episodes = [episode(role, "8", "43", "7"), episode(role, "5"), episode(role, "5", "9+", "6", "43", "7")]
    roles = [{"role": "assistant"}, {"role": read}] * 2 + [{"role": "assistant"}]
    texts = [["8", "43", "7"], ["5"], ["5", "9+", "6", "43", "7"]]
    expected = [
        score_of(tokenizer, [USER, *(kind | {"content": text} for kind, text in zip(roles, turns, strict=False))])
        for turns in texts
    ]
    assert len(set(np.round(expected, 3))) == 3
    np.testing.assert_allclose(chatting([IN_CHAT] * 3, episodes), expected, rtol=1e-4, atol=1e-4)


def test_messages_are_read_in_the_reward_models_template(chatting, reward_model):
    model, tokenizer, answers = chatting, chatting.tokenizer, ["7", "12"]
    expected = [score_of(tokenizer, [USER, {"role": "assistant", "content": answer}]) for answer in answers]
    np.testing.assert_allclose(reward_function(model)([IN_CHAT] * 2, answers), expected, rtol=1e-4, atol=1e-4)
    with refused("another chat template"):
        reward_function(model)([{"prompt": Prompt("3+4", template="another")}], ["7"])
    text = {"prompt": Prompt("3+4=", template=digest_of_template(tokenizer))}
    np.testing.assert_allclose(model([text], ["7"]), reward_model([{"prompt": "3+4="}], ["7"]), rtol=1e-4)


def test_variables_of_rows_reach_its_template(chatting):
    tokenizer, answer, template = (
        chatting.tokenizer,
        {"role": "assistant", "content": "7"},
        chatting.tokenizer.chat_template,
    )
    tokenizer.chat_template = "5" + template
    expected = score_of(tokenizer, [USER, answer])
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + template
    variables = {"tools": [{"type": "function", "function": {"name": "5"}}], "of_the_policy": True}
    prompt = Prompt("the policy's own template", [USER], variables, template="another")
    np.testing.assert_allclose(chatting([{"prompt": prompt}], ["7"]), [expected], rtol=1e-4, atol=1e-4)


def test_a_fixed_size_is_compiled_once(reward_model):
    reward = reward_function(reward_model, batch_size=4, max_prompt_tokens=6, max_tokens=5)
    rows = [{"prompt": prompt} for prompt in ("1+1=", "2+2=", "3+3=") for _ in range(2)]
    reward(rows, ["1"] * 6)
    before = sum(programs_so_far())
    for texts in (["1"] * 6, ["12345", "1", "", "2", "3", "44"], ["0"] * 4):
        reward(rows[: len(texts)], texts)
    reward(rows[:2] + rows[:2], ["1"] * 4)  # two groups of one prompt side by side: one group of four
    assert sum(programs_so_far()) == before + 1


BAD_CALLS = [
    (lambda model, folder: reward_function(model)([{"prompt": ""}], ["1"]), "empty"),
    (lambda model, folder: load_reward_model(folder), "no tensor 'score.weight'"),
    (lambda model, folder: load_pretrained(model.folder), "score.weight"),
    (lambda model, folder: split_preferences([Preference("a", "b", "c")]), "of 1 rows"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_what_cannot_work_is_refused_in_a_sentence(reward_model, policy_folder, call, message):
    with refused(message):
        call(reward_model, policy_folder)
