"""Checks the command line and the folders of experiments, and the numbers over several seeds."""

import io
import math
import shutil

import pytest
from matplotlib import pyplot
from rich.console import Console
from tiny import refused, write_rows

from experiments import arithmetic, plots
from experiments.common import over_seeds
from grpo_jax.commands import flags
from grpo_jax.report import explain_control
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import interval_over_runs


def parse(folder, *args):
    return flags.parse(arithmetic.Config, None, ["--run-dir", str(folder), *map(str, args)])


# ---- folders of runs


def test_runs_get_numbered_folders_and_resume_the_newest(tmp_path):
    for name in ("run", "run-2", "run-3"):
        assert parse(tmp_path / "run").output.run_dir == tmp_path / name
        flags.open_run(parse(tmp_path / "run"))
        assert (tmp_path / name / "config.json").exists()
    shutil.rmtree(tmp_path / "run-2")
    assert parse(tmp_path / "run").output.run_dir.name == "run-4"
    assert parse(tmp_path / "run", "--resume").output.run_dir.name == "run-3"


def test_simultaneous_runs_cannot_share_a_folder(tmp_path):
    first, second = (parse(tmp_path / "run", "--seed", seed) for seed in (0, 1))
    flags.open_run(first)
    with refused(r"other options \(seed\)"):
        flags.open_run(second)


def test_resumed_runs_may_change_only_their_devices(tmp_path):
    flags.open_run(parse(tmp_path / "run"))
    flags.open_run(parse(tmp_path / "run", "--resume", "--devices", "2"))
    flags.open_run(parse(tmp_path / "falling", "--decay", "linear"))
    with refused("the learning rate of the run falls until step 250"):
        flags.open_run(parse(tmp_path / "falling", "--resume", "--steps", "300"))


BAD_STARTS = [
    (["--resume"], {}, "there is no run to resume"),
    (["--preset", "nonsense"], {}, "nonsense"),
    (["--resume"], {"config.json": ""}, "cannot be read"),
    (["--resume"], {"config.json": '{"no_such_option": 1}'}, "of another experiment or version"),
    ([], {"thesis.txt": "mine"}, "exists and is no run"),
]


@pytest.mark.parametrize(("args", "files", "words"), BAD_STARTS)
def test_bad_options_and_folders_are_refused_untouched(tmp_path, capsys, args, files, words):
    for name, text in files.items():
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        parse(tmp_path / "run", *args)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert words in " ".join((captured.out + captured.err).split())
    assert [file.name for file in (tmp_path / "run").glob("*")] == [*files]


# ---- several seeds


def test_the_interval_of_runs_is_students():
    # mean 2, standard deviation 1, t of two degrees of freedom at 97.5% is 4.3027
    margin = 4.3027 / math.sqrt(3)
    assert interval_over_runs([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - margin, 2 + margin), abs=1e-4)
    assert interval_over_runs([5.0]).mean == 5
    assert math.isnan(interval_over_runs([5.0]).low)


def test_methods_are_compared_seed_by_seed():
    runs = {"ours": {"gold": [3.0, 5.0], "length": [1.0, 1.0]}, "control": {"gold": [2.0, 6.0], "length": [2.0, 4.0]}}
    rows = over_seeds(runs, first="gold", control="control")
    assert (rows["ours"]["gold"], rows["ours"]["difference"], rows["ours"]["wins"]) == (4, 0, 1)
    assert rows["control"]["length"] == 3
    assert "difference" not in rows["control"]


def test_control_tables_say_drift_is_not_learning(tmp_path):
    run = RunFolder(tmp_path, {}, console=Console(file=io.StringIO(), width=40))
    for columns, control in ((("before", "after"), "control"), (("after", "control"), "control"), (("coin",), "coin")):
        explain_control(run, columns, control=control)
    first, second = run.console.file.getvalue().splitlines()
    assert (first.partition(":")[0], second.partition(":")[0]) == ("control", "coin")
    assert "not learning" in first


def test_curves_average_methods_over_steps_all_seeds_share(tmp_path, monkeypatch):
    panels, close = {}, pyplot.close

    def read(figure):
        panels.update({axis.get_title(): [y.get_xydata().tolist() for y in axis.lines] for axis in figure.axes})
        close(figure)

    monkeypatch.setattr(pyplot, "close", read)
    run = RunFolder(tmp_path, {})
    kls = {"grpo_0": [0.0, 1.0, 5.0], "grpo_1": [1.0, 2.0], "coin_0": [3.0], "coin_1": [5.0]}
    lines = [{"phase": phase, "step": i, "kl": kl} for phase, of in kls.items() for i, kl in enumerate(of)]
    write_rows(tmp_path / "metrics.jsonl", lines)
    methods = {"grpo": ["grpo_0", "grpo_1"], "coin": ["coin_0", "coin_1"]}
    plots.save_curves(run, (("kl", "KL"), ("missing", "none")), methods)
    assert panels == {"KL": [[[0, 0.5], [1, 1.5]], [[0, 4.0]]], "none": [[], []]}
    assert (tmp_path / "curves.png").stat().st_size
