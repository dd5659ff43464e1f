"""Data of one's own in one file: tables and archives, with a column of clients, and errors that say where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import ntkfl
from ntkfl.data import IID, ByClient, Dirichlet, from_clients, from_datasets, from_file
from ntkfl.errors import ConfigError, DataError
from ntkfl.federation.config import RunConfig, load_data
from ntkfl.federation.simulation import execute
from ntkfl.wire import Message

HEADER = "age,client,dose,label,split\n"
ROWS = [
    ("A", 0.5, 1.0, 0, "train"), ("B", 1.5, 2.0, 1, "train"), ("A", 2.5, 3.0, 1, "train"), ("B", 3.5, 4.0, 0, "test"),
    ("A", 4.5, 5.0, 2, "train"), ("A", 5.5, 6.0, 2, "test"),
]  # fmt: skip


def table(path: Path) -> Path:
    path.write_text(HEADER + "".join(f"{a},{c},{d},{y},{s}\n" for c, a, d, y, s in ROWS))
    return path


def by_hand() -> Any:
    def rows(wanted: list[int]) -> tuple[np.ndarray, np.ndarray]:
        chosen = [ROWS[i] for i in wanted]
        return np.array([[a, d] for _, a, d, _, _ in chosen]), np.array([y for *_, y, _ in chosen])

    return from_clients([rows([0, 2, 4]), rows([1])], test=rows([3, 5]))


def same(a: Any, b: Any) -> None:
    assert len(a) == len(b)
    for i in range(len(a)):
        assert all(torch.equal(s, t) for s, t in zip(a.client(i), b.client(i), strict=True))
    assert all(torch.equal(s, t) for s, t in zip(a.test, b.test, strict=True))
    assert a.classes == b.classes


def test_a_table_with_clients_and_a_split(tmp_path: Path) -> None:
    dataset = from_file(table(tmp_path / "rows.csv"))
    assert repr(dataset).endswith("4 training and 2 test rows [2], 3 classes)")
    same(dataset.partition(ByClient()), by_hand())
    assert dataset.partition(ByClient()).describe()["partition"] == {"kind": "client"}
    assert dataset.partition(IID(clients=4)).sizes == [1] * 4


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("client", "age", "dose", "label", "split")
    rows = pandas.DataFrame(ROWS, columns=names)
    monkeypatch.setattr(pandas, "read_parquet", lambda path: rows.copy())
    same(from_file(tmp_path / "rows.parquet").partition(ByClient()), by_hand())

    rows["seen"] = pandas.Timestamp("2026-11-18")
    with pytest.raises(DataError, match=r"row 2 has '2026-11-18'.* in column 'seen', which must be numbers"):
        from_file(tmp_path / "rows.parquet")
    rows.loc[1, "client"] = None
    with pytest.raises(DataError, match="row 3 lacks values"):
        from_file(tmp_path / "rows.parquet")

    def lacking(path: Path) -> None:
        raise ImportError("no engine")

    monkeypatch.setattr(pandas, "read_parquet", lacking)
    with pytest.raises(DataError, match="need pyarrow; or save the table as CSV"):
        from_file(tmp_path / "rows.parquet")


def test_a_table_without_pandas_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="a table needs the extra 'data'"):
        from_file(table(tmp_path / "rows.csv"))


def test_an_archive_with_clients(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.array(["u", "v"] * 6), test_x=x[:4] + 1, test_y=y[:4])
    fed = from_file(tmp_path / "a.npz").partition(ByClient())
    same(fed, from_clients([(x[::2], y[::2]), (x[1::2], y[1::2])], test=(x[:4] + 1, y[:4])))


def test_a_fifth_of_the_rows_is_for_testing_where_the_file_does_not_say(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(50.0).reshape(50, 1), y=np.arange(50) % 2)
    dataset = from_file(tmp_path / "a.npz")
    assert 4 <= len(dataset.test_rows) <= 16
    both = torch.cat([dataset.rows.x, dataset.test_rows.x]).flatten().sort().values
    assert torch.equal(both, torch.arange(50.0))
    assert torch.equal(dataset.test_rows.x, from_file(tmp_path / "a.npz").test_rows.x)
    with pytest.raises(DataError, match="does not say whose its rows are"):
        dataset.partition(ByClient())


def test_a_row_is_for_testing_whatever_other_rows_there_are(tmp_path: Path) -> None:
    """Taking one record away moves no other one: ε of a record rests on it."""
    draws = np.random.default_rng(0)
    x, y = draws.standard_normal((1000, 3)), np.arange(1000) % 2
    np.savez(tmp_path / "whole.npz", x=x, y=y)
    whole = from_file(tmp_path / "whole.npz").test_rows.x
    assert 150 < len(whole) < 250
    for gone in (0, 400, 999):
        np.savez(tmp_path / "less.npz", x=np.delete(x, gone, 0), y=np.delete(y, gone))
        less = from_file(tmp_path / "less.npz").test_rows.x
        kept = (whole != torch.from_numpy(x[gone]).float()).any(1)
        assert torch.equal(less, whole[kept])


def test_real_targets_have_a_decimal_point(tmp_path: Path) -> None:
    (tmp_path / "real.csv").write_text("x,label\n" + "".join(f"{i},{i}.0\n" for i in range(10)))
    dataset = from_file(tmp_path / "real.csv")
    assert dataset.classes is None
    assert dataset.partition(IID(clients=2)).output_dim == 1
    with pytest.raises(ConfigError, match="no classes to deal by"):
        dataset.partition(Dirichlet(clients=2, alpha=1.0))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "No columns"),
        ("x,y\n1,2\n", "has no column 'label'; its columns are x, y"),
        ("label\n1\n", "has no features"),
        ("x,label\n1,0\n2\n", "row 3 without a label"),
        ("x,label\n1,0\n2,1,3\n", "line 3, saw 3"),
        ("x,label\n1,0\nten,1\n", "row 3 has 'ten' in column 'x', which must be numbers"),
        ("x,label\n" + "?,0\n" * 8, "row 6 has '\\?' and 3 more in column 'x'"),
        ("x,label,client\n1,0,a\n2,1,\n", "row 3 without a client in column 'client'"),
        ("first name,label\nAnn,0\n", "--client-column 'first name'"),
        ("x,label\n1,0\n2,-1\n", "labels must lie in 0"),
        ("x,label,split\n1,0,train\n2,1,dev\n", "column 'split' has 'dev'; it must be train or test"),
        ("x,label,split\n1,0,train\n2,1,train\n", "all rows are for training, none for the other"),
        ('x,label\n"1,0\n', "cannot be read as a table"),
    ],
)
def test_a_table_that_cannot_be_used_says_where(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(DataError, match=why):
        from_file(tmp_path / "bad.csv")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        from_file(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"x,label\n\xff,1\n")
    with pytest.raises(DataError, match="cannot be read as a table"):
        from_file(tmp_path / "bytes.csv")
    for arrays, why in [
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, "one entry per row"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int), "client": np.zeros(2, int)}, "one entry per row"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int), "test_x": np.zeros((2, 2))}, "come together"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int), "test_x": np.zeros((2, 3)), "test_y": np.zeros(2, int)}, "fit"),
    ]:
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(DataError, match=why):
            from_file(tmp_path / "bad.npz")


def visits(path: Path) -> Path:
    rows = [(i % 7, "flu" if i % 3 else "cold", ["north", "south", "10"][i % 3]) for i in range(60)]
    path.write_text("age,diagnosis,hospital\n" + "".join(f"{a},{d},{h}\n" for a, d, h in rows))
    return path


def test_columns_by_any_name_and_labels_that_are_text(tmp_path: Path) -> None:
    dataset = from_file(visits(tmp_path / "v.csv"), label="diagnosis", client="hospital")
    fed = dataset.partition(ByClient())
    assert (fed.client_names, fed.class_names) == (("10", "north", "south"), ("cold", "flu"))
    assert fed.counts()[1].tolist() == [fed.sizes[1], 0]  # north has every third row, the colds
    assert fed.counts()[2].tolist() == [0, fed.sizes[2]]
    assert fed.describe()["test"] == "a random part of all rows"
    part, held = fed.hold_out(1, seed=3)
    for some in (part, held):  # names stay with their clients
        for i, name in enumerate(some.client_names):
            assert torch.equal(some.client(i)[0], fed.client(fed.client_names.index(name))[0])
    assert dataset.partition(IID(clients=4)).client_names == ()
    assert dataset.partition(IID(clients=4)).class_names == ("cold", "flu")
    with pytest.raises(DataError, match=r"no column 'hospitl': did you mean 'hospital'\? its columns are age, diag"):
        from_file(tmp_path / "v.csv", label="diagnosis", client="hospitl")
    with pytest.raises(DataError, match="--label-column"):
        from_file(tmp_path / "v.csv")
    with pytest.raises(DataError, match="--client-column hospital"):
        from_file(tmp_path / "v.csv", label="diagnosis")


def test_a_column_of_free_text_is_no_label(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"{i},note {i}\n" for i in range(30)))
    with pytest.raises(DataError, match="label of its own in every row"):
        from_file(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"{i},{'ab'[i % 2] if i else ''}\n" for i in range(30)))
    with pytest.raises(DataError, match="row 2 without a label"):
        from_file(tmp_path / "a.csv")


def test_clients_by_name_in_python() -> None:
    x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    fed = from_clients({"north": (x, y), "south": (2 * x, y)}, test=(x, y), class_names=["no", "yes"])
    assert (fed.client_names, fed.class_names, fed.classes) == (("north", "south"), ("no", "yes"), 2)
    assert from_datasets({"north": (x, y)}, test=(x, y)).client_names == ("north",)
    with pytest.raises(DataError, match="client south: x has a value that is not finite"):
        from_clients({"north": (x, y), "south": (x / 0, y)}, test=(x, y))
    with pytest.raises(DataError, match="1 names for 2 classes"):
        from_clients([(x, y)], test=(x, y), classes=2, class_names=["no"])


@pytest.mark.parametrize(("method", "privacy"), [("fedavg", "secure_sum"), ("ntk-fl", "shuffle")])
def test_names_stay_with_the_run_and_are_never_sent(
    method: str, privacy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    encode = Message.encode
    monkeypatch.setattr(Message, "encode", lambda self, *given: sent.append(encode(self, *given)) or sent[-1])
    file = visits(tmp_path / "v.csv")
    file.write_text(file.read_text().replace("10", "clinic"))
    data = {"dataset": str(file), "label_column": "diagnosis", "client_column": "hospital"}
    config = RunConfig(data=data, rounds=1, model={"hidden": [4]}, method={"name": method}, privacy={privacy: True})
    run = execute(config, out=tmp_path / "run")
    named = {"clients": ("clinic", "north", "south"), "classes": ("cold", "flu"), "features": ("age",)}
    assert run.config["names"] == named
    assert run.history[0]["clients"] == [0, 1, 2]
    assert sent
    assert not [m for m in sent for name in (b"clinic", b"north", b"south", b"cold", b"flu") if name in m]
    again = RunConfig.read(tmp_path / "run" / "config.toml")
    assert load_data(again).client_names == ("clinic", "north", "south")
    with pytest.raises(ConfigError, match="label-column names a column of a file"):
        RunConfig(data={"dataset": "digits", "label_column": "x"})


def test_training_from_a_file_and_again_from_its_settings(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    lines = [f"{a:.3f},{b:.3f},{c:.3f},{int(a > 0)},site-{i % 4}\n" for i, (a, b, c) in enumerate(x)]
    (tmp_path / "sites.csv").write_text("a,b,c,label,client\n" + "".join(lines))
    method = {"name": "fedavg", "local_steps": 2}
    config = RunConfig(data={"dataset": str(tmp_path / "sites.csv")}, rounds=1, model={"hidden": [4]}, method=method)
    run = execute(config, out=tmp_path / "run")
    assert run.history[0]["clients"] == [0, 1, 2, 3]  # as the file says, all of them
    again = RunConfig.read(tmp_path / "run" / "config.toml")
    assert again.data.partition == "client"
    assert load_data(again).fingerprint() == load_data(config).fingerprint()
    dealt = RunConfig(data={"dataset": str(tmp_path / "sites.csv"), "partition": "iid", "clients": 7})
    assert len(load_data(dealt)) == 7
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        RunConfig(data={"dataset": "digit"})
    assert ntkfl.Run.load(tmp_path / "run").evaluate(x[:10], (x[:10, 0] > 0).astype(int)).samples == 10
