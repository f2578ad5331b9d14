"""Stands in for torchrun where a test is about its being killed: starts the workers as torchrun does (a session
each, the same variables, no death signal), forwards SIGTERM and waits. Loads in a tenth of torch's time."""

import argparse
import os
import signal
import subprocess


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--log-dir")
    parser.add_argument("--no-python", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    size = str(args.nproc_per_node)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    workers = [
        subprocess.Popen(
            args.no_python,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(args.nproc_per_node)
    ]

    def forward(*_: object) -> None:
        for worker in workers:
            worker.terminate()

    signal.signal(signal.SIGTERM, forward)
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    main()
