"""Recurrent layers as the card runs them: cuDNN's one op for all layers and steps, or a fused op per cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdover.trace._torch import AUTOCAST_CUDA, COMPOSITE, excluding
from holdover.trace.target.card import Target
from holdover.trace.target.rules import RNN_SAVED_PER_STEP, rnn_is_cudnn

aten = torch.ops.aten
Params = Sequence[torch.Tensor]

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers (cudnnRNNMode_t)."""
KINDS = {number: kind for kind, number in MODES.items()}


def lstm(
    target: Target, input: torch.Tensor, hx: Params, params: Params, has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    if not rnn_is_cudnn(input, target):
        return aten.lstm.input._op_dk(  # type: ignore[no-any-return]
            COMPOSITE, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    return cudnn("lstm", input, (), hx[0], hx[1], params, has_biases, num_layers, dropout, train, bidirectional,
                 batch_first)  # fmt: skip


def lstm_packed(
    target: Target, data: torch.Tensor, batch_sizes: Sequence[int], hx: Params, params: Params, has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    needs_cudnn(data, target)
    return cudnn("lstm", data, batch_sizes, hx[0], hx[1], params, has_biases, num_layers, dropout, train, bidirectional,
                 False)  # fmt: skip


def needs_cudnn(data: torch.Tensor, target: Target) -> None:
    if not rnn_is_cudnn(data, target):
        raise RuntimeError("Recurrent layers over packed sequences are followed on cuDNN only.")


def one_hidden(
    kind: str, target: Target, input: torch.Tensor, hx: torch.Tensor, params: Params, has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if not rnn_is_cudnn(input, target):
        return getattr(aten, kind).input._op_dk(  # type: ignore[no-any-return]
            COMPOSITE, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    return cudnn(kind, input, (), hx, None, params, has_biases, num_layers, dropout, train, bidirectional,
                 batch_first)[:2]  # fmt: skip


def one_hidden_packed(
    kind: str, target: Target, data: torch.Tensor, batch_sizes: Sequence[int], hx: torch.Tensor, params: Params,
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    needs_cudnn(data, target)
    return cudnn(kind, data, batch_sizes, hx, None, params, has_biases, num_layers, dropout, train, bidirectional,
                 False)[:2]  # fmt: skip


def cudnn(
    kind: str, input: torch.Tensor, batch_sizes: Sequence[int], hx: torch.Tensor, cx: torch.Tensor | None,
    params: Params, has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """cudnn/RNN.cpp _cudnn_impl, for weights that lie in one buffer (nn.RNNBase.flatten_parameters sees to that)."""
    hidden = hx.size(2) if cx is None else cx.size(2)
    projection = hx.size(2) if hx.size(2) != hidden else 0
    per_layer = len(params) // (num_layers * (2 if bidirectional else 1))
    out = aten._cudnn_rnn(
        input, list(params), per_layer, flat_buffer(params), hx, cx, MODES[kind], hidden, projection, num_layers,
        batch_first, dropout, train, bidirectional, list(batch_sizes), None,
    )  # fmt: skip
    return out[0], out[1], out[2]


def flat_buffer(params: Params) -> torch.Tensor:
    """The memory behind the weights, as one tensor, made as cudnn/RNN.cpp try_get_weight_buf makes it."""
    first = params[0]
    with torch.no_grad():
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())


def under_autocast(
    input: torch.Tensor, weight: Params, weight_stride0: int, weight_buf: torch.Tensor | None, hx: torch.Tensor,
    cx: torch.Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    """cudnn/AutocastRNN.cpp: everything in float16, the weights as views of a new flat buffer."""
    with excluding(AUTOCAST_CUDA):
        if weight[0].dtype != torch.float16:
            weight_buf = torch.empty(sum(w.numel() for w in weight), dtype=torch.float16, device=input.device)
            views, offset = [], 0
            for w in weight:
                view = weight_buf.narrow(0, offset, w.numel()).view(w.shape)
                views.append(view.copy_(w))
                offset += w.numel()
            weight = views
        half = torch.float16
        return aten._cudnn_rnn(
            input.to(half), list(weight), weight_stride0, weight_buf.detach() if weight_buf is not None else None,
            hx.to(half), None if cx is None else cx.to(half), *rest,
        )  # fmt: skip


def lstm_cell(
    target: Target, input: torch.Tensor, hx: Params, w_ih: torch.Tensor, w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None, b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return hy, cy


def gru_cell(
    target: Target, input: torch.Tensor, hx: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None, b_hh: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    out: torch.Tensor = aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]
    return out


# -- what the ops give back, where PyTorch's fake kernels do not say --------------------------------------------------


def cudnn_rnn_outputs(
    input: torch.Tensor, weight: Params, weight_stride0: int, weight_buf: torch.Tensor, hx: torch.Tensor,
    cx: torch.Tensor | None, mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, batch_sizes: Sequence[int],
    dropout_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output, hidden states, the reserve (a guess) and the weights (cudnn/RNN.cpp _cudnn_rnn)."""
    directions = 2 if bidirectional else 1
    size = (proj_size or hidden_size) * directions
    swapped = batch_first and not batch_sizes  # made with time first, whatever was asked for
    output = input.new_empty((*(input.transpose(0, 1) if swapped else input).shape[:-1], size))
    steps = sum(batch_sizes) if batch_sizes else input.size(0) * input.size(1)  # times batch
    reserve = RNN_SAVED_PER_STEP[KINDS[mode]] * num_layers * directions * steps * hidden_size * input.element_size()
    return (
        output.transpose(0, 1) if swapped else output,
        hx.new_empty(hx.shape),
        hx.new_empty(0 if cx is None else cx.shape),
        input.new_empty(reserve if train else 0, dtype=torch.uint8),
        weight_buf.detach(),
    )


def cudnn_rnn_backward_outputs(
    input: torch.Tensor, weight: Params, weight_stride0: int, weight_buf: torch.Tensor, hx: torch.Tensor,
    cx: torch.Tensor | None, *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients; those of the weights are views of one buffer (cudnn/RNN.cpp _cudnn_rnn_backward_weight)."""
    buffer, offset, views = weight_buf.new_empty(weight_buf.shape), 0, []
    for w in weight:
        views.append(buffer.narrow(0, offset, w.numel()).view(w.shape))
        offset += w.numel()
    swapped, mask = rest[8] and not rest[12], rest[-1]  # batch_first, batch_sizes
    grad = input.new_empty((input.transpose(0, 1) if swapped else input).shape)
    return (
        grad.transpose(0, 1) if swapped else grad,
        torch.empty_like(hx),
        None if cx is None else torch.empty_like(cx),
        views if mask[3] else [],
    )


def gru_cell_outputs(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """cuda/RNN.cu _thnn_fused_gru_cell_cuda: the workspace holds five values per hidden unit."""
    return torch.empty_like(hx), hx.new_empty(hx.size(0), 5 * hx.size(1))


def gru_cell_backward_outputs(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    """cuda/RNN.cu _thnn_fused_gru_cell_backward_cuda."""
    batch, hidden = grad_hy.shape
    gates = [grad_hy.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [grad_hy.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], torch.empty_like(grad_hy), biases[0], biases[1]


FAKE_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: cudnn_rnn_outputs,
    aten._cudnn_rnn_backward.default: cudnn_rnn_backward_outputs,
    aten._thnn_fused_gru_cell.default: gru_cell_outputs,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward_outputs,
}
