"""The toggles: defaults, bad values, unknown names, and the switch that turns all off."""

import pytest

from vllm_commext import ConfigError
from vllm_commext.settings import GONE_VALUES, TOGGLES, Toggle, describe_unknown, read_settings


def test_defaults_without_any_variable() -> None:
    settings = read_settings({})
    assert dict(settings.values) == {toggle.field: toggle.default for toggle in TOGGLES}
    assert settings.enabled
    assert settings.unknown == ()


@pytest.mark.parametrize("toggle", TOGGLES, ids=lambda toggle: toggle.name)
@pytest.mark.parametrize("value", ["2", "", " 1", "true", "AUTO"])
def test_a_bad_value_is_an_error_that_lists_the_choices(toggle: Toggle, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings({toggle.name: value})
    message = str(raised.value)
    assert message.startswith(f"{toggle.name}: expected one of {', '.join(toggle.choices)}")
    assert repr(value) in message


@pytest.mark.parametrize(("name", "value"), GONE_VALUES)
def test_a_value_that_is_gone_names_what_to_do_instead(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings({name: value})
    assert str(raised.value) == f"{name}={value} is gone: {GONE_VALUES[name, value]}"


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"VLLM_COMMEXT_STRICT.*VLLM_COMMEXT_NIXL"):
        read_settings({"VLLM_COMMEXT_STRICT": "yes", "VLLM_COMMEXT_NIXL": "yes"})


def test_turned_off_as_a_whole_checks_nothing_else() -> None:
    settings = read_settings({"VLLM_COMMEXT": "0", "VLLM_COMMEXT_NIXL": "nonsense"})
    assert not settings.enabled


def test_unknown_names_are_reported_with_the_known_ones() -> None:
    settings = read_settings({"VLLM_COMMEXT_NIXI": "1", "VLLM_PORT": "1", "PATH": "/bin"})
    assert settings.unknown == ("VLLM_COMMEXT_NIXI",)
    line = describe_unknown("VLLM_COMMEXT_NIXI")
    assert "did you mean VLLM_COMMEXT_NIXL?" in line
    assert all(toggle.name in line for toggle in TOGGLES)
