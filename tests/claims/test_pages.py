"""Checks the files that questions leave on disk, and the pages that are made of their numbers."""

import itertools
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats
from tiny import refused

from claims import answers, figures, numbers, pages, reproduce
from claims.bench import Bench, Config
from claims.numbers import Decision, Interval
from claims.questions import BY_ID, CLAIMS, COIN, HEADLINES, PAGES, QUESTIONS, START
from claims.testbeds import ADDITIONS, WORDS
from grpo_jax.commands.flags import read_flags
from grpo_jax.models.policy import decoder_policy
from grpo_jax.runs.files import write_json
from grpo_jax.runs.progress import in_time
from grpo_jax.statistics import interval_over_runs

ROOT = Path(__file__).parents[2]
MEANS = {"grpo_ppo": 0.001, "kl_none": 0.2, "kl_high": 0.05, "clip_none": -0.05, "samples_to_target": np.log(0.4)}


def answer_of(name, seeds, spread=0.003):
    """An answer whose numbers have these means, all others a mean of 0.03 that varies too much to be decided."""
    noise, question = np.resize([1, -1, 0.5, -0.5], seeds), QUESTIONS[name]
    columns = dict.fromkeys(("accuracy", *question.columns), 0.5 + 0.01 * noise)
    names = (START, COIN, *question.starts, *question.settings, *question.means, "it")
    rows = {row: columns | {"nothing": np.full(seeds, np.nan)} for row in names}
    rows["it"]["accuracy"] = rows["it"]["accuracy"] + 0.25
    measures = [it.measure for it in question.also] + [f"also of {name}"]
    primary = {}
    for claim in CLAIMS:
        if claim.question == name:
            values = MEANS[claim.id] + spread * noise if claim.id in MEANS else 0.03 + 0.1 * noise
            primary[claim.id] = [values.tolist(), int(claim.id == "clip_none")]
    return {
        "rows": {row: {column: x.tolist() for column, x in columns.items()} for row, columns in rows.items()},
        "primary": primary,
        "also": [{"source": "", "words": "words", "measure": it, "values": noise.tolist()} for it in measures],
        "drawn": ["accuracy"],
        "curves": {"it": (np.tile(np.linspace(0, 1, 5), (seeds, 1)) + noise[:, None] / 100).tolist()},
        "note": "",
    }


