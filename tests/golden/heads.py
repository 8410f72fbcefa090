"""Texts of files as people write them, and wrong command lines: what is read and said is pinned."""

ROWS = 12

# Columns of text by what they hold; shorter ones repeat.
COLUMNS = {
    "number": "1.5 -2 0.25 3 17.125 0",
    "decimal_comma": "1,5 -2,25 0,25 3,0 17,125 0,5",
    "thousands": "1,234.50 12,000.00 999.25 1,000,000.00",
    "thousands_dots": "1.234,50 12.000,00 999,25 1.000.000,00",
    "thousands_marks": "1'234 12'000 999",
    "whole_thousands": "1,234 12,000 999 45,001",
    "three_decimals": "1.234 2.345 0.125",
    "percent": "12% 7.5% 100%",
    "percent_spaced": "12 %|7,5 %|100 %",
    "dollar": "$1.50 $1,200.00 $3",
    "dollar_negative": "-$1.50 $2.00 ($3.25)",
    "euro": "€1,50 €2,75 €1.200,00",
    "euro_behind": "1,50 €|2,75 €|1.200,00 €",
    "unit": "1.5 kg|2 kg|0.5 kg",
    "scientific": "1e-3 2.5E5 -1.25e+2",
    "signs": "+1 -2 −3",
    "huge": "1152921504606846977 1152921504606846979 3",
    "infinite": "1 inf 2 -inf",
    "slip": "1.5 2.5 1O.5 3.5 4.5 5.5 6.5 7.5 8.5 9.5 10.5 11.5",
    "spaces": " 1.5 |2.5 | 3.5",
    "zeros": "007 012 100",
    "iso": "2024-01-05 2023-12-31 2024-02-29",
    "iso_seconds": "2024-01-05 10:30:00|2023-12-31 23:59:59|2024-02-29 00:00:01",
    "iso_t": "2024-01-05T10:30:00Z 2023-12-31T23:59:59Z",
    "iso_zone": "2024-01-05T10:30:00+02:00 2023-12-31T23:59:59+02:00",
    "iso_parts": "2024-01-05T10:30:00.125 2023-12-31T23:59:59.500",
    "date_dots": "05.01.2024 31.12.2023 29.02.2024",
    "date_slashes": "1/5/2024 12/31/2023 2/29/2024",
    "date_days_first": "25/12/2023 31/01/2024 05/02/2024",
    "date_unclear": "01/02/2024 03/04/2024 05/06/2024",
    "date_words": "5 Jan 2024|31 Dec 2023|29 Feb 2024",
    "date_compact": "20240105 20231231 20240229",
    "month": "2024-01 2023-12 2024-02",
    "time": "10:30 23:59 00:01",
    "impossible_date": "2024-01-05 2023-02-31 2024-02-29",
    "boolean": "true false true",
    "boolean_capitals": "TRUE FALSE",
    "yes_no": "yes no no",
    "zero_one": "0 1 1",
    "blank": "1.5||2.5|",
    "words_for_gaps": "1.5 NA n/a null None ? - NaN #N/A",
    "category": "red blue green red",
    "category_gaps": "red NA blue ? green",
    "code_and_text": "1 2 x",
    "accents": "Zürich naïve Ελλάδα",
    "sentinel": "-999 1.5 2.5 -999",
}


def column(name):
    text = COLUMNS[name]
    cells = text.split("|") if "|" in text else text.split()
    return [cells[i % len(cells)] for i in range(ROWS)]


def quoted(cell, mark):
    return f'"{cell}"' if mark in cell or '"' in cell else cell


def lines(names, mark=","):
    """A text of the columns with a counter before them."""
    rows = [["key", *names], *zip(map(str, range(ROWS)), *map(column, names), strict=True)]
    return "".join(mark.join(quoted(cell, mark) for cell in row) + "\n" for row in rows)


