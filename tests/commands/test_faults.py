"""Damages the files of a killed run: resumed, it ends with the same bytes, or a sentence says why not.

One table has every place and every fault. If the bytes that are left differ, the run warns about it.
"""

import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from command_helpers import exit_status, read_refusal

from grpo_jax.commands import train

# = the same bytes; l the same results, with fewer or other lines; w the same results, and a warning that names it;
# r refused in one sentence; . not of this place.
TABLE = """
                                flip half empty gone more folder dangling elsewhere latin unreadable
run/config.json                 r    r    r     r    r    r      r        =         r     r
run/inputs.json                 r    r    r     w    r    r      w        =         r     r
run/metrics.jsonl               r    w    w     w    l    r      w        =         r     r
run/times.jsonl                 r    w    w     w    =    r      w        =         r     r
run/rollouts.jsonl              r    w    w     w    r    r      w        =         r     r
run/warnings.jsonl              .    .    =     =    .    r      =        .         r     r
run/lock                        .    .    =     =    .    r      =        .         .     r
run/command.txt                 .    .    .     =    .    r      =        .         .     r
run/model/config.json           .    .    =     =    .    r      .        .         .     r
run/tensorboard                 .    .    .     =    .    .      r        r         .     r
run/checkpoints                 .    .    .     =    .    .      r        =         .     r
run/checkpoints/grpo            .    .    .     =    .    .      r        =         .     r
newest                          .    .    .     =    .    .      w        =         .     r
newest/digests.json             w    w    w     w    w    w      w        =         w     w
newest/_CHECKPOINT_METADATA     =    =    =     =    =    =      =        =         =     =
newest/params/manifest.ocdbt    w    w    w     w    w    w      w        .         w     w
newest/params/d/*               w    w    w     w    w    w      w        .         .     w
newest/rest/d/*                 w    w    w     w    w    w      w        .         .     .
older/params/d/*                =    .    .     =    .    .      =        .         .     .
older/digests.json              .    .    =     =    .    =      .        .         .     .
every/params/d/*                r    r    r     r    r    r      r        .         .     r
model/config.json               r    r    r     r    r    r      r        =         r     r
model/model.safetensors         r    r    r     r    r    r      r        =         .     r
model/tokenizer.json            r    r    r     r    r    r      r        =         r     r
rows.jsonl                      r    r    r     r    r    r      r        =         r     r
rewards.py                      r    r    r     r    r    r      r        =         r     .
"""
ALIASES = {"newest": ["run/checkpoints/grpo/4"], "older": ["run/checkpoints/grpo/2"]}
ALIASES["every"] = ALIASES["newest"] + ALIASES["older"]


def cases() -> list:
    """(place, fault, cell) of the table."""
    faults, *rows = (line.split() for line in TABLE.strip().splitlines())
    every = [
        (place, fault, cell) for place, *cells in rows for fault, cell in zip(faults, cells, strict=True) if cell != "."
    ]
    return [pytest.param(*case, id="-".join(case[:2])) for case in every]


# ---- what happens to a file, or to a folder


def flip(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    # Digits of lines depend on rounding and on time, and a flipped digit is another number. So lines lose a quotation
    # mark, which no line can do without.
    places = (
        [i for i, byte in enumerate(content) if byte == ord('"')] if file.suffix == ".jsonl" else range(len(content))
    )
    content[dice.choice(places)] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def half(file: Path, dice: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def empty(file: Path, dice: random.Random) -> None:
    file.write_bytes(b"")


def gone(path: Path, dice: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def more(file: Path, dice: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(b'{"phase": "grpo", "step": 1, "prompt": "1+1=", "message": "more"}\n')


def folder(file: Path, dice: random.Random) -> None:
    file.unlink()
    file.mkdir()


def dangling(path: Path, dice: random.Random) -> None:
    gone(path, dice)
    path.symlink_to("nowhere")


def elsewhere(path: Path, dice: random.Random) -> None:
    """A link to what was there."""
    target = path.parent.parent / f"moved.{path.name}"
    path.rename(target)
    path.symlink_to(target.absolute())


def latin(file: Path, dice: random.Random) -> None:
    file.write_bytes(b"\xe9" + file.read_bytes())


def unreadable(path: Path, dice: random.Random) -> None:
    path.chmod(0)


FAULTS: dict[str, Callable[[Path, random.Random], None]] = {
    fault.__name__: fault for fault in (flip, half, empty, gone, more, folder, dangling, elsewhere, latin, unreadable)
}


# ---- runs

GIVEN = "--model model --task rows.jsonl --reward rewards.py:low --group-size 4 --num-prompts 4 --max-tokens 4 "
GIVEN += "--steps 6 --learning-rate 1e-2 --checkpoint-every 2 --keep-checkpoints 3 --eval-every 3 --rollouts-every 1"
AGAIN = ["--run-dir", "run", "--no-compilation-cache"]
RESULTS = ("results.json", "metrics.jsonl", "rollouts.jsonl")


@pytest.fixture(scope="module")
def killed(inputs, tmp_path_factory):
    """A folder with the inputs of a run, and the run as it was when it had logged its last step and not saved it yet.

    And the files that it left at its end.
    """
    folder = shutil.copytree(inputs, tmp_path_factory.mktemp("killed") / "inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train.command([*GIVEN.split(), *AGAIN])
    expected = {name: (folder / "run" / name).read_bytes() for name in RESULTS}
    for name in ("results.json", "report.html"):
        (folder / "run" / name).unlink()
    shutil.rmtree(folder / "run/checkpoints/grpo/6")
    return folder, expected


def places(folder: Path, place: str) -> list[Path]:
    """The paths that a place of the table names."""
    first, _, rest = place.partition("/")
    return [
        path
        for base in ALIASES.get(first, [first])
        for path in sorted(folder.glob(f"{base}/{rest}" if rest else base))[:1]
    ]


def warnings(folder: Path) -> set[str]:
    file = folder / "run/warnings.jsonl"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return {json.loads(line)["message"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "fault", "cell"), cases())
def test_a_fault_is_mended_or_told(killed, tmp_path, monkeypatch, capsys, place, fault, cell):
    origin, expected = killed
    here = tmp_path / "here"
    shutil.copytree(origin, here)
    paths = places(here, place)
    assert paths
    for path in paths:
        FAULTS[fault](path, random.Random(zlib.crc32(f"{place} {fault}".encode())))
    monkeypatch.chdir(here)
    capsys.readouterr()
    status = exit_status(lambda: train.command(["--resume", *AGAIN]))
    if status:
        read_refusal(capsys, status)
        outcome = "r"
    else:
        contents = {name: (here / "run" / name).read_bytes() for name in RESULTS}
        new_warnings = warnings(here) - warnings(origin)
        assert contents["results.json"] == expected["results.json"]
        assert all("checkpoint 4 is not used" in words or Path(place).name in words for words in new_warnings)
        outcome = "w" if new_warnings else "=" if contents == expected else "l"
    assert outcome == cell
