"""How many bytes of KV a device can spare beside the weights and what a step needs."""

import os

import torch

from engine.model_config import ModelConfig, ModelError

CPU_KV_BYTES = 1 << 30
CPU_KV_SHARE = 0.25
LOGITS_COPIES = 4  # float32 logits, and what sampling makes of them


def default_kv_bytes(
    device: torch.device, config: ModelConfig, weights: int, step_tokens: int, sequences: int, utilization: float
) -> int:
    """On CPU at most 1 GiB or a quarter of the memory; on a GPU what `utilization` leaves beside all else.

    Raises: ModelError, naming the amounts, where nothing is left.
    """
    if device.type == "cpu":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(CPU_KV_BYTES, int(memory_bytes * CPU_KV_SHARE))
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    step_bytes = activation_bytes(config, step_tokens, sequences)
    left = int(total * utilization) - used - weights - step_bytes
    if left <= 0:
        needed = (used + weights + step_bytes) / total
        raise ModelError(
            f"gpu_memory_utilization {utilization} of {total} bytes leaves no room for KV: {used} are in use, the "
            f"weights take {weights} and a step up to {step_bytes}; it would have to be above {needed:.3f}"
        )
    return left


def activation_bytes(config: ModelConfig, step_tokens: int, sequences: int) -> int:
    """An upper estimate of what one step allocates, in float32 throughout."""
    per_token = 4 * config.hidden_size + 3 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    return 4 * (step_tokens * per_token + LOGITS_COPIES * sequences * config.vocab_size)
