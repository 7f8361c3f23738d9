"""How a client's channel is set up, sync and async alike."""

from client.options import GenerateOptions

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_ADMIN_TARGET = "127.0.0.1:50052"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

# The ping interval stays well above the server's limit of 10 s, past which it would drop the connection. A connection
# that was refused is tried again soon, so that the client's own retries find a server that has just come up.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def metadata_from(options: GenerateOptions) -> tuple[tuple[str, str], ...]:
    traceparent, api_key = options.get("traceparent"), options.get("api_key")
    told = (("traceparent", traceparent), ("authorization", f"Bearer {api_key}" if api_key else None))
    return tuple((key, value) for key, value in told if value)
