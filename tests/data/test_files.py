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
from ntkfl.data import IID, ByClient, Dirichlet, from_clients, from_file
from ntkfl.data.files import open_dataset
from ntkfl.errors import ConfigError, DataError, RunFolderError
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


def written(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("\n".join([header, *rows, ""]))
    return path


def by_hand() -> Any:
    def rows(wanted: list[int]) -> tuple[np.ndarray, np.ndarray]:
        chosen = [ROWS[i] for i in wanted]
        return np.array([[a, d] for _, a, d, _, _ in chosen]), np.array([y for *_, y, _ in chosen])

    return from_clients([rows([0, 2, 4]), rows([1])], test=rows([3, 5]))


def same(a: Any, b: Any) -> bool:
    pairs = [(a.test, b.test), *((a.client(i), b.client(i)) for i in range(len(a)))]
    return len(a) == len(b) and all(torch.equal(s, t) for one, other in pairs for s, t in zip(one, other, strict=True))


def test_a_table_with_clients_and_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = from_file(table(tmp_path / "rows.csv"))
    assert repr(dataset).endswith("4 training and 2 test samples, inputs [2], 3 classes)")
    assert same(dataset.partition(ByClient()), by_hand())
    assert dataset.partition(ByClient()).describe()["partition"] == {"kind": "client"}
    assert dataset.partition(IID(clients=4)).sizes == [1] * 4
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="a table needs the extra 'data'"):
        from_file(table(tmp_path / "rows.csv"))


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pandas.DataFrame(ROWS, columns=("client", "age", "dose", "label", "split"))
    monkeypatch.setattr(pandas, "read_parquet", lambda path: rows.copy())
    assert same(from_file(tmp_path / "rows.parquet").partition(ByClient()), by_hand())
    rows["seen"] = pandas.Timestamp("2026-11-18")
    with pytest.raises(DataError, match=r"column 'seen' \(row 2 has '2026-11-18.*features must be numbers"):
        from_file(tmp_path / "rows.parquet")
    rows.loc[1, "client"] = None
    rows["seen"] = 1
    with pytest.raises(DataError, match="row 3 has no client"):
        from_file(tmp_path / "rows.parquet")

    def lacking(path: Path) -> None:
        raise ImportError("no engine")

    monkeypatch.setattr(pandas, "read_parquet", lacking)
    with pytest.raises(DataError, match="need pyarrow; or save the table as CSV"):
        from_file(tmp_path / "rows.parquet")


def test_an_archive_with_clients(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.array(["u", "v"] * 6), test_x=x[:4] + 1, test_y=y[:4])
    fed = from_file(tmp_path / "a.npz").partition(ByClient())
    expected = from_clients([(x[::2], y[::2]), (x[1::2], y[1::2])], test=(x[:4] + 1, y[:4]))
    assert same(fed, expected)


