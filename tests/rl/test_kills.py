"""Runs of every kind that are killed at random end with the same bytes. `kills.py` makes more of them, with a tally."""

import json

import kills
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    kills.prepare(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2 * len(kills.RUNS)))
def test_a_run_that_is_killed_at_random_ends_with_the_same_bytes(folder, number):
    result = kills.case(folder, number)
    assert kills.is_same(result), json.dumps(result, indent=1)
