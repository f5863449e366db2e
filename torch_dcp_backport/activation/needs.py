"""The packages that activation needs: each is checked before its first use, and imported nowhere else."""

from __future__ import annotations

from importlib import import_module

#: As in pyproject.toml. wrapt before 1.15 holds a lock of its own while it calls hooks, and ours import: two
#: threads could wait for each other. Version.major came with packaging 20.0.
LEAST = {"packaging": "20.0", "wrapt": "1.15.0"}


def require(name: str) -> None:
    """Raise ImportError, with what was found and what is wanted, unless the package is new enough."""
    least = LEAST[name]
    cause: Exception | None = None
    try:
        found = str(import_module(name).__version__)
        from packaging.version import Version

        if Version(found) >= Version(least):
            return
        state = f"{name} {found} is installed"
    except ImportError as error:
        cause, state = error, f"it cannot be imported ({error})"
    except Exception as error:  # a folder of that name, or a version that cannot be compared
        cause, state = error, f"it is not what is there ({type(error).__name__}: {error})"
    text = f"torch_dcp_backport needs {name} >= {least}, and {state}: pip install '{name}>={least}'"
    raise ImportError(text, name=name) from cause
