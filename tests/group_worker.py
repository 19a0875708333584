"""One process of distributed runs; see test_distributed.py."""

import torch

from . import ep_worker, svi_worker

KINDS = {"ep": ep_worker, "svi": svi_worker}


def run(job, rank=0, world=1, group=None):
    """All processes start from the first one's parameters."""
    kind, mode = job.split("-")
    return KINDS[kind].run(KINDS[kind].share(rank, world, mode), mode, group, start=0.3 * rank)


def work(rank, world, file, jobs):
    """A share of the data for each job, and its result to FILE.RANK.JOB."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        for job in jobs:
            torch.save(run(job, rank, world, torch.distributed.group.WORLD), f"{file}.{rank}.{job}")
    finally:
        torch.distributed.destroy_process_group()
