"""Program for `torchrun --no-python` in tests of server.serve.store.rendezvous. It prints this worker's rank and whether it
is on the front's node, in one write, so that the lines of several workers do not mix."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from server.serve.store.rendezvous import find_agent, front_host, place_from

place = place_from()
host = front_host(place, find_agent())
os.write(
    1, f"rank={place.rank} local_rank={place.local_rank} node={os.environ['NODE']} host={host}\n".encode()
)
