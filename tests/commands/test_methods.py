"""Checks `grpo-jax train` with every method, on a model so small that a run takes seconds."""

import inspect
import json
import re
import shutil

import jax
import numpy as np
import pytest
from command_helpers import evaluation, refusal, run, with_template
from tiny import GOLDEN, read_lines, refused, slow_unless, write_rows

from experiments.tasks import arithmetic
from grpo_jax import hosts
from grpo_jax.commands import flags, kto, sft, train
from grpo_jax.commands.dpo import CONSTANTS
from grpo_jax.commands.export import Options, export
from grpo_jax.commands.offline import encoding
from grpo_jax.config import TeacherConfig
from grpo_jax.data.preferences import encode_preferences, read_preferences
from grpo_jax.models.chat import Chat
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.offline.sft import text_nll
from grpo_jax.rewards.learned import load_reward_model
from grpo_jax.runs.folder import run_digest

SFT = ("--steps", 12, "--num-rows", 16, "--learning-rate", 1e-2, "--eval-every", 6, "--checkpoint-every", 4)
TIMES = ("--warmup-steps", 0, "--steps", 8, "--learning-rate", 1e-2, "--eval-every", 4, "--checkpoint-every", 4)
PAIRS, KTO = ("--num-pairs", 16, *TIMES), ("--num-completions", 16, *TIMES)
OFFLINE = {"sft": SFT, "dpo": PAIRS, "kto": KTO, "reward-model": PAIRS}
TEACHER = ("--teacher", "teacher", "--distillation", "forward_kl", "--nll-coef", 0.1)
TAUGHT = sft.Config(divergence=TeacherConfig("jsd", teacher="DIR"))


def options_of(method):
    """Returns options of a short run."""
    by_rewards = ("--reward", "rewards.py:low", "--num-prompts", 4, "--max-tokens", 4, "--learning-rate", 1e-2)
    return OFFLINE.get(method, (*by_rewards, "--steps", 2, "--eval-every", 1))


def moved(folder, exported):
    """Returns the largest change of each leaf between the model and an export."""
    before, after = (load_pretrained(path).params for path in (folder / "model", exported))
    return jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), before, after)


# ---- prompts


@pytest.mark.parametrize("method", train.METHODS)
def test_every_method_uses_the_chat_template_by_default(folder, tmp_path, capsys, method):
    model = with_template(folder, tmp_path / "model", "{{ raise_exception('it was filled in') }}")
    size = next((option for option in OFFLINE.get(method, ()) if str(option).startswith("--num")), "--num-prompts")
    rows = ("--task", "rows.jsonl", "--run-dir", tmp_path / "run")
    args = ("train", "--method", method, "--model", model, *rows, *options_of(method), size, 999)
    assert "it was filled in" in refusal(capsys, *args)
    assert "999" in refusal(capsys, *args, "--chat", "False")


