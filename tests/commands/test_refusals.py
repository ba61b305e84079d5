"""Checks that commands refuse bad input of every kind in one sentence, before there is a run."""

import json
import shlex
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import pytest
from command_helpers import refusal
from tiny import STORIES, needs_data, refused, write_rows

from grpo_jax import commands
from grpo_jax.commands import evaluate, flags, grpo
from grpo_jax.data.types import Component
from grpo_jax.errors import UsageError
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.rewards.processes import Grader
from grpo_jax.rewards.reward import to_rewards
from grpo_jax.training import prepare

TRAIN = "train --run-dir run --no-compilation-cache --model model"
GRPO = f"{TRAIN} --task rows.jsonl --num-prompts 4 --max-tokens 8"
STARTS = {
    "train": "train --run-dir run",
    "": "",
    "task": f"{GRPO}",
    "grpo": f"{GRPO} --reward rewards.py:low",
    "episodes": f"{GRPO} --max-turns 3",
    "sft": f"{TRAIN} --method sft --task rows.jsonl",
    "taught": f"{TRAIN} --method sft --task rows.jsonl --teacher teacher --distillation jsd",
    "dpo": f"{TRAIN} --method dpo --task rows.jsonl",
    "kto": f"{TRAIN} --method kto --task rows.jsonl",
    "reward-model": f"{TRAIN} --method reward-model --task rows.jsonl",
}
# start, further arguments, words of the refusal
REFUSED = [
    ("train", "--method sft --critic shared", "--critic is an option of --method grpo and ppo"),
    ("train", "--method grpo --critic_learning_rate=1", "critic_learning_rate has no effect while critic is 'none'"),
    ("train", "--method sft --no-whiten", "--no-whiten is an option of --method grpo and ppo"),
    ("train", "--method sft --reward f", "--reward is an option of --method grpo and ppo"),
    ("train", "--method dpo --data ''", "--task is needed: name a file of pairs"),
    ("train", "--method sft --data nowhere.jsonl", "there is no nowhere.jsonl"),
    ("train", "--method sft --num-prompts 8", "the method is sft: set its batch size with --num-rows"),
    ("train", "--num-pairs 8", "the method is grpo: set its batch size with --num-prompts"),
    ("train", "--method pop", "there is no method pop: is it ppo or dpo?"),
    ("train", "--method gspo", "there is no method gspo: --preset gspo names it"),
    ("", "evaluate somewhere --task gsm8k --samples 0", "samples is 0"),
    ("", "evaluate somewhere --task gsm8k --samples 99999999999", "samples is 99999999999"),
    ("", f"evaluate somewhere --task gsm8k --seed {2**32}", f"seed is {2**32}"),
    ("", "evaluate model --task rows.jsonl --reward rewards.py:low --step 3", "model is no run"),
    ("task", "--task ''", "--task is needed"),
    ("task", "", "--reward is needed for rows.jsonl"),
    ("task", "--reward 'lenght(maximum=1)'", "no built-in reward 'lenght'"),
    ("task", "--reward 'exact_answer(column=\"nope\")'", "compares with the column 'nope'"),
    ("task", "--reward rewards.py:low 'exact_answer(column=\"nope\")'", "compares with the column 'nope'"),
    ("task", "--reward 'repetition(n=1e9)'", "is 1000000000.0: it must be a whole number"),
    ("task", "--reward 'repetition(n=1e9)' --dry-run", "it must be a whole number"),
    ("", "train --resume --config numbers.json", "run_dir is 3"),
    ("grpo", "--data x", "--data belongs to"),
    ("task", "--task gsm8k --prompt-column question", "--prompt-column is for rows of your own"),
    ("task", "--task math", "--data is needed for math"),
    ("grpo", "--max-tokens 64", "max_tokens is 64"),
    ("grpo", f"--group-size {10**9}", "less than 2^31 tokens"),
    ("grpo", f"--lora-rank {10**30}", "lora_rank"),
    ("grpo", "--reward-memory-mb 0", "memory_mb is 0"),
    ("grpo", "--stop-code 256", "stop_code is 256"),
    ("grpo", "--distillation k1", "need a teacher"),
    ("grpo", "--teacher x --distillation k1 --control", "a teacher would teach it too"),
    ("episodes", "--tools game.py:add --reward exact_answer", "chat template"),
    ("episodes", "--tools game.py:none --reward exact_answer", "has no 'none'"),
    ("episodes", "--tools game.py:add --environment game.py:make", "give one of them"),
    ("episodes", "--environment-factory game.py:Game", "chat template"),
    ("episodes", "--environment-factory game.py:Nobody", "has no 'Nobody'"),
    ("episodes", "--environment-factory game.py:add", "environment_factory cannot be called"),
    ("episodes", "--environment-factory game.py:Game --template {prompt}", "leave out --template"),
    ("episodes", "--agent game.py:talk", "no chat template"),
    ("episodes", "--agent game.py:nobody", "has no 'nobody'"),
    ("episodes", "--agent game.py:add --system x", "leave out --template, --system"),
    ("episodes", "--agent game.py:add --reply-deadline 5 --reply-budget 5", "reply_budget is for processes"),
    ("episodes", "--agent game.py:add --tools game.py:add", "give one of them"),
    ("episodes", "--environment game.py:make", "environment_tokens is 0"),
    ("episodes", "--environment game.py:nobody --environment-tokens 9", "has no 'nobody'"),
    ("task", "--tools game.py:add --reward exact_answer", "tools has no effect while max_turns is 1"),
    ("grpo", "--engine-folder x", "engine_folder has no effect while engine is ()"),
    ("grpo", "--engine http://127.0.0.1:9 --devices 2 --sampler-devices 1", "is 1, but an engine samples"),
    ("grpo", "--devices 4 --sampler-devices 2 --sampler-tensor 2", "is 2, but the model has 1 key-value heads"),
    ("grpo", "--engine http://127.0.0.1:9 --top-p 0.8", "set support to sampler, for vLLM and without staleness"),
    ("grpo", "--engine http://127.0.0.1:9 --top-k 2 --support sampler --staleness 1", "without staleness"),
    ("grpo", "--engine http://127.0.0.1:9 --min-p 0.1 --support sampler --engine-kind sglang", "for vLLM"),
    ("grpo", "--lora-rank 2 --lora-targets q_proj q_proj", "lora_targets is q_proj, q_proj: give each value once"),
    ("grpo", "--lora-alpha 3", "lora_alpha has no effect while lora_rank is 0"),
    ("sft", "--lora-targets q_proj", "lora_targets has no effect while lora_rank is 0"),
    ("dpo", "--keep-best --eval-every 0", "keep_best has no effect while eval_every is 0"),
    ("grpo", "--patience 2 --eval-every 0", "patience has no effect while eval_every is 0"),
    ("", "evaluate model --task rows.jsonl --tools game.py:add", "tools has no effect while max_turns is 1"),
    ("grpo", "--num-generations 4", "no option num_generations: num_generations is called group_size here"),
    ("grpo", "--beta 0", "beta is called kl_coef here"),
    ("grpo", "--lr 1e-4", "no option lr: lr is called learning_rate here"),
    ("sft", "--bf16", "bf16 is called dtype here"),
    ("train", "--num-train-epochs=3", "num_train_epochs is called steps here"),
    ("sft", "--batch-size 4", "batch_size is called num_rows here"),
    ("kto", "--gradient-accumulation-steps 4", "called num_completions here (it multiplies a batch, and pieces only"),
    ("grpo", "--use-vllm", "use_vllm is called engine here (this process samples, unless"),
    ("dpo", "--report_to wandb", "report_to is called wandb here"),
    ("grpo", "--load_in_4bit", "load_in_4bit is called quantize here (set it to nf4 or int8, with lora_rank)"),
    ("grpo", "--reward_funcs f", "reward_funcs is called reward here (it takes (examples, completions)"),
    ("grpo", "--callbacks f", "no option callbacks: on_rollout and on_line"),
    ("sft", "--task ''", "--task is needed"),
    ("grpo", "--optimizer adam", "no optimizer 'adam': take adamw or muon, or name your own as file.py:name"),
    ("kto", "--optimizer rewards.py:none", "has no 'none'"),
    ("grpo", "--optimizer rewards.py:low", "must take a schedule, but: TypeError"),
    ("dpo", "--optimizer rewards.py:low", "must take a schedule, but: TypeError"),
    ("reward-model", "--optimizer rewards.py:low --weight-decay 0.1", "weight_decay is 0.1, but your own optimizer"),
    ("grpo", "--optimizer rates.py:ready --decay linear", "decay has no effect on an optax transformation"),
    ("sft", "--optimizer rates.py:ready --learning-rate 1e-3", "learning_rate has no effect on an optax"),
    ("grpo", "--kl-horizon 5000", "no option kl_horizon: kl_coef always moves towards kl_target by at most a fifth"),
    ("grpo", "--microbatches 2", "microbatches is called piece_tokens here (it is the largest number of tokens"),
    ("grpo", "--reply-budget 5", "reply_budget is for tasks with an environment"),
    ("", "evaluate model --task rows.jsonl --reply-deadline 5", "reply_deadline is for tasks with an environment"),
    ("task", "--reward std=rewards.py:low", "a reward is called std, as is a deviation in metrics.jsonl"),
    ("task", "--reward a=rewards.py:low a_std=exact_answer", "a reward is called a_std"),
    ("grpo", "--dry-run --curriculum 5 --curriculum-bound 0.5", "curriculum_bound is for the levels of generators"),
    ("grpo", "--dry-run --filter-metric no --max-rollouts 2", 'filter_metric "no" is no reward'),
    ("grpo", "--dry-run --max-turns 2", "this one has none: leave them out"),
    ("grpo", "--dry-run --lora-rank 2 --lora-targets in_proj_z", "for this model"),
    ("sft", "--task talks.jsonl --completion-column answer", "talks.jsonl, line 1 has no column answer"),
    ("sft", "--task talks.jsonl --prompt-column question", "talks.jsonl, line 1 has no column"),
    ("sft", "--task texts.jsonl --completion-column answer", "texts.jsonl, line 1 has no column answer"),
    ("sft", "--optim muon", "optim is called optimizer here"),
    ("sft", "--task numbers.jsonl", "numbers.jsonl, line 2: column completion"),
    ("sft", "--completion-column answer", "set --completion-column"),
    ("sft", "--max-tokens 1", "no completion is left"),
    ("sft", "--num-rows 99", "num_rows is 99, but there are 58 rows for training: set it to 1 to 58"),
    ("sft", "--steps 0", "steps is 0"),
    ("sft", "--quantize int8", "quantize int8"),
    ("sft", "--teacher DIR", "distillation is none"),
    ("taught", "--nll-coef nan", "nll_coef is nan"),
    ("taught", "--distillation k1", "distillation k1 is an advantage"),
    ("taught", "--teacher ''", "distillation jsd needs a teacher"),
    ("taught", "--distillation-top-k 99", "top_k is 99, but the model has"),
    ("taught", "--num-rows 12 --microbatches 2 --devices 8 --fsdp 4", "multiple of microbatches x data x fsdp"),
    ("dpo", "--task ''", "--task is needed"),
    ("dpo", "--tau 0.5", "tau is no constant of --preference-loss dpo"),
    ("dpo", "--preference-loss simpo --label-smoothing 0.1", "choose dpo or robust or length-normalized"),
    ("dpo", "--preference-loss robust --label-smoothing 0.5", "label_smoothing is 0.5"),
    ("dpo", "--num-pairs 99", "num_pairs is 99, but there are"),
    ("dpo", "--max-tokens 1", "no pair is left"),
    ("dpo", "--heldout-share 0", "0 are held out"),
    ("kto", "--beta 0", "beta is 0.0"),
    ("kto", "--desirable-weight 0 --undesirable-weight 0", "so nothing is learned"),
    ("kto", "--num-completions 999", "num_completions is 999, but there are"),
    ("reward-model", "--bins 0", "bins is 0"),
    ("reward-model", "--model granite", "no class for reward models of granite"),
]


