import pytest
import torch

from magicpig import merge, reference


def states(n, shape=(3, 5), dim=8):
    return [(torch.randn(*shape, dim), 3 * torch.randn(shape)) for _ in range(n)]


def empty(shape=(3, 5), dim=8):
    return torch.zeros(*shape, dim), torch.full(shape, -torch.inf)


def same(a, b):
    torch.testing.assert_close(a[0], b[0])
    torch.testing.assert_close(a[1], b[1])


def test_it_is_associative_and_commutative():
    a, b, c = states(3)
    same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))
    same(merge(*a, *b), merge(*b, *a))


def test_it_equals_the_reference():
    (a, b) = states(2, shape=())
    out, lse = merge(*a, *b)
    same((out, lse), reference.merge(*a, *b))


def test_the_empty_state_changes_nothing_and_two_of_them_are_empty():
    (a,) = states(1)
    same(merge(*a, *empty()), a)
    same(merge(*empty(), *a), a)
    same(merge(*empty(), *empty()), empty())


def test_far_apart_states_do_not_overflow():
    out, lse = merge(torch.ones(1, 2), torch.tensor([1e4]), torch.zeros(1, 2), torch.tensor([-1e4]))
    assert out.tolist() == [[1.0, 1.0]]
    assert lse.item() == 1e4


def test_wrong_shapes_are_named():
    (a, b) = states(2)
    with pytest.raises(ValueError, match="lse_b"):
        merge(*a, b[0], b[1][0])
    with pytest.raises(ValueError, match="out_b"):
        merge(*a, b[0][:2], b[1][:2])


@pytest.mark.parametrize(
    "bad", [[1.0], torch.ones(3, 5, 8).int(), torch.ones(3, 5, 8, device="meta")]
)
def test_wrong_types_are_named(bad):
    (a, b) = states(2)
    with pytest.raises((TypeError, ValueError), match="out_b"):
        merge(*a, bad, b[1])
    with pytest.raises((TypeError, ValueError), match="lse_b"):
        merge(*a, b[0], bad)


def test_an_output_without_dimensions_is_refused():
    with pytest.raises(ValueError, match="lse_a"):
        merge(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0))
