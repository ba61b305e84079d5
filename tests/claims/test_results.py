"""What questions leave on disk, and the pages that are made of their numbers."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.claims import findings, numbers, page, replication, reproduce, results
from experiments.claims.ablation import COIN, START, Bench
from experiments.claims.findings import Also, Finding, Measured
from experiments.claims.primary import HEADLINES, PRIMARY
from grpo_jax.errors import UsageError
from grpo_jax.runs.folder import write_json

ROOT = Path(__file__).parents[2]
MEANS = {"grpo_ppo": 0.001, "kl_none": 0.2, "kl_high": 0.05, "clip_none": -0.05, "samples_to_target": np.log(0.4)}


def finding_of(name, seeds, spread=0.003):
    """A finding whose numbers have these means, all others a mean of 0.03 that varies too much to be decided."""
    noise = np.resize([1, -1, 0.5, -0.5], seeds)
    rows = {row: {"accuracy": 0.5 + 0.01 * noise, "nothing": np.full(seeds, np.nan)} for row in (START, COIN, "it")}
    rows["it"]["accuracy"] = rows["it"]["accuracy"] + 0.25
    primary = {}
    for claim in PRIMARY:
        if claim.question == name:
            values = MEANS[claim.id] + spread * noise if claim.id in MEANS else 0.03 + 0.1 * noise
            primary[claim.id] = Measured(values, diverged=int(claim.id == "clip_none"))
    curves = {"it": np.tile(np.linspace(0, 1, 5), (seeds, 1)) + noise[:, None] / 100}
    return Finding(rows, primary, [Also("source", "said", f"also of {name}", noise)], ["accuracy"], curves)


@pytest.fixture(scope="module")
def asked():
    """The questions and seeds that were asked, in place of running them."""
    calls = []

    def answering(name):
        def measure(bench):
            calls.append((name.rpartition(".")[2], len(bench.seeds)))
            return finding_of(calls[-1][0], len(bench.seeds))

        return SimpleNamespace(measure=measure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "import_module", answering)
        yield calls


@pytest.fixture(scope="module")
def config(asked, tmp_path_factory):
    """Of the first look, which was taken."""
    folder = tmp_path_factory.mktemp("claims")
    config = reproduce.Config(preset="smoke", num_seeds=10, run_dir=folder / "runs", out=folder)
    reproduce.main(config)
    assert {seeds for _, seeds in asked} == {10}
    return config


def test_answers_come_first_and_the_page_is_the_same_when_written_again(config, asked, undrawn):
    text = (config.out / "RESULTS-smoke.md").read_text()
    first = text[: text.index("![")]
    assert (
        "| GRPO or PPO, at equal samples? | No difference that matters. | [GRPO − PPO](docs/results-smoke/ppo_" in first
    )
    assert (
        "All else equal, a group's mean or a critic? | Not settled; the group's mean is ahead. | [group baseline"
        in first
    )
    assert "0.01 or none? | 0.01. | [β 0.01 − none](docs/results-smoke/ablate_kl.md), on the way: +0.200 [" in first
    assert "eight updates a rollout? | No: learning is better without one." in first
    for target in re.findall(r"\]\(#(\w+)\)", text):
        assert f'<a id="{target}"></a>' in text
    for target in re.findall(r"\]\((docs/[^)]+)\)", text):
        assert (config.out / target).exists()
    (row,) = re.findall(r"\| samples until 95%.*", text)
    assert "× 0.4 [" in row
    assert row.endswith("| below 0.5 | × 0.35 | 10 | supported |")
    assert "1 runs diverged" in text
    asked.clear()
    reproduce.main(config)
    assert (config.out / "RESULTS-smoke.md").read_text() == text
    assert not asked


@pytest.mark.parametrize("draws", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["words", "figures too"])
def test_the_pages_are_made_of_the_file_of_numbers_alone(config, asked, tmp_path, draws, request):
    written = config.out / "docs/results-smoke"
    if not draws:  # pages show the figures that are there
        request.getfixturevalue("undrawn")
        (tmp_path / "docs/results-smoke").mkdir(parents=True)
        for figure in written.glob("*.png"):
            shutil.copy(figure, tmp_path / "docs/results-smoke")
    asked.clear()
    file = written / "numbers.json"
    reproduce.main(reproduce.Config(numbers=(file,), run_dir=tmp_path / "none", out=tmp_path))
    assert not asked
    assert not (tmp_path / "none").exists()
    for path in written.iterdir():
        assert (tmp_path / "docs/results-smoke" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "RESULTS-smoke.md").read_text() == (config.out / "RESULTS-smoke.md").read_text()


@pytest.fixture
def undrawn(monkeypatch):
    """Without new figures, for tests of words."""
    for draw in ("save_forest", "save_rows", "save_curves"):
        monkeypatch.setattr(results, draw, lambda *of: None)


def test_the_pages_of_the_repository_are_those_of_its_numbers(undrawn, tmp_path):
    files = sorted((ROOT / "docs/results").glob("numbers*.json"))
    reproduce.main(reproduce.Config(numbers=tuple(files), out=tmp_path))
    for path in (Path("RESULTS.md"), *(file.relative_to(tmp_path) for file in tmp_path.glob("docs/results/*.md"))):
        assert (tmp_path / path).read_text() == (ROOT / path).read_text()
    text = (tmp_path / "RESULTS.md").read_text()
    for headline in HEADLINES:  # each has its row, with what is said beside it
        (row,) = re.findall(rf"\| {re.escape(headline.question)} \|.*", text)
        assert headline.beside[0] in row


def test_the_file_has_the_values_of_all_seeds(config):
    known = json.loads((config.out / "docs/results-smoke/numbers.json").read_text())
    values, diverged = known["answers"]["ablate_clip"]["primary"]["clip_none"]
    np.testing.assert_allclose(values, finding_of("ablate_clip", 10).primary["clip_none"].values, rtol=1e-6)
    assert diverged == 1
    assert known["answers"]["ablate_clip"]["rows"]["it"]["nothing"] == [None] * 10


def test_numbers_of_other_seeds_have_another_checksum(config, tmp_path):
    file = config.out / "docs/results-smoke/numbers.json"
    known, first = json.loads(file.read_text()), numbers.read_numbers(file).checksum
    other = tmp_path / "numbers.json"
    known["answers"]["ablate_kl"] |= {"seconds": 1e9, "machine": "another", "note": "other words"}
    other.write_text(json.dumps(known))
    assert numbers.read_numbers(other).checksum == first
    known["answers"]["ablate_kl"]["primary"]["kl_none"][0][3] += 1e-6
    other.write_text(json.dumps(known))
    assert numbers.read_numbers(other).checksum != first


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"preset": "cpu", "answers": 3}'])
def test_a_file_that_has_no_numbers_is_named(tmp_path, text):
    (tmp_path / "numbers.json").write_text(text)
    with pytest.raises(UsageError, match=r"numbers\.json"):
        numbers.read_numbers(tmp_path / "numbers.json")


def lose_values(file):
    """Leaves the file as it would be if the values of seeds were lost."""
    kept, found = json.loads(file.read_text()), numbers.read_numbers(file)
    answers = kept.pop("answers")
    kept["claims"] = {
        key: it.decision._asdict() | {"diverged": it.diverged, "needed": it.needed} for key, it in found.claims.items()
    }
    lost = ("learned", "curves")
    kept["questions"] = {
        name: {key: value for key, value in told._asdict().items() if key not in lost}
        | {"also": [it._asdict() for it in told.also], "seconds": answers[name]["seconds"]}
        for name, told in found.questions.items()
    }
    write_json(file, kept)


def test_where_values_are_lost_means_and_verdicts_make_the_same_pages(config, undrawn, tmp_path):
    before = config.out / "docs/results-smoke"
    shutil.copytree(before, tmp_path / "before")
    file = tmp_path / "before/numbers.json"
    lose_values(file)
    reproduce.main(reproduce.Config(numbers=(file,), out=tmp_path))
    first = (config.out / "RESULTS-smoke.md").read_text()
    again = (tmp_path / "RESULTS-smoke.md").read_text()
    assert again.rpartition("SHA-256")[0] == first.rpartition("SHA-256")[0]
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


def test_another_machine_stands_beside_the_first(config, other):
    first = numbers.read_numbers(config.out / "docs/results-smoke/numbers.json")
    text = page.markdown(replication.replication(first, [numbers.read_numbers(other)]))
    assert "; then another, " in text
    assert (
        ": of 2 claims the intervals of 0 overlap, and the means of 2 are more than 1.96 standard errors apart. "
        in text
    )
    assert "in at most 0% of repetitions. Verdicts: 1 different, 1 decided at first only" in text
    assert re.search(
        r"\| β 0.01 − none \| \+0.200 .*: supported \| −0.200 .*: contradicted \| no \| [\d.]+ \| different \|", text
    )


@pytest.mark.slow
def test_another_machine_has_a_page_and_a_link(config, other, tmp_path):
    file = config.out / "docs/results-smoke/numbers.json"
    reproduce.main(reproduce.Config(numbers=(file, other), out=tmp_path))
    text, before = (tmp_path / "RESULTS-smoke.md").read_text(), (config.out / "RESULTS-smoke.md").read_text()
    assert "](docs/results-smoke/replication.md)" in text
    assert (tmp_path / "docs/results-smoke/replication.md").exists()
    assert (tmp_path / "docs/results-smoke/numbers2.json").read_text() == other.read_text()
    assert text.splitlines()[-1] == before.splitlines()[-1]  # nothing of the other enters the page's numbers
    assert text[text.index('id="every"') : text.index('id="rule"')] in before


@pytest.mark.parametrize(
    ("bounds", "expected"), [((0.0, 0.1), True), ((0.1, 0.2), True), ((0.11, 0.2), False), ((-0.3, -0.21), False)]
)
def test_intervals_overlap_where_they_share_a_point(bounds, expected):
    def judged(low, high):
        return numbers.Judged(numbers.Decision("undecided", 10, numbers.Interval(0.0, low, high)))

    assert replication.overlap(judged(-0.2, 0.1), judged(*bounds)) == expected
    assert replication.overlap(judged(*bounds), judged(-0.2, 0.1)) == expected


@pytest.mark.parametrize(
    ("first", "again", "expected"),
    [
        ("supported", "supported", "the same"),
        ("supported", "contradicted", "different"),
        ("no difference that matters", "supported", "different"),
        ("contradicted", "undecided", "decided at first only"),
        ("undecided", "contradicted", "decided again only"),
        ("undecided", "undecided", "undecided in both"),
    ],
)
def test_what_two_verdicts_are_to_each_other(first, again, expected):
    both = [numbers.Judged(numbers.Decision(verdict, 10, numbers.UNKNOWN)) for verdict in (first, again)]
    assert replication.agreement(*both) == expected


def test_how_far_two_means_are_apart_by_hand():
    # 9 degrees of freedom: t is 2.262. Standard errors of 0.03 and 0.04 are 0.05 together, and 0.1 is two of them.
    both = [
        numbers.Judged(numbers.Decision("undecided", 10, numbers.Interval(mean, mean - 2.262 * e, mean + 2.262 * e)))
        for mean, e in ((0.3, 0.03), (0.2, 0.04))
    ]
    assert replication.apart(*both) == pytest.approx(2, rel=1e-3)


def test_what_chance_gives_by_hand():
    assert replication.by_chance([1.96]) == pytest.approx(0.05, abs=1e-4)
    assert replication.by_chance([0.3, 1.96, 1.0]) == pytest.approx(0.15, abs=1e-4)
    assert replication.by_chance([0.3] * 9) == 1


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


def test_the_twin_has_the_same_tables(config):
    twin = (config.out / "docs/results-smoke/claims.html").read_text()
    assert twin.count("<td>supported</td>") == 2 * 3  # of every claim, and of its question
    assert not re.search(r'(src|href)="(http|/)', twin)
    for figure in re.findall(r'<img src="([^"]+)"', twin):
        assert (config.out / "docs/results-smoke" / figure).exists()


def test_what_is_registered_has_to_be_measured(config):
    bench = Bench(config)
    whole = finding_of("ablate_kl", 10)
    fewer = whole._replace(primary={"kl_none": whole.primary["kl_none"]})
    with pytest.raises(UsageError, match="differ in kl_high"):
        findings.answer(bench, "ablate_kl", lambda bench: fewer)
    with pytest.raises(UsageError, match="has 9 values: give one for each of 10 seeds"):
        findings.answer(bench, "ablate_kl", lambda bench: finding_of("ablate_kl", 9))


def test_where_nothing_learned_there_is_no_verdict():
    found = finding_of("ablate_kl", 10)
    answer = findings.Answer(found, 1.0, range(10))
    assert numbers.decisions_of({"ablate_kl": answer})["kl_none"].verdict == "supported"
    unlearned = found._replace(rows=found.rows | {"it": found.rows[START]})
    assert not findings.has_learned(unlearned)
    answer = answer._replace(finding=unlearned)
    assert numbers.decisions_of({"ablate_kl": answer})["kl_none"].verdict == "undecided"
    # A table without a score is of no training; one of a second testbed has its own start.
    assert findings.has_learned(found._replace(rows={START: {"signal": [0.0] * 3}}))
    words = {f"words, {START}": {"accuracy": [0.8] * 10}, "words, it": {"accuracy": [0.7] * 10}}
    assert not findings.has_learned(unlearned._replace(rows=dict(unlearned.rows) | words))


def test_words_of_a_page_cannot_break_it():
    blocks = [page.Table(("a|b",), [("x | <b> & `c|d`",)]), page.Folded("more", [page.Text("**so**")], "place")]
    assert page.markdown(blocks).startswith("| a\\|b |\n| --- |\n| x \\| <b>")
    twin = page.html(blocks, "<title>")
    assert "<td>x | &lt;b&gt; &amp; <code>c|d</code></td>" in twin
    assert '<details id="place"><summary>more</summary>\n<p><strong>so</strong></p>' in twin
    assert "<title>&lt;title&gt;</title>" in twin
