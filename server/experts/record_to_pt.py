"""Convert a recorded load to the .pt file of SGLang's recorder: python record_to_pt.py RECORD.json RECORD.pt.

This is a separate script, because it needs torch and the front does not. Format (SGLang, `stat` mode): a dict of `rank`,
`logical_count` [steps, layers, experts] int32 and `average_utilization_rate_over_window`.
"""

import json
import sys
from pathlib import Path

import torch


def main(source: str, target: str) -> None:
    """Convert one file."""
    record = json.loads(Path(source).read_text())
    record["logical_count"] = torch.tensor(record["logical_count"], dtype=torch.int32)
    torch.save(record, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
