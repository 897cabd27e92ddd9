from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.exchange.torch_csv import read_schedule, schedule_csv
from planner.schedules import Action, Letter, Schedule, parse_action

actions = st.builds(
    Action,
    stage=st.integers(0, 12),
    letter=st.sampled_from((Letter.FORWARD, Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)),
    microbatch=st.integers(0, 100),
)


def read(text: str, tmp_path: Path) -> tuple[list[str], tuple[str, ...]]:
    (tmp_path / "table.csv").write_text(text)
    schedule, remarks = read_schedule(tmp_path / "table.csv")
    return [" ".join(map(str, order)) for order in schedule], remarks


@given(rows=st.lists(st.lists(actions, min_size=1).map(tuple), min_size=1).map(tuple))
def test_what_is_written_reads_the_same(rows: Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    path.write_text(schedule_csv(rows))
    assert read_schedule(path) == (rows, ())


def test_blanks_overlaps_and_derived_cells(tmp_path: Path) -> None:
    text = "0UNSHARD, 0F0 ,,0SEND_F0,(0F3;3B1)OVERLAP_F_B,0RECV_B1,0REDUCE_GRAD,0RESHARD\n,1F0,1I0,1W0,1UNSHARD0\n\n"
    assert read(text, tmp_path) == (["0F0 0F3 3B1", "1F0 1I0 1W0"], ())


def test_old_letters_are_read_as_what_they_meant(tmp_path: Path) -> None:
    rows, remarks = read("0F0,0F1,0B0,0W0,0BW1\n", tmp_path)
    assert rows == ["0F0 0F1 0I0 0W0 0B1"]
    assert len(remarks) == 1


@pytest.mark.parametrize("text", ["", "\n\n", "0F\n", "F0\n", "0f0\n", "(0F0;1G0)OVERLAP_F_B\n", "0F0 0F1\n"])
def test_what_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"table\.csv: (row 0|has no rows)"):
        read(text, tmp_path)


def test_letters_spell_the_same_as_actions() -> None:
    assert str(parse_action("3I0")) == "3I0"
