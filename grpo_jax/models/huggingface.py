"""Loading and saving Hugging Face folders: configuration, parameters and tokenizer. `weights` handles the tensors."""

import glob
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401, teaches NumPy bfloat16
import numpy as np

from grpo_jax.errors import UsageError, make_folder, reason_of, user_path
from grpo_jax.models.chat import Chat, turn_end
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.heads import Headed, without_vocabulary
from grpo_jax.models.files.families import config_from_huggingface, text_config
from grpo_jax.models.files.weights import (
    ignored_index,
    load_params,
    read_json,
    save_params,
    untie_if_different,
    write_model_json,
)
from grpo_jax.models.params.tree import Adapted, Params, Quantize, check_decoder, check_full_precision

# Files of a folder besides weights, and those of them that a run and an export copy. None of them is a pickle.
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
# The same weights in the format of their makers: Mistral, gpt-oss
_SECOND_COPIES = ["consolidated*.safetensors", "*/*.safetensors"]
_COPIED: tuple[str, ...] = ("*.jinja", "*.model", "LICENSE*", "vocab.*", "merges.txt", "tekken.json", "chat_template.*")
_COPIED += ("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json")


class Pretrained(NamedTuple):
    """A model loaded from its folder."""

    config: ModelConfig
    params: Params  # or `Headed`
    tokenizer: Any  # a tokenizer of transformers
    eos_ids: tuple[int, ...]  # the union of config.json, generation_config.json, tokenizer and chat template
    folder: Path
    notes: tuple[str, ...] = ()  # messages about the model for the user
    brings_tokenizer: bool = False  # the tokenizer is not that of the folder, so a run writes it to its own

    def __repr__(self) -> str:  # without the arrays
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"Pretrained({str(self.folder)!r}, {count:,} parameters)"


def load_pretrained(
    name: str | Path,
    *,
    head: bool = False,
    param_dtype: Any = jnp.float32,
    quantize: Quantize = "none",
    sharding: Any = None,
    weights: bool = True,
    tokenizer: Any = None,
    **overrides: Any,
) -> Pretrained:
    """Loads config.json, *.safetensors and the tokenizer of a model.

    Args:
      name: A local folder written by `save_pretrained` of transformers, or the id of a model on the hub.
      head: True for a classifier with one label, such as a reward model. The parameters are then `heads.Headed`.
      param_dtype: The dtype of the parameters, for any dtype in the files. Default float32, which keeps small updates.
        Decay rates and norms of delta nets are always float32, as in the files of Qwen3.5.
      quantize: The format of the kernels of projections: int8 or nf4, for LoRA, or none; see `models.params.quantised`.
      sharding: A `jax.sharding.Sharding` for all parameters, a tree of shardings that is a prefix of the parameters, or
        a function from the parameters' shapes to either; None: the default device.
      weights: False to load everything but the weights. `params` then holds only shapes.
      tokenizer: A tokenizer of transformers instead of the folder's.
      **overrides: The fields of ModelConfig that config.json does not determine: dtype, rounding, remat, attention,
        router, longest_text.

    Returns:
      The model with its tokenizer.

    Raises:
      UsageError: Something is missing or not supported.
    """
    folder = model_folder(name)
    config = read_config(folder, **overrides)
    try:
        param_dtype = jnp.dtype(param_dtype)
    except TypeError as error:
        raise UsageError(f"param_dtype is unknown: {error}") from None
    if not jnp.issubdtype(param_dtype, jnp.floating):
        raise UsageError(f"param_dtype is {param_dtype}: it must be float32, bfloat16 or float16")
    brings_tokenizer = tokenizer is not None
    tokenizer = tokenizer if brings_tokenizer else load_tokenizer(folder)  # before the weights, which take longest
    ends, notes = eos_ids(folder, tokenizer, config.vocab_size)
    config, untied = (without_vocabulary(config), ()) if head else untie_if_different(folder, config)
    notes = (*notes, *ignored_index(folder), *untied)
    settings = {"head": head, "dtype": param_dtype, "quantize": quantize, "sharding": sharding, "weights": weights}
    params = load_params(folder, config, **settings)
    return Pretrained(config, params, tokenizer, ends, folder, notes, brings_tokenizer)


def with_tokenizer(pretrained: Pretrained, tokenizer: Any) -> Pretrained:
    """Returns a model with another tokenizer, and the tokens that then end a text."""
    ends, notes = eos_ids(pretrained.folder, tokenizer, pretrained.config.vocab_size)
    notes = (*pretrained.notes, *notes)
    return pretrained._replace(tokenizer=tokenizer, eos_ids=ends, notes=notes, brings_tokenizer=True)


