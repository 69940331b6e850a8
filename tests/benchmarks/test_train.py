"""The benchmark of train steps: all take part in all sizes but the largest, where each library has its fastest form."""

from benchmarks import dispatch, train


def test_the_largest_size_has_the_fastest_form_of_each_library() -> None:
    assert set(train.IN_LARGE) <= set(dispatch.ADAPTERS)
    chosen = {size: {k for k in dispatch.ADAPTERS if train.takes_part(("train", size), k)} for size in dispatch.SIZES}
    assert chosen.pop(train.LARGE) == set(train.IN_LARGE)
    assert all(labels == set(dispatch.ADAPTERS) for labels in chosen.values())


def test_each_size_is_measured_with_and_without_donation() -> None:
    found = dispatch.cases(train.TRAIN, dispatch.SIZES)
    assert {(kind, size) for kind in ("train", "train, donated") for size in (10, 100, 1000, 5000)} == set(found)