@pytest.mark.parametrize(("start", "args", "words"), REFUSED, ids=[" ".join(row[:2]) for row in REFUSED])
def test_bad_input_is_refused_before_a_run_exists(folder, capsys, start, args, words):
    assert words in refusal(capsys, *STARTS[start].split(), *shlex.split(args))
    assert not (folder / "run").exists()


@pytest.mark.parametrize("command", ["evaluate", "sample"])
@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"method": "reward-model", "heldout_share": 0.1}, "is the run of a reward model, which writes no completions"),
        ({"method": "dpo", "heldout_share": 0.1}, "learned from rows without a reward: name others with --task"),
    ],
)
def test_a_run_without_a_task_names_itself(folder, tmp_path, capsys, command, saved, words):
    (tmp_path / "checkpoints/x").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(saved | {"task": "rows.jsonl"}))
    assert words in refusal(capsys, command, tmp_path)
    has_task = refusal(capsys, command, tmp_path, "--task", "rows.jsonl", "--reward", "rewards.py:low")
    assert (words in has_task) == (saved["method"] == "reward-model")


TWICE = [
    ("grpo", "--reward exact_answer", "--reward is given twice, as '--reward rewards.py:low' and as '--reward exact"),
    ("sft", "--config numbers.json --config other.json", "--config is given twice, as '--config numbers.json' and"),
]


