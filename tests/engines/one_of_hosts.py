"""What a test starts on each of several hosts: a run whose servers sample alongside training."""

import sys
import traceback
from pathlib import Path

from grpo_jax import hosts

if __name__ == "__main__":
    address, count, index, folder, rank, *urls = sys.argv[1:]
    hosts.start(hosts.HostOptions(False, address, int(count), int(index)), print, print)
    from beside_runs import run_of  # which uses JAX, and JAX has to know the hosts before

    try:
        run_of(Path(folder), urls, 1, rank=int(rank), devices=0)
        hosts.gather("the end", None)
    except Exception as error:
        traceback.print_exc()
        hosts.leave(str(error), 1)