@pytest.fixture(scope="module")
def asked():
    """The questions and seeds that were asked, instead of running them; figures are empty files."""
    calls = []

    def measure(bench, question):
        calls.append((question.name, len(bench.seeds)))
        return answer_of(question.name, len(bench.seeds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "measure", measure)
        patch.setattr(pages, "save_forest", lambda path, *_: path.touch())
        for module, draw in itertools.product((answers, pages), ("save_rows", "save_curves")):
            patch.setattr(module, draw, lambda path, *_: path.touch())
        yield calls


@pytest.fixture(scope="module")
def config(asked, tmp_path_factory):
    """Of the first look, which was taken."""
    folder = tmp_path_factory.mktemp("claims")
    config = Config(preset="smoke", num_seeds=10, run_dir=folder / "runs", out=folder)
    reproduce.main(config)
    assert {seeds for _, seeds in asked} == {10}
    return config


def test_pages_start_with_answers_and_are_reproducible(config, asked):
    text = (config.out / "RESULTS-smoke.md").read_text()
    first = text[: text.index("![")]
    for headline in HEADLINES:  # each has its rows, with a link
        assert f"| {headline.question}" in first
        for row in headline.evidence:
            if row.question in ("stories", "sums"):  # not asked
                continue
            assert f"[{row.says}](docs/results-smoke/{row.question}.md) | {row.model} |" in first
    assert "| additions | **no difference that matters** at the end |" in first
    assert re.search(r"finds differences of 0\.\d+ with 10 seeds, or 0\.\d+ with 40", first)
    for target in re.findall(r"\]\(#(\w+)\)", text):
        assert f'<a id="{target}"></a>' in text
    for target in re.findall(r"\]\((docs/[^)]+)\)", text):
        assert any((folder / target).exists() for folder in (config.out, ROOT))
    (row,) = re.findall(r"\| samples until 95%.*", text)
    assert "× 0.4 [" in row
    assert row.endswith("| below 0.5 | × 0.35 | 10 | supported |")
    assert "1 runs diverged" in text
    asked.clear()
    reproduce.main(config)
    assert (config.out / "RESULTS-smoke.md").read_text() == text
    assert not asked


def test_figures_are_drawn_alike_each_time(config, tmp_path):
    known = numbers.read_numbers(config.out / "docs/results-smoke/numbers.json")
    result = known.questions["ablate_kl"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        drawn = [(claim, known.claims[claim.id]) for claim in CLAIMS if claim.id in MEANS]
        figures.save_forest(tmp_path / name / "forest.png", drawn)
        figures.save_rows(tmp_path / name / "rows.png", result.rows, result.drawn)
        figures.save_curves(tmp_path / name / "curves.png", result.curves, known.steps)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_intervals_that_leave_the_axis_end_in_arrows(tmp_path, monkeypatch):
    drawn, close = [], figures.plt.close
    monkeypatch.setattr(figures.plt, "close", lambda figure: close(figure) or drawn.extend(figure.axes[0].lines))
    interval = Interval(-0.1, -0.13, -0.07)
    figures.save_forest(tmp_path / "forest.png", [(BY_ID["kl_none"], Decision("contradicted", 10, interval))])
    assert [line.get_xdata()[0] for line in drawn if line.get_marker() == "<"] == [-figures.REACH["difference"]]
    assert not [line for line in drawn if line.get_marker() == ">"]


def test_committed_pages_match_the_committed_numbers(asked, tmp_path):
    files = sorted((ROOT / "docs/results").glob("numbers*.json"))
    reproduce.main(Config(numbers=tuple(files), out=tmp_path))
    for path in (Path("RESULTS.md"), *(file.relative_to(tmp_path) for file in tmp_path.glob("docs/results/*.md"))):
        assert (tmp_path / path).read_text() == (ROOT / path).read_text()


def strings_of(values, scale="difference"):
    """A number as the pages may print it, computed without their code."""
    values = np.array([np.nan if x is None else x for x in values], np.float64)
    mean, half = values.mean(), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    if scale == "ratio":
        return {f"× {math.exp(mean):.3g} [{math.exp(mean - half):.3g}, {math.exp(mean + half):.3g}]"}
    signed = [f"{x:+z.3f}".replace("-", "−") for x in (mean, mean - half, mean + half)]
    return {f"{signed[0]} [{signed[1]}, {signed[2]}]", f"{mean:z.3f} ± {half:.3f}"}


def test_numbers_on_the_page_follow_from_seed_values():
    known = json.loads((ROOT / "docs/results/numbers.json").read_text())["answers"]
    expected = set()
    for answer in known.values():
        for key, (values, _) in answer["primary"].items():
            for look in (10, 20, 40):  # the one that decided
                expected |= strings_of(values[:look], BY_ID[key].scale)
        for it in answer["also"]:
            expected |= strings_of(it["values"])
        for columns in answer["rows"].values():
            for values in columns.values():
                expected |= strings_of(values)
    for headline in HEADLINES:
        for row in headline.evidence:
            rows = known.get(row.question, {"rows": {}})["rows"]
            if row.rows and set(row.rows) <= rows.keys():  # measured so far
                one, other = (rows[name] for name in row.rows)
                for column in one:
                    expected |= strings_of(np.subtract(one[column], other[column]))
    mean, low, high = json.loads((ROOT / "docs/results/numbers2.json").read_text())["claims"]["grpo_ppo"]["interval"]
    of_other_machine = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]".replace("-", "−")
    text = (ROOT / "RESULTS.md").read_text()
    assert f"| 40 | {of_other_machine} |" in text
    expected.add(of_other_machine)
    page = text[: text.index('<a id="again"></a>')]  # below it stands another machine
    numbers_on_page = re.findall(r"[+−]\d\.\d+ \[[^\]]+\]|× [\d.]+ \[[^\]]+\]|\d\.\d+ ± \d\.\d+", page)
    assert len(numbers_on_page) > 80
    assert set(numbers_on_page) - expected == set()
    for at_most in re.findall(r"a lead is at most (\d\.\d+)", page):
        assert any(f"−{at_most}, " in it or f"+{at_most}]" in it for it in expected)
    for testbed in (ADDITIONS, WORDS):
        shapes = jax.eval_shape(decoder_policy(testbed.model).init, jax.random.key(0))
        assert f"{round(sum(leaf.size for leaf in jax.tree.leaves(shapes)), -3):,} parameters" in page
    # The sentences themselves have no measured numbers.
    written = "".join((*PAGES["findings"], PAGES["texts"]["results"], *("".join(it.note) for it in HEADLINES)))
    written = re.sub(r"\{[^{}]*\}", "", written)  # names of numbers
    assert set(re.findall(r"\d+\.\d+", written)) <= {"0.01", "0.02", "0.04", "0.0017", "0.8", "2504.13837"}


def test_numbers_file_holds_seed_values_and_their_checksum(config, tmp_path):
    file = config.out / "docs/results-smoke/numbers.json"
    known, first = json.loads(file.read_text()), numbers.read_numbers(file).checksum
    values, diverged = known["answers"]["ablate_clip"]["primary"]["clip_none"]
    np.testing.assert_allclose(values, answer_of("ablate_clip", 10)["primary"]["clip_none"][0], rtol=1e-6)
    assert diverged == 1
    assert known["answers"]["ablate_clip"]["rows"]["it"]["nothing"] == [None] * 10
    other = tmp_path / "numbers.json"
    known["answers"]["ablate_kl"] |= {"seconds": 1e9, "machine": "another", "note": "other words"}
    other.write_text(json.dumps(known))
    assert numbers.read_numbers(other).checksum == first
    known["answers"]["ablate_kl"]["primary"]["kl_none"][0][3] += 1e-6
    other.write_text(json.dumps(known))
    assert numbers.read_numbers(other).checksum != first


def test_more_seeds_follow_those_of_the_file(config, tmp_path):
    source = config.out / "docs/results-smoke/numbers.json"
    file, known = tmp_path / "numbers.json", json.loads(source.read_text())
    file.write_text(source.read_text())
    answer = known["answers"]["ablate_kl"]
    more = json.loads(json.dumps(answer)) | {"seeds": [97, 99], "code": "checksum 1"}
    more["primary"]["kl_none"] = [[0.5, 0.25], 1]
    numbers.add_answer(file, "ablate_kl", more, more=True)
    joined = json.loads(file.read_text())["answers"]["ablate_kl"]
    assert joined["seeds"] == [*answer["seeds"], 97, 99]
    values, diverged = answer["primary"]["kl_none"]
    assert joined["primary"]["kl_none"] == [[*values, 0.5, 0.25], diverged + 1]
    (row, *_), (before, *_) = joined["rows"].values(), answer["rows"].values()
    assert row == {column: 2 * values for column, values in before.items()}
    assert joined["code"] == f"{answer['code']} and checksum 1"
    assert joined["seconds"] == pytest.approx(2 * answer["seconds"], rel=1e-6)
    with refused("seed 97 is in both answers"):
        numbers.add_answer(file, "ablate_kl", more, more=True)
    with refused("different questions"):
        numbers.with_more_seeds(answer, more | {"rows": {}})


def test_seeds_that_cannot_be_added_are_not_run(config, asked):
    file = config.out / "docs/results-smoke/numbers.json"
    asked.clear()
    for changes, words in (({"seed": 9}, "has seed 9 of ablate_kl"), ({"preset": "gpu"}, "preset smoke, not gpu")):
        with refused(words):
            reproduce.main(reproduce.replace(config, only=("ablate_kl",), num_seeds=1, add_to=file, **changes))
    assert not asked


@pytest.mark.parametrize("text", [reproduce.__doc__, (ROOT / "docs/ablations.md").read_text(encoding="utf-8")])
def test_the_documented_seeds_can_be_added(text, tmp_path):
    (line,) = re.findall(r"-m claims.reproduce (.*--add-to .*)", text)
    config = read_flags(Config, args=shlex.split(line))
    seeds = Bench(reproduce.replace(config, run_dir=tmp_path)).seeds
    numbers.check_addition(ROOT / config.add_to, config.only, config.preset, seeds)


def test_an_answer_counts_no_time_of_other_seeds(asked, tmp_path):
    config = Config(preset="smoke", num_seeds=2, run_dir=tmp_path)
    first = answers.answer(Bench(config), "ablate_kl")
    file = tmp_path / "smoke" / "ablate_kl.json"
    write_json(file, first | {"seconds": 1000.0})
    assert answers.answer(Bench(reproduce.replace(config, num_seeds=4)), "ablate_kl")["seconds"] >= 1000
    assert answers.answer(Bench(reproduce.replace(config, seed=20)), "ablate_kl")["seconds"] < 1000


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"preset": "cpu", "answers": 3}'])
def test_a_file_that_has_no_numbers_is_named(tmp_path, text):
    (tmp_path / "numbers.json").write_text(text)
    with refused(r"numbers\.json"):
        numbers.read_numbers(tmp_path / "numbers.json")


