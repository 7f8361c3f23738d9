"""Configuration of an elastic worker, which changes its role between prefill and decode."""

from baton.decode_worker.config import DecodeConfig
from baton.prefill_worker.config import PrefillConfig
from baton.process.config import Field
from baton.process.registry.worker_record import WorkerRole


class ElasticConfig(PrefillConfig, DecodeConfig):
    """Settings of a worker that serves as a prefill or decode worker and changes its role on a router's command."""

    role: WorkerRole = Field(description="First role: prefill or decode.")
    role_drain_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Longest drain before a change of role, in seconds; if it takes longer, the worker keeps its role.",
    )
