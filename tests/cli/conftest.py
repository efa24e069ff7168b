"""Models for the command line to find, and the command line as a function."""

from dataclasses import dataclass

import pytest

from tests.cli.installed import install
from unimem_jax.cli import main


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory):
    """A folder with the distribution of the tiny models."""
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def models(models_folder, monkeypatch):
    """The tiny models, installed for one test."""
    monkeypatch.syspath_prepend(models_folder)


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def unimem(models, capsys):
    """Runs the command line in this process, which keeps its JAX configuration."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return run
