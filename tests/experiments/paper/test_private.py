"""Figure 6 and Table 1: what is said follows from the numbers."""

from __future__ import annotations

from typing import Any

from ntkfl_experiments.paper.private import STAGED, judge_table1
from ntkfl_experiments.paper.settings import FEDAVG


def table(**staged: Any) -> dict[str, Any]:
    def row(rounds: list[int | None], mib: list[float | None]) -> dict[str, Any]:
        return {"rounds": rounds, "uplink_mib": mib}

    return {
        "table": {
            "CP-NTK-FL": row([14, 16], [190.0, 210.0]),
            STAGED: row([20, 26], [150.0, 160.0]) | {"longest": 40} | staged,
            "FedCOM": row([240, 260], [150.0, 170.0]),
            "QSGD, 4 bit": row([600, 620], [390.0, 400.0]),
            FEDAVG: row([280, 290], [600.0, 700.0]),
        }
    }


def test_table_1_is_judged_by_the_papers_choices() -> None:
    """Our preset is the same in all of these, and changes nothing."""
    assert [v.holds for v in judge_table1(table())[0]] == [True, True, True]
    assert [v.holds for v in judge_table1(table(rounds=[30, 40]))[0]] == [False, False, True]
    never = table(rounds=[26, None], uplink_mib=[150.0, None])
    assert [v.holds for v in judge_table1(never)[0]] == [False, False, None]
    assert "in 1 of 2 seeds" in judge_table1(never)[0][0].ours
    assert judge_table1(never)[0][1].short == "below 7.6×: not in 40 rounds; our preset 16.7× or more"  # 250 / 33
    soon = table(rounds=[20, None], uplink_mib=[150.0, None], longest=22)  # 250 / 21: it may be ten times or not
    assert judge_table1(soon)[0][1].holds is None
    assert judge_table1(table(uplink_mib=[200.0, 250.0]))[0][2].holds is False
