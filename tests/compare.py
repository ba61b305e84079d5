"""Compares the working tree with another commit: both versions run the same tiny runs on this machine.

  python tests/compare.py [COMMIT] [--only NAME ...] [--list] [--keep FOLDER]

The script checks the commit out into a temporary folder. It then runs every method and family of options with both
versions, with the same interpreter, one process at a time, and compares what the runs leave behind: the lines of
rollouts.jsonl (tokens, rewards, advantages), the lines of metrics.jsonl, results.json, and the gradients. Gradients of
the first step may differ by 1e-6 of each leaf's norm. Most runs take more than one step, so that staleness and moving
references have an effect; later steps are compared too, with a wider bound, since their parameters already differ by
rounding.

It drives each version only through what a rebuild preserves: the command line and the files of a run. Gradients are
read where the library calls optax's AdamW, so the comparison needs no internal name of either version. When a rebuild
renames an option, a file's field or a metric on purpose, enter both names in RENAMED_OPTIONS or RENAMED_FIELDS.

With --keep the runs of the commit stay in a folder, and the next comparison uses them again.

The exit status is 1 if anything differs.
"""

import argparse
import functools
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxlib.version import __version_info__ as jaxlib_version

COMMIT = "66b02f76"  # the commit that the working tree is compared with by default
RENAMED_OPTIONS: Mapping[str, str] = {}  # option of COMMIT -> option of the working tree, such as "--old": "--new"
RENAMED_FIELDS: Mapping[str, str] = {}  # metric or JSON field of COMMIT -> its name in the working tree

TREE = Path(__file__).resolve().parents[1]
FIRST_GRADIENT = 1e-6  # a share of the leaf's norm
LATER_GRADIENT = 1e-4
FIRST_NUMBER = 1e-5  # a share of the metric's size
LATER_NUMBER = 1e-4
NOISE = 0.5  # numbers that are only rounding errors, such as a ratio's deviation from 1, may differ by this x the bound
DECIMALS = 1.1e-3  # numbers of rollouts.jsonl are rounded to 3 or 4 decimals, and the last one may differ
QUICK_COMPILATION = "--xla_backend_optimization_level=0"
if jaxlib_version < (0, 11):  # later versions do not know these flags, and an unknown one ends the process
    QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
SECONDS = 6000  # the timeout of a process


# ---- the files that all runs read


VOCABULARY = [*"0123456789+= abcdefg", "<pad>", "</s>"]
TOOL_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
CHAT_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
)
USER_CODE = '''
def low(rows, texts):
    return [float(sum(map(text.count, "01234"))) for text in texts]


def short(rows, texts):
    return [-0.5 * len(text) for text in texts]


def halves(rows, texts):
    """Spans: one reward for each half of a completion."""
    middles = [len(text) // 2 for text in texts]
    parts = [[(0, middle), (middle, len(text))] for text, middle in zip(texts, middles)]
    return [
        [(start, end, float(sum(map(text[start:end].count, "01234")))) for start, end in pair if start < end]
        for text, pair in zip(texts, parts)
    ]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def make():
    """The environment: it answers with a digit and rewards low digits of each turn."""
    from grpo_jax.data.episodes import Reply

    def reply(example, transcript, key):
        turn = transcript[-1]
        text = turn.said if hasattr(turn, "said") else turn.action
        return Reply(str(len(text) % 10), reward=float(sum(map(text.count, "01234"))))

    return reply


class Game:
    """An environment as TRL takes it."""

    def reset(self, **columns):
        self.total = 0
        return "a"

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.total += a + b
        return a + b

    def get_reward(self):
        return float(self.total)
'''


