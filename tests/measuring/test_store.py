"""The cache on disk, with other processes writing to it and things gone wrong with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdover.measuring.store import Store, cache_folder
from holdover.trace.graph import Signature, TensorSpec

CPU = torch.device("cpu")


def signature(size: int) -> Signature:
    return Signature("aten.neg.default", (TensorSpec((size,), (1,), "float32", "cpu"),), ())


def test_what_was_saved_is_there_next_time(tmp_path: Path) -> None:
    store = Store(CPU, tmp_path)
    store.put("seconds", signature(1), 0.25)
    store.put("workspace", signature(1), 64)
    store.save()
    again = Store(CPU, tmp_path)
    assert again.get("seconds", signature(1)) == 0.25
    assert again.get("workspace", signature(1)) == 64
    assert again.get("seconds", signature(2)) is None


def test_settings_that_change_kernels_have_files_of_their_own(tmp_path: Path) -> None:
    before = Store(CPU, tmp_path).path
    torch.set_num_threads(2)
    try:
        assert Store(CPU, tmp_path).path != before
    finally:
        torch.set_num_threads(1)


def test_another_allocator_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Store(CPU, tmp_path).path
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000000")
    assert Store(CPU, tmp_path).path != before


WRITER = """
import sys
from pathlib import Path
import torch
from holdover.measuring.store import Store
from holdover.trace.graph import Signature, TensorSpec
torch.set_num_threads(1)
first = int(sys.argv[2])
for n in range(first, first + 200):
    store = Store(torch.device("cpu"), Path(sys.argv[1])) if n % 50 == 0 else store
    store.put("seconds", Signature("aten.neg.default", (TensorSpec((n,), (1,), "float32", "cpu"),), ()), n)
    store.save()
"""


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(first)]) for first in (1000, 2000)]
    assert [w.wait() for w in writers] == [0, 0]
    store = Store(CPU, tmp_path)
    for first in (1000, 2000):
        assert [store.get("seconds", signature(n)) for n in range(first, first + 200)] == list(
            range(first, first + 200)
        )


@pytest.mark.parametrize("damage", [b"\x00\xff\xfe garbage", b"{\n{\n[1]\n{}{}\n", b'{"k": "seconds:1"', b"null\n7\n"])
def test_a_damaged_file_is_read_as_far_as_it_goes_and_mended(tmp_path: Path, damage: bytes) -> None:
    store = Store(CPU, tmp_path)
    store.put("seconds", signature(1), 0.25)
    store.save()
    with store.path.open("ab") as file:
        file.write(damage + b"\n" + damage)
    other = Store(CPU, tmp_path)
    assert other.get("seconds", signature(1)) == 0.25
    other.put("seconds", signature(2), 0.5)
    other.save()
    assert Store(CPU, tmp_path).get("seconds", signature(2)) == 0.5
    assert b"garbage" not in store.path.read_bytes()


def test_a_folder_that_cannot_be_written_is_borne(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    store = Store(CPU, blocked / "cache")
    store.put("seconds", signature(1), 0.25)
    store.save()
    assert store.get("seconds", signature(1)) == 0.25


def test_the_folder_follows_the_custom_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "holdover"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == Path.home() / ".cache" / "holdover"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "holdover"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache_folder() == tmp_path / "holdover" / "Cache"
