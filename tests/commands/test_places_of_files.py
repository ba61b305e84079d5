"""What a model's files, its chat template and rows mean holds in every place that reads them.

The places are training, evaluation, an engine, a resumed run, and an exported folder. Commands run on tiny models
from golden/, whose files have what `ROWS` names, and the check of a row sees what a place read. `ABSENT` gives the
reason why a row has no check in a place.
"""

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import tokenizers
from command_helpers import refusal
from engines.server import Server
from safetensors.numpy import load_file, save_file
from tiny import (
    GOLDEN,
    change_json,
    digits,
    load_golden,
    random_params,
    read_lines,
    states_of_texts,
    task_of_tokens,
    write_rows,
)

from experiments.new_models import save_new_model
from grpo_jax.commands import evaluate, flags, model_and_task, sft, train
from grpo_jax.commands.export import Options, export
from grpo_jax.config import EngineOptions, recipe
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.data.types import Completion, Prompt
from grpo_jax.engines.sampler import sampler_of
from grpo_jax.models.decoder.heads import judge_groups
from grpo_jax.models.files.weights import load_params, unpack_mxfp4
from grpo_jax.models.huggingface import Pretrained, for_texts, load_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rewards.learned import load_reward_model, reward_function

# ---- files

SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>", "<think>", "</think>", "<answer>", "</answer>"]
TOKENS = [*'0123456789+=a\n"\\', *SPECIAL]  # the 24 tokens of the models in golden/
ASSISTANT, END, EOS = map(TOKENS.index, SPECIAL[1:4])
# An answer ends with a token that the files do not name, and the last token of a prompt is an EOS of the files.
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '\n' if m.role == 'user' }}{{ m.content | trim }}<|end|>\n{% endfor %}"
)
CHAT += "{% if add_generation_prompt %}<|assistant|>{{ '<think>\n' if thinks is not defined or thinks }}{% endif %}"
WITH_TOOLS = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + CHAT
# As that of gpt-oss, the last turn ends with another token. A reply is written as JSON, as results of tools in Llama 3.
EPISODES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.first or m.role == 'assistant' else m.content | "
)
EPISODES += "tojson }}{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
EPISODES += "{{ '<|assistant|>' if add_generation_prompt }}"
JUDGED = "{% for m in messages %}{{ '+' if m.role == 'user' else '=' }}<answer>{{ m.content }}</answer>{% endfor %}"
SIGNS = {"user": "+", "assistant": "="}
SCHEMA = {"type": "function", "function": {"name": "aaa", "description": "a", "parameters": {}}}
HEAD = np.roll(np.arange(24), 5)  # the rows of the embedding that the output matrix has
LONG = "0123456789" * 3
LIMIT = 16  # tokens of a prompt

PATTERN = r"<think>.*\d.*"
USER_CODE = f'''
import json
from pathlib import Path

from grpo_jax.data.episodes import Reply
from grpo_jax.rewards.builtin import matches

built_in = matches({PATTERN!r})


def read(examples, completions):
    """The built-in reward. It writes down what it reads."""
    rewards = built_in(examples, completions)
    with (Path(__file__).parent / "read.jsonl").open("a") as file:
        for example, text, reward in zip(examples, completions, rewards):
            prompt = example["prompt"]
            line = {{"prompt": prompt, "messages": prompt.messages, "template": prompt.template, "reward": reward}}
            line |= {{"text": text, "ids": text.ids, "turns": text.messages}}
            line |= {{"replies": [reply.ids for reply in text.observations]}}
            file.write(json.dumps(line) + "\\n")
    return rewards


def make():
    return lambda example, transcript, key: Reply('a"1')
'''


