"""How long recording a large training step takes, and how much memory, beside PyTorch's own memory tracker.

    python benchmarks/tracing.py [SHAPE ...]

The step is two times forward, loss, backward and `AdamW.step()`; the model is transformers' Llama on `meta`. Each
figure comes from a process of its own, so that resident memory is that of the task alone (imports included).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch

SHAPES = {
    "1.3B": {
        "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 50304,
    },
    "Llama-3-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "Llama-3-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
BATCH, LENGTH = 4, 2048


Timed = tuple[float, float, int]  # seconds, processor seconds, result


def usages() -> list[resource.struct_rusage]:
    """Of this process, and of its children (holdover records in one)."""
    return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


class Clock:
    """Time since it was made: by the wall, and of the processor (which other programs slow down less)."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), self.processor()

    @staticmethod
    def processor() -> float:
        return sum(usage.ru_utime + usage.ru_stime for usage in usages())

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.start[0], self.processor() - self.start[1]


def make(shape: str, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    import zoo  # noqa: F401 - lets transformers import beside a torchvision without compiled ops
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=LENGTH, use_cache=False)
    with torch.device(device):
        return LlamaForCausalLM(config), torch.zeros(BATCH, LENGTH, dtype=torch.int64)


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, foreach=True)


def record_step(shape: str) -> Timed:
    """Time of recording, and the number of ops recorded."""
    from holdover.trace.record import record

    model, ids = make(shape, "meta")
    clock = Clock()
    trace = record(model, (ids,), {"labels": ids}, optimizer=adamw)
    return *clock.read(), len(trace.ops)


def estimate_step(shape: str) -> Timed:
    """Time until the whole estimate is there, and the peak."""
    import holdover

    model, ids = make(shape, "meta")
    clock = Clock()
    estimate = holdover.estimate(model, (ids,), {"labels": ids}, optimizer=adamw)
    return *clock.read(), estimate.peak_bytes


def track_step(shape: str) -> Timed:
    """The same two steps under `torch.distributed._tools.mem_tracker`, and its peak."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, ids = make(shape, "cpu")
        optimizer = adamw(model.parameters())
        tracker, peak = MemTracker(), 0
        tracker.track_external(model, optimizer, ids)
        clock = Clock()
        for _ in range(2):
            with tracker:
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            peak = max(peak, *(by["Total"] for by in tracker.get_tracker_snapshot("peak").values()))
            tracker.reset_mod_stats()
        return *clock.read(), peak


TASKS: dict[str, Callable[[str], Timed]] = {
    "holdover, recording": record_step,
    "holdover, estimate": estimate_step,
    "mem_tracker": track_step,
}


def worker(task: str, shape: str) -> None:
    warnings.simplefilter("ignore")
    seconds, processor, result = TASKS[task](shape)
    resident = max(usage.ru_maxrss for usage in usages()) * 1024
    print(json.dumps({"seconds": seconds, "processor": processor, "result": result, "resident": resident}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []], metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(*chosen.worker)
        return
    threads = torch.get_num_threads()
    print(f"Two steps of Llama shapes on meta, batch {BATCH}, {LENGTH} tokens, AdamW; {threads} threads")
    print(f"{'shape':12} {'tool':20} {'seconds':>8} {'cpu s':>8} {'resident':>10}   result")
    for shape in chosen.shapes or SHAPES:
        for task in TASKS:
            command = [sys.executable, __file__, "--worker", task, shape]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{shape:12} {task:20} failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            said = json.loads(done.stdout.strip().splitlines()[-1])
            result = f"{said['result']} ops" if "record" in task else f"peak {said['result'] / 2**30:.2f} GiB"
            resident = f"{said['resident'] / 2**30:6.2f} GiB"
            print(
                f"{shape:12} {task:20} {said['seconds']:8.2f} {said['processor']:8.2f} {resident}   {result}",
                flush=True,
            )


if __name__ == "__main__":
    main()