@pytest.mark.parametrize(("start", "args", "words"), TWICE)
def test_lists_and_files_of_options_are_given_once(folder, capsys, start, args, words):
    (folder / "numbers.json").write_text("{}")
    (folder / "other.json").write_text("{}")
    assert words in refusal(capsys, *STARTS[start].split(), *args.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--seed", "3", "--seed=4"), "--seed is given twice, as '--seed 3' and as '--seed=4': the last one counts"),
        (("--no-heldout", "--heldout"), "--heldout is given twice, as '--no-heldout' and as '--heldout'"),
        (("--dry_run", "--no-dry-run"), "--dry-run is given twice, as '--dry_run' and as '--no-dry-run'"),
        (("--seed", "4", "--seed", "4"), ""),
    ],
)
def test_a_note_has_both_values_of_an_option(capsys, args, words):
    @dataclass(frozen=True)
    class Options:
        seed: int = 0
        heldout: bool = False
        dry_run: bool = False

    flags.read_flags(Options, args=[*args])
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == bool(words)


@pytest.mark.parametrize("start", ["grpo", "grpo --method ppo", "sft", "taught", "dpo", "kto", "reward-model"])
def test_a_warmup_that_never_ends_is_refused(folder, capsys, start):
    start, *method = start.split(maxsplit=1)
    line = [*STARTS[start].split(), *" ".join(method).split()]
    assert "warmup_steps is 3: set it below the 3 updates" in refusal(capsys, *line, "--steps", 3, "--warmup-steps", 3)
    assert not (folder / "run").exists()


