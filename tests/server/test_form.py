"""What the form takes, and what it says at which field."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdover.server.form import FormError, Wanted, read_form

MODELS = ["timm:resnet18", "models.py:make"]


def errors(**fields: Any) -> dict[str, str]:
    with pytest.raises(FormError) as raised:
        read_form({"model": MODELS[0], **fields}, MODELS)
    return raised.value.errors


def test_a_form_as_the_page_sends_it() -> None:
    sent = {
        "model": "timm:resnet18", "batch": "16", "seq": "", "precision": "bf16-mixed", "optimizer": "sgd",
        "device": "h100-80gb", "budget": " 60% ",
    }  # fmt: skip
    wanted = Wanted("timm:resnet18", 16, None, "bf16-mixed", "sgd", "h100-80gb", "60%")
    assert read_form(sent, MODELS) == wanted
    assert wanted.to_dict() == {**sent, "batch": 16, "seq": None, "budget": "60%"}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "timm:resnet50", "not among the models named on the command line: timm:resnet18, models.py:make"),
        ("model", "/etc/evil.py:make", "not among the models named on the command line"),
        ("model", ["timm:resnet18"], "a short text"),
        ("batch", "0", "a whole number from 1 to 65,536"),
        ("batch", "1e3", "a whole number from 1 to 65,536"),
        ("batch", "٤", "a whole number from 1 to 65,536"),
        ("batch", True, "a whole number from 1 to 65,536"),
        ("batch", 65_537, "a whole number from 1 to 65,536"),
        ("seq", -1, "a whole number from 1 to 1,048,576"),
        ("precision", "fp4", "one of 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, or nothing"),
        ("optimizer", "lion", "one of adafactor, adagrad, adam, adamw, rmsprop, sgd, or none"),
        ("device", "abacus", "unknown card 'abacus'"),
        ("budget", "16gb", "'16gb' can be read in two ways: write 16GiB"),
        ("budget", "130%", "a budget of 130% makes no sense"),
        ("budget", "x" * 101, "a short text"),
        ("shell", "rm -rf /", "unknown fields: shell"),
    ],
)  # fmt: skip
def test_what_is_said_at_the_field(field: str, value: Any, said: str) -> None:
    found = errors(**{field: value})
    key = "" if field == "shell" else field
    assert list(found) == [key]
    assert found[key].startswith(said)


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert set(errors(batch="many", budget="0", optimizer="lion")) == {"batch", "budget", "optimizer"}


def test_a_files_factory_decides_its_sizes() -> None:
    assert set(errors(model="models.py:make", batch=4, seq=8)) == {"batch", "seq"}
    assert read_form({"model": "models.py:make"}, MODELS).batch == 8


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from([*Wanted.__dataclass_fields__, "other"])


@given(json_values | st.dictionaries(fields, json_values))
def test_anything_is_read_or_refused_and_nothing_else_is_loaded(data: Any) -> None:
    wanted = None
    with suppress(FormError):
        wanted = read_form(data, MODELS)
    assert wanted is None or wanted.model in MODELS
