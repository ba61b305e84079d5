"""Options as data: ranges in their types, and the groups that methods share."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, get_args

import pytest
from tiny import refused

from grpo_jax.config import GRPOConfig, PPOConfig, with_options
from grpo_jax.offline.phase import SupervisedConfig, check_supervised
from grpo_jax.options import (
    FINITE,
    Bound,
    Count,
    Fraction,
    Positive,
    Range,
    Seed,
    Share,
    Size,
    Weight,
    at_least,
    check_number,
    check_ranges,
    option_types,
)
from grpo_jax.tasks.options import TaskOptions

TYPES = {
    "Count": (Count, [0, 3, 2**31 - 1], {-1: "at least 0", 2**31: r"below 2\^31", 10**30: r"below 2\^31"}),
    "Size": (Size, [1, 2**31 - 1], {0: "at least 1", 2**31: r"below 2\^31"}),
    "Seed": (Seed, [0, 2**32 - 1], {-1: r"between 0 and 2\^32 - 1", 2**32: "between 0 and"}),
    "Weight": (Weight, [0.0, 1e30], {-0.1: "at least 0", math.inf: "finite", math.nan: "at least 0"}),
    "Positive": (Positive, [1e-30, 10**400], {0.0: "above 0", math.inf: "finite", math.nan: "above 0"}),
    "Bound": (Bound, [1e-30, math.inf], {0.0: "above 0", math.nan: "above 0"}),
    "Fraction": (Fraction, [0, 0.5, 1.0], {-0.1: "between 0 and 1", 1.1: "between 0 and 1", math.nan: "between"}),
    "Share": (Share, [0.1, 1], {0.0: "above 0", 1.1: "at most 1", math.nan: "above 0"}),
    "optional": (Size | None, [None, 1], {0: "at least 1"}),
    "several": (Annotated[float, at_least(-1), FINITE, Range(lambda x: x != 0, "not 0")], [-1.0, 1.0], {0.0: "not 0"}),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_number_is_in_all_ranges_of_its_type_or_refused_in_a_sentence(name):
    hint, good, bad = TYPES[name]
    for value in good:
        check_number("some_option", value, hint)
    for value, words in bad.items():
        with refused(f"^some_option is {re.escape(str(value))}: it must be {words}"):
            check_number("some_option", value, hint)


@dataclass(frozen=True)
class Inner:
    """A group."""

    share: Share | None = None


@dataclass(frozen=True)
class Outer:
    """A command's options."""

    inner: Inner = Inner()
    size: Size = 1
    name: str = ""


def test_options_of_all_groups_are_checked():
    check_ranges(Outer())
    check_ranges(Outer(Inner(0.5)))
    with refused("share is 2: it must be at most 1"):
        check_ranges(Outer(Inner(2)))
    with refused("size is 0"):
        check_ranges(Outer(size=0))


@pytest.mark.parametrize("config", [PPOConfig, SupervisedConfig, TaskOptions])
def test_every_number_declares_a_range(config):
    """A spread of temperatures is checked together with the temperature."""
    plain, annotated = option_types(config), option_types(config, include_extras=True)
    numbers = {name for name, hint in plain.items() if {int, float} & {hint, *get_args(hint)}}
    assert len(numbers) >= 5
    assert {name for name in numbers if annotated[name] == plain[name]} <= {"temperature_spread"}


def test_defaults_are_in_their_ranges():
    for config in (GRPOConfig(), PPOConfig(), SupervisedConfig(), TaskOptions()):
        check_ranges(config)


def test_a_phase_on_data_is_checked_by_the_same_ranges():
    config = SupervisedConfig(4, 1e-2, devices=1)
    assert (config.steps, config.learning_rate) == (4, 1e-2)
    check_supervised(config, seed=0, rows=8, name="num_rows")
    for option, value in {"steps": 0, "weight_decay": -1.0, "max_grad_norm": math.nan, "log_every": 0}.items():
        with refused(f"^{option} is {value}: it must be "):
            check_supervised(with_options(config, **{option: value}), seed=0, rows=8, name="num_rows")
    with refused("seed is -1"):
        check_supervised(config, seed=-1, rows=8, name="num_rows")