def test_dry_run_prints_the_plan_without_loading_weights(folder, capsys):
    (folder / "half.py").write_text("def half(rows, texts): return [1 / len(text) for text in texts]\n")
    (folder / "hides.py").write_text("def hides(rows, texts): raise ValueError('\\x1b[2J')\n")
    args = [*STARTS["task"].split(), "--reward", "rewards.py:low", "half.py:half", "hides.py:hides"]
    args += ["--lora-rank", "2", "--dry-run"]
    commands.main(args)
    printed = capsys.readouterr().out
    assert "plan: " in printed
    assert "the first prompt, as the model reads it: '" in printed
    assert "rewards of the empty completion: low 0.0, half ZeroDivisionError: division by zero" in printed
    assert r"hides ValueError: \x1b[2J" in printed  # visible, not as a control character
    assert not (folder / "run").exists()
    params = load_pretrained(folder / "model", weights=False).params
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("options", "usual"), [(("--learning-rate", "1e-6"), "4e-04"), (("--lora-rank", "2"), "3e-03")]
)
def test_rates_ten_times_off_are_warnings(folder, tmp_path, capsys, options, usual):
    args = [*STARTS["task"].split(), "--reward", "rewards.py:low", *options]
    commands.main([*args, "--dry-run"])
    sentence = f"but {usual} trained models of about"
    assert sentence in capsys.readouterr().out
    short = ("--steps", "1", "--eval-every", "0", "--num-heldout", "2", "--run-dir", tmp_path / "run")
    commands.main([*args, *map(str, short)])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.index(sentence) < printed.index("evaluating the initial model")
    commands.main([*args, "--learning-rate", usual, "--dry-run"])
    assert "trained models of about" not in capsys.readouterr().out


