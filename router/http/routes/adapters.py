"""Routes that load and unload LoRA adapters, as in vLLM: POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from baton.router.dispatcher import Dispatcher
from baton.router.http.edge.exchange import FullReply, Reply
from baton.router.http.messages import LoadAdapterRequest, UnloadAdapterRequest
from baton.router.http.requests import HttpCall

TEXT = "text/plain; charset=utf-8"


async def load_adapter(dispatcher: Dispatcher, message: LoadAdapterRequest, call: HttpCall) -> Reply:
    """Load an adapter. It is loaded on all workers or on none. Raises: BatonError."""
    await dispatcher.load_adapter(message.lora_name, message.lora_path, bool(message.load_inplace))
    return FullReply(f"Success: LoRA adapter '{message.lora_name}' added successfully.".encode(), media_type=TEXT)


async def unload_adapter(dispatcher: Dispatcher, message: UnloadAdapterRequest, call: HttpCall) -> Reply:
    """Unload an adapter: new requests for it are rejected, running requests complete. Raises: BatonError."""
    await dispatcher.unload_adapter(message.lora_name, 0.0)
    return FullReply(f"Success: LoRA adapter '{message.lora_name}' removed successfully.".encode(), media_type=TEXT)