def read_config(folder: Path, **overrides: Any) -> ModelConfig:
    """Reads the configuration of a decoder from the config.json of a folder.

    Args:
      folder: The folder of the model, or of the description of one.
      **overrides: See `load_pretrained`.

    Raises:
      UsageError: The file is missing or damaged, or the decoder does not compute its model. The message names the file.
    """
    file = folder / "config.json"
    written = read_json(file)
    try:
        config = config_from_huggingface(text_config(written))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{file} cannot be understood ({reason}): correct it, or download it again") from error
    return replace(config, **overrides)


def for_texts(pretrained: Pretrained, longest: int) -> Pretrained:
    """Chooses the factors of longrope, if the model has this scaling, by the longest text of a program.

    Args:
      pretrained: The model. A larger `longest_text` in its configuration stays.
      longest: The largest possible length of a text in tokens, prompt included.

    Returns:
      The model with `ModelConfig.longest_text`, and with a note if the texts are long.

    Raises:
      UsageError: The model has dynamic scaling, and texts may exceed its original context.
    """
    config = pretrained.config
    if config.longest_short_text is None:
        config.check_width(longest)
        return pretrained
    config = replace(config, longest_text=max(longest, config.longest_text or 0))
    note = (
        f"texts may have {config.longest_text} tokens, more than the original {config.longest_short_text}: all texts, "
        "short ones too, use the long factors of longrope"
    )
    return pretrained._replace(config=config, notes=(*pretrained.notes, *[note] * config.has_long_texts))


def model_folder(name: str | Path) -> Path:
    """Returns the local folder of a model, which is downloaded if `name` is the id of a model on the hub.

    Raises:
      UsageError: There is no such folder and no such id, or the folder holds an adapter, or weights only as GGUF.
    """
    if not name:  # the option --model is not required, since --resume takes it from the run
        raise UsageError("--model is needed: name a folder of a Hugging Face model, or its id on the hub")
    folder = user_path(name)
    if folder.is_dir():
        return _checked_folder(folder)
    if folder.suffix == ".gguf" and folder.is_file():
        raise _gguf_refusal(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or folder.suffix in (".safetensors", ".gguf"):
        raise UsageError(
            f"there is no folder {name}: name the folder of a Hugging Face model, or its id on the hub, OWNER/NAME"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = [*_TEXT_FILES, "*.safetensors"]
        folder = Path(snapshot_download(str(name), allow_patterns=patterns, ignore_patterns=_SECOND_COPIES))
    except Exception as error:  # the hub has many classes of errors: offline, unknown, private
        raise UsageError(
            f"{name} is no folder here, and fetching it from the hub failed: {reason_of(error)}"
        ) from error
    return _checked_folder(folder)


def _checked_folder(folder: Path) -> Path:
    """Returns a folder that holds a model and nothing that changes it.

    Raises:
      UsageError: transformers with PEFT would load an adapter too, or the weights are in a GGUF file.
    """
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"{folder} holds an adapter, which transformers adds to its model: merge it with PEFT's merge_and_unload, "
            "or name a folder without adapter_config.json and load the adapter in Python with peft.load_adapter"
        )
    packed = sorted(folder.glob("*.gguf"))
    if packed and not any(folder.glob("*.safetensors")):
        raise _gguf_refusal(packed[0])
    return folder


def _gguf_refusal(file: Path) -> UsageError:
    """Returns the error for a GGUF file, with the command that converts it."""
    command = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T, GgufConfig as G; "
        f"d, f, o = {str(file.parent)!r}, {file.name!r}, 'converted'; "
        "M.from_pretrained(d, gguf_file=f, quantization_config=G(dequantize=True)).save_pretrained(o); "
        "T.from_pretrained(d, gguf_file=f).save_pretrained(o)"
    )
    return UsageError(
        f'GGUF files are not read: pip install torch gguf accelerate, convert this one with python -c "{command}", and '
        "name the folder converted (docs/pretrained.md says more)"
    )


