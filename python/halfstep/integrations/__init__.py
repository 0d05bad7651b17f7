"""halfstep inside other libraries, through what they offer for that. Nothing here imports them before it is called."""

from . import transformers

__all__ = ["transformers"]
