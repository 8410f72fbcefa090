import gc
import gzip
import io
import os
import threading
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from selfnorm._files import atomic
from selfnorm._inputs import refuse_repeated_names
from selfnorm.cli import files
from selfnorm.cli.files import Table, check_output, numeric, read_table, write_table
from selfnorm.errors import DataError, SelfnormWarning

VALUES = np.array([[1.5, -2.0, 3e-7], [4.0, 5.25, 1e12], [0.1, 0.2, -0.3]])
NAMES = ["a", "b c", "d"]


def table():
    return Table({name: VALUES[:, i] for i, name in enumerate(NAMES)})


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".npz"])
def test_round_trip_keeps_names_and_every_bit(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    write_table(table(), path)
    back = read_table(path)
    assert back.names == NAMES
    assert np.array_equal(numeric(back), VALUES)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_npy_has_no_names_and_is_taken_by_position(tmp_path):
    path = tmp_path / "t.npy"
    write_table(table(), path)
    back = read_table(path)
    assert not back.named
    assert np.array_equal(numeric(back, ["p", "q", "r"]), VALUES)
    with pytest.raises(DataError, match="'s' is missing"):
        numeric(back, ["x0", "s"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,b\n", "no rows"),
        ("a,b\n1,2\n3,\n", r"missing value in row 2 \(line 3\), column 'b'"),
        ("a,b\n1,2\n\n3,NA\n", r"row 2 \(line 4\), column 'b'"),
        ("a,b\n1,2\n3,x7\n", r"column 'b' holds text \('x7' in row 2 \(line 3\)\)"),
        ("a,b\n1,inf\n", r"infinite value \(inf\) in row 1 \(line 2\), column 'b'"),
        ("a,b\n1,2\n3,4,5\n", "line 3 has 3 cells, the header has 2"),
        ("a,a\n1,2\n", "column 'a' appears twice"),
        ("a,\n1,2\n", "column 2 has no name"),
        ("a,b\n1,\n2,\n", "missing value in row 1"),
        ("a,b\n1,\n2,inf\n", r"missing value .* \(1 such cell"),
        ("NA,2.5\n1.5,3.5\n", r"missing value in row 1 \(line 1\), column 'x0'"),
        ('a,b\n"1,5",2\n', r"holds text \('1,5' in row 1 .*decimal point"),
        ('a,b\n"1,234",2\n', "separators of thousands"),
    ],
)
def test_bad_csv_names_row_and_column(tmp_path, text, words):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        numeric(read_table(path))
    assert "\n" not in str(caught.value)


def test_cells_of_a_density_are_passed_on_unread(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1.50,x\n2.25,y\n")
    monkeypatch.setattr(files, "numbers_from", None)
    table = read_table(path)
    assert {name: list(cells.texts) for name, cells in table.frame().items()} == {
        "a": ["1.50", "2.25"],
        "b": ["x", "y"],
    }
    assert len(table) == 2


def test_thirty_thousand_columns_are_read_and_a_name_that_is_twice_among_them(tmp_path):
    """In a moment: names that are looked up among all others take the square of their number."""
    path, names = tmp_path / "t.csv", [f"c{i}" for i in range(30_000)]
    path.write_text(f"{','.join(names)}\n{'1,' * 29_999}1\n")
    table = read_table(path)
    assert len(table.names) == 30_000
    refuse_repeated_names(pd.DataFrame(np.zeros((1, 30_000)), columns=names))
    path.write_text(f"{','.join([*names[:-1], 'c7'])}\n{'1,' * 29_999}1\n")
    with pytest.raises(DataError, match=r"^[^:]*: column 'c7' appears twice; rename one$"):
        read_table(path)


def test_packed_text_and_pipes_are_read(tmp_path):
    text = b"a;b\n1,5;x\n2,5;y\n"
    for name in ("t.csv.gz", "t.TXT.GZ"):
        (tmp_path / name).write_bytes(gzip.compress(text))
        assert read_table(tmp_path / name).numbers("a").tolist() == [1.5, 2.5]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
@pytest.mark.parametrize("name", ["pipe", "t.csv"])
def test_a_pipe_is_read_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    writer = threading.Thread(target=(tmp_path / name).write_bytes, args=[b"a,b\n1,x\n2,y\n"])
    writer.start()
    table = read_table(tmp_path / name)
    writer.join()
    assert (table.names, table.numbers("a").tolist()) == (["a", "b"], [1.0, 2.0])


def written(write, *given, **options):
    with io.BytesIO() as content:
        write(content, *given, **options)
        return content.getvalue()


def zipped(content, **members):
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("_", "."), data)


OTHER, ARRAY = written(zipped, readme_txt="no table"), written(np.save, VALUES)
UNREADABLE = [
    ("t.xlsx", b"PK", "unknown kind of table"),
    ("t.npy.gz", gzip.compress(b"a;b"), "unknown kind of table '.gz'"),
    ("t.csv.gz", gzip.compress(b"a;b\n1,5;x\n" * 10_000)[:-20], r"cannot read .*t\.csv\.gz: "),
    ("t.csv", b"a,b\n\xff\xfe,1\n", "not UTF-8"),
    ("t.csv", b"a\0b,c\n1,2\n", "zero bytes"),
    ("t.npy", b"not numpy", "cannot be read"),
    ("t.npz", b"not numpy either", "cannot be read"),
    ("t.npz", b"PK\x03\x04" + bytes(100), "cannot be read as a numpy file"),
    ("t.parquet", b"PAR1 but not really", "cannot be read"),
    ("t.npy", OTHER, "holds no array"),
    ("t.npz", OTHER, "holds no array"),
    # a pickle is never loaded; NumPy calls both members X
    ("t.npy", written(np.save, np.array([{"a": 1}], dtype=object)), "cannot be read"),
    ("t.npz", written(zipped, X_npy=ARRAY, X=ARRAY), "array 'X' appears twice"),
    ("t.npz", written(np.savez, X=VALUES, columns=np.array(["a"] * 3)), "'a' appears twice"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    UNREADABLE,
    ids=[f"{name}-{words}" for name, _, words in UNREADABLE],  # archives hold the time
)
def test_files_that_are_no_tables_are_refused_and_closed(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_table(tmp_path / name)
    gc.collect()


def test_a_column_that_arrow_cannot_give_is_named(tmp_path):
    path, moments = tmp_path / "t.parquet", pa.array([0, 1], pa.timestamp("us", "Not/AZone"))
    parquet.write_table(pa.table({"a": [1.5, 2.5], "when": moments}), path)
    with pytest.raises(DataError, match=r"column 'when' of type timestamp.* cannot be read"):
        read_table(path)


def test_what_is_no_file_is_refused(tmp_path):
    for path, words in ((tmp_path / "none.csv", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(DataError, match=words):
            read_table(path)


def test_csv_dialects(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("\ufeffx;y\r\n1;2\r\n3;4\r\n".encode())
    assert read_table(path).names == ["x", "y"]
    path.write_text("1,2\n3,4\n")  # no header
    back = read_table(path)
    assert back.names == ["x0", "x1"]
    assert len(back) == 2
    path.write_text('"a, b",c\n1,2\n')
    assert read_table(path).names == ["a, b", "c"]
    path.write_text('"height, cm";"weight, kg"\n180;75\n')
    assert read_table(path).names == ["height, cm", "weight, kg"]


def test_semicolons_and_decimal_commas_are_read_and_written(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a;b;c\n1,5;x,y;7\n;z;8\n1.234,25;z;9\n")
    read = read_table(path)
    assert read.numbers("a")[[0, 2]].tolist() == [1.5, 1234.25]
    write_table(read.added({"d": np.array([0.5, 1.0, np.nan])}), tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == ("a;b;c;d\n1,5;x,y;7;0,5\n;z;8;1\n1234,25;z;9;\n")
    path.write_text("1,5;2,5\n2,5;3\n")  # no header
    assert numeric(read_table(path)).tolist() == [[1.5, 2.5], [2.5, 3.0]]
    path.write_text("a;b\n1,234;0.5\n2,345;1.5\n")  # who writes points may group by commas
    assert read_table(path).array("a").tolist() == ["1,234", "2,345"]


def test_amounts_are_numbers_without_their_marks(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('price,share\n"-$1,250.50",12 %\n$20.00,7.5 %\n')
    assert numeric(read_table(path)).tolist() == [[-1250.5, 12.0], [20.0, 7.5]]
    path.write_text("price\n$20.00\nfree\n")
    with pytest.raises(DataError, match=r"'free' in row 2"):
        numeric(read_table(path))


def test_encodings(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("größe\tort\n1\tKöln\n", encoding="utf-16")
    assert read_table(path).names == ["größe", "ort"]
    path.write_text("größe,ort\n1,Köln\n", encoding="latin-1")
    path = path.rename(tmp_path / "t; reboot.csv")
    with pytest.raises(DataError, match=r"not UTF-8 text.*iconv -f latin1 -t utf-8 't; reboot"):
        read_table(path)


def test_all_that_is_no_number_is_told_at_once(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1,x,\n2,y,3\n")
    with pytest.raises(DataError) as caught:
        numeric(read_table(path))
    assert "2 problems" in str(caught.value)
    assert "column 'b' holds text" in str(caught.value)
    assert "missing value in row 1 (line 2), column 'c'" in str(caught.value)
    with pytest.raises(DataError, match="columns 'd', 'e' are missing"):
        numeric(read_table(path), ["d", "a", "e"])


def test_the_names_of_a_frame_without_names_are_no_row(tmp_path):
    path = tmp_path / "t.csv"
    pd.DataFrame(VALUES).assign(**{"2": [4, 5, 6]}).drop(columns=2).to_csv(path, index=False)
    back = read_table(path)
    assert (back.names, len(back)) == (["0", "1", "2"], 3)
    path.write_text("0,1\n1,1\n0,0\n")  # whole numbers throughout: a row like the others
    assert len(read_table(path)) == 3


def test_identifiers_are_passed_on_as_they_are(tmp_path):
    ids = {"code": ["0042", "0007"], "key": [2**60 + 1, 2**60 + 3], "size": ["1.50", "NA"]}
    csv = tmp_path / "t.csv"
    pd.DataFrame(ids).to_csv(csv, index=False)
    read = read_table(csv)
    assert numeric(read, ["code", "key"]).tolist() == [[42.0, 2.0**60], [7.0, 2.0**60]]
    write_table(read, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == csv.read_text()
    write_table(read, tmp_path / "out.parquet")
    back = pd.read_parquet(tmp_path / "out.parquet")
    assert back["code"].tolist() == ids["code"]
    assert back["key"].tolist() == [str(key) for key in ids["key"]]
    assert back["size"].iloc[0] == 1.5
    pd.DataFrame(ids).to_parquet(tmp_path / "t.parquet")
    for name in ("again.parquet", "again.csv"):
        write_table(read_table(tmp_path / "t.parquet"), tmp_path / name)
    assert pd.read_parquet(tmp_path / "again.parquet")["key"].tolist() == ids["key"]
    assert pd.read_csv(tmp_path / "again.csv")["key"].tolist() == ids["key"]
    np.save(tmp_path / "t.npy", np.array([ids["key"]]).T)
    write_table(read_table(tmp_path / "t.npy"), tmp_path / "keys.csv")
    assert pd.read_csv(tmp_path / "keys.csv")["x0"].tolist() == ids["key"]


def test_a_column_of_lists_is_no_column_of_numbers(tmp_path):
    path = tmp_path / "t.parquet"
    pd.DataFrame({"a": [1.5, 2.5], "vector": [[1.0, 2.0], [3.0, 4.0]]}).to_parquet(path)
    read = read_table(path)
    assert numeric(read, ["a"]).shape == (2, 1)
    with pytest.raises(DataError, match="column 'vector' holds text"):
        numeric(read)


def test_of_several_arrays_the_table_is_named_x(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, y=VALUES[:, 0], features=VALUES)
    with pytest.raises(DataError, match=r"arrays \['y', 'features'\]: name the one"):
        read_table(path)
    np.savez(path, y=VALUES[:, 0], X=VALUES)
    assert np.array_equal(numeric(read_table(path)), VALUES)


def test_output_is_whole_or_absent(tmp_path):
    path = tmp_path / "t.csv"

    def break_off():
        with atomic(path) as temporary:
            temporary.write_text("a,b\n1")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        break_off()
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    with pytest.raises(DataError, match="missing value"):
        write_table(Table({"a": np.array([np.nan])}), tmp_path / "t.npy")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_impossible_outputs_are_refused_early(tmp_path):
    read = tmp_path / "read.csv"
    read.write_text("a\n1\n")
    for path, words in (
        (tmp_path / "t.docx", "cannot write"),
        (tmp_path / "none" / "t.csv", "no such folder"),
        (tmp_path, "cannot write"),
        (tmp_path / ".." / tmp_path.name / "read.csv", "is the table that is read"),
    ):
        with pytest.raises(DataError, match=words):
            check_output(path, source=read)


def test_row_names_of_a_data_frame_are_a_column(tmp_path):
    """As written by ``to_csv``; they have the name that pandas gives them."""
    frame = pd.DataFrame({"a": [1.5, 2.5], "b": ["x", "y"]})
    for written in (frame, frame.rename(columns={"a": "0", "b": "1"})):
        written.to_csv(tmp_path / "t.csv")
        with pytest.warns(SelfnormWarning, match="column 1 has no name: called 'Unnamed: 0'"):
            table = read_table(tmp_path / "t.csv")
        assert table.names == pd.read_csv(tmp_path / "t.csv").columns.tolist()
        assert numeric(table, table.names[:2]).tolist() == [[0.0, 1.5], [1.0, 2.5]]


def test_tables_put_one_below_the_other_lose_the_second_header(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\na,b\n3,4\n")
    with pytest.warns(SelfnormWarning, match="stands again in line 3; left out"):
        table = read_table(path)
    assert numeric(table).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert table.lines.tolist() == [2, 4]
    path.write_text("0,1,2\n3,4,5\n0,1,2\n")  # of numbers it may be a row
    with pytest.warns(SelfnormWarning, match="of which some are numbers"):
        assert len(read_table(path)) == 2


IRIS = ["5.1,3.5,Iris-setosa", "4.9,3,Iris-setosa", "7,?,Iris-virginica", "6.3,3.3,Iris-virginica"]


@pytest.mark.parametrize(
    "lines",
    [
        IRIS,
        ["5.1,,Iris-setosa", *IRIS[1:]],
        ["A11,6,A34,4,4", "A12,48,A32,2,1", "A11,12,A34,4,2"],  # cells that are the same: no names
        ["red,small", "blue,small", "red,large"],
        ["2020-01-31,$4.50", "2020-02-29,$13.25"],
        ['"$1,250.50",a', "$20.00,b", "$7.00,a"],
        ["2019,2020", "2018,2021", "2017,2019"],
        ["2019,2020,2021", "1.5,2,3", "2001,5,6"],  # they may be names: the warning says how
        ["id01,4", "id02,5"],
        ["5,1;x", "4,9;x"],
    ],
)
def test_a_first_line_like_the_others_is_data(tmp_path, lines):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(SelfnormWarning, match="line 1 is data.* called 'x0', 'x1'"):
        table = read_table(path)
    assert (len(table), table.named, table.names[0]) == (len(lines), False, "x0")


@pytest.mark.parametrize(
    "lines",
    [
        ["town,2019,2020", "Rome,1,2", "Rome,3,4"],
        ["0,1,kind", "3,4,a", "5,6,a"],
        ["0,1,2", "3,a,1", "5,b,2"],
        ["a,b", "a,1", "b,1", "a,b", "c,2"],
        ["x1,x2", "1,2"],
        ["na", "1", "2"],
    ],
)
@pytest.mark.filterwarnings("ignore:.*(stands again|some are numbers)")
def test_a_first_line_unlike_the_others_is_a_header(tmp_path, lines):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines) + "\n")
    assert read_table(path).names == lines[0].split(",")


@pytest.mark.filterwarnings("error")  # who says what the line is, is not told
def test_whether_a_line_of_names_stands_above_can_be_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("2019,2020\n1.5,2\n")
    assert read_table(path, header=True).names == ["2019", "2020"]
    path.write_text("Tokyo,37.4\nDelhi,31\n")
    table = read_table(path, header=False)
    assert (table.names, len(table), table.lines.tolist()) == (["x0", "x1"], 2, [1, 2])
    np.save(tmp_path / "t.npy", VALUES)
    with pytest.raises(DataError, match="--header and --no-header are for text"):
        read_table(tmp_path / "t.npy", header=True)


def test_a_doubtful_guess_of_the_header_is_told_with_the_other_way(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("Tokyo,37.4\nDelhi,31\n")
    with pytest.warns(SelfnormWarning, match="line 1 is taken as names.* --no-header takes it"):
        assert read_table(path).names == ["Tokyo", "37.4"]
    path.write_text("1,2\n3,4\n")
    with pytest.warns(SelfnormWarning, match="line 1 is data.* --header takes it as names"):
        assert len(read_table(path)) == 2


def test_a_quote_that_is_not_closed_is_told_by_its_line(tmp_path):
    path = tmp_path / "t.csv"
    lines = ["a,b,c", *["1,2,x"] * 60]
    for cells in ('"1,2,x', '1,2,"x'):
        path.write_text("\n".join([*lines[:6], cells, *lines[7:]]) + "\n")
        with pytest.raises(DataError, match=r"t.csv: a quote opened in line 7 is not closed$"):
            read_table(path)
    path.write_text("\n".join([*lines[:6], '"1,2,x', *lines[7:30], '1,2,"y"', *lines]) + "\n")
    with pytest.raises(DataError, match=r"line 31 has 1 cells.*opened in line 7 is not closed"):
        read_table(path)
    path.write_text("\n".join([*lines[:6], '1,2,"x', *lines * 1000]) + "\n")
    with pytest.raises(DataError, match=r"t.csv: a quote opened in line 7 is not closed$"):
        read_table(path)
    path.write_text('a,b\n1,"two\nlines"\n')
    assert read_table(path).array("b").tolist() == ["two\nlines"]
