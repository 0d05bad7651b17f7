"""torch's multi-tensor calls under plain names: they are what its users write, though not what type checkers export."""

from typing import Any

import torch

_torch: Any = torch

add_ = _torch._foreach_add_
copy_ = _torch._foreach_copy_
norms = _torch._foreach_norm
unscale_ = _torch._amp_foreach_non_finite_check_and_unscale_
