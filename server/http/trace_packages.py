"""Whether OpenTelemetry's packages, which are optional, are there: asked before anything else starts."""

import importlib.util
from collections.abc import Mapping

from server.options.checks import OptionsError

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # OpenTelemetry's own
_EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}  # protocol -> the last word of its package


def check_traces(environment: Mapping[str, str]) -> str:
    """Return the protocol that the environment asks for, after a check that spans can be sent with it.

    Raises:
        OptionsError: naming the missing package, or the protocol that is none.
    """
    protocol = environment.get(PROTOCOL_VARIABLE, "grpc")
    if protocol not in _EXPORTERS:
        raise OptionsError(f"{PROTOCOL_VARIABLE} is {protocol!r}; it must be one of {', '.join(_EXPORTERS)}")
    word = _EXPORTERS[protocol]
    for module, package in (
        ("opentelemetry.sdk", "opentelemetry-sdk"),
        (f"opentelemetry.exporter.otlp.proto.{word}", f"opentelemetry-exporter-otlp-proto-{word}"),
    ):
        if not _is_installed(module):
            raise OptionsError(
                f"--otlp-traces-endpoint needs the package {package}, which is not installed: "
                "pip install 'wideep[otel]'"
            )
    return protocol


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