def write_tokens(folder: Path, template: str) -> None:
    """Writes a tokenizer of TOKENS with a chat template."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[3], "pad_token": SPECIAL[3]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)


def copy_golden(name: str, folder: Path, template: str, **config: Any) -> Path:
    """Copies a model of golden/, and gives it a tokenizer. `config` are fields of its config.json."""
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("*.npz", "adapter", "classifier"))
    write_tokens(folder, template)
    for file in ("config.json", "generation_config.json"):
        if (folder / file).exists():
            change_json(folder / file, eos_token_id=EOS)
    change_json(folder / "config.json", **config)
    return folder


def chat_rows(digit: int) -> list[dict]:
    """Returns prompts that end in a digit: a short one, one that turns thinking on, a long one, and one with tools."""
    more: list[dict[str, Any]] = [{}, {"chat_template_kwargs": {"thinks": True}}, {}, {"tools": [SCHEMA]}]
    texts = [f"1+1={digit}", f"1+2={digit}", f"{LONG}{digit}", f"1+3={digit}"]
    return [{"prompt": text} | columns for text, columns in zip(texts, more, strict=True)]


def write_chats(folder: Path) -> Path:
    """Writes a Phi-4-mini with another output matrix than its tied embedding, next to older shards with an index."""
    model = copy_golden("phi4_mini", folder / "model", CHAT)
    change_json(model / "generation_config.json", eos_token_id=[ASSISTANT, EOS])
    tensors = load_file(model / "model.safetensors")
    save_file({name: x + 1 for name, x in tensors.items()}, model / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    head = np.ascontiguousarray(tensors["model.embed_tokens.weight"][HEAD])
    save_file(tensors | {"lm_head.weight": head}, model / "model.safetensors")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text(WITH_TOOLS)
    return model


def write_mxfp4(folder: Path) -> tuple[Path, Any, Any]:
    """Writes a gpt-oss with experts in MXFP4. Returns the folder, the configuration, and the parameters."""
    config = replace(load_golden("gpt_oss")[0], hidden_size=32, intermediate_size=32)
    config = replace(config, num_hidden_layers=1, sliding_layers=None)
    config = replace(config, experts=config.experts._replace(moe_intermediate_size=32))
    model = save_new_model(folder / "model", random_params(config), config)
    tensors, rng = load_file(model / "model.safetensors"), np.random.default_rng(0)
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 128, blocks.shape[:3], dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(unpack_mxfp4(blocks, scales).astype(np.float32))
    (folder / "plain").mkdir()
    save_file(plain, folder / "plain/model.safetensors")
    save_file(tensors, model / "model.safetensors")
    write_tokens(model, CHAT)
    return model, config, load_params(folder / "plain", config)


# ---- places


class Seen(NamedTuple):
    """What one place read."""

    files: Path  # the model's files there
    printed: str = ""
    reads: Sequence[dict] = ()  # by the reward, of the place's prompts
    groups: Sequence[dict] = ()  # of rollouts.jsonl
    texts: Sequence[tuple[list[int], list[int]]] = ()  # of supervised training: prompts, and learned tokens
    nll: float | None = None  # of the texts
    pretrained: Pretrained | None = None  # as the place loads it
    other: Any = None  # a model that the check needs


PLACES = ("training", "evaluation", "engine", "resumed", "exported")
GRPO = "--num-prompts 4 --group-size 4 --learning-rate 1e-12 --decay none --eval-every 0 --checkpoint-every 0"
GRPO += " --rollouts-every 1 --eval-samples 3 --no-compilation-cache"
SFT = "--num-rows 6 --num-heldout 2 --log-every 1 --eval-every 1 --warmup-steps 0 --decay none --learning-rate 1e-12"
SFT += " --no-compilation-cache"
TASK = ("--overlong", "truncate", "--max-prompt-tokens", LIMIT, "--max-tokens", 8)
NOWHERE = ("--engine", "http://127.0.0.1:9")  # where no server is


def watch(folder: Path, command: Callable[[list[str]], None], *args: Any) -> tuple[str, list[dict]]:
    """Runs a command, and returns what it printed and what the reward read."""
    (folder / "read.jsonl").write_text("")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        command(list(map(str, args)))
    return " ".join(out.getvalue().split()), read_lines(folder / "read.jsonl")


def grpo_places(folder: Path, model: Path, rows: Callable[[int], list[dict]], *options: Any) -> Callable[[str], Seen]:
    """Returns the function that trains, evaluates and exports where a place is asked for: place -> what it read."""
    (folder / "user.py").write_text(USER_CODE)
    files = [write_rows(folder / f"rows{digit}.jsonl", rows(digit)) for digit in (1, 2)]
    run = folder / "run"
    command = ("--model", model, "--task", files[0], "--heldout", files[1], *TASK, *options, *GRPO.split())

    def of_rows(digit: int, reads: list[dict]) -> list[dict]:
        return [read for read in reads if read["ids"] and read["messages"][0]["content"].endswith(str(digit))]

    def trained(run: Path, step: int, *args: Any) -> Seen:
        printed, reads = watch(folder, train.command, *args, "--run-dir", run, "--steps", step)
        groups = [group for group in read_lines(run / "rollouts.jsonl") if group["step"] == step]
        return Seen(run / "model", printed, of_rows(1, reads), groups)

    def evaluated(model: Path, *args: Any) -> Seen:
        printed, reads = watch(folder, evaluate_command, model, "--samples", 3, *args)
        return Seen(model, printed, of_rows(2, reads))

    def engine() -> Seen:
        with serving(folder / "served") as (url, loaded):
            seen = trained(folder / "other", 1, *command, "--engine", url)
        return seen._replace(files=folder / "served", pretrained=loaded[0])

    def exported() -> Seen:
        export(Options(run, folder / "exported"))
        seen = evaluated(folder / "exported", "--task", files[1], *TASK, *options)
        return seen._replace(pretrained=load_pretrained(folder / "exported"))

    @cache
    def seen(place: str) -> Seen:
        if place not in ("training", "engine"):
            seen("training")
        if place == "training":
            return trained(run, 1, *command)
        if place == "resumed":
            return trained(run, 2, "--resume")
        if place == "evaluation":
            pretrained = model_and_task.load_sampling_model(evaluate.Options(model=str(run)))[0]
            return evaluated(run)._replace(files=run / "model", pretrained=pretrained)
        return exported() if place == "exported" else engine()

    return seen


def evaluate_command(args: list[str]) -> None:
    evaluate.main(evaluate.parse(args))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[Pretrained]]]:
    """Starts a server that samples with the parameters that it is told to load. Yields its address and these models.

    The first folder with parameters is copied to `folder`.
    """
    models: list[Pretrained] = []

    @cache
    def load(name: str) -> Pretrained:
        models.append(load_pretrained(name if models else shutil.copytree(name, folder)))
        return models[-1]

    def sample(name: str, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        model, ids, logprobs = load(name), list(body["prompt"]), list[float]()
        rng = np.random.default_rng(body["seed"])
        while len(logprobs) < body["max_tokens"] and not (logprobs and ids[-1] in body["stop_token_ids"]):
            values = log_probabilities(model, [ids])[0, len(ids) - 1]
            shares = np.exp(values.astype(float))
            ids.append(int(rng.choice(24, p=shares / shares.sum()) if body["temperature"] else values.argmax()))
            logprobs.append(float(values[ids[-1]]))
        return ids[len(body["prompt"]) :], logprobs

    def score(name: str, ids: list[int], temperature: float) -> np.ndarray:
        values = log_probabilities(load(name), [ids])[0]
        return np.array([values[place, i] for place, i in enumerate(ids[1:])])

    server = Server(sample, digits, (EOS,), score=score)
    try:
        yield server.url, models
    finally:
        server.stop()


def serve(folder: Path, model: Path) -> Seen:
    """Returns what a server loads when a sampler sends it a model."""
    config = recipe(steps=1, num_prompts=1, group_size=2, max_tokens=1)
    task, inputs = task_of_tokens((EOS,), 0, 24), (np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32), np.zeros(3))
    pretrained = load_pretrained(model)
    with serving(folder / "served") as (url, loaded):
        sampler = sampler_of(EngineOptions((url,)), pretrained, task, config, note=print)
        sampler.complete(pretrained.params, pad_prompts([[1]], [{}], width=1, pad_id=0), *inputs)
    return Seen(folder / "served", pretrained=loaded[0])


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """The places of GRPO on Phi-4-mini: place -> what it read."""
    folder = tmp_path_factory.mktemp("chats")
    options = ("--reward", f"{folder}/user.py:read", "--chat-template-kwargs", '{"thinks": false}')
    return grpo_places(folder, write_chats(folder), chat_rows, *options)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """The places of GRPO with an environment on a Qwen2 with yarn's mscale."""
    folder = tmp_path_factory.mktemp("episodes")
    model = copy_golden("qwen2_mscale", folder / "model", EPISODES)
    turns = ("--environment", f"{folder}/user.py:make", "--max-turns", 2, "--environment-tokens", 12)

    def rows(digit: int) -> list[dict]:
        return [{"prompt": f"1+{i}={digit}"} for i in range(4)]

    seen = grpo_places(folder, model, rows, "--reward", f"{folder}/user.py:read", *turns)
    return lambda place: serve(folder, model) if place == "engine" else seen(place)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory):
    """The places of supervised training on a gpt-oss in MXFP4, and its parameters."""
    folder = tmp_path_factory.mktemp("supervised")
    model, config, params = write_mxfp4(folder)
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}<|end|>\n"} for i in range(8)]
    options = ["--method", "sft", "--model", model, "--task", write_rows(folder / "rows.jsonl", rows)]
    options += [
        "--run-dir",
        folder / "run",
        *["--num-rows", "6", "--num-heldout", "2", "--log-every", "1", "--eval-every", "1"],
    ]
    options += ["--warmup-steps", "0", "--decay", "none", "--learning-rate", "1e-12", "--no-compilation-cache"]

    def texts(args: list[Any], side: int, model: Pretrained) -> list[tuple[list[int], list[int]]]:
        options = flags.parse(sft.Config, None, list(map(str, args)))
        packed = sft.encode_splits(options, sft.read_training_rows(options), model)[side]
        rows = zip(packed.ids, packed.texts, packed.completion_mask, strict=True)
        parts = (
            (ids[(numbers == n)], learned[numbers == n])
            for ids, numbers, learned in rows
            for n in range(1, numbers.max() + 1)
        )
        return [(ids[~learned].tolist(), ids[learned].tolist()) for ids, learned in parts]

    @cache
    def seen(place: str) -> Seen:
        run, resume = folder / "run", ["--resume", "--run-dir", folder / "run"]
        if place == "engine":
            return serve(folder, model)
        if place == "training":
            watch(folder, train.command, *options, "--steps", 1)
        else:
            seen("training")
        if place == "resumed":
            watch(folder, train.command, *resume, "--steps", 2)
        if place == "exported":
            export(Options(run, folder / "exported"))
            pretrained = load_pretrained(folder / "exported")
            return Seen(folder / "exported", texts=texts(options, 0, pretrained), pretrained=pretrained)
        pretrained, lines = load_pretrained(model), read_lines(run / "metrics.jsonl")
        if place == "evaluation":
            pretrained = model_and_task.load_sampling_model(evaluate.Options(model=str(run)))[0]
            return Seen(
                run / "model", texts=texts(resume, 1, pretrained), nll=lines[0]["heldout_nll"], pretrained=pretrained
            )
        return Seen(run / "model", texts=texts(resume, 0, pretrained), nll=lines[-1]["loss"], pretrained=pretrained)

    plain = Pretrained(config, params, None, (), folder)
    return lambda place: seen(place)._replace(other=plain)


