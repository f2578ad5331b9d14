"""`wideep models`: which model types of the installed transformers are supported, and why others are not."""

import argparse
import sys
from collections import Counter

import transformers
from transformers.utils import logging

from moe.survey import SupportStatus, Verdict, moe_types, survey
from server.front.images.seeing import IMAGE_TYPES
from server.options.reading import nearest


def _about_images(verdict: Verdict) -> str:
    """Return whether a model with an image tower takes images; empty for a model without one."""
    if verdict.status is not SupportStatus.TEXT_PART:
        return ""
    if verdict.model_type in IMAGE_TYPES:
        return "and images"
    return "no images: this type was not checked with images"


def run_models(args: argparse.Namespace) -> int:
    """Print a line for each type as it is checked, and a summary; return the exit status.

    The status is 2 if a given type is unknown or has no experts, 1 if a given type is refused, and 0 otherwise.
    """
    logging.set_verbosity_error()
    known = moe_types()
    unknown = sorted(set(args.types) - set(known))
    if unknown:
        named = ", ".join(f"{name}{nearest(name, known)}" for name in unknown)
        print(
            f"wideep models: {named}: transformers {transformers.__version__} has no such type with experts; "
            f"`wideep models` lists all {len(known)}",
            file=sys.stderr,
        )
        return 2
    wanted = args.types or known
    width, counts = max(map(len, wanted)), Counter[SupportStatus]()
    for verdict in survey(wanted):
        counts[verdict.status] += 1
        why = verdict.why or _about_images(verdict)
        print(f"{verdict.model_type:{width}}  {verdict.status:9}  {why}".rstrip(), flush=True)
    if not args.types:
        told = ", ".join(f"{counts[status]} {status}" for status in SupportStatus)
        print(f"\ntransformers {transformers.__version__}, {len(wanted)} types with experts: {told}")
    return int(bool(args.types) and counts[SupportStatus.REFUSED] > 0)
