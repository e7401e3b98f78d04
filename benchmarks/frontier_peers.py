"""What else there is for PyTorch, each with its own sweep: a point changes a copy of the model, which is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from frontier_blocks import Attention, Case, Experts, FusedQKV
from frontier_measure import Contender, Point, Setting, UnavailableError, many_graphs
from frontier_rotor import _measured, rotor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default,)
HEAVY = (*MATMULS, *ATTENTION, aten.convolution.default)

NOT_RUN = {
    "Rockmate, HiRemate": (
        "the released packages do not import; the development version needs CUDA, and on a CPU stand-in does not know "
        "in-place activations (figures measured that way on GPT are shown as published points)"
    ),
    "Checkmate": "TensorFlow 2 only, no release since 2022",
    "MONeT": "needs torch 1.5 with CUDA kernels of its own, no release since 2021",
    "DTR": "a patched C++ build of an old PyTorch",
    "POFO, MODeL": "the one was never published, the other recomputes nothing",
    "torch.distributed._tools auto-SAC": (
        "plans a fraction per module on CUDA timings; nothing in PyTorch applies such a plan, and a module called "
        "twice ends in an assertion"
    ),
}
"""Peers that have no rows, and why."""


# -- activation checkpointing of whole blocks -----------------------------------------------------------------------


def _wrap(model: torch.nn.Module, names: Sequence[str], how: Callable[..., Any]) -> None:
    """Call `how(forward, *args)` in place of the forward of each of these modules."""
    for name in names:
        module = model.get_submodule(name)
        module.forward = functools.partial(how, module.forward)


_checkpointed = functools.partial(checkpoint, use_reentrant=False)


def every_kth(case: Case, setting: Setting) -> Iterator[Point]:
    for k, label in ((1, "every block"), (2, "every 2nd"), (3, "every 3rd")):
        yield Point(label, functools.partial(_wrap, names=case.blocks[::k], how=_checkpointed))


def segments(case: Case, setting: Setting) -> Iterator[Point]:
    """`checkpoint` around runs of several blocks, the last run left alone, as `checkpoint_sequential` does it."""
    if not case.chains:
        raise UnavailableError("the blocks are no chain")
    longest = max(len(case.model.get_submodule(c).blocks) for c in case.chains)  # type: ignore[arg-type]
    sizes = sorted({2, 3, round(longest**0.5), 2 * round(longest**0.5), round(longest**0.5) // 2} - {0, 1})
    for size in [s for s in sizes if s < longest]:

        def prepare(model: torch.nn.Module, size: int = size) -> None:
            for name in case.chains:
                chain = model.get_submodule(name)
                chain.forward = functools.partial(_in_segments, list(chain.blocks), size)  # type: ignore[arg-type]

        yield Point(f"segments of {size}", prepare)


def _in_segments(blocks: list[Any], size: int, x: Any, *shared: Any) -> Any:
    def run(start: int, x: Any, *shared: Any) -> Any:
        for block in blocks[start : start + size]:
            x = block(x, *shared)
        return x

    for start in range(0, len(blocks), size):
        last = start + size >= len(blocks)
        x = run(start, x, *shared) if last else _checkpointed(run, start, x, *shared)
    return x


# -- selective activation checkpointing -----------------------------------------------------------------------------

Keep = Callable[[Any, int], bool]
"""(op, its number among the heavy ops of the block so far) -> whether its output is kept."""


def _selective(forward: Callable[..., Any], *args: Any, keep: Keep) -> Any:
    def contexts() -> Any:
        counts = {False: itertools.count(), True: itertools.count()}  # forward and replay count alike

        def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if op not in HEAVY:
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = next(counts[context.is_recompute])
            return CheckpointPolicy.MUST_SAVE if keep(op, number) else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)


def selective_by_type(case: Case, setting: Setting) -> Iterator[Point]:
    policies: dict[str, Keep] = {
        "heavy ops kept": lambda op, number: True,
        "every 2nd heavy op kept": lambda op, number: number % 2 == 0,
        "attention kept": lambda op, number: op in ATTENTION,
    }
    for label, keep in policies.items():
        if keep is policies["attention kept"] and not any(
            isinstance(m, (Attention, FusedQKV)) for m in case.model.modules()
        ):
            continue
        yield Point(
            label,
            functools.partial(_wrap, names=case.blocks, how=functools.partial(_selective, keep=keep)),
            answers_for_ops=True,
        )


class _Heavy(TorchDispatchMode):
    """The heavy ops of one block in order, with the bytes of their outputs and roughly their work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[int, float]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op in HEAVY:
            tensor = out[0] if isinstance(out, tuple) else out
            reads = [a for a in args if isinstance(a, torch.Tensor)]
            inner = reads[1].shape[-2] * 2 if op in ATTENTION else reads[-1][0].numel() if reads[-1].dim() > 2 else (
                reads[-1].shape[0])  # fmt: skip
            self.ops.append((tensor.nbytes, 2.0 * tensor.numel() * inner))
        return out


