"""The processes of a run: those that ``torchrun`` has started, or this one alone."""

from __future__ import annotations

import gc
import importlib
import os
import time
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Processes:
    """Which of them this is, how many there are, and the device of this one."""

    rank: int
    world: int
    device: torch.device

    def wait(self) -> None:
        """Wait until all of them have come here."""
        if self.world > 1:
            distributed.barrier()


def join() -> Processes:
    """Join the group of ``torchrun``, unless that has been done; one process has none."""
    rank, world = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    cuda = torch.cuda.is_available()
    if world == 1:
        return Processes(0, 1, torch.device("cuda" if cuda else "cpu"))
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        # Its functions keep the group that exists when it is imported as their default, and a
        # group that is kept never ends its threads: see `leave`.
        importlib.import_module("torch.distributed.nn")
        backend, own = ("nccl", device) if cuda else ("gloo", None)
        distributed.init_process_group(backend, device_id=own)
    return Processes(rank, world, device)


def leave() -> None:
    """Leave the group that :func:`join` may have joined.

    gloo's threads let go of the tensors of the last exchange a moment after it; an interpreter that
    ends in that moment is aborted. A group that nobody holds waits for its threads; a sharded model
    holds its group, so there they get time.
    """
    if distributed.is_available() and distributed.is_initialized():
        gc.collect()
        distributed.destroy_process_group()
        time.sleep(0.2)
