"""The argument for a running service's URL. It has no heavy imports, because `wideep --help` needs it."""

import argparse

DEFAULT_URL = "http://127.0.0.1:8000"


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add URL to a command's parser, as a positional argument and as `--url URL`; both set `url`."""
    parser.add_argument(
        "url", nargs="?", default=argparse.SUPPRESS, metavar="URL",
        help=f"URL of the service, or unix:PATH of its --uds (default: {DEFAULT_URL})",
    )  # fmt: skip
    parser.add_argument("--url", dest="url", default=DEFAULT_URL, metavar="URL", help="the same as URL")
