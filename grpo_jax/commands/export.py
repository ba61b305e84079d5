"""Writes a checkpoint of a run as a Hugging Face folder, which transformers, vLLM and load_pretrained load.

A README.md beside it holds the results of the run, the command line and the options. `hf upload` takes the
folder to the hub.
With LoRA the adapters are merged into the model, or written separately (--adapter) as a folder that PEFT loads.

  grpo-jax export runs/train trained-model
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro

import grpo_jax
from grpo_jax.commands.flags import program, read_flags, refusing
from grpo_jax.errors import UsageError, user_path
from grpo_jax.models import huggingface
from grpo_jax.models.files import peft, weights
from grpo_jax.models.files.families import text_config
from grpo_jax.options import flattened
from grpo_jax.runs.files import COMMAND, read_object, write_text
from grpo_jax.runs.folder import numbered_runs
from grpo_jax.runs.pretrained import Step, phase_of, restore
from grpo_jax.runs.progress import RunConsole, say


@dataclass(frozen=True)
class Options:
    """Options of an export."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not exist, or be empty."""
    phase: str | None = None
    """Phase of the run; None: the only one that is neither a warm start nor a control."""
    step: Step = None
    """Step of the checkpoint; None: the newest; best: the best held-out score. A run keeps few (--keep-checkpoints,
    --keep-best)."""
    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Dtype of the tensors; model: that of the initial model's files. bfloat16 rounds weights stochastically, to keep
    small updates. float32 loses nothing."""
    base: Path | None = None
    """Folder of the base of a LoRA run, if it has moved."""
    adapter: bool = False
    """Write only the adapters of a LoRA run."""


def export(options: Options) -> int:
    """Writes a run's checkpoint as a Hugging Face or PEFT folder.

    Args:
      options: The options of the export.

    Returns:
      The step of the checkpoint that was written.

    Raises:
      UsageError: One sentence that says what is missing.
    """
    if options.adapter and options.dtype != "model":
        raise UsageError("adapters are always written in float32: leave out --dtype")
    run, out = user_path(options.run), user_path(options.out)
    source = run / "model"
    trained = restore(run, options.phase, options.step, base=options.base, adapter=options.adapter)
    card = model_card(run, phase=phase_of(run, options.phase), step=trained.step, adapter=options.adapter)
    with huggingface.complete_or_not_at_all(out) as partial:
        if options.adapter and trained.lora:
            base = str(options.base or trained.lora.base)
            peft.save_adapter(partial, trained.config, trained.params, base=base, source=source)
        else:
            dtype = dtype_of(options)
            card += f"\n{rounding_sentence(dtype)}\n" if dtype != jnp.float32 else ""
            merged = trained.merged(jnp.float32)  # rounded only once, when it is written
            huggingface.save_pretrained(partial, merged, trained.config, source=source, dtype=dtype)
        write_text(partial / "README.md", card)
    return trained.step


def dtype_of(options: Options) -> jnp.dtype:
    """Returns the dtype of the exported tensors."""
    raw = text_config(weights.read_json(user_path(options.run) / "model" / "config.json"))
    stated = raw.get("dtype") or raw.get("torch_dtype")
    from_model = stated if stated in weights.FLOAT_DTYPES.values() else "float32"
    return jnp.dtype(from_model if options.dtype == "model" else options.dtype)


def rounding_sentence(dtype: jnp.dtype) -> str:
    """Returns a sentence that says how the exported tensors are rounded."""
    how = "stochastically, so that small updates are kept" if dtype == jnp.bfloat16 else "to the nearest"
    return f"The trained weights, which are float32, are rounded to {dtype} {how}."


def command() -> None:
    """Runs the command."""
    with refusing():
        options = read_flags(Options, prog=program(), description=__doc__)
        done = export(options)
        say(RunConsole(), f"step {done} of {options.run} is now in {options.out}")
        if not options.adapter and (dtype := dtype_of(options)) != jnp.float32:
            say(RunConsole(), rounding_sentence(dtype))
        runs = numbered_runs(user_path(options.run))
        if len(runs) > 1:
            say(RunConsole(), f"{runs[max(runs)]} is a newer run")


# ---- the card: README.md of an exported folder


def model_card(run: Path, *, phase: str, step: int, adapter: bool) -> str:
    """Returns the README.md of an exported folder, which the hub shows.

    Args:
      run: The folder of the run.
      phase: The phase of the checkpoint.
      step: The step of the checkpoint.
      adapter: True if only adapters were exported.
    """
    options = flattened(read_object(run / "config.json"))
    base = str(options.get("model") or "")
    head = ["library_name: " + ("peft" if adapter else "transformers"), "pipeline_tag: text-generation"]
    if base.count("/") == 1 and not base.startswith((".", "~", "/")) and not Path(base).exists():  # an id on the hub
        head.append(f"base_model: {base}")
    head.append(f"tags: [{options.get('method', 'grpo')}, grpo_jax]")
    started = f"after training from `{base}`" if base else "after training"
    sections = [
        "---\n" + "\n".join(head) + "\n---",
        f"# {run.absolute().name}",
        f"Step {step} of phase `{phase}`, {started} with grpo_jax {grpo_jax.__version__}.",
    ]
    if kwargs := options.get("chat_template_kwargs"):
        sections.append(f"Prompts were written with the variables `{kwargs}` of the chat template.")
    for title, name in {"Results": "results.json", "Command": COMMAND, "Options": "config.json"}.items():
        if (run / name).exists():
            text = (run / name).read_text(encoding="utf-8", errors="replace").strip()
            sections += [f"## {title}", f"```\n{text}\n```"]
    return "\n\n".join(sections) + "\n"
