"""Runs every experiment in small from its start to its table and resumes it, and checks its refusals."""

import importlib
import json
import shutil
import string

import pytest
from tiny import STORIES, needs_data, read_lines, save_tiny_model, write_rows

from experiments import constitutional
from experiments.tasks.characters import Characters
from grpo_jax.commands import flags
from grpo_jax.commands.export import Options, export
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.options import option_types
from grpo_jax.runs.checkpoint import params_sha256

pytestmark = pytest.mark.usefixtures("without_curves")
TEXT = Characters(string.ascii_letters + string.digits + " \n:?.,'")
FILES = {"config.json", "metrics.jsonl", "times.jsonl", "rollouts.jsonl", "results.json", "report.html"}
FILES |= {"inputs.json", "lock", "tensorboard", "checkpoints", "model", "command.txt"}


def load(experiment):
    return importlib.import_module(f"experiments.{experiment}")


def parse(experiment, args, folder):
    return flags.parse(experiment.Config, None, [*args.split(), "--run-dir", str(folder)])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a tiny "model", and made-up transcripts in "rows.jsonl", where the polite answer was chosen."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_model(folder / "model", TEXT)
    first = "\n\nHuman: how tall is tower {}?\n\nAssistant:"
    rows = [
        {"chosen": f"{turn} please ask.", "rejected": f"{turn} go to {i}."}
        for i in range(40)
        for turn in (first.format(i), f"{first.format(i)} no idea.\n\nHuman: and the bridge?\n\nAssistant:")
    ]
    write_rows(folder / "rows.jsonl", rows)
    return folder


# ---- the files and numbers of each, besides that it resumes


def lines_of(run, phase):
    return [line for line in read_lines(run / "metrics.jsonl") if line["phase"] == phase]


def check_arithmetic(run, results):
    warned = {"warnings.jsonl"}  # there is little to learn
    assert {file.name for file in run.iterdir()} - {"curves.png"} == FILES | warned
    assert {"avg", "avg_low", "maj_at_7", "pass_at_4", "greedy_high", "change_low"} <= set(results["after"])
    assert "change" not in results["before"]
    evaluated = [line for line in lines_of(run, "grpo") if "heldout_avg" in line]
    assert [line["step"] for line in evaluated] == [0, 1, 2]
    assert evaluated[-1]["heldout_avg"] == results["after"]["avg"]  # the same completions


def check_ppo(run, results):
    runs = results["runs"]
    assert runs["ppo"]["before"] == runs["grpo"]["before"]
    assert runs["ppo"]["parameters"][0] > 1.9 * runs["grpo"]["parameters"][0]
    last = lines_of(run, "ppo_1")[-1]
    assert last["heldout_avg"] == runs["ppo"]["avg"][1]
    assert {"critic_loss", "explained_variance", "value_mean", "returns_mean", "value_clip"} <= set(last)


def check_distill(run, results):
    assert len({row["start"][0] for row in results["runs"].values()}) == 1
    assert (run / "samples.png").exists()


def check_constitutional(run, results):
    line = lines_of(run, "constitution_0")[-1]
    assert line["reward"] == pytest.approx(sum(line[f"reward_{name}"] for name in constitutional.GOLD) / 4, rel=1e-4)


def check_multi_objective(run, results):
    runs, swept = results["runs"], {f"{name}_own0.2_0" for name in results["covered"]}
    assert set(runs) == swept | {f"{name}_0" for name in results["over_seeds"]}
    assert runs["start_0"] != runs["gdpo_0"] != runs["sum_0"]
    compiled = [line["compilations"] for line in read_lines(run / "times.jsonl")]
    assert compiled[-1] - compiled[-6] <= 2  # other weights and methods take the programs that there are


def check_preferences(run, results):
    rows = {method: {name: values[0] for name, values in row.items()} for method, row in results["runs"].items()}
    start, trained, _, best = rows
    assert (rows[start]["kl"], rows[start]["share"], rows[best]["kl_to_best"]) == (0, 0, 0)
    for row in rows.values():  # J(π*) − J(π) = β KL(π ‖ π*), whatever the policy
        assert rows[best]["objective"] - row["objective"] == pytest.approx(row["kl_to_best"], abs=1e-4)
        assert row["accuracy"] == pytest.approx(rows[best]["accuracy"] - row["below_best"])
        assert row["below_best"] >= 0
    assert rows[start]["accuracy"] == pytest.approx(0.5)
    assert rows[trained]["kl"] > 0


def check_stories(run, results):
    assert results["before"]["kl"] == pytest.approx(0, abs=1e-5)
    assert results["after"]["kl"] > 1e-4  # to the start, not to itself
    assert 0.5 < results["before"]["start_nll"] < 2.5
    assert export(Options(run, run.parent / "out")) == 1
    saved = load_pretrained(run.parent / "out")
    assert params_sha256(saved.params) == results["params_sha256"]
    card = (run.parent / "out/README.md").read_text()
    assert all((run / name).read_text().strip() in card for name in ("results.json", "command.txt", "config.json"))
    assert (saved.config, saved.eos_ids) == (load_pretrained(STORIES).config, (1, 2))


def check_hh_rlhf(run, results):
    assert results["rows"]["SFT"]["judge"] == pytest.approx(0, abs=1e-6)
    assert results["rows"]["SFT"]["win_rate"] == 0.5
    assert sum(results["pairs"].values()) == 80
    assert "Prompt 6" in (run / "samples.md").read_text()
    first = [lines_of(run, phase)[0] for phase in ("ppo_0", "grpo_0", "control_0")]
    assert [line["step"] for line in first] == [1, 1, 1]
    assert len({line["reward_learned"] for line in first}) == 1  # the same prompts, start and noise
    assert export(Options(run, run.parent / "out", phase="grpo_0")) == 2
    for gone in ("results.json", "checkpoints/grpo_0", "checkpoints/control_0"):  # as if it had been killed there
        shutil.rmtree(run / gone) if (run / gone).is_dir() else (run / gone).unlink()


