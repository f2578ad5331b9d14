"""The part of `Options` that is about HTTP: who may ask, from where, how much, over TLS or not, and until when.

Names are vLLM's where vLLM has them. One difference on purpose: no origin is allowed unless it is named, so that a
page in somebody's browser cannot use a service that is meant for the machine it runs on.
"""

import argparse
import json
import math
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from server.http.key_file import read_keys
from server.options.checks import OptionsError, parse_bytes, parse_strings

MAX_REQUEST_BYTES = 32 << 20
SHUTDOWN_TIMEOUT_S = 25.0  # torchrun and Kubernetes kill 30 s after they asked


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What the user asked for; the defaults are those of the command line."""

    api_key_file: str | None = None  # one key per line
    allowed_origins: tuple[str, ...] = ()  # of pages in browsers; empty: CORS is off
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_request_bytes: int = MAX_REQUEST_BYTES
    root_path: str = ""  # what a proxy in front of us adds to paths
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S  # for open requests, after SIGTERM

    @property
    def scheme(self) -> str:
        """What URLs begin with."""
        return "https" if self.ssl_certfile else "http"


def add_http_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the endpoint's flags."""
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names that requests may use for the model; the first is shown (default: MODEL's)",
    )
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require this bearer key; may be repeated. Others on the machine can read a command line: prefer "
        "--api-key-file, or keys in the variable WIDEEP_API_KEY",
    )
    add(
        "--api-key-file",
        metavar="FILE",
        help="require a key of this file too: one per line, # begins a comment; read again when it changes",
    )
    _add_limit_arguments(group)
    _add_cors_arguments(group)
    _add_tls_arguments(group)


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-request-bytes",
        default="32M",
        metavar="BYTES",
        help="longest body that is read, e.g. 512K or 64M; longer ones are a 413 (default: %(default)s)",
    )
    add(
        "--shutdown-timeout-seconds",
        "--shutdown-timeout",
        type=float,
        default=SHUTDOWN_TIMEOUT_S,
        metavar="SECONDS",
        help="how long open requests may go on after SIGTERM; 0 ends them at once (default: %(default)s)",
    )


def _add_cors_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--allowed-origins",
        default="[]",
        metavar="JSON",
        help="""origins whose pages may use the service from a browser, such as '["https://chat.example"]' or """
        """'["*"]' (default: none)""",
    )
    add("--allowed-methods", default='["*"]', metavar="JSON", help="for those pages (default: %(default)s)")
    add("--allowed-headers", default='["*"]', metavar="JSON", help="for those pages (default: %(default)s)")
    add("--allow-credentials", action="store_true", help="let those pages send cookies and the like")
    add("--enable-request-id-headers", action="store_true", help="nothing to enable: answers always have one")


def _add_tls_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="its key, where the certificate's file does not hold it")
    add(
        "--root-path",
        default="",
        metavar="PATH",
        help="path under which a proxy shows the service, e.g. /llm",
    )


def http_options_from(args: argparse.Namespace) -> HttpOptions:
    """Validate the parsed flags, and read once what files they name.

    Raises:
        OptionsError: naming the flag, the value seen and the values allowed.
    """
    timeout_s = args.shutdown_timeout_seconds
    if not (timeout_s >= 0 and math.isfinite(timeout_s)):
        raise OptionsError(f"--shutdown-timeout-seconds is {timeout_s}; it must be 0 or more seconds")
    options = HttpOptions(
        api_key_file=args.api_key_file,
        allowed_origins=parse_strings(args.allowed_origins, "--allowed-origins"),
        allowed_methods=parse_strings(args.allowed_methods, "--allowed-methods"),
        allowed_headers=parse_strings(args.allowed_headers, "--allowed-headers"),
        allow_credentials=args.allow_credentials,
        max_request_bytes=parse_bytes(args.max_request_bytes, "--max-request-bytes"),
        root_path=_root_path(args.root_path),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        shutdown_timeout_s=timeout_s,
    )
    if options.api_key_file is not None:
        read_keys(Path(options.api_key_file))
    _check_certificate(options)
    return options


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if path and not path.startswith("/"):
        raise OptionsError(f"--root-path is {text!r}; it must begin with / as in /llm")
    return path


def _check_certificate(options: HttpOptions) -> None:
    """Load the certificate now: a service that cannot use it should not have loaded a model first."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise OptionsError("--ssl-keyfile needs a certificate: give --ssl-certfile too")
        return
    for flag, name in (("--ssl-certfile", options.ssl_certfile), ("--ssl-keyfile", options.ssl_keyfile)):
        if name is not None and not Path(name).is_file():
            raise OptionsError(f"{flag} is {name!r}, which is not a file")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # With a password at hand OpenSSL does not ask the terminal for one.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        raise OptionsError(
            f"--ssl-certfile {options.ssl_certfile!r} cannot be used: {error}; it must be a certificate in PEM form "
            "and --ssl-keyfile its key, without a password"
        ) from error


def http_arguments(options: HttpOptions) -> list[str]:
    """Write options as flags that parse back to the same value."""
    flags = {
        "--api-key-file": options.api_key_file,
        "--allowed-origins": _json(options.allowed_origins),
        "--allowed-methods": _json(options.allowed_methods),
        "--allowed-headers": _json(options.allowed_headers),
        "--max-request-bytes": options.max_request_bytes,
        "--root-path": options.root_path,
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-certfile": options.ssl_certfile,
        "--shutdown-timeout-seconds": options.shutdown_timeout_s,
    }
    arguments = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    return [*arguments, "--allow-credentials"] if options.allow_credentials else arguments


def _json(strings: Iterable[str]) -> str:
    return json.dumps(list(strings))
