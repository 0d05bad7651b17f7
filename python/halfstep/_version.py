"""The one place where the version is written; pyproject.toml and `halfstep.__version__` read it."""

__version__ = "0.1.0.dev0"
