import copy
import dataclasses
import pickle

import pytest

from magicpig import LSHConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits_per_table", 0),
        ("bits_per_table", 17),
        ("num_tables", 0),
        ("num_tables", 5000),
        ("min_collisions", 0),
        ("min_collisions", 151),
        ("seed", -1),
        ("exact_below", -1),
    ],
)
def test_a_bad_value_is_named(field, value):
    with pytest.raises(ValueError, match=rf"{field}.*{value}"):
        LSHConfig(**{field: value})


@pytest.mark.parametrize("value", ["10", 10.0, True, None])
def test_a_wrong_type_is_named(value):
    with pytest.raises(ValueError, match=rf"bits_per_table.*{value}"):
        LSHConfig(bits_per_table=value)


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match=r"bits=10.*bits_per_table"):
        LSHConfig(bits=10)


def test_it_can_be_copied_and_pickled():
    config = LSHConfig(num_tables=20)
    assert dataclasses.replace(config, seed=3) == LSHConfig(num_tables=20, seed=3)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_it_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LSHConfig().seed = 1
    assert len({LSHConfig(), LSHConfig(), LSHConfig(seed=1)}) == 2
