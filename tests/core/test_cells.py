"""Cells: many of them are read and written at once, and all of them or none."""

import dis

import pytest

from nnxlib.core.cells import new_cell, reader, write_cells, writer


@pytest.mark.parametrize("when", range(4))
def test_an_interrupt_between_writes_leaves_none_undone(when):
    """What a step returned is in all of its cells or in none: also if Ctrl-C arrives in the middle of the loop."""

    class Interrupted(list):
        def __iter__(self):
            for k, cell in enumerate(super().__iter__()):
                if k == when and not interrupted:
                    interrupted.append(k)
                    raise KeyboardInterrupt
                yield cell

    interrupted = []
    cells = Interrupted(new_cell(None) for _ in range(4))
    with pytest.raises(KeyboardInterrupt):
        write_cells(cells, [0, 1, 2, 3, "of the output"])
    assert [cell.value for cell in cells] == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [0, 1, 2, 128, 129])
def test_readers_and_writers_of_cells(count):
    """Each cell is read once and in order, and given its own value; the output behind the values is nobody's."""
    cells = [new_cell(k) for k in range(count)]
    assert reader(cells)(lambda *values: values) == tuple(range(count))
    writer(cells)((*range(1, count + 1), "of the output"))
    assert [cell.value for cell in cells] == [*range(1, count + 1)]


def test_nothing_can_interrupt_what_is_written_out():
    """Python looks out for an interrupt where a function is entered or called, and where a loop goes round."""
    instructions = [x.opname for x in dis.get_instructions(writer([new_cell(None) for _ in range(5)]))]
    assert "STORE_ATTR" in instructions
    assert not [x for x in instructions if x.startswith(("CALL", "JUMP", "FOR_ITER", "SEND", "YIELD"))]
