"""The claims of the sources, measured and decided: runs the questions, and writes RESULTS.md.

Each question is a file in claims/questions; `--only NAME` answers one and prints its table. What decides is in these
files (claims and measures) and in `verdicts` (the rule), both fixed before the runs. A look is a verdict after a number
of seeds: first 10, and with `--look 20` and `--look 40` more seeds for the questions that have an undecided claim.
Finished runs are never repeated, even if words, the rule or the page have changed. The command says how long it may
take, and continues where it was stopped.

The folder of --out (runs/results) gets RESULTS.md with the answers, and docs/results/ with a page for each question and
the numbers of all seeds, numbers.json. `--out .` replaces the pages of this repository. With --numbers, the pages are
made of such files, without any run. The last line of RESULTS.md is a checksum of all numbers, which the same seeds give
again on the same kind of machine. Presets other than cpu write RESULTS-smoke.md and RESULTS-gpu.md.

  python -m claims.reproduce --preset cpu
  python -m claims.reproduce --preset cpu --look 20
  python -m claims.reproduce --preset cpu --only ablate_kl
  python -m claims.reproduce --preset cpu --only ablate_kl --seed 25 --num-seeds 10 --add-to docs/results/numbers.json
  python -m claims.reproduce --numbers docs/results/numbers.json docs/results/numbers2.json --out .
"""

import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from claims import answers
from claims.bench import Bench, Config, cores
from claims.numbers import add_answer, check_addition, judge, read_numbers, result_of, write_numbers
from claims.pages import (
    UNLEARNED,
    WHY_UNLEARNED,
    folder_of,
    number,
    rows_as_text,
    with_interval,
    write_pages,
)
from claims.questions import BY_ID, CLAIMS, COIN, PAGES, QUESTIONS
from claims.verdicts import LOOKS, interval
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.errors import UsageError
from grpo_jax.report import explain_control
from grpo_jax.runs.progress import in_time, use_cache

ROOT = Path(__file__).parents[1]
Answers = Mapping[str, Mapping[str, Any]]  # by question, as `answers.answer` returns them


def main(config: Config) -> None:
    """Writes the pages, of files of numbers or of answers to all questions; or prints the answers to some.

    Raises:
      UsageError: there is no such question, or the pages cannot be written.
    """
    names = [name for name, question in QUESTIONS.items() if question.module == "reproduce"]
    if unknown := set(config.only) - set(names):
        raise UsageError(f"there is no question {', '.join(sorted(unknown))}: name some of {', '.join(names)}")
    if config.only:
        bench = bench_of(config)
        if config.add_to:
            check_addition(config.add_to.expanduser(), config.only, config.preset, bench.seeds)
        for name, answer in answer_all(bench, config.only).items():
            show(bench, name, answer)
            if config.add_to:
                add_answer(config.add_to.expanduser(), name, answer, more=True)
        return
    out = config.out.expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)  # before hours of work
    except OSError as error:
        raise UsageError(f"{config.out} cannot hold results ({error}): name another --out") from None
    page = write_pages([file.expanduser() for file in config.numbers] or [ask(config, out)], out)
    Console().print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


def ask(config: Config, out: Path) -> Path:
    """Answers the questions that are not answered yet, and writes their numbers into one file."""
    bench, known = bench_of(config), dict[str, Mapping[str, Any]]()
    looks = [look for look in LOOKS if look < len(bench.seeds)] if config.look else []
    for seeds in [*looks, len(bench.seeds)]:
        names = [name for name in PAGES["questions"] if name not in known or is_open(name, known)]
        known |= answer_all(bench_of(replace(config, look=None, num_seeds=seeds)), names)
    decisions = judge(known)
    counts = Counter(decisions[claim.id].verdict for claim in CLAIMS)
    bench.run.console.print(", ".join(f"{count} {word}" for word, count in counts.items()))
    file = folder_of(out, config.preset) / "numbers.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_numbers(file, config.preset, bench.size, bench.run.path, list(known))
    return file


def bench_of(config: Config) -> Bench:
    """Returns the bench with the seeds of the look."""
    return Bench(replace(config, num_seeds=config.look) if config.look else config)


def is_open(name: str, known: Answers) -> bool:
    """Returns whether a question has a claim without a verdict, by what is known."""
    decisions = judge(known)
    return any(decisions[it.id].verdict == "undecided" for it in CLAIMS if it.question == name)


def answer_all(bench: Bench, names: Sequence[str]) -> Answers:
    """Returns the answers to questions; those on disk are read."""
    known = {name: it for name in names if (it := answers.present_answer(bench, name))}
    if missing := [name for name in names if name not in known]:
        bench.run.say(f"{len(missing)} of {len(names)} questions are open: {expected_time(bench, missing)}")
    with bench.run.progress("question", len(names)) as progress:
        for name in missing:
            bench.say = partial(_say, progress, len(known), name)
            known[name] = answers.answer(bench, name)
        progress(len(names), "")
    return {name: known[name] for name in names}


def expected_time(bench: Bench, names: Sequence[str]) -> str:
    """Returns a sentence on the time that questions take, by the time that the committed results took per seed.

    These were asked in order, so runs count for the first question that has them. If some are on disk, it takes less.
    """
    file = folder_of(ROOT, bench.preset) / "numbers.json"
    results = read_numbers(file).questions if file.exists() else {}
    seconds = sum(results[name].seconds / results[name].seeds if name in results else math.nan for name in names)
    if math.isnan(seconds):
        return "nobody has measured how long they take"
    return f"they took {in_time(seconds * len(bench.seeds))} on two CPU cores, after the runs of earlier questions"


def _say(progress: Callable[[int, str], None], place: int, name: str, words: str) -> None:
    progress(place, f"{name}: {words}")


def show(bench: Bench, name: str, answer: Mapping[str, Any]) -> None:
    """Prints the table and the numbers of an answer."""
    run, result, seeds = bench.run, result_of(answer), ", ".join(map(str, answer["seeds"]))
    columns, rows = rows_as_text(result)
    report.print_table(
        run, f"{name}: means ± half a 95% interval over seeds {seeds}; {bench.size.steps} steps", columns, rows
    )
    if not QUESTIONS[name].computed_by:  # else the coin's row is no run
        explain_control(run, rows, control=COIN)
    numbers = {
        BY_ID[key].measure: [BY_ID[key].words, with_interval(BY_ID[key].scale, interval(BY_ID[key], values))]
        for key, (values, _) in answer["primary"].items()
    }
    numbers |= {it.measure: [it.words, number(it.interval)] for it in result.also}
    report.print_table(run, "what the sources say of it", ("", "measured"), numbers)
    words = [result.note] if result.learned else [f"{UNLEARNED}: {WHY_UNLEARNED}", result.note]
    words += [f"{result.seconds:.0f} s; to look at: {run.path / name}.png"]
    run.say("\n".join(filter(None, words)))


def run_guarded(config: Config) -> None:
    """Runs `main` with all cores as devices, and products in float32; a refusal is one sentence."""
    jax.config.update("jax_num_cpu_devices", cores())
    # GPUs would round the factors of a product to TF32, and TPUs to bfloat16: then a machine would be an experiment.
    jax.config.update("jax_default_matmul_precision", "highest")
    if config.compilation_cache:
        use_cache()
    try:
        main(config)
    except (UsageError, FloatingPointError) as error:
        flags.refuse(str(error))
    except KeyboardInterrupt:
        flags.say_refusal("stopped; the same command continues")
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    run_guarded(flags.read_flags(Config, prog="python -m claims.reproduce", description=__doc__))
