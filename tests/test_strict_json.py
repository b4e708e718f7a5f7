"""JSON texts that only some readers take are refused."""

import pytest

from octavo.serve.strict_json import strict_json


@pytest.mark.parametrize(
    "text", ["NaN", "[-Infinity]", '{"a": Infinity}', "1e999", "[-2e400]", "{"]
)
def test_what_is_not_json_everywhere(text):
    with pytest.raises(ValueError, match=r"JSON|large|Expecting"):
        strict_json(text)


def test_numbers_keep_their_value():
    assert strict_json('{"a": [1, 1.5, -2e-3, 1e308, 12345678901234567890]}') == {
        "a": [1, 1.5, -2e-3, 1e308, 12345678901234567890]
    }