def test_a_transcript_becomes_messages_by_default(folder, tmp_path, capsys):
    template = "{% for m in messages %}{{ raise_exception(m.role ~ ' ' ~ m.content) if loop.last }}{% endfor %}"
    talk = "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: {i}\n\nAssistant:"
    rows = [{"chosen": talk.format(i=i) + "4", "rejected": talk.format(i=i) + "5"} for i in range(9)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    where = ("--task", file, "--run-dir", tmp_path / "run")
    model = with_template(folder, tmp_path / "model", template)
    sentence = refusal(capsys, "train", "--method", "dpo", "--model", model, *where, "--heldout-share", 0.5)
    assert re.search(r"refuses prompt 0: user \d$", sentence)
    assert read_preferences(file, chat=False)[0][0].prompt == talk.format(i=0)


@pytest.mark.parametrize("method", OFFLINE)
def test_long_texts_stay_whole_by_default(folder, tmp_path, capsys, method):
    rows = [{"prompt": 18 * "1+" + f"{i % 10}{i // 10}=", "label": True} for i in range(40)]
    rows = [row | {"completion": "1", "chosen": "1", "rejected": "2"} for row in rows]
    short = ("--warmup-steps", 0, "--steps", 1, "--eval-every", 0)
    options = (*OFFLINE[method], *short, "--task", write_rows(tmp_path / "rows.jsonl", rows))
    for name, limits in (("whole", ()), ("cut", ("--max-prompt-tokens", 16, "--overlong", "truncate"))):
        run(folder, tmp_path / name, method, *options, *limits)
        file = tmp_path / name / "warnings.jsonl"
        warnings = file.read_text() if file.exists() else ""
        printed = " ".join(capsys.readouterr().out.split())
        assert ("lost their beginning" in warnings) == ("lost their beginning" in printed) == (name == "cut")
        assert "dropped" not in warnings


def test_the_former_name_of_rows_still_works(folder, tmp_path, capsys):
    options = (*PAIRS, "--decay", "none", "--run-dir", tmp_path / "run", "--no-compilation-cache", "--model", "model")
    train.command([*map(str, ("--method", "dpo", "--data", "rows.jsonl", *options, "--steps", 4))])
    file = tmp_path / "run/config.json"
    sealed = run_digest(file.parent, "dpo")
    saved = json.loads(file.read_text())
    saved["data"] = saved.pop("task")  # as earlier versions wrote it
    file.write_text(json.dumps(saved))
    assert run_digest(file.parent, "dpo") == sealed
    train.command([*map(str, ("--resume", "--run-dir", tmp_path / "run", "--steps", 8))])
    assert {line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")} == {0, 4, 8}
    (tmp_path / "both.json").write_text('{"data": "a.jsonl", "task": "b.jsonl"}')
    assert "no option data" in refusal(capsys, "train", "--method", "dpo", "--config", tmp_path / "both.json")
    assert "learned from rows without a reward" in refusal(
        capsys, "evaluate", tmp_path / "run"
    )  # other prompts would be held out


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_runs_without_a_group_critic_continue(folder, tmp_path, method):
    """The files are those that the commit before wrote: of GRPO without a critic, and of PPO with a group `run`."""
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(GOLDEN / f"runs/{method}.json", out / "config.json")
    run(folder, out, "", "--resume")
    sealed = run_digest(out, method)
    lines, _ = run(folder, out, "", "--resume", "--steps", 3)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert run_digest(out, method) == sealed
    with pytest.raises(SystemExit):
        run(folder, out, "", "--resume", "--gae-lambda", 0.8)


# ---- what every method leaves


FIRST_METRICS = [
    ("sft", "nll", {}),
    ("dpo", "loss", {"loss": np.log(2), "accuracy": 0.5, "margin": 0}),  # the policy is the reference, to the bit
    pytest.param("kto", "loss", {"loss": 0.5, "accuracy": 0.5, "kl": 0}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "metric", "first"), FIRST_METRICS)
def test_methods_train_export_and_evaluate_on_rows(folder, tmp_path, capsys, monkeypatch, method, metric, first):
    evaluated, out, rows = [], tmp_path / "run", shutil.copy(folder / "rows.jsonl", tmp_path)
    monkeypatch.setattr(sft, "text_nll", lambda *args, **options: evaluated.append(1) or text_nll(*args, **options))
    source = ("--task", rows)
    lines, results = run(folder, out, method, *OFFLINE[method], *source)
    assert {line["phase"] for line in lines} == {method}
    held = {line["step"]: line for line in lines if f"heldout_{metric}" in line}
    assert [*held] == ([0, 6, 12] if method == "sft" else [0, 4, 8])
    assert len(evaluated) == (3 if method == "sft" else 0)  # no parameters twice
    values = {step: line[f"heldout_{metric}"] for step, line in held.items()}
    before, *_, after = values.values()
    assert (results["before"][metric], results["after"][metric]) == pytest.approx((before, after), rel=1e-5)
    assert results["after"]["change"] == pytest.approx(after - before, rel=1e-4)
    assert {name: held[0][f"heldout_{name}"] for name in first} == pytest.approx(first)
    assert lines[-1]["loss"] < lines[1]["loss"]
    assert {"report.html", "model"} <= {file.name for file in out.iterdir()}
    printed = capsys.readouterr().out
    assert "plan: prompts that are text are encoded without a chat template" in printed
    assert "held-out " in printed

    steps = max(held)
    assert export(Options(out, tmp_path / "exported")) == steps
    assert f"tags: [{method}, grpo_jax]" in (tmp_path / "exported/README.md").read_text()
    assert jax.tree.reduce(max, moved(folder, tmp_path / "exported")) > 0
    graded = ("--reward", "exact_answer(column='completion')", "--max-tokens", 4, "--samples", 1)
    numbers = evaluation(out, tmp_path / "numbers", *graded, *(() if method == "sft" else ("--task", rows)))
    assert (numbers["options"]["phase"], numbers["options"]["step"]) == (method, steps)
    printed = capsys.readouterr().out
    assert f"samples each, step {steps} [" in printed
    assert "no longer those of the run" not in printed  # the held-out prompts of SFT
    (tmp_path / "rows.jsonl").write_text((folder / "rows.jsonl").read_text().replace('"2"', '"3"'))
    assert "training rows" in refusal(capsys, "train", "--resume", "--run-dir", out)


OPTIMIZED = [(method, name) for method in train.METHODS for name in ("muon", "sign.py:signs")]


@pytest.mark.parametrize(("method", "name"), slow_unless([("grpo", "muon"), ("sft", "sign.py:signs")], OPTIMIZED))
def test_methods_train_with_other_optimizers(folder, tmp_path, capsys, method, name):
    """A sign moves each number by the rate. Muon moves those of a matrix by about a fifth of it."""
    file, out = tmp_path / "sign.py", tmp_path / "run"
    file.write_text("import optax\n\ndef signs(schedule): return optax.sign_sgd(schedule)\n")
    named = f"{tmp_path}/{name}" if ":" in name else name
    options = (*options_of(method), "--steps", 1, "--eval-every", 1, "--warmup-steps", 0, "--decay", "none")
    lines, _ = run(folder, out, method, *options, "--learning-rate", 1e-2, "--optimizer", named)
    assert lines[-1]["learning_rate"] == pytest.approx(1e-2)
    if method != "reward-model":
        export(Options(out, tmp_path / "exported"))
        paths = folder / "model", tmp_path / "exported"
        before, after = (load_pretrained(path).params["layers"]["mlp"]["down_proj"]["kernel"] for path in paths)
        rms = np.sqrt(np.mean((after - before) ** 2))
        assert rms == pytest.approx(1e-2 if ":" in name else 2e-3, rel=0.4)
    if ":" in name:
        file.write_text(file.read_text() + "# changed\n")
        assert "source of the optimizer" in refusal(capsys, "train", "--resume", "--run-dir", out)


def test_ppo_uses_its_defaults_and_exports_no_critic(folder, tmp_path):
    out = tmp_path / "run"
    lines, results = run(folder, out, "ppo", *options_of("ppo"), "--control")
    assert dict.fromkeys(line["phase"] for line in lines) == dict.fromkeys(["ppo", "control"])
    assert all("explained_variance" in line for line in lines if line["step"])
    assert [line["step"] for line in lines if line["phase"] == "ppo" and "heldout_avg" in line] == [0, 1, 2]
    assert set(results) == {"before", "after", "control", "params_sha256"}
    assert '"rollouts":{"ppo":[[1,[' in (out / "report.html").read_text()
    options = json.loads((out / "config.json").read_text())["train"]
    assert (options["sampling"]["group_size"], options["loss"]["preset"]) == (1, "lite_ppo")
    assert (options["loss"]["kl_coef"], options["loss"]["kl_in_reward"]) == (0.02, True)
    assert export(Options(out, tmp_path / "exported")) == 2
    assert jax.tree.reduce(max, moved(folder, tmp_path / "exported")) > 0
    numbers = evaluation(out, tmp_path / "numbers", "--samples", 7)
    assert numbers["options"]["phase"] == "ppo"
    assert numbers["avg"] == pytest.approx(results["after"]["avg"], abs=1e-6)


EXPORTED_RUNS = [
    ("ppo", ("--critic", "shared")),
    ("ppo", ("--lora-rank", 2, "--quantize", "nf4", "--group-size", 4)),
    ("grpo", ("--lora-rank", 2, "--quantize", "int8")),
    ("dpo", ("--lora-rank", 2, "--quantize", "int8")),
    ("kto", ("--lora-rank", 2, "--quantize", "nf4")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), EXPORTED_RUNS)
def test_whatever_is_trained_the_whole_policy_is_exported(folder, tmp_path, method, options):
    run(folder, tmp_path / "run", method, *options_of(method), "--eval-every", 0, *options)
    export(Options(tmp_path / "run", tmp_path / "exported"))
    change = moved(folder, tmp_path / "exported")
    assert jax.tree.reduce(max, change) > 0
    assert (change["embedding"] == 0) == ("--lora-rank" in options)
    graded = ("--reward", "rewards.py:low", "--max-tokens", 4, "--task", "rows.jsonl", "--samples", 1)
    evaluation(tmp_path / "run", tmp_path / "numbers", *graded)


EXTENDED_RUNS = [
    ("ppo", ("--steps", 2, "--decay", "none")),
    ("sft", (*TEACHER, "--decay", "none")),
    ("dpo", ("--decay", "none", "--lora-rank", 2, "--preference-loss", "ipo", "--tau", 0.5)),
    ("sft", ("--decay", "none", "--lora-rank", 2, "--lora-targets", "q_proj", "--quantize", "nf4")),
    ("kto", ("--decay", "none", "--undesirable-weight", 0.75)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), EXTENDED_RUNS)
def test_a_run_is_extended_by_its_folder_alone(folder, tmp_path, capsys, method, options):
    args = (*options_of(method), *options)
    whole = run(folder, tmp_path / "whole", method, *args)
    steps = whole[0][-1]["step"]
    run(folder, tmp_path / "cut", method, *args, "--steps", steps // 2)
    assert "evaluating the initial model" in capsys.readouterr().out
    lines, results = run(folder, tmp_path / "cut", "", "--resume", "--steps", steps)
    assert (lines[-1], results) == (whole[0][-1], whole[1])
    assert "evaluating the initial model" not in capsys.readouterr().out  # its evaluation is in the run


@pytest.mark.parametrize("method", slow_unless(["grpo", "dpo"], train.METHODS))
def test_the_start_is_scored_once_before_training(folder, tmp_path, capsys, method):
    args = (*options_of(method), "--eval-every", 0, "--decay", "none")
    steps = args[args.index("--steps") + 1]
    run(folder, tmp_path / "run", method, *args, "--steps", steps // 2)
    phase, printed = method.replace("-", "_"), capsys.readouterr().out
    assert printed.index(f"{phase}: step 0 of {steps // 2}, heldout_") < printed.index(f"{phase}: compiling")
    lines, _ = run(folder, tmp_path / "run", "", "--resume", "--steps", steps)
    (start,) = [line for line in lines if line["step"] == 0]
    assert any(name.startswith("heldout_") for name in start)
    assert "step 0" not in capsys.readouterr().out
    assert '"heldout_' in (tmp_path / "run/report.html").read_text()


# ---- supervised fine-tuning


def test_sft_masks_prompts_and_ends_completions_with_eos(folder):
    config = flags.parse(sft.Config, None, ["--model", "model", "--task", "rows.jsonl", "--max-tokens", "2"])
    packed, _, _, notes = sft.encode_splits(config, sft.read_training_rows(config), load_pretrained(folder / "model"))
    assert "training: dropped 13 completions that are longer than 2 tokens" in notes[0]  # of two digits and EOS
    for ids, numbers, learned in zip(packed.ids, packed.texts, packed.completion_mask, strict=True):
        for number in range(1, numbers.max() + 1):
            answer = ids[(numbers == number) & learned].tolist()
            prompt = arithmetic.TEXT.decode(ids[(numbers == number) & ~learned])
            assert answer[-1] == arithmetic.TEXT.eos_id
            assert eval(prompt.removesuffix("=")) == int(arithmetic.TEXT.decode(answer[:-1]))


def test_rows_of_text_are_learned_whole_with_eos(folder, tmp_path):
    texts = [f"{i}+1={i + 1}" for i in range(8)]
    file = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    options = ["--model", "model", "--task", str(file), "--num-heldout", "2", "--overlong", "truncate"]
    model = load_pretrained(with_template(folder, tmp_path / "model", "{{ raise_exception('it was filled in') }}"))

    def encoded(*more):
        config = flags.parse(sft.Config, None, [*options, *more])
        sides = sft.encode_splits(config, sft.read_training_rows(config), model)[:2]
        rows = [row for packed in sides for row in zip(packed.ids, packed.texts, packed.completion_mask, strict=True)]
        return [
            (ids[numbers == number].tolist(), learned[numbers == number].tolist())
            for ids, numbers, learned in rows
            for number in range(1, numbers.max() + 1)
        ]

    whole = sorted([*arithmetic.TEXT.encode(text), arithmetic.TEXT.eos_id] for text in texts)
    assert sorted(ids for ids, _ in encoded()) == whole
    assert sorted(ids for ids, _ in encoded("--max-tokens", "3")) == [ids[:4] for ids in whole]  # the end is cut
    assert all(learned == [False] + [True] * (len(ids) - 1) for ids, learned in encoded())
    with refused("whole texts outside a chat: leave out --chat"):
        encoded("--chat", "True")
    with refused("have no prompts: leave out --max-prompt-tokens"):
        encoded("--max-prompt-tokens", "4")


@pytest.mark.slow
def test_sft_continues_with_the_same_teacher_only(folder, tmp_path, capsys):
    teacher = shutil.copytree(folder / "teacher", tmp_path / "teacher")
    lines, _ = run(folder, tmp_path / "run", "sft", *SFT, *TEACHER, "--teacher", teacher)
    assert lines[-1]["heldout_distillation"] < 0.9 * lines[0]["heldout_distillation"]
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["distillation"] + 0.1 * lines[-1]["nll"], rel=1e-4)
    weights = (folder / "model/model.safetensors").read_bytes()
    (teacher / "model.safetensors").write_bytes(weights)
    assert "model.safetensors of the teacher" in refusal(capsys, "train", "--resume", "--run-dir", tmp_path / "run")


def test_held_out_loss_with_a_teacher_scores_checkpoints(folder):
    files = ("--model", folder / "model", "--task", folder / "rows.jsonl", *TEACHER, "--teacher", folder / "teacher")
    job = sft.make_sft_job(flags.parse(sft.Config, None, [*map(str, files)]))
    numbers = job.log(job.params, job.evaluate(job.params))
    assert next(iter(numbers)) == "loss"
    assert numbers["loss"] == pytest.approx(numbers["distillation"] + 0.1 * numbers["nll"], rel=1e-6)


# ---- reward model


def test_resume_rewrites_a_damaged_reward_model_folder(folder, tmp_path):
    options = ("--num-pairs", 8, "--learning-rate", 1e-2, "--warmup-steps", 0, "--decay", "none", "--eval-every", 2)
    whole, out = tmp_path / "whole", tmp_path / "run"
    lines, expected = run(folder, whole, "reward-model", *options, "--steps", 4)
    assert {line["phase"] for line in lines} == {"reward_model"}
    assert np.isfinite(load_reward_model(whole / "reward-model")([{"prompt": "1+1="}], ["2"])).all()
    run(folder, out, "reward-model", *options, "--steps", 2)
    (out / "reward-model.partial-1").mkdir()  # of a process that was killed
    weights = [path / "reward-model/model.safetensors" for path in (whole, out)]
    weights[1].write_bytes(weights[1].read_bytes()[:-10])
    assert run(folder, out, "", "--resume", "--steps", 4) == (lines, expected)
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [path.name for path in out.glob("reward-model*")] == ["reward-model"]
    with refused("a reward model is in its run's folder reward-model"):
        export(Options(out, tmp_path / "exported"))


# ---- DPO and KTO


def test_pair_completions_include_eos_in_their_length(folder):
    dpo = train.module_of("dpo")
    args = ["--model", "model", "--task", "rows.jsonl", "--max-tokens", "2"]
    pretrained, eos_id = load_pretrained(folder / "model"), arithmetic.TEXT.eos_id
    preferences, _ = read_preferences(folder / "rows.jsonl")

    def encoded(*more):
        config = flags.parse(dpo.Config, None, [*args, *more])
        options = encoding(pretrained, config.model, config.max_tokens)
        return encode_preferences(Chat(pretrained.tokenizer, pretrained.eos_ids), preferences, **options)

    whole = encoded()
    assert {(len(ids), ids[-1]) for pair in whole.answers for ids in pair} == {(2, eos_id)}
    assert any("longer than 2 tokens" in note for note in whole.notes)
    cut = encoded("--overlong", "truncate")
    assert any(pair[0][-1] != eos_id and pair[1][-1] != eos_id for pair in cut.answers)
    assert len(cut.answers) > len(whole.answers)


def test_preference_losses_receive_only_constants_that_are_set():
    dpo = train.module_of("dpo")
    for name, loss in dpo.LOSSES.items():
        assert dpo.choose_loss(dpo.Config(preference_loss=name)).keywords == {}
        parameters = inspect.signature(loss).parameters.values()
        constants = dict.fromkeys({p.name for p in parameters if p.kind == p.KEYWORD_ONLY}, 0.25)
        assert constants.keys() <= set(CONSTANTS)
        assert dpo.choose_loss(dpo.Config(preference_loss=name, **constants)).keywords == constants


def test_all_good_ratings_warn_and_zero_weight_fails(folder, tmp_path, capsys):
    model = with_template(folder, tmp_path / "model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"prompt": f"{i % 8}+1=", "completion": str(i), "label": True} for i in range(40)]
    data = ("--task", write_rows(tmp_path / "rows.jsonl", rows), "--heldout-share", 0.4)
    options = (*KTO, "--steps", 1, "--eval-every", 0, "--model", model, *data)
    _, results = run(folder, tmp_path / "run", "kto", *options)
    assert results["before"]["log_ratio_desirable"] == 0
    assert "plan: prompts that are text are user messages of the chat template" in capsys.readouterr().out
    assert "all completions to train on are good" in (tmp_path / "run/warnings.jsonl").read_text()
    where = ("train", "--method", "kto", "--run-dir", tmp_path / "no", "--no-compilation-cache")
    assert "all completions to train on have the weight 0" in refusal(capsys, *where, *options, "--desirable-weight", 0)


@pytest.mark.slow
def test_kto_on_one_prompt_needs_reference_point_zero(folder, tmp_path, capsys):
    rows = [{"prompt": f"{i % 2}+1=", "completion": str(i), "label": i % 3 == 0} for i in range(40)]
    data = ("--task", write_rows(tmp_path / "two.jsonl", rows), "--heldout-share", 0.4)  # one prompt is held out
    lines, _ = run(folder, tmp_path / "zero", "kto", *KTO, "--steps", 1, *data, "--reference-point", "zero")
    assert lines[-1]["kl"] == 0
    where = ("train", "--method", "kto", "--model", "model", "--run-dir", tmp_path / "kl", "--no-compilation-cache")
    assert "or take the reference point zero" in refusal(capsys, *where, *KTO, *data)


# ---- which method


def test_method_comes_from_flag_run_or_file(tmp_path):
    saved = tmp_path / "run"
    saved.mkdir()
    (saved / "config.json").write_text('{"method": "ppo"}')
    (tmp_path / "file.yaml").write_text("method: sft\n")
    (tmp_path / "plain.yaml").write_text("steps: 3\n")
    where, file = ["--run-dir", str(saved)], ["--config", str(tmp_path / "file.yaml")]
    for method, args in (
        ("grpo", []),
        ("sft", ["--method", "sft"]),
        ("sft", ["--method=sft"]),
        ("ppo", ["--resume", *where]),
        ("grpo", where),  # a new run, with a number added
        ("sft", file),
        ("ppo", [*file, "--method", "ppo"]),
        ("grpo", ["--config", str(tmp_path / "plain.yaml")]),
    ):
        assert train.method_of(args) == method
    with refused("is of method ppo: leave out --method"):
        train.method_of(["--resume", *where, "--method", "sft"])


def test_an_options_file_can_choose_another_method(folder, tmp_path):
    (tmp_path / "file.yaml").write_text("method: ppo\nmodel: model\ncritic: shared\nsteps: 2\n")
    args = ["--config", str(tmp_path / "file.yaml"), "--preset", "dapo", "--run-dir", str(tmp_path / "run")]
    config = flags.parse(train.module_of(train.method_of(args)).Config, None, args)
    assert (config.method, config.train.critic.critic, config.train.steps) == ("ppo", "shared", 2)
    assert config.train.loss.epsilon_high == 0.28


@pytest.mark.parametrize(("method", "config"), [(kto, kto.Config()), (sft, TAUGHT)])
def test_single_host_methods_are_refused_on_two_hosts(monkeypatch, method, config):
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with refused("leave out --distributed"):
        method.main(config)