WARM = "--warm-steps 4 --warm-batch 8 --steps 2 --num-prompts 40 --eval-every 1"
LETTERS = "--warm-steps 2 --steps 2 --num-prompts 32 --num-seeds 1 --eval-every 1"
PAIRS = "--steps 8 --num-pairs 32 --num-seeds 1 --warmup-steps 2 --eval-every 4"
# experiment, options, rows of its results, and what else is true of its folder and results
RUNS = {
    "arithmetic": ("arithmetic", WARM, "before, after, control", check_arithmetic),
    "calculator": ("calculator", WARM, "before, after, control", None),
    "guess": ("guess", f"{WARM} --group-size 2 --warmup-steps 0", "before, after, control, noise", None),
    "curriculum": ("curriculum", "--warm-steps 2 --steps 2 --num-seeds 1", "uniform, curriculum", None),
    "dtypes": (
        "dtypes",
        f"{WARM} --num-seeds 1 --rates 1e-3",
        "float32 0.001, stochastic 0.001, nearest 0.001",
        None,
    ),
    "ppo": ("ppo", f"{WARM} --num-seeds 2", "ppo, grpo, control", check_ppo),
    "distill": (
        "distill",
        f"{WARM} --num-seeds 1 --grpo-steps 2 --grpo-eval-every 1 --eval-samples 1 --kinds reverse_kl",
        "reverse_kl, grpo, control, sft",
        check_distill,
    ),
    "constitutional": (
        "constitutional",
        f"{LETTERS} --group-size 2 --warm-rows 8",
        "start, control, untrained, constitution, gold",
        check_constitutional,
    ),
    "online": (
        "online_preference",
        f"{LETTERS} --group-size 4 --rounds 2 --labels 128",
        "start, frozen, online, coin, gold",
        None,
    ),
    "multi_objective": (
        "multi_objective",
        "--steps 1 --warm-steps 2 --max-tokens 4 --group-size 2 --weights 0.2 --num-seeds 1",
        "sum, scaled, gdpo, coin, start",
        check_multi_objective,
    ),
    "dpo": ("preferences", PAIRS, "start, dpo, control, closed form", check_preferences),
    "kto": ("preferences", f"{PAIRS} --loss kto", "start, kto, control, closed form", check_preferences),
    "stories": (
        "stories",
        f"--model {STORIES} --steps 1 --max-tokens 16 --num-prompts 64 --group-size 2 --max-prompt-tokens 40",
        "before, after, control",
        check_stories,
    ),
    "hh_rlhf": (
        "hh_rlhf",
        "--model INPUTS/model --data INPUTS/rows.jsonl --num-prompts 4 --group-size 2 --max-tokens 8 "
        "--max-prompt-tokens 24 --num-heldout 6 --steps 2 --sft-steps 2 --reward-model-steps 2 --num-pairs 4 "
        "--num-seeds 1 --lora-rank 2",
        "SFT, SFT, shortest of n, SFT, best of n, PPO, GRPO, GRPO, coin toss",
        check_hh_rlhf,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_option_has_a_text(name):
    config = load(RUNS[name][0]).Config
    texts = flags.option_texts(config)
    assert texts.keys() == option_types(config).keys()
    assert all(len(text.split()) > 1 for text in texts.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=needs_data if x == "stories" else ()) for x in RUNS])
def test_resumed_experiments_report_the_same_numbers(inputs, tmp_path, name):
    (experiment, args, rows, check), run = RUNS[name], tmp_path / "run"
    experiment = load(experiment)
    experiment.main(parse(experiment, args.replace("INPUTS", str(inputs)), run))
    results, metrics = json.loads((run / "results.json").read_text()), (run / "metrics.jsonl").read_bytes()
    assert (run / "report.html").exists()
    table = results.get("over_seeds") or results.get("rows") or results
    assert sorted(", ".join(table.keys() - {"params_sha256"}).split(", ")) == sorted(rows.split(", "))
    if check:
        check(run, results)
    experiment.main(parse(experiment, "--resume", run))  # with the options of the run, not the defaults
    assert json.loads((run / "results.json").read_text()) == results
    assert (run / "metrics.jsonl").read_bytes() == metrics


# ---- refusals


BAD_STARTS = [
    ("hh_rlhf", "--model INPUTS/model", "--data"),
    ("hh_rlhf", "--model INPUTS/model --data INPUTS/rows.jsonl --num-seeds 0", "num_seeds"),
    ("hh_rlhf", "--model INPUTS/model --data INPUTS/rows.jsonl --microbatches 3", "sft_rows"),
    ("multi_objective", "--weights 1.5", "weights"),
    ("arithmetic", "--wrong-share 2", "wrong_share is 2"),
    ("multi_objective", "--max-tokens 16", "15 letters"),
    ("preferences", "--microbatches 3", "num_pairs is 512"),
    ("preferences", "--beta 0", "beta is 0"),
]


@pytest.mark.parametrize(("experiment", "args", "words"), BAD_STARTS)
def test_bad_input_is_refused_before_creating_a_folder(inputs, tmp_path, capsys, experiment, args, words):
    args = [*args.replace("INPUTS", str(inputs)).split(), "--run-dir", str(tmp_path / "run"), "--no-compilation-cache"]
    experiment = load(experiment)
    with pytest.raises(SystemExit) as ended:
        flags.main(experiment.Config, experiment.main, None, args)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
