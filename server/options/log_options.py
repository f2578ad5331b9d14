"""The part of `Options` that is about logs and traces. Names are vLLM's where vLLM has them."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from server.http.trace_packages import check_traces
from server.options.checks import OptionsError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error", "critical")
QUIET_PATHS = ("/health", "/metrics", "/ping")  # asked every few seconds, by machines


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What the user asked for; the defaults are those of the command line."""

    format: str = "text"  # one of FORMATS
    level: str = "info"  # one of LEVELS
    requests: bool = False  # also log prompts and parameters
    access: bool = True  # log a line per answered HTTP request
    quiet_paths: tuple[str, ...] = QUIET_PATHS  # no such line for these
    otlp_endpoint: str | None = None  # where spans go


def add_log_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        "--log-format", choices=FORMATS, default="text", help="of access and error log (default: %(default)s)"
    )
    add("--log-level", choices=LEVELS, default="info", help="least that is logged (default: %(default)s)")
    add(
        "--log-requests",
        "--enable-log-requests",
        dest="log_requests",
        action="store_true",
        help="log every request's prompt and parameters, which is off by default",
    )
    add(
        "--disable-log-requests",
        dest="log_requests",
        action="store_false",
        help="do not (the default, for scripts that say so)",
    )
    add(
        "--disable-access-log",
        "--disable-uvicorn-access-log",
        dest="access_log",
        action="store_false",
        help="no line per answered HTTP request",
    )
    add(
        "--disable-access-log-for-endpoints",
        default=",".join(QUIET_PATHS),
        metavar="PATHS",
        help="none for these paths, separated by commas (default: %(default)s)",
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send one OpenTelemetry span per request there, e.g. http://127.0.0.1:4317; needs wideep[otel]",
    )


def log_options_from(args: argparse.Namespace, environment: Mapping[str, str]) -> LogOptions:
    """Validate the parsed flags.

    Raises:
        OptionsError: naming the flag, the value seen and the values allowed.
    """
    paths = [path.strip() for path in args.disable_access_log_for_endpoints.split(",")]
    for path in paths:
        if path and not path.startswith("/"):
            raise OptionsError(
                f"--disable-access-log-for-endpoints has {path!r}; give paths such as /health,/metrics"
            )
    endpoint = args.otlp_traces_endpoint
    if endpoint is not None:
        if not endpoint.startswith(("http://", "https://")):
            raise OptionsError(
                f"--otlp-traces-endpoint is {endpoint!r}; give a URL such as http://127.0.0.1:4317"
            )
        check_traces(environment)
    return LogOptions(
        format=args.log_format,
        level=args.log_level,
        requests=args.log_requests,
        access=args.access_log,
        quiet_paths=tuple(path for path in paths if path),
        otlp_endpoint=endpoint,
    )


def log_arguments(options: LogOptions) -> list[str]:
    """Write options as flags that parse back to the same value."""
    arguments = [
        f"--log-format={options.format}",
        f"--log-level={options.level}",
        f"--disable-access-log-for-endpoints={','.join(options.quiet_paths)}",
    ]
    arguments += ["--log-requests"] if options.requests else []
    arguments += [] if options.access else ["--disable-access-log"]
    return arguments + (
        [] if options.otlp_endpoint is None else [f"--otlp-traces-endpoint={options.otlp_endpoint}"]
    )