def lose_values(file):
    """Leaves the file as it would be if the values of seeds were lost."""
    known, results = json.loads(file.read_text()), numbers.read_numbers(file)
    seconds = {name: it["seconds"] for name, it in known.pop("answers").items()}
    known["claims"] = {key: it._asdict() for key, it in results.claims.items()}
    known["questions"] = {
        name: {key: value for key, value in it._asdict().items() if key not in ("learned", "curves")}
        | {"also": [also._asdict() for also in it.also], "seconds": seconds[name]}
        for name, it in results.questions.items()
    }
    write_json(file, known)


@pytest.mark.parametrize("lost", [False, True])
def test_pages_are_rebuilt_from_the_numbers_file(config, asked, tmp_path, lost):
    before = config.out / "docs/results-smoke"
    shutil.copytree(before, tmp_path / "before")
    file = tmp_path / "before/numbers.json"
    if lost:
        lose_values(file)
    asked.clear()
    reproduce.main(Config(numbers=(file,), run_dir=tmp_path / "none", out=tmp_path))
    assert not asked
    assert not (tmp_path / "none").exists()
    first = (config.out / "RESULTS-smoke.md").read_text()
    again = (tmp_path / "RESULTS-smoke.md").read_text()
    # Only the differences of the first table need the values.
    evidence = [text[text.index('<a id="every">') : text.index("SHA-256")] for text in (first, again)]
    assert evidence[0] == evidence[1]
    for path in (*before.glob("*.md"), *before.glob("*_curves.png")):  # these as they were
        assert (tmp_path / "docs/results-smoke" / path.name).read_bytes() == path.read_bytes()


