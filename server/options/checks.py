"""Checks of options against the machine: files of keys, certificates, optional packages."""

import importlib.util
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

from server.options.flag import OptionsError

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # defined by OpenTelemetry
_EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}  # protocol -> the last part of its package's name


def check_key(name: str, key: str) -> None:
    """Refuse a key that a header cannot carry.

    Raises:
        OptionsError: The key is empty or contains white space.
    """
    if key.split() != [key]:
        raise OptionsError(f"{name} is empty or contains white space; give a key without white space")


def read_keys(path: Path, name: str = "--api-key-file") -> tuple[str, ...]:
    """Read a file of keys: one per line; empty lines and lines that begin with # are skipped.

    Raises:
        OptionsError: The file cannot be read, or a line is not a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"{name} {str(path)!r} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    for number, key in enumerate(keys, start=1):
        if key.split() != [key]:
            raise OptionsError(f"{name} {str(path)!r}: key {number} contains white space; give one per line")
    return tuple(keys)


MIN_KEY_BYTES = 32


def read_cluster_key(path: Path) -> bytes:
    """Read the secret that all nodes of a service share.

    Raises:
        OptionsError: The file cannot be read, its key is too short, or other users can access it.
    """
    name = f"--cluster-key-file {str(path)!r}"
    try:
        key, status = path.read_bytes().strip(), path.stat()
    except OSError as error:
        raise OptionsError(f"{name} cannot be read: {error.strerror}") from error
    if status.st_mode & 0o077:
        raise OptionsError(
            f"{name} is accessible to other users (mode {stat.S_IMODE(status.st_mode):o}); run chmod 600 on it"
        )
    if len(key) < MIN_KEY_BYTES:
        raise OptionsError(
            f"{name} has {len(key)} bytes; a key needs at least {MIN_KEY_BYTES}: make one with `openssl rand -hex 32`"
        )
    return key


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Load a certificate now, so that an unusable one fails before the model is loaded.

    Raises:
        OptionsError: A file is missing or invalid.
    """
    if certfile is None:
        if keyfile is not None:
            raise OptionsError("--ssl-keyfile needs a certificate: give --ssl-certfile too")
        return
    for flag, name in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if name is not None and not Path(name).is_file():
            raise OptionsError(f"{flag} is {name!r}, which is not a file")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # With a password given, OpenSSL does not prompt for one on the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        raise OptionsError(
            f"--ssl-certfile {certfile!r} cannot be used: {error}; give a certificate in PEM format "
            "and its key as --ssl-keyfile, without a password"
        ) from error


def check_traces(environment: Mapping[str, str]) -> str:
    """Return the trace protocol that the environment selects, after checking that its exporter is installed.

    Raises:
        OptionsError: A package is missing, or the protocol is unknown; the message names it.
    """
    protocol = environment.get(PROTOCOL_VARIABLE, "grpc")
    if protocol not in _EXPORTERS:
        raise OptionsError(f"{PROTOCOL_VARIABLE} is {protocol!r}; it must be one of {', '.join(_EXPORTERS)}")
    ending = _EXPORTERS[protocol]
    for module, package in (
        ("opentelemetry.sdk", "opentelemetry-sdk"),
        (f"opentelemetry.exporter.otlp.proto.{ending}", f"opentelemetry-exporter-otlp-proto-{ending}"),
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
    except ModuleNotFoundError:  # a parent package is missing
        return False
