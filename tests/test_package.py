"""Promises to other projects: few packages, a quick import, types, and one program."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import jax
import pytest
import yaml

import grpo_jax
from grpo_jax import commands

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA = ("flax", "optax", "orbax", "transformers", "safetensors", "tokenizers", "jinja2", "rich", "tyro", "matplotlib")
EXTRA += ("tensorboardX", "filelock", "yaml", "huggingface_hub")
WITHOUT = f"import sys; sys.modules |= dict.fromkeys({EXTRA!r})\n"


def python(*args, cwd=ROOT, **variables):
    """Runs Python, as a rule in the root of the project."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_modules_work_or_name_the_missing_extra():
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "grpo_jax").rglob("*.py")]
    names = sorted(".".join(file.parts).removesuffix(".__init__") for file in files)
    names = [name for name in names if not name.startswith("grpo_jax.commands.")]  # started by the program, which asks
    script = f"""
import importlib
def refused(call):
    try:
        call()
    except ImportError as error:
        assert "pip install 'grpo_jax[train]'" in str(error), error
        return True
for name in {names!r}:
    if not refused(lambda: importlib.import_module(name)):
        print(name)
import grpo_jax, grpo_jax.commands
assert refused(lambda: grpo_jax.GRPOTrainer)
grpo_jax.commands.main(["train"])
"""
    ran = python("-c", WITHOUT + script)
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "pip install 'grpo_jax[train]'" in ran.stderr
    works = set(ran.stdout.split())
    assert {name for name in names if name.startswith("grpo_jax.functional")} <= works
    assert {"grpo_jax", "grpo_jax.commands", "grpo_jax.config", "grpo_jax.statistics"} <= works


def test_base_package_needs_only_jax(capsys):
    assert {need.split(">")[0] for need in PROJECT["dependencies"]} == {"jax"}
    assert not [need for extra in PROJECT["optional-dependencies"].values() for need in extra if "<" in need]
    listing = "import sys, grpo_jax.commands as c; c.main(['--help'])"
    grader = "import grpo_jax.rewards.worker"  # what each process of a grader imports
    ran = python("-c", f"{listing}; {grader}; assert not {{'jax', 'numpy', 'asyncio'}} & set(sys.modules)")
    assert ran.returncode == 0, ran.stderr
    for name in ("train", "sample", "evaluate", "export", "report"):
        assert f"\n  {name} " in ran.stdout
    with pytest.raises(SystemExit, match="2"):
        commands.main(["trian"])
    sentence = "error: there is no command 'trian': name one of train, sample, evaluate, export, report\n"
    assert capsys.readouterr().err == sentence


def test_the_program_runs_as_a_module():
    assert python("-m", "grpo_jax").stdout.startswith("usage: grpo-jax COMMAND")
    assert "no command 'trian'" in python("-m", "grpo_jax", "trian").stderr


def test_functional_imports_no_framework_or_other_modules():
    names = python("-c", "import grpo_jax.functional, sys; print(*sys.modules)").stdout.split()
    assert not {"flax", "optax", "orbax", "transformers"} & {name.split(".")[0] for name in names}
    assert "grpo_jax.functional.losses" in names
    assert all(name.startswith("grpo_jax.functional") for name in names if name.startswith("grpo_jax."))


PUBLIC = {"GRPOTrainer", "GRPOConfig", "recipe", "make_programs", "load_pretrained", "text_task", "PRESETS", "train"}
ORDERS = """
import importlib, inspect, pkgutil, sys, grpo_jax
assert "jax" not in sys.modules
modules = [module.name for module in pkgutil.iter_modules(grpo_jax.__path__) if module.name != "__main__"]
def load_names():
    for name in grpo_jax.__all__:
        exec(f"from grpo_jax import {name}")
        assert not inspect.ismodule(getattr(grpo_jax, name)), name
def load_modules():
    for name in modules:
        assert importlib.import_module(f"grpo_jax.{name}") is getattr(grpo_jax, name), name
print(*grpo_jax.__all__)
"""


@pytest.mark.parametrize("order", ["load_names(); load_modules()", "load_modules(); load_names()"])
def test_public_names_are_no_modules(order):
    ran = python("-c", f"{ORDERS}\n{order}; load_names(); load_modules()")
    assert ran.returncode == 0, ran.stderr
    assert {*ran.stdout.split()} == PUBLIC <= {*dir(grpo_jax)}
    page = (ROOT / "docs/own_loop.md").read_text().partition("## What is public")[2]
    assert all(f"`{name}`" in page for name in PUBLIC)


