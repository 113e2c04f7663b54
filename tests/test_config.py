import copy
import dataclasses
import pickle

import pytest

from magicpig import LSHConfig, ScanConfig


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits_per_dim", 0),
        ("bits_per_dim", 3),
        ("bits_per_dim", 8),
        ("bits_per_dim", True),
        ("bits_per_dim", 2.0),
        ("bits_per_dim", "2"),
        ("bits_per_dim", None),
        ("budget", 0),
        ("budget", -0.01),
        ("budget", 1e-50),
        ("budget", 1.5),
        ("budget", float("nan")),
        ("budget", True),
        ("budget", "1%"),
        ("budget", None),
        ("target_error", 1e-50),
        ("min_rows", -1),
        ("min_rows", 2**31),
        ("min_rows", 1.5),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", True),
        ("exact_below", -1),
        ("exact_below", None),
    ],
)
def test_a_bad_value_of_scan_is_named(field, value):
    with pytest.raises(ValueError, match=rf"{field}.*{value}"):
        ScanConfig(**{field: value})


@pytest.mark.parametrize("value", ["10", 10.0, True, None])
def test_a_wrong_type_is_named(value):
    with pytest.raises(ValueError, match=rf"bits_per_table.*{value}"):
        LSHConfig(bits_per_table=value)


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match=r"bits=10.*bits_per_table"):
        LSHConfig(bits=10)
    with pytest.raises(ValueError, match=r"bits=2.*bits_per_dim"):
        ScanConfig(bits=2)


def test_it_can_be_copied_and_pickled():
    for config, other in (
        (LSHConfig(num_tables=20), LSHConfig(num_tables=20, seed=3)),
        (ScanConfig(budget=0.02), ScanConfig(budget=0.02, seed=3)),
    ):
        assert dataclasses.replace(config, seed=3) == other
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_it_is_frozen_and_hashable():
    for kind in (LSHConfig, ScanConfig):
        with pytest.raises(dataclasses.FrozenInstanceError):
            kind().seed = 1
        assert len({kind(), kind(), kind(seed=1)}) == 2
