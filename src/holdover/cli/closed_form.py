"""`holdover closed-form [MODEL]`: a transformer over many GPUs, from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdover.cli.common import JsonOption, check_writable, fail, fails_politely, show, show_json
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.recompute import MODULES
from holdover.closed_form.settings import CHOICES

if TYPE_CHECKING:
    from holdover.closed_form.settings import Settings

_MODEL = "The model"
_LAYOUT = "The layout"
_KERNELS = "The code that runs it"
_STATES = "What is kept per parameter"
_RECOMPUTE = "Recomputation"
_OUTPUT = "What to show"


def _option(flag: str, text: str, panel: str, *, least: int | None = None) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, min=least)


def _choice(flag: str, setting: str, text: str, panel: str) -> Any:
    """An option whose values are the setting's."""
    return _option(flag, f"{text}{', '.join(filter(None, CHOICES[setting]))}.", panel)


def _number(flag: str, text: str, panel: str) -> Any:
    return _option(flag, text, panel, least=1)


@fails_politely
def closed_form(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A preset ({', '.join(PRESETS)}) or the path of a Hugging Face config.json. "
            "Without one, --layers, --hidden, --heads and --vocab describe the model.",
            show_default=False,
        ),
    ] = "",
    style: Annotated[str, _choice("--style", "style", "Without MODEL: ", _MODEL)] = "llama",
    layers: Annotated[int, _option("--layers", "Layers. 0: as MODEL has it, here and below.", _MODEL)] = 0,
    hidden: Annotated[int, _option("--hidden", "Hidden size.", _MODEL)] = 0,
    heads: Annotated[int, _option("--heads", "Attention heads.", _MODEL)] = 0,
    kv_heads: Annotated[int, _option("--kv-heads", "Key-value heads.", _MODEL)] = 0,
    head_dim: Annotated[int, _option("--head-dim", "Width of a head.", _MODEL)] = 0,
    ffn: Annotated[int, _option("--ffn", "Width of the MLP.", _MODEL)] = 0,
    vocab: Annotated[int, _option("--vocab", "Vocabulary.", _MODEL)] = 0,
    seq: Annotated[int, _option("--seq", "Tokens of a sequence.", _MODEL)] = 0,
    experts: Annotated[int, _option("--experts", "Routed experts of a layer.", _MODEL)] = 0,
    top_k: Annotated[int, _option("--top-k", "Experts that each token visits.", _MODEL)] = 0,
    expert_ffn: Annotated[int, _option("--expert-ffn", "Width of an expert.", _MODEL)] = 0,
    shared_ffn: Annotated[int, _option("--shared-ffn", "Width of the shared experts.", _MODEL)] = 0,
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Output layer and embedding.", rich_help_panel=_MODEL)
    ] = None,
    tp: Annotated[int, _number("--tp", "Tensor-parallel ranks.", _LAYOUT)] = 1,
    pp: Annotated[int, _number("--pp", "Pipeline stages.", _LAYOUT)] = 1,
    dp: Annotated[int, _number("--dp", "Data-parallel replicas.", _LAYOUT)] = 1,
    cp: Annotated[int, _number("--cp", "Context-parallel ranks.", _LAYOUT)] = 1,
    ep: Annotated[int, _number("--ep", "Expert-parallel ranks.", _LAYOUT)] = 1,
    etp: Annotated[int, _number("--etp", "Tensor-parallel ranks inside an expert.", _LAYOUT)] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Shard norms and residuals too.", rich_help_panel=_LAYOUT)
    ] = False,
    context: Annotated[str, _choice("--context", "context", "Context parallelism: ", _LAYOUT)] = "ring",
    replicate_kv: Annotated[
        bool, typer.Option("--replicate-kv", help="Allow more ranks than key-value heads.", rich_help_panel=_LAYOUT)
    ] = False,
    schedule: Annotated[str, _choice("--schedule", "schedule", "", _LAYOUT)] = "",
    virtual: Annotated[int, _number("--virtual", "Chunks of a stage (interleaved).", _LAYOUT)] = 1,
    stage_layers: Annotated[str, _option("--stage-layers", "Layers of each chunk: 3,4,4,3.", _LAYOUT)] = "",
    micro_batch: Annotated[int, _number("--micro-batch", "Sequences of a micro-batch.", _LAYOUT)] = 1,
    micro_batches: Annotated[
        int, _option("--micro-batches", "Micro-batches of a step. 0: four for each stage.", _LAYOUT)
    ] = 0,
    zero: Annotated[
        int, _option("--zero", "Share optimizer states (1), gradients too (2), weights too (3).", _LAYOUT)
    ] = 0,
    reshard: Annotated[
        bool,
        typer.Option("--reshard/--no-reshard", help="zero 3: free weights after forward.", rich_help_panel=_LAYOUT),
    ] = True,
    code: Annotated[
        str,
        _choice("--code", "code", "Whose layers: megatron's are fused, auto takes paper for its models. ", _KERNELS),
    ] = "auto",
    attention: Annotated[str, _choice("--attention", "attention", "", _KERNELS)] = "",
    fp8: Annotated[str, _choice("--fp8", "fp8", "Linear inputs: ", _KERNELS)] = "none",
    fp32_residual: Annotated[
        bool, typer.Option("--fp32-residual", help="The residual stream in fp32.", rich_help_panel=_KERNELS)
    ] = False,
    loss: Annotated[str, _choice("--loss", "loss", "", _KERNELS)] = "",
    logits: Annotated[str, _choice("--logits", "logits", "What the loss keeps: ", _KERNELS)] = "",
    imbalance: Annotated[float, _option("--imbalance", "Most loaded expert rank over the mean.", _KERNELS)] = 1.0,
    weights: Annotated[str, _choice("--weights", "weights", "", _STATES)] = "bf16",
    gradients: Annotated[str, _choice("--gradients", "gradients", "", _STATES)] = "fp32",
    optimizer: Annotated[str, _choice("--optimizer", "optimizer", "", _STATES)] = "adamw",
    master: Annotated[
        bool, typer.Option("--master/--no-master", help="fp32 copies of 16-bit weights.", rich_help_panel=_STATES)
    ] = True,
    recompute: Annotated[str, _choice("--recompute", "recompute", "", _RECOMPUTE)] = "none",
    modules: Annotated[
        str,
        _option(
            "--recompute-modules",
            f"selective: {', '.join(MODULES)}, comma-separated.",
            _RECOMPUTE,
        ),
    ] = "core_attn",
    method: Annotated[str, _choice("--recompute-method", "method", "full: ", _RECOMPUTE)] = "uniform",
    num_layers: Annotated[
        int, _option("--recompute-num-layers", "Layers of a group, or layers recomputed.", _RECOMPUTE)
    ] = 1,
    distribute_saved: Annotated[
        bool,
        typer.Option("--distribute-saved-activations", help="Shard saved inputs over tp.", rich_help_panel=_RECOMPUTE),
    ] = False,
    store_all: Annotated[
        str, _option("--store-all", "Micro-batches in flight that keep everything, or auto.", _RECOMPUTE)
    ] = "0",
    offload: Annotated[float, _option("--offload", "Share of activations kept on the host.", _RECOMPUTE)] = 0.0,
    card: Annotated[str, _option("--card", "The GPU; `holdover devices` lists them.", _OUTPUT)] = "h100-80gb",
    memory: Annotated[
        str, _option("--memory", "Budget of each GPU, such as 70GiB. [default: the card's]", _OUTPUT)
    ] = "",
    step_time: Annotated[
        float | None, typer.Option("--step-time", min=1e-9, help="Measured seconds, for MFU.", rich_help_panel=_OUTPUT)
    ] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Show every stage.", rich_help_panel=_OUTPUT)] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List a layer tensor by tensor.", rich_help_panel=_OUTPUT)
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help='Another setting beside this one: "recompute=full,tp=4". May be repeated.',
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Try every layout over --gpus. Where none fits, the exit status is 2.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    gpus: Annotated[int, _option("--gpus", "GPUs of the sweep.", _OUTPUT)] = 0,
    global_batch: Annotated[int, _option("--global-batch", "Sequences of a step, in the sweep.", _OUTPUT)] = 0,
    top: Annotated[int, _number("--top", "Candidates of the sweep to show.", _OUTPUT)] = 15,
    megatron: Annotated[
        bool, typer.Option("--megatron", help="The nearest Megatron-LM flags.", rich_help_panel=_OUTPUT)
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            help="Draw before and after to this file; without MODEL, the paper's figure 1.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """A transformer's memory, FLOPs and step time over many GPUs, in closed form: no model is built."""
    from holdover.closed_form.settings import Settings

    if figure is not None:
        check_writable(figure)
    if figure is not None and not model and not layers:
        _draw(None, figure, as_json)
        return
    settings = Settings(
        model=model,
        style=style,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        seq=seq,
        experts=experts,
        top_k=top_k,
        expert_ffn=expert_ffn,
        shared_ffn=shared_ffn,
        tied=tied,
        code=code,
        attention=attention,
        fp8=fp8,
        fp32_residual=fp32_residual,
        loss=loss,
        logits=logits,
        imbalance=imbalance,
        dp=dp,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        etp=etp,
        sequence_parallel=sequence_parallel,
        context=context,
        replicate_kv=replicate_kv,
        schedule=schedule,
        virtual=virtual,
        stage_layers=stage_layers,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        zero=zero,
        reshard=reshard,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        master=master,
        recompute=recompute,
        method=method,
        num_layers=num_layers,
        modules=modules,
        distribute_saved=distribute_saved,
        store_all=store_all,
        offload=offload,
        card=card,
        memory=memory,
    )
    if (gpus or global_batch) and not sweep:
        fail(
            "--gpus and --global-batch are of a sweep over layouts: add --sweep, or say one layout by --tp, --pp, --dp"
        )
    if sweep:
        _sweep(settings, gpus, global_batch, top, as_json)
    elif figure is not None:
        _draw(settings, figure, as_json)
    elif megatron:
        _megatron(settings, as_json)
    elif compare:
        _compare(settings, compare, as_json)
    else:
        _show(settings, step_time, stages, tensors, as_json)


def _show(settings: Settings, step_time: float | None, stages: bool, tensors: bool, as_json: bool) -> None:
    from rich.console import Group

    from holdover.closed_form.views import result_view, tensors_view

    found = settings.run()
    if as_json:
        measured = {"mfu": found.mfu(step_time), "hfu": found.hfu(step_time)} if step_time else {}
        show_json(found.to_json() | measured)
        return
    view = result_view(found, step_seconds=step_time, every_stage=stages)
    show(Group(view, "", tensors_view(found)) if tensors else view)


def _compare(settings: Settings, others: list[str], as_json: bool) -> None:
    from holdover.closed_form.views import compare_view, recompute_name

    if not all(text.strip(" ,") for text in others):
        fail('--compare names no setting: write settings and their values, as in --compare "recompute=full,tp=4"')
    base = settings.run()
    named = [(f"recompute {recompute_name(base.recompute)}", base)]
    named += [(text, settings.changed(text).run()) for text in others]
    if as_json:
        show_json({"version": 1, "settings": [{"name": name} | found.to_json() for name, found in named]})
    else:
        show(compare_view(named))


def _sweep(settings: Settings, gpus: int, global_batch: int, top: int, as_json: bool) -> None:
    from holdover.closed_form.sweep import layouts_for
    from holdover.closed_form.sweep import sweep as run_sweep
    from holdover.closed_form.views import LEFT_OUT, nothing_fits, sweep_view

    if gpus < 1 or global_batch < 1:
        fail(
            "a sweep needs --gpus and --global-batch (the sequences of a step), as in --gpus 64 --global-batch 512; "
            f"here they are {gpus} and {global_batch}"
        )
    architecture, cluster = settings.architecture(), settings.cluster()
    length = settings.seq or architecture.sequence
    context = (1, 2, 4, 8) if length >= 16384 else (1,)
    layouts = layouts_for(architecture, gpus, global_batch=global_batch, sequence=settings.seq, context=context)
    memory = settings.memory_bytes()
    swept = run_sweep(
        architecture,
        layouts,
        kernels=settings.kernels(),
        states=settings.states(),
        cluster=cluster,
        memory_bytes=memory,
    )
    if as_json:
        from dataclasses import asdict

        data = asdict(swept)
        data["fitting"] = data["fitting"][:top]
        show_json({"version": 1, "model": architecture.name, "gpus": gpus, "usable_bytes": memory} | data)
    elif swept.fitting:
        title = f"{architecture.name} on {gpus} {cluster.card.title}, {global_batch} sequences of {length} tokens"
        show(sweep_view(swept, top=top, usable_bytes=memory, title=title))
        typer.echo(f"{LEFT_OUT} A lower --memory leaves room for them.")
    if not swept.fitting:  # as for a budget that no plan meets
        fail(nothing_fits(swept, usable_bytes=memory, title=f"{architecture.name} on {gpus} {cluster.card.title}"))


def _megatron(settings: Settings, as_json: bool) -> None:
    import dataclasses

    from holdover.closed_form.megatron import nearest
    from holdover.closed_form.views import megatron_view

    optimal = dataclasses.replace(settings, recompute="optimal", store_all="0").run()
    near = nearest(optimal, settings.memory_bytes())
    if not as_json:
        show(megatron_view(near))
        return
    show_json(
        {
            "version": 1,
            "flags": list(near.flags),
            "not_expressible": list(near.not_expressible),
            "lost_time": near.lost_time,
            "megatron": near.found.to_json(),
            "optimal": near.optimal.to_json(),
        }
    )


def _draw(settings: Settings | None, path: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from holdover.closed_form.figure import compare_bar, draw, paper_bars

    if settings is None:
        bars, card_name = paper_bars(), "a100-80gb"
    else:
        bar = compare_bar(
            settings.architecture(),
            settings.layout(),
            kernels=settings.kernels(),
            recompute=settings.recomputation(),
            states=settings.states(),
            cluster=settings.cluster(),
            memory_bytes=settings.memory_bytes(),
        )
        bars, card_name = [bar], settings.card
    draw(bars, path, card_name=card_name)
    if as_json:
        show_json({"version": 1, "file": str(path), "bars": [asdict(bar) for bar in bars]})
    else:
        typer.echo(f"drew {path}")
