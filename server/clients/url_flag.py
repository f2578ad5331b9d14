"""The arguments for a running service's URL and for one of its pools. It has no heavy imports, because `wideep --help` needs it."""

import argparse

DEFAULT_URL = "http://127.0.0.1:8000"


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add URL to a command's parser, as a positional argument and as `--url URL`; both set `url`."""
    parser.add_argument(
        "url", nargs="?", default=argparse.SUPPRESS, metavar="URL",
        help=f"URL of the service, or unix:PATH of its --uds (default: {DEFAULT_URL})",
    )  # fmt: skip
    parser.add_argument("--url", dest="url", default=DEFAULT_URL, metavar="URL", help="the same as URL")


def add_pool(parser: argparse.ArgumentParser) -> None:
    """Add `--pool NAME` to a command's parser."""
    parser.add_argument("--pool", metavar="NAME", help="pool of a service with --pools (default: the first)")


def pool_query(args: argparse.Namespace) -> dict[str, str] | None:
    """Return the query parameters that choose the pool of `add_pool`, or None without a choice."""
    return None if args.pool is None else {"pool": args.pool}
