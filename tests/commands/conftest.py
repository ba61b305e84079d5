"""The inputs that tests of commands share."""

import pytest
from command_helpers import write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """The folder of `write_inputs`. Tests leave its files as they are."""
    return write_inputs(tmp_path_factory.mktemp("commands"))


@pytest.fixture
def folder(inputs, monkeypatch):
    """The folder of inputs, which is the working directory."""
    monkeypatch.chdir(inputs)
    return inputs
