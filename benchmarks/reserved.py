"""Reserved memory that others measured on a T4, beside what the replayed allocator says without one.

    python benchmarks/reserved.py

The rows are fitcheck's (fp16 autocast, LoRA, every layer recomputed); it does not say which layers have adapters, nor
the rank of all rows: all linear layers of the blocks and rank 16 are taken where nothing is said. Computed on one CPU
core, models on meta, nothing is downloaded. Needs the extra `zoo`; takes a minute.
"""

from __future__ import annotations

import warnings

import torch
from published import MIB, lora
from transformers.integrations import sdpa_attention

ROWS = (
    ("SmolLM2-1.7B", 4, 1024, "sdpa", 32, 6528.7, 7094),
    ("SmolLM2-135M", 1, 4096, "sdpa", 16, 3148, 3284),
    ("SmolLM2-135M", 1, 4096, "eager", 16, 3180, 4476),
    ("TinyLlama-1.1B", 2, 1024, "sdpa", 16, 3288, 3532),
    ("TinyLlama-1.1B", 2, 1024, "eager", 16, 3518, 4226),
)
"""Model, batch, length, attention, rank, MiB allocated and reserved."""


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The measured versions of transformers repeated keys and values; with grouped heads a T4 takes the math kernel.
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    print(
        f"{'model':16} {'step':>8} {'attention':>9} {'allocated':>9} {'here':>8} {'off':>6} "
        f"{'reserved':>9} {'here':>8} {'off':>6} {'ratio':>6} {'here':>6}"
    )
    for name, batch, length, attention, rank, allocated, reserved in ROWS:
        found = lora(name, batch, length, attention, rank)
        ours = found.allocated_bytes / MIB, found.reserved_bytes / MIB
        print(
            f"{name:16} {batch:>2} x {length} {attention:>8} {allocated:>9.0f} {ours[0]:>8.0f} "
            f"{ours[0] / allocated - 1:>+6.1%} {reserved:>9.0f} {ours[1]:>8.0f} {ours[1] / reserved - 1:>+6.1%} "
            f"{reserved / allocated:>6.2f} {ours[1] / ours[0]:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
