"""Models of transformers, timm and torchvision, by name and configuration."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import benchmarks.zoo  # noqa: F401  (declares the names of torchvision's compiled ops)
import pytest
import torch

import holdover
from holdover.cli.model_spec import load

from .conftest import Run

ROOT = Path(__file__).parent.parent.parent
PYTHON = ("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import benchmarks.zoo, holdover.cli as c; c.main()")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip


def of(run: Run, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run(*arguments, python=PYTHON)


def test_a_configuration_is_estimated_planned_on_meta_and_verified(run: Run, tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    sizes = ("transformers:llama.json", "--batch", "4", "--seq", "64")
    done = of(run, "estimate", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    estimate = json.loads(done.stdout)
    assert (estimate["model"], estimate["recorded_on"]) == ("LlamaForCausalLM", "fake")
    assert "input_ids=int64[4, 64]" in estimate["inputs"]
    done = of(run, "plan", *sizes, "--budget", "80%", "-o", "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["unplanned_peak_bytes"] == estimate["peak_bytes"]
    done = of(run, "verify", *sizes, "--plan", "plan.json", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["measured_unplanned_peak_bytes"] == pytest.approx(estimate["peak_bytes"], rel=0.01)


def test_classes_and_names_are_built_without_their_memory(run: Run) -> None:
    done = of(run, "estimate", "transformers:LlamaForCausalLM", "--batch", "1", "--seq", "16", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_bytes"] > 20 * 2**30
    done = of(run, "estimate", "timm:resnet18", "--batch", "2", "--json", "--optimizer", "sgd")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == "(float32[2, 3, 224, 224])"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("transformers:NoSuchModel", "transformers has no model class 'NoSuchModel'"),
        ("transformers:LlamaForCausal", "transformers has no model class 'LlamaForCausal'; near it: LlamaForCausalLM"),
        ("transformers:nowhere.json", "cannot read nowhere.json: No such file or directory"),
        ("transformers:empty.json", 'empty.json is not a transformers configuration: it has no "model_type"'),
        ("transformers:broken.json", "broken.json is not JSON"),
        ("timm:resnet19", "timm has no model 'resnet19'; near it: resnet"),
        ("timm:resnet19", "timm.list_models() lists all"),
        ("timm:resnet18", "--seq 16: resnet18 takes images, which have no tokens to count; leave the option out"),
        ("torchvision:resnet18", "--seq 16: resnet18 takes images"),
        ("torchvision:resnet5", "torchvision has no model 'resnet5'; near it: "),
    ],
)
def test_what_a_library_does_not_have_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(holdover.ModelSpecError) as caught:
        load(model, batch=2, seq=16, meta=True)
    assert said in str(caught.value)


def test_a_sequence_longer_than_the_positions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA))
    with pytest.raises(holdover.ModelSpecError, match="--seq 129 is longer than the 128 positions"):
        load(f"transformers:{path}", batch=2, seq=129, meta=True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("torchvision:resnet18", "torchvision is installed but cannot be imported: RuntimeError: operator"),
        ("transformers:LlamaForCausalLM", "caused by RuntimeError: operator torchvision::nms does not exist"),
    ],
)
def test_a_torchvision_for_another_torch_is_named(run: Run, tmp_path: Path, model: str, said: str) -> None:
    package = tmp_path / "torchvision"  # found before the installed one, and as broken as one for CUDA
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(*_): pass\n"
    )
    done = run("estimate", model)
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert said in told
    assert f"was built for another torch than {torch.__version__}, so that its compiled ops do not load" in told
    assert f"pip install --force-reinstall torch=={torch.__version__.partition('+')[0]} torchvision" in told


def test_other_causes_are_shown_without_blaming_torchvision(tmp_path: Path) -> None:
    path = tmp_path / "causes.py"
    path.write_text(
        "def make():\n"
        "    try:\n        {}['width']\n"
        "    except KeyError as error:\n        raise ValueError('no such size.\\nNone at all.') from error\n"
    )
    with pytest.raises(holdover.ModelSpecError) as caught:
        load(f"{path}:make", batch=None, seq=None, meta=True)
    said = f"make() of {path} raised ValueError: no such size, caused by KeyError: 'width' (line 5)"
    assert str(caught.value) == said