@pytest.fixture
def other(config, tmp_path):
    """Numbers of another machine, of one question: one claim is reversed, the other undecided."""
    known = json.loads((config.out / "docs/results-smoke/numbers.json").read_text())
    of_kl = known["answers"]["ablate_kl"] | {"machine": "another"}
    of_kl["primary"] = {"kl_none": [[-x for x in of_kl["primary"]["kl_none"][0]], 0], "kl_high": [[0.05, -0.05] * 5, 0]}
    file = tmp_path / "other.json"
    file.write_text(json.dumps(known | {"answers": {"ablate_kl": of_kl}}))
    return file


def test_another_machine_has_a_page_and_a_link(config, other, tmp_path):
    file = config.out / "docs/results-smoke/numbers.json"
    reproduce.main(Config(numbers=(file, other), out=tmp_path))
    text, before = (tmp_path / "RESULTS-smoke.md").read_text(), (config.out / "RESULTS-smoke.md").read_text()
    assert "](docs/results-smoke/replication.md)" in text
    assert (tmp_path / "docs/results-smoke/numbers2.json").read_text() == other.read_text()
    assert text.splitlines()[-1] == before.splitlines()[-1]  # nothing of the other enters the page's numbers
    assert text[text.index('id="every"') : text.index('id="rule"')] in before
    again = (tmp_path / "docs/results-smoke/replication.md").read_text()
    assert "The second is another, " in again
    for part in ("intervals of 0 of 2 claims overlap", "1 different", "1 decided only on the first machine"):
        assert part in again
    row = (
        r"\| β 0.01 − none \| \+0.200 .*: supported \| −0.200 .*: contradicted \| no \| [\d.]+ \| different verdicts \|"
    )
    assert re.search(row, again)


