"""What was measured on this machine, kept in the user's cache folder for the next run.

One file per kind of machine and release of PyTorch, one JSON object a line, only ever appended to: processes may
write at the same time, and a line that was torn is skipped. Where the folder cannot be written nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from holdover.measuring.machine import cpu_name
from holdover.trace.graph import Signature

_FORMAT = 4


class Store:
    """A dictionary on disk, from (what was measured, signature) to any JSON value.

    Args:
        device: the device that the measurements belong to.
        folder: where the file lies.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        conditions = describe(device)
        name = hashlib.sha256(conditions.encode()).hexdigest()[:16]
        self.path = folder / f"measured-{name}.jsonl"
        self._conditions = conditions
        self._known: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        self._load()

    def get(self, what: str, signature: Signature) -> Any:
        """The stored value, None when there is none."""
        return self._known.get(_key(what, signature))

    def put(self, what: str, signature: Signature, value: Any) -> None:
        """Keep a value; it reaches the disk with `save`."""
        key = _key(what, signature)
        self._known[key] = self._new[key] = value

    def save(self) -> None:
        """Append what is new. Never raises: a cache that cannot be written is only slow."""
        if not self._new:
            return
        lines = [json.dumps({"k": key, "v": value}) for key, value in self._new.items()]
        self._new = {}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                lines.insert(0, json.dumps({"conditions": self._conditions}))
            # The leading line break ends a line that another process may have left unfinished.
            _append(self.path, ("\n" + "\n".join(lines) + "\n").encode())

    def _load(self) -> None:
        try:
            text = self.path.read_bytes().decode(errors="replace")
        except OSError:
            return
        damaged = 0
        for line in text.splitlines():
            if not line:
                continue
            try:
                entry = json.loads(line)
                if "k" in entry:
                    self._known[entry["k"]] = entry["v"]
            except (ValueError, TypeError, KeyError):
                damaged += 1
        if damaged > 1:  # a single one may be another process's line in the making
            self._rewrite()

    def _rewrite(self) -> None:
        lines = [json.dumps({"conditions": self._conditions})]
        lines += [json.dumps({"k": key, "v": value}) for key, value in self._known.items()]
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            temporary.write_text("\n".join(lines) + "\n")
            os.replace(temporary, self.path)


def open_store(device: torch.device) -> Store:
    """The store in the user's cache folder for this device and these settings, read once per process."""
    return _opened(device, describe(device), cache_folder())


@functools.lru_cache(maxsize=8)
def _opened(device: torch.device, conditions: str, folder: Path) -> Store:
    return Store(device, folder)


def _append(path: Path, data: bytes) -> None:
    """In one system call, so that lines of processes writing at once do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def _key(what: str, signature: Signature) -> str:
    return f"{what}:{hashlib.sha256(repr(signature).encode()).hexdigest()[:24]}"


def cache_folder() -> Path:
    """The folder for this user's caches by the custom of the system, "holdover" inside it.

    `XDG_CACHE_HOME` is heeded everywhere; otherwise `~/.cache`, `~/Library/Caches` or `%LOCALAPPDATA%`.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "holdover"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "holdover" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "holdover"
    return Path.home() / ".cache" / "holdover"


def _allocator() -> str:
    """What the environment says of memory allocation: fresh pages cost more than many an op that fills them."""
    told = {k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    return ",".join(f"{k}={told[k]}" for k in sorted(told)) or "default"


def describe(device: torch.device) -> str:
    """Everything beside the op itself that its time and workspace depend on."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        settings = f"cudnn={torch.backends.cudnn.version()},tf32={torch.backends.cuda.matmul.allow_tf32}"
    else:
        name = cpu_name()
        settings = (
            f"threads={torch.get_num_threads()},isa={torch.backends.cpu.get_cpu_capability()},"
            f"mkldnn={torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled},allocator={_allocator()}"
        )
    deterministic = torch.are_deterministic_algorithms_enabled()
    return f"{_FORMAT}; {name}; torch {torch.__version__}; {settings}; deterministic={deterministic}"
