"""Run as a program: quantizes a folder, or scans one, and kills itself (-9) while it writes the n-th file."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.model import load_model
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.models.quantization import scan, work_folder
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS

TOKENS = torch.arange(120).view(4, 30) * 7 % 61


def main(source: str, out: str, method: str, saves: int) -> None:
    """saves: how many files of tensors are begun (of the method "scan": files of JSON); the last is half written."""
    left = [saves]

    def dies(file: Path) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    save, place = work_folder.save_file, work_folder._place

    def dying_save(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save(tensors, file, metadata=metadata)
        dies(file)

    def dying_place(new: Path, file: Path) -> None:
        dies(new)
        place(new, file)

    if method == "scan":
        work_folder._place = dying_place
        plain = UnquantizedLinear(torch.float32, torch.device("cpu"))
        load: Any = partial(load_model, Path(source), torch.float32, linear_method=plain)
        scan.scan_folder(Path(source), Path(out), load, TOKENS[:2], METHODS["rtn"], ["int4", "int8"])
    work_folder.save_file = dying_save
    quantize_folder(Job(Path(source), Path(out), METHODS[method], TOKENS))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