# ---- what transformers computes


@cache
def program(config: Any) -> Callable[..., jax.Array]:
    policy = decoder_policy(config)

    @jax.jit
    def log_probabilities(params: Any, ids: Any) -> jax.Array:
        states = states_of_texts(policy, params, ids, np.ones(ids.shape, np.int32))
        return jax.nn.log_softmax(states @ policy.unembedding(params).T)

    return log_probabilities


def log_probabilities(model: Any, texts: list[list[int]]) -> np.ndarray:
    """Returns log-probabilities of the token after each token of at most 16 texts of at most 30 tokens, [16, 30, V]."""
    ids = np.zeros((16, 30), np.int32)
    for row, text in zip(ids, texts, strict=False):
        row[: len(text)] = text
    model = for_texts(model, 30)
    return np.asarray(program(model.config)(model.params, ids))


def golden_model(name: str, head: Any) -> tuple[Pretrained, np.ndarray, np.ndarray]:
    """Returns a model of golden/, and the ids and the log-probabilities that transformers recorded."""
    config, params = load_golden(name)
    if head is not None:
        config = replace(config, tie_word_embeddings=False)
        params = params | {"unembedding": params["embedding"][head]}
    golden = np.load(GOLDEN / name / "golden.npz")
    logits = golden["logits"] if head is None else golden["logits"][..., head]
    return Pretrained(config, params, None, (), Path()), golden["ids"], np.asarray(jax.nn.log_softmax(logits))