def test_a_row_is_for_testing_whatever_other_rows_there_are(tmp_path: Path) -> None:
    """Taking one record away moves no other one, on which ε of a record rests. About a fifth of the rows is."""
    draws = np.random.default_rng(0)
    x, y = draws.standard_normal((1000, 3)), np.arange(1000) % 2
    np.savez(tmp_path / "whole.npz", x=x, y=y)
    dataset = from_file(tmp_path / "whole.npz")
    whole = dataset.test_rows.x
    assert 150 < len(whole) < 250
    assert len(dataset) + len(whole) == 1000
    assert dataset.partition(IID(clients=4)).describe()["test"] == "a random part of all rows"
    for gone in (0, 400, 999):
        np.savez(tmp_path / "less.npz", x=np.delete(x, gone, 0), y=np.delete(y, gone))
        less = from_file(tmp_path / "less.npz").test_rows.x
        kept = (whole != torch.from_numpy(x[gone]).float()).any(1)
        assert torch.equal(less, whole[kept])
    with pytest.raises(DataError, match=r"--client-column .* --partition iid"):
        dataset.partition(ByClient())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "No columns"),
        ("label\n1\n", "has no features"),
        ("x,label\n1,0\n2\n", "row 3 has the label ''"),
        ("x,label\n1,0\n2,1,3\n", "line 3, saw 3"),
        ("x,label,client\n1,0,a\n2,1,\n", "row 3 has no client in column 'client'"),
        ("x,label\n1,0\n2,-1\n", "labels must lie in 0"),
        ("x,label,split\n1,0,train\n2,1,dev\n", "column 'split' has 'dev'; it must be train or test"),
        ("x,label,split\n1,0,train\n2,1,train\n", "all rows are for training, none for the other"),
        ('x,label\n"1,0\n', "cannot be read as a table"),
        ("x,label\n" + "".join(f"{i},note {i}\n" for i in range(30)), "half the rows have a label of their own"),
        ("x,label\n\udcff,1\n", "cannot be read as a table"),
    ],
)
def test_a_table_that_cannot_be_used_says_where(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=why):
        from_file(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (("f", "m", "f", "m"), "'sex' .*row 2 has 'f'.* holds text"),  # text: a column for each value
        (("1", "", "3", "4"), "'sex' .*row 3 has ''.* has no number in 1 of 6 rows"),
        (("1", "2", "n/a", "?"), "'sex' .*row 4 has 'n/a'.* has no number in 2 of 6 rows"),
    ],
)
def test_two_lines_of_pandas_mend_a_column(
    cells: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{i}.5,{cell},{i % 2},{'test' if i > 2 else 'train'}" for i, cell in enumerate((*cells, "5", "6"))]
    path = written(tmp_path / "visits.csv", "age,sex,label,split", rows[: 4 + 2 * (cells[0] != "f")])
    with pytest.raises(DataError, match=why) as caught:
        from_file(path)
    (note,) = caught.value.__notes__
    lines = note.split("\n")
    assert len(lines) == 2
    assert "--client-column" in str(caught.value)
    exec("import pandas\n" + "\n".join(line.strip() for line in lines), {})
    mended = from_file("mended.csv")
    kept = [cell for cell in (*cells, "5", "6") if cell.isdigit()]
    assert len(mended) + len(mended.test_rows) == (len(kept) if cells[0] != "f" else 4)
    assert mended.feature_names == (("age", "sex") if cells[0] != "f" else ("age", "sex_f", "sex_m"))


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    for arrays, why in [
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, "do not fit"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int), "client": np.zeros(2, int)}, "one entry per row"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int), "test_x": np.zeros((2, 2))}, "do not fit"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4, int), "test_x": np.zeros((2, 3)), "test_y": np.zeros(2, int)}, "fit"),
    ]:
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(DataError, match=why):
            from_file(tmp_path / "bad.npz")


# --- names of columns, clients and classes


def visits(path: Path) -> Path:
    rows = [(i % 7, "flu" if i % 3 else "cold", ["north", "south", "10"][i % 3]) for i in range(60)]
    return written(path, "age,diagnosis,hospital", [f"{a},{d},{h}" for a, d, h in rows])


def test_columns_by_any_name_and_labels_that_are_text(tmp_path: Path) -> None:
    dataset = from_file(visits(tmp_path / "v.csv"), label="diagnosis", client="hospital")
    fed = dataset.partition(ByClient())
    assert (fed.client_names, fed.class_names) == (("10", "north", "south"), ("cold", "flu"))
    assert fed.counts()[1].tolist() == [fed.sizes[1], 0]  # north has every third row, the colds
    assert fed.counts()[2].tolist() == [0, fed.sizes[2]]
    for some in fed.hold_out(1, seed=3):  # names stay with their clients
        for i, name in enumerate(some.client_names):
            assert torch.equal(some.client(i)[0], fed.client(fed.client_names.index(name))[0])
    assert dataset.partition(IID(clients=4)).client_names == ()
    assert dataset.partition(IID(clients=4)).class_names == ("cold", "flu")
    with pytest.raises(DataError, match=r"no column 'hospitl'; its columns are age, diagnosis, hospital"):
        from_file(tmp_path / "v.csv", label="diagnosis", client="hospitl")
    with pytest.raises(DataError, match=r"'hospital' .*holds text.*--client-column"):
        from_file(tmp_path / "v.csv", label="diagnosis")


