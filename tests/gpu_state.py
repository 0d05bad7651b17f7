"""`make gpu`'s first step: prints the GPU's state and fails with one sentence if there is no usable GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys

from halfstep.doctor import gpu_sentence


def main() -> int:
    import torch

    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)
    print(f"GPU: {gpu_sentence()}")
    if not torch.cuda.is_available():
        print("make gpu needs a machine with a GPU and a torch built for it; nothing was run.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
