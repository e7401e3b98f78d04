"""Collectives write to their arguments, which neither their schemas nor version counters say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.recompute.helpers import default_loss, results, same, script
from tests.several import on_two_ranks
from torch import nn

from holdover.recompute.apply import install


def all_reduce(y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(y.detach())
    return y


def all_reduce_later(y: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(y.detach(), async_op=True)
    work.wait()
    return y


def broadcast(y: torch.Tensor) -> torch.Tensor:
    dist.broadcast(y.detach(), 0)
    return y


def all_gather(y: torch.Tensor) -> torch.Tensor:
    parts = [torch.zeros_like(y) for _ in range(2)]
    dist.all_gather(parts, y.detach())
    return y + parts[0] * parts[1]


def all_gather_into(y: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(2 * y.shape[0], y.shape[1])
    dist.all_gather_into_tensor(whole, y.detach())
    return y * whole[: y.shape[0]] + whole[y.shape[0] :]


def all_to_all(y: torch.Tensor) -> torch.Tensor:
    other = torch.zeros_like(y)
    dist.all_to_all_single(other, y.detach())
    return y * other


def reduce_scatter(y: torch.Tensor) -> torch.Tensor:
    part = torch.zeros(y.shape[0] // 2, y.shape[1])
    dist.reduce_scatter_tensor(part, y.detach())
    return y * part.repeat(2, 1)


def send_and_receive(y: torch.Tensor) -> torch.Tensor:
    other, rank = torch.zeros_like(y), dist.get_rank()
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, y.detach(), 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    )
    for request in requests:
        request.wait()
    return y * other


EXCHANGES = [
    all_reduce, all_reduce_later, broadcast, all_gather, all_gather_into, all_to_all, reduce_scatter, send_and_receive,
]  # fmt: skip


class Parallel(nn.Module):
    """The second layer reads what the ranks have exchanged of the first one's output."""

    def __init__(self, exchange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.exchange, self.first, self.second = exchange, nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.exchange(self.first(x))
        result: torch.Tensor = self.second(nn.functional.gelu(y)) * y.tanh()
        return result


def outcomes(exchange: Any, rank: int) -> list[Any]:
    found = []
    for plan in (False, True):
        torch.manual_seed(0)
        model = Parallel(exchange)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
        if plan:
            install(model, script(model, (x,)))
        out = model(x)
        default_loss(out).backward()
        found.append({"out": out.detach(), **results(model)})
    return found


def differing(rank: int) -> list[str]:
    return [e.__name__ for e in EXCHANGES if not same(*outcomes(e, rank))]


def test_what_a_collective_writes_to_is_not_replayed_from_what_made_it(tmp_path: Path) -> None:
    assert on_two_ranks(differing, tmp_path) == []
