"""A run on paper: what does each device store and exchange, and how long does an iteration take at least?

The script runs nothing and reads no weights. Memory is the estimate that the library uses to plan runs. Formulas give
the bytes that devices exchange. Seconds follow from the rates of a device, or from yours. They are lower bounds: real
programs are slower.

--compile compares memory and bytes with XLA. It compiles the programs for as many virtual CPU devices, from shapes
only, and reads what they plan and exchange. Programs for accelerators differ: XLA on CPU computes bfloat16 in float32,
and gives each device the whole sum of gradients instead of its part. --topology compiles for TPUs or GPUs instead, and
needs none of them. For GPUs it also counts kernels.

  python -m experiments.plan --model Qwen2.5-7B --devices 8
  python -m experiments.plan --model Llama-3-70B --devices 64 --tensor 8 --device v5p --compile
  python -m experiments.plan --model Qwen2.5-7B --topology v5p:2x2x2 --programs learn
  python -m experiments.plan --model Qwen3-0.6B --topology h100:1 --prompts-per-device 16
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from experiments.benchmarks import shapes
from experiments.paper.bytes_moved import moved_bytes, moved_in_loops, total
from experiments.paper.collectives import collectives
from experiments.paper.kernels import KERNELS_OF_ADAPTERS, KERNELS_OF_LAYER, SECONDS_OF_KERNEL, by_group, decoding_steps
from experiments.paper.lowered import lowered, peak_bytes, planned_bytes
from experiments.paper.topology import GPUS, as_if_here, devices_of_topology
from experiments.planning.models import MODELS
from experiments.planning.traffic import Exchange, learn_traffic, moved, sample_traffic, score_traffic
from grpo_jax.commands.flags import read_flags, refusing
from grpo_jax.config import PPO, GRPOConfig, ModelOptions, PlannedRemat, recipe, with_options
from grpo_jax.devices import Devices, Mesh
from grpo_jax.errors import UsageError
from grpo_jax.functional.products import CPU, Traits, traits_of_gpu
from grpo_jax.models.config import Dtype, ModelConfig
from grpo_jax.models.decoder.transformer import param_shapes
from grpo_jax.models.huggingface import model_folder, read_config
from grpo_jax.models.params import sharding
from grpo_jax.models.params.tree import Quantize
from grpo_jax.models.policy import suits_cudnn
from grpo_jax.options import Count, Size, Weight, check_ranges
from grpo_jax.planning.memory import (
    GB,
    GIB,
    Estimate,
    Plan,
    Shape,
    choose,
    count_shards,
    divide_shape,
    estimate,
    num_params,
)


class Device(NamedTuple):
    """The limits of one device."""

    flops: float  # FLOP/s of dense products in bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes of memory per second
    link: float  # bytes to other devices per second, in one direction


# NVIDIA's data sheets: H100 and A100 SXM have 900 and 600 GB/s of NVLink in both directions, within a host of eight. An
# RTX 4090 and an L4 have 16 lanes of PCIe 4, and a T4 of PCIe 3. Google's pages of each TPU
# (cloud.google.com/tpu/docs/v5e, v5p, v6e, read in November 2026): the interconnect in both directions is 400, 1,200
# and 800 GB/s.
DEVICES = {
    "h100": Device(989e12, 80e9, 3.35e12, 450e9),
    "a100": Device(312e12, 80e9, 2039e9, 300e9),
    "rtx4090": Device(165e12, 24e9, 1008e9, 32e9),
    "l4": Device(121e12, 24e9, 300e9, 32e9),
    "t4": Device(8.1e12, 16e9, 320e9, 16e9),  # float32: it has no units for bfloat16
    "v5e": Device(197e12, 16e9, 819e9, 200e9),
    "v5p": Device(459e12, 95 * 2**30, 2765e9, 600e9),
    "v6e": Device(918e12, 32e9, 1600e9, 400e9),
}

Program = Literal["sample", "score", "learn"]


@dataclass(frozen=True)
class Config:
    """Options of the plan."""

    model: str = "Qwen2.5-7B"
    """A model of experiments/planning/models.py, such as Qwen2.5-7B; or the folder or hub id of a model."""
    devices: Count = 0
    """Devices of the run; 0: those of the topology, or 8."""
    hosts: Size = 1
    """Hosts of the devices; with a topology those of its name. It only matters with sampler_devices."""
    fsdp: Count = 0
    """The same option as in a run; 0: what tensor leaves of the devices."""
    tensor: Size = 1
    """The same option as in a run."""
    sampler_devices: Count = 0
    """The same option as in a run: devices of each host that only sample."""
    sampler_fsdp: Size = 1
    """The same option as in a run."""
    sampler_tensor: Size = 1
    """The same option as in a run."""
    staleness: Count = 0
    """The same option as in a run: so many more copies of what is trained are on devices that only sample."""
    device: Literal["h100", "a100", "rtx4090", "l4", "t4", "v5e", "v5p", "v6e"] = "h100"
    """Kind of the devices; with a topology those of its name."""
    tflops: Weight = 0.0
    """10^12 operations a second of a device; 0: its data sheet's."""
    bandwidth_gb_s: Weight = 0.0
    """10^9 bytes a second of its memory; 0: its data sheet's."""
    link_gb_s: Weight = 0.0
    """10^9 bytes a second that it sends to others; 0: its data sheet's."""
    prompts_per_device: Size = 8
    """Prompts of a rollout over the devices that they are spread over (data x fsdp)."""
    group_size: Size = 8
    """G."""
    prompt_tokens: Size = 256
    """P."""
    max_tokens: Size = 512
    """T."""
    dtype: Dtype = "bfloat16"
    """Dtype of activations and matrix products."""
    remat: PlannedRemat = "auto"
    """The same option as in a run."""
    piece_tokens: Count = 0
    """The same option as in a run."""
    lora_rank: Count = 0
    """The same option as in a run; the frozen parameters are then bfloat16."""
    quantize: Quantize = "none"
    """The same option as in a run."""
    method: Literal["grpo", "ppo"] = "grpo"
    """PPO has an own critic."""
    compile: bool = False
    """Compile the programs for virtual CPU devices, and compare."""
    topology: str = ""
    """Compile them for these TPUs or GPUs instead: kind and torus or number, such as v5p:2x2x2 or h100:1."""
    programs: tuple[Program, ...] = ("learn", "score", "sample")
    """Which to compile. A decoder of 80 layers takes long to compile for sampling."""


