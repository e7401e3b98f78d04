"""Tensors whose memory is handed out: what numpy or another library does to it, no dispatcher sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from holdover.trace.recorder import Recorder

DOORS = {
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.data_ptr: "data_ptr()",
    torch.Tensor.__dlpack__: "DLPack",
    torch.Tensor.untyped_storage: "untyped_storage()",
}


class Escapes(TorchFunctionMode):
    """Notes the storages that leave through one of `DOORS`. Only real tensors can: fake ones have no memory to give."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        door = DOORS.get(func)
        if door is not None and not self.recorder.paused:
            for live in self.recorder.live.inside(args[0]):
                self.recorder.escaped[live.storage] = door
        return func(*args, **(kwargs or {}))
