"""The trainer in five lines: as the post that announced GRPO writes them, and what it refuses."""

import functools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.request import ProxyHandler, Request, build_opener

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import random_params, refused, save_tiny_model

from experiments.tasks import arithmetic
from grpo_jax import GRPOTrainer, commands
from grpo_jax.commands.export import Options, export
from grpo_jax.config import GRPOConfig, ModelOptions
from grpo_jax.data.episodes import Reply, episode_return
from grpo_jax.data.types import Component
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import Pretrained, load_pretrained, save_pretrained
from grpo_jax.options import flattened, option_types
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.tasks.adapters import trl_reward

PROMPTS = ["1+1=", "2+2=", "12+3="]
LINES = """
from grpo_jax import GRPOTrainer, commands

trainer = GRPOTrainer(
    model=model,
    reward_model=reward_model,
    steps=2,
    group_size=12,
    clip_epsilon=0.15,
)

trainer.train(prompts)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a tokenizer of characters."""
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", arithmetic.TEXT))


class Threes:
    """A reward model that is an object, and remembers the rows that it saw."""

    def __init__(self):
        self.rows = []

    def __call__(self, rows, completions):
        self.rows += rows
        return [text.count("3") for text in completions]


class Frame(list):
    """A table like pandas', which iterates over the names of its columns."""

    def iterrows(self):
        """The method by which pandas' tables are known."""


class Table(list):
    """A table like that of the package datasets, which is known by its features."""

    features = ("prompt", "tools", "chat_template_kwargs")


class Rising(Threes):
    """Rewards that differ in every group, whatever is sampled."""

    def __call__(self, rows, completions):
        super().__call__(rows, completions)
        return list(range(len(completions)))


def test_the_five_lines(folder, tmp_path, monkeypatch, capsys):
    """They leave the files of the command line but for the command: what was called is a program of the user's."""
    monkeypatch.chdir(tmp_path)
    scope = {"model": folder, "reward_model": Threes(), "prompts": PROMPTS}
    exec(LINES, scope)
    run = scope["trainer"].run
    assert run.path == Path("runs/grpo_trainer")
    options = flattened(json.loads((run.path / "config.json").read_text()))
    assert (options["group_size"], options["num_prompts"], options["steps"]) == (12, 3, 2)
    assert (options["epsilon_low"], options["epsilon_high"]) == (0.15, 0.15)
    assert [line["step"] for line in run.lines()] == [1, 2]
    group = run.lines("rollouts.jsonl")[0]
    assert group["prompt"] in PROMPTS  # each of them, at every step
    first_step = scope["reward_model"].rows[12:48]  # the trial before the run took a group
    assert {row["prompt"] for row in first_step} == set(PROMPTS)
    assert len(group["completions"]) == 12
    lines = {"metrics.jsonl", "times.jsonl", "rollouts.jsonl", "warnings.jsonl"}
    made = {"config.json", "inputs.json", "lock", "model", "checkpoints", "tensorboard"}
    ending = {"report.html", "results.json"}
    assert {file.name for file in run.path.iterdir()} == lines | made | ending
    checksum = json.loads((run.path / "results.json").read_text())["params_sha256"]
    assert checksum in (run.path / "report.html").read_text()
    assert "report:" in capsys.readouterr().out


def test_trainer_takes_an_optimizer(folder, tmp_path):
    """A sign moves every number by the rate, wherever its gradient is not 0."""
    optimizer, rate = optax.sign_sgd(1e-2), np.float32(1e-2)
    trainer = GRPOTrainer(folder, Rising(), run_dir=tmp_path / "run", steps=1, max_tokens=2, optimizer=optimizer)
    before, after = (x.params["layers"]["mlp"] for x in (load_pretrained(folder), trainer.train(PROMPTS)))
    for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        np.testing.assert_allclose(np.abs(y - x), rate, rtol=1e-4)
    (line,) = trainer.run.lines()
    assert "learning_rate" not in line
    options = flattened(json.loads((trainer.run.path / "config.json").read_text()))
    assert options["optimizer"].startswith("optax.")


