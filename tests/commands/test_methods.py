"""`grpo-jax train` by every method, on a model so small that a run takes seconds."""

import inspect
import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments.tasks import arithmetic
from grpo_jax import hosts
from grpo_jax.commands import evaluate, kto, sft, train
from grpo_jax.commands.dpo import CONSTANTS
from grpo_jax.commands.offline import encoding
from grpo_jax.data.preferences import encode_preferences, read_preferences
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import load_pretrained, save_pretrained
from grpo_jax.models.lora import merge
from grpo_jax.models.peft import load_adapter
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.sft import text_nll
from grpo_jax.rewards.learned import load_reward_model
from grpo_jax.runs import flags
from grpo_jax.runs.export import Options, export

CONFIG = ModelConfig(arithmetic.TEXT.vocab_size, 16, 32, 1, 2, 1, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and rows that serve every method."""
    folder = tmp_path_factory.mktemp("methods")
    for name, config in (("model", CONFIG), ("teacher", replace(CONFIG, initializer_range=0.3))):
        save_pretrained(folder / name, jax.jit(decoder_policy(config).init)(jax.random.key(3)), config)
        arithmetic.TEXT.save_tokenizer(folder / name)
    sums = [(f"{i}+{j}=", i + j) for i in range(8) for j in range(8)]
    rows = [
        {"prompt": prompt, "completion": str(total), "chosen": str(total), "rejected": str(total + 1)}
        for prompt, total in sums
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(
        "def low(rows, texts): return [sum(map(text.count, '01234')) for text in texts]\n"
    )
    return folder


def small(folder):
    """Options of a short run by rewards."""
    steps = ("--steps", 2, "--eval-every", 1, "--learning-rate", 1e-2)
    return "--num-prompts", 4, "--max-tokens", 4, *steps, "--reward", f"{folder}/rewards.py:low"


def run(folder, out, method, *args):
    """The command, as the program calls it; gives the lines of metrics.jsonl and the results."""
    rows = "--data" if method in ("reward-model", "dpo", "kto") else "--task"
    given = ["--method", method, "--model", folder / "model", rows, folder / "rows.jsonl"] if method else []
    train.command([str(arg) for arg in [*given, "--run-dir", out, "--no-compilation-cache", *args]])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((out / "results.json").read_text())


def refused(capsys, *args) -> str:
    with pytest.raises(SystemExit) as ended:
        train.command([str(arg) for arg in args])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def distance(one, other):
    """The largest difference of each leaf."""
    return jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), one, other)


# ---- prompts


def with_template(folder, path, template):
    """Returns a copy of the model that has a chat template."""
    shutil.copytree(folder / "model", path)
    (path / "chat_template.jinja").write_text(template)
    return path


SIZES = {"dpo": "--num-pairs", "reward-model": "--num-pairs", "kto": "--num-completions", "sft": "--num-rows"}


@pytest.mark.parametrize("method", ["grpo", "ppo", *SIZES])
def test_every_method_puts_text_into_the_chat_template_by_default(folder, tmp_path, capsys, method):
    model = with_template(folder, tmp_path / "model", "{{ raise_exception('it was filled in') }}")
    rows = "--data" if method in ("reward-model", "dpo", "kto") else "--task"
    told = ("--method", method, "--model", model, rows, folder / "rows.jsonl", "--run-dir", tmp_path / "run")
    told += () if method in SIZES else ("--reward", f"{folder}/rewards.py:low")
    size = SIZES.get(method, "--num-prompts")
    assert "it was filled in" in refused(capsys, *told, size, 999)
    said = refused(capsys, *told, size, 999, "--chat", "False")
    assert "999" in said
    assert "it was filled in" not in said


def test_a_transcript_becomes_messages_by_default(folder, tmp_path, capsys):
    template = "{% for m in messages %}{{ raise_exception(m.role ~ ' ' ~ m.content) if loop.last }}{% endfor %}"
    talk = "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: {i}\n\nAssistant:"
    rows = [{"chosen": talk.format(i=i) + "4", "rejected": talk.format(i=i) + "5"} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = ("--model", with_template(folder, tmp_path / "model", template), "--data", tmp_path / "rows.jsonl")
    said = refused(capsys, "--method", "dpo", *told, "--heldout-share", 0.5, "--run-dir", tmp_path / "run")
    assert re.search(r"refuses prompt 0: user \d$", said)


@pytest.mark.parametrize("method", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft", "kto"))])
@pytest.mark.parametrize("has_template", [True, False])
def test_the_plan_of_a_run_says_how_text_is_encoded(folder, tmp_path, capsys, method, has_template):
    model = folder / "model"
    if has_template:
        model = with_template(folder, tmp_path / "model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    run(folder, tmp_path / "run", method, "--steps", 1, "--eval-every", 0, "--model", model)
    how = "are user messages of the chat template" if has_template else "are encoded without a chat template"
    assert f"plan: prompts that are text {how}" in capsys.readouterr().out


# ---- PPO


@pytest.fixture(scope="module")
def ppo_run(folder, tmp_path_factory):
    """A run with a critic of its own and a control: its folder, lines and results."""
    out = tmp_path_factory.mktemp("ppo") / "run"
    return out, *run(folder, out, "ppo", *small(folder), "--control")


def test_ppo_has_its_own_defaults_a_table_a_page_and_a_control(ppo_run):
    out, lines, results = ppo_run
    assert dict.fromkeys(line["phase"] for line in lines) == dict.fromkeys(["ppo", "control"])
    assert all("explained_variance" in line for line in lines if line["step"])
    assert [line["step"] for line in lines if line["phase"] == "ppo" and "heldout_avg" in line] == [0, 1, 2]
    assert set(results) == {"before", "after", "control", "params_sha256"}
    assert {"report.html"} <= {file.name for file in out.iterdir()}
    assert '"rollouts":{"ppo":[[1,[' in (out / "report.html").read_text()
    options = json.loads((out / "config.json").read_text())["train"]["run"]
    assert (options["sampling"]["group_size"], options["loss"]["preset"]) == (1, "lite_ppo")
    assert (options["loss"]["kl_coef"], options["loss"]["kl_in_reward"]) == (0.02, True)


@pytest.mark.slow
def test_a_run_of_ppo_is_resumed_by_its_folder_alone(ppo_run, folder, tmp_path):
    run(folder, tmp_path / "cut", "ppo", *small(folder), "--steps", 1)
    lines, results = run(folder, tmp_path / "cut", "", "--resume", "--steps", 2)
    assert lines == [line for line in ppo_run[1] if line["phase"] == "ppo"]
    assert results == {name: row for name, row in ppo_run[2].items() if name != "control"}


def test_the_policy_of_ppo_is_exported_and_evaluated_without_the_critic(ppo_run, folder, tmp_path):
    out, _, results = ppo_run
    assert export(Options(out, tmp_path / "exported")) == 2
    before, after = (load_pretrained(path).params for path in (folder / "model", tmp_path / "exported"))
    assert any(leaf > 0 for leaf in jax.tree.leaves(distance(before, after)))
    evaluate.main(evaluate.parse([str(out), "--samples", "7", "--out", str(tmp_path / "numbers")]))
    numbers = json.loads((tmp_path / "numbers/numbers.json").read_text())
    assert numbers["options"]["phase"] == "ppo"
    assert numbers["avg"] == pytest.approx(results["after"]["avg"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--critic", "shared"], ["--lora-rank", 2], ["--lora-rank", 2, "--group-size", 4]])
def test_other_critics_and_adapters_are_exported_too(folder, tmp_path, options):
    out = tmp_path / "run"
    run(folder, out, "ppo", *small(folder), *options, "--eval-every", 0)
    export(Options(out, tmp_path / "exported"))
    before, after = (load_pretrained(path).params for path in (folder / "model", tmp_path / "exported"))
    moved = distance(before, after)
    assert any(leaf > 0 for leaf in jax.tree.leaves(moved))
    assert (moved["embedding"] == 0) == ("--lora-rank" in options)


# ---- supervised fine-tuning


SFT = ("--steps", 12, "--num-rows", 16, "--learning-rate", 1e-2, "--eval-every", 6, "--checkpoint-every", 4)


def test_sft_learns_completions_and_is_exported_and_evaluated(folder, tmp_path, capsys):
    out = tmp_path / "run"
    lines, results = run(folder, out, "sft", *SFT)
    assert {line["phase"] for line in lines} == {"sft"}
    held = [line["heldout_nll"] for line in lines if "heldout_nll" in line]
    assert len(held) == 3  # before, during, after
    assert held[0] == pytest.approx(results["before"]["nll"], rel=1e-5)
    assert held[-1] == pytest.approx(results["after"]["nll"], rel=1e-5)
    assert results["after"]["nll_high"] < results["before"]["nll_low"]
    assert results["after"]["change"] == pytest.approx(held[-1] - held[0], rel=1e-4)
    said = capsys.readouterr().out
    assert "held-out completions" in said
    assert "58 texts to train on" in said
    assert {"report.html", "model"} <= {file.name for file in out.iterdir()}

    assert export(Options(out, tmp_path / "exported")) == 12
    assert "tags: [sft, grpo_jax]" in (tmp_path / "exported/README.md").read_text()
    assert load_pretrained(tmp_path / "exported").params.keys() == load_pretrained(folder / "model").params.keys()
    # Of its own rows the held-out prompts, which are those that a task of these rows holds out.
    given = [str(out), "--reward", "exact_answer(column='completion')", "--max-tokens", "4"]
    options = evaluate.parse([*given, "--out", str(tmp_path / "numbers")])
    evaluate.main(options)
    assert "no longer those of the run" not in capsys.readouterr().out
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "numbers/completions.jsonl").read_text().splitlines()]
    assert len(asked) == 6


def test_no_parameters_are_evaluated_twice(folder, tmp_path, monkeypatch):
    evaluated = []
    monkeypatch.setattr(sft, "text_nll", lambda *args, **options: evaluated.append(1) or text_nll(*args, **options))
    options = (*SFT, "--steps", 4, "--eval-every", 2)
    run(folder, tmp_path / "run", "sft", *options)
    assert len(evaluated) == 3  # steps 0, 2 and 4
    run(folder, tmp_path / "uneven", "sft", *options, "--eval-every", 3)
    assert len(evaluated) == 3 + 3  # steps 0, 3 and 4


def test_prompts_are_not_learned_and_completions_end_with_eos(folder):
    args = ["--model", str(folder / "model"), "--task", str(folder / "rows.jsonl"), "--max-tokens", "2"]
    sft = train.module_of("sft")
    config = flags.parse(sft.Config, None, args)
    pretrained = load_pretrained(folder / "model")
    packed, _, _, notes = sft.encode_texts(config, sft.read_completions(config), pretrained)
    assert "dropped of 58 completions" in notes[0]  # of two digits and EOS
    eos_id = arithmetic.TEXT.eos_id
    for ids, numbers, learned in zip(packed.ids, packed.texts, packed.completion_mask, strict=True):
        for number in range(1, numbers.max() + 1):
            answer = ids[(numbers == number) & learned].tolist()
            prompt = arithmetic.TEXT.decode(ids[(numbers == number) & ~learned])
            assert answer[-1] == eos_id
            assert eval(prompt.removesuffix("=")) == int(arithmetic.TEXT.decode(answer[:-1]))


@pytest.mark.slow
def test_a_run_of_sft_is_resumed_with_adapters_and_more_steps(folder, tmp_path):
    constant = (*SFT, "--decay", "none", "--lora-rank", 2)
    whole = run(folder, tmp_path / "whole", "sft", *constant)
    run(folder, tmp_path / "cut", "sft", *constant, "--steps", 6)
    again = run(folder, tmp_path / "cut", "", "--resume", "--steps", 12)
    assert again[1] == whole[1]
    assert again[0][-1] == whole[0][-1]
    export(Options(tmp_path / "cut", tmp_path / "adapters", adapter=True))
    assert (tmp_path / "adapters/adapter_config.json").exists()


@pytest.mark.slow
def test_a_run_on_a_quantised_base_is_resumed_and_exported_onto_the_original(folder, tmp_path):
    options = (*SFT, "--decay", "none", "--lora-rank", 2, "--lora-targets", "q_proj", "--quantize", "nf4")
    whole = run(folder, tmp_path / "whole", "sft", *options)
    run(folder, tmp_path / "cut", "sft", *options, "--steps", 6)
    again = run(folder, tmp_path / "cut", "", "--resume", "--steps", 12)
    assert again[1] == whole[1]
    export(Options(tmp_path / "cut", tmp_path / "adapters", adapter=True))
    export(Options(tmp_path / "cut", tmp_path / "exported"))
    before, after = (load_pretrained(path).params for path in (folder / "model", tmp_path / "exported"))
    moved = distance(before, after)["layers"]
    assert moved["attention"]["q_proj"]["kernel"] > 0
    assert moved["mlp"]["up_proj"]["kernel"] == 0
    merged = merge(load_adapter(tmp_path / "adapters", before))
    jax.tree.map(np.testing.assert_array_equal, merged, after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("method", ["grpo", "ppo", "dpo", "kto"])
def test_every_method_trains_adapters_on_a_quantised_base(folder, tmp_path, method, kind):
    is_of_pairs = method in ("dpo", "kto")
    options = {"dpo": DPO, "kto": KTO}[method] if is_of_pairs else small(folder)
    run(folder, tmp_path / "run", method, *options, "--lora-rank", 2, "--quantize", kind)
    export(Options(tmp_path / "run", tmp_path / "exported"))
    given = [tmp_path / "run", "--reward", f"{folder}/rewards.py:low", "--max-tokens", 4, "--out", tmp_path / "numbers"]
    given += ["--task", folder / "rows.jsonl"] if is_of_pairs else []
    evaluate.main(evaluate.parse([str(arg) for arg in given]))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--quantize", "int8"], "quantize int8 is of frozen parameters, and without LoRA all are trained"),
        (
            ["--completion-column", "answer"],
            "line 1 has no column answer: its columns are prompt, completion, chosen, rejected; set --completion-co",
        ),
        (["--completion-column", "prompt"], "--completion-column names the column of the prompt"),
        (["--task", "gsm8k"], "gsm8k is a task of rewards"),
        (["--task", ""], "--task is needed"),
        (["--max-tokens", 1], "no completion is left"),
        (["--num-rows", 99], "a step of 99 rows is asked for"),
        (["--steps", 0], "steps is 0: it must be at least 1"),
        (["--seed", -1], "seed is -1: it must be between 0 and 2^32 - 1"),
        (["--teacher", "DIR"], "there is a teacher, but distillation is none"),
        (["--distillation", "jsd"], "distillation jsd needs a teacher"),
        (["--nll-coef", 1], "nll_coef is 1.0, but distillation is none"),
        (["--distillation-top-k", 4], "distillation_top_k is 4, but distillation is none"),
        (["--teacher", "DIR", "--distillation", "forward_kl", "--nll-coef", "nan"], "nll_coef is nan"),
        (["--teacher", "DIR", "--distillation", "reverse_kl", "--distillation-beta", 0.3], "reverse_kl has no mixture"),
        (["--teacher", "DIR", "--distillation", "jsd", "--distillation-top-k", 99], "top_k is 99, but the model has"),
    ],
)
def test_what_sft_cannot_learn_is_refused(folder, tmp_path, capsys, args, sentence):
    where = ["--model", folder / "model", "--task", folder / "rows.jsonl", "--run-dir", tmp_path / "run"]
    assert sentence in refused(capsys, "--method", "sft", "--no-compilation-cache", *where, *args)


def test_a_completion_that_is_no_text_is_named_by_its_line(folder, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+1=", "completion": 2}\n')
    where = ["--model", folder / "model", "--task", tmp_path / "rows.jsonl", "--run-dir", tmp_path / "run"]
    said = refused(capsys, "--method", "sft", "--no-compilation-cache", *where)
    assert "rows.jsonl, line 2: column completion holds a number, and should hold text" in said


@pytest.mark.slow
def test_sft_with_a_teacher_nears_it_and_goes_on_with_the_same_one_alone(folder, tmp_path, capsys):
    teacher = tmp_path / "teacher"
    shutil.copytree(folder / "teacher", teacher)
    taught = (*SFT, "--decay", "none", "--teacher", teacher, "--distillation", "forward_kl", "--nll-coef", 0.1)
    lines, results = run(folder, tmp_path / "whole", "sft", *taught)
    held = [(line["heldout_distillation"], line["heldout_nll"]) for line in lines if "heldout_nll" in line]
    assert held[-1][0] < 0.9 * held[0][0]
    assert held[-1][1] == pytest.approx(results["after"]["nll"], rel=1e-5)
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["distillation"] + 0.1 * lines[-1]["nll"], rel=1e-4)
    run(folder, tmp_path / "cut", "sft", *taught, "--steps", 6)
    again = run(folder, tmp_path / "cut", "", "--resume", "--steps", 12)
    assert again[1] == results
    assert again[0][-1] == lines[-1]
    content = bytearray((teacher / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (teacher / "model.safetensors").write_bytes(content)
    said = refused(capsys, "--resume", "--run-dir", tmp_path / "cut", "--no-compilation-cache")
    assert "model.safetensors of the teacher" in said


# ---- reward model


def test_a_reward_model_by_the_same_command_and_resumed(folder, tmp_path):
    options = ("--steps", 2, "--num-pairs", 8, "--eval-every", 1)
    out = tmp_path / "run"
    lines, results = run(folder, out, "reward-model", *options)
    assert {line["phase"] for line in lines} == {"reward_model"}
    assert np.isfinite(load_reward_model(out / "reward-model")([{"prompt": "1+1="}], ["2"])).all()
    assert run(folder, out, "", "--resume") == (lines, results)
    with pytest.raises(UsageError, match="reward model, and of no policy: take the run's folder reward-model"):
        export(Options(out, tmp_path / "exported"))


def test_the_folder_of_a_reward_model_is_of_the_last_step_and_is_repaired(folder, tmp_path):
    options = ("--num-pairs", 8, "--learning-rate", 1e-2, "--warmup-steps", 0, "--decay", "none")
    whole, out = tmp_path / "whole", tmp_path / "run"
    _, expected = run(folder, whole, "reward-model", *options, "--steps", 4)
    run(folder, out, "reward-model", *options, "--steps", 2)
    (out / "reward-model.partial-1").mkdir()  # of a process that was killed
    assert run(folder, out, "", "--resume", "--steps", 4)[1] == expected
    weights = [path / "reward-model/model.safetensors" for path in (whole, out)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    weights[1].write_bytes(weights[1].read_bytes()[:-10])
    run(folder, out, "", "--resume")
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [path.name for path in out.glob("reward-model*")] == ["reward-model"]


# ---- DPO


DPO = ("--steps", 8, "--num-pairs", 16, "--learning-rate", 1e-2, "--eval-every", 4, "--checkpoint-every", 4)


def test_dpo_learns_pairs_and_is_exported_and_evaluated(folder, tmp_path, capsys):
    out = tmp_path / "run"
    lines, results = run(folder, out, "dpo", *DPO)
    assert {line["phase"] for line in lines} == {"dpo"}
    held = [line for line in lines if "heldout_loss" in line]
    assert [line["step"] for line in held] == [0, 4, 8]
    assert held[0]["heldout_loss"] == pytest.approx(np.log(2))  # the policy is the reference, to the bit
    assert (held[0]["heldout_accuracy"], held[0]["heldout_margin"]) == (0.5, 0)
    assert held[-1]["heldout_loss"] == results["after"]["loss"]
    assert results["after"]["change"] == pytest.approx(results["after"]["loss"] - np.log(2))
    assert lines[-1]["margin"] > 0.05
    assert lines[-1]["loss"] < np.log(2)
    assert "held-out pairs" in capsys.readouterr().out
    assert {"report.html", "model"} <= {file.name for file in out.iterdir()}

    assert export(Options(out, tmp_path / "exported")) == 8
    assert "tags: [dpo, grpo_jax]" in (tmp_path / "exported/README.md").read_text()
    given = [str(out), "--task", str(folder / "rows.jsonl"), "--reward", "exact_answer(column='completion')"]
    evaluate.main(evaluate.parse([*given, "--max-tokens", "4", "--out", str(tmp_path / "numbers")]))
    assert json.loads((tmp_path / "numbers/numbers.json").read_text())["options"]["phase"] == "dpo"


@pytest.mark.slow
def test_a_run_of_dpo_is_resumed_and_keeps_its_reference(folder, tmp_path):
    constant = (*DPO, "--decay", "none", "--lora-rank", 2, "--preference-loss", "ipo", "--tau", 0.5)
    whole = run(folder, tmp_path / "whole", "dpo", *constant)
    run(folder, tmp_path / "cut", "dpo", *constant, "--steps", 4)
    again = run(folder, tmp_path / "cut", "", "--resume", "--steps", 8)
    assert again == whole


@pytest.mark.slow
def test_a_loss_without_reference_keeps_none(folder, tmp_path):
    lines, results = run(folder, tmp_path / "run", "dpo", *DPO, "--preference-loss", "simpo", "--steps", 1)
    assert "log_ratio_chosen" not in lines[-1]
    assert results["before"]["logprob_chosen"] < 0


def test_completions_of_pairs_end_with_eos_and_count_it(folder):
    dpo = train.module_of("dpo")
    args = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--max-tokens", "2"]
    pretrained = load_pretrained(folder / "model")
    preferences, _ = read_preferences(folder / "rows.jsonl")

    def encoded(*more):
        config = flags.parse(dpo.Config, None, [*args, *more])
        options = encoding(pretrained, config.model, config.max_tokens)
        return encode_preferences(pretrained.tokenizer, preferences, **options)

    kept = encoded()
    eos_id = arithmetic.TEXT.eos_id
    assert {(len(ids), ids[-1]) for pair in kept.answers for ids in pair} == {(2, eos_id)}
    assert any("longer than 2 tokens" in note for note in kept.notes)
    cut = encoded("--overlong", "truncate")
    assert any(pair[0][-1] != eos_id and pair[1][-1] != eos_id for pair in cut.answers)
    assert len(cut.answers) > len(kept.answers)


@pytest.mark.parametrize("name", ["dpo", "robust", "length-normalized", "ipo", "hinge", "simpo", "orpo", "cpo"])
def test_every_loss_has_constants_of_its_own_and_the_sources_defaults(name):
    dpo = train.module_of("dpo")
    assert dpo.loss_of(dpo.Config(preference_loss=name)).keywords == {}
    own = set(inspect.signature(dpo.LOSSES[name]).parameters) & set(CONSTANTS)
    keyword_only = {p.name for p in inspect.signature(dpo.LOSSES[name]).parameters.values() if p.kind == p.KEYWORD_ONLY}
    assert own == keyword_only
    config = dpo.Config(preference_loss=name, **dict.fromkeys(own, 0.25))
    assert dpo.loss_of(config).keywords == dict.fromkeys(own, 0.25)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--data", ""], "--data is needed"),
        (["--tau", 0.5], "tau is no constant of --preference-loss dpo: leave it out, or choose ipo"),
        (["--preference-loss", "simpo", "--label-smoothing", 0.1], "choose dpo or robust or length-normalized"),
        (["--beta", 0], "beta is 0.0: it must be above 0"),
        (["--beta", "nan"], "beta is nan: it must be above 0"),
        (["--preference-loss", "robust", "--label-smoothing", 0.5], "label_smoothing is 0.5: it must be at least 0"),
        (["--preference-loss", "simpo", "--gamma", -1], "gamma is -1.0: it must be at least 0"),
        (["--num-pairs", 99], "num_pairs is 99, but there are"),
        (["--max-tokens", 1], "no pair is left"),
        (["--max-tokens", 0], "max_tokens is 0: it must be at least 1"),
        (["--heldout-share", 0], "0 are held out"),
        (["--heldout-share", 2], "heldout_share is 2.0: it must be between 0 and 1"),
        (["--steps", 0], "steps is 0: it must be at least 1"),
        (["--seed", -1], "seed is -1: it must be between 0 and 2^32 - 1"),
    ],
)
def test_what_dpo_cannot_learn_is_refused(folder, tmp_path, capsys, args, sentence):
    where = ["--model", folder / "model", "--data", folder / "rows.jsonl", "--run-dir", tmp_path / "run"]
    assert sentence in refused(capsys, "--method", "dpo", "--no-compilation-cache", *where, *args)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--center-coef", "nan"], "center_coef is nan: it must be at least 0"),
        (["--center-coef", "inf"], "center_coef is inf"),
        (["--center-coef", -1], "center_coef is -1.0"),
        (["--bins", 0], "bins is 0: it must be at least 1"),
    ],
)
def test_what_a_reward_model_cannot_learn_is_refused(folder, tmp_path, capsys, args, sentence):
    where = ["--model", folder / "model", "--data", folder / "rows.jsonl", "--run-dir", tmp_path / "run"]
    assert sentence in refused(capsys, "--method", "reward-model", "--no-compilation-cache", *where, *args)
    assert not (tmp_path / "run").exists()


# ---- KTO


KTO = ("--steps", 8, "--num-completions", 16, "--learning-rate", 1e-2, "--eval-every", 4, "--checkpoint-every", 4)


@pytest.mark.slow
def test_kto_learns_ratings_and_is_resumed_exported_and_evaluated(folder, tmp_path, capsys):
    out, constant = tmp_path / "run", (*KTO, "--decay", "none", "--undesirable-weight", 0.75)
    lines, results = run(folder, out, "kto", *constant)
    assert {line["phase"] for line in lines} == {"kto"}
    held = [line for line in lines if "heldout_loss" in line]
    assert [line["step"] for line in held] == [0, 4, 8]
    assert held[0]["heldout_loss"] == pytest.approx(0.5 * 1.75 / 2)  # the policy is the reference
    assert (held[0]["heldout_accuracy"], held[0]["heldout_kl"]) == (0.5, 0)
    assert held[-1]["heldout_loss"] == results["after"]["loss"]
    assert lines[-1]["log_ratio_desirable"] > lines[-1]["log_ratio_undesirable"]
    assert lines[-1]["loss"] < lines[1]["loss"]
    said = capsys.readouterr().out
    assert "held-out completions" in said
    assert "good, " in said
    assert {"report.html", "model"} <= {file.name for file in out.iterdir()}

    run(folder, tmp_path / "cut", "kto", *constant, "--steps", 4)
    assert run(folder, tmp_path / "cut", "", "--resume", "--steps", 8) == (lines, results)

    assert export(Options(out, tmp_path / "exported")) == 8
    given = [str(out), "--task", str(folder / "rows.jsonl"), "--reward", "exact_answer(column='completion')"]
    evaluate.main(evaluate.parse([*given, "--max-tokens", "4", "--out", str(tmp_path / "numbers")]))
    assert json.loads((tmp_path / "numbers/numbers.json").read_text())["options"]["phase"] == "kto"


@pytest.mark.slow
def test_kto_learns_from_labels_and_from_one_prompt_where_nothing_is_estimated(folder, tmp_path, capsys):
    for name, prompts in (("many", 8), ("two", 2)):  # of two, one is held out
        rows = [{"prompt": f"{i % prompts}+1=", "completion": str(i), "label": i % 3 == 0} for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (*KTO, "--steps", 1, "--heldout-share", 0.4)
    _, results = run(folder, tmp_path / "run", "kto", *options, "--data", tmp_path / "many.jsonl")
    assert results["before"]["log_ratio_desirable"] == 0
    two = (*options, "--data", tmp_path / "two.jsonl")
    lines, _ = run(folder, tmp_path / "zero", "kto", *two, "--reference-point", "zero")
    assert lines[-1]["kl"] == 0
    where = ["--method", "kto", "--model", folder / "model", "--run-dir", tmp_path / "kl", "--no-compilation-cache"]
    assert "or take the reference point zero" in refused(capsys, *where, *two)


def test_completions_that_are_all_good_are_told_and_without_weight_refused(folder, tmp_path, capsys):
    rows = [{"prompt": f"{i % 8}+1=", "completion": str(i), "label": True} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (*KTO, "--steps", 1, "--heldout-share", 0.4, "--data", tmp_path / "rows.jsonl")
    run(folder, tmp_path / "run", "kto", *options)
    assert "all completions to train on are good" in (tmp_path / "run/warnings.jsonl").read_text()
    where = ["--method", "kto", "--model", folder / "model", "--run-dir", tmp_path / "no", "--no-compilation-cache"]
    said = refused(capsys, *where, *options, "--desirable-weight", 0)
    assert "all completions are good, and the weight of good ones is 0" in said


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--data", ""], "--data is needed"),
        (["--beta", 0], "beta is 0.0: it must be above 0"),
        (["--desirable-weight", -1], "desirable_weight is -1.0: it must be at least 0"),
        (["--desirable-weight", 0, "--undesirable-weight", 0], "so nothing is learned"),
        (["--num-completions", 0], "num_completions is 0: it must be at least 1"),
        (["--num-completions", 999], "num_completions is 999, but there are"),
        (["--max-tokens", 1], "no completion is left"),
        (["--max-tokens", 0], "max_tokens is 0: it must be at least 1"),
        (["--heldout-share", 0], "0 are held out"),
        (["--steps", 0], "steps is 0: it must be at least 1"),
        (["--seed", -1], "seed is -1: it must be between 0 and 2^32 - 1"),
    ],
)
def test_what_kto_cannot_learn_is_refused(folder, tmp_path, capsys, args, sentence):
    where = ["--model", folder / "model", "--data", folder / "rows.jsonl", "--run-dir", tmp_path / "run"]
    assert sentence in refused(capsys, "--method", "kto", "--no-compilation-cache", *where, *args)


# ---- what a run is made of


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_rows_rewards_or_weights(folder, tmp_path, capsys):
    """Each change is of what the first step does not show."""
    (tmp_path / "here").mkdir()
    here = tmp_path / "here"
    shutil.copytree(folder, here, dirs_exist_ok=True)
    out = tmp_path / "run"
    run(here, out, "grpo", *small(here), "--steps", 1, "--eval-every", 0)
    again = ["--resume", "--run-dir", out, "--no-compilation-cache"]

    def change_rows():
        lines = (here / "rows.jsonl").read_text().splitlines()
        lines[40] = json.dumps(json.loads(lines[40]) | {"rejected": "another"})
        (here / "rows.jsonl").write_text("".join(line + "\n" for line in lines))

    def change_reward():
        (here / "rewards.py").write_text((here / "rewards.py").read_text().replace("01234", "01235"))

    def change_weights():
        file = here / "model/model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)

    for change, named in (
        (change_rows, "training rows"),
        (change_reward, "source of reward low"),
        (change_weights, "model.safetensors of the model"),
    ):
        kept = {file: file.read_bytes() for file in here.rglob("*") if file.is_file()}
        change()
        assert f"began: {named}" in refused(capsys, *again)
        for file, content in kept.items():
            file.write_bytes(content)
    run(here, out, "", "--resume")


@pytest.mark.slow
def test_other_texts_and_pairs_are_noticed_too(folder, tmp_path, capsys):
    pairs = ("--steps", 2, "--num-pairs", 8)
    for method, options in (("sft", SFT), ("reward-model", pairs), ("dpo", pairs), ("kto", KTO)):
        here = tmp_path / method
        shutil.copytree(folder, here)
        run(here, here / "run", method, *options)
        lines = (here / "rows.jsonl").read_text().splitlines()
        for number, line in enumerate(lines[1:], 1):
            row = json.loads(line)
            lines[number] = json.dumps(row | {"completion": row["rejected"], "rejected": row["chosen"][::-1] + "1"})
        (here / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
        assert "training rows" in refused(capsys, "--resume", "--run-dir", here / "run", "--no-compilation-cache")


# ---- which method


def test_the_method_is_that_of_the_flag_the_run_or_the_file(tmp_path):
    saved = tmp_path / "run"
    saved.mkdir()
    (saved / "config.json").write_text('{"method": "ppo"}')
    (tmp_path / "file.yaml").write_text("method: sft\n")
    (tmp_path / "plain.yaml").write_text("steps: 3\n")
    where = ["--run-dir", str(saved)]
    assert train.method_of([]) == "grpo"
    assert train.method_of(["--method", "sft"]) == train.method_of(["--method=sft"]) == "sft"
    assert train.method_of(["--resume", *where]) == "ppo"
    assert train.method_of(where) == "grpo"  # a new run, with a number added
    assert train.method_of(["--config", str(tmp_path / "file.yaml")]) == "sft"
    assert train.method_of(["--config", str(tmp_path / "file.yaml"), "--method", "ppo"]) == "ppo"
    assert train.method_of(["--config", str(tmp_path / "plain.yaml")]) == "grpo"
    with pytest.raises(UsageError, match="is of method ppo: leave out --method"):
        train.method_of(["--resume", *where, "--method", "sft"])


def test_a_run_of_another_method_starts_from_the_options_of_a_file(folder, tmp_path):
    (tmp_path / "file.yaml").write_text(f"method: ppo\nmodel: {folder / 'model'}\ncritic: shared\nsteps: 2\n")
    args = ["--config", str(tmp_path / "file.yaml"), "--preset", "dapo", "--run-dir", str(tmp_path / "run")]
    config = flags.parse(train.module_of(train.method_of(args)).Config, None, args)
    assert (config.method, config.train.critic.critic, config.train.run.steps) == ("ppo", "shared", 2)
    assert config.train.run.loss.epsilon_high == 0.28


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--critic", "shared"], "--critic is an option of --method ppo, and the method is grpo"),
        (["--method", "grpo", "--critic_learning_rate=1"], "--critic-learning-rate is an option of --method ppo"),
        (["--method", "sft", "--no-whiten"], "--no-whiten is an option of --method ppo, and the method is sft"),
        (["--method", "sft", "--reward", "f"], "--reward is an option of --method grpo and ppo, and the method is sft"),
        (
            ["--method", "dpo", "--task", "f"],
            "--task is an option of --method grpo, ppo and sft, and the method is dpo: name its rows with --data, or",
        ),
        (["--method", "sft", "--data", "f"], "and the method is sft: name its rows with --task, or choose another"),
        (["--method", "ppo", "--bins", "8"], "--bins is an option of --method reward-model"),
        (["--method", "pop"], "there is no method pop: is it ppo or dpo?"),
        (["--config", "none.yaml"], "none.yaml cannot be read"),
    ],
)
def test_options_of_another_method_are_refused(capsys, args, sentence):
    assert sentence in refused(capsys, *args)


@pytest.mark.parametrize(
    ("method", "has", "lacks"),
    [
        ("grpo", ["--preset", "--reward"], ["--critic ", "--completion-column", "--bins"]),
        ("ppo", ["--preset", "--reward", "--critic", "--gae-lambda"], ["--completion-column", "--bins"]),
        ("sft", ["--completion-column", "--num-rows"], ["--preset", "--reward", "--critic", "--bins"]),
        ("reward-model", ["--data", "--bins"], ["--preset", "--reward ", "--critic", "--completion-column"]),
        ("dpo", ["--data", "--preference-loss", "--beta", "--tau"], ["--preset", "--reward ", "--critic", "--bins"]),
        ("kto", ["--data", "--desirable-weight", "--beta"], ["--preference-loss", "--reward ", "--critic", "--bins"]),
    ],
)
def test_help_lists_the_options_of_a_method_alone(capsys, method, has, lacks):
    with pytest.raises(SystemExit):
        train.command(["--method", method, "--help-all"])
    page = capsys.readouterr().out
    assert "--method {grpo,ppo,sft,reward-model,dpo,kto}" in page
    assert all(flag in page for flag in has)
    assert not any(flag in page for flag in lacks)


# ---- a mesh


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [False, True])
def test_sft_trains_on_a_mesh(folder, tmp_path, teacher, capsys):
    options = ("--teacher", folder / "teacher", "--distillation", "forward_kl") if teacher else ()
    check_mesh(folder, tmp_path, "sft", "--num-rows", options, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "size"), [("dpo", "--num-pairs"), ("kto", "--num-completions"), ("reward-model", "--num-pairs")]
)
def test_preferences_are_learned_on_a_mesh(folder, tmp_path, method, size, capsys):
    check_mesh(folder, tmp_path, method, size, (), capsys)


@pytest.mark.parametrize(("method", "config"), [(kto, kto.Config()), (sft, sft.Config(teacher="DIR"))])
def test_what_runs_on_one_host_alone_is_refused_on_two(monkeypatch, method, config):
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with pytest.raises(UsageError, match="run on one host, and there are 2: leave out --distributed"):
        method.main(config)


def check_mesh(folder, tmp_path, method, size, more, capsys):
    """Against one device: the same lines, and results by the same names."""
    steps = ("--steps", 4, "--log-every", 1, "--eval-every", 2, "--learning-rate", 1e-2)
    options = (*more, *steps, size, 16, "--microbatches", 2)
    expected, results = run(folder, tmp_path / "one", method, *options)
    lines, found = run(folder, tmp_path / "mesh", method, *options, "--devices", 8, "--fsdp", 4)
    for line, other in zip(lines, expected, strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            if method in ("dpo", "kto") and name == "accuracy" and line["step"] <= 2:
                continue  # the policy is the reference yet, and rounding says which is above
            is_number = isinstance(value, (int, float))
            assert value == (pytest.approx(other[name], rel=1e-3, abs=1e-4) if is_number else other[name]), name
    assert found.keys() == results.keys()
    where = ["--model", folder / "model", "--task" if method == "sft" else "--data", folder / "rows.jsonl"]
    given = ["--method", method, *where, *more, size, 12, "--devices", 8, "--fsdp", 4, "--run-dir", tmp_path / "no"]
    assert "is 12: it must be a multiple of microbatches x data x fsdp, 8" in refused(capsys, *given)
