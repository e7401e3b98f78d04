"""`holdover closed-form` as people run it; printed tables add up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from holdover.cli.app import app
from holdover.units import format_bytes

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["closed-form", *arguments])


def printed(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


EXAMPLE = "gpt3-175b --tp 8 --pp 8 --sequence-parallel --recompute selective --micro-batch 1".split()  # noqa: SIM905


def test_the_example_of_the_documentation() -> None:
    text = printed(*EXAMPLE)
    assert "gpt3-175b: 174.6 B parameters on 64 GPUs (H100 80 GB SXM), tp 8, pp 8, sequence parallel, 1f1b" in text
    assert re.search(r"activations +9\.56 +1\.20", text)
    assert "57.26 GiB of 79.10 GiB usable: fits" in text
    assert "Not counted: CUDA context" in text


def test_printed_parts_add_up_to_the_printed_total() -> None:
    rows = {
        match[1].strip(): float(match[2])
        for match in re.finditer(r"^([a-z ,]+?)  +([\d.]+)  +[\d.]+$", printed(*EXAMPLE), re.MULTILINE)
    }
    parts = ("weights", "gradients", "optimizer", "activations", "embedding", "head, loss", "working set")
    assert sum(rows[name] for name in parts) == pytest.approx(rows["total"], abs=0.04)


def test_every_stage_has_a_row() -> None:
    lines = [line for line in printed(*EXAMPLE, "--stages").splitlines() if line.startswith("stage ")]
    assert len(lines) == 8
    for line in lines:
        numbers = [float(part) for part in line.rsplit(maxsplit=8)[1:]]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.04)


def test_tensors_are_listed_and_add_up() -> None:
    text = printed(*EXAMPLE, "--tensors")
    table = text[text.index("one dense layer") :]
    unit = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    sizes = [float(number) * unit[name] for number, name in re.findall(r"([\d.]+) (B|KiB|MiB)$", table, re.MULTILINE)]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], rel=1e-4)
    assert re.search(r"softmax dropout mask +as +tensor +core_attn +[\d.]+ us +48.00 MiB", table)


def test_json_is_the_result() -> None:
    data = json.loads(printed(*EXAMPLE, "--json"))
    assert data["fits"] is True
    assert data["peak_bytes"] == max(stage["total_bytes"] for stage in data["stages"])
    assert data["recompute"]["granularity"] == "selective"


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8}
    config |= {"num_key_value_heads": 2, "intermediate_size": 704, "vocab_size": 1000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    data = json.loads(printed(str(file), "--code", "huggingface", "--seq", "64", "--micro-batch", "2", "--json"))
    assert data["model"]["name"] == tmp_path.name
    assert data["stages"][0]["activations_bytes"] == 4 * 128 * (16 * 256 + 4 * 256 + 4 * 64 + 8 * 704 + 4 * 8 + 8)


def test_a_measured_step_gives_utilisation() -> None:
    text = printed("gpt-22b", "--tp", "8", "--micro-batch", "4", "--card", "a100-80gb", "--step-time", "1.1")
    assert "At the given 1.1 s a step: MFU" in text


def test_settings_side_by_side() -> None:
    text = printed("llama3-8b", "--dp", "8", "--zero", "3", "--compare", "recompute=full", "--compare", "tp=2,dp=4")
    assert "recompute=full" in text
    assert "tp=2,dp=4" in text
    data = json.loads(printed("llama3-8b", "--compare", "recompute=full", "--json"))
    assert [x["name"] for x in data["settings"]] == ["recompute none", "recompute=full"]
    assert data["settings"][1]["stages"][0]["activations_bytes"] < data["settings"][0]["stages"][0]["activations_bytes"]


def test_the_sweep() -> None:
    text = printed("llama3-8b", "--sweep", "--gpus", "16", "--global-batch", "64", "--top", "3")
    assert "llama3-8b on 16 H100 80 GB SXM, 64 sequences of 8192 tokens" in text
    data = json.loads(printed("llama3-8b", "--sweep", "--gpus", "16", "--global-batch", "64", "--top", "3", "--json"))
    assert len(data["fitting"]) == 3
    times = [found["step_seconds"] for found in data["fitting"]]
    assert times == sorted(times)


def test_a_sweep_in_which_nothing_fits_says_so_and_what_the_lightest_needs() -> None:
    options = ["llama3-8b", "--sweep", "--gpus", "8", "--global-batch", "8", "--memory"]
    done = run(*options, "1GiB", "--json")
    assert done.exit_code == 2
    data = json.loads(done.stdout)
    assert data["fitting"] == []
    said = " ".join(done.stderr.split())
    assert f"none of {data['layouts']} layouts of llama3-8b on 8 H100 80 GB SXM" in said
    assert f"fits in 1.00 GiB of each GPU; the lightest needs {format_bytes(data['lightest_bytes'], 'GiB')}." in said
    assert "Ways out: more --gpus" in said
    assert run(*options, f"{data['lightest_bytes']}B").exit_code == 0
    refused = run(*options, f"{data['lightest_bytes'] - 1}B")
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_megatrons_flags() -> None:
    options = ["llama3-8b", "--dp", "8", "--zero", "3", "--micro-batch", "2"]
    text = printed(*options, "--megatron")
    assert "--recompute-granularity full" in text
    assert "The flags lose" in text
    data = json.loads(printed(*options, "--megatron", "--json"))
    assert data["lost_time"] > 0
    assert data["megatron"]["fits"]
    assert data["optimal"]["fits"]


def test_the_papers_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "figure1.png"
    assert printed("--figure", str(file)) == f"drew {file}\n"
    assert file.read_bytes().startswith(PNG)
    data = json.loads(printed("--figure", str(file), "--json"))
    assert [bar["name"] for bar in data["bars"]] == ["gpt-22b", "gpt3-175b", "mt-nlg-530b", "gpt-1t"]
    svg = tmp_path / "one.svg"
    printed("llama3-8b", "--dp", "8", "--zero", "3", "--recompute", "full", "--figure", str(svg))
    assert "<svg" in svg.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama9"], "unknown model 'llama9'"),
        (["llama3-8b", "--tp", "16"], "above the 8 key-value heads"),
        (["llama3-8b", "--ep", "2"], "without experts"),
        (["llama3-8b", "--sweep"], "a sweep needs --gpus and --global-batch (the sequences of a step)"),
        (["llama3-8b", "--sweep", "--gpus", "8"], "here they are 8 and 0"),
        (["llama3-8b", "--gpus", "8"], "add --sweep, or say one layout by --tp, --pp, --dp"),
        (["llama3-8b", "--compare", "x=1"], "no setting 'x'"),
        (["llama3-8b", "--recompute", "optimal", "--memory", "20GiB"], "even with everything recomputed"),
        (["llama3-8b", "--figure", "/nowhere/x.png"], "cannot write"),
        (["--hidden", "64"], "the model needs --layers"),
        (["llama3-8b", "--card", "gtx"], "unknown card"),
        (
            ["llama3-8b", "--sweep", "--gpus", "8", "--global-batch", "8", "--memory", "1GiB"],
            "nothing fits: none of",
        ),
    ],
)
def test_mistakes_get_one_message_and_status_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    said = " ".join((done.stderr or done.output).split())
    assert message in said
    assert "Traceback" not in said
