"""Which GPU a worker computes on, in words that mean the same to every process of a machine."""

import torch


def gpu_id(device: torch.device) -> str:
    """Its UUID; empty on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