def load_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of a folder with transformers' AutoTokenizer.

    Raises:
      UsageError: The folder has no tokenizer that transformers can load.
    """
    # transformers is imported here because that takes seconds. Its warning about missing torch is turned off.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        # Without a limit, transformers does not warn about prompts that are too long, which the run counts itself. Code
        # in the folder is never run, and the user is not asked about it.
        tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=sys.maxsize, trust_remote_code=False)
    except Exception as error:  # each kind of broken file raises another class
        raise UsageError(
            f"{folder} holds no tokenizer that transformers can load ({reason_of(error)}): correct its "
            "config.json, or copy its tokenizer.json into it"
        ) from error
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if dropout := getattr(model, "dropout", None):
        warnings.warn(f"{folder}: the tokenizer's BPE dropout of {dropout:g} is set to none", stacklevel=2)
        model.dropout = None
    return tokenizer


def eos_ids(folder: Path, tokenizer: Any, vocab_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the tokens that end a text: the union of config.json, generation_config.json, tokenizer and template.

    The files of a base model often do not name the token with which its chat template ends a turn.

    Args:
      folder: The folder of the model.
      tokenizer: The model's tokenizer, from transformers.
      vocab_size: The size of the model's vocabulary. Ids outside it are left out, unless none would remain.

    Returns:
      The ids, and notes that name the ids left out.
    """
    candidates = {tokenizer.eos_token_id, _turn_end_id(tokenizer)}
    for file in (folder / "config.json", folder / "generation_config.json"):
        candidates |= _eos_ids_in(file)
    ids = tuple(sorted(candidates - {None}))
    usable = tuple(eos_id for eos_id in ids if eos_id < vocab_size)
    if not usable or usable == ids:
        return ids, ()
    unusable = ", ".join(map(str, ids[len(usable) :]))
    return usable, (f"EOS {unusable} is left out, since the model has the tokens 0 to {vocab_size - 1}",)


def _eos_ids_in(file: Path) -> set[int | None]:
    """Returns the tokens that a config.json or generation_config.json names as eos_token_id."""
    ids = read_json(file).get("eos_token_id") if file.exists() else None
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(x, int | None) and not isinstance(x, bool) and (x or 0) >= 0 for x in ids):
        raise UsageError(f"eos_token_id in {file} is {ids}: it must be a token's number, or a list of them")
    return set(ids)


def _turn_end_id(tokenizer: Any) -> int | None:
    """Returns the last token with which the chat template ends a turn, or None if no token of its own does."""
    end = turn_end(Chat(tokenizer)) if tokenizer.chat_template else None
    last = tokenizer(end.learned, add_special_tokens=False)["input_ids"][-1] if end and end.learned else None
    return last if last in tokenizer.added_tokens_decoder else None


# ---- out


