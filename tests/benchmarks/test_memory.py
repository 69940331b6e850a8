"""The benchmark of memory: it runs, and shows that nested remat grows with the square root of the depth."""

from benchmarks import memory


def test_nested_remat_grows_with_the_square_root_of_the_depth():
    kept = {depth: memory.activations_kept(depth, memory.ways(depth)["remat_scan"]) for depth in (16, 64)}
    assert kept[64] < 2.2 * kept[16]
    assert kept[64] < memory.activations_kept(64, remat=True) / 2


def test_the_table_has_a_cell_for_each_way_and_depth():
    lines = memory.table((4,)).lines()
    assert [line[0] for line in lines] == ["", "loop", "remat", "remat_scan"]
    assert all(float(line[1]) > 0 for line in lines[1:])