def ids_of(text: str) -> list[int]:
    return [TOKENS.index(token) for token in re.findall("|".join(map(re.escape, [*SPECIAL, *TOKENS])), text)]


def first_turn(group: dict, number: int) -> list[str]:
    """Returns the tokens of a completion's first turn. The token that ends a turn is the empty text."""
    tokens, turns = group["tokens"][number], group.get("turns", [[1] * len(group["tokens"][number])] * 4)[number]
    return [token for token, turn in zip(tokens, turns, strict=True) if turn == 1]


def computes_as_transformers(name: str, head: Any, seen: Seen) -> None:
    """Checks the model of a place, and the log-probabilities of its sampled tokens. Those of ends may be any end's."""
    model, ids, expected = golden_model(name, head)
    for loaded in filter(None, (model, seen.pretrained)):
        np.testing.assert_allclose(log_probabilities(loaded, list(ids))[: len(ids)], expected, atol=1e-4)
    sampled = [(group, i) for group in seen.groups for i in range(4) if "logprobs" in group]
    assert sampled or seen.pretrained
    for start in range(0, len(sampled), 16):
        some = sampled[start : start + 16]
        texts = [(ids_of(group["prompt"]), first_turn(group, i)) for group, i in some]
        values = log_probabilities(model, [prompt + ids_of("".join(tokens)) for prompt, tokens in texts])
        for (group, i), (prompt, tokens), table in zip(some, texts, values, strict=False):
            for place, token in enumerate(tokens):
                row, logprob = table[len(prompt) + place - 1], group["logprobs"][i][place]
                possible = row[TOKENS.index(token)] if token else row[[ASSISTANT, END, EOS]]
                assert np.abs(possible - logprob).min() < 2e-3


