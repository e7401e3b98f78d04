"""From the MODEL of the command line to a training step."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from holdover.errors import ModelSpecError
from holdover.names import near

FORMS = "path/to/file.py:factory, transformers:CONFIG.json, transformers:CLASS, timm:NAME or torchvision:NAME"
LIBRARIES = {"transformers": "LlamaForCausalLM", "timm": "resnet18", "torchvision": "resnet18"}  # with an example
BATCH = 8  # where none is asked for
CLASSES = 1000  # of an image classifier, where it does not say
_MODEL_CLASS = re.compile(r"Model$|For[A-Z]\w+$")  # how the names of transformers' models end


@dataclass
class ModelStep:
    """A model with all that a training step needs."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None


def load(spec: str, *, batch: int | None = None, seq: int | None = None, meta: bool) -> ModelStep:
    """Build the training step that a MODEL argument names.

    Args:
        spec: one of the forms above.
        batch, seq: sizes of the inputs, for models that come from a library, and for a factory that has parameters of
            these names. None is the usual size, or the factory's own.
        meta: build the models of a library without their memory, where no number in them matters.

    Raises:
        ModelSpecError: it cannot be read, found, imported or built, or does not take such a size.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what the model's own code prints is no part of our output
        return _load(spec, batch, seq, meta)


def _load(spec: str, batch: int | None, seq: int | None, meta: bool) -> ModelStep:
    kind, name = parsed(spec)
    if kind in LIBRARIES:
        place: AbstractContextManager[Any] = torch.device("meta") if meta else nullcontext()
        builder = {"transformers": _from_transformers, "timm": _from_timm, "torchvision": _from_torchvision}[kind]
        try:
            with place:
                return builder(name, batch or BATCH, seq)
        except ModelSpecError:
            raise
        except Exception as error:
            raise ModelSpecError(f"{kind} could not build {name!r}: {_said(error)}") from error
    return _from_file(Path(kind), name, {"batch": batch, "seq": seq})


def parsed(spec: str) -> tuple[str, str]:
    """A MODEL as the library or file that it is of, and its name there.

    Raises:
        ModelSpecError: it has none of the forms, or there is no such file.
    """
    kind, colon, name = spec.partition(":")
    if colon and name and kind in LIBRARIES:
        return kind, name
    file, colon, factory = spec.rpartition(":")
    if kind in LIBRARIES:
        raise ModelSpecError(f"MODEL {spec!r} names no model: write for example {kind}:{LIBRARIES[kind]}")
    if colon and factory and Path(f"{file}.py").is_file() and not Path(file).is_file():
        raise ModelSpecError(f"there is no file {file}; near it: {file}.py, as in {file}.py:{factory}")
    if colon and "." not in file and not Path(file).exists() and (libraries := near(file, LIBRARIES)):
        raise ModelSpecError(f"MODEL {spec!r} is of no library that is known, {', '.join(LIBRARIES)}{libraries}")
    if not colon and spec.endswith(".py"):
        known = _functions(_import_file(Path(spec)))
        raise ModelSpecError(f"MODEL {spec!r} names no function: write {spec}:FUNCTION; {known}")
    if not colon or not file or not factory:
        raise ModelSpecError(f"cannot read MODEL {spec!r}: write {FORMS}")
    _check_file(Path(file))
    return file, factory


def _said(error: BaseException) -> str:
    """An error with what it was raised from, which transformers hides, and the way out where that is known."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    if root is error:
        text = _named(error, str(error).strip())
    else:
        text = f"{_first(error).rstrip('.')}, caused by {_first(root)}"
    return text + _torchvision_hint(root)


def _named(error: BaseException, text: str) -> str:
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first(error: BaseException) -> str:
    return _named(error, str(error).strip().partition("\n")[0])


def _torchvision_hint(root: BaseException) -> str:
    """PyPI pairs the CPU build of torch with a torchvision for CUDA, which is installed without a word."""
    if "torchvision" not in str(root) or hasattr(torch.ops.torchvision, "nms"):
        return ""
    number, _, build = torch.__version__.partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if re.match(r"cpu|cu\d|rocm|xpu", build) else ""
    return (
        f". The torchvision that is installed was built for another torch than {torch.__version__}, so that its "
        f"compiled ops do not load. Install both from one place (pip install --force-reinstall torch=={number} "
        f"torchvision{index}); or remove it (pip uninstall torchvision), which transformers, not timm, can do without"
    )


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ModelSpecError(f"{name} is not installed here: pip install {name}") from None
        raise ModelSpecError(f"{name} is installed but cannot be imported: {_said(error)}") from error


