"""The race against other libraries: its clock, its results, and this library as an entrant."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import refused, save_tiny_model

from experiments.benchmarks.peers.recorder import LINES, Moment, Plan, Recorder, snapshot_folder
from experiments.benchmarks.race import __main__ as race, plans, results
from experiments.benchmarks.race.races import ENTRANTS, RACES, Entrant
from experiments.tasks.arithmetic import TEXT, arithmetic_task
from experiments.tasks.characters import Characters
from experiments.tasks.rewards import hash_number
from grpo_jax.rewards.builtin import gsm8k_answer
from grpo_jax.runs.files import read_lines
from grpo_jax.tasks.problems import TEMPLATES


@pytest.fixture
def plan(tmp_path):
    """Returns a plan of two steps with two prompts each."""
    return Plan(
        folder=str(tmp_path),
        race="arithmetic",
        model="",
        seed=0,
        prompts=[["1+1=", "10+1="], ["2+2=", "3+3="]],
        ids=[[[1, 2], [1, 0, 2]], [[3], [4]]],
        answers={"1+1=": "2", "10+1=": "11"},
        reward="exact_answer",
        group=2,
        max_tokens=4,
        ends=[13],
        pad_id=12,
        learning_rate=1e-3,
        snapshots=[1, 2],
        probe=[[5], [6]],
        settings={},
    )


def test_plans_are_json_and_pad_prompts_left(plan):
    assert Plan(**json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
    assert (plan.completions, plan.width, plan.texts[2]) == (4, 3, "2+2=")
    assert plan.first_prompts() == ([[12, 1, 2], [1, 0, 2]], [[False, True, True], [True, True, True]])


def test_clock_stops_while_a_snapshot_is_saved(plan, tmp_path):
    time = [10.0]

    def save(folder):
        time[0] += 7
        (folder / "model.safetensors").touch()

    recorder = Recorder(plan, lambda: Moment(time[0], time[0] / 2))
    with recorder.sampling():
        time[0] += 4
    assert recorder.grade(["1+1="] * 2 + ["10+1="] * 2, ["2", "3", "11", "11"]) == [1, 0, 1, 1]
    time[0] += 2
    assert [recorder.is_due(step) for step in (0, 1, 2, 3)] == [False, True, True, False]
    recorder.save(1, save)
    time[0] += 1
    recorder.save(2, save)
    recorder.finish([[1, 2]])
    first, *snapshots, last = read_lines(tmp_path / LINES, {})
    assert first.pop("peak_mb") > 10
    assert first == {"step": 1, "samples": 4, "reward": 0.75, "sampling": 4, "seconds": 14, "cpu_seconds": 7}
    assert [(line["snapshot"], line["samples"], line["seconds"], line["cpu_seconds"]) for line in snapshots] == [
        (1, 4, 16, 8),
        (2, 8, 17, 8.5),
    ]
    assert last == {"logprobs": [[1, 2]]}
    assert recorder.now() == (17, 8.5)
    assert (snapshot_folder(tmp_path, 2) / "model.safetensors").exists()


def test_plans_hold_task_prompts_and_integer_batch_sizes(tmp_path):
    folder = save_tiny_model(tmp_path / "model", TEXT)
    entrant = Entrant("tunix", {"train_micro_batch_size": 0.25, "other": 3})
    plan = plans.make_plan("arithmetic", entrant, folder, tmp_path, steps=13, seed=1)
    prompts = [arithmetic_task(num_prompts=32, seed=1).prompts(step) for step in range(13)]
    assert plan.prompts == [[example["prompt"] for example in step.examples] for step in prompts]
    assert plan.ids == [step.tokens.ids.tolist() for step in prompts]
    assert plan.answers[prompts[12].examples[0]["prompt"]] == prompts[12].examples[0]["answer"]
    assert plan.snapshots == [1, 10, 13]
    assert plan.settings == {"train_micro_batch_size": 8, "other": 3}


GRADED = ["6 + 12\n#### 18", "####18", "#### $18.00", "#### 1\n#### 18", "18", "#### 8", "#### -18", "#### 1,018", ""]


def test_numbers_after_hashes_are_graded_as_in_training():
    rows = [{"prompt": "", "answer": "18"}] * len(GRADED)
    assert hash_number(rows, GRADED) == gsm8k_answer()(rows, GRADED) == [1, 1, 1, 1, 0, 0, 0, 0, 0]


def test_race_on_gsm8k_reads_rows_and_answers(tmp_path):
    for split, numbers in {"train": range(40), "test": range(40, 44)}.items():
        rows = [{"question": f"{i} + 1 =", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in numbers]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    letters = Characters("".join(sorted(set(TEMPLATES["gsm8k"][0] + "0123456789+-= #."))))
    model = save_tiny_model(tmp_path / "model", letters)
    entrant = ENTRANTS["TRL, bfloat16, eighths"]
    plan = plans.make_plan("gsm8k", entrant, model, tmp_path, steps=1, seed=0, data=str(tmp_path))
    assert len(plan.texts) == 32
    assert plan.settings["per_device_train_batch_size"] == 32
    assert all(f"Question: {int(plan.answers[text]) - 1} + 1 =" in text for text in plan.texts)


def curve(*rewards, seconds=10.0):
    """Returns points at multiples of some seconds."""
    return [
        {"reward": reward, "seconds": seconds * i, "cpu_seconds": i, "samples": 4 * i}
        for i, reward in enumerate(rewards)
    ]


def test_time_to_a_level_is_interpolated():
    points = curve(0.2, 0.6, 0.3, 0.9)
    assert results.time_to(points, 0.5) == pytest.approx(7.5)
    assert results.time_to(points, 0.5, "cpu_seconds") == pytest.approx(0.75)
    assert results.time_to(points, 0.75) == pytest.approx(27.5)
    assert results.time_to(points, 0.1) == 0
    assert results.time_to(points, 0.95) is None
    assert results.step_seconds([9, 10, 12, 13, 14.5]) == 1.25


PEAKS = """
from experiments.benchmarks import step
from grpo_jax.devices import peak_memory_mb
step.matmul_flops = lambda dtype: 0.0
print(peak_memory_mb(), step.summary([{"compilations": 0}], 0, 0)["peak_rss_mb"])
"""


def test_peak_memory_is_not_that_of_the_parent():
    large = bytearray(3 * 2**28)
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    assert max(map(float, done.stdout.split())) < len(large) / 2**20


def entry(rewards, **changes):
    """Returns the results of a process."""
    numbers = {"curve": curve(*rewards), "peak_mb": 100, "step_seconds": 1.0, "first_change": 1.0, "logprobs": [[-1.0]]}
    return numbers | changes


def test_results_are_medians_over_seeds_at_shared_levels(tmp_path):
    own, slow, fast = "grpo_jax, cold cache", "TRL, defaults", "TRL, whole batch"
    entries = {
        own: [entry([0.0, 0.5, 1.0]), entry([0.0, 0.5, 1.0], peak_mb=300)],
        slow: [entry([0.0, 0.2, 0.5]), entry([0.0, 0.5, 0.9], curve=curve(0.0, 0.5, 0.9, seconds=20))],
        fast: [entry([0.0, 0.5, 1.0], logprobs=[[-1.5]]), entry([0.0, 0.5, 1.0])],
    }
    summary = results.summaries(entries)
    assert summary["final"] == pytest.approx(0.9)
    assert summary["log_probability_difference"] == 0.5
    rows = summary["entrants"]
    assert rows[own]["seconds_to_0.5"] == pytest.approx(9)
    assert (rows[own]["reward"], rows[own]["peak_mb"], rows[own]["seconds"]) == (1, 200, 20)
    assert rows[slow]["seconds_to_0.9"] is None  # a seed never reached it
    assert rows[slow]["reward_range"] == [0.5, 0.9]
    assert results.drawn_entrants(rows) == [own, fast]
    visible = results.table(summary)
    assert visible.row_count == 3
    assert "never" in list(visible.columns[3].cells)
    results.save_figure(
        tmp_path / "race.svg", "race", {name: [e["curve"] for e in seeds] for name, seeds in entries.items()}
    )
    assert "<svg" in (tmp_path / "race.svg").read_text()


def test_cold_entrants_run_before_those_sharing_their_cache():
    for name, entrant in ENTRANTS.items():
        before = list(ENTRANTS.values())[: list(ENTRANTS).index(name)]
        filled = any(other.cache == entrant.cache and other.is_cold for other in before)
        assert not entrant.cache or entrant.is_cold != filled


UNFIT_OPTIONS = [
    ({"race": "words"}, "--model is needed"),
    ({"steps": 1}, "at least 2"),
    ({"entrants": ("TRL",)}, "TRL"),
    ({"race": "gsm8k", "model": Path("DIR")}, "--data is needed"),
]


@pytest.mark.parametrize(("options", "words"), UNFIT_OPTIONS)
def test_options_that_do_not_work_are_refused(tmp_path, options, words):
    with refused(words):
        race.main(race.Config(out=tmp_path, **options))


def test_tunix_is_refused_where_it_loads_no_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    with refused("only Llamas: leave it out of --entrants"):
        race.main(race.Config(race="real", model=tmp_path, out=tmp_path / "race"))


@pytest.mark.slow
def test_this_library_runs_a_plan(tmp_path):
    model, folder = save_tiny_model(tmp_path / "model", TEXT), tmp_path / "run"
    entrant = ENTRANTS["grpo_jax, cold cache"]
    plan = plans.make_plan("arithmetic", entrant, model, folder, steps=2, seed=0)
    race.run(plan, entrant, "cpu", race.Config())
    assert race.is_complete(folder, plan)
    with refused("other options"):
        race.is_complete(folder, dataclasses.replace(plan, seed=1))
    reward = results.heldout_reward("arithmetic", model)
    entry = results.entry_of(folder, model, RACES["arithmetic"].learning_rate, reward)
    assert [(point["step"], point["samples"]) for point in entry["curve"]] == [(0, 0), (0, 256), (1, 256), (2, 512)]
    assert 0 < entry["curve"][1]["seconds"] == entry["curve"][2]["seconds"] < entry["curve"][3]["seconds"]
    assert entry["first_change"] < 0.1  # no random completion is right, and the policy is at its reference
    assert entry["cached_programs"] == 0
    assert len(entry["rollout_rewards"]) == 2
    assert list((tmp_path / "cache_own").glob("*-cache"))
