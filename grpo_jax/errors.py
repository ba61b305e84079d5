"""What a user can mend."""

from importlib.util import find_spec


class UsageError(ValueError):
    """An option, a file or a task that cannot work, in one sentence that says what to change.

    Programs print it without a traceback; any other error is a defect and keeps its own.
    """


def missing(package: str | None) -> ImportError:
    """What to raise where a package of the extra `train` cannot be imported."""
    return ImportError(
        f"this part of grpo_jax needs the package {package}: pip install 'grpo_jax[train]'", name=package
    )


def need(*packages: str) -> None:
    """Refuses to go on without packages of the extra `train`.

    Raises:
      ImportError: one of them is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise missing(package)