def tensors_of(seen: Seen) -> dict[str, np.ndarray]:
    """Returns the tensors of a place that has a folder with weights."""
    return load_file(file) if (file := seen.files / "model.safetensors").exists() else {}


# ---- checks of rows

as_phi = partial(computes_as_transformers, "phi4_mini", HEAD)
KINDS = ("short", "thinking", "long", "tools")  # of prompts


def kinds_of(seen: Seen) -> dict[str, list[dict]]:
    """Returns what the reward read of each kind of prompt."""
    kinds = {"1=": "short", "2=": "thinking", "3=": "tools"}
    reads: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for read in seen.reads:
        reads[kinds.get(read["messages"][0]["content"][-3:-1], "long")].append(read)
    assert all(reads.values())
    return reads


def check_head(seen: Seen, place: str) -> None:
    as_phi(seen)
    assert place != "training" or "lm_head.weight" in seen.printed
    if tensors := tensors_of(seen):
        head = tensors["model.embed_tokens.weight"][HEAD]
        np.testing.assert_array_equal(tensors["lm_head.weight"], head)
        assert not json.loads((seen.files / "config.json").read_text())["tie_word_embeddings"]


def check_shards(seen: Seen, place: str) -> None:
    as_phi(seen)
    assert place != "training" or "model.safetensors.index.json" in seen.printed
    assert not [*seen.files.glob("*.index.json"), *seen.files.glob("model-*")]


