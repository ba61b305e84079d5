"""Every claim of the sources, measured: runs all questions, and writes RESULTS.md.

Thirteen questions, each a script of its own in `experiments.claims.questions` (try `--help` of
`python -m experiments.claims.questions.ablate_kl`). Runs are kept as they end: the same command goes on where it
stopped, and scripts share runs, starts and compiled programs. RESULTS.md
has for each claim what the source says, our number with its interval, and a verdict by one rule; its last line is a
checksum of all numbers, which the same seeds give again on the same kind of machine. Presets other than cpu write
RESULTS-smoke.md and RESULTS-gpu.md. The cpu preset takes about half an hour on two cores.

  python -m experiments.claims.reproduce --preset cpu
"""

import hashlib
import importlib
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import tyro

from experiments.claims import ablation, findings
from experiments.claims.ablation import Bench, Size
from experiments.claims.findings import (
    UNLEARNED,
    WHY_UNLEARNED,
    Answer,
    Claim,
    Finding,
    cells,
    claim_cells,
    has_learned,
)
from grpo_jax.errors import UsageError
from grpo_jax.runs.folder import write_text
from grpo_jax.tasks.letters import NUM_HELDOUT

QUESTIONS = (
    "ablate_group_size",
    "ablate_temperature",
    "ablate_kl",
    "ablate_clip",
    "ppo_vs_grpo",
    "entropy_bonus",
    "gae_bias_variance",
    "reward_noise",
    "agreement",
    "reward_hacking",
    "curriculum",
    "estimators",
    "staleness",
)
SOURCES = """The sources are the texts that this library implements: 000 and 001 are the posts that announced GRPO in
September 2022, 003 are notes on PPO and GRPO. None of them published data. What they say of other tasks and sizes is
not refuted by what a small model does on additions: here is what can be seen of it in minutes, by anyone."""
RULE = """Each claim is a number of ours and the range that its words allow, both stated before the runs. Over seeds
the number has a mean and Student's 95% interval. **Agree**: the whole interval is inside the range. **Disagree**:
all of it is outside. **Undecided**: the rest. Numbers without any chance in them have no interval; equal is not
better. Nothing is corrected for there being many claims: of those of a direction ("above 0") without substance one
in forty would agree, and those of no harm ("above -0.02") agree where there is no effect. In tables ± is half an
interval; in figures dots are means, bars intervals, and lines the controls. What a section expects was written
before its results."""


@dataclass(frozen=True)
class Config(ablation.Config):
    """Options of the whole."""

    out: Path = Path(".")
    """Folder for RESULTS.md, and for its figures in docs/."""


def main(config: Config) -> None:
    """Answers the questions that are not answered yet, and writes all of them down."""
    bench, answers = Bench(config), dict[str, Answer]()
    try:
        config.out.expanduser().mkdir(parents=True, exist_ok=True)  # before hours of work
    except OSError as error:
        raise UsageError(f"{config.out} cannot hold results ({error}): name another --out") from None
    with bench.run.progress("question", len(QUESTIONS), seldom=False) as show:
        for number, name in enumerate(QUESTIONS):
            bench.say = partial(_say, show, number, name)
            if not findings.is_answered(bench, name):
                findings.answer(bench, name, importlib.import_module(f"{findings.QUESTIONS}.{name}").measure)
            answers[name] = findings.read_answer(bench, name)  # as it is read, so that a page made again is the same
        show(len(QUESTIONS), "")
    page = write_results(bench, config, answers)
    counts = Counter(words[-1] for *_, words in verdicts_of(answers))
    said = ("agree", "disagree", "undecided", *([UNLEARNED] if counts[UNLEARNED] else []))
    bench.run.console.print(", ".join(f"{counts[word]} {word}" for word in said))
    bench.run.console.print(f"to read: {page}", markup=False, highlight=False, soft_wrap=True)


def verdicts_of(answers: Mapping[str, Answer]) -> list[tuple[str, Claim, tuple[str, str, str]]]:
    """Each claim with its question and its cells."""
    learned = {name: has_learned(known.finding) for name, known in answers.items()}
    return [
        (name, claim, claim_cells(claim, learned[name]))
        for name, known in answers.items()
        for claim in known.finding.claims
    ]


def _say(show: Callable[[int, str], None], number: int, name: str, words: str) -> None:
    show(number, f"{name}: {words}")


