"""Two processes that can talk to each other, for what only several can do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_two_ranks(work: Callable[[int], Any], folder: Path) -> Any:
    """What `work(0)` returns, while a second process runs `work(1)`; both are in one gloo group."""
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    ranks = [fork.Process(target=_rank, args=(work, rank, folder / "store", answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return answers.get()


def _rank(work: Callable[[int], Any], rank: int, store: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    answer = work(rank)
    if rank == 0:
        answers.put(answer)
    dist.destroy_process_group()