def check_added_template(seen: Seen, place: str) -> None:
    assert (seen.files / "additional_chat_templates/tool_use.jinja").read_text() == WITH_TOOLS
    for kind, reads in kinds_of(seen).items():
        assert all(read["prompt"].startswith("aaa<|user|>") == (kind == "tools") for read in reads)


def check_phi(seen: Seen, place: str) -> None:
    as_phi(seen)
    assert json.loads((seen.files / "config.json").read_text())["rope_parameters"]["rope_type"] == "longrope"
    assert not tensors_of(seen) or any("qkv_proj" in name for name in tensors_of(seen))


def check_last_token(seen: Seen, place: str) -> None:
    """The end of the prompt is an EOS. The log-probabilities show that the sampler read it."""
    assert kinds_of(seen)["short"][0]["prompt"].endswith("<|end|>\n<|assistant|>")
    as_phi(seen)


def check_turn_end(seen: Seen, place: str) -> None:
    assert not any("<|end|>" in read["text"] for read in seen.reads)
    assert any(len(read["ids"]) < 7 for read in seen.reads)
    if tensors_of(seen):
        assert load_pretrained(seen.files).eos_ids == (ASSISTANT, END, EOS)
        named = json.loads((seen.files / "generation_config.json").read_text())["eos_token_id"]
        assert named == [ASSISTANT, END, EOS]


def check_tags(seen: Seen, place: str) -> None:
    assert [read["text"] for read in seen.reads] == ["".join(TOKENS[i] for i in read["ids"]) for read in seen.reads]
    assert any("<" in read["text"] for read in seen.reads)


def check_judge(seen: Seen, place: str) -> None:
    """A reward model reads messages in its own template, and scores the last token."""
    judge, reads = seen.other, list({read["prompt"]: read for read in seen.reads if read["text"][-1] != ">"}.values())
    prompts = [{"prompt": Prompt(read["prompt"], read["messages"], {}, read["template"])} for read in reads]
    scores = reward_function(judge)(prompts, [Completion(read["text"], read["ids"]) for read in reads])
    whole = [[*read["messages"], {"role": "assistant", "content": read["text"]}] for read in reads]
    texts = [
        ids_of("".join(f"{SIGNS[m['role']]}<answer>{m['content']}</answer>" for m in messages)) for messages in whole
    ]
    nothing = np.zeros((1, 1, 1), np.int32)
    for text, score in zip(texts, scores, strict=True):
        prompt = PromptTokens(np.array([[0] * (64 - len(text)) + text]), np.arange(64)[None] >= 64 - len(text))
        expected = judge_groups(judge.config, judge.params, prompt, nothing, nothing > 0)
        assert score == pytest.approx(float(expected[0, 0]), abs=1e-4)


def check_opened_tag(seen: Seen, place: str) -> None:
    rewards: dict[str, list[float]] = {}
    for kind, reads in kinds_of(seen).items():
        opened = "<think>\n" if kind == "thinking" else ""
        rewards[kind] = [float(re.fullmatch(PATTERN, opened + read["text"], re.S) is not None) for read in reads]
        assert [read["reward"] for read in reads] == rewards[kind]
    assert any(rewards["thinking"])


