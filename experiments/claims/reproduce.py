"""The claims of the sources, measured and decided: runs the questions, and writes RESULTS.md.

Questions are scripts of their own in `experiments.claims.questions` (try `--help` of
`python -m experiments.claims.questions.ablate_kl`). What decides is in `primary` (claims and measures) and `verdicts`
(the rule), both fixed before the runs. The first look is at 10 seeds. `--look 20` and `--look 40` add new seeds to the
questions that have an undecided claim; runs that are there are never repeated, nor when only words, the rule or the
page change. RESULTS.md has the answers, docs/results/ a page for each question, one with sortable tables, claims.html,
and the numbers of all seeds, numbers.json. The pages are made of that file alone, without any run by `--numbers`. The
last line of RESULTS.md is a checksum of all numbers, which the same seeds give again on the same kind of machine.
Presets other than cpu write RESULTS-smoke.md and RESULTS-gpu.md.

  python -m experiments.claims.reproduce --preset cpu
  python -m experiments.claims.reproduce --preset cpu --look 20
  python -m experiments.claims.reproduce --numbers docs/results/numbers.json docs/results/numbers2.json
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal

from rich.console import Console

from experiments.claims import ablation, findings
from experiments.claims.ablation import Bench
from experiments.claims.findings import Answer
from experiments.claims.numbers import decisions_of, write_numbers
from experiments.claims.primary import PRIMARY
from experiments.claims.results import folder_of, write_results
from experiments.claims.verdicts import LOOKS
from grpo_jax.errors import UsageError
from grpo_jax.runs.flags import read_flags

QUESTIONS = (*dict.fromkeys(claim.question for claim in PRIMARY), "curriculum", "agreement")  # no claims in these two


@dataclass(frozen=True)
class Config(ablation.Config):
    """Options of the whole."""

    look: Literal[10, 20, 40] | None = None
    """Seeds of the look, for questions that the looks before left open. None: the first look, or `num_seeds`."""
    out: Path = Path(".")
    """Folder for RESULTS.md, and for its other pages in docs/."""
    numbers: tuple[Path, ...] = ()
    """Files of numbers to make the pages of, in place of runs. The first decides; others, of other machines, are put
    beside it."""


def main(config: Config) -> None:
    """Writes the pages: of the files of numbers that are given, or of answers to all questions."""
    out, console = config.out.expanduser(), Console()
    try:
        out.mkdir(parents=True, exist_ok=True)  # before hours of work
    except OSError as error:
        raise UsageError(f"{config.out} cannot hold results ({error}): name another --out") from None
    page = write_results([file.expanduser() for file in config.numbers] or [ask(config, out)], out)
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


def ask(config: Config, out: Path) -> Path:
    """Answers the questions that are not answered yet, and writes their numbers into one file."""
    bench, answers = bench_of(config), dict[str, Answer]()
    looks = [look for look in LOOKS if look < len(bench.seeds)] if config.look else []
    for seeds in [*looks, len(bench.seeds)]:
        wanted = [name for name in QUESTIONS if name not in answers or is_open(name, answers)]
        answers |= answer_all(bench_of(replace(config, look=None, num_seeds=seeds)), wanted)
    counts = Counter(decision.verdict for decision in decisions_of(answers).values())
    bench.run.console.print(", ".join(f"{count} {word}" for word, count in counts.items()))
    file = folder_of(out, config.preset) / "numbers.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_numbers(file, bench, config.preset, list(answers))
    return file


def bench_of(config: Config) -> Bench:
    """The bench with the seeds of the look."""
    return Bench(replace(config, num_seeds=config.look) if config.look else config)


def is_open(name: str, answers: Mapping[str, Answer]) -> bool:
    """Whether a question has a claim without a verdict, by what is known."""
    decisions = decisions_of(answers)
    return any(decisions[it.id].verdict == "undecided" for it in PRIMARY if it.question == name)


def answer_all(bench: Bench, names: list[str]) -> dict[str, Answer]:
    """Answers of questions, those on disk read."""
    answers = dict[str, Answer]()
    with bench.run.progress("question", len(names), seldom=False) as show:
        for number, name in enumerate(names):
            bench.say = partial(_say, show, number, name)
            if not findings.is_answered(bench, name):
                findings.answer(bench, name, import_module(f"{findings.QUESTIONS}.{name}").measure)
            answers[name] = findings.read_answer(bench, name)
        show(len(names), "")
    return answers


def _say(show: Callable[[int, str], None], number: int, name: str, words: str) -> None:
    show(number, f"{name}: {words}")


if __name__ == "__main__":
    options = read_flags(Config, prog="python -m experiments.claims.reproduce", description=__doc__)
    findings.run_guarded(lambda: main(options), options)