def test_a_dry_run_finds_missing_packages_of_trackers(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    args = (*STARTS["task"].split(), "--reward", "rewards.py:low", "--wandb", "project", "--dry-run")
    assert "wandb needs the package of this name" in refusal(capsys, *args)


def test_rewards_are_tried_on_the_first_row():
    row, seen = {"prompt": "1+1=", "solution": "two", "answer": "2"}, []
    pretrained = SimpleNamespace(tokenizer=lambda text, **_: {"input_ids": list(text.encode())})

    def tried(**rewards):
        named = {name: Component(reward, 0.0 if name == "logged" else 1.0) for name, reward in rewards.items()}
        return prepare.try_rewards(SimpleNamespace(environment=None, rewards=to_rewards(named)), row, pretrained, 3)

    def words(rows, texts):
        seen.append((rows, list(texts)))
        return [float(len(text.split()[0])) for text in texts]

    def fails(rows, texts):
        raise RuntimeError("no such thing")

    scores = tried(words=words, logged=fails)
    assert seen == [([row] * 3, [""] * 3), ([row] * 3, ["two\n#### 2"] * 3)]
    assert "IndexError" in scores["the empty completion"]["words"]
    assert scores["the row's own answer"]["words"] == 3.0
    for rewards in ({"fails": fails}, {"fails": fails, "logged": lambda rows, texts: [1.0] * len(texts)}):
        with refused("the reward fails fails on the first prompt, so nothing is sampled: RuntimeError: no such"):
            tried(**rewards)
    tried(fails=fails, words=words)
    with Grader("grpo_jax.rewards.builtin:repetition", arguments={"n": 1e9}, chunk="prompt") as grader:
        with refused("the reward grader fails on the first prompt"):
            tried(grader=grader)
        assert not any(grader.counts.values())
        assert not grader.messages


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_rewards_that_cannot_answer_are_refused_before_sampling(folder, monkeypatch, capsys, command):
    args = {"train": STARTS["task"], "evaluate": "evaluate model --task rows.jsonl --max-tokens 8"}[command].split()
    monkeypatch.setattr(evaluate, "sample_and_score", lambda *_, **__: pytest.fail("it samples"))
    monkeypatch.setattr(flags, "open_run", lambda *_: pytest.fail("the run begins"))
    (folder / "raises.py").write_text("def low(rows, texts): raise RuntimeError('no such column')")
    sentence = refusal(capsys, *args, "--reward", "raises.py:low")
    assert "the reward low fails on the first prompt" in sentence
    assert "no such column" in sentence
    sentence = refusal(capsys, *args, "--reward", "rewards.py:low", "--reward-deadline", 1e-9)
    assert "no answer within its deadline" in sentence


def test_runs_too_large_for_memory_are_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "memory_limit", lambda devices: 2**14)
    words = refusal(capsys, *STARTS["grpo"].split())
    assert "the run needs about" in words
    assert not (folder / "run").exists()


@needs_data
def test_overlong_prompts_are_dropped_at_the_models_limit(tmp_path):
    texts = [f"Once there was a {animal}." for animal in ("cat", "dog", "bird", "fish", "bear", "frog")]
    texts.append("Once there was a cat. " * 50_000)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in texts])
    given = ["--model", STORIES, "--task", rows, "--reward", "length(maximum=3)", "--max-tokens", 12]
    given += ["--num-prompts", 2, "--run-dir", tmp_path / "run"]
    config = flags.parse(grpo.Config, None, [str(arg) for arg in given])
    with grpo.task_of(config, load_pretrained(STORIES)) as task:
        assert task.prompts(0).tokens.width <= 500  # 512 of the model, less 12
        assert "1 longer than 500 tokens" in " ".join(task.notes)


def test_a_sentence_is_one_line_whatever_it_quotes():
    error = str(UsageError("there is no column a\n\nb\u2028c" + "d" * 5000 + ": name another"))
    assert len(error.splitlines()) == 1
    assert len(error) < 1000
    assert error.startswith("there is no column a  b c")
    assert error.endswith("d: name another")
