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


def make(shape: str, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    import zoo  # noqa: F401 - lets transformers import beside a torchvision without compiled ops
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=LENGTH, use_cache=False)
    with torch.device(device):
        return LlamaForCausalLM(config), torch.zeros(BATCH, LENGTH, dtype=torch.int64)


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, foreach=True)


def record_step(shape: str) -> tuple[float, int]:
    """Seconds of recording, and the number of ops recorded."""
    from holdover.trace.record import record

    model, ids = make(shape, "meta")
    start = time.perf_counter()
    trace = record(model, (ids,), {"labels": ids}, optimizer=adamw)
    return time.perf_counter() - start, len(trace.ops)


def estimate_step(shape: str) -> tuple[float, int]:
    """Seconds until the whole estimate is there, and the peak."""
    import holdover

    model, ids = make(shape, "meta")
    start = time.perf_counter()
    estimate = holdover.estimate(model, (ids,), {"labels": ids}, optimizer=adamw)
    return time.perf_counter() - start, estimate.peak_bytes


def track_step(shape: str) -> tuple[float, int]:
    """The same two steps under `torch.distributed._tools.mem_tracker`, and its peak."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, ids = make(shape, "cpu")
        optimizer = adamw(model.parameters())
        tracker, peak = MemTracker(), 0
        tracker.track_external(model, optimizer, ids)
        start = time.perf_counter()
        for _ in range(2):
            with tracker:
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            peak = max(peak, *(by["Total"] for by in tracker.get_tracker_snapshot("peak").values()))
            tracker.reset_mod_stats()
        return time.perf_counter() - start, peak


TASKS: dict[str, Callable[[str], tuple[float, int]]] = {
    "holdover, recording": record_step,
    "holdover, estimate": estimate_step,
    "mem_tracker": track_step,
}


def worker(task: str, shape: str) -> None:
    warnings.simplefilter("ignore")
    seconds, result = TASKS[task](shape)
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"seconds": seconds, "result": result, "resident": max(own, child) * 1024}))


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
    print(f"{'shape':12} {'tool':20} {'seconds':>8} {'resident':>10}   result")
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
            print(f"{shape:12} {task:20} {said['seconds']:8.2f} {resident}   {result}", flush=True)


if __name__ == "__main__":
    main()