def test_declared_classes_number_the_labels(tmp_path: Path) -> None:
    """Numbers of classes follow from what was declared, whatever labels the rows have."""
    path = visits(tmp_path / "v.csv")
    how = {"label": "diagnosis", "client": "hospital"}
    fed = from_file(path, **how, classes=["flu", "gout", "cold"]).partition(ByClient())
    assert (fed.classes, fed.class_names, fed.counts()[1].tolist()) == (
        3,
        ("flu", "gout", "cold"),
        [0, 0, fed.sizes[1]],
    )
    with pytest.raises(DataError, match=r"row 2 has the label 'cold', none of .*flu"):
        from_file(path, **how, classes=["flu", "gout"])
    whole = np.array([3, 5, 3, 5] * 10)
    np.savez(tmp_path / "a.npz", x=np.arange(40.0)[:, None], y=whole)
    assert set(from_file(tmp_path / "a.npz", classes=["5", "4", "3"]).rows.y.tolist()) == {0, 2}
    with pytest.raises(ConfigError, match="classes are of a file or folder"):
        RunConfig(data={"dataset": "digits", "classes": ["a", "b"]})


@pytest.mark.parametrize("name", ["private-sums", "private-ridge"])
def test_differential_privacy_needs_declared_classes(name: str, tmp_path: Path) -> None:
    """Collected from the labels, they would show whether the one record with a rare label is there."""
    data = {"dataset": str(visits(tmp_path / "v.csv")), "label_column": "diagnosis", "client_column": "hospital"}
    given = {"rounds": 1, "clients_per_round": 3, "method": {"name": name}, "model": {"hidden": (4,)}}
    privacy = {"secure_sum": True, "epsilon": 100.0, "noise_clients": 3}
    with pytest.raises(ConfigError, match=r"classes to be declared: .* --set 'data.classes="):
        execute(RunConfig(data=data, privacy=privacy, **given))
    told = RunConfig(data=data | {"classes": ["flu", "cold"]}, privacy=privacy, **given)
    assert execute(told).history[0]["epsilon"] < 100.1
    execute(RunConfig(data=data, **given | {"method": {"name": "fedavg"}}))  # without noise nothing is promised
    numbers = tmp_path / "n.csv"  # the largest whole number would tell as much
    numbers.write_text(Path(data["dataset"]).read_text().replace("flu", "0").replace("cold", "1"))
    with pytest.raises(ConfigError, match="classes to be declared"):
        execute(RunConfig(data=data | {"dataset": str(numbers)}, privacy=privacy, **given))
    told = RunConfig(data=data | {"dataset": str(numbers), "classes": ["0", "1"]}, privacy=privacy, **given)
    assert execute(told).history[0]["epsilon"] < 100.1


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
    with pytest.raises(ConfigError, match="label_column is of a file, and digits is none"):
        RunConfig(data={"dataset": "digits", "label_column": "x"})


def test_training_from_a_file_and_again_from_its_settings(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(120, 3))
    rows = [f"{a:.3f},{b:.3f},{c:.3f},{int(a > 0)},site-{i % 4}" for i, (a, b, c) in enumerate(x)]
    path = written(tmp_path / "sites.csv", "a,b,c,label,client", rows)
    method = {"name": "fedavg", "local_steps": 2}
    config = RunConfig(data={"dataset": str(path)}, rounds=1, model={"hidden": [4]}, method=method)
    run = execute(config, out=tmp_path / "run")
    assert run.history[0]["clients"] == [0, 1, 2, 3]  # as the file says, all of them
    again = RunConfig.read(tmp_path / "run" / "config.toml")
    assert again.data.partition == "client"
    assert load_data(again).fingerprint() == load_data(config).fingerprint()
    assert len(load_data(RunConfig(data={"dataset": str(path), "partition": "iid", "clients": 7}))) == 7
    assert ntkfl.Run.load(tmp_path / "run").evaluate(x[:10], (x[:10, 0] > 0).astype(int)).samples == 10
    # Columns in another order would be other features: refused, with the two lines that mend the file.
    frame = pandas.read_csv(path)
    frame[["c", "label", "a", "client", "b"]].to_csv(path, index=False)
    with pytest.raises(RunFolderError, match="features, or their order, differ") as caught:
        execute(again.model_copy(update={"rounds": 2}), out=tmp_path / "run", resume=True)
    (note,) = caught.value.__notes__
    lines = [line.strip().replace("FILE.csv", str(path)) for line in note.split("\n")]
    assert len(lines) == 2
    exec("import pandas\n" + "\n".join(lines), {})
    assert len(execute(again.model_copy(update={"rounds": 2}), out=tmp_path / "run", resume=True).history) == 2
    frame.loc[0, "a"] += 1  # other data under the same name
    frame.to_csv(path, index=False)
    with pytest.raises(RunFolderError, match="the data are not those that its rounds were trained on"):
        execute(again.model_copy(update={"rounds": 3}), out=tmp_path / "run", resume=True)


