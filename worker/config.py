"""Configuration of a worker that can change its role: that of both roles, and which one comes first."""

from baton.service.config import Field
from baton.service.registry.worker_record import WorkerRole
from baton.worker.decode.config import DecodeConfig
from baton.worker.prefill.config import PrefillConfig


class ElasticConfig(PrefillConfig, DecodeConfig):
    """Serves as a prefill or a decode worker, and changes when a router says so."""

    role: WorkerRole = Field(description="first role: prefill or decode")
    role_drain_s: float = Field(
        60.0, gt=0, le=3600, description="longest drain before a change of role; after it, the worker keeps its role"
    )