PLAIN = "a,b,c\n1,2.5,x\n3,4.5,y\n5,6.5,x\n"
SHAPES = {
    "bom.csv": "\ufeff" + PLAIN,
    "utf16.csv": PLAIN.encode("utf-16"),
    "latin.csv": "a,b\nZürich,1\n".encode("latin-1"),
    "zero_bytes.csv": PLAIN + "\0",
    "empty.csv": "",
    "blank.csv": "\n\n",
    "names_alone.csv": "a,b,c\n",
    "one_column.csv": "a\n1\n2\n3\n",
    "one_column_without_name.csv": "1\n2\n3\n",
    "without_names.csv": "1,2\n3,4\n5,6\n",
    "without_names_but_text.csv": "1,x,2\n3,y,4\n5,x,6\n",
    "names_are_years.csv": "2021,2022,2023\n1,2,3\n4,5,6\n",
    "names_and_a_number.csv": "a,2022\n1,2\n3,4\n",
    "names_twice_over.csv": "a,b\n1,2\na,b\n3,4\n",
    "repeated_name.csv": "a,b,a\n1,2,3\n",
    "missing_name.csv": "a,,c\n1,2,3\n",
    "index_without_name.csv": ",a,b\n0,1,2\n1,3,4\n",
    "blank_lines.csv": "a,b\n\n1,2\n\n3,4\n\n",
    "rows_of_commas.csv": "a,b\n1,2\n3,4\n,\n,\n",
    "commas_behind.csv": "a,b,\n1,2,\n3,4,\n",
    "short_line.csv": "a,b,c\n1,2,3\n4,5\n6,7,8\n",
    "long_line.csv": "a,b\n1,2\n3,4,5\n",
    "ragged_and_text.csv": "a,b\n1,2\n3,oops,5\ninf,1\n",
    "open_quote.csv": 'a,b\n1,"x\n2,y\n',
    "lines_in_quotes.csv": 'a,b\n1,"x\ny"\n2,z\n',
    "doubled_quotes.csv": 'a,b\n1,"say ""hi"""\n2,z\n',
    "all_quoted.csv": '"a","b"\n"1","2.5"\n"3","4.5"\n',
    "spaces_behind_commas.csv": "a, b, c\n1, 2, x\n3, 4, y\n",
    "carriage_returns.csv": PLAIN.replace("\n", "\r\n"),
    "old_carriage_returns.csv": PLAIN.replace("\n", "\r"),
    "no_last_line_end.csv": PLAIN.rstrip("\n"),
    "comments.csv": "# made by hand\na,b\n1,2\n3,4\n",
    "tabs.tsv": PLAIN.replace(",", "\t"),
    "tabs.csv": PLAIN.replace(",", "\t"),
    "commas.tsv": PLAIN,
    "bars.txt": PLAIN.replace(",", "|"),
    "spaces.txt": PLAIN.replace(",", " "),
    "semicolons_and_points.csv": "a;b\n1.5;2.25\n3.5;4.75\n",
    "semicolons_both.csv": "a;b\n1,5;2.25\n3,5;4.75\n",
    "semicolons_thousands.csv": "a;b\n1.234,5;1.234\n3.456,5;4.567\n",
    "gap_everywhere.csv": "a,b\nNA,1\n,2\n?,3\n",
    "constant.csv": "a,b\n1,1\n1,2\n1,3\n",
    "suffix.dat": PLAIN,
}


def heads():
    """Every file of the corpus: its name and its bytes."""
    files = dict(SHAPES)
    for name in COLUMNS:
        files[f"{name}.csv"] = lines([name])
        files[f"{name}_semicolons.csv"] = lines([name, "number"], ";")
    return {k: v if isinstance(v, bytes) else v.encode() for k, v in files.items()}


# Wrong command lines, in a folder with the files and models that ``pins`` makes.
REFUSED = """
fit
fit train.csv
fit none.csv -o new
fit folder -o new
fit suffix.dat -o new
fit empty.csv -o new
fit train.csv -o model
fit train.csv -o train.csv
fit train.csv -o new --columns z
fit train.csv -o new --columns a,z
fit train.csv -o new --drop z
fit train.csv -o new --drop a,b,c
fit train.csv -o new --target z
fit train.csv -o new --target a --max-steps 5
fit train.csv -o new --target a --kinds b=cells
fit train.csv -o new --target a --model-gaps
fit train.csv -o new --max-epochs 5
fit train.csv -o new --max-steps 0
fit train.csv -o new --max-steps many
fit train.csv -o new --method best --no-progress
fit train.csv -o new --kinds a
fit train.csv -o new --kinds a=amount
fit train.csv -o new --kinds z=cells
fit train.csv -o new --contamination 2 --no-progress
fit train.csv -o new --max-time soon --no-progress
fit train.csv -o new --device tpu
fit mixed.csv -o new --target kind --no-progress
fit ragged.csv -o new
fit four.csv -o new --no-progress
fit train.csv -o new --unknown
evaluate model none.csv
evaluate none test.csv
evaluate folder test.csv
evaluate model two.csv
evaluate model test.csv --n-samples 5
evaluate model mixed.csv
score model test.csv
score model test.csv -o test.csv
score model test.csv -o scored.doc
score model test.csv -o none/scored.csv
score regressor test.csv -o scored.csv --explain
score model infinite.csv -o scored.csv
impute regressor test.csv -o filled.csv
impute model test.csv -o filled.csv --draws 0
sample regressor -o rows.csv
sample model -o rows.csv -n 0
sample model -o rows.csv --missing
sample model
predict model test.csv
predict regressor mixed.csv -o p.csv
predict regressor test.csv -o p.csv --quantiles high
predict regressor test.csv -o p.csv --quantiles 1.5
plot none
report model test.csv -o page.pdf
evidence test.csv
evidence test.csv --log-density z
evidence test.csv --log-density a --positive z
evidence test.csv --log-density a --chain b
reproduce
reproduce nothing
unknown
"""

# Lines that are right: what they print and write.
DONE = """
evaluate model test.csv --json
evaluate regressor test.csv
evaluate model test.csv --against model
evaluate model test.csv --against regressor
score model test.csv -o out.csv
score model test.csv -o out.csv --explain
score regressor test.csv -o out.csv
impute model gaps.csv -o out.csv
impute model gaps.csv -o out.csv --draws 2
sample model -o out.csv -n 5
sample model -o out.tsv -n 5 --seed 3
predict regressor test.csv -o out.csv --quantiles 0.1 0.9
evidence draws.csv --log-density lp --json
"""