def test_other_machines_are_named_with_their_questions():
    places = {"ablate_kl": "one H100", "staleness": "two cores", "pass_at_k": "one H100"}
    assert pages.places_of(places) == "one H100 (but of staleness: two cores)"


def test_pages_name_the_command_of_their_question(config, tmp_path):
    known = json.loads((config.out / "docs/results-smoke/numbers.json").read_text())
    pretrained = known["answers"]["ablate_kl"] | {"primary": {}, "also": []}
    (tmp_path / "numbers.json").write_text(json.dumps(known | {"answers": {"sums": pretrained, "stories": pretrained}}))
    reproduce.main(Config(numbers=(tmp_path / "numbers.json",), out=tmp_path))
    for name in ("sums", "stories"):
        page = (tmp_path / "docs/results-smoke" / f"{name}.md").read_text()
        assert f"`python -m claims.pretrained --question {name} --model DIR`" in page
    page = (config.out / "docs/results-smoke/ablate_kl.md").read_text()
    assert re.search(r"`python -m claims.reproduce --only ablate_kl`: .* s without the runs of earlier questions", page)


BOUNDS = [((0.0, 0.1), True), ((0.1, 0.2), True), ((0.11, 0.2), False), ((-0.3, -0.21), False)]


@pytest.mark.parametrize(("bounds", "expected"), BOUNDS)
def test_intervals_overlap_where_they_share_a_point(bounds, expected):
    one, other = Interval(0.0, -0.2, 0.1), Interval(0.0, *bounds)
    assert pages.overlap(one, other) == pages.overlap(other, one) == expected


RELATIONS = [
    ("supported", "supported", "the same verdict"),
    ("supported", "contradicted", "different verdicts"),
    ("no difference that matters", "supported", "different verdicts"),
    ("contradicted", "undecided", "decided only on the first machine"),
    ("undecided", "contradicted", "decided only on the second machine"),
    ("undecided", "undecided", "undecided on both"),
]


@pytest.mark.parametrize(("first", "again", "expected"), RELATIONS)
def test_what_two_verdicts_are_to_each_other(first, again, expected):
    both = [Decision(verdict, 10, Interval(0.0, 0.0, 0.0)) for verdict in (first, again)]
    assert pages.relation(*both) == expected


def test_distance_of_means_and_chance_probability_by_hand():
    # 9 degrees of freedom: t is 2.262. Standard errors of 0.03 and 0.04 are 0.05 together, and 0.1 is two of them.
    one, other = (Interval(mean, mean - 2.262 * e, mean + 2.262 * e) for mean, e in ((0.3, 0.03), (0.2, 0.04)))
    both = Decision("undecided", 10, one), Decision("undecided", 10, other)
    assert pages.apart(*both) == pytest.approx(2, rel=1e-3)
    values = np.random.default_rng(0).normal(size=10), np.random.default_rng(1).normal(0.4, 2, size=20)
    seen = [Decision("undecided", len(x), interval_over_runs(x)) for x in values]
    assert pages.chance(*seen) == pytest.approx(stats.ttest_ind(*values, equal_var=False).pvalue)