def test_the_page_of_a_run_is_packaged():
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "*.html" in package_data["grpo_jax"]


def test_the_citation_names_the_version_and_the_authors():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == grpo_jax.__version__
    assert citation["authors"] == PROJECT["authors"]
    assert f"## {grpo_jax.__version__} " in (ROOT / "CHANGELOG.md").read_text()


BUILD = """
from pathlib import Path
from setuptools.build_meta import build_sdist, build_wheel
for build in (build_wheel, build_sdist):
    Path("dist").mkdir(exist_ok=True)
    build("dist")
"""


@pytest.mark.slow
def test_wheel_and_sdist_hold_only_the_package(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for folder in ("grpo_jax", "claims", "experiments"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "tests/test_package.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    files = {str(file.relative_to(tmp_path)) for file in (tmp_path / "grpo_jax").rglob("*") if file.is_file()}
    assert {"grpo_jax/py.typed", "grpo_jax/engines/worker.py"} < files
    assert any(file.endswith(".html") for file in files)
    ran = python("-c", BUILD, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    assert wheel.name == f"grpo_jax-{grpo_jax.__version__}-py3-none-any.whl"
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == files
    with tarfile.open(sdist) as archive:
        in_sdist = {file.name.partition("/")[2] for file in archive.getmembers() if file.isfile()}
    others = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "PKG-INFO", "setup.cfg"}
    assert {name for name in in_sdist - others if not name.startswith("grpo_jax.egg-info/")} == files


def test_commands_do_not_load_unused_features():
    features = (
        "rl.ppo",
        "rl.distillation",
        "rl.episodes",
        "engines",
        "tasks.environments",
        "tasks.adapters",
        "offline",
    )
    loaded = python("-c", "import sys, grpo_jax.commands.grpo; print(*sys.modules)").stdout.split()
    assert not [name for name in loaded if name.startswith(tuple(f"grpo_jax.{part}" for part in features))]
    assert "grpo_jax.training.prepare" in loaded


USER = '''
"""A user's own step."""

import jax
import jax.numpy as jnp

from grpo_jax import PRESETS, GRPOConfig, GRPOTrainer, recipe, train
from grpo_jax.config import with_options
from grpo_jax.functional import Objective, group_advantages, grpo_loss, losses, token_mean_weights
from grpo_jax.statistics import interval_over_runs

config: GRPOConfig = with_options(recipe("dapo", steps=3), seed=1)
objective: Objective = PRESETS["dapo"]

def loss(logprobs: jax.Array, rewards: jax.Array, mask: jax.Array) -> tuple[jax.Array, losses.Metrics]:
    advantages, weights = group_advantages(rewards), token_mean_weights(mask)
    return grpo_loss(logprobs, logprobs, advantages, mask, weights=weights)

print(loss(jnp.zeros((2, 3)), jnp.ones(2), jnp.ones((2, 3), bool))[0], interval_over_runs([1.0, 2.0]).mean)
print(GRPOTrainer, train)
'''


@pytest.mark.slow
def test_a_users_file_is_strictly_typed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(USER)
    ran = python(str(file))
    assert ran.returncode == 0, ran.stderr
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "grpo_jax").symlink_to(ROOT / "grpo_jax")  # as if installed: typed only by its py.typed
    (site / "others.pth").write_text(str(Path(jax.__file__).parents[1]))
    options = ["--strict", "--config-file", os.devnull, "--cache-dir", str(tmp_path / "cache")]
    options += ["--python-executable", str(tmp_path / "env/bin/python")]
    ran = python("-m", "mypy", *options, str(file), cwd=tmp_path, PYTHONPATH="")
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_an_editable_install_imports_beside_a_clone(tmp_path):
    clone = tmp_path / "grpo_jax"
    shutil.copytree(ROOT / "grpo_jax", clone / "grpo_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    venv.create(tmp_path / "env", with_pip=True)
    program = str(tmp_path / "env/bin/python")
    install = [program, "-m", "pip", "install", "--no-deps", "--quiet", "--editable", str(clone)]
    if subprocess.run(install, check=False).returncode:
        pytest.skip("pip has no index to install setuptools from")
    call = "import grpo_jax; print(grpo_jax.__version__)"
    env = os.environ | {"PYTHONPATH": ""}
    ran = subprocess.run([program, "-c", call], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == grpo_jax.__version__, ran.stderr
