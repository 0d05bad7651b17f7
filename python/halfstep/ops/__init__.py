"""The one door to the kernels: layouts, backend choice, schemas. Users call halfstep.optim, .scaler, .cast instead."""

from . import backend, schemas

__all__ = ["backend", "schemas"]