def test_texts_are_written_into_the_template(folder, tmp_path, capsys):
    model = shutil.copytree(folder, tmp_path / "chats")
    (model / "chat_template.jinja").write_text("({% for m in messages %}{{ m.content }}{% endfor %})")
    trainer = GRPOTrainer(model, Rising(), run_dir=tmp_path / "run", steps=1, max_tokens=2)
    trainer.train(["1+1="])
    messages = [{"role": "user", "content": "1+1="}]
    written = load_pretrained(model).tokenizer.apply_chat_template(messages, tokenize=False)
    assert trainer.run.lines("rollouts.jsonl")[0]["prompt"] == written
    assert "prompts that are text are user messages of the chat template" in capsys.readouterr().out
    trainer = GRPOTrainer(model, Rising(), run_dir=tmp_path / "bare", chat=False, steps=1, max_tokens=2)
    trainer.train(["1+1="])
    assert trainer.run.lines("rollouts.jsonl")[0]["prompt"] == "1+1="
    assert "encoded without a chat template" in capsys.readouterr().out


@pytest.mark.slow
def test_trainer_accepts_a_loaded_model_with_adapters(folder, tmp_path):
    loaded, reward = load_pretrained(folder, attention="xla"), Rising()
    before = params_sha256(loaded.params)
    trainer = GRPOTrainer(
        loaded, reward, run_dir=tmp_path / "run", steps=1, max_tokens=2, lora_rank=2, learning_rate=0.1, minibatches=2
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "3"}) + "\n" for p in PROMPTS))
    trained = trainer.train(tmp_path / "rows.jsonl")
    options = flattened(json.loads((trainer.run.path / "config.json").read_text()))
    assert (options["model"], options["attention"], options["lora_rank"]) == (folder, "xla", 2)
    assert {row["answer"] for row in reward.rows} == {"3"}
    assert len(reward.rows) == 2 * 8  # of three prompts as many as two minibatches take
    assert params_sha256(loaded.params) == before
    assert params_sha256(trained.params) != before

    saved = load_pretrained(save_pretrained(tmp_path / "out", trained.params, trained.config, source=trained.folder))
    export(Options(tmp_path / "run", tmp_path / "exported"))
    for params in (saved.params, load_pretrained(tmp_path / "exported").params):
        assert params_sha256(params) == params_sha256(trained.params)