def write_inputs(folder: Path) -> None:
    """Writes two random models with tokenizers, rows that serve every method, rewards and environments."""
    write_model(folder / "model", hidden=32, seed=0)
    write_model(folder / "teacher", hidden=48, seed=1)
    shutil.copytree(folder / "model", folder / "chat_model")
    (folder / "chat_model/chat_template.jinja").write_text(CHAT_TEMPLATE)
    sums = [(f"{i}+{j}=", i + j) for i in range(6) for j in range(6)]
    rows = [
        {"prompt": prompt, "completion": str(total), "chosen": str(total), "rejected": f"{total + 1}a", "answer": total}
        for prompt, total in sums
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Most prompts are short, so that pieces of several widths pay off.
    long = [row | {"prompt": "a" * (28 * (i % 4 == 0)) + row["prompt"]} for i, row in enumerate(rows)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    (folder / "user.py").write_text(USER_CODE)


def write_model(folder: Path, *, hidden: int, seed: int) -> None:
    """Writes a random Llama in Hugging Face's format, with a tokenizer of characters and one token for a tool call."""
    import tokenizers
    from safetensors.numpy import save_file

    folder.mkdir()
    vocabulary = [*VOCABULARY, TOOL_CALL, "?"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": vocabulary.index("<pad>"),
        "eos_token_id": vocabulary.index("</s>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(seed)
    weights = {
        name: (0.2 * generator.standard_normal(shape) + ("norm" in name)).astype(np.float32)
        for name, shape in weight_shapes(config).items()
    }
    # Feature 0 is nearly constant, and makes both tokens likely: turns end, and tools are called.
    weights["model.embed_tokens.weight"][:, 0] = 3
    weights["lm_head.weight"][:, 0] = 4 * np.isin(vocabulary, ["</s>", TOOL_CALL])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    model = tokenizers.models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a Llama's tensors, by Hugging Face's names."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, key_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (heads * size, width),
        "self_attn.k_proj": (key_heads * size, width),
        "self_attn.v_proj": (key_heads * size, width),
        "self_attn.o_proj": (width, heads * size),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes = {"model.embed_tokens": (vocab, width), "model.norm": (width,), "lm_head": (vocab, width)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


# ---- the cases


class Case(NamedTuple):
    """A run to make with both versions."""

    args: str  # arguments of `grpo-jax train`, or of the module
    devices: int = 1  # virtual CPU devices
    module: str = ""  # run with `python -m` instead of the command
    bound: float = FIRST_GRADIENT  # of the first gradient, as a share of each leaf's norm


# With a large ε, AdamW's step is nearly proportional to the gradient, so rounding errors do not grow with the steps.
SGD = "--adam-epsilon 100 --learning-rate 10 --max-grad-norm 1e9"
STEPS = "--eval-every 0 --checkpoint-every 0 --rollouts-every 1 --eval-samples 1 --num-heldout 2"
ROLLOUTS = f"--model model --task rows.jsonl --num-prompts 4 --max-tokens 6 {STEPS}"
GRPO = f"{ROLLOUTS} --group-size 4 {SGD}"
ONE = f"{GRPO} --steps 1 --reward user.py:low"
TWO = f"{GRPO} --steps 2 --reward user.py:low"
THREE = f"{GRPO} --steps 3 --reward user.py:low"
EPISODES = f"{GRPO} --steps 1 --max-turns 3 --environment-tokens 4 --max-tokens 12"
CHAT = f"{EPISODES} --model chat_model --environment-tokens 8"
TEACHER = f"{TWO} --teacher teacher"
# Prompts of two widths, and packed completions. The commit did not pack for every loss. Where the working tree does,
# sums have another order, and the bound is that of tests/rl/test_pieces.py.
PACKED_NOW = 5e-6
LONG = "--task long.jsonl --num-prompts 8 --max-tokens 32 --piece-tokens 128"
PPO = f"--method ppo {ROLLOUTS} {SGD} --critic-learning-rate 10 --steps 2 --reward user.py:low"
FIT = "--model model --steps 2 --log-every 1 --eval-every 1 --warmup-steps 0 --learning-rate 1e-3 --max-grad-norm 1e9"
SFT = f"--method sft {FIT} --task rows.jsonl --num-rows 8 --max-tokens 8 --num-heldout 4"
DPO = f"--method dpo {FIT} --data rows.jsonl --num-pairs 8"
KTO = f"--method kto {FIT} --data rows.jsonl --num-completions 8"
REWARD_MODEL = f"--method reward-model {FIT} --data rows.jsonl --num-pairs 8"
# No command trains on online preferences, so the experiment does.
ONLINE = "--warm-steps 2 --labels 128 --rounds 2 --steps 2 --num-prompts 8 --group-size 4 --eval-every 1 --num-seeds 1"

FAMILIES: Mapping[str, Case] = {
    "grpo": Case(TWO),
    "grpo_defaults_of_adamw": Case(f"{ROLLOUTS} --group-size 4 --steps 2 --reward user.py:low --weight-decay 0.1"),
    "control": Case(f"{ONE} --control"),
    "staleness": Case(f"{THREE} --staleness 1"),
    "dynamic_sampling": Case(f"{TWO} --preset dapo --max-rollouts 3"),
    "turns": Case(f"{EPISODES} --environment user.py:make --advantages-of turns"),
    "episodes": Case(f"{EPISODES} --environment user.py:make --temperature 0.8 --top-k 8"),
    "tools": Case(f"{CHAT} --tools user.py:add --reward user.py:low"),
    "environment_factory": Case(f"{CHAT} --environment-factory user.py:Game"),
    "spans": Case(f"{GRPO} --steps 1 --reward user.py:halves --advantages-of spans"),
    "components": Case(f"{GRPO} --steps 1 --reward low=user.py:low short=0.5*user.py:short --advantages-of components"),
    "moving_reference": Case(f"{THREE} --ref-sync-steps 1 --ref-mixup-alpha 0.5"),
    "kl_target": Case(f"{THREE} --preset rloo --kl-coef 0.1 --kl-target 0.01 --kl-horizon 16"),
    "correction_token": Case(f"{THREE} --staleness 1 --correction token"),
    "correction_sequence": Case(f"{THREE} --staleness 1 --correction sequence"),
    "correction_icepop": Case(f"{THREE} --staleness 1 --correction icepop"),
    "correction_geometric": Case(f"{THREE} --staleness 1 --correction geometric"),
    "off_policy_threshold": Case(f"{THREE} --staleness 1 --off-policy-threshold 0.0001 --mask-truncated"),
    "top_entropy": Case(f"{ONE} --top-entropy 0.5"),
    "divergence_full": Case(f"{TWO} --divergence full"),
    "kl_bias_correction": Case(f"{TWO} --kl-bias-correction --minibatches 2 --epochs 2 --microbatches 2"),
    "truncation": Case(f"{ONE} --top-p 0.9 --min-p 0.05 --temperature-spread 0.3 --entropy-coef 0.01"),
    "gspo": Case(f"{ONE} --preset gspo --kl-coef 0.01"),
    "cispo": Case(f"{ONE} --preset cispo"),
    "vespo": Case(f"{ONE} --preset vespo"),
    "dr_grpo": Case(f"{ONE} --preset dr_grpo"),
    "teacher_reverse_kl": Case(f"{TEACHER} --distillation reverse_kl"),
    "teacher_forward_kl": Case(f"{TEACHER} --distillation forward_kl --distillation-top-k 4"),
    "teacher_jsd": Case(f"{TEACHER} --distillation jsd --distillation-beta 0.3 --reward-coef 0"),
    "teacher_k1": Case(f"{TEACHER} --distillation k1"),
    "lora": Case(f"{TWO} --lora-rank 2"),
    "quantised": Case(f"{ONE} --lora-rank 2 --quantize int8"),
    "ppo": Case(PPO),
    "ppo_shared": Case(f"{PPO} --critic shared --group-size 2"),
    "packed": Case(f"{TWO} {LONG} --top-entropy 0.5 --minibatches 2"),
    "packed_ppo": Case(f"{PPO} --group-size 4 {LONG}"),
    "packed_ppo_shared": Case(f"{PPO} --critic shared --group-size 4 {LONG}"),
    "packed_teacher_k1": Case(f"{TEACHER} {LONG} --distillation k1"),
    "packed_staleness": Case(f"{THREE} {LONG} --staleness 1 --correction token"),
    "pieces_divergence_full": Case(f"{TWO} {LONG} --divergence full", bound=PACKED_NOW),
    "pieces_teacher": Case(f"{TEACHER} {LONG} --distillation forward_kl", bound=PACKED_NOW),
    "pieces_ppo_bootstrap": Case(f"{PPO} --group-size 4 {LONG} --bootstrap-truncated", bound=PACKED_NOW),
    "pieces_episodes": Case(f"{EPISODES} {LONG} --max-tokens 24 --environment user.py:make"),
    "sft": Case(SFT),
    "sft_teacher": Case(f"{SFT} --teacher teacher --distillation forward_kl --nll-coef 0.5"),
    "reward_model": Case(REWARD_MODEL),
    "dpo": Case(DPO),
    "dpo_simpo": Case(f"{DPO} --preference-loss simpo --microbatches 2"),
    "kto": Case(KTO),
    "online_preferences": Case(ONLINE, module="experiments.online_preference"),
}
PMAP, MESH = "--parallel pmap --devices 4", "--parallel mesh --devices 8 --fsdp 2 --tensor 2"
ON_PMAP = ("packed", "staleness", "dynamic_sampling", "ppo", "dpo")
ON_MESH = ("packed", "staleness", "ppo_shared", "sft")
CASES: Mapping[str, Case] = {
    **FAMILIES,
    **{f"{name}_pmap": Case(f"{FAMILIES[name].args} {PMAP}", 4) for name in ON_PMAP},
    **{f"{name}_mesh": Case(f"{FAMILIES[name].args} {MESH}", 8) for name in ON_MESH},
}

# ---- in a process of one version


class Job(NamedTuple):
    """One case in one process."""

    name: str
    case: Case
    folder: str  # the folder for the run and its gradients


gradients: dict[str, np.ndarray] = {}  # gradients in the current case, by update and leaf
lock = threading.Lock()


def add_gradients(names: Sequence[str], count: Any, *leaves: Any) -> None:
    """Adds the gradients of one update. With pmap, all devices repeat the same gradients, which are stored once."""
    with lock:
        for name, leaf in zip(names, leaves, strict=True):
            value, again = np.array(leaf), 0
            while not np.array_equal(
                gradients.setdefault(f"{int(count)}|{again}|{name}", value), value, equal_nan=True
            ):
                again += 1  # a later phase, whose optimizer counts from 0 again


def watch_optimizers() -> None:
    """Replaces optax's Adam and AdamW by versions that also add to `gradients`, from within compiled programs."""
    import jax
    import optax

    def watched(make: Any) -> Any:
        @functools.wraps(make)
        def call(*args: Any, **options: Any) -> Any:
            inner = make(*args, **options)

            def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
                paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(grads), strict=True)
                names = [".".join(re.findall(r"\w+", jax.tree_util.keystr(path))) for path in paths]
                names = [name.removeprefix("policy.") for name in names]  # not every version names the only role
                count = optax.tree_utils.tree_get_all_with_path(state, "count")[0][1]
                jax.debug.callback(functools.partial(add_gradients, names), count, *leaves)
                return inner.update(grads, state, params, **extra)

            return optax.GradientTransformationExtraArgs(inner.init, update)

        return call

    for name in ("adamw", "adam"):
        setattr(optax, name, watched(getattr(optax, name)))


def drive(tree: Path, jobs: Sequence[Job]) -> None:
    """Runs jobs one after another in this process, with the version whose root is `tree`."""
    import jax
    import matplotlib.figure

    watch_optimizers()
    # Curves take seconds and are not compared.
    matplotlib.figure.Figure.savefig = lambda self, path, *_, **__: Path(path).touch()  # type: ignore[method-assign]
    entry = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["grpo-jax"]
    module, function = entry.split(":")
    main = getattr(importlib.import_module(module), function)
    package = Path(sys.modules[module.split(".")[0]].__file__ or "")
    assert package.is_relative_to(tree), f"{package} is not in {tree}"
    for job in jobs:
        gradients.clear()
        out, started = Path(job.folder), time.perf_counter()
        print(f"--- {job.name}", flush=True)
        status = attempt(main, job)
        jax.effects_barrier()
        np.savez(out / "gradients.npz", **gradients)
        seconds = round(time.perf_counter() - started, 1)
        (out / "status.json").write_text(json.dumps({"status": status, "seconds": seconds}))
        jax.clear_caches()


def attempt(main: Any, job: Job) -> str:
    """Runs one case; returns a description of its error, or ""."""
    run = ["--run-dir", f"{job.folder}/run"]
    try:
        if job.case.module:
            sys.argv = [job.case.module, *job.case.args.split(), *run, "--no-compilation-cache"]
            runpy.run_module(job.case.module, run_name="__main__")
        else:
            sys.argv = ["grpo-jax", "train", *job.case.args.split(), *run, "--no-compilation-cache"]
            main()
    except SystemExit as ended:
        return f"exit status {ended.code}" if ended.code else ""
    except BaseException:
        traceback.print_exc()
        return traceback.format_exc().splitlines()[-1]
    return ""


# ---- processes of versions


def start(tree: Path, jobs: Sequence[Job], inputs: Path, cache: Path) -> None:
    """Runs jobs with the same number of devices. If a process dies, a new process runs the remaining jobs."""
    left = list(jobs)
    while left:
        devices = left[0].case.devices
        flags = f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILATION}"
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            # A program's key covers the whole program, so versions share equal programs.
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for job in left:
            Path(job.folder).mkdir(parents=True, exist_ok=True)
        log = Path(left[0].folder) / "log.txt"
        # -P keeps this script's folder out of the module search path.
        command = [sys.executable, "-P", __file__, "--drive", str(tree), json.dumps(left)]
        with log.open("w") as file:
            try:
                subprocess.run(command, cwd=inputs, env=environment, stdout=file, stderr=file, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                file.write("\nthis process hung\n")
        left = [job for job in left if not status_of(job)]
        if left:
            ended = {"status": "the process died", "seconds": 0}
            (Path(left[0].folder) / "status.json").write_text(json.dumps(ended))
            left = left[1:]


def status_of(job: Job) -> dict[str, Any]:
    """Returns the status that a job wrote at its end, or {}."""
    file = Path(job.folder) / "status.json"
    return json.loads(file.read_text()) if file.exists() else {}


# ---- comparisons


def compare_case(name: str, old: Path, new: Path) -> list[str]:
    """Returns the differences between the two versions' runs of a case, one sentence each."""
    ends = [json.loads((folder / "status.json").read_text())["status"] for folder in (old, new)]
    if any(ends):
        return [f"{name}: ended with '{ends[0]}' in the commit and with '{ends[1]}' in the working tree"]
    differences = compare_gradients(
        *(dict(np.load(folder / "gradients.npz")) for folder in (old, new)), CASES[name].bound
    )
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        differences += compare_lines(file, *(read_lines(folder / "run" / file) for folder in (old, new)))
    results = [json.loads((folder / "run/results.json").read_text()) for folder in (old, new)]
    differences += compare_json("results.json", *map(renamed, results), LATER_NUMBER, NOISE * LATER_NUMBER)
    return [f"{name}: {difference}" for difference in differences]


def read_lines(file: Path) -> dict[tuple[Any, ...], Any]:
    """Returns the lines of a file by phase, step, and position within the step."""
    lines: dict[tuple[Any, ...], Any] = {}
    for text in file.read_text().splitlines() if file.exists() else ():
        line = renamed(json.loads(text))
        key, number = (line.get("phase"), line.get("step")), 0
        while (*key, number) in lines:
            number += 1
        lines[*key, number] = line
    return lines


def renamed(value: Any) -> Any:
    """Returns JSON with the names of the working tree, and without checksums, which rounding changes."""
    if isinstance(value, dict):
        return {RENAMED_FIELDS.get(key, key): renamed(x) for key, x in value.items() if not key.endswith("sha256")}
    return [renamed(x) for x in value] if isinstance(value, list) else value


def compare_lines(file: str, old: Mapping[Any, Any], new: Mapping[Any, Any]) -> list[str]:
    """Returns the differences between two files of lines. Lines up to the first step have the narrow bound."""
    found = [f"{file} has {key} in one version only" for key in old.keys() ^ new.keys()]
    for key in old.keys() & new.keys():
        bound = FIRST_NUMBER if (key[1] or 0) <= 1 else LATER_NUMBER
        least = DECIMALS if file == "rollouts.jsonl" else NOISE * bound
        found += compare_json(f"{file} {'/'.join(map(str, key))}", old[key], new[key], bound, least)
    return sorted(found)


def compare_json(where: str, old: Any, new: Any, bound: float, least: float) -> list[str]:
    """Returns the differences between two JSON values.

    Texts and whole numbers must be equal. Other numbers may differ by a share of their size, or by `least`.
    """
    if isinstance(old, list) and isinstance(new, list):
        old, new = (dict(enumerate(values)) for values in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        differences = [f"{where} has {name} in one version only" for name in old.keys() ^ new.keys()]
        for name in old.keys() & new.keys():
            differences += compare_json(f"{where} {name}", old[name], new[name], bound, least)
        return sorted(differences)
    if isinstance(old, int | float) and isinstance(new, int | float) and float in (type(old), type(new)):
        if abs(old - new) <= max(bound * max(abs(old), abs(new)), least):
            return []
    elif old == new:
        return []
    return [f"{where}: {short(old)} against {short(new)}"]


def short(value: Any) -> str:
    """Returns the beginning of a value's JSON."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def compare_gradients(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], first: float) -> list[str]:
    """Returns the leaves whose gradients differ, with the difference as a share of the leaf's norm."""
    if not old or not new:
        return ["no gradient was seen: does the library still call optax.adamw?"]
    pairs = match_leaves(old, new)
    alone = (old.keys() - pairs.keys()) | (new.keys() - set(pairs.values()))
    found = [f"gradient {key} has no counterpart" for key in sorted(alone)]
    for update in sorted({update_of(key) for key in pairs}):
        group = [(key, old[key], new[other]) for key, other in pairs.items() if update_of(key) == update]
        whole = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for _, x, _ in group))
        bound = first if update.startswith("0|") else LATER_GRADIENT
        for key, one, other in group:
            norm, apart = (np.linalg.norm(np.float64(x).ravel()) for x in (one, one - other))
            # A gradient that is only rounding errors is compared with the norm of the whole gradient.
            if not apart <= bound * max(norm, 1e-3 * whole):
                found.append(f"gradient {key}: apart by {apart / max(norm, 1e-30):.1e} of its norm {norm:.1e}")
    return found


def update_of(key: str) -> str:
    """Returns the number of the update that a leaf's gradient belongs to."""
    return key.rpartition("|")[0]


def match_leaves(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Matches each leaf of `old` with the leaf of the same name in `new`, or else the nearest of its update and shape.

    This still works when a version changes the structure of its parameters.
    """
    pairs = {key: key for key in old if key in new and old[key].shape == new[key].shape}
    for key in sorted(old.keys() - pairs.keys()):
        left = [x for x in sorted(new.keys() - set(pairs.values())) if update_of(x) == update_of(key)]
        alike = {x: np.linalg.norm(new[x] - old[key]) for x in left if new[x].shape == old[key].shape}
        if alike:
            pairs[key] = min(alike, key=lambda x: alike[x])
    return pairs


# ---- the whole comparison


def in_new_names(case: Case) -> Case:
    """Returns a case with the option names of the working tree."""
    return case._replace(args=" ".join(RENAMED_OPTIONS.get(word, word) for word in case.args.split()))


def compare_versions(
    names: Sequence[str], old: Path, new: Path, folder: Path, skipped: Path | None = None
) -> Iterator[str]:
    """Runs cases with both versions, one process at a time; yields the differences."""
    for devices in (1, 4, 8):
        chosen = [name for name in names if CASES[name].devices == devices]
        jobs = [Job(name, CASES[name], str(folder / "old" / name)) for name in chosen]
        again = [Job(name, in_new_names(CASES[name]), str(folder / "new" / name)) for name in chosen]
        for tree, todo in ((old, [job for job in jobs if not status_of(job)]), (new, again)):
            if todo and tree != skipped:
                start(tree, todo, folder / "inputs", folder / "cache")
        if skipped:
            continue
        for name, *sides in zip(chosen, jobs, again, strict=True):
            differences = compare_case(name, *(Path(side.folder) for side in sides))
            seconds = " and ".join(f"{status_of(side)['seconds']:.0f}" for side in sides)
            print(f"{'DIFFERS' if differences else 'agrees'}: {name} ({seconds} s)", flush=True)
            yield from differences


def compare(commit: str, only: Sequence[str], folder: Path, only_commit: bool = False) -> list[str]:
    """Checks the commit out, runs all cases, and returns the differences."""
    started = time.perf_counter()
    shutil.rmtree(folder / "new", ignore_errors=True)
    if not (folder / "inputs").exists():
        (folder / "inputs").mkdir()
        (folder / "cache").mkdir()
        write_inputs(folder / "inputs")
    git = ["git", "-C", str(TREE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder / "tree"), commit], check=True)
    try:
        names = [name for name in CASES if not only or name in only]
        differences = list(compare_versions(names, folder / "tree", TREE, folder, TREE if only_commit else None))
    finally:
        subprocess.run([*git, "remove", "--force", str(folder / "tree")], check=True)
    print(*differences, sep="\n")
    minutes = (time.perf_counter() - started) / 60
    print(f"{len(differences)} differences between {commit} and the working tree, in {minutes:.1f} minutes")
    return differences


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["--drive"]:
        jobs = [Job(name, Case(*case), folder) for name, case, folder in json.loads(sys.argv[3])]
        drive(Path(sys.argv[2]), jobs)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default=COMMIT)
    parser.add_argument("--only", nargs="+", default=(), choices=[*CASES], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument(
        "--keep", type=Path, help="a folder that keeps all runs, and whose runs of the commit are used again"
    )
    parser.add_argument("--only-commit", action="store_true", help="run only the commit, for later comparisons")
    options = parser.parse_args()
    if options.list:
        print(*CASES, sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="compare_") as temporary:
        folder = options.keep.absolute() if options.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(1 if compare(options.commit, options.only, folder, options.only_commit) else 0)


if __name__ == "__main__":
    main()