# -- files ------------------------------------------------------------------------------------------------------------


def _from_file(path: Path, factory: str, sizes: Mapping[str, int | None]) -> ModelStep:
    module = _import_file(path)
    make = getattr(module, factory, None)
    if make is None:
        raise ModelSpecError(f"{path} has no {factory!r}: {_functions(module)}")
    if not callable(make):
        raise ModelSpecError(f"{factory!r} of {path} is a {type(make).__name__}, not a function that makes a model")
    given = _taken(make, sizes, f"{factory}() of {path}")
    if lacking := _lacking(make, given):
        what = "is a class that" if inspect.isclass(make) else "is a function that"
        raise ModelSpecError(
            f"{factory!r} of {path} {what} needs arguments ({', '.join(lacking)}), and it is called without: give them "
            "defaults, or write a function that makes the model. --batch and --seq set parameters of these names"
        )
    try:
        made = make(**given)
    except (Exception, SystemExit) as error:
        raise ModelSpecError(f"{factory}() of {path} raised {_said(error)}{_where(error, path)}") from error
    return _as_step(made, f"{factory}() of {path}")


def _lacking(make: Callable[..., Any], given: Mapping[str, int]) -> list[str]:
    """The parameters without a default that nothing is given for."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # it is not told
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [n for n, p in parameters.items() if p.default is p.empty and p.kind not in kinds and n not in given]


def _functions(module: ModuleType) -> str:
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    return f"its functions are {', '.join(sorted(own))}" if own else "it defines no function"


def _taken(make: Callable[..., Any], sizes: Mapping[str, int | None], what: str) -> dict[str, int]:
    """The sizes that were asked for, which the factory has to have parameters for."""
    asked = {name: size for name, size in sizes.items() if size is not None}
    parameters = inspect.signature(make).parameters if asked else {}
    for name, size in asked.items():
        if name not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            own = f"only {', '.join(parameters)}" if parameters else "nor any other"
            raise ModelSpecError(
                f"--{name} {size} does not reach {what}, which has no parameter {name!r}, {own}. Leave it out, and "
                f"the factory decides; or give it that parameter, as in def make({name}={size})"
            )
    return asked


def _check_file(path: Path) -> None:
    if not path.is_file():
        hint = ": it is a directory" if path.is_dir() else near(path.name, (p.name for p in path.parent.glob("*.py")))
        if not hint and not path.suffix:
            hint = f". A MODEL is {FORMS}"
        raise ModelSpecError(f"there is no file {path}{hint}")


def _import_file(path: Path) -> ModuleType:
    _check_file(path)
    name = path.stem if path.stem not in sys.modules else f"model_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelSpecError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up by name
    sys.path.insert(0, str(path.parent.resolve()))  # what lies beside the file can be imported, as when it is run
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ModelSpecError(f"importing {path} raised {_said(error)}{_where(error, path)}") from error
    return module


def _where(error: BaseException, path: Path) -> str:
    lines = [
        f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()
    ]
    return f" (line {lines[-1]})" if lines else ""


def _as_step(made: Any, what: str) -> ModelStep:
    parts = list(made) if isinstance(made, tuple) else [made]
    if not parts or not isinstance(parts[0], torch.nn.Module) or len(parts) > 4:
        got = (
            f"({', '.join(type(part).__name__ for part in parts)})" if isinstance(made, tuple) else type(made).__name__
        )
        hint = ": all but the model, a torch.nn.Module, may be left out"
        if made is None:
            hint += "; is its return missing?"
        elif isinstance(made, type) and issubclass(made, torch.nn.Module):
            hint += f"; {made.__name__} is a class, call it"
        raise ModelSpecError(f"{what} must return (model, args, kwargs, loss), not {got}{hint}")
    step = ModelStep(parts[0])
    if len(parts) > 1 and parts[1] is not None:
        if not isinstance(parts[1], (tuple, list)):
            raise ModelSpecError(f"{what}: args must be a tuple such as (x,), not {type(parts[1]).__name__}")
        step.args = tuple(parts[1])
    if len(parts) > 2 and parts[2] is not None:
        if not isinstance(parts[2], Mapping):
            raise ModelSpecError(f"{what}: kwargs must be a dict, not {type(parts[2]).__name__}")
        step.kwargs = dict(parts[2])
    if len(parts) > 3 and parts[3] is not None:
        if not callable(parts[3]):
            raise ModelSpecError(f"{what}: loss must be a function of the output, not {type(parts[3]).__name__}")
        step.loss = parts[3]
    return step


# -- libraries --------------------------------------------------------------------------------------------------------


def _from_transformers(name: str, batch: int, seq: int | None) -> ModelStep:
    transformers = _library("transformers")
    if name.endswith(".json"):
        config, cls = _transformers_config(transformers, Path(name))
    else:
        cls = getattr(transformers, name, None)
        if cls is None or not getattr(cls, "config_class", None):
            told = near(name, filter(_MODEL_CLASS.search, dir(transformers))) or ": write for example LlamaForCausalLM"
            raise ModelSpecError(f"transformers has no model class {name!r}{told}")
        config = cls.config_class()
    model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
    model.train()
    sizes = getattr(config, "text_config", config)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        kwargs = {"pixel_values": torch.randn(batch, getattr(config, "num_channels", 3), side, side)}
        if "labels" in inspect.signature(model.forward).parameters:
            kwargs["labels"] = torch.randint(config.num_labels, (batch,))
        _refuse_seq(seq, name)
        return ModelStep(model, (), kwargs)
    most = getattr(sizes, "max_position_embeddings", None) or getattr(sizes, "n_positions", None)
    length = seq or min(512, most or 512)
    if most and length > most:
        raise ModelSpecError(f"--seq {length} is longer than the {most} positions of {name}")
    kwargs = {"input_ids": torch.randint(sizes.vocab_size, (batch, length))}
    parameters = inspect.signature(model.forward).parameters
    if "labels" in parameters:
        per_sample = "Classification" in type(model).__name__ and "Token" not in type(model).__name__
        kwargs["labels"] = torch.randint(config.num_labels, (batch,)) if per_sample else kwargs["input_ids"]
    elif getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = kwargs["input_ids"]
    step = ModelStep(model, (), dict(kwargs))
    if "use_cache" in parameters:
        step.kwargs["use_cache"] = False  # nothing is generated in training
    return step


def _transformers_config(transformers: ModuleType, path: Path) -> tuple[Any, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ModelSpecError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelSpecError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise ModelSpecError(f'{path} is not a transformers configuration: it has no "model_type"')
    config = transformers.AutoConfig.for_model(**data)
    for architecture in data.get("architectures") or ():
        cls = getattr(transformers, architecture, None)
        if cls is not None:
            return config, cls
    return config, transformers.AutoModelForCausalLM._model_mapping[type(config)]


def _from_timm(name: str, batch: int, seq: int | None) -> ModelStep:
    timm = _library("timm")
    if not timm.is_model(name):
        lists = "timm.list_models() lists all"
        raise ModelSpecError(f"timm has no model {name!r}{near(name, timm.list_models())}; {lists}")
    _refuse_seq(seq, name)
    model = timm.create_model(name, pretrained=False)
    return _classifier(model, batch, timm.data.resolve_model_data_config(model)["input_size"])


def _from_torchvision(name: str, batch: int, seq: int | None) -> ModelStep:
    models = _library("torchvision").models
    if name not in models.list_models():
        lists = "torchvision.models.list_models() lists all"
        raise ModelSpecError(f"torchvision has no model {name!r}{near(name, models.list_models())}; {lists}")
    _refuse_seq(seq, name)
    return _classifier(models.get_model(name, weights=None), batch, (3, 224, 224))


def _refuse_seq(seq: int | None, name: str) -> None:
    if seq is not None:
        raise ModelSpecError(f"--seq {seq}: {name} takes images, which have no tokens to count; leave the option out")


def _classifier(model: torch.nn.Module, batch: int, size: tuple[int, ...]) -> ModelStep:
    labels = torch.randint(getattr(model, "num_classes", CLASSES), (batch,))

    def loss(output: Any) -> torch.Tensor:
        logits = output if isinstance(output, torch.Tensor) else output[0]
        return torch.nn.functional.cross_entropy(logits, labels)

    return ModelStep(model.train(), (torch.randn(batch, *size),), {}, loss)
