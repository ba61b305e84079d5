"""Recipes, options by their flat names and as data with ranges, and what command lines and files make of them."""

import dataclasses
import json
import math
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import jax
import pytest
from tiny import GOLDEN, refused

from grpo_jax import config as configs, options as grpo_options
from grpo_jax.commands import dpo, flags, kto, reward_model, sft
from grpo_jax.commands.train import METHODS, module_of
from grpo_jax.config import validate
from grpo_jax.errors import UsageError
from grpo_jax.functional.presets import PRESETS
from grpo_jax.offline.phase import FitObjective, SupervisedConfig, make_fit_programs
from grpo_jax.runs.folder import differing_options, run_digest
from grpo_jax.tasks.options import TaskOptions


@dataclass(frozen=True)
class Experiment:
    """All groups that a command line has."""

    train: configs.GRPOConfig = configs.recipe(steps=7, kl_coef=0.5)
    model: configs.ModelOptions = configs.ModelOptions()
    task: TaskOptions = TaskOptions()
    output: flags.RunConfig = flags.RunConfig(Path("runs/experiment"))
    number: int = 3
    """An option of the experiment."""


@dataclass(frozen=True)
class WithCritic:
    """The groups of a command line of PPO."""

    ppo: configs.GRPOConfig = configs.PPO
    output: flags.RunConfig = flags.RunConfig(Path("runs/experiment"))


OBJECTIVE = FitObjective(lambda params, batch: None, lambda mask: None)


def parse(*args, config=Experiment):
    return flags.parse(config, None, [str(arg) for arg in args])


# ---- recipes

