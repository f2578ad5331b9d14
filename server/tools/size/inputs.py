"""Checks of `wideep size` and `wideep simulate` before they import torch: the model and the device exist.

A model is a directory, a config.json, "demo", or a hub name, for which only config.json is downloaded.
"""

import argparse
from pathlib import Path

from server.options.flag import OptionsError
from server.options.reading import nearest
from server.serve.preflight.model import PreflightError, resolve_config
from server.tools.size.costs.devices import NAMES


def resolve_inputs(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with `model` as an existing path.

    Raises:
        OptionsError: The model cannot be found or downloaded, or the device is unknown.
    """
    if args.device is not None and args.device not in NAMES:
        raise OptionsError(
            f"--device is {args.device!r}{nearest(args.device, NAMES)}; known devices are {', '.join(NAMES)}"
        )
    if args.model is None or args.model.exists():
        return args
    try:
        return argparse.Namespace(**{**vars(args), "model": Path(resolve_config(str(args.model)))})
    except PreflightError as error:
        raise OptionsError(str(error)) from error