def check_variables(seen: Seen, place: str) -> None:
    for kind, reads in kinds_of(seen).items():
        assert all(read["prompt"].endswith("<think>\n") == (kind == "thinking") for read in reads)
    if place == "exported":
        assert '{"thinks": false}' in (seen.files / "README.md").read_text()


def check_cut(seen: Seen, place: str) -> None:
    """The beginning of the content is cut, and the frame of the template stays."""
    read, whole = kinds_of(seen)["long"][0], chat_rows(2 if place in ("evaluation", "exported") else 1)[2]["prompt"]
    content = whole[-(LIMIT - 5) :]
    assert read["prompt"] == f"<|user|>\n{content}<|end|>\n<|assistant|>"
    assert read["messages"] == [{"role": "user", "content": content}]


def check_replies(seen: Seen, place: str) -> None:
    """The reply follows the token that ended the policy's turn, as JSON and with no second end."""
    replies = [reply for read in seen.reads for reply in read["replies"]]
    assert replies
    assert {tuple(reply) for reply in replies} == {tuple(ids_of('<|user|>"a\\"1"<|end|><|assistant|>'))}
    turns = [read["turns"][1] for read in seen.reads if read["replies"]]
    assert turns == [{"role": "user", "content": 'a"1'}] * len(turns)


def check_mxfp4(seen: Seen, place: str) -> None:
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-9)
    jax.tree.map(close, seen.pretrained.params, seen.other.params)
    if seen.nll is not None:
        values = log_probabilities(seen.other, [prompt + learned for prompt, learned in seen.texts])
        rows = [(row[len(prompt) - 1 :], learned) for row, (prompt, learned) in zip(values, seen.texts, strict=False)]
        logprobs = [row[place][token] for row, learned in rows for place, token in enumerate(learned)]
        assert seen.nll == pytest.approx(-np.mean(logprobs), abs=1e-4)


def check_line_break(seen: Seen, place: str) -> None:
    assert len(seen.texts) == (2 if place == "evaluation" else 6)
    for prompt, learned in seen.texts:
        first, second = (TOKENS[i] for i in (prompt[2], learned[0]))
        assert int(second) == int(first) + 1
        assert learned[1:] == [END]


# What the files have -> the runs that read it, and its check.
ROWS: dict[str, tuple[str, Callable[[Seen, str], None]]] = {
    "another head than the tied embedding": ("chats", check_head),
    "yarn's mscale": ("episodes", lambda seen, place: computes_as_transformers("qwen2_mscale", None, seen)),
    "old shards beside a single file": ("chats", check_shards),
    "weights in MXFP4": ("supervised", check_mxfp4),
    "an added chat template": ("chats", check_added_template),
    "Phi-4-mini": ("chats", check_phi),
    "a prompt that ends in an EOS": ("chats", check_last_token),
    "a turn's own end": ("chats", check_turn_end),
    "special tokens as tags": ("chats", check_tags),
    "a reward model with another template": ("judged", check_judge),
    "a tag that the prompt opens": ("chats", check_opened_tag),
    "variables of the template": ("chats", check_variables),
    "a long prompt": ("chats", check_cut),
    "an answer that ends already": ("supervised", check_line_break),
    "a reply of an environment": ("episodes", check_replies),
}
ABSENT = {
    ("a reply of an environment", "engine"): "engines refuse environments",
    ("an answer that ends already", "engine"): "supervised training samples nothing",
}


def cells() -> Iterator[Any]:
    """Yields each row with each of its places. Quick ones hold each run's training, and each place of one run."""
    slow = {"chats": (), "judged": (), "episodes": ("evaluation", "resumed", "exported"), "supervised": ("resumed",)}
    for row, place in product(ROWS, PLACES):
        is_slow = place in slow[ROWS[row][0]]
        if (row, place) not in ABSENT:
            yield pytest.param(row, place, marks=pytest.mark.slow if is_slow else ())