def main(config: Config) -> None:
    """Prints the plan, and with --compile the compiler's numbers."""
    config, devices = resolved(config)
    check(config)
    if config.compile and not devices:  # before JAX looks for devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.devices)
    console, shape, data = Console(), shape_of(config), data_of(config)
    model = replace(model_of(config.model), dtype=config.dtype, rounding=ModelOptions().rounding)
    device = device_of(config)
    shape, sampler = divide_shape(model, shape, run_of(config, shape, data), *sides_of(config, shape, data))
    plan = choose(model, shape, int(device.memory), remat=config.remat, sampler=sampler)
    mesh = f"data {data} x fsdp {plan.shape.fsdp} x tensor {plan.shape.tensor}"
    console.print(f"{config.model}: {in_words(num_params(model))} parameters on {mesh} {config.device}")
    console.print(f"{plan}, each device", highlight=False)
    console.print(memory_table(plan.estimate))
    if plan.sampler:
        cut = f"fsdp {config.sampler_fsdp} x tensor {config.sampler_tensor}"
        console.print(f"{config.sampler_devices} devices of each host only sample, {cut}; each of them")
        console.print(memory_table(plan.sampler.estimate))
    results = traffic_of(plan, data)
    console.print(traffic_table(results, device))
    console.print(time_table(plan, results, device))
    console.print(sharding_table(model, plan.shape))
    if devices or config.compile:
        with as_if_here(devices) if devices else nullcontext():
            table, texts = compiled_table(config, plan, data)
            console.print(table)
            if config.device in GPUS:
                console.print(kernels_table(texts, device))


# ---- what is planned


