"""The experiment on two rewards in conflict: its rewards, its front, and the whole of it."""

import json

import pytest

from experiments import multi_objective
from experiments.multi_objective import gold, hypervolume, in_order, order, own_letters, pareto_front
from grpo_jax.runs import flags


@pytest.mark.parametrize(
    ("word", "letters"), [("", 0), ("q", 1), ("zyx", 1), ("abcxyzab", 3), ("xcdef", 4), ("za", 1), ("acegi", 1)]
)
def test_letters_in_order_have_no_gaps(word, letters):
    assert in_order(word) == letters


def test_what_words_earn():
    rows = [{"letters": "cab"}] * 4
    words = ["", "abc", "aaaabbbbcccc", "xxcabx"]
    assert own_letters(rows, words) == [0, 3 / 8, 1, 3 / 8]
    assert order(rows, words) == [0, 9, 4, 4]
    assert gold(rows, words) == pytest.approx([0, (3 / 8 + 3 / 15) / 2, (1 + 2 / 15) / 2, (3 / 8 + 2 / 15) / 2])


def test_a_front_leaves_out_what_another_point_exceeds():
    points = [(0.5, 0.5), (0.2, 0.9), (0.4, 0.5), (0.5, 0.1), (0.8, 0.2), (0.5, 0.5)]
    assert pareto_front(points) == [(0.2, 0.9), (0.5, 0.5), (0.8, 0.2)]
    assert hypervolume(points) == pytest.approx(0.2 * 0.9 + 0.3 * 0.5 + 0.3 * 0.2)
    assert hypervolume([]) == 0


def parse(*args):
    return flags.parse(multi_objective.Config, None, [str(arg) for arg in args])


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--weights", "1.5"), "weights"), (("--num-seeds", "0"), "num_seeds"), (("--max-tokens", "16"), "15 letters")],
)
def test_what_cannot_work_is_refused(tmp_path, options, word):
    with pytest.raises(ValueError, match=word):
        multi_objective.main(parse(*options, "--run-dir", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_from_start_to_tables_and_again_resumed(tmp_path, capsys):
    run = tmp_path / "run"
    small = ["--steps", 1, "--warm-steps", 2, "--max-tokens", 4, "--group-size", 2, "--weights", 0.2, "--num-seeds", 1]
    multi_objective.main(parse(*small, "--run-dir", run))
    results = json.loads((run / "results.json").read_text())
    methods = {"sum", "scaled", "gdpo"}
    assert set(results["covered"]) == methods
    assert set(results["over_seeds"]) == methods | {"coin", "start"}
    assert set(results["runs"]) == {f"{name}_0" for name in results["over_seeds"]} | {
        f"{name}_own0.2_0" for name in methods
    }
    assert results["runs"]["start_0"] != results["runs"]["gdpo_0"] != results["runs"]["sum_0"]
    assert {"front.png", "curves.png", "report.html"} <= {file.name for file in run.iterdir()}
    compiled = [line["compilations"] for line in map(json.loads, (run / "times.jsonl").read_text().splitlines())]
    assert compiled[-1] - compiled[-6] <= 2  # other weights and methods take the programs that there are
    metrics = (run / "metrics.jsonl").read_text()
    multi_objective.main(parse("--resume", "--run-dir", run))
    assert json.loads((run / "results.json").read_text()) == results
    assert (run / "metrics.jsonl").read_text() == metrics
    assert "held-out scores at equal weights" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_rewards_compared_one_by_one_reach_more_of_both_than_their_sum(tmp_path):
    multi_objective.main(parse("--num-seeds", 1, "--weights", 0.5, "--run-dir", tmp_path / "run"))
    rows = json.loads((tmp_path / "run/results.json").read_text())["over_seeds"]
    assert rows["gdpo"]["gold"] > rows["sum"]["gold"] + 0.02
    assert rows["sum"]["gold"] > rows["start"]["gold"] + 0.2 > rows["coin"]["gold"]