@pytest.fixture(scope="module")
def judged(chats, tmp_path_factory):
    """The places of `chats`, with a reward model that transformers wrote and that has a template of its own."""
    judge = load_reward_model(copy_golden("llama/classifier", tmp_path_factory.mktemp("judge") / "model", JUDGED))
    return lambda place: chats(place)._replace(other=judge)


@pytest.mark.parametrize(("row", "place"), cells())
def test_files_are_read_alike_in_every_place(request, row, place):
    runs, check = ROWS[row]
    check(request.getfixturevalue(runs)(place), place)


# ---- refusals


def damage(model: Path) -> None:
    """Flips a bit of a scale in MXFP4."""
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: np.full_like(tensors[name], 160)}, model / "model.safetensors")


def write_gemma4(folder: Path, **change: Any) -> Path:
    return copy_golden("gemma4_small", folder / "model", CHAT, **change)


# What is refused -> how to make the model, and what the sentence names.
REFUSED = {
    "damaged MXFP4": (lambda folder: damage(model := write_mxfp4(folder)[0]) or model, "down_proj_blocks"),
    "num_kv_shared_layers of -1": (partial(write_gemma4, num_kv_shared_layers=-1), "num_kv_shared_layers"),
    "per_layer_config of null": (partial(write_gemma4, per_layer_config=None), "config.json asks for"),
    "a prompt in the template": (write_chats, "--chat False"),
}


@pytest.mark.parametrize("place", PLACES[:3])
@pytest.mark.parametrize("row", REFUSED)
def test_training_evaluation_and_engines_refuse_by_name(tmp_path, capsys, row, place):
    """A refused run has no folder to resume or export."""
    make, words = REFUSED[row]
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "<|user|>\n1+1=<|end|>\n<|assistant|>"}] * 8)
    args = [make(tmp_path), "--task", rows, "--reward", "length(maximum=3)", "--max-tokens", 8]
    more = ["--run-dir", tmp_path / "run", "--num-prompts", 4, *(NOWHERE if place == "engine" else ())]
    command = ["evaluate"] if place == "evaluation" else ["train", *more, "--model"]
    assert words in refusal(capsys, *command, *args)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_refuses_weights_damaged_meanwhile(supervised, capsys):
    folder = supervised("training").files.parents[1]
    file = folder / "model/model.safetensors"
    before = file.read_bytes()
    damage(folder / "model")
    words = refusal(capsys, "train", "--resume", "--run-dir", folder / "run", "--steps", 9)
    file.write_bytes(before)
    assert "down_proj_blocks" in words


def test_an_exported_model_refuses_prompts_in_its_template(chats, tmp_path, capsys):
    """So does the run that it is from."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "<|user|>\n1+1=<|end|>\n"}])
    for model in (chats("exported").files, chats("training").files.parent):
        words = refusal(capsys, "evaluate", model, "--task", rows, "--reward", "length(maximum=3)", "--max-tokens", 8)
        assert "--chat False" in words


@pytest.mark.parametrize("name", ["granite", "gemma4", "qwen3_5_moe"])
def test_reward_models_without_a_class_are_refused(tmp_path, capsys, name):
    """Reward models are no policies: no evaluation, engine or export of a run reads one."""
    model = copy_golden(name, tmp_path / "model", CHAT)
    rows = [{"prompt": f"{i}+1=", "chosen": "1", "rejected": "2"} for i in range(9)]
    options = ["--model", model, "--task", write_rows(tmp_path / "rows.jsonl", rows), "--run-dir", tmp_path / "run"]
    options += ["--num-pairs", 2]
    words = refusal(capsys, "train", "--method", "reward-model", *options)
    assert "no class for reward models" in words
    assert not (tmp_path / "run").exists()
