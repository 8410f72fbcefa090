"""A Ray cluster of two workers on this machine: fit a density to files, score them by Ray Data.

    python -m pip install 'selfnorm[ray]'
    python examples/cluster.py [FOLDER] [ROWS]

On a real cluster the same lines run: ``ray.init(address="auto")``, and folders that all machines
read. Training by several processes is a command of its own:
``torchrun --nproc-per-node 2 -m selfnorm fit 'FOLDER/rows/*.parquet' -o FOLDER/model``.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import ray

import selfnorm as sn
from selfnorm.integrations import Scorer

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
rows = int(float(sys.argv[2])) if len(sys.argv) > 2 else 100_000

# Files of 50,000 rows

(folder / "rows").mkdir(parents=True, exist_ok=True)
for k in range(max(1, rows // 50_000)):
    rng = np.random.default_rng(k)
    size = rng.normal(size=min(rows, 50_000))
    kind = np.where(size + rng.normal(size=len(size)) > 0, "a", "b")
    table = pa.table({"size": size, "kind": kind, "count": rng.poisson(np.exp(1 + size / 2))})
    parquet.write_table(table, folder / "rows" / f"{k:04}.parquet")

# Two processes train one density

if not (folder / "model").exists():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "selfnorm", "fit", str(folder / "rows"), "-o", str(folder / "model")]
    command += ["--max-steps", "100", "--no-progress"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

# Two workers score the files

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
began = time.perf_counter()
scorer = Scorer(folder / "model", normalizer="learned")
scored = ray.data.read_parquet(str(folder / "rows")).map_batches(scorer, batch_format="pyarrow")
scored.write_parquet(str(folder / "scored"))
seconds = time.perf_counter() - began
ray.shutdown()

# One process scores them, too

began = time.perf_counter()
density = sn.EnergyDensity.load(folder / "model")
density.score_batches(folder / "rows", folder / "alone", normalizer="learned")
alone = time.perf_counter() - began
both = [parquet.read_table(folder / name) for name in ("scored", "alone")]
ours, theirs = (
    table.sort_by([(name, "ascending") for name in table.column_names]) for table in both
)
report = {
    "rows": ours.num_rows,
    "equal": ours.replace_schema_metadata().equals(theirs.replace_schema_metadata()),
    "seconds_of_two_workers": round(seconds, 1),
    "seconds_of_one_process": round(alone, 1),
    "ray": ray.__version__,
}
print(json.dumps(report))
