"""Puts faults into a copy of the tree, one at a time, and prints which of them the tests notice.

python -m tests.faults                      every fault of tests/faults.toml
python -m tests.faults --only functional    faults of modules whose path contains this
python -m tests.faults --tests tests/rl     these tests instead of those that a fault names
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 900
# Programs that a fault does not change are compiled only once for all runs.
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


def load_faults(only: str) -> list[dict]:
    """Reads the faults of modules whose path contains `only`."""
    with (ROOT / "tests" / "faults.toml").open("rb") as file:
        return [fault for fault in tomllib.load(file)["fault"] if only in fault["module"]]


def copy_tree(target: Path) -> None:
    """Copies all files that git tracks or does not ignore."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, tests: list[str], cache: Path) -> tuple[str, str]:
    """Returns "caught", "missed" or "error", and the test that failed first."""
    # Without workers: a worker of xdist would run all its files before it stops.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = {**os.environ, **CACHE, "PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "caught", "timeout"
    failures = [line.split(" ")[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failures:
        return "caught", failures[0]
    return ("missed" if run.returncode == 0 else "error"), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults of modules whose path contains this")
    parser.add_argument("--tests", nargs="+", help="run these instead of the tests that a fault names")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="faults_") as folder:
        tree, cache = Path(folder, "tree"), Path(folder, "cache")
        copy_tree(tree)
        for fault in load_faults(options.only):
            module = tree / fault["module"]
            source, start = module.read_text(encoding="utf-8"), time.monotonic()
            if source.count(fault["before"]) != 1:
                result, test = "error", f"before occurs {source.count(fault['before'])} times, not once"
            else:
                module.write_text(source.replace(fault["before"], fault["after"]), encoding="utf-8")
                result, test = run_tests(tree, options.tests or fault["tests"], cache)
                module.write_text(source, encoding="utf-8")
            results.append(result)
            seconds = time.monotonic() - start
            print(f"| {result} | {module.stem} | {fault['meaning']} | {test} | {seconds:.0f} s |", flush=True)
    print(f"{results.count('caught')} of {len(results)} caught")
    return int(results.count("caught") < len(results))


if __name__ == "__main__":
    raise SystemExit(main())
