"""Tables that another device has sorted for the native core."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from test_found_elsewhere import found_of, layer

from magicpig import LSHConfig, _native, reference
from magicpig.kv import device_index
from magicpig.kv.device_index import hash_keys


def sorted_of(keys, lsh):
    """As found_of, with tables instead of signs."""
    means, inv_norms, signs = hash_keys(keys, lsh)
    offsets, ids = reference.sorted_into_tables(signs, lsh.num_tables, lsh.bits_per_table)
    return means, inv_norms, offsets.numpy().astype(np.uint32), ids.numpy().astype(np.uint16)


@pytest.mark.parametrize("tokens", [1, 100, 3000, 65_536])
@pytest.mark.parametrize(("bits", "tables"), [(6, 40), (11, 7), (16, 2)])
def test_tables_sorted_elsewhere_are_those_of_the_signs(tokens, bits, tables):
    lsh = LSHConfig(bits, tables, exact_below=0)
    keys, values = torch.randn(2, 2, tokens, 24)
    whole, grown, own = (layer(lsh, []) for _ in range(3))
    own._native.append_hashed(keys, values, found_of(keys, lsh))
    whole._native.append_hashed(keys, values, sorted_of(keys, lsh))
    growing = _native.GrowingSegment(grown._native, tokens)
    growing.add(keys, values)
    growing.finish(sorted_of(keys, lsh))
    for kv in (whole, grown):
        assert (kv._native.segment_memory(0)[1] == own._native.segment_memory(0)[1]).all()


@pytest.mark.parametrize("tokens", [64, 100, 3000])
def test_tables_sorted_elsewhere_are_checked(tokens):
    lsh = LSHConfig(6, 40, exact_below=0)
    keys, values = torch.randn(2, 2, tokens, 24)
    kv, found = layer(lsh, []), sorted_of(keys, lsh)

    def refused(message, change):
        spoiled = [found[0], found[1], found[2].copy(), found[3].copy()]
        change(spoiled)
        growing = _native.GrowingSegment(kv._native, tokens)
        growing.add(keys, values)
        for taken in (growing.finish, lambda found: kv._native.append_hashed(keys, values, found)):
            with pytest.raises(ValueError, match=message):
                taken(tuple(spoiled))

    def put(which, place, value):
        def change(spoiled):
            spoiled[which][place] = value

        return change

    def part(which, *places):
        def change(spoiled):
            spoiled[which] = spoiled[which][places].copy()

        return change

    for place, value in (((1, 39, 5), found[3][1, 39, 6]), ((0, 0, 0), tokens), ((1, 3, 7), 65535)):
        refused("each row once", put(3, place, value))
    last = (0, 3, 64)
    for place, value in (((0, 3, 0), 1), (last, tokens - 1), (last, 2**32 - 1), ((1, 2, 9), 2**31)):
        refused("each row once", put(2, place, value))
    for which, name in ((2, "offsets"), (3, "ids")):
        for places in ([slice(1)], [slice(None), slice(39)], [slice(None), slice(None), slice(63)]):
            refused(f"{name} must have shape", part(which, *places))
    assert kv.num_tokens == 0
    with pytest.raises(TypeError, match="incompatible"):
        kv._native.append_hashed(keys, values, (*found[:3], found[3].astype(np.int32)))


@pytest.mark.parametrize("wrong", [None, device_index.TRIED, "no such instruction"])
def test_a_device_that_sorts_wrongly_leaves_it_to_the_cpu(wrong, monkeypatch, recwarn):
    """What a GPU gives is compared with plain torch's tables once, before it is relied on."""
    right = wrong is None

    def sort(signs, num_tables, bits_per_table):
        if isinstance(wrong, str):
            raise RuntimeError(wrong)
        offsets, ids = reference.sorted_into_tables(signs, num_tables, bits_per_table)
        if signs.shape[2] == wrong:
            ids[-1, -1, -2:] = ids[-1, -1, -2:].flip(0)
        return offsets.int(), ids.short()

    lsh, keys = LSHConfig(6, 40, exact_below=0), torch.randn(2, 300, 24)
    signs = hash_keys(keys, lsh)
    on_gpu = ModuleType("magicpig.kv.tables_on_gpu")
    on_gpu.sort = sort
    monkeypatch.setitem(sys.modules, on_gpu.__name__, on_gpu)
    monkeypatch.setattr("magicpig.kv.tables_on_gpu", on_gpu, raising=False)
    monkeypatch.setattr(device_index, "has_triton", lambda where: True)
    monkeypatch.setattr(device_index, "hash_keys", lambda keys, lsh: signs)
    device_index._sorts_right.cache_clear()
    for _ in range(2):
        found = device_index.found_of(keys, lsh)
        expected = sort(signs[2], 40, 6) if right else signs[2:]
        assert all(torch.equal(a, b) for a, b in zip(found[2:], expected, strict=True))
    device_index._sorts_right.cache_clear()
    warnings = [str(each.message) for each in recwarn]
    assert len(warnings) == (not right)
    fault = wrong if isinstance(wrong, str) else "its tables are others than they should be"
    assert right or f"40 tables of 6 bits ({fault}): the CPU does" in warnings[0]
