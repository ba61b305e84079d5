"""What a question leaves on disk, and the pages that are made of it."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.claims import findings, page, reproduce, results
from experiments.claims.ablation import COIN, START, Bench
from experiments.claims.findings import Also, Finding, Measured
from experiments.claims.primary import PRIMARY
from grpo_jax.errors import UsageError

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


def test_answers_come_first_and_the_page_is_the_same_when_written_again(config, asked):
    text = (config.out / "RESULTS-smoke.md").read_text()
    first = text[: text.index("![")]
    assert (
        "| GRPO or PPO, at equal samples? | Either: no difference that matters. All else equal: not settled; " in first
    )
    assert "the group's mean is ahead by 0.030 in these seeds." in first
    assert "? | 0.01 beats none. 0.1 is worse. |" in first
    assert "| Is a clip needed? | No: without it learning is better" in first
    assert "[GRPO − PPO](docs/results-smoke/ppo_vs_grpo.md): +0.001 [" in first
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
    assert results.decisions_of({"ablate_kl": answer})["kl_none"].verdict == "supported"
    unlearned = found._replace(rows=found.rows | {"it": found.rows[START]})
    assert not findings.has_learned(unlearned)
    answer = answer._replace(finding=unlearned)
    assert results.decisions_of({"ablate_kl": answer})["kl_none"].verdict == "undecided"
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
