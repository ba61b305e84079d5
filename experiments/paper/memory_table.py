"""README's table of memory: `python -m experiments.paper.memory_table` prints it."""

from dataclasses import replace

from experiments.planning.models import MODELS
from grpo_jax.planning.memory import Shape, estimate, num_params

GIB = 2**30


def table() -> str:
    """Returns README's table: GiB on one device for each model, in Markdown."""
    lines = [
        "| model | parameters | full training | full training, `--fsdp 8` | LoRA, rank 16 |",
        "|---|---|---|---|---|",
    ]
    shape = Shape(microbatches=2)
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"):
        model = replace(MODELS[name], dtype="bfloat16", rounding="stochastic", remat="layer")
        shapes = shape, shape._replace(fsdp=8), shape._replace(lora_rank=16, param_dtype="bfloat16")
        estimates = [estimate(model, each) for each in shapes]
        cells = " | ".join(f"{each.peak / GIB:.0f} ({each.held / GIB:.0f})" for each in estimates)
        lines.append(f"| {name} | {num_params(model) / 1e9:.2f} billion | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