def higher(example, transcript, key):
    return Reply("1+", reward=float(len(transcript)))


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one.
        b: another.
    """
    return a + b


class Adder:
    """As for TRL."""

    def reset(self, **kwargs):
        self.sum = 0
        return "=="

    def get_reward(self):
        return float(self.sum)

    def more(self, a: int) -> int:
        """Adds.

        Args:
            a: how much.
        """
        self.sum += a
        return self.sum


@pytest.mark.slow
def test_an_environment_answers_each_turn(folder, tmp_path):
    options = {"steps": 2, "max_tokens": 6, "group_size": 4, "learning_rate": 0.1, "max_turns": 3}
    model = shutil.copytree(folder, tmp_path / "chats")
    (model / "chat_template.jinja").write_text(TURNS)

    def graded(examples, completions):
        for completion in completions:
            observations = [message["content"] for message in completion.messages if message["role"] == "user"]
            assert observations == ["1+"] * (len(completion.turns) - 1)
        return episode_return(examples, completions)

    trainer = GRPOTrainer(model, graded, environment=higher, environment_tokens=4, run_dir=tmp_path / "run", **options)
    trained = trainer.train(PROMPTS)
    assert json.loads((trainer.run.path / "results.json").read_text()) == {
        "params_sha256": params_sha256(trained.params)
    }
    line, group = trainer.run.lines()[0], trainer.run.lines("rollouts.jsonl")[0]
    assert line["turns_mean"] > 1
    assert line["first_ratio_deviation"] < 1e-4
    for text, rewards, reward in zip(group["completions"], group["turn_rewards"], group["rewards"], strict=True):
        assert text.count("1+") >= len(rewards) - 1
        assert reward == sum(range(1, len(rewards) + 1))


TWO_TURNS = {"steps": 1, "max_tokens": 4, "max_turns": 2, "environment_tokens": 4, "learning_rate": 0.1}
# Of a chat template: the names of tools, and what each turn says.
NAMES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_templates_announce_tools_and_calls_are_counted(folder, tmp_path):
    told = tmp_path / "told"
    shutil.copytree(folder, told)
    template = told / "chat_template.jinja"
    template.write_text(NAMES + "{{ messages[0].content }}")
    with refused("no turn of the role tool or user"):
        GRPOTrainer(told, Threes(), tools=[add], environment_tokens=4, run_dir=tmp_path / "run").train(PROMPTS)
    template.write_text(NAMES + TURNS)
    trainer = GRPOTrainer(told, Threes(), tools=[add], run_dir=tmp_path / "run", **TWO_TURNS)
    trainer.train(PROMPTS)
    line = trainer.run.lines()[0]
    assert (line["environment_calls"], line["environment_bad_calls"], line["turns_mean"]) == (0, 0, 1)
    template.write_text(TURNS)
    with refused("writes no tools into the prompt"):
        GRPOTrainer(told, Threes(), tools=[add], run_dir=tmp_path / "none", **TWO_TURNS).train(PROMPTS)


def test_nulls_of_arrow_are_left_out_of_tables(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "told")
    template = "{% if low is not defined %}{% set low = 3 %}{% endif %}{{ low }}" + NAMES
    (model / "chat_template.jinja").write_text(template + "{{ tools[0].function.parameters | length }}" + TURNS)
    tools = [{"function": {"name": "=", "parameters": {"x": x, "y": y}}} for x, y in ((1, None), (None, 1))]
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "tools": [tool]} for tool in tools]
    rows = Table(row | {"chat_template_kwargs": {"low": low}} for row, low in zip(rows, (None, 2), strict=True))
    trainer = GRPOTrainer(model, Rising(), run_dir=tmp_path / "run", steps=1, max_tokens=2)
    with pytest.warns(UserWarning, match="prompts: 3 nulls were left out"):
        trainer.train(rows)
    assert {line["prompt"] for line in trainer.run.lines("rollouts.jsonl")} == {"3=11+1=", "2=11+1="}


@pytest.mark.slow
def test_trl_environments_show_tools_and_first_observation(folder, tmp_path):
    told = tmp_path / "told"
    shutil.copytree(folder, told)
    (told / "chat_template.jinja").write_text(NAMES + TURNS)
    reward = trl_reward(Adder)
    trainer = GRPOTrainer(told, reward, environment_factory=Adder, run_dir=tmp_path / "trl", **TWO_TURNS)
    trainer.train(PROMPTS)
    group = trainer.run.lines("rollouts.jsonl")[0]
    assert group["prompt"].endswith("==")  # what `reset` shows
    assert group["prompt"].startswith("more")
    assert {*group["rewards"]} == {0.0}


def ask_twice(example, url):
    messages = [{"role": "user", "content": example["prompt"]}]
    for _ in range(2):
        request = Request(f"{url}/chat/completions", json.dumps({"model": "policy", "messages": messages}).encode())
        with build_opener(ProxyHandler({})).open(request) as answer:
            choice = json.load(answer)["choices"][0]
        messages += [choice["message"], {"role": "user", "content": "1+"}]
        if choice["finish_reason"] == "length":
            break
    return len(messages)


def test_agents_train_with_their_own_rewards(folder, tmp_path):
    with refused("no chat template"):
        GRPOTrainer(folder, agent=ask_twice, run_dir=tmp_path / "none", **TWO_TURNS).train(PROMPTS)
    told = tmp_path / "told"
    shutil.copytree(folder, told)
    (told / "chat_template.jinja").write_text(TURNS)
    trainer = GRPOTrainer(told, agent=ask_twice, heldout=["7+7="], run_dir=tmp_path / "run", **TWO_TURNS)
    trainer.train(PROMPTS)
    groups = trainer.run.lines("rollouts.jsonl")
    assert {group["prompt"] for group in groups} <= {*PROMPTS}
    rewards = [reward for group in groups for reward in group["rewards"]]
    turns = [max(map(abs, turns)) for group in groups for turns in group["turns"]]
    assert rewards == [1.0 + 2 * count for count in turns]


def pretrained(**fields):
    """Returns a loaded model without a tokenizer."""
    config = ModelConfig(12, 8, 16, 1, 2, 1, 4)
    return Pretrained(config, random_params(config, 0.1), None, (), Path("model"))._replace(**fields)


BAD_OPTIONS = [
    ({"tools": [add], "prompts": PROMPTS}, "tools need a tokenizer with a chat template"),
    ({"tools": [add], "environment": higher}, "give one of them"),
    ({"agent": ask_twice, "environment": higher}, "give one of them"),
    ({"environment_factory": Adder, "environment": higher}, "give one of them"),
    ({"environment": higher, "max_turns": 2, "prompts": PROMPTS}, "environment_tokens is 0"),
    ({"max_turns": 2, "prompts": PROMPTS}, "this one has none: leave them out"),
    ({"model": "nowhere"}, "no folder nowhere"),
    ({"clip_epsilon": 0.1, "epsilon_low": 0.2}, "give it or them"),
    ({"learnin_rate": 1e-3}, "no option learnin_rate: is it learning_rate?"),
    ({"preset": np.array(["grpo", "gspo"])}, "preset is array.*: it must be a name"),
    ({"beta": 0.0}, "beta is called kl_coef here"),
    ({"zzz": 1}, "no option zzz: they are steps, "),
    ({"reward_model": None}, "reward_model is empty"),
    ({"model": None, "reward_model": None, "reward_funcs": [Threes()]}, "reward_funcs is called reward_model here"),
    ({"train_dataset": PROMPTS}, "no option train_dataset: GRPOTrainer takes it as the argument of train"),
    ({"args": {}}, "no option args: every setting is an argument of GRPOTrainer by itself"),
    ({"processing_class": None}, "no option processing_class: a model's folder has one"),
    ({"callbacks": []}, "no option callbacks: on_rollout and on_line"),
    ({"peft_config": {"r": 8}}, "peft_config is called lora_rank here .lora_rank, lora_alpha and lora_targets"),
    ({"load_in_4bit": True}, "load_in_4bit is called quantize here .set it to nf4 or int8, with lora_rank"),
    ({"use_vllm": True}, "no option use_vllm: this process samples"),
    ({"report_to": "wandb"}, "report_to is called wandb here .TensorBoard's files are always written"),
    ({"eval_dataset": PROMPTS}, "eval_dataset is called heldout here"),
    ({"eval_every": 2}, "eval_every is for held-out prompts: give them as heldout"),
    ({"heldout": PROMPTS, "eval_every": 0, "patience": 2}, "patience has no effect while eval_every is 0"),
    ({"heldout": []}, "heldout is empty"),
    ({"heldout": "reasoning_gym:sums"}, "heldout is for rows"),
    ({"heldout": ["1+1="], "prompts": "reasoning_gym:sums"}, "heldout is for rows"),
    ({"heldout": PROMPTS, "prompts": PROMPTS}, "no prompt is left for training"),
    ({"resume": True}, "there is no run to resume in"),
    ({"resume": 1}, "resume is 1: it must be True or False"),
    ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2': give a tokenizer of transformers"),
    ({"wandb": True}, "wandb is True: it must be a text"),
    ({"on_rollout": 3}, "on_rollout is 3: it must be a function"),
    ({"on_line": 3}, "on_line is 3: it must be a function"),
    ({"on_rollout": lambda rollout: 0}, r"on_rollout must take \(step, rollout\), but: too many"),
    ({"on_line": lambda step, line, more: 0}, r"on_line must take \(step, line\), but: missing"),
    ({"chat_template_kwargs": {"a": {1}}}, "chat_template_kwargs must hold values that JSON has"),
    ({"optimizer": optax.adam(1e-3), "learning_rate": 0.5}, "learning_rate has no effect on an optax"),
    ({"reward_model": {"std": Threes()}}, "a reward is called std"),
    ({"output_dir": "run"}, "output_dir is called run_dir here"),
    (
        {"gradient_accumulation_steps": 4},
        "called num_prompts here .it multiplies a batch, and pieces only divide",
    ),
    ({"options": {}}, "no option options"),
    ({"steps": "2"}, "steps is '2'"),
    ({"clip_epsilon": "0.2"}, "clip_epsilon is '0.2'"),
    ({"lora_targets": "q_proj"}, "lora_targets is 'q_proj'"),
    ({"preset": "gppo"}, "no preset gppo: is it .*grpo"),
    ({"reward_model": lambda completions: 0}, "reward_model takes completions first"),
    ({"reward_model": {"a": lambda prompts, completions, **columns: 0}}, "the reward a takes prompts first"),
    ({"reward_model": 3}, "reward_model is 3: it must be a function"),
    ({"reward_model": {}}, "reward_model is empty"),
    ({"reward_model": {"": Threes()}}, r"names in reward_model are \[''\]"),
    ({"reward_model": {1: Threes()}}, r"names in reward_model are \[1\]"),
    ({"reward_model": {"a": 3}}, "reward_model is .*: it must be a function"),
    ({"reward_model": {"a": Component(Threes(), "1")}}, "weight is '1': it must be a number"),
    ({"model": 3}, "model is 3"),
    ({"model": pretrained()}, "the model has no tokenizer"),
    ({"model": pretrained(tokenizer=print, folder=3)}, "folder is 3"),
    ({"run_dir": None}, "run_dir is None"),
    ({"environment": "game"}, "environment is 'game': it must be a function"),
    ({"environment_factory": 3}, "environment_factory is 3: it must be a function"),
    ({"tools": add}, "tools is .*: it must be a list of functions"),
    ({"tools": [add, add, functools.partial(add, 1)]}, "each must be a function with a name of its own"),
    ({"teacher": 5}, "teacher is 5"),
    ({"seed": -1, "prompts": PROMPTS}, "seed is -1: it must be between"),
    ({"minibatches": 0, "prompts": PROMPTS}, "minibatches is 0: it must be at least 1"),
    ({"group_size": 1}, "group_size is 1: preset grpo compares"),
    ({"devices": 3, "fsdp": 2}, "fsdp x tensor is 2, which does not divide the 3 devices"),
    ({"quantize": "nf4"}, "quantize nf4 .*lora_rank"),
    ({"clip_epsilon": -0.1, "prompts": PROMPTS}, "epsilon_low is -0.1"),
    ({"prompts": "1+1="}, "prompts is one text"),
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": 3}, "prompts is 3: give a list"),
    ({"prompts": {"prompt": PROMPTS}}, "prompts is {'prompt': .*: give a list"),
    ({"prompts": {*PROMPTS}}, "prompts is {.*: give a list"),  # its order differs from process to process
    ({"prompts": b"1+1="}, "prompts is b'1\\+1=': give a list"),
    ({"prompts": [{"prompt": "1+1=", ("a", 1): 2}]}, r"row 0 has a column \('a', 1\): names of columns"),
    ({"prompts": Frame(["prompt", "answer"])}, "prompts is .*: give a list"),
    ({"prompts": [*PROMPTS, 4]}, "row 3: column prompt"),
    ({"prompts": PROMPTS, "num_prompts": 4}, "num_prompts is 4"),
    ({"prompts": PROMPTS, "minibatches": 4}, "3 prompts for 4 parts"),
    ({"prompts": "nowhere.jsonl"}, "no nowhere.jsonl"),
    ({"prompts": "reasoning_gym:sums*"}, "the generator 'sums\\*' cannot be read"),
    ({"prompts": [[{"role": "user", "content": "1+1"}]]}, "no chat template"),
    ({"prompts": PROMPTS, "chat_template_kwargs": {"thinks": False}}, "sets thinks, but the chat template has no such"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_what_cannot_work_is_refused_in_a_sentence(folder, tmp_path, options, message):
    given = {"model": folder, "reward_model": Threes(), "run_dir": tmp_path / "run"} | options
    prompts = given.pop("prompts", None)
    with refused(message):
        GRPOTrainer(**given).train(prompts)
    assert not (tmp_path / "run").exists()


def test_numbers_out_of_range_are_refused_before_loading(tmp_path):
    hints = option_types(GRPOConfig, include_extras=True) | option_types(ModelOptions, include_extras=True)
    names = {name for name, hint in hints.items() if "Range" in str(hint)} - {"eval_every", "eval_samples", "patience"}
    assert len(names) > 40
    for name in names:
        with refused(f"{name} is -1: it must be "):
            GRPOTrainer(str(tmp_path), Threes(), **{name: -1})


def test_loaded_models_print_briefly_and_refuse_new_settings(folder, tmp_path):
    loaded = load_pretrained(folder)
    count = sum(np.prod(x.shape, dtype=int) for x in jax.tree.leaves(loaded.params))
    assert repr(loaded) == f"Pretrained('{folder}', {count:,} parameters)"
    for option in ({"remat": "layer"}, {"dtype": "bfloat16"}):
        with refused(f"the model is loaded already: give {next(iter(option))} to load_pretrained"):
            GRPOTrainer(loaded, Threes(), **option)
    half = loaded._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded.params))
    with refused("param_dtype bfloat16 .*would lose"):
        GRPOTrainer(half, Threes())
    (tmp_path / "thesis.txt").write_text("mine")
    with refused("is no run"):
        GRPOTrainer(loaded, Threes(), run_dir=tmp_path).train(PROMPTS)


# ---- evaluation, resume, tokenizer, Weights & Biases

SHORT = {"steps": 3, "num_prompts": 3, "group_size": 4, "max_tokens": 2, "learning_rate": 0.1, "checkpoint_every": 1}
HELDOUT = ["5+4=", "6+1="]
REWARD = "def odd(examples, completions):\n    return [float(sum(map(ord, text)) % 3) for text in completions]\n"


def odd(examples, completions):
    return [float(sum(map(ord, text)) % 3) for text in completions]


def write_prompts(file, prompts):
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(file)


def test_heldout_prompts_are_evaluated_as_in_the_command(folder, tmp_path, capsys):
    options = SHORT | {"eval_every": 2, "eval_samples": 2}
    files = [write_prompts(tmp_path / f"{name}.jsonl", rows) for name, rows in (("rows", PROMPTS), ("held", HELDOUT))]
    (tmp_path / "rewards.py").write_text(REWARD)
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags += ["--model", folder, "--task", files[0], "--heldout", files[1], "--reward", f"{tmp_path}/rewards.py:odd"]
    commands.main(["train", *flags, "--run-dir", str(tmp_path / "command")])
    lines = []
    trainer = GRPOTrainer(
        folder,
        {"odd": odd},
        heldout=tmp_path / "held.jsonl",
        on_line=lambda step, line: lines.append(line),
        run_dir=tmp_path / "run",
        **options,
    )
    trained = trainer.train(PROMPTS)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()
    assert lines == trainer.run.lines()
    assert [line["step"] for line in lines if "heldout_avg" in line] == [0, 2, 3]
    results, of_command = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "command"))
    assert results == of_command
    assert results.keys() == {"before", "after", "params_sha256"}
    assert results["params_sha256"] == params_sha256(trained.params)
    assert "2 held-out prompts [95% interval]" in capsys.readouterr().out


class Killed(Exception):
    """The end of a run at a step."""


def killed_at(number):
    """Returns a hook that ends the run at a step."""

    def hook(step, value):
        if step == number:
            raise Killed

    return hook


def test_a_trainer_continues_its_newest_run(folder, tmp_path):
    options = SHORT | {"heldout": HELDOUT, "eval_every": 2}
    whole = GRPOTrainer(folder, odd, run_dir=tmp_path / "whole", **options)
    expected = params_sha256(whole.train(PROMPTS).params)
    killed = GRPOTrainer(folder, odd, run_dir=tmp_path / "cut", on_rollout=killed_at(2), **options)
    with pytest.raises(Killed):
        killed.train(PROMPTS)
    rollouts = []
    # The options are those of the run, and need not be repeated.
    trainer = GRPOTrainer(
        folder,
        odd,
        heldout=HELDOUT,
        run_dir=tmp_path / "cut",
        resume=True,
        on_rollout=lambda step, rollout: rollouts.append(step),
    )
    assert params_sha256(trainer.train(PROMPTS).params) == expected
    assert rollouts == [2, 3]
    assert trainer.run.path == killed.run.path
    assert trainer.run.lines() == whole.run.lines()
    assert trainer.run.lines("rollouts.jsonl") == whole.run.lines("rollouts.jsonl")
    assert params_sha256(trainer.train(PROMPTS).params) == expected  # nothing is left to do
    resume = functools.partial(GRPOTrainer, folder, odd, run_dir=tmp_path / "cut", resume=True)
    with refused("began with other options .learning_rate"):
        resume(heldout=HELDOUT, learning_rate=0.2).train(PROMPTS)
    for prompts, heldout in ((["9+9=", *PROMPTS[1:]], HELDOUT), (PROMPTS, ["9+9="])):
        with refused("not what they were when the run in .* began"):
            resume(heldout=heldout).train(prompts)
    with refused("source of reward reward"):
        resume = functools.partial(GRPOTrainer, folder, lambda rows, texts: [1.0] * len(texts), resume=True)
        resume(heldout=HELDOUT, run_dir=tmp_path / "cut").train(PROMPTS)


def test_run_and_export_have_the_passed_tokenizer(folder, tmp_path):
    bare, tokenizer = tmp_path / "bare", load_pretrained(folder).tokenizer
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    with refused("holds no tokenizer"):
        GRPOTrainer(bare, odd)
    options = SHORT | {"steps": 1, "run_dir": tmp_path / "run"}
    trained = GRPOTrainer(bare, odd, tokenizer=tokenizer, **options).train(PROMPTS)
    loaded = load_pretrained(folder)
    with refused("the model has no tokenizer: give one as tokenizer"):
        GRPOTrainer(loaded._replace(tokenizer=None), odd)
    expected = GRPOTrainer(loaded._replace(tokenizer=None), odd, tokenizer=tokenizer, **options).train(PROMPTS)
    assert params_sha256(trained.params) == params_sha256(expected.params)
    saved = save_pretrained(tmp_path / "saved", trained.params, trained.config, source=trained.folder)
    export(Options(tmp_path / "run", tmp_path / "exported"))
    for out in (saved, tmp_path / "exported"):
        assert load_pretrained(out).tokenizer.get_vocab() == tokenizer.get_vocab()
        assert load_pretrained(out).eos_ids == expected.eos_ids == loaded.eos_ids


def test_numbers_go_to_weights_and_biases(folder, tmp_path, monkeypatch):
    logged, started = [], {}
    run = SimpleNamespace(log=lambda values, **_: logged.append(values), define_metric=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: started.update(options) or run))
    trainer = GRPOTrainer(folder, odd, wandb="sums", run_dir=tmp_path / "run", **SHORT | {"steps": 1})
    trainer.train(PROMPTS)
    assert (started["project"], started["config"]["group_size"]) == ("sums", 4)
    (reward,) = {value for values in logged for name, value in values.items() if name.endswith("/reward")}
    assert reward == trainer.run.lines()[0]["reward"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused("wandb needs the package of this name"):
        GRPOTrainer("nowhere", odd, wandb="sums")