def write_results(bench: Bench, config: Config, answers: Mapping[str, Answer]) -> Path:
    """RESULTS.md and its figures; returns its place."""
    named = ablation.name_of(config)
    suffix = "" if named == "cpu" else f"-{named}"
    options = f"--preset {config.preset}" + (f" --num-seeds {bench.size.seeds}" if named != config.preset else "")
    figures = Path("docs") / f"results{suffix}"
    (config.out.expanduser() / figures).mkdir(parents=True, exist_ok=True)
    for name in answers:
        shutil.copy(bench.run.path / f"{name}.png", config.out.expanduser() / figures / f"{name}.png")
    seconds, total = sum(known.seconds for known in answers.values()), Counter[str]()
    claims = verdicts_of(answers)
    total.update(verdict for *_, (_, _, verdict) in claims)
    lines = [
        "# What the announcements of GRPO claim, and what was measured",
        "",
        f"`python -m experiments.claims.reproduce {options}`: random "
        f"seeds {', '.join(map(str, bench.seeds))} "
        f"({_size(bench.size)}), {seconds / 60:.0f} minutes on {_hardware()}. Of {len(claims)} claims we "
        f"agree with {total['agree']}, disagree with {total['disagree']}, and cannot decide {total['undecided']}."
        + (f" Of {total[UNLEARNED]} there is no verdict, since nothing learned." if total[UNLEARNED] else ""),
        "",
        *(["This is a test of whether it works: the numbers mean nothing.", ""] if config.preset == "smoke" else []),
        SOURCES,
        "",
        RULE,
        "",
        *_table(
            ("source", "what it says", "measured by", "ours", "allowed", "verdict"),
            [(f"[{claim.source}](#{name})", claim.words, claim.measure, *words) for name, claim, words in claims],
        ),
    ]
    for name, known in answers.items():
        lines += ["", *_section(name, known, figures, options, bench.of_what)]
    body = "\n".join(lines)
    checksum = hashlib.sha256(repr([_numbers(known.finding) for known in answers.values()]).encode()).hexdigest()
    page = config.out.expanduser() / f"RESULTS{suffix}.md"
    write_text(page, f"{body}\n\nSHA-256 of all numbers: `{checksum}`\n")
    return page


def _numbers(finding: Finding) -> list:
    """All values of all seeds, without any words."""
    rows = [list(map(float, values)) for columns in finding.rows.values() for values in columns.values()]
    return rows + [list(map(float, claim.values)) for claim in finding.claims]


def _section(name: str, known: Answer, figures: Path, options: str, of_what: str) -> list[str]:
    """A question with its table, figure, claims and command."""
    title, _, rest = (importlib.import_module(f"{findings.QUESTIONS}.{name}").__doc__ or name).strip().partition("\n")
    columns, rows = cells(known.finding)
    learned = has_learned(known.finding)
    return [
        f'<a id="{name}"></a>',
        "",
        f"## {title}",
        "",
        rest.strip().rpartition("\n\n")[0],
        "",
        *_table(("", *columns), [(row, *values) for row, values in rows.items()]),
        "",
        f"Means ± half a 95% interval over {of_what}.",
        "",
        *([f"{UNLEARNED.capitalize()}: {WHY_UNLEARNED}", ""] if not learned else []),
        *([known.finding.note, ""] if known.finding.note else []),
        f"![{' and '.join(known.finding.drawn)}]({figures / name}.png)",
        "",
        *_table(
            ("what it says", "measured by", "ours", "allowed", "verdict"),
            [(claim.words, claim.measure, *claim_cells(claim, learned)) for claim in known.finding.claims],
        ),
        "",
        f"`python -m {findings.QUESTIONS}.{name} {options}`, {known.seconds:.0f} s here, "
        "after the questions before it.",
    ]


def _size(size: Size) -> str:
    return (
        f"{size.steps} steps of {size.num_prompts} prompts, {size.heldout} held-out prompts; of words "
        f"{size.steps * 3 // 5} of {size.num_prompts // 2}, and at most {NUM_HELDOUT}; starts of "
        f"{size.warm_steps} supervised steps"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def _hardware() -> str:
    """What computed: without names of machines."""
    if jax.default_backend() != "cpu":
        return f"{jax.device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"{ablation.cores()} {platform.machine()} cores, jax {jax.__version__}"


if __name__ == "__main__":
    options = tyro.cli(Config, prog="python -m experiments.claims.reproduce", description=__doc__)
    findings.run_guarded(lambda: main(options), options)
