"""gRPC settings that both ends of a rank's stream share.

A dead process closes its connection at once; keep-alive pings are for a host or a cable that
vanished silently, and patient, because a machine with too few cores may leave a process without time for seconds.
"""

METADATA_KEY = "authorization"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 256 << 20),  # bytes; a prompt of a million tokens takes about 4 MB
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.enable_http_proxy", 0),  # ranks are reached directly, whatever http_proxy says
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # an end that gets pings without data never hangs up for it
    ("grpc.so_reuseport", 0),  # two fronts must not share one port unnoticed
)


def bearer(token: str) -> str:
    """Return the metadata value that carries `token`."""
    return f"Bearer {token}"