# --- whole numbers: classes or real targets, as the loss has it or as their user says

COUNTS = [(i / 10, 50 - 2 * i, "north" if i % 2 else "south") for i in range(40)]  # targets 50, 48, … −28


def loaded(path: Path, loss: str, **data: str) -> ntkfl.data.Federated:
    method = {"name": "fedavg", "loss": loss}
    return load_data(RunConfig(method=method, data={"dataset": str(path), **data}))


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_whole_numbers_of_a_file_are_real_with_squared_error(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / "counts.csv", "x,label,client", [f"{x},{y},{client}" for x, y, client in COUNTS])
    if suffix == "npz":
        x, y, client = (np.array(column) for column in zip(*COUNTS, strict=True))
        path = tmp_path / "counts.npz"
        np.savez(path, x=x[:, None], y=y, client=(client == "north").astype(np.int64))
    config = RunConfig(
        rounds=30,
        method={"name": "fedavg", "loss": "mse", "lr": 0.05, "local_steps": 10},
        data={"dataset": str(path), "standardize": True},
        model={"hidden": ()},
    )
    fed = load_data(config)
    assert fed.classes is None
    assert fed.output_dim == 1
    assert sorted(torch.cat([fed.rows.y, fed.test_rows.y])[:, 0].tolist()) == sorted(float(y) for _, y, _ in COUNTS)
    run = execute(config)
    assert run.history[-1]["test_accuracy"] is None
    assert run.history[-1]["test_loss"] < 1.0  # a line fits; the targets' variance is 533
    with pytest.raises(ConfigError, match="no classes to deal by"):
        from_file(path, targets="real").partition(Dirichlet(clients=2, alpha=1.0))


def test_losses_of_classes_and_words_keep_classes(tmp_path: Path) -> None:
    path = written(tmp_path / "marks.csv", "x,label,client", [f"{i / 9},{i % 3},a" for i in range(40)])
    assert loaded(path, "ce").classes == 3
    assert loaded(path, "mse").classes is None
    assert loaded(path, "mse", targets="classes").classes == 3
    assert loaded(path, "ce", targets="real").classes is None
    written(path, "x,label,client", [f"{i / 9},{'yes' if i % 3 else 'no'},a" for i in range(40)])
    assert loaded(path, "mse").classes == 2
    with pytest.raises(DataError, match="labels are classes, such as 'no', and not real targets"):
        loaded(path, "mse", targets="real")
    written(path, "x,label", [f"{i},{i}.0" for i in range(10)])
    assert from_file(path).classes is None  # a decimal point


def test_a_loss_of_ones_own_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "targets_loss.py").write_text("def huber(f, Y):\n    return (f - Y).abs().sum(-1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = written(tmp_path / "counts.csv", "x,label,client", [f"{x},{y},{client}" for x, y, client in COUNTS])
    with pytest.raises(DataError, match=r"whole numbers: say whether they are real or classes \(--targets real\)"):
        loaded(path, "targets_loss:huber")
    assert loaded(path, "targets_loss:huber", targets="real").classes is None


def test_names_of_datasets() -> None:
    assert len(open_dataset("digits")) == 1442
    for name in ("digit", "", "x" * 5000, "a\0b", "none"):  # no file, whatever the system says of such names
        with pytest.raises(ConfigError, match="unknown dataset"):
            RunConfig(data={"dataset": name})


def test_many_whole_numbers_are_asked_about(tmp_path: Path) -> None:
    """Prices would otherwise train as so many classes, without a word."""
    path = written(tmp_path / "prices.csv", "size,label", [f"{i}.5,{100 + i % 80}" for i in range(400)])
    with pytest.raises(DataError, match=r"80 different whole numbers: .*data.targets=real \(with --set loss=mse\)"):
        from_file(path)
    assert from_file(path, targets="real").classes is None
    assert from_file(path, targets="classes").classes == 180