@pytest.mark.slow
def test_a_later_look_asks_only_what_is_open(config, asked, tmp_path):
    shutil.copytree(config.out, tmp_path, dirs_exist_ok=True)
    config = reproduce.replace(config, run_dir=tmp_path / "runs", out=tmp_path)
    asked.clear()
    reproduce.main(reproduce.replace(config, num_seeds=None, look=20))
    assert {seeds for _, seeds in asked} == {20}
    assert "ablate_kl" not in dict(asked)  # both of its claims have their verdicts
    assert "ablate_group_size" in dict(asked)
    asked.clear()
    reproduce.main(reproduce.replace(config, num_seeds=None, look=20))
    assert not asked
    assert "; the look at 40 seeds takes up to" in (tmp_path / "RESULTS-smoke.md").read_text()


def test_each_claim_has_a_value_for_each_seed(config, monkeypatch):
    monkeypatch.setattr(answers, "measure", lambda bench, question: answer_of(question.name, 9))
    with refused("has 9 values: give one for each of 10 seeds"):
        answers.answer(Bench(config), "ablate_kl")


def test_one_question_is_printed_without_pages(config, asked, capsys):
    page = (config.out / "RESULTS-smoke.md").read_text()
    asked.clear()
    # The answer on disk has more seeds than are asked for.
    reproduce.main(reproduce.replace(config, only=("ablate_kl",), num_seeds=2, out=config.out / "none"))
    printed = " ".join(capsys.readouterr().out.split())
    assert not asked
    assert not (config.out / "none").exists()
    assert "ablate_kl: means ± half a 95% interval over seeds 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; " in printed
    assert "+0.200 [" in printed
    assert "ablate_kl.png" in printed
    assert (config.out / "RESULTS-smoke.md").read_text() == page
    with refused("there is no question ablate_kk: name some of ablate_clip, "):
        reproduce.main(reproduce.replace(config, only=("ablate_kk",)))


def test_a_start_says_how_long_it_may_take(tmp_path):
    committed = numbers.read_numbers(ROOT / "docs" / "results" / "numbers.json").questions
    seconds = sum(20 * committed[name].seconds / committed[name].seeds for name in ("ablate_kl", "staleness"))
    bench = Bench(Config(num_seeds=20, run_dir=tmp_path))
    sentence = reproduce.expected_time(bench, ["ablate_kl", "staleness"])
    assert sentence == f"they took {in_time(seconds)} on two CPU cores, after the runs of earlier questions"
    assert "nobody has measured" in reproduce.expected_time(bench, ["ablate_kl", "unknown"])


def test_where_nothing_learned_there_is_no_verdict():
    known = answer_of("ablate_kl", 10)
    assert numbers.judge({"ablate_kl": known})["kl_none"].verdict == "supported"
    rows = known["rows"] | {"it": known["rows"][START]}
    assert not numbers.has_learned(rows)
    assert numbers.judge({"ablate_kl": known | {"rows": rows}})["kl_none"].verdict == "undecided"
    # A table without a score is of no training; one of a second testbed has its own start.
    assert numbers.has_learned({START: {"signal": [0.0] * 3}})
    words = {f"words, {START}": {"accuracy": [0.8] * 10}, "words, it": {"accuracy": [0.7] * 10}}
    assert not numbers.has_learned(rows | words)


def test_words_of_a_table_cannot_break_it():
    assert pages.table(("a|b",), [("x | <b>",)]) == "| a\\|b |\n| --- |\n| x \\| <b> |"