def save_pretrained(
    folder: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    source: str | Path,
    dtype: Any = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Writes a folder that transformers, vLLM and `load_pretrained` can load. It appears only when it is complete.

    Args:
      folder: The folder to write, which must not exist or must be empty.
      params: The parameters of the decoder, with layers stacked and without adapters (use `lora.merge`); or
        `heads.Headed`, which is written as a classifier with one label.
      config: The configuration of the decoder.
      source: The folder whose config.json, tokenizer, chat template and generation config are copied.
      dtype: The dtype of the tensors; None: the dtype of the parameters. In bfloat16 matrices are rounded
        stochastically: see `rounding`. Decay rates and norms of delta nets are always float32.
      max_shard_bytes: The size above which weights are split into several files; None: a sixteenth of all weights,
        within 64 MiB and 4 GiB. The tensors of a file are in memory while it is written, with some of the previous
        file's.

    Returns:
      The folder.

    Raises:
      UsageError: The folder is in use, or the parameters have adapters, are quantised or belong to another model.
    """
    decoder = params.decoder if isinstance(params, Headed) else params
    if isinstance(decoder, Adapted):
        raise UsageError("these parameters have adapters: save lora.merge of them, or peft.save_adapter")
    check_decoder(decoder)
    check_full_precision(decoder, "save the original ones, or quantised.dequantise_params of them")
    source = Path(source)
    dtype = np.dtype(dtype or decoder["embedding"].dtype)
    written = text_config(read_json(source / "config.json"))
    for name in ("quantization_config", "auto_map"):  # the folder has no code, which auto_map would name
        written.pop(name, None)
    if isinstance(params, Headed):
        written = _classifier_config(written)
    else:
        written["tie_word_embeddings"] = config.tie_word_embeddings  # the files of the source may have differed from it
    written |= {"torch_dtype" if "torch_dtype" in written else "dtype": dtype.name}
    if max_shard_bytes is None:
        total = sum(leaf.size for leaf in jax.tree.leaves(params)) * dtype.itemsize
        max_shard_bytes = min(max(total // 16, 2**26), 2**32)

    with complete_or_not_at_all(folder) as partial:
        copy_text_files(source, partial)
        write_model_json(partial / "config.json", written)
        with suppress(UsageError):  # a tokenizer that cannot be loaded is copied as it is
            _name_turn_end(partial)
        config = replace(config, model_type=written["model_type"])
        save_params(partial, params, config, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return Path(folder).expanduser()


def _name_turn_end(folder: Path) -> None:
    """Adds the end of a turn of the chat template to generation_config.json, so that other programs stop there too."""
    if not any("chat_template" in file.name or b'"chat_template"' in file.read_bytes() for file in folder.glob("*.j*")):
        return
    file, end = folder / "generation_config.json", _turn_end_id(load_tokenizer(folder))
    named = _eos_ids_in(file) if file.exists() else _eos_ids_in(folder / "config.json")
    if end is not None and end not in named:
        ids = sorted({end, *named} - {None}, key=int)  # type: ignore[arg-type]
        write_model_json(file, (read_json(file) if file.exists() else {}) | {"eos_token_id": ids})


def classifier_class(model_type: str) -> str:
    """Returns the name of the class in transformers for classifiers of a family.

    Raises:
      UsageError: The installed transformers has no such class, so no program could load the model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as names

    if model_type not in names:
        raise UsageError(f"transformers has no class for reward models of {model_type}: start from another family")
    return names[model_type]


def _classifier_config(written: dict[str, Any]) -> dict[str, Any]:
    """Changes the config.json of a decoder to that of a classifier with one label."""
    architectures = [classifier_class(written["model_type"])]
    one_label = {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return written | {"architectures": architectures, **one_label, "pad_token_id": classifier_padding(written)}


def classifier_padding(written: dict[str, Any]) -> int | None:
    """Returns the padding token of a classifier made from the config.json of a decoder.

    transformers reads the score at the last token that is not padding, and refuses batches without a padding token. If
    the decoder has none, it is the token that ends a text.
    """
    end, padding = written.get("eos_token_id"), written.get("pad_token_id")
    return (next(iter(end), None) if isinstance(end, list) else end) if padding is None else padding


@contextmanager
def complete_or_not_at_all(folder: str | Path) -> Iterator[Path]:
    """Provides a temporary folder to write to, which is renamed to `folder` at the end.

    Raises:
      UsageError: The folder exists and is not empty, or cannot be made.
    """
    folder = user_path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: name another folder to write to")
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    for left in (partial, *folder.parent.glob(f"{glob.escape(folder.name)}.partial-*")):  # left by a killed process
        if left == partial or not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    make_folder(partial)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    for file in partial.glob("*.safetensors"):  # readable only by their owner; a server may be another user
        file.chmod(next(partial.glob("*.json")).stat().st_mode)
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def files_of(folder: Path) -> list[str]:
    """Lists the files of a model's folder that a run depends on: weights, configurations, tokenizer, chat template."""
    patterns = [pattern for pattern in (*_TEXT_FILES, "*.safetensors") if not pattern.startswith("LICENSE")]
    return sorted(name for name in _names(folder) if any(fnmatchcase(name, pattern) for pattern in patterns))


def _names(folder: Path) -> list[str]:
    """Lists the files of a model's folder, and those chat templates that tokenizers read from a folder inside it."""
    files = [file for file in folder.iterdir() if file.is_file()]
    files += [file for file in (folder / "additional_chat_templates").glob("*.jinja") if file.is_file()]
    return [file.relative_to(folder).as_posix() for file in files]


def copy_text_files(source: Path, target: Path) -> None:
    """Copies the files of a model besides weights: configurations, tokenizer, chat template, licence.

    Raises:
      UsageError: A file is a link out of the folder. Its target may be private, and the copy may be published.
    """
    target.mkdir(parents=True, exist_ok=True)
    home = source.parents[1] if source.parent.name == "snapshots" else source  # links in the hub's cache stay inside
    for name in filter(is_copied, _names(source)):
        file = source / name
        # Links are allowed for these two files: loading has read them, and refuses files that do not belong to a model.
        if name not in ("config.json", "tokenizer.json") and not file.resolve().is_relative_to(home.resolve()):
            raise UsageError(f"{file} is a link to a file outside of the model's folder: put a copy in its place")
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target / name)


def is_copied(name: str) -> bool:
    """Returns whether a run and an export copy a file of this name from a model's folder."""
    return any(fnmatchcase(name, pattern) for pattern in _COPIED)