def _heavy_ops(case: Case) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    modes: list[_Heavy] = []

    def enter(module: Any, args: Any) -> None:
        modes.append(_Heavy())
        modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(name: str, module: Any, args: Any, output: Any) -> None:
        modes[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
        found[name] = modes.pop().ops

    hooks = []
    for name in case.blocks:
        module = case.model.get_submodule(name)
        hooks += [
            module.register_forward_pre_hook(enter), module.register_forward_hook(functools.partial(leave, name))
        ]  # fmt: skip
    with torch.no_grad():
        case.model(*case.args)
    for hook in hooks:
        hook.remove()
    return found


def _kept_sets(case: Case, most: int, *, last: bool) -> list[tuple[int, ...]]:
    """Numbers of heavy ops to keep in each block: those sets that no other beats on bytes and work together.

    With many heavy ops in a block only the sets of the most work per byte are looked at.
    """
    heavy = _heavy_ops(case)
    length = max((len(ops) for ops in heavy.values()), default=0)
    nbytes, work = [0.0] * length, [0.0] * length
    for ops in heavy.values():
        for i, (n, w) in enumerate(ops):
            nbytes[i] += n
            work[i] += w
    usable = range(length if last else length - 1)
    if length <= 7:
        sets = [s for k in range(len(usable) + 1) for s in itertools.combinations(usable, k)]
    else:
        order = sorted(usable, key=lambda i: -work[i] / nbytes[i])
        sets = [tuple(sorted(order[:k])) for k in range(len(order) + 1)]
    total = sum(work)
    points = sorted((sum(nbytes[i] for i in s), total - sum(work[i] for i in s), s) for s in sets)
    front: list[tuple[int, ...]] = []
    least = float("inf")
    for _, left, s in points:
        if left < least:
            least = left
            front.append(s)
    return front if len(front) <= most else [front[round(i * (len(front) - 1) / (most - 1))] for i in range(most)]


def selective_by_occurrence(case: Case, setting: Setting) -> Iterator[Point]:
    for kept in _kept_sets(case, 5 if setting.quick else 12, last=bool(_convolutional(case))):
        how = functools.partial(_selective, keep=lambda op, number, kept=kept: number in kept)  # type: ignore[misc]
        yield Point(f"keep {_named(kept)}", functools.partial(_wrap, names=case.blocks, how=how), answers_for_ops=True)


def _convolutional(case: Case) -> bool:
    """Whether what follows a block's last heavy op has something for backward to read (norms after convolutions)."""
    return any(isinstance(m, torch.nn.Conv2d) for n in case.blocks for m in case.model.get_submodule(n).modules())


def _named(kept: Sequence[int]) -> str:
    return "+".join(map(str, kept)) if kept else "none"


# -- torch-remat ----------------------------------------------------------------------------------------------------


def remat_regions(case: Case, setting: Setting) -> Iterator[Point]:
    """Each leaf module of a block is a region; the heavy ones of a set are saved, and what ends the block is."""
    try:
        import torch_remat  # type: ignore[import-untyped]
    except ImportError as why:
        raise UnavailableError(f"torch-remat is not installed: {why}") from why

    class Generator:
        """What torch-remat asks for where random numbers are drawn: it restores none by itself."""

        def snapshot(self) -> torch.Tensor:
            return torch.get_rng_state()

        def restore(self, state: torch.Tensor) -> None:
            torch.set_rng_state(state)

    if not hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):
        # CPU builds of PyTorch lack it; torch-remat uses it to tell who reads a tensor that has no data.
        torch._C._set_storage_data_ptr_access_error_msg = lambda storage_ptr, s: None
    random = any(isinstance(m, torch.nn.Dropout) and m.p for m in case.model.modules())
    hooks = (Generator(),) if random else ()

    def prepare(model: torch.nn.Module, kept: tuple[int, ...], tail: bool) -> None:
        for name in case.blocks:
            block = model.get_submodule(name)
            leaves = [block.get_submodule(path) for path in order[name]]
            heavy = [i for i, leaf in enumerate(leaves) if _is_heavy(leaf)]
            saved = {heavy[i] for i in kept if i < len(heavy)} | set(range(heavy[-1], len(leaves)) if tail else ())
            for i, (path, leaf) in enumerate(zip(order[name], leaves, strict=True)):
                leaf.forward = torch_remat.region(leaf.forward, path, recompute=i not in saved)
            wrapped = torch_remat.checkpoint(region_name=name, recompute_state_hooks=hooks)(block.forward)
            block.forward = wrapped

    order = _leaves(case)
    number = max(sum(_is_heavy(case.model.get_submodule(f"{n}.{p}")) for p in paths) for n, paths in order.items())
    experts = any(isinstance(m, Experts) for m in case.model.modules())
    tail = not _convolutional(case) and not experts
    offered = _kept_sets(case, 4 if setting.quick else 10, last=not tail)
    sets = list(dict.fromkeys(tuple(i for i in kept if i < number) for kept in offered))
    yield Point("nothing saved", functools.partial(prepare, kept=(), tail=False))
    for kept in sets:
        if kept or tail:
            yield Point(f"save {_named(kept)}{' and the end' * tail}", functools.partial(prepare, kept=kept, tail=tail))


