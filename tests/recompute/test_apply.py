"""Putting a plan on a model changes nothing that its user can see, and comes off without a trace."""

from __future__ import annotations

import copy
import gc
import inspect as python_inspect
import io
import pickle
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from tests.recompute.helpers import assert_same, count, script, script_of, step
from torch import nn

from holdover import ApplyError
from holdover.recompute.apply import install, installation_of, session, uninstall
from holdover.recompute.inspect import inspect, inspection_of


class Block(nn.Module):
    """Says what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        """Scaled and shifted."""
        self.calls += 1
        y = self.b(self.a(x).sigmoid()) * scale
        return x + (y if shift is None else y + shift)


class Model(nn.Sequential):
    pass


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return Model(Block(), nn.ReLU(inplace=True), Block()), torch.randn(5, 4)


def planned() -> tuple[nn.Module, torch.Tensor]:
    model, x = model_and_batch()
    install(model, script(model, (x,)), plan_id="half")
    return model, x


def test_nothing_visible_changes() -> None:
    plain, _ = model_and_batch()
    model, _ = planned()
    assert repr(model) == repr(plain)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    block = model[0]
    assert python_inspect.signature(block.forward) == python_inspect.signature(plain[0].forward)
    assert python_inspect.getfullargspec(block.forward).kwonlyargs == ["shift"]
    assert block.forward.__name__ == "forward"
    assert block.forward.__doc__ == "Scaled and shifted."


def test_removing_undoes_it_wholly() -> None:
    plain, x = model_and_batch()
    model, _ = planned()
    before = {n: set(m.__dict__) for n, m in plain.named_modules()}
    step(model, (x,))
    fresh(model)
    uninstall(model)
    assert not any(hasattr(p.untyped_storage(), "_holdover") for p in [*model.parameters(), *model.buffers()])
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == before
    with pytest.raises(ApplyError, match="follows no plan"):
        uninstall(model)
    with pytest.raises(ApplyError, match="follows no plan"):
        inspect(model)
    assert_same(step(plain, (x,)), step(model, (x,)))


def test_an_instance_forward_is_wrapped_and_given_back() -> None:
    outcomes = []
    for plan in (False, True):
        model, x = model_and_batch()
        replaced = partial(model[0].forward, scale=2.0)
        model[0].forward = replaced
        if plan:
            install(model, script(doubled(), (x,)))
        outcomes.append(step(model, (x,)))
        if plan:
            assert inspect(model).matched > 0
            uninstall(model)
            assert model[0].forward is replaced
    assert_same(*outcomes)


def doubled() -> nn.Module:
    model, _ = model_and_batch()
    model[0].forward = partial(model[0].forward, scale=2.0)
    return model


def test_twice_is_refused() -> None:
    model, _ = planned()
    with pytest.raises(ApplyError, match=r"already follows a plan.*half"):
        install(model, {})
    uninstall(model)
    install(model, {})


def test_models_that_do_not_run_in_python_are_refused() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ApplyError, match="runs in Python"):
        install(scripted, {})
    with pytest.raises(ApplyError, match="before compiling"):
        install(torch.compile(nn.Linear(2, 2)), {})


def test_a_wrong_script_is_refused() -> None:
    model, _ = model_and_batch()
    with pytest.raises(ValueError, match="unknown action 'forget'"):
        install(model, {"model": {0: ("aten.mul.Tensor", "forget")}})


@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_follows_the_plan_by_itself(duplicate: str) -> None:
    model, x = planned()
    expected = step(model_and_batch()[0], (x,))
    if duplicate == "deepcopy":
        twin = copy.deepcopy(model)
    elif duplicate == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert installation_of(twin) is not installation_of(model)
    assert_same(expected, step(twin, (x,)))
    assert inspect(twin).replayed_ops > 0
    assert inspect(model).matched == 0
    assert model[0].calls == 0  # the copy runs on its own modules
    uninstall(twin)
    assert_same({"out": [model(x)]}, {"out": [planned()[0](x)]})
    assert "forward" not in twin.__dict__
    assert inspect(model).matched > 0


def test_a_copied_part_is_an_ordinary_module() -> None:
    model, x = planned()
    assert torch.equal(copy.deepcopy(model[0])(x), model_and_batch()[0][0](x))


def test_the_model_dies_with_its_last_user() -> None:
    model, x = planned()
    step(model, (x,))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_evaluation_is_plain() -> None:
    model, x = planned()
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert inspect(model).matched == 0
    model[0](x)  # a part called by itself
    assert inspect(model).matched == 0


def test_replicas_of_data_parallel_run_on_their_own_parts() -> None:
    model, x = planned()
    replica = model._replicate_for_data_parallel()
    replica._modules = {n: m._replicate_for_data_parallel() for n, m in model._modules.items()}
    replica._modules["0"]._modules = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 4)}
    outcomes: dict[str, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda n, m: outcomes.__setitem__(n, m(x)), args=(n, m))
        for n, m in (("model", model), ("replica", replica))
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.equal(outcomes["model"], model_and_batch()[0](x))
    assert not torch.equal(outcomes["model"], outcomes["replica"])
    sum(o.sum() for o in outcomes.values()).backward()


def test_another_batch_size_follows_the_same_plan() -> None:
    model, _ = planned()
    plain, _ = model_and_batch()
    x = torch.randn(9, 4)
    assert_same(step(plain, (x,)), step(model, (x,)))
    assert inspect(model).unmatched == ()


def test_another_path_is_kept_and_reported() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).sin() if x.sum() > 0 else self.b(x).cos().neg()

    model, x = Choosing(), torch.ones(2, 4)
    plain = copy.deepcopy(model)
    install(model, script(model, (x,)))
    assert_same(step(plain, (-x,)), step(model, (-x,)))
    done = inspect(model)
    assert str(done.unmatched[0]) == "model, op 3: aten.sin.default was planned, aten.cos.default ran"
    assert [(u.call, u.found) for u in done.unmatched[1:]].count(("model/a", "")) == 4
    assert "not as planned:" in str(done)


def test_quiet_calls_run_without_the_mode() -> None:
    seen = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._len_torch_dispatch_stack())
            return self.inner(x)

    model = nn.Sequential(nn.Tanh(), Watched(), nn.Tanh())
    x = torch.randn(3, requires_grad=True)
    everything = script(model, (x,))
    quiet = {k: v for k, v in everything.items() if not k.startswith("model/1")}
    seen.clear()
    install(model, quiet, frozenset({"model/1", "model/1/1.inner"}))
    model(x).sum().backward()
    uninstall(model)
    install(model, everything)
    model(x)
    assert seen == [0, 1]
    uninstall(model)
    install(model, quiet, ["model/1"])
    with pytest.raises(TypeError):
        model("not a tensor")
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_block_of_code_with_its_loss() -> None:
    def loss_of(out: torch.Tensor) -> torch.Tensor:
        return (out.sin() * out.exp()).logsumexp(0).sum()

    plain, x = model_and_batch()
    expected = step(plain, (x,), loss=loss_of)
    seen = script_of(count(*model_and_batch_args(), loss=loss_of))
    assert seen[""]
    for installed in (False, True):
        model, x = model_and_batch()
        if installed:
            install(model, {})
        torch.manual_seed(7)
        with session(seen, model_class="Model") as running:
            out = model(x)
            loss = loss_of(out)
            with pytest.raises(ApplyError, match="already"), session(seen):
                pass
        loss.backward()
        done = inspection_of(running)
        assert done.unmatched == ()
        assert done.replayed_ops > 3
        assert installed == ("forward" in model.__dict__)
        got = {n: p.grad for n, p in model.named_parameters()}
        assert_same(expected["grads"], got)
        if installed:
            assert inspect(model) == done


def model_and_batch_args() -> Any:
    model, x = model_and_batch()
    return model, (x,)


def test_calls_in_a_block_are_told_apart() -> None:
    model, x = model_and_batch()

    def loss_of(out: torch.Tensor) -> torch.Tensor:
        return (model(out).exp() + nn.Sigmoid()(model[0].a(out)).sum()).sum()

    with session({"model:1/0": {1: ("aten.sigmoid.default", "recompute")}}, model_class="Model") as running:
        loss = loss_of(model(x))
    loss.backward()
    assert [f.key for f in running.frames] == ["", "model:1", "model:1/0"]
    assert inspection_of(running).unmatched == ()


def test_a_backward_inside_the_block() -> None:
    plain, x = model_and_batch()
    expected = step(plain, (x,))
    model, x = model_and_batch()
    torch.manual_seed(7)
    with session(script(model, (x,))):
        model(x).square().sum().backward()
    assert_same(expected["grads"], {n: p.grad for n, p in model.named_parameters()})


def test_two_models_train_in_two_threads() -> None:
    plain, x = model_and_batch()
    expected = [step(plain, (x * k,)) for k in range(3)]
    plain_grads = expected[-1]["grads"]
    failures: list[Any] = []
    barrier = threading.Barrier(4)

    def train(model: nn.Module, use_session: bool) -> None:
        try:
            seen = script(model, (x,))
            if not use_session:
                install(model, seen)
            barrier.wait()
            for k in range(3):
                if use_session:
                    with session(seen):
                        loss = model(x * k).square().sum()
                else:
                    loss = model(x * k).square().sum()
                loss.backward()
            assert_same(plain_grads, {n: p.grad for n, p in model.named_parameters()})
        except BaseException as e:
            failures.append(e)

    models = [model_and_batch()[0] for _ in range(4)]  # here: the seed is one for all threads
    threads = [threading.Thread(target=train, args=(model, i % 2 == 0)) for i, model in enumerate(models)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_forward_in_one_thread_and_backward_in_another() -> None:
    plain, x = model_and_batch()
    expected = step(plain, (x,))
    model, _ = planned()
    loss = model(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same(expected["grads"], {n: p.grad for n, p in model.named_parameters()})


def test_a_model_in_a_model() -> None:
    outcomes = []
    for plan in (False, True):
        inner, x = model_and_batch()
        outer = nn.Sequential(inner, nn.Tanh())
        if plan:
            install(inner, script(inner, (x,)), plan_id="inner")
            bare = nn.Sequential(model_and_batch()[0], nn.Tanh())
            install(outer, script(bare, (x,)), plan_id="outer")
        outcomes.append(step(outer, (x,)))
    assert_same(*outcomes)
    assert inspect(outer).unmatched == ()
    assert inspect(inner).matched == 0
    uninstall(inner)
    assert_same(outcomes[0], step(fresh(outer), (x,)))
    uninstall(outer)
    assert all("forward" not in m.__dict__ for m in outer.modules())


def fresh(model: nn.Module) -> nn.Module:
    model.zero_grad()
    for b in model.buffers():
        b.zero_()
    return model
