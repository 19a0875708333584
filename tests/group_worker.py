"""One process of distributed runs; see test_distributed.py.

python -m tests.group_worker RANK WORLD FILE JOBS: a share of the data for each job, and its result to FILE.RANK.JOB.
"""

import sys

import torch

from . import ep_worker, svi_worker

KINDS = {"ep": ep_worker, "svi": svi_worker}


def run(job, rank=0, world=1, group=None):
    """All processes start from the first one's parameters."""
    kind, mode = job.split("-")
    return KINDS[kind].run(KINDS[kind].share(rank, world, mode), mode, group, start=0.3 * rank)


def work(rank, world, file, jobs):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        for job in jobs:
            torch.save(run(job, rank, world, torch.distributed.group.WORLD), f"{file}.{rank}.{job}")
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