# Options that only some presets change.
USUAL = {"kl_in_reward": False, "group_size": 8, "temperature": 1.0, "temperature_spread": 0.0}
USUAL |= {"entropy_coef": 0.0, "delta": None, "kl_bias_correction": False}
UNUSUAL = {
    "rloo": {"kl_in_reward": True},
    "reinforce_pp": {"kl_in_reward": True},
    "companion_post": {"temperature": 0.7, "temperature_spread": 0.3},
    "introduction_post": {"group_size": 12},
    "introduction_post_rank": {"group_size": 12},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_recipes_have_the_published_numbers_of_their_preset(preset):
    config = configs.recipe(preset)
    options, expected = grpo_options.options_of(config), USUAL | UNUSUAL.get(preset, {})
    assert {name: options[name] for name in expected} == expected
    assert config.loss.objective == PRESETS[preset]
    validate(config)


def test_command_line_lists_all_presets():
    names, text = get_args(configs.Preset)
    assert (set(get_args(names)), text) == (PRESETS.keys(), str)
    assert configs.RECIPES.keys() <= PRESETS.keys()


def test_the_objective_has_the_numbers_of_the_config():
    objective = configs.recipe(
        "dapo", kl_coef=0.1, epsilon_high=0.3, entropy_coef=0.01, kl_in_reward=True
    ).loss.objective
    assert (objective.kl_coef, objective.entropy_coef, objective.kl_in_reward) == (0.1, 0.01, True)
    assert objective.constants == {"epsilon_low": 0.2, "epsilon_high": 0.3}


def test_defaults_are_the_recipes_of_grpo_and_ppo():
    assert configs.recipe() == configs.GRPOConfig()
    run = configs.PPO
    assert (run.loss.preset, run.loss.kl_coef, run.loss.kl_in_reward) == ("lite_ppo", 0.02, True)
    assert run.sampling.group_size == 1
    assert run.critic == configs.CriticConfig(critic="own")
    validate(run)


OF_OLDER_POLICY = [{}, {"old_logprobs": "sampler"}, {"distillation": "jsd", "teacher": "it", "reward_coef": 0.0}]


@pytest.mark.parametrize("options", OF_OLDER_POLICY)
@pytest.mark.parametrize("preset", PRESETS)
def test_auto_corrects_stale_rollouts_unless_refused(preset, options):
    def fits(correction):
        try:
            validate(configs.recipe(preset, staleness=4, correction=correction, **options))
        except UsageError:
            return False
        return True

    assert configs.recipe(preset, **options).correction == "none"
    assert fits("auto") == fits("none")
    if fits("none"):
        expected = configs.BEST_CORRECTION if fits(configs.BEST_CORRECTION) else "none"
        assert configs.recipe(preset, staleness=4, **options).correction == expected
    for name in get_args(configs.Correction):
        assert configs.recipe(preset, staleness=4, correction=name, **options).correction == name


def test_auto_is_the_default_of_grpo_and_ppo():
    for config in (configs.recipe(staleness=4), configs.with_options(configs.PPO, staleness=4)):
        assert (config.loss.correction, config.correction) == ("auto", configs.BEST_CORRECTION)


# ---- options by name


@pytest.mark.parametrize("config", [Experiment(), WithCritic(), configs.PPO, configs.GRPOConfig()])
def test_names_of_options_are_unique(config):
    def names(config):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            yield from names(value) if dataclasses.is_dataclass(value) else [field.name]

    counts = Counter(names(config))
    assert set(counts.values()) == {1}, counts.most_common(3)
    assert counts.keys() == grpo_options.options_of(config).keys() == grpo_options.option_types(type(config)).keys()


def test_options_are_replaced_in_whichever_group_they_are():
    config = configs.with_options(configs.PPO, steps=3, top_k=5, kl_target=6.0, epochs=2, eval_every=1, critic="shared")
    assert (config.steps, config.sampling.top_k, config.loss.kl_target) == (3, 5, 6.0)
    assert (config.optimizer.epochs, config.logging.eval_every) == (2, 1)
    assert config.critic == configs.CriticConfig(critic="shared")
    assert (
        configs.with_options(config) == configs.with_options(configs.PPO, **grpo_options.options_of(config)) == config
    )
    assert configs.PPO.steps == 100  # the old one stays


def test_options_replace_the_numbers_of_a_preset():
    config = configs.with_options(
        configs.recipe(kl_coef=0.5, learning_rate=1e-3, top_k=2), preset="companion_post", epsilon_low=0.1
    )
    assert (config.loss.preset, config.loss.kl_coef, config.loss.epsilon_low) == ("companion_post", 0.01, 0.1)
    assert (config.sampling.temperature, config.sampling.temperature_spread) == (0.7, 0.3)
    assert (config.optimizer.learning_rate, config.sampling.top_k) == (1e-3, 2)  # no numbers of a preset
    assert configs.with_options(config, epsilon_low=0.1, preset="companion_post") == config
    assert configs.with_options(configs.PPO, preset="cispo").loss == configs.recipe("cispo").loss


UNKNOWN_OPTIONS = [
    ({"epsilon": 0.1}, "no option epsilon: .*epsilon_low"),
    ({"xyzzy": 1}, "no option xyzzy: they are steps, "),
    ({"loss": None}, "no option loss"),
    ({"preset": "dappo"}, "no preset dappo: is it .*dapo"),
]


@pytest.mark.parametrize(("options", "words"), UNKNOWN_OPTIONS)
def test_an_unknown_option_is_refused_in_a_sentence(options, words):
    with refused(words):
        configs.with_options(configs.GRPOConfig(), **options)


# Arguments of TRL 1.16: its GRPOTrainer, and those of its configurations that its documentation shows.
OF_TRL = """
model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks
optimizers quantization_config peft_config tools rollout_func environment_factory
output_dir learning_rate max_completion_length num_generations num_iterations generation_batch_size steps_per_generation
temperature top_p top_k min_p chat_template_kwargs use_vllm vllm_server_base_url beta epsilon epsilon_high delta
importance_sampling_level reward_weights scale_rewards loss_type mask_truncated_completions sync_ref_model entropy_coef
ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile vllm_importance_sampling_correction log_completions
off_policy_mask_threshold use_bias_correction_kl max_length
label_smoothing desirable_weight undesirable_weight
per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps lr_scheduler_type warmup_steps
warmup_ratio weight_decay max_grad_norm adam_epsilon logging_steps eval_steps save_steps save_total_limit seed bf16 fp16
gradient_checkpointing report_to load_best_model_at_end resume_from_checkpoint"""


def test_names_of_trl_are_options_or_listed():
    methods = {method: grpo_options.option_types(module_of(method).Config) for method in METHODS}
    known = {name for options in methods.values() for name in options} | {"reward_model"}
    table = grpo_options.COUNTERPARTS.keys() | grpo_options.DIFFERENCES.keys()
    for name in {*OF_TRL.split()} - known - table:  # a name that is nearly the same
        assert grpo_options.suggestion(name, known).startswith("is it "), name
    assert table & known == {"beta", "microbatches"}  # of dpo and kto, and of all methods on data
    assert {name for names in grpo_options.COUNTERPARTS.values() for name in names.split()} <= known
    for name in table:
        for options in methods.values():
            sentence = grpo_options.suggestion(name, options)
            here = [each for each in grpo_options.COUNTERPARTS.get(name, "").split() if each in options]
            assert not here or f"{name} is called {here[0]} here" in sentence
            assert grpo_options.DIFFERENCES.get(name, "") in sentence


def test_the_page_has_the_rates_of_warnings():
    page = (Path(__file__).parents[1] / "docs/hyperparameters.md").read_text()
    (table,) = re.findall(r"## Learning rate by size\n(.*?)\n## ", page, re.DOTALL)
    cells = re.findall(r"^\| (up to .*? million|more) \| (\S+).*? \| (.*?) \|", table, re.MULTILINE)
    numbers = [(words, float(full), None if lora == "not tried" else float(lora)) for words, full, lora in cells]
    sizes = ["more" if math.isinf(most) else f"up to {most / 1e6:.0f} million" for most in configs.RATES]
    assert numbers == [(size, *rates) for size, rates in zip(sizes, configs.RATES.values(), strict=True)]


def test_unused_options_that_are_gone_are_ignored():
    now = json.loads(json.dumps(dataclasses.asdict(configs.recipe())))
    old = now | {"reference": {"kl_horizon": 10_000}, "optimizer": now["optimizer"] | {"microbatches": 0}}
    assert grpo_options.from_json(configs.recipe(), old) == configs.recipe()
    assert differing_options(old, now) == []
    for name, value in (("kl_horizon", 64), ("microbatches", 4)):
        assert differing_options(now | {name: value}, now) == [name]
        with refused(f"there is no option {name}"):
            grpo_options.from_json(configs.recipe(), now | {name: value})


def test_methods_share_defaults_unless_explained():
    defaults: dict[str, set] = {}
    for method in METHODS:
        for name, value in grpo_options.options_of(module_of(method).Config()).items():
            defaults.setdefault(name, set()).add(str(value))
    differing = {f"--{name.replace('_', '-')}" for name, values in defaults.items() if len(values) > 1} - {"--method"}
    page = (Path(__file__).parents[1] / "docs/hyperparameters.md").read_text()
    (table,) = re.findall(r"## Defaults that differ\n(.*?)\n## ", page, re.DOTALL)
    assert set(re.findall(r"`(--[a-z-]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))) == differing


def test_values_may_be_traced():
    @jax.jit
    def scaled(kl_coef, epsilon_high):
        objective = configs.recipe(kl_coef=kl_coef, epsilon_high=epsilon_high).loss.objective
        assert objective.has_reference
        return objective.kl_coef * objective.constants["epsilon_high"]

    assert scaled(2.0, 3.0) == 6


# ---- command lines


def test_flags_are_flat_and_reach_every_group(tmp_path):
    config = parse(
        "--steps", 5, "--top-p", 0.9, "--model", "m", "--task", "t", "--number", 4, "--run-dir", tmp_path / "r"
    )
    assert (config.train.steps, config.train.sampling.top_p, config.number) == (5, 0.9, 4)
    assert (config.model.model, config.task.task, config.output.run_dir) == ("m", "t", tmp_path / "r")
    assert config.train.loss.kl_coef == 0.5  # the experiment's


@pytest.mark.parametrize("named", [["--preset", "dapo"], ["--preset=dapo"], ["--preset", "grpo", "--preset", "dapo"]])
def test_preset_flags_work_in_any_order(tmp_path, named):
    where = ["--run-dir", tmp_path / "run"]
    config = parse(*named, *where)
    assert config.train.loss == configs.recipe("dapo").loss
    assert config.train.steps == 7
    first, second = parse(*named, "--kl-coef", 0.1, *where), parse("--kl-coef", 0.1, *named, *where)
    assert first == second == configs.with_options(config, kl_coef=0.1)


def test_a_preset_reaches_the_groups_of_ppo(tmp_path):
    config = parse("--preset", "cispo", "--critic", "shared", "--run-dir", tmp_path / "run", config=WithCritic)
    assert config.ppo.loss == configs.recipe("cispo").loss
    assert config.ppo.critic.critic == "shared"


def test_help_shows_the_numbers_of_a_preset(capsys):
    def default(*args):
        with pytest.raises(SystemExit):
            parse("--help-all", *args)
        page = " ".join(word for word in capsys.readouterr().out.split() if word != "│")
        return page.split("--epsilon-high")[1].split("(default: ")[1].split(")")[0]

    assert default() == "0.2"
    assert default("--preset", "dapo") == "0.28"


def test_partly_read_help_ends_without_a_traceback(monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as nobody_reads:
        monkeypatch.setattr("sys.stdout", nobody_reads)
        with pytest.raises(SystemExit) as ended, flags.refusing():
            flags.read_flags(Experiment, args=["--help"])
    assert ended.value.code == 2


# ---- files


@pytest.mark.parametrize("config", [Experiment(), WithCritic()])
def test_json_round_trips(config):
    changed = configs.with_options(config, preset="sapo", seed=3)
    saved = json.loads(json.dumps(dataclasses.asdict(changed), default=str))
    del saved["output"]["run_dir"]
    assert grpo_options.from_json(config, saved) == changed
    with refused("no option no_such_option"):
        grpo_options.from_json(config, {"output": {"no_such_option": 1}})


@pytest.mark.parametrize(("saved", "engine"), [("", ()), ("http://a:1", ("http://a:1",)), (["a", "b"], ("a", "b"))])
def test_one_address_of_an_engine_is_read(saved, engine):
    assert grpo_options.from_json(configs.EngineOptions(), {"engine": saved}).engine == engine


def test_runs_without_a_new_option_continue():
    saved = {"sampling": {"top_p": 0.9}}
    assert not differing_options(saved, {"sampling": {"top_p": 0.9, "support": "vocabulary", "support_size": 64}})
    assert differing_options(saved, {"sampling": {"top_p": 0.9, "support": "sampler"}}) == ["support"]
    assert not differing_options(saved, {"top_p": 0.9, **dataclasses.asdict(configs.CriticConfig())})
    assert differing_options(saved, {"top_p": 0.9, **dataclasses.asdict(configs.PPO.critic)}) == ["critic"]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_runs_without_a_group_critic_keep_digests(tmp_path, method):
    """The files are as an earlier version wrote them, with a group `run` in PPO. More steps change nothing else."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(GOLDEN / f"runs/{method}.json", folder / "config.json")
    resumed = partial(parse, "--resume", "--run-dir", folder, config=module_of(method).Config)
    run = flags.open_run(resumed())
    run.keep_inputs(method, {})
    sealed = run_digest(folder, method)
    del run
    flags.open_run(resumed("--steps", 3))
    assert json.loads((folder / "config.json").read_text())["train"].get("run", {}).get("steps", 3) == 3
    assert run_digest(folder, method) == sealed
    with pytest.raises((UsageError, SystemExit)):
        flags.open_run(resumed("--gae-lambda", 0.8))


def test_differing_options_are_named_without_their_groups():
    one, other = configs.recipe(), configs.recipe("dapo", learning_rate=1e-3, keep_checkpoints=9)
    differing = differing_options(json.loads(json.dumps(dataclasses.asdict(one))), dataclasses.asdict(other))
    assert differing == ["epsilon_high", "kl_coef", "learning_rate", "preset"]


LORA = ("--lora-rank", 2, "--lora-targets", "q_proj")


def test_runs_resume_with_their_original_options(tmp_path):
    config = parse("--preset", "dapo", "--kl-coef", 0.1, *LORA, "--run-dir", tmp_path / "run")
    folder = flags.open_run(config).path
    saved = json.loads((folder / "config.json").read_text())
    assert saved["train"]["loss"]["kl_coef"] == 0.1
    again = parse("--resume", "--run-dir", tmp_path / "run")
    assert configs.with_options(again, resume=False) == config
    flags.open_run(parse("--resume", "--preset", "dapo", "--run-dir", tmp_path / "run"))  # what it had
    with refused(r"began with other options \(kl_coef, preset\)"):
        flags.open_run(parse("--resume", "--preset", "grpo", "--kl-coef", 0.2, "--run-dir", tmp_path / "run"))


def test_runs_keep_the_correction_they_began_with(tmp_path):
    def begin(name):
        return flags.open_run(parse("--staleness", 2, "--correction", "none", "--run-dir", tmp_path / name)).path

    def resume(name):
        return flags.open_run(parse("--resume", "--run-dir", tmp_path / name))

    begin("none")
    assert parse("--resume", "--run-dir", tmp_path / "none").train.correction == "none"
    resume("none")
    file = begin("older") / "config.json"
    saved = json.loads(file.read_text())
    del saved["train"]["loss"]["correction"]
    file.write_text(json.dumps(saved))
    with refused(r"began with other options \(correction\)"):  # it may not have been corrected
        resume("older")
    assert parse("--config", file, "--run-dir", tmp_path / "new").train.correction == configs.BEST_CORRECTION


def test_flags_replace_options_from_a_file(tmp_path):
    config = parse("--preset", "dapo", "--kl-coef", 0.1, *LORA, "--run-dir", tmp_path / "run")
    file = flags.open_run(config).path / "config.json"
    again = parse("--config", file, "--run-dir", tmp_path / "again")
    assert again.output.config == file
    assert dataclasses.replace(again, output=config.output) == config
    assert json.loads((flags.open_run(again).path / "config.json").read_text()) == json.loads(file.read_text())
    other = parse(f"--config={file}", "--kl-coef", 0.2, "--run-dir", tmp_path / "other")
    assert (other.train.loss.kl_coef, other.train.loss.preset) == (0.2, "dapo")
    other = parse("--config", file, "--preset", "grpo", "--run-dir", tmp_path / "other")
    assert (other.train.loss.kl_coef, other.train.loss.epsilon_high) == (0.04, 0.2)

    short = tmp_path / "short.yaml"
    short.write_text("preset: dapo\nnumber: 4\nlora_targets: [q_proj]\nlora_rank: 2\nlearning_rate: 1e-4\n")
    other = parse("--config", short, "--run-dir", tmp_path / "other")
    assert other.train.optimizer.learning_rate == 1e-4
    assert (other.train.loss.epsilon_high, other.number, other.model.lora_targets) == (0.28, 4, ("q_proj",))
    assert other.train.steps == 7  # the experiment's own


UNFIT_FILES = [
    ("a.json", '{"nubmer": 1}', "no option nubmer"),
    ("a.json", '{"train": {"learning_rate": "1e-3"}}', "learning_rate is '1e-3'"),
    ("a.json", '{"number": true}', "number is True"),
    ("a.json", "[1]", "must be a mapping"),
    ("a.json", "{", "cannot be read"),
    ("none.json", None, "cannot be read"),
    ("a.json", '{"seed": 1, "train": {"seed": 2}}', "seed is given twice"),
    ("a.yaml", "number: 1\ntrain: {number: 2}", "number is given twice"),
    ("a.yaml", "trian: {number: 2}", "no group of options trian: is it train?"),
    ("a.json", '{"train": {"number": {"number": 2}}}', "no group of options number"),
    ("a.yaml", 'steps: !!int ""', "a.yaml cannot be read (IndexError"),
    ("a.yaml", 'steps: !!bool ""', "a.yaml cannot be read (KeyError"),
    ("a.yaml", 'steps: !!timestamp ""', "a.yaml cannot be read (AttributeError"),
    ("a.json", '{"train": {"seed": 1, "seed": 2}}', "seed is given twice, as 1 and as 2"),
    ("a.yaml", "number: 1\nnumber: 2", "number is given twice, as '1' and as '2'"),
    ("a.yaml", "train: {}\ntrain: {seed: 2}", "train is given twice"),
    ("a.yaml", "1: 2", "no option 1"),
    ("a.yaml", "lora_targets: &a [*a]", "write the value out"),
    ("a.json", '{"a":' * 200_000 + "1" + "}" * 200_000, "cannot be read"),
    ("a.yaml", "steps: 1:30", "steps is '1:30'"),
    ("a.yaml", "steps: 010", "steps is 10.0"),
    ("a.yaml", "learning_rate: 1:30.5", "learning_rate is '1:30.5'"),
    ("a.yaml", "steps: " + "1:" * 100_000 + "1", "steps is '1:1:1"),
    ("a.yaml", "steps: " + "1" * 200_000, "cannot be read"),
    ("a.yaml", "[" * 400 + "]" * 400, "cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "sentence"), UNFIT_FILES)
def test_invalid_option_files_are_refused_in_one_sentence(tmp_path, capsys, name, text, sentence):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit):
        parse("--config", tmp_path / name, "--run-dir", tmp_path / "run")
    assert re.fullmatch(rf"error: .*{re.escape(sentence)}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(("name", "text"), [("a.json", '{"number": 5}'), ("a.yaml", "number: 5")])
def test_option_files_may_have_a_byte_order_mark(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert parse("--config", tmp_path / name, "--run-dir", tmp_path / "run").number == 5


# ---- ranges of options

BEYOND_FLOAT32 = dict.fromkeys([math.inf, 10**400, 1e39, 1e-39, 1e-300], "a number that float32 holds")
TYPES = {
    "Count": (grpo_options.Count, [0, 3, 2**31 - 1], {-1: "at least 0", 2**31: r"below 2\^31", 10**30: r"below 2\^31"}),
    "Size": (grpo_options.Size, [1, 2**31 - 1], {0: "at least 1", 2**31: r"below 2\^31"}),
    "Seed": (grpo_options.Seed, [0, 2**32 - 1], {-1: r"between 0 and 2\^32 - 1", 2**32: "between 0 and"}),
    "Weight": (grpo_options.Weight, [0.0, 1e30], {-0.1: "at least 0", math.nan: "at least 0"} | BEYOND_FLOAT32),
    "Positive": (grpo_options.Positive, [1e-30, 3e38], {0.0: "above 0", math.nan: "above 0"} | BEYOND_FLOAT32),
    "Bound": (grpo_options.Bound, [1e-30, math.inf], {0.0: "above 0", math.nan: "above 0", 1e-300: "a number that"}),
    "Fraction": (
        grpo_options.Fraction,
        [0, 0.5, 1.0],
        {-0.1: "between 0 and 1", 1.1: "between 0 and 1", math.nan: "between"},
    ),
    "Share": (grpo_options.Share, [0.1, 1], {0.0: "above 0", 1.1: "at most 1", math.nan: "above 0"}),
    "optional": (grpo_options.Size | None, [None, 1], {0: "at least 1"}),
    "several": (
        Annotated[
            float, grpo_options.at_least(-1), grpo_options.FLOAT32, grpo_options.Range(lambda x: x != 0, "not 0")
        ],
        [-1.0, 1.0],
        {0.0: "not 0"},
    ),
}


@pytest.mark.parametrize("name", TYPES)
def test_numbers_outside_their_ranges_are_refused(name):
    hint, good, bad = TYPES[name]
    for value in good:
        grpo_options.check_number("some_option", value, hint)
    for value, words in bad.items():
        with refused(f"^some_option is {re.escape(str(value))}: it must be {words}"):
            grpo_options.check_number("some_option", value, hint)


@dataclass(frozen=True)
class Inner:
    """A group."""

    share: grpo_options.Share | None = None


@dataclass(frozen=True)
class Outer:
    """A command's options."""

    inner: Inner = Inner()
    size: grpo_options.Size = 1
    name: str = ""


def test_options_of_all_groups_are_checked():
    grpo_options.check_ranges(Outer())
    grpo_options.check_ranges(Outer(Inner(0.5)))
    with refused("share is 2: it must be at most 1"):
        grpo_options.check_ranges(Outer(Inner(2)))
    with refused("size is 0"):
        grpo_options.check_ranges(Outer(size=0))


@pytest.mark.parametrize("config", [configs.GRPOConfig, SupervisedConfig, TaskOptions])
def test_every_number_declares_a_range(config):
    """A spread of temperatures is checked together with the temperature."""
    plain, annotated = grpo_options.option_types(config), grpo_options.option_types(config, include_extras=True)
    numbers = {name for name, hint in plain.items() if {int, float} & {hint, *get_args(hint)}}
    assert len(numbers) >= 5
    assert {name for name in numbers if annotated[name] == plain[name]} <= {"temperature_spread"}


def test_defaults_are_in_their_ranges():
    for config in (configs.GRPOConfig(), configs.PPO, SupervisedConfig(), TaskOptions()):
        grpo_options.check_ranges(config)


def test_supervised_phases_check_the_same_ranges():
    config = SupervisedConfig(4, 1e-2, devices=1)
    assert (config.steps, config.learning_rate) == (4, 1e-2)
    for option, value in {"steps": 0, "weight_decay": -1.0, "max_grad_norm": math.nan, "log_every": 0}.items():
        with refused(f"^{option} is {value}: it must be "):
            make_fit_programs(OBJECTIVE, configs.with_options(config, **{option: value}))
    for command in (dpo, kto, reward_model, sft):
        with refused("seed is -1"):
            grpo_options.check_ranges(command.Config(seed=-1))