def _leaves(case: Case) -> dict[str, list[str]]:
    """The ops of each block as modules, in the order in which they run."""
    order: dict[str, list[str]] = {}
    hooks = []
    for block in case.blocks:
        paths = order[block] = []
        outer: list[str] = []
        for path, module in case.model.get_submodule(block).named_modules():
            whole = isinstance(module, (Attention, FusedQKV, Experts))  # with more in them than modules
            inside = any(path.startswith(f"{o}.") for o in outer)
            outer += [path] * whole
            if path and not inside and (whole or not list(module.children())) and type(module) is not torch.nn.Identity:
                hooks.append(module.register_forward_hook(lambda *_, paths=paths, path=path: paths.append(path)))
    with torch.no_grad():
        case.model(*case.args)
    for hook in hooks:
        hook.remove()
    return order


def _is_heavy(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Linear, torch.nn.Conv2d, Attention, FusedQKV, Experts))


# -- the compiler's activation memory budget ------------------------------------------------------------------------


def _backend(name: str, budget: float) -> Callable[..., Any]:
    """A backend object of its own for each budget: the compiler's cache tells graphs apart by backend."""
    from torch._dynamo.backends.registry import lookup_backend

    inner = lookup_backend(name)

    def backend(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return inner(graph, inputs)

    return backend


def compile_budget(name: str, *, by_block: bool) -> Contender:
    def offers(case: Case, setting: Setting) -> Iterator[Point]:
        import torch._functorch.config

        many_graphs()
        few = (0.5, 0.25, 0.0) if by_block else (0.75, 0.25)
        for budget in few if setting.quick else (1.0, 0.75, 0.5, 0.25, 0.1, 0.0):

            def prepare(model: torch.nn.Module, budget: float = budget) -> Any:
                backend = _backend(name, budget)
                if not by_block:
                    return torch.compile(model, backend=backend)
                for path in case.blocks:
                    block = model.get_submodule(path)
                    block.forward = torch.compile(block.forward, backend=backend)
                return None

            yield Point(f"budget {budget:g}", prepare)

    return offers


# -- ckptplan -------------------------------------------------------------------------------------------------------


def ckptplan(case: Case, setting: Setting) -> Iterator[Point]:
    """Its plans, with the bytes that it only measures on CUDA put in, applied by `checkpoint` as it does itself."""
    if len(case.chains) != 1:
        raise UnavailableError("it plans one chain of blocks, each reading what the one before it makes")
    try:
        import ckptplan as package
    except ImportError as why:
        raise UnavailableError(f"ckptplan is not installed: {why}") from why
    chain = case.model.get_submodule(case.chains[0])
    first: list[Any] = []
    hook = chain.register_forward_pre_hook(lambda _, args: first.extend(args))
    with torch.no_grad():
        case.model(*case.args)
    hook.remove()
    begun = time.perf_counter()
    blocks = package.declare_blocks(chain, [(f"block{i}", b) for i, b in enumerate(chain.blocks)])  # type: ignore[arg-type]
    example = (first[0].detach().requires_grad_(),)
    with contextlib.redirect_stderr(None):
        profiles = package.profile_blocks(blocks, example, device="cpu", dtype=torch.float32)
    if not any(p.eligible_for_checkpoint for p in profiles):
        reasons = sorted({str(p.exclusion_reason) for p in profiles})
        raise UnavailableError(f"it holds no block eligible: {', '.join(reasons)}")
    stages = _measured(case, case.chains[0])
    profiles = tuple(
        dataclasses.replace(p, timing_only=False, activation_bytes_estimate=s.tape,
                            activation_bytes_method="isolated_forward_delta")
        for p, s in zip(profiles, stages, strict=True)
    )  # fmt: skip
    took = time.perf_counter() - begun
    total, seen = sum(s.tape for s in stages), set()
    for share in (0.5, 0.2) if setting.quick else (0.8, 0.65, 0.5, 0.35, 0.2, 0.1):
        begun = time.perf_counter()
        try:
            plan = package.plan_checkpoints(
                profiles, blocks, target_kind="activation_budget_bytes", target_value=int(share * total),
                planner="dynamic_programming", activation_bucket_bytes=1 << 16,
            )  # fmt: skip
        except package.InfeasibleTargetError:
            continue
        names = tuple(n for n, d in zip(case.blocks, plan.decisions, strict=True) if d.checkpointed)
        if names not in seen:
            seen.add(names)
            seconds = took + time.perf_counter() - begun
            yield Point(f"share {share:g}", functools.partial(_wrap, names=names, how=_checkpointed), seconds)


PEERS: dict[str, Contender] = {
    "stock": every_kth,
    "stock segments": segments,
    "selective, by type": selective_by_type,
    "selective, by occurrence": selective_by_occurrence,
    "torch-remat": remat_regions,
    "Rotor": rotor,
    "ckptplan": ckptplan,
    "compile budget, model": compile_budget("inductor", by_block=False),
    "compile budget, blocks": compile_budget("inductor", by_block=True),
    "compile budget, model, aot_eager": compile_budget("aot_eager", by_block=False),
    "compile budget, blocks, aot_eager": compile_budget("aot_eager", by_block=True),
}
