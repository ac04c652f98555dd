"""Which kernels serve which device. Layer 3; loads triton only when a device needs it."""

from __future__ import annotations

import torch

from pdkv.errors import ConfigError
from pdkv.interfaces import CopyKernels
from pdkv.kernels.cpu import CpuKernels

__all__ = ["kernels_for"]


def kernels_for(*devices: torch.device | str) -> CopyKernels:
    """Kernels for tensors on these devices: the CPU's when all are "cpu", else Triton's.

    They run on the current stream of the device. ConfigError where triton is needed and missing.
    """
    accelerators = [d for d in map(_device, devices) if d.type != "cpu"]
    if not accelerators:
        return CpuKernels()
    from pdkv.kernels.triton import TritonKernels

    return TritonKernels(accelerators[0])


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(str(error).split(".")[0]) from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"no kernels for device {str(found)!r}, only for cpu and cuda")
    return found
