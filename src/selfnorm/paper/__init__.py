"""One module per table of the paper: run it, and set ours, the paper's and the limit in one row."""