def resolved(config: Config) -> tuple[Config, list[jax.Device]]:
    """Resolves the number and kind of devices. Also returns the devices of the topology, if there is one.

    Raises:
      UsageError: There is no such topology, it has another number of devices, or their rates are not known.
    """
    if not config.topology:
        return replace(config, devices=config.devices or 8), []
    kind: Any = config.topology.partition(":")[0]
    if kind not in DEVICES:
        raise UsageError(f"topology is {config.topology}: begin it with one of {', '.join(DEVICES)}, and a colon")
    devices = devices_of_topology(config.topology)
    if config.devices not in (0, len(devices)):
        raise UsageError(
            f"devices is {config.devices}, but {config.topology} has {len(devices)}: leave out devices, or name "
            "another topology"
        )
    count = len({device.process_index for device in devices})
    return replace(config, devices=len(devices), hosts=count, device=kind), devices


def check(config: Config) -> None:
    """Checks the options.

    Raises:
      UsageError: One sentence that says what to change.
    """
    check_ranges(config)
    tokens = config.prompts_per_device * config.group_size * (config.prompt_tokens + config.max_tokens)
    if tokens >= 2**31:
        raise UsageError(f"a device would have {tokens} tokens of a rollout: set prompts, group_size or tokens lower")
    if config.quantize != "none" and not config.lora_rank:
        raise UsageError(f"quantize {config.quantize} is of LoRA's frozen parameters: set lora_rank above 0")
    if config.devices % config.hosts or config.sampler_devices >= config.devices // config.hosts:
        raise UsageError(
            f"sampler_devices is {config.sampler_devices}, of {config.devices} devices on {config.hosts} hosts: each "
            "host needs as many devices, of which at least one trains"
        )
    data, cut = data_of(config), config.sampler_fsdp * config.sampler_tensor
    prompts = config.prompts_per_device * data * shape_of(config).fsdp
    if config.sampler_devices % cut or prompts % (config.hosts * config.sampler_devices // config.sampler_tensor or 1):
        raise UsageError(
            f"sampler_devices is {config.sampler_devices}: sampler_fsdp x sampler_tensor, {cut}, must divide it, and "
            f"hosts x sampler_devices / sampler_tensor must divide the {prompts} prompts"
        )
    if (heads := model_of(config.model).num_key_value_heads) % config.tensor:
        raise UsageError(f"tensor is {config.tensor}: it must divide the model's {heads} key-value heads")


def model_of(name: str) -> ModelConfig:
    """Returns a published shape, or the shape of the model in a folder.

    Raises:
      UsageError: There is neither.
    """
    if name in MODELS:
        return MODELS[name]
    return read_config(model_folder(name))


def data_of(config: Config) -> int:
    """Returns the number of devices on the axis "data".

    Raises:
      UsageError: fsdp and tensor do not divide the devices.
    """
    count = training_devices(config)
    cut = (config.fsdp or count // config.tensor) * config.tensor
    if not cut or count % cut:
        raise UsageError(f"fsdp x tensor is {cut}: set it to a divisor of the {count} devices")
    return count // cut


def training_devices(config: Config) -> int:
    """Returns the number of devices that train."""
    return config.devices - config.hosts * config.sampler_devices


def sides_of(config: Config, shape: Shape, data: int) -> tuple[Devices, Devices]:
    """Returns stand-ins for the devices that train, and for those of one host that only sample."""

    def named(count: int, hosts: int, mesh: Mesh) -> Devices:
        listed: Any = tuple(SimpleNamespace(process_index=number * hosts // count) for number in range(count))
        return Devices(listed, mesh)

    fsdp, tensor, count = config.sampler_fsdp, config.sampler_tensor, config.sampler_devices
    training = named(training_devices(config), config.hosts, Mesh(data, shape.fsdp, shape.tensor))
    return training, named(count, 1, Mesh(count // (fsdp * tensor), fsdp, tensor))


def shape_of(config: Config) -> Shape:
    """Returns the sizes that determine the run's memory on one device."""
    gpu = GPUS.get(config.device)
    return Shape(
        traits=traits_of_gpu(".".join(map(str, gpu.capability))) if gpu else Traits("tpu"),
        num_prompts=config.prompts_per_device,
        group_size=config.group_size,
        prompt_tokens=config.prompt_tokens,
        max_tokens=config.max_tokens,
        piece_tokens=config.piece_tokens,
        lora_rank=config.lora_rank,
        param_dtype="bfloat16" if config.lora_rank else "float32",
        quantize=config.quantize,
        critic="own" if config.method == "ppo" else "none",
        fsdp=config.fsdp or training_devices(config) // config.tensor,
        tensor=config.tensor,
    )


def device_of(config: Config) -> Device:
    """Returns the device, with the rates from the options."""
    inputs = {"flops": config.tflops * 1e12, "bandwidth": config.bandwidth_gb_s * 1e9, "link": config.link_gb_s * 1e9}
    return DEVICES[config.device]._replace(**{name: rate for name, rate in inputs.items() if rate})


def traffic_of(plan: Plan, data: int) -> dict[str, list[Exchange]]:
    """Returns the exchanges of each program."""
    return {
        "sample": sample_traffic(plan.model, (plan.sampler or plan).shape),
        "score": score_traffic(plan.model, plan.shape),
        "learn": learn_traffic(plan.model, plan.shape, data=data),
    }


# ---- tables


def in_words(number: int) -> str:
    """Formats a number of parameters, in billions or millions."""
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"


def memory_table(of: Estimate) -> Table:
    """Returns the table of GiB on one device, by part; absent parts, such as a teacher, are left out."""
    table = Table("GiB of a device", "", box=None)
    for name, size in of._asdict().items():
        if size:
            table.add_row(name, f"{size / GIB:.2f}")
    for name in ("held", "sampling", "learning", "peak"):
        table.add_row(f"[bold]{name}[/]", f"{getattr(of, name) / GIB:.2f}")
    return table


def traffic_table(results: dict[str, list[Exchange]], device: Device) -> Table:
    """Returns the table of all exchanges in an iteration."""
    table = Table("program", "exchanged", "by", "devices", "GB", "GB sent", "s", box=None)
    for program, exchanges in results.items():
        for one in exchanges:
            sent = f"{one.moved / GB:.2f}", f"{one.moved / device.link:.3f}"
            table.add_row(program, one.what, one.kind, str(one.devices), f"{one.size / GB:.2f}", *sent)
    return table


def time_table(plan: Plan, results: dict[str, list[Exchange]], device: Device) -> Table:
    """Returns the table of least seconds of each program, with full overlap and without overlap."""
    table = Table("program", *(f"s {name.replace('_', ' ')}" for name in Seconds._fields), box=None)
    seconds = least_seconds(plan, results, device)
    for program, each in seconds.items():
        table.add_row(program, *(f"{number:.3f}" for number in each))
    totals = [sum(each[-2:][bound] for each in seconds.values()) for bound in (0, 1)]
    if plan.sampler and plan.sampler.shape.versions > 1:  # sampling takes place beside the rest
        sampling = seconds["sample"]
        totals = [max(sampling[-2:][bound], totals[bound] - sampling[-2:][bound]) for bound in (0, 1)]
    table.add_row("[bold]iteration[/]", "", "", "", "", *(f"{total:.3f}" for total in totals))
    return table


class Seconds(NamedTuple):
    """The seconds of a program on one device."""

    computing: float
    reading: float
    launching: float
    exchanging: float
    at_least: float
    one_by_one: float


def least_seconds(plan: Plan, results: Mapping[str, list[Exchange]], device: Device) -> dict[str, Seconds]:
    """Returns the seconds of each program. Launches add to the rest, because each kernel of a decoding step waits."""
    seconds: dict[str, Seconds] = {}
    work = costs(plan) | ({"sample": costs(plan.sampler)["sample"]} if plan.sampler else {})
    for program, (flops, read) in work.items():
        computing, reading = flops / device.flops, read / device.bandwidth
        launching = SECONDS_OF_KERNEL * num_kernels(plan.sampler or plan) if program == "sample" else 0.0
        exchanging = sum(one.moved for one in results[program]) / device.link
        alone = max(computing, reading) + launching
        bounds = max(alone, exchanging), alone + exchanging
        seconds[program] = Seconds(computing, reading, launching, exchanging, *bounds)
    return seconds


def num_kernels(plan: Plan) -> int:
    """Estimates the kernels that decoding launches on a GPU. On a TPU a decoding step is one program."""
    if plan.shape.traits.backend != "gpu":
        return 0
    is_fused = plan.shape.is_on_one_gpu and suits_cudnn(plan.model, plan.shape.traits)
    of_layer = KERNELS_OF_LAYER[is_fused] + (KERNELS_OF_ADAPTERS if plan.shape.lora_rank else 0)
    return (plan.shape.max_tokens - 1) * plan.model.num_hidden_layers * of_layer


def costs(plan: Plan) -> dict[str, tuple[float, float]]:
    """Returns the operations of products and the bytes read in decoding, for each program on one device."""
    separate, cut = plan.shape, plan.shape.fsdp * plan.shape.tensor
    together = separate.num_prompts * separate.fsdp  # prompts of all devices that share one copy of the parameters
    rollout = shapes.Shape(plan.model, together, separate.prompt_tokens, separate.max_tokens, separate.group_size)
    cost = shapes.cost_of(rollout, element=2 if plan.model.dtype == "bfloat16" else 4)
    forward, critics = cost.forward_flops / cut, 2 if separate.critic == "own" else 1
    # With LoRA, frozen parameters have no gradient: the backward pass is only that of activations.
    passes = (2 if separate.lora_rank else 3) + (plan.model.remat != "none")
    return {
        "sample": (forward, cost.sample_bytes / cut),
        "score": (forward * critics, 0.0),
        "learn": (forward * passes * critics, 0.0),
    }


def last_step_bytes(plan: Plan) -> float:
    """Returns the fewest bytes that the last decode step reads: weights, and keys and values of full completions."""
    shorter = plan._replace(shape=plan.shape._replace(max_tokens=plan.shape.max_tokens - 1))
    return costs(plan)["sample"][1] - costs(shorter)["sample"][1]


def sharding_table(model: ModelConfig, shape: Shape) -> Table:
    """Returns the table of the parameters' shardings."""
    table, params = Table("parameter", "shape", "cut along", "MB of a device", box=None), param_shapes(model)
    specs = jax.tree.leaves(sharding.specs(params, shape.mesh))
    for (path, x), spec in zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True):
        name, size = "/".join(key.key for key in path), x.size * x.dtype.itemsize / count_shards(spec, shape.mesh)
        axes = " ".join(_axes(entry, shape) for entry in spec)
        table.add_row(name, " x ".join(map(str, x.shape)), axes, f"{size / 1e6:.1f}")
    return table


def _axes(entry: sharding.Axes, shape: Shape) -> str:
    """Returns the axes of the mesh that shard one axis of an array; a dash for none."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    return "*".join(name for name in names if shape.mesh[name] > 1) or "-"


# ---- the compiler's numbers


def run_of(config: Config, shape: Shape, data: int) -> GRPOConfig:
    """Returns the options of the planned run."""
    options: dict[str, Any] = {
        "num_prompts": config.prompts_per_device * data * shape.fsdp,
        "group_size": config.group_size,
        "max_tokens": config.max_tokens,
        "piece_tokens": shape.piece_tokens,
        "devices": config.devices,
        "fsdp": shape.fsdp,
        "tensor": config.tensor,
        "sampler_devices": config.sampler_devices,
        "sampler_fsdp": config.sampler_fsdp,
        "sampler_tensor": config.sampler_tensor,
        "staleness": config.staleness,
    }
    return recipe(**options) if config.method == "grpo" else with_options(PPO, **options)


def in_float32(plan: Plan) -> Plan:
    """Returns the plan of a run that computes in float32, as XLA does on a CPU."""
    changed = plan._replace(model=replace(plan.model, dtype="float32"))
    return changed._replace(sampler=in_float32(plan.sampler)) if plan.sampler else changed


def on_cpu(plan: Plan) -> Plan:
    """Returns the plan with the memory that it takes on a CPU."""
    shape = plan.shape._replace(traits=CPU)
    sampler = on_cpu(plan.sampler) if plan.sampler else None
    return plan._replace(shape=shape, estimate=estimate(plan.model, shape), sampler=sampler)


def compiled_table(config: Config, plan: Plan, data: int) -> tuple[Table, dict[str, str]]:
    """Compares memory and exchanges of the plan and the compiled programs. For a CPU the plan is in float32.

    Also returns the text of each compiled program.

    For GPUs, the row "step" compares the bytes that the last decode step moves with those that it must read.
    """
    traffic = traffic_of(plan, data)
    if not config.topology:
        traffic = traffic_of(in_float32(plan), data)
        plan = on_cpu(plan)
    table = Table("program", "", "planned GiB", "compiled GiB", "compiled / planned", "s to compile", box=None)
    run, texts = run_of(config, plan.shape, data), dict[str, str]()
    for program in config.programs:
        began = time.perf_counter()
        made = lowered(
            plan.model,
            run,
            config.prompt_tokens,
            lora_rank=config.lora_rank,
            param_dtype=plan.shape.param_dtype,
            quantize=plan.shape.quantize,
            programs=(program,),
        )
        if program not in made:
            continue
        compiled = made[program].compile()
        took = f"{time.perf_counter() - began:.0f}"
        inputs, added = memory_of(compiled, on_tpu=bool(config.topology) and config.device not in GPUS)
        rows, text = _memory_rows(program, plan, inputs, added), str(compiled.as_text())
        texts[program] = text
        turns = config.max_tokens - 1 if program == "sample" else plan.shape.num_pieces
        if config.devices > 1:
            rows += _traffic_rows(traffic[program], text, turns)
        if program == "sample" and config.device in GPUS:
            rows.append(("step", last_step_bytes(plan), max(map(total, moved_in_loops(text)))))
        for name, planned, results in rows:
            share = f"{results / planned:.2f}" if planned else ""
            estimated = f"{planned / GIB:.2f}" if planned is not None else ""
            table.add_row(program, name, estimated, f"{results / GIB:.2f}", share, took)
    return table, texts


def kernels_table(texts: Mapping[str, str], device: Device) -> Table:
    """Returns the table of kernels and bytes: of a decoding step, and of the parts of `score` and `learn`."""
    table = Table("program", "part", "kernels", "one after another", "GB", "s at least", box=None)

    def add_row(program: str, part: str, kernels: int, chain: str, size: int) -> None:
        seconds = SECONDS_OF_KERNEL * kernels + size / device.bandwidth
        table.add_row(program, part, f"{kernels:,}", chain, f"{size / GB:.2f}", f"{seconds:.4f}")

    for program, text in texts.items():
        if program == "sample":
            for step in decoding_steps(text):
                add_row(program, "one token", step.kernels, str(step.chain), step.size)
            continue
        for group, (kernels, size) in by_group(moved_bytes(text)).items():
            add_row(program, group, kernels, "", size)
    return table


def memory_of(compiled: jax.stages.Compiled, *, on_tpu: bool) -> tuple[int, int]:
    """Returns the bytes of a program's inputs on a device, and the bytes that it adds."""
    results = planned_bytes(compiled)
    inputs = results["arguments"]
    return inputs, peak_bytes(compiled) - inputs if on_tpu else results["temporary"] + results["results"]


def _memory_rows(program: str, plan: Plan, inputs: int, added: int) -> list[tuple[str, float | None, float]]:
    """Returns (name, planned, compiled) bytes of a program's inputs, and of the memory that it adds.

    The plan has no estimate of what `score` adds, which is less than what `learn` adds.
    """
    ours = plan.estimate
    # One version of what is trained is the input of a program.
    copied = estimate(plan.model, plan.sampler.shape._replace(versions=1)) if plan.sampler else ours
    planned = {"learn": ours.params + ours.optimizer, "sample": copied.params}
    adds = {"learn": ours.learning, "sample": copied.sampling - copied.moving}
    return [("given", planned.get(program, ours.params), inputs), ("added", adds.get(program), added)]


def _traffic_rows(exchanges: Iterable[Exchange], text: str, turns: int) -> list[tuple[str, float | None, float]]:
    """Returns (name, planned, compiled) bytes by kind of exchange; a sum may leave a part on each device, or all."""
    groups = {"put together": ("all-gather",), "summed": ("reduce-scatter", "all-reduce")}
    groups |= {"moved": ("all-to-all", "collective-permute")}
    results = collectives(text, unknown_trips=turns)
    rows = list[tuple[str, float | None, float]]()
    for name, kinds in groups.items():
        planned = sum(one.size for one in exchanges if one.kind in kinds)
        compiled = sum(one.size * one.times for one in results if one.kind in kinds)
        rows.append((name, planned, compiled))
    sent = sum(moved(one.kind, one.size * one.times, one.devices) for one in results)
    return [*rows, ("sent in a ring", sum(one.moved for one in exchanges), sent)]


if __name__ == "__main__":
    with refusing():
        main(read_flags(Config, prog="python -m experiments.plan", description=__doc__))
